"""How each operation that torch traced is written for Triton.

Scores are float32, whatever float type the user's own conversions name; positions and integers loaded from tensors
are int32 or int64. Integer division floors, as Python's does: where a sign is not known, instructions are spent on it.

A rule gets its inputs as atoms (a name, a number, a conversion) and gives the right-hand side of one line. What it
writes twice costs nothing: the compiler finds equal expressions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import fx


class Refusal(Exception):  # noqa: N818 - not an error by itself: the caller makes it one, or tries another way
    """Why a function cannot be translated, to be read after "the function"."""


class Value(NamedTuple):
    """A piece of source text and what is known of it."""

    text: str
    dtype: torch.dtype
    depends: frozenset[str]  # on "q", on "kv": the axes of its tile
    natural: bool  # an integer that is never negative
    number: int | float | None  # if it is a literal
    settle: Callable[[], int | float] | None = None  # of a runtime constant: its number, to stand in the source instead


Of = Callable[[object], Value]
Write = Callable[[Of, fx.Node], Value]


def literal(number: bool | float) -> Value:
    """Write a number."""
    if isinstance(number, bool):
        return Value(str(number), torch.bool, frozenset(), True, number)
    if isinstance(number, int):
        dtype = torch.int32 if -(2**31) <= number < 2**31 else torch.int64
        return Value(str(number) if number >= 0 else f"({number})", dtype, frozenset(), number >= 0, number)
    text = repr(number) if math.isfinite(number) else f'float("{number}")'
    return Value(f"({text})" if text.startswith("-") else text, torch.float32, frozenset(), False, number)


def cast(value: Value, dtype: torch.dtype) -> Value:
    """Convert a value, if it needs that. All float types are float32 here."""
    if dtype.is_floating_point:
        if value.dtype.is_floating_point:
            return value
        if value.number is not None:
            return literal(float(value.number))
        return value._replace(text=f"tl.cast({value.text}, tl.float32)", dtype=torch.float32, natural=False)
    if dtype is torch.bool:
        if value.number is not None:
            return literal(bool(value.number))
        return value if value.dtype is torch.bool else value._replace(text=f"({value.text} != 0)", dtype=torch.bool)
    dtype = torch.int64 if dtype is torch.int64 else torch.int32
    if value.dtype is dtype:
        return value
    if value.number is not None:
        return literal(int(value.number))._replace(dtype=dtype)
    if value.dtype is torch.int32:  # widens by itself
        return value._replace(dtype=dtype)
    return value._replace(text=f"tl.cast({value.text}, tl.{str(dtype)[6:]})", dtype=dtype)


def operation_name(node: fx.Node) -> str:
    """Give the name of the operation that a node calls, whatever its overload."""
    packet = getattr(node.target, "overloadpacket", node.target)
    name = str(getattr(packet, "__name__", packet))
    namespace = getattr(node.target, "namespace", "aten")
    return name if namespace in ("aten", "prims") else f"{namespace}::{name}"


def result_type(node: fx.Node) -> torch.dtype:
    """Give the type of what an operation makes."""
    dtype: torch.dtype = node.meta["val"].dtype
    if dtype.is_complex:
        raise Refusal("computes with complex numbers")
    return dtype


def common_type(values: tuple[Value, ...]) -> torch.dtype:
    """Give the type in which values are compared."""
    if any(value.dtype.is_floating_point for value in values):
        return torch.float32
    if all(value.dtype is torch.bool for value in values):
        return torch.bool
    return torch.int64 if any(value.dtype is torch.int64 for value in values) else torch.int32


def joined(values: tuple[Value, ...]) -> frozenset[str]:
    """Give the axes of a tile that any of the values has."""
    return frozenset().union(*(value.depends for value in values))


def made(text: str, node: fx.Node, *values: Value, natural: bool = False) -> Value:
    """Give the value of an operation's text."""
    dtype = result_type(node)
    return Value(text, torch.float32 if dtype.is_floating_point else dtype, joined(values), natural, None)


def inputs(of: Of, node: fx.Node, count: int, dtype: torch.dtype | None = None) -> tuple[Value, ...]:
    """Give an operation's first inputs, in the type that it computes in."""
    found = tuple(of(argument) for argument in node.args[:count])
    return tuple(cast(value, dtype or result_type(node)) for value in found)


# ---- makers of rules: each returns how one kind of operation is written ----


def in_result_type(template: str, natural: Callable[..., bool] = lambda *_: False) -> Write:
    """An operation on values of the type that it gives. ``{0}`` and ``{1}`` in the template are the values."""
    count = 2 if "{1}" in template else 1

    def write(of: Of, node: fx.Node) -> Value:
        values = inputs(of, node, count)
        return made(template.format(*(value.text for value in values)), node, *values, natural=natural(*values))

    return write


def in_float(template: str) -> Write:
    """A function of real numbers."""
    count = 2 if "{1}" in template else 1

    def write(of: Of, node: fx.Node) -> Value:
        values = inputs(of, node, count, torch.float32)
        return made(template.format(*(value.text for value in values)), node, *values)

    return write


def comparison(sign: str) -> Write:
    """A comparison, in the type that both values fit in."""

    def write(of: Of, node: fx.Node) -> Value:
        pair = (of(node.args[0]), of(node.args[1]))
        dtype = common_type(pair)
        left, right = (cast(value, dtype) for value in pair)
        return made(f"{left.text} {sign} {right.text}", node, left, right)

    return write


def logical(template: str) -> Write:
    """An operation on truth values."""
    count = 2 if "{1}" in template else 1

    def write(of: Of, node: fx.Node) -> Value:
        values = inputs(of, node, count, torch.bool)
        return made(template.format(*(value.text for value in values)), node, *values)

    return write


def scaled_sum(sign: str, swap: bool = False) -> Write:
    """``a + alpha * b`` and its like."""

    def write(of: Of, node: fx.Node) -> Value:
        left, right = inputs(of, node, 2)
        alpha = node.kwargs.get("alpha", 1 if len(node.args) < 3 else node.args[2])
        if alpha != 1:
            factor = cast(of(alpha), result_type(node))
            which = left if swap else right
            scaled = which._replace(text=f"({which.text} * {factor.text})", natural=which.natural and factor.natural)
            left, right = (scaled, right) if swap else (left, scaled)
        if swap:
            left, right = right, left
        natural = sign == "+" and left.natural and right.natural
        return made(f"{left.text} {sign} {right.text}", node, left, right, natural=natural)

    return write


# ---- rules that need more than a template ----


def divide(of: Of, node: fx.Node) -> Value:
    """Division; by what is the same for all pairs it is a product, since a product costs a tenth."""
    rounding = node.kwargs.get("rounding_mode")
    if rounding is None:
        left, right = inputs(of, node, 2, torch.float32)
        if right.number:
            right = literal(1.0 / right.number)
        elif right.depends:
            return made(f"{left.text} / {right.text}", node, left, right)
        else:  # one division for all pairs
            right = right._replace(text=f"(1.0 / {right.text})")
        return made(f"{left.text} * {right.text}", node, left, right)
    if rounding == "floor":
        return floor_divide(of, node)
    if result_type(node).is_floating_point:
        left, right = inputs(of, node, 2)
        quotient = f"{left.text} / {right.text}"
        return made(f"tl.where({quotient} < 0, tl.ceil({quotient}), tl.floor({quotient}))", node, left, right)
    return in_result_type("{0} // {1}")(of, node)  # Triton truncates


def divided(of: Of, node: fx.Node) -> tuple[Value, Value, int | None]:
    """Give the inputs of a division of integers, and the divisor's exponent if it is a power of two.

    A divisor that a user's closure holds is written as a literal: a division by what the compiler knows is a product or
    a shift, and by what it does not know a dozen instructions.
    """
    left, right = inputs(of, node, 2)
    if right.settle is not None:
        right = literal(right.settle())._replace(dtype=right.dtype)
    number = right.number
    is_power = isinstance(number, int) and number > 0 and number & (number - 1) == 0
    return left, right, int(number).bit_length() - 1 if is_power and number else None


def floor_divide(of: Of, node: fx.Node) -> Value:
    """Division rounded down, where Triton rounds towards zero."""
    if result_type(node).is_floating_point:
        left, right = inputs(of, node, 2)
        return made(f"tl.floor({left.text} / {right.text})", node, left, right)
    left, right, exponent = divided(of, node)
    if exponent is not None:
        return made(f"{left.text} >> {exponent}", node, left, natural=left.natural)
    quotient = f"{left.text} // {right.text}"
    if left.natural and right.natural:
        return made(quotient, node, left, right, natural=True)
    apart = f"({left.text} % {right.text} != 0) & (({left.text} < 0) != ({right.text} < 0))"
    return made(f"{quotient} - tl.cast({apart}, tl.int32)", node, left, right)


def remainder(of: Of, node: fx.Node) -> Value:
    """The remainder with the divisor's sign, as Python has it."""
    if result_type(node).is_floating_point:
        left, right = inputs(of, node, 2)
        a, b = left.text, right.text
        return made(f"{a} - tl.floor({a} / {b}) * {b}", node, left, right)
    left, right, exponent = divided(of, node)
    a, b = left.text, right.text
    if exponent is not None:
        return made(f"{a} & {(1 << exponent) - 1}", node, left, natural=True)
    if left.natural and right.natural:
        return made(f"{a} % {b}", node, left, right, natural=True)
    if right.natural:
        return made(f"tl.where({a} % {b} < 0, {a} % {b} + {b}, {a} % {b})", node, left, right, natural=True)
    return made(f"tl.where(({a} % {b} != 0) & (({a} < 0) != ({b} < 0)), {a} % {b} + {b}, {a} % {b})", node, left, right)


def power(of: Of, node: fx.Node) -> Value:
    """Small powers by products; others from the logarithm, with the sign that whole powers of negative numbers have."""
    number = node.args[1]
    base = cast(of(node.args[0]), result_type(node))
    if isinstance(number, (int, float)) and number == int(number) and abs(number) <= 16:
        product = " * ".join([base.text] * abs(int(number)))
        if number == 0:
            return cast(literal(1), result_type(node))
        if number > 0:
            return made(product, node, base, natural=base.natural)
        if result_type(node).is_floating_point:
            return made(f"1.0 / ({product})", node, base)
    if not result_type(node).is_floating_point:
        raise Refusal("raises integers to a power that is no small positive number; convert them to float first")
    if number == 0.5:
        return made(f"tl.sqrt({base.text})", node, base)
    exponent = cast(of(number), torch.float32)
    if base.number is not None and base.number > 0:
        return made(f"tl.exp2({exponent.text} * {math.log2(base.number)!r})", node, exponent)
    a, e = base.text, exponent.text
    size = f"tl.where({e} == 0, 1.0, tl.exp2({e} * tl.log2(tl.abs({a}))))"
    odd = f"({e} - 2.0 * tl.floor({e} * 0.5) == 1.0)"
    below = f'tl.where(tl.floor({e}) == {e}, tl.where({odd}, -1.0, 1.0), float("nan"))'
    return made(f"{size} * tl.where({a} < 0, {below}, 1.0)", node, base, exponent)


def where(of: Of, node: fx.Node) -> Value:
    """A choice."""
    condition = cast(of(node.args[0]), torch.bool)
    first, second = (cast(of(argument), result_type(node)) for argument in node.args[1:3])
    natural = first.natural and second.natural
    text = f"tl.where({condition.text}, {first.text}, {second.text})"
    return made(text, node, condition, first, second, natural=natural)


def masked_fill(of: Of, node: fx.Node) -> Value:
    """A choice, the other way round."""
    value, condition, filling = (of(argument) for argument in node.args[:3])
    condition = cast(condition, torch.bool)
    value, filling = cast(value, result_type(node)), cast(filling, result_type(node))
    return made(f"tl.where({condition.text}, {filling.text}, {value.text})", node, value, condition, filling)


def clamp(of: Of, node: fx.Node) -> Value:
    """Bounds on one side or both, for ``clamp`` and ``clamp_min``."""
    low = node.args[1] if len(node.args) > 1 else node.kwargs.get("min")
    high = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
    return bounded(of, node, low, high)


def clamp_max(of: Of, node: fx.Node) -> Value:
    """A bound above."""
    return bounded(of, node, None, node.args[1])


def bounded(of: Of, node: fx.Node, low: object, high: object) -> Value:
    """Write the bounds that there are."""
    value = cast(of(node.args[0]), result_type(node))
    if low is not None:
        bound = cast(of(low), result_type(node))
        natural = value.natural or bound.natural
        value = made(f"tl.maximum({value.text}, {bound.text})", node, value, bound, natural=natural)
    if high is not None:
        bound = cast(of(high), result_type(node))
        natural = value.natural and bound.natural
        value = made(f"tl.minimum({value.text}, {bound.text})", node, value, bound, natural=natural)
    return value


def absolute(of: Of, node: fx.Node) -> Value:
    """The absolute value, which of an integer is never negative."""
    (value,) = inputs(of, node, 1)
    return made(f"tl.abs({value.text})", node, value, natural=not result_type(node).is_floating_point)


def sign(of: Of, node: fx.Node) -> Value:
    """1, 0 or -1, of the value's own type."""
    (value,) = inputs(of, node, 1)
    one, zero, other = (cast(literal(number), result_type(node)).text for number in (1, 0, -1))
    return made(f"tl.where({value.text} > 0, {one}, tl.where({value.text} < 0, {other}, {zero}))", node, value)


def invert(of: Of, node: fx.Node) -> Value:
    """Negation of a truth value, or of an integer's bits."""
    (value,) = inputs(of, node, 1)
    if value.number is not None:  # a literal True, inverted as it stands, would be an integer
        return literal(not value.number if isinstance(value.number, bool) else ~int(value.number))
    return made(f"~{value.text}", node, value)


def to_whole(template: str) -> Write:
    """A rounding, which leaves integers alone."""

    def write(of: Of, node: fx.Node) -> Value:
        (value,) = inputs(of, node, 1)
        return made(template.format(value.text), node, value) if result_type(node).is_floating_point else value

    return write


def bitwise(sign: str) -> Write:
    """An operation on bits, or on truth values."""

    def write(of: Of, node: fx.Node) -> Value:
        left, right = inputs(of, node, 2)
        natural = (left.natural and right.natural) or (sign == "&" and (left.natural or right.natural))
        return made(f"{left.text} {sign} {right.text}", node, left, right, natural=natural)

    return write


def same(of: Of, node: fx.Node) -> Value:
    """An operation that changes nothing, or only the type."""
    value = of(node.args[0])
    dtype = result_type(node)
    if dtype is torch.int64 and value.dtype is not torch.int64 and value.number is None:  # asked for by name
        return value._replace(text=f"tl.cast({value.text}, tl.int64)", dtype=dtype)
    return cast(value, dtype)


def copied(of: Of, node: fx.Node) -> Value:
    """Take the second input's value in place of the first's."""
    return cast(of(node.args[1]), result_type(node))


def constant(position: int | None, number: float = 0.0) -> Write:
    """A tensor of one number: that of an argument, or a fixed one."""

    def write(of: Of, node: fx.Node) -> Value:
        value = literal(number) if position is None else of(node.args[position])
        return cast(value, result_type(node))

    return write


def both_natural(left: Value, right: Value) -> bool:
    """Say that a result is never negative if neither value is."""
    return left.natural and right.natural


def either_natural(left: Value, right: Value) -> bool:
    """Say that a result is never negative if one value is not."""
    return left.natural or right.natural


SERIES = "{0} * {0} * (-1.0 / 3 + {0} * {0} * (2.0 / 15 + {0} * {0} * (-17.0 / 315 + {0} * {0} * (62.0 / 2835))))"
# The series keeps what the difference loses near zero; beside the exponential it costs little.
TANH = "tl.where({0} * {0} < 0.0625, {0} + {0} * (" + SERIES + "), 1.0 - 2.0 / (1.0 + tl.exp(2.0 * {0})))"
# exp(x) - 1 = tanh(x / 2) * (exp(x) + 1), which loses nothing near zero either.
EXPM1 = TANH.format("({0} * 0.5)") + " * (tl.exp({0}) + 1.0)"
# With u = 1 + x rounded, log(u) / (u - 1) has the error that log(1 + x) / x is short of: they cancel.
LOG1P = "tl.where(1.0 + {0} == 1.0, {0}, tl.log(1.0 + {0}) * ({0} / ((1.0 + {0}) - 1.0)))"

OPERATIONS: dict[str, Write] = {
    "add": scaled_sum("+"),
    "sub": scaled_sum("-"),
    "rsub": scaled_sum("-", swap=True),
    "mul": in_result_type("{0} * {1}", both_natural),
    "div": divide,
    "true_divide": divide,
    "floor_divide": floor_divide,
    "remainder": remainder,
    "neg": in_result_type("-{0}"),
    "abs": absolute,
    "sign": sign,
    "sgn": sign,
    "pow": power,
    "square": in_result_type("{0} * {0}"),
    "reciprocal": in_float("1.0 / {0}"),
    "exp": in_float("tl.exp({0})"),
    "expm1": in_float(EXPM1),
    "exp2": in_float("tl.exp2({0})"),
    "log": in_float("tl.log({0})"),
    "log2": in_float("tl.log2({0})"),
    "log10": in_float(f"tl.log2({{0}}) * {math.log10(2.0)!r}"),
    "log1p": in_float(LOG1P),
    "sqrt": in_float("tl.sqrt({0})"),
    "rsqrt": in_float("tl.rsqrt({0})"),
    "sin": in_float("tl.sin({0})"),
    "cos": in_float("tl.cos({0})"),
    "tan": in_float("tl.sin({0}) / tl.cos({0})"),
    "erf": in_float("tl.erf({0})"),
    "tanh": in_float(TANH),
    "sigmoid": in_float("1.0 / (1.0 + tl.exp(-{0}))"),
    "relu": in_result_type("tl.maximum({0}, 0)"),
    "floor": to_whole("tl.floor({0})"),
    "ceil": to_whole("tl.ceil({0})"),
    "trunc": to_whole("tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))"),
    "minimum": in_result_type("tl.minimum({0}, {1})", both_natural),
    "maximum": in_result_type("tl.maximum({0}, {1})", either_natural),
    "clamp": clamp,
    "clamp_min": clamp,
    "clamp_max": clamp_max,
    "where": where,
    "masked_fill": masked_fill,
    "eq": comparison("=="),
    "ne": comparison("!="),
    "lt": comparison("<"),
    "le": comparison("<="),
    "gt": comparison(">"),
    "ge": comparison(">="),
    "logical_and": logical("{0} & {1}"),
    "logical_or": logical("{0} | {1}"),
    "logical_xor": logical("{0} ^ {1}"),
    "logical_not": invert,
    "bitwise_and": bitwise("&"),
    "bitwise_or": bitwise("|"),
    "bitwise_xor": bitwise("^"),
    "bitwise_not": invert,
    "bitwise_left_shift": in_result_type("{0} << {1}"),
    "bitwise_right_shift": in_result_type("{0} >> {1}", lambda left, _: left.natural),
    "__lshift__": in_result_type("{0} << {1}"),
    "__rshift__": in_result_type("{0} >> {1}", lambda left, _: left.natural),
    "isnan": in_float("{0} != {0}"),
    "isinf": in_float('tl.abs({0}) == float("inf")'),
    "_to_copy": same,
    "convert_element_type": same,
    "copy": copied,
    "clone": same,
    "detach": same,
    "alias": same,
    "lift_fresh_copy": same,
    "lift_fresh": same,
    "expand": same,
    "view": same,
    "scalar_tensor": constant(0),
    "full": constant(1),
    "full_like": constant(1),
    "new_full": constant(2),
    "zeros_like": constant(None, 0.0),
    "ones_like": constant(None, 1.0),
    "new_zeros": constant(None, 0.0),
    "new_ones": constant(None, 1.0),
    "zeros": constant(None, 0.0),
    "ones": constant(None, 1.0),
}
