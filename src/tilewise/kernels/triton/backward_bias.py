"""The gradients of the bias and of the sink, which are shared by many rows: each sum is one program's, in one order."""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.share import kernel
from tilewise.kernels.triton.backward import load_saved, tile_gradients
from tilewise.kernels.triton.steps import (
    LOG2E,
    add_pieces,
    base_of,
    clamped,
    key_blocks,
    key_range,
    load_rows,
    mods_of,
    option,
    packed_tile,
    pairs_of,
    scalar_of,
    visible_pairs,
)


@triton.jit
def add_tiles(
    acc, q_matrix, d_out_matrix, k_matrix, v_matrix, saved, q_start, place, left, right, seen, score_with, mask, drop,
    first, stop, DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_DIM_QK: tl.constexpr, BLOCK_DIM_V: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
    MASK_MOD: tl.constexpr,
):  # fmt: skip
    """Add ds of a tile of queries and the blocks of keys [first, stop) to acc, all on top of each other."""
    len_q = place[0]
    rows = q_start + tl.arange(0, BLOCK_Q)
    q = load_rows(q_matrix, q_start, 0, len_q, DIM_QK, BLOCK_Q, BLOCK_DIM_QK, True, UNIT)
    d_out = load_rows(d_out_matrix, q_start, 0, len_q, DIM_V, BLOCK_Q, BLOCK_DIM_V, True, UNIT)
    lse, delta = load_saved(saved, rows)
    q_pos = rows[:, None]
    q_source, d_out_source = (q_matrix, q_start, 0, len_q), (d_out_matrix, q_start, 0, len_q)
    for block in range(first, stop):
        start = block * BLOCK_KV
        kv_pos = (start + tl.arange(0, BLOCK_KV))[None, :]
        k = load_rows(k_matrix, start, seen[0], seen[1], DIM_QK, BLOCK_KV, BLOCK_DIM_QK, True, UNIT)
        v = load_rows(v_matrix, start, seen[0], seen[1], DIM_V, BLOCK_KV, BLOCK_DIM_V, True, UNIT)
        visible = visible_pairs(q_pos, kv_pos, place, left, right, mask, MASK_MOD)
        k_source, v_source = (k_matrix, start, seen[0], seen[1]), (v_matrix, start, seen[0], seen[1])
        score = tl.dot(q, k.T, input_precision=PRECISION)
        score = add_pieces(score, q_source, k_source, DIM_QK, BLOCK_DIM_QK, True, UNIT, PRECISION)
        dp = tl.dot(d_out, v.T, input_precision=PRECISION)
        dp = add_pieces(dp, d_out_source, v_source, DIM_V, BLOCK_DIM_V, True, UNIT, PRECISION)
        _, ds, _ = tile_gradients(
            score, dp, lse[:, None], delta[:, None], q_pos, kv_pos, place, score_with, drop, (visible,), EXACT, PACKED,
            SCORE_MOD, SCORE_GRADIENT,
        )  # fmt: skip
        acc += ds
    return acc


@kernel
def bias_gradient(
    q_ptr, k_ptr, v_ptr, d_out_ptr, saved_ptr, dbias_ptr,
    bias_ptr, mask_ptr, slopes_ptr, kv_start_ptr, kv_stop_ptr, cu_q_ptr, cu_k_ptr, seed_ptr,
    q_batch_stride: tl.int64, q_head_stride: tl.int64, q_row_stride: tl.int64, q_dim_stride: tl.int64,
    k_batch_stride: tl.int64, k_head_stride: tl.int64, k_row_stride: tl.int64, k_dim_stride: tl.int64,
    v_batch_stride: tl.int64, v_head_stride: tl.int64, v_row_stride: tl.int64, v_dim_stride: tl.int64,
    d_out_batch_stride: tl.int64, d_out_head_stride: tl.int64, d_out_row_stride: tl.int64, d_out_dim_stride: tl.int64,
    dbias_batch_stride: tl.int64, dbias_head_stride: tl.int64, dbias_q_stride: tl.int64, dbias_kv_stride: tl.int64,
    saved_batch_stride: tl.int64, saved_head_stride: tl.int64, saved_plane_stride: tl.int64,
    bias_batch_stride: tl.int64, bias_head_stride: tl.int64, bias_q_stride: tl.int64, bias_kv_stride: tl.int64,
    mask_batch_stride: tl.int64, mask_head_stride: tl.int64, mask_q_stride: tl.int64, mask_kv_stride: tl.int64,
    slopes_batch_stride: tl.int64, slopes_head_stride: tl.int64,
    batch: tl.int32, heads: tl.int32, group: tl.int32, len_q: tl.int32, len_kv: tl.int32, bias_width: tl.int32,
    q_tiles: tl.int32, kv_tiles: tl.int32,
    sequence_span: tl.int32, head_span: tl.int32, q_span: tl.int32, kv_span: tl.int32,
    left, right, scale: tl.float32, softcap, dropout, mods: tl.tuple,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_DIM_QK: tl.constexpr, BLOCK_DIM_V: tl.constexpr, UNIT: tl.constexpr, TOP_LEFT: tl.constexpr,
    Q_SUM: tl.constexpr, KV_SUM: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, MASK_MOD: tl.constexpr,
):  # fmt: skip
    """Compute one tile of dbias: the sum of ds over every axis along which the bias was broadcast.

    A span is what a program covers of an axis, in sequences, heads or tiles: 1, or all where the bias has size 1.
    """
    PACKED: tl.constexpr = cu_q_ptr is not None
    program = tl.program_id(0)
    kv_first = program % (kv_tiles // kv_span) * kv_span
    program = program // (kv_tiles // kv_span)
    q_first = program % (q_tiles // q_span) * q_span
    program = program // (q_tiles // q_span)
    head_first = program % (heads // head_span) * head_span
    sequence_first = program // (heads // head_span) * sequence_span
    if PACKED:
        sequence_first, _, q_start, q_base, len_q, kv_base, len_kv = packed_tile(
            q_first, cu_q_ptr, cu_k_ptr, batch, len_q, len_kv, BLOCK_Q
        )
    else:
        q_start, q_base, kv_base = q_first * BLOCK_Q, 0, 0
    acc = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    for turn in range(sequence_span * head_span * q_span):
        start = q_start + turn % q_span * BLOCK_Q
        head = head_first + turn // q_span % head_span
        sequence = sequence_first + turn // q_span // head_span
        kv_start, kv_stop = key_range(sequence, kv_start_ptr, kv_stop_ptr, len_kv, left, right)
        place = (len_q, kv_start, kv_stop, 0 if TOP_LEFT else len_kv - len_q)
        edges, seen = key_blocks(start, place, left, right, BLOCK_Q, BLOCK_KV, False)
        k = base_of(k_ptr, sequence, head // group, kv_base, k_batch_stride, k_head_stride, k_row_stride, UNIT)
        v = base_of(v_ptr, sequence, head // group, kv_base, v_batch_stride, v_head_stride, v_row_stride, UNIT)
        q = base_of(q_ptr, sequence, head, q_base, q_batch_stride, q_head_stride, q_row_stride, UNIT)
        g = base_of(d_out_ptr, sequence, head, q_base, d_out_batch_stride, d_out_head_stride, d_out_row_stride, UNIT)
        saved = base_of(saved_ptr, sequence, head, q_base, saved_batch_stride, saved_head_stride, 1, 1)
        bias = pairs_of(
            bias_ptr, sequence, head, q_base, bias_batch_stride, bias_head_stride, bias_q_stride, bias_kv_stride,
            bias_width,
        )  # fmt: skip
        mask = pairs_of(
            mask_ptr, sequence, head, q_base, mask_batch_stride, mask_head_stride, mask_q_stride, mask_kv_stride, len_kv
        )
        alibi = scalar_of(slopes_ptr, sequence, head, slopes_batch_stride, slopes_head_stride)
        drop = () if seed_ptr is None else (tl.load(seed_ptr), dropout, head, sequence)
        score_mod, mask_mod = mods_of(mods, sequence, head, SCORE_MOD, MASK_MOD)
        acc = add_tiles(
            acc, (q, q_row_stride, q_dim_stride), (g, d_out_row_stride, d_out_dim_stride),
            (k, k_row_stride, k_dim_stride), (v, v_row_stride, v_dim_stride), (saved, saved_plane_stride), start, place,
            left, right, seen, (scale, option(softcap), bias, alibi, score_mod), (mask, mask_mod), drop,
            tl.maximum(edges[0], kv_first), tl.minimum(edges[3], kv_first + kv_span),
            DIM_QK, DIM_V, BLOCK_Q, BLOCK_KV, BLOCK_DIM_QK, BLOCK_DIM_V, UNIT, EXACT, PACKED, PRECISION,
            SCORE_MOD, SCORE_GRADIENT, MASK_MOD,
        )  # fmt: skip
    at = base_of(
        dbias_ptr, sequence_first, head_first, q_base, dbias_batch_stride, dbias_head_stride, dbias_q_stride, 1
    )
    store_sums(
        at, dbias_q_stride, dbias_kv_stride, q_start, len_q, kv_first * BLOCK_KV, bias_width, acc, Q_SUM, KV_SUM,
        BLOCK_Q, BLOCK_KV,
    )  # fmt: skip


@triton.jit
def store_sums(
    base, q_stride, kv_stride, q_start, q_stop, kv_start, kv_stop, acc,
    Q_SUM: tl.constexpr, KV_SUM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Store a tile of dbias; an axis of size 1 gets the sum over the tile's."""
    rows = (q_start + tl.arange(0, BLOCK_Q))[:, None]
    columns = (kv_start + tl.arange(0, BLOCK_KV))[None, :]
    if Q_SUM:
        acc, rows, q_stop = tl.sum(acc, 0)[None, :], tl.arange(0, 1)[:, None], 1
    if KV_SUM:
        acc, columns, kv_stop = tl.sum(acc, 1)[:, None], tl.arange(0, 1)[None, :], 1
    pointers = base + (rows.to(tl.int64) * q_stride + columns.to(tl.int64) * kv_stride)
    tl.store(pointers, acc.to(base.dtype.element_ty), mask=(rows < q_stop) & (columns < kv_stop))


@kernel
def sink_gradient(
    saved_ptr, sink_ptr, dsink_ptr, cu_q_ptr,
    saved_batch_stride: tl.int64, saved_head_stride: tl.int64, saved_plane_stride: tl.int64,
    sink_batch_stride: tl.int64, sink_head_stride: tl.int64,
    heads: tl.int32, len_q: tl.int32, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Compute dsink of one sequence and head, (batch, heads): ``-sum(exp(sink - lse) * delta)`` over its rows."""
    head = tl.program_id(0) % heads
    sequence = tl.program_id(0) // heads
    q_base = 0
    if cu_q_ptr is not None:
        total = len_q
        q_base = clamped(tl.load(cu_q_ptr + sequence), total)
        len_q = tl.maximum(clamped(tl.load(cu_q_ptr + sequence + 1), total) - q_base, 0)
    saved = base_of(saved_ptr, sequence, head, q_base, saved_batch_stride, saved_head_stride, 1, 1)
    sink = tl.load(sink_ptr + (sequence * sink_batch_stride + head * sink_head_stride)).to(tl.float32) * LOG2E
    acc = tl.zeros([BLOCK_Q], tl.float32)
    for start in range(0, len_q, BLOCK_Q):
        rows = start + tl.arange(0, BLOCK_Q)
        lse, delta = load_saved((saved, saved_plane_stride), rows)
        acc -= tl.where(rows < len_q, tl.exp2(sink - lse) * delta, 0.0)
    tl.store(dsink_ptr + tl.program_id(0), tl.sum(acc, 0))
