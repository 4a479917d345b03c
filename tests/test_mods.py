"""What holds for scores and masks that users write: their translation computes what they say, forward and backward."""
# ruff: noqa: ARG005 - scores and masks have one signature, whether or not they need all of it

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional

from tilewise import mods
from tilewise.mods.trace import trace_score
from tilewise.testing import error

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mods_tile import described, device_function, one_tile

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 before Python starts")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter leaves nothing to compile")

BATCH, HEADS, LEN_Q, LEN_KV = 2, 3, 13, 27
Function = Callable[..., object]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def integers(*shape: int, stop: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(stop, shape, generator=torch.Generator().manual_seed(stop), dtype=dtype)


class Outcome(NamedTuple):
    """What a score gives: its values, the derivative with respect to the score, and the tensors' gradients."""

    out: torch.Tensor
    d_in: torch.Tensor
    d_tensors: tuple[torch.Tensor | None, ...]


class Data(NamedTuple):
    """Scores, the gradient that arrives, and which pairs are visible: (BATCH, HEADS, LEN_Q, LEN_KV) each."""

    score: torch.Tensor
    d_score: torch.Tensor
    visible: torch.Tensor


@functools.cache
def data() -> Data:
    shape = (BATCH, HEADS, LEN_Q, LEN_KV)
    generator = torch.Generator().manual_seed(0)
    score, d_score, luck = (torch.randn(shape, generator=generator) for _ in range(3))
    return Data(score * 2, d_score, luck > -1)


def places() -> list[torch.Tensor]:
    """Every batch, head, query and key, in axes that broadcast."""
    return [torch.as_tensor(place) for place in np.ogrid[:BATCH, :HEADS, :LEN_Q, :LEN_KV]]


def in_kernel(function: Function, given: tuple[torch.Tensor, ...], transposed: bool) -> Outcome:
    traced, tensors = trace_score(function, given)
    assert traced.gradient_source is not None, traced.gradient_refusal
    score, d_score, visible = data()
    out, d_in = torch.full_like(score, torch.nan), torch.full_like(score, torch.nan)
    buffers = [
        torch.zeros(tensor.shape) if tensor.is_floating_point() and reached else None
        for tensor, reached in zip(tensors, traced.differentiable, strict=True)
    ]
    d_tensors = tuple(() if buffer is None else described((buffer,))[0] for buffer in buffers)
    one_tile[(BATCH * HEADS,)](
        score, d_score, visible.to(torch.int8), out, None, d_in, HEADS, LEN_Q, LEN_KV,
        described(tensors), traced.constants, d_tensors, (), (),
        device_function(traced.source), device_function(traced.gradient_source), None, 16, 32, transposed,
    )  # fmt: skip
    return Outcome(out, d_in, tuple(buffers))


def by_autograd(function: Function, given: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Outcome:
    """Run the user's own function on torch, in this type, and let torch differentiate it."""
    score, d_score, visible = data()
    score = score.to(dtype, copy=True).requires_grad_()
    tensors = [
        tensor.to(dtype, copy=True).requires_grad_() if tensor.is_floating_point() else tensor for tensor in given
    ]
    out = torch.as_tensor(function(score * 1, *places(), *tensors)).to(dtype).expand(score.shape)
    if out.requires_grad:
        torch.where(visible, out, 0).backward(d_score.to(dtype))
    d_in = torch.zeros_like(score) if score.grad is None else score.grad
    return Outcome(out.detach(), d_in, tuple(tensor.grad for tensor in tensors))


SLOPES = normal(HEADS)
TABLE = normal(BATCH, LEN_Q)
BY_DISTANCE = normal(HEADS, 21)
DENSE = normal(BATCH, HEADS, LEN_Q, LEN_KV)
KIND = integers(LEN_Q, LEN_KV, stop=5, dtype=torch.int64)
GROUP = integers(LEN_KV, stop=4, dtype=torch.int16)
FLAGS = integers(LEN_Q, stop=2).bool()


def integer_division(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
    distance = q_pos - kv_pos
    whole = distance // 3 + distance % 3 * 10 + distance // -4 * 100 + distance % -4 * 1000 + q_pos // 5 + kv_pos % 7
    return score + 0.01 * whole + score % 0.7


def functions_of_real_numbers(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
    size = abs(score) + 0.5
    return (
        mods.exp(-size) + mods.exp2(score) + mods.log(size) + mods.log2(size) + mods.log1p(size - 0.5) + mods.sqrt(size)
        + mods.sin(score) + mods.cos(score) + mods.tanh(score) + mods.sigmoid(score)
    )  # fmt: skip


def powers(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
    return score**2 + score**3 - abs(score) ** 1.5 + 2.0 ** (score * 0.5) + (abs(score) + 1) ** -2 + q_pos**2


def from_torch(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
    clipped = torch.clamp(score, -1.0, 1.5) + score.clamp(min=0.25) + torch.clamp_max(score, 0.75)
    smooth = (
        functional.gelu(score)
        + functional.silu(score)
        + functional.softplus(score)
        + functional.relu(score)
        + torch.erf(score)
        + torch.rsqrt(abs(score) + 1)
    )
    chosen = score.masked_fill(q_pos == kv_pos, 2.0) + torch.where(torch.logical_not(q_pos > kv_pos), score, 0.5)
    rounded = torch.ceil(score * 2) + torch.trunc(score * 3) + torch.floor(q_pos) + torch.expm1(score) + q_pos**0
    return (
        clipped
        + smooth
        + chosen
        + rounded
        + torch.sign(score) * 3
        + torch.sgn(q_pos - kv_pos)
        + torch.reciprocal(score.square() + 1)
    )


def choices(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
    early = (q_pos < 5) & (kv_pos <= 9) | ~(q_pos != kv_pos) ^ (batch == head)
    raised = mods.maximum(mods.minimum(score, 1.0), q_pos - kv_pos)
    counted = (q_pos > kv_pos) * 2.0 + (q_pos == kv_pos) + (q_pos > 3) * 2
    always = torch.ones_like(q_pos, dtype=torch.bool)
    raised = raised + counted + mods.where(always & ~(~always | (q_pos > kv_pos)), 1.0, 0.0)
    return mods.where(early, raised, mods.where(score > 0, -score, mods.floor(score)))


def in_place(score, batch, head, q_pos, kv_pos, table):  # type: ignore[no-untyped-def]
    score = score * 1.0
    score *= table[batch, q_pos]
    score += 1
    return score.mul_(2).neg_()


def buckets(width: int, height: float) -> Function:
    """Whole quotients, which come out one too small where 41 * (1 / 41) does."""

    def score_mod(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
        captured = torch.floor(q_pos * 41 / width) + (kv_pos * 47 / height).long()
        written = torch.floor(q_pos * 55 / 55) + (kv_pos * 61 / 61.0).int() + torch.floor(kv_pos / 8)
        float_rules = q_pos * 41.0 // width + kv_pos * 47.0 % height
        between = torch.floor((q_pos + 1) * (kv_pos + 1) / (kv_pos + 1))
        cut = torch.div(q_pos * -41.0, 41, rounding_mode="trunc")
        return score / 3 + score / (kv_pos + 1) + captured + written + float_rules + between + cut

    return score_mod


def integers_of_64_bits(score, batch, head, q_pos, kv_pos, groups):  # type: ignore[no-untyped-def]
    million = torch.tensor(1000000)
    product = million * (q_pos * kv_pos) * 9 + groups[q_pos, kv_pos] * 10**6 * (kv_pos + 1000)
    chosen = torch.where(q_pos > kv_pos, million, million) * (kv_pos * 1000)
    return score + (product + chosen) // 1000 * 1e-6


class Example(NamedTuple):
    """A score and its tensors."""

    function: Function
    tensors: tuple[torch.Tensor, ...] = ()


EXAMPLES = {
    "arithmetic": Example(lambda s, b, h, q, kv: -(s * 2 - 1) / 3 + q - kv * 0.5 + (b + 1) / (h + 2)),
    "integer division": Example(integer_division),
    "buckets of positions": Example(buckets(41, 47.0)),
    "integers of 64 bits": Example(integers_of_64_bits, (KIND,)),
    "division by zero, not chosen": Example(lambda s, b, h, q, kv: mods.where(q < 99, s, (q + 1) / 0.0)),
    "functions of real numbers": Example(functions_of_real_numbers),
    "powers": Example(powers),
    "functions of torch": Example(from_torch),
    "choices": Example(choices),
    "nothing of the score": Example(lambda s, b, h, q, kv: 0.25 * q),
    "nothing of the score but of a tensor": Example(lambda s, b, h, q, kv, t: t[b, q] * 0.5, (TABLE,)),
    "a number": Example(lambda s, b, h, q, kv: s.new_tensor(0.5)),
    "a slope for each head": Example(lambda s, b, h, q, kv, t: s * t[h] - t[h] * abs(q - kv), (SLOPES,)),
    "a number of no axis": Example(lambda s, b, h, q, kv, t: s * t, (torch.tensor(1.5),)),
    "one for each query": Example(lambda s, b, h, q, kv, t: mods.tanh(s * t[b, q]), (TABLE,)),
    "one for each key, of another type": Example(
        lambda s, b, h, q, kv, t: s + t[kv] * s, (normal(LEN_KV, dtype=torch.bfloat16).float().bfloat16(),)
    ),
    "one for each pair": Example(lambda s, b, h, q, kv, t: s + t[b, h, q, kv] * 0.5, (DENSE,)),
    "one for each distance, clamped": Example(
        lambda s, b, h, q, kv, t: s + t[h, mods.minimum(mods.maximum(q - kv, -10), 10) + 10], (BY_DISTANCE,)
    ),
    "all pairs read one number": Example(lambda s, b, h, q, kv, t: s * t[h, (q - kv) * 0 + 1], (BY_DISTANCE,)),
    "counted from the end": Example(lambda s, b, h, q, kv, t: s + t[b, -1 - q] + t[-1, 2], (TABLE,)),
    "loads that lead to loads": Example(
        lambda s, b, h, q, kv, t, kind, group, flag: (
            s * mods.where(flag[q], t[h, kind[q, kv]], t[h, group[kv].long() + 5])
        ),
        (BY_DISTANCE, KIND, GROUP, FLAGS),
    ),
    "a tensor read twice": Example(lambda s, b, h, q, kv, t: s * t[b, q] + t[b, q // 2] * t[1 - b, 3], (TABLE,)),
    "changes in place": Example(in_place, (TABLE,)),
    "a strided tensor": Example(lambda s, b, h, q, kv, t: s + t[q, b], (TABLE.T,)),
}


@pytest.mark.interpreter
@interpreted
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("transposed", [False, True], ids=["tile", "transposed"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_score_in_a_kernel_is_the_function_itself_forward_and_backward(name: str, transposed: bool) -> None:
    function, given = EXAMPLES[name]
    found = in_kernel(function, given, transposed)
    right = by_autograd(function, given, torch.float64)
    low = by_autograd(function, given, torch.float32)
    compare(found, right, low)


def compare(found: Outcome, right: Outcome, low: Outcome) -> None:
    eps = torch.finfo(torch.float32).eps
    assert error(found.out, right.out, low.out, eps).within
    assert error(found.d_in, right.d_in, low.d_in, eps).within
    for got, ref, yard in zip(found.d_tensors, right.d_tensors, low.d_tensors, strict=True):
        assert (got is None) == (ref is None)
        if got is not None and ref is not None and yard is not None:
            assert bool(ref.any())
            # A sum over many pairs, in another order.
            assert error(got, ref, yard, eps, terms=math.sqrt(LEN_Q * LEN_KV)).within


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_score_runs_on_torch_as_the_function_itself(name: str) -> None:
    function, given = EXAMPLES[name]
    traced, tensors = trace_score(function, given)

    def translated(score: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return traced.run(score, *rest[:4], rest[4:])

    assert len(tensors) == len(given)
    right = by_autograd(function, given, torch.float64)
    found = by_autograd(translated, given, torch.float64)
    eps = torch.finfo(torch.float64).eps
    assert error(found.out, right.out, right.out, eps, terms=8).within
    assert error(found.d_in, right.d_in, right.d_in, eps, terms=8).within
    for got, ref in zip(found.d_tensors, right.d_tensors, strict=True):
        if ref is not None and got is not None:
            assert error(got, ref, ref, eps, terms=8).within


def everything(score, batch, head, q_pos, kv_pos, *tensors):  # type: ignore[no-untyped-def]
    """All examples at once."""
    ahead = iter(tensors)
    parts = [
        example.function(score, batch, head, q_pos, kv_pos, *(next(ahead) for _ in example.tensors))
        for example in EXAMPLES.values()
    ]
    return sum(parts)


@pytest.mark.compile
@compiled
def test_every_example_compiles_for_a_gpu_forward_and_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    given = tuple(tensor for example in EXAMPLES.values() for tensor in example.tensors)
    traced, tensors = trace_score(everything, given)
    assert traced.gradient_source is not None, traced.gradient_refusal
    names = {
        torch.float32: "*fp32",
        torch.bfloat16: "*bf16",
        torch.int64: "*i64",
        torch.int16: "*i16",
        torch.bool: "*i1",
    }
    types = tuple((names[tensor.dtype], *(["i32"] * (2 * tensor.dim()))) for tensor in tensors)
    gradients = tuple(
        ("*fp32", *kind[1:]) if reached else () for kind, reached in zip(types, traced.differentiable, strict=True)
    )
    constants = {
        "SCORE": device_function(traced.source), "GRADIENT": device_function(traced.gradient_source), "MASK": None,
        "BLOCK_Q": 16, "BLOCK_KV": 16, "TRANSPOSED": False, "seen_ptr": None,
    }  # fmt: skip
    runtime = {
        **dict.fromkeys(("score_ptr", "d_score_ptr", "out_ptr", "d_in_ptr"), "*fp32"), "visible_ptr": "*i8",
        **dict.fromkeys(("heads", "len_q", "len_kv"), "i32"), "tensors": types, "constants": (), "d_tensors": gradients,
        "mask_tensors": (), "mask_constants": (),
    }  # fmt: skip
    signature = {name: runtime.get(name, "constexpr") for name in one_tile.arg_names}
    binary = triton.compile(ASTSource(one_tile, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert binary.asm["ptx"].count("atom.global") >= traced.differentiable.count(True)
