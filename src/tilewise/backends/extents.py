"""How kernels count a problem: its tiles, entries, band, strides and results, and how its tiles are launched."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch

    from tilewise.machine.tiles import Tiles
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


def unit_of(*matrices: torch.Tensor) -> int:
    """Give the elements in 16 bytes where all of these can be loaded 16 bytes at a time, else 1."""
    unit = 16 // matrices[0].element_size()
    for x in matrices:
        if x.data_ptr() % 16 or x.stride(-1) != 1 or any(stride % unit for stride in x.stride()[:-1]):
            return 1
    return unit


class LaunchOptions(TypedDict):
    """What a launch takes of tiles."""

    num_warps: int
    num_stages: int
    maxnreg: int | None


def launch_options(sizes: Tiles) -> LaunchOptions:
    """Give the options that `tilewise.backends.launch` takes."""
    return {"num_warps": sizes.num_warps, "num_stages": sizes.num_stages, "maxnreg": sizes.max_registers}
