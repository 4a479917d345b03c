"""Calls against a cache, with their data and their judge: for the tests on a CPU and the check on a GPU alike.

A case draws a call, runs it through the front door and holds the result to the oracle: the untiled formula in float64
on the keys and values that the cache holds after the call. What no query may see is NaN from the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tilewise import api
from tilewise.backends import torch_cache
from tilewise.problem.cache import CacheOptions, CacheTensors, describe_cache
from tilewise.problem.mask import Align
from tilewise.problem.problem import Options, Spec, Tensors
from tilewise.testing import Call, Error, Results, error, oracle, spread, yardstick

INT8_RANGE, FP8_RANGE = 100.0, 8.0  # what the numbers in a quantised cache reach


@dataclass(frozen=True)
class Case:
    """One call: ``lengths`` tokens held by each sequence before it, ``new`` appended to each.

    Args:
        page_size: 0 = a cache in one piece; ``rows`` = rows of it beyond the batch, chosen by cache_batch_idx.
        stored: dtype of the cache, or "" for q's.
        rotary: features turned; 0 = none.
        leftpad: slots at the front of each sequence that hold nothing, or ().
        alibi, sink: "", "h" or "bh".
        align, window, softcap, scale, num_splits, batch_invariant, layout, causal, interleaved: as the call has them.
    """

    name: str
    heads_q: int = 4
    heads_kv: int = 2
    len_q: int = 1
    dim_qk: int = 16
    dim_v: int = 16
    capacity: int = 60
    lengths: tuple[int, ...] = (33, 0, 57)
    new: int = 0
    page_size: int = 0
    rows: int = 0
    stored: str = ""
    rotary: int = 0
    interleaved: bool = True
    leftpad: tuple[int, ...] = ()
    alibi: str = ""
    sink: str = ""
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    align: Align = "bottom_right"
    softcap: float = 0.0
    scale: float | None = None
    num_splits: int | None = None
    batch_invariant: bool = False
    layout: str = "bshd"

    def build(self, device: str, dtype: str, seed: int = 0) -> Drawn:
        """Draw the data of the call."""
        draw, kind = torch.Generator().manual_seed(seed), getattr(torch, dtype)
        batch, total = len(self.lengths), max(self.capacity, 1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw).to(kind)

        def heads(which: str) -> torch.Tensor | None:
            shape = {"h": (self.heads_q,), "bh": (batch, self.heads_q)}.get(which)
            return None if shape is None else normal(*shape)

        table = index = None
        if self.page_size:
            columns = -(-total // self.page_size)
            pages = batch * columns + 3
            table = torch.randperm(pages, generator=draw)[: batch * columns].view(batch, columns).int()
            shape = (pages, self.page_size)
        else:
            shape = (batch + self.rows, total)
            index = torch.randperm(batch + self.rows, generator=draw)[:batch] if self.rows else None
        caches = [self._cache(normal(*shape, self.heads_kv, dim)) for dim in (self.dim_qk, self.dim_v)]
        angle = torch.rand(total + self.len_q, self.rotary // 2, generator=draw) * 6
        alibi = heads(self.alibi)
        tensors = CacheTensors(
            q=normal(batch, self.len_q, self.heads_q, self.dim_qk),
            k_cache=caches[0],
            v_cache=caches[1],
            k=normal(batch, self.new, self.heads_kv, self.dim_qk) if self.new else None,
            v=normal(batch, self.new, self.heads_kv, self.dim_v) if self.new else None,
            cache_seqlens=torch.tensor(self.lengths, dtype=torch.int32),
            block_table=table,
            cache_batch_idx=index,
            cache_leftpad=torch.tensor(self.leftpad) if self.leftpad else None,
            k_scale=self._scale(draw),
            v_scale=self._scale(draw),
            rotary_cos=angle.cos() if self.rotary else None,
            rotary_sin=angle.sin() if self.rotary else None,
            sink=heads(self.sink),
            alibi_slopes=None if alibi is None else alibi.abs() * 0.25,
        )
        drawn = Drawn(self, CacheTensors(*(None if x is None else x.to(device) for x in tensors)))  # type: ignore[arg-type]
        drawn.poison()
        return drawn

    def _cache(self, data: torch.Tensor) -> torch.Tensor:
        if not self.stored:
            return data
        spread = INT8_RANGE if self.stored == "int8" else FP8_RANGE
        return (data.float() * spread / 4).clamp(-spread, spread).to(getattr(torch, self.stored))

    def _scale(self, draw: torch.Generator) -> torch.Tensor | None:
        spread = INT8_RANGE if self.stored == "int8" else FP8_RANGE
        return (torch.rand(self.heads_kv, generator=draw) + 0.5) * 4 / spread if self.stored else None

    @property
    def options(self) -> CacheOptions:
        """What `describe_cache` reads."""
        left, right = self.window
        return CacheOptions(
            self.interleaved, self.num_splits, self.batch_invariant, self.causal, left, right, self.align,
            self.scale, self.softcap, return_lse=True,
        )  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A case with its tensors, len axes before heads."""

    case: Case
    tensors: CacheTensors

    def held(self) -> list[tuple[int, int]]:
        """Give the slots [start, stop) that hold something after the call, of each sequence."""
        pads = self.case.leftpad or (0,) * len(self.case.lengths)
        pairs = zip(pads, self.case.lengths, strict=True)
        return [(pad, min(max(length + self.case.new, 0), self.case.capacity)) for pad, length in pairs]

    def where(self, sequence: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give row (or page) and slot of a sequence's tokens in the cache."""
        if self.tensors.block_table is not None:
            size = self.case.page_size
            return self.tensors.block_table[sequence].long()[tokens // size], tokens % size
        index = self.tensors.cache_batch_idx
        row = sequence if index is None else int(index[sequence])
        return torch.full_like(tokens, row), tokens

    def poison(self) -> None:
        """Make NaN (in int8, a large number) of all slots that hold nothing after the call."""
        for cache in (self.tensors.k_cache, self.tensors.v_cache):
            raw = cache if cache.itemsize > 1 else cache.view(torch.uint8)
            bad = torch.full_like(raw, math.nan if cache.itemsize > 1 else 127)
            for sequence, (start, stop) in enumerate(self.held()):
                place = self.where(sequence, torch.arange(start, max(stop, start), device=cache.device))
                bad[place] = raw[place]
            raw.copy_(bad)

    def run(self, backend: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the call through the front door: out (batch, len_q, heads_q, dim_v), lse (batch, heads_q, len_q)."""
        case, tensors = self.case, self.tensors._asdict()
        if case.layout == "bhsd":
            names = ["q", "k", "v"] if case.page_size else ["q", "k", "v", "k_cache", "v_cache"]
            tensors |= {name: x.transpose(1, 2) for name in names if (x := tensors[name]) is not None}
        attend: Callable[..., tuple[torch.Tensor, torch.Tensor]] = api.attention_with_kvcache  # with lse, always
        out, lse = attend(
            **tensors,
            rotary_interleaved=case.interleaved,
            num_splits=case.num_splits,
            batch_invariant=case.batch_invariant,
            causal=case.causal,
            window=case.window,
            align=case.align,
            scale=case.scale,
            softcap=case.softcap or None,
            layout=case.layout,
            return_lse=True,
            backend=backend,
        )
        return (out.transpose(1, 2) if case.layout == "bhsd" else out), lse

    def copy(self) -> Drawn:
        """Give the same call on caches of its own."""
        t = self.tensors
        return replace(self, tensors=t._replace(k_cache=t.k_cache.clone(), v_cache=t.v_cache.clone()))

    def written(self) -> tuple[torch.Tensor, Drawn]:
        """Append with torch: q as it is turned, and the call with the caches as they should be then."""
        after = self.copy()
        specs = {
            name: Spec(tuple(x.shape), x.stride(), str(x.dtype).removeprefix("torch."), str(x.device), False)
            for name, x in after.tensors._asdict().items()
            if x is not None
        }
        q, _ = torch_cache.append(describe_cache(specs, self.case.options), after.tensors)
        return q, after

    def right(self) -> tuple[Results, Results, torch.Tensor]:
        """Compute what the call must give, what its dtype may lose and `spread`, with the new tokens in the caches."""
        q, after = self.written()
        wide, narrow, spreads = [], [], []
        for sequence, (start, stop) in enumerate(after.held()):
            row = slice(sequence, sequence + 1)
            k, v = (after.read(name, sequence, stop) for name in ("k", "v"))
            own = {
                name: None if x is None else x[row] if x.ndim == 2 else x
                for name, x in (("sink", self.tensors.sink), ("alibi_slopes", self.tensors.alibi_slopes))
            }
            ranges = torch.tensor([min(start, stop)], device=q.device)
            call = Call(
                Tensors(q[row].transpose(1, 2).double(), k, v, kv_start=ranges, **own),
                self._dense_options(), torch.empty(0), torch.empty(0),
            )  # fmt: skip
            wide.append(oracle(call.to(torch.float64), gradients=False))
            narrow.append(yardstick(call.to(q.dtype), gradients=False))
            spreads.append(spread(call))
        return _stacked(wide), _stacked(narrow), torch.cat(spreads)

    def _dense_options(self) -> Options:
        given = self.case.options
        return Options(
            causal=given.causal, window_left=given.window_left, window_right=given.window_right, align=given.align,
            scale=given.scale, softcap=given.softcap, return_lse=True,
        )  # fmt: skip

    def read(self, name: str, sequence: int, stop: int) -> torch.Tensor:
        """Read a sequence's keys or values as (1, heads_kv, stop, dim), in float64 with their scales."""
        cache = getattr(self.tensors, f"{name}_cache")
        scale = getattr(self.tensors, f"{name}_scale")
        raw = cache if cache.itemsize > 1 else cache.view(torch.uint8)
        read: torch.Tensor = raw[self.where(sequence, torch.arange(stop, device=raw.device))].view(cache.dtype).double()
        return (read if scale is None else read * scale.double()[:, None]).transpose(0, 1)[None]

    def judge(self, out: torch.Tensor, lse: torch.Tensor) -> dict[str, Error]:
        """Measure the results of a call that was run on a copy of this one."""
        ref, low, sums = self.right()
        eps = torch.finfo(out.dtype).eps, torch.finfo(lse.dtype).eps
        return {
            "out": error(out.transpose(1, 2), ref.out, low.out, eps[0]),
            "lse": error(lse, ref.lse, low.lse, eps[1], spread=sums),
        }

    def check(self, backend: str | None) -> dict[str, Error]:
        """Run the call on a copy, hold results to the budget and caches to what torch writes.

        Raises:
            AssertionError: something exceeds it.
        """
        mine = self.copy()
        report = self.judge(*mine.run(backend))
        for name, found in report.items():
            if not found.within:
                raise AssertionError(f"{self.case.name}: {name} exceeds the error budget: {found}")
        _, right = self.written()
        for name in ("k_cache", "v_cache"):
            got, want = getattr(mine.tensors, name), getattr(right.tensors, name)
            if not _same(got, want):
                raise AssertionError(f"{self.case.name}: {name} holds something else than torch writes")
        return report


def _same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Compare caches: what was turned may be rounded the other way, once in its own dtype and once in the cache's."""
    got, want, kind = got.float(), want.float(), got.dtype
    step = 1.0 if kind == torch.int8 else 0.0
    eps = 0.0 if kind == torch.int8 else 2 * torch.finfo(kind).eps
    near = (got - want).abs() <= step + eps * want.abs() + 1e-6
    return bool((near | (got.isnan() & want.isnan())).all())


def _stacked(parts: list[Results]) -> Results:
    return Results(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))
