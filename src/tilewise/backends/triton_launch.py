"""Launches of the Triton kernels for a dense or packed call: arguments by name, and what a kernel is compiled for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Union

import torch

from tilewise.backends import triton_mods
from tilewise.backends.extents import clip, launch_options

if TYPE_CHECKING:
    from tilewise.backends.launch import Parts
    from tilewise.kernels.share import Jitted
    from tilewise.machine.tiles import Tiles
    from tilewise.problem.problem import Problem, Tensors

Argument = Union[torch.Tensor, int, float, str, bool, None, "Jitted", "Parts"]
Arguments = dict[str, Argument]

# The kernels' names of the tensors that they read.
READ = {"q_ptr": "q", "k_ptr": "k", "v_ptr": "v", "bias_ptr": "bias", "mask_ptr": "mask", "sink_ptr": "sink"} | {
    "slopes_ptr": "alibi_slopes", "kv_start_ptr": "kv_start", "kv_stop_ptr": "kv_stop",
    "cu_q_ptr": "cu_seqlens_q", "cu_k_ptr": "cu_seqlens_k", "seed_ptr": "seed",
}  # fmt: skip


def matrix_arguments(problem: Problem, unit: int, **matrices: torch.Tensor | None) -> Arguments:
    """Give the pointer and the strides of q, k, v and their like; a varlen tensor is one batch entry."""
    arguments: Arguments = {}
    for label, x in matrices.items():
        batch, head, row, dim = (0, 0, 0, 0) if x is None else _strides(x, problem)
        arguments[f"{label}_ptr"] = x
        arguments[f"{label}_batch_stride"] = batch // unit
        arguments[f"{label}_head_stride"] = head // unit
        arguments[f"{label}_row_stride"] = row // unit
        arguments[f"{label}_dim_stride"] = dim
    return arguments


def _strides(x: torch.Tensor, problem: Problem) -> tuple[int, int, int, int]:
    """Give the strides along (batch, heads, len, dim)."""
    if problem.kind == "varlen":
        row, head, dim = x.stride()
        return 0, head, row, dim
    batch, head, row, dim = x.stride()
    return batch, head, row, dim


def row_arguments(problem: Problem, **rows: torch.Tensor | None) -> Arguments:
    """Give the strides of lse and its like: (batch, heads, len), varlen (heads, total); 0 where there is none."""
    arguments: Arguments = {}
    for label, x in rows.items():
        batch, head, row = (0, 0, 0, *(() if x is None else x.stride()))[-3:]
        arguments |= {f"{label}_batch_stride": batch, f"{label}_head_stride": head, f"{label}_row_stride": row}
    return arguments


def feature_arguments(problem: Problem, tensors: Tensors) -> Arguments:
    """Give what the options add: None for each that is absent, so that no code is made for it."""
    score, band = problem.score, problem.mask.band
    cu_q, cu_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    dropout = problem.dropout if problem.dropout and tensors.seed is not None else None
    mask = None if tensors.mask is None else tensors.mask.view(torch.uint8)
    return {
        "kv_start_ptr": tensors.kv_start,
        "kv_stop_ptr": tensors.kv_stop,
        "cu_q_ptr": cu_q,
        "cu_k_ptr": cu_q if cu_k is None else cu_k,
        "seed_ptr": None if dropout is None else tensors.seed,
        "dropout": dropout,
        "softcap": score.softcap or None,
        "scale": score.scale,
        "left": clip(band.left, problem),
        "right": clip(band.right, problem),
        **triton_mods.arguments(problem, tensors),
        "batch": problem.batch,
        "heads": problem.heads_q,
        "group": problem.group,
        "len_q": problem.total_q,
        "len_kv": problem.total_kv,
        "bias_width": problem.len_kv if tensors.bias is None or problem.kind == "dense" else tensors.bias.shape[-1],
        **pair_arguments(problem, "bias", tensors.bias),
        **pair_arguments(problem, "mask", mask),
        **head_arguments("sink", tensors.sink),
        **head_arguments("slopes", tensors.alibi_slopes),
    }


def pair_arguments(problem: Problem, label: str, x: torch.Tensor | None) -> Arguments:
    """Give the pointer and strides of a bias or a mask along (batch, heads, len_q, len_kv), 0 where it broadcasts."""
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if x is not None and problem.kind == "varlen":
        strides = (0, *x.expand(problem.heads_q, -1, -1).stride())
    elif x is not None:
        strides = x.expand(problem.batch, problem.heads_q, problem.len_q, problem.len_kv).stride()
    axes = ("batch", "head", "q", "kv")
    return {f"{label}_ptr": x, **{f"{label}_{axis}_stride": n for axis, n in zip(axes, strides, strict=True)}}


def head_arguments(label: str, x: torch.Tensor | None) -> Arguments:
    """Give the pointer and strides of a tensor of (heads_q,) or (batch, heads_q)."""
    batch, head = (0, 0) if x is None else (0, *x.stride())[-2:]
    return {f"{label}_ptr": x, f"{label}_batch_stride": batch, f"{label}_head_stride": head}


def constant_arguments(problem: Problem, sizes: Tiles, unit: int) -> Arguments:
    """Give what a kernel is compiled for."""
    exact = problem.dtype == "float32"
    return {
        "DIM_QK": problem.dim_qk,
        "DIM_V": problem.dim_v,
        **block_arguments(problem, sizes),
        "UNIT": unit,
        "TOP_LEFT": problem.mask.band.align == "top_left",
        "EXACT": exact,
        "NEGATIVE": problem.score.scale < 0,
    }


def block_arguments(problem: Problem, sizes: Tiles) -> Arguments:
    """Give the shapes of tiles."""
    return {
        "BLOCK_Q": sizes.block_q,
        "BLOCK_KV": sizes.block_kv,
        "BLOCK_DIM_QK": sizes.piece(problem.dim_qk),
        "BLOCK_DIM_V": sizes.piece(problem.dim_v),
    }


# ---- launching ------------------------------------------------------------------------------------------------------

Launch = Callable[[Iterable[torch.Tensor]], None]


def prepare_launch(
    kernel: Jitted, grid: tuple[int, int], arguments: Arguments, sizes: Tiles, pointers: Sequence[str]
) -> Launch | None:
    """Settle a launch but for the addresses of its tensors, given by name; None where launches go to Triton."""
    from tilewise.backends.launch import prepare_named

    return prepare_named(kernel, grid, arguments, pointers, **launch_options(sizes))


def launch(kernel: Jitted, grid: tuple[int, int], arguments: Arguments, sizes: Tiles) -> None:
    """Launch a kernel with those of the arguments that it takes."""
    from tilewise.backends.launch import launch_named

    launch_named(kernel, grid, arguments, **launch_options(sizes))
