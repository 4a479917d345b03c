"""How kernels count a problem: its tiles, its batch entries, the sides of its band, the memory of its results."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewise.problem.problem import Problem


def is_bshd(problem: Problem) -> bool:
    """Say whether the user's order of axes is (batch, len, heads, dim)."""
    return problem.kind == "dense" and problem.layout == "bshd"


def contiguous(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Give a shape and the strides of memory that is filled in its order."""
    return shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def clip(side: int | None, problem: Problem) -> int | None:
    """Hold a side of the band to what no query and key of the problem can exceed, so that sums stay within int32."""
    most = problem.total_q + problem.total_kv
    return None if side is None else max(-most, min(side, most))


def tile_count(problem: Problem, total: int, block: int) -> int:
    """Count the tiles of rows. The host never reads how long packed sequences are: each may end in a part of a tile."""
    return -(-total // block) + (problem.batch if problem.kind == "varlen" else 0)


def entries(problem: Problem) -> int:
    """Count the entries along the batch axis as the kernels see it: packed sequences are one."""
    return 1 if problem.kind == "varlen" else problem.batch
