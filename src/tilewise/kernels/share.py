"""What host and device share: functions compiled for a GPU from the source that the host calls as it stands.

Triton compiles a function of plain arithmetic without knowing where it came from, and keeps None and other compile-time
values apart from runtime ones by itself. So the rule of `tilewise.problem.blocks` needs no second writing.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
from collections.abc import Callable
from types import FunctionType
from typing import Protocol

import triton
import triton.language as tl


class Jitted(Protocol):
    """A function compiled for the device: ``kernel[grid](*arguments)`` launches it."""

    arg_names: list[str]

    def __call__(self, *arguments: object) -> object:
        """Call it from another function on the device."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Bind a grid of programs."""


def share(function: Callable[..., object], jit: Callable[[object], Jitted] = triton.jit) -> Jitted:
    """Compile a plain Python function for the device; ``jit`` chooses the compiler.

    The copy finds ``tl`` among its globals, which Triton's interpreter asks of every function it runs.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"share compiles functions written in Python; got {function!r}. Pass the function itself")
    copy = FunctionType(function.__code__, {**function.__globals__, "tl": tl}, function.__name__, function.__defaults__)
    copy.__module__, copy.__qualname__, copy.__doc__ = function.__module__, function.__qualname__, function.__doc__
    copy.__annotations__ = function.__annotations__
    return jit(copy)


def written(source: str, name: str) -> Jitted:
    """Compile a function for the device from text that was made at run time; equal texts give the same object.

    Triton reads a function's source from its file. A text has none, and stands among the lines that Python keeps of
    files instead, under a name that is made of the text.
    """
    key = hashlib.sha256(source.encode()).hexdigest()[:20]
    found = _written.get((key, name))
    if found is None:
        file = f"<tilewise {key}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        names: dict[str, object] = {"tl": tl, "triton": triton, "__name__": __name__}
        exec(compile(source, file, "exec"), names)  # noqa: S102 - our own translation of what the caller wrote
        found = _written.setdefault((key, name), triton.jit(names[name]))
        _sources[id(found)] = f"{name} of {source}"
    return found


def source_of(function: object) -> str | None:
    """Give the text that `written` made a function of; None for all else."""
    return _sources.get(id(function))


_written: dict[tuple[str, str], Jitted] = {}
_sources: dict[int, str] = {}  # by the ids of functions that are kept above


def kernel(function: Callable[..., object]) -> Jitted:
    """Compile a function that the host launches, with no variants by the values of its arguments.

    Triton would compile anew for integers that are 1 or divisible by 16 and for pointers aligned to 16 bytes. Lengths,
    heads and strides change from call to call; what a kernel may know of them is among its constants.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if "constexpr" not in str(parameter.annotation)]
    compiled: Jitted = triton.jit(function, do_not_specialize=names)
    return compiled
