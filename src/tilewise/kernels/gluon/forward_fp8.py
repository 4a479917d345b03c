"""The forward pass on Hopper in 8-bit floats: e4m3 products, float32 sums and softmax, out in 16 bits.

Who does what is as in `forward`; this file says what 8 bits change:

    scales   a block of 128 keys has a scale for k and one, a power of two, for v. Neither costs a multiplication of a
             tile: k's joins the factor of exp2's argument, and v's is added there as log2. So p comes out in the units
             of its block's v, row_max bounds p in those units, and a row's sum takes them off again.
    range    e4m3 ends at 448, and below 2**-6 it loses digits: p goes up to 2**8 instead of 1.
    v        lies transposed, for 8-bit operands are read along the summed axis alone, and its keys are permuted inside
             each 16, so that the scores of a thread are, once rounded, its share of the second product's left operand.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from typing import NamedTuple

from tilewise.kernels.gluon.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.kernels.gluon.forward import TURN, pass_over, set_up_barriers
from tilewise.kernels.gluon.schedule import (
    GROUP_ROWS,
    barriers,
    coordinates,
    get_place,
    own_steps,
    place_of,
    put_place,
    visited,
)
from tilewise.kernels.gluon.softmax import LOG2E, finish_rows, rows_see, to_rows_of
from tilewise.kernels.gluon.softmax_fp8 import packed, softmax_step
from tilewise.kernels.gluon.sync import (
    arrive,
    bytes_of,
    count,
    first_lane,
    get,
    lane_id,
    named_arrive,
    named_sync,
    put,
    rescale_if_moved,
    wait,
)
from tilewise.problem import fp8

BLOCK = gl.constexpr(fp8.BLOCK)  # keys in a block: those with one scale, as 128 rows of q have
NOWHERE = gl.constexpr(2**30)  # a column behind every end of v: the copy engine gives zeros


class Plan(NamedTuple):
    """What the kernel is compiled for: the names of `schedule.Plan` that its functions ask for, and two more."""

    groups: int
    block_kv: int
    dim_qk: int
    dim_v: int
    stages: int
    q_buffers: int
    dynamic: bool
    longest_first: bool
    ping_pong: bool
    lazy: bool
    q_registers: bool
    soft_exp: int  # of so many exponentials of a thread one is computed by multiplications; 0 = none
    top_left: bool
    negative: bool
    packed: bool
    clipped: bool
    right_masked: bool
    left_masked: bool
    bar_off: int


# ---- producer -------------------------------------------------------------------------------------------------------


@gluon.jit
def produce(maps, buffers, bars, counter_ptr, work, band, ranges, PLAN: gl.constexpr):
    """Go through the program's tiles, from the launch's counter or every so many."""
    B: gl.constexpr = barriers(PLAN)
    lane = lane_id()
    tiles, batch, heads, _, _, _, _, _, _, _ = work
    total = tiles * heads
    if not PLAN.packed:
        total = total * batch
    programs = gl.num_programs(0)
    ticket = gl.program_id(0)
    handed = 0  # tiles so far
    loaded = 0  # blocks of keys so far
    while ticket < total:
        ahead = 0
        if PLAN.dynamic:
            ahead = count(counter_ptr)
        place, k_base, _ = place_of(ticket, work, band, ranges, PLAN)
        if place[0] < place[3]:  # q_start < len_q: packed tiles exist in number only, see `packed_tile`
            loaded = load_tile(place, k_base, handed, loaded, lane, maps, buffers, bars, work[3], band, PLAN)
            handed += 1
        if PLAN.dynamic:
            ahead = first_lane(ahead)
            if ahead == total - 1:
                gl.store(counter_ptr, 0)  # the last ticket of a launch leaves the counter ready for the next launch
            ticket = programs + ahead
        else:
            ticket += programs
    slot = handed & 1
    wait(B.tile_empty + slot, ((handed >> 1) & 1) ^ 1, PLAN.bar_off)
    put_place(slot, (-1, 0, 0, 0, 0, 0, 0), lane, PLAN)
    arrive(B.tile_full + slot, lane, PLAN.bar_off)


@gluon.jit
def load_tile(place, k_base, handed, loaded, lane, maps, buffers, bars, group, band, PLAN: gl.constexpr):
    """Hand one tile over and have its q, k and v copied; give the number of blocks loaded so far."""
    B: gl.constexpr = barriers(PLAN)
    q_map, k_map, v_map = maps
    q_buffers, k_buffers, v_buffers = buffers
    q_start, head, sequence, _, _, _, q_base = place
    head_kv = head // group
    entry = 0 if PLAN.packed else sequence
    first, stop = visited(place, band, PLAN)
    first_block = 0  # of scales, and of v
    v_base = 0
    if PLAN.packed:  # each sequence begins with a block of its own
        first_block = gl.maximum(k_base // BLOCK + sequence, 0)
        v_base = gl.where(sequence < 0, NOWHERE, first_block * BLOCK)
    slot = handed & 1
    wait(B.tile_empty + slot, ((handed >> 1) & 1) ^ 1, PLAN.bar_off)
    put_place(slot, place, lane, PLAN)
    if PLAN.packed:
        put(words_of_bases(slot, PLAN), q_base, first_block, lane, PLAN.bar_off)
    arrive(B.tile_full + slot, lane, PLAN.bar_off)
    turn = handed % PLAN.q_buffers
    phase = ((handed // PLAN.q_buffers) & 1) ^ 1
    last = (stop - 1) * PLAN.block_kv
    for g in gl.static_range(PLAN.groups):
        q = g * PLAN.q_buffers + turn
        wait(B.q_empty + q, phase, PLAN.bar_off)
        q_rows = (entry, head, q_base + q_start + g * GROUP_ROWS, 0)
        copy(q_map, q_rows, q_buffers.index(q), bars.index(B.q_full + q))
        if g == 0:  # the first k right behind the first consumer's q
            k_rows = (entry, head_kv, k_base + last, 0)
            load_block(k_map, k_rows, k_buffers, bars, loaded, B.k_full, B.k_empty, PLAN)
    for i in range(stop - first):
        start = last - i * PLAN.block_kv
        if i > 0:
            k_rows = (entry, head_kv, k_base + start, 0)
            load_block(k_map, k_rows, k_buffers, bars, loaded, B.k_full, B.k_empty, PLAN)
        v_columns = (entry, head_kv, 0, v_base + start)
        load_block(v_map, v_columns, v_buffers, bars, loaded, B.v_full, B.v_empty, PLAN)
        loaded += 1
    return loaded


@gluon.jit
def load_block(matrix, corner, ring, bars, loaded, FULL: gl.constexpr, EMPTY: gl.constexpr, PLAN: gl.constexpr):
    """Have block number ``loaded`` copied into its buffer of the ring, once that is empty."""
    stage = loaded % PLAN.stages
    wait(EMPTY + stage, ((loaded // PLAN.stages) & 1) ^ 1, PLAN.bar_off)
    copy(matrix, corner, ring.index(stage), bars.index(FULL + stage))


@gluon.jit
def copy(matrix, corner, buffer, full):
    """Have a box of 8-bit numbers copied, and its bytes counted at the barrier ``full``."""
    mbarrier.expect(full, matrix.block_shape[-2] * matrix.block_shape[-1])
    tma_load(matrix, corner, full, buffer)


@gluon.jit
def words_of_bases(slot, PLAN: gl.constexpr):
    """Find the pair of words that, of a packed place, holds q_base and here the first block of the keys' scales too."""
    return barriers(PLAN).words + 4 * slot + 3


# ---- consumer -------------------------------------------------------------------------------------------------------


@gluon.jit
def first_step(used, q, ring, lane, tile, scales, G: gl.constexpr, PLAN: gl.constexpr):
    """Take the softmax of a tile's first block of keys, always masked; there are no values to add yet."""
    B: gl.constexpr = barriers(PLAN)
    k_buffers, _ = ring
    seen, stop = tile
    stage = used % PLAN.stages
    now = block_scales(scales, stop - 1)
    after = block_scales(scales, gl.maximum(stop - 2, 0))
    wait(B.k_full + stage, (used // PLAN.stages) & 1, PLAN.bar_off)
    if PLAN.ping_pong:
        named_sync(TURN + G, 256)
    score_begun = begin_score(q, k_buffers, stage, PLAN)
    if PLAN.ping_pong:
        named_arrive(TURN + (G + 1) % PLAN.groups, 256)
    score = warpgroup_mma_wait(0, deps=(score_begun,))
    arrive(B.k_empty + stage, lane, PLAN.bar_off)
    how = (scales[0], now, PLAN.negative, seen, (stop - 1) * PLAN.block_kv)
    p, rows, rescale = softmax_step(score, (), how, True, PLAN.soft_exp)
    acc = gl.zeros([GROUP_ROWS, PLAN.dim_v], gl.float32, accumulator(PLAN.dim_v))
    return acc, packed(p), rows, rescale, after


@gluon.jit
def step(i, used, q, ring, lane, state, tile, scales, MASKED: gl.constexpr, G: gl.constexpr, PLAN: gl.constexpr):
    """Multiply q with block i of the keys beside p(i-1) with the values before, then take the softmax."""
    B: gl.constexpr = barriers(PLAN)
    k_buffers, v_buffers = ring
    seen, stop = tile
    acc, p, rows, rescale, now = state
    stage = used % PLAN.stages
    before = used - 1
    stage_before = before % PLAN.stages
    after = block_scales(scales, gl.maximum(stop - 2 - i, 0))
    wait(B.k_full + stage, (used // PLAN.stages) & 1, PLAN.bar_off)
    if PLAN.ping_pong:
        named_sync(TURN + G, 256)
    score_begun = begin_score(q, k_buffers, stage, PLAN)
    wait(B.v_full + stage_before, (before // PLAN.stages) & 1, PLAN.bar_off)
    if PLAN.lazy:  # under q k^T, and taken the less often the more keys were seen
        acc = rescale_if_moved(acc, to_rows_of(rescale, acc))
    acc_begun = add_values(p, v_buffers, stage_before, acc, PLAN)
    if PLAN.ping_pong:
        named_arrive(TURN + (G + 1) % PLAN.groups, 256)
    score = warpgroup_mma_wait(1, deps=(score_begun,))
    arrive(B.k_empty + stage, lane, PLAN.bar_off)
    how = (scales[0], now, PLAN.negative, seen, (stop - 1 - i) * PLAN.block_kv)
    p_next, rows, rescale = softmax_step(score, rows, how, MASKED, PLAN.soft_exp)
    acc = warpgroup_mma_wait(0, deps=(acc_begun,))
    arrive(B.v_empty + stage_before, lane, PLAN.bar_off)
    if not PLAN.lazy:
        acc = acc * to_rows_of(rescale, acc)[:, None]
    return acc, packed(p_next), rows, rescale, after


@gluon.jit
def last_values(used, ring, lane, state, place, q_pos, lse_ptr, heads, total_q, PLAN: gl.constexpr):
    """Add the last block's values, with lse in its shadow; give the finished tile of out, in float32."""
    B: gl.constexpr = barriers(PLAN)
    _, v_buffers = ring
    acc, p, rows, rescale, _ = state
    _, head, sequence, len_q, _, _, q_base = place
    before = used - 1
    stage = before % PLAN.stages
    if PLAN.lazy:
        acc = acc * to_rows_of(rescale, acc)[:, None]
    wait(B.v_full + stage, (before // PLAN.stages) & 1, PLAN.bar_off)
    acc_begun = add_values(p, v_buffers, stage, acc, PLAN)
    inverse, lse = finish_rows(*rows, ())
    if lse_ptr is not None:
        of_all = head if PLAN.packed else sequence * heads + head
        gl.store(lse_ptr + of_all.to(gl.int64) * total_q + (q_base + q_pos), lse, mask=q_pos < len_q)
    acc = warpgroup_mma_wait(0, deps=(acc_begun,))
    arrive(B.v_empty + stage, lane, PLAN.bar_off)
    return acc * to_rows_of(inverse, acc)[:, None]


@gluon.jit
def begin_score(q, k_buffers, stage, PLAN: gl.constexpr):
    """Start q k^T, asynchronously."""
    LAYOUT: gl.constexpr = accumulator(PLAN.block_kv)
    k = k_buffers.index(stage).reshape([PLAN.block_kv, PLAN.dim_qk])
    zero = gl.zeros([GROUP_ROWS, PLAN.block_kv], gl.float32, LAYOUT)
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def add_values(p, v_buffers, stage, acc, PLAN: gl.constexpr):
    """Start acc + p v, asynchronously; ``p`` comes from `packed`."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=4)
    twice = gl.join(p, p)
    four = gl.join(twice, twice).reshape([GROUP_ROWS, PLAN.block_kv])
    v = v_buffers.index(stage).reshape([PLAN.dim_v, PLAN.block_kv])
    operand = bytes_of(gl.convert_layout(four, LAYOUT, assert_trivial=True))
    return warpgroup_mma(operand, v.permute((1, 0)), acc, is_async=True)


@gluon.constexpr_function
def accumulator(columns):
    """Give the layout of a product's result: rows over four warps of 16."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32])


# ---- scales ---------------------------------------------------------------------------------------------------------


@gluon.jit
def block_scales(scales, block):
    """Read the scales of a block of the tile's keys: a step before they are used, so that nothing waits."""
    _, k_scale_ptr, v_scale_ptr = scales
    return gl.load(k_scale_ptr + block), gl.load(v_scale_ptr + block)


@gluon.jit
def tile_scales(place, first_block, scale, pointers, group, heads, start, PLAN: gl.constexpr):
    """Give what scores of a tile are multiplied by but for k's scale, and where the scales of its keys stand."""
    q_scale_ptr, k_scale_ptr, v_scale_ptr, q_blocks, kv_blocks = pointers
    _, head, sequence, _, _, _, q_base = place
    block = start // BLOCK
    if PLAN.packed:
        block = gl.where(sequence < 0, 0, block + q_base // BLOCK + sequence)
        row = head
    else:
        row = sequence * heads + head
    block = gl.minimum(block, q_blocks - 1)  # of a consumer whose rows all lie behind the last one
    q_scale = gl.load(q_scale_ptr + row * q_blocks + block)
    keys = row // group * kv_blocks + first_block
    return q_scale * scale, k_scale_ptr + keys, v_scale_ptr + keys


# ---- a tile after the other -----------------------------------------------------------------------------------------


@gluon.jit
def consume(out_map, lse_ptr, pointers, buffers, bars, work, band, scale, G: gl.constexpr, PLAN: gl.constexpr):
    """Compute rows G * 64 to G * 64 + 64 of each tile of queries that the producer hands over."""
    B: gl.constexpr = barriers(PLAN)
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator(PLAN.block_kv))
    q_buffers, k_buffers, v_buffers, out_buffers = buffers
    ring = (k_buffers, v_buffers)
    _, _, heads, group, _, len_q, _, _, _, _ = work
    out_tile = out_buffers.index(G)
    lane = lane_id()
    used = 0  # blocks of keys so far
    taken = 0  # tiles so far
    if PLAN.ping_pong and PLAN.groups - 1 == G:
        named_arrive(TURN, 256)  # consumer 0 goes first
    wait(B.tile_full, 0, PLAN.bar_off)
    place, first_block = take_place(0, work, PLAN)
    arrive(B.tile_empty, lane, PLAN.bar_off)
    while place[0] >= 0:
        first, last = visited(place, band, PLAN)
        start = place[0] + G * GROUP_ROWS
        scales = tile_scales(place, first_block, scale, pointers, group, heads, start, PLAN)
        stop, bare, _, steps = own_steps(start, first, last, place, band, PLAN)
        q_pos = start + gl.arange(0, GROUP_ROWS, layout=ROWS)
        tile = (rows_see(q_pos, place[4], place[5], band), stop)
        buffer = G * PLAN.q_buffers + taken % PLAN.q_buffers
        q = q_buffers.index(buffer).reshape([GROUP_ROWS, PLAN.dim_qk])
        wait(B.q_full + buffer, (taken // PLAN.q_buffers) & 1, PLAN.bar_off)
        if PLAN.q_registers:
            q = q.load(gl.DotOperandLayout(operand_index=0, parent=accumulator(PLAN.block_kv), k_width=4))
        if PLAN.right_masked:
            for _ in range(last - stop):
                used = pass_over(used, lane, G, PLAN)
        state = first_step(used, q, ring, lane, tile, scales, G, PLAN)
        used += 1
        if PLAN.q_registers:  # the first product had it all
            arrive(B.q_empty + buffer, lane, PLAN.bar_off)
        if PLAN.right_masked:
            for i in range(1, bare):
                state = step(i, used, q, ring, lane, state, tile, scales, True, G, PLAN)
                used += 1
        for i in range(bare, steps):
            state = step(i, used, q, ring, lane, state, tile, scales, False, G, PLAN)
            used += 1
        if not PLAN.q_registers:
            arrive(B.q_empty + buffer, lane, PLAN.bar_off)
        out = last_values(used, ring, lane, state, place, q_pos, lse_ptr, heads, len_q, PLAN)
        tma_store_wait(0)  # the last tile's output has left by now
        thread_barrier()
        out_tile.reshape([GROUP_ROWS, PLAN.dim_v]).store(out.to(out_buffers.dtype))
        fence_async_shared()
        rows = coordinates(place[2], place[1], place[6], place[3], start, PLAN.packed)
        taken += 1
        slot = taken & 1
        wait(B.tile_full + slot, (taken >> 1) & 1, PLAN.bar_off)
        place, first_block = take_place(slot, work, PLAN)
        arrive(B.tile_empty + slot, lane, PLAN.bar_off)
        tma_store(out_map, rows, out_tile)
    tma_store_wait(0)
    if PLAN.ping_pong and G == 0:
        named_sync(TURN, 256)  # take the last pending turn, so that the barrier ends balanced


@gluon.jit
def take_place(slot, work, PLAN: gl.constexpr):
    """Read a place, and the first block of the scales of its keys."""
    _, _, _, _, _, len_q, len_kv, offset, _, _ = work
    place = get_place(slot, len_q, len_kv, offset, PLAN)
    first_block = 0
    if PLAN.packed:
        _, first_block = get(words_of_bases(slot, PLAN), PLAN.bar_off)
    return place, first_block


# ---- kernel ---------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def plan_of(*values):
    """Gather the constants of the kernel, for its functions to hand on as one."""
    return Plan(*map(gl.constexpr, values))


@gluon.jit
def attention_forward_fp8(
    q_map, k_map, v_map, out_map, lse_ptr, counter_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, cu_q_ptr, cu_k_ptr,
    q_blocks: gl.int32, kv_blocks: gl.int32, tiles: gl.int32, batch: gl.int32, heads: gl.int32, group: gl.int32,
    section: gl.int32, len_q: gl.int32, len_kv: gl.int32, offset: gl.int32, right, scale: gl.float32,
    GROUPS: gl.constexpr, BLOCK_DIM: gl.constexpr, STAGES: gl.constexpr, Q_BUFFERS: gl.constexpr,
    DYNAMIC: gl.constexpr, PING_PONG: gl.constexpr, LAZY: gl.constexpr, Q_REGISTERS: gl.constexpr,
    SOFT_EXP: gl.constexpr, TOP_LEFT: gl.constexpr, NEGATIVE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, BAR_OFF: gl.constexpr,
):  # fmt: skip
    """Compute out and lse of all tiles; ``backends/hopper_fp8.py`` says what each argument is."""
    PACKED: gl.constexpr = cu_q_ptr is not None
    CAUSAL: gl.constexpr = right is not None
    PLAN: gl.constexpr = plan_of(
        GROUPS, BLOCK, BLOCK_DIM, BLOCK_DIM, STAGES, Q_BUFFERS, DYNAMIC, CAUSAL, PING_PONG, LAZY, Q_REGISTERS, SOFT_EXP,
        TOP_LEFT, NEGATIVE, PACKED, PACKED, CAUSAL, False, BAR_OFF,
    )  # fmt: skip
    q_s = gl.allocate_shared_memory(q_map.dtype, [GROUPS * Q_BUFFERS, 1, 1, GROUP_ROWS, BLOCK_DIM], q_map.layout)
    k_s = gl.allocate_shared_memory(k_map.dtype, [STAGES, 1, 1, BLOCK, BLOCK_DIM], k_map.layout)
    v_s = gl.allocate_shared_memory(v_map.dtype, [STAGES, 1, 1, BLOCK_DIM, BLOCK], v_map.layout)
    if PACKED:
        out_s = gl.allocate_shared_memory(out_map.dtype, [GROUPS, 1, 1, 1, GROUP_ROWS, BLOCK_DIM], out_map.layout)
    else:
        out_s = gl.allocate_shared_memory(out_map.dtype, [GROUPS, 1, 1, GROUP_ROWS, BLOCK_DIM], out_map.layout)
    bars = set_up_barriers(PLAN)
    work = (tiles, batch, heads, group, section, len_q, len_kv, offset, 0, 0)
    band = (None, right)
    ranges = (None, None, cu_q_ptr, cu_k_ptr)
    pointers = (q_scale_ptr, k_scale_ptr, v_scale_ptr, q_blocks, kv_blocks)
    factor = scale * LOG2E
    smem = (q_s, k_s, v_s, out_s)
    loads = (q_map, k_map, v_map)
    if GROUPS == 2:
        warp_specialize(
            [
                (consume, (out_map, lse_ptr, pointers, smem, bars, work, band, factor, 0, PLAN)),
                (consume, (out_map, lse_ptr, pointers, smem, bars, work, band, factor, 1, PLAN)),
                (produce, (loads, (q_s, k_s, v_s), bars, counter_ptr, work, band, ranges, PLAN)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        warp_specialize(
            [
                (consume, (out_map, lse_ptr, pointers, smem, bars, work, band, factor, 0, PLAN)),
                (consume, (out_map, lse_ptr, pointers, smem, bars, work, band, factor, 1, PLAN)),
                (consume, (out_map, lse_ptr, pointers, smem, bars, work, band, factor, 2, PLAN)),
                (produce, (loads, (q_s, k_s, v_s), bars, counter_ptr, work, band, ranges, PLAN)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
