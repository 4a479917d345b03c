"""Calls with functions of their own: a score_mod, a mask_mod, lists of tiles.

An operator's schema carries tensors and plain values, no functions. So these calls go to a torch.autograd.Function,
which holds the functions as they were traced, and compiled graphs break before them. The rest of the call is described,
checked and dispatched as ever, with `tilewise.problem.mods.Mods` beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from tilewise import dispatch
from tilewise.arguments import Asked, check_tensors, refuse_jvp
from tilewise.autograd import DIFFERENTIABLE, N_TENSORS, plain, problem_for, spec_of
from tilewise.backends.block_lists import Blocks, TileLists
from tilewise.mods.trace import Traced, trace_mask, trace_score
from tilewise.problem.checks import fail, kind, mismatch
from tilewise.problem.mods import Captured, Lists, Mods, ModTensors, captured_of
from tilewise.problem.problem import Needs, Options, Problem, Spec, Tensors
from tilewise.recall import ORDINARY, OutAndPerhapsLse, in_transform, remembered

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

ALONE = "Call it outside torch.func's transforms, fake tensors and tensor subclasses, or pass bias= and mask= instead"


def call(tensors: Tensors, options: Options, asked: Asked) -> OutAndPerhapsLse:
    """Run a call with functions of its own; in a compiled graph, outside of it.

    Raises:
        TypeError, ValueError: what is asked for is wrong, or cannot be translated or served.
        NotImplementedError: a transform or a fake tensor watches the call.
    """
    return (_outside if torch.compiler.is_compiling() else _run)(tensors, options, asked)


def _run(tensors: Tensors, options: Options, asked: Asked) -> OutAndPerhapsLse:
    options = options._replace(backend=options.backend or dispatch.requested())
    problem, together = describe(tensors, options, asked)
    captured = together.captured
    if dispatch.explaining.get():
        raise dispatch.Explained(dispatch.plan(problem, options.backend))
    everything = (*tensors, *captured.score, *captured.mask)
    refuse_jvp(everything)
    if in_transform() or not all(x is None or type(x) in ORDINARY for x in everything):
        raise NotImplementedError(f"attention with a score_mod or mask_mod takes ordinary tensors alone. {ALONE}")
    if _differentiates(tensors, captured):
        _check_gradients(problem, tensors, options, captured)
        out, lse = _WithMods.apply(problem, together, options, *tensors, *captured.score)  # type: ignore[no-untyped-call]
        return out, lse
    return _forward(problem, together, options)


def _forward(problem: Problem, together: ModTensors, options: Options) -> OutAndPerhapsLse:
    """Run the forward pass; a call like an earlier one finds it prepared."""
    like = problem, options.backend
    prepared = remembered(like)
    if prepared is None:
        return plain(problem, together, options, like)
    out, lse = prepared(together)
    return (out.transpose(1, 2) if options.layout == "bshd" else out), lse


def _differentiates(tensors: Tensors, captured: Captured) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, *captured.score))


_outside: Callable[[Tensors, Options, Asked], OutAndPerhapsLse] = torch.compiler.disable(
    _run, reason="tilewise: no operator carries a score_mod or mask_mod, so the graph breaks before the call"
)


def describe(tensors: Tensors, options: Options, asked: Asked) -> tuple[Problem, ModTensors]:
    """Check and trace what is asked for, and describe the call; like calls have the same description."""
    base = problem_for(tensors, options)
    problem, captured = _described(base, tensors, _checked(base, asked))
    return problem, ModTensors.of(tensors, captured)


# ---- what is asked ---------------------------------------------------------------------------------------------------


def _checked(problem: Problem, asked: Asked) -> Asked:
    """Hold functions, tensors and lists to their types and sizes, and give lists their own mask_mod."""
    for name, function in (("score_mod", asked.score_mod), ("mask_mod", asked.mask_mod)):
        if function is not None and not callable(function):
            raise mismatch(f"{name} must be a function", kind(function), "Write a Python function of positions")
    for name, function, given in (
        ("score_tensors", asked.score_mod, asked.score_tensors),
        ("mask_tensors", asked.mask_mod, asked.mask_tensors),
    ):
        if not isinstance(given, (tuple, list)):
            raise mismatch(f"{name} must be a tuple of tensors", kind(given), "Put a single one into a tuple")
        if given and function is None:
            raise fail(
                f"{name} go with a {name.partition('_')[0]}_mod", f"{len(given)} tensors", "Pass the function too"
            )
        check_tensors(**{f"{name}[{place}]": x for place, x in enumerate(given)})
    blocks = asked.blocks
    if blocks is None:
        return asked
    if not isinstance(blocks, Blocks):
        raise mismatch("blocks must be a tilewise Blocks", kind(blocks), "Make one with Blocks.of or Blocks.from_torch")
    if asked.mask_mod not in (None, blocks.mask_mod):  # by ==, since an object's method is another object each time
        raise fail(
            "blocks hold the mask_mod that they were made of", "another mask_mod beside them", "Leave mask_mod out"
        )
    _check_lists(problem, blocks)
    return asked._replace(mask_mod=blocks.mask_mod, mask_tensors=blocks.mask_tensors)


def _check_lists(problem: Problem, blocks: Blocks) -> None:
    if problem.kind != "dense":
        raise fail("blocks list the tiles of equal sequences", "packed ones", "Pass mask_mod without blocks")
    sizes = (blocks.batch, blocks.heads, blocks.len_q, blocks.len_kv)
    wanted = (problem.batch, problem.heads_q, problem.len_q, problem.len_kv)
    if sizes[2:] != wanted[2:] or any(got not in (1, want) for got, want in zip(sizes[:2], wanted[:2], strict=True)):
        raise fail(f"blocks must be of (batch or 1, heads_q or 1, len_q, len_kv) = {wanted}", sizes, "Make them anew")
    if str(blocks.device) != problem.device:
        raise fail(f"blocks must be on q's device {problem.device}", blocks.device, "Make them there, with device=")
    own = (blocks.left, blocks.right, blocks.offset if (blocks.left, blocks.right) != (None, None) else 0)
    band = _band(problem)
    if own[:2] != (None, None) and own != band:
        raise fail(
            f"the call's band (left, right, offset) is {band}", f"blocks of the band {own}", "Give both the same"
        )


def _band(problem: Problem) -> tuple[int | None, int | None, int]:
    band = problem.mask.band
    return band.left, band.right, 0 if band.is_open else band.offset(problem.len_q, problem.len_kv)


def _check_gradients(problem: Problem, tensors: Tensors, options: Options, captured: Captured) -> None:
    """Refuse gradients that no kernel sums as asked, before anything is launched."""
    if options.deterministic and any(wants(problem, captured)):
        raise fail(
            "deterministic=True cannot sum the gradients of a score_mod's tensors, which atomic additions gather",
            "a score tensor with requires_grad=True",
            "Detach it, pass what it adds as bias=, or leave deterministic False",
        )
    bias, blocks = tensors.bias, captured.blocks
    if bias is not None and bias.requires_grad and blocks is not None and not blocks.of_mask:
        raise fail(
            "bias gets no gradient beside lists of tiles that may say more than their mask_mod",
            "a bias with requires_grad=True and blocks of a BlockMask",
            "Make them with Blocks.of(mask_mod), or add the bias in a score_mod, as one of score_tensors",
        )


# ---- as a problem ----------------------------------------------------------------------------------------------------

_problems: dict[object, Problem] = {}
_PROBLEMS_KEPT = 4096


def _described(base: Problem, tensors: Tensors, asked: Asked) -> tuple[Problem, Captured]:
    """Trace the functions, gather their tensors, and describe the call; like descriptions are the same object."""
    score = mask = None
    score_tensors: tuple[torch.Tensor, ...] = ()
    mask_tensors: tuple[torch.Tensor, ...] = ()
    if asked.score_mod is not None:
        score, score_tensors = trace_score(asked.score_mod, tuple(asked.score_tensors))
    if asked.mask_mod is not None:
        mask, mask_tensors = trace_mask(asked.mask_mod, tuple(asked.mask_tensors))
    device = tensors.q.device
    captured = Captured(
        score=tuple(x.to(device) if x.ndim == 0 else x for x in score_tensors),
        mask=tuple(x.to(device) if x.ndim == 0 else x for x in mask_tensors),
        blocks=asked.blocks,
        score_function=None if score is None else score.run,
        mask_function=None if mask is None else mask.run,
    )
    specs = {f"score_tensors[{place}]": spec_of(x) for place, x in enumerate(captured.score)}
    specs |= {f"mask_tensors[{place}]": spec_of(x) for place, x in enumerate(captured.mask)}
    lists = None if asked.blocks is None else _lists_of(base, asked.blocks)
    with_lse = base.return_lse or _differentiates(tensors, captured)  # the gradients need it
    key = (base, with_lse, *_identity(score), *_identity(mask), lists, tuple(specs.items()))
    problem = _problems.get(key)
    if problem is None:
        _check_captured(base, specs)
        if len(_problems) >= _PROBLEMS_KEPT:
            _problems.clear()
        mods = Mods(score, mask, lists)
        problem = _problems[key] = replace(base, mods=mods, specs={**base.specs, **specs}, return_lse=with_lse)
    return problem, captured


def _identity(traced: Traced | None) -> tuple[object, ...]:
    return () if traced is None else (traced.kind, traced.key, tuple(map(repr, traced.constants)))


def _lists_of(problem: Problem, blocks: Blocks) -> Lists:
    """Say how the lists are made up, and whether a full tile is visible whatever else the call asks for."""
    mask = problem.mask
    banded = (blocks.left, blocks.right) != (None, None) or mask.band.is_open
    bare = banded and not mask.ranged and not mask.dense
    sizes = (blocks.batch, blocks.heads, blocks.tiles_q, blocks.tiles_kv, blocks.block_q, blocks.block_kv)
    return Lists(*sizes, bare)


def _check_captured(problem: Problem, specs: dict[str, Spec]) -> None:
    pairs = problem.batch * problem.heads_q * problem.total_q * problem.total_kv
    for name, spec in specs.items():
        if spec.device != problem.device:
            raise fail(f"{name} must be on q's device {problem.device}", spec.device, "Move it with .to(q.device)")
        if pairs and 0 in spec.shape:
            raise fail(f"{name} must have an element to read", f"shape {spec.shape}", "Leave it out of the function")


# ---- gradients -------------------------------------------------------------------------------------------------------


def wants(problem: Problem, captured: Captured) -> list[bool]:
    """Say which of the score_mod's tensors want a gradient that they can have."""
    score = None if problem.mods is None else problem.mods.score
    reached = () if score is None else score.differentiable
    return [x.requires_grad and reach for x, reach in zip(captured.score, reached, strict=True)]


def buffers(problem: Problem, score: Sequence[torch.Tensor], wanted: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
    """Make room for the gradients of the score_mod's tensors: float32, float64 beside float64."""
    wide = torch.float64 if problem.dtype == "float64" else torch.float32
    pairs = zip(score, wanted, strict=True)
    return tuple(torch.zeros(x.shape, dtype=wide, device=x.device) if want else None for x, want in pairs)


def _apart(captured: Captured) -> tuple[Captured, tuple[torch.Tensor, ...]]:
    """Take the tensors of the mask and of the lists out, for autograd to keep: it sees when they are written to.

    What is left holds no tensors: the functions that ran take them as arguments.
    """
    blocks = captured.blocks
    if blocks is None:
        return captured._replace(score=(), mask=()), captured.mask
    nothing = TileLists(*(blocks.by_query.partial.new_empty(0),) * 4)
    bare = replace(blocks, by_query=nothing, by_key=nothing, mask_mod=None, mask_tensors=())
    return captured._replace(score=(), mask=(), blocks=bare), (*blocks.by_query, *blocks.by_key, *captured.mask)


def _together(bare: Captured, kept: Sequence[torch.Tensor]) -> Captured:
    """Put back what `_apart` took out."""
    if bare.blocks is None:
        return bare._replace(mask=tuple(kept))
    blocks = replace(bare.blocks, by_query=TileLists(*kept[:4]), by_key=TileLists(*kept[4:8]))
    return bare._replace(blocks=blocks, mask=tuple(kept[8:]))


class _WithMods(torch.autograd.Function):
    """The call as autograd sees it."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, problem: Problem, together: ModTensors, options: Options, *flat: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run, and keep what the gradients need."""
        out, lse = _forward(problem, together, options)
        assert lse is not None  # noqa: S101 - the problem asks for it
        ctx.set_materialize_grads(False)
        captured = captured_of(together)
        bare, beside = _apart(captured)
        ctx.save_for_backward(*flat, out, lse, *beside)  # type: ignore[arg-type]  # None is allowed
        ctx.call = problem, options.backend, bare, wants(problem, captured)  # type: ignore[attr-defined]
        ctx.flat = len(flat)  # type: ignore[attr-defined]
        return out, lse

    @staticmethod
    def backward(
        ctx: FunctionCtx, d_out: torch.Tensor | None, d_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Differentiate, into buffers of float32 or wider for the score_mod's tensors."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "attention with a score_mod or mask_mod has no second derivative. Leave create_graph False, or pass "
                "what the functions do as bias= and mask="
            )
        saved: tuple[torch.Tensor | None, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        problem, backend, bare, wanted = ctx.call  # type: ignore[attr-defined]
        flat: int = ctx.flat  # type: ignore[attr-defined]
        found: list[torch.Tensor | None] = [None] * flat
        if d_out is None and d_lse is None:
            return None, None, None, *found
        score = cast("tuple[torch.Tensor, ...]", saved[N_TENSORS:flat])
        out, lse, *beside = cast("tuple[torch.Tensor, ...]", saved[flat:])
        into = buffers(problem, score, wanted)
        tensors = ModTensors.of(
            Tensors(*saved[:N_TENSORS]),  # type: ignore[arg-type]  # q, k and v are there
            _together(bare, beside)._replace(score=score, gradients=into),
        )
        needs = Needs(*(bool(ctx.needs_input_grad[3 + place]) for place in DIFFERENTIABLE))  # type: ignore[attr-defined]
        grads = dispatch.backward(problem, tensors, out, lse, d_out, d_lse, needs, backend)
        for place, needed, gradient in zip(DIFFERENTIABLE, needs, grads, strict=True):
            found[place] = gradient if needed else None
        for place, (x, gradient) in enumerate(zip(score, into, strict=True)):
            found[N_TENSORS + place] = None if gradient is None else gradient.to(x.dtype)
        return None, None, None, *found
