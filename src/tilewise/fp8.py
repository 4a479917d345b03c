"""Attention in FP8: quantise q, k and v to e4m3 by blocks, then attend by products of 8-bit numbers. Inference only.

``tilewise.attention(..., fp8=True)`` does both at once. Where keys are attended to more than once, `quantize` and
`attention` do them apart.

>>> import torch, tilewise
>>> from tilewise import fp8
>>> q, k, v = (torch.randn(1, 2, 200, 64) for _ in range(3))
>>> out = fp8.attention(fp8.quantize(q, k, v), causal=True, backend="torch_tiled")
>>> exact = tilewise.attention(q, k, v, causal=True)
>>> out.dtype, bool((out - exact).square().mean().sqrt() < 0.05 * exact.square().mean().sqrt())
(torch.bfloat16, True)
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol, cast, overload

import torch

from tilewise import dispatch
from tilewise.arguments import check_tensors, refuse_jvp
from tilewise.autograd import problem_for, spec_of
from tilewise.backends import quantize as blocks
from tilewise.machine.detect import detect
from tilewise.problem.fp8 import BLOCK, DIMS, block_count
from tilewise.problem.problem import Options, Problem, Spec, Tensors, describe, fail, mismatch

if TYPE_CHECKING:
    from tilewise.problem.mask import Align

__all__ = ["Quantized", "attention", "quantize"]

KERNEL, PARTNER = "hopper_fp8", "torch_tiled"
DTYPES = ("float16", "bfloat16", "float32")
SERVED = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")


class Kernel(Protocol):
    """What the backend of FP8 offers."""

    def why_not(self, problem: Problem) -> str | None:
        """Say why it cannot serve a call, or None."""

    def forward(
        self, quantized: Quantized, *, causal: bool, align: Align, scale: float, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute (out, lse)."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """q, k and v in e4m3, with a float32 scale for each 128 rows of a head: a number is its byte times the scale.

    Of packed sequences each begins with a block of its own: sequence s at block ``cu_seqlens[s] // 128 + s``, and there
    are ``total // 128 + batch + 1`` blocks. Tensors are contiguous, scales powers of two from 2**-68 up.

    Args:
        q8: (batch, heads_q, len_q, dim), packed (total_q, heads_q, dim); dim is 64, 128 or 256.
        k8: (batch, heads_kv, len_kv, dim), packed (total_kv, heads_kv, dim).
        v8: (batch, heads_kv, dim, blocks * 128), packed (heads_kv, dim, blocks * 128): transposed, the keys of a block
            in the order of `tilewise.problem.fp8.key_of_slot`, zero where there is no key.
        q_scale, k_scale, v_scale: (batch, heads, blocks), packed (heads, blocks).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 for packed sequences, else None.
        dtype: of out, bfloat16 or float16.

    Raises:
        ValueError: shapes that do not go together. TypeError: a wrong dtype.
    """

    q8: torch.Tensor
    k8: torch.Tensor
    v8: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Check shapes and dtypes."""
        check_tensors(**{name: getattr(self, name) for name in ("q8", "k8", "v8", "q_scale", "k_scale", "v_scale")})
        packed = self.cu_seqlens_q is not None
        if packed != (self.cu_seqlens_k is not None):
            raise fail("cu_seqlens_q and cu_seqlens_k go together", "one of them", "Pass both, or neither")
        if self.q8.ndim != 4 - packed or self.k8.ndim != 4 - packed:
            got = f"q8 {tuple(self.q8.shape)}, k8 {tuple(self.k8.shape)}"
            raise fail(f"q8 and k8 must have {4 - packed} axes", got, "Make them with tilewise.fp8.quantize")
        for name, side, rows in (("q", "q", self.q8), ("k", "k", self.k8), ("v", "k", self.k8)):
            cu = self.cu_seqlens_q if side == "q" else self.cu_seqlens_k
            lead = (rows.shape[1],) if packed else tuple(rows.shape[:2])
            count = block_count(rows.shape[0 if packed else 2], None if cu is None else len(cu) - 1)
            wide = tuple(rows.shape) if name != "v" else (*lead, rows.shape[-1], count * BLOCK)
            _check(f"{name}8", getattr(self, f"{name}8"), torch.float8_e4m3fn, wide)
            _check(f"{name}_scale", getattr(self, f"{name}_scale"), torch.float32, (*lead, count))
            if cu is not None:
                _check(f"cu_seqlens_{side}", cu, torch.int32, tuple(cu.shape))
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise mismatch("out is bfloat16 or float16", self.dtype, "Pass dtype=torch.bfloat16")

    @property
    def specs(self) -> dict[str, Spec]:
        """Describe q, k and v as tensors of out's dtype."""
        dense = {"q": self.q8, "k": self.k8, "v": self.k8}
        specs = {name: spec_of(x)._replace(dtype=str(self.dtype).removeprefix("torch.")) for name, x in dense.items()}
        cu = {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k}
        return specs | {name: spec_of(x) for name, x in cu.items() if x is not None}

    def dequantize(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give the numbers that are attended to: q, k and v in float32, in the shapes of q8 and k8, exact in bfloat16.

        After a rotation q and k stay rotated, and 1 / dim, by which its products are too large, is in q.
        """
        total_q, total_kv = (x.shape[2 if self.cu_seqlens_q is None else 0] for x in (self.q8, self.k8))
        q = blocks.dequantize(blocks.Blocks(self.q8, self.q_scale), total_q, self.cu_seqlens_q, transposed=False)
        k = blocks.dequantize(blocks.Blocks(self.k8, self.k_scale), total_kv, self.cu_seqlens_k, transposed=False)
        v = blocks.dequantize(blocks.Blocks(self.v8, self.v_scale), total_kv, self.cu_seqlens_k, transposed=True)
        return q, k, v


def _check(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x.dtype != dtype:
        raise mismatch(f"{name} must be {dtype}", x.dtype, "Make it with tilewise.fp8.quantize")
    if tuple(x.shape) != shape or not x.is_contiguous():
        got = f"{tuple(x.shape)}{'' if x.is_contiguous() else ', not contiguous'}"
        raise fail(f"{name} must be contiguous, {shape}", got, "Make it with tilewise.fp8.quantize")


# ---- quantising -----------------------------------------------------------------------------------------------------


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    rotate: bool = True,
    seed: int = 0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> Quantized:
    """Quantise q, k and v to e4m3, a scale for each 128 rows of a head; each tensor is read once.

    Every block's scale is the least power of two with ``max|x| <= 448 * scale``, and ``x8 = e4m3(x / scale)``, rounded
    to nearest. With ``rotate`` rows of q and k are multiplied first by one orthogonal matrix R, random signs times a
    matrix of Hadamard: ``(q R) @ (k R).T = q @ k.T``, and a large element of a row is spread over the whole row.
    Source: Shah et al., FlashAttention-3, arXiv:2407.08608, section 3.3; Chee et al., QuIP, arXiv:2307.13304.

    Args:
        q: (batch, heads_q, len_q, dim), or packed (total_q, heads_q, dim); float16, bfloat16 or float32, any strides;
            dim is 64, 128 or 256. Numbers must be finite.
        k, v: the same with heads_kv heads; heads_q must be a multiple of heads_kv.
        rotate: rotate q and k.
        seed: of the signs. Tensors that are attended to together must have been rotated with the same seed.
        cu_seqlens_q: (batch + 1,) integers, cumulative lengths of packed sequences; None = q, k and v are not packed.
        cu_seqlens_k: the same for keys; None = cu_seqlens_q.

    Returns:
        A `Quantized`; its out will be float16 where q is, else bfloat16.

    Raises:
        ValueError: a shape or head dim that cannot be, or an input that requires a gradient. TypeError: a wrong dtype.

    >>> import torch
    >>> x = torch.tensor([1.0, 1.0625, 1.07, -3.3])[:, None].expand(1, 1, 4, 64)
    >>> quantized = quantize(x, x, x, rotate=False)
    >>> quantized.q_scale.item(), quantized.dequantize()[0][0, 0, :, 0].tolist()
    (0.0078125, [1.0, 1.0, 1.125, -3.25])
    """
    check_tensors(q=q, k=k, v=v)
    problem = _problem_of(q, k, v, Options(), cu_seqlens_q, cu_seqlens_k)
    return _quantize(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, rotate=rotate, seed=seed)


def _problem_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
) -> Problem:
    """Describe and check a call on tensors that are still to be quantised; dtype is that of its out."""
    if cu_q is None and cu_k is not None:
        raise fail("cu_seqlens_k goes with cu_seqlens_q", "cu_seqlens_k alone", "Pass both for packed sequences")
    if torch.compiler.is_compiling():
        raise fail("FP8 attention is not traced", "a call inside torch.compile", "Call it from torch.compiler.disable")
    tensors = Tensors(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    problem = problem_for(tensors, options)
    if problem.dtype not in DTYPES:
        raise mismatch(f"FP8 quantises {', '.join(DTYPES)}", problem.dtype, "Convert q, k and v first")
    if problem.dim_qk not in DIMS or problem.dim_v != problem.dim_qk:
        got = f"{problem.dim_qk} for q and k, {problem.dim_v} for v"
        raise fail("FP8 has head dims 64, 128 and 256, the same for q, k and v", got, "Leave fp8 False for others")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise fail("FP8 attention has no gradient", "requires_grad=True", "Call it under torch.no_grad(), or detach")
    refuse_jvp((q, k, v))
    return _with_dtype_of_out(problem)


@lru_cache(maxsize=4096)
def _with_dtype_of_out(problem: Problem) -> Problem:
    return replace(problem, dtype="float16" if problem.dtype == "float16" else "bfloat16")


def _quantize(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    *,
    rotate: bool,
    seed: int,
) -> Quantized:
    cu_q = None if cu_q is None else cu_q.to(torch.int32).contiguous()
    cu_k = cu_q if cu_k is None else cu_k.to(torch.int32).contiguous()
    dim = q.shape[-1]
    matrix = blocks.rotation(dim, seed, q.device, q.dtype) if rotate else None
    q8 = blocks.quantize(q.detach(), cu_q, matrix, 1 / dim if rotate else 1.0, transposed=False)
    k8 = blocks.quantize(k.detach(), cu_k, matrix, 1.0, transposed=False)
    v8 = blocks.quantize(v.detach(), cu_k, None, 1.0, transposed=True)
    dtype = torch.float16 if problem.dtype == "float16" else torch.bfloat16
    return Quantized(q8.x8, k8.x8, v8.x8, q8.scale, k8.scale, v8.scale, cu_q, cu_k, dtype)


# ---- attending ------------------------------------------------------------------------------------------------------


@overload
def attention(
    quantized: Quantized,
    *,
    causal: bool = ...,
    align: Align = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    quantized: Quantized,
    *,
    causal: bool = ...,
    align: Align = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> torch.Tensor: ...
def attention(
    quantized: Quantized,
    *,
    causal: bool = False,
    align: Align = "bottom_right",
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend with what `quantize` made; see `tilewise.attention` for the formula.

    On NVIDIA GPUs of compute capability 9.0 both products are of 8-bit numbers: sums are in float32, and the softmax is
    rounded to e4m3 before it meets v. ``backend="torch_tiled"`` attends to the same numbers on any device, without
    that rounding: what the kernel is judged by, and no faster than attention without FP8.

    Args:
        quantized: from `quantize`.
        causal, align, scale, return_lse: as in `tilewise.attention`.
        backend: None = "hopper_fp8"; or "torch_tiled".

    Returns:
        out (batch, heads_q, len_q, dim) or packed (total_q, heads_q, dim), in quantized.dtype; with return_lse also
        lse (batch, heads_q, len_q) or (heads_q, total_q), float32.

    Raises:
        ValueError: the backend cannot serve the call, with its reason, or bad options.
    """
    options = Options(causal=causal, align=align, scale=scale, return_lse=return_lse)
    problem = _problem_of_quantized(quantized, options)
    name = _serving(problem, backend)
    if dispatch.explaining.get():
        raise dispatch.Explained(_plan(problem, name))
    out, lse = _run(quantized, problem, options, name)
    return (out, lse) if return_lse else out


def _problem_of_quantized(quantized: object, options: Options) -> Problem:
    if not isinstance(quantized, Quantized):
        mend = "Make it with tilewise.fp8.quantize, or pass q, k and v to tilewise.attention(..., fp8=True)"
        raise mismatch("attention in FP8 takes a Quantized", type(quantized).__name__, mend)
    shapes = [None if x is None else x.shape for x in (quantized.cu_seqlens_q, quantized.cu_seqlens_k)]
    key = (quantized.q8.shape, quantized.k8.shape, *shapes, quantized.q8.device, quantized.dtype, options)
    problem = _problems.get(key)
    if problem is None:
        problem = describe(quantized.specs, options)
        if len(_problems) >= _PROBLEMS_KEPT:
            _problems.clear()
        _problems[key] = problem
    return problem


_problems: dict[object, Problem] = {}  # of calls that were met before: metadata need not be checked twice
_PROBLEMS_KEPT = 4096


def attend(tensors: Tensors, options: Options, *, modified: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise and attend: what ``fp8=True`` asks of `tilewise.attention` and `tilewise.attention_varlen`.

    Args:
        tensors, options: as the operator takes them; what FP8 does not have is refused.
        modified: the call has functions of the user's own, which are refused too.
    """
    window = (options.window_left, options.window_right)
    unserved: dict[str, object] = {"window": None if set(window) <= {None, -1} else window}
    unserved |= {"softcap": options.softcap, "dropout": options.dropout, "score_mod or mask_mod": modified}
    unserved |= {name: x for name, x in tensors._asdict().items() if name not in SERVED}
    for name, value in unserved.items():
        if isinstance(value, torch.Tensor) or value:
            got = type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)
            mend = "Leave it out, or leave fp8 False"
            raise fail(f"FP8 attention has causal, align, scale and return_lse, no {name}", got, mend)
    q, k, v, cu_q, cu_k = tensors.q, tensors.k, tensors.v, tensors.cu_seqlens_q, tensors.cu_seqlens_k
    problem = _problem_of(q, k, v, options._replace(backend=None, layout="bhsd"), cu_q, cu_k)
    name = _serving(problem, options.backend)
    if dispatch.explaining.get():
        raise dispatch.Explained(_plan(problem, name))
    quantized = _quantize(problem, q, k, v, cu_q, cu_k, rotate=True, seed=0)
    return _run(quantized, problem, options, name)


def _serving(problem: Problem, backend: str | None) -> str:
    """Give the name of who computes."""
    name = backend or dispatch.requested() or KERNEL
    if name not in (KERNEL, PARTNER):
        raise fail(f'FP8 attention is computed by "{KERNEL}" or "{PARTNER}"', repr(name), "Name one, or leave it None")
    reason = None if name == PARTNER else _why_not(problem)
    if reason is not None:
        mend = f'backend="{PARTNER}" attends to the same rounded numbers on any device; fp8=False does without rounding'
        raise ValueError(f"backend {name!r} cannot serve this call: {reason}. {mend}")
    return name


@lru_cache(maxsize=4096)
def _why_not(problem: Problem) -> str | None:
    return _kernel().why_not(problem)


def _kernel() -> Kernel:
    return cast("Kernel", importlib.import_module(f"tilewise.backends.{KERNEL}"))


def _run(quantized: Quantized, problem: Problem, options: Options, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by the backend of this name; a problem with nothing to compute needs no kernel."""
    if name == KERNEL and not problem.is_empty:
        given = {"causal": options.causal, "align": options.align, "return_lse": options.return_lse}
        out, lse = _kernel().forward(quantized, scale=problem.score.scale, **given)  # type: ignore[arg-type]
        return out, cast("torch.Tensor", lse)  # None only where nobody asked for it
    cu_q, cu_k = quantized.cu_seqlens_q, quantized.cu_seqlens_k
    tensors = Tensors(*quantized.dequantize(), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    with torch.autocast(quantized.q8.device.type, enabled=False):  # these numbers are rounded enough
        out, lse = dispatch.forward(problem_for(tensors, options._replace(layout="bhsd")), tensors, PARTNER)
    return out.to(quantized.dtype), lse


def _plan(problem: Problem, name: str) -> dispatch.Plan:
    """Say what a call in FP8 would do; its roofline is that of 8-bit products where the data sheet has them."""
    plan = dispatch.plan(problem, PARTNER)
    if name == PARTNER:
        refusals = {KERNEL: _why_not(problem) or f"{PARTNER} was named"}
        return replace(plan, backward="nobody: FP8 is for inference", refusals=refusals)
    rated = "float8" in detect(problem.device).rates
    return replace(
        plan,
        problem=replace(problem, dtype="float8") if rated else problem,
        backend=f"{KERNEL}, after q, k and v were quantised to e4m3 by blocks of {BLOCK} rows",
        backward="nobody: FP8 is for inference",
        tiles=None,
        refusals={PARTNER: "only when named"},
    )
