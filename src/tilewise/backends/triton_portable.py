"""The kernels in plain Triton: every GPU that Triton compiles for, and any CPU under Triton's interpreter.

This file chooses tiles, allocates results and lays the arguments out; what is computed stands in ``kernels/triton``.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Union

import torch

from tilewise.backends import triton_decode, triton_mods
from tilewise.backends.extents import clip, contiguous, entries, is_bshd, launch_options, tile_count, unit_of
from tilewise.backends.triton_decode import decode
from tilewise.backends.triton_mods import why_not_backward
from tilewise.machine.detect import detect
from tilewise.machine.tiles import Kind, Tiles, default_tiles, padded_dim
from tilewise.problem.mods import captured_of
from tilewise.problem.problem import Grads, Needs, Problem, Tensors

if TYPE_CHECKING:
    from tilewise.backends.launch import Parts
    from tilewise.kernels.share import Jitted
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
        read = {label: x for label, x in _READ.items() if x in problem.specs}
        if "cu_q_ptr" in read:
            read.setdefault("cu_k_ptr", "cu_seqlens_q")
        if not problem.dropout:
            read.pop("seed_ptr", None)
        self._names = ("out_ptr", *(["lse_ptr"] if with_lse else []), *read)
        self._read_of = itemgetter(*(Tensors._fields.index(x) for x in read.values()))
        self._float32 = problem.dtype == "float32"  # torch's switch for tf32 may turn between calls
        self._launches: dict[tuple[bool, str], _Launch] = {}

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
        launch = self._launches.get(key) or self._settle(key, tensors, out, lse)
        launch((out, *read))
        return out, lse

    def _settle(
        self, key: tuple[bool, str], given: Sequence[torch.Tensor | None], out: torch.Tensor, lse: torch.Tensor | None
    ) -> _Launch:
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
            **_row_strides(problem, lse=lse),
            **_matrices(problem, unit, **matrices),
            **_features(problem, tensors),
            **_constants(problem, sizes, unit),
            "PRECISION": precision(problem),
            "tiles": count,
        }
        names = (*self._names, *triton_mods.pointer_names(captured_of(tensors)))
        launch = _prepare(attention_forward, grid, arguments, sizes, names)
        if launch is None:
            return lambda _: _launch(attention_forward, grid, arguments, sizes)
        self._launches[key] = launch
        return launch


# The kernels' names of the tensors that they read.
_READ = {"q_ptr": "q", "k_ptr": "k", "v_ptr": "v", "bias_ptr": "bias", "mask_ptr": "mask", "sink_ptr": "sink"} | {
    "slopes_ptr": "alibi_slopes", "kv_start_ptr": "kv_start", "kv_stop_ptr": "kv_stop",
    "cu_q_ptr": "cu_seqlens_q", "cu_k_ptr": "cu_seqlens_k", "seed_ptr": "seed",
}  # fmt: skip


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
    from tilewise.kernels.triton import backward as kernels

    q, k, v = tensors.q, tensors.k, tensors.v
    by_keys, by_queries = sizes or backward_tiles(problem)
    d_out = torch.zeros_like(out[:1, :1, :1]).expand_as(out) if d_out is None else d_out.to(out.dtype)
    dq, dk, dv = (
        torch.empty_like(x) if need else None for x, need in zip((q, k, v), (needs.dq, needs.dk, needs.dv), strict=True)
    )
    saved = lse.new_empty(2 * lse.numel() + max(by_keys.block_q, by_queries.block_q))  # kernels.load_saved says why
    given = [x for x in (q, k, v, out, d_out, dq, dk, dv) if x is not None]
    unit = unit_of(*given)
    arguments = {
        **_matrices(problem, unit, q=q, k=k, v=v, out=out, d_out=d_out, dq=dq, dk=dk, dv=dv),
        **_features(problem, tensors),
        **_constants(problem, by_queries, unit),
        "PRECISION": precision(problem, "backward_q"),
        "lse_ptr": lse,
        "d_lse_ptr": d_lse,
        "saved_ptr": saved,
        **_row_strides(problem, lse=lse, d_lse=d_lse),
        "saved_batch_stride": 0 if problem.kind == "varlen" else problem.heads_q * problem.total_q,
        "saved_head_stride": problem.total_q,
        "saved_plane_stride": lse.numel(),
    }
    heads = problem.heads_q * entries(problem)

    def launch(kernel: Jitted, programs: int, sizes: Tiles = by_queries, pieces: int = 1, **more: Argument) -> None:
        _launch(kernel, (programs, pieces), arguments | more, sizes)

    rows = -(-problem.total_q // by_queries.block_q)
    launch(kernels.prepare_rows, rows * heads, tiles=rows, BLOCK_DIM_V=padded_dim(problem.dim_v))
    scatter = any(x is not None for x in captured_of(tensors).gradients)
    if dk is not None or dv is not None or scatter:
        count = tile_count(problem, problem.total_kv, by_keys.block_kv)
        for part, blocks, pieces in _key_passes(problem, by_keys, dk, dv, scatter):
            mods = triton_mods.arguments(problem, tensors, by_key=True, scatter=scatter and len(part) != 1)
            own = {"tiles": count, **_blocks(problem, blocks), **mods}
            launch(kernels.key_gradients, count * heads // problem.group, blocks, pieces, **own, **part)
    if dq is not None:
        count = tile_count(problem, problem.total_q, by_queries.block_q)
        launch(kernels.query_gradients, count * heads, pieces=by_queries.pieces(problem.dim_qk), tiles=count)
    dbias = (
        _bias_gradient(problem, tensors.bias, by_queries, launch) if needs.dbias and tensors.bias is not None else None
    )
    dsink = _sink_gradient(problem, tensors.sink, launch) if needs.dsink and tensors.sink is not None else None
    return Grads(dq, dk, dv, dbias, dsink)


def _key_passes(
    problem: Problem, sizes: Tiles, dk: torch.Tensor | None, dv: torch.Tensor | None, scatter: bool
) -> Iterator[tuple[Arguments, Tiles, int]]:
    """Give the passes over keys and their pieces: one for dk and dv, or, where no program can hold both, one for each.

    Two passes compute the scores twice, and are faster all the same at head dim 256, where one pass spills. dv's sum
    alone leaves room for twice the queries. Where head dims come in pieces, the programs of a pass own one each. What
    is scattered to a score_mod's tensors must be added once: where there are two passes, it has a third.
    """
    pieces_dk, pieces_dv = sizes.pieces(problem.dim_qk), sizes.pieces(problem.dim_v)
    small = padded_dim(problem.dim_qk) + padded_dim(problem.dim_v) <= 256 or sizes.block_kv < 128
    if small and pieces_dk == pieces_dv == 1:
        yield {}, sizes, 1
        return
    if dk is not None:
        yield {"dv_ptr": None}, sizes, pieces_dk
    if dv is not None:
        yield (
            {"dk_ptr": None},
            (sizes if small else triton_mods.within_lists(problem, replace(sizes, block_q=2 * sizes.block_q))),
            pieces_dv,
        )
    if scatter:
        yield {"dk_ptr": None, "dv_ptr": None}, sizes, 1


def _bias_gradient(problem: Problem, bias: torch.Tensor, sizes: Tiles, launch: Callable[..., None]) -> torch.Tensor:
    """Sum ds over the axes along which the bias was broadcast; tokens behind the last packed sequence get 0."""
    from tilewise.kernels.triton.backward_bias import bias_gradient

    dbias = torch.zeros_like(bias, memory_format=torch.contiguous_format)
    target = dbias[(None,) * (4 - bias.ndim)]
    has_batch, has_heads, has_q, has_kv = (size > 1 for size in target.shape)
    varlen = problem.kind == "varlen"
    width = bias.shape[-1] if varlen else problem.len_kv
    q_tiles, kv_tiles = tile_count(problem, problem.total_q, sizes.block_q), -(-width // sizes.block_kv)
    spans = {
        "sequence_span": 1 if has_batch or varlen else problem.batch,
        "head_span": 1 if has_heads else problem.heads_q,
        "q_span": 1 if has_q or varlen else q_tiles,
        "kv_span": 1 if has_kv or varlen else kv_tiles,
    }
    whole = entries(problem) * problem.heads_q * q_tiles * kv_tiles
    launch(
        bias_gradient,
        whole // math.prod(spans.values()),
        **spans,
        **_pairs(problem, "dbias", dbias),
        q_tiles=q_tiles,
        kv_tiles=kv_tiles,
        Q_SUM=not (has_q or varlen),
        KV_SUM=not (has_kv or varlen),
    )
    return dbias


def _sink_gradient(problem: Problem, sink: torch.Tensor, launch: Callable[..., None]) -> torch.Tensor:
    """Sum over the rows of each sequence on the device, then over the sequences that shared a sink."""
    from tilewise.kernels.triton.backward_bias import sink_gradient

    dsink = torch.empty((problem.batch, problem.heads_q), dtype=torch.float32, device=sink.device)
    launch(sink_gradient, problem.batch * problem.heads_q, dsink_ptr=dsink)
    return (dsink.sum(0) if sink.ndim == 1 else dsink).to(sink.dtype)


# ---- arguments ------------------------------------------------------------------------------------------------------

Argument = Union[torch.Tensor, int, float, str, bool, None, "Jitted", "Parts"]
Arguments = dict[str, Argument]


def _matrices(problem: Problem, unit: int, **matrices: torch.Tensor | None) -> Arguments:
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


def _row_strides(problem: Problem, **rows: torch.Tensor | None) -> Arguments:
    """Give the strides of lse and its like: (batch, heads, len), varlen (heads, total); 0 where there is none."""
    arguments: Arguments = {}
    for label, x in rows.items():
        batch, head, row = (0, 0, 0, *(() if x is None else x.stride()))[-3:]
        arguments |= {f"{label}_batch_stride": batch, f"{label}_head_stride": head, f"{label}_row_stride": row}
    return arguments


def _features(problem: Problem, tensors: Tensors) -> Arguments:
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
        **_pairs(problem, "bias", tensors.bias),
        **_pairs(problem, "mask", mask),
        **_per_head("sink", tensors.sink),
        **_per_head("slopes", tensors.alibi_slopes),
    }


def _pairs(problem: Problem, label: str, x: torch.Tensor | None) -> Arguments:
    """Give the pointer and strides of a bias or a mask along (batch, heads, len_q, len_kv), 0 where it broadcasts."""
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if x is not None and problem.kind == "varlen":
        strides = (0, *x.expand(problem.heads_q, -1, -1).stride())
    elif x is not None:
        strides = x.expand(problem.batch, problem.heads_q, problem.len_q, problem.len_kv).stride()
    axes = ("batch", "head", "q", "kv")
    return {f"{label}_ptr": x, **{f"{label}_{axis}_stride": n for axis, n in zip(axes, strides, strict=True)}}


def _per_head(label: str, x: torch.Tensor | None) -> Arguments:
    """Give the pointer and strides of a tensor of (heads_q,) or (batch, heads_q)."""
    batch, head = (0, 0) if x is None else (0, *x.stride())[-2:]
    return {f"{label}_ptr": x, f"{label}_batch_stride": batch, f"{label}_head_stride": head}


def _constants(problem: Problem, sizes: Tiles, unit: int) -> Arguments:
    """Give what a kernel is compiled for."""
    exact = problem.dtype == "float32"
    return {
        "DIM_QK": problem.dim_qk,
        "DIM_V": problem.dim_v,
        **_blocks(problem, sizes),
        "UNIT": unit,
        "TOP_LEFT": problem.mask.band.align == "top_left",
        "EXACT": exact,
        "NEGATIVE": problem.score.scale < 0,
    }


def _blocks(problem: Problem, sizes: Tiles) -> Arguments:
    """Give the shapes of tiles."""
    return {
        "BLOCK_Q": sizes.block_q,
        "BLOCK_KV": sizes.block_kv,
        "BLOCK_DIM_QK": sizes.piece(problem.dim_qk),
        "BLOCK_DIM_V": sizes.piece(problem.dim_v),
    }


# ---- launching ------------------------------------------------------------------------------------------------------

_Launch = Callable[[Iterable[torch.Tensor]], None]


def _prepare(
    kernel: Jitted, grid: tuple[int, int], arguments: Arguments, sizes: Tiles, pointers: Sequence[str]
) -> _Launch | None:
    """Settle a launch but for the addresses of its tensors, given by name; None where launches go to Triton."""
    from tilewise.backends.launch import prepare_named

    return prepare_named(kernel, grid, arguments, pointers, **launch_options(sizes))


def _launch(kernel: Jitted, grid: tuple[int, int], arguments: Arguments, sizes: Tiles) -> None:
    """Launch a kernel with those of the arguments that it takes."""
    from tilewise.backends.launch import launch_named

    launch_named(kernel, grid, arguments, **launch_options(sizes))


@cache
def _capability(device: str) -> Capability:
    return detect(device).capability if device.startswith("cuda") else None


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreting() -> bool:
    """Say whether Triton interprets kernels; it reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
