"""What holds for numbers that a function finds for itself: a translation that is kept never brings back old ones."""
# ruff: noqa: ARG002 - scores have one signature, whether or not they need all of it

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch

from tilewise.mods import masks, scores
from tilewise.mods.capture import Walk
from tilewise.mods.trace import trace_score

Function = Callable[..., object]


class Rated:
    """An object with a rate, of its own or of its class."""

    rate = 0.5

    def __init__(self, rate: float | None = None) -> None:
        if rate is not None:
            self.rate = rate

    def __getitem__(self, distance):  # type: ignore[no-untyped-def]
        return distance * self.rate

    @property
    def twice(self) -> float:
        return 2 * self.rate

    def score_mod(self, score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
        return score + self.rate


class Mapped(dict):
    """A dict of another class."""


class Threshold(torch.nn.Module):
    """A module that is called."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, score, *_):  # type: ignore[no-untyped-def]
        return score + self.rate

    def score_mod(self, score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
        return self(score)


def rate_of(thing: Rated) -> float:
    return thing.rate


settings = types.ModuleType("settings")


def settle(rate: float) -> Function:
    settings.rate = rate  # type: ignore[attr-defined]
    return lambda score, *_: score + settings.rate


def imports(rate: float) -> Function:
    settings.rate = rate  # type: ignore[attr-defined]
    sys.modules["settings_of_mods"] = settings

    def score_mod(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
        import settings_of_mods  # type: ignore[import-not-found]

        return score + settings_of_mods.rate

    return score_mod


def of_class(rate: float) -> Function:
    Rated.rate = rate
    return lambda score, *_: score + Rated.rate


def of_class_by_instance(rate: float) -> Function:
    Rated.rate = rate
    held = Rated()
    return lambda score, *_: score + held.rate


def lent(hold: Callable[[float], object], use: Function) -> Callable[[float], Function]:
    def of(rate: float) -> Function:
        held = hold(rate)
        return lambda score, *_: score + use(held)

    return of


FOUND: dict[str, Callable[[float], Function]] = {
    "a module's": settle,
    "an imported module's": imports,
    "a class's": of_class,
    "a class's, by an instance": of_class_by_instance,
    "a property's": lent(Rated, lambda held: held.twice / 2),
    "an operator's": lent(Rated, lambda held: held[1]),
    "a function's that the object is passed to": lent(Rated, rate_of),
    "a method's": lambda rate: Rated(rate).score_mod,
    "a dict's of another class": lent(lambda rate: Mapped(rate=rate), lambda held: held["rate"]),
    "an ordered dict's": lent(lambda rate: OrderedDict(rate=rate), lambda held: held["rate"]),
    "by getattr": lent(Rated, lambda held: getattr(held, "rate")),  # noqa: B009
    "by vars": lent(lambda rate: types.SimpleNamespace(rate=rate), lambda held: vars(held)["rate"]),
    "a called module's": lent(Threshold, lambda held: held(torch.zeros(()))),
    "a module's that calls itself": lambda rate: Threshold(rate).score_mod,
    "a module's that is the mod": Threshold,
    "one of torch's modules'": lent(lambda rate: torch.nn.Threshold(100.0, rate), lambda held: held(torch.zeros(()))),
    "a method of a list's": lent(lambda rate: [rate].__getitem__, lambda held: held(0)),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_number_that_a_function_finds_for_itself_is_never_an_old_one(name: str) -> None:
    place = torch.tensor(0)
    for rate in (0.5, 2.0, 0.5):
        traced, tensors = trace_score(FOUND[name](rate))
        assert traced.run(torch.zeros(()), place, place, place, place, tensors).item() == rate


def test_the_same_functions_in_another_order_are_told_apart() -> None:
    def of(step: float) -> Callable[[float], float]:
        return lambda s: s + step

    def last(*parts: Callable[[float], float]) -> Function:
        return lambda score, *_: parts[-1](score)

    place, (a, b) = torch.tensor(0), (of(0.25), of(0.5))
    for parts, expected in (((a, b, a), 0.25), ((a, b, b), 0.5)):
        traced, _ = trace_score(last(*parts))
        assert traced.run(torch.zeros(()), place, place, place, place, ()).item() == expected


class Block(torch.nn.Module):
    """A part of a network that has a score as a method."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.table = torch.nn.Parameter(torch.zeros(2))
        self.mlp = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))

    def score_mod(self, score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
        return score + self.table[head]

    def forward(self, x):  # type: ignore[no-untyped-def]
        self.calls += 1
        return self.mlp(x)


def test_the_module_around_a_method_is_walked_only_where_the_method_goes() -> None:
    block = Block()
    before = Walk(block.score_mod)
    block(torch.zeros(2))
    after = Walk(block.score_mod)
    assert before.known
    assert before.key == after.key
    assert [tensor is block.table for tensor in after.tensors] == [True]


def test_what_the_library_makes_is_known() -> None:
    for made in (masks.sliding_window(100), masks.documents(torch.arange(4)), scores.softcap(20.0), scores.alibi(4)):
        assert Walk(made[0]).known
