"""The second derivative, tile by tile: used after any backend's backward.

The backward pass, seen as a function of (q, k, v, bias, sink, out, lse, d_out, d_lse), is a sum over tiles with nothing
that couples them: what a row's normalisation owes is in lse and delta already. So each tile's share is
differentiated by itself, with torch.func.vjp over `torch_tiled.tile_gradients`, and added up. Memory stays linear in
the length. How out and lse depend on q, k and v is not looked at here: the gradients given for them flow back through
the first derivative, as autograd chains it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.backends.outputs import sum_dtype
from tilewise.backends.torch_geometry import Tile
from tilewise.backends.torch_tiled import LOG2E, Engine, Rows, engine_for, sink_gradient, tile_gradients, tiles
from tilewise.problem.problem import Grads, Needs, Problem, Tensors


class SecondGrads(NamedTuple):
    """Gradients of ``sum(cotangent * first gradient)`` with respect to all that the backward pass read."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    sink: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    d_out: torch.Tensor
    d_lse: torch.Tensor


def double_backward(
    problem: Problem,
    tensors: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    cotangents: Grads,
) -> SecondGrads:
    """Differentiate the backward pass.

    Args:
        problem, tensors, out, lse, d_out, d_lse: what the backward pass read.
        cotangents: the gradients that arrive for dq, dk, dv, dbias and dsink, each in its input's shape, or None.
    """
    engine = engine_for(problem, tensors)
    exact = sum_dtype(tensors.q.dtype)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    second = SecondGrads(
        *(torch.zeros_like(x, dtype=exact) for x in (tensors.q, tensors.k, tensors.v)),
        *(None if x is None else torch.zeros_like(x, dtype=exact) for x in (tensors.bias, tensors.sink)),
        *(torch.zeros_like(x, dtype=exact) for x in (out, lse, d_out, d_lse)),
    )
    block_q = tiles(problem).block_q
    for q_start in range(0, engine.geometry.rows, block_q):
        q_stop = min(q_start + block_q, engine.geometry.rows)
        _rows(engine, q_start, q_stop, (out, lse, d_out, d_lse), cotangents, second)
    return second


def _rows(
    engine: Engine,
    q_start: int,
    q_stop: int,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    cotangents: Grads,
    second: SecondGrads,
) -> None:
    """Add what rows [q_start, q_stop) contribute."""
    out, lse, d_out, d_lse = saved
    q = engine.load_rows(engine.q, q_start, q_stop)
    rows = engine.saved_rows(out, lse, d_out, d_lse, q_start, q_stop)
    g_q, g_d_out, g_lse, g_delta = totals = [torch.zeros_like(x) for x in (q, *rows)]
    if any(x is not None for x in cotangents[:4]):
        for tile in engine.geometry.tiles(q_start, q_stop, tiles(engine.problem).block_kv):
            for total, share in zip(totals, _tile(engine, tile, q, rows, cotangents, second), strict=True):
                total += share
    for total, share in zip(totals[2:], _sink(engine, rows, q_start, q_stop, cotangents, second), strict=True):
        total += share

    # delta = sum(d_out * out) - d_lse, and the rows' lse was taken to base 2
    exact_out = engine.load_rows(engine.grouped(out), q_start, q_stop)
    finite = torch.isfinite(engine.grouped_rows(lse)[..., q_start:q_stop])
    at = (Ellipsis, slice(q_start, q_stop))
    engine.grouped(second.q)[(*at, slice(None))] += g_q
    engine.grouped(second.out)[(*at, slice(None))] += g_delta[..., None] * rows.d_out
    engine.grouped(second.d_out)[(*at, slice(None))] += g_d_out + g_delta[..., None] * exact_out
    engine.grouped_rows(second.lse)[at] += torch.where(finite, g_lse * LOG2E, 0)
    engine.grouped_rows(second.d_lse)[at] -= g_delta


def _tile(
    engine: Engine, tile: Tile, q: torch.Tensor, rows: Rows, cotangents: Grads, second: SecondGrads
) -> tuple[torch.Tensor, ...]:
    """Differentiate one tile: adds to k, v and bias, and gives the gradients of (q, d_out, lse, delta)."""
    needs = Needs(*(x is not None for x in cotangents))
    keys = slice(tile.kv_start, tile.kv_stop)

    def first(
        q: torch.Tensor,
        d_out: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        grads = tile_gradients(engine, tile, q, k, v, bias, Rows(d_out, lse, delta), needs)
        return tuple(x for x in grads if x is not None)

    k, v = engine.load_keys(tile, engine.visible(tile))
    bias = engine.bias(tile)
    outputs, pull, *_ = torch.func.vjp(first, q, *rows, k, v, *(() if bias is None else (bias,)))
    arriving: list[torch.Tensor] = []
    if cotangents.dq is not None:
        arriving.append(engine.load_rows(engine.grouped(cotangents.dq), tile.q_start, tile.q_stop))
    arriving += [engine.by_heads(x)[:, :, keys].to(q.dtype) for x in (cotangents.dk, cotangents.dv) if x is not None]
    if cotangents.dbias is not None:
        arriving.append(engine.cut_bias(cotangents.dbias, tile).expand_as(outputs[-1]))
    grads = pull(tuple(arriving))
    engine.by_heads(second.k)[:, :, keys] += grads[4]
    engine.by_heads(second.v)[:, :, keys] += grads[5]
    if second.bias is not None:
        engine.add_bias(second.bias, grads[6], tile)
    return tuple(grads[:4])


def _sink(
    engine: Engine, rows: Rows, q_start: int, q_stop: int, cotangents: Grads, second: SecondGrads
) -> tuple[torch.Tensor, ...]:
    """Differentiate the rows' share of dsink: adds to sink, and gives the gradients of (lse, delta)."""
    sink = engine.sink(q_start, q_stop)
    if sink is None or second.sink is None or cotangents.dsink is None:
        return torch.zeros_like(rows.lse), torch.zeros_like(rows.delta)

    def first(sink: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return sink_gradient(sink, Rows(rows.d_out, lse, delta))

    by_row, pull, *_ = torch.func.vjp(first, sink, rows.lse, rows.delta)
    g_sink, g_lse, g_delta = pull(engine.per_head(cotangents.dsink, q_start, q_stop).expand_as(by_row))
    engine.add_per_head(second.sink, g_sink * LOG2E, q_start, q_stop)
    return g_lse, g_delta
