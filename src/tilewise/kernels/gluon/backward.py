"""The backward pass on Hopper for head dims 64 and 128: dk, dv and, if asked for, dq, from one pass over the scores.

A program owns 128 keys. Two consumer warpgroups take 64 of them each, and a producer warp streams blocks of queries
(q, d_out, lse, delta) of every query head that shares the key head, so no sum of dk or dv leaves the program. A block
of queries is a step:

    S = K Q' - lse/scale          P = exp2(S * scale_log2)         dV += P dO
    dP = V dO' - delta            dS = P * dP                      dK += dS Q             dQ = dS' K

P, and at head dim 128 dS, go from registers into the next product. dS also goes to shared memory, where both warpgroups
read all of it for their parts of dQ: half of the columns, or half of the rows where the block has 128. These are added
up over the programs in float32 by the tensor memory accelerator, in the order in which threads hold them; another
kernel brings them into rows (`backward_rows.finish_queries`). This addition is the only sum without a fixed order.

The order of the products keeps the tensor cores at work while a warpgroup computes: dP, dK of the step before, dV, dQ,
then S of the next step. dP and dK run under exp2, dV under the products of dS, dQ and S under the hand-over of dQ. At
the edge of the loop no product is in flight: ptxas would make each of them wait for itself.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from tilewise.kernels.gluon.backward_steps import (
    bare_queries,
    box_at,
    key_tile,
    probabilities,
    product,
    query_blocks,
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
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.kernels.gluon.sync import named_sync, opaque_zero

BOTH = gl.constexpr(8)  # the hardware barrier at which the two consumers meet


@gluon.jit
def load_queries(
    maps, tiles, barriers, bounds, sizes, band, rows,
    CUT: gl.constexpr, TOP_LEFT: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, DIM: gl.constexpr,
    Q_STAGES: gl.constexpr, D_OUT_STAGES: gl.constexpr,
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
            slot = step % Q_STAGES
            mbarrier.wait(q_empty.index(slot), ((step // Q_STAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), BLOCK_Q * DIM * 2 + BLOCK_Q * 4)
            tma_load(q_map, queries, q_full.index(slot), q_s.index(slot))
            tma_load(saved_map, [row + block * BLOCK_Q], q_full.index(slot), lse_s.index(slot))
            slot = step % D_OUT_STAGES
            mbarrier.wait(d_out_empty.index(slot), ((step // D_OUT_STAGES) & 1) ^ 1)
            mbarrier.expect(d_out_full.index(slot), BLOCK_Q * DIM * 2 + BLOCK_Q * 4)
            tma_load(d_out_map, queries, d_out_full.index(slot), d_out_s.index(slot))
            tma_load(saved_map, [saved_rows + row + block * BLOCK_Q], d_out_full.index(slot), delta_s.index(slot))
            step += 1


@gluon.jit
def scores_to_ds(
    s, dk, dv, ds_past, step, block, keys_v, tiles, barriers, kv_pos, bare, place, band, scaling,
    NEGATIVE: gl.constexpr, S_LAYOUT: gl.constexpr, OPERAND: gl.constexpr, Q_STAGES: gl.constexpr,
    D_OUT_STAGES: gl.constexpr, DK_FROM_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Take a step from S to dS: issue dP, dK of the step before (``ds_past``), and dV, which is left in flight.

    Gives dS, dK, dV in flight and the P that it is made from.
    """
    q_s, d_out_s, lse_s, delta_s = tiles
    q_empty, d_out_full = barriers
    DTYPE: gl.constexpr = q_s.dtype
    BLOCK_Q: gl.constexpr = q_s.shape[4]
    DIM: gl.constexpr = q_s.shape[5]
    slot = step % D_OUT_STAGES
    past = gl.maximum(step - 1, 0) % Q_STAGES
    d_out = d_out_s.index(slot).reshape([BLOCK_Q, DIM])
    mbarrier.wait(d_out_full.index(slot), (step // D_OUT_STAGES) & 1)
    dp_start = start_from(delta_s, slot, keys_v.shape[0], S_LAYOUT)
    dp_flight = warpgroup_mma(keys_v, d_out.permute((1, 0)), dp_start, is_async=True)
    dk_flight = warpgroup_mma(ds_past, q_s.index(past).reshape([BLOCK_Q, DIM]), dk, is_async=True)
    masked = (block < bare[0]) | (block >= bare[1])
    p, p_bent = probabilities(
        s, lse_s, step % Q_STAGES, masked, block * BLOCK_Q, kv_pos, place, band, scaling, NEGATIVE, S_LAYOUT
    )
    p_operand = gl.convert_layout(p.to(DTYPE), OPERAND)
    dv_flight = warpgroup_mma(p_operand, d_out, dv, is_async=True)
    if DK_FROM_REGISTERS:
        dp, dk, _ = warpgroup_mma_wait(1, deps=(dp_flight, dk_flight, ds_past))
    else:
        dp, dk = warpgroup_mma_wait(1, deps=(dp_flight, dk_flight))
    mbarrier.arrive(q_empty.index(past), count=1, pred=step > 0)
    return (p_bent * dp).to(DTYPE), dk, dv_flight, p_operand


@gluon.jit
def start_dq(step, k_all, ds_s, ds_full, PART: gl.constexpr, DQ_LAYOUT: gl.constexpr):
    """Start a warpgroup's part of dQ = dS' K, once both halves of dS are in shared memory."""
    DIM: gl.constexpr = k_all.shape[1]
    BLOCK_Q: gl.constexpr = ds_s.shape[2]
    tma_store_wait(0)  # by the thread that issued it; the barrier in `arrive` tells the others that dq_s is free
    mbarrier.arrive(ds_full.index(step & 1), count=1)
    mbarrier.wait(ds_full.index(step & 1), (step // 2) & 1)
    ds_all = ds_s.index(step & 1).permute((1, 0))
    if BLOCK_Q == 128:  # half of the rows
        ds_part, k_part = ds_all.slice(PART * 64, 64, dim=0), k_all
    else:  # half of the columns
        ds_part, k_part = ds_all, k_all.slice(PART * (DIM // 2), DIM // 2, dim=1)
    COLUMNS: gl.constexpr = k_part.shape[1]
    zero = gl.zeros([64, COLUMNS], gl.float32, DQ_LAYOUT)
    return warpgroup_mma(ds_part, k_part, zero, use_acc=False, is_async=True)


@gluon.jit
def over_queries(
    dq_acc_map, tiles, barriers, first, stop, steps, row, padded_rows, kv_pos, bare, place, band, scaling,
    PART: gl.constexpr, NEGATIVE: gl.constexpr, WITH_DQ: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
    DIM: gl.constexpr, Q_STAGES: gl.constexpr, D_OUT_STAGES: gl.constexpr, DK_FROM_REGISTERS: gl.constexpr,
    S_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Walk over the blocks [first, stop) of each query head, at least one step; gives dk and dv."""
    q_s, d_out_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s = tiles
    q_full, q_empty, d_out_full, d_out_empty, kv_full, ds_full = barriers
    ROWS: gl.constexpr = BLOCK_KV // 2
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC_LAYOUT, k_width=2)
    DQ_COLUMNS: gl.constexpr = DIM if BLOCK_Q == 128 else DIM // 2
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    dk = gl.zeros([ROWS, DIM], gl.float32, ACC_LAYOUT)
    dv = gl.zeros([ROWS, DIM], gl.float32, ACC_LAYOUT)
    # An accumulator may be set by ordinary instructions only while no product is in flight: pin the zeros here.
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s = product(
        k_s.index(0).reshape([BLOCK_KV, DIM]).slice(PART * ROWS, ROWS, dim=0),
        q_s.index(0).reshape([BLOCK_Q, DIM]).permute((1, 0)),
        start_of_scores(lse_s, 0, scaling[2], ROWS, S_LAYOUT),
    )
    mbarrier.wait(kv_full.index(1), 0)
    ds_zero = gl.zeros([ROWS, BLOCK_Q], q_s.dtype, S_LAYOUT)  # dK is added a step late: at first there is nothing
    if DK_FROM_REGISTERS:
        ds_operand = gl.convert_layout(ds_zero, OPERAND)
    else:
        ds_s.index(1).slice(PART * ROWS, ROWS, dim=0).store(ds_zero)
        fence_async_shared()
        thread_barrier()
    block = first
    for step in range(steps):
        # Without an index that might change, LLVM computes 24 descriptors ahead of the loop and holds them.
        zero = opaque_zero(block)
        k_all = k_s.index(zero).reshape([BLOCK_KV, DIM])
        v_own = v_s.index(zero).reshape([BLOCK_KV, DIM]).slice(PART * ROWS, ROWS, dim=0)
        ds, dk, dv_flight, p_operand = scores_to_ds(
            s, dk, dv, ds_operand if DK_FROM_REGISTERS else ds_s.index((step & 1) ^ 1).slice(PART * ROWS, ROWS, dim=0),
            step, block, v_own, (q_s, d_out_s, lse_s, delta_s), (q_empty, d_out_full), kv_pos, bare, place, band,
            scaling, NEGATIVE, S_LAYOUT, OPERAND, Q_STAGES, D_OUT_STAGES, DK_FROM_REGISTERS,
        )  # fmt: skip
        if WITH_DQ or not DK_FROM_REGISTERS:
            ds_s.index(step & 1).slice(PART * ROWS, ROWS, dim=0).store(ds)
            fence_async_shared()
        if DK_FROM_REGISTERS:
            ds_operand = gl.convert_layout(ds, OPERAND)
        if WITH_DQ:
            dq_flight = start_dq(step, k_all, ds_s, ds_full, PART, DQ_LAYOUT)
            dv, _ = warpgroup_mma_wait(1, deps=(dv_flight, p_operand))
        else:
            dv, _ = warpgroup_mma_wait(0, deps=(dv_flight, p_operand))
        mbarrier.arrive(d_out_empty.index(step % D_OUT_STAGES), count=1)
        # S of the next step; after the last one a product of what lies there, which nobody reads.
        ahead = (step + 1) % Q_STAGES
        mbarrier.wait(q_full.index(ahead), ((step + 1) // Q_STAGES) & 1, pred=step + 1 < steps)
        if WITH_DQ:
            dq_s.index(PART).store(to_thread_order(warpgroup_mma_wait(0, deps=(dq_flight,))))
        s_flight = warpgroup_mma(
            k_all.slice(PART * ROWS, ROWS, dim=0),
            q_s.index(ahead).reshape([BLOCK_Q, DIM]).permute((1, 0)),
            start_of_scores(lse_s, ahead, scaling[2], ROWS, S_LAYOUT),
            is_async=True,
        )
        if WITH_DQ:
            fence_async_shared()
            sums = (row + block * BLOCK_Q) * (DIM // 32) + PART * (2 * DQ_COLUMNS)
            tma_add(dq_acc_map, [sums, 0], dq_s.index(PART))
        block += 1
        if block == stop:  # the next head of the group
            block = first
            row += padded_rows
        s = warpgroup_mma_wait(0, deps=(s_flight,))
    q_last = q_s.index((steps - 1) % Q_STAGES).reshape([BLOCK_Q, DIM])
    if DK_FROM_REGISTERS:
        dk, _ = warpgroup_mma_wait(0, deps=(warpgroup_mma(ds_operand, q_last, dk, is_async=True), ds_operand))
    else:
        dk = product(ds_s.index((steps - 1) & 1).slice(PART * ROWS, ROWS, dim=0), q_last, dk)
    return dk, dv


@gluon.jit
def differentiate(
    maps, tiles, barriers, bounds, sizes, band, scaling, rows,
    PART: gl.constexpr, CUT: gl.constexpr, TOP_LEFT: gl.constexpr, NEGATIVE: gl.constexpr, WITH_DQ: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, DIM: gl.constexpr, Q_STAGES: gl.constexpr,
    D_OUT_STAGES: gl.constexpr, DK_FROM_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Consume: one warpgroup's 64 keys (PART 0 or 1) of the program's tile, and its part of dQ of all of them."""
    dq_acc_map, dk_map, dv_map = maps
    k_s, v_s, kv_full = tiles[2], tiles[3], barriers[4]
    PACKED: gl.constexpr = bounds[0] is not None
    DTYPE: gl.constexpr = dk_map.dtype
    ROWS: gl.constexpr = BLOCK_KV // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])

    sequence, kv_head, start, kv_base, q_base, len_kv, place = key_tile(bounds, sizes, band, CUT, TOP_LEFT, BLOCK_KV)
    edges, _ = query_blocks(start, place, band[0], band[1], BLOCK_Q, BLOCK_KV, True)
    own = start + PART * ROWS
    bare = bare_queries(own, place, band, BLOCK_Q, ROWS)
    group = sizes[1] // sizes[2]
    steps = (edges[3] - edges[0]) * group
    k_own = k_s.index(0).reshape([BLOCK_KV, DIM]).slice(PART * ROWS, ROWS, dim=0)
    v_own = v_s.index(0).reshape([BLOCK_KV, DIM]).slice(PART * ROWS, ROWS, dim=0)
    if CUT:
        _, kv_start, kv_stop, _ = place
        if (steps > 0) & ((start < kv_start) | (start + BLOCK_KV > kv_stop)):
            mbarrier.wait(kv_full.index(0), 0)
            mbarrier.wait(kv_full.index(1), 0)
            zero_outside(k_own, own, kv_start, kv_stop)
            zero_outside(v_own, own, kv_start, kv_stop)
            named_sync(BOTH, 256)
    dk = gl.zeros([ROWS, DIM], gl.float32, ACC_LAYOUT)
    dv = gl.zeros([ROWS, DIM], gl.float32, ACC_LAYOUT)
    if steps > 0:
        row = saved_row(sequence, kv_head * group, sizes[1], q_base, rows[0], PACKED)
        kv_pos = own + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        dk, dv = over_queries(
            dq_acc_map, tiles, barriers, edges[0], edges[3], steps, row, rows[0], kv_pos, bare, place, band, scaling,
            PART, NEGATIVE, WITH_DQ, BLOCK_Q, BLOCK_KV, DIM, Q_STAGES, D_OUT_STAGES, DK_FROM_REGISTERS, S_LAYOUT,
            ACC_LAYOUT,
        )  # fmt: skip
        named_sync(BOTH, 256)  # both warpgroups have read K for dQ

    # The tiles of V and K carry dV and dK out; even if nobody has read them, they must have arrived.
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(kv_full.index(1), 0)
    v_own.store(dv.to(DTYPE))
    k_own.store((dk * scaling[1]).to(DTYPE))
    fence_async_shared()
    keys = box_at(sequence, kv_head, kv_base, len_kv, own, PACKED)
    tma_store(dv_map, keys, v_s.index(0).slice(PART * ROWS, ROWS, dim=3))
    tma_store(dk_map, keys, k_s.index(0).slice(PART * ROWS, ROWS, dim=3))
    tma_store_wait(0)


@gluon.jit
def attention_backward(
    q_map, d_out_map, k_map, v_map, saved_map, dq_acc_map, dk_map, dv_map,
    cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr,
    batch, heads_q, heads_kv, len_q, len_kv, tiles, section, left, right, scale_log2, scale, softcap,
    padded_rows, saved_rows,
    CUT: gl.constexpr, TOP_LEFT: gl.constexpr, NEGATIVE: gl.constexpr, WITH_DQ: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr, DIM: gl.constexpr, Q_STAGES: gl.constexpr, D_OUT_STAGES: gl.constexpr,
    DK_FROM_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile of keys, and add its share of dq to that of all others, if WITH_DQ.

    Launched with 4 warps over tiles x heads_kv (x batch, unless packed) programs.
    """
    DTYPE: gl.constexpr = q_map.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_KV, BLOCK_Q], DTYPE)
    DQ_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 32], gl.float32)
    ROW_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    BAR_LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    DQ_ROWS: gl.constexpr = 2 * DIM if BLOCK_Q == 128 else DIM
    q_s = gl.allocate_shared_memory(DTYPE, [Q_STAGES, 1, 1, 1, BLOCK_Q, DIM], q_map.layout)
    d_out_s = gl.allocate_shared_memory(DTYPE, [D_OUT_STAGES, 1, 1, 1, BLOCK_Q, DIM], d_out_map.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [1, 1, 1, 1, BLOCK_KV, DIM], k_map.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [1, 1, 1, 1, BLOCK_KV, DIM], v_map.layout)
    ds_s = gl.allocate_shared_memory(DTYPE, [2, BLOCK_KV, BLOCK_Q], DS_LAYOUT)
    dq_s = gl.allocate_shared_memory(gl.float32, [2, DQ_ROWS, 32], DQ_LAYOUT)
    lse_s = gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK_Q], ROW_LAYOUT)
    delta_s = gl.allocate_shared_memory(gl.float32, [D_OUT_STAGES, BLOCK_Q], ROW_LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BAR_LAYOUT)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BAR_LAYOUT)
    d_out_full = gl.allocate_shared_memory(gl.int64, [D_OUT_STAGES, 1], BAR_LAYOUT)
    d_out_empty = gl.allocate_shared_memory(gl.int64, [D_OUT_STAGES, 1], BAR_LAYOUT)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR_LAYOUT)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR_LAYOUT)
    for slot in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=2)
    for slot in gl.static_range(D_OUT_STAGES):
        mbarrier.init(d_out_full.index(slot), count=1)
        mbarrier.init(d_out_empty.index(slot), count=2)
    for slot in gl.static_range(2):
        mbarrier.init(kv_full.index(slot), count=1)
        mbarrier.init(ds_full.index(slot), count=2)
    fence_async_shared()
    # The tuples stand inside the call: put into a variable first, one would lose its constants.
    warp_specialize([
        (differentiate, (
            (dq_acc_map, dk_map, dv_map), (q_s, d_out_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s),
            (q_full, q_empty, d_out_full, d_out_empty, kv_full, ds_full),
            (cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr),
            (batch, heads_q, heads_kv, len_q, len_kv, tiles, section), (left, right), (scale_log2, scale, softcap),
            (padded_rows, saved_rows), 0, CUT, TOP_LEFT, NEGATIVE, WITH_DQ, BLOCK_Q, BLOCK_KV, DIM, Q_STAGES,
            D_OUT_STAGES, DK_FROM_REGISTERS,
        )),
        (differentiate, (
            (dq_acc_map, dk_map, dv_map), (q_s, d_out_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s),
            (q_full, q_empty, d_out_full, d_out_empty, kv_full, ds_full),
            (cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr),
            (batch, heads_q, heads_kv, len_q, len_kv, tiles, section), (left, right), (scale_log2, scale, softcap),
            (padded_rows, saved_rows), 1, CUT, TOP_LEFT, NEGATIVE, WITH_DQ, BLOCK_Q, BLOCK_KV, DIM, Q_STAGES,
            D_OUT_STAGES, DK_FROM_REGISTERS,
        )),
        (load_queries, (
            (q_map, d_out_map, k_map, v_map, saved_map), (q_s, d_out_s, k_s, v_s, lse_s, delta_s),
            (q_full, q_empty, d_out_full, d_out_empty, kv_full), (cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr),
            (batch, heads_q, heads_kv, len_q, len_kv, tiles, section), (left, right), (padded_rows, saved_rows),
            CUT, TOP_LEFT, BLOCK_Q, BLOCK_KV, DIM, Q_STAGES, D_OUT_STAGES,
        )),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
