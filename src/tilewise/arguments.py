"""The user's arguments made uniform, before anything is described or launched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.autograd import forward_ad

from tilewise.problem.problem import fail, mismatch

Window = tuple["int | None", "int | None"]


def check_tensors(**tensors: object) -> None:
    """Hold what should be tensors to ordinary torch tensors; None passes."""
    for name, x in tensors.items():
        if x is None or (isinstance(x, torch.Tensor) and not x.is_nested):
            continue
        if isinstance(x, torch.Tensor):
            mend = "Pass x.values() and x.offsets() of its (total, heads, dim) form to attention_varlen"
            raise mismatch(f"{name} must be an ordinary tensor", "a nested tensor", mend)
        raise mismatch(f"{name} must be a torch tensor", type(x).__name__, "NumPy arrays go to tilewise.reference")


def check_rank(rank: int, **tensors: torch.Tensor) -> None:
    """Hold tensors to a number of axes, before they are transposed."""
    for name, x in tensors.items():
        if x.ndim != rank:
            raise fail(f"{name} must have {rank} axes", f"{name} {tuple(x.shape)}", "Check the layout")


def refuse_jvp(tensors: Iterable[torch.Tensor | None]) -> None:
    """Refuse forward-mode differentiation, which an operator without a rule for it would answer with zeros.

    Raises:
        NotImplementedError: a tensor carries a tangent.
    """
    if forward_ad._current_level < 0:  # noqa: SLF001  # no public question; the loop would cost host time in every call
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                "attention has no forward-mode derivative (jvp); got a tensor with a tangent. Use torch.func.vjp or "
                "torch.autograd.grad, twice for a Hessian-vector product"
            )


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Under torch.autocast, convert to its dtype as torch does for its own attention; float64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def sides(window: Window | None) -> Window:
    """Take the window apart: (left, right), None for an open side."""
    if window is None:
        return None, None
    if len(window) != 2:
        raise fail("window must be (left, right)", window, "Count the keys to each side; None leaves a side open")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, (int, torch.SymInt))):
            raise mismatch("window's sides must be ints or None", type(side).__name__, "Count the keys to each side")
    return window[0], window[1]


def seed_tensor(seed: int | torch.Tensor | None, dropout: float, q: torch.Tensor) -> torch.Tensor | None:
    """Give dropout's seed as a tensor on q's device, so that graph replays and checkpointing see it as data."""
    if not dropout:
        return None
    if seed is None:
        return torch.randint(0, 2**63 - 1, (1,), device=q.device)
    if isinstance(seed, torch.Tensor):
        return seed
    wrapped = (seed + 2**63) % 2**64 - 2**63  # any 64-bit value, as int64 holds it
    return torch.full((1,), wrapped, dtype=torch.int64, device=q.device)


def integers_tensor(name: str, x: torch.Tensor | Sequence[int] | None, q: torch.Tensor) -> torch.Tensor | None:
    """Turn a list of ints into a tensor on q's device; a tensor passes."""
    if x is None or isinstance(x, torch.Tensor):
        return x
    if isinstance(x, (list, tuple)) and all(isinstance(value, int) for value in x):
        return torch.tensor(x, dtype=torch.int32, device=q.device)
    raise mismatch(f"{name} must be an integer tensor or a list of ints", type(x).__name__, "Give one per sequence")
