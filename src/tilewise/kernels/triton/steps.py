"""The steps that the attention kernels are made of, each with one job.

What belongs together travels as a tuple: where a tile lies (``place``), or what a feature needs (``mask``, ``bias``).
The empty tuple says that a feature is absent, and then no code is made for it.

A tile of scores is (block_q, block_kv) or transposed: positions come with an axis of size 1, ``q_pos[:, None]`` and
``kv_pos[None, :]`` or the other way round, and all else follows by broadcasting.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from __future__ import annotations

import math

import triton
import triton.language as tl

from tilewise.kernels.share import share
from tilewise.problem import blocks

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))
FAR_LSE = tl.constexpr(2.0**24)  # from here on, neighbours in float32 lie 1 and more apart
MOST_POSITIONS = tl.constexpr(2**30)  # no position reaches it

block_ranges = share(blocks.block_ranges)
is_visible = share(blocks.is_visible)


# ---- where a program works ------------------------------------------------------------------------------------------


@triton.jit
def sequence_of_tile(tile, cu_ptr, batch, total, BLOCK: tl.constexpr):
    """Find the packed sequence that a tile of rows belongs to; ``batch`` stands for the rows after the last one.

    Sequence s owns the tiles from ``cu[s] // BLOCK + s`` on: at least as many as its rows need, and in rising order, so
    that a binary search finds the owner without a table made on the host.
    """
    low = 0
    high = batch
    while low < high:
        middle = (low + high + 1) // 2
        start = clamped(tl.load(cu_ptr + middle), total)
        if start // BLOCK + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def clamped(length, most):
    """Hold a length that only the device knows to [0, most]."""
    return tl.minimum(tl.maximum(length, 0), most).to(tl.int32)


@triton.jit
def packed_tile(tile, cu_ptr, cu_other_ptr, batch, total, total_other, BLOCK: tl.constexpr):
    """Place a tile of packed rows: sequence, is_tail, first row in it, then base row and length here and across.

    Rows behind the last sequence are a sequence with nothing across.
    """
    sequence = sequence_of_tile(tile, cu_ptr, batch, total, BLOCK)
    is_tail = sequence == batch
    after = tl.minimum(sequence + 1, batch)
    base = clamped(tl.load(cu_ptr + sequence), total)
    stop = tl.where(is_tail, total, clamped(tl.load(cu_ptr + after), total))
    other_base = clamped(tl.load(cu_other_ptr + sequence), total_other)
    other_stop = clamped(tl.load(cu_other_ptr + after), total_other)
    start = (tile - (base // BLOCK + sequence)) * BLOCK
    length = tl.maximum(stop - base, 0)
    other_length = tl.where(is_tail, 0, tl.maximum(other_stop - other_base, 0))
    return tl.minimum(sequence, batch - 1), is_tail, start, base, length, other_base, other_length


@triton.jit
def key_range(sequence, kv_start_ptr, kv_stop_ptr, len_kv, left, right):
    """Give the sequence's own range of keys, empty where no query of it can see any."""
    kv_start = 0
    kv_stop = len_kv
    if kv_start_ptr is not None:
        kv_start = clamped(tl.load(kv_start_ptr + sequence), len_kv)
    if kv_stop_ptr is not None:
        kv_stop = clamped(tl.load(kv_stop_ptr + sequence), len_kv)
    if left is not None and right is not None:  # a band that is empty everywhere
        kv_stop = tl.where(left + right < 0, kv_start, kv_stop)
    return kv_start, kv_stop


@triton.jit
def key_blocks(q_start, place, left, right, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BARE: tl.constexpr):
    """Give the edges of the blocks of keys for a tile of queries (masked, bare, masked), and the keys that it sees.

    Without BARE all blocks are masked: a dense mask may hide anything anywhere.
    """
    len_q, kv_start, kv_stop, offset = place
    q_stop = tl.minimum(q_start + BLOCK_Q, len_q)
    edges = block_ranges(q_start, q_stop, kv_start, kv_stop, left, right, offset, BLOCK_KV)
    seen = block_ranges(q_start, q_stop, kv_start, kv_stop, left, right, offset, 1)
    if not BARE:
        edges = (edges[0], edges[3], edges[3], edges[3])
    return edges, (seen[0], seen[3])


@triton.jit
def query_blocks(tile_start, place, left, right, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BARE: tl.constexpr):
    """Give the same for a tile of keys: the blocks of queries and the queries that see it."""
    len_q, kv_start, kv_stop, offset = place
    kv_first, kv_last = tl.maximum(tile_start, kv_start), tl.minimum(tile_start + BLOCK_KV, kv_stop)
    q_stop = tl.where(kv_first < kv_last, len_q, 0)
    edges = block_ranges(kv_first, kv_last, 0, q_stop, right, left, -offset, BLOCK_Q)
    seen = block_ranges(kv_first, kv_last, 0, q_stop, right, left, -offset, 1)
    if not BARE:
        edges = (edges[0], edges[3], edges[3], edges[3])
    return edges, (seen[0], seen[3])


# ---- tiles ----------------------------------------------------------------------------------------------------------


@triton.jit
def base_of(pointer, sequence, head, row, batch_stride, head_stride, row_stride, UNIT: tl.constexpr):
    """Point at a row of one sequence and head; strides count UNIT elements."""
    return pointer + (sequence * batch_stride + head * head_stride + row * row_stride) * UNIT


@triton.jit
def pairs_of(pointer, sequence, head, row, batch_stride, head_stride, q_stride, kv_stride, width):
    """Gather what `load_pairs` needs of a bias or a mask, or () where there is none."""
    if pointer is None:
        pairs = ()
    else:
        base = base_of(pointer, sequence, head, row, batch_stride, head_stride, q_stride, 1)
        pairs = (base, q_stride, kv_stride, width)
    return pairs


@triton.jit
def scalar_of(pointer, sequence, head, batch_stride, head_stride):
    """Load one number of a sequence and head, as (number,), or () where there is none."""
    if pointer is None:
        scalar = ()
    else:
        scalar = (tl.load(pointer + (sequence * batch_stride + head * head_stride)).to(tl.float32),)
    return scalar


@triton.jit
def option(value):
    """Give (value,), or () for None."""
    return () if value is None else (value,)


# ---- what users' functions need -------------------------------------------------------------------------------------
#
# ``mods`` holds what a call's functions and lists of tiles need, as `tilewise.backends.triton_mods` fills it: the
# score_mod's tensors and constants, the mask_mod's, where gradients of the score_mod's tensors go, and the lists.


@triton.jit
def mods_of(mods, sequence, head, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr):
    """Gather what a score_mod and a mask_mod are given beside scores and positions; () for what is absent."""
    score_mod = () if SCORE_MOD is None else (sequence, head, mods[0], mods[1], mods[4])
    mask_mod = () if MASK_MOD is None else (sequence, head, mods[2], mods[3])
    return score_mod, mask_mod


@triton.jit
def parts_of(edges, mods, sequence, head, start, LIST: tl.constexpr, ACROSS: tl.constexpr, BLOCK: tl.constexpr):
    """Give the ranges of blocks between the edges, masked, bare and masked; or those listed, partial and full.

    With them comes where the lists lie, or () for each. A row of tiles covers LIST positions, an entry ACROSS positions
    on the other axis, which are ``ACROSS // BLOCK`` blocks; without lists both are 0.
    """
    if LIST == 0:
        parts, entries = ((edges[0], edges[1]), (edges[1], edges[2]), (edges[2], edges[3])), ((), (), ())
    else:
        partial_start_ptr, partial_ptr, full_start_ptr, full_ptr, batch_stride, head_stride = mods[5]
        row = sequence * batch_stride + head * head_stride + start // LIST
        EACH: tl.constexpr = ACROSS // BLOCK
        partial = (tl.load(partial_start_ptr + row) * EACH, tl.load(partial_start_ptr + row + 1) * EACH)
        full = (tl.load(full_start_ptr + row) * EACH, tl.load(full_start_ptr + row + 1) * EACH)
        parts, entries = (partial, full, full), (partial_ptr, full_ptr, full_ptr)
    return parts, entries


@triton.jit
def block_start(entries, number, stop, ACROSS: tl.constexpr, BLOCK: tl.constexpr):
    """Say where a block begins, the ``number``-th of those listed; 0 behind the last, which nobody computes.

    A loop asks for the next one ahead of time: what it loads then waits for no other load.
    """
    EACH: tl.constexpr = ACROSS // BLOCK
    tile = tl.load(entries + number // EACH, mask=number < stop, other=0)
    return tile * ACROSS + number % EACH * BLOCK


@triton.jit
def tile_pointers(
    base, start, row_stride, dim_stride, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, UNIT: tl.constexpr
):
    """Point at rows ``start`` to ``start + BLOCK`` of a matrix: (BLOCK, BLOCK_DIM).

    UNIT is 1 for any strides. Where the base lies on 16 bytes, the last axis is dense and a row is a multiple of 16
    bytes, UNIT is the elements in 16 bytes and row_stride counts such units: what the compiler must know to load 16
    bytes at once, with no variant for each stride.
    """
    rows = tl.arange(0, BLOCK).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    base += start * (row_stride * UNIT)
    if UNIT > 1:
        pointers = tl.multiple_of(base, 16) + (rows[:, None] * (row_stride * UNIT) + dims[None, :])
    else:
        pointers = base + (rows[:, None] * row_stride + dims[None, :] * dim_stride)
    return pointers


@triton.jit
def load_rows(
    matrix, start, first, stop,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, BOUNDED: tl.constexpr, UNIT: tl.constexpr, piece=0,
):  # fmt: skip
    """Load rows ``start`` to ``start + BLOCK`` of a matrix (base, row_stride, dim_stride): (BLOCK, BLOCK_DIM).

    Zero beyond DIM and, if BOUNDED, outside [first, stop). Of a matrix wider than BLOCK_DIM it is one piece.
    """
    base, row_stride, dim_stride = matrix
    PADDED: tl.constexpr = DIM < BLOCK_DIM or DIM % BLOCK_DIM > 0
    if DIM > BLOCK_DIM:
        base += piece * BLOCK_DIM * dim_stride
    pointers = tile_pointers(base, start, row_stride, dim_stride, BLOCK, BLOCK_DIM, UNIT)
    rows = start + tl.arange(0, BLOCK)
    inside_rows = ((rows >= first) & (rows < stop))[:, None]
    inside_dims = (tl.arange(0, BLOCK_DIM) < DIM - piece * BLOCK_DIM)[None, :]
    if BOUNDED and PADDED:
        tile = tl.load(pointers, mask=inside_rows & inside_dims, other=0.0)
    elif BOUNDED:
        tile = tl.load(pointers, mask=inside_rows, other=0.0)
    elif PADDED:
        tile = tl.load(pointers, mask=inside_dims, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(
    matrix, start, stop, tile,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, UNIT: tl.constexpr, piece=0,
):  # fmt: skip
    """Store a tile (BLOCK, BLOCK_DIM) to rows ``start`` up to ``stop`` of a matrix or its piece, in its own type."""
    base, row_stride, dim_stride = matrix
    if DIM > BLOCK_DIM:
        base += piece * BLOCK_DIM * dim_stride
    pointers = tile_pointers(base, start, row_stride, dim_stride, BLOCK, BLOCK_DIM, UNIT)
    inside_dims = tl.arange(0, BLOCK_DIM) < DIM - piece * BLOCK_DIM
    inside = (start + tl.arange(0, BLOCK) < stop)[:, None] & inside_dims[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_pairs(pairs, q_pos, kv_pos, len_q, PACKED: tl.constexpr):
    """Load the tile of a bias or a mask (base, q_stride, kv_stride, width), zero outside.

    A packed bias may be narrower than its longest sequence, if the device's lengths say so: its last column serves.
    """
    base, q_stride, kv_stride, width = pairs
    if PACKED:
        kv_pos = tl.minimum(kv_pos, width - 1)
    pointers = base + (q_pos.to(tl.int64) * q_stride + kv_pos.to(tl.int64) * kv_stride)
    return tl.load(pointers, mask=(q_pos < len_q) & (kv_pos < width), other=0)


# ---- pieces ---------------------------------------------------------------------------------------------------------
#
# A head dim too wide for the chip comes in pieces of BLOCK_DIM columns. A product over it begins with the first piece,
# as if there were no other, and `add_pieces` adds the rest. Of the results a program owns one piece, for which
# `own_piece` finds the rows; programs along the grid's second axis own the others, and each computes the scores for
# itself. Where one piece is all, no code is made here. A source is (matrix, start, first, stop), for `load_rows`.


@triton.jit
def add_pieces(
    product, resting, streaming,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BOUNDED: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    NEGATIVE: tl.constexpr = False,
):  # fmt: skip
    """Add to ``dot(resting, streaming.T)`` of the first pieces what the others contribute; both are sources.

    Of what rests in a program, too, the other pieces are loaded for each block of streaming rows. The compiler would
    see that they are the same each time, and hold them all through the loop: so a bound seems to change with the block.
    BOUNDED speaks of the streaming rows; NEGATIVE negates what rests.
    """
    for piece in tl.static_range(1, (DIM + BLOCK_DIM - 1) // BLOCK_DIM):
        matrix, start, first, stop = resting
        stop = tl.where(streaming[1] < MOST_POSITIONS, stop, first)
        a = load_rows(matrix, start, first, stop, DIM, product.shape[0], BLOCK_DIM, True, UNIT, piece)
        matrix, start, first, stop = streaming
        b = load_rows(matrix, start, first, stop, DIM, product.shape[1], BLOCK_DIM, BOUNDED, UNIT, piece)
        product = tl.dot(-a if NEGATIVE else a, b.T, product, input_precision=PRECISION)
    return product


@triton.jit
def own_piece(
    tile, source, visible, piece, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BOUNDED: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Give the piece of rows that a program's own columns are summed from; tile is the first one.

    With (visible,) instead of () it zeroes the rows that no query of the tile sees.
    """
    if DIM > BLOCK_DIM:
        matrix, start, first, stop = source
        tile = load_rows(matrix, start, first, stop, DIM, tile.shape[0], BLOCK_DIM, BOUNDED, UNIT, piece)
        if len(visible) > 0:
            tile = zero_unseen(tile, visible[0])
    return tile


# ---- scores ---------------------------------------------------------------------------------------------------------


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """Hyperbolic tangent from exp2; EXACT keeps its relative accuracy near zero too, by the series."""
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - decay) / (1.0 + decay)
    far = tl.where(x < 0, -far, far)
    if EXACT:
        square = x * x
        series = square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
        return tl.where(square < 0.0625, x + x * series, far)
    return far


@triton.jit
def visible_pairs(q_pos, kv_pos, place, left, right, mask, MASK_MOD: tl.constexpr = None):
    """Say which pairs of the tile are visible; rows behind the last query see nothing.

    mask is what a dense mask needs and what MASK_MOD needs, () for each that is absent or not to be asked.
    """
    return seen_pairs(q_pos, kv_pos, place, left, right, mask, MASK_MOD) & (q_pos < place[0])


@triton.jit
def seen_pairs(q_pos, kv_pos, place, left, right, mask, MASK_MOD: tl.constexpr = None):
    """Say the same where rows behind the last query are nobody's: they may see what they like."""
    len_q, kv_start, kv_stop, offset = place
    pairs, mod = mask
    visible = is_visible(q_pos, kv_pos, kv_start, kv_stop, left, right, offset)
    if len(pairs) > 0:
        visible = visible & (load_pairs(pairs, q_pos, kv_pos, len_q, False) != 0)
    if len(mod) > 0:
        sequence, head, tensors, constants = mod
        visible = visible & MASK_MOD(sequence, head, q_pos, kv_pos, tensors, constants)
    return visible


@triton.jit
def within(q_pos, kv_pos, place):
    """Say which pairs of a tile are inside the lengths, where no mask is asked."""
    len_q, kv_start, kv_stop, _ = place
    return (q_pos < len_q) & (kv_pos >= kv_start) & (kv_pos < kv_stop)


@triton.jit
def zero_unseen(rows, visible):
    """Zero the keys or values (block_kv, dim) that no query of the tile sees: 0 * NaN would spread."""
    seen = (tl.max(visible.to(tl.int32), 0) > 0)[:, None]
    return tl.where(seen, rows, tl.zeros_like(rows))


@triton.jit
def finish_score(
    score, q_pos, kv_pos, place, score_with, EXACT: tl.constexpr, PACKED: tl.constexpr, SCORE_MOD: tl.constexpr = None
):
    """Make a score in base 2 of ``dot(q, k)``: scale, softcap, bias, ALiBi, score_mod; and give what gradients need.

    That is the softcap's derivative, and the score that the score_mod was given, each in a tuple or ().
    Without all of them the product stays as it is: the scale goes into exp2's argument, where it is free. A score_mod
    works in natural-log units; what it gives comes to base 2 in exp2's argument too.
    """
    len_q, _, _, offset = place
    scale, softcap, bias, alibi, mod = score_with
    BASE: tl.constexpr = LOG2E if len(mod) == 0 else 1.0
    derivative = ()
    if len(softcap) > 0:
        capped = tanh(score * (scale / softcap[0]), EXACT)
        derivative = (1.0 - capped * capped,)
        score = capped * (softcap[0] * BASE)
    elif len(bias) > 0 or len(alibi) > 0 or len(mod) > 0:
        score = score * (scale * BASE)
    if len(bias) > 0:
        score = score + load_pairs(bias, q_pos, kv_pos, len_q, PACKED).to(tl.float32) * BASE
    if len(alibi) > 0:
        distance = tl.abs(q_pos + offset - kv_pos)
        score = score - (alibi[0] * BASE) * distance.to(tl.float32)
    given = ()
    if len(mod) > 0:
        given = (score,)
        sequence, head, tensors, constants, _ = mod
        score = SCORE_MOD(score, sequence, head, q_pos, kv_pos, tensors, constants)
    return score, derivative, given


@triton.jit
def exponent_factor(score_with):
    """Give the factor that `finish_score` left to exp2's argument."""
    scale, softcap, bias, alibi, mod = score_with
    plain = 1.0 if len(softcap) > 0 or len(bias) > 0 or len(alibi) > 0 else scale * LOG2E
    return LOG2E if len(mod) > 0 else plain


@triton.jit
def through_mod(ds, given, q_pos, kv_pos, place, score_with, visible, SCORE_GRADIENT: tl.constexpr):
    """Take the gradient of a score back through the score_mod, adding what its tensors get to their gradients.

    ``given`` holds the score that it was given, or is () where there is none; visible as in `visible_pairs`, or ().
    Hidden pairs give nothing: their scores may be NaN, and the slopes.
    """
    if len(given) > 0:
        sequence, head, tensors, constants, into = score_with[4]
        d_tensors, scatters = into
        if len(visible) > 0:
            seen = visible[0]
        elif len(scatters) > 0:
            seen = within(q_pos, kv_pos, place)
        else:
            seen = True
        ds = SCORE_GRADIENT(given[0], sequence, head, q_pos, kv_pos, tensors, constants, ds, d_tensors, seen)
    return ds


@triton.jit
def is_kept(q_pos, kv_pos, drop):
    """Say which pairs survive dropout (seed, dropout, head, sequence), by the generator of problem/philox.py."""
    seed, dropout, head, sequence = drop
    zero = (q_pos + kv_pos) * 0
    word, _, _, _ = tl.philox(seed, zero + kv_pos, zero + q_pos, zero + head, zero + sequence)
    return tl.uint_to_uniform_float(word) >= dropout
