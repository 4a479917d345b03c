"""PyTorch's own fused kernel, where it computes exactly what is asked and hands out its lse.

On a CPU that is ``aten::_scaled_dot_product_flash_attention_for_cpu``, compiled code with the same tiled algorithm. It
knows neither windows nor biases with linear memory, and some of its edges are sharp: a last stride other than 1 gives
wrong numbers, an empty input crashes the process, and older releases write out of bounds for grouped heads. All of that
is kept away from it here.
"""

from __future__ import annotations

import torch

from tilewise.backends.outputs import empty_lse, empty_out
from tilewise.problem.problem import Grads, Needs, Problem, Tensors

name = "torch_sdpa"

_KNOWS_GROUPS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # 2.6 was seen to corrupt memory

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  # no public name returns lse
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


def why_not(problem: Problem) -> str | None:
    """Say why PyTorch's kernel cannot serve a problem, or None."""
    score, mask, specs = problem.score, problem.mask, problem.specs
    if problem.device_type != "cpu":
        return f"serves the CPU; on {problem.device_type} its kernels do not hand out what tilewise promises"
    if problem.kind != "dense":
        return f"has no {problem.kind} form"
    for feature, asked in (
        ("window", mask.band.left is not None or mask.band.right not in (None, 0)),
        ("key range", mask.ranged),
        ("score_mod or mask_mod", problem.mods is not None),
        ("dense mask in linear memory", mask.dense),
        ("bias in linear memory", score.bias),
        ("ALiBi", score.alibi),
        ("softcap", bool(score.softcap)),
        ("sink", score.sink),
        ("reproducible dropout", bool(problem.dropout)),
    ):
        if asked:
            return f"has no {feature}"
    if problem.group > 1 and not _KNOWS_GROUPS:
        return f"writes out of bounds for grouped heads in torch {torch.__version__}; 2.13 was seen to be right"
    if problem.dim_v != problem.dim_qk:
        return f"needs dim_v == dim_qk, got {problem.dim_v} and {problem.dim_qk}"
    causal = mask.band.right == 0
    if causal and mask.band.offset(problem.len_q, problem.len_kv) != 0:
        return "its causal mask is aligned top-left"
    if causal and problem.len_q < problem.len_kv:
        return "NaN in keys that no query sees would spread"
    if problem.return_lse and problem.itemsize == 2:
        return f"its lse has only some of float32's digits in {problem.dtype}"
    strided = [tensor for tensor in ("q", "k", "v") if specs[tensor].strides[-1] != 1]
    if strided:
        return f"needs a last stride of 1 for {', '.join(strided)}"
    return None


def tiles(problem: Problem) -> None:
    """Its tiles are its own."""


def forward(problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse."""
    out, lse = _KERNEL(tensors.q, tensors.k, tensors.v, 0.0, problem.mask.band.right == 0, scale=problem.score.scale)
    q = tensors.q.to("meta")  # strides alone: nothing is allocated
    return _laid(empty_out(q, problem.dim_v, problem.layout), out), _laid(empty_lse(q), lse)


def backward(
    problem: Problem,
    tensors: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    needs: Needs,
) -> Grads:
    """Differentiate `forward`.

    The kernel takes no gradient of lse. Its ``delta = sum(d_out * out)`` would have to become ``delta - d_lse``, and
    that is what one more column of out (-d_lse) and of d_out (1) makes of it, beside a column of zeros in v.
    """
    q, k, v = tensors.q, tensors.k, tensors.v
    d_out = torch.zeros_like(out) if d_out is None else d_out
    if d_lse is not None:
        q, k, v = (torch.nn.functional.pad(x, (0, 1)) for x in (q, k, v))
        out = torch.cat((out, -d_lse[..., None].to(out.dtype)), -1)
        d_out = torch.cat((d_out, torch.ones_like(d_out[..., :1])), -1)
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    grads = _KERNEL_BACKWARD(d_out, q, k, v, out, lse, 0.0, problem.mask.band.right == 0, scale=problem.score.scale)
    dq, dk, dv = (
        _laid(torch.empty_like(x, device="meta"), grad[..., : x.shape[-1]])
        for x, grad in zip((tensors.q, tensors.k, tensors.v), grads, strict=True)
    )
    return Grads(dq if needs.dq else None, dk if needs.dk else None, dv if needs.dv else None, None, None)


def _laid(target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Give x in the strides of a tensor without memory, copied only where they differ."""
    if x.stride() == target.stride():
        return x
    return x.new_empty_strided(target.shape, target.stride()).copy_(x)
