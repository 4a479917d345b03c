"""Pieces of source text, what is known of each, and how one type is written as another."""

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
    depends: frozenset[str]  # on "q", on "kv": the axes of its tile; on the "score"
    natural: bool  # an integer that is never negative
    number: int | float | None  # if it is a literal
    settle: Callable[[], int | float] | None = None  # of a runtime constant: its number, to stand in the source instead


Of = Callable[[object], Value]


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
        number = int(value.number)
        if dtype is torch.int32 and not -(2**31) <= number < 2**31:
            raise Refusal(f"computes in 32 bits with {number}, which needs more; convert positions first: q_pos.long()")
        return literal(number)._replace(dtype=dtype)
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
    if dtype is torch.int64 and all(value.number is not None for value in values if value.dtype is not torch.bool):
        text = f"tl.cast({text}, tl.int64)"  # Triton gives literals as few bits as they need
    return Value(text, torch.float32 if dtype.is_floating_point else dtype, joined(values), natural, None)


def inputs(of: Of, node: fx.Node, count: int, dtype: torch.dtype | None = None) -> tuple[Value, ...]:
    """Give an operation's first inputs, in the type that it computes in."""
    found = tuple(of(argument) for argument in node.args[:count])
    return tuple(cast(value, dtype or result_type(node)) for value in found)
