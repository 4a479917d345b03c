"""Which tiles to visit: the only place that knows.

Every ordinary mask (causal, sliding window, padding, packed documents, decoding) leaves each query an
interval of visible keys. Query ``q`` sees key ``kv`` when

    kv_start <= kv < kv_stop    and    q + offset - left <= kv <= q + offset + right

with ``None`` for a side that is open. The two functions below say this once for a tile and once for an element.
NumPy, torch, the stepper and the cost model call them as they stand, and ``kernels/share.py`` compiles the same
source for Triton and Gluon. So they use operators and builtin ``min`` and ``max`` alone, and clamp to zero before
each division: ``//`` floors in Python and truncates in Triton.

The backward pass needs no second rule. Which queries a tile of keys is seen by is the same question with the roles
swapped: ``left`` and ``right`` change places, the offset changes sign, and the query range takes the key range's place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import numpy as np
    import torch


def block_ranges(
    tile_start: int,
    tile_stop: int,
    kv_start: int,
    kv_stop: int,
    left: int | None,
    right: int | None,
    offset: int,
    block_kv: int,
) -> tuple[int, int, int, int]:
    """Give the blocks of ``block_kv`` keys that the query tile ``[tile_start, tile_stop)`` must visit.

    Returns ``(first, full_first, full_stop, stop)`` in blocks, with ``first <= full_first <= full_stop <= stop``.
    Blocks outside ``[first, stop)`` hold no visible pair. Inside ``[full_first, full_stop)`` every pair is visible, so
    the loop over them carries no mask. The two ends are masked:

    ``[first, full_first)`` masked, ``[full_first, full_stop)`` bare, ``[full_stop, stop)`` masked.

    Args:
        tile_start, tile_stop: query positions, half open, ``tile_start < tile_stop``.
        kv_start, kv_stop: the sequence's own range of keys, half open, ``kv_start >= 0``.
        left, right: keys visible to each side of the diagonal, inclusive; any integer, or None for an open side.
        offset: key position that lies on the diagonal of query 0.
        block_kv: keys in a block.

    Example: eight causal queries in tiles of four, keys in blocks of two. The second tile sees blocks 0 and 1
    entirely and blocks 2 and 3 in part.

    >>> block_ranges(0, 4, 0, 8, None, 0, 0, 2)
    (0, 0, 0, 2)
    >>> block_ranges(4, 8, 0, 8, None, 0, 0, 2)
    (0, 0, 2, 4)
    """
    visit_start = kv_start
    full_start = kv_start
    if left is not None:
        visit_start = max(tile_start + offset - left, kv_start)  # the first query reaches furthest back
        full_start = max(tile_stop - 1 + offset - left, kv_start)
    visit_stop = kv_stop
    full_end = kv_stop
    if right is not None:
        visit_stop = min(tile_stop + offset + right, kv_stop)  # the last query reaches furthest ahead
        full_end = min(tile_start + offset + right + 1, kv_stop)
    stop = (max(visit_stop, 0) + block_kv - 1) // block_kv
    first = min(max(visit_start, 0) // block_kv, stop)
    full_first = min((max(full_start, 0) + block_kv - 1) // block_kv, stop)
    full_stop = max(max(full_end, 0) // block_kv, full_first)
    return first, full_first, full_stop, stop


@overload
def is_visible(
    q_pos: int, kv_pos: int, kv_start: int, kv_stop: int, left: int | None, right: int | None, offset: int
) -> bool: ...
@overload
def is_visible(
    q_pos: np.ndarray,
    kv_pos: np.ndarray,
    kv_start: int | np.ndarray,
    kv_stop: int | np.ndarray,
    left: int | None,
    right: int | None,
    offset: int | np.ndarray,
) -> np.ndarray: ...
@overload
def is_visible(
    q_pos: torch.Tensor,
    kv_pos: torch.Tensor,
    kv_start: int | torch.Tensor,
    kv_stop: int | torch.Tensor,
    left: int | None,
    right: int | None,
    offset: int | torch.Tensor,
) -> torch.Tensor: ...
# The body carries no type hints: its arguments are all of the above and, in a kernel, Triton values.
def is_visible(q_pos, kv_pos, kv_start, kv_stop, left, right, offset):  # type: ignore[no-untyped-def]
    """Say, element by element, whether the query at ``q_pos`` sees the key at ``kv_pos``.

    Arguments broadcast against each other; the test of the key range is inside. See `block_ranges` for their meaning.

    >>> [is_visible(1, kv, 0, 4, None, 0, 0) for kv in range(4)]
    [True, True, False, False]
    """
    visible = (kv_pos >= kv_start) & (kv_pos < kv_stop)
    if left is not None:
        visible = visible & (kv_pos >= q_pos + offset - left)
    if right is not None:
        visible = visible & (kv_pos <= q_pos + offset + right)
    return visible
