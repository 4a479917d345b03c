"""The front door of decoding: attention to a cache that new keys and values are appended to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch

from tilewise import autograd
from tilewise.arguments import Window, check_rank, check_tensors, lengths_tensor, sides
from tilewise.problem.cache import CacheOptions, CacheTensors
from tilewise.problem.problem import fail
from tilewise.recall import recall

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tilewise.arguments import CacheArguments
    from tilewise.problem.mask import Align
    from tilewise.problem.problem import Layout


@overload
def attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[CacheArguments],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[CacheArguments],
) -> torch.Tensor: ...
def attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    causal: bool = True,
    window: Window | None = None,
    align: Align = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode: attend from a few new queries to a cache of keys and values, after appending new ones in place.

    Sequence b holds ``cache_seqlens[b]`` tokens. New k and v are written behind them, and the queries see what is
    then there, the diagonal's offset coming from each sequence's own length. For inference: no gradient.

    Args:
        q: (batch, len_q, heads_q, dim_qk).
        k_cache, v_cache: (batch, capacity, heads_kv, dim), or (pages, page_size, heads_kv, dim) with a block_table; q's
            dtype, or fp8 or int8 with scales.
        k, v: (batch, len_new, heads_kv, dim), appended first; need cache_seqlens.
        cache_seqlens: (batch,) integers, a list, or one int: the tokens held before the call; None = the whole
            capacity. More than fits is a ValueError where the host can tell; on a device, what does not fit is dropped.
        block_table: (batch, max_pages) integers, the pages of each sequence in order; any page size.
        cache_batch_idx: (batch,) integers, the cache's row of each sequence; not with a block_table.
        cache_leftpad: (batch,) integers, slots at the front of each sequence that hold nothing.
        k_scale, v_scale: (heads_kv,), value = stored * scale; with fp8 and int8 caches.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2); rotate k at its slots, and q at the same ones when causal
            or windowed, else all of q at ``cache_seqlens``. They go with k and v.
        rotary_interleaved: pairs (0, 1), (2, 3), ... when True, else (0, half), (1, half + 1), ...
        num_splits: parts that the keys are split into; None or 0 = chosen. The result is the same to rounding.
        batch_invariant: a row's bits do not depend on the rest of the batch.
        layout: of q, k, v, out and unpaged caches: "bshd", or "bhsd" for (batch, heads, len, dim).
        causal, window, align, scale, softcap, alibi_slopes, sink, return_lse, backend: as in `attention`.

    Returns:
        out (batch, len_q, heads_q, dim_v); with return_lse also lse (batch, heads_q, len_q).

    Raises:
        ValueError: bad shapes or values, before anything is written.
        TypeError: wrong dtypes, or an input that requires a gradient.

    >>> import torch, tilewise
    >>> k_cache, v_cache = torch.zeros(1, 128, 2, 64), torch.zeros(1, 128, 2, 64)
    >>> q, k, v = torch.randn(1, 1, 4, 64), torch.randn(1, 1, 2, 64), torch.randn(1, 1, 2, 64)
    >>> out = tilewise.attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=0)
    >>> torch.equal(k_cache[:, :1], k), bool((out[0, 0, 0] - v[0, 0, 0]).abs().max() < 1e-6)
    (True, True)
    """
    given = (
        q, k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx, cache_leftpad, k_scale, v_scale,
        rotary_cos, rotary_sin, sink, alibi_slopes,
    )  # fmt: skip
    wanted = (
        "cache", rotary_interleaved, num_splits, batch_invariant, causal, window, align, scale, softcap, return_lse,
        layout, backend,
    )  # fmt: skip
    like, results = recall(given, wanted)
    if results is not None:
        return results if return_lse else results[0]  # type: ignore[return-value]  # an lse that was asked for
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, sink=sink, alibi_slopes=alibi_slopes)
    check_tensors(block_table=block_table, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    check_tensors(k_scale=k_scale, v_scale=v_scale, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if layout == "bhsd":
        new = {name: x for name, x in (("k", k), ("v", v)) if x is not None}
        check_rank(4, q=q, k_cache=k_cache, v_cache=v_cache, **new)
        q = q.transpose(1, 2)
        k, v = (None if x is None else x.transpose(1, 2) for x in (k, v))
        if block_table is None:
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    elif layout != "bshd":
        raise fail('layout must be "bhsd" or "bshd"', repr(layout), "Name the order of q's axes")
    left, right = sides(window)
    tensors = CacheTensors(q, k_cache, v_cache, k, v, lengths_tensor(cache_seqlens, q), *given[6:])
    options = CacheOptions(
        rotary_interleaved, num_splits, batch_invariant, causal, left, right, align, scale, softcap or 0.0, return_lse,
        layout, backend,
    )  # fmt: skip
    length = cache_seqlens if isinstance(cache_seqlens, (int, torch.SymInt)) else None
    out, lse = autograd.call_cache(tensors, options, length, like)
    out = out.transpose(1, 2) if layout == "bhsd" else out
    return (out, lse) if return_lse else out  # type: ignore[return-value]  # as above
