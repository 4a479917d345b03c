"""Softmax along any axis of a tensor on a GPU: the host side of `tilewise.kernels.triton.softmax`.

A tensor of any strides is taken as it lies. Its axis of the softmax is the columns; the other axes are merged as far as
their strides allow, into (outer, rows) in nearly all layouts, and what is left over is a loop of launches.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton

from tilewise.backends.compile import Constant
from tilewise.backends.launch import launch
from tilewise.kernels.share import Jitted
from tilewise.kernels.triton import softmax as kernels

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
VECTOR = 16  # bytes that one thread loads at once

# What a thread holds: this many float32 values of all tensors that are read. Of two tensors, or in float64, half.
HELD = 32
MAX_OUTERS = 65535  # programs along the second axis of a grid

# How longer rows are gone over: programs of 1024 threads, each with this many values of every tensor (in float64 half),
# two programs on a multiprocessor. Of some 20 tilings on an H200 in float16 it was the fastest at 65,536 and at 262,144
# columns, forward and backward: benchmarks/results/h200-softmax-sweep.json.
ONLINE_THREADS, ONLINE_HELD, ONLINE_PROGRAMS = 1024, 16, 2
# Rows of more are gone over online, though 1024 threads could hold 32,768 in registers. Such a program has a
# multiprocessor to itself, and nothing is loaded while it computes and stores: at 32,768 columns it reached 0.73 of a
# copy's speed (benchmarks/results/h200-softmax.json), less than online rows of twice the length, which are read twice.
ONCE_COLS = 16384


class Tiling(NamedTuple):
    """How a row is gone over: `online` in blocks of ``lanes * span`` columns, twice; else as one block, once.

    ``programs`` bounds the programs of an online launch to those that run at once, each with rows of its own; 0 = no
    bound.
    """

    online: bool
    block_rows: int
    lanes: int
    span: int
    num_warps: int
    programs: int = 0


class Axes(NamedTuple):
    """Sizes of (outer, rows, cols), and each tensor's strides in that order."""

    sizes: tuple[int, int, int]
    strides: tuple[tuple[int, int, int], ...]


class Facts(NamedTuple):
    """What a kernel may know of strides and sizes; see `tilewise.kernels.triton.softmax.offsets`."""

    dense: str
    unit: int
    row_unit: int
    col_unit: int


def why_not(x: torch.Tensor) -> str | None:
    """Say why these kernels cannot serve a tensor, or None."""
    if x.dtype not in DTYPES:
        return f"has no kernel for {x.dtype}"
    if not x.is_cuda:
        if x.device.type == "cpu" and not isinstance(kernels.softmax_once, triton.JITFunction):
            return None  # the interpreter's
        return f"needs a GPU, the tensor is on {x.device}"
    if x.dtype == torch.bfloat16 and torch.version.hip is None and _capability(x.device) < (8, 0):
        return "bfloat16 needs compute capability 8.0 or newer"
    return None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def softmax(x: torch.Tensor, dim: int, tiling: Tiling | None = None) -> torch.Tensor:
    """Compute ``p = exp(x - max) / sum(exp(x - max))`` along ``dim``; rows of -inf give 0.

    Args:
        x: any shape and strides, one of DTYPES.
        dim: the axis.
        tiling: None = chosen; given by benchmarks and tests.

    Returns:
        p, a tensor like x, in x's layout where x is dense.
    """
    out = torch.empty_like(x)
    _over_rows([x, out], dim, tiling)
    return out


def softmax_backward(p: torch.Tensor, dp: torch.Tensor, dim: int, tiling: Tiling | None = None) -> torch.Tensor:
    """Compute ``ds = p * (dp - sum(p * dp))`` along ``dim``, the gradient of the scores; arguments as in `softmax`."""
    ds = torch.empty_like(p)
    _over_rows([p, dp, ds], dim, tiling)
    return ds


def _over_rows(tensors: list[torch.Tensor], dim: int, tiling: Tiling | None) -> None:
    """Launch over all rows along ``dim``; the last tensor is written."""
    first = tensors[0]
    if first.numel() == 0:
        return
    strides = tuple([tensor.stride() for tensor in tensors])
    aligned = not any([tensor.data_ptr() % VECTOR for tensor in tensors])  # noqa: C419 - faster than a generator
    planned = plan(first.shape, strides, dim, first.dtype, aligned, first.device, tiling)
    if isinstance(planned, int):
        axes = [tensor.movedim(dim, -1) for tensor in tensors]
        for parts in zip(*(tensor.unbind(planned) for tensor in axes), strict=True):
            _over_rows(list(parts), -1, tiling)
        return
    launch(
        planned.kernel,
        planned.grid,
        (*tensors, *planned.scalars),
        planned.constants,
        num_warps=planned.num_warps,
        num_stages=1,
    )


class Planned(NamedTuple):
    """One launch but for its tensors."""

    kernel: Jitted
    grid: tuple[int, int, int]
    scalars: tuple[int, ...]
    constants: dict[str, Constant]
    num_warps: int


@lru_cache(maxsize=4096)
def plan(
    shape: torch.Size,
    strides: tuple[tuple[int, ...], ...],
    dim: int,
    dtype: torch.dtype,
    aligned: bool,
    device: torch.device,
    tiling: Tiling | None,
) -> Planned | int:
    """Plan a launch over tensors of one shape, or give the axis to loop over: with the axis of the softmax last."""
    order = list(range(len(shape)))
    if order:
        order.append(order.pop(dim))
    last = tuple(tuple(stride[axis] for axis in order) or (1,) for stride in strides)
    axes = merge_axes(tuple(shape[axis] for axis in order) or (1,), last)
    if isinstance(axes, int):  # more axes than a kernel has, which do not merge
        return axes
    facts = facts_of(axes, dtype.itemsize, aligned)
    tiling = tiling or choose_tiling(axes, facts, dtype.itemsize, len(strides), *device_figures(device))
    outers, rows, cols = axes.sizes
    scalars: list[int] = []
    for outer_stride, row_stride, col_stride in axes.strides:
        scalars += [outer_stride // facts.unit]
        scalars += [row_stride if facts.dense == "rows" else row_stride // facts.unit]
        scalars += [col_stride if facts.dense == "cols" else col_stride // facts.unit]
    scalars += [outers, rows // facts.row_unit, cols // facts.col_unit]
    tiles = -(-rows // tiling.block_rows)
    grid = (min(tiles, tiling.programs or tiles), min(outers, MAX_OUTERS), 1)
    kernel, constants = kernel_and_constants(facts, tiling, len(strides))
    return Planned(kernel, grid, tuple(scalars), constants, tiling.num_warps)


def kernel_and_constants(facts: Facts, tiling: Tiling, tensors: int) -> tuple[Jitted, dict[str, Constant]]:
    """Choose the kernel, forward for two tensors and backward for three, and give what it is compiled for."""
    constants: dict[str, Constant] = {
        "BLOCK_ROWS": tiling.block_rows,
        "ROW_UNIT": facts.row_unit,
        "COL_UNIT": facts.col_unit,
        "UNIT": facts.unit,
        "DENSE": facts.dense,
    }
    backward = tensors == 3
    if tiling.online:
        kernel = kernels.softmax_online_backward if backward else kernels.softmax_online
        return kernel, {**constants, "LANES": tiling.lanes, "SPAN": tiling.span}
    kernel = kernels.softmax_once_backward if backward else kernels.softmax_once
    return kernel, {**constants, "BLOCK_COLS": tiling.lanes * tiling.span}


# ---- how tensors lie ------------------------------------------------------------------------------------------------


def merge_axes(shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> Axes | int:
    """Merge all axes but the last into (outer, rows); where they are more, give the one to loop over.

    >>> merge_axes((2, 3, 5), ((15, 5, 1), (15, 5, 1)))
    Axes(sizes=(1, 6, 5), strides=((0, 5, 1), (0, 5, 1)))
    >>> merge_axes((2, 3, 5), ((15, 1, 3),))  # the axis of the softmax was the middle one
    Axes(sizes=(2, 3, 5), strides=((15, 1, 3),))
    >>> merge_axes((2, 3, 4, 5), ((1000, 100, 10, 1),))  # a view into something larger
    0
    """
    places = [place for place in range(len(shape) - 1) if shape[place] > 1]
    places.sort(key=lambda place: -abs(strides[0][place]))
    merged: list[tuple[int, list[int]]] = []  # size, one stride for each tensor
    for place in places:
        here = [stride[place] for stride in strides]
        if merged and all(above == inner * shape[place] for above, inner in zip(merged[-1][1], here, strict=True)):
            merged[-1] = (merged[-1][0] * shape[place], here)
        else:
            merged.append((shape[place], here))
    if len(merged) > 2:
        return places[0]
    nothing = (1, [0] * len(strides))
    (outers, outer_strides), (rows, row_strides) = [nothing, nothing, *merged][-2:]
    cols = (stride[-1] for stride in strides)
    return Axes((outers, rows, shape[-1]), tuple(zip(outer_strides, row_strides, cols, strict=True)))


def facts_of(axes: Axes, itemsize: int, aligned: bool) -> Facts:
    """Find what the kernels may know; ``aligned`` says that all tensors begin on 16 bytes.

    >>> facts_of(Axes((1, 6, 1000), ((0, 1000, 1),)), 2, True)
    Facts(dense='cols', unit=8, row_unit=1, col_unit=8)
    >>> facts_of(Axes((1, 6, 1001), ((0, 1001, 1),)), 2, True)
    Facts(dense='cols', unit=1, row_unit=1, col_unit=1)
    """
    _, rows, cols = axes.sizes
    unit = VECTOR // itemsize
    if all(col_stride == 1 for _, _, col_stride in axes.strides):
        dense, others = "cols", [stride for outer, row, _ in axes.strides for stride in (outer, row)]
    elif all(row_stride == 1 for _, row_stride, _ in axes.strides):
        dense, others = "rows", [stride for outer, _, col in axes.strides for stride in (outer, col)]
    else:
        return Facts("", 1, 1, 1)
    if not aligned or any(stride % unit for stride in others):
        return Facts(dense, 1, 1, 1)
    row_unit = unit if dense == "rows" and rows % unit == 0 else 1
    return Facts(dense, unit, row_unit, unit if dense == "cols" and cols % unit == 0 else 1)


# ---- tiles ----------------------------------------------------------------------------------------------------------


@cache
def device_figures(device: torch.device) -> tuple[int, int]:
    """Give the number of multiprocessors and the threads of a warp; small figures for a CPU that interprets."""
    if device.type != "cuda":
        return 2, 32
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.warp_size


def choose_tiling(axes: Axes, facts: Facts, itemsize: int, tensors: int, sms: int, warp: int) -> Tiling:
    """Choose tiles of as many elements as threads can hold; rows that do not fit go online.

    >>> choose_tiling(Axes((1, 8192, 4096), ((0, 4096, 1),)), Facts("cols", 8, 1, 8), 2, 2, 132, 32)
    Tiling(online=False, block_rows=1, lanes=4096, span=1, num_warps=4, programs=0)
    >>> choose_tiling(Axes((1, 4096, 65536), ((0, 65536, 1),)), Facts("cols", 8, 1, 8), 2, 2, 132, 32)
    Tiling(online=True, block_rows=1, lanes=2048, span=8, num_warps=32, programs=264)
    """
    _, rows, cols = axes.sizes
    block_cols = _power_of_two(cols)
    wide = 2 if itemsize == 8 else 1
    per_warp = warp * HELD // (tensors - 1) // wide
    most = 1024 // warp * per_warp
    if facts.dense == "rows":
        # Threads side by side take rows side by side: 128 bytes of them where there are as many.
        most_rows = block_rows = min(128 // itemsize, _power_of_two(rows))
        while block_rows * block_cols > most and block_rows * itemsize > 32:
            block_rows //= 2
        elements = block_rows * block_cols
        if elements <= most:
            return Tiling(False, block_rows, block_cols, 1, max(elements // per_warp, 1))
        return Tiling(True, most_rows, max(4 * per_warp // most_rows, 1), 1, 4)
    if 2 * block_cols <= per_warp:  # a warp takes several rows whole, so that none is shared between warps
        return Tiling(False, min(4 * per_warp // block_cols, _power_of_two(rows)), block_cols, 1, 4)
    if block_cols <= min(most, ONCE_COLS):
        return Tiling(False, 1, block_cols, 1, max(block_cols // per_warp, 1))
    span = facts.unit if facts.dense == "cols" else 1
    lanes = ONLINE_THREADS * ONLINE_HELD // wide // span
    return Tiling(True, 1, lanes, span, ONLINE_THREADS // warp, ONLINE_PROGRAMS * sms)


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
