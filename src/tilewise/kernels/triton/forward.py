"""The forward pass: a program computes one tile of queries of one head and walks over the keys that it sees.

`attend` is the loop, and reads like ``backends/numpy_tiled.py``. Two things differ. The scale is multiplied inside
exp2's argument wherever nothing else happens to the score, so that row_max is compared after scaling. And the loop is
compiled with mask code and without, for the ranges of blocks that `block_ranges` gives.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.share import kernel
from tilewise.kernels.triton.steps import (
    LN2,
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
    packed_tile,
    pairs_of,
    parts_of,
    scalar_of,
    seen_pairs,
    store_rows,
    zero_unseen,
)


@triton.jit
def attend(
    q, q_source, k_matrix, v_matrix, piece, q_pos, state, place, left, right, seen, score_with, mask, drop, blocks,
    entries,
    MASKED: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_DIM_QK: tl.constexpr, BLOCK_DIM_V: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, NEGATIVE: tl.constexpr, SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr, LIST_KV: tl.constexpr,
):  # fmt: skip
    """Take the queries over the blocks of keys [first, stop); give the new (row_max, row_sum, acc).

    With entries, blocks are counted in a list of tiles of LIST_KV keys.
    """
    row_max, row_sum, acc = state
    seen_start, seen_stop = seen
    factor = exponent_factor(score_with)
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
        k = load_rows(k_matrix, start, seen_start, seen_stop, DIM_QK, BLOCK_KV, BLOCK_DIM_QK, MASKED, UNIT)
        v = load_rows(v_matrix, start, seen_start, seen_stop, DIM_V, BLOCK_KV, BLOCK_DIM_V, MASKED, UNIT, piece)
        if len(mask[0]) > 0:
            visible = seen_pairs(q_pos, kv_pos, place, left, right, mask, MASK_MOD)
            k, v = zero_unseen(k, visible), zero_unseen(v, visible)
        score = tl.dot(q, k.T, input_precision=PRECISION)
        k_source = (k_matrix, start, seen_start, seen_stop)
        score = add_pieces(score, q_source, k_source, DIM_QK, BLOCK_DIM_QK, MASKED, UNIT, PRECISION, NEGATIVE)
        score, _, _ = finish_score(score, q_pos, kv_pos, place, score_with, EXACT, PACKED, SCORE_MOD)
        if MASKED:
            if len(mask[0]) == 0:  # only now: held over the product, so many truth values would be packed and unpacked
                visible = seen_pairs(q_pos, kv_pos, place, left, right, mask, MASK_MOD)
            score = tl.where(visible, score, -float("inf"))
        row_max_new = tl.maximum(row_max, scaled(tl.max(score, 1), factor))
        anchor = tl.where(row_max_new == -float("inf"), 0.0, row_max_new)
        p = tl.exp2(score * factor_at(anchor, factor)[:, None] - anchor[:, None])
        rescale = tl.exp2(row_max - anchor)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        if len(drop) > 0:
            p = tl.where(is_kept(q_pos, kv_pos, drop), p, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = row_max_new
    return row_max, row_sum, acc


# ---- scores that are far out ----------------------------------------------------------------------------------------
#
# ``score * factor - anchor`` is rounded once, and the anchor was rounded before: the largest score's difference is not
# 0 but half a unit in the anchor's last place. A common factor of all p, it cancels against row_sum, until p
# overflows: in float16 from 2**28 on. There a power of two takes the factor's place, by which products are exact. So
# the largest score gives p = 1, and all others next to nothing, as they should: the next number that float32 has lies
# 16 or more below.

FAR = tl.constexpr(2.0**28)


@triton.jit
def power_above(factor):
    """Give the power of two that is next to a positive factor, upwards, as a tensor of one."""
    bits = tl.full([1], factor, tl.float32).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def scaled(row_max, factor):
    """Scale row_max to base 2, by what fits it."""
    near = row_max * factor
    return tl.where(tl.abs(near) > FAR, row_max * power_above(factor), near)


@triton.jit
def factor_at(anchor, factor):
    """Give each row the factor that its anchor was scaled by."""
    return tl.where(tl.abs(anchor) > FAR, power_above(factor), factor)


@triton.jit
def unscaled(state, factor):
    """Give the state with row_max as scaled by the factor alone: what lse reports."""
    row_max, row_sum, acc = state
    return tl.where(tl.abs(row_max) > FAR, row_max * (factor / power_above(factor)), row_max), row_sum, acc


@triton.jit
def fresh_state(BLOCK_Q: tl.constexpr, BLOCK_DIM_V: tl.constexpr):
    """Give (row_max, row_sum, acc) of rows that have seen nothing."""
    row_max = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    return row_max, tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q, BLOCK_DIM_V], tl.float32)


@triton.jit
def add_sink(state, sink):
    """Take one more step of the same kind: a score, in base 2, without a value."""
    row_max, row_sum, acc = state
    row_max_new = tl.maximum(row_max, sink)
    anchor = tl.where(row_max_new == -float("inf"), 0.0, row_max_new)
    rescale = tl.exp2(row_max - anchor)
    return row_max_new, row_sum * rescale + tl.exp2(sink - anchor), acc * rescale[:, None]


@triton.jit
def normalised(state, kept):
    """Give the rows of out, and what lse is made of: row_max, and row_sum or 1; dropout leaves the share ``kept``."""
    row_max, row_sum, acc = state
    row_sum_or_1 = tl.where(row_sum == 0, 1.0, row_sum)
    return acc / (row_sum_or_1 * kept)[:, None], row_max, row_sum_or_1


@kernel
def attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    bias_ptr, mask_ptr, sink_ptr, slopes_ptr, kv_start_ptr, kv_stop_ptr, cu_q_ptr, cu_k_ptr, seed_ptr,
    q_batch_stride: tl.int64, q_head_stride: tl.int64, q_row_stride: tl.int64, q_dim_stride: tl.int64,
    k_batch_stride: tl.int64, k_head_stride: tl.int64, k_row_stride: tl.int64, k_dim_stride: tl.int64,
    v_batch_stride: tl.int64, v_head_stride: tl.int64, v_row_stride: tl.int64, v_dim_stride: tl.int64,
    out_batch_stride: tl.int64, out_head_stride: tl.int64, out_row_stride: tl.int64, out_dim_stride: tl.int64,
    lse_batch_stride: tl.int64, lse_head_stride: tl.int64, lse_row_stride: tl.int64,
    bias_batch_stride: tl.int64, bias_head_stride: tl.int64, bias_q_stride: tl.int64, bias_kv_stride: tl.int64,
    mask_batch_stride: tl.int64, mask_head_stride: tl.int64, mask_q_stride: tl.int64, mask_kv_stride: tl.int64,
    sink_batch_stride: tl.int64, sink_head_stride: tl.int64,
    slopes_batch_stride: tl.int64, slopes_head_stride: tl.int64,
    tiles: tl.int32, batch: tl.int32, heads: tl.int32, group: tl.int32, len_q: tl.int32, len_kv: tl.int32,
    bias_width: tl.int32, left, right, scale: tl.float32, softcap, dropout, mods: tl.tuple,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_DIM_QK: tl.constexpr, BLOCK_DIM_V: tl.constexpr, UNIT: tl.constexpr, TOP_LEFT: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, NEGATIVE: tl.constexpr, SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr, LIST_Q: tl.constexpr, LIST_KV: tl.constexpr, LIST_BARE: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of one tile of queries; ``backends/triton_portable.py`` says what each argument is.

    Tensors are addressed as (batch, heads, len, dim). Packed sequences are one batch entry, in which they begin at
    different rows; len_q and len_kv then count all tokens. The grid's second axis counts the pieces of out's columns;
    all programs of the same rows find the same lse. NEGATIVE says whether scale is, at compile time: arithmetic on q
    would keep the products from reading it in shared memory.
    """
    PACKED: tl.constexpr = cu_q_ptr is not None
    BARE: tl.constexpr = mask_ptr is None and MASK_MOD is None
    HEAD_MASKED: tl.constexpr = left is not None or kv_start_ptr is not None or not BARE
    program = tl.program_id(0)
    piece = tl.program_id(1) if DIM_V > BLOCK_DIM_V else 0
    tile = tiles - 1 - program % tiles  # late queries see most keys when causal: longest first
    head = program // tiles % heads
    if PACKED:
        sequence, is_tail, q_start, q_base, len_q, kv_base, len_kv = packed_tile(
            tile, cu_q_ptr, cu_k_ptr, batch, len_q, len_kv, BLOCK_Q
        )
    else:
        sequence, is_tail, q_start, q_base, kv_base = program // tiles // heads, False, tile * BLOCK_Q, 0, 0
    if q_start >= len_q:
        return

    kv_start, kv_stop = key_range(sequence, kv_start_ptr, kv_stop_ptr, len_kv, left, right)
    place = (len_q, kv_start, kv_stop, 0 if TOP_LEFT else len_kv - len_q)
    edges, seen = key_blocks(q_start, place, left, right, BLOCK_Q, BLOCK_KV, BARE)
    parts, entries = parts_of(edges, mods, sequence, head, q_start, LIST_Q, LIST_KV, BLOCK_KV)
    q = base_of(q_ptr, sequence, head, q_base, q_batch_stride, q_head_stride, q_row_stride, UNIT)
    k = base_of(k_ptr, sequence, head // group, kv_base, k_batch_stride, k_head_stride, k_row_stride, UNIT)
    v = base_of(v_ptr, sequence, head // group, kv_base, v_batch_stride, v_head_stride, v_row_stride, UNIT)
    out = base_of(out_ptr, sequence, head, q_base, out_batch_stride, out_head_stride, out_row_stride, UNIT)
    bias = pairs_of(
        bias_ptr, sequence, head, q_base, bias_batch_stride, bias_head_stride, bias_q_stride, bias_kv_stride, bias_width
    )
    mask = pairs_of(
        mask_ptr, sequence, head, q_base, mask_batch_stride, mask_head_stride, mask_q_stride, mask_kv_stride, len_kv
    )
    alibi = scalar_of(slopes_ptr, sequence, head, slopes_batch_stride, slopes_head_stride)
    sink = scalar_of(sink_ptr, sequence, head, sink_batch_stride, sink_head_stride)
    drop = () if seed_ptr is None else (tl.load(seed_ptr), dropout, head, sequence)

    rows = q_start + tl.arange(0, BLOCK_Q)
    q_source = ((q, q_row_stride, q_dim_stride), q_start, 0, len_q)
    # The sign goes to q, exactly, so that row_max may compare before scaling; and 0 * -inf must not be.
    q = load_rows(q_source[0], q_start, 0, len_q, DIM_QK, BLOCK_Q, BLOCK_DIM_QK, True, UNIT)
    q = -q if NEGATIVE else q
    factor = tl.maximum(tl.abs(scale), 1e-30)
    state = fresh_state(BLOCK_Q, BLOCK_DIM_V)
    score_mod, mask_mod = mods_of(mods, sequence, head, SCORE_MOD, MASK_MOD)
    score_with = (factor, option(softcap), bias, alibi, score_mod)
    for part in tl.static_range(3):  # masked, bare, masked; or listed: partial, full
        if part < 2 if LIST_KV > 0 else (HEAD_MASKED if part == 0 else BARE):
            state = attend(
                q, q_source, (k, k_row_stride, k_dim_stride), (v, v_row_stride, v_dim_stride), piece, rows[:, None],
                state, place, left, right, seen, score_with,
                (mask, () if LIST_KV > 0 and part == 1 else mask_mod), drop, parts[part], entries[part],
                part != 1 or not LIST_BARE, DIM_QK, DIM_V, BLOCK_KV, BLOCK_DIM_QK, BLOCK_DIM_V, UNIT, EXACT, PACKED,
                PRECISION, NEGATIVE, SCORE_MOD, MASK_MOD, LIST_KV,
            )  # fmt: skip
    state = unscaled(state, exponent_factor(score_with))
    if len(sink) > 0:
        state = add_sink(state, tl.where(is_tail, -float("inf"), sink[0] * LOG2E))
    acc, row_max, row_sum = normalised(state, 1.0 if seed_ptr is None else 1.0 - dropout)
    store_rows((out, out_row_stride, out_dim_stride), q_start, len_q, acc, DIM_V, BLOCK_Q, BLOCK_DIM_V, UNIT, piece)
    if lse_ptr is not None:
        lse = base_of(lse_ptr, sequence, head, q_base, lse_batch_stride, lse_head_stride, lse_row_stride, 1)
        tl.store(lse + rows * lse_row_stride, row_max * LN2 + tl.log(row_sum), mask=rows < len_q)
