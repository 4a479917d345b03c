"""One call, as metadata: what is asked, and every check that does not depend on who answers.

A `Problem` holds shapes, strides, dtypes, the device and flags. It holds no tensor, and this file imports no torch, so
a problem can be built, printed, cached and costed anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from tilewise.problem.checks import (
    check_band,
    check_broadcast,
    check_contents,
    check_cu_seqlens,
    check_integers,
    check_options,
    check_qkv,
    check_score,
    check_seed,
    fail,
    mismatch,
    shapes,
)
from tilewise.problem.mask import Align, Band, Mask
from tilewise.problem.score import Score

if TYPE_CHECKING:
    import torch

    from tilewise.problem.cache import Cache
    from tilewise.problem.mods import Mods

__all__ = [
    "Grads",
    "Kind",
    "Layout",
    "Needs",
    "Options",
    "Problem",
    "Spec",
    "Tensors",
    "check_band",
    "check_contents",
    "describe",
    "fail",
    "mismatch",
]

Kind = Literal["dense", "varlen", "cache"]
Layout = Literal["bhsd", "bshd"]


class Spec(NamedTuple):
    """The metadata of one tensor; strides count elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool = False

    @property
    def device_type(self) -> str:
        """The device without its index: "cpu", "cuda"."""
        return self.device.partition(":")[0]


class Tensors(NamedTuple):
    """The tensors of one call. Dense: q (batch, heads_q, len_q, dim_qk); varlen: q (total_q, heads_q, dim_qk)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    kv_start: torch.Tensor | None = None
    kv_stop: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    seed: torch.Tensor | None = None


class Options(NamedTuple):
    """Everything else about a call: plain values that an operator's schema can carry."""

    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    align: Align = "bottom_right"
    scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    deterministic: bool = False
    return_lse: bool = False
    layout: Layout = "bhsd"
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    backend: str | None = None


class Grads(NamedTuple):
    """What a backend's backward returns; None where no gradient was asked for."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    dbias: torch.Tensor | None
    dsink: torch.Tensor | None


class Needs(NamedTuple):
    """Which gradients are asked for."""

    dq: bool = True
    dk: bool = True
    dv: bool = True
    dbias: bool = False
    dsink: bool = False


@dataclass(frozen=True, eq=False)
class Problem:
    """The frozen metadata of one call.

    ``len_q`` and ``len_kv`` are the tensors' lengths; in a varlen call they are upper bounds of a sequence's length,
    and ``total_q`` and ``total_kv`` count tokens. ``specs`` describes each tensor that was given, by its name.
    """

    kind: Kind
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    dim_qk: int
    dim_v: int
    total_q: int
    total_kv: int
    dtype: str
    device: str
    mask: Mask
    score: Score
    dropout: float
    deterministic: bool
    return_lse: bool
    layout: Layout
    specs: Mapping[str, Spec] = field(repr=False)
    cache: Cache | None = None
    mods: Mods | None = None

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads_q // max(self.heads_kv, 1)

    @property
    def device_type(self) -> str:
        """The device without its index: "cpu", "cuda"."""
        return self.device.partition(":")[0]

    @property
    def itemsize(self) -> int:
        """Bytes of one element of q."""
        return {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[self.dtype]

    @property
    def lse_dtype(self) -> str:
        """lse is float32, and float64 beside float64 inputs."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def is_empty(self) -> bool:
        """True where there is no query, or nothing to add up: out and all gradients are then zero or empty."""
        return 0 in (self.batch, self.heads_q, self.total_q, self.total_kv, self.dim_qk, self.dim_v)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of out: q's, with dim_v in place of dim_qk."""
        return (*self.specs["q"].shape[:-1], self.dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(batch, heads_q, len_q); varlen (heads_q, total_q)."""
        return (self.heads_q, self.total_q) if self.kind == "varlen" else (self.batch, self.heads_q, self.len_q)


def describe(specs: Mapping[str, Spec], options: Options) -> Problem:
    """Check one dense or varlen call and describe it.

    Args:
        specs: the metadata of the given tensors, by their names in `Tensors`.
        options: the rest of the call.

    Raises:
        ValueError: a wrong shape, device or value.
        TypeError: a wrong dtype.

    >>> spec = Spec((1, 2, 8, 16), (256, 128, 16, 1), "float32", "cpu")
    >>> describe({"q": spec, "k": spec, "v": spec}, Options(causal=True)).mask.band
    Band(left=None, right=0, align='bottom_right')
    """
    check_options(options)
    varlen = "cu_seqlens_q" in specs
    check_qkv(specs, rank=3 if varlen else 4, paged="block_table" in specs)
    score = check_score(specs, options)
    band = check_band(options)
    if not 0.0 <= options.dropout < 1.0:
        raise fail("dropout must lie in [0, 1)", options.dropout, "Pass the probability of dropping, 0.0 for none")
    check_seed(specs)
    return _varlen(specs, options, band, score) if varlen else _dense(specs, options, band, score)


def _dense(specs: Mapping[str, Spec], options: Options, band: Band, score: Score) -> Problem:
    q, k, v = specs["q"], specs["k"], specs["v"]
    batch, heads_q, len_q, dim_qk = q.shape
    len_kv = k.shape[2]
    if k.shape[0] != batch or v.shape[0] != batch:
        raise fail("q, k and v must have the same batch", shapes(specs, "q", "k", "v"), "Expand k and v to q's batch")
    for name in ("bias", "mask"):
        check_broadcast(specs, name, (batch, heads_q, len_q, len_kv), "(batch, heads_q, len_q, len_kv)")
    for name in ("kv_start", "kv_stop"):
        if name in specs:
            check_integers(specs, name)
            if specs[name].shape != (batch,):
                raise fail(f"{name} must have shape (batch,) = ({batch},)", specs[name].shape, "Give one per sequence")
    return Problem(
        kind="dense",
        batch=batch,
        heads_q=heads_q,
        heads_kv=k.shape[1],
        len_q=len_q,
        len_kv=len_kv,
        dim_qk=dim_qk,
        dim_v=v.shape[3],
        total_q=len_q,
        total_kv=len_kv,
        dtype=q.dtype,
        device=q.device,
        mask=Mask(band, ranged="kv_start" in specs or "kv_stop" in specs, dense="mask" in specs),
        score=score,
        dropout=options.dropout,
        deterministic=options.deterministic,
        return_lse=options.return_lse,
        layout=options.layout,
        specs=specs,
    )


def _varlen(specs: Mapping[str, Spec], options: Options, band: Band, score: Score) -> Problem:
    q, k, v = specs["q"], specs["k"], specs["v"]
    total_q, heads_q, dim_qk = q.shape
    paged = "block_table" in specs
    batch = check_cu_seqlens(specs, "cu_seqlens_q")
    if "cu_seqlens_k" in specs:
        batch_k = check_cu_seqlens(specs, "cu_seqlens_k")
        if batch_k != batch:
            got = f"{batch} in cu_seqlens_q, {batch_k} in cu_seqlens_k"
            raise fail(
                "cu_seqlens_q and cu_seqlens_k must describe the same number of sequences",
                got,
                "Pass one entry a sequence and a last one",
            )
    elif paged:
        raise fail("block_table needs cu_seqlens_k", None, "Pass the cumulative key lengths of the sequences")
    elif k.shape[0] != total_q:
        raise fail(
            "without cu_seqlens_k, q and k must have the same tokens", shapes(specs, "q", "k"), "Pass cu_seqlens_k"
        )
    if paged:
        table = specs["block_table"]
        check_integers(specs, "block_table")
        if len(table.shape) != 2 or table.shape[0] != batch:
            raise fail(
                f"block_table must have shape (batch, max_pages) with batch = {batch}",
                table.shape,
                "Give one row of pages a sequence",
            )
        for name in ("k", "v"):
            if specs[name].requires_grad:
                raise fail(
                    "keys and values in pages get no gradient",
                    f"{name} with requires_grad=True",
                    "Detach them, or pack the keys without pages",
                )
        heads_kv, total_kv, longest = k.shape[2], batch * table.shape[1] * k.shape[1], table.shape[1] * k.shape[1]
    else:
        heads_kv, total_kv, longest = k.shape[1], k.shape[0], k.shape[0]
    for name, value in (("max_seqlen_q", options.max_seqlen_q), ("max_seqlen_k", options.max_seqlen_k)):
        if value is not None and value < 0:
            raise fail(f"{name} must not be negative", value, "It is a hint; leave it None where unknown")
    if "bias" in specs:
        shape = specs["bias"].shape
        if len(shape) != 3 or shape[0] not in (1, heads_q) or shape[1] != total_q:
            want = f"(heads_q or 1, total_q, max_seqlen_k) with heads_q = {heads_q}, total_q = {total_q}"
            raise fail(f"a varlen bias must have shape {want}", shape, "Its last axis counts keys within a sequence")
    return Problem(
        kind="varlen",
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        len_q=total_q,
        len_kv=longest,
        dim_qk=dim_qk,
        dim_v=v.shape[-1],
        total_q=total_q,
        total_kv=total_kv,
        dtype=q.dtype,
        device=q.device,
        mask=Mask(band),
        score=score,
        dropout=options.dropout,
        deterministic=options.deterministic,
        return_lse=options.return_lse,
        layout=options.layout,
        specs=specs,
    )
