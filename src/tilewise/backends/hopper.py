"""The kernels in Gluon for NVIDIA GPUs of compute capability 9.0 (H100, H200).

This file says what they can do, chooses settings, allocates results and describes the tensors to the copy engine; what
is computed stands in ``kernels/gluon``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache, lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from tilewise.backends.counters import zeros
from tilewise.backends.extents import clip, contiguous, entries, is_bshd, tile_count
from tilewise.machine.detect import detect
from tilewise.machine.tiles import Tiles
from tilewise.problem.blocks import block_ranges
from tilewise.problem.problem import Grads, Needs, Problem, Spec, Tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tilewise.backends.launch import Argument, Prepared, TensorMap
    from tilewise.machine.device import Capability

name = "hopper"

GROUP_ROWS = 64  # queries of one consumer, a warpgroup
DIMS = (64, 128, 256)  # head dims of the kernels; others are padded by the copy engine
LOG2E = math.log2(math.e)
UNIT = 8  # elements in the 16 bytes that the copy engine counts in
MOST_ROWS = 2**30  # positions are int32 in the kernels, and a clipped map adds two of them


# ---- what is served -------------------------------------------------------------------------------------------------


def why_not(problem: Problem) -> str | None:
    """Say why these kernels cannot serve a problem, or None."""
    if problem.kind == "cache":
        return "has no cache form"
    if problem.device_type != "cuda":
        return f"runs on NVIDIA GPUs of compute capability 9.0; got {problem.device_type}"
    capability = _capability(problem.device)
    if capability != (9, 0):
        return f"needs compute capability 9.0; got {capability}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Gluon has no interpreter"
    reason = _why_not_gluon() or _why_not_features(problem)
    if reason is not None or problem.is_empty:
        return reason
    return _why_not_shape(problem)


def why_not_backward(problem: Problem) -> str | None:
    """Say why there is no gradient for a problem that has a forward pass here, or None."""
    from tilewise.backends import hopper_backward

    return hopper_backward.why_not(problem)


def _why_not_features(problem: Problem) -> str | None:
    if problem.dtype not in ("float16", "bfloat16"):
        return f"multiplies float16 and bfloat16; got {problem.dtype}"
    if problem.mask.dense or problem.score.bias or problem.score.alibi:
        return "has no dense mask, bias or ALiBi"
    if problem.mods is not None:
        return "has no score_mod, mask_mod or lists of tiles"
    if problem.dropout:
        return "has no dropout"
    if "block_table" in problem.specs:
        return "has no paged keys"
    return None


def _why_not_shape(problem: Problem) -> str | None:
    if max(problem.dim_qk, problem.dim_v) > DIMS[-1]:
        return f"has head dims up to {DIMS[-1]}; got {problem.dim_qk} and {problem.dim_v}"
    if problem.dim_v % UNIT:
        return f"stores rows of out in units of 16 bytes; got a head dim of {problem.dim_v} for v"
    for label in ("q", "k", "v"):
        spec = problem.specs[label]
        axes = list(zip(spec.shape, spec.strides, strict=True))
        outer = [stride for size, stride in axes[:-1] if size > 1]
        if (axes[-1][1] != 1 and axes[-1][0] > 1) or any(stride % UNIT or stride == 0 for stride in outer):
            return f"copies rows in units of 16 bytes; got {label} with strides {spec.strides}"
        if any(stride >= 2**38 for stride in outer):
            return f"counts strides up to 2**38 elements; got {label} with strides {spec.strides}"
    if max(problem.total_q, problem.total_kv) >= MOST_ROWS:
        return f"counts fewer than {MOST_ROWS} positions"
    if _is_clipped(problem) and problem.kind == "dense":
        for label in ("k", "v"):
            rows = _rows_of_entry(problem, label)
            if rows is None or (problem.batch - 1) * rows + problem.len_kv >= MOST_ROWS:
                return f"needs batch entries of {label} a whole number of rows apart, at most {MOST_ROWS} rows in all"
    if tile_count(problem, problem.total_q, GROUP_ROWS * 2) * problem.heads_q * entries(problem) >= MOST_ROWS:
        return "has too many tiles for one launch"
    return None


@cache
def _capability(device: str) -> Capability:
    return detect(device).capability


@cache
def _why_not_gluon() -> str | None:
    from tilewise.kernels.gluon.compat import refusal

    return refusal()


# ---- settings -------------------------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """How the forward kernel works on a problem.

    Args:
        groups: consumers, with 64 queries each: 2 or 3.
        block_kv: keys in a block.
        stages: blocks of keys, and of values, that the rings hold.
        q_buffers: tiles of queries in flight: with 2, one is copied or stored while the other is computed.
        consumer_registers, producer_registers: registers of a thread in the partitions after the first.
        ping_pong: consumers take turns at starting products.
        lazy: acc is rescaled ahead of the next product, and by warps alone in which a row_max moved.
        pack: p is rounded by packed conversions, for two loops that hand it on.
        schedule: programs take tiles in a fixed order ("static"), from a counter ("dynamic"), or are one for each tile.
        section_bytes: keys and values of the heads that are worked on together; the L2 cache holds 50 MB.
    """

    groups: int
    block_kv: int
    stages: int
    q_buffers: int
    consumer_registers: int
    producer_registers: int
    ping_pong: bool
    lazy: bool
    pack: bool
    schedule: Literal["static", "dynamic", "each"]
    section_bytes: int = 32 << 20


_TWO_64 = Settings(2, 128, 2, 2, 240, 24, ping_pong=True, lazy=True, pack=True, schedule="static")
_THREE_64 = Settings(3, 128, 2, 2, 160, 32, ping_pong=True, lazy=True, pack=True, schedule="static")
_WHOLE_128 = Settings(2, 128, 2, 2, 240, 24, ping_pong=True, lazy=False, pack=False, schedule="static")
_WHOLE_256 = Settings(2, 64, 2, 1, 240, 24, ping_pong=False, lazy=True, pack=False, schedule="static")
_ANY = 1 << 31

# By head dim and whether a band cuts tiles: (longest len_q, settings), the fastest of what was measured on an H200 in
# bfloat16 with 16,384 tokens and 2,048 columns over all heads. Three consumers waste rows where few are needed.
TABLE: Mapping[tuple[int, bool], tuple[tuple[int, Settings], ...]] = {
    (64, False): ((512, _TWO_64._replace(stages=4)), (_ANY, _THREE_64)),
    (64, True): (
        (1024, _TWO_64._replace(stages=4, lazy=False, schedule="dynamic")),
        (_ANY, _THREE_64._replace(stages=4, schedule="dynamic")),
    ),
    (128, False): ((8192, _WHOLE_128), (_ANY, _WHOLE_128._replace(ping_pong=False))),
    (128, True): (
        (512, _WHOLE_128._replace(block_kv=64, stages=4, pack=True, schedule="dynamic")),
        (_ANY, _WHOLE_128._replace(lazy=True, pack=True, schedule="dynamic")),
    ),
    (256, False): ((_ANY, _WHOLE_256),),
    (256, True): (
        (2048, _WHOLE_256._replace(pack=True, schedule="dynamic")),
        (_ANY, _WHOLE_256._replace(pack=True, schedule="each")),
    ),
}


def settings(problem: Problem) -> Settings:
    """Choose the settings of the forward pass from the table.

    Packed sequences count by their mean length. Tiles of unequal work are shared out by a counter, and three consumers
    have no registers for a softcap.
    """
    length = problem.total_q // max(problem.batch, 1) if problem.kind == "varlen" else problem.len_q
    rows = TABLE[padded(max(problem.dim_qk, problem.dim_v)), not problem.mask.band.is_open]
    chosen = next(row for most, row in rows if length <= most or (problem.score.softcap and row.groups == 2))
    if chosen.schedule == "static" and (problem.kind == "varlen" or problem.mask.ranged):
        chosen = chosen._replace(schedule="dynamic")
    return chosen


def tiles(problem: Problem) -> Tiles:
    """Give the tile sizes of the forward pass."""
    chosen = settings(problem)
    return Tiles(chosen.groups * GROUP_ROWS, chosen.block_kv, num_warps=4, num_stages=chosen.stages)


def padded(dim: int) -> int:
    """Give the head dim that a kernel computes with.

    >>> padded(64), padded(96), padded(192)
    (64, 128, 256)
    """
    return next(most for most in DIMS if dim <= most)


# ---- forward --------------------------------------------------------------------------------------------------------


def forward(problem: Problem, tensors: Tensors, chosen: Settings | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse of a dense or varlen problem; the tuner names the settings, others take the table's."""
    out, lse = _forward(problem, chosen, True)(tensors)
    assert lse is not None  # noqa: S101 - it was asked for
    return (out.transpose(1, 2) if is_bshd(problem) else out), lse


def prepare(problem: Problem) -> Forward:
    """Settle the forward pass of a problem but for its tensors; without an lse where nobody asked for it."""
    return _forward(problem, None, problem.return_lse)


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
    from tilewise.backends import hopper_backward

    return hopper_backward.backward(problem, tensors, out, lse, d_out, d_lse, needs)


@lru_cache(maxsize=4096)
def _forward(problem: Problem, chosen: Settings | None, with_lse: bool) -> Forward:
    return Forward(problem, settings(problem) if chosen is None else chosen, with_lse)


class Forward:
    """The forward pass of one problem: a call takes memory for its results and launches; the first one settles how.

    Called with tensors in the order of `Tensors`, as the problem's specs describe them; q, k and v may also have the
    user's order of axes, in which out is returned.
    """

    def __init__(self, problem: Problem, chosen: Settings, with_lse: bool) -> None:
        self._problem, self._settings, self._with_lse = problem, chosen, with_lse
        shape = problem.out_shape
        self._out = contiguous((shape[0], shape[2], shape[1], shape[3]) if is_bshd(problem) else shape)
        self._is_like_q = problem.specs["q"][:2] == self._out and not is_bshd(problem)
        self._lse = contiguous(problem.lse_shape)
        self._dtype, self._device = getattr(torch, problem.dtype), torch.device(problem.device)
        self._by_counter = chosen.schedule == "dynamic"
        read = {label: x for label, x in _READ.items() if x in problem.specs}
        if "cu_q_ptr" in read:
            read.setdefault("cu_k_ptr", "cu_seqlens_q")
        places = [Tensors._fields.index(x) for x in read.values()]
        self._read_of = itemgetter(*places, places[0]) if places else None  # one more, so that it gives a tuple
        given = ["lse_ptr"] * with_lse + ["counter_ptr"] * self._by_counter + list(read)
        self._names = (*given, "out_map", "q_map", "k_map", "v_map")
        self._launch: Prepared | None = None

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute out, contiguous in the user's order of axes, and lse, or None for it."""
        q, k, v = tensors[:3]
        assert q is not None and k is not None and v is not None  # noqa: S101, PT018 - for the type checker
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
            q, k, v = (moved_to_16_bytes(x) for x in (q, k, v))
        if self._is_like_q:  # the cheaper question
            out = torch.empty_like(q)
        else:
            out = torch.empty_strided(*self._out, dtype=self._dtype, device=self._device)
        given: list[torch.Tensor] = []
        lse = None
        if self._with_lse:
            lse = torch.empty_strided(*self._lse, dtype=torch.float32, device=self._device)
            given.append(lse)
        if self._by_counter:
            given.append(zeros(self._device))
        if self._read_of is not None:
            given += self._read_of(tensors)[:-1]
        given += out, q, k, v
        launch = self._launch or self._settle(given)
        launch(given)
        return out, lse

    def _settle(self, given: Sequence[torch.Tensor]) -> Prepared:
        from tilewise.backends.launch import prepare_named
        from tilewise.kernels.gluon.forward import attention_forward

        processors = detect(self._problem.device).sms or 1
        tensors = dict(zip(self._names, given, strict=True))
        programs, named = arguments(self._problem, self._settings, tensors, processors)
        self._launch = prepare_named(attention_forward, (programs,), named, self._names)
        if self._launch is None:
            raise RuntimeError("launches go to Triton here, which kernels with tensor maps cannot")
        return self._launch


# The kernel's names of the tensors that it reads by pointers.
_READ = {
    "sink_ptr": "sink", "kv_start_ptr": "kv_start", "kv_stop_ptr": "kv_stop",
    "cu_q_ptr": "cu_seqlens_q", "cu_k_ptr": "cu_seqlens_k",
}  # fmt: skip


def moved_to_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor whose address the copy engine cannot take, with its strides; give others as they are."""
    return (
        x
        if x.data_ptr() % 16 == 0
        else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    )


# ---- arguments ------------------------------------------------------------------------------------------------------


def arguments(
    problem: Problem, chosen: Settings, tensors: Mapping[str, torch.Tensor], processors: int
) -> tuple[int, dict[str, Argument]]:
    """Lay out the kernel's arguments and constants; give the number of programs with them.

    ``tensors`` holds what the call has, by the kernel's names; what is absent is None to the kernel, and costs nothing.
    """
    from tilewise.backends.launch import Mapped
    from tilewise.kernels.triton.forward import FAR

    score, band = problem.score, problem.mask.band
    clipped, packed = _is_clipped(problem), problem.kind == "varlen"
    dim_qk, dim_v = padded(problem.dim_qk), padded(problem.dim_v)
    count = tile_count(problem, problem.total_q, chosen.groups * GROUP_ROWS)
    heads = problem.heads_q * entries(problem)
    specs = problem.specs
    factor = max(abs(score.scale), 1e-30) * LOG2E
    boxes = {
        "q": (specs["q"], GROUP_ROWS, dim_qk, packed),
        "k": (specs["k"], chosen.block_kv, dim_qk, clipped),
        "v": (specs["v"], chosen.block_kv, dim_v, clipped),
        "out": (_out_spec(problem), GROUP_ROWS, dim_v, packed),
    }
    sink = specs.get("sink")
    sink_strides = (0, 0) if sink is None else (0, *sink.strides)[-2:]
    named: dict[str, Argument] = {
        **dict.fromkeys(("lse_ptr", "counter_ptr", *_READ)),
        **tensors,
        **{f"{x}_map": Mapped(tensors[f"{x}_map"], tensor_map(*how)) for x, how in boxes.items()},
        "sink_batch_stride": sink_strides[0],
        "sink_head_stride": sink_strides[1],
        "k_batch_rows": 0 if packed else _rows_of_entry(problem, "k") or 0,
        "v_batch_rows": 0 if packed else _rows_of_entry(problem, "v") or 0,
        "tiles": count,
        "batch": problem.batch,
        "heads": problem.heads_q,
        "group": problem.group,
        "section": _section(problem, chosen.section_bytes),
        "len_q": problem.total_q,
        "len_kv": problem.total_kv,
        "offset": band.offset(problem.len_q, problem.len_kv),
        "left": clip(band.left, problem),
        "right": clip(band.right, problem),
        "factor": factor,
        "far": FAR.value / factor,
        "softcap": score.softcap * LOG2E if score.softcap else None,
        "GROUPS": chosen.groups,
        "BLOCK_KV": chosen.block_kv,
        "BLOCK_DIM_QK": dim_qk,
        "BLOCK_DIM_V": dim_v,
        "STAGES": chosen.stages,
        "Q_BUFFERS": chosen.q_buffers,
        "DYNAMIC": chosen.schedule == "dynamic",
        "LONGEST_FIRST": band.right is not None,
        "PING_PONG": chosen.ping_pong,
        "LAZY": chosen.lazy,
        "PACK": chosen.pack,
        "CLIPPED": clipped,
        "TOP_LEFT": band.align == "top_left",
        "NEGATIVE": score.scale < 0,
        "POWER": 2.0 ** min(max(math.ceil(math.log2(factor)), 0), 127),  # 1 for all usual scales
        "CONSUMER_REGISTERS": chosen.consumer_registers,
        "PRODUCER_REGISTERS": chosen.producer_registers,
        "BAR_OFF": sum(_shared_bytes(chosen, dim_qk, dim_v)),
    }
    return (count * heads if chosen.schedule == "each" else min(count * heads, processors)), named


def _shared_bytes(chosen: Settings, dim_qk: int, dim_v: int) -> tuple[int, int, int]:
    """Give the bytes that the rings take in shared memory: q, k and v, and out where it cannot use q's."""
    q = chosen.groups * chosen.q_buffers * GROUP_ROWS
    kv = chosen.stages * chosen.block_kv
    return 2 * q * dim_qk, 2 * kv * (dim_qk + dim_v), 0 if dim_qk == dim_v else 2 * q * dim_v


def tensor_map(spec: Spec, rows: int, dim: int, clipped: bool) -> TensorMap:
    """Describe a matrix of q, k, v or out to the copy engine, which moves ``rows`` rows of ``dim`` columns at once.

    A clipped map can end anywhere between the rows: see `coordinates` in ``kernels/gluon/schedule.py``.
    """
    from tilewise.backends.launch import TensorMap

    shape, strides = spec.shape, spec.strides
    if len(shape) == 3:  # packed: (total, heads, dim)
        shape, strides = (1, shape[1], shape[0], shape[2]), (0, strides[1], strides[0], strides[2])
    # A stride of an axis of size 1 may be anything; here it must be whole units.
    batch, head, row = (stride if size > 1 else UNIT for size, stride in zip(shape[:3], strides[:3], strict=True))
    if not clipped:
        return TensorMap(shape, (batch, head, row, 1), (1, 1, rows, dim))
    far = 2**31 - 2**16
    sizes = (far, far, shape[1], MOST_ROWS, shape[3])
    return TensorMap(sizes, (2**34 - row, row, head, row, 1), (1, 1, 1, rows, dim))


def _out_spec(problem: Problem) -> Spec:
    """Describe out: contiguous in the user's order of axes."""
    shape = problem.out_shape
    if is_bshd(problem):
        _, (batch, row, head, dim) = contiguous((shape[0], shape[2], shape[1], shape[3]))
        return Spec(shape, (batch, head, row, dim), problem.dtype, problem.device)
    return Spec(*contiguous(shape), problem.dtype, problem.device)


def _is_clipped(problem: Problem) -> bool:
    """Say whether a sequence's keys may begin or end elsewhere than the tensor's."""
    if problem.kind == "varlen" or problem.mask.ranged:
        return True
    band, len_q, len_kv = problem.mask.band, problem.len_q, problem.len_kv
    if band.left is not None and band.right is not None and band.left + band.right < 0:
        return True
    seen = block_ranges(0, len_q, 0, len_kv, band.left, band.right, band.offset(len_q, len_kv), 1)
    return (seen[0], seen[3]) != (0, len_kv)


def _rows_of_entry(problem: Problem, label: str) -> int | None:
    """Give the rows between two batch entries of a dense tensor; None where that is no whole number."""
    spec = problem.specs[label]
    batch, row = spec.strides[0], spec.strides[2] if spec.shape[2] > 1 else UNIT
    if spec.shape[0] == 1:
        return 0
    return None if batch % row else batch // row


def _section(problem: Problem, most: int) -> int:
    """Give the number of heads, over the whole batch, whose keys and values take at most so many bytes together."""
    size = 2 * problem.len_kv * (problem.dim_qk + problem.dim_v)
    heads = problem.heads_q * entries(problem)
    return max(1, min(heads, most // size * problem.group))
