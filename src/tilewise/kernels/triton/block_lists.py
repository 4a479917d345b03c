"""Which tiles a mask_mod leaves empty, shows in part or shows whole: the kernel that evaluates it over all pairs.

One program walks the row of tiles of 128 queries, or as many as a tile has, and keeps of each tile no more than its
number of visible pairs. It runs twice: to count the tiles to be listed, so that the host can make room, and to list
them.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from __future__ import annotations

import triton.language as tl

from tilewise.kernels.share import kernel
from tilewise.kernels.triton.steps import block_ranges, is_visible


@kernel
def list_tiles(
    partial_place_ptr, full_place_ptr, partial_ptr, full_ptr,
    heads: tl.int32, tiles_q: tl.int32, len_q: tl.int32, len_kv: tl.int32, left, right, offset: tl.int32,
    mods: tl.tuple,
    MASK_MOD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    PIECE_Q: tl.constexpr, PIECE_KV: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """List one row's partial and full tiles; without FILL, store how many there are at the row's place.

    With FILL the two places are where the row's tiles begin in ``partial`` and ``full``. ``mods`` holds the tensors and
    the constants of MASK_MOD. A tile is gone over in pieces of PIECE_Q x PIECE_KV pairs, which registers can hold.
    """
    row = tl.program_id(0)
    slot = row // tiles_q
    q_start = (row % tiles_q) * BLOCK_Q
    q_stop = tl.minimum(q_start + BLOCK_Q, len_q)
    first, _, _, stop = block_ranges(q_start, q_stop, 0, len_kv, left, right, offset, BLOCK_KV)
    partial_place = 0
    full_place = 0
    if FILL:
        partial_place = tl.load(partial_place_ptr + row)
        full_place = tl.load(full_place_ptr + row)
    for tile in range(first, stop):
        seen = tl.zeros((PIECE_Q, PIECE_KV), tl.int32)
        for piece in range((BLOCK_Q // PIECE_Q) * (BLOCK_KV // PIECE_KV)):
            q_piece = q_start + piece // (BLOCK_KV // PIECE_KV) * PIECE_Q
            kv_piece = tile * BLOCK_KV + piece % (BLOCK_KV // PIECE_KV) * PIECE_KV
            q_pos = (q_piece + tl.arange(0, PIECE_Q))[:, None]
            kv_pos = (kv_piece + tl.arange(0, PIECE_KV))[None, :]
            visible = is_visible(q_pos, kv_pos, 0, len_kv, left, right, offset) & (q_pos < len_q)
            if MASK_MOD is not None:
                visible = visible & MASK_MOD(slot // heads, slot % heads, q_pos, kv_pos, mods[0], mods[1])
            seen += visible.to(tl.int32)
        pairs = tl.sum(tl.sum(seen, 1), 0)
        is_full = pairs == BLOCK_Q * BLOCK_KV
        is_partial = (pairs > 0) & (pairs < BLOCK_Q * BLOCK_KV)
        if FILL:
            tl.store(partial_ptr + partial_place, tile, mask=is_partial)
            tl.store(full_ptr + full_place, tile, mask=is_full)
        partial_place += is_partial.to(tl.int32)
        full_place += is_full.to(tl.int32)
    if not FILL:
        tl.store(partial_place_ptr + row, partial_place)
        tl.store(full_place_ptr + row, full_place)
