"""The kernels in plain Triton: every GPU that Triton compiles for, and any CPU under Triton's interpreter.

This file chooses tiles, allocates results and lays the arguments out; what is computed stands in ``kernels/triton``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import cache, lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.backends import triton_backward, triton_decode, triton_mods
from tilewise.backends.extents import contiguous, entries, is_bshd, tile_count, unit_of
from tilewise.backends.triton_decode import decode
from tilewise.backends.triton_launch import (
    READ,
    Launch,
    constant_arguments,
    feature_arguments,
    launch,
    matrix_arguments,
    prepare_launch,
    row_arguments,
)
from tilewise.backends.triton_mods import why_not_backward
from tilewise.machine.detect import detect
from tilewise.machine.tiles import Kind, Tiles, default_tiles, padded_dim
from tilewise.problem.mods import captured_of
from tilewise.problem.problem import Grads, Needs, Problem, Tensors

if TYPE_CHECKING:
    from tilewise.machine.device import Capability

__all__ = ["backward", "decode", "forward", "prepare", "tiles", "why_not", "why_not_backward"]

name = "triton_portable"

KINDS: tuple[Kind, ...] = ("forward", "backward_kv", "backward_q")
_MOST_POSITIONS = 2**30  # positions are int32 in the kernels, and a band adds two of them


def why_not(problem: Problem) -> str | None:
    """Say why these kernels cannot serve a problem, or None."""
    if problem.device_type not in ("cuda", "cpu"):
        return f"runs on GPUs of NVIDIA and AMD; got {problem.device_type}"
    if problem.device_type == "cpu" and not _interpreting():
        return "needs a GPU; on a CPU only under TRITON_INTERPRET=1"
    if not _has_triton():
        return "triton is not installed"
    if problem.dtype == "float64":
        return "has no float64"
    if problem.device_type == "cpu" and problem.dtype == "bfloat16":
        return "Triton's interpreter multiplies no bfloat16"
    if "block_table" in problem.specs and problem.kind != "cache":
        return "has no paged keys"
    if max(problem.len_q, problem.len_kv) > _MOST_POSITIONS:
        return f"counts at most {_MOST_POSITIONS} positions"
    capability = _capability(problem.device)
    if isinstance(capability, tuple) and capability < (7, 5):
        return f"needs compute capability 7.5 or newer; got {capability[0]}.{capability[1]}"
    if isinstance(capability, tuple) and capability < (8, 0) and problem.dtype == "bfloat16":
        return f"bfloat16 needs compute capability 8.0 or newer; got {capability[0]}.{capability[1]}"
    if problem.is_empty:
        return None
    try:
        if problem.kind == "cache":
            return triton_decode.why_not(problem)
        for kind in KINDS:
            _tiles(problem, kind)
    except ValueError as error:
        return str(error)
    return None


def tiles(problem: Problem) -> Tiles:
    """Give the tile sizes and launch settings of the forward pass, or of decoding."""
    return triton_decode.tiles(problem) if problem.kind == "cache" else _tiles(problem, "forward")


def _tiles(problem: Problem, kind: Kind) -> Tiles:
    dims = max(problem.dim_qk, 1), max(problem.dim_v, 1)
    sizes = default_tiles(_capability(problem.device), *dims, problem.itemsize, kind)
    sizes = triton_mods.within_lists(problem, sizes)
    return _unrolled(sizes) if _multiplies_without_matrix_units(problem, kind) else sizes


class BackwardTiles(NamedTuple):
    """The tiles of the two passes: over keys, for dk and dv, and over queries, for dq and the rest."""

    kv: Tiles
    q: Tiles


def backward_tiles(problem: Problem) -> BackwardTiles:
    """Give the tile sizes and launch settings of the backward passes."""
    return BackwardTiles(_tiles(problem, "backward_kv"), _tiles(problem, "backward_q"))


def _multiplies_without_matrix_units(problem: Problem, kind: Kind) -> bool:
    """Say whether products are unrolled: Triton uses no tensor core on sm_75, nor for ieee float32 on NVIDIA."""
    capability = _capability(problem.device)
    ieee = problem.dtype == "float32" and precision(problem, kind) == "ieee"
    return isinstance(capability, tuple) and (ieee or capability < (8, 0))


def _unrolled(sizes: Tiles) -> Tiles:
    """Shrink tiles to what an unrolled product can hold in registers: larger ones spill thousands of bytes a thread."""
    return Tiles(min(sizes.block_q, 32), min(sizes.block_kv, 32), num_warps=8, num_stages=1, max_dim=sizes.max_dim)


def precision(problem: Problem, kind: Kind = "forward") -> str:
    """Give the way float32 is multiplied; narrower types know but one way.

    Where torch allows tf32, that. Else exactly, which means: within the error budget of float32 arithmetic. Forward, on
    NVIDIA from compute capability 8.0 and up to head dim 128, three tf32 products make up one ("tf32x3"), as exact as
    that on an H200 and seven times as fast as "ieee", which uses no tensor core. The gradients keep "ieee": where a row
    sees one key, what is left after cancellation shows the difference.
    """
    if problem.dtype == "float32" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    capability = _capability(problem.device)
    matrix_units = isinstance(capability, tuple) and capability >= (8, 0)
    small = padded_dim(max(problem.dim_qk, problem.dim_v, 1)) <= 128
    return "tf32x3" if problem.dtype == "float32" and kind == "forward" and matrix_units and small else "ieee"


def forward(problem: Problem, tensors: Tensors, sizes: Tiles | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse of a dense or varlen problem; the tuner names the tiles, others take the table's."""
    out, lse = _forward(problem, sizes, True)(tensors)
    assert lse is not None  # noqa: S101 - it was asked for
    return (out.transpose(1, 2) if is_bshd(problem) else out), lse


def prepare(problem: Problem) -> Forward | triton_decode.Decode:
    """Settle the forward pass of a problem but for its tensors; without an lse where nobody asked for it."""
    return triton_decode.prepare(problem) if problem.kind == "cache" else _forward(problem, None, problem.return_lse)


@lru_cache(maxsize=4096)
def _forward(problem: Problem, sizes: Tiles | None, with_lse: bool) -> Forward:
    return Forward(problem, sizes, with_lse)


class Forward:
    """The forward pass of one problem: a call takes memory for its results, sees where the tensors lie, and launches.

    What is launched is settled in the first call, once for tensors that load 16 bytes at a time and once for others.
    Called with tensors in the order of `Tensors`, as the problem's specs describe them; q, k and v may also have the
    user's order of axes, in which out is returned.
    """

    def __init__(self, problem: Problem, sizes: Tiles | None, with_lse: bool) -> None:
        self._problem, self._sizes, self._with_lse = problem, sizes, with_lse
        shape = problem.out_shape
        self._out = contiguous((shape[0], shape[2], shape[1], shape[3]) if is_bshd(problem) else shape)
        self._is_like_q = problem.specs["q"][:2] == self._out and not is_bshd(problem)
        self._lse = contiguous(problem.lse_shape)
        self._dtype, self._device = getattr(torch, problem.dtype), torch.device(problem.device)
        read = {label: x for label, x in READ.items() if x in problem.specs}
        if "cu_q_ptr" in read:
            read.setdefault("cu_k_ptr", "cu_seqlens_q")
        if not problem.dropout:
            read.pop("seed_ptr", None)
        self._names = ("out_ptr", *(["lse_ptr"] if with_lse else []), *read)
        self._read_of = itemgetter(*(Tensors._fields.index(x) for x in read.values()))
        self._float32 = problem.dtype == "float32"  # torch's switch for tf32 may turn between calls
        self._launches: dict[tuple[bool, str], Launch] = {}

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute out, contiguous in the user's order of axes, and lse, or None for it."""
        read = self._read_of(tensors)
        if self._problem.mods is not None:
            read += triton_mods.pointers(captured_of(tensors))
        q, k, v = read[:3]
        if self._is_like_q:  # the cheaper question
            out = torch.empty_like(q)
        else:
            out = torch.empty_strided(*self._out, dtype=self._dtype, device=self._device)
        aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0
        key = aligned, precision(self._problem) if self._float32 else "ieee"
        lse = None
        if self._with_lse:
            lse = torch.empty_strided(*self._lse, dtype=torch.float32, device=self._device)
            read = (lse, *read)
        settled = self._launches.get(key) or self._settle(key, tensors, out, lse)
        settled((out, *read))
        return out, lse

    def _settle(
        self, key: tuple[bool, str], given: Sequence[torch.Tensor | None], out: torch.Tensor, lse: torch.Tensor | None
    ) -> Launch:
        from tilewise.kernels.triton.forward import attention_forward

        problem, sizes = self._problem, self._sizes or tiles(self._problem)
        tensors = given if isinstance(given, Tensors) else Tensors(*given)  # type: ignore[arg-type]  # q, k and v are there
        matrices = {x: getattr(tensors, x).as_strided(*problem.specs[x][:2]) for x in ("q", "k", "v")}
        matrices["out"] = out.transpose(1, 2) if is_bshd(problem) else out
        unit = unit_of(*matrices.values())
        count = tile_count(problem, problem.total_q, sizes.block_q)
        grid = count * problem.heads_q * entries(problem), sizes.pieces(problem.dim_v)
        arguments = {
            "lse_ptr": lse,
            **row_arguments(problem, lse=lse),
            **matrix_arguments(problem, unit, **matrices),
            **feature_arguments(problem, tensors),
            **constant_arguments(problem, sizes, unit),
            "PRECISION": precision(problem),
            "tiles": count,
        }
        names = (*self._names, *triton_mods.pointer_names(captured_of(tensors)))
        prepared = prepare_launch(attention_forward, grid, arguments, sizes, names)
        if prepared is None:
            return lambda _: launch(attention_forward, grid, arguments, sizes)
        self._launches[key] = prepared
        return prepared


def backward(
    problem: Problem,
    tensors: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    needs: Needs,
    sizes: BackwardTiles | None = None,
) -> Grads:
    """Differentiate `forward`, recomputing each tile of p from lse; d_out or d_lse may be None for zero.

    What a score_mod's tensors get is added to the buffers beside them, with atomic additions.
    """
    chosen = sizes or backward_tiles(problem)
    how = precision(problem, "backward_q")
    return triton_backward.differentiate(problem, tensors, out, lse, d_out, d_lse, needs, chosen, how)


@cache
def _capability(device: str) -> Capability:
    return detect(device).capability if device.startswith("cuda") else None


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreting() -> bool:
    """Say whether Triton interprets kernels; it reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
