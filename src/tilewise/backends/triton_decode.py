"""Decoding by the kernels in plain Triton: what `triton_portable` does with a call against a cache.

A call's form settles everything but where its tensors lie: tiles, splits, and one launch, or two where tokens are
appended. A prepared call takes memory for its results and launches. It reads nothing that lies on the device, so a CUDA
graph may hold it while lengths and pages change between replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.backends.counters import scratch, zeros
from tilewise.backends.extents import LaunchOptions, clip, contiguous, launch_options
from tilewise.machine.detect import detect
from tilewise.machine.tiles import (
    FIXED_SPLIT,
    Splits,
    Tiles,
    decode_splits,
    default_tiles,
    estimate_shared_memory,
    padded_dim,
    shared_memory_limit,
)
from tilewise.problem.cache import Cache, CacheTensors
from tilewise.problem.problem import Problem

if TYPE_CHECKING:
    from tilewise.kernels.share import Jitted
    from tilewise.machine.device import Capability

MOST_ROWS = 64  # in a tile; further queries are further tiles, which load the keys again
APPENDED_ROWS = 16  # tokens x heads that one program writes
MERGED_CELLS = 4096  # of partial results whose loads are on their way together

Argument = torch.Tensor | int | float | str | bool | None
Arguments = dict[str, Argument]
Maybe = torch.Tensor | None


# ---- what is served, and how it is cut ------------------------------------------------------------------------------


def why_not(problem: Problem) -> str | None:
    """Say why these kernels cannot serve a call against a cache, or None; the device itself is `triton_portable`'s.

    Raises:
        ValueError: no tile fits the device.
    """
    capability, stored = _capability(problem.device), {problem.specs[name].dtype for name in ("k_cache", "v_cache")}
    if "float8_e4m3fn" in stored and problem.device_type == "cuda":
        if not isinstance(capability, tuple):
            return "an AMD GPU of this kind stores other 8-bit floats than float8_e4m3fn"
        if capability < (8, 9):
            return f"float8_e4m3fn needs compute capability 8.9 or newer; got {capability[0]}.{capability[1]}"
    if not problem.is_empty:
        tiles(problem)
    return None


def tiles(problem: Problem) -> Tiles:
    """Give the tile sizes and launch settings.

    The rows of a tile are the queries of all heads that share a key head: as many as there are, up to `MOST_ROWS` and
    to what fits; 16 and no other where rows must not depend on how many come at once.
    """
    capability, dims = _capability(problem.device), (max(problem.dim_qk, 1), max(problem.dim_v, 1))
    itemsize = max(_itemsize(problem.specs[name].dtype) for name in ("k_cache", "v_cache"))
    sizes = default_tiles(capability, *dims, itemsize, "decode")
    unrolled = problem.dtype == "float32" and _precision(problem) == "ieee"
    if isinstance(capability, tuple) and (unrolled or capability < (8, 0)):
        # Without tensor cores a product is unrolled, and what it holds must fit into registers.
        sizes = Tiles(16, min(sizes.block_kv, 32), num_warps=8, num_stages=1)
    elif not _cache(problem).batch_invariant:
        rows = min(MOST_ROWS, _power_of_two(problem.group * problem.len_q))
        larger = replace(sizes, block_q=max(rows, sizes.block_q))
        while larger.block_q > sizes.block_q and not _fits(larger, capability, dims, problem.itemsize):
            larger = replace(larger, block_q=larger.block_q // 2)
        # A bound on registers was found for the rows of the table.
        sizes = sizes if larger.block_q == sizes.block_q else replace(larger, max_registers=None)
    # Behind a table of pages the compiler shares the stages out between loads of the table and loads of the keys.
    return replace(sizes, num_stages=2 * sizes.num_stages - 1) if _cache(problem).page_size else sizes


def _fits(sizes: Tiles, capability: Capability, dims: tuple[int, int], itemsize: int) -> bool:
    small = sizes.block_q * padded_dim(dims[1]) <= 64 * 128  # what 128 threads can sum in registers
    return small and estimate_shared_memory(sizes, *dims, itemsize, "decode") <= shared_memory_limit(capability)


def splits(problem: Problem, sizes: Tiles) -> Splits:
    """Give how the keys are split; see `decode_splits`."""
    held, band = _cache(problem), problem.mask.band
    keys = held.capacity
    if band.left is not None and band.right is not None:  # no tile sees more than this of a longer cache
        width = max(band.left + band.right + sizes.block_q, 1)
        keys = min(keys, width + FIXED_SPLIT * held.batch_invariant)  # a fixed split more, where it begins within one
    count = _row_tiles(problem, sizes) * problem.heads_kv * problem.batch
    chosen = 0 if held.batch_invariant else held.num_splits or 0
    return decode_splits(count, keys, _multiprocessors(problem.device), sizes.block_kv, chosen, held.batch_invariant)


def _row_tiles(problem: Problem, sizes: Tiles) -> int:
    return -(-problem.group * problem.len_q // sizes.block_q)


def _scattered(problem: Problem, sizes: Tiles) -> bool:
    """Say whether a block of keys may lie in several pages."""
    return _cache(problem).page_size % sizes.block_kv != 0


def _precision(problem: Problem) -> str:
    """Give the way float32 is multiplied: as torch allows tf32, else exactly; narrower types know but one way.

    Exactly means three tf32 products for one where there are tensor cores, up to head dim 128; see `triton_portable`.
    """
    if problem.dtype == "float32" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    capability = _capability(problem.device)
    matrix_units = isinstance(capability, tuple) and capability >= (8, 0)
    small = padded_dim(max(problem.dim_qk, problem.dim_v, 1)) <= 128
    return "tf32x3" if problem.dtype == "float32" and matrix_units and small else "ieee"


# ---- a call ---------------------------------------------------------------------------------------------------------


def decode(problem: Problem, tensors: CacheTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Append to the cache, then attend to it: out (batch, len_q, heads_q, dim_v), lse (batch, heads_q, len_q)."""
    out, lse = _prepared(problem, True)(tensors)
    assert lse is not None  # noqa: S101 - it was asked for
    return out, lse


def prepare(problem: Problem) -> Decode:
    """Settle a call but for its tensors; without an lse where nobody asked for it."""
    return _prepared(problem, problem.return_lse)


@lru_cache(maxsize=4096)
def _prepared(problem: Problem, with_lse: bool) -> Decode:
    return Decode(problem, with_lse)


class Plan(NamedTuple):
    """What a call of one form does, for tensors that lie in one way on 16 bytes."""

    launches: list[tuple[_Launch, Callable[[Sequence[object]], tuple[torch.Tensor, ...]]]]  # and what each is given
    partial: int  # float32 numbers of partial results
    counters: int  # tiles whose splits are joined; 0 where there is one split


class Decode:
    """Calls of one form: each takes memory for its results, sees where the tensors lie, and launches.

    Called with tensors in the order of `CacheTensors`, as the problem's specs describe them or in the user's order of
    axes. Gives out, contiguous as (batch, len_q, heads_q, dim_v), and lse, or None for it.
    """

    def __init__(self, problem: Problem, with_lse: bool) -> None:
        self._problem = problem
        self._device = torch.device(problem.device)
        self._float = torch.empty(0, dtype=torch.float32, device=self._device)  # to make more of its kind
        self._out = (problem.batch, problem.len_q, problem.heads_q, problem.dim_v)
        # A settled call is given tensors in the user's order of axes, which matters here alone.
        self._is_like_q = problem.layout == "bshd" and problem.specs["q"][:2] == contiguous(self._out)
        self._lse = problem.lse_shape if with_lse else None
        turns = "rotary_cos" in problem.specs
        self._turned = (problem.batch, problem.len_q, problem.heads_q, problem.dim_qk) if turns else None
        # The kernels count on vectors that are dense; a strided one is copied, which costs a launch.
        self._strided = {
            place
            for place, label in enumerate(CacheTensors._fields)
            if label in _VECTORS and label in problem.specs and problem.specs[label].strides != (1,)
        }
        self._float32 = problem.dtype == "float32"  # torch's switch for tf32 may turn between calls
        self._plans: dict[tuple[bool, str], Plan] = {}

    def __call__(self, given: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Append to the cache, attend to it, give (out, lse)."""
        if self._strided:
            given = [x.contiguous() if n in self._strided and x is not None else x for n, x in enumerate(given)]
        q, k, v = given[:3]
        if q is None or k is None or v is None:
            raise TypeError("a call against a cache has q, k_cache and v_cache")
        aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0
        key = aligned, _precision(self._problem) if self._float32 else "ieee"
        plan = self._plans.get(key) or self._settle(key, q, given)
        out, *others = self._make(q, plan.partial, plan.counters)
        everything = (out, *others, *given)
        for launch, read in plan.launches:
            launch(read(everything))
        return out, others[0]

    def _make(self, q: torch.Tensor, partial: int, counters: int) -> tuple[torch.Tensor, Maybe, Maybe, Maybe, Maybe]:
        """Take memory for what a call writes, in the order of `_MADE`, asking in the cheapest way."""
        out = torch.empty_like(q) if self._is_like_q else q.new_empty(self._out)
        lse = None if self._lse is None else self._float.new_empty(self._lse)
        turned = None if self._turned is None else q.new_empty(self._turned)
        if not counters:
            return out, lse, turned, None, None
        return out, lse, turned, scratch(self._device, partial), zeros(self._device, counters)

    def _settle(self, key: tuple[bool, str], q: torch.Tensor, given: Sequence[torch.Tensor | None]) -> Plan:
        from tilewise.kernels.triton.append import append_tokens
        from tilewise.kernels.triton.decode import attention_decode

        problem, sizes = self._problem, tiles(self._problem)
        how, count, cells = splits(problem, sizes), _tile_count(problem, sizes), _merged_cells(problem, sizes)
        joined = how.count > 1
        partial = 2 * count * how.count * cells if joined else 0
        made = self._make(q, partial, count if joined else 0)
        tensors = dict(zip((*_MADE, *CacheTensors._fields), (*made, *given), strict=True))
        launches = []
        if "k" in problem.specs:
            arguments, programs = _append_arguments(problem)
            options = LaunchOptions(num_warps=4, num_stages=1, maxnreg=None)
            launches.append(_settled(append_tokens, programs, arguments, options, tensors, _APPEND_READS))
        arguments = _decode_arguments(problem, sizes, how, aligned=key[0]) | {"PRECISION": key[1]}
        reads = _DECODE_READS if self._turned is None else _DECODE_READS | {"q_ptr": "turned"}
        launches.append(_settled(attention_decode, count * how.count, arguments, launch_options(sizes), tensors, reads))
        return self._plans.setdefault(key, Plan(launches, partial, count if joined else 0))


# ---- arguments ------------------------------------------------------------------------------------------------------

_MADE = ("out", "lse", "turned", "partial", "arrived")
_VECTORS = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "k_scale", "v_scale")

# The kernels' names of the tensors that they take.
_SHARED_READS = {
    "q_ptr": "q", "k_ptr": "k_cache", "v_ptr": "v_cache", "seqlens_ptr": "cache_seqlens", "table_ptr": "block_table",
    "batch_idx_ptr": "cache_batch_idx", "k_scale_ptr": "k_scale", "v_scale_ptr": "v_scale",
}  # fmt: skip
_DECODE_READS = _SHARED_READS | {
    "out_ptr": "out", "lse_ptr": "lse", "partial_ptr": "partial", "arrived_ptr": "arrived",
    "leftpad_ptr": "cache_leftpad", "sink_ptr": "sink", "slopes_ptr": "alibi_slopes",
}  # fmt: skip
_APPEND_READS = _SHARED_READS | {
    "turned_ptr": "turned", "k_new_ptr": "k", "v_new_ptr": "v", "cos_ptr": "rotary_cos", "sin_ptr": "rotary_sin",
}  # fmt: skip


def _decode_arguments(problem: Problem, sizes: Tiles, how: Splits, aligned: bool) -> Arguments:
    """Give what `attention_decode` takes beside tensors, and its constants."""
    held, score, band = _cache(problem), problem.score, problem.mask.band
    unit_q, unit_k, unit_v = _units(problem) if aligned else (1, 1, 1)
    row, cells = problem.heads_q * problem.dim_v, _merged_cells(problem, sizes)
    return {
        **(
            _strides("q", problem, "q", unit_q)
            if "rotary_cos" not in problem.specs
            else _turned_strides(problem, unit_q)
        ),
        **_strides("k", problem, "k_cache", unit_k),
        **_strides("v", problem, "v_cache", unit_v),
        **_table(problem),
        **_per_head(problem, "sink", "sink"),
        **_per_head(problem, "slopes", "alibi_slopes"),
        "out_batch_stride": problem.len_q * row // unit_q,
        "out_row_stride": row // unit_q,
        "out_head_stride": problem.dim_v // unit_q,
        "lse_batch_stride": problem.heads_q * problem.len_q,
        "lse_head_stride": problem.len_q,
        "lse_row_stride": 1,
        "tiles": _tile_count(problem, sizes),
        "row_tiles": _row_tiles(problem, sizes),
        "splits": how.count,
        "least": how.least_blocks,
        "fixed": how.fixed_blocks,
        "heads_kv": problem.heads_kv,
        "group": problem.group,
        "len_q": problem.len_q,
        "capacity": held.capacity,
        "appended": held.appended,
        "left": clip(band.left, problem),
        "right": clip(band.right, problem),
        "scale": score.scale,
        "softcap": score.softcap or None,
        **_dims(problem),
        "BLOCK_Q": sizes.block_q,
        "BLOCK_KV": sizes.block_kv,
        "UNIT_Q": unit_q,
        "UNIT_K": unit_k,
        "UNIT_V": unit_v,
        "SCATTERED": _scattered(problem, sizes),
        "TOP_LEFT": band.align == "top_left",
        "EXACT": problem.dtype == "float32",
        "MERGE_ROWS": cells // padded_dim(problem.dim_v),
        "MERGE_AT_ONCE": max(1, min(16, MERGED_CELLS // cells)),
    }


def _append_arguments(problem: Problem) -> tuple[Arguments, int]:
    """Give the same of `append_tokens`, and its programs."""
    held, turns = _cache(problem), "rotary_cos" in problem.specs
    key_parts = -(-held.appended * problem.heads_kv // APPENDED_ROWS)
    parts = key_parts + (-(-problem.len_q * problem.heads_q // APPENDED_ROWS) if turns else 0)
    angles = {name: problem.specs[f"rotary_{name}"].strides if turns else (0, 0) for name in ("cos", "sin")}
    arguments: Arguments = {
        **_strides("q", problem, "q"),
        **_strides("k", problem, "k_cache"),
        **_strides("v", problem, "v_cache"),
        **_strides("k_new", problem, "k"),
        **_strides("v_new", problem, "v"),
        **_table(problem),
        **{f"{name}_row_stride": strides[0] for name, strides in angles.items()},
        **{f"{name}_dim_stride": strides[1] for name, strides in angles.items()},
        "parts": parts,
        "key_parts": key_parts,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "len_q": problem.len_q,
        "appended": held.appended,
        "capacity": held.capacity,
        "positions": problem.specs["rotary_cos"].shape[0] if turns else 1,
        "half": held.rotary_dim // 2,
        **_dims(problem),
        "BLOCK_ROWS": APPENDED_ROWS,
        "INTERLEAVED": held.rotary_interleaved,
        "DIAGONAL": not problem.mask.band.is_open,
    }
    return arguments, problem.batch * parts


def _cache(problem: Problem) -> Cache:
    if problem.cache is None:
        raise TypeError("a cache problem carries its cache's description")
    return problem.cache


def _dims(problem: Problem) -> Arguments:
    qk, v = problem.dim_qk, problem.dim_v
    return {"DIM_QK": qk, "DIM_V": v, "BLOCK_DIM_QK": padded_dim(qk), "BLOCK_DIM_V": padded_dim(v)}


def _strides(label: str, problem: Problem, name: str, unit: int = 1) -> Arguments:
    """Give a tensor's strides (batch or page, len or slot, heads, dim), all but the last in units."""
    batch, row, head, dim = problem.specs[name].strides
    return _named_strides(label, batch, row, head, dim, unit)


def _turned_strides(problem: Problem, unit: int) -> Arguments:
    """Give the strides of q as it was turned: contiguous."""
    head = problem.dim_qk
    row = problem.heads_q * head
    return _named_strides("q", problem.len_q * row, row, head, 1, unit)


def _named_strides(label: str, batch: int, row: int, head: int, dim: int, unit: int) -> Arguments:
    return {
        f"{label}_batch_stride": batch // unit,
        f"{label}_row_stride": row // unit,
        f"{label}_head_stride": head // unit,
        f"{label}_dim_stride": dim,
    }


def _units(problem: Problem) -> tuple[int, int, int]:
    """Give the elements of q, keys and values in 16 bytes where all rows can be loaded 16 bytes at a time, else 1."""
    specs = problem.specs
    units = tuple(16 // _itemsize(specs[name].dtype) for name in ("q", "k_cache", "v_cache"))
    for name, unit in zip(("q", "k_cache", "v_cache"), units, strict=True):
        *outer, dim = specs[name].strides
        if dim != 1 or any(stride % unit for stride in outer):
            return 1, 1, 1
    if problem.dim_qk % units[0] or problem.dim_v % units[0]:  # of q as it was turned, and of out
        return 1, 1, 1
    return units[0], units[1], units[2]


def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size


def _table(problem: Problem) -> Arguments:
    paged = "block_table" in problem.specs
    row, column = problem.specs["block_table"].strides if paged else (0, 0)
    return {
        "table_row_stride": row,
        "table_column_stride": column,
        "cache_rows": problem.specs["k_cache"].shape[0],
        "page_size": max(_cache(problem).page_size, 1),
    }


def _per_head(problem: Problem, label: str, name: str) -> Arguments:
    """Give the strides of a tensor of (heads_q,) or (batch, heads_q)."""
    batch, head = (0, *problem.specs[name].strides)[-2:] if name in problem.specs else (0, 0)
    return {f"{label}_batch_stride": batch, f"{label}_head_stride": head}


def _tile_count(problem: Problem, sizes: Tiles) -> int:
    return problem.batch * problem.heads_kv * _row_tiles(problem, sizes)


def _merged_cells(problem: Problem, sizes: Tiles) -> int:
    """Count the numbers of a tile's partial result: the rows that there are, to a power of two, times dim_v."""
    rows = min(sizes.block_q, _power_of_two(problem.group * problem.len_q))
    return rows * padded_dim(problem.dim_v)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


# ---- launching ------------------------------------------------------------------------------------------------------

_Launch = Callable[[Iterable[torch.Tensor]], None]


def _settled(
    kernel: Jitted,
    programs: int,
    arguments: Arguments,
    options: LaunchOptions,
    tensors: dict[str, torch.Tensor | None],
    reads: dict[str, str],
) -> tuple[_Launch, Callable[[Sequence[object]], tuple[torch.Tensor, ...]]]:
    """Settle a launch but for its tensors; with it comes what takes these out of all that a call has."""
    there = {label: name for label, name in reads.items() if tensors[name] is not None}
    named = {**dict.fromkeys(reads), **arguments, **{label: tensors[name] for label, name in there.items()}}
    places = list(tensors)
    return _prepare(kernel, programs, named, options, list(there)), itemgetter(*map(places.index, there.values()))


def _prepare(
    kernel: Jitted, programs: int, named: Arguments, options: LaunchOptions, pointers: Sequence[str]
) -> _Launch:
    from tilewise.backends.launch import launch_named, prepare_named

    settled = prepare_named(kernel, (programs,), named, pointers, **options)
    if settled is not None:
        return settled
    return lambda tensors: launch_named(
        kernel, (programs,), named | dict(zip(pointers, tensors, strict=True)), **options
    )


@cache
def _capability(device: str) -> Capability:
    return detect(device).capability if device.startswith("cuda") else None


@cache
def _multiprocessors(device: str) -> int:
    return (detect(device).sms or 1) if device.startswith("cuda") else 1
