"""A kernel of one tile for each batch and head, in which tests apply scores and masks that users write."""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tilewise.kernels.share import share
from tilewise.mods.source import function_from

if TYPE_CHECKING:
    import torch


@triton.jit
def one_tile(
    score_ptr, d_score_ptr, visible_ptr, out_ptr, seen_ptr, d_in_ptr, heads, len_q, len_kv,
    tensors, constants, d_tensors, mask_tensors, mask_constants,
    SCORE: tl.constexpr, GRADIENT: tl.constexpr, MASK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Apply a score_mod and its gradient, or a mask_mod, to a tile. What lies outside the lengths is NaN."""
    batch = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    if TRANSPOSED:
        q_pos = tl.arange(0, BLOCK_Q)[None, :]
        kv_pos = tl.arange(0, BLOCK_KV)[:, None]
    else:
        q_pos = tl.arange(0, BLOCK_Q)[:, None]
        kv_pos = tl.arange(0, BLOCK_KV)[None, :]
    at = (tl.program_id(0) * len_q + q_pos) * len_kv + kv_pos
    inside = (q_pos < len_q) & (kv_pos < len_kv)
    if MASK is not None:
        seen = inside & MASK(batch, head, q_pos, kv_pos, mask_tensors, mask_constants)
        tl.store(seen_ptr + at, seen.to(tl.int8), mask=inside)
    if SCORE is not None:
        score = tl.load(score_ptr + at, mask=inside, other=float("nan"))
        d_score = tl.load(d_score_ptr + at, mask=inside, other=float("nan"))
        visible = tl.load(visible_ptr + at, mask=inside, other=0) != 0
        out = SCORE(score, batch, head, q_pos, kv_pos, tensors, constants)
        tl.store(out_ptr + at, out, mask=inside)
        d_in = GRADIENT(score, batch, head, q_pos, kv_pos, tensors, constants, d_score, d_tensors, visible)
        tl.store(d_in_ptr + at, d_in, mask=inside)


def described(tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[object, ...], ...]:
    return tuple((tensor, *tensor.stride(), *tensor.shape) for tensor in tensors)


@functools.cache
def device_function(source: str) -> object:
    return share(function_from(source))
