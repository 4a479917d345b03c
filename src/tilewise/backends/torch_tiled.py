"""The tiled algorithm in plain torch: any device torch knows, forward and backward, every feature, linear memory.

`forward` and `backward` read top to bottom like ``numpy_tiled.py``; here a tile spans all batches and heads at once,
which keeps torch's cost per call small beside the work. Each feature has one place: what is visible in
``torch_geometry.py``, what happens to a score in `Engine.score`, dropout in `Engine.dropout`.

Inside, heads_q is split into (heads_kv, group), and the group's rows share one product with their keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.backends import torch_cache
from tilewise.backends.outputs import empty_lse, empty_out, sum_dtype
from tilewise.backends.torch_geometry import Geometry, Tile, cache_geometry, dense_geometry, varlen_geometry
from tilewise.backends.torch_mods import MaskMod, Pairs, ScoreMod
from tilewise.machine.tiles import Tiles, torch_tiles
from tilewise.problem.cache import CacheTensors
from tilewise.problem.mods import captured_of
from tilewise.problem.problem import Grads, Needs, Problem, Tensors

if TYPE_CHECKING:
    from tilewise.backends.block_lists import Blocks

name = "torch_tiled"
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


def why_not(problem: Problem) -> str | None:
    """Every problem fits."""
    return None


def tiles(problem: Problem) -> Tiles:
    """Give the tile sizes for a problem."""
    batch = 1 if problem.kind == "varlen" else problem.batch
    return torch_tiles(batch * problem.heads_q, 8 if problem.dtype == "float64" else 4)


def forward(problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse of a dense or varlen problem; `tilewise.attention` gives the shapes."""
    engine = engine_for(problem, tensors)
    out, lse = empty_out(tensors.q, problem.dim_v, problem.layout), empty_lse(tensors.q)
    _forward(engine, engine.grouped(out), engine.grouped_rows(lse))
    return out, lse


def decode(problem: Problem, tensors: CacheTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Append to the cache, then attend to it: out (batch, len_q, heads_q, dim_v), lse (batch, heads_q, len_q)."""
    q, lengths = torch_cache.append(problem, tensors)
    q = q.transpose(1, 2)
    table = torch_cache.page_table(tensors)
    stores = Tensors(q, tensors.k_cache, tensors.v_cache, sink=tensors.sink, alibi_slopes=tensors.alibi_slopes)
    engine = Engine(
        problem=problem,
        geometry=cache_geometry(problem, lengths, tensors.cache_leftpad),
        q=_split_heads(q, problem),
        k=torch_cache.Store(tensors.k_cache, table, tensors.k_scale),
        v=torch_cache.Store(tensors.v_cache, table, tensors.v_scale),
        tensors=stores,
    )
    out, lse = empty_out(q, problem.dim_v, "bshd"), empty_lse(q)
    _forward(engine, engine.grouped(out), engine.grouped_rows(lse))
    return out.transpose(1, 2), lse


def _forward(engine: Engine, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill out (batch, heads_kv, group, rows, dim_v) and lse (batch, heads_kv, group, rows)."""
    sizes = tiles(engine.problem)
    for q_start in range(0, engine.geometry.rows, sizes.block_q):
        q_stop = min(q_start + sizes.block_q, engine.geometry.rows)
        q = engine.scaled(engine.load_rows(engine.q, q_start, q_stop))
        row_max = q.new_full(q.shape[:-1], -math.inf)
        row_sum = torch.zeros_like(row_max)
        acc = q.new_zeros((*q.shape[:-1], engine.problem.dim_v))
        for tile in engine.geometry.tiles(q_start, q_stop, sizes.block_kv):
            visible = engine.visible(tile)
            k, v = engine.load_keys(tile, visible)
            score, _, _ = engine.score(q, k, engine.bias(tile), tile, visible)  # base 2; the scale is in q
            row_max_new = torch.maximum(row_max, score.amax(-1))
            anchor = torch.where(row_max_new == -math.inf, 0, row_max_new)
            p = score.sub_(anchor[..., None]).exp2_()
            rescale = torch.exp2(row_max - anchor)
            row_sum = row_sum * rescale + p.sum(-1)
            acc = acc.mul_(rescale[..., None]).add_(product(engine.dropout(p, tile), v))
            row_max = row_max_new
        sink = engine.sink(q_start, q_stop)
        if sink is not None:  # one more step of the same kind: a score without a value
            row_max_new = torch.maximum(row_max, sink)
            anchor = torch.where(row_max_new == -math.inf, 0, row_max_new)
            rescale = torch.exp2(row_max - anchor)
            row_sum = row_sum * rescale + torch.exp2(sink - anchor)
            acc = acc.mul_(rescale[..., None])
            row_max = row_max_new
        row_sum_or_1 = torch.where(row_sum == 0, 1, row_sum)
        out[..., q_start:q_stop, :] = acc / row_sum_or_1[..., None]
        lse[..., q_start:q_stop] = row_max * LN2 + row_sum_or_1.log()


def backward(
    problem: Problem,
    tensors: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    needs: Needs,
) -> Grads:
    """Differentiate `forward`, recomputing each tile of p from lse; d_out or d_lse may be None for zero."""
    engine = engine_for(problem, tensors)
    exact = sum_dtype(tensors.q.dtype)
    dq = torch.empty_like(tensors.q) if needs.dq else None
    dk = torch.zeros_like(tensors.k, dtype=exact) if needs.dk else None
    dv = torch.zeros_like(tensors.v, dtype=exact) if needs.dv else None
    dbias = torch.zeros_like(tensors.bias, dtype=exact) if needs.dbias and tensors.bias is not None else None
    dsink = torch.zeros_like(tensors.sink, dtype=exact) if needs.dsink and tensors.sink is not None else None
    sizes = tiles(problem)
    for q_start in range(0, engine.geometry.rows, sizes.block_q):
        q_stop = min(q_start + sizes.block_q, engine.geometry.rows)
        q = engine.load_rows(engine.q, q_start, q_stop)
        rows = engine.saved_rows(out, lse, d_out, d_lse, q_start, q_stop)
        dq_rows = torch.zeros_like(q)
        for tile in engine.geometry.tiles(q_start, q_stop, sizes.block_kv):
            k, v = engine.load_keys(tile, engine.visible(tile))
            grads = tile_gradients(engine, tile, q, k, v, engine.bias(tile), rows, needs)
            keys = slice(tile.kv_start, tile.kv_stop)
            if grads.dq is not None:
                dq_rows += grads.dq
            if dk is not None and grads.dk is not None:
                engine.by_heads(dk)[:, :, keys] += grads.dk
            if dv is not None and grads.dv is not None:
                engine.by_heads(dv)[:, :, keys] += grads.dv
            if dbias is not None and grads.dbias is not None:
                engine.add_bias(dbias, grads.dbias, tile)
        if dq is not None:
            engine.grouped(dq)[..., q_start:q_stop, :] = dq_rows
        sink = engine.sink(q_start, q_stop)
        if dsink is not None and sink is not None:
            engine.add_per_head(dsink, sink_gradient(sink, rows), q_start, q_stop)
    return Grads(
        dq=dq,
        dk=None if dk is None else dk.to(tensors.k.dtype),
        dv=None if dv is None else dv.to(tensors.v.dtype),
        dbias=None if dbias is None or tensors.bias is None else dbias.to(tensors.bias.dtype),
        dsink=None if dsink is None or tensors.sink is None else dsink.to(tensors.sink.dtype),
    )


class Rows(NamedTuple):
    """What the backward pass knows of rows: d_out (..., block_q, dim_v), lse in base 2 and delta (..., block_q)."""

    d_out: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor


def tile_gradients(
    engine: Engine,
    tile: Tile,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    rows: Rows,
    needs: Needs,
) -> Grads:
    """Give one tile's share of each gradient: a pure function of its tensors, differentiated for the second time."""
    visible = engine.visible(tile)
    score, slope, given = engine.score(engine.scaled(q), k, bias, tile, visible)
    p = torch.exp2(score - rows.lse[..., None])
    dp = product(rows.d_out, v.mT)
    p_kept, dp = engine.dropout(p, tile), engine.dropout(dp, tile)
    ds = p * (dp - rows.delta[..., None])
    dv = product_over_rows(p_kept, rows.d_out) if needs.dv else None
    if engine.score_mod is not None and given is not None:
        ds = engine.score_mod.gradient(given, engine.pairs(tile), ds)
    dbias = ds if needs.dbias else None
    if slope is not None:
        ds = ds * slope
    scale = engine.problem.score.scale
    dq = product(ds, k) * scale if needs.dq else None
    dk = product_over_rows(ds, q) * scale if needs.dk else None
    return Grads(dq, dk, dv, dbias, None)


def sink_gradient(sink: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Give each row's share of dsink: the sink's probability times what the row's normalisation owes."""
    return -torch.exp2(sink - rows.lse) * rows.delta


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply (batch, heads_kv, group, rows, n) by (batch, heads_kv, n, m), a group's rows in one product."""
    joined = left.flatten(2, 3) @ right
    return torch.unflatten(joined, 2, left.shape[2:4])


def product_over_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply (..., rows, n) transposed by (..., rows, m), summed over the group too: (batch, heads_kv, n, m)."""
    return left.flatten(2, 3).mT @ right.flatten(2, 3)


@dataclass(frozen=True)
class Engine:
    """One problem's tensors as the loops want them; each method is one feature's only place."""

    problem: Problem
    geometry: Geometry
    q: torch.Tensor  # (batch, heads_kv, group, rows, dim_qk)
    k: torch_cache.Store
    v: torch_cache.Store
    tensors: Tensors

    @cached_property
    def score_mod(self) -> ScoreMod | None:
        """The user's function of scores."""
        return ScoreMod.of(self.tensors, sum_dtype(self.q.dtype))

    @cached_property
    def mask_mod(self) -> MaskMod | None:
        """The user's function of positions."""
        return MaskMod.of(self.tensors)

    def pairs(self, tile: Tile) -> Pairs:
        """Say which pairs a tile holds, as users' functions are told, broadcasting against its scores."""
        heads = torch.arange(self.problem.heads_q, device=self.q.device).view(1, *self.q.shape[1:3], 1, 1)
        row = self.geometry.row
        return Pairs(
            row(self.geometry.sequence, tile), heads, row(self.geometry.q_pos, tile), self.geometry.kv_pos(tile)
        )

    def by_heads(self, x: torch.Tensor) -> torch.Tensor:
        """View q, k, v, out or a gradient as (batch, heads, len, dim): varlen tokens become one batch."""
        return x.transpose(0, 1)[None] if self.problem.kind == "varlen" else x

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """View a tensor of query rows as (batch, heads_kv, group, rows, dim)."""
        return _split_heads(self.by_heads(x), self.problem)

    def grouped_rows(self, x: torch.Tensor) -> torch.Tensor:
        """View lse, or a tensor like it, as (batch, heads_kv, group, rows)."""
        return _split_heads(x[None] if self.problem.kind == "varlen" else x, self.problem)

    def load_rows(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Read rows [start, stop) of a grouped tensor in the type that sums are kept in."""
        return x[..., start:stop, :].to(sum_dtype(x.dtype))

    def load_keys(self, tile: Tile, visible: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the tile's keys and values, zero where no row of the tile sees them: 0 * NaN would spread."""
        exact = sum_dtype(self.q.dtype)
        k = self.k.tile(tile.kv_start, tile.kv_stop, exact)
        v = self.v.tile(tile.kv_start, tile.kv_stop, exact)
        if visible is None:
            return k, v
        seen = visible.any(-2).any(2)[..., None]  # (batch or 1, heads_kv or 1, block_kv, 1)
        return torch.where(seen, k, 0), torch.where(seen, v, 0)

    def visible(self, tile: Tile) -> torch.Tensor | None:
        """Say which pairs of the tile are visible, broadcasting to (batch, heads_kv, group, block_q, block_kv)."""
        blocks = captured_of(self.tensors).blocks
        if self.tensors.mask is None and self.mask_mod is None and blocks is None:
            return self.geometry.visible(tile) if tile.masked else None
        visible = self.geometry.visible(tile)
        if self.tensors.mask is not None:
            visible = self._cut(self.tensors.mask, tile) & visible
        shown = None if self.mask_mod is None else self.mask_mod(self.pairs(tile))
        if blocks is not None:
            shown = self._listed(blocks, tile, shown)
        return visible if shown is None else visible & shown

    def _listed(self, blocks: Blocks, tile: Tile, shown: torch.Tensor | None) -> torch.Tensor:
        """Say which pairs lists of tiles leave visible, where ``shown`` says it within partial tiles."""
        q_pos = torch.arange(tile.q_start, tile.q_stop, device=self.q.device)[:, None]
        kv_pos = torch.arange(tile.kv_start, tile.kv_stop, device=self.q.device)[None, :]
        if shown is not None:  # (batch, heads_q, rows, keys), as the lists have it
            shape = (*self.q.shape[:3], *torch.broadcast_shapes(q_pos.shape, kv_pos.shape))
            shown = shown.expand(shape).flatten(1, 2)
        return _split_heads(blocks.visible(q_pos, kv_pos, True if shown is None else shown), self.problem)

    def scaled(self, q: torch.Tensor) -> torch.Tensor:
        """Multiply q by the scale, and by log2(e) where neither softcap nor score_mod comes in between."""
        score = self.problem.score
        return q * (score.scale if score.softcap or self.score_mod else score.scale * LOG2E)

    def score(
        self, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, tile: Tile, visible: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Give the tile's scores in base 2, -inf where hidden, the softcap's slope, and what the score_mod was given.

        A score_mod works in natural-log units, so that base 2 comes after it.
        """
        softcap, slope, given = self.problem.score.softcap, None, None
        base = 1.0 if self.score_mod else LOG2E
        score = product(q, k.mT)
        if softcap:
            capped = torch.tanh(score / softcap)
            score, slope = capped * (softcap * base), 1 - capped.square()
        if bias is not None:
            score = score + bias * base
        if self.tensors.alibi_slopes is not None:
            slopes = self.per_head(self.tensors.alibi_slopes, tile.q_start, tile.q_stop)
            score = score - slopes[..., None] * base * self.geometry.distance(tile)
        if self.score_mod is not None:
            given = score if visible is None else score.masked_fill(~visible, 0)
            score = self.score_mod(given, self.pairs(tile)) * LOG2E
        if visible is not None:
            score = score.masked_fill(~visible, -math.inf)
        return score, slope, given

    def bias(self, tile: Tile) -> torch.Tensor | None:
        """Cut the bias to the tile."""
        return None if self.tensors.bias is None else self.cut_bias(self.tensors.bias, tile)

    def cut_bias(self, bias: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Cut a tensor of the bias's shape to the tile, broadcasting to (batch, heads_kv, group, block_q, block_kv)."""
        exact = sum_dtype(self.q.dtype)
        if self.problem.kind != "varlen":
            return self._cut(bias, tile).to(exact)
        rows = self._bias_heads(bias)[..., tile.q_start : tile.q_stop, :]
        return rows.gather(-1, self._bias_columns(rows, tile)).to(exact)

    def add_bias(self, dbias: torch.Tensor, ds: torch.Tensor, tile: Tile) -> None:
        """Add the tile's ds to the bias's gradient, summed over the axes along which the bias was broadcast."""
        if self.problem.kind == "varlen":
            rows = self._bias_heads(dbias)[..., tile.q_start : tile.q_stop, :]
            ds = torch.where(self.geometry.visible(tile), ds, 0)
            rows.scatter_add_(-1, self._bias_columns(rows, tile), ds.sum_to_size((*rows.shape[:-1], ds.shape[-1])))
            return
        target = self._cut(dbias, tile)
        target += ds.sum_to_size(target.shape)

    def _bias_heads(self, bias: torch.Tensor) -> torch.Tensor:
        """View a varlen bias (heads_q or 1, total_q, width) as (1, heads_kv or 1, group or 1, total_q, width)."""
        return _split_heads(bias[None], self.problem)

    def _bias_columns(self, rows: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Give the column of each pair in a varlen bias: the key's position in its own sequence."""
        columns = self.geometry.kv_pos(tile).clamp(0, rows.shape[-1] - 1)
        return columns.expand(*rows.shape[:-1], tile.kv_stop - tile.kv_start)

    def _cut(self, x: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Cut a tensor that broadcasts to (batch, heads_q, len_q, len_kv) to the tile, axes of size 1 kept."""
        x = _split_heads(x[(None,) * (4 - x.ndim)], self.problem)
        if x.shape[3] > 1:
            x = x[:, :, :, tile.q_start : tile.q_stop]
        return x[..., tile.kv_start : tile.kv_stop] if x.shape[4] > 1 else x

    def per_head(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """View a tensor of (heads_q,) or (batch, heads_q) as (batch or 1, heads_kv, group, rows or 1)."""
        x = x.to(sum_dtype(self.q.dtype))
        if x.ndim == 1:
            return _split_heads(x[None, :, None], self.problem)
        if self.problem.kind != "varlen":
            return _split_heads(x[:, :, None], self.problem)
        by_row = x[self.geometry.sequence[0, start:stop]]  # (rows, heads_q)
        return _split_heads(by_row.mT[None], self.problem)

    def add_per_head(self, target: torch.Tensor, by_row: torch.Tensor, start: int, stop: int) -> None:
        """Add (batch, heads_kv, group, rows) to a gradient of (heads_q,) or (batch, heads_q)."""
        by_row = by_row.flatten(1, 2)
        if target.ndim == 1:
            target += by_row.sum((0, 2))
        elif self.problem.kind != "varlen":
            target += by_row.sum(2)
        else:
            target.index_add_(0, self.geometry.sequence[0, start:stop], by_row[0].mT)

    def sink(self, start: int, stop: int) -> torch.Tensor | None:
        """Give the rows' sink in base 2, in the shape of row_max."""
        sink = self.tensors.sink
        if sink is None:
            return None
        rows = (self.per_head(sink, start, stop) * LOG2E).expand(*self.q.shape[:3], stop - start)
        tail = self.geometry.tail
        return rows if tail is None else rows.masked_fill(tail[:, start:stop], -math.inf)

    def dropout(self, x: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Zero what is dropped and scale up what stays."""
        rate, seed = self.problem.dropout, self.tensors.seed
        if not rate or seed is None:
            return x
        heads = torch.arange(self.problem.heads_q, device=x.device).view(*self.q.shape[1:3], 1, 1)
        return torch.where(self.geometry.kept(tile, seed, rate, heads), x / (1 - rate), 0)

    def saved_rows(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        d_out: torch.Tensor | None,
        d_lse: torch.Tensor | None,
        start: int,
        stop: int,
    ) -> Rows:
        """Read what the backward pass needs of some rows: ``delta = sum(d_out * out) - d_lse``."""
        out = self.load_rows(self.grouped(out), start, stop)
        d_out = torch.zeros_like(out) if d_out is None else self.load_rows(self.grouped(d_out), start, stop)
        delta = (d_out * out).sum(-1)
        if d_lse is not None:
            delta = delta - self.grouped_rows(d_lse)[..., start:stop]
        lse = self.grouped_rows(lse)[..., start:stop]
        far = torch.where(lse == -math.inf, 0.0, math.inf)  # p is 0 where the dtype no longer tells scores apart
        near = lse.abs() < 2 / torch.finfo(lse.dtype).eps
        return Rows(d_out, torch.where(near, lse * LOG2E, far), delta)


def _split_heads(x: torch.Tensor, problem: Problem) -> torch.Tensor:
    """View (batch, heads_q or 1, ...) as (batch, heads_kv or 1, group or 1, ...)."""
    if x.shape[1] == problem.heads_q and problem.heads_q:
        return torch.unflatten(x, 1, (problem.heads_kv, problem.group))
    return x.unsqueeze(2)


def engine_for(problem: Problem, tensors: Tensors) -> Engine:
    """Lay a dense or varlen problem out for the loops."""
    q, k, v = tensors.q, tensors.k, tensors.v
    if problem.kind == "dense":
        stores = torch_cache.Store(k), torch_cache.Store(v)
        return Engine(problem, dense_geometry(problem, tensors), _split_heads(q, problem), *stores, tensors)
    q = q.transpose(0, 1)[None]
    if tensors.block_table is None:
        stores = torch_cache.Store(k.transpose(0, 1)[None]), torch_cache.Store(v.transpose(0, 1)[None])
    else:  # sequence s owns the tokens from s * max_pages * page_size on: one long row of pages
        table = tensors.block_table.reshape(1, -1)
        stores = torch_cache.Store(k, table), torch_cache.Store(v, table)
    return Engine(problem, varlen_geometry(problem, tensors), _split_heads(q, problem), *stores, tensors)
