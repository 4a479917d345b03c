"""What stands before and behind the backward kernels for Hopper, row by row, in plain Triton.

Before: two numbers a row, from which products start (`backward_steps` says why), laid out in whole blocks so that a
tensor map of one axis reads them: all of ``-lse / scale`` (under a softcap ``-lse`` in base 2), then all of ``-delta``.
Rows that see no key, and those that fill a block up, have -inf for the first, on the scale of S, so that p is zero.
Behind: dq out of the sums that all programs have added to, and dsink.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.share import kernel
from tilewise.kernels.triton.steps import FAR_LSE, base_of, clamped, load_rows, packed_tile, store_rows

SAVED_BLOCK = tl.constexpr(128)


@triton.jit
def saved_tile(tile, head, cu_q_ptr, batch, heads, len_q, padded_rows):
    """Place a block of saved rows: sequence, head, first row, where that is saved, the sequence's base and length.

    ``head`` counts the heads of all sequences, of packed ones the heads alone.
    """
    saved = head.to(tl.int64) * padded_rows + tile * SAVED_BLOCK
    sequence, start, base = head // heads, tile * SAVED_BLOCK, 0
    head = head % heads
    if cu_q_ptr is not None:
        _, _, start, base, len_q, _, _ = packed_tile(tile, cu_q_ptr, cu_q_ptr, batch, len_q, len_q, SAVED_BLOCK)
        sequence = 0
    return sequence, head, start, saved, base, len_q


@kernel
def prepare_rows(
    out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, cu_q_ptr, saved_ptr, dq_acc_ptr,
    out_batch_stride: tl.int64, out_head_stride: tl.int64, out_row_stride: tl.int64, out_dim_stride: tl.int64,
    d_out_batch_stride: tl.int64, d_out_head_stride: tl.int64, d_out_row_stride: tl.int64, d_out_dim_stride: tl.int64,
    lse_batch_stride: tl.int64, lse_head_stride: tl.int64, lse_row_stride: tl.int64,
    d_lse_batch_stride: tl.int64, d_lse_head_stride: tl.int64, d_lse_row_stride: tl.int64,
    batch: tl.int32, heads: tl.int32, len_q: tl.int32, padded_rows: tl.int32, saved_rows: tl.int64,
    lse_factor: tl.float32,
    DIM_V: tl.constexpr, BLOCK_DIM_V: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Save the numbers of ROWS rows and, if there is a dq_acc, set DIM of its sums a row to zero.

    Launched over ``padded_rows / ROWS`` times heads (times batch) programs.
    """
    PARTS: tl.constexpr = SAVED_BLOCK // ROWS
    programs = padded_rows // ROWS
    part = tl.program_id(0) % programs
    sequence, head, start, saved, base, stop = saved_tile(
        part // PARTS, tl.program_id(0) // programs, cu_q_ptr, batch, heads, len_q, padded_rows
    )
    start += part % PARTS * ROWS
    saved += part % PARTS * ROWS
    rows = start + tl.arange(0, ROWS)
    inside = rows < stop
    out = base_of(out_ptr, sequence, head, base, out_batch_stride, out_head_stride, out_row_stride, UNIT)
    d_out = base_of(d_out_ptr, sequence, head, base, d_out_batch_stride, d_out_head_stride, d_out_row_stride, UNIT)
    lse = base_of(lse_ptr, sequence, head, base, lse_batch_stride, lse_head_stride, lse_row_stride, 1)
    out = load_rows((out, out_row_stride, out_dim_stride), start, 0, stop, DIM_V, ROWS, BLOCK_DIM_V, True, UNIT)
    d_out = load_rows((d_out, d_out_row_stride, d_out_dim_stride), start, 0, stop, DIM_V, ROWS, BLOCK_DIM_V, True, UNIT)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if d_lse_ptr is not None:
        d_lse = base_of(d_lse_ptr, sequence, head, base, d_lse_batch_stride, d_lse_head_stride, d_lse_row_stride, 1)
        delta -= tl.load(d_lse + rows * d_lse_row_stride, mask=inside, other=0.0)
    lse = tl.load(lse + rows * lse_row_stride, mask=inside, other=-float("inf"))
    seen = tl.abs(lse) < FAR_LSE  # beyond, exp2 of what rounding leaves would overflow
    tl.store(saved_ptr + saved + tl.arange(0, ROWS), tl.where(seen, lse, float("inf")) * lse_factor)
    tl.store(saved_ptr + saved_rows + saved + tl.arange(0, ROWS), tl.where(seen, -delta, 0.0))
    if dq_acc_ptr is not None:
        sums = dq_acc_ptr + saved * DIM + tl.arange(0, ROWS * DIM)
        tl.store(sums, tl.zeros([ROWS * DIM], tl.float32))


@kernel
def finish_queries(
    dq_acc_ptr, dq_ptr, cu_q_ptr,
    dq_batch_stride: tl.int64, dq_head_stride: tl.int64, dq_row_stride: tl.int64, dq_dim_stride: tl.int64,
    batch: tl.int32, heads: tl.int32, len_q: tl.int32, padded_rows: tl.int32, scale: tl.float32,
    DIM_QK: tl.constexpr, DIM: tl.constexpr, BLOCK_Q: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Bring BLOCK_Q rows of sums from the order of threads (`backward_steps.to_thread_order`) into rows of dq.

    Launched over ``padded_rows / BLOCK_Q`` times heads (times batch) programs.
    """
    PARTS: tl.constexpr = SAVED_BLOCK // BLOCK_Q
    COLUMNS: tl.constexpr = DIM if BLOCK_Q == 128 else DIM // 2  # of one warpgroup
    programs = padded_rows // BLOCK_Q
    part = tl.program_id(0) % programs
    sequence, head, start, saved, base, stop = saved_tile(
        part // PARTS, tl.program_id(0) // programs, cu_q_ptr, batch, heads, len_q, padded_rows
    )
    start += part % PARTS * BLOCK_Q
    saved += part % PARTS * BLOCK_Q
    dq = tl.load(dq_acc_ptr + saved * DIM + tl.arange(0, BLOCK_Q * DIM))
    dq = dq.reshape(2, COLUMNS // 8, 4, 8, 4, 2, 2)  # warpgroup, column block, warp, row, column pair, row / 8, column
    if BLOCK_Q == 128:  # the warpgroups have halves of the rows
        dq = dq.permute(0, 2, 5, 3, 1, 4, 6).reshape(BLOCK_Q, DIM)
    else:  # they have halves of the columns
        dq = dq.permute(2, 5, 3, 0, 1, 4, 6).reshape(BLOCK_Q, DIM)
    to = base_of(dq_ptr, sequence, head, base, dq_batch_stride, dq_head_stride, dq_row_stride, UNIT)
    store_rows((to, dq_row_stride, dq_dim_stride), start, stop, dq * scale, DIM_QK, BLOCK_Q, DIM, UNIT)


@kernel
def sink_gradient(
    lse_ptr, saved_ptr, sink_ptr, cu_q_ptr, dsink_ptr,
    lse_batch_stride: tl.int64, lse_head_stride: tl.int64, lse_row_stride: tl.int64,
    sink_batch_stride: tl.int64, sink_head_stride: tl.int64,
    heads: tl.int32, len_q: tl.int32, padded_rows: tl.int32, saved_rows: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dsink of one sequence and head, (batch, heads): ``-sum(exp(sink - lse) * delta)`` over its rows."""
    head = tl.program_id(0) % heads
    sequence = tl.program_id(0) // heads
    sink = tl.load(sink_ptr + (sequence * sink_batch_stride + head * sink_head_stride)).to(tl.float32)
    base, saved = 0, tl.program_id(0).to(tl.int64) * padded_rows
    if cu_q_ptr is not None:
        total = len_q
        base = clamped(tl.load(cu_q_ptr + sequence), total)
        len_q = tl.maximum(clamped(tl.load(cu_q_ptr + sequence + 1), total) - base, 0)
        saved = head.to(tl.int64) * padded_rows + (base // SAVED_BLOCK + sequence) * SAVED_BLOCK
        sequence = 0
    lse = base_of(lse_ptr, sequence, head, base, lse_batch_stride, lse_head_stride, lse_row_stride, 1)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(0, len_q, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        row_lse = tl.load(lse + rows * lse_row_stride, mask=rows < len_q, other=float("inf"))
        row_lse = tl.where(row_lse == -float("inf"), float("inf"), row_lse)  # only beside a sink of -inf
        less_delta = tl.load(saved_ptr + saved_rows + saved + rows, mask=rows < len_q, other=0.0)
        acc += tl.exp(sink - row_lse) * less_delta
    tl.store(dsink_ptr + tl.program_id(0), tl.sum(acc, 0))
