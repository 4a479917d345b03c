"""Quantise tensors to FP8 (e4m3) by blocks of rows: by the kernel where it serves, else by PyTorch's operators.

For every block of 128 rows of a head, ``scale`` is the least power of two with ``max|x| <= 448 * scale``, and
``x8 = e4m3(x / scale)``, rounded to nearest, ties to even. A rotation multiplies by a matrix of 1 and -1 first.
"""

from __future__ import annotations

import importlib
import os
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.backends.extents import unit_of
from tilewise.problem.fp8 import BLOCK, LARGEST, SMALLEST, block_count, exponent_bits, key_of_slot

if TYPE_CHECKING:
    from types import ModuleType

MULTIPLYING = (8, 0)  # the first compute capability whose units multiply bfloat16
CONVERTING = (8, 9)  # the first whose units convert to e4m3; the kernel rounds by hand below it


class Blocks(NamedTuple):
    """A tensor in e4m3 and its scales, (batch, heads, blocks); of packed sequences (heads, blocks)."""

    x8: torch.Tensor
    scale: torch.Tensor


@lru_cache(maxsize=32)
def rotation(dim: int, seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Give diag(signs) @ H, (dim, dim), of 1 and -1: rows orthogonal to each other, each of length sqrt(dim).

    H is Sylvester's matrix of Hadamard, ``H[i, j] = (-1)**(number of bits that i and j share)``; signs come from seed.
    """
    signs = torch.randint(0, 2, (dim, 1), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    index = torch.arange(dim)
    shared = index[:, None] & index
    odd = sum((shared >> bit) & 1 for bit in range(dim.bit_length())) % 2
    return (signs * (1 - 2 * odd)).to(device, dtype)


def quantize(
    x: torch.Tensor, cu: torch.Tensor | None, matrix: torch.Tensor | None, factor: float, *, transposed: bool
) -> Blocks:
    """Quantise one tensor.

    Args:
        x: (batch, heads, len, dim), or with ``cu`` (total, heads, dim); any strides.
        cu: (sequences + 1,) int32, cumulative lengths; rows behind the last are left as they are.
        matrix: what rows are multiplied by first, `rotation` in x's dtype, or None.
        factor: a power of two that scales are multiplied by.
        transposed: give x8 as (batch, heads, dim, blocks * BLOCK) or (heads, dim, blocks * BLOCK), zero behind the last
            key of each sequence, keys in the order of `key_of_slot`; else in x's shape, contiguous.
    """
    kernels = _kernels_for(x)
    if kernels is None or not x.numel():
        return _by_operators(x, cu, matrix, factor, transposed=transposed)
    return _by_kernel(kernels, x, cu, matrix, factor, transposed=transposed)


# ---- by the kernel --------------------------------------------------------------------------------------------------


def _kernels_for(x: torch.Tensor) -> ModuleType | None:
    """Give the kernel's module where it serves a tensor: on NVIDIA GPUs, and in Triton's interpreter."""
    if x.dtype not in (torch.float16, torch.bfloat16) or torch.version.hip is not None:
        return None  # AMD's units have another e4m3 than PyTorch's tensors
    if x.is_cuda:
        return _kernels() if torch.cuda.get_device_capability(x.device) >= MULTIPLYING else None
    if x.device.type != "cpu" or x.dtype == torch.bfloat16 or os.environ.get("TRITON_INTERPRET") != "1":
        return None  # the interpreter multiplies no bfloat16
    return _kernels()


@cache
def _kernels() -> ModuleType | None:
    try:
        return importlib.import_module("tilewise.kernels.triton.quantize")
    except ModuleNotFoundError as absent:
        if (absent.name or "").partition(".")[0] != "triton":
            raise
        return None


def _by_kernel(
    kernels: ModuleType,
    x: torch.Tensor,
    cu: torch.Tensor | None,
    matrix: torch.Tensor | None,
    factor: float,
    *,
    transposed: bool,
) -> Blocks:
    from tilewise.backends.launch import launch_named

    batch, heads, total, dim = x.shape if cu is None else (1, x.shape[1], x.shape[0], x.shape[2])
    sequences = None if cu is None else len(cu) - 1
    blocks, unit = block_count(total, sequences), unit_of(x)
    batch_stride, head_stride, row_stride = x.stride()[:3] if cu is None else (0, x.stride(1), x.stride(0))
    lead = (heads,) if cu is not None else (batch, heads)
    by_hand = not x.is_cuda or torch.cuda.get_device_capability(x.device) < CONVERTING
    x8 = x.new_empty((*lead, dim, blocks * BLOCK) if transposed else x.shape, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((*lead, blocks), dtype=torch.float32)
    named = {
        "x_ptr": x, "x8_ptr": x8.view(torch.uint8) if by_hand else x8, "scale_ptr": scale,
        "rotation_ptr": matrix, "cu_ptr": cu,
        "batch_stride": batch_stride // unit, "head_stride": head_stride // unit, "row_stride": row_stride // unit,
        "dim_stride": x.stride(-1),
        "batch_rows": heads * total, "head_rows": total if cu is None else 1, "rows_apart": 1 if cu is None else heads,
        "blocks": blocks, "heads": heads, "total": total, "sequences": sequences or 0, "factor": factor,
        "DIM": dim, "TRANSPOSED": transposed, "UNIT": unit, "BY_HAND": by_hand,
    }  # fmt: skip
    launch_named(kernels.quantize_blocks, (blocks * heads * batch,), named, num_warps=8)
    return Blocks(x8, scale)


# ---- by PyTorch's operators -----------------------------------------------------------------------------------------


def _by_operators(
    x: torch.Tensor, cu: torch.Tensor | None, matrix: torch.Tensor | None, factor: float, *, transposed: bool
) -> Blocks:
    with torch.autocast(x.device.type, enabled=False):  # it would round the product
        x32 = x.float() if matrix is None else x.float() @ matrix.float()
    if cu is not None:
        x32 = x32.transpose(0, 1)
    rows, inside = rows_of_blocks(x32.shape[-2], cu, x.device)
    if rows.numel() and x32.shape[-2]:
        tiles = torch.where(inside[..., None], x32[..., rows.clamp(max=x32.shape[-2] - 1), :], 0)
    else:
        tiles = x32.new_zeros((*x32.shape[:-2], *rows.shape, x32.shape[-1]))
    largest = tiles.abs().nan_to_num(nan=0.0, posinf=torch.inf).flatten(-2).amax(-1).clamp(min=SMALLEST)
    exponent = exponent_bits(largest.view(torch.int32))
    inverse = ((254 - exponent) << 23).view(torch.float32)
    scale = (exponent << 23).view(torch.float32) * factor
    if transposed:
        x8 = _e4m3(tiles * inverse[..., None, None])
        x8 = x8[..., key_of_slot(torch.arange(BLOCK, device=x.device)), :]
        return Blocks(x8.movedim(-1, -3).flatten(-2).contiguous(), scale)
    x8 = _e4m3(x32 * per_row(inverse, x32.shape[-2], cu)[..., None])
    return Blocks((x8 if cu is None else x8.transpose(0, 1)).contiguous(), scale)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def rows_of_blocks(total: int, cu: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the row at each place of each block, (blocks, BLOCK), and whether that place holds one."""
    place = torch.arange(BLOCK, device=device)
    if cu is None:
        rows = torch.arange(block_count(total), device=device)[:, None] * BLOCK + place
        return rows, rows < total
    block = torch.arange(block_count(total, len(cu) - 1), device=device)
    bounds = cu.long().clamp(0, total)
    first = bounds // BLOCK + torch.arange(len(cu), device=device)  # of each sequence, and of the rows behind the last
    sequence = torch.searchsorted(first, block, right=True) - 1
    rows = (bounds[sequence] + (block - first[sequence]) * BLOCK)[:, None] + place
    stop = bounds[(sequence + 1).clamp(max=len(cu) - 1)]
    return rows, rows < stop[:, None]


def per_row(scale: torch.Tensor, total: int, cu: torch.Tensor | None) -> torch.Tensor:
    """Give each row's scale, (..., total), from (..., blocks); rows behind the last sequence get some block's."""
    row = torch.arange(total, device=scale.device)
    if cu is None:
        return scale[..., row // BLOCK]
    bounds = cu.long().clamp(0, total)
    sequence = torch.searchsorted(bounds, row, right=True) - 1
    block = bounds[sequence] // BLOCK + sequence + (row - bounds[sequence]) // BLOCK
    return scale[..., block.clamp(max=scale.shape[-1] - 1)]


def dequantize(blocks: Blocks, total: int, cu: torch.Tensor | None, *, transposed: bool) -> torch.Tensor:
    """Give the numbers that x8 and scale stand for, float32, in the shape that was quantised."""
    if not transposed:
        rows = blocks.x8.float() if cu is None else blocks.x8.float().transpose(0, 1)
    else:
        keys = key_of_slot(torch.arange(BLOCK, device=blocks.scale.device))
        tiles = blocks.x8.float().unflatten(-1, (-1, BLOCK)).movedim(-3, -1)  # (..., blocks, slots, dim)
        tiles = tiles[..., torch.argsort(keys), :].flatten(-3, -2)
        place = torch.arange(total, device=tiles.device)
        if cu is not None:
            bounds = cu.long().clamp(0, total)
            sequence = torch.searchsorted(bounds, place, right=True) - 1
            place = place + (bounds[sequence] // BLOCK + sequence) * BLOCK - bounds[sequence]
            place = place.clamp(max=tiles.shape[-2] - 1)
        rows = tiles[..., place, :]
    rows = rows * per_row(blocks.scale, total, cu)[..., None]
    return rows if cu is None else rows.transpose(0, 1)
