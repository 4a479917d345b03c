"""Calls without data, for `tilewise explain`: every tensor is one row or one element, repeated without being copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch

from tilewise import api
from tilewise.bench.cases import DTYPES
from tilewise.dispatch import Plan
from tilewise.machine import detect
from tilewise.problem.mask import Band

if TYPE_CHECKING:
    from tilewise.backends.block_lists import Blocks, MaskMod
    from tilewise.problem.mask import Align

Kind = Literal["dense", "varlen", "cache"]


@dataclass(frozen=True)
class Sketch:
    """A call of `tilewise.attention`, `attention_varlen` or `attention_with_kvcache`, by its sizes.

    ``len_q`` and ``len_kv`` are each sequence's; with a cache, ``len_kv`` is its capacity. bias, mask, sink and alibi
    say whether there is such a tensor. mask_mod: a function and its tensors. page_size: pages in place of one stretch
    of memory, for "varlen" and "cache". Everything else is as the function has it.
    """

    kind: Kind = "dense"
    batch: int = 1
    heads_q: int = 8
    heads_kv: int = 8
    len_q: int = 4096
    len_kv: int = 4096
    dim: int = 64
    dim_v: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    align: str = "bottom_right"
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    bias: bool = False
    mask: bool = False
    mask_mod: tuple[MaskMod, tuple[torch.Tensor, ...]] | None = None
    sink: bool = False
    kv_start: int | None = None
    kv_stop: int | None = None
    dropout: float = 0.0
    deterministic: bool = False
    return_lse: bool = False
    layout: str | None = None
    page_size: int | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        for name in ("batch", "heads_q", "heads_kv", "len_q", "len_kv", "dim", "dim_v"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name.replace('_', '-')} must be 0 or more, got {getattr(self, name)}")
        if self.page_size is not None and self.page_size < 1:
            raise ValueError(f"page-size must be 1 or more, got {self.page_size}")
        detect.detect(self.device)

    def explain(self) -> Plan:
        """Plan the call.

        Raises:
            ValueError, TypeError: what the call itself would raise, and options that its kind does not have.

        >>> Sketch(len_q=10**6, len_kv=10**6, causal=True).explain().backend
        'torch_sdpa'
        """
        self._refuse()
        plan = {"dense": self._dense, "varlen": self._varlen, "cache": self._cache}[self.kind]
        return plan()

    def _refuse(self) -> None:
        """Refuse options that the function of this kind does not take."""
        lacking = {
            "dense": {"page_size"},
            "varlen": {"mask", "mask_mod", "kv_start", "kv_stop", "layout"},
            "cache": {"bias", "mask", "mask_mod", "kv_start", "kv_stop", "dropout", "deterministic"},
        }[self.kind]
        for name in sorted(lacking):
            if getattr(self, name) not in (None, False, 0.0):
                raise ValueError(f"{name.removesuffix('_mod').replace('_', '-')} is no option of {self.kind} attention")

    def _row(self, *shape: int) -> torch.Tensor:
        """Make a tensor of one row; its last stride is 1, as real ones have it."""
        return torch.zeros(shape[-1], dtype=getattr(torch, self.dtype), device=self.device).expand(shape)

    def _shared(self) -> dict[str, object]:
        """Give the options that all three functions take."""
        return {
            "causal": self.causal,
            "window": self.window,
            "align": self.align,
            "scale": self.scale,
            "softcap": self.softcap,
            "alibi_slopes": self._row(self.heads_q) if self.alibi else None,
            "sink": self._row(self.heads_q) if self.sink else None,
            "return_lse": self.return_lse,
            "backend": self.backend,
        }

    def _dense(self) -> Plan:
        sizes = {"q": (self.heads_q, self.len_q, self.dim), "k": (self.heads_kv, self.len_kv, self.dim)}
        sizes["v"] = (self.heads_kv, self.len_kv, self.dim_v)
        layout = self.layout or "bhsd"
        q, k, v = (self._row(self.batch, *((n, h) if layout == "bshd" else (h, n)), d) for h, n, d in sizes.values())
        full = (self.batch, self.heads_q, self.len_q, self.len_kv)
        return api.explain(
            api.attention,
            q,
            k,
            v,
            bias=self._row(*full) if self.bias else None,
            mask=torch.ones(self.len_kv, dtype=torch.bool, device=self.device).expand(full) if self.mask else None,
            **self._functions(),
            kv_start=None if self.kv_start is None else [self.kv_start] * self.batch,
            kv_stop=None if self.kv_stop is None else [self.kv_stop] * self.batch,
            dropout=self.dropout,
            deterministic=self.deterministic,
            layout=layout,
            **self._shared(),
        )

    def _functions(self) -> dict[str, object]:
        return {} if self.mask_mod is None else {"mask_mod": self.mask_mod[0], "mask_tensors": self.mask_mod[1]}

    def blocks(self) -> Blocks:
        """Find the tiles that a dense call's mask_mod, band and lengths leave to visit."""
        from tilewise.backends.block_lists import Blocks

        band = Band.of(self.causal, self.window, cast("Align", self.align))
        return Blocks.of(
            *(self.mask_mod or (None, ())),
            batch=self.batch,
            heads=self.heads_q,
            len_q=self.len_q,
            len_kv=self.len_kv,
            device=self.device,
            left=band.left,
            right=band.right,
            offset=band.offset(self.len_q, self.len_kv),
        )

    def _varlen(self) -> Plan:
        total_q, total_kv = self.batch * self.len_q, self.batch * self.len_kv
        keys = [self._row(total_kv, self.heads_kv, dim) for dim in (self.dim, self.dim_v)]
        if self.page_size is not None:
            keys = [self._row(self._pages, self.page_size, self.heads_kv, dim) for dim in (self.dim, self.dim_v)]
        return api.explain(
            api.attention_varlen,
            self._row(total_q, self.heads_q, self.dim),
            *keys,
            self._bounds(self.len_q),
            self._bounds(self.len_kv),
            max_seqlen_q=self.len_q,
            max_seqlen_k=self.len_kv,
            block_table=self._table(),
            bias=self._row(self.heads_q, total_q, self.len_kv) if self.bias else None,
            dropout=self.dropout,
            deterministic=self.deterministic,
            **self._shared(),
        )

    def _cache(self) -> Plan:
        layout = self.layout or "bshd"
        stores = [(self.batch, self.len_kv, self.heads_kv, dim) for dim in (self.dim, self.dim_v)]
        if self.page_size is not None:
            stores = [(self._pages, self.page_size, self.heads_kv, dim) for dim in (self.dim, self.dim_v)]
        q, caches = self._row(self.batch, self.len_q, self.heads_q, self.dim), [self._row(*store) for store in stores]
        if layout == "bhsd":
            q = q.transpose(1, 2)
            caches = caches if self.page_size is not None else [cache.transpose(1, 2) for cache in caches]
        lengths = torch.full((self.batch,), self.len_kv, dtype=torch.int32, device=self.device)
        return api.explain(
            api.attention_with_kvcache,
            q,
            *caches,
            cache_seqlens=lengths,
            block_table=self._table(),
            layout=layout,
            **self._shared(),
        )

    @property
    def _pages(self) -> int:
        return self.batch * self._pages_each

    @property
    def _pages_each(self) -> int:
        return -(-self.len_kv // (self.page_size or 1))

    def _table(self) -> torch.Tensor | None:
        if self.page_size is None:
            return None
        pages = torch.arange(self._pages, dtype=torch.int32, device=self.device)
        return pages.reshape(self.batch, self._pages_each)

    def _bounds(self, length: int) -> torch.Tensor:
        return torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * length
