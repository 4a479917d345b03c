"""The checks of one call, each saying what was wrong, what was got and how to mend it.

They look at metadata, and at such contents as the host holds. None reads a tensor on a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from tilewise.problem.mask import Band
from tilewise.problem.score import Score

if TYPE_CHECKING:
    from tilewise.problem.cache import CacheOptions
    from tilewise.problem.problem import Options, Problem, Spec

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int32", "int64")

# What a plain option must be: the names it goes by, its types, what to call them, and how to mend another.
PLAIN: tuple[tuple[tuple[str, ...], tuple[type, ...], str, str], ...] = (
    (
        ("causal", "deterministic", "return_lse", "rotary_interleaved", "batch_invariant"),
        (bool,),
        "True or False",
        "Pass a Python bool, neither a tensor nor a number",
    ),
    (("dropout", "softcap"), (int, float), "a number", "Pass a Python number; .item() reads a tensor's"),
    (("align", "layout"), (str,), "a name", "Pass one of the strings that the docstring lists"),
    (("scale",), (int, float, type(None)), "a number or None", "Pass a Python number; .item() reads a tensor's"),
    (
        ("window_left", "window_right", "max_seqlen_q", "max_seqlen_k", "num_splits"),
        (int, type(None)),
        "an int or None",
        "Pass a Python int; .item() reads a tensor's",
    ),
)


def fail(what: str, got: object, mend: str) -> ValueError:
    """Build the error that every check raises: what was wrong, what was got, how to mend it."""
    return ValueError(f"{what}; got {got}. {mend}")


def mismatch(what: str, got: object, mend: str) -> TypeError:
    """Build the error for a wrong type or dtype."""
    return TypeError(f"{what}; got {got}. {mend}")


def kind(value: object) -> str:
    """Name what was got: its type, and its value where printing that reads no device."""
    plain = isinstance(value, (bool, int, float, str))
    return f"{type(value).__name__} {value!r}" if plain else type(value).__name__


def shapes(specs: Mapping[str, Spec], *names: str) -> str:
    """Print the shapes of some tensors: ``q (1, 2, 8, 16), k (1, 2, 8, 32)``."""
    return ", ".join(f"{name} {tuple(specs[name].shape)}" for name in names)


def check_options(options: Options | CacheOptions) -> None:
    """Hold plain options to plain Python values: a tensor in the place of one would have to be read from its device."""
    given = options._asdict()
    for names, types, want, mend in PLAIN:
        for name in names:
            if name not in given:
                continue
            value = given[name]
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise mismatch(f"{name} must be {want}", kind(value), mend)
    if options.layout not in ("bhsd", "bshd"):
        raise fail('layout must be "bhsd" or "bshd"', repr(options.layout), "Name the order of q's axes")


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
            "The first puts the last query beside the last key, the second the first beside the first",
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
