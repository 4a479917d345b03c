"""What a user's function carries with it: numbers, tensors and further functions in its closure.

`Walk` lists what a function captured and gives a key under which a translation may be kept: the same code with tensors
of the same rank and type translates to the same. `rebuild` gives the function anew with other values in place of the
captured numbers, so that these reach the kernels as arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import TypeAlias

import numpy as np
import torch

Number: TypeAlias = "int | float"
Function: TypeAlias = Callable[..., object]

DEPTH = 8  # functions within functions, objects within objects
LIBRARIES = ("torch", "numpy", "tilewise")  # their functions mean the same at every call


class Walk:
    """What a function reaches, in a fixed order: its tensors, and the numbers that `rebuild` can replace.

    ``key`` tells all else apart; of numbers only what the source may depend on. ``known`` says that the key tells all.
    """

    def __init__(self, function: Function) -> None:
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[Number] = []
        self.known = True
        self._seen: set[tuple[int, bool]] = set()
        self.key = self._of(function, (), True, DEPTH)

    def _of(self, value: object, names: tuple[str, ...], replaced: bool, depth: int) -> Hashable:
        """Give the key of one value; ``names`` are those that the code around it uses.

        ``replaced`` says whether `rebuild` comes here: then a number's value is no part of the key.
        """
        if is_number(value) and replaced:
            self.numbers.append(value)  # type: ignore[arg-type]
            return kind_of_number(value)  # type: ignore[arg-type]
        if isinstance(value, (int, float, str, np.generic)) or value is None:
            return str(type(value)), repr(value)  # 1, 1.0 and True would be equal keys of a dict
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return "tensor", value.dtype, value.dim()
        if isinstance(value, (ModuleType, type, torch.dtype, torch.device, Enum, BuiltinFunctionType)):
            return value
        if depth > 0 and isinstance(value, FunctionType):
            return self._of_function(value, replaced, depth)
        parts = parts_of(value)
        if depth > 0 and parts is not None:
            return str(type(value)), *(self._of(part, names, replaced, depth - 1) for part in parts)
        if depth > 0 and isinstance(value, MethodType):
            inner = value.__func__
            names = (*names, *_names(inner.__code__)) if isinstance(inner, FunctionType) else names
            return "method", *(self._of(part, names, False, depth - 1) for part in (inner, value.__self__))
        if depth > 0 and hasattr(value, "__dict__"):
            return self._of_object(value, names, depth)
        self.known = False
        return str(type(value))

    def _of_function(self, function: FunctionType, replaced: bool, depth: int) -> Hashable:
        root = (function.__module__ or "").partition(".")[0]
        if (id(function), replaced) in self._seen or (root in LIBRARIES and not function.__closure__):
            return function.__code__
        self._seen.add((id(function), replaced))
        names = _names(function.__code__)
        reached = [function.__globals__[name] for name in names if name in function.__globals__]
        key = [self._of(value, names, replaced, depth - 1) for value in held_by(function)]
        key += [self._of(value, names, False, depth - 1) for value in reached]
        return function.__code__, *key

    def _of_object(self, value: object, names: tuple[str, ...], depth: int) -> Hashable:
        """Of an object, what the code may mean by the names that it uses: attributes, parameters, buffers.

        What the class defines (methods, properties) uses names in turn.
        """
        reached = [*names, "__call__"]
        for name in reached:
            defined = getattr(type(value), name, None)
            defined = defined.fget if isinstance(defined, property) else defined
            if isinstance(defined, FunctionType):
                reached += [further for further in _names(defined.__code__) if further not in reached]
        held = dict(vars(value))
        for table in ("_parameters", "_buffers", "_modules"):
            held.update(held.get(table) or {})
        found = [name for name in reached if name in held]
        return type(value), *((name, self._of(held[name], tuple(reached), False, depth - 1)) for name in found)


def is_number(value: object) -> bool:
    """Say whether a value is a plain int or float; a bool says which way to go, and stays in its place."""
    return type(value) in (int, float)


def kind_of_number(number: float) -> Hashable:
    """Say of a captured number what a source may depend on: its type, its width, and whether it is negative."""
    return type(number).__name__, number < 0, isinstance(number, int) and not fits_int32(number)


def fits_int32(number: int) -> bool:
    """Say whether a number fits in 32 bits."""
    return -(2**31) <= number < 2**31


def parts_of(value: object) -> Iterable[object] | None:
    """List what a tuple, list, dict or partial function consists of, in the order of `rebuild`; else None."""
    if type(value) in (tuple, list):
        return value  # type: ignore[return-value]
    if type(value) is dict:
        return (*value, *value.values())
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords, *value.keywords.values())
    return None


def held_by(function: FunctionType) -> list[object]:
    """List what a function's closure and its defaults hold, in the order of `rebuild`."""
    cells = [_content(cell) for cell in function.__closure__ or ()]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


@functools.cache
def _names(code: CodeType) -> tuple[str, ...]:
    """List the names of globals and attributes that a piece of code uses, those of functions inside it too."""
    inner = (name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def numbers_of(function: Function) -> tuple[Number, ...]:
    """List the numbers in a function's closure, and in those of the functions in it, in the order of `rebuild`."""
    found: list[Number] = []

    def note(number: Number) -> object:
        found.append(number)
        return number

    rebuild(function, note)
    return tuple(found)


def rebuild(function: Function, replace: Callable[[Number], object]) -> Function:
    """Give the function again, with ``replace(number)`` for each int and float that its closure holds."""
    made: dict[int, FunctionType] = {}

    def of(value: object) -> object:
        if is_number(value):
            return replace(value)  # type: ignore[arg-type]
        if isinstance(value, FunctionType) and held_by(value):
            return made.get(id(value)) or again(value)
        if type(value) in (tuple, list):
            parts = [of(part) for part in value]  # type: ignore[attr-defined]
            return tuple(parts) if type(value) is tuple else parts
        if type(value) is dict:
            keys = [of(key) for key in value]
            return dict(zip(keys, [of(part) for part in value.values()], strict=True))
        if isinstance(value, functools.partial):
            inner: Function = of(value.func)  # type: ignore[assignment]
            arguments = [of(part) for part in value.args]
            keywords = {name: of(part) for name, part in value.keywords.items()}
            return functools.partial(inner, *arguments, **keywords)
        return value

    def again(old: FunctionType) -> FunctionType:
        cells = tuple(CellType() for _ in old.__closure__ or ())
        new = FunctionType(old.__code__, old.__globals__, old.__name__, None, cells)
        made[id(old)] = new  # before its cells: a function may hold itself
        for cell, before in zip(cells, old.__closure__ or (), strict=True):
            cell.cell_contents = of(_content(before))
        new.__defaults__ = tuple(of(part) for part in old.__defaults__ or ()) or None
        new.__kwdefaults__ = {name: of(part) for name, part in (old.__kwdefaults__ or {}).items()}
        return new

    changed: Function = of(function)  # type: ignore[assignment]
    return changed
