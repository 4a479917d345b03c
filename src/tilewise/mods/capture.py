"""What a user's function carries with it: numbers, tensors and further functions in its closure.

`walk` lists what a function captured and gives a key under which a translation may be kept: the same code with the same
numbers and tensors of the same rank and type translates to the same. `rebuild` gives the function anew with other values
in place of the captured numbers, so that these reach the kernels as arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from enum import Enum
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType

import torch

DEPTH = 6  # functions within functions, objects within objects


class Walk:
    """What a function reaches, in a fixed order: its tensors, and the numbers that `rebuild` can replace.

    ``key`` tells all else apart; of numbers only what the source may depend on. ``known`` says that the key tells all.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[int | float] = []
        self.known = True
        self._seen: set[tuple[int, bool]] = set()
        self.key = self._of(function, (), True, DEPTH)

    def _of(self, value: object, names: tuple[str, ...], replaced: bool, depth: int) -> Hashable:
        """Give the key of one value; ``names`` are those that the code around it uses.

        ``replaced`` says whether `rebuild` comes here: then a number's value is no part of the key.
        """
        kind = type(value)
        if kind in (int, float) and replaced:
            self.numbers.append(value)  # type: ignore[arg-type]
            return kind_of_number(value)  # type: ignore[arg-type]
        if kind in (int, float, bool, str) or value is None:
            # 1, 1.0 and True are equal keys of a dict; 0.0 and -0.0 too.
            return kind, repr(value) if kind is float else value
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return "tensor", value.dtype, value.dim()
        if depth == 0:
            self.known = False
            return kind
        if kind is FunctionType:
            return self._of_function(value, replaced, depth)  # type: ignore[arg-type]
        if kind in (tuple, list):
            return kind, *(self._of(item, names, replaced, depth - 1) for item in value)  # type: ignore[attr-defined]
        if kind is functools.partial:
            parts = (value.func, value.args, tuple(value.keywords.items()))  # type: ignore[attr-defined]
            return kind, self._of(parts, names, replaced, depth - 1)
        if kind is MethodType:
            inner = value.__func__  # type: ignore[attr-defined]
            names = (*names, *_names(inner.__code__)) if isinstance(inner, FunctionType) else names
            return kind, *(self._of(part, names, False, depth - 1) for part in (inner, value.__self__))  # type: ignore[attr-defined]
        if isinstance(value, (ModuleType, type, torch.dtype, torch.device, Enum, BuiltinFunctionType)):
            return value
        if not hasattr(value, "__dict__"):
            self.known = False
            return kind
        return self._of_object(value, names, depth)

    def _of_function(self, function: FunctionType, replaced: bool, depth: int) -> Hashable:
        if (id(function), replaced) in self._seen:
            return "seen"
        self._seen.add((id(function), replaced))
        names = _names(function.__code__)
        cells = [_content(cell) for cell in function.__closure__ or ()]
        reached = [function.__globals__[name] for name in names if name in function.__globals__]
        cells += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        key = [self._of(value, names, replaced, depth - 1) for value in cells]
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
        return type(value), *(
            (name, self._of(held[name], tuple(reached), False, depth - 1)) for name in reached if name in held
        )


def kind_of_number(number: int | float) -> Hashable:
    """Say of a captured number what a source may depend on: its type, and whether it is negative."""
    return type(number), number < 0, isinstance(number, int) and not -(2**31) <= number < 2**31


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


def numbers_of(function: Callable[..., object]) -> tuple[int | float, ...]:
    """List the numbers in a function's closure, and in those of the functions in it, in the order of `rebuild`."""
    found: list[int | float] = []

    def note(number: int | float) -> object:
        found.append(number)
        return number

    rebuild(function, note)
    return tuple(found)


def rebuild(function: Callable[..., object], replace: Callable[[int | float], object]) -> Callable[..., object]:
    """Give the function again, with ``replace(number)`` for each int and float that its closure holds."""
    made: dict[int, object] = {}

    def of(value: object) -> object:
        kind = type(value)
        if kind is int or kind is float:
            return replace(value)  # type: ignore[arg-type]
        if kind is FunctionType and (value.__closure__ or value.__defaults__):  # type: ignore[attr-defined]
            return made.get(id(value)) or again(value)  # type: ignore[arg-type]
        if kind in (tuple, list):
            return kind(of(item) for item in value)  # type: ignore[attr-defined, call-arg]
        if kind is functools.partial:
            keywords = {name: of(item) for name, item in value.keywords.items()}  # type: ignore[attr-defined]
            return functools.partial(of(value.func), *of(value.args), **keywords)  # type: ignore[attr-defined, misc, arg-type]
        return value

    def again(old: FunctionType) -> FunctionType:
        cells = tuple(CellType() for _ in old.__closure__ or ())
        new = FunctionType(old.__code__, old.__globals__, old.__name__, None, cells)
        made[id(old)] = new  # before its cells: a function may hold itself
        for cell, before in zip(cells, old.__closure__ or (), strict=True):
            cell.cell_contents = of(_content(before))
        new.__defaults__ = of(old.__defaults__) if old.__defaults__ else None  # type: ignore[assignment]
        new.__kwdefaults__ = {name: of(item) for name, item in (old.__kwdefaults__ or {}).items()}
        return new

    return of(function)  # type: ignore[return-value]
