"""merge and softmax on torch: short formulas of differentiable operators, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilewise.backends.outputs import sum_dtype


def merge(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join partial results over disjoint keys; `tilewise.merge` gives shapes and the formula."""
    dtype = outs[0].dtype
    exact = sum_dtype(dtype)
    lse = torch.stack([part.to(exact) for part in lses])
    row_max = lse.detach().amax(0)  # any anchor gives the same result, so it needs no gradient
    extra = None
    if sink is not None:
        extra = sink.to(exact)[..., None]  # (heads, 1) or (batch, heads, 1)
        row_max = torch.maximum(row_max, extra.detach())
    anchor = torch.where(row_max == -math.inf, 0, row_max)
    weights = torch.exp(lse - anchor)
    row_sum = weights.sum(0)
    if extra is not None:
        row_sum = row_sum + torch.exp(extra - anchor)
    empty = row_sum == 0
    row_sum = torch.where(empty, 1, row_sum)
    packed = outs[0].ndim == 3  # out (total, heads, dim) beside lse (heads, total)
    out = torch.zeros_like(outs[0], dtype=exact)
    for part, weight in zip(outs, weights / row_sum, strict=True):
        weight = (weight.mT if packed else weight)[..., None]
        out = out + torch.where(weight == 0, 0, part.to(exact)) * weight
    return out.to(dtype), torch.where(empty, -math.inf, anchor + row_sum.log())


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax along dim, zeros where the whole row is -inf."""
    if 0 in x.shape:
        return torch.softmax(x, dim)
    hidden = x.detach().amax(dim, keepdim=True) == -math.inf
    return torch.softmax(x.masked_fill(hidden, 0), dim).masked_fill(hidden, 0)


def softmax_backward(p: torch.Tensor, dp: torch.Tensor, dim: int) -> torch.Tensor:
    """Give ``ds = p * (dp - sum(p * dp))`` along dim, the gradient of the scores."""
    return torch.ops.aten._softmax_backward_data(dp, p, dim, p.dtype)  # type: ignore[no-any-return]  # noqa: SLF001
