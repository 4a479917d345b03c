"""The steps of a consumer of the forward pass: what it multiplies, waits for and releases at each block of keys.

A state is (acc, p, rows, rescale): the sums of values; p of the last block, rounded, whose values are still to be
added; (row_max, row_sum); and what acc must be multiplied by before. Each step starts its products, releases a block of
keys as soon as the scores are there and a block of values when they are added, and leaves the next p.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from tilewise.kernels.gluon.compat import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from tilewise.kernels.gluon.schedule import GROUP_ROWS, barriers
from tilewise.kernels.gluon.softmax import LOG2E, finish_rows, softmax_step, to_rows_of
from tilewise.kernels.gluon.sync import (
    arrive,
    arrive_if,
    named_arrive,
    named_sync,
    pack,
    rescale_if_moved,
    wait,
    wait_if,
)
from tilewise.kernels.triton.steps import scalar_of

TURN = gl.constexpr(8)  # the first of the hardware's barriers by which consumers take turns


@gluon.jit
def first_step(used, q, ring, lane, tile, score_with, G: gl.constexpr, PLAN: gl.constexpr):
    """Take the softmax of a tile's first block of keys, always masked; there are no values to add yet."""
    B: gl.constexpr = barriers(PLAN)
    k_buffers, v_buffers = ring
    factor, softcap = score_with
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
    how = (factor, softcap, PLAN.negative, seen, (stop - 1) * PLAN.block_kv)
    p, rows, rescale = softmax_step(score, (), how, True, PLAN.lazy)
    acc = gl.zeros([GROUP_ROWS, PLAN.dim_v], gl.float32, accumulator(PLAN.dim_v))
    return acc, operand_of(p, acc, v_buffers.dtype, PLAN), rows, rescale


@gluon.jit
def step(i, used, q, ring, lane, state, tile, score_with, MASKED: gl.constexpr, G: gl.constexpr, PLAN: gl.constexpr):
    """Multiply q with block i of the keys beside p(i-1) with the values before, then take the softmax."""
    B: gl.constexpr = barriers(PLAN)
    k_buffers, v_buffers = ring
    factor, softcap = score_with
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
    if PLAN.lazy:  # seldom taken, and under q k^T
        acc = rescale_if_moved(acc, to_rows_of(rescale, acc))
    acc_begun = add_values(p, v_buffers, stage_before, acc, PLAN)
    if PLAN.ping_pong:
        named_arrive(TURN + (G + 1) % PLAN.groups, 256)
    score = warpgroup_mma_wait(1, deps=(score_begun,))
    arrive(B.k_empty + stage, lane, PLAN.bar_off)
    # ptxas lifts the wait for p v to just behind the maximum, and packs exponentials, conversions and the rescale into
    # one block behind it. Every way to hold it back was slower: another consumer keeps the tensor cores busy meanwhile.
    how = (factor, softcap, PLAN.negative, seen, (stop - 1 - i) * PLAN.block_kv)
    p_next, rows, rescale = softmax_step(score, rows, how, MASKED, PLAN.lazy)
    acc, p = warpgroup_mma_wait(0, deps=(acc_begun, p))
    arrive(B.v_empty + stage_before, lane, PLAN.bar_off)
    if not PLAN.lazy:
        acc = acc * to_rows_of(rescale, acc)[:, None]
    return acc, operand_of(p_next, acc, v_buffers.dtype, PLAN), rows, rescale


@gluon.jit
def last_values(used, ring, lane, state, ends, PLAN: gl.constexpr):
    """Add the last block's values, with lse in their shadow; give the finished tile of out."""
    B: gl.constexpr = barriers(PLAN)
    _, v_buffers = ring
    acc, p, rows, rescale = state
    before = used - 1
    stage = before % PLAN.stages
    if PLAN.lazy:
        acc = acc * to_rows_of(rescale, acc)[:, None]
    wait(B.v_full + stage, (before // PLAN.stages) & 1, PLAN.bar_off)
    acc_begun = add_values(p, v_buffers, stage, acc, PLAN)
    inverse = end_rows(rows, ends, PLAN)
    acc, p = warpgroup_mma_wait(0, deps=(acc_begun, p))
    arrive(B.v_empty + stage, lane, PLAN.bar_off)
    return (acc * to_rows_of(inverse, acc)[:, None]).to(v_buffers.dtype)


@gluon.jit
def change_tiles(used, more, q, ring, lane, state, ends, tile, score_with, G: gl.constexpr, PLAN: gl.constexpr):
    """Do `first_step` of the next tile and `last_values` of this one at once, as `step` does within a tile.

    ``q`` and ``tile`` are the next one's, ``ends`` is this one's. Gives the finished tile of out and the next state.
    """
    B: gl.constexpr = barriers(PLAN)
    k_buffers, v_buffers = ring
    factor, softcap = score_with
    seen, stop = tile
    acc, p, rows, rescale = state
    stage = used % PLAN.stages
    before = used - 1
    stage_before = before % PLAN.stages
    wait_if(more, B.k_full + stage, (used // PLAN.stages) & 1, PLAN.bar_off)
    if PLAN.ping_pong:
        named_sync(TURN + G, 256)
    score_begun = begin_score(q, k_buffers, stage, PLAN)
    wait(B.v_full + stage_before, (before // PLAN.stages) & 1, PLAN.bar_off)
    if PLAN.lazy:
        acc = rescale_if_moved(acc, to_rows_of(rescale, acc))
    acc_begun = add_values(p, v_buffers, stage_before, acc, PLAN)
    if PLAN.ping_pong:
        named_arrive(TURN + (G + 1) % PLAN.groups, 256)
    inverse = end_rows(rows, ends, PLAN)
    score = warpgroup_mma_wait(1, deps=(score_begun,))
    arrive_if(more, B.k_empty + stage, lane, PLAN.bar_off)
    how = (factor, softcap, PLAN.negative, seen, (stop - 1) * PLAN.block_kv)
    p_next, rows, rescale = softmax_step(score, (), how, True, PLAN.lazy)
    acc, p = warpgroup_mma_wait(0, deps=(acc_begun, p))
    arrive(B.v_empty + stage_before, lane, PLAN.bar_off)
    out = (acc * to_rows_of(inverse, acc)[:, None]).to(v_buffers.dtype)
    acc = gl.zeros([GROUP_ROWS, PLAN.dim_v], gl.float32, accumulator(PLAN.dim_v))
    return out, (acc, operand_of(p_next, acc, v_buffers.dtype, PLAN), rows, rescale)


@gluon.jit
def end_rows(rows, ends, PLAN: gl.constexpr):
    """Store the rows' lse where it is asked for; give what their sums of values are multiplied by."""
    place, q_pos, lse_ptr, sinks, heads, total_q = ends
    _, head, sequence, len_q, _, _, q_base = place
    inverse, lse = finish_rows(rows, sink_of(sinks, sequence, head))
    if lse_ptr is not None:
        of_all = head if PLAN.packed else sequence * heads + head
        gl.store(lse_ptr + of_all.to(gl.int64) * total_q + (q_base + q_pos), lse, mask=q_pos < len_q)
    return inverse


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
def sink_of(sinks, sequence, head):
    """Give a head's sink in base 2 as (score,), or (); -inf behind the last packed sequence."""
    sink_ptr, batch_stride, head_stride = sinks
    if sink_ptr is None:
        sink = ()
    else:
        value = scalar_of(sink_ptr, gl.maximum(sequence, 0), head, batch_stride, head_stride)[0]
        sink = (gl.where(sequence < 0, -float("inf"), value * LOG2E),)
    return sink
