"""The forward pass in FP8 for NVIDIA GPUs of compute capability 9.0 (H100, H200).

This file says what the kernel can do, chooses settings, allocates results and describes the tensors to the copy engine;
what is computed stands in ``kernels/gluon/forward_fp8.py``, and what is quantised how in ``problem/fp8.py``.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from tilewise.backends import hopper
from tilewise.backends.counters import zeros
from tilewise.backends.extents import contiguous
from tilewise.machine.detect import detect
from tilewise.problem.fp8 import BLOCK, DIMS
from tilewise.problem.mask import Align, Band
from tilewise.problem.problem import Problem, Spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tilewise.backends.launch import Argument, Prepared, TensorMap
    from tilewise.fp8 import Quantized

name = "hopper_fp8"

GROUP_ROWS = hopper.GROUP_ROWS
UNIT = 16  # elements in the 16 bytes that the copy engine counts in


# ---- what is served -------------------------------------------------------------------------------------------------


def why_not(problem: Problem) -> str | None:
    """Say why the kernel cannot serve the quantised form of a problem, or None."""
    return _why_not_here(problem) or why_not_asked(problem)


def _why_not_here(problem: Problem) -> str | None:
    from tilewise.kernels.gluon.compat import refusal

    capability = detect(problem.device).capability if problem.device_type == "cuda" else None
    if capability != (9, 0):
        return f"runs on NVIDIA GPUs of compute capability 9.0; got {capability or problem.device_type}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Gluon has no interpreter"
    return refusal()


def why_not_asked(problem: Problem) -> str | None:
    """Say what the problem asks that the kernel cannot do on any device, or None."""
    if problem.kind == "cache":
        return "has no cache form"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"gives out in float16 or bfloat16; got {problem.dtype}"
    if problem.dim_qk != problem.dim_v or problem.dim_qk not in DIMS:
        return f"has head dims {DIMS}, one for q, k and v; got {problem.dim_qk} and {problem.dim_v}"
    if problem.mask.dense or problem.mask.ranged or problem.mask.band.left is not None:
        return "masks by causal alone: no window to the left, no ranges of keys, no dense mask"
    if problem.score.bias or problem.score.alibi or problem.score.softcap or "sink" in problem.specs:
        return "has no bias, ALiBi, softcap or sink"
    if problem.dropout:
        return "has no dropout"
    if max(problem.total_q, problem.total_kv) >= hopper.MOST_ROWS:
        return f"counts fewer than {hopper.MOST_ROWS} positions"
    return None


# ---- settings -------------------------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """How the kernel works on a problem.

    Args:
        groups: consumers, with 64 queries each: 2 or 3.
        stages: blocks of 128 keys, and of values, that the rings hold.
        q_buffers: tiles of queries in flight.
        consumer_registers, producer_registers: registers of a thread in the partitions after the first.
        ping_pong: consumers take turns at starting products.
        lazy: acc is rescaled ahead of the next product, and by warps alone in which a row_max moved.
        q_registers: q is read from registers instead of shared memory, whose rate full products come close to.
        soft_exp: of so many exponentials of a thread (2, 4, 8, 16, 32) one is computed by multiplications; 0 = none.
        schedule: programs take tiles in a fixed order ("static"), from a counter ("dynamic"), or are one for each tile.
        section_bytes: keys and values of the heads that are worked on together; the L2 cache holds 50 MB.
    """

    groups: int
    stages: int
    q_buffers: int
    consumer_registers: int
    producer_registers: int
    ping_pong: bool
    lazy: bool
    q_registers: bool
    soft_exp: int
    schedule: Literal["static", "dynamic", "each"]
    section_bytes: int = 32 << 20


_64 = Settings(3, 4, 2, 160, 32, ping_pong=True, lazy=True, q_registers=True, soft_exp=0, schedule="static")
_128 = Settings(2, 4, 2, 240, 24, ping_pong=True, lazy=True, q_registers=True, soft_exp=16, schedule="static")
_256 = Settings(2, 2, 1, 240, 24, ping_pong=False, lazy=True, q_registers=False, soft_exp=0, schedule="static")
# By head dim and causal: the fastest of what was measured on an H200 with 16,384 tokens and 2,048 columns.
TABLE: Mapping[tuple[int, bool], Settings] = {
    (64, False): _64, (64, True): _64, (128, False): _128, (128, True): _128, (256, False): _256,
    (256, True): _256._replace(soft_exp=16),
}  # fmt: skip


def settings(dim: int, *, causal: bool, varlen: bool) -> Settings:
    """Choose how to work: tiles of unequal work are shared out by a counter."""
    chosen = TABLE[dim, causal]
    return chosen._replace(schedule="dynamic") if causal or varlen else chosen


# ---- forward --------------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What a launch depends on besides where its tensors lie."""

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    sequences: int | None  # of packed ones
    slots: int  # of v's keys in a head
    q_blocks: int  # of scales in a head
    kv_blocks: int
    dtype: torch.dtype
    device: torch.device
    band: Band
    scale: float
    with_lse: bool
    settings: Settings

    @property
    def dim(self) -> int:
        """Give the head dim."""
        return self.q_shape[-1]

    @property
    def heads(self) -> tuple[int, int]:
        """Give the heads of q and those of k and v."""
        return self.q_shape[1], self.k_shape[1]

    @property
    def lengths(self) -> tuple[int, int]:
        """Give the rows of q and of k: in a batch entry, or packed."""
        axis = 2 if self.sequences is None else 0
        return self.q_shape[axis], self.k_shape[axis]

    @property
    def batch(self) -> int:
        """Give the number of batch entries or of packed sequences."""
        return self.q_shape[0] if self.sequences is None else self.sequences

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Give lse's shape."""
        return self.q_shape[:3] if self.sequences is None else (self.q_shape[1], self.q_shape[0])


def forward(
    quantized: Quantized,
    *,
    causal: bool = False,
    align: Align = "bottom_right",
    scale: float | None = None,
    return_lse: bool = False,
    chosen: Settings | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend with quantised tensors.

    Args:
        quantized: q, k and v in e4m3 with their scales; those of v are powers of two.
        causal, align, scale: as in `tilewise.attention`; no scale stands for ``1 / sqrt(dim)``.
        return_lse: also give the logarithm of each row's sum.
        chosen: how to work; none stands for the table's settings.

    Returns:
        out, shaped as q in ``quantized.dtype``, and lse in float32, (batch, heads_q, len_q) or (heads_q, total_q).
    """
    return _forward(asked_of(quantized, Band.of(causal, None, align), scale, return_lse, chosen))(quantized)


def asked_of(
    quantized: Quantized, band: Band, scale: float | None, with_lse: bool, chosen: Settings | None = None
) -> Asked:
    """Describe a call; no scale and no settings stand for the usual ones."""
    q, cu = quantized.q8, quantized.cu_seqlens_q
    dim = q.shape[-1]
    return Asked(
        tuple(q.shape), tuple(quantized.k8.shape), None if cu is None else cu.numel() - 1, quantized.v8.shape[-1],
        quantized.q_scale.shape[-1], quantized.k_scale.shape[-1], quantized.dtype, q.device,
        band, dim**-0.5 if scale is None else scale, with_lse,
        chosen or settings(dim, causal=band.right is not None, varlen=cu is not None),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _forward(asked: Asked) -> Forward:
    return Forward(asked)


class Forward:
    """The forward pass of one kind of call: the first one settles its launch, others write addresses into that."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._launch: Prepared | None = None

    def __call__(self, quantized: Quantized) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute out and lse, or None for it."""
        asked = self._asked
        out = torch.empty(asked.q_shape, dtype=asked.dtype, device=asked.device)
        lse = torch.empty(asked.lse_shape, dtype=torch.float32, device=asked.device) if asked.with_lse else None
        if 0 in asked.q_shape or 0 in asked.k_shape:
            return out.zero_(), None if lse is None else lse.fill_(-torch.inf)
        counter = zeros(asked.device) if asked.settings.schedule == "dynamic" else None
        given = tensors_of(quantized, out, lse, counter)
        launch = self._launch or self._settle(given)
        launch(list(given.values()))
        return out, lse

    def _settle(self, given: Mapping[str, torch.Tensor]) -> Prepared:
        from tilewise.backends.launch import prepare_named
        from tilewise.kernels.gluon.forward_fp8 import attention_forward_fp8

        programs, named = arguments(self._asked, given, detect(str(self._asked.device)).sms or 1)
        self._launch = prepare_named(attention_forward_fp8, (programs,), named, list(given))
        if self._launch is None:
            raise RuntimeError("launches go to Triton here, which kernels with tensor maps cannot")
        return self._launch


def tensors_of(
    quantized: Quantized, out: torch.Tensor, lse: torch.Tensor | None, counter: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Name a call's tensors as the kernel does, those that it takes through maps last."""
    given = {
        "q_scale_ptr": quantized.q_scale,
        "k_scale_ptr": quantized.k_scale,
        "v_scale_ptr": quantized.v_scale,
        "lse_ptr": lse,
        "counter_ptr": counter,
        "cu_q_ptr": quantized.cu_seqlens_q,
        "cu_k_ptr": quantized.cu_seqlens_k,
        "out_map": out,
        "q_map": quantized.q8,
        "k_map": quantized.k8,
        "v_map": quantized.v8,
    }
    return {name: x for name, x in given.items() if x is not None}


# ---- arguments ------------------------------------------------------------------------------------------------------


def arguments(asked: Asked, tensors: Mapping[str, torch.Tensor], processors: int) -> tuple[int, dict[str, Argument]]:
    """Lay out the kernel's arguments and constants; give the number of programs with them.

    ``tensors`` holds what the call has, by the kernel's names; what is absent is None to the kernel, and costs nothing.
    """
    from tilewise.backends.launch import Mapped

    chosen, band, packed = asked.settings, asked.band, asked.sequences is not None
    heads_q, heads_kv = asked.heads
    len_q, len_kv = asked.lengths
    block_q = chosen.groups * GROUP_ROWS
    tiles = -(-len_q // block_q) + (asked.batch if packed else 0)
    group, all_heads = heads_q // heads_kv, heads_q * (1 if packed else asked.batch)
    out = Spec(*contiguous(asked.q_shape), str(asked.dtype), str(asked.device))
    maps = {
        "q_map": _rows_map(asked.q_shape, GROUP_ROWS),
        "k_map": _rows_map(asked.k_shape, BLOCK),
        "v_map": _columns_map(1 if packed else asked.batch, heads_kv, asked.dim, asked.slots),
        "out_map": hopper.tensor_map(out, GROUP_ROWS, asked.dim, packed),
    }
    named: dict[str, Argument] = {
        **dict.fromkeys(("lse_ptr", "counter_ptr", "cu_q_ptr", "cu_k_ptr")),
        **tensors,
        **{label: Mapped(tensors[label], how) for label, how in maps.items()},
        "q_blocks": asked.q_blocks,
        "kv_blocks": asked.kv_blocks,
        "tiles": tiles,
        "batch": asked.batch,
        "heads": heads_q,
        "group": group,
        "section": max(1, min(all_heads, chosen.section_bytes // (2 * len_kv * asked.dim) * group)),
        "len_q": len_q,
        "len_kv": len_kv,
        "offset": band.offset(len_q, len_kv),
        "right": band.right,
        "scale": max(abs(asked.scale), 1e-30),
        "GROUPS": chosen.groups,
        "BLOCK_DIM": asked.dim,
        "STAGES": chosen.stages,
        "Q_BUFFERS": chosen.q_buffers,
        "DYNAMIC": chosen.schedule == "dynamic",
        "PING_PONG": chosen.ping_pong,
        "LAZY": chosen.lazy,
        "Q_REGISTERS": chosen.q_registers,
        "SOFT_EXP": chosen.soft_exp,
        "TOP_LEFT": band.align == "top_left",
        "NEGATIVE": asked.scale < 0,
        "CONSUMER_REGISTERS": chosen.consumer_registers,
        "PRODUCER_REGISTERS": chosen.producer_registers,
        "BAR_OFF": shared_bytes(chosen, asked.dim),
    }
    count = tiles * all_heads
    return (count if chosen.schedule == "each" else min(count, processors)), named


def shared_bytes(chosen: Settings, dim: int) -> int:
    """Give the bytes that the rings take in shared memory: q, k and v, and out, whose elements take two each."""
    q = chosen.groups * chosen.q_buffers * GROUP_ROWS
    kv = chosen.stages * BLOCK
    return dim * (q + 2 * kv + 2 * chosen.groups * GROUP_ROWS)


def _rows_map(shape: tuple[int, ...], rows: int) -> TensorMap:
    """Describe q or k to the copy engine: axes (batch, head, row, dim), of which it moves ``rows`` rows at once."""
    from tilewise.backends.launch import TensorMap

    _, strides = contiguous(shape)
    if len(shape) == 3:  # packed: (total, heads, dim)
        shape, strides = (1, shape[1], shape[0], shape[2]), (UNIT, strides[1], strides[0], 1)
    return TensorMap(shape, strides, (1, 1, rows, shape[-1]))


def _columns_map(batch: int, heads: int, dim: int, slots: int) -> TensorMap:
    """Describe v, which lies transposed: axes (batch, head, dim, slot of a key)."""
    from tilewise.backends.launch import TensorMap

    return TensorMap(*contiguous((batch, heads, dim, slots)), (1, 1, dim, BLOCK))
