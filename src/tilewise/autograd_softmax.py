"""The operators behind `tilewise.softmax`: schema, shapes for tracing, derivatives.

The derivative of ``tilewise::softmax`` is ``tilewise::softmax_backward``, and its derivative is made of itself and of
PyTorch's operators, so a softmax can be differentiated any number of times. The bodies dispatch. Importing this file
registers them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from tilewise import dispatch
from tilewise.backends import torch_ops
from tilewise.backends.outputs import sum_dtype

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define("softmax(Tensor x, int dim) -> Tensor")
_library.define("softmax_backward(Tensor p, Tensor dp, int dim) -> Tensor")


def _softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    return _laid_out_like(x, dispatch.softmax(x, dim))


def _softmax_backward(p: torch.Tensor, dp: torch.Tensor, dim: int) -> torch.Tensor:
    return _laid_out_like(p, dispatch.softmax_backward(p, dp, dim))


def _laid_out_like(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Give the result in the layout that the fake implementations promise, in which kernels write it anyway."""
    if result.stride() == x.stride():
        return result
    promised = torch.empty_like(x)
    return result if result.stride() == promised.stride() else promised.copy_(result)


def _softmax_fake(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.empty_like(x)


def _softmax_backward_fake(p: torch.Tensor, dp: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.empty_like(p)


# ---- derivatives ----------------------------------------------------------------------------------------------------


def _setup(ctx: FunctionCtx, inputs: tuple[torch.Tensor, int], output: torch.Tensor) -> None:
    ctx.dim = inputs[1]  # type: ignore[attr-defined]
    ctx.save_for_backward(output)


def _derivative(ctx: FunctionCtx, dp: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (p,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return torch.ops.tilewise.softmax_backward(p, dp, ctx.dim), None  # type: ignore[attr-defined]


def _setup_backward(ctx: FunctionCtx, inputs: tuple[torch.Tensor, torch.Tensor, int], output: torch.Tensor) -> None:
    p, dp, ctx.dim = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(p, dp)


def _second_derivative(ctx: FunctionCtx, d_ds: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Differentiate ``ds = p * (dp - sum(p * dp))``: in dp it is linear, by a symmetric matrix."""
    p, dp = ctx.saved_tensors  # type: ignore[attr-defined]
    dim: int = ctx.dim  # type: ignore[attr-defined]
    d_dp = torch.ops.tilewise.softmax_backward(p, d_ds, dim) if ctx.needs_input_grad[1] else None  # type: ignore[attr-defined]
    exact = sum_dtype(p.dtype)
    p, dp, d_ds = p.to(exact), dp.to(exact), d_ds.to(exact)
    d_p = d_ds * (dp - (p * dp).sum(dim, keepdim=True)) - dp * (p * d_ds).sum(dim, keepdim=True)
    return d_p.to(ctx.saved_tensors[0].dtype), d_dp, None  # type: ignore[attr-defined]


_library.impl("softmax", _softmax, "CompositeExplicitAutograd")
_library.impl("softmax_backward", _softmax_backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::softmax", _softmax_fake, lib=_library)
torch.library.register_fake("tilewise::softmax_backward", _softmax_backward_fake, lib=_library)
torch.library.register_autograd("tilewise::softmax", _derivative, setup_context=_setup, lib=_library)
torch.library.register_autograd(
    "tilewise::softmax_backward", _second_derivative, setup_context=_setup_backward, lib=_library
)


# ---- calling --------------------------------------------------------------------------------------------------------


def call(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute a softmax: by PyTorch's operators, by the kernels, or by the operator that shows them to autograd."""
    if torch.compiler.is_compiling():
        return _operator(x, dim) if _is_compiled_as_ours(x) else torch_ops.softmax(x, dim).to(x.dtype)
    kernels = None if _knows_only_pytorch(x) else dispatch.softmax_kernels(x)
    if kernels is None:
        return _by_operators(x, dim).to(x.dtype)  # autocast gives float32
    if (x.requires_grad and torch.is_grad_enabled()) or x.is_neg() or _in_mode():
        return _operator(x, dim)
    return kernels.softmax(x, dim)


def _operator(x: torch.Tensor, dim: int) -> torch.Tensor:
    result: torch.Tensor = torch.ops.tilewise.softmax(x, dim)
    return result


def _by_operators(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute by PyTorch's operators; on a CPU rows of -inf are looked for afterwards, which costs next to nothing."""
    if x.device.type == "cpu" and x.numel() and x.ndim and not (_knows_only_pytorch(x) or _in_mode()):
        p = torch.softmax(x, dim)
        if not p.detach().select(dim, 0).isnan().any():  # a row of -inf would be NaN from its first element on
            return p
    return torch_ops.softmax(x, dim)


def _is_compiled_as_ours(x: torch.Tensor) -> bool:
    """Say whether a graph takes the operator, whose body sees to the rest when it runs."""
    return x.is_cuda and not _in_transform()


def _knows_only_pytorch(x: torch.Tensor) -> bool:
    """Say whether somebody follows the call who knows no operator of ours: a subclass, a transform, a tangent."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or _in_transform():
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None  # noqa: SLF001


def _in_mode() -> bool:
    """Say whether a dispatch mode sees the call."""
    return bool(torch._C._len_torch_dispatch_stack())  # noqa: SLF001  # no public question


def _in_transform() -> bool:
    """Say whether torch.func is at work, in a graph that is being compiled too."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001  # no public question


# The compiler asks at tracing and keeps the answer: what torch.compiler.assume_constant_result does, which would load
# all of the compiler.
_in_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
