"""Calls that are like an earlier one: looked up by their metadata, then run with all settled that does not change.

Most of what the host does for a call answers questions whose answers stay: are these arguments right, who serves them,
which kernel, which launch. A backend's *prepared* object holds the answers, and is found here by what the call is like:
the options as given, and each tensor's shape, strides, dtype and device. What depends on more than that is never found:
a call that something watches (a tracer, a transform, a mode), one that wants a gradient, and one that is given
something else than ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd import forward_ad

from tilewise import dispatch

OutAndPerhapsLse = tuple[torch.Tensor, "torch.Tensor | None"]  # lse where it was asked for, at the least
Prepared = Callable[[Sequence["torch.Tensor | None"]], OutAndPerhapsLse]

ORDINARY = (torch.Tensor, torch.nn.Parameter)
MOST = 4096  # forms of calls that are kept

_prepared: dict[object, Prepared] = {}
_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001  # no public question for any of these
_transform = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
_autocast = torch._C._is_any_autocast_enabled  # noqa: SLF001
_is_compiling = torch.compiler.is_compiling


def recall(given: tuple[object, ...], wanted: tuple[object, ...]) -> tuple[object, OutAndPerhapsLse | None]:
    """Run a call at once where one like it went before.

    Args:
        given: what the user gave as tensors, in the order that prepared objects expect; the first three are no options.
        wanted: what the user asked for beside it: the function's name first, the backend last.

    Returns:
        What the call is like, and its results if one like it was met; None and None where it must go the whole way.
    """
    if (
        _is_compiling()
        or _modes()
        or _transform() is not None
        or forward_ad._current_level >= 0  # noqa: SLF001
        or dispatch.explaining.get()
        or _autocast()
    ):
        return None, None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q, k, v, *others = given  # type: ignore[assignment]  # what else they may be, the next lines refuse
    if type(q) not in ORDINARY or type(k) not in ORDINARY or type(v) not in ORDINARY:
        return None, None
    grad = torch.is_grad_enabled()
    if grad and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None, None
    try:  # written out, since this is most of what the host does for a call
        like: tuple[object, ...] = (
            wanted, wanted[-1] or dispatch.requested(),
            q.shape, q.stride(), q.dtype, q.device,
            k.shape, k.stride(), k.dtype, k.device,
            v.shape, v.stride(), v.dtype, v.device,
        )  # fmt: skip
        for place, x in enumerate(others):
            if x is None:
                continue
            if type(x) not in ORDINARY or (grad and x.requires_grad):  # type: ignore[attr-defined]
                return None, None
            like += (place, x.shape, x.stride(), x.dtype, x.device)  # type: ignore[attr-defined]
        prepared = _prepared.get(like)
    except (RuntimeError, TypeError):  # nested and sparse tensors have no strides; a list among the options no hash
        return None, None
    return like, None if prepared is None else prepared(given)  # type: ignore[arg-type]  # tensors, by now


def remember(like: object, prepared: Prepared) -> None:
    """Keep what runs calls like this; ``like`` is what `recall` gave, None for what must not be kept."""
    if like is None:
        return
    if len(_prepared) >= MOST:
        _prepared.clear()
    _prepared[like] = prepared


def remembered(like: object) -> Prepared | None:
    """Give what was kept under ``like``, or None."""
    return _prepared.get(like)


def forget() -> None:
    """Drop everything, so that the next calls ask their backends again."""
    _prepared.clear()


def in_transform() -> bool:
    """Say whether torch.func is at work outside a compiled graph; torch has no public question for it."""
    return not _is_compiling() and _transform() is not None


def is_watched() -> bool:
    """Say whether a dispatch mode or a transform sees the call."""
    return bool(_modes()) or in_transform()
