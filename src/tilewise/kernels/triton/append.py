"""What happens before a decoding step: new keys and values are written behind the cached ones, keys and queries turned.

A kernel of its own: a query may see what another program of the decoding kernel would still have to write, and queries
are turned once, not once a split.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.share import kernel
from tilewise.kernels.triton.decode import cache_row, page_of, tokens_held
from tilewise.kernels.triton.steps import clamped

TO_WHOLE = tl.constexpr(
    1.5 * 2**23
)  # added to a float32 and taken away again, it rounds to a whole number, ties to even


@triton.jit
def turned(x, rows, position, angles, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load rows (rows, BLOCK_DIM) of a matrix, turned by the angle of each row's position where there are angles.

    x is (pointer, offsets of the rows, dim_stride). Pairs are (0, 1), (2, 3), ... when INTERLEAVED, else (0, half), ...
    """
    base, offsets, dim_stride = x
    dims = tl.arange(0, BLOCK_DIM)
    inside = rows[:, None] & (dims < DIM)[None, :]
    tile = tl.load(base + (offsets[:, None] + dims[None, :] * dim_stride), mask=inside, other=0.0)
    if len(angles) > 0:
        cos_ptr, sin_ptr, cos_stride, sin_stride, cos_dim_stride, sin_dim_stride, positions, half = angles
        if INTERLEAVED:
            pair, is_first = dims // 2, dims % 2 == 0
            partner = tl.where(is_first, dims + 1, dims - 1)
        else:
            is_first = dims < half
            pair = tl.where(is_first, dims, dims - half)
            partner = tl.where(is_first, dims + half, dims - half)
        turning = inside & (dims < 2 * half)[None, :]
        other = tl.load(base + (offsets[:, None] + partner[None, :] * dim_stride), mask=turning, other=0.0)
        row = clamped(position, positions - 1)[:, None]
        cos = tl.load(cos_ptr + (row * cos_stride + pair[None, :] * cos_dim_stride), mask=turning, other=1.0)
        sin = tl.load(sin_ptr + (row * sin_stride + pair[None, :] * sin_dim_stride), mask=turning, other=0.0)
        other = tl.where(is_first[None, :], -other.to(tl.float32), other.to(tl.float32))
        tile = (tile.to(tl.float32) * cos.to(tl.float32) + other * sin.to(tl.float32)).to(tile.dtype)
    return tile


@triton.jit
def stored_as(x, scale_ptr, head, stored: tl.constexpr):
    """Give rows in the type that a cache stores: divided by the head's scale and held to the type's range."""
    if scale_ptr is not None:
        x = x.to(tl.float32) / tl.load(scale_ptr + head).to(tl.float32)[:, None]
        if stored == tl.int8:
            x = tl.minimum(tl.maximum(x, -128.0), 127.0)
            x = (x + TO_WHOLE) - TO_WHOLE
        else:
            limit: tl.constexpr = 448.0 if stored == tl.float8e4nv else 57344.0
            x = tl.minimum(tl.maximum(x, -limit), limit)
    return x.to(stored)


@triton.jit
def write_rows(tile, matrix, page, slot, head, inside, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Write rows of new keys or values where they belong."""
    base, page_stride, head_stride, row_stride, dim_stride = matrix
    dims = tl.arange(0, BLOCK_DIM)
    offsets = page * page_stride + slot * row_stride + head * head_stride
    mask = inside[:, None] & (dims < DIM)[None, :]
    tl.store(base + (offsets[:, None] + dims[None, :] * dim_stride), tile, mask=mask)


@kernel
def append_tokens(
    q_ptr, turned_ptr, k_new_ptr, v_new_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr,
    seqlens_ptr, table_ptr, batch_idx_ptr, k_scale_ptr, v_scale_ptr,
    q_batch_stride: tl.int64, q_head_stride: tl.int64, q_row_stride: tl.int64, q_dim_stride: tl.int64,
    k_new_batch_stride: tl.int64, k_new_head_stride: tl.int64, k_new_row_stride: tl.int64, k_new_dim_stride: tl.int64,
    v_new_batch_stride: tl.int64, v_new_head_stride: tl.int64, v_new_row_stride: tl.int64, v_new_dim_stride: tl.int64,
    k_batch_stride: tl.int64, k_head_stride: tl.int64, k_row_stride: tl.int64, k_dim_stride: tl.int64,
    v_batch_stride: tl.int64, v_head_stride: tl.int64, v_row_stride: tl.int64, v_dim_stride: tl.int64,
    cos_row_stride: tl.int64, cos_dim_stride: tl.int64, sin_row_stride: tl.int64, sin_dim_stride: tl.int64,
    table_row_stride: tl.int64, table_column_stride: tl.int64,
    parts: tl.int32, key_parts: tl.int32, heads_q: tl.int32, heads_kv: tl.int32, len_q: tl.int32, appended: tl.int32,
    capacity: tl.int32, cache_rows: tl.int32, page_size: tl.int32, positions: tl.int32, half: tl.int32,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM_QK: tl.constexpr, BLOCK_DIM_V: tl.constexpr, INTERLEAVED: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Write some rows (tokens x heads) of k and v into the caches, or turn some rows of q into ``turned_ptr``.

    Tokens that do not fit are dropped. Without a DIAGONAL all queries stand at one place, behind the cached tokens.
    """
    part = tl.program_id(0) % parts
    sequence = (tl.program_id(0) // parts).to(tl.int64)
    before = tokens_held(seqlens_ptr, sequence, capacity)
    if cos_ptr is None:
        angles = ()
    else:
        angles = (
            cos_ptr, sin_ptr, cos_row_stride, sin_row_stride, cos_dim_stride, sin_dim_stride, positions, half
        )  # fmt: skip
    if part < key_parts:
        row = part * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        token, head = row // heads_kv, row % heads_kv
        slot = tl.maximum(before, 0) + token
        inside = (token < appended) & (slot < capacity)
        if table_ptr is None:
            page = cache_row(batch_idx_ptr, sequence, cache_rows)
        else:
            table = (table_ptr + sequence * table_row_stride, table_column_stride, cache_rows, page_size)
            page, slot = page_of(table, slot, inside), slot % page_size
        k_rows = sequence * k_new_batch_stride + token * k_new_row_stride + head * k_new_head_stride
        k = (k_new_ptr, k_rows, k_new_dim_stride)
        k = turned(k, inside, before + token, angles, DIM_QK, BLOCK_DIM_QK, INTERLEAVED)
        k_matrix = (k_ptr, k_batch_stride, k_head_stride, k_row_stride, k_dim_stride)
        k = stored_as(k, k_scale_ptr, head, k_ptr.dtype.element_ty)
        write_rows(k, k_matrix, page, slot, head, inside, DIM_QK, BLOCK_DIM_QK)
        v_rows = sequence * v_new_batch_stride + token * v_new_row_stride + head * v_new_head_stride
        v = (v_new_ptr, v_rows, v_new_dim_stride)
        v = turned(v, inside, before + token, (), DIM_V, BLOCK_DIM_V, INTERLEAVED)
        v_matrix = (v_ptr, v_batch_stride, v_head_stride, v_row_stride, v_dim_stride)
        v = stored_as(v, v_scale_ptr, head, v_ptr.dtype.element_ty)
        write_rows(v, v_matrix, page, slot, head, inside, DIM_V, BLOCK_DIM_V)
    elif turned_ptr is not None:
        row = (part - key_parts) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        q_pos, head = row // heads_q, row % heads_q
        inside = q_pos < len_q
        position = before + q_pos if DIAGONAL else before + q_pos * 0
        q_rows = sequence * q_batch_stride + q_pos * q_row_stride + head * q_head_stride
        q = turned((q_ptr, q_rows, q_dim_stride), inside, position, angles, DIM_QK, BLOCK_DIM_QK, INTERLEAVED)
        dims = tl.arange(0, BLOCK_DIM_QK)
        cells = ((sequence * len_q + q_pos) * heads_q + head)[:, None] * DIM_QK + dims[None, :]
        tl.store(turned_ptr + cells, q, mask=inside[:, None] & (dims < DIM_QK)[None, :])
