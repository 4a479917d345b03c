"""Decoding: a few queries against a long cache, its keys split over programs, their results joined in the same launch.

A program takes a tile of rows and one split of the keys. The rows are the query heads that share a key head, times the
queries, so that each key is loaded once for all of them. How many keys a sequence holds only the device knows: programs
share out what is there, and one whose split is empty leaves at once.

A split's result is (out, lse), like that of any attention over some of the keys. Whichever program of a tile comes
last joins them, by the rule of `merge` and in the order of the keys, so that the bits do not depend on who was last. A
second kernel would do the same a launch later, which takes the host as long as the first, and leaves the device idle
in between. The price is a counter for each tile, zero before and after.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.share import kernel
from tilewise.kernels.triton.forward import add_sink, fresh_state
from tilewise.kernels.triton.steps import (
    LN2,
    LOG2E,
    block_ranges,
    clamped,
    exponent_factor,
    finish_score,
    option,
    visible_pairs,
)

FAR = tl.constexpr(2**30)


# ---- where things stand in a cache ----------------------------------------------------------------------------------


@triton.jit
def tokens_held(seqlens_ptr, sequence, capacity):
    """Load how many tokens a sequence holds before the call, held to what an int32 can add to."""
    if seqlens_ptr is None:
        held = capacity
    else:
        held = tl.minimum(tl.maximum(tl.load(seqlens_ptr + sequence), -FAR), FAR).to(tl.int32)
    return held


@triton.jit
def cache_row(batch_idx_ptr, sequence, rows):
    """Give the row of a cache in one piece that belongs to a sequence."""
    row = sequence
    if batch_idx_ptr is not None:
        row = clamped(tl.load(batch_idx_ptr + sequence), rows - 1)
    return row


@triton.jit
def page_of(table, token, inside):
    """Look up the pages of tokens in the sequence's row of the table: (pointer, stride, pages, page_size)."""
    row, stride, pages, page_size = table
    return clamped(tl.load(row + (token // page_size).to(tl.int64) * stride, mask=inside, other=0), pages - 1)


@triton.jit
def rows_of_block(start, tokens, inside, table, SCATTERED: tl.constexpr):
    """Give (page, slot) of a block of tokens: of its first where the others follow, else of each.

    The table is () for a cache in one piece. SCATTERED: a block may lie in several pages.
    """
    if len(table) == 0:
        page, slot = 0, start
    elif SCATTERED:
        page, slot = page_of(table, tokens, inside), tokens % table[3]
    else:
        page, slot = page_of(table, start, True), start % table[3]
    return page, slot


@triton.jit
def load_tokens(
    matrix, place, inside,
    DIM: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_DIM: tl.constexpr, UNIT: tl.constexpr, SCATTERED: tl.constexpr,
):  # fmt: skip
    """Load a block of keys or values (BLOCK_KV, BLOCK_DIM), zero where not inside; strides count UNIT elements."""
    base, page_stride, row_stride, dim_stride = matrix
    page, slot = place
    dims = tl.arange(0, BLOCK_DIM)
    if SCATTERED:
        rows = page * page_stride + slot * row_stride
    else:
        base = tl.multiple_of(base + (page * page_stride + slot * row_stride) * UNIT, 16 if UNIT > 1 else 1)
        rows = tl.arange(0, BLOCK_KV) * row_stride
    if UNIT > 1:
        pointers = base + ((rows * UNIT)[:, None] + dims[None, :])
    else:
        pointers = base + (rows[:, None] + dims[None, :] * dim_stride)
    mask = inside[:, None] & (dims < DIM)[None, :] if DIM < BLOCK_DIM else inside[:, None]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def pointers_of_rows(matrix, q_pos, head, BLOCK_DIM: tl.constexpr, UNIT: tl.constexpr):
    """Point at rows of q or out: each has its query and its head."""
    base, row_stride, head_stride, dim_stride = matrix
    rows = q_pos * row_stride + head * head_stride
    dims = tl.arange(0, BLOCK_DIM)
    if UNIT > 1:
        pointers = base + ((rows * UNIT)[:, None] + dims[None, :])
    else:
        pointers = base + (rows[:, None] + dims[None, :] * dim_stride)
    return pointers


@triton.jit
def per_row(pointer, sequence, head, inside, batch_stride, head_stride):
    """Load each row's number, as (numbers,), or () where there is none."""
    if pointer is None:
        numbers = ()
    else:
        given = tl.load(pointer + (sequence * batch_stride + head * head_stride), mask=inside, other=0.0)
        numbers = (given.to(tl.float32),)
    return numbers


@triton.jit
def scale_of(pointer, head):
    """Load what a head's stored numbers are multiplied by."""
    return 1.0 if pointer is None else tl.load(pointer + head).to(tl.float32)


# ---- splits ---------------------------------------------------------------------------------------------------------


@triton.jit
def blocks_of_split(split, first, stop, splits, least, fixed):
    """Give the blocks [begin, end) of a split of [first, stop), and how many splits are not empty, at least one.

    Splits are equal parts of no fewer than ``least`` blocks, or, where ``fixed`` is not 0, stretches of so many blocks
    counted from key 0: then no split depends on how many keys or queries there are.
    """
    share = tl.maximum(tl.cdiv(stop - first, splits), least)
    base = first
    if fixed > 0:
        share = fixed
        base = first // fixed * fixed
    used = tl.maximum(tl.cdiv(stop - base, share), 1)
    begin = base + split * share
    return tl.maximum(begin, first), tl.minimum(begin + share, stop), used


@triton.jit
def merge_splits(partial, used, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, AT_ONCE: tl.constexpr):
    """Join the partial results of a tile, out and lse in base 2, both (ROWS, BLOCK_DIM) for each split.

    Every element has its row's lse beside it. So nothing is passed between threads, which would make each split wait
    for the one before: the loads of AT_ONCE splits are on their way together.

    One split after the other, in the order of the keys. A split that a row sees nothing of leaves its bits alone.
    """
    row_max = tl.full([ROWS, BLOCK_DIM], -float("inf"), tl.float32)
    row_sum, acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32), tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    cells = tl.arange(0, ROWS)[:, None] * BLOCK_DIM + tl.arange(0, BLOCK_DIM)[None, :]
    for start in range(0, used, AT_ONCE):
        for number in tl.static_range(AT_ONCE):
            there = start + number < used
            split = partial + ((start + number) * (2 * ROWS * BLOCK_DIM) + cells)
            out = tl.load(split, mask=there, other=0.0, cache_modifier=".cg")
            lse = tl.load(split + ROWS * BLOCK_DIM, mask=there, other=-float("inf"), cache_modifier=".cg")
            row_max_new = tl.maximum(row_max, lse)
            anchor = tl.where(row_max_new == -float("inf"), 0.0, row_max_new)
            p = tl.exp2(lse - anchor)
            rescale = tl.exp2(row_max - anchor)
            row_sum = row_sum * rescale + p
            acc = acc * rescale + out * p
            row_max = row_max_new
    row_sum_or_1 = tl.where(row_sum == 0, 1.0, row_sum)
    return acc / row_sum_or_1, tl.max(row_max + tl.log2(row_sum_or_1), 1)


@triton.jit
def place_rows(tile_rows, ROWS: tl.constexpr):
    """Give the query and the head of each row of a tile, and whether there is such a row."""
    row_start, head_kv, group, len_q = tile_rows
    rows = row_start + tl.arange(0, ROWS)
    return rows // group, head_kv * group + rows % group, rows < group * len_q


@triton.jit
def finish_rows(
    out, lse, results, sinks, tile_rows,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Add the sink to rows whose keys are all seen, and store them. The sink is one more part to join."""
    out_matrix, lse_rows = results
    sink_ptr, sequence, sink_batch_stride, sink_head_stride = sinks
    q_pos, head, inside = place_rows(tile_rows, ROWS)
    sink = per_row(sink_ptr, sequence, head, inside, sink_batch_stride, sink_head_stride)
    if len(sink) > 0:
        row_max, row_sum, acc = add_sink((lse, tl.full([ROWS], 1.0, tl.float32), out), sink[0] * LOG2E)
        out = acc / row_sum[:, None]
        lse = row_max + tl.log2(row_sum)
    mask = inside[:, None] & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
    out = out.to(out_matrix[0].dtype.element_ty)
    tl.store(pointers_of_rows(out_matrix, q_pos, head, BLOCK_DIM, UNIT), out, mask=mask)
    if len(lse_rows) > 0:
        tl.store(lse_rows[0] + (q_pos * lse_rows[1] + head * lse_rows[2]), lse * LN2, mask=inside)


@triton.jit
def join_splits(
    out, lse, tile, split, used, splits, partial_ptr, arrived_ptr, results, sinks, tile_rows,
    BLOCK_Q: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Hand in a split's result; whoever comes last joins all, stores the rows and sets the counter to zero again."""
    partial = partial_ptr + tile.to(tl.int64) * splits * (2 * ROWS * BLOCK_DIM)
    own = tl.multiple_of(partial + split * (2 * ROWS * BLOCK_DIM), 16)
    local = tl.arange(0, BLOCK_Q)[:, None]
    cells = own + (local * BLOCK_DIM + tl.arange(0, BLOCK_DIM)[None, :])
    tl.store(cells, out, mask=local < ROWS)
    tl.store(cells + ROWS * BLOCK_DIM, tl.broadcast_to(lse[:, None], out.shape), mask=local < ROWS)
    tl.debug_barrier()  # all threads' stores come before the one thread's arrival, which publishes them
    if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == used - 1:
        tl.store(arrived_ptr + tile, 0)
        merged, merged_lse = merge_splits(tl.multiple_of(partial, 16), used, ROWS, BLOCK_DIM, AT_ONCE)
        finish_rows(merged, merged_lse, results, sinks, tile_rows, ROWS, DIM, BLOCK_DIM, UNIT)


# ---- the kernel -----------------------------------------------------------------------------------------------------


@triton.jit
def attend_cache(
    q, k_matrix, v_matrix, table, q_pos, state, place, left, right, seen, score_with, begin, end,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_DIM_QK: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr, UNIT_K: tl.constexpr, UNIT_V: tl.constexpr, SCATTERED: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the rows over the blocks of keys [begin, end); give the new (row_max, row_sum, acc).

    One loop, always masked: loads wait for memory anyway, and a second loop would begin with an empty pipeline.
    """
    row_max, row_sum, acc = state
    seen_start, seen_stop = seen
    factor = exponent_factor(score_with)
    for block in range(begin, end):
        start = block * BLOCK_KV
        tokens = start + tl.arange(0, BLOCK_KV)
        inside = (tokens >= seen_start) & (tokens < seen_stop)
        rows = rows_of_block(start, tokens, inside, table, SCATTERED)
        k = load_tokens(k_matrix, rows, inside, DIM_QK, BLOCK_KV, BLOCK_DIM_QK, UNIT_K, SCATTERED).to(q.dtype)
        v = load_tokens(v_matrix, rows, inside, DIM_V, BLOCK_KV, BLOCK_DIM_V, UNIT_V, SCATTERED).to(q.dtype)
        kv_pos = tokens[None, :]
        visible = visible_pairs(q_pos, kv_pos, place, left, right, ((), ()))
        score = tl.dot(q, k.T, input_precision=PRECISION)
        score, _, _ = finish_score(score, q_pos, kv_pos, place, score_with, EXACT, False)
        score = tl.where(visible, score * factor, -float("inf"))
        row_max_new = tl.maximum(row_max, tl.max(score, 1))
        anchor = tl.where(row_max_new == -float("inf"), 0.0, row_max_new)
        p = tl.exp2(score - anchor[:, None])
        rescale = tl.exp2(row_max - anchor)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = row_max_new
    return row_max, row_sum, acc


@kernel
def attention_decode(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, partial_ptr, arrived_ptr,
    seqlens_ptr, table_ptr, batch_idx_ptr, leftpad_ptr, k_scale_ptr, v_scale_ptr, sink_ptr, slopes_ptr,
    q_batch_stride: tl.int64, q_head_stride: tl.int64, q_row_stride: tl.int64, q_dim_stride: tl.int64,
    k_batch_stride: tl.int64, k_head_stride: tl.int64, k_row_stride: tl.int64, k_dim_stride: tl.int64,
    v_batch_stride: tl.int64, v_head_stride: tl.int64, v_row_stride: tl.int64, v_dim_stride: tl.int64,
    out_batch_stride: tl.int64, out_head_stride: tl.int64, out_row_stride: tl.int64,
    lse_batch_stride: tl.int64, lse_head_stride: tl.int64, lse_row_stride: tl.int64,
    table_row_stride: tl.int64, table_column_stride: tl.int64,
    sink_batch_stride: tl.int64, sink_head_stride: tl.int64,
    slopes_batch_stride: tl.int64, slopes_head_stride: tl.int64,
    tiles: tl.int32, row_tiles: tl.int32, splits: tl.int32, least: tl.int32, fixed: tl.int32,
    heads_kv: tl.int32, group: tl.int32, len_q: tl.int32, capacity: tl.int32, appended: tl.int32,
    cache_rows: tl.int32, page_size: tl.int32, left, right, scale: tl.float32, softcap,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_DIM_QK: tl.constexpr, BLOCK_DIM_V: tl.constexpr, UNIT_Q: tl.constexpr, UNIT_K: tl.constexpr,
    UNIT_V: tl.constexpr, SCATTERED: tl.constexpr, TOP_LEFT: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Compute one split of one tile of rows, and join the splits; ``backends/triton_decode.py`` says what each is.

    Row r of a sequence and key head is query ``r // group`` of the head ``r % group`` among those that share the key
    head. ``cache_rows`` counts the rows of a cache in one piece, or the pages.
    """
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row_start, head_kv = tile % row_tiles * BLOCK_Q, tile // row_tiles % heads_kv
    sequence = (tile // row_tiles // heads_kv).to(tl.int64)
    q_start, q_stop = row_start // group, tl.minimum((row_start + BLOCK_Q - 1) // group + 1, len_q)
    kv_stop = clamped(tokens_held(seqlens_ptr, sequence, capacity) + appended, capacity)
    kv_start = 0 if leftpad_ptr is None else clamped(tl.load(leftpad_ptr + sequence), capacity)
    if left is not None and right is not None:  # a band that is empty everywhere
        kv_start = tl.where(left + right < 0, kv_stop, kv_start)
    offset = 0 if TOP_LEFT else kv_stop - len_q
    first, _, _, stop = block_ranges(q_start, q_stop, kv_start, kv_stop, left, right, offset, BLOCK_KV)
    seen_start, _, _, seen_stop = block_ranges(q_start, q_stop, kv_start, kv_stop, left, right, offset, 1)
    begin, end, used = blocks_of_split(split, first, stop, splits, least, fixed)
    if split >= used:
        return

    tile_rows = (row_start, head_kv, group, len_q)
    q_pos, head, inside = place_rows(tile_rows, BLOCK_Q)
    # The compiler must be told of an address where that is computed: of a helper's argument it would forget it.
    LIES_ON: tl.constexpr = 16 if UNIT_Q > 1 else 1
    q_base = tl.multiple_of(q_ptr + sequence * (q_batch_stride * UNIT_Q), LIES_ON)
    q_matrix = (q_base, q_row_stride, q_head_stride, q_dim_stride)
    q_mask = inside[:, None] & (tl.arange(0, BLOCK_DIM_QK) < DIM_QK)[None, :]
    q = tl.load(pointers_of_rows(q_matrix, q_pos, head, BLOCK_DIM_QK, UNIT_Q), mask=q_mask, other=0.0)
    table = ()
    k_base, v_base = k_ptr + head_kv * (k_head_stride * UNIT_K), v_ptr + head_kv * (v_head_stride * UNIT_V)
    if table_ptr is not None:
        table = (table_ptr + sequence * table_row_stride, table_column_stride, cache_rows, page_size)
    else:
        row = cache_row(batch_idx_ptr, sequence, cache_rows)
        k_base += row * (k_batch_stride * UNIT_K)
        v_base += row * (v_batch_stride * UNIT_V)
    k_base, v_base = tl.multiple_of(k_base, LIES_ON), tl.multiple_of(v_base, LIES_ON)
    k_matrix = (k_base, k_batch_stride, k_row_stride, k_dim_stride)
    v_matrix = (v_base, v_batch_stride, v_row_stride, v_dim_stride)
    scale *= scale_of(k_scale_ptr, head_kv)
    slopes = per_row(slopes_ptr, sequence, head, inside, slopes_batch_stride, slopes_head_stride)
    alibi = () if slopes_ptr is None else (slopes[0][:, None],)
    state = attend_cache(
        q, k_matrix, v_matrix, table, q_pos[:, None], fresh_state(BLOCK_Q, BLOCK_DIM_V),
        (len_q, kv_start, kv_stop, offset), left, right, (seen_start, seen_stop),
        (scale, option(softcap), (), alibi, ()), begin, end,
        DIM_QK, DIM_V, BLOCK_KV, BLOCK_DIM_QK, BLOCK_DIM_V, UNIT_K, UNIT_V, SCATTERED, EXACT, PRECISION,
    )  # fmt: skip
    row_max, row_sum, acc = state
    row_sum_or_1 = tl.where(row_sum == 0, 1.0, row_sum)
    out, lse = acc / row_sum_or_1[:, None], row_max + tl.log2(row_sum_or_1)
    out *= scale_of(v_scale_ptr, head_kv)
    out_base = tl.multiple_of(out_ptr + sequence * (out_batch_stride * UNIT_Q), LIES_ON)
    lse_rows = () if lse_ptr is None else (lse_ptr + sequence * lse_batch_stride, lse_row_stride, lse_head_stride)
    results = ((out_base, out_row_stride, out_head_stride, 1), lse_rows)
    sinks = (sink_ptr, sequence, sink_batch_stride, sink_head_stride)
    if used == 1:
        finish_rows(out, lse, results, sinks, tile_rows, BLOCK_Q, DIM_V, BLOCK_DIM_V, UNIT_Q)
    elif partial_ptr is not None:
        join_splits(
            out, lse, tile, split, used, splits, partial_ptr, arrived_ptr, results, sinks, tile_rows,
            BLOCK_Q, DIM_V, BLOCK_DIM_V, UNIT_Q, MERGE_ROWS, MERGE_AT_ONCE,
        )  # fmt: skip
