"""PyTorch's scaled_dot_product_attention: as a function of the same signature, beneath PyTorch's own, and explained.

`scaled_dot_product_attention` takes every argument of the function it is named after. `activate` puts tilewise in the
place of the flash kernel that PyTorch's own function calls on GPUs, so that models run on it unchanged, wherever
PyTorch would have chosen that kernel. `explain_sdpa` tells where that is, and why not elsewhere.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, CausalVariant

from tilewise.adapters.probabilities import signed_probabilities
from tilewise.api import attention
from tilewise.problem.problem import Options, Tensors

if TYPE_CHECKING:
    from tilewise.problem.problem import Layout

__all__ = ["SdpaPlan", "activate", "deactivate", "explain_sdpa", "scaled_dot_product_attention"]

NAME = "tilewise"

# ---- the function ---------------------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute what torch.nn.functional.scaled_dot_product_attention computes, in tiles, with every argument.

    Args:
        query: (..., heads_q, len_q, dim_qk), with two axes or more; all but the last two broadcast, as in PyTorch.
        key: (..., heads_kv, len_kv, dim_qk). value: (..., heads_kv, len_kv, dim_v).
        attn_mask: broadcasts to (..., heads_q, len_q, len_kv); bool, True = visible; floating point, added to the
            scores and differentiable; or a causal bias of torch.nn.attention.bias, which stays two numbers.
        dropout_p: probability of dropping an element of the softmax, in training and evaluation alike.
        is_causal: hide keys behind the diagonal, which starts at the first query and the first key (top-left).
        scale: None = dim_qk ** -0.5.
        enable_gqa: let groups of query heads share a key head.

    Returns:
        (..., heads_q, len_q, dim_v) in query's dtype. A row that sees no key is 0.

    Raises:
        ValueError: attn_mask beside is_causal, or heads that differ without enable_gqa. The rest as
            `tilewise.attention`.

    >>> q, k = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 5, 16)
    >>> out = scaled_dot_product_attention(q, k, k, is_causal=True)
    >>> bool((out - torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)).abs().max() < 1e-5)
    True
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask does not go with is_causal=True; got both. Put the diagonal into the mask")
    if min(x.ndim for x in (query, key, value)) < 2:
        got = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key and value must have axes (..., len, dim); got {got}. Add the missing one")
    shape, (q, k, v) = _four_axes(query, key, value, enable_gqa)
    bottom_right = False
    mask = bias = None
    if isinstance(attn_mask, CausalBias):
        is_causal, bottom_right = True, attn_mask.variant is CausalVariant.LOWER_RIGHT
    elif attn_mask is not None:
        if len(shape) > 4 and attn_mask.ndim > 3:  # the axes before the heads have become one
            attn_mask = attn_mask.expand(*shape[:-1], key.shape[-2]).flatten(0, -4)
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    out = attention(
        q,
        k,
        v,
        causal=is_causal,
        align="bottom_right" if bottom_right else "top_left",
        scale=scale,
        dropout=dropout_p,
        mask=mask,
        bias=bias,
    )
    return out.view(*shape[:-1], v.shape[-1])


def _four_axes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[torch.Tensor, ...]]:
    """Give query's shape after broadcasting, and all three as (batch, heads, len, dim)."""
    rank = max(query.ndim, key.ndim, value.ndim)
    wide = [x[(None,) * (max(rank, 3) - x.ndim)] for x in (query, key, value)]
    heads_q, heads_k, heads_v = (x.shape[-3] for x in wide)
    heads_kv = max(heads_k, heads_v)
    if not enable_gqa:
        heads_q = max(heads_q, heads_kv)
        if any(x.shape[-3] not in (1, heads_q) for x in wide):
            got = ", ".join(str(x.shape[-3]) for x in wide)
            raise ValueError(f"query, key and value must have the same heads; got {got}. enable_gqa=True allows groups")
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in wide))
    spread = [x.expand(*lead, n, -1, -1) for x, n in zip(wide, (heads_q, heads_kv, heads_kv), strict=True)]
    shape = tuple(spread[0].shape[-rank:])
    return shape, tuple(x.reshape(math.prod(lead), *x.shape[-3:]) for x in spread)


# ---- beneath PyTorch's own function ---------------------------------------------------------------------------------


def activate() -> None:
    """Let torch.nn.functional.scaled_dot_product_attention run on tilewise where it would run PyTorch's flash kernel.

    That is on GPUs, in half precision, without a mask; `explain_sdpa` tells for a given call. Where PyTorch prefers
    another kernel, ``torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)`` asks for this one. Calls on a CPU
    stay as they are. Nothing happens on import.

    Raises:
        RuntimeError: this torch has no place for a flash implementation of others.
    """
    registry = torch.nn.attention
    if not hasattr(registry, "activate_flash_attention_impl"):
        raise RuntimeError(
            f"torch {torch.__version__} cannot exchange its flash kernel: call "
            "tilewise.adapters.sdpa.scaled_dot_product_attention, or install a newer torch"
        )
    registry.register_flash_attention_impl(NAME, register_fn=_take_place)
    registry.activate_flash_attention_impl(NAME)
    if not _is_in_place():  # releases that cannot restore their own kernel take a second activation for the first
        _take_place()


def deactivate() -> None:
    """Undo `activate`."""
    if active_implementation() == NAME and hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        torch.nn.attention.restore_flash_attention_impl()
    while _handles:
        _handles.pop().remove()


def active_implementation() -> str | None:
    """Name what has taken the place of PyTorch's flash kernel, or None."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    found = None if current is None else current()
    return None if found == NAME and not _is_in_place() else found


@dataclass
class _Handle:
    """What keeps the replaced operators in place: as long as the library lives, so do they."""

    library: torch.library.Library | None

    def remove(self) -> None:
        """Give the operators back to PyTorch."""
        self.library = None


_handles: list[_Handle] = []


def _is_in_place() -> bool:
    return any(handle.library is not None for handle in _handles)


def _take_place() -> _Handle:
    _handles.append(_register())
    return _handles[-1]


def _register(device: str = "CUDA") -> _Handle:
    library = torch.library.Library("aten", "IMPL", device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that kernels are replaced, as meant
        library.impl("_scaled_dot_product_flash_attention", _flash_forward, device)
        library.impl("_scaled_dot_product_flash_attention_backward", _flash_backward, device)
    return _Handle(library)


FlashResults = tuple[
    torch.Tensor, torch.Tensor, None, None, int, int, torch.Tensor, torch.Tensor, torch.Tensor
]  # out, lse, two that only nested tensors have, len_q, len_kv, the state of dropout, unused, debugging output


def _flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> FlashResults:
    """Serve aten::_scaled_dot_product_flash_attention, whose diagonal ends at the last query and the last key."""
    q, k, v = query.detach(), key.detach(), value.detach()
    seed = torch.randint(0, 2**63 - 1, (1,), device=q.device) if dropout_p else None
    options: _Options = {"causal": is_causal, "scale": scale, "dropout": dropout_p, "seed": seed}
    if _layout(query) == "bshd":
        rows = (x.transpose(1, 2) for x in (q, k, v))  # (batch, len, heads, dim)
        out, lse = attention(*rows, **options, layout="bshd", return_lse=True)
        out = out.transpose(1, 2)
    else:
        out, lse = attention(q, k, v, **options, return_lse=True)
    shown = q.new_empty(0)
    state, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
    if seed is not None:
        state = torch.cat((seed, seed)).view(torch.uint64)
        if return_debug_mask:
            shown = signed_probabilities(q, k, dropout_p, seed, causal=is_causal, scale=scale)
    len_q, len_kv = query.shape[2], key.shape[2]
    return _laid_like(query, out), lse, None, None, len_q, len_kv, state, unused, shown


def _flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Serve aten::_scaled_dot_product_flash_attention_backward."""
    seed = philox_seed.view(torch.int64)[:1] if dropout_p else None
    tensors = Tensors(q=query.detach(), k=key.detach(), v=value.detach(), seed=seed)
    options = Options(
        causal=is_causal,
        scale=scale,
        dropout=dropout_p,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        return_lse=True,
        layout=_layout(query),
    )
    needs = [True, True, True, False, False]
    grads = torch.ops.tilewise.attention_backward(*tensors, out, logsumexp, grad_out, None, *options, needs)
    return tuple(_laid_like(x, grad) for x, grad in zip((query, key, value), grads, strict=False))


class _Options(TypedDict):
    causal: bool
    scale: float | None
    dropout: float
    seed: torch.Tensor | None


def _layout(x: torch.Tensor) -> Layout:
    """Name the order in which x (batch, heads, len, dim) lies in memory, where it is one of the two."""
    return "bshd" if not x.is_contiguous() and x.transpose(1, 2).is_contiguous() else "bhsd"


def _laid_like(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Give a result the strides that PyTorch's kernel would give it, and that compiled code counts on."""
    strides = torch.empty_like(x, device="meta").stride()
    return result if result.stride() == strides else torch.empty_like(x).copy_(result)


# ---- explained ------------------------------------------------------------------------------------------------------

# Each fused backend, the first word of its heading in PyTorch's warnings, and whether it is switched on.
FUSED: tuple[tuple[SDPBackend, str, Callable[[], bool]], ...] = (
    (SDPBackend.FLASH_ATTENTION, "flash", torch.backends.cuda.flash_sdp_enabled),
    (SDPBackend.EFFICIENT_ATTENTION, "memory", torch.backends.cuda.mem_efficient_sdp_enabled),
    (SDPBackend.CUDNN_ATTENTION, "cudnn", torch.backends.cuda.cudnn_sdp_enabled),
)
HEADING = re.compile(r"(\w+).* kernel not used because:")
TRIGGERED = re.compile(r"\s*\(Triggered internally at [^)]*\)")


@dataclass(frozen=True)
class SdpaPlan:
    """What PyTorch would do with a call of its scaled_dot_product_attention.

    Args:
        backend: the name in torch.nn.attention.SDPBackend of what would run; "ERROR" where nothing can.
        refusals: for each other fused backend, in PyTorch's own words, why it would not; empty text where it could.
        device: where the tensors are.
        implementation: what serves FLASH_ATTENTION in PyTorch's place, None = PyTorch itself.
    """

    backend: str
    refusals: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    implementation: str | None = None

    def __str__(self) -> str:
        by = f" (by {self.implementation})" if self.implementation and self.backend == "FLASH_ATTENTION" else ""
        lines = [f"{self.backend}{by} on {self.device}"]
        lines += [f"  {name}: {reason or 'could serve, is not preferred'}" for name, reason in self.refusals.items()]
        return "\n".join(lines)


def explain_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> SdpaPlan:
    """Say which of PyTorch's own backends a call of its scaled_dot_product_attention would get, and why not the others.

    A fused kernel that refuses is passed over in silence, and the call falls back to the formula with its whole score
    matrix (MATH). The reasons are those of PyTorch's own checks, on this machine and under the current settings.

    Args:
        query, key, value and the rest: as of the function itself. Nothing is computed.

    Returns:
        An `SdpaPlan` with .backend and .refusals {name: reason}; ``str()`` prints it.

    >>> q = torch.randn(1, 2, 8, 16)
    >>> explain_sdpa(q, q, q).backend
    'FLASH_ATTENTION'
    >>> plan = explain_sdpa(q, q, q, dropout_p=0.1)
    >>> plan.backend, plan.refusals["FLASH_ATTENTION"]
    ('MATH', 'Both fused kernels do not support non-zero dropout.')
    """

    def choose() -> SDPBackend:
        choice = torch._fused_sdp_choice  # noqa: SLF001  # what PyTorch's function itself asks; no public name
        return SDPBackend(
            choice(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            chosen = choose()
        except RuntimeError:  # every backend is switched off
            chosen = SDPBackend.ERROR
    refusals = {}
    for backend, heading, is_on in FUSED:
        if backend == chosen:
            continue
        if not is_on():
            refusals[backend.name] = "is switched off"
            continue
        with warnings.catch_warnings(record=True) as said, sdpa_kernel(backend):
            warnings.simplefilter("always")
            try:
                choose()
                reason = ""
            except RuntimeError:
                reason = _reasons(heading, [str(warning.message) for warning in said])
                reason = reason or f"there is none for {query.device.type}"
        refusals[backend.name] = reason
    return SdpaPlan(chosen.name, refusals, str(query.device), active_implementation())


def _reasons(heading: str, said: Sequence[str]) -> str:
    """Pick from PyTorch's warnings what stands under a backend's heading."""
    reasons, current = [], ""
    for text in said:
        found = HEADING.match(text)
        if found:
            current = found[1].lower()
        elif current == heading:
            reasons.append(TRIGGERED.sub("", text).strip())
    return " ".join(reasons)
