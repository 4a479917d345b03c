"""The backward pass on Hopper in two kernels that share no sum: dk and dv at head dim 256, and dq at any head dim.

At head dim 256 the sums of dK and dV of 64 keys fill the registers of a warpgroup each, and adding dQ up in memory
would take twice the traffic of head dim 128. So `wide_key_gradients` leaves dQ out, and `query_gradients` computes the
scores once more: seven products instead of five, nothing added between programs, the same bits in each run. That is
also why smaller head dims take `query_gradients` where a call asks to be deterministic, or for dq alone.

In `wide_key_gradients` a program owns 64 keys, and its two consumer warpgroups different products of them: the first S,
P and dV, the second dP, dS and dK. P goes over through shared memory in float32, in the order of threads.
In `query_gradients` a program owns 128 queries, 64 for each consumer, and streams keys and values.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from tilewise.kernels.gluon.backward_steps import (
    bare_queries,
    box_at,
    capped,
    from_thread_order,
    hide,
    key_blocks,
    key_tile,
    probabilities,
    product,
    query_blocks,
    query_tile,
    saved_row,
    start_from,
    start_of_scores,
    to_thread_order,
    zero_outside,
)
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
from tilewise.kernels.gluon.sync import named_sync, opaque_zero

BOTH = gl.constexpr(8)  # the hardware barrier at which the two consumers meet


# ---- dk and dv at head dim 256 --------------------------------------------------------------------------------------


@gluon.jit
def load_queries(
    maps, tiles, barriers, bounds, sizes, band, rows,
    CUT: gl.constexpr, TOP_LEFT: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Produce: the tile of keys once, then every block of queries that sees it, for each query head."""
    q_map, d_out_map, k_map, v_map, saved_map = maps
    q_s, d_out_s, k_s, v_s, lse_s, delta_s = tiles
    q_full, q_empty, d_out_full, d_out_empty, kv_full = barriers
    padded_rows, saved_rows = rows
    PACKED: gl.constexpr = bounds[0] is not None
    sequence, kv_head, start, kv_base, q_base, len_kv, place = key_tile(bounds, sizes, band, CUT, TOP_LEFT, BLOCK_KV)
    edges, _ = query_blocks(start, place, band[0], band[1], BLOCK_Q, BLOCK_KV, True)
    heads_q, group = sizes[1], sizes[1] // sizes[2]

    keys = box_at(sequence, kv_head, kv_base, len_kv, start, PACKED)
    mbarrier.expect(kv_full.index(0), BLOCK_KV * DIM * 2)
    tma_load(k_map, keys, kv_full.index(0), k_s.index(0))
    mbarrier.expect(kv_full.index(1), BLOCK_KV * DIM * 2)
    tma_load(v_map, keys, kv_full.index(1), v_s.index(0))
    step = 0
    for head in range(kv_head * group, kv_head * group + group):
        row = saved_row(sequence, head, heads_q, q_base, padded_rows, PACKED)
        for block in range(edges[0], edges[3]):
            queries = box_at(sequence, head, q_base, place[0], block * BLOCK_Q, PACKED)
            slot = step & 1
            phase = ((step // 2) & 1) ^ 1
            mbarrier.wait(q_empty.index(slot), phase)
            mbarrier.expect(q_full.index(slot), BLOCK_Q * DIM * 2 + BLOCK_Q * 4)
            tma_load(q_map, queries, q_full.index(slot), q_s.index(slot))
            tma_load(saved_map, [row + block * BLOCK_Q], q_full.index(slot), lse_s.index(slot))
            mbarrier.wait(d_out_empty.index(slot), phase)
            mbarrier.expect(d_out_full.index(slot), BLOCK_Q * DIM * 2 + BLOCK_Q * 4)
            tma_load(d_out_map, queries, d_out_full.index(slot), d_out_s.index(slot))
            tma_load(saved_map, [saved_rows + row + block * BLOCK_Q], d_out_full.index(slot), delta_s.index(slot))
            step += 1


@gluon.jit
def start_of_stream(saved_s, slot, softcap, ROWS: gl.constexpr, OF_V: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Begin S from lse, or dP from delta."""
    if OF_V:
        start = start_of_scores(saved_s, slot, softcap, ROWS, S_LAYOUT)
    else:
        start = start_from(saved_s, slot, ROWS, S_LAYOUT)
    return start


@gluon.jit
def second_operand(
    s, saved_s, p_s, hand, step, block, kv_pos, bare, place, band, scaling,
    OF_V: gl.constexpr, NEGATIVE: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Make P of S and hand it over, or take it and make dS of dP: the left operand of a step's second product."""
    p_full, p_empty = hand
    slot = step & 1
    phase = (step // 2) & 1
    BLOCK_Q: gl.constexpr = s.shape[1]
    if OF_V:
        masked = (block < bare[0]) | (block >= bare[1])
        p, p_bent = probabilities(
            s, saved_s, slot, masked, block * BLOCK_Q, kv_pos, place, band, scaling, NEGATIVE, S_LAYOUT
        )
        mbarrier.wait(p_empty.index(slot), phase ^ 1)
        p_s.index(slot).store(to_thread_order(p_bent))
        mbarrier.arrive(p_full.index(slot), count=1)
    else:
        mbarrier.wait(p_full.index(slot), phase)
        p = from_thread_order(p_s.index(slot), BLOCK_Q, S_LAYOUT) * s
        mbarrier.arrive(p_empty.index(slot), count=1)
    return p


@gluon.jit
def wide_differentiate(
    grad_map, keys_s, first_s, second_s, saved_s, p_s, kv_full, first, second, hand, bounds, sizes, band, scaling,
    OF_V: gl.constexpr, CUT: gl.constexpr, TOP_LEFT: gl.constexpr, NEGATIVE: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Consume: dV of the program's keys (OF_V), or dK.

    Both walk alike. A product of the keys with the first stream (K with q, V with d_out) makes the scores of a step
    ahead of time; what becomes of them, P or dS, is multiplied with the second stream (d_out, q) of the step itself.
    """
    first_full, first_empty = first
    second_full, second_empty = second
    softcap = scaling[2]
    PACKED: gl.constexpr = bounds[0] is not None
    DTYPE: gl.constexpr = grad_map.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC_LAYOUT, k_width=2)

    sequence, kv_head, start, kv_base, _, len_kv, place = key_tile(bounds, sizes, band, CUT, TOP_LEFT, BLOCK_KV)
    edges, _ = query_blocks(start, place, band[0], band[1], BLOCK_Q, BLOCK_KV, True)
    bare = bare_queries(start, place, band, BLOCK_Q, BLOCK_KV)
    steps = (edges[3] - edges[0]) * (sizes[1] // sizes[2])
    kv_pos = start + gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(1, S_LAYOUT))
    if CUT:
        _, kv_start, kv_stop, _ = place
        if (steps > 0) & ((start < kv_start) | (start + BLOCK_KV > kv_stop)):
            mbarrier.wait(kv_full, 0)
            zero_outside(keys_s.index(0).reshape([BLOCK_KV, DIM]), start, kv_start, kv_stop)
            thread_barrier()

    acc = gl.zeros([BLOCK_KV, DIM], gl.float32, ACC_LAYOUT)
    if steps > 0:
        acc = warpgroup_mma_wait(0, deps=(acc,))  # the zeros must stand before the first product
        mbarrier.wait(first_full.index(0), 0)
        mbarrier.wait(kv_full, 0)
        s = product(
            keys_s.index(0).reshape([BLOCK_KV, DIM]),
            first_s.index(0).reshape([BLOCK_Q, DIM]).permute((1, 0)),
            start_of_stream(saved_s, 0, softcap, BLOCK_KV, OF_V, S_LAYOUT),
        )
        mbarrier.arrive(first_empty.index(0), count=1)
        block = edges[0]
        for step in range(steps):
            slot = step & 1
            phase = (step // 2) & 1
            ahead = (step + 1) & 1
            keys = keys_s.index(opaque_zero(block)).reshape([BLOCK_KV, DIM])
            p_or_ds = second_operand(
                s, saved_s, p_s, hand, step, block, kv_pos, bare, place, band, scaling, OF_V, NEGATIVE, S_LAYOUT
            )
            operand = gl.convert_layout(p_or_ds.to(DTYPE), OPERAND)
            mbarrier.wait(first_full.index(ahead), ((step + 1) // 2) & 1, pred=step + 1 < steps)
            s_start = start_of_stream(saved_s, ahead, softcap, BLOCK_KV, OF_V, S_LAYOUT)
            streamed = first_s.index(ahead).reshape([BLOCK_Q, DIM]).permute((1, 0))
            s_flight = warpgroup_mma(keys, streamed, s_start, is_async=True)
            mbarrier.wait(second_full.index(slot), phase)
            acc_flight = warpgroup_mma(operand, second_s.index(slot).reshape([BLOCK_Q, DIM]), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s_flight,))
            mbarrier.arrive(first_empty.index(ahead), count=1, pred=step + 1 < steps)
            acc, operand = warpgroup_mma_wait(0, deps=(acc_flight, operand))
            mbarrier.arrive(second_empty.index(slot), count=1)
            block += 1
            if block == edges[3]:  # the next head of the group
                block = edges[0]
    mbarrier.wait(kv_full, 0)  # over already, unless no query sees these keys
    if not OF_V:
        acc = acc * scaling[1]
    keys_s.index(0).reshape([BLOCK_KV, DIM]).store(acc.to(DTYPE))  # nobody else reads this tile
    fence_async_shared()
    tma_store(grad_map, box_at(sequence, kv_head, kv_base, len_kv, start, PACKED), keys_s.index(0))
    tma_store_wait(0)


@gluon.jit
def wide_key_gradients(
    q_map, d_out_map, k_map, v_map, saved_map, dk_map, dv_map,
    cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr,
    batch, heads_q, heads_kv, len_q, len_kv, tiles, section, left, right, scale_log2, scale, softcap,
    padded_rows, saved_rows,
    CUT: gl.constexpr, TOP_LEFT: gl.constexpr, NEGATIVE: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
    DIM: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile of 64 keys.

    Launched with 4 warps over tiles x heads_kv (x batch, unless packed) programs.
    """
    DTYPE: gl.constexpr = q_map.dtype
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * BLOCK_Q, 32], gl.float32)
    ROW_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    BAR_LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 1, BLOCK_Q, DIM], q_map.layout)
    d_out_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 1, BLOCK_Q, DIM], d_out_map.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [1, 1, 1, 1, BLOCK_KV, DIM], k_map.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [1, 1, 1, 1, BLOCK_KV, DIM], v_map.layout)
    p_s = gl.allocate_shared_memory(gl.float32, [2, 2 * BLOCK_Q, 32], P_LAYOUT)
    lse_s = gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], ROW_LAYOUT)
    delta_s = gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], ROW_LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR_LAYOUT)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR_LAYOUT)
    d_out_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR_LAYOUT)
    d_out_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR_LAYOUT)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR_LAYOUT)
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR_LAYOUT)
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR_LAYOUT)
    for slot in gl.static_range(2):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(d_out_full.index(slot), count=1)
        mbarrier.init(kv_full.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=2)
        mbarrier.init(d_out_empty.index(slot), count=2)
        mbarrier.init(p_full.index(slot), count=1)
        mbarrier.init(p_empty.index(slot), count=1)
    fence_async_shared()
    # The tuples stand inside the call: put into a variable first, one would lose its constants.
    warp_specialize([
        (wide_differentiate, (
            dv_map, k_s, q_s, d_out_s, lse_s, p_s, kv_full.index(0), (q_full, q_empty), (d_out_full, d_out_empty),
            (p_full, p_empty), (cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr),
            (batch, heads_q, heads_kv, len_q, len_kv, tiles, section), (left, right), (scale_log2, scale, softcap),
            True, CUT, TOP_LEFT, NEGATIVE, BLOCK_Q, BLOCK_KV, DIM,
        )),
        (wide_differentiate, (
            dk_map, v_s, d_out_s, q_s, delta_s, p_s, kv_full.index(1), (d_out_full, d_out_empty), (q_full, q_empty),
            (p_full, p_empty), (cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr),
            (batch, heads_q, heads_kv, len_q, len_kv, tiles, section), (left, right), (scale_log2, scale, softcap),
            False, CUT, TOP_LEFT, NEGATIVE, BLOCK_Q, BLOCK_KV, DIM,
        )),
        (load_queries, (
            (q_map, d_out_map, k_map, v_map, saved_map), (q_s, d_out_s, k_s, v_s, lse_s, delta_s),
            (q_full, q_empty, d_out_full, d_out_empty, kv_full), (cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr),
            (batch, heads_q, heads_kv, len_q, len_kv, tiles, section), (left, right), (padded_rows, saved_rows),
            CUT, TOP_LEFT, BLOCK_Q, BLOCK_KV, DIM,
        )),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# ---- dq -------------------------------------------------------------------------------------------------------------


@gluon.jit
def load_keys(
    maps, tiles, barriers, bounds, sizes, band,
    CUT: gl.constexpr, TOP_LEFT: gl.constexpr, BLOCK_KV: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Produce: the tile of queries once, in halves, then every block of keys and values that it sees."""
    q_map, d_out_map, k_map, v_map = maps
    q_s, d_out_s, k_s, v_s = tiles
    q_full, d_out_full, k_full, k_empty, v_full, v_empty = barriers
    PACKED: gl.constexpr = bounds[0] is not None
    sequence, head, start, kv_base, q_base, len_kv, place = query_tile(bounds, sizes, band, CUT, TOP_LEFT, 128)
    edges, _ = key_blocks(start, place, band[0], band[1], 128, BLOCK_KV, True)
    kv_head = head // (sizes[1] // sizes[2])
    for part in gl.static_range(2):
        queries = box_at(sequence, head, q_base, place[0], start + part * 64, PACKED)
        mbarrier.expect(q_full.index(part), 64 * DIM * 2)
        tma_load(q_map, queries, q_full.index(part), q_s.index(part))
    for block in range(edges[0], edges[3]):
        step = block - edges[0]
        keys = box_at(sequence, kv_head, kv_base, len_kv, block * BLOCK_KV, PACKED)
        slot = step & 1
        mbarrier.wait(k_empty.index(slot), ((step // 2) & 1) ^ 1)
        mbarrier.expect(k_full.index(slot), BLOCK_KV * DIM * 2)
        tma_load(k_map, keys, k_full.index(slot), k_s.index(slot))
        if step == 0:  # d_out comes after the first keys: S needs them before
            for part in gl.static_range(2):
                queries = box_at(sequence, head, q_base, place[0], start + part * 64, PACKED)
                mbarrier.expect(d_out_full.index(part), 64 * DIM * 2)
                tma_load(d_out_map, queries, d_out_full.index(part), d_out_s.index(part))
        mbarrier.wait(v_empty.index(0), (step & 1) ^ 1)
        mbarrier.expect(v_full.index(0), BLOCK_KV * DIM * 2)
        tma_load(v_map, keys, v_full.index(0), v_s.index(0))


@gluon.jit
def zero_hidden_keys(rows, block, place, PART: gl.constexpr):
    """Zero the rows of a streamed block that no query of the sequence sees; each consumer does half of the block."""
    _, kv_start, kv_stop, _ = place
    ROWS: gl.constexpr = rows.shape[0]
    start = block * ROWS
    if (start < kv_start) | (start + ROWS > kv_stop):
        HALF: gl.constexpr = ROWS // 2
        zero_outside(rows.slice(PART * HALF, HALF, dim=0), start + PART * HALF, kv_start, kv_stop)
        named_sync(BOTH, 256)


@gluon.jit
def differentiate_queries(
    dq_map, saved_ptr, tiles, barriers, bounds, sizes, band, scaling, rows,
    PART: gl.constexpr, CUT: gl.constexpr, TOP_LEFT: gl.constexpr, BLOCK_KV: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Consume: dq of 64 queries (PART 0 or 1 of the program's tile); tiles of scores are (64, block_kv) here."""
    q_s, d_out_s, k_s, v_s = tiles
    q_full, d_out_full, k_full, k_empty, v_full, v_empty = barriers
    padded_rows, saved_rows = rows
    scale_log2, scale, softcap = scaling
    PACKED: gl.constexpr = bounds[0] is not None
    DTYPE: gl.constexpr = dq_map.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC_LAYOUT, k_width=2)

    sequence, head, start, _, q_base, _, place = query_tile(bounds, sizes, band, CUT, TOP_LEFT, 128)
    edges, _ = key_blocks(start, place, band[0], band[1], 128, BLOCK_KV, True)
    own = start + PART * 64
    own_edges, _ = key_blocks(own, place, band[0], band[1], 64, BLOCK_KV, True)
    steps = edges[3] - edges[0]
    q_pos = own + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    row = saved_row(sequence, head, sizes[1], q_base, padded_rows, PACKED) + q_pos
    lse = gl.load(saved_ptr + row)  # negative, and over the scale unless a softcap stands between: so is delta
    delta = gl.load(saved_ptr + saved_rows + row)
    if softcap is None:
        lse = lse * scale_log2
    s_zero = gl.zeros([64, BLOCK_KV], gl.float32, S_LAYOUT)
    acc = gl.zeros([64, DIM], gl.float32, ACC_LAYOUT)
    if steps > 0:
        acc = warpgroup_mma_wait(0, deps=(acc,))  # the zeros must stand before the first product
        mbarrier.wait(q_full.index(PART), 0)
        mbarrier.wait(k_full.index(0), 0)
        if CUT:
            zero_hidden_keys(k_s.index(0).reshape([BLOCK_KV, DIM]), edges[0], place, PART)
        s = product(q_s.index(PART).reshape([64, DIM]), k_s.index(0).reshape([BLOCK_KV, DIM]).permute((1, 0)), s_zero)
        mbarrier.wait(d_out_full.index(PART), 0)
        for step in range(steps):
            block = edges[0] + step
            slot = step & 1
            ahead = (step + 1) & 1
            zero = opaque_zero(step + gl.program_id(0))
            q = q_s.index(PART + zero).reshape([64, DIM])
            d_out = d_out_s.index(PART + zero).reshape([64, DIM])
            mbarrier.wait(v_full.index(0), step & 1)
            v = v_s.index(0).reshape([BLOCK_KV, DIM])
            if CUT:
                zero_hidden_keys(v, block, place, PART)
            dp_flight = warpgroup_mma(d_out, v.permute((1, 0)), s_zero, use_acc=False, is_async=True)
            if softcap is None:
                s = s * scale_log2 + lse[:, None]
            else:
                s, slope = capped(s, lse[:, None], scale, softcap)
            if (block < own_edges[1]) | (block >= own_edges[2]):
                kv_pos = (block * BLOCK_KV + gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, S_LAYOUT)))[None, :]
                s = hide(s, q_pos[:, None], kv_pos, place, band, float("-inf"))
            p = gl.exp2(s)
            if softcap is not None:
                p = p * slope
            dp = warpgroup_mma_wait(0, deps=(dp_flight,))
            mbarrier.arrive(v_empty.index(0), count=1)
            ds_operand = gl.convert_layout((p * (dp + delta[:, None])).to(DTYPE), OPERAND)
            k = k_s.index(slot).reshape([BLOCK_KV, DIM])
            acc_flight = warpgroup_mma(ds_operand, k, acc, is_async=True)
            mbarrier.wait(k_full.index(ahead), ((step + 1) // 2) & 1, pred=step + 1 < steps)
            k_next = k_s.index(ahead).reshape([BLOCK_KV, DIM])
            if CUT:  # noqa: SIM102 - asked when the kernel is compiled
                if step + 1 < steps:
                    zero_hidden_keys(k_next, block + 1, place, PART)
            s_flight = warpgroup_mma(q, k_next.permute((1, 0)), s_zero, use_acc=False, is_async=True)
            acc, ds_operand = warpgroup_mma_wait(1, deps=(acc_flight, ds_operand))
            mbarrier.arrive(k_empty.index(slot), count=1)
            s = warpgroup_mma_wait(0, deps=(s_flight,))
    mbarrier.wait(q_full.index(PART), 0)  # over already, unless these queries see no key
    q_s.index(PART).reshape([64, DIM]).store((acc * scale).to(DTYPE))
    fence_async_shared()
    tma_store(dq_map, box_at(sequence, head, q_base, place[0], own, PACKED), q_s.index(PART))
    tma_store_wait(0)


@gluon.jit
def query_gradients(
    q_map, d_out_map, k_map, v_map, dq_map, saved_ptr,
    cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr,
    batch, heads_q, heads_kv, len_q, len_kv, tiles, section, left, right, scale_log2, scale, softcap,
    padded_rows, saved_rows,
    CUT: gl.constexpr, TOP_LEFT: gl.constexpr, BLOCK_KV: gl.constexpr, DIM: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dq of one tile of 128 queries.

    Launched with 4 warps over tiles x heads_q (x batch, unless packed) programs.
    """
    DTYPE: gl.constexpr = q_map.dtype
    BAR_LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 1, 64, DIM], q_map.layout)
    d_out_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 1, 64, DIM], d_out_map.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 1, BLOCK_KV, DIM], k_map.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [1, 1, 1, 1, BLOCK_KV, DIM], v_map.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR_LAYOUT)
    d_out_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR_LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR_LAYOUT)
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR_LAYOUT)
    v_full = gl.allocate_shared_memory(gl.int64, [1, 1], BAR_LAYOUT)
    v_empty = gl.allocate_shared_memory(gl.int64, [1, 1], BAR_LAYOUT)
    for slot in gl.static_range(2):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(d_out_full.index(slot), count=1)
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
    mbarrier.init(v_full.index(0), count=1)
    mbarrier.init(v_empty.index(0), count=2)
    fence_async_shared()
    # The tuples stand inside the call: put into a variable first, one would lose its constants.
    warp_specialize([
        (differentiate_queries, (
            dq_map, saved_ptr, (q_s, d_out_s, k_s, v_s), (q_full, d_out_full, k_full, k_empty, v_full, v_empty),
            (cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr),
            (batch, heads_q, heads_kv, len_q, len_kv, tiles, section), (left, right), (scale_log2, scale, softcap),
            (padded_rows, saved_rows), 0, CUT, TOP_LEFT, BLOCK_KV, DIM,
        )),
        (differentiate_queries, (
            dq_map, saved_ptr, (q_s, d_out_s, k_s, v_s), (q_full, d_out_full, k_full, k_empty, v_full, v_empty),
            (cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr),
            (batch, heads_q, heads_kv, len_q, len_kv, tiles, section), (left, right), (scale_log2, scale, softcap),
            (padded_rows, saved_rows), 1, CUT, TOP_LEFT, BLOCK_KV, DIM,
        )),
        (load_keys, (
            (q_map, d_out_map, k_map, v_map), (q_s, d_out_s, k_s, v_s),
            (q_full, d_out_full, k_full, k_empty, v_full, v_empty), (cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr),
            (batch, heads_q, heads_kv, len_q, len_kv, tiles, section), (left, right), CUT, TOP_LEFT, BLOCK_KV, DIM,
        )),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
