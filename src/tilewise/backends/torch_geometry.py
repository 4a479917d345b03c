"""Where rows and keys stand: one picture of dense, varlen and cache calls for the torch engine.

The engine sees every call as q (batch, heads_kv, group, rows, dim_qk) against k (batch, heads_kv, keys, dim_qk). A
varlen call is one batch of all tokens. What tells sequences apart is a handful of small per-row tensors: the row's
position in its own sequence, the key index at which that sequence's keys begin, and its range of visible keys. Memory
is linear in the length, and `tilewise.problem.blocks` stays the only place that knows what is visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewise.problem.blocks import block_ranges, is_visible
from tilewise.problem.philox import is_kept
from tilewise.problem.problem import Problem, Tensors


class Tile(NamedTuple):
    """A tile of the score matrix: rows and keys, half open, and whether some pair in it may be hidden."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    masked: bool


class Span(NamedTuple):
    """What the host knows of one sequence: its rows, where its keys begin, and its range among them."""

    q_start: int
    q_stop: int
    kv_base: int
    kv_start: int
    kv_stop: int
    offset: int


@dataclass(frozen=True)
class Geometry:
    """Positions and ranges of every row. Tensors are (sequences or 1, rows or 1) and broadcast against each other.

    ``spans`` is None where sequence bounds lie on the device, which the host never reads: every key is then visited
    under the mask. ``exact`` says whether the spans give the ranges themselves or only bounds of them. ``tail`` marks
    rows that belong to no sequence, or is None.
    """

    left: int | None
    right: int | None
    rows: int
    keys: int
    q_pos: torch.Tensor
    kv_base: torch.Tensor
    kv_start: torch.Tensor
    kv_stop: torch.Tensor
    offset: torch.Tensor
    sequence: torch.Tensor
    spans: list[Span] | None
    exact: bool
    tail: torch.Tensor | None = None

    def tiles(self, q_start: int, q_stop: int, block_kv: int) -> Iterator[Tile]:
        """Walk the keys that rows [q_start, q_stop) must visit: masked, bare, masked, in pieces of block_kv."""
        visit_start, full_start, full_stop, visit_stop = self._ranges(q_start, q_stop)
        for start, stop, masked in (
            (visit_start, full_start, True),
            (full_start, full_stop, False),
            (full_stop, visit_stop, True),
        ):
            for kv_start in range(start, stop, block_kv):
                yield Tile(q_start, q_stop, kv_start, min(kv_start + block_kv, stop), masked)

    def _ranges(self, q_start: int, q_stop: int) -> tuple[int, int, int, int]:
        """Join the key ranges of all sequences that have a row here; a key is bare where it is for each of them."""
        if self.spans is None:
            return 0, self.keys, self.keys, self.keys
        visit_start, visit_stop, full_start, full_stop, covered = self.keys, 0, 0, self.keys, True
        for span in self.spans:
            if span.q_start >= q_stop or span.q_stop <= q_start:
                continue
            covered = covered and span.q_start <= q_start and q_stop <= span.q_stop
            first = max(q_start, span.q_start) - span.q_start
            last = min(q_stop, span.q_stop) - span.q_start
            ranges = block_ranges(first, last, span.kv_start, span.kv_stop, self.left, self.right, span.offset, 1)
            start, bare_start, bare_stop, stop = (span.kv_base + edge for edge in ranges)
            if start < stop:
                visit_start, visit_stop = min(visit_start, start), max(visit_stop, stop)
            full_start, full_stop = max(full_start, bare_start), min(full_stop, bare_stop)
        if visit_start >= visit_stop:
            return 0, 0, 0, 0
        if not (covered and self.exact) or full_start >= full_stop:
            return visit_start, visit_stop, visit_stop, visit_stop
        return visit_start, full_start, full_stop, visit_stop

    def row(self, x: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Cut a per-row tensor to the tile: (sequences or 1, 1, 1, block_q or 1, 1)."""
        x = x[:, tile.q_start : tile.q_stop] if x.shape[1] > 1 else x
        return x[:, None, None, :, None]

    def kv_pos(self, tile: Tile) -> torch.Tensor:
        """Give each key's position in the row's own sequence: (1, 1, 1, block_q or 1, block_kv)."""
        index = torch.arange(tile.kv_start, tile.kv_stop, device=self.q_pos.device)
        return index - self.row(self.kv_base, tile)

    def visible(self, tile: Tile) -> torch.Tensor:
        """Say which pairs of the tile are visible: (sequences or 1, 1, 1, block_q, block_kv)."""
        q_pos, offset = self.row(self.q_pos, tile), self.row(self.offset, tile)
        kv_start, kv_stop = self.row(self.kv_start, tile), self.row(self.kv_stop, tile)
        return is_visible(q_pos, self.kv_pos(tile), kv_start, kv_stop, self.left, self.right, offset)

    def distance(self, tile: Tile) -> torch.Tensor:
        """Give ALiBi's distance of each key from the diagonal."""
        return (self.row(self.q_pos, tile) + self.row(self.offset, tile) - self.kv_pos(tile)).abs()

    def kept(self, tile: Tile, seed: torch.Tensor, dropout: float, heads: torch.Tensor) -> torch.Tensor:
        """Say which pairs survive dropout; heads is (heads_kv, group, 1, 1)."""
        positions = self.row(self.q_pos, tile), self.kv_pos(tile)
        return is_kept(seed, dropout, *positions, heads, self.row(self.sequence, tile))


def dense_geometry(problem: Problem, tensors: Tensors) -> Geometry:
    """Describe a dense call: every batch entry has the same rows; ranges may differ."""
    device = tensors.q.device

    def bounds(x: torch.Tensor | None, default: int) -> torch.Tensor:
        return torch.full((1, 1), default, device=device) if x is None else x.long().clamp(0, problem.len_kv)[:, None]

    offset = problem.mask.band.offset(problem.len_q, problem.len_kv)
    kv_start, kv_stop = bounds(tensors.kv_start, 0), bounds(tensors.kv_stop, problem.len_kv)
    widest = Span(0, problem.len_q, 0, 0, problem.len_kv, offset)
    return _batch(problem, kv_start, kv_stop, torch.full((1, 1), offset, device=device), [widest])


def _batch(
    problem: Problem, kv_start: torch.Tensor, kv_stop: torch.Tensor, offset: torch.Tensor, bounds: list[Span] | None
) -> Geometry:
    """Describe a batch whose entries have the same rows. ``bounds`` is what the host knows of ranges on a device."""
    device, band = kv_stop.device, problem.mask.band
    spans, exact = bounds, not problem.mask.ranged
    if device.type == "cpu":
        triples = torch.cat(torch.broadcast_tensors(kv_start, kv_stop, offset), 1).unique(dim=0).tolist()
        spans, exact = [Span(0, problem.len_q, 0, start, stop, shift) for start, stop, shift in triples], True
    return Geometry(
        left=band.left,
        right=band.right,
        rows=problem.len_q,
        keys=problem.len_kv,
        q_pos=torch.arange(problem.len_q, device=device)[None],
        kv_base=torch.zeros((1, 1), dtype=torch.int64, device=device),
        kv_start=kv_start,
        kv_stop=kv_stop,
        offset=offset,
        sequence=torch.arange(problem.batch, device=device)[:, None],
        spans=spans,
        exact=exact,
    )


def varlen_geometry(problem: Problem, tensors: Tensors) -> Geometry:
    """Describe packed sequences: one batch of total_q rows, each with its own sequence's keys.

    Rows after the last sequence see nothing. With a block table, sequence s owns the keys that `gather_pages` laid at
    ``s * max_pages * page_size``.
    """
    band, device = problem.mask.band, tensors.q.device
    bounds_q = _known(tensors.cu_seqlens_q).long()
    bounds_k = bounds_q if tensors.cu_seqlens_k is None else tensors.cu_seqlens_k.long()
    pitch = problem.len_kv if tensors.block_table is not None else 0
    index = torch.arange(problem.total_q, device=device)
    last = max(problem.batch - 1, 0)
    found = torch.searchsorted(bounds_q[1:].contiguous(), index, right=True)
    sequence = found.clamp(max=last)
    starts_q, stops_q = bounds_q[:-1], bounds_q[1:]
    starts_k, stops_k = bounds_k[:-1], bounds_k[1:]
    if problem.batch == 0:
        starts_q = stops_q = starts_k = stops_k = bounds_q[:1]
    len_q, len_kv = (stops_q - starts_q)[sequence], (stops_k - starts_k)[sequence]
    len_kv = len_kv.clamp(0, problem.len_kv)
    offset = len_kv - len_q if band.align == "bottom_right" else torch.zeros_like(len_q)
    spans = None
    if device.type == "cpu":
        spans = []
        edges = zip(starts_q.tolist(), stops_q.tolist(), starts_k.tolist(), stops_k.tolist(), strict=True)
        for number, (q_start, q_stop, k_start, k_stop) in enumerate(edges):
            base = number * pitch if pitch else k_start
            kv_stop = k_stop - k_start
            spans.append(Span(q_start, q_stop, base, 0, kv_stop, band.offset(q_stop - q_start, kv_stop)))
    return Geometry(
        left=band.left,
        right=band.right,
        rows=problem.total_q,
        keys=problem.total_kv,
        q_pos=(index - starts_q[sequence])[None],
        kv_base=(sequence * pitch if pitch else starts_k[sequence])[None],
        kv_start=torch.zeros((1, 1), dtype=torch.int64, device=device),
        kv_stop=torch.where(found > last, 0, len_kv)[None],
        tail=(found > last)[None],
        offset=offset[None],
        sequence=sequence[None],
        spans=spans,
        exact=True,
    )


def cache_geometry(problem: Problem, lengths: torch.Tensor, leftpad: torch.Tensor | None) -> Geometry:
    """Describe a decoding call: each sequence has its own length, and so its own diagonal."""
    kv_stop = lengths.long().clamp(0, problem.len_kv)[:, None]
    kv_start = torch.zeros_like(kv_stop) if leftpad is None else leftpad.long().clamp(0, problem.len_kv)[:, None]
    bottom_right = problem.mask.band.align == "bottom_right"
    offset = kv_stop - problem.len_q if bottom_right else torch.zeros_like(kv_stop)
    return _batch(problem, kv_start, kv_stop, offset, None)


def _known(x: torch.Tensor | None) -> torch.Tensor:
    if x is None:
        raise TypeError("a varlen problem carries cu_seqlens_q")
    return x
