"""The operators: schema, shapes for tracing, first and second derivative, vmap.

``tilewise::attention`` and ``tilewise::attention_backward`` serve dense and varlen calls alike,
``tilewise::attention_with_kvcache`` decodes. Their bodies describe the problem, check it and dispatch. They are
defined with torch.library.Library, since the custom_op decorator costs far more host time a call.

Importing this file registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from tilewise import dispatch
from tilewise.arguments import refuse_jvp
from tilewise.backends.outputs import empty_lse, empty_out
from tilewise.backends.torch_double_backward import double_backward
from tilewise.problem.cache import CacheOptions, CacheTensors, check_cache_contents, describe_cache
from tilewise.problem.problem import Grads, Needs, Options, Problem, Spec, Tensors, check_contents, describe
from tilewise.recall import ORDINARY, OutAndPerhapsLse, Prepared, in_transform, is_watched, remember

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

_TENSORS = """Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? sink, Tensor? alibi_slopes,
    Tensor? kv_start, Tensor? kv_stop, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? block_table, Tensor? seed"""
_OPTIONS = """bool causal, SymInt? window_left, SymInt? window_right, str align, float? scale, float softcap,
    float dropout, bool deterministic, bool return_lse, str layout, SymInt? max_seqlen_q, SymInt? max_seqlen_k,
    str? backend"""
_CACHE = """Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, Tensor? cache_seqlens,
    Tensor? block_table, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? k_scale, Tensor? v_scale,
    Tensor? rotary_cos, Tensor? rotary_sin, Tensor? sink, Tensor? alibi_slopes, bool rotary_interleaved,
    SymInt? num_splits, bool batch_invariant, bool causal, SymInt? window_left, SymInt? window_right, str align,
    float? scale, float softcap, bool return_lse, str layout, str? backend"""

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define(f"attention({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward({_TENSORS}, Tensor out, Tensor lse, Tensor? d_out, Tensor? d_lse, {_OPTIONS}, bool[] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(f"attention_with_kvcache({_CACHE}) -> (Tensor, Tensor)")

N_TENSORS, N_OPTIONS = len(Tensors._fields), len(Options._fields)
DIFFERENTIABLE = tuple(Tensors._fields.index(name) for name in ("q", "k", "v", "bias", "sink"))

Results = tuple[torch.Tensor, torch.Tensor]  # out and lse

_problems: dict[object, Problem] = {}
_PROBLEMS_KEPT = 4096
HOST_READ = ("kv_start", "kv_stop", "cu_seqlens_q", "cu_seqlens_k", "block_table")
CACHE_HOST_READ = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table")


def problem_for(tensors: Tensors | CacheTensors, options: Options | CacheOptions) -> Problem:
    """Describe and check one call. Metadata that was met before is not checked again; contents of CPU tensors are."""
    grad = torch.is_grad_enabled()
    key = (
        options,
        *(None if x is None else (x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad) for x in tensors),
    )
    problem = _problems.get(key)
    if problem is None:
        specs = {name: spec_of(x) for name, x in tensors._asdict().items() if x is not None}
        problem = _describe(specs, options)
        if len(_problems) >= _PROBLEMS_KEPT:
            _problems.clear()
        _problems[key] = problem
    if problem.device == "cpu":
        given = _host_read(tensors)
        if given:
            contents = {name: x.flatten().tolist() for name, x in given.items()}
            (check_contents if isinstance(tensors, Tensors) else check_cache_contents)(problem, contents)
    return problem


def _host_read(tensors: Tensors | CacheTensors) -> dict[str, torch.Tensor]:
    """Give the tensors whose contents are checked where the host can read them."""
    names = HOST_READ if isinstance(tensors, Tensors) else CACHE_HOST_READ
    return {name: getattr(tensors, name) for name in names if getattr(tensors, name) is not None}


def _describe(specs: Mapping[str, Spec], options: Options | CacheOptions) -> Problem:
    return describe(specs, options) if isinstance(options, Options) else describe_cache(specs, options)


def spec_of(x: torch.Tensor) -> Spec:
    """Take a tensor's metadata."""
    grad = torch.is_grad_enabled() and x.requires_grad
    return Spec(tuple(x.shape), x.stride(), str(x.dtype).removeprefix("torch."), str(x.device), grad)


# ---- forward --------------------------------------------------------------------------------------------------------


def run(tensors: Tensors, options: Options) -> Results:
    """Run one call without the operator around it: for callers that need no gradient and no tracing."""
    return dispatch.forward(problem_for(tensors, options), tensors, options.backend)


def _forward(*args: object) -> Results:
    return run(*_split(args))


def _forward_fake(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, options = _split(args)
    return empty_out(tensors.q, tensors.v.shape[-1], options.layout), empty_lse(tensors.q)


def _split(args: tuple[object, ...]) -> tuple[Tensors, Options]:
    return Tensors(*args[:N_TENSORS]), Options(*args[N_TENSORS:])  # type: ignore[arg-type]  # the schema's order


def _forward_setup(ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensors, options = _split(inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)  # type: ignore[arg-type]  # None is allowed
    ctx.options = options  # type: ignore[attr-defined]


def _forward_backward(
    ctx: FunctionCtx, d_out: torch.Tensor | None, d_lse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    return (*_gradients(ctx, d_out, d_lse, _call_backward), *[None] * N_OPTIONS)


def _gradients(
    ctx: FunctionCtx,
    d_out: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    differentiate: Callable[..., tuple[torch.Tensor, ...]],
) -> list[torch.Tensor | None]:
    """Give the gradient of each of `Tensors`, None where it is not needed."""
    gradients: list[torch.Tensor | None] = [None] * N_TENSORS
    if d_out is None and d_lse is None:
        return gradients
    *tensors, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
    needs = [bool(ctx.needs_input_grad[index]) for index in DIFFERENTIABLE]  # type: ignore[attr-defined]
    options: Options = ctx.options  # type: ignore[attr-defined]
    found = differentiate(*tensors, out, lse, d_out, d_lse, *options, needs)
    for index, needed, gradient in zip(DIFFERENTIABLE, needs, found, strict=True):
        gradients[index] = gradient if needed else None
    return gradients


class _Eager(torch.autograd.Function):
    """The forward operator where nothing but a gradient must see it: the same without the dispatcher's host time."""

    @staticmethod
    def forward(ctx: FunctionCtx, *args: object) -> Results:
        """Run on the tensors and an Options, and keep what the gradients need."""
        *given, options = args
        tensors = Tensors(*given)  # type: ignore[arg-type]  # in the order of its fields
        out, lse = run(tensors, options)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse)  # type: ignore[arg-type]  # None is allowed
        ctx.options = options  # type: ignore[attr-defined]
        return out, lse

    @staticmethod
    def backward(
        ctx: FunctionCtx, d_out: torch.Tensor | None, d_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Differentiate; through the operator where a second derivative may follow."""
        differentiate = _call_backward if torch.is_grad_enabled() or is_watched() else _backward
        return (*_gradients(ctx, d_out, d_lse, differentiate), None)


# ---- backward -------------------------------------------------------------------------------------------------------


def _backward(*args: object) -> tuple[torch.Tensor, ...]:
    tensors, (out, lse, d_out, d_lse), options, needs = _split_backward(args)
    problem = problem_for(tensors, options)
    grads = dispatch.backward(problem, tensors, out, lse, d_out, d_lse, needs, options.backend)
    return tuple(tensors.q.new_empty(0) if grad is None else grad for grad in grads)


def _backward_fake(*args: object) -> tuple[torch.Tensor, ...]:
    tensors, _, _, needs = _split_backward(args)
    inputs = (tensors.q, tensors.k, tensors.v, tensors.bias, tensors.sink)
    return tuple(
        torch.empty_like(x) if need and x is not None else tensors.q.new_empty(0)
        for x, need in zip(inputs, needs, strict=True)
    )


Saved = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"]


def _split_backward(args: tuple[object, ...]) -> tuple[Tensors, Saved, Options, Needs]:
    stop = N_TENSORS + 4
    tensors, saved, options, needs = args[:N_TENSORS], args[N_TENSORS:stop], args[stop:-1], args[-1]
    # In the order of the schema.
    return Tensors(*tensors), tuple(saved), Options(*options), Needs(*needs)  # type: ignore[arg-type,misc,return-value]


def _backward_setup(ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[torch.Tensor, ...]) -> None:
    tensors, saved, options, needs = _split_backward(inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *saved)  # type: ignore[arg-type]  # None is allowed
    ctx.options, ctx.needs = options, needs  # type: ignore[attr-defined]


class _Last(torch.autograd.Function):
    """Hands on second derivatives and refuses to be differentiated.

    torch's once_differentiable is not enough: it ties its refusal to nothing, and torch.autograd.grad walks past it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Hand on the first ``count`` tensors; the others are what they came from."""
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[object, ...]) -> None:
        """Nothing is needed to refuse."""

    @staticmethod
    def backward(ctx: FunctionCtx, *_: torch.Tensor) -> None:
        """Refuse."""
        raise NotImplementedError(
            "attention has no third derivative; two are there. Use backend-free operators where more are needed, "
            "such as torch.softmax(q @ k.mT * scale, -1) @ v"
        )


def _backward_backward(ctx: FunctionCtx, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    tensors, (out, lse, d_out, d_lse) = Tensors(*saved[:N_TENSORS]), saved[N_TENSORS:]
    options: Options = ctx.options  # type: ignore[attr-defined]
    needs: Needs = ctx.needs  # type: ignore[attr-defined]
    arriving = Grads(*(g if need else None for g, need in zip(cotangents, needs, strict=True)))
    with torch.no_grad():
        second = double_backward(problem_for(tensors, options), tensors, out, lse, d_out, d_lse, arriving)
    grads: list[torch.Tensor | None] = [None] * (N_TENSORS + 4 + N_OPTIONS + 1)
    for index, grad in zip((*DIFFERENTIABLE, *range(N_TENSORS, N_TENSORS + 4)), second, strict=True):
        original = saved[index]
        grads[index] = None if original is None or grad is None else grad.to(original.dtype)
    if torch.is_grad_enabled():
        return _Last.apply(len(grads), *grads, *saved, *cotangents)  # type: ignore[no-any-return,no-untyped-call]
    return tuple(grads)


# ---- decoding -------------------------------------------------------------------------------------------------------


def _cache(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, options = _split_cache(args)
    return dispatch.decode(problem_for(tensors, options), tensors, options.backend)


def _cache_fake(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, _ = _split_cache(args)
    q = tensors.q.transpose(1, 2)
    return empty_out(q, tensors.v_cache.shape[-1], "bshd").transpose(1, 2), empty_lse(q)


def _split_cache(args: tuple[object, ...]) -> tuple[CacheTensors, CacheOptions]:
    count = len(CacheTensors._fields)
    return CacheTensors(*args[:count]), CacheOptions(*args[count:])  # type: ignore[arg-type]  # the schema's order


# ---- torch.func -----------------------------------------------------------------------------------------------------


def _each(op: torch._ops.OpOverload):  # type: ignore[no-untyped-def]  # the shape that register_vmap asks for
    """Make a vmap rule that runs the operator once a sample and stacks the results."""

    def rule(info, in_dims, *args):  # type: ignore[no-untyped-def]
        samples = []
        for sample in range(info.batch_size):
            pairs = zip(args, in_dims, strict=True)
            samples.append(op(*(x.select(dim, sample) if isinstance(dim, int) else x for x, dim in pairs)))
        stacked = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


class _Functional(torch.autograd.Function):
    """The forward operator for torch.func.grad and its kin, which do not see an operator's registered derivative."""

    forward = staticmethod(torch.ops.tilewise.attention.default)
    setup_context = staticmethod(_forward_setup)
    backward = staticmethod(_forward_backward)
    vmap = staticmethod(_each(torch.ops.tilewise.attention.default))


class _FunctionalBackward(torch.autograd.Function):
    """The backward operator, likewise."""

    forward = staticmethod(torch.ops.tilewise.attention_backward.default)
    setup_context = staticmethod(_backward_setup)
    backward = staticmethod(_backward_backward)
    vmap = staticmethod(_each(torch.ops.tilewise.attention_backward.default))


def _call_backward(*args: object) -> tuple[torch.Tensor, ...]:
    backward = _FunctionalBackward.apply if in_transform() else torch.ops.tilewise.attention_backward
    result: tuple[torch.Tensor, ...] = backward(*args)  # type: ignore[no-untyped-call]
    return result


_library.impl("attention", _forward, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
_library.impl("attention_with_kvcache", _cache, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::attention", _forward_fake, lib=_library)
torch.library.register_fake("tilewise::attention_backward", _backward_fake, lib=_library)
torch.library.register_fake("tilewise::attention_with_kvcache", _cache_fake, lib=_library)
torch.library.register_autograd("tilewise::attention", _forward_backward, setup_context=_forward_setup, lib=_library)
torch.library.register_autograd(
    "tilewise::attention_backward", _backward_backward, setup_context=_backward_setup, lib=_library
)
torch.library.register_vmap("tilewise::attention", _each(torch.ops.tilewise.attention.default), lib=_library)
torch.library.register_vmap(
    "tilewise::attention_backward", _each(torch.ops.tilewise.attention_backward.default), lib=_library
)


# ---- calling --------------------------------------------------------------------------------------------------------


def call(tensors: Tensors, options: Options, like: object = None) -> OutAndPerhapsLse:
    """Run a call, through the operator where something must see it: a gradient, a transform, a mode or a tracer.

    ``like`` is what `tilewise.recall` gave: where not None, calls that are like this one need not come here again.
    """
    if not torch.compiler.is_compiling():
        options = options._replace(backend=options.backend or dispatch.requested())
        if dispatch.explaining.get():
            raise dispatch.Explained(dispatch.plan(problem_for(tensors, options), options.backend))
        refuse_jvp(tensors)
        if _is_plain(tensors):
            return plain(problem_for(tensors, options), tensors, options, like)
        if not is_watched():  # below, the schema would judge types, and the body would see no gradient
            problem_for(tensors, options)
            if all(x is None or type(x) in ORDINARY for x in tensors):
                eager: Results = _Eager.apply(*tensors, options)  # type: ignore[no-untyped-call]
                return eager
    forward = _Functional.apply if in_transform() else torch.ops.tilewise.attention
    result: Results = forward(*tensors, *options)  # type: ignore[no-untyped-call]
    return result


def plain(problem: Problem, tensors: Tensors, options: Options, like: object) -> OutAndPerhapsLse:
    """Run a call that nothing watches, prepared where it can be, so that `recall` finds it."""
    prepared = dispatch.prepared(problem, options.backend)
    if prepared is None:
        return dispatch.forward(problem, tensors, options.backend)
    if not (problem.device == "cpu" and _host_read(tensors)):
        remember(like, prepared)
    out, lse = prepared(tensors)
    return (out.transpose(1, 2) if options.layout == "bshd" else out), lse


def call_cache(
    tensors: CacheTensors, options: CacheOptions, length: int | None, like: object = None
) -> OutAndPerhapsLse:
    """Run a decoding call likewise; ``length`` is what the caller gave as an int for all of cache_seqlens."""
    if not torch.compiler.is_compiling():
        options = options._replace(backend=options.backend or dispatch.requested())
        problem = problem_for(tensors, options)
        if length is not None:
            check_cache_contents(problem, {"cache_seqlens": [length]})
        if dispatch.explaining.get():
            raise dispatch.Explained(dispatch.plan(problem, options.backend))
        refuse_jvp(tensors)
        if _is_plain(tensors):
            prepared = dispatch.prepared(problem, options.backend)
            if prepared is None:
                return dispatch.decode(problem, tensors, options.backend)
            if not (problem.device == "cpu" and _host_read(tensors)):
                remember(like, _turned(prepared) if options.layout == "bhsd" else prepared)
            return prepared(tensors)
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.tilewise.attention_with_kvcache(*tensors, *options)
    return result


def _turned(prepared: Prepared) -> Prepared:
    """Give out as (batch, heads, len, dim): prepared decoding gives (batch, len, heads, dim)."""

    def run(given: Sequence[torch.Tensor | None]) -> OutAndPerhapsLse:
        out, lse = prepared(given)
        return out.transpose(1, 2), lse

    return run


def _is_plain(tensors: Tensors | CacheTensors) -> bool:
    """Say whether the call can skip the operator: ordinary tensors, no gradient, no transform and no mode."""
    if is_watched():
        return False
    grad = torch.is_grad_enabled()
    return not any(x is not None and (type(x) not in ORDINARY or (grad and x.requires_grad)) for x in tensors)
