"""What holds for translations: what a function carries with it, when they are kept, and what is refused."""
# ruff: noqa: ARG002, ARG004, ARG005 - scores and masks have one signature, whether or not they need all of it

from __future__ import annotations

import functools
import gc
import re
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from tilewise import mods
from tilewise.mods import trace
from tilewise.mods.trace import trace_mask, trace_score

Function = Callable[..., object]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


SLOPES = normal(3)
TABLE = normal(2, 13)
COMPLEX = torch.ones(3, dtype=torch.complex64)


def functions_of_real_numbers(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
    size = abs(score) + 0.5
    return (
        mods.exp(-size) + mods.exp2(score) + mods.log(size) + mods.log2(size) + mods.log1p(size - 0.5) + mods.sqrt(size)
        + mods.sin(score) + mods.cos(score) + mods.tanh(score) + mods.sigmoid(score)
    )  # fmt: skip


# ---- masks ----


def test_a_mask_may_be_smaller_than_a_tile_and_of_integers() -> None:
    assert trace_mask(lambda b, h, q, kv: q < 3)[0].source.endswith("x0 = q_pos < 3\n    return x0\n")
    assert trace_mask(lambda b, h, q, kv: kv & 1)[0].source.endswith("x0 = kv_pos & 1\n    return x0 != 0\n")
    assert trace_mask(lambda b, h, q, kv: True)[0].source.endswith("return True\n")


def test_the_whole_row_of_an_index_can_be_taken_apart() -> None:
    interval = torch.tensor([[0, 2], [1, 5], [4, 6]])

    def within(batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
        start, stop = interval[kv_pos]
        return (q_pos >= start) & (q_pos < stop) & (interval[kv_pos][1] > 0)

    traced, tensors = trace_mask(within)
    assert traced.loads == (0, 0)  # the same element is loaded once
    q_pos, kv_pos = torch.arange(6)[:, None], torch.arange(3)[None, :]
    expected = (q_pos >= interval[:, 0]) & (q_pos < interval[:, 1])
    assert torch.equal(traced.run(0, 0, q_pos, kv_pos, tensors), expected)


# ---- what a function carries with it ----


def test_captured_tensors_come_after_the_given_ones_in_the_order_of_their_use() -> None:
    first, second, third = normal(4), normal(5), torch.tensor(2.0)

    def score_mod(score, batch, head, q_pos, kv_pos, table):  # type: ignore[no-untyped-def]
        return third * score + second[q_pos] + table[kv_pos] + second[kv_pos] + first[head]

    given = (normal(6),)
    for _ in range(2):  # translated, then remembered
        traced, tensors = trace_score(score_mod, given)
        assert [id(tensor) for tensor in tensors] == [id(x) for x in (given[0], third, second, first)]
    assert traced.loads == (1, 2, 0, 2, 3)
    assert traced.differentiable == (True,) * 4
    assert traced.ranks == (1, 0, 1, 1)
    assert traced.dtypes == ("float32",) * 4


def test_a_tensor_that_is_given_and_captured_is_one() -> None:
    table, other = normal(5), normal(5)

    def of(captured: torch.Tensor) -> Function:
        return lambda score, batch, head, q_pos, kv_pos, table: score + table[q_pos] + captured[kv_pos]

    assert len(trace_score(of(table), (table,))[1]) == 1
    assert len(trace_score(of(other), (table,))[1]) == 2
    assert len(trace_score(of(table), (table,))[1]) == 1


class Counted:
    """Counts how often a function is translated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        translate = trace._translate

        def counted(*arguments: object) -> object:
            self.count += 1
            return translate(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(trace, "_translate", counted)
        monkeypatch.setattr(trace, "_kept", {})


@pytest.fixture
def translations(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def fading(rate: float, window: int, table: torch.Tensor) -> Function:
    def score_mod(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
        return mods.where(q_pos - kv_pos < window, score - rate * (q_pos - kv_pos) + table[head], score * 0.5)

    return score_mod


def test_other_numbers_and_values_need_neither_a_translation_nor_another_kernel(translations: Counted) -> None:
    first, tensors = trace_score(fading(0.25, 7, SLOPES))
    assert first.constants == (0.25, 7)
    assert [tensor is SLOPES for tensor in tensors] == [True]
    other = normal(70)
    second, tensors = trace_score(fading(0.5, 1000, other))
    assert [tensor is other for tensor in tensors] == [True]
    assert (second.key, second.source, second.constants) == (first.key, first.source, (0.5, 1000))
    assert translations.count == 1
    q_pos = torch.arange(20)[:, None]
    score = normal(20, 20).double()
    expected = fading(0.5, 1000, other.double())(score, 0, 2, q_pos, q_pos.T)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(second.run(score, 0, 2, q_pos, q_pos.T, (other.double(),)), expected)
    assert trace_score(fading(0.5, 7, SLOPES.double()))[0].dtypes == ("float64",)
    assert translations.count == 2


def test_a_translation_that_is_kept_costs_microseconds() -> None:
    function = fading(0.25, 7, SLOPES)
    trace_score(function)

    def once() -> float:
        start = time.perf_counter()
        for _ in range(100):
            trace_score(function)
        return (time.perf_counter() - start) / 100

    assert min(once() for _ in range(5)) < 200e-6


def test_numbers_that_a_function_steers_by_are_told_apart_by_value(translations: Counted) -> None:
    def repeated(times: int, step: float) -> Function:
        def score_mod(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
            for _ in range(times):
                score = score + step
            return score

        return score_mod

    place = torch.tensor(0)
    for times, step, expected in ((1, 0.5, 0.5), (3, 0.5, 1.5), (3, 2.0, 6.0), (3, 0.5, 1.5)):
        traced, _ = trace_score(repeated(times, step))
        assert traced.run(torch.zeros(()), place, place, place, place, ()).item() == expected
        assert traced.constants == (step,) * times
    assert translations.count == 3
    assert trace_score(repeated(3, 0.5))[0].key == trace_score(repeated(3, 2.0))[0].key


def test_a_shape_that_a_function_asks_for_is_looked_at_again(translations: Counted) -> None:
    def score_mod(score, batch, head, q_pos, kv_pos, table):  # type: ignore[no-untyped-def]
        return score * table.shape[0] + table[q_pos]

    place = torch.tensor(0)
    for size in (3, 5, 3):
        traced, tensors = trace_score(score_mod, (torch.zeros(size),))
        assert traced.run(torch.ones(()), place, place, place, place, tensors).item() == size
    assert translations.count == 2


class Learned(torch.nn.Module):
    """A score as a method, with a parameter and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(normal(4))
        self.strength = 2.0

    def score_mod(self, score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
        return score + self.scaled(head)  # type: ignore[no-untyped-call]

    def scaled(self, head):  # type: ignore[no-untyped-def]
        return self.table[head] * self.strength


def test_methods_bring_their_objects_parameters_and_numbers(translations: Counted) -> None:
    module = Learned()
    place = torch.tensor(1)

    def value() -> torch.Tensor:
        traced, tensors = trace_score(module.score_mod)
        assert [tensor is module.table for tensor in tensors] == [True]
        return traced.run(torch.zeros(()), place, place, place, place, tensors)

    value().backward()
    assert module.table.grad is not None
    assert module.table.grad.tolist() == [0, 2, 0, 0]
    assert value().item() == module.table[1].item() * 2
    assert translations.count == 1
    module.strength = 3.0
    assert value().item() == module.table[1].item() * 3
    module.table = torch.nn.Parameter(normal(4) + 1)
    assert value().item() == module.table[1].item() * 3
    assert translations.count == 2


def test_a_bound_may_be_captured_beside_one_that_stands_in_the_code() -> None:
    def of(most: int) -> Function:
        return lambda batch, head, q_pos, kv_pos: q_pos.clamp(min=1, max=most) >= torch.clip(kv_pos, 0, most + 1)

    assert [trace_mask(of(most))[0].constants for most in (5, 9)] == [(5,), (9,)]
    q_pos = torch.arange(12)[:, None]
    found = trace_mask(of(9))[0].run(0, 0, q_pos, q_pos.T, ())
    assert torch.equal(found, q_pos.clamp(1, 9) >= q_pos.T.clamp(0, 10))


def test_partial_functions_and_functions_in_tuples_bring_their_numbers() -> None:
    def shifted(score, batch, head, q_pos, kv_pos, shift, *, factor):  # type: ignore[no-untyped-def]
        return score * factor + shift

    parts = (functools.partial(shifted, shift=3, factor=0.5), fading(0.25, 7, SLOPES))

    def both(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
        for part in parts:
            score = part(score, batch, head, q_pos, kv_pos)
        return score

    for _ in range(2):
        assert trace_score(both)[0].constants == (3, 0.5, 0.25, 7)


def test_translations_keep_no_tensor_alive() -> None:
    table = normal(1000)
    alive = weakref.ref(table)
    trace_score(fading(0.125, 8, table))
    del table
    gc.collect()
    assert alive() is None


def test_what_the_caller_has_switched_on_changes_no_translation(monkeypatch: pytest.MonkeyPatch) -> None:
    right = trace_score(functions_of_real_numbers)[0]
    assert right.gradient_source is not None

    def again() -> None:
        monkeypatch.setattr(trace, "_kept", {})
        found = trace_score(functions_of_real_numbers)[0]
        assert (found.source, found.gradient_source) == (right.source, right.gradient_source)

    with torch.no_grad():
        again()
    with torch.inference_mode():
        again()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again()
    with torch.device("meta"):
        again()

    def watched(x: torch.Tensor) -> torch.Tensor:
        again()
        return x

    torch.func.vmap(watched)(torch.zeros(2))
    torch.func.grad(watched)(torch.tensor(0.0))


# ---- refusals ----


def steers(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
    return score if q_pos > kv_pos else score * 2


class Cut(torch.autograd.Function):
    """A function whose author says that it has no derivative."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, d_out: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no derivative, says its author")


def own_operator(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
    return torch.ops.mods_test.tanh(score)


LIBRARY = torch.library.Library("mods_test", "DEF")
LIBRARY.define("tanh(Tensor x) -> Tensor")
LIBRARY.impl("tanh", torch.neg, "CompositeExplicitAutograd")


def cut(score, batch, head, q_pos, kv_pos):  # type: ignore[no-untyped-def]
    return Cut.apply(score)  # type: ignore[no-untyped-call]


def every(step: int) -> Function:
    return lambda s, b, h, q, kv: s + (q - kv) // step


REFUSED: dict[str, tuple[Function, str]] = {
    "a decision": (steers, r"'steers' cannot be translated: it decides in Python .* Use tilewise.mods.where"),
    "a whole tensor": (lambda s, b, h, q, kv: s + TABLE, r"whole tensor of shape \(2, 13\); index it by batch, head"),
    "a row": (lambda s, b, h, q, kv: s + TABLE[b], "computes with a row of a tensor; index all of its axes"),
    "a sum of a row": (
        lambda s, b, h, q, kv: TABLE[b].sum(),
        r"uses 1 of the 2 indices of a tensor of shape \(2, 13\)",
    ),
    "too many indices": (lambda s, b, h, q, kv: s + SLOPES[b, h], r"uses 2 indices on a tensor of shape \(3,\)"),
    "a slice": (lambda s, b, h, q, kv: s + TABLE[b, 1:], r"indexes a tensor by slice\(1, None, None\)"),
    "an index of a fraction": (lambda s, b, h, q, kv: s + SLOPES[q / 2], "indexes a tensor by torch.float32"),
    "a value of the host": (lambda s, b, h, q, kv: s + SLOPES.tolist()[0], "reads the values of a tensor on the host"),
    "an unknown operation": (lambda s, b, h, q, kv: torch.special.bessel_j0(s), "uses special_bessel_j0, which has no"),
    "axes of its own": (lambda s, b, h, q, kv: s + torch.arange(3), r"makes a tensor of shape \(3,\) with"),
    "an operator of their own": (own_operator, "uses mods_test::tanh, which has no translation"),
    "no value": (lambda s, b, h, q, kv: None, "uses None as a value"),
    "wrong arguments": (lambda s: s, "torch met TypeError: .*takes 1 positional argument but 5 were given"),
    "a division by zero": (lambda s, b, h, q, kv: s + q % 0, "divides integers by 0, in remainder of q_pos and 0"),
    "a number of more bits": (
        lambda s, b, h, q, kv: s + q * 3_000_000_000,
        r"in 32 bits with 3000000000, .* q_pos.long\(\)",
    ),
    "a division by a captured zero": (every(0), "divides integers by 0, in"),
    "complex numbers": (lambda s, b, h, q, kv: (s * 1j).real, "cannot be translated"),
    "complex tensors": (lambda s, b, h, q, kv: abs(COMPLEX[h]) + s, "torch.complex64; convert it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_translated_is_refused_with_the_reason(name: str) -> None:
    function, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        trace_score(function)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda s, b, h, q, kv: s + s // 2,
            r"has no gradient: torch does not differentiate aten::floor_divide. Detach",
        ),
        (cut, "NotImplementedError: no derivative, says its author"),
    ],
    ids=["floor", "own function"],
)
def test_a_score_without_a_gradient_is_translated_and_says_why_it_has_none(function: Function, reason: str) -> None:
    traced, _ = trace_score(function)
    assert traced.gradient_source is None
    assert traced.gradient_refusal is not None
    assert re.search(reason, traced.gradient_refusal)


def test_a_detached_part_gets_no_gradient() -> None:
    traced, _ = trace_score(lambda s, b, h, q, kv: s + (s.detach() // 2) * 3)
    assert traced.gradient_source is not None
    assert traced.gradient_source.endswith("return tl.where(visible, d_score, 0.0)\n")
    score = torch.ones((), requires_grad=True)
    place = torch.tensor(0)
    (gradient,) = torch.autograd.grad(traced.run(score, place, place, place, place, ()), score)
    assert gradient == 1
    doubled = trace_score(lambda s, b, h, q, kv: s + s.detach() * 2)[0]
    (gradient,) = torch.autograd.grad(doubled.run(score, place, place, place, place, ()), score)
    assert gradient == 1
