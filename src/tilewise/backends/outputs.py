"""Allocate results: one rule for every backend, and for the shapes torch.compile asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tilewise.problem.problem import Layout


def empty_out(q: torch.Tensor, dim_v: int, layout: Layout) -> torch.Tensor:
    """Allocate out for q (batch, heads, len, dim) or (total, heads, dim), contiguous in the user's axis order.

    With layout "bshd" the caller holds a transposed view of (batch, len, heads, dim), and so is the result.
    """
    shape = (*q.shape[:-1], dim_v)
    if q.ndim == 4 and layout == "bshd":
        batch, heads, length, _ = shape
        return q.new_empty((batch, length, heads, dim_v)).transpose(1, 2)
    return q.new_empty(shape)


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    """Allocate lse: (batch, heads, len), varlen (heads, total); float32, float64 beside float64 inputs."""
    shape = q.shape[:3] if q.ndim == 4 else (q.shape[1], q.shape[0])
    return q.new_empty(shape, dtype=sum_dtype(q.dtype))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the type that sums are kept in: float32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
