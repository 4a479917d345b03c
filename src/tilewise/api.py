"""The front door: normalises arguments, draws dropout's seed, calls the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch

from tilewise import autograd, autograd_softmax, dispatch
from tilewise.api_cache import attention_with_kvcache
from tilewise.arguments import (
    Asked,
    Window,
    autocast,
    check_rank,
    check_tensors,
    integers_tensor,
    merge_parts,
    seed_tensor,
    sides,
)
from tilewise.backends import torch_ops
from tilewise.dispatch import use_backend
from tilewise.problem.problem import Options, Tensors, fail, mismatch
from tilewise.recall import OutAndPerhapsLse, recall

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tilewise.arguments import DenseOptions, Function, VarlenOptions
    from tilewise.backends.block_lists import Blocks
    from tilewise.problem.mask import Align
    from tilewise.problem.problem import Layout

__all__ = ["attention", "attention_varlen", "attention_with_kvcache", "explain", "merge", "softmax", "use_backend"]


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True], **options: Unpack[DenseOptions]
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[DenseOptions],
) -> torch.Tensor: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    align: Align = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    kv_start: torch.Tensor | Sequence[int] | None = None,
    kv_stop: torch.Tensor | Sequence[int] | None = None,
    sink: torch.Tensor | None = None,
    score_mod: Function | None = None,
    score_tensors: Sequence[torch.Tensor] = (),
    mask_mod: Function | None = None,
    mask_tensors: Sequence[torch.Tensor] = (),
    blocks: Blocks | None = None,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    layout: Layout = "bhsd",
    fp8: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute exact attention, ``softmax(scale * q @ k.T + ...) @ v``, in tiles, never storing the score matrix.

    A visible score is ``cap(scale * dot(q, k)) + bias - alibi_slope * |q_pos + offset - kv_pos|``, where
    ``cap(x) = softcap * tanh(x / softcap)``. Query i sees key j when ``kv_start <= j < kv_stop``, when the window and
    ``causal`` leave it in the band ``i + offset - left <= j <= i + offset + right``, and when ``mask`` is True there.
    A row that sees no key has out 0, lse -inf and zero gradients.
    Source: Dao et al., arXiv:2205.14135 and arXiv:2307.08691.

    Args:
        q: (batch, heads_q, len_q, dim_qk); float16, bfloat16, float32 or float64.
        k: (batch, heads_kv, len_kv, dim_qk); heads_q must be a multiple of heads_kv.
        v: (batch, heads_kv, len_kv, dim_v); dim_v may differ from dim_qk.
        causal: hide keys behind the diagonal (right = 0).
        window: (left, right), inclusive counts of keys to each side of the diagonal; None or -1 leaves a side open.
        align: where the diagonal lies when len_q != len_kv: "bottom_right" (offset = len_kv - len_q) puts the last
            query beside the last key, "top_left" (offset = 0) the first beside the first.
        scale: None = dim_qk ** -0.5; any sign.
        softcap: None or 0.0 = none.
        alibi_slopes: (heads_q,) or (batch, heads_q); get no gradient.
        bias: broadcasts to (batch, heads_q, len_q, len_kv), added to the scores; differentiable.
        mask: bool, broadcasts to (batch, heads_q, len_q, len_kv), True = visible.
        kv_start, kv_stop: (batch,) integers, each sequence's visible keys, half open; None = 0 and len_kv.
        sink: (heads_q,) or (batch, heads_q), one more natural-log score in each row's sum; differentiable.
        score_mod: ``score_mod(score, batch, head, q_pos, kv_pos, *score_tensors)`` gives a visible pair's new score, in
            natural-log units, after all of the above. Gradients reach its tensors, also those of its closure.
        mask_mod: ``mask_mod(batch, head, q_pos, kv_pos, *mask_tensors)``, True = visible, if all else leaves it so.
            What it alone hides must be finite; whatever else hides a key, the key may hold anything.
        blocks: lists of the tiles that a mask_mod leaves to visit, in place of mask_mod.
        dropout: probability of dropping an element of the softmax, in [0, 1).
        seed: int or one-element int64 tensor; None draws one from torch's generator.
        deterministic: gradients bitwise equal over runs.
        return_lse: also return lse.
        layout: "bhsd", or "bshd" for q, k, v and out as (batch, len, heads, dim); no copy is made.
        fp8: quantise q, k and v first, then multiply 8-bit numbers (see `tilewise.fp8`): rounded, for inference, with
            causal, align, scale and return_lse alone.
        backend: a backend's name; None takes the first that serves the call.

    Returns:
        out (batch, heads_q, len_q, dim_v) in q's dtype; with return_lse also lse (batch, heads_q, len_q), the natural
        log of each row's sum of exponentials, float32 (float64 beside float64), differentiable.

    Raises:
        ValueError, TypeError: bad input, before anything is launched.

    >>> import torch, tilewise
    >>> q, k, v = (torch.randn(1, 4, 100, 64) for _ in range(3))
    >>> out = tilewise.attention(q, k, v, causal=True)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> out.shape, bool((out - expected).abs().max() < 1e-5)
    (torch.Size([1, 4, 100, 64]), True)
    >>> distance = torch.tensor([0.5, 0.25, 0.125, 0.0625])  # of each head, as ALiBi has it
    >>> nearer = lambda score, batch, head, q_pos, kv_pos: score - distance[head] * abs(q_pos - kv_pos)
    >>> past = lambda batch, head, q_pos, kv_pos: q_pos >= kv_pos
    >>> out = tilewise.attention(q, k, v, score_mod=nearer, mask_mod=past)
    >>> bool((out - tilewise.attention(q, k, v, causal=True, alibi_slopes=distance)).abs().max() < 1e-5)
    True
    """
    given = (q, k, v, bias, mask, sink, alibi_slopes, kv_start, kv_stop, None, None, None, seed)
    wanted = ("dense", causal, window, align, scale, softcap, dropout, deterministic, return_lse, layout, backend)
    asked = None
    if score_mod is not None or mask_mod is not None or blocks is not None or score_tensors or mask_tensors:
        asked = Asked(score_mod, score_tensors, mask_mod, mask_tensors, blocks)
    like, results = recall(given, wanted) if asked is None and not fp8 else (None, None)
    if results is not None:
        return results if return_lse else results[0]  # type: ignore[return-value]  # an lse that was asked for
    check_tensors(q=q, k=k, v=v, bias=bias, mask=mask, sink=sink, alibi_slopes=alibi_slopes)
    left, right = sides(window)
    options = Options(
        causal, left, right, align, scale, softcap or 0.0, dropout, deterministic, return_lse, layout, backend=backend
    )
    q, k, v = autocast(q, k, v)
    if layout == "bshd":
        check_rank(4, q=q, k=k, v=v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    tensors = Tensors(
        q=q,
        k=k,
        v=v,
        bias=bias,
        mask=mask,
        sink=sink,
        alibi_slopes=alibi_slopes,
        kv_start=integers_tensor("kv_start", kv_start, q),
        kv_stop=integers_tensor("kv_stop", kv_stop, q),
        seed=seed_tensor(seed, dropout, q),
    )
    out, lse = _call(tensors, options, like if tensors.seed is seed else None, asked, fp8)
    out = out.transpose(1, 2) if layout == "bshd" else out
    return (out, lse) if return_lse else out  # type: ignore[return-value]  # as above


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
) -> torch.Tensor: ...
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int | torch.Tensor | None = None,
    max_seqlen_k: int | torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    align: Align = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    score_mod: Function | None = None,
    score_tensors: Sequence[torch.Tensor] = (),
    mask_mod: Function | None = None,
    mask_tensors: Sequence[torch.Tensor] = (),
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    fp8: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention within each of several sequences packed end to end; see `attention` for the formula.

    Sequence s has queries ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1]`` and keys ``cu_seqlens_k[s]`` to
    ``cu_seqlens_k[s + 1]``; either may be empty. Tokens after the last sequence get out 0 and zero gradients. The
    diagonal's offset comes from each sequence's own lengths.

    Args:
        q: (total_q, heads_q, dim_qk).
        k: (total_k, heads_kv, dim_qk), or (pages, page_size, heads_kv, dim_qk) with a block_table.
        v: as k, with dim_v.
        cu_seqlens_q: (batch + 1,) int32 or int64, cumulative lengths from 0.
        cu_seqlens_k: the same for keys; None = cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: a hint at the longest sequence; never trusted, tensors are not read.
        block_table: (batch, max_pages) int32 or int64, the pages of each sequence in order; pages get no gradient.
        bias: (heads_q or 1, total_q, max_seqlen_k), its last axis counting keys within a sequence.
        sink, alibi_slopes: (heads_q,) or (batch, heads_q).
        causal, window, align, scale, softcap, dropout, seed, deterministic, return_lse, fp8, backend: see `attention`.
        score_mod, score_tensors, mask_mod, mask_tensors: as in `attention`; batch is the number of a sequence, and
            positions count within it.

    Returns:
        out (total_q, heads_q, dim_v); with return_lse also lse (heads_q, total_q).

    Raises:
        ValueError, TypeError: bad input, before anything is launched.

    >>> import torch, tilewise
    >>> q = torch.randn(10, 4, 64)  # two documents of 3 and 7 tokens
    >>> out = tilewise.attention_varlen(q, q, q, torch.tensor([0, 3, 10]), causal=True)
    >>> first = tilewise.attention(*(x[None, :3] for x in (q, q, q)), causal=True, layout="bshd")
    >>> bool((out[:3] - first[0]).abs().max() < 1e-5)
    True
    """
    given = (
        q, k, v, bias, None, sink, alibi_slopes, None, None, cu_seqlens_q, cu_seqlens_k, block_table, seed,
    )  # fmt: skip
    max_seqlen_q = None if isinstance(max_seqlen_q, torch.Tensor) else max_seqlen_q
    max_seqlen_k = None if isinstance(max_seqlen_k, torch.Tensor) else max_seqlen_k
    wanted = (
        "packed", causal, window, align, scale, softcap, dropout, deterministic, return_lse, max_seqlen_q, max_seqlen_k,
        backend,
    )  # fmt: skip
    asked = None
    if score_mod is not None or mask_mod is not None or score_tensors or mask_tensors:
        asked = Asked(score_mod, score_tensors, mask_mod, mask_tensors)
    like, results = recall(given, wanted) if asked is None and not fp8 else (None, None)
    if results is not None:
        return results if return_lse else results[0]  # type: ignore[return-value]  # an lse that was asked for
    check_tensors(q=q, k=k, v=v, bias=bias, sink=sink, alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q)
    check_tensors(cu_seqlens_k=cu_seqlens_k, block_table=block_table)
    left, right = sides(window)
    options = Options(
        causal, left, right, align, scale, softcap or 0.0, dropout, deterministic, return_lse, "bhsd",
        max_seqlen_q, max_seqlen_k, backend,
    )  # fmt: skip
    q, k, v = autocast(q, k, v)
    tensors = Tensors(
        q=q,
        k=k,
        v=v,
        bias=bias,
        sink=sink,
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        block_table=block_table,
        seed=seed_tensor(seed, dropout, q),
    )
    out, lse = _call(tensors, options, like if tensors.seed is seed else None, asked, fp8)
    return (out, lse) if return_lse else out  # type: ignore[return-value]  # as above


def _call(tensors: Tensors, options: Options, like: object, asked: Asked | None, fp8: bool) -> OutAndPerhapsLse:
    if fp8:
        from tilewise.fp8 import attend

        return attend(tensors, options, modified=asked is not None)
    if asked is None:
        return autograd.call(tensors, options, like)
    from tilewise import autograd_mods

    return autograd_mods.call(tensors, options, asked)


def merge(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    *,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join partial results of the same queries over disjoint sets of keys, exactly.

    ``lse = log(sum_i exp(lse_i) [+ exp(sink)])`` and ``out = sum_i exp(lse_i - lse) * out_i``: the rule by which tiles
    are joined inside a kernel, with whole results in the place of tiles. Differentiable in all of its inputs.
    Source: Dao, arXiv:2307.08691, and the Flash-Decoding note, 2023.

    Args:
        outs: any number of (batch, heads, len, dim_v) or (total, heads, dim_v), in a list or stacked along axis 0.
        lses: as many (batch, heads, len), beside packed outs (heads, total); natural log.
        sink: (heads,) or (batch, heads), added once; the parts must have been made without it.

    Returns:
        out and lse in the parts' shapes. A part with lse -inf adds nothing; where all are so, out is 0 and lse -inf.

    Raises:
        ValueError: no part, or shapes that do not go together.

    >>> import torch, tilewise
    >>> q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    >>> halves = [tilewise.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 4), slice(4, 8))]
    >>> out, _ = tilewise.merge(*zip(*halves))
    >>> bool((out - tilewise.attention(q, k, v)).abs().max() < 1e-6)
    True
    """
    return torch_ops.merge(*merge_parts(outs, lses, sink), sink)


def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Compute ``exp(x - max) / sum(exp(x - max))`` along ``dim``; a row of -inf gives zeros, never NaN.

    Sums are in float32 or better. On a GPU a kernel of tilewise computes it, where Triton is there to compile it: it
    reads and writes a row once as long as the chip holds it, and reads longer ones twice. PyTorch's operators serve
    elsewhere, inside torch.func's transforms, and where `use_backend` asks for another backend than triton_portable.

    Args:
        x: any shape and strides, floating point. dim: the axis to normalise over.

    Returns:
        A tensor like x, differentiable any number of times.

    Raises:
        TypeError: x is not a floating point tensor. IndexError: there is no such axis.

    >>> import torch, tilewise
    >>> tilewise.softmax(torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])).tolist()
    [[0.5, 0.5], [0.0, 0.0]]
    """
    check_tensors(x=x)
    if not x.is_floating_point():
        raise mismatch("softmax needs floating point numbers", x.dtype, "Convert with .float()")
    axes = max(x.ndim, 1)  # a number counts as a row of one
    if not -axes <= dim < axes:
        raise IndexError(f"dim must be from {-axes} to {axes - 1} here; got {dim}. Count the axes of {tuple(x.shape)}")
    return autograd_softmax.call(x, dim)


def explain(function: Callable[..., object], *args: object, **options: object) -> dispatch.Plan:
    """Say what a call would do, without doing it: who would serve it, why the others refuse, and what it costs.

    Args:
        function: `attention`, `attention_varlen` or `attention_with_kvcache`. args, options: its arguments.

    Returns:
        A Plan with .backend, .tiles, .refusals {name: reason}, .flops, .bytes, .memory; ``str()`` prints it.

    Raises:
        ValueError: another function. Whatever the call itself would raise.

    >>> import torch, tilewise
    >>> q = torch.randn(1, 2, 128, 64)
    >>> plan = tilewise.explain(tilewise.attention, q, q, q, window=(16, 0))
    >>> plan.backend, plan.refusals["torch_sdpa"]
    ('torch_tiled', 'has no window')
    """
    if all(function is not known for known in (attention, attention_varlen, attention_with_kvcache)):
        got = getattr(function, "__name__", function)
        raise fail(
            "explain takes attention, attention_varlen or attention_with_kvcache", got, "Pass the function itself"
        )
    token = dispatch.explaining.set(True)
    try:
        function(*args, **options)
    except dispatch.Explained as stop:
        return stop.plan
    finally:
        dispatch.explaining.reset(token)
    raise RuntimeError("the call ended before its plan was made")
