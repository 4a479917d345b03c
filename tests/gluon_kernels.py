"""Two small kernels in Gluon that use what the large ones do, with a way to get each of their protocols wrong."""
# mypy: ignore-errors
# Kernels compute with Triton's values, which have no types that a checker knows.

from tilewise.kernels.gluon import sync
from tilewise.kernels.gluon.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)

SIZE = gl.constexpr(64)  # rows and columns of every tile
TILE_BYTES = gl.constexpr(64 * 64 * 2)
ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
ROWS = gl.constexpr(gl.SliceLayout(1, ACC.value))
OPERAND = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=ACC.value, k_width=2))

# ---- ring: out = a b, and the sum over all blocks of rows, by one consumer and a ring of two buffers ----------------

FULL, EMPTY, WORDS_FULL, WORDS, RING_SLOTS = (gl.constexpr(slot) for slot in (0, 2, 4, 5, 6))


@gluon.jit
def fill_ring(a_map, b_map, a_s, b_s, bars, blocks, FAULT: gl.constexpr, BAR_OFF: gl.constexpr):
    lane = sync.lane_id()
    sync.put(WORDS, blocks, 7, lane, BAR_OFF)
    sync.arrive(WORDS_FULL, lane, BAR_OFF)
    for i in range(blocks):
        stage = i % 2
        if FAULT != "no wait for empty":
            sync.wait(EMPTY + stage, ((i // 2) & 1) ^ 1, BAR_OFF)
        full = bars.index(FULL + stage)
        mbarrier.expect(full, 2 * TILE_BYTES)
        tma_load(a_map, (gl.program_id(0) * SIZE, i * SIZE), full, a_s.index(stage))
        tma_load(b_map, (i * SIZE, 0), full, b_s.index(stage))


@gluon.jit
def use_ring(
    out_map, sum_map, row_ptr, length, a_s, b_s, out_s, sum_s, bars, FAULT: gl.constexpr, BAR_OFF: gl.constexpr
):  # fmt: skip
    lane = sync.lane_id()
    sync.wait(WORDS_FULL, 0, BAR_OFF)
    blocks, seven = sync.get(WORDS, BAR_OFF)
    acc = gl.zeros([SIZE, SIZE], gl.float32, ACC)
    for i in range(blocks):
        stage = i % 2
        sync.wait_if((FAULT != "no wait for full") | (i != 1), FULL + stage, (i // 2) & 1, BAR_OFF)
        begun = warpgroup_mma(a_s.index(stage), b_s.index(stage), acc, is_async=True)
        if FAULT == "empty before the product is done":
            sync.arrive(EMPTY + stage, lane, BAR_OFF)
        if FAULT == "product used too early":
            acc = warpgroup_mma_wait(1, deps=(begun,))
        else:
            acc = warpgroup_mma_wait(0, deps=(begun,))
        if FAULT != "empty before the product is done" and FAULT != "no arrival":  # noqa: PLR1714 - Gluon has no `in`
            sync.arrive(EMPTY + stage, lane, BAR_OFF)
    out_s.store(acc.to(out_map.dtype))
    sum_s.store(acc)
    if FAULT != "no fence":
        fence_async_shared()
    tma_store(out_map, (gl.program_id(0) * SIZE, 0), out_s)
    tma_add(sum_map, (0, 0), sum_s)
    if FAULT != "no wait for the stores":
        tma_store_wait(0)
    row = gl.program_id(0) * SIZE + gl.arange(0, SIZE, layout=ROWS)
    limit = length
    if FAULT == "no mask":
        limit = length + SIZE
    gl.store(row_ptr + row, gl.sum(acc, 1) + seven, mask=row < limit)


@gluon.jit
def ring(
    a_map, b_map, out_map, sum_map, row_ptr, length: gl.int32, blocks: gl.int32,
    FAULT: gl.constexpr, BAR_OFF: gl.constexpr,
):  # fmt: skip
    a_s = gl.allocate_shared_memory(a_map.dtype, [2, SIZE, SIZE], a_map.layout)
    b_s = gl.allocate_shared_memory(b_map.dtype, [2, SIZE, SIZE], b_map.layout)
    out_s = gl.allocate_shared_memory(out_map.dtype, [SIZE, SIZE], out_map.layout)
    sum_s = gl.allocate_shared_memory(gl.float32, [SIZE, SIZE], sum_map.layout)
    bars = gl.allocate_shared_memory(gl.int64, [RING_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(FULL + i), count=1)
        mbarrier.init(bars.index(EMPTY + i), count=5 if FAULT == "an arrival too few" else 4)
    mbarrier.init(bars.index(WORDS_FULL), count=1)
    if FAULT != "no fence behind init":
        fence_async_shared()
    warp_specialize(
        [
            (use_ring, (out_map, sum_map, row_ptr, length, a_s, b_s, out_s, sum_s, bars, FAULT, BAR_OFF)),
            (fill_ring, (a_map, b_map, a_s, b_s, bars, blocks, FAULT, BAR_OFF)),
        ],
        [1],
        [24],
    )


# ---- chain: out = scaled(a b) b for tiles from a counter, by two consumers that take turns --------------------------

# One buffer of a for each consumer, which takes its output too; b stays for all tiles.
A_FULL, A_EMPTY, B_FULL, TILE_FULL, TILE_EMPTY, TILE, CHAIN_SLOTS = (
    gl.constexpr(slot) for slot in (0, 2, 4, 5, 6, 7, 8)
)
TURN = gl.constexpr(8)


@gluon.jit
def feed_chain(a_map, b_map, a_s, b_s, bars, counter_ptr, tiles, FAULT: gl.constexpr, BAR_OFF: gl.constexpr):
    lane = sync.lane_id()
    mbarrier.expect(bars.index(B_FULL), TILE_BYTES)
    tma_load(b_map, (0, 0), bars.index(B_FULL), b_s)
    tile = gl.program_id(0)
    handed = 0
    while tile < tiles:
        ticket = sync.count(counter_ptr)
        phase = (handed & 1) ^ 1
        if FAULT != "words overwritten":
            sync.wait(TILE_EMPTY, phase, BAR_OFF)
        sync.put(TILE, tile, 0, lane, BAR_OFF)
        sync.arrive(TILE_FULL, lane, BAR_OFF)
        for g in gl.static_range(2):
            sync.wait_if(handed > 0, A_EMPTY + g, phase, BAR_OFF)
            mbarrier.expect(bars.index(A_FULL + g), TILE_BYTES)
            tma_load(a_map, ((2 * tile + g) * SIZE, 0), bars.index(A_FULL + g), a_s.index(g))
        tile = gl.num_programs(0) + sync.first_lane(ticket)
        handed += 1
    sync.wait(TILE_EMPTY, (handed & 1) ^ 1, BAR_OFF)
    sync.put(TILE, -1, 0, lane, BAR_OFF)
    sync.arrive(TILE_FULL, lane, BAR_OFF)


@gluon.jit
def link_chain(out_map, a_s, b_s, bars, G: gl.constexpr, FAULT: gl.constexpr, BAR_OFF: gl.constexpr):
    lane = sync.lane_id()
    zero = gl.zeros([SIZE, SIZE], gl.float32, ACC)
    row = gl.arange(0, SIZE, layout=ROWS)
    if G == 1:
        sync.named_arrive(TURN, 256)  # consumer 0 goes first
    sync.wait(B_FULL, 0, BAR_OFF)
    sync.wait(TILE_FULL, 0, BAR_OFF)
    tile, _ = sync.get(TILE, BAR_OFF)
    sync.arrive(TILE_EMPTY, lane, BAR_OFF)
    taken = 0
    while tile >= 0:
        sync.wait(A_FULL + G, taken & 1, BAR_OFF)
        sync.named_sync(TURN + G, 256)
        acc = warpgroup_mma(a_s.index(G), b_s, zero, use_acc=False)
        sync.named_arrive(TURN + 1 - G, 256)
        acc = sync.rescale_if_moved(acc, gl.where(row % 2 == 0, 1.0, 0.5))
        operand = gl.convert_layout(sync.pack(acc, out_map.dtype), OPERAND)
        begun = warpgroup_mma(operand, b_s, zero, use_acc=False, is_async=True)
        if FAULT == "operand not among the deps":
            acc = warpgroup_mma_wait(0, deps=(begun,))
        else:
            acc, operand = warpgroup_mma_wait(0, deps=(begun, operand))
        out_s = a_s.index(G + sync.opaque_zero(taken))
        out_s.store(acc.to(out_map.dtype))
        fence_async_shared()
        tma_store(out_map, ((2 * tile + G) * SIZE, 0), out_s)
        if FAULT == "buffer freed before it is stored":
            sync.arrive(A_EMPTY + G, lane, BAR_OFF)
        tma_store_wait(0)
        thread_barrier()
        sync.arrive_if(FAULT != "buffer freed before it is stored", A_EMPTY + G, lane, BAR_OFF)
        taken += 1
        sync.wait(TILE_FULL, taken & 1, BAR_OFF)
        tile, _ = sync.get(TILE, BAR_OFF)
        sync.arrive(TILE_EMPTY, lane, BAR_OFF)
    if G == 0 and FAULT != "a turn left over":
        sync.named_sync(TURN, 256)


@gluon.jit
def chain(a_map, b_map, out_map, counter_ptr, tiles: gl.int32, FAULT: gl.constexpr, BAR_OFF: gl.constexpr):
    a_s = gl.allocate_shared_memory(a_map.dtype, [2, SIZE, SIZE], a_map.layout)
    b_s = gl.allocate_shared_memory(b_map.dtype, [SIZE, SIZE], b_map.layout)
    bars = gl.allocate_shared_memory(gl.int64, [CHAIN_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(A_FULL + i), count=1)
        mbarrier.init(bars.index(A_EMPTY + i), count=4)
    mbarrier.init(bars.index(B_FULL), count=1)
    mbarrier.init(bars.index(TILE_FULL), count=1)
    mbarrier.init(bars.index(TILE_EMPTY), count=8)
    fence_async_shared()
    warp_specialize(
        [
            (link_chain, (out_map, a_s, b_s, bars, 0, FAULT, BAR_OFF)),
            (link_chain, (out_map, a_s, b_s, bars, 1, FAULT, BAR_OFF)),
            (feed_chain, (a_map, b_map, a_s, b_s, bars, counter_ptr, tiles, FAULT, BAR_OFF)),
        ],
        [4, 1],
        [104, 24],
    )


# ---- scalars: what integers do, and a hand-over from one program to the next ----------------------------------------


@gluon.jit
def integers(in_ptr, out_ptr, a: gl.int32, b: gl.int32):
    gl.store(out_ptr, a // b)
    gl.store(out_ptr + 1, a % b)
    gl.store(out_ptr + 2, a >> 1)
    gl.store(out_ptr + 3, gl.load(in_ptr + 1, mask=a > 0, other=b))
    gl.store(out_ptr + 4, a.to(gl.int64) * 1000000000)


@gluon.jit
def relay(flag_ptr, out_ptr):
    """Program n waits until those before it are done, in whatever order they run."""
    me = gl.num_programs(0) - 1 - gl.program_id(0)
    while gl.atomic_add(flag_ptr, 0) < me:
        pass
    gl.store(out_ptr + me, gl.load(out_ptr + gl.maximum(me - 1, 0)) + me)
    gl.atomic_add(flag_ptr, 1)
