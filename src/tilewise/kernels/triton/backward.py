"""The backward pass: each tile of probabilities is computed again from lse, and no two programs add to the same place.

1. `prepare_rows`: ``delta = sum(d_out * out) - d_lse``, and lse in base 2, a number of each a row.
2. `key_gradients`: a program owns a tile of keys and walks over the queries that see it, of every head that shares it.
3. `query_gradients`: a program owns a tile of queries and walks over the keys that it sees.

So every sum has one order, and results are the same bits in each run; the price is that the scores are computed twice.
Which queries see a tile of keys is the rule of the forward pass with the roles swapped. The gradients of bias and sink
stand in ``backward_bias.py``.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.share import kernel
from tilewise.kernels.triton.steps import (
    FAR_LSE,
    LOG2E,
    add_pieces,
    base_of,
    block_start,
    exponent_factor,
    finish_score,
    is_kept,
    key_blocks,
    key_range,
    load_rows,
    mods_of,
    option,
    own_piece,
    packed_tile,
    pairs_of,
    parts_of,
    query_blocks,
    scalar_of,
    store_rows,
    through_mod,
    visible_pairs,
    zero_unseen,
)


@kernel
def prepare_rows(
    out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, saved_ptr,
    out_batch_stride: tl.int64, out_head_stride: tl.int64, out_row_stride: tl.int64, out_dim_stride: tl.int64,
    d_out_batch_stride: tl.int64, d_out_head_stride: tl.int64, d_out_row_stride: tl.int64, d_out_dim_stride: tl.int64,
    lse_batch_stride: tl.int64, lse_head_stride: tl.int64, lse_row_stride: tl.int64,
    d_lse_batch_stride: tl.int64, d_lse_head_stride: tl.int64, d_lse_row_stride: tl.int64,
    saved_batch_stride: tl.int64, saved_head_stride: tl.int64, saved_plane_stride: tl.int64,
    tiles: tl.int32, heads: tl.int32, len_q: tl.int32,
    DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_DIM_V: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Save what the other kernels need of each row: lse in base 2, then ``delta = sum(d_out * out) - d_lse``.

    Saved lse is 0 where a row has seen nothing: its scores are all -inf. It is inf, so that p is 0, where float32 no
    longer tells scores apart: exp2 of what rounding leaves there would overflow. Packed sequences need no telling apart
    here.
    """
    program = tl.program_id(0)
    start = program % tiles * BLOCK_Q
    head = program // tiles % heads
    sequence = program // tiles // heads
    out = base_of(out_ptr, sequence, head, 0, out_batch_stride, out_head_stride, out_row_stride, UNIT)
    d_out = base_of(d_out_ptr, sequence, head, 0, d_out_batch_stride, d_out_head_stride, d_out_row_stride, UNIT)
    lse = base_of(lse_ptr, sequence, head, 0, lse_batch_stride, lse_head_stride, lse_row_stride, 1)
    saved = base_of(saved_ptr, sequence, head, 0, saved_batch_stride, saved_head_stride, 1, 1)
    out = load_rows((out, out_row_stride, out_dim_stride), start, 0, len_q, DIM_V, BLOCK_Q, BLOCK_DIM_V, True, UNIT)
    d_out = load_rows(
        (d_out, d_out_row_stride, d_out_dim_stride), start, 0, len_q, DIM_V, BLOCK_Q, BLOCK_DIM_V, True, UNIT
    )
    rows = start + tl.arange(0, BLOCK_Q)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if d_lse_ptr is not None:
        d_lse = base_of(d_lse_ptr, sequence, head, 0, d_lse_batch_stride, d_lse_head_stride, d_lse_row_stride, 1)
        delta -= tl.load(d_lse + rows * d_lse_row_stride, mask=rows < len_q, other=0.0)
    lse = tl.load(lse + rows * lse_row_stride, mask=rows < len_q, other=0.0)
    far = tl.where(lse == -float("inf"), 0.0, float("inf"))
    tl.store(saved + rows, tl.where(tl.abs(lse) < FAR_LSE, lse * LOG2E, far), mask=rows < len_q)
    tl.store(saved + saved_plane_stride + rows, delta, mask=rows < len_q)


@triton.jit
def load_saved(saved, rows):
    """Load lse, in base 2, and delta of a tile's rows; saved is (base, plane_stride).

    Rows behind the last query may hold anything. The memory ends one tile later than the rows: no mask is needed.
    It is one load with each number twice, (rows, 4), since Triton takes a load of fewer numbers than threads for cheap:
    every thread would copy all that it needs by itself, 4 bytes at a time.
    """
    base, plane_stride = saved
    planes = (tl.arange(0, 4) % 2)[None, :] * plane_stride
    both = tl.reshape(tl.load(base + (rows[:, None] + planes)), [rows.shape[0], 2, 2])
    both, _ = tl.split(tl.permute(both, [0, 2, 1]))
    return tl.split(both)


@triton.jit
def tile_gradients(
    score, dp, lse, delta, q_pos, kv_pos, place, score_with, drop, visible, EXACT: tl.constexpr, PACKED: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Give p as dropout left it, ds before the score_mod, and the softcap's slope of one tile.

    They come from ``dot(q, k)`` and ``dot(d_out, v)``.
    """
    score, derivative, given = finish_score(score, q_pos, kv_pos, place, score_with, EXACT, PACKED, SCORE_MOD)
    p = tl.exp2(score * exponent_factor(score_with) - lse)
    if len(visible) > 0:
        p = tl.where(visible[0], p, 0.0)
    p_kept = p
    if len(drop) > 0:
        kept = is_kept(q_pos, kv_pos, drop)
        p_kept = tl.where(kept, p / (1.0 - drop[1]), 0.0)
        dp = tl.where(kept, dp / (1.0 - drop[1]), 0.0)
    ds = p * (dp - delta)
    if len(visible) > 0:  # dp and the slope are NaN where a hidden value or key is
        ds = tl.where(visible[0], ds, 0.0)
        if len(derivative) > 0:
            derivative = (tl.where(visible[0], derivative[0], 0.0),)
    ds = through_mod(ds, given, q_pos, kv_pos, place, score_with, visible, SCORE_GRADIENT)
    return p_kept, ds, derivative


# ---- the gradients of keys and values -------------------------------------------------------------------------------


@triton.jit
def over_queries(
    k, v, k_source, v_source, piece, dk, dv, q_matrix, d_out_matrix, saved, kv_pos, place, left, right, seen,
    score_with, mask, drop, blocks, entries,
    MASKED: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_DIM_QK: tl.constexpr, BLOCK_DIM_V: tl.constexpr, UNIT: tl.constexpr,
    EXACT: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, MASK_MOD: tl.constexpr, LIST_Q: tl.constexpr,
):  # fmt: skip
    """Take a tile of keys over the blocks of queries [first, stop); tiles of scores are (block_kv, block_q) here.

    With entries, blocks are counted in a list of tiles of LIST_Q queries.
    """
    first, stop = blocks
    if LIST_Q > 0:
        coming = block_start(entries, first, stop, LIST_Q, BLOCK_Q)
    for block in range(first, stop):
        if LIST_Q > 0:
            start = coming
            coming = block_start(entries, block + 1, stop, LIST_Q, BLOCK_Q)
        else:
            start = block * BLOCK_Q
        rows = start + tl.arange(0, BLOCK_Q)
        q_pos = rows[None, :]
        q = load_rows(q_matrix, start, seen[0], seen[1], DIM_QK, BLOCK_Q, BLOCK_DIM_QK, MASKED, UNIT)
        d_out = load_rows(d_out_matrix, start, seen[0], seen[1], DIM_V, BLOCK_Q, BLOCK_DIM_V, MASKED, UNIT)
        lse, delta = load_saved(saved, rows)
        q_source, d_out_source = (q_matrix, start, seen[0], seen[1]), (d_out_matrix, start, seen[0], seen[1])
        score = tl.dot(k, q.T, input_precision=PRECISION)
        score = add_pieces(score, k_source, q_source, DIM_QK, BLOCK_DIM_QK, MASKED, UNIT, PRECISION)
        dp = tl.dot(v, d_out.T, input_precision=PRECISION)
        dp = add_pieces(dp, v_source, d_out_source, DIM_V, BLOCK_DIM_V, MASKED, UNIT, PRECISION)
        visible = (visible_pairs(q_pos, kv_pos, place, left, right, mask, MASK_MOD),) if MASKED else ()
        p, ds, derivative = tile_gradients(
            score, dp, lse[None, :], delta[None, :], q_pos, kv_pos, place, score_with, drop, visible, EXACT, PACKED,
            SCORE_MOD, SCORE_GRADIENT,
        )  # fmt: skip
        if NEED_DV:
            d_out = own_piece(d_out, d_out_source, (), piece, DIM_V, BLOCK_DIM_V, MASKED, UNIT)
            dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
        if NEED_DK:
            if len(derivative) > 0:
                ds = ds * derivative[0]
            q = own_piece(q, q_source, (), piece, DIM_QK, BLOCK_DIM_QK, MASKED, UNIT)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@kernel
def key_gradients(
    q_ptr, k_ptr, v_ptr, d_out_ptr, saved_ptr, dk_ptr, dv_ptr,
    bias_ptr, mask_ptr, slopes_ptr, kv_start_ptr, kv_stop_ptr, cu_q_ptr, cu_k_ptr, seed_ptr,
    q_batch_stride: tl.int64, q_head_stride: tl.int64, q_row_stride: tl.int64, q_dim_stride: tl.int64,
    k_batch_stride: tl.int64, k_head_stride: tl.int64, k_row_stride: tl.int64, k_dim_stride: tl.int64,
    v_batch_stride: tl.int64, v_head_stride: tl.int64, v_row_stride: tl.int64, v_dim_stride: tl.int64,
    d_out_batch_stride: tl.int64, d_out_head_stride: tl.int64, d_out_row_stride: tl.int64, d_out_dim_stride: tl.int64,
    dk_batch_stride: tl.int64, dk_head_stride: tl.int64, dk_row_stride: tl.int64, dk_dim_stride: tl.int64,
    dv_batch_stride: tl.int64, dv_head_stride: tl.int64, dv_row_stride: tl.int64, dv_dim_stride: tl.int64,
    saved_batch_stride: tl.int64, saved_head_stride: tl.int64, saved_plane_stride: tl.int64,
    bias_batch_stride: tl.int64, bias_head_stride: tl.int64, bias_q_stride: tl.int64, bias_kv_stride: tl.int64,
    mask_batch_stride: tl.int64, mask_head_stride: tl.int64, mask_q_stride: tl.int64, mask_kv_stride: tl.int64,
    slopes_batch_stride: tl.int64, slopes_head_stride: tl.int64,
    tiles: tl.int32, batch: tl.int32, heads: tl.int32, group: tl.int32, len_q: tl.int32, len_kv: tl.int32,
    bias_width: tl.int32, left, right, scale: tl.float32, softcap, dropout, mods: tl.tuple,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_DIM_QK: tl.constexpr, BLOCK_DIM_V: tl.constexpr, UNIT: tl.constexpr, TOP_LEFT: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
    MASK_MOD: tl.constexpr, LIST_Q: tl.constexpr, LIST_KV: tl.constexpr, LIST_BARE: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile of keys, summed over the query heads that share it; either may be None.

    Where a head dim comes in pieces, only one may be asked for, whose pieces the grid's second axis counts.
    """
    PACKED: tl.constexpr = cu_q_ptr is not None
    BARE: tl.constexpr = mask_ptr is None and MASK_MOD is None
    piece = tl.program_id(1) if (DIM_V > BLOCK_DIM_V if dk_ptr is None else DIM_QK > BLOCK_DIM_QK) else 0
    program = tl.program_id(0)  # early keys are seen by most queries when causal: longest first
    tile, kv_head = program % tiles, program // tiles % (heads // group)
    if PACKED:
        sequence, _, start, kv_base, len_kv, q_base, len_q = packed_tile(
            tile, cu_k_ptr, cu_q_ptr, batch, len_kv, len_q, BLOCK_KV
        )
    else:
        sequence, start, kv_base, q_base = program // tiles // (heads // group), tile * BLOCK_KV, 0, 0
    if start >= len_kv:
        return
    kv_start, kv_stop = key_range(sequence, kv_start_ptr, kv_stop_ptr, len_kv, left, right)
    place = (len_q, kv_start, kv_stop, 0 if TOP_LEFT else len_kv - len_q)
    edges, seen = query_blocks(start, place, left, right, BLOCK_Q, BLOCK_KV, BARE)

    k = base_of(k_ptr, sequence, kv_head, kv_base, k_batch_stride, k_head_stride, k_row_stride, UNIT)
    v = base_of(v_ptr, sequence, kv_head, kv_base, v_batch_stride, v_head_stride, v_row_stride, UNIT)
    k_source = ((k, k_row_stride, k_dim_stride), start, kv_start, kv_stop)
    v_source = ((v, v_row_stride, v_dim_stride), start, kv_start, kv_stop)
    k = load_rows(k_source[0], start, kv_start, kv_stop, DIM_QK, BLOCK_KV, BLOCK_DIM_QK, True, UNIT)
    v = load_rows(v_source[0], start, kv_start, kv_stop, DIM_V, BLOCK_KV, BLOCK_DIM_V, True, UNIT)
    kv_pos = (start + tl.arange(0, BLOCK_KV))[:, None]
    dk, dv = tl.zeros([BLOCK_KV, BLOCK_DIM_QK], tl.float32), tl.zeros([BLOCK_KV, BLOCK_DIM_V], tl.float32)
    for head in range(kv_head * group, kv_head * group + group):
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
        parts, entries = parts_of(edges, mods, sequence, head, start, LIST_KV, LIST_Q, BLOCK_Q)
        for part in tl.static_range(3):  # masked, bare, masked; or listed: partial, full
            if part < 2 if LIST_Q > 0 else ((right is not None or not BARE) if part == 0 else BARE):
                dk, dv = over_queries(
                    k, v, k_source, v_source, piece, dk, dv, (q, q_row_stride, q_dim_stride),
                    (g, d_out_row_stride, d_out_dim_stride), (saved, saved_plane_stride), kv_pos, place, left, right,
                    seen, (scale, option(softcap), bias, alibi, score_mod),
                    (mask, () if LIST_Q > 0 and part == 1 else mask_mod), drop, parts[part], entries[part],
                    part != 1 or not LIST_BARE, dk_ptr is not None, dv_ptr is not None, DIM_QK, DIM_V, BLOCK_Q,
                    BLOCK_DIM_QK, BLOCK_DIM_V, UNIT, EXACT, PACKED, PRECISION, SCORE_MOD, SCORE_GRADIENT, MASK_MOD,
                    LIST_Q,
                )  # fmt: skip
    inside = (kv_pos >= kv_start) & (kv_pos < kv_stop)
    dk, dv = tl.where(inside, dk * scale, 0.0), tl.where(inside, dv, 0.0)
    if dk_ptr is not None:
        base = base_of(dk_ptr, sequence, kv_head, kv_base, dk_batch_stride, dk_head_stride, dk_row_stride, UNIT)
        store_rows((base, dk_row_stride, dk_dim_stride), start, len_kv, dk, DIM_QK, BLOCK_KV, BLOCK_DIM_QK, UNIT, piece)
    if dv_ptr is not None:
        base = base_of(dv_ptr, sequence, kv_head, kv_base, dv_batch_stride, dv_head_stride, dv_row_stride, UNIT)
        store_rows((base, dv_row_stride, dv_dim_stride), start, len_kv, dv, DIM_V, BLOCK_KV, BLOCK_DIM_V, UNIT, piece)


# ---- the gradient of queries ----------------------------------------------------------------------------------------


@triton.jit
def over_keys(
    q, d_out, q_source, d_out_source, piece, dq, k_matrix, v_matrix, lse, delta, q_pos, place, left, right, seen,
    score_with, mask, drop, blocks, entries,
    MASKED: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_DIM_QK: tl.constexpr, BLOCK_DIM_V: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, MASK_MOD: tl.constexpr, LIST_KV: tl.constexpr,
):  # fmt: skip
    """Take a tile of queries over the blocks of keys [first, stop), or over as many blocks of the entries of a list."""
    first, stop = blocks
    if LIST_KV > 0:
        coming = block_start(entries, first, stop, LIST_KV, BLOCK_KV)
    for block in range(first, stop):
        if LIST_KV > 0:
            start = coming
            coming = block_start(entries, block + 1, stop, LIST_KV, BLOCK_KV)
        else:
            start = block * BLOCK_KV
        kv_pos = (start + tl.arange(0, BLOCK_KV))[None, :]
        k = load_rows(k_matrix, start, seen[0], seen[1], DIM_QK, BLOCK_KV, BLOCK_DIM_QK, MASKED, UNIT)
        v = load_rows(v_matrix, start, seen[0], seen[1], DIM_V, BLOCK_KV, BLOCK_DIM_V, MASKED, UNIT)
        if len(mask[0]) > 0:
            visible = (visible_pairs(q_pos, kv_pos, place, left, right, mask, MASK_MOD),)
            k = zero_unseen(k, visible[0])
        k_source, v_source = (k_matrix, start, seen[0], seen[1]), (v_matrix, start, seen[0], seen[1])
        score = tl.dot(q, k.T, input_precision=PRECISION)
        score = add_pieces(score, q_source, k_source, DIM_QK, BLOCK_DIM_QK, MASKED, UNIT, PRECISION)
        dp = tl.dot(d_out, v.T, input_precision=PRECISION)
        dp = add_pieces(dp, d_out_source, v_source, DIM_V, BLOCK_DIM_V, MASKED, UNIT, PRECISION)
        if len(mask[0]) == 0:  # only now, see `attend`
            visible = (visible_pairs(q_pos, kv_pos, place, left, right, mask, MASK_MOD),) if MASKED else ()
        _, ds, derivative = tile_gradients(
            score, dp, lse, delta, q_pos, kv_pos, place, score_with, drop, visible, EXACT, PACKED,
            SCORE_MOD, SCORE_GRADIENT,
        )  # fmt: skip
        if len(derivative) > 0:
            ds = ds * derivative[0]
        unseen = visible if len(mask[0]) > 0 else ()
        k = own_piece(k, k_source, unseen, piece, DIM_QK, BLOCK_DIM_QK, MASKED, UNIT)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@kernel
def query_gradients(
    q_ptr, k_ptr, v_ptr, d_out_ptr, saved_ptr, dq_ptr,
    bias_ptr, mask_ptr, slopes_ptr, kv_start_ptr, kv_stop_ptr, cu_q_ptr, cu_k_ptr, seed_ptr,
    q_batch_stride: tl.int64, q_head_stride: tl.int64, q_row_stride: tl.int64, q_dim_stride: tl.int64,
    k_batch_stride: tl.int64, k_head_stride: tl.int64, k_row_stride: tl.int64, k_dim_stride: tl.int64,
    v_batch_stride: tl.int64, v_head_stride: tl.int64, v_row_stride: tl.int64, v_dim_stride: tl.int64,
    d_out_batch_stride: tl.int64, d_out_head_stride: tl.int64, d_out_row_stride: tl.int64, d_out_dim_stride: tl.int64,
    dq_batch_stride: tl.int64, dq_head_stride: tl.int64, dq_row_stride: tl.int64, dq_dim_stride: tl.int64,
    saved_batch_stride: tl.int64, saved_head_stride: tl.int64, saved_plane_stride: tl.int64,
    bias_batch_stride: tl.int64, bias_head_stride: tl.int64, bias_q_stride: tl.int64, bias_kv_stride: tl.int64,
    mask_batch_stride: tl.int64, mask_head_stride: tl.int64, mask_q_stride: tl.int64, mask_kv_stride: tl.int64,
    slopes_batch_stride: tl.int64, slopes_head_stride: tl.int64,
    tiles: tl.int32, batch: tl.int32, heads: tl.int32, group: tl.int32, len_q: tl.int32, len_kv: tl.int32,
    bias_width: tl.int32, left, right, scale: tl.float32, softcap, dropout, mods: tl.tuple,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_DIM_QK: tl.constexpr, BLOCK_DIM_V: tl.constexpr, UNIT: tl.constexpr, TOP_LEFT: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
    MASK_MOD: tl.constexpr, LIST_Q: tl.constexpr, LIST_KV: tl.constexpr, LIST_BARE: tl.constexpr,
):  # fmt: skip
    """Compute dq of one tile of queries; the grid's second axis counts pieces of its columns."""
    PACKED: tl.constexpr = cu_q_ptr is not None
    BARE: tl.constexpr = mask_ptr is None and MASK_MOD is None
    piece = tl.program_id(1) if DIM_QK > BLOCK_DIM_QK else 0
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles  # late queries see most keys when causal: longest first
    head = program // tiles % heads
    if PACKED:
        sequence, _, q_start, q_base, len_q, kv_base, len_kv = packed_tile(
            tile, cu_q_ptr, cu_k_ptr, batch, len_q, len_kv, BLOCK_Q
        )
    else:
        sequence, q_start, q_base, kv_base = program // tiles // heads, tile * BLOCK_Q, 0, 0
    if q_start >= len_q:
        return
    kv_start, kv_stop = key_range(sequence, kv_start_ptr, kv_stop_ptr, len_kv, left, right)
    place = (len_q, kv_start, kv_stop, 0 if TOP_LEFT else len_kv - len_q)
    edges, seen = key_blocks(q_start, place, left, right, BLOCK_Q, BLOCK_KV, BARE)
    parts, entries = parts_of(edges, mods, sequence, head, q_start, LIST_Q, LIST_KV, BLOCK_KV)

    q = base_of(q_ptr, sequence, head, q_base, q_batch_stride, q_head_stride, q_row_stride, UNIT)
    k = base_of(k_ptr, sequence, head // group, kv_base, k_batch_stride, k_head_stride, k_row_stride, UNIT)
    v = base_of(v_ptr, sequence, head // group, kv_base, v_batch_stride, v_head_stride, v_row_stride, UNIT)
    d_out = base_of(d_out_ptr, sequence, head, q_base, d_out_batch_stride, d_out_head_stride, d_out_row_stride, UNIT)
    saved = base_of(saved_ptr, sequence, head, q_base, saved_batch_stride, saved_head_stride, 1, 1)
    bias = pairs_of(
        bias_ptr, sequence, head, q_base, bias_batch_stride, bias_head_stride, bias_q_stride, bias_kv_stride, bias_width
    )
    mask = pairs_of(
        mask_ptr, sequence, head, q_base, mask_batch_stride, mask_head_stride, mask_q_stride, mask_kv_stride, len_kv
    )
    alibi = scalar_of(slopes_ptr, sequence, head, slopes_batch_stride, slopes_head_stride)
    drop = () if seed_ptr is None else (tl.load(seed_ptr), dropout, head, sequence)
    rows = q_start + tl.arange(0, BLOCK_Q)
    q_source = ((q, q_row_stride, q_dim_stride), q_start, 0, len_q)
    d_out_source = ((d_out, d_out_row_stride, d_out_dim_stride), q_start, 0, len_q)
    q = load_rows(q_source[0], q_start, 0, len_q, DIM_QK, BLOCK_Q, BLOCK_DIM_QK, True, UNIT)
    d_out = load_rows(d_out_source[0], q_start, 0, len_q, DIM_V, BLOCK_Q, BLOCK_DIM_V, True, UNIT)
    lse, delta = load_saved((saved, saved_plane_stride), rows)
    dq = tl.zeros([BLOCK_Q, BLOCK_DIM_QK], tl.float32)
    score_mod, mask_mod = mods_of(mods, sequence, head, SCORE_MOD, MASK_MOD)
    HEAD_MASKED: tl.constexpr = left is not None or kv_start_ptr is not None or not BARE
    for part in tl.static_range(3):  # masked, bare, masked; or listed: partial, full
        if part < 2 if LIST_KV > 0 else (HEAD_MASKED if part == 0 else BARE):
            dq = over_keys(
                q, d_out, q_source, d_out_source, piece, dq,
                (k, k_row_stride, k_dim_stride), (v, v_row_stride, v_dim_stride),
                lse[:, None], delta[:, None], rows[:, None], place, left, right, seen,
                (scale, option(softcap), bias, alibi, score_mod), (mask, () if LIST_KV > 0 and part == 1 else mask_mod),
                drop,
                parts[part], entries[part], part != 1 or not LIST_BARE, DIM_QK, DIM_V, BLOCK_KV, BLOCK_DIM_QK,
                BLOCK_DIM_V, UNIT, EXACT, PACKED, PRECISION, SCORE_MOD, SCORE_GRADIENT, MASK_MOD, LIST_KV,
            )  # fmt: skip
    base = base_of(dq_ptr, sequence, head, q_base, dq_batch_stride, dq_head_stride, dq_row_stride, UNIT)
    store_rows(
        (base, dq_row_stride, dq_dim_stride), q_start, len_q, dq * scale, DIM_QK, BLOCK_Q, BLOCK_DIM_QK, UNIT, piece
    )
