"""A user's score or mask, translated for the kernels: traced and differentiated by torch, written as source, kept."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import fx

from tilewise.mods.capture import Function, Number, Walk, numbers_of
from tilewise.mods.graph import PLACES, Recorded, nobody_watching, number_type, record, runnable
from tilewise.mods.source import WHERE_FROM, Writer, forward_source, gradient_source
from tilewise.mods.values import Refusal, Value

KEPT = 512  # translations


@dataclass(frozen=True)
class Traced:
    """A score or mask as the kernels take it; see `trace_score` and `trace_mask`.

    Equal ``key`` means equal source: a kernel that was compiled for one serves the other.
    """

    kind: str  # "score" or "mask"
    key: str  # hash of the sources
    source: str  # def score_mod(score, batch, head, q_pos, kv_pos, tensors, constants); mask_mod is without score
    gradient_source: str | None  # def score_mod_gradient(..., d_score, d_tensors, visible); None for a mask
    gradient_refusal: str | None  # why there is no gradient of a score
    constants: tuple[Number, ...]  # the numbers that the sources take at run time
    loads: tuple[int, ...]  # of each load in the source: which tensor it reads
    ranks: tuple[int, ...]  # of the tensors
    dtypes: tuple[str, ...]  # of the tensors, such as "float32"
    differentiable: tuple[bool, ...]  # of the tensors: whether the score has a derivative with respect to it
    run: Callable[..., torch.Tensor] = field(compare=False, repr=False)  # the same on torch tensors, see `Graphs.bound`


def trace_score(function: Function, tensors: Sequence[torch.Tensor] = ()) -> tuple[Traced, tuple[torch.Tensor, ...]]:
    """Translate ``function(score, batch, head, q_pos, kv_pos, *tensors) -> score``, and list the tensors that it reads.

    Args:
        function: made of arithmetic, comparisons, ``& | ~``, the functions of `tilewise.mods` or torch's own, and loads
            such as ``tensor[head, q_pos]``. Numbers in its closure become ``constants``.
        tensors: given to the function after the positions.

    Returns:
        The translation, and ``tensors`` followed by those that the function captured, in the order of their first use.

    Raises:
        ValueError: the function cannot be translated; the message names the operation and says how to mend it.

    >>> traced, tensors = trace_score(lambda score, batch, head, q_pos, kv_pos: score - 0.5 * (q_pos - kv_pos))
    >>> print(traced.source.strip())
    def score_mod(score, batch, head, q_pos, kv_pos, tensors, constants):
        x0 = q_pos - kv_pos
        x1 = tl.cast(x0, tl.float32) * 0.5
        x2 = score - x1
        return x2
    """
    return _traced("score", function, tuple(tensors))


def trace_mask(function: Function, tensors: Sequence[torch.Tensor] = ()) -> tuple[Traced, tuple[torch.Tensor, ...]]:
    """Translate ``function(batch, head, q_pos, kv_pos, *tensors) -> bool``, True where visible; as `trace_score`."""
    return _traced("mask", function, tuple(tensors))


# ---- keeping translations ----


@dataclass
class Entry:
    """A translation that is kept, and where among a function's tensors the captured ones are found."""

    traced: Traced
    graphs: Graphs
    lifted: tuple[int, ...]

    def at(self, walk: Walk, given: tuple[torch.Tensor, ...]) -> tuple[Traced, tuple[torch.Tensor, ...]]:
        """Give the translation for another function of the same key: other numbers, other tensors."""
        traced = self.traced
        numbers = tuple(walk.numbers)
        if self.graphs.lifted and numbers != traced.constants:
            traced = replace(traced, constants=numbers, run=self.graphs.bound(numbers))
        return traced, given + tuple(walk.tensors[place] for place in self.lifted)


_kept: dict[Hashable, Entry | str] = {}


def _traced(kind: str, function: Function, given: tuple[torch.Tensor, ...]) -> tuple[Traced, tuple[torch.Tensor, ...]]:
    """Find a translation that was kept, or make it.

    What else it depends on is only known when it was made: a word in place of the entry says what to look at, too.
    """
    walk = Walk(function)
    tensors = (*given, *walk.tensors)
    identities = [id(tensor) for tensor in tensors]  # the same tensor twice is one tensor
    key: Hashable = (
        kind, walk.key, tuple((tensor.dtype, tensor.dim()) for tensor in given),
        tuple(identities.index(identity) for identity in identities),
    )  # fmt: skip
    entry = _kept.get(key)
    while isinstance(entry, str):
        more: object = (
            tuple(map(repr, walk.numbers)) if entry == "numbers" else tuple(tensor.shape for tensor in tensors)
        )
        key = (key, entry, more)
        entry = _kept.get(key)
    if entry is not None:
        return entry.at(walk, given)
    with nobody_watching():
        graphs, traced, read = _translate(kind, function, given)
    captured = read[len(given) :]
    places = [next((n for n, known in enumerate(walk.tensors) if known is tensor), None) for tensor in captured]
    known = tuple(place for place in places if place is not None)
    if walk.known and len(known) == len(captured) and numbers_of(function) == tuple(walk.numbers):
        if len(_kept) >= KEPT:
            _kept.clear()
        for word, more in (
            ("numbers", tuple(map(repr, walk.numbers)) if walk.numbers and not graphs.serves_all else None),
            ("shapes", tuple(tensor.shape for tensor in tensors) if graphs.forward.reads_shapes else None),
        ):
            if more is not None:
                _kept[key] = word
                key = (key, word, more)
        _kept[key] = Entry(traced, graphs, known)
    return traced, read


# ---- making them ----


@dataclass
class Graphs:
    """The graph of a function, and what runs it."""

    kind: str
    forward: Recorded
    lifted: bool  # the numbers of the closure are inputs of the graph
    serves_all: bool  # the sources, too, are right for other numbers
    _made: dict[tuple[bool, torch.device], fx.GraphModule] = field(default_factory=dict)

    def bound(self, constants: tuple[Number, ...]) -> Callable[..., torch.Tensor]:
        """Give ``run([score,] batch, head, q_pos, kv_pos, tensors)`` on torch tensors that broadcast, loads clamped.

        Differentiable by torch; float64 for a float64 score.
        """

        def run(*arguments: object) -> torch.Tensor:
            places, tensors = arguments[:-1], cast("Sequence[torch.Tensor]", arguments[-1])
            wide = getattr(places[0], "dtype", None) is torch.float64
            device = next((place.device for place in places if isinstance(place, torch.Tensor)), torch.device("cpu"))
            if (wide, device) not in self._made:
                self._made[wide, device] = runnable(self.kind, self.forward, wide, device)
            numbers = [tensor_of(number, wide, device) for number in constants] if self.lifted else []
            result: torch.Tensor = self._made[wide, device](*places, *numbers, *tensors)
            return result

        return run


def tensor_of(number: Number, wide: bool, device: torch.device) -> torch.Tensor:
    """Make a captured number a tensor without axes, as the function met it when it was recorded."""
    dtype = number_type(number)
    # Filled, not copied: the host need not wait for the device.
    return torch.full((), number, dtype=torch.float64 if wide and dtype.is_floating_point else dtype, device=device)


Translation = tuple[Graphs, Traced, tuple[torch.Tensor, ...]]


def _translate(kind: str, function: Function, given: tuple[torch.Tensor, ...]) -> Translation:
    """Translate with the closure's numbers as inputs; where the function steers by them, with their values in place."""
    numbers = numbers_of(function)
    if numbers:
        try:
            return _attempt(kind, function, given, numbers)
        except Exception:  # noqa: BLE001, S110 - whatever the user's code raises at values that are no numbers
            pass
    try:
        return _attempt(kind, function, given, ())
    except Exception as error:
        raise ValueError(f"the {kind}_mod {_name(function)} {_reason(error)}") from error


def _attempt(
    kind: str, function: Function, given: tuple[torch.Tensor, ...], numbers: tuple[Number, ...]
) -> Translation:
    baked: list[Number] = []
    settled: list[Number] = []  # that stand in the sources themselves
    lift = None if numbers or not numbers_of(function) else baked
    forward, tensors = record(kind, function, given, numbers, gradient=False)
    value, _, _ = forward.results
    source = forward_source(kind, _writer(kind, forward, numbers, lift, settled), value)
    gradient, refusal, reached = None, None, [False] * len(tensors)
    if kind == "score":
        try:
            backward, _ = record(kind, function, given, numbers, gradient=True)
            _, (d_score, *d_loads), _ = backward.results
            gradient = gradient_source(_writer(kind, backward, numbers, lift, settled), d_score, d_loads)
            for load, d_load in zip(backward.loads, d_loads, strict=True):
                reached[load] |= d_load is not None
        except Exception as error:
            if numbers:
                raise
            # A score may be used without a gradient.
            refusal = f"the score_mod {_name(function)} {_reason(error)}"
    graphs = Graphs(kind, forward, bool(numbers), bool(numbers) and not settled)
    constants = numbers or tuple(baked)
    traced = Traced(
        kind=kind,
        key=hashlib.sha256(f"{source}{gradient}".encode()).hexdigest()[:16],
        source=source,
        gradient_source=gradient,
        gradient_refusal=refusal,
        constants=constants,
        loads=forward.loads,
        ranks=forward.ranks,
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in forward.dtypes),
        differentiable=tuple(reached),
        run=graphs.bound(constants),
    )
    return graphs, traced, tensors


def _writer(
    kind: str, recorded: Recorded, numbers: tuple[Number, ...], lift: list[Number] | None, settled: list[Number]
) -> Writer:
    """Say what the inputs of a graph are called in the source."""
    inputs = iter(recorded.inputs)
    values: dict[fx.Node, Value] = {}
    for name in PLACES[kind]:
        dtype = torch.float32 if name == "score" else torch.int32
        values[next(inputs)] = Value(name, dtype, frozenset(WHERE_FROM.get(name, ())), name != "score", None)
    for place, number in enumerate(numbers):
        natural = isinstance(number, int) and number >= 0
        settle = partial(_settle, number, settled)
        values[next(inputs)] = Value(f"constants[{place}]", number_type(number), frozenset(), natural, None, settle)
    leaves = {next(inputs): site for site in range(len(recorded.loads))}
    for node in inputs:  # there is one more in a gradient
        values[node] = Value("d_score", torch.float32, frozenset(WHERE_FROM["score"]), False, None)
    return Writer(
        loads=recorded.loads,
        dtypes=recorded.dtypes,
        values=values,
        leaves=leaves,
        indices=recorded.results[2],
        lift=lift,
    )


def _settle(number: Number, settled: list[Number]) -> Number:
    """Give a number to be written into the source, and remember that it was."""
    settled.append(number)
    return number


def _name(function: Function) -> str:
    return repr(getattr(function, "__name__", type(function).__name__))


def _reason(error: Exception) -> str:
    """Say why a function was not translated, in words that go on from its name."""
    if isinstance(error, Refusal):
        return f"cannot be translated: it {error}"
    text = str(error)
    if "data-dependent" in text.lower() or "tracing tensor" in text or "DataDependent" in type(error).__name__:
        return (
            "cannot be translated: it decides in Python (if, while, and, or, int(), float()) by a value that differs "
            "from pair to pair. Use tilewise.mods.where, and & | ~ in place of and, or, not"
        )
    missing = re.search(r"derivative for (\S+) is not implemented", text)
    if missing:
        return (
            f"has no gradient: torch does not differentiate {missing[1]}. Detach what it is applied to "
            "(x.detach()) if no gradient should flow through it"
        )
    return (
        f"cannot be translated: torch met {type(error).__name__}: {text.partition(chr(10))[0]}. It may use arithmetic, "
        "comparisons, the functions of tilewise.mods or torch's on single values, and tensors indexed on all axes"
    )
