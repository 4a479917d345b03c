"""The gradients by the Triton kernels: which passes there are, and what each is given.

A backward pass is settled in its first call, as the forward pass is: later calls of the same problem, with tensors that
lie in memory alike, take memory for the results and launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.backends import triton_mods
from tilewise.backends.extents import entries, tile_count, unit_of
from tilewise.backends.triton_launch import (
    READ,
    Argument,
    Arguments,
    Launch,
    block_arguments,
    constant_arguments,
    feature_arguments,
    launch,
    matrix_arguments,
    pair_arguments,
    prepare_launch,
    row_arguments,
)
from tilewise.machine.tiles import Tiles, padded_dim
from tilewise.problem.mods import captured_of
from tilewise.problem.problem import Grads, Needs, Problem, Tensors

if TYPE_CHECKING:
    from tilewise.kernels.share import Jitted

Held = dict[str, "torch.Tensor | None"]  # every tensor of a call, by the kernels' names


class Pass(NamedTuple):
    """One kernel of a backward pass, with what it takes beside the arguments that all share."""

    kernel: Jitted
    grid: tuple[int, int]
    sizes: Tiles
    more: Arguments
    by_key: bool = False
    scatter: bool = False


class Settled(NamedTuple):
    """A pass that is launched by giving it tensors: those of the call by name, then those of users' functions."""

    launch: Launch
    names: list[str]
    has_mods: bool
    by_key: bool
    scatter: bool

    def __call__(self, held: Held, tensors: Tensors) -> None:
        """Launch."""
        given = [held[name] for name in self.names]
        if self.has_mods:
            given += triton_mods.pointers(captured_of(tensors), by_key=self.by_key, scatter=self.scatter)
        self.launch(given)  # type: ignore[arg-type]  # what is named is there


@lru_cache(maxsize=4096)
def _settled(_: Problem) -> dict[object, list[Settled]]:
    return {}


def differentiate(
    problem: Problem,
    tensors: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    needs: Needs,
    sizes: tuple[Tiles, Tiles],
    precision: str,
) -> Grads:
    """Compute the gradients; see ``triton_portable.backward``. ``sizes`` are of passes over keys and over queries."""
    q, k, v = tensors.q, tensors.k, tensors.v
    d_out = torch.zeros_like(out[:1, :1, :1]).expand_as(out) if d_out is None else d_out.to(out.dtype)
    dq, dk, dv = (
        torch.empty_like(x) if need else None for x, need in zip((q, k, v), (needs.dq, needs.dk, needs.dv), strict=True)
    )
    saved = lse.new_empty(2 * lse.numel() + max(size.block_q for size in sizes))  # kernels.load_saved says why
    held: Held = {label: getattr(tensors, x) for label, x in READ.items()} | {
        "out_ptr": out, "d_out_ptr": d_out, "dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv,
        "lse_ptr": lse, "d_lse_ptr": d_lse, "saved_ptr": saved,
    }  # fmt: skip
    if tensors.cu_seqlens_k is None:
        held["cu_k_ptr"] = tensors.cu_seqlens_q
    given = [x for x in (q, k, v, out, d_out, dq, dk, dv) if x is not None]
    key = (
        sizes, needs, precision, all(x.data_ptr() % 16 == 0 for x in given),
        out.stride(), lse.stride(), d_out.stride(), None if d_lse is None else d_lse.stride(),
        tuple(x is not None for x in captured_of(tensors).gradients),
    )  # fmt: skip
    settled = _settled(problem).get(key)
    if settled is not None:
        for each in settled:
            each(held, tensors)
        if not needs.dbias and not needs.dsink:
            return Grads(dq, dk, dv, None, None)
    unit = unit_of(*given)
    arguments = {
        **matrix_arguments(problem, unit, q=q, k=k, v=v, out=out, d_out=d_out, dq=dq, dk=dk, dv=dv),
        **feature_arguments(problem, tensors),
        **constant_arguments(problem, sizes[1], unit),
        "PRECISION": precision,
        "lse_ptr": lse,
        "d_lse_ptr": d_lse,
        "saved_ptr": saved,
        **row_arguments(problem, lse=lse, d_lse=d_lse),
        "saved_batch_stride": 0 if problem.kind == "varlen" else problem.heads_q * problem.total_q,
        "saved_head_stride": problem.total_q,
        "saved_plane_stride": lse.numel(),
    }
    if settled is None:
        passes = [_run(each, arguments, held, tensors) for each in _passes(problem, tensors, sizes, needs)]
        if None not in passes:
            _settled(problem)[key] = [each for each in passes if each is not None]

    def once(kernel: Jitted, programs: int, **more: Argument) -> None:
        launch(kernel, (programs, 1), arguments | more, sizes[1])

    dbias = _bias_gradient(problem, tensors.bias, sizes[1], once) if needs.dbias and tensors.bias is not None else None
    dsink = _sink_gradient(problem, tensors.sink, once) if needs.dsink and tensors.sink is not None else None
    return Grads(dq, dk, dv, dbias, dsink)


def _run(each: Pass, arguments: Arguments, held: Held, tensors: Tensors) -> Settled | None:
    """Run a pass; give it as settled, or None where launches go to Triton."""
    named = arguments | each.more
    names = [name for name in each.kernel.arg_names if held.get(name) is not None and named[name] is not None]
    has_mods = "mods" in each.kernel.arg_names and bool(named["mods"])
    captured = captured_of(tensors)
    of_mods = triton_mods.pointer_names(captured, scatter=each.scatter) if has_mods else []
    prepared = prepare_launch(each.kernel, each.grid, named, each.sizes, [*names, *of_mods])
    if prepared is None:
        launch(each.kernel, each.grid, named, each.sizes)
        return None
    settled = Settled(prepared, names, has_mods, each.by_key, each.scatter)
    settled(held, tensors)
    return settled


def _passes(problem: Problem, tensors: Tensors, sizes: tuple[Tiles, Tiles], needs: Needs) -> Iterator[Pass]:
    """Give the passes: over rows, over keys, over queries."""
    from tilewise.kernels.triton import backward as kernels

    by_keys, by_queries = sizes
    heads = problem.heads_q * entries(problem)
    rows = -(-problem.total_q // by_queries.block_q)
    more: Arguments = {"tiles": rows, "BLOCK_DIM_V": padded_dim(problem.dim_v)}
    yield Pass(kernels.prepare_rows, (rows * heads, 1), by_queries, more)
    scatter = any(x is not None for x in captured_of(tensors).gradients)
    if needs.dk or needs.dv or scatter:
        count = tile_count(problem, problem.total_kv, by_keys.block_kv)
        for part, blocks, pieces in _key_passes(problem, by_keys, needs, scatter):
            scatters = len(part) == 2
            mods = triton_mods.arguments(problem, tensors, by_key=True, scatter=scatters)
            more = {"tiles": count, **block_arguments(problem, blocks), **mods, **part}
            grid = count * heads // problem.group, pieces
            yield Pass(kernels.key_gradients, grid, blocks, more, by_key=True, scatter=scatters)
    if needs.dq:
        count = tile_count(problem, problem.total_q, by_queries.block_q)
        grid = count * heads, by_queries.pieces(problem.dim_qk)
        yield Pass(kernels.query_gradients, grid, by_queries, {"tiles": count})


def _key_passes(problem: Problem, sizes: Tiles, needs: Needs, scatter: bool) -> Iterator[tuple[Arguments, Tiles, int]]:
    """Give the passes over keys and their pieces: one for dk and dv, or, where no program can hold both, one for each.

    Two passes compute the scores twice, and are faster all the same at head dim 256, where one pass spills. dv's sum
    alone leaves room for twice the queries. Where head dims come in pieces, the programs of a pass own one each. What
    is scattered to a score_mod's tensors has a pass of its own: beside dk and dv it spilled 4 KB a thread.
    """
    pieces_dk, pieces_dv = sizes.pieces(problem.dim_qk), sizes.pieces(problem.dim_v)
    small = padded_dim(problem.dim_qk) + padded_dim(problem.dim_v) <= 256 or sizes.block_kv < 128
    if small and pieces_dk == pieces_dv == 1:
        if needs.dk or needs.dv:
            yield {}, sizes, 1
    else:
        if needs.dk:
            yield {"dv_ptr": None}, sizes, pieces_dk
        if needs.dv:
            more = sizes if small else triton_mods.within_lists(problem, replace(sizes, block_q=2 * sizes.block_q))
            yield {"dk_ptr": None}, more, pieces_dv
    if scatter:
        yield {"dk_ptr": None, "dv_ptr": None}, replace(sizes, num_warps=8), 1


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
        **pair_arguments(problem, "dbias", dbias),
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
