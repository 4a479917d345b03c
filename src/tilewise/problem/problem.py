"""One call, as metadata: what is asked, and every check that does not depend on who answers.

A `Problem` holds shapes, strides, dtypes, the device and flags. It holds no tensor, and this file imports no torch, so
a problem can be built, printed, cached and costed anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from tilewise.problem.mask import Align, Band, Mask
from tilewise.problem.score import Score

if TYPE_CHECKING:
    import torch

    from tilewise.problem.cache import Cache

Kind = Literal["dense", "varlen", "cache"]
Layout = Literal["bhsd", "bshd"]

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int32", "int64")


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

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads_q // self.heads_kv

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


def fail(what: str, got: object, mend: str) -> ValueError:
    """Build the error that every check raises: what was wrong, what was got, how to mend it."""
    return ValueError(f"{what}; got {got}. {mend}")


def mismatch(what: str, got: object, mend: str) -> TypeError:
    """Build the error for a wrong type or dtype."""
    return TypeError(f"{what}; got {got}. {mend}")


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
    varlen = "cu_seqlens_q" in specs
    check_qkv(specs, rank=3 if varlen else 4, paged="block_table" in specs)
    score = check_score(specs, options)
    band = check_band(options)
    if not 0.0 <= options.dropout < 1.0:
        raise fail("dropout must lie in [0, 1)", options.dropout, "Pass the probability of dropping, 0.0 for none")
    if options.layout not in ("bhsd", "bshd"):
        raise fail('layout must be "bhsd" or "bshd"', repr(options.layout), "Name the order of q's axes")
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


# ---------------------------------------------------------------------------------------------------------------------
# The checks, each saying what was wrong, what was got and how to mend it. cache.py uses them too.
# ---------------------------------------------------------------------------------------------------------------------


def shapes(specs: Mapping[str, Spec], *names: str) -> str:
    """Print the shapes of some tensors: ``q (1, 2, 8, 16), k (1, 2, 8, 32)``."""
    return ", ".join(f"{name} {tuple(specs[name].shape)}" for name in names)


def check_qkv(specs: Mapping[str, Spec], rank: int, paged: bool) -> None:
    """Hold q, k and v to their ranks, dtypes, devices, heads and head dims."""
    q, k, v = specs["q"], specs["k"], specs["v"]
    axes = {3: "(total, heads, dim)", 4: "(batch, heads, len, dim)"}
    if len(q.shape) != rank:
        raise fail(f"q must have {rank} axes {axes[rank]}", f"q {q.shape}", _rank_mend(rank))
    kv_rank = 4 if paged else rank
    kv_axes = "(pages, page_size, heads_kv, dim)" if paged else axes[rank]
    for name in ("k", "v"):
        if len(specs[name].shape) != kv_rank:
            raise fail(f"{name} must have {kv_rank} axes {kv_axes}", f"{name} {specs[name].shape}", _rank_mend(rank))
    if q.dtype not in FLOATS:
        raise mismatch(f"q, k and v must be one of {', '.join(FLOATS)}", f"q {q.dtype}", "Convert them")
    if not q.dtype == k.dtype == v.dtype:
        got = f"q {q.dtype}, k {k.dtype}, v {v.dtype}"
        raise mismatch(
            "q, k and v must have the same dtype", got, "Convert them to one dtype, or run under torch.autocast"
        )
    for name, spec in specs.items():
        if spec.device != q.device:
            raise fail(f"{name} must be on q's device {q.device}", spec.device, f"Move it with {name}.to(q.device)")
    if k.shape[:-1] != v.shape[:-1]:
        raise fail(
            "k and v must agree in all but the last axis",
            shapes(specs, "k", "v"),
            "Check how they were split into heads",
        )
    if k.shape[-1] != q.shape[-1]:
        raise fail("q and k must have the same dim_qk", shapes(specs, "q", "k"), "Only v may have another head dim")
    heads_q = q.shape[1]
    heads_kv = k.shape[2] if paged else k.shape[1]
    check_heads(heads_q, heads_kv)


def check_heads(heads_q: int, heads_kv: int) -> None:
    """Hold heads_q to a multiple of heads_kv."""
    if heads_kv == 0 or heads_q % heads_kv:
        mend = "Query head h reads key head h // (heads_q // heads_kv); check the layout of the axes"
        if not heads_q == heads_kv == 0:
            raise fail("heads_q must be a multiple of heads_kv", f"heads_q {heads_q}, heads_kv {heads_kv}", mend)


def _rank_mend(rank: int) -> str:
    return "Packed documents go to attention_varlen, batches to attention" if rank == 4 else "Batches go to attention"


def check_band(options: Options) -> Band:
    """Hold the window to counts of keys and the alignment to its two names."""
    for side, value in (("left", options.window_left), ("right", options.window_right)):
        if value is not None and value < -1:
            raise fail(
                f"window's {side} side counts keys beside the diagonal",
                value,
                "Pass 0 or more, or None for an open side",
            )
    if options.align not in ("bottom_right", "top_left"):
        raise fail(
            'align must be "bottom_right" or "top_left"',
            repr(options.align),
            "bottom_right puts the last query beside the last key",
        )
    return Band.of(options.causal, (options.window_left, options.window_right), options.align)


def check_score(specs: Mapping[str, Spec], options: Options) -> Score:
    """Hold scale, softcap, bias, ALiBi slopes and sink to their ranges, dtypes and shapes."""
    q = specs["q"]
    heads_q = q.shape[1]
    if options.scale is not None and not math.isfinite(options.scale):
        raise fail("scale must be finite", options.scale, "Leave it None for dim_qk ** -0.5")
    if not (math.isfinite(options.softcap) and options.softcap >= 0):
        raise fail("softcap must be finite and not negative", options.softcap, "Pass None or 0.0 for no cap")
    batch = None if "cu_seqlens_q" in specs else q.shape[0]
    if "cu_seqlens_q" in specs and specs["cu_seqlens_q"].shape:
        batch = specs["cu_seqlens_q"].shape[0] - 1
    for name in ("sink", "alibi_slopes"):
        if name in specs:
            spec = specs[name]
            if spec.dtype not in FLOATS:
                raise mismatch(f"{name} must be floating point", spec.dtype, "Convert it")
            if spec.shape not in ((heads_q,), (batch, heads_q)):
                want = f"(heads_q,) = ({heads_q},) or (batch, heads_q) = ({batch}, {heads_q})"
                raise fail(f"{name} must have shape {want}", spec.shape, "Give one number a query head")
    if "alibi_slopes" in specs and specs["alibi_slopes"].requires_grad:
        raise fail("alibi_slopes get no gradient", "requires_grad=True", "Detach them, or pass the whole term as bias")
    if "bias" in specs and specs["bias"].dtype not in FLOATS:
        raise mismatch(
            "bias must be floating point", specs["bias"].dtype, "A bool tensor (True = visible) goes to mask"
        )
    if "mask" in specs and specs["mask"].dtype != "bool":
        raise mismatch("mask must be bool, True = visible", specs["mask"].dtype, "Scores to add go to bias")
    scale = (q.shape[-1] ** -0.5 if q.shape[-1] else 1.0) if options.scale is None else options.scale
    return Score(scale, options.softcap, "bias" in specs, "alibi_slopes" in specs, "sink" in specs)


def check_broadcast(specs: Mapping[str, Spec], name: str, shape: tuple[int, ...], axes: str) -> None:
    """Hold a dense tensor to a shape that broadcasts to ``shape``."""
    if name not in specs:
        return
    got = specs[name].shape
    fits = len(got) <= len(shape) and all(
        size in (1, full) for size, full in zip(reversed(got), reversed(shape), strict=False)
    )
    if not fits:
        raise fail(f"{name} must broadcast to {axes} = {shape}", got, "Each axis must have size 1 or the full size")


def check_integers(specs: Mapping[str, Spec], name: str) -> None:
    """Hold an index tensor to int32 or int64."""
    if specs[name].dtype not in INTEGERS:
        raise mismatch(f"{name} must be int32 or int64", specs[name].dtype, "Convert it with .int()")


def check_cu_seqlens(specs: Mapping[str, Spec], name: str) -> int:
    """Hold cumulative lengths to (batch + 1,) integers and give the batch."""
    check_integers(specs, name)
    shape = specs[name].shape
    if len(shape) != 1 or shape[0] < 1:
        raise fail(f"{name} must have shape (batch + 1,)", shape, "Pass [0, len_0, len_0 + len_1, ...]")
    return shape[0] - 1


def check_seed(specs: Mapping[str, Spec]) -> None:
    """Hold the seed to one int64."""
    if "seed" in specs and (specs["seed"].dtype != "int64" or math.prod(specs["seed"].shape) != 1):
        got = f"{specs['seed'].dtype} {specs['seed'].shape}"
        raise fail("seed must be an int or a one-element int64 tensor", got, "Draw one with torch.randint")


def check_contents(problem: Problem, contents: Mapping[str, Sequence[int]]) -> None:
    """Check the values of index tensors that the host can read (CPU tensors), by their names.

    Contents of device tensors never come here: kernels clamp them instead.
    """
    for name in ("kv_start", "kv_stop"):
        for sequence, value in enumerate(contents.get(name, ())):
            if not 0 <= value <= problem.len_kv:
                raise fail(f"{name}[{sequence}] must lie in [0, len_kv] = [0, {problem.len_kv}]", value, "Clamp it")
    for name, total in (("cu_seqlens_q", problem.total_q), ("cu_seqlens_k", problem.total_kv)):
        bounds = contents.get(name)
        if bounds is None:
            continue
        if bounds[0] != 0 or any(later < earlier for earlier, later in pairwise(bounds)):
            raise fail(f"{name} must start at 0 and never fall", list(bounds), "Pass the cumulative sum of the lengths")
        if bounds[-1] > total:
            raise fail(
                f"{name} must not pass the {total} tokens given", bounds[-1], "Check the lengths against the tensor"
            )
    if problem.kind == "varlen":
        _check_varlen_contents(problem, contents)


def _check_varlen_contents(problem: Problem, contents: Mapping[str, Sequence[int]]) -> None:
    bounds = contents.get("cu_seqlens_k", contents.get("cu_seqlens_q"))
    if bounds is None:
        return
    lengths = [later - earlier for earlier, later in pairwise(bounds)]
    if problem.score.bias and max(lengths, default=0) > problem.specs["bias"].shape[2]:
        width = problem.specs["bias"].shape[2]
        raise fail(
            "bias must have a column for each key of the longest sequence",
            f"{width} columns, {max(lengths)} keys",
            "Widen it",
        )
    table = contents.get("block_table")
    if table is not None:
        pages, page_size = problem.specs["k"].shape[:2]
        max_pages = problem.specs["block_table"].shape[1]
        check_pages(table, lengths, pages, page_size, max_pages)


def check_pages(table: Sequence[int], lengths: Sequence[int], pages: int, page_size: int, max_pages: int) -> None:
    """Hold the used entries of a flattened block table to existing pages, and each length to its row of pages."""
    for sequence, length in enumerate(lengths):
        used = -(-length // page_size) if page_size else 0
        if used > max_pages:
            raise fail(
                f"sequence {sequence} needs {used} pages of {page_size} tokens",
                f"{max_pages} in block_table",
                "Widen the table",
            )
        for page in table[sequence * max_pages : sequence * max_pages + used]:
            if not 0 <= page < pages:
                raise fail(f"block_table must name pages 0 to {pages - 1}", page, f"Check row {sequence}")
