"""The functions of flash_attn 2: change the import, and code written for that package runs here.

Arguments, their order, layouts and results are those of flash_attn 2.8. What is special about them:

* tensors are (batch, len, heads, dim), or (tokens, heads, dim) with ``cu_seqlens``; packed ones have an axis of 3 or 2
  before the heads;
* causal masks and windows are aligned bottom-right: the last query stands beside the last key;
* ``window_size`` counts keys to each side, inclusive, a negative side is open;
* the lse of a row that sees no key is +inf (its out is 0), where `tilewise.attention` gives -inf;
* ``return_attn_probs`` adds lse and S_dmask, which is empty unless there is dropout.

What that package refuses is served: float32 and float64, any head dim and page size, softcap with dropout, a CPU. The
lse is differentiable. `install` makes ``import flash_attn`` itself resolve to this module.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, TypedDict

import torch

from tilewise.adapters import bert_padding
from tilewise.adapters.probabilities import signed_probabilities
from tilewise.api import attention, attention_varlen, attention_with_kvcache

if TYPE_CHECKING:
    from tilewise.adapters.probabilities import Score

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]

VERSION = "2.8.4"  # of flash_attn: the one whose functions these are

Results = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # out, or (out, softmax_lse, S_dmask)
Window = Iterable[int | torch.Tensor]

# ---- the module flash_attn ------------------------------------------------------------------------------------------


def install() -> bool:
    """Let ``import flash_attn`` give these functions, where the package itself is absent.

    ``flash_attn.flash_attn_interface`` and ``flash_attn.bert_padding`` come along; `uninstall` takes all of it back.
    Code that looks for the distribution rather than the module, as transformers does, still finds none::

        from tilewise.adapters import flash_attn

        flash_attn.install()
        from flash_attn import flash_attn_func

    Returns:
        True where ``import flash_attn`` now gives this module; False where the real package is there, and stays.
    """
    if is_installed():
        return True
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        return False
    package = ModuleType("flash_attn", __doc__)
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None, is_package=True)
    package.__path__ = []
    own = sys.modules[__name__]
    contents: dict[str, object] = {name: getattr(own, name) for name in __all__ if name.startswith("flash_attn")}
    contents |= {"__version__": VERSION, "flash_attn_interface": own, "bert_padding": bert_padding}
    for name, value in contents.items():
        setattr(package, name, value)
    sys.modules["flash_attn"] = package
    sys.modules["flash_attn.flash_attn_interface"] = own
    sys.modules["flash_attn.bert_padding"] = bert_padding
    return True


def uninstall() -> None:
    """Undo `install`; what was imported meanwhile stays what it is."""
    if is_installed():
        for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"):
            sys.modules.pop(name, None)


def is_installed() -> bool:
    """Say whether ``import flash_attn`` gives this module."""
    return sys.modules.get("flash_attn.flash_attn_interface") is sys.modules[__name__]


# ---- batches --------------------------------------------------------------------------------------------------------


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Compute attention of a batch.

    Args:
        q: (batch, len_q, heads_q, dim).
        k, v: (batch, len_kv, heads_kv, dim); heads_q must be a multiple of heads_kv.
        dropout_p: probability of dropping an element of the softmax.
        softmax_scale: None = dim ** -0.5.
        causal, window_size: query i sees keys ``i + len_kv - len_q - left`` to ``i + len_kv - len_q + right``; causal
            makes right 0, a negative side is open.
        softcap: 0.0 = none.
        alibi_slopes: (heads_q,) or (batch, heads_q); get no gradient.
        deterministic: gradients bitwise equal over runs.
        return_attn_probs: give (out, softmax_lse, S_dmask) instead of out.

    Returns:
        out (batch, len_q, heads_q, dim); softmax_lse (batch, heads_q, len_q), natural log, +inf where nothing is seen;
        S_dmask (batch, heads_q, len_q, len_kv), each row's softmax scaled to maximum 1, negative where dropped. Without
        dropout it is empty; with it, it has the size of the score matrix, and is for looking at alone.

    Raises:
        ValueError, TypeError: as `tilewise.attention`.

    >>> q, k, v = torch.randn(1, 2, 4, 16), torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 16)
    >>> out, lse, probabilities = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    >>> out.shape, lse.shape, probabilities.numel()
    (torch.Size([1, 2, 4, 16]), torch.Size([1, 4, 2]), 0)
    """
    score = _score(softmax_scale, causal, window_size, softcap, alibi_slopes)
    training = _training(dropout_p, deterministic, q)
    if not return_attn_probs:
        return attention(q, k, v, **score, **training, layout="bshd")
    out, lse = attention(q, k, v, **score, **training, layout="bshd", return_lse=True)
    seed = training["seed"]
    if seed is None:
        return out, _empty_rows_infinite(lse), q.new_empty(0)
    shown = signed_probabilities(q.transpose(1, 2), k.transpose(1, 2), dropout_p, seed, **score)
    return out, _empty_rows_infinite(lse), shown


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Compute attention of a batch, with kv (batch, len_kv, 2, heads_kv, dim); see `flash_attn_func`."""
    k, v = _unpacked(kv, 2, "kv", 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Compute attention of a batch, with qkv (batch, len, 3, heads, dim); see `flash_attn_func`."""
    q, k, v = _unpacked(qkv, 3, "qkv", 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


# ---- packed sequences -----------------------------------------------------------------------------------------------


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Results:
    """Compute attention within each of several sequences packed end to end.

    Args:
        q: (total_q, heads_q, dim).
        k, v: (total_k, heads_kv, dim), or (pages, page_size, heads_kv, dim) with a block_table.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) integers, cumulative lengths from 0.
        max_seqlen_q, max_seqlen_k: the longest sequence; a hint, and a tensor is not read.
        block_table: (batch, max_pages) integers, each sequence's pages.
        others: as in `flash_attn_func`, the diagonal lying by each sequence's own lengths.

    Returns:
        out (total_q, heads_q, dim); softmax_lse (heads_q, total_q); S_dmask (batch, heads_q, longest q, longest k) with
        dropout, where the lengths are read from the device; else empty.

    >>> q, bounds = torch.randn(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, bounds, bounds, 4, 4, causal=True).shape
    torch.Size([7, 4, 16])
    """
    score = _score(softmax_scale, causal, window_size, softcap, alibi_slopes)
    training = _training(dropout_p, deterministic, q)
    packed: _Packed = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "block_table": block_table}
    if not return_attn_probs:
        return attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **packed, **score, **training)
    out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **packed, **score, **training, return_lse=True)
    seed = training["seed"]
    if seed is None:
        return out, _empty_rows_infinite(lse), q.new_empty(0)
    if block_table is not None:
        raise ValueError("S_dmask is not given for keys in pages; got return_attn_probs=True with dropout. Pack them")
    shown = _varlen_probabilities(q, k, (cu_seqlens_q, cu_seqlens_k), dropout_p, seed, score)
    return out, _empty_rows_infinite(lse), shown


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Compute attention of packed sequences, with kv (total_k, 2, heads_kv, dim); see `flash_attn_varlen_func`."""
    k, v = _unpacked(kv, 2, "kv", 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Compute attention of packed sequences, with qkv (total, 3, heads, dim); see `flash_attn_varlen_func`."""
    q, k, v = _unpacked(qkv, 3, "qkv", 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


# ---- decoding -------------------------------------------------------------------------------------------------------


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append k and v to a cache in place, and attend from q to what it then holds. Nothing gets a gradient.

    Args:
        q: (batch, len_q, heads_q, dim).
        k_cache, v_cache: (batch, capacity, heads_kv, dim), or (pages, page_size, heads_kv, dim) with a block_table.
        k, v: (batch, len_new, heads_kv, dim), written behind what is there.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), for k at its slots, and for q at the same when causal or
            windowed, else all of q at cache_seqlens.
        cache_seqlens: int or (batch,) integers: the tokens held before the call; None = all.
        cache_batch_idx, cache_leftpad, block_table: as in `tilewise.attention_with_kvcache`.
        rotary_interleaved: pairs (0, 1), (2, 3), ... when True, else (0, half), (1, half + 1), ...
        num_splits: parts that the keys are split into; 0 = chosen.
        others: as in `flash_attn_func`.

    Returns:
        out (batch, len_q, heads_q, dim); with return_softmax_lse also lse (batch, heads_q, len_q).

    >>> cache = torch.zeros(2, 1, 8, 2, 16)  # keys and values
    >>> q, k, v = torch.randn(1, 1, 4, 16), torch.randn(1, 1, 2, 16), torch.randn(1, 1, 2, 16)
    >>> out = flash_attn_with_kvcache(q, cache[0], cache[1], k, v, cache_seqlens=3, causal=True)
    >>> torch.equal(cache[0][:, 3:4], k)
    True
    """
    with torch.no_grad():
        out, lse = attention_with_kvcache(
            q,
            k_cache,
            v_cache,
            k=k,
            v=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            block_table=block_table,
            scale=softmax_scale,
            causal=causal,
            window=_window(window_size),
            softcap=softcap,
            rotary_interleaved=rotary_interleaved,
            alibi_slopes=alibi_slopes,
            num_splits=num_splits,
            return_lse=True,
        )
    return (out, _empty_rows_infinite(lse)) if return_softmax_lse else out


# ---- translation ----------------------------------------------------------------------------------------------------


def _score(
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> Score:
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": _window(window_size),
        "softcap": softcap,
        "alibi_slopes": None if alibi_slopes is None else alibi_slopes.detach(),
    }


class _Packed(TypedDict):
    max_seqlen_q: int | torch.Tensor
    max_seqlen_k: int | torch.Tensor
    block_table: torch.Tensor | None


class _Training(TypedDict):
    dropout: float
    seed: torch.Tensor | None
    deterministic: bool


def _training(dropout_p: float, deterministic: bool, q: torch.Tensor) -> _Training:
    """Draw the seed here, so that S_dmask can show what it drops."""
    seed = torch.randint(0, 2**63 - 1, (1,), device=q.device) if dropout_p else None
    return {"dropout": dropout_p, "seed": seed, "deterministic": deterministic}


def _window(window_size: Window) -> tuple[int | None, int | None]:
    left, right = (int(side) if isinstance(side, torch.Tensor) else side for side in window_size)
    return (None if left < 0 else left), (None if right < 0 else right)


def _empty_rows_infinite(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def _unpacked(packed: torch.Tensor, parts: int, name: str, rank: int) -> tuple[torch.Tensor, ...]:
    if packed.ndim != rank or packed.shape[-3] != parts:
        axes = f"(batch, len, {parts}, heads, dim)" if rank == 5 else f"(total, {parts}, heads, dim)"
        raise ValueError(f"{name} must be {axes}; got {tuple(packed.shape)}. Stack along the axis before the heads")
    return packed.unbind(-3)


def _varlen_probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    dropout: float,
    seed: torch.Tensor,
    score: Score,
) -> torch.Tensor:
    """Show one sequence after the other: (batch, heads_q, longest q, longest k), 0 beyond a sequence's end."""
    ranges_q, ranges_k = (list(pairwise(x.tolist())) for x in bounds)
    longest_q, longest_k = (max((stop - start for start, stop in r), default=0) for r in (ranges_q, ranges_k))
    shown = q.new_zeros(len(ranges_q), q.shape[1], longest_q, longest_k)
    slopes = score["alibi_slopes"]
    for sequence, ((start_q, stop_q), (start_k, stop_k)) in enumerate(zip(ranges_q, ranges_k, strict=True)):
        own = slopes[sequence : sequence + 1] if slopes is not None and slopes.ndim == 2 else slopes
        one_q, one_k = q[None, start_q:stop_q].transpose(1, 2), k[None, start_k:stop_k].transpose(1, 2)
        one = signed_probabilities(one_q, one_k, dropout, seed, sequence, **(score | {"alibi_slopes": own}))
        shown[sequence, :, : stop_q - start_q, : stop_k - start_k] = one[0]
    return shown
