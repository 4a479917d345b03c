"""Which rank holds which rows, and what one rank's queries see of another's keys: arithmetic, no tensors.

A sequence of N tokens on W ranks is cut into 2 W chunks of N / (2 W) tokens, rounded, and rank r holds chunks r and
2 W - 1 - r: one early, one late. Under a causal mask every rank then has as many visible pairs as any other, and as
many with each other rank's keys. With order="contiguous" rank r holds the r-th of W parts, which suits a narrow
window: neighbours then hold all that is seen. Nothing needs to divide by anything, and chunks may be empty.

Rank r holds the same rows whichever way attention is computed. On a mesh of R x U ranks, counted row by row, the U
ranks of row r together hold chunks r and 2 R - 1 - r of a sequence on R ranks: the rule nests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

Order = Literal["zigzag", "contiguous"]
Range = tuple[int, int]  # half open

ORDERS: tuple[Order, ...] = ("zigzag", "contiguous")


def rows_of(rank: int, ranks: int, length: int, order: Order) -> tuple[Range, ...]:
    """Give the positions that a rank holds: sorted ranges, none empty, no two adjacent.

    >>> [rows_of(rank, 2, 16, "zigzag") for rank in range(2)]
    [((0, 4), (12, 16)), ((4, 12),)]
    >>> [rows_of(rank, 2, 5, "contiguous") for rank in range(2)]
    [((0, 2),), ((2, 5),)]
    """
    if order == "contiguous":
        return joined([_chunk(rank, ranks, length)])
    return joined([_chunk(rank, 2 * ranks, length), _chunk(2 * ranks - 1 - rank, 2 * ranks, length)])


def _chunk(index: int, count: int, length: int) -> Range:
    return index * length // count, (index + 1) * length // count


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort ranges that do not overlap, drop empty ones and join adjacent ones.

    >>> joined([(6, 8), (0, 2), (3, 3), (2, 4)])
    ((0, 4), (6, 8))
    """
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def size(ranges: Iterable[Range]) -> int:
    """Count the positions in ranges."""
    return sum(stop - start for start, stop in ranges)


class Piece(NamedTuple):
    """One call of attention inside a hop, in the ranks' own rows and keys: query ``rows`` against ``keys``.

    Query ``rows[0] + i`` sees keys ``keys[0] + i - left`` to ``keys[0] + i + right``; None is an open side. ``bounds``
    are cumulative lengths of documents, which rows and keys then share.
    """

    rows: Range
    keys: Range
    left: int | None = None
    right: int | None = None
    bounds: tuple[int, ...] | None = None

    @property
    def is_full(self) -> bool:
        """True where every query sees every key."""
        return self.left is None and self.right is None and self.bounds is None


@dataclass(frozen=True)
class Sharding:
    """One sequence on a mesh of ``ring`` x ``exchange`` ranks, and what its queries may see.

    ``left``, ``right`` and ``offset`` are the band over whole sequences (`tilewise.problem.mask.Band`), ``bounds`` the
    cumulative lengths of packed documents, which see nothing of each other.
    """

    length_q: int
    length_kv: int
    ring: int
    exchange: int
    order: Order
    left: int | None = None
    right: int | None = None
    offset: int = 0
    bounds: tuple[int, ...] | None = None

    def queries(self, rank: int) -> tuple[Range, ...]:
        """Give the query positions of a rank of the ring: those that its exchange group holds together."""
        return self._held(rank, self.length_q)

    def keys(self, rank: int) -> tuple[Range, ...]:
        """Give the key positions of a rank of the ring."""
        return self._held(rank, self.length_kv)

    def _held(self, rank: int, length: int) -> tuple[Range, ...]:
        members = range(rank * self.exchange, (rank + 1) * self.exchange)
        return joined(part for member in members for part in self.of_member(member, length))

    def of_member(self, member: int, length: int) -> tuple[Range, ...]:
        """Give the positions that one rank of the whole mesh holds of a sequence of ``length``."""
        return rows_of(member, self.ring * self.exchange, length, self.order)

    def hop(self, rank: int, source: int) -> tuple[Piece, ...]:
        """Give the calls that a rank's queries and a source's keys need: none where nothing is visible.

        Two ranks, causal: what rank 1 holds follows rank 0's first chunk and precedes its second.

        >>> sharding = Sharding(16, 16, 2, 1, "zigzag", right=0)
        >>> sharding.hop(1, 0)
        (Piece(rows=(0, 8), keys=(0, 4), left=None, right=None, bounds=None),)
        >>> sharding.hop(0, 0)
        (Piece(rows=(0, 8), keys=(0, 8), left=None, right=0, bounds=None),)
        """
        return _hop(self, rank, source)

    def needs(self, rank: int, source: int) -> Range:
        """Give the source's keys that a rank must be sent, in the source's own rows; (0, 0) where none."""
        pieces = self.hop(rank, source)
        if not pieces:
            return 0, 0
        return min(piece.keys[0] for piece in pieces), max(piece.keys[1] for piece in pieces)


@lru_cache(maxsize=16384)
def _hop(sharding: Sharding, rank: int, source: int) -> tuple[Piece, ...]:
    queries, keys, bounds = sharding.queries(rank), sharding.keys(source), sharding.bounds
    left, right, offset = sharding.left, sharding.right, sharding.offset
    if not queries or not keys:
        return ()
    if queries == keys and offset == 0 and left is None and right in (None, 0):
        # Own rows stand in the order of their positions, so what is causal there is causal here, gap or not.
        everything = (0, size(queries))
        local = None if bounds is None else _local_bounds(queries, bounds)
        return () if local == (0,) else (Piece(everything, everything, None, right, local),)
    pieces: list[Piece] = []
    row = 0
    for q_start, q_stop in queries:
        key = 0
        for kv_start, kv_stop in keys:
            if bounds is not None and (q_start, q_stop) == (kv_start, kv_stop):
                local = _local_bounds(((q_start, q_stop),), bounds)
                here = (row, row + q_stop - q_start), (key, key + kv_stop - kv_start)
                pieces += [Piece(*here, left, right, local)] if local != (0,) else []
            else:
                for q_part, kv_part in _documents((q_start, q_stop), (kv_start, kv_stop), bounds):
                    piece = _trimmed(q_part, kv_part, left, right, offset)
                    if piece is not None:
                        pieces.append(_moved(piece, q_part[0] - q_start + row, kv_part[0] - kv_start + key))
            key += kv_stop - kv_start
        row += q_stop - q_start
    return tuple(_fused(pieces))


def _documents(rows: Range, keys: Range, bounds: Sequence[int] | None) -> list[tuple[Range, Range]]:
    """Give the parts of two ranges that lie in the same document; for ranges that do not overlap at most one."""
    if bounds is None:
        return [(rows, keys)]
    parts = [
        ((max(rows[0], start), min(rows[1], stop)), (max(keys[0], start), min(keys[1], stop)))
        for start, stop in pairwise(bounds)
    ]
    return [(q, kv) for q, kv in parts if q[0] < q[1] and kv[0] < kv[1]]


def _local_bounds(ranges: Sequence[Range], bounds: Sequence[int]) -> tuple[int, ...]:
    """Count the rows of ranges before each document's start: cumulative lengths of what the ranges hold of each."""
    return tuple(sorted({sum(min(max(bound, a), b) - a for a, b in ranges) for bound in bounds}))


def _trimmed(rows: Range, keys: Range, left: int | None, right: int | None, offset: int) -> Piece | None:
    """Cut two ranges of positions down to what sees and is seen, from 0 on; both sides of the band are then 0 or more.

    Between position ranges that start apart, the band is ``i - left' <= j <= i + right'`` with a side that may be
    negative; dropping the keys before the first visible one, or the queries before the first that sees, mends that.
    """
    n_rows, n_keys = rows[1] - rows[0], keys[1] - keys[0]
    shift = rows[0] + offset - keys[0]
    row_start, row_stop, key_start, key_stop = 0, n_rows, 0, n_keys
    if left is not None:
        left -= shift
        key_start = max(0, -left)
        row_stop = min(n_rows, n_keys + left)
    if right is not None:
        right += shift
        row_start = max(0, -right)
        key_stop = min(n_keys, n_rows + right)
    if row_start >= row_stop or key_start >= key_stop:
        return None
    moved = row_start - key_start
    n_rows, n_keys = row_stop - row_start, key_stop - key_start
    if left is not None:
        left = None if left - moved >= n_rows - 1 else left - moved
    if right is not None:
        right = None if right + moved >= n_keys - 1 else right + moved
    return Piece((row_start, row_stop), (key_start, key_stop), left, right)


def _moved(piece: Piece, row: int, key: int) -> Piece:
    rows, keys = piece.rows, piece.keys
    return piece._replace(rows=(rows[0] + row, rows[1] + row), keys=(keys[0] + key, keys[1] + key))


def _fused(pieces: list[Piece]) -> list[Piece]:
    """Join full pieces that lie side by side: fewer and larger calls, and fewer merges."""
    for index, one in enumerate(pieces):
        for other in pieces[index + 1 :]:
            if not (one.is_full and other.is_full):
                continue
            rows = one.rows if one.rows == other.rows else (one.rows[0], other.rows[1])
            keys = one.keys if one.keys == other.keys else (one.keys[0], other.keys[1])
            beside = (one.rows == other.rows and one.keys[1] == other.keys[0]) or (
                one.keys == other.keys and one.rows[1] == other.rows[0]
            )
            if beside:
                rest = [piece for piece in pieces if piece not in (one, other)]
                return _fused([*rest, Piece(rows, keys)])
    return pieces
