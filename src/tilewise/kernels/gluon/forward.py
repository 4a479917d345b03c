"""The forward pass on Hopper: copies, products and softmax at the same time, each by its own unit.

A program is two or three *consumers*, warpgroups with 64 queries each, and one *producer*, a single warp. They meet at
barriers alone; `schedule.barriers` lists them, a full and an empty one for each buffer.

    producer     takes a tile of queries, tells the consumers where it lies, has q, k and v copied into rings of buffers
    consumer     step i: start  score = q k(i)^T  and  acc += p(i-1) v(i-1)  together, wait for the score alone,
                         take the softmax of block i while the second product is still under way

With PING_PONG the consumers take turns at starting products, so that one's softmax lies under another's products.
Blocks of keys run from the last to the first: what the diagonal cuts comes first, in a loop of its own.

The softmax is that of ``kernels/triton/forward.py``, the rule which blocks to visit that of ``problem/blocks.py``.
Where a wait stands has been measured; the compiler moves arithmetic over waits in both directions, so read the SASS
after a change.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

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
from tilewise.kernels.gluon.schedule import (
    GROUP_ROWS,
    Plan,
    barriers,
    coordinates,
    get_place,
    own_steps,
    place_of,
    put_place,
    visited,
)
from tilewise.kernels.gluon.softmax import LOG2E, finish_rows, rows_see, softmax_step, to_rows_of
from tilewise.kernels.gluon.sync import (
    arrive,
    count,
    first_lane,
    lane_id,
    named_arrive,
    named_sync,
    pack,
    rescale_if_moved,
    wait,
)
from tilewise.kernels.triton.steps import scalar_of

TURN = gl.constexpr(8)  # the first of the hardware's barriers by which consumers take turns
WARPS = gl.constexpr(4)  # in a consumer: an empty barrier counts them

# ---- producer -------------------------------------------------------------------------------------------------------


@gluon.jit
def produce(maps, buffers, bars, counter_ptr, work, band, ranges, PLAN: gl.constexpr):
    """Go through the program's tiles, from the launch's counter or every so many."""
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
        place, k_base, v_base = place_of(ticket, work, band, ranges, PLAN)
        if PLAN.packed:
            if place[0] < place[3]:  # q_start < len_q: some tiles exist in number only, see `packed_tile`
                loaded = load_tile(
                    place, k_base, v_base, handed, loaded, lane, maps, buffers, bars, work[3], band, PLAN
                )
                handed += 1
        else:
            loaded = load_tile(place, k_base, v_base, handed, loaded, lane, maps, buffers, bars, work[3], band, PLAN)
            handed += 1
        if PLAN.dynamic:
            ahead = first_lane(ahead)
            if ahead == total - 1:
                gl.store(counter_ptr, 0)  # the last ticket of a launch leaves the counter ready for the next launch
            ticket = programs + ahead
        else:
            ticket += programs
    B: gl.constexpr = barriers(PLAN)
    slot = handed & 1
    wait(B.tile_empty + slot, ((handed >> 1) & 1) ^ 1, PLAN.bar_off)
    put_place(slot, (-1, 0, 0, 0, 0, 0, 0), lane, PLAN)
    arrive(B.tile_full + slot, lane, PLAN.bar_off)


@gluon.jit
def load_tile(place, k_base, v_base, handed, loaded, lane, maps, buffers, bars, group, band, PLAN: gl.constexpr):
    """Hand one tile over and have its q, k and v copied; give the number of blocks loaded so far."""
    B: gl.constexpr = barriers(PLAN)
    q_map, k_map, v_map = maps
    q_buffers, k_buffers, v_buffers = buffers
    q_start, head, sequence, len_q, len_kv, _, q_base = place
    head_kv = head // group
    first, stop = visited(place, band, PLAN)
    slot = handed & 1
    wait(B.tile_empty + slot, ((handed >> 1) & 1) ^ 1, PLAN.bar_off)
    put_place(slot, place, lane, PLAN)
    arrive(B.tile_full + slot, lane, PLAN.bar_off)
    turn = handed % PLAN.q_buffers
    phase = ((handed // PLAN.q_buffers) & 1) ^ 1
    last = (stop - 1) * PLAN.block_kv
    for g in gl.static_range(PLAN.groups):
        if g == 0 and PLAN.q_buffers == 1:  # k and v first: the only buffer of q still holds the last tile's output
            k_rows = coordinates(sequence, head_kv, k_base, len_kv, last, PLAN.clipped)
            load_block(k_map, k_rows, k_buffers, bars, loaded, B.k_full, B.k_empty, PLAN)
            v_rows = coordinates(sequence, head_kv, v_base, len_kv, last, PLAN.clipped)
            load_block(v_map, v_rows, v_buffers, bars, loaded, B.v_full, B.v_empty, PLAN)
        q = g * PLAN.q_buffers + turn
        wait(B.q_empty + q, phase, PLAN.bar_off)
        full = bars.index(B.q_full + q)
        mbarrier.expect(full, GROUP_ROWS * PLAN.dim_qk * 2)
        q_rows = coordinates(sequence, head, q_base, len_q, q_start + g * GROUP_ROWS, PLAN.packed)
        tma_load(q_map, q_rows, full, q_buffers.index(q))
        if g == 0 and PLAN.q_buffers > 1:  # the first k right behind the first consumer's q
            k_rows = coordinates(sequence, head_kv, k_base, len_kv, last, PLAN.clipped)
            load_block(k_map, k_rows, k_buffers, bars, loaded, B.k_full, B.k_empty, PLAN)
    for i in range(stop - first):
        start = last - i * PLAN.block_kv
        if i > 0:
            k_rows = coordinates(sequence, head_kv, k_base, len_kv, start, PLAN.clipped)
            load_block(k_map, k_rows, k_buffers, bars, loaded, B.k_full, B.k_empty, PLAN)
        if PLAN.q_buffers > 1 or i > 0:
            v_rows = coordinates(sequence, head_kv, v_base, len_kv, start, PLAN.clipped)
            load_block(v_map, v_rows, v_buffers, bars, loaded, B.v_full, B.v_empty, PLAN)
        loaded += 1
    return loaded


@gluon.jit
def load_block(rows_map, rows, ring, bars, loaded, FULL: gl.constexpr, EMPTY: gl.constexpr, PLAN: gl.constexpr):
    """Have block number ``loaded`` copied into its buffer of the ring, once that is empty."""
    buffer = ring.index(loaded % PLAN.stages)
    stage = loaded % PLAN.stages
    wait(EMPTY + stage, ((loaded // PLAN.stages) & 1) ^ 1, PLAN.bar_off)
    full = bars.index(FULL + stage)
    mbarrier.expect(full, PLAN.block_kv * rows_map.block_shape[-1] * 2)
    tma_load(rows_map, rows, full, buffer)


# ---- consumer -------------------------------------------------------------------------------------------------------


@gluon.jit
def first_step(used, q, ring, lane, tile, score_with, G: gl.constexpr, PLAN: gl.constexpr):
    """Take the softmax of a tile's first block of keys, always masked; there are no values to add yet."""
    B: gl.constexpr = barriers(PLAN)
    k_buffers, v_buffers = ring
    factors, softcap = score_with
    seen, stop = tile
    stage = used % PLAN.stages
    wait(B.k_full + stage, (used // PLAN.stages) & 1, PLAN.bar_off)
    if PLAN.ping_pong:
        named_sync(TURN + G, 256)
    score_begun = begin_score(q, k_buffers, stage, PLAN)
    if PLAN.ping_pong:
        named_arrive(TURN + (G + 1) % PLAN.groups, 256)
    score = warpgroup_mma_wait(0, deps=(score_begun,))
    arrive(B.k_empty + stage, lane, PLAN.bar_off)
    how = (factors, softcap, PLAN.negative, seen, (stop - 1) * PLAN.block_kv)
    p, rows, rescale = softmax_step(score, (), how, True)
    acc = gl.zeros([GROUP_ROWS, PLAN.dim_v], gl.float32, accumulator(PLAN.dim_v))
    return acc, operand_of(p, acc, v_buffers.dtype, PLAN), rows, rescale


@gluon.jit
def step(i, used, q, ring, lane, state, tile, score_with, MASKED: gl.constexpr, G: gl.constexpr, PLAN: gl.constexpr):
    """Multiply q with block i of the keys beside p(i-1) with the values before, then take the softmax."""
    B: gl.constexpr = barriers(PLAN)
    k_buffers, v_buffers = ring
    factors, softcap = score_with
    seen, stop = tile
    acc, p, rows, rescale = state
    stage = used % PLAN.stages
    before = used - 1
    stage_before = before % PLAN.stages
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
    # ptxas lifts the wait for p v to just behind the maximum, and packs exponentials, conversions and the rescale into
    # one block behind it. Every way to hold it back was slower: another consumer keeps the tensor cores busy meanwhile.
    how = (factors, softcap, PLAN.negative, seen, (stop - 1 - i) * PLAN.block_kv)
    p_next, rows, rescale = softmax_step(score, rows, how, MASKED)
    acc, p = warpgroup_mma_wait(0, deps=(acc_begun, p))
    arrive(B.v_empty + stage_before, lane, PLAN.bar_off)
    if not PLAN.lazy:
        acc = acc * to_rows_of(rescale, acc)[:, None]
    return acc, operand_of(p_next, acc, v_buffers.dtype, PLAN), rows, rescale


@gluon.jit
def last_values(used, ring, lane, state, place, q_pos, lse_ptr, sinks, heads, total_q, PLAN: gl.constexpr):
    """Add the last block's values, with lse in its shadow; give the finished tile of out, in float32."""
    B: gl.constexpr = barriers(PLAN)
    _, v_buffers = ring
    acc, p, rows, rescale = state
    _, head, sequence, len_q, _, _, q_base = place
    before = used - 1
    stage = before % PLAN.stages
    if PLAN.lazy:
        acc = acc * to_rows_of(rescale, acc)[:, None]
    wait(B.v_full + stage, (before // PLAN.stages) & 1, PLAN.bar_off)
    acc_begun = add_values(p, v_buffers, stage, acc, PLAN)
    _, anchor, row_sum = rows
    inverse, lse = finish_rows(anchor, row_sum, sink_of(sinks, sequence, head))
    if lse_ptr is not None:
        of_all = head if PLAN.packed else sequence * heads + head
        gl.store(lse_ptr + of_all.to(gl.int64) * total_q + (q_base + q_pos), lse, mask=q_pos < len_q)
    acc, p = warpgroup_mma_wait(0, deps=(acc_begun, p))
    arrive(B.v_empty + stage, lane, PLAN.bar_off)
    return acc * to_rows_of(inverse, acc)[:, None]


@gluon.jit
def pass_over(used, lane, G: gl.constexpr, PLAN: gl.constexpr):
    """Leave a block to the other consumers: give its buffers back, and the turn on."""
    B: gl.constexpr = barriers(PLAN)
    stage = used % PLAN.stages
    phase = (used // PLAN.stages) & 1
    if PLAN.ping_pong:
        named_sync(TURN + G, 256)
        named_arrive(TURN + (G + 1) % PLAN.groups, 256)
    wait(B.k_full + stage, phase, PLAN.bar_off)
    arrive(B.k_empty + stage, lane, PLAN.bar_off)
    wait(B.v_full + stage, phase, PLAN.bar_off)
    arrive(B.v_empty + stage, lane, PLAN.bar_off)
    return used + 1


@gluon.jit
def begin_score(q, k_buffers, stage, PLAN: gl.constexpr):
    """Start q k^T, asynchronously."""
    LAYOUT: gl.constexpr = accumulator(PLAN.block_kv)
    k = k_buffers.index(stage).reshape([PLAN.block_kv, PLAN.dim_qk])
    zero = gl.zeros([GROUP_ROWS, PLAN.block_kv], gl.float32, LAYOUT)
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def add_values(p, v_buffers, stage, acc, PLAN: gl.constexpr):
    """Start acc + p v, asynchronously."""
    return warpgroup_mma(p, v_buffers.index(stage).reshape([PLAN.block_kv, PLAN.dim_v]), acc, is_async=True)


@gluon.constexpr_function
def accumulator(columns):
    """Give the layout of a product's result: rows over four warps of 16."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def operand_of(p, acc, DTYPE: gl.constexpr, PLAN: gl.constexpr):
    """Round p to what the second product reads, from registers."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    return gl.convert_layout(pack(p, DTYPE) if PLAN.pack else p.to(DTYPE), LAYOUT)


@gluon.jit
def consume(out_map, lse_ptr, sinks, buffers, bars, work, band, score_with, G: gl.constexpr, PLAN: gl.constexpr):
    """Compute rows G * 64 to G * 64 + 64 of each tile of queries that the producer hands over."""
    B: gl.constexpr = barriers(PLAN)
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator(PLAN.block_kv))
    q_buffers, k_buffers, v_buffers, out_buffers = buffers
    ring = (k_buffers, v_buffers)
    _, _, heads, _, _, len_q, len_kv, offset, _, _ = work
    lane = lane_id()
    used = 0  # blocks of keys so far
    taken = 0  # tiles so far
    if PLAN.ping_pong and PLAN.groups - 1 == G:
        named_arrive(TURN, 256)  # consumer 0 goes first
    wait(B.tile_full, 0, PLAN.bar_off)
    place = get_place(0, len_q, len_kv, offset, PLAN)
    arrive(B.tile_empty, lane, PLAN.bar_off)
    while place[0] >= 0:
        first, last = visited(place, band, PLAN)
        start = place[0] + G * GROUP_ROWS
        stop, bare, left_masked, steps = own_steps(start, first, last, place, band, PLAN)
        q_pos = start + gl.arange(0, GROUP_ROWS, layout=ROWS)
        tile = (rows_see(q_pos, place[4], place[5], band), stop)
        turn = taken % PLAN.q_buffers
        buffer = G * PLAN.q_buffers + turn
        q = q_buffers.index(buffer).reshape([GROUP_ROWS, PLAN.dim_qk])
        wait(B.q_full + buffer, (taken // PLAN.q_buffers) & 1, PLAN.bar_off)
        if PLAN.right_masked:
            for _ in range(last - stop):
                used = pass_over(used, lane, G, PLAN)
        state = first_step(used, q, ring, lane, tile, score_with, G, PLAN)
        used += 1
        if PLAN.q_buffers == 2 and taken > 0:  # the last tile's output has left its buffer by now
            tma_store_wait(0)
            thread_barrier()
            arrive(B.q_empty + G * PLAN.q_buffers + (1 - turn), lane, PLAN.bar_off)
        if PLAN.right_masked:
            for i in range(1, bare):
                state = step(i, used, q, ring, lane, state, tile, score_with, True, G, PLAN)
                used += 1
        for i in range(bare, left_masked):
            state = step(i, used, q, ring, lane, state, tile, score_with, False, G, PLAN)
            used += 1
        if PLAN.left_masked:
            for i in range(left_masked, steps):
                state = step(i, used, q, ring, lane, state, tile, score_with, True, G, PLAN)
                used += 1
        out = last_values(used, ring, lane, state, place, q_pos, lse_ptr, sinks, heads, len_q, PLAN)
        if PLAN.left_masked:
            for _ in range(stop - steps - first):
                used = pass_over(used, lane, G, PLAN)
        # Out leaves through this tile's own buffer of q; where the next tile lies is asked meanwhile.
        out_buffers.index(buffer).reshape([GROUP_ROWS, PLAN.dim_v]).store(out.to(v_buffers.dtype))
        fence_async_shared()
        rows = coordinates(place[2], place[1], place[6], place[3], start, PLAN.packed)
        taken += 1
        slot = taken & 1
        wait(B.tile_full + slot, (taken >> 1) & 1, PLAN.bar_off)
        place = get_place(slot, len_q, len_kv, offset, PLAN)
        arrive(B.tile_empty + slot, lane, PLAN.bar_off)
        tma_store(out_map, rows, out_buffers.index(buffer))
        if PLAN.q_buffers == 1:
            tma_store_wait(0)
            thread_barrier()
            arrive(B.q_empty + buffer, lane, PLAN.bar_off)
    if PLAN.q_buffers == 2:
        tma_store_wait(0)
    if PLAN.ping_pong and G == 0:
        named_sync(TURN, 256)  # take the last pending turn, so that the barrier ends balanced


@gluon.jit
def sink_of(sinks, sequence, head):
    """Give a head's sink in base 2 as (score,), or (); -inf behind the last packed sequence."""
    sink_ptr, batch_stride, head_stride = sinks
    if sink_ptr is None:
        sink = ()
    else:
        value = scalar_of(sink_ptr, gl.maximum(sequence, 0), head, batch_stride, head_stride)[0]
        sink = (gl.where(sequence < 0, -float("inf"), value * LOG2E),)
    return sink


# ---- kernel ---------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def plan_of(*values):
    """Gather the constants of the kernel, for its functions to hand on as one."""
    return Plan(*map(gl.constexpr, values))


@gluon.jit
def attention_forward(
    q_map, k_map, v_map, out_map, lse_ptr, counter_ptr, sink_ptr, kv_start_ptr, kv_stop_ptr, cu_q_ptr, cu_k_ptr,
    sink_batch_stride: gl.int64, sink_head_stride: gl.int64, k_batch_rows: gl.int32, v_batch_rows: gl.int32,
    tiles: gl.int32, batch: gl.int32, heads: gl.int32, group: gl.int32, section: gl.int32,
    len_q: gl.int32, len_kv: gl.int32, offset: gl.int32, left, right, factor: gl.float32, far: gl.float32, softcap,
    GROUPS: gl.constexpr, BLOCK_KV: gl.constexpr, BLOCK_DIM_QK: gl.constexpr, BLOCK_DIM_V: gl.constexpr,
    STAGES: gl.constexpr, Q_BUFFERS: gl.constexpr, DYNAMIC: gl.constexpr, LONGEST_FIRST: gl.constexpr,
    PING_PONG: gl.constexpr, LAZY: gl.constexpr, PACK: gl.constexpr, CLIPPED: gl.constexpr, TOP_LEFT: gl.constexpr,
    NEGATIVE: gl.constexpr, POWER: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    BAR_OFF: gl.constexpr,
):  # fmt: skip
    """Compute out and lse of all tiles; ``backends/hopper.py`` says what each argument is."""
    PACKED: gl.constexpr = cu_q_ptr is not None
    PLAN: gl.constexpr = plan_of(
        GROUPS, BLOCK_KV, BLOCK_DIM_QK, BLOCK_DIM_V, STAGES, Q_BUFFERS, DYNAMIC, LONGEST_FIRST, PING_PONG, LAZY, PACK,
        TOP_LEFT, NEGATIVE, PACKED, CLIPPED, right is not None, left is not None, BAR_OFF,
    )  # fmt: skip
    q_s = allocate_ring(q_map, GROUPS * Q_BUFFERS, GROUP_ROWS, BLOCK_DIM_QK, PACKED)
    k_s = allocate_ring(k_map, STAGES, BLOCK_KV, BLOCK_DIM_QK, PLAN.clipped)
    v_s = allocate_ring(v_map, STAGES, BLOCK_KV, BLOCK_DIM_V, PLAN.clipped)
    if BLOCK_DIM_QK == BLOCK_DIM_V:
        out_s = q_s
    else:
        out_s = allocate_ring(out_map, GROUPS * Q_BUFFERS, GROUP_ROWS, BLOCK_DIM_V, PACKED)
    bars = set_up_barriers(PLAN)
    work = (tiles, batch, heads, group, section, len_q, len_kv, offset, k_batch_rows, v_batch_rows)
    band = (left, right)
    ranges = (kv_start_ptr, kv_stop_ptr, cu_q_ptr, cu_k_ptr)
    sinks = (sink_ptr, sink_batch_stride, sink_head_stride)
    score_with = ((factor, far, POWER), ()) if softcap is None else ((1.0,), (factor / softcap, softcap))
    smem = (q_s, k_s, v_s, out_s)
    loads = (q_map, k_map, v_map)
    if GROUPS == 2:
        warp_specialize(
            [
                (consume, (out_map, lse_ptr, sinks, smem, bars, work, band, score_with, 0, PLAN)),
                (consume, (out_map, lse_ptr, sinks, smem, bars, work, band, score_with, 1, PLAN)),
                (produce, (loads, (q_s, k_s, v_s), bars, counter_ptr, work, band, ranges, PLAN)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        warp_specialize(
            [
                (consume, (out_map, lse_ptr, sinks, smem, bars, work, band, score_with, 0, PLAN)),
                (consume, (out_map, lse_ptr, sinks, smem, bars, work, band, score_with, 1, PLAN)),
                (consume, (out_map, lse_ptr, sinks, smem, bars, work, band, score_with, 2, PLAN)),
                (produce, (loads, (q_s, k_s, v_s), bars, counter_ptr, work, band, ranges, PLAN)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


@gluon.jit
def allocate_ring(rows_map, N: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, CLIPPED: gl.constexpr):
    """Take N buffers of ROWS x DIM in shared memory, with the axes of the map in front."""
    if CLIPPED:
        ring = gl.allocate_shared_memory(rows_map.dtype, [N, 1, 1, 1, ROWS, DIM], rows_map.layout)
    else:
        ring = gl.allocate_shared_memory(rows_map.dtype, [N, 1, 1, ROWS, DIM], rows_map.layout)
    return ring


@gluon.jit
def set_up_barriers(PLAN: gl.constexpr):
    """Take and initialise the barriers. Full ones count the producer's copy, empty ones the warps of who reads."""
    B: gl.constexpr = barriers(PLAN)
    bars = gl.allocate_shared_memory(gl.int64, [B.end, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLAN.groups * PLAN.q_buffers):
        mbarrier.init(bars.index(B.q_full + i), count=1)
        mbarrier.init(bars.index(B.q_empty + i), count=WARPS)
    for i in gl.static_range(PLAN.stages):
        mbarrier.init(bars.index(B.k_full + i), count=1)
        mbarrier.init(bars.index(B.k_empty + i), count=WARPS * PLAN.groups)
        mbarrier.init(bars.index(B.v_full + i), count=1)
        mbarrier.init(bars.index(B.v_empty + i), count=WARPS * PLAN.groups)
    for i in gl.static_range(2):
        mbarrier.init(bars.index(B.tile_full + i), count=1)
        mbarrier.init(bars.index(B.tile_empty + i), count=WARPS * PLAN.groups)
    fence_async_shared()
    return bars
