"""What counts as right in FP8: float64 attention to the same e4m3 numbers, and how far rounding may lead away from it.

Quantising is not judged here: a kernel is given `tilewise.fp8.Quantized`, and what those numbers are is exact. It may
then lose, number by number, what follows from the format alone:

- *p in e4m3.* A normal number is off by 2**-4 of itself at most, a subnormal one by 2**-10. The largest p of a row, in
  units of v's scales, is 2**8, so that of ``out = sum(p v) / sum(p)`` at most
  ``most = sum(2**-4 p |v| + 2**-18 p_max |v8|) / sum(p)`` is lost. Roundings being independent and uniform, the
  mean square is the sum of the squares of these terms over 3.
- *Sums of 8-bit products.* An instruction adds 32 products to what was summed before, and cuts each of them 13 bits
  behind the largest. In a score these are dim cuts, each uniform from 0 to a unit and with its product's sign, the unit
  being at most 2**-13 of the row's largest product or score: half a unit for each sign that is not balanced, and a
  standard deviation of ``sqrt(dim / 12)``. The first and three of the second are what a score may be off, and lse; out
  moves by twice as much of ``sum(p |v|)``. Each of the len_kv / 32 steps of the second product may cut 2**-14 of what
  has been summed so far.
- *out's own dtype*: half its eps.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.backends import quantize as blocks
from tilewise.problem.fp8 import ROUNDOFF
from tilewise.testing import Error

if TYPE_CHECKING:
    from tilewise.fp8 import Quantized
    from tilewise.problem.mask import Align

SUBNORMAL = 2.0**-18  # 2**-10 of a largest p of 2**8
CUT = 2.0**-13  # of each term of a sum of 8-bit products, by the largest
DEVIATIONS = 3  # of the cuts of a score, in a single number's budget
STEP = 32  # keys of one instruction
SUMS = 2.0**-20  # of exponents and sums in float32, relative
SPARE = 1.1  # of a mean square: it is that of a sample


class Right(NamedTuple):
    """What is right, and what may be lost: each of out, of its square in the mean, and each of lse."""

    out: torch.Tensor
    lse: torch.Tensor
    most: torch.Tensor
    square: torch.Tensor
    most_lse: torch.Tensor


def right_answer(
    quantized: Quantized, *, causal: bool = False, align: Align = "bottom_right", scale: float | None = None
) -> Right:
    """Attend in float64, untiled; in the shapes of out and lse, packed rows behind the last sequence left out."""
    q, k, v = (x.double() for x in quantized.dequantize())
    cu_q, cu_k = quantized.cu_seqlens_q, quantized.cu_seqlens_k
    rows = v.shape[2 if cu_k is None else 0]
    v_scale = blocks.per_row(quantized.v_scale.double(), rows, cu_k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    eps = torch.finfo(quantized.dtype).eps / 2
    if cu_q is None or cu_k is None:
        return _attend(q, k, v, v_scale, causal, align, scale, eps)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    parts = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        given = q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], v_scale[:, k0:k1]
        parts.append(_attend(*given, causal, align, scale, eps))
    out, lse, most, square, most_lse = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    return Right(out.transpose(0, 1), lse, most.transpose(0, 1), square.transpose(0, 1), most_lse)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    causal: bool,
    align: Align,
    scale: float,
    eps: float,
) -> Right:
    """Attend and bound: q, k, v (..., heads, rows, dim), v_scale (..., heads, rows)."""
    group = q.shape[-3] // max(k.shape[-3], 1)
    k, v = (x.repeat_interleave(group, -3) for x in (k, v))
    v_scale = v_scale.repeat_interleave(group, -2)
    len_q, len_kv = q.shape[-2], k.shape[-2]
    score = q @ k.mT * scale
    if causal:
        offset = len_kv - len_q if align == "bottom_right" else 0
        hidden = torch.ones(len_q, len_kv, dtype=torch.bool, device=q.device).triu(offset + 1)
        score = score.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(score, -1)
    p = torch.exp(score - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = p @ v
    largest = (p * v_scale[..., None, :]).amax(-1, keepdim=True) if len_kv else p.new_zeros((*p.shape[:-1], 1))
    normal, subnormal, v8 = ROUNDOFF * p, SUBNORMAL * largest * (p > 0), v / v_scale[..., None]
    (cut_most, cut_score), cut_sum = _cuts_of_scores(q * scale, k, score), -(-len_kv // STEP) * CUT / 2
    size, last = p @ v.abs(), eps * out.abs()
    most = normal @ v.abs() + subnormal @ v8.abs() + (2 * cut_most + cut_sum + SUMS) * size + last
    spread = p**2 @ v**2
    square = (ROUNDOFF**2 * spread + subnormal**2 @ v8**2 + last**2) / 3
    square += cut_score**2 * spread + cut_sum**2 * (out.abs() + 3 * spread.sqrt()) ** 2
    most_lse = cut_most[..., 0] + SUMS * lse.masked_fill(lse == -math.inf, 0.0).abs().clamp(min=1.0)
    return Right(out, lse, most, square, most_lse)


def _cuts_of_scores(q: torch.Tensor, k: torch.Tensor, score: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give what the units cut off the scores of each row, at most and as a root mean square; q is scaled."""
    if not score.shape[-1]:
        return (score.new_zeros((*score.shape[:-1], 1)),) * 2
    product = (q.abs() * k.abs().amax(-2, keepdim=True)).amax(-1, keepdim=True)
    largest = score.masked_fill(score == -math.inf, 0.0).abs().amax(-1, keepdim=True)
    unbalanced = (q.sign() @ k.sign().mT).abs().amax(-1, keepdim=True)
    unit, dim = CUT * torch.maximum(product, largest), q.shape[-1]
    return unit * (unbalanced / 2 + DEVIATIONS * math.sqrt(dim / 12)), unit * math.sqrt(dim / 3)


def measure(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    quantized: Quantized,
    *,
    causal: bool = False,
    align: Align = "bottom_right",
    scale: float | None = None,
) -> dict[str, Error]:
    """Measure a result; "out" and, where there is one, "lse".

    ``max`` is the largest share of what a number may lose, its budget 1; ``mean`` is the root mean square of the errors
    of out, and their mean for lse. Packed rows behind the last sequence must be 0, and -inf in lse.
    """
    right = right_answer(quantized, causal=causal, align=align, scale=scale)
    packed = quantized.cu_seqlens_q is not None
    rows = right.out.shape[0 if packed else -2]
    used, tail = (out[:rows], out[rows:]) if packed else (out, out[:0])
    wrong = (used.double() - right.out).abs()
    found = {"out": _error(wrong, right.most, wrong.square().mean().sqrt(), (SPARE * right.square.mean()).sqrt())}
    whole = bool(torch.isfinite(used).all()) and not bool(tail.any())
    if lse is not None:
        seen = right.lse > -math.inf
        away = (lse[..., :rows].double() - right.lse).abs()[seen]
        bound = right.most_lse[seen]
        found["lse"] = _error(away, bound, away.mean(), bound.mean() / DEVIATIONS)
        whole = whole and torch.equal(lse[..., :rows] > -math.inf, seen) and bool((lse[..., rows:] == -math.inf).all())
    broken = Error(math.inf, math.inf, 1.0, 0.0)
    return found if whole else dict.fromkeys(found, broken)


def _error(wrong: torch.Tensor, bound: torch.Tensor, mean: torch.Tensor, mean_budget: torch.Tensor) -> Error:
    if not wrong.numel():
        return Error(0.0, 0.0, 1.0, 0.0)
    share = torch.where(wrong == 0, 0.0, wrong / bound.clamp(min=torch.finfo(torch.float64).tiny))
    return Error(share.max().item(), mean.item(), 1.0, mean_budget.item())
