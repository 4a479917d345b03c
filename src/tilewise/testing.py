"""Named cases, the oracle and the error budget: shared by the tests, the benchmark and the tuner.

The judge is `tilewise.backends.naive` in float64, on inputs that were drawn in the dtype under test. How far a
result may be from it is not a constant but a measurement: what the same formula loses in that dtype (`yardstick`).
For each of out, lse, dq, dk, dv, dbias and dsink,

    max|err|  <= 2 * max|err of the yardstick| + 2 * eps * max|ref|
    mean|err| <= 1.5 * mean|err of the yardstick| + eps * mean|ref|

and infinities and NaN must stand where the oracle has them. What the untiled formula does not lose is added:

- A score is a sum whose order is free. Rounding moves it, and so lse, by ``eps(lse) * spread`` (`spread`).
- Gradients come from a stored lse. Its error moves every probability by ``eps(lse) * (max|lse| + max spread)``.
- Gradients come from a stored out, whose rounding moves delta: `widened` counts what follows as the yardstick's error.
- float64 has no better oracle than itself: the order of summation adds ``sqrt(len_kv) * eps``.

docs/adr/0002 and 0008 give the reasons.

>>> case = CASES["causal"]
>>> call = case.build("cpu", "float32")
>>> report = check(run(call, "torch_tiled"), call)
>>> sorted(report)
['dk', 'dq', 'dv', 'lse', 'out']
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from tilewise import autograd, dispatch
from tilewise.arguments import Asked
from tilewise.problem.mods import ModTensors, captured_of
from tilewise.problem.problem import Needs, Options, Problem, Tensors


class Results(NamedTuple):
    """What one call gives, forward and backward; None for what it has not."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    dbias: torch.Tensor | None = None
    dsink: torch.Tensor | None = None
    dtensors: tuple[torch.Tensor, ...] = ()  # of a score_mod's floating point tensors


@dataclass(frozen=True)
class Call:
    """One call with its data: tensors, options, the gradients that arrive for out and lse, and functions of its own."""

    tensors: Tensors
    options: Options
    d_out: torch.Tensor
    d_lse: torch.Tensor
    asked: Asked | None = None

    @property
    def problem(self) -> Problem:
        """The call's description."""
        return self.described()[0]

    def described(self) -> tuple[Problem, Tensors]:
        """Give the call's description and its tensors, with those of its functions."""
        if self.asked is None:
            return autograd.problem_for(self.tensors, self.options), self.tensors
        from tilewise import autograd_mods

        return autograd_mods.describe(self.tensors, self.options, self.asked)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Call:
        """Convert all floating point data to a dtype, and move everything to a device."""

        def move(x: torch.Tensor) -> torch.Tensor:
            return x.to(device, dtype if x.is_floating_point() else None)

        moved = [None if x is None else move(x) for x in self.tensors]
        tensors = Tensors(*moved)  # type: ignore[arg-type]  # q, k and v are not None
        asked = self.asked
        if asked is not None:
            score, mask = (tuple(map(move, given)) for given in (asked.score_tensors, asked.mask_tensors))
            asked = asked._replace(score_tensors=score, mask_tensors=mask)
        return replace(self, tensors=tensors, d_out=move(self.d_out), d_lse=move(self.d_lse), asked=asked)


@dataclass(frozen=True)
class Case:
    """One named problem. Lengths of a varlen case are per sequence; ``tail`` tokens belong to none.

    ``bias`` and ``mask`` give the shape of a dense tensor by letters: "bhqk" is full, a "1" broadcasts that axis.
    ``ranges`` gives (kv_start, kv_stop) per sequence. ``strided`` hands tensors in as views inside wider storage.
    """

    name: str
    batch: int = 2
    heads_q: int = 2
    heads_kv: int = 2
    len_q: int = 37
    len_kv: int = 37
    dim_qk: int = 16
    dim_v: int = 16
    lengths_q: tuple[int, ...] = ()
    lengths_kv: tuple[int, ...] = ()
    tail: int = 0
    bias: str = ""
    mask: str = ""
    ranges: tuple[tuple[int, int], ...] = ()
    alibi: str = ""
    sink: str = ""
    sink_mean: float = 0.0
    strided: bool = False
    options: Options = field(default_factory=Options)

    @property
    def varlen(self) -> bool:
        """True for packed sequences."""
        return bool(self.lengths_q)

    def build(self, device: str, dtype: str, seed: int = 0) -> Call:
        """Draw the data from normal distributions, in the dtype itself. Tensors lie inside NaN margins."""
        draw = _Draw(device, getattr(torch, dtype), seed, self.strided)
        total_q, total_kv = sum(self.lengths_q) + self.tail, sum(self.lengths_kv or self.lengths_q) + self.tail
        cu_q = cu_k = kv_start = kv_stop = mask = None
        shape_q: tuple[int, ...]
        shape_k: tuple[int, ...]
        lse_shape: tuple[int, ...]
        out_shape: tuple[int, ...]
        if self.varlen:
            shape_q, shape_k = (total_q, self.heads_q), (total_kv, self.heads_kv)
            cu_q, cu_k = _cumulative(self.lengths_q, device), _cumulative(self.lengths_kv or self.lengths_q, device)
            axes = {"h": self.heads_q, "q": total_q, "k": max(self.lengths_kv or self.lengths_q, default=0)}
            batch, out_shape, lse_shape = len(self.lengths_q), (*shape_q, self.dim_v), (self.heads_q, total_q)
        else:
            shape_q, shape_k = (self.batch, self.heads_q, self.len_q), (self.batch, self.heads_kv, self.len_kv)
            axes = {"b": self.batch, "h": self.heads_q, "q": self.len_q, "k": self.len_kv}
            batch, out_shape, lse_shape = self.batch, (*shape_q, self.dim_v), shape_q
        axes["1"] = 1
        if self.mask:
            mask = draw.normal([axes[letter] for letter in self.mask]) > -0.5
        if self.ranges:
            kv_start, kv_stop = (torch.tensor(side, device=device) for side in zip(*self.ranges, strict=True))
        heads = {"h": (self.heads_q,), "bh": (batch, self.heads_q)}
        tensors = Tensors(
            q=draw.normal((*shape_q, self.dim_qk)),
            k=draw.normal((*shape_k, self.dim_qk)),
            v=draw.normal((*shape_k, self.dim_v)),
            bias=draw.normal([axes[letter] for letter in self.bias]) if self.bias else None,
            mask=mask,
            sink=draw.normal(heads[self.sink]).add_(self.sink_mean) if self.sink else None,
            alibi_slopes=draw.normal(heads[self.alibi]).abs() * 0.25 if self.alibi else None,
            kv_start=kv_start,
            kv_stop=kv_stop,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            seed=torch.tensor([1234567890123 + seed], device=device) if self.options.dropout else None,
        )
        d_lse = draw.normal(lse_shape)
        return Call(
            tensors, self.options, draw.normal(out_shape), d_lse.double() if dtype == "float64" else d_lse.float()
        )


@dataclass
class _Draw:
    device: str
    dtype: torch.dtype
    seed: int
    strided: bool

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, shape: tuple[int, ...] | list[int]) -> torch.Tensor:
        """Draw a tensor; when strided, as a view of every axis of a larger NaN-filled tensor."""
        data = torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)
        if not self.strided:
            return data
        wide = torch.full([size + 3 for size in shape], math.nan, dtype=self.dtype, device=self.device)
        view = wide[tuple(slice(1, size + 1) for size in shape)]
        return view.copy_(data)


def _cumulative(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


_options = partial(Options, return_lse=True)

_VARLEN = (5, 0, 41, 1, 17)
_VARLEN_KV = (9, 4, 41, 0, 3)

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("plain", options=_options()),
        Case("causal", options=_options(causal=True)),
        Case("causal, more keys than queries", len_q=20, options=_options(causal=True)),
        Case("causal, more queries than keys: empty rows", len_kv=20, options=_options(causal=True)),
        Case("causal top-left, more keys", len_q=20, options=_options(causal=True, align="top_left")),
        Case("causal top-left, more queries", len_kv=20, options=_options(causal=True, align="top_left")),
        Case("window", options=_options(window_left=7, window_right=3)),
        Case("window left alone", options=_options(window_left=5)),
        Case("window of the diagonal alone", options=_options(window_left=0, window_right=0)),
        Case("window wider than the keys", options=_options(window_left=100, window_right=100)),
        Case("causal window", options=_options(causal=True, window_left=9, window_right=4)),
        Case("one key head for all", heads_q=6, heads_kv=1, options=_options(causal=True)),
        Case("three query heads a key head", heads_q=6, heads_kv=2, options=_options(causal=True)),
        Case("softcap", options=_options(softcap=1.5)),
        Case("negative scale", options=_options(scale=-0.3)),
        Case("ALiBi", alibi="h", options=_options(causal=True)),
        Case("ALiBi per batch, both directions", alibi="bh", options=_options()),
        Case("bias", bias="bhqk", options=_options()),
        Case("bias over heads and queries", bias="b11k", options=_options()),
        Case("bias over the batch and keys", bias="1hq1", options=_options()),
        Case("bias of two axes", bias="qk", options=_options(causal=True)),
        Case("mask", mask="bhqk", options=_options()),
        Case("mask over heads", mask="b1qk", options=_options(causal=True)),
        Case("padding mask", mask="b11k", options=_options()),
        Case("sink", sink="h", options=_options()),
        Case("sink per batch", sink="bh", options=_options(causal=True)),
        Case("sink far below, beside empty rows", len_kv=20, sink="h", sink_mean=-300.0, options=_options(causal=True)),
        Case("left padding", ranges=((5, 37), (0, 37)), options=_options(causal=True)),
        Case("right padding", ranges=((0, 20), (0, 37)), options=_options()),
        Case("padding on both sides", ranges=((3, 30), (11, 12)), options=_options()),
        Case("a sequence of padding alone", ranges=((0, 37), (9, 9)), options=_options(causal=True)),
        Case("other head dim for v", dim_qk=24, dim_v=8, options=_options(causal=True)),
        Case("odd head dims", dim_qk=7, dim_v=13, options=_options()),
        Case("head dim 1", dim_qk=1, dim_v=1, options=_options()),
        Case("one query", len_q=1, options=_options(causal=True)),
        Case("one key", len_kv=1, options=_options()),
        Case(
            "longer than a tile", batch=1, heads_q=1, heads_kv=1, len_q=600, len_kv=1100, options=_options(causal=True)
        ),
        Case("dropout", options=_options(dropout=0.3)),
        Case("dropout, causal, grouped heads", heads_q=4, options=_options(dropout=0.1, causal=True)),
        Case("strided views", strided=True, heads_q=4, bias="bhqk", sink="h", options=_options(causal=True)),
        Case("layout bshd", options=_options(causal=True, layout="bshd")),
        Case(
            "many at once",
            heads_q=4,
            len_q=29,
            bias="1hqk",
            mask="b1qk",
            sink="h",
            alibi="h",
            ranges=((2, 33), (0, 30)),
            options=_options(causal=True, window_left=20, softcap=3.0, dropout=0.2),
        ),
        Case("packed", lengths_q=_VARLEN, options=_options()),
        Case("packed causal with a tail", lengths_q=_VARLEN, tail=3, heads_q=4, options=_options(causal=True)),
        Case("packed, other keys", lengths_q=_VARLEN, lengths_kv=_VARLEN_KV, options=_options(causal=True)),
        Case("packed, window", lengths_q=_VARLEN, options=_options(window_left=4, window_right=2)),
        Case("packed, bias and sink", lengths_q=_VARLEN, bias="hqk", sink="bh", tail=2, options=_options()),
        Case(
            "packed, many at once",
            lengths_q=_VARLEN,
            lengths_kv=_VARLEN_KV,
            heads_q=4,
            bias="1qk",
            sink="h",
            alibi="bh",
            options=_options(causal=True, softcap=2.0, dropout=0.2, align="top_left"),
        ),
    )
}


# ---- running --------------------------------------------------------------------------------------------------------


def run(call: Call, backend: str, *, gradients: bool = True) -> Results:
    """Run a call on one backend, forward and backward, below autograd.

    Raises:
        ValueError: the backend cannot serve the call, with its reason.
    """
    problem, tensors = call.described()
    if call.asked is not None and backend == "naive":
        tensors = _untraced(tensors, call.asked)
    out, lse = dispatch.forward(problem, tensors, backend)
    if not gradients:
        return Results(out, lse)
    needs = Needs(dbias=tensors.bias is not None, dsink=tensors.sink is not None)
    tensors, into = _with_room(problem, tensors)
    grads = dispatch.backward(problem, tensors, out, lse, call.d_out, call.d_lse, needs, backend)
    return Results(out, lse, *grads, dtensors=into)


def _untraced(tensors: Tensors, asked: Asked) -> Tensors:
    """Let the formula call the user's functions themselves, which owes nothing to how they were traced."""
    captured = captured_of(tensors)
    if len(captured.score) > len(asked.score_tensors) or len(captured.mask) > len(asked.mask_tensors):
        return tensors  # closures hold tensors of another dtype than the formula's
    score, mask = asked.score_mod, asked.mask_mod

    def plainly(function: Callable[..., object] | None) -> Callable[..., torch.Tensor] | None:
        return None if function is None else lambda *given: torch.as_tensor(function(*given[:-1], *given[-1]))

    changed = captured._replace(score_function=plainly(score), mask_function=plainly(mask) or captured.mask_function)
    return ModTensors.of(tensors, changed)


def _with_room(problem: Problem, tensors: Tensors) -> tuple[Tensors, tuple[torch.Tensor, ...]]:
    """Ask for the gradients of a score_mod's floating point tensors, and make room for them."""
    captured = captured_of(tensors)
    wide = torch.float64 if problem.dtype == "float64" else torch.float32
    into = tuple(torch.zeros_like(x, dtype=wide) if x.is_floating_point() else None for x in captured.score)
    asking = ModTensors.of(tensors, captured._replace(gradients=into)) if captured.score else tensors
    return asking, tuple(x for x in into if x is not None)


def oracle(call: Call, *, gradients: bool = True) -> Results:
    """Compute what is right: the untiled formula in float64."""
    return _formula(call.to(torch.float64), gradients)


def yardstick(call: Call, *, gradients: bool = True) -> Results:
    """Compute what the untiled formula loses in the call's own dtype (lse: in float32 at least).

    Raises:
        ArithmeticError: a value is NaN where the oracle's is not: the case's data are too large for the dtype.
    """
    return _formula(call, gradients)


def _formula(call: Call, gradients: bool) -> Results:
    """Run the untiled formula; on the CPU where it would have to read packed sequences' bounds from a device."""
    device = call.tensors.q.device
    if call.problem.kind == "varlen" and device.type != "cpu":
        found = run(call.to(device="cpu"), "naive", gradients=gradients)
        moved = (None if x is None else x.to(device) for x in found[:-1])
        return Results(*moved, dtensors=tuple(x.to(device) for x in found.dtensors))  # type: ignore[arg-type,misc]
    return run(call, "naive", gradients=gradients)


def spread(call: Call) -> torch.Tensor:
    """Add up the sizes of what scores are sums of: the lse of |q|, |k| and |scale| alone, in lse's shape.

    However a score's dim_qk products are added, rounding moves it by about an eps of the sum of their absolute values,
    which is many times the score where they cancel. In a row that sees few keys that is many times lse.
    """
    given, asked = call.tensors, call.asked
    if asked is not None:  # the user's mask stays
        shown = asked.mask_mod is not None or asked.blocks is not None
        asked = asked._replace(score_mod=None, score_tensors=()) if shown else None
    tensors = given._replace(q=given.q.abs(), k=given.k.abs(), bias=None, sink=None, alibi_slopes=None)
    options = call.options._replace(scale=abs(call.problem.score.scale), softcap=0.0, dropout=0.0)
    sizes = replace(call, tensors=tensors, options=options, asked=asked)
    return _formula(sizes.to(torch.promote_types(given.q.dtype, torch.float32)), gradients=False).lse


def widened(low: Results, ref: Results, call: Call) -> Results:
    """Widen the yardstick's gradients by what a backward pass loses that takes delta from the stored out.

    The gradients are linear in d_out and d_lse, and delta enters beside d_lse: an error of delta acts as a d_lse.
    """
    arriving = delta_error(low, ref, call.d_out)
    arriving = arriving.mT if call.problem.kind == "varlen" else arriving
    off = replace(call.to(torch.float64), d_out=torch.zeros_like(ref.out), d_lse=arriving)
    return worse(low, ref, _formula(off, gradients=True))


def delta_error(low: Results, ref: Results, d_out: torch.Tensor) -> torch.Tensor:
    """Say how far ``delta = sum(out * d_out)`` may be off in each row when out is as wrong as the yardstick's.

    That is two standard deviations of the sum, for errors of out of these sizes and of random signs. The sum itself
    is no measure: in one row of twenty it is by luck below a sixteenth of a deviation. It gives the sign.
    """
    away = (low.out.double() - ref.out) * d_out.double()
    return 2 * away.square().sum(-1).sqrt().copysign(away.sum(-1))


def worse(low: Results, ref: Results, off: Results) -> Results:
    """Move each number of the yardstick's gradients to ``ref + off`` where that is farther from the oracle."""

    def move(x: torch.Tensor | None, right: torch.Tensor | None, away: torch.Tensor | None) -> torch.Tensor | None:
        if x is None or right is None or away is None:
            return None
        return torch.where(away.abs() > (x - right).abs(), right + away, x)

    moved = {name: move(*map(attrgetter(name), (low, ref, off))) for name in ("dq", "dk", "dv", "dbias", "dsink")}
    tensors = map(move, low.dtensors, ref.dtensors, off.dtensors)
    return Results(low.out, low.lse, **moved, dtensors=tuple(x for x in tensors if x is not None))


@dataclass(frozen=True)
class Error:
    """How far one tensor is from the oracle, beside what it may be."""

    max: float
    mean: float
    max_budget: float
    mean_budget: float

    @property
    def within(self) -> bool:
        """True where the budget holds."""
        return self.max <= self.max_budget and self.mean <= self.mean_budget


def error(
    got: torch.Tensor,
    ref: torch.Tensor,
    low: torch.Tensor,
    eps: float,
    terms: float = 0.0,
    spread: torch.Tensor | None = None,
) -> Error:
    """Measure a tensor against the oracle; ``terms`` more eps of ref and one of ``spread`` widen the bounds.

    A tensor whose infinities or NaN stand elsewhere than the oracle's has an infinite error.

    Raises:
        ArithmeticError: the yardstick itself is not finite where the oracle is.
    """
    if got.shape != ref.shape:
        raise ValueError(f"shapes differ: got {tuple(got.shape)}, the oracle has {tuple(ref.shape)}")
    ref, got, low = ref.double(), got.double(), low.double()
    finite = torch.isfinite(ref)
    if not bool(torch.isfinite(low[finite]).all()):
        raise ArithmeticError("the yardstick is not finite where the oracle is: draw smaller data for this dtype")
    if not torch.equal(torch.where(finite, 0, got).nan_to_num(), torch.where(finite, 0, ref).nan_to_num()):
        return Error(math.inf, math.inf, 0.0, 0.0)  # nan_to_num keeps infinities apart by sign
    if not torch.equal(torch.isnan(got), torch.isnan(ref)) or not torch.equal(torch.isfinite(got), finite):
        return Error(math.inf, math.inf, 0.0, 0.0)
    if not bool(finite.any()):
        return Error(0.0, 0.0, 0.0, 0.0)
    err, err_low, size = (got - ref)[finite].abs(), (low - ref)[finite].abs(), ref[finite].abs()
    sums = torch.zeros_like(size) if spread is None else _finite(spread)[finite]
    most = 2 * err_low.max().item() + eps * ((2 + terms) * size.max() + sums.max()).item()
    mean = 1.5 * err_low.mean().item() + eps * ((1 + terms) * size.mean() + sums.mean()).item()
    # The mean of one number is its maximum, and has one bound.
    return Error(err.max().item(), err.mean().item(), most, most if err.numel() == 1 else mean)


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(x), x.double(), 0)


def errors(got: Results, ref: Results, low: Results, len_kv: int, spread: torch.Tensor) -> Iterator[tuple[str, Error]]:
    """Measure every tensor of a result that the oracle has too; ``spread`` is what the function of that name gives."""
    largest = sum(_finite(x).abs().max().item() for x in (ref.lse, spread) if x.numel())
    stored = largest * torch.finfo(got.lse.dtype).eps
    names = (*Results._fields[:-1], *(f"dtensors[{place}]" for place in range(len(ref.dtensors))))
    columns = ((*found[:-1], *found.dtensors) for found in (got, ref, low))
    for name, tensor, right, yard in zip(names, *columns, strict=True):
        if (tensor is None) != (right is None):
            raise ValueError(f"{name}: {'missing' if tensor is None else 'unexpected'} in the result")
        if tensor is None or right is None or yard is None:
            continue
        eps = torch.finfo(tensor.dtype).eps
        terms = math.sqrt(max(len_kv, 1)) if tensor.dtype == torch.float64 else 0.0
        terms += 0.0 if name in ("out", "lse") else stored / eps
        yield name, error(tensor, right, yard, eps, terms, spread if name == "lse" else None)


def measure(got: Results, call: Call) -> dict[str, Error]:
    """Measure a result against the oracle and the yardstick of its call; lse only where the call asks for it."""
    gradients = got.dq is not None
    ref, low = oracle(call, gradients=gradients), yardstick(call, gradients=gradients)
    low = widened(low, ref, call) if gradients else low
    found = dict(errors(got, ref, low, call.problem.len_kv, spread(call)))
    return found if call.options.return_lse else {name: error for name, error in found.items() if name != "lse"}


def check(got: Results, call: Call) -> dict[str, Error]:
    """Hold a result to the budget and give the measurements.

    Raises:
        AssertionError: a tensor exceeds it.
    """
    report = measure(got, call)
    for name, found in report.items():
        if not found.within:
            raise AssertionError(f"{name} exceeds the error budget: {found}")
    return report
