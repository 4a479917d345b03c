"""Softmax over the rows of a matrix, forward and backward: the online rule without the products around it.

Two ways to go over a row. Where it fits on the chip it is one tile, read once and written once. Longer rows are read
twice: a first pass finds row_max and row_sum block by block, a second one writes. The second pass goes backwards, so
that what was read last, and is likeliest to be in the L2 cache still, is read first.

A matrix is addressed as (outer, rows, cols), by strides; programs take tiles of rows along the grid's first axis, and
matrices along its second. UNIT and DENSE say what the compiler may know of the strides: see `offsets`.

The steps are those of the attention kernels but for the base of the exponentials, which here is e: the anchor is
subtracted before anything rounds the score, which costs one more multiplication where memory sets the pace.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's values have no types that a checker knows.

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.share import kernel


@triton.jit
def offsets(rows, cols, row_stride, col_stride, UNIT: tl.constexpr, DENSE: tl.constexpr):
    """Give the offsets of elements (rows, cols), which broadcast against each other.

    DENSE names the axis whose elements lie side by side. Then the stride of the other axis counts UNIT elements, 16
    bytes or one element, and the base lies on UNIT elements too: what must be known to load 16 bytes at once.
    """
    if DENSE == "cols":
        return rows * (row_stride * UNIT) + cols
    if DENSE == "rows":
        return rows + cols * (col_stride * UNIT)
    return rows * row_stride + cols * col_stride


@triton.jit
def matrix_base(pointer, outer, outer_stride, UNIT: tl.constexpr):
    """Point at one matrix; the outer stride counts UNIT elements."""
    base = pointer + outer * (outer_stride * UNIT)
    if UNIT > 1:
        base = tl.multiple_of(base, 16)
    return base


@triton.jit
def anchor_of(row_max):
    """Give what to subtract from a row's scores: its maximum, or 0 where that is -inf, so that exp never gives NaN."""
    return tl.where(row_max == -float("inf"), 0.0, row_max)


@triton.jit
def reciprocal(row_sum):
    """Give 1 / row_sum; a row without a sum has p = 0 everywhere, and any finite factor leaves it so."""
    return 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)


# ---- rows that fit on the chip --------------------------------------------------------------------------------------


@kernel
def softmax_once(
    x_ptr, out_ptr,
    x_outer_stride: tl.int64, x_row_stride: tl.int64, x_col_stride: tl.int64,
    out_outer_stride: tl.int64, out_row_stride: tl.int64, out_col_stride: tl.int64,
    outers: tl.int32, row_units: tl.int64, col_units: tl.int32,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, ROW_UNIT: tl.constexpr, COL_UNIT: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Compute the softmax of a tile of whole rows; there are row_units * ROW_UNIT of them, and columns likewise."""
    EXACT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (row < row_units * ROW_UNIT) & (col < col_units * COL_UNIT)
    x_place = offsets(row, col, x_row_stride, x_col_stride, UNIT, DENSE)
    out_place = offsets(row, col, out_row_stride, out_col_stride, UNIT, DENSE)
    for outer in range(tl.program_id(1), outers, tl.num_programs(1)):
        x = matrix_base(x_ptr, outer, x_outer_stride, UNIT)
        out = matrix_base(out_ptr, outer, out_outer_stride, UNIT)
        score = tl.load(x + x_place, mask=inside, other=-float("inf")).to(EXACT)
        row_max = tl.max(score, 1)
        anchor = anchor_of(row_max)
        p = tl.exp(score - anchor[:, None])
        row_sum = tl.sum(p, 1)
        p = p * reciprocal(row_sum)[:, None]
        tl.store(out + out_place, p.to(out_ptr.dtype.element_ty), mask=inside)


@kernel
def softmax_once_backward(
    p_ptr, dp_ptr, ds_ptr,
    p_outer_stride: tl.int64, p_row_stride: tl.int64, p_col_stride: tl.int64,
    dp_outer_stride: tl.int64, dp_row_stride: tl.int64, dp_col_stride: tl.int64,
    ds_outer_stride: tl.int64, ds_row_stride: tl.int64, ds_col_stride: tl.int64,
    outers: tl.int32, row_units: tl.int64, col_units: tl.int32,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, ROW_UNIT: tl.constexpr, COL_UNIT: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Compute ds = p * (dp - sum(p * dp)) of a tile of whole rows."""
    EXACT: tl.constexpr = tl.float64 if p_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (row < row_units * ROW_UNIT) & (col < col_units * COL_UNIT)
    p_place = offsets(row, col, p_row_stride, p_col_stride, UNIT, DENSE)
    dp_place = offsets(row, col, dp_row_stride, dp_col_stride, UNIT, DENSE)
    ds_place = offsets(row, col, ds_row_stride, ds_col_stride, UNIT, DENSE)
    for outer in range(tl.program_id(1), outers, tl.num_programs(1)):
        p = tl.load(matrix_base(p_ptr, outer, p_outer_stride, UNIT) + p_place, mask=inside, other=0.0).to(EXACT)
        dp = tl.load(matrix_base(dp_ptr, outer, dp_outer_stride, UNIT) + dp_place, mask=inside, other=0.0).to(EXACT)
        delta = tl.sum(p * dp, 1)
        ds = p * (dp - delta[:, None])
        tl.store(
            matrix_base(ds_ptr, outer, ds_outer_stride, UNIT) + ds_place, ds.to(ds_ptr.dtype.element_ty), mask=inside
        )


# ---- longer rows ----------------------------------------------------------------------------------------------------
#
# A block of BLOCK_COLS = LANES * SPAN columns is a tile (BLOCK_ROWS, LANES, SPAN) of threads' own short rows: each lane
# keeps a row_max and a row_sum of what it has seen, and only after the last block do lanes meet. So the loop has no
# barrier in it, and warps need not wait for each other.


@kernel
def softmax_online(
    x_ptr, out_ptr,
    x_outer_stride: tl.int64, x_row_stride: tl.int64, x_col_stride: tl.int64,
    out_outer_stride: tl.int64, out_row_stride: tl.int64, out_col_stride: tl.int64,
    outers: tl.int32, row_units: tl.int64, col_units: tl.int32,
    BLOCK_ROWS: tl.constexpr, LANES: tl.constexpr, SPAN: tl.constexpr, ROW_UNIT: tl.constexpr, COL_UNIT: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Compute the softmax of a tile of rows after another, each in two passes over blocks of columns."""
    EXACT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    BLOCK_COLS: tl.constexpr = LANES * SPAN
    rows, cols = row_units * ROW_UNIT, col_units * COL_UNIT
    blocks = tl.cdiv(cols, BLOCK_COLS)
    lane = tl.arange(0, LANES)[None, :, None] * SPAN + tl.arange(0, SPAN)[None, None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0)):
        row = (tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64))[:, None, None]
        for outer in range(tl.program_id(1), outers, tl.num_programs(1)):
            x = matrix_base(x_ptr, outer, x_outer_stride, UNIT)
            out = matrix_base(out_ptr, outer, out_outer_stride, UNIT)
            row_max = tl.full((BLOCK_ROWS, LANES), -float("inf"), EXACT)
            row_sum = tl.zeros((BLOCK_ROWS, LANES), EXACT)
            for block in range(blocks):
                col = block * BLOCK_COLS + lane
                place = offsets(row, col.to(tl.int64), x_row_stride, x_col_stride, UNIT, DENSE)
                inside = (row < rows) & (col < cols)
                score = tl.load(x + place, mask=inside, other=-float("inf"), eviction_policy="evict_last").to(EXACT)
                row_max_new = tl.maximum(row_max, tl.max(score, 2))
                anchor = anchor_of(row_max_new)
                p = tl.exp(score - anchor[:, :, None])
                rescale = tl.exp(row_max - anchor)
                row_sum = row_sum * rescale + tl.sum(p, 2)
                row_max = row_max_new

            anchor = anchor_of(tl.max(row_max, 1))
            row_sum = tl.sum(row_sum * tl.exp(row_max - anchor[:, None]), 1)
            share = reciprocal(row_sum)[:, None, None]
            for back in range(blocks):
                col = (blocks - 1 - back) * BLOCK_COLS + lane
                x_place = offsets(row, col.to(tl.int64), x_row_stride, x_col_stride, UNIT, DENSE)
                out_place = offsets(row, col.to(tl.int64), out_row_stride, out_col_stride, UNIT, DENSE)
                inside = (row < rows) & (col < cols)
                score = tl.load(x + x_place, mask=inside, other=-float("inf"), eviction_policy="evict_first").to(EXACT)
                p = tl.exp(score - anchor[:, None, None]) * share
                tl.store(out + out_place, p.to(out_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@kernel
def softmax_online_backward(
    p_ptr, dp_ptr, ds_ptr,
    p_outer_stride: tl.int64, p_row_stride: tl.int64, p_col_stride: tl.int64,
    dp_outer_stride: tl.int64, dp_row_stride: tl.int64, dp_col_stride: tl.int64,
    ds_outer_stride: tl.int64, ds_row_stride: tl.int64, ds_col_stride: tl.int64,
    outers: tl.int32, row_units: tl.int64, col_units: tl.int32,
    BLOCK_ROWS: tl.constexpr, LANES: tl.constexpr, SPAN: tl.constexpr, ROW_UNIT: tl.constexpr, COL_UNIT: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Compute ds = p * (dp - sum(p * dp)) of a tile of rows after another, each in two passes."""
    EXACT: tl.constexpr = tl.float64 if p_ptr.dtype.element_ty == tl.float64 else tl.float32
    BLOCK_COLS: tl.constexpr = LANES * SPAN
    rows, cols = row_units * ROW_UNIT, col_units * COL_UNIT
    blocks = tl.cdiv(cols, BLOCK_COLS)
    lane = tl.arange(0, LANES)[None, :, None] * SPAN + tl.arange(0, SPAN)[None, None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0)):
        row = (tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64))[:, None, None]
        for outer in range(tl.program_id(1), outers, tl.num_programs(1)):
            p_base = matrix_base(p_ptr, outer, p_outer_stride, UNIT)
            dp_base = matrix_base(dp_ptr, outer, dp_outer_stride, UNIT)
            ds_base = matrix_base(ds_ptr, outer, ds_outer_stride, UNIT)
            delta = tl.zeros((BLOCK_ROWS, LANES), EXACT)
            for block in range(blocks):
                col = block * BLOCK_COLS + lane
                p_place = offsets(row, col.to(tl.int64), p_row_stride, p_col_stride, UNIT, DENSE)
                dp_place = offsets(row, col.to(tl.int64), dp_row_stride, dp_col_stride, UNIT, DENSE)
                inside = (row < rows) & (col < cols)
                p = tl.load(p_base + p_place, mask=inside, other=0.0, eviction_policy="evict_last").to(EXACT)
                dp = tl.load(dp_base + dp_place, mask=inside, other=0.0, eviction_policy="evict_last").to(EXACT)
                delta += tl.sum(p * dp, 2)

            delta_row = tl.sum(delta, 1)[:, None, None]
            for back in range(blocks):
                col = (blocks - 1 - back) * BLOCK_COLS + lane
                p_place = offsets(row, col.to(tl.int64), p_row_stride, p_col_stride, UNIT, DENSE)
                dp_place = offsets(row, col.to(tl.int64), dp_row_stride, dp_col_stride, UNIT, DENSE)
                ds_place = offsets(row, col.to(tl.int64), ds_row_stride, ds_col_stride, UNIT, DENSE)
                inside = (row < rows) & (col < cols)
                p = tl.load(p_base + p_place, mask=inside, other=0.0, eviction_policy="evict_first").to(EXACT)
                dp = tl.load(dp_base + dp_place, mask=inside, other=0.0, eviction_policy="evict_first").to(EXACT)
                ds = p * (dp - delta_row)
                tl.store(ds_base + ds_place, ds.to(ds_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")
