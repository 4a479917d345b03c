"""The user's arguments made uniform, before anything is described or launched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd import forward_ad

from tilewise.problem.checks import fail, kind, mismatch

if TYPE_CHECKING:
    from typing import TypedDict

    from tilewise.backends.block_lists import Blocks
    from tilewise.problem.mask import Align
    from tilewise.problem.problem import Layout

    class ScoreOptions(TypedDict, total=False):
        """What the three functions share; `tilewise.attention` explains each."""

        causal: bool
        window: Window | None
        align: Align
        scale: float | None
        softcap: float | None
        alibi_slopes: torch.Tensor | None
        sink: torch.Tensor | None
        backend: str | None

    class TrainingOptions(ScoreOptions, total=False):
        """What attention and attention_varlen share beyond that."""

        bias: torch.Tensor | None
        score_mod: Callable[..., object] | None
        score_tensors: Sequence[torch.Tensor]
        mask_mod: Callable[..., object] | None
        mask_tensors: Sequence[torch.Tensor]
        dropout: float
        seed: int | torch.Tensor | None
        deterministic: bool
        fp8: bool

    class DenseOptions(TrainingOptions, total=False):
        """The keyword arguments of attention, but for return_lse."""

        mask: torch.Tensor | None
        kv_start: torch.Tensor | Sequence[int] | None
        kv_stop: torch.Tensor | Sequence[int] | None
        blocks: Blocks | None
        layout: Layout

    class VarlenOptions(TrainingOptions, total=False):
        """The keyword arguments of attention_varlen, but for return_lse."""

        max_seqlen_q: int | torch.Tensor | None
        max_seqlen_k: int | torch.Tensor | None
        block_table: torch.Tensor | None

    class CacheArguments(ScoreOptions, total=False):
        """The keyword arguments of attention_with_kvcache, but for return_lse."""

        k: torch.Tensor | None
        v: torch.Tensor | None
        cache_seqlens: int | torch.Tensor | Sequence[int] | None
        block_table: torch.Tensor | None
        cache_batch_idx: torch.Tensor | None
        cache_leftpad: torch.Tensor | None
        k_scale: torch.Tensor | None
        v_scale: torch.Tensor | None
        rotary_cos: torch.Tensor | None
        rotary_sin: torch.Tensor | None
        rotary_interleaved: bool
        num_splits: int | None
        batch_invariant: bool
        layout: Layout


Window = tuple["int | None", "int | None"]


# Tensors that a call can do without; k and v are among them where they are appended to a cache.
OPTIONAL = frozenset({"bias", "mask", "sink", "alibi_slopes", "cu_seqlens_k", "block_table"}) | frozenset(
    {"cache_batch_idx", "cache_leftpad", "k_scale", "v_scale", "rotary_cos", "rotary_sin"}
)


Function = Callable[..., object]


class Asked(NamedTuple):
    """What a call wants of functions of its own, as given to `tilewise.attention`."""

    score_mod: Function | None
    score_tensors: Sequence[torch.Tensor]
    mask_mod: Function | None
    mask_tensors: Sequence[torch.Tensor]
    blocks: Blocks | None = None


def check_tensors(**tensors: object) -> None:
    """Hold what should be tensors to ordinary torch tensors; None passes where a call can do without."""
    for name, x in tensors.items():
        if x is None and (name in OPTIONAL or (name in ("k", "v") and "k_cache" in tensors)):
            continue
        if not isinstance(x, torch.Tensor):
            mend = "It cannot be left out" if x is None else "NumPy arrays go to tilewise.reference"
            raise mismatch(f"{name} must be a torch tensor", type(x).__name__, mend)
        if x.is_nested:
            mend = "Pass x.values() and x.offsets() of its (total, heads, dim) form to attention_varlen"
            raise mismatch(f"{name} must be an ordinary tensor", "a nested tensor", mend)
        if x.layout is not torch.strided:
            raise mismatch(f"{name} must be an ordinary tensor", f"{x.layout}", f"Pass {name}.to_dense()")
        if name == "alibi_slopes" and x.requires_grad and torch.is_grad_enabled():
            raise fail("alibi_slopes get no gradient", "requires_grad=True", "Detach them, or pass the term as bias")


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


def sides(window: Window | Sequence[int | None] | None) -> Window:
    """Take the window apart: (left, right), None for an open side."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        got = f"{len(window)} sides" if isinstance(window, (tuple, list)) else kind(window)
        raise fail("window must be (left, right)", got, "Count the keys to each side; None leaves a side open")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, (int, torch.SymInt))):
            raise mismatch("window's sides must be ints or None", kind(side), "Count the keys to each side")
        if isinstance(side, int) and not -(2**63) <= side < 2**63:
            raise fail("window's sides must fit in 64 bits", side, "None leaves a side open")
    return window[0], window[1]


def seed_tensor(seed: int | torch.Tensor | None, dropout: float, q: torch.Tensor) -> torch.Tensor | None:
    """Give dropout's seed as a tensor on q's device, so that graph replays and checkpointing see it as data."""
    if not isinstance(dropout, (int, float, torch.SymFloat)):
        raise mismatch("dropout must be a number", kind(dropout), "Pass the probability of dropping")
    if isinstance(seed, torch.Tensor):
        check_tensors(seed=seed)
        return seed if dropout else None
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt))):
        raise mismatch("seed must be an int or a one-element int64 tensor", kind(seed), "None draws one")
    if isinstance(seed, int) and not -(2**63) <= seed < 2**64:
        raise fail("seed must fit in 64 bits", seed, "None draws one")
    if not dropout:
        return None
    if seed is None:
        return torch.randint(0, 2**63 - 1, (1,), device=q.device)
    wrapped = (seed + 2**63) % 2**64 - 2**63  # any 64-bit value, as int64 holds it
    return torch.full((1,), wrapped, dtype=torch.int64, device=q.device)


def integers_tensor(name: str, x: torch.Tensor | Sequence[int] | int | None, q: torch.Tensor) -> torch.Tensor | None:
    """Turn a list of ints into a tensor on q's device; a tensor passes."""
    if x is None:
        return None
    if isinstance(x, torch.Tensor):
        check_tensors(**{name: x})
        return x
    if not isinstance(x, (list, tuple)) or any(isinstance(value, bool) or not isinstance(value, int) for value in x):
        got = f"{type(x).__name__} of {', '.join(map(kind, x))}" if isinstance(x, (list, tuple)) else kind(x)
        raise mismatch(f"{name} must be an integer tensor or a list of ints", got, "Give one per sequence")
    for sequence, value in enumerate(x):
        if not 0 <= value < 2**31:
            raise fail(f"{name}[{sequence}] must be the number of a key", value, "Clamp it to [0, len_kv]")
    return torch.tensor(x, dtype=torch.int32, device=q.device)


def lengths_tensor(x: int | torch.Tensor | Sequence[int] | None, q: torch.Tensor) -> torch.Tensor | None:
    """Turn cache_seqlens into a tensor on q's device; one int is every sequence's length."""
    if isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool):
        if not 0 <= x < 2**31:
            raise fail("cache_seqlens must count the tokens held", x, "Pass 0 for an empty cache")
        return torch.full(q.shape[:1], x, dtype=torch.int32, device=q.device)
    return integers_tensor("cache_seqlens", x, q)


Parts = torch.Tensor | Sequence[torch.Tensor]


def merge_parts(outs: Parts, lses: Parts, sink: torch.Tensor | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Take partial results apart and hold them to shapes, dtypes and devices that go together."""
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)) and not (isinstance(parts, torch.Tensor) and parts.ndim):
            raise mismatch(
                f"{name} must be a list of tensors or a stack of them", kind(parts), "Pass one for each part"
            )
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise fail("merge needs one lse for each out, and at least one", f"{len(outs)} and {len(lses)}", "Pass pairs")
    for out, lse in zip(outs, lses, strict=True):
        check_tensors(out=out, lse=lse)
        if out.ndim not in (3, 4) or out.shape != outs[0].shape or out.dtype != outs[0].dtype:
            got = f"{tuple(out.shape)} {out.dtype} beside {tuple(outs[0].shape)} {outs[0].dtype}"
            raise fail(
                "outs must share one shape, of 3 or 4 axes, and one dtype", got, "Merge results of the same call"
            )
        want = tuple(out.shape[:3]) if out.ndim == 4 else (out.shape[1], out.shape[0])
        if not (out.is_floating_point() and lse.is_floating_point()):
            raise mismatch("outs and lses must be floating point", f"{out.dtype} and {lse.dtype}", "Convert them")
        if out.device != outs[0].device or lse.device != outs[0].device:
            raise fail(f"all parts must be on {outs[0].device}", f"{out.device} and {lse.device}", "Move them to one")
        if tuple(lse.shape) != want:
            raise fail(f"the lse of an out {tuple(out.shape)} must be {want}", tuple(lse.shape), "Use return_lse=True")
    if sink is not None:
        check_tensors(sink=sink)
        heads = outs[0].shape[1]
        fits = sink.shape == (heads,) or (outs[0].ndim == 4 and sink.shape == (outs[0].shape[0], heads))
        if not fits:
            raise fail(f"sink must be (heads,) = ({heads},) or (batch, heads)", tuple(sink.shape), "One number a head")
    return outs, lses
