"""What a user's function carries with it: numbers, tensors and further functions in its closure.

`Walk` lists what a function captured and gives a key under which a translation may be kept: the same code with tensors
of the same rank and type translates to the same. `rebuild` gives the function anew with other values in place of the
captured numbers, so that these reach the kernels as arguments.
"""

from __future__ import annotations

import dis
import functools
import sys
from abc import ABCMeta
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import Enum
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import TypeAlias

import numpy as np
import torch

Number: TypeAlias = "int | float"
Function: TypeAlias = Callable[..., object]

DEPTH = 8  # functions within functions, objects within objects
LIBRARIES = {"torch", "numpy", "tilewise", "math", "cmath", "operator", "itertools", "builtins"}  # mean the same always
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
FIXED = (torch.dtype, torch.device, torch.memory_format, Enum, *OPERATORS)
# Names by which code may come to anything, and what marks them among the names of a piece of code.
DYNAMIC = {
    "getattr", "hasattr", "vars", "dir", "globals", "locals", "eval", "exec", "__import__", "import_module",
    "attrgetter", "methodcaller", "__dict__", "__getattr__", "__getattribute__", "__globals__", "__closure__",
    "__self__", "__func__",
    "modules", "children", "named_modules", "named_children", "parameters", "named_parameters", "buffers",
    "named_buffers", "get_submodule", "get_parameter", "get_buffer", "state_dict", "get_extra_state",
}  # fmt: skip
ANYTHING = "?"
CALLED = ("__call__", "forward")
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MODULE_STATE = frozenset(vars(torch.nn.Module())) - {"training"}


class Walk:
    """What a function reaches, in a fixed order: its tensors, and the numbers that `rebuild` can replace.

    ``key`` tells all else apart; of numbers only what the source may depend on. ``known`` says that the key tells all:
    where code may come to more than was looked at, it is False, and no translation is kept.
    """

    def __init__(self, function: Function) -> None:
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[Number] = []
        self.known = True
        self._seen: dict[Hashable, int] = {}
        self.key = self._of(function, CALLED, True, DEPTH, False)

    def _of(self, value: object, names: tuple[str, ...], replaced: bool, depth: int, whole: bool) -> Hashable:
        """Give the key of one value; ``names`` are those that the code around it uses.

        ``replaced`` says whether `rebuild` comes here: then a number's value is no part of the key. ``whole`` says that
        the code does more with the value than to read attributes that it names.
        """
        if is_number(value) and replaced:
            self.numbers.append(value)  # type: ignore[arg-type]
            return kind_of_number(value)  # type: ignore[arg-type]
        if type(value) in PLAIN or isinstance(value, np.generic):
            return str(type(value)), repr(value)  # 1, 1.0 and True would be equal keys of a dict
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return "tensor", value.dtype, value.dim(), *self._held(vars(value), names, depth, False)
        if isinstance(value, FIXED):
            return value
        if isinstance(value, (staticmethod, classmethod, property)):
            value = value.fget if isinstance(value, property) else value.__func__
        if depth <= 0:
            return self._unknown(value)
        parts = parts_of(value)
        if parts is not None:
            return str(type(value)), *(self._of(part, names, replaced, depth - 1, True) for part in parts)
        if isinstance(value, FunctionType):
            return self._of_function(value, replaced, depth)
        if isinstance(value, BuiltinFunctionType):
            owner = value.__self__
            if owner is None or isinstance(owner, (ModuleType, type)):
                return value
            return "builtin", value.__name__, self._of(owner, (), False, depth - 1, True)
        if isinstance(value, MethodType):
            inner = value.__func__
            used = _names(inner.__code__) if isinstance(inner, FunctionType) else ()
            whole = _passes_itself(inner) if isinstance(inner, FunctionType) else True
            key = self._of(inner, (), False, depth - 1, False)
            return "method", key, self._of(value.__self__, used, False, depth - 1, whole)
        if isinstance(value, (ModuleType, type)):
            return self._of_space(value, names, depth, whole)
        return self._of_object(value, names, depth, whole) if hasattr(value, "__dict__") else self._unknown(value)

    def _unknown(self, value: object) -> Hashable:
        self.known = False
        return str(type(value))

    def _again(self, *what: Hashable) -> Hashable | None:
        """Say which of the things seen before this is, or None."""
        if what in self._seen:
            return "seen", self._seen[what]
        self._seen[what] = len(self._seen)
        return None

    def _held(self, held: Mapping[str, object], names: Iterable[str], depth: int, whole: bool) -> list[Hashable]:
        """Give the keys of what a space holds under the names."""
        names = tuple(names)
        return [
            (name, self._of(held[name], names, False, depth - 1, whole or f"{name}()" in names))
            for name in names
            if name in held
        ]

    def _of_function(self, function: FunctionType, replaced: bool, depth: int) -> Hashable:
        code = function.__code__
        # By where its code is from: a name may be borrowed.
        if _root(function.__globals__.get("__name__")) in LIBRARIES and not function.__closure__:
            return code
        again = self._again("function", id(function), replaced)
        if again is not None:
            return again
        names = _names(code)
        if ANYTHING in names or set(vars(function)) - {"__wrapped__"}:
            self.known = False
        free = code.co_freevars
        key = [
            self._of(value, names, replaced, depth - 1, place >= len(free) or f"{free[place]}()" in names)
            for place, value in enumerate(held_by(function))
        ]
        key += self._held(function.__globals__, names, depth, False)
        return code, len(function.__defaults__ or ()), tuple(function.__kwdefaults__ or ()), *key

    def _of_space(self, space: ModuleType | type, names: tuple[str, ...], depth: int, whole: bool) -> Hashable:
        """Of a module or a class, what the code means by the names that it uses."""
        again = self._again("space", id(space), names, whole)
        if again is not None:
            return again
        if isinstance(space, ModuleType):
            if _root(space.__name__) in LIBRARIES:
                return space
            if whole or "__getattr__" in vars(space):
                self.known = False
                return space
            return space, *self._held(vars(space), names, depth, False)
        if _is_ours(space):
            return space
        if type(space) not in (type, ABCMeta) or _is_opaque(space):
            self.known = False
            return space
        tables = _tables(space)
        reached, whole = _reach(names, {}, tables, whole)
        return space, *(tuple(self._held(table, reached, depth, whole)) for table in tables)

    def _of_object(self, value: object, names: tuple[str, ...], depth: int, whole: bool) -> Hashable:
        """Of an object, what the code may mean by the names that it uses: attributes, parameters, buffers.

        What its classes define (methods, properties) uses names in turn. An object that is called, computed with or
        passed on may be asked for anything that it has.
        """
        kind = type(value)
        again = self._again("object", id(value), names, whole)
        if again is not None:
            return again
        if _is_opaque(kind):
            return self._unknown(value)
        held = dict(vars(value))
        if isinstance(value, torch.nn.Module):
            if any(held.get(hooks) for hooks in MODULE_HOOKS):
                self.known = False
            for table in MODULE_TABLES:
                held.update(held.get(table) or {})
            held = {name: part for name, part in held.items() if name not in MODULE_STATE}
        tables = _tables(kind)
        # Of torch's own modules, and of what stands for an attribute, the code that uses it is not read.
        whole = whole or not tables or hasattr(kind, "__get__")
        reached, whole = _reach(names, held, tables, whole)
        return kind, *(tuple(self._held(table, reached, depth, whole)) for table in (held, *tables))


def _root(name: object) -> str:
    return str(name or "").partition(".")[0]


def _is_ours(kind: type) -> bool:
    """Say whether a class is of Python or of a library, where nobody changes what it means."""
    return _root(kind.__module__) in LIBRARIES or _root(kind.__module__) in sys.stdlib_module_names


def _is_opaque(kind: type) -> bool:
    """Say whether objects of a class hold, or do, what their attributes do not tell: a dict's items, say."""
    for base in kind.__mro__[:-1]:
        root = _root(base.__module__)
        if root in LIBRARIES:
            if not issubclass(base, torch.nn.Module):
                return True
        elif root in sys.stdlib_module_names:
            if root not in ("abc", "typing", "types"):
                return True
        elif not {"__getattr__", "__getattribute__"}.isdisjoint(vars(base)):
            return True
    return False


def _tables(kind: type) -> list[Mapping[str, object]]:
    """List what the classes define that users wrote; all of them, since one may call another's by `super`."""
    return [vars(base) for base in kind.__mro__ if not _is_ours(base)]


def _reach(
    names: tuple[str, ...], held: Mapping[str, object], tables: list[Mapping[str, object]], whole: bool
) -> tuple[tuple[str, ...], bool]:
    """List the names that are used with those of the methods that they mean, and say whether all may be used."""
    reached = dict.fromkeys(names)
    waiting = list(reached)
    everything = False
    while waiting or (whole and not everything):
        if whole and not everything:
            everything = True
            further = [*held, *(name for table in tables for name in table if _may_be_used(name, table[name]))]
        else:
            name, further = waiting.pop(), []
            for table in tables:
                defined = table.get(name)
                defined = getattr(defined, "fget", getattr(defined, "__func__", defined))
                if isinstance(defined, FunctionType):
                    further += _names(defined.__code__)
                    whole = whole or _passes_itself(defined)
        waiting += [name for name in further if name not in reached]
        reached.update(dict.fromkeys(further))
    return tuple(reached), whole


def _may_be_used(name: str, value: object) -> bool:
    """Say whether a class's attribute is its author's, or an operator."""
    return not name.startswith("__") or isinstance(value, (FunctionType, staticmethod, classmethod, property))


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
    """List the names of globals and attributes that a piece of code uses, those of functions inside it too.

    ``name()`` beside a name, of a local too, says that more is done with it than to read an attribute. `ANYTHING` says
    that the code may come to what it does not name.
    """
    names = dict.fromkeys(code.co_names)
    if not DYNAMIC.isdisjoint(names):
        names[ANYTHING] = None
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("EXTENDED_ARG", "CACHE")]
    for step, after in zip(steps, (*steps[1:], None), strict=True):
        if step.opname == "IMPORT_NAME" and _root(step.argval) not in LIBRARIES:
            names[ANYTHING] = None
        if "LOAD" in step.opname and "CONST" not in step.opname:
            loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                loaded = loaded[:-1]
            names.update(dict.fromkeys(f"{name}()" for name in loaded))
    for part in code.co_consts:
        if isinstance(part, CodeType):
            names.update(dict.fromkeys(_names(part)))
    return tuple(names)


def _passes_itself(method: FunctionType) -> bool:
    """Say whether a method does more with its object than to read attributes that it names."""
    code = method.__code__
    return not code.co_argcount or f"{code.co_varnames[0]}()" in _names(code)


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
