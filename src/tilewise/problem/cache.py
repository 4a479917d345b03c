"""Decoding against a cache of keys and values: its description and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tilewise.problem.checks import (
    FLOATS,
    check_band,
    check_heads,
    check_integers,
    check_options,
    check_pages,
    check_score,
    fail,
    mismatch,
    shapes,
)
from tilewise.problem.mask import Align, Mask
from tilewise.problem.problem import Layout, Options, Problem, Spec

if TYPE_CHECKING:
    import torch

QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8")


class CacheTensors(NamedTuple):
    """The tensors of one decoding call, len axes before heads: q (batch, len_q, heads_q, dim_qk).

    k_cache, v_cache: (batch, capacity, heads_kv, dim), or (pages, page_size, heads_kv, dim) with a block_table.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    cache_seqlens: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None


class CacheOptions(NamedTuple):
    """The rest of a decoding call."""

    rotary_interleaved: bool = True
    num_splits: int | None = None
    batch_invariant: bool = False
    causal: bool = True
    window_left: int | None = None
    window_right: int | None = None
    align: Align = "bottom_right"
    scale: float | None = None
    softcap: float = 0.0
    return_lse: bool = False
    layout: Layout = "bshd"
    backend: str | None = None


@dataclass(frozen=True)
class Cache:
    """How keys and values are kept.

    ``capacity`` counts the tokens that one sequence can hold, ``appended`` the tokens that this call writes first.
    ``page_size`` is 0 for a cache in one piece. ``rotary_dim`` is 0 without rotary embedding.
    """

    capacity: int
    appended: int
    page_size: int
    has_lengths: bool
    has_batch_idx: bool
    has_leftpad: bool
    quantised: bool
    rotary_dim: int
    rotary_interleaved: bool
    num_splits: int | None
    batch_invariant: bool


def describe_cache(specs: Mapping[str, Spec], options: CacheOptions) -> Problem:
    """Check one decoding call and describe it.

    Raises:
        ValueError: a wrong shape, device or value.
        TypeError: a wrong dtype, or an input that asks for a gradient: decoding is inference only.
    """
    check_options(options)
    q, k_cache = specs["q"], specs["k_cache"]
    if len(q.shape) != 4:
        raise fail("q must have 4 axes (batch, len_q, heads_q, dim_qk)", f"q {q.shape}", "A single query has len_q 1")
    batch, len_q, heads_q, dim_qk = q.shape
    paged = "block_table" in specs
    _check_caches(specs, paged)
    check_heads(heads_q, k_cache.shape[2])
    for name, spec in specs.items():
        if spec.device != q.device:
            raise fail(f"{name} must be on q's device {q.device}", spec.device, f"Move it with {name}.to(q.device)")
        if spec.requires_grad:
            mend = "Call under torch.no_grad with detached tensors, or use attention for training"
            raise mismatch("attention_with_kvcache is for inference", f"{name} with requires_grad=True", mend)
    _check_indices(specs, batch, paged)
    page_size = k_cache.shape[1] if paged else 0
    capacity = specs["block_table"].shape[1] * page_size if paged else k_cache.shape[1]
    _check_append(specs, heads_kv=k_cache.shape[2])
    quantised = _check_scales(specs)
    rotary_dim = _check_rotary(specs, dim_qk)
    if options.num_splits is not None and options.num_splits < 0:
        raise fail("num_splits must not be negative", options.num_splits, "Leave it None (or 0) to have it chosen")
    plain = Options(scale=options.scale, softcap=options.softcap, causal=options.causal, align=options.align)
    plain = plain._replace(window_left=options.window_left, window_right=options.window_right)
    by_heads = {**specs, "q": q._replace(shape=(batch, heads_q, len_q, dim_qk))}
    cache = Cache(
        capacity=capacity,
        appended=specs["k"].shape[1] if "k" in specs else 0,
        page_size=page_size,
        has_lengths="cache_seqlens" in specs,
        has_batch_idx="cache_batch_idx" in specs,
        has_leftpad="cache_leftpad" in specs,
        quantised=quantised,
        rotary_dim=rotary_dim,
        rotary_interleaved=options.rotary_interleaved,
        num_splits=options.num_splits,
        batch_invariant=options.batch_invariant,
    )
    return Problem(
        kind="cache",
        batch=batch,
        heads_q=heads_q,
        heads_kv=k_cache.shape[2],
        len_q=len_q,
        len_kv=capacity,
        dim_qk=dim_qk,
        dim_v=specs["v_cache"].shape[3],
        total_q=len_q,
        total_kv=capacity,
        dtype=q.dtype,
        device=q.device,
        mask=Mask(check_band(plain), ranged=True),
        score=check_score(by_heads, plain),
        dropout=0.0,
        deterministic=True,
        return_lse=options.return_lse,
        layout=options.layout,
        specs=specs,
        cache=cache,
    )


def _check_caches(specs: Mapping[str, Spec], paged: bool) -> None:
    q, k_cache, v_cache = specs["q"], specs["k_cache"], specs["v_cache"]
    axes = "(pages, page_size, heads_kv, dim)" if paged else "(batch, capacity, heads_kv, dim)"
    for name in ("k_cache", "v_cache"):
        if len(specs[name].shape) != 4:
            raise fail(f"{name} must have 4 axes {axes}", f"{name} {specs[name].shape}", "Check the layout")
    if q.dtype not in FLOATS:
        raise mismatch(f"q must be one of {', '.join(FLOATS)}", q.dtype, "Convert it")
    for name in ("k_cache", "v_cache"):
        if specs[name].dtype not in (q.dtype, *QUANTISED):
            want = f"{name} must have q's dtype {q.dtype} or be one of {', '.join(QUANTISED)}"
            raise mismatch(want, specs[name].dtype, "Convert the cache or q")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise fail(
            "k_cache and v_cache must agree in all but the last axis",
            shapes(specs, "k_cache", "v_cache"),
            "Allocate them alike",
        )
    if k_cache.shape[3] != q.shape[3]:
        raise fail(
            "q and k_cache must have the same dim_qk",
            shapes(specs, "q", "k_cache"),
            "Only v_cache may have another head dim",
        )


def _check_indices(specs: Mapping[str, Spec], batch: int, paged: bool) -> None:
    for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad"):
        if name in specs:
            check_integers(specs, name)
            if specs[name].shape != (batch,):
                raise fail(f"{name} must have shape (batch,) = ({batch},)", specs[name].shape, "Give one per sequence")
    if paged:
        check_integers(specs, "block_table")
        table = specs["block_table"].shape
        if len(table) != 2 or table[0] != batch:
            raise fail(
                f"block_table must have shape (batch, max_pages) with batch = {batch}",
                table,
                "Give one row of pages a sequence",
            )
        if "cache_batch_idx" in specs:
            raise fail(
                "cache_batch_idx does not go with block_table", "both", "Permute the rows of block_table instead"
            )
    elif "cache_batch_idx" not in specs and specs["k_cache"].shape[0] != batch:
        raise fail(
            "k_cache must have q's batch",
            shapes(specs, "q", "k_cache"),
            "Choose rows of a larger cache with cache_batch_idx",
        )


def _check_append(specs: Mapping[str, Spec], heads_kv: int) -> None:
    if ("k" in specs) != ("v" in specs):
        raise fail("k and v are appended together", "k" if "k" in specs else "v", "Pass both or neither")
    if "k" not in specs:
        return
    if "cache_seqlens" not in specs:
        raise fail(
            "appending k and v needs cache_seqlens", None, "Pass the lengths before this call, (batch,) or an int"
        )
    q, k, v = specs["q"], specs["k"], specs["v"]
    for name, dim in (("k", q.shape[3]), ("v", specs["v_cache"].shape[3])):
        spec = specs[name]
        if len(spec.shape) != 4 or spec.shape[0] != q.shape[0] or spec.shape[2:] != (heads_kv, dim):
            want = (
                f"{name} must have shape (batch, len_new, heads_kv, dim) = ({q.shape[0]}, len_new, {heads_kv}, {dim})"
            )
            raise fail(want, spec.shape, "It is written into the cache as it stands")
        if spec.dtype != q.dtype:
            raise mismatch(f"{name} must have q's dtype {q.dtype}", spec.dtype, "Convert it")
    if k.shape[1] != v.shape[1]:
        raise fail("k and v must have the same number of new tokens", shapes(specs, "k", "v"), "Append them together")
    for name in ("k_cache", "v_cache"):
        spec = specs[name]
        if any(stride == 0 and size > 1 for size, stride in zip(spec.shape, spec.strides, strict=True)):
            raise fail(
                f"{name} must own every slot that k and v are written to",
                f"{spec.shape} with strides {spec.strides}",
                "Call .contiguous() on the expanded cache once, before decoding",
            )


def _check_scales(specs: Mapping[str, Spec]) -> bool:
    heads_kv = specs["k_cache"].shape[2]
    for name, cache in (("k_scale", "k_cache"), ("v_scale", "v_cache")):
        quantised = specs[cache].dtype in QUANTISED
        if quantised != (name in specs):
            got = f"{cache} {specs[cache].dtype}, {name} {'given' if name in specs else 'missing'}"
            raise fail(
                f"{name} goes with an fp8 or int8 {cache}, and only with one",
                got,
                "Pass (heads_kv,) scales: value = stored * scale",
            )
        if quantised and (specs[name].shape != (heads_kv,) or specs[name].dtype not in FLOATS):
            got = f"{specs[name].dtype} {specs[name].shape}"
            raise fail(
                f"{name} must be floating point of shape (heads_kv,) = ({heads_kv},)", got, "Give one scale a head"
            )
    return "k_scale" in specs or "v_scale" in specs


def _check_rotary(specs: Mapping[str, Spec], dim_qk: int) -> int:
    if ("rotary_cos" in specs) != ("rotary_sin" in specs):
        got = "rotary_cos alone" if "rotary_cos" in specs else "rotary_sin alone"
        raise fail("rotary_cos and rotary_sin go together", got, "Pass both or neither")
    if "rotary_cos" not in specs:
        return 0
    if "k" not in specs:
        mend = "Pass k and v to append, or rotate q before the call"
        raise fail("rotary_cos and rotary_sin rotate q together with the k that is appended", "no k", mend)
    cos, sin = specs["rotary_cos"], specs["rotary_sin"]
    if len(cos.shape) != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > dim_qk:
        want = "rotary_cos and rotary_sin must have shape (positions, rotary_dim / 2)"
        raise fail(
            f"{want} with rotary_dim <= dim_qk = {dim_qk}", shapes(specs, "rotary_cos", "rotary_sin"), "Trim them"
        )
    if cos.dtype not in FLOATS or sin.dtype not in FLOATS:
        raise mismatch("rotary_cos and rotary_sin must be floating point", f"{cos.dtype}, {sin.dtype}", "Convert them")
    check_positions(cos.shape[0], max(specs["k"].shape[1], min(specs["q"].shape[1], 1)))
    return 2 * cos.shape[1]


def check_positions(rows: int, needed: int) -> None:
    """Hold rotary tables of ``rows`` positions to those that a call needs."""
    if needed > rows:
        want = f"rotary_cos and rotary_sin must have a row for each of the {needed} positions in use"
        raise fail(want, f"{rows} rows", "Make the tables as long as the cache's capacity")


def check_cache_contents(problem: Problem, contents: Mapping[str, Sequence[int]]) -> None:
    """Check the values of a decoding call's index tensors that the host can read, by their names."""
    cache = problem.cache
    if cache is None:
        return
    rows = problem.specs["k_cache"].shape[0]
    chosen = contents.get("cache_batch_idx", ())
    for row in chosen:
        if not 0 <= row < rows:
            raise fail(f"cache_batch_idx must name rows 0 to {rows - 1} of the cache", row, "Check the indices")
    for sequence, pad in enumerate(contents.get("cache_leftpad", ())):
        if not 0 <= pad <= cache.capacity:
            raise fail(f"cache_leftpad[{sequence}] must lie in [0, capacity] = [0, {cache.capacity}]", pad, "Clamp it")
    if cache.appended and len(set(chosen)) < len(chosen):
        raise fail(
            "two sequences must not append to one row of the cache", f"cache_batch_idx {list(chosen)}", "Copy it"
        )
    lengths = contents.get("cache_seqlens")
    if lengths is not None:
        _check_lengths(problem, cache, lengths)
    elif not cache.has_lengths:
        lengths = [cache.capacity] * problem.batch
    table = contents.get("block_table")
    if table is not None and lengths is not None:
        _check_table(problem, cache, table, lengths)


def _check_lengths(problem: Problem, cache: Cache, lengths: Sequence[int]) -> None:
    for sequence, length in enumerate(lengths):
        if length < 0 or length + cache.appended > cache.capacity:
            got = f"{length} cached and {cache.appended} new tokens"
            raise fail(
                f"sequence {sequence} must fit the cache's capacity of {cache.capacity}",
                got,
                "Allocate a larger cache or more pages",
            )
    if "rotary_cos" in problem.specs:
        queries = min(problem.len_q, 1) if problem.mask.band.is_open else problem.len_q
        needed = max(lengths, default=0) + max(cache.appended, queries)
        check_positions(problem.specs["rotary_cos"].shape[0], needed)


def _check_table(problem: Problem, cache: Cache, table: Sequence[int], lengths: Sequence[int]) -> None:
    pages, max_pages = problem.specs["k_cache"].shape[0], problem.specs["block_table"].shape[1]
    check_pages(table, [length + cache.appended for length in lengths], pages, cache.page_size, max_pages)
    if not cache.appended:
        return
    owners: dict[int, int] = {}
    for sequence, length in enumerate(lengths):
        for column in range(length // cache.page_size, -(-(length + cache.appended) // cache.page_size)):
            page = table[sequence * max_pages + column]
            if owners.setdefault(page, sequence) != sequence:
                raise fail(
                    "two sequences must not append to one page",
                    f"page {page} in rows {owners[page]} and {sequence} of block_table",
                    "Copy a shared page before it is written to",
                )
