"""What one call amounts to: its sizes, its visible pairs, the tiles visited and the operations they need.

All of it is exact integer arithmetic on a `Shape`; `tilewise.machine.cost` says what each way of computing moves.

>>> flops(Shape.square(16384, 128))  # 4 N^2 d
137438953472
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from tilewise.problem.blocks import block_ranges

if TYPE_CHECKING:
    from tilewise.problem.problem import Problem


@dataclass(frozen=True)
class Shape:
    """The sizes of one call and its diagonal band (see `tilewise.problem.blocks`); ``itemsize`` is in bytes."""

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    dim_qk: int
    dim_v: int
    itemsize: int = 2
    left: int | None = None
    right: int | None = None
    offset: int = 0

    @staticmethod
    def square(
        length: int, dim: int, *, batch: int = 1, heads: int = 1, itemsize: int = 2, causal: bool = False
    ) -> Shape:
        """Give the textbook case: as many queries as keys, one head dim, every query head with keys of its own.

        >>> Shape.square(8, 4, causal=True).pairs
        36
        """
        return Shape(batch, heads, heads, length, length, dim, dim, itemsize, None, 0 if causal else None)

    @staticmethod
    def of(problem: Problem) -> Shape:
        """Give the shape of a call. A varlen call counts as one sequence, its upper bound: the device knows more."""
        band, packed = problem.mask.band, problem.kind == "varlen"
        return Shape(
            1 if packed else problem.batch,
            problem.heads_q,
            problem.heads_kv,
            problem.total_q,
            problem.total_kv,
            problem.dim_qk,
            problem.dim_v,
            problem.itemsize,
            band.left,
            band.right,
            band.offset(problem.total_q, problem.total_kv),
        )

    @property
    def itemsize32(self) -> int:
        """Bytes of a number kept in float32, or in float64 beside float64 inputs."""
        return max(4, self.itemsize)

    @property
    def rows(self) -> int:
        """Rows of softmax: queries of all heads."""
        return self.batch * self.heads_q * self.len_q

    @property
    def size_q(self) -> int:
        """Elements of q and of dq."""
        return self.rows * self.dim_qk

    @property
    def size_out(self) -> int:
        """Elements of out and of d_out."""
        return self.rows * self.dim_v

    @property
    def size_kv(self) -> int:
        """Elements of k and v together."""
        return self.batch * self.heads_kv * self.len_kv * (self.dim_qk + self.dim_v)

    @property
    def size_scores(self) -> int:
        """Elements of the score matrix, seen or not.

        >>> shape = Shape.square(16384, 128)
        >>> shape.size_scores * shape.itemsize // 2**20  # MiB for one head in float16
        512
        """
        return self.rows * self.len_kv

    def depth(self, qk: int, v: int) -> int:
        """Give the multiplications for one pair in ``qk`` products over or into dim_qk and ``v`` over or into dim_v."""
        return qk * self.dim_qk + v * self.dim_v

    @property
    def pairs(self) -> int:
        """Visible pairs of query and key, over all heads."""
        visible = visible_pairs(self.len_q, self.len_kv, self.left, self.right, self.offset)
        return self.batch * self.heads_q * visible


def visible_pairs(len_q: int, len_kv: int, left: int | None, right: int | None, offset: int) -> int:
    """Count the pairs that `tilewise.problem.blocks.is_visible` lets through, for one head, in closed form.

    Row ``q`` ends at key ``q + offset + right`` and starts at ``q + offset - left``, each clamped to the sequence; the
    count is the sum of the ends less the sum of the starts.

    >>> visible_pairs(4, 4, None, 0, 0), visible_pairs(16384, 16384, 1023, 0, 0)
    (10, 16253440)
    """
    ends = len_q * len_kv if right is None else _clamped_sum(offset + right + 1, len_q, len_kv)
    starts = 0 if left is None else _clamped_sum(offset - left, len_q, len_kv)
    return max(ends - starts, 0)  # below zero where the band is empty: each row starts after its end


def _clamped_sum(start: int, count: int, limit: int) -> int:
    """Sum min(max(m, 0), limit) over ``count`` integers m from ``start``."""

    def below(stop: int) -> int:
        ramp = min(max(stop, 0), limit + 1)  # terms that grow: 0, 1, ... up to the limit
        return ramp * (ramp - 1) // 2 + max(stop - limit - 1, 0) * limit

    return below(start + count) - below(start)


class Visits(NamedTuple):
    """What the tile loop of one head visits.

    ``masked`` and ``full`` count tiles of either kind; ``pairs`` the scores computed in them; ``loaded`` the rows of
    the inner side loaded, over all outer tiles; ``touched`` how many different rows of the inner side that is.
    """

    masked: int
    full: int
    pairs: int
    loaded: int
    touched: int


def visits(shape: Shape, block_q: int, block_kv: int, outer: Literal["q", "kv"] = "q") -> Visits:
    """Walk the tiles of one head by `tilewise.problem.blocks.block_ranges`, queries or keys outside.

    >>> visits(Shape.square(8, 4, causal=True), 4, 2)
    Visits(masked=4, full=2, pairs=48, loaded=12, touched=8)
    """
    left, right, offset = shape.left, shape.right, shape.offset
    outer_len, inner_len, block_outer, block_inner = shape.len_q, shape.len_kv, block_q, block_kv
    if outer == "kv":
        left, right, offset = right, left, -offset
        outer_len, inner_len, block_outer, block_inner = inner_len, outer_len, block_inner, block_outer
    masked = full = pairs = loaded = last = 0
    lowest = inner_len
    for start in range(0, outer_len, block_outer):
        stop = min(start + block_outer, outer_len)
        first, full_first, full_stop, end = block_ranges(start, stop, 0, inner_len, left, right, offset, block_inner)
        if first == end:
            continue
        full += full_stop - full_first
        masked += end - first - (full_stop - full_first)
        low, high = first * block_inner, min(end * block_inner, inner_len)
        loaded += high - low
        pairs += (high - low) * (stop - start)
        lowest, last = min(lowest, low), max(last, high)
    # The band moves one key a query, so that the ranges of neighbouring tiles leave no gap.
    return Visits(masked, full, pairs, loaded, max(last - lowest, 0))


def flops(shape: Shape, *, backward: bool = False) -> int:
    """Count the operations that the visible pairs need, a multiplication and an addition as two.

    Forward two products, ``q k^T`` and ``p v``: 2 pairs (dim_qk + dim_v), or 4 N^2 d. Backward five, since ``q k^T`` is
    computed anew (FA-1 appendix B; FA-2 algorithm 2), then ``d_out v^T``, ``p^T d_out``, ``ds k``, ``ds^T q``:
    2 pairs (3 dim_qk + 2 dim_v), 2.5 times as many where the dims agree.

    >>> flops(Shape.square(16384, 128)), flops(Shape.square(16384, 128), backward=True)
    (137438953472, 343597383680)
    """
    return 2 * shape.pairs * (shape.depth(3, 2) if backward else shape.depth(1, 1))


def nominal_flops(shape: Shape, *, backward: bool = False) -> int:
    """Count as benchmarks of this field do: every pair, halved when causal, backward 2.5 times the forward pass.

    Source: the benchmark script of FA-2, section 4.1. It differs from `flops` by the diagonal: N^2 / 2 against
    N (N + 1) / 2 pairs.

    >>> nominal_flops(Shape.square(16384, 128, causal=True)) * 2 == nominal_flops(Shape.square(16384, 128))
    True
    """
    causal = shape.left is None and shape.right == 0
    forward = 2 * shape.size_scores * shape.depth(1, 1) // (2 if causal else 1)
    return forward * 5 // 2 if backward else forward
