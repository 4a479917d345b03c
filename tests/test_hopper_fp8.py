"""The FP8 forward pass on Hopper: right in the emulator, whatever its copies do meanwhile; and what it compiles to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from tilewise.kernels.gluon import compat

if compat.refusal() is not None:
    pytest.skip(str(compat.refusal()), allow_module_level=True)

from gluon_emulator import emulate, tensor_map
from tilewise.backends import compile as compiling
from tilewise.backends import hopper_fp8
from tilewise.backends.launch import Mapped
from tilewise.fp8 import Quantized, quantize
from tilewise.kernels.gluon.forward_fp8 import attention_forward_fp8
from tilewise.problem.fp8 import BLOCK
from tilewise.problem.mask import Align, Band

BOTH = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


@dataclass(frozen=True)
class Call:
    """One call: lengths are those of packed sequences, or of a batch's entries, which are then alike."""

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    dim: int
    causal: bool = False
    align: Align = "bottom_right"
    scale: float | None = None
    lengths_q: tuple[int, ...] = ()
    lengths_kv: tuple[int, ...] = ()
    tail: int = 0  # rows behind the last packed sequence
    steep: float = 1.0
    sizes_of_v: tuple[float, ...] = (1.0,)  # of its blocks, in turn
    dtype: torch.dtype = torch.bfloat16

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw q, k and v; a packed call has rows first."""
        generator = torch.Generator().manual_seed(self.len_kv + self.dim)
        packed = bool(self.lengths_q)
        total_q = sum(self.lengths_q) + self.tail if packed else self.len_q
        total_kv = sum(self.lengths_kv) + self.tail if packed else self.len_kv
        lead = () if packed else (self.batch,)
        q, k, v = (
            torch.randn((*lead, heads, rows, self.dim), generator=generator)
            for heads, rows in ((self.heads_q, total_q), (self.heads_kv, total_kv), (self.heads_kv, total_kv))
        )
        rows = torch.arange(total_kv) // BLOCK % len(self.sizes_of_v)
        v *= torch.tensor(self.sizes_of_v)[rows][:, None]
        q *= self.steep
        return (q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)) if packed else (q, k, v)

    def quantized(self) -> Quantized:
        """Quantise what is drawn."""
        cu_q, cu_k = (
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) if lengths else None
            for lengths in (self.lengths_q, self.lengths_kv)
        )
        made = quantize(*self.tensors(), rotate=False, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        return replace(made, dtype=self.dtype)


class Results(NamedTuple):
    """Out and lse, rows of all heads: (heads, rows, dim) and (heads, rows), a batch's entries one after the other."""

    out: torch.Tensor
    lse: torch.Tensor


CONSTANTS = {param.name for param in compiling.compiled_kernel(attention_forward_fp8).params if param.is_constexpr}


def run(
    call: Call,
    chosen: hopper_fp8.Settings | None = None,
    *,
    late: bool = False,
    seed: int = 0,
    processors: int = 3,
    given: Quantized | None = None,
) -> Results:
    """Emulate the forward pass of a call; results are NaN until they are written."""
    given = given or call.quantized()
    asked = hopper_fp8.asked_of(given, Band.of(call.causal, None, call.align), call.scale, with_lse=True, chosen=chosen)
    out, lse = torch.full(asked.q_shape, torch.nan, dtype=call.dtype), torch.full(asked.lse_shape, torch.nan)
    counter = torch.zeros(1, dtype=torch.int32) if asked.settings.schedule == "dynamic" else None
    tensors = hopper_fp8.tensors_of(given, out, lse, counter)
    programs, named = hopper_fp8.arguments(asked, tensors, processors)
    arguments = {
        name: tensor_map(x.tensor, x.map.shape, x.map.strides, box=x.map.box) if isinstance(x, Mapped) else x
        for name, x in named.items()
    }
    constants = {name: arguments.pop(name) for name in CONSTANTS}
    emulate(attention_forward_fp8, (programs,), arguments, constants, seed=seed, late=late)
    assert counter is None or counter.item() == 0, "the last ticket must leave the counter as it was"
    if call.lengths_q:
        return Results(out.transpose(0, 1), lse)
    return Results(out.flatten(0, 1), lse.flatten(0, 1))


# ---- what is right --------------------------------------------------------------------------------------------------


class Right(NamedTuple):
    """Results in float64 from the quantised numbers, and by what rounding p may change out."""

    out: torch.Tensor
    lse: torch.Tensor
    most: torch.Tensor  # the error of each number of out
    square: torch.Tensor  # and the mean square of it, roundings being independent


def attend(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, v_scale: torch.Tensor) -> Right:
    """Compute attention of one entry or sequence: q, k, v (heads, rows, dim), with v_scale (heads, rows)."""
    group = call.heads_q // call.heads_kv
    k, v, v_scale = (x.repeat_interleave(group, 0) for x in (k, v, v_scale))
    score = q @ k.mT * (call.dim**-0.5 if call.scale is None else call.scale)
    if call.causal:
        offset = k.shape[1] - q.shape[1] if call.align == "bottom_right" else 0
        score = score.masked_fill(torch.ones(score.shape[1:], dtype=torch.bool).triu(offset + 1), -torch.inf)
    lse = torch.logsumexp(score, -1)
    p = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    # A normal e4m3 is off by 2**-4 of itself at most, a subnormal by 2**-10. The largest p of a row, in the units of
    # v's scales, is at least 2**4: lazily, four powers of two below the top.
    largest = (p * v_scale[:, None]).amax(-1, keepdim=True) if p.shape[-1] else p.new_zeros((*p.shape[:2], 1))
    normal, subnormal, v8 = 2.0**-4 * p, 2.0**-14 * largest * (p > 0), v / v_scale[..., None]
    most = normal @ v.abs() + subnormal @ v8.abs()
    return Right(p @ v, lse, most, (normal**2 @ v**2 + subnormal**2 @ v8**2) / 3)


def right_answer(call: Call, given: Quantized) -> Right:
    """Compute a call's attention from its quantised numbers, in float64."""
    q, k, v = (x.double() for x in given.dequantize())
    v_scale = given.v_scale.double().repeat_interleave(BLOCK, -1)
    if not call.lengths_q:
        entries = zip(q, k, v, v_scale[..., : call.len_kv], strict=True)
        return Right(*map(torch.cat, zip(*(attend(call, *each) for each in entries), strict=True)))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    parts = []
    ends = zip(*([0, *accumulate(lengths)] for lengths in (call.lengths_q, call.lengths_kv)), strict=True)
    for s, ((q0, k0), (q1, k1)) in enumerate(pairwise(ends)):
        first = (k0 // BLOCK + s) * BLOCK
        parts.append(attend(call, q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], v_scale[:, first : first + k1 - k0]))
    return Right(*(torch.cat(each, 1) for each in zip(*parts, strict=True)))


def check(got: Results, call: Call, given: Quantized | None = None) -> None:
    """Hold results to what rounding p to e4m3 may do, number by number and on the mean, and out's own rounding."""
    right = right_answer(call, given or call.quantized())
    rows = right.out.shape[1]
    out, lse = got.out.double(), got.lse.double()
    assert not torch.isnan(out).any()
    if call.tail:
        assert (out[:, rows:] == 0).all()
        assert (lse[:, rows:] == -torch.inf).all()
    last = right.out.abs() * (2.0**-8 if call.dtype == torch.bfloat16 else 2.0**-11)
    wrong = (out[:, :rows] - right.out).abs()
    assert (wrong <= right.most + last + 1e-5 * right.out.abs().amax()).all()
    assert (wrong**2).mean() <= (right.square + last**2 / 3).mean() * 1.02
    empty = right.lse == -torch.inf
    assert ((lse[:, :rows] == -torch.inf) == empty).all()
    assert ((lse[:, :rows] - right.lse)[~empty].abs() <= 1e-5 * right.lse[~empty].abs().clamp(min=1.0)).all()


CALLS = {
    "d=64": Call(1, 2, 1, 300, 450, 64),
    "d=64 causal": Call(2, 1, 1, 300, 300, 64, causal=True),
    "d=128": Call(1, 2, 1, 200, 300, 128),
    "d=128 causal, grouped heads": Call(1, 4, 2, 270, 400, 128, causal=True),
    "d=256": Call(1, 1, 1, 150, 300, 256),
    "d=256 causal, float16": Call(1, 2, 1, 200, 200, 256, causal=True, dtype=torch.float16),
    "one row, one key": Call(1, 1, 1, 1, 1, 64),
    "more queries than keys": Call(1, 1, 1, 300, 130, 64, causal=True),
    "top left": Call(1, 1, 1, 140, 300, 64, causal=True, align="top_left"),
    "negative scale": Call(1, 1, 1, 100, 200, 64, scale=-0.3),
    "steep": Call(1, 1, 1, 130, 700, 64, steep=6.0),
    "blocks of v of all sizes": Call(1, 1, 1, 200, 900, 64, sizes_of_v=(1.0, 100.0, 1e-3, 0.0, 3.0)),
    "packed": Call(
        3, 2, 1, 0, 0, 64, causal=True, lengths_q=(140, 0, 200, 1), lengths_kv=(140, 9, 157, 130), tail=70
    ),
    "packed, d=128": Call(2, 2, 2, 0, 0, 128, lengths_q=(100, 30, 60), lengths_kv=(300, 0, 129)),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", CALLS)
def test_out_is_off_by_the_rounding_of_p_alone(name: str, late: bool) -> None:
    call = CALLS[name]
    check(run(call, late=late, seed=len(name)), call)
