"""How each operation that torch traced is written for Triton.

Scores are float32, whatever float type the user's own conversions name; positions and integers loaded from tensors
are int32 or int64. Integer division floors, as Python's does: where a sign is not known, instructions are spent on it.

A rule gets its inputs as atoms (a name, a number, a conversion) and gives the right-hand side of one line. What it
writes twice costs nothing: the compiler finds equal expressions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from tilewise.mods.values import (
    Of,
    Refusal,
    Value,
    cast,
    common_type,
    inputs,
    literal,
    made,
    operation_name,
    result_type,
)

Write = Callable[[Of, fx.Node], Value]


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


def exact_quotient(left: Value, right: Value) -> str:
    """Write a quotient rounded once, as torch has it: rounded down, it is the right whole number."""
    return f"tl.div_rn({left.text}, {right.text})"


def quotient(left: Value, right: Value) -> str:
    """Write a quotient: of scores, which are rounded anyway, as a product where a product costs a tenth."""
    number = right.number
    inverse = 1.0 / number if number else 0.0
    usual = 2.0**-126 <= abs(inverse) <= 2.0**126
    of_score = "score" in left.depends | right.depends
    if usual and (of_score or abs(math.frexp(inverse)[0]) == 0.5):  # a power of two loses nothing
        return f"{left.text} * {literal(inverse).text}"
    if number is not None or not of_score:
        return exact_quotient(left, right)
    return f"{left.text} / {right.text}" if right.depends else f"{left.text} * (1.0 / {right.text})"


def divide(of: Of, node: fx.Node) -> Value:
    """Division, rounded in one of three ways or not at all."""
    rounding = node.kwargs.get("rounding_mode")
    if rounding is None:
        left, right = inputs(of, node, 2, torch.float32)
        return made(quotient(left, right), node, left, right)
    if rounding == "floor":
        return floor_divide(of, node)
    if result_type(node).is_floating_point:
        left, right = inputs(of, node, 2)
        text = exact_quotient(left, right)
        return made(f"tl.where({text} < 0, tl.ceil({text}), tl.floor({text}))", node, left, right)
    left, right, _ = divided(of, node)
    return made(f"{left.text} // {right.text}", node, left, right)  # Triton truncates


def divided(of: Of, node: fx.Node) -> tuple[Value, Value, int | None]:
    """Give the inputs of a division of integers, and the divisor's exponent if it is a power of two.

    A divisor that a user's closure holds is written as a literal: a division by what the compiler knows is a product or
    a shift, and by what it does not know a dozen instructions.
    """
    left, right = inputs(of, node, 2)
    if right.settle is not None:
        right = literal(right.settle())._replace(dtype=right.dtype)
    number = right.number
    if number == 0:
        raise Refusal(f"divides integers by 0, in {operation_name(node)} of {left.text} and 0")
    is_power = isinstance(number, int) and number > 0 and number & (number - 1) == 0
    return left, right, int(number).bit_length() - 1 if is_power and number else None


def floor_divide(of: Of, node: fx.Node) -> Value:
    """Division rounded down, where Triton rounds towards zero."""
    if result_type(node).is_floating_point:
        left, right = inputs(of, node, 2)
        return made(f"tl.floor({exact_quotient(left, right)})", node, left, right)
    left, right, exponent = divided(of, node)
    if exponent is not None:
        return made(f"{left.text} >> {exponent}", node, left, natural=left.natural)
    towards_zero = f"{left.text} // {right.text}"
    if left.natural and right.natural:
        return made(towards_zero, node, left, right, natural=True)
    apart = f"({left.text} % {right.text} != 0) & (({left.text} < 0) != ({right.text} < 0))"
    return made(f"{towards_zero} - tl.cast({apart}, tl.int32)", node, left, right)


def remainder(of: Of, node: fx.Node) -> Value:
    """The remainder with the divisor's sign, as Python has it."""
    if result_type(node).is_floating_point:
        left, right = inputs(of, node, 2)
        text = f"{left.text} - tl.floor({exact_quotient(left, right)}) * {right.text}"
        return made(text, node, left, right)
    left, right, exponent = divided(of, node)
    a, b = left.text, right.text
    if exponent is not None:
        return made(f"{a} & {(1 << exponent) - 1}", node, left, natural=True)
    if left.natural and right.natural:
        return made(f"{a} % {b}", node, left, right, natural=True)
    if right.natural:
        return made(f"tl.where({a} % {b} < 0, {a} % {b} + {b}, {a} % {b})", node, left, right, natural=True)
    return made(f"tl.where(({a} % {b} != 0) & (({a} < 0) != ({b} < 0)), {a} % {b} + {b}, {a} % {b})", node, left, right)


def reciprocal(of: Of, node: fx.Node) -> Value:
    """One over a value."""
    (value,) = inputs(of, node, 1, torch.float32)
    return made(quotient(literal(1.0), value), node, value)


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
    "reciprocal": reciprocal,
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
