"""Launch kernels: one launcher for all of them, which needs no C compiler and little of the host's time.

`launch` takes a kernel, a grid, the arguments and the constants, as ``kernel[grid](...)`` does in Triton. On an NVIDIA
GPU it goes past Triton's launcher, which compiles C code in every new process without a cache and spends its time on
questions whose answers do not change:

1. a *variant* is a kernel with its constants and options;
2. a variant is *bound* once for a device and the dtypes of its arguments: compiled by `tilewise.backends.compile`,
   loaded through the CUDA driver, its argument block laid out in memory;
3. a call fills that block and calls ``cuLaunchKernelEx``;
4. where calls differ only in where their tensors lie, a launch is *prepared*: it has a block of its own in which
   everything else stands already, and a call writes addresses. Steps 3 and 4 are in `tilewise.backends.bound`.

Kernels say in their annotations what type their numbers have; without one, an argument is a pointer, or an i32 or fp32
that may also be None. Values never choose a variant: what a kernel may know of them is among its constants. That all
tensors lie on one device is checked when a variant is bound and not again: callers have checked it before.

Elsewhere the call goes to Triton: on AMD GPUs to its launcher, which does compile C code, and under TRITON_INTERPRET=1
to its interpreter. Of numbers in tuples, that launcher compiles variants for 1 and for multiples of 16, which it cannot
be told to leave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple, Union, cast

import torch
import triton

from tilewise.backends.bound import Bound, Prepared, Value
from tilewise.backends.compile import (
    Binary,
    Constant,
    Kernel,
    Kind,
    Options,
    Parameter,
    binary_for,
    compiled_kernel,
    flat,
    is_tuple,
    signature,
)
from tilewise.backends.driver import CudaDriver, Driver
from tilewise.backends.tensor_map import Mapped, TensorMap, kind_of
from tilewise.kernels.share import Jitted

__all__ = ["Argument", "Launcher", "Mapped", "Prepared", "TensorMap", "launch", "launch_named", "prepare_named"]

Argument = torch.Tensor | Mapped | int | float | None
Parts = tuple[Union[Argument, "Parts"], ...]  # what a kernel takes as one tuple, of tuples too
Shape = tuple[Union["Shape", None], ...]  # how such a tuple is made up


class Long(int):
    """A number of a tuple that a kernel takes in 64 bits; others take 32."""


POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
SCALARS: dict[object, str] = {Long: "i64", int: "i32", float: "fp32", bool: "i1"}


def launch(
    kernel: Jitted,
    grid: tuple[int, ...],
    arguments: Sequence[Argument],
    constants: Mapping[str, Constant],
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    maxnreg: int | None = None,
    launch_pdl: bool = False,
    launch_cooperative_grid: bool = False,
) -> None:
    """Run a kernel over a grid of programs, on the device of its first argument and that device's current stream.

    Args:
        kernel: made by triton.jit; its parameters are first the arguments, then the constants (tl.constexpr).
        grid: programs along one to three axes; where one is 0, nothing runs.
        arguments: every parameter that is no constant, in order; the first is a tensor.
        constants: values that the kernel is compiled for, by name.
        num_warps, num_stages, maxnreg, launch_pdl, launch_cooperative_grid: as Triton has them.

    Raises:
        ValueError: a number that does not fit its type, a dtype without a Triton type, a missing constant.
        RuntimeError: the driver refuses, with its reason.
    """
    if 0 in grid:
        return
    options = Options(num_warps, num_stages, maxnreg, launch_pdl, launch_cooperative_grid)
    launcher = default_launcher(kernel)
    if launcher is not None:
        launcher.variant(kernel, constants, options)(grid, arguments)
        return
    _through_triton(kernel, grid, arguments, constants, options)


def launch_named(
    kernel: Jitted,
    grid: tuple[int, ...],
    named: Mapping[str, Argument | Constant | Parts],
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    maxnreg: int | None = None,
) -> None:
    """Run a kernel as `launch` does, with arguments and constants by name; names that it does not take are left out.

    A parameter that the kernel annotates as ``tl.tuple`` is given a tuple, of tensors, numbers and tuples; its makeup,
    not its values, belongs to the variant. Such parameters come after all other arguments.

    Raises:
        KeyError: an argument is not among them. Whatever `launch` raises.
    """
    if 0 in grid:
        return
    options = Options(num_warps, num_stages, maxnreg)
    launcher = default_launcher(kernel)
    if launcher is not None:
        passed, tuples, fixed = launcher.names(kernel)
        constants = {name: cast("Constant", named[name]) for name in fixed}
        arguments = [cast("Argument", named[name]) for name in passed]
        parts = {name: cast("Parts", named[name]) for name in tuples if named[name]}
        for value in parts.values():
            arguments += [part for _, part in leaves("", value)]
        launcher.variant(kernel, constants, options, shapes_of(parts))(grid, arguments)
        return
    _through_triton(kernel, grid, [_plain(named[name]) for name in kernel.arg_names], {}, options)


def prepare_named(
    kernel: Jitted,
    grid: tuple[int, ...],
    named: Mapping[str, Argument | Constant | Parts],
    pointers: Sequence[str],
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    maxnreg: int | None = None,
) -> Prepared | None:
    """Settle a launch as `launch_named` would make it, but for where its tensors lie.

    Args:
        kernel, grid, named, num_warps, num_stages, maxnreg: as in `launch_named`; the tensors give their dtypes and
            the device.
        pointers: the names of all the tensors that the kernel takes, in the order in which calls will give them; those
            that it takes through maps (`Mapped`) stand last, and those in tuples are named by place: "mods.0.1".

    Returns:
        What launches when it is called with tensors of those dtypes on that device; None where launches go to Triton.
    """
    launcher = default_launcher(kernel)
    if launcher is None:
        return None
    passed, tuples, fixed = launcher.names(kernel)
    constants = {name: cast("Constant", named[name]) for name in fixed}
    parts = {name: cast("Parts", named[name]) for name in tuples if named[name]}
    arguments = [(name, cast("Argument", named[name])) for name in passed]
    for name, value in parts.items():
        arguments += leaves(name, value)
    order = [name for name, _ in arguments]
    variant = launcher.variant(kernel, constants, Options(num_warps, num_stages, maxnreg), shapes_of(parts))
    return variant.prepare(grid, [value for _, value in arguments], list(map(order.index, pointers)))


def leaves(name: str, parts: Parts) -> Iterator[tuple[str, Argument]]:
    """Go through what a tuple holds, tuples within it too, each named by its place.

    >>> list(leaves("mods", ((1, 2.0), (), (3,))))
    [('mods.0.0', 1), ('mods.0.1', 2.0), ('mods.2.0', 3)]
    """
    for place, part in enumerate(parts):
        if isinstance(part, tuple):
            yield from leaves(f"{name}.{place}", part)
        else:
            yield f"{name}.{place}", part


def shapes_of(parts: Mapping[str, Parts]) -> dict[str, Shape]:
    """Give the makeup of each tuple: None for a leaf."""

    def shape(part: Argument | Parts) -> Shape | None:
        return tuple(shape(x) for x in part) if isinstance(part, tuple) and not isinstance(part, Mapped) else None

    return {name: cast("Shape", shape(value)) for name, value in parts.items()}


def _plain(value: object) -> Argument:
    """Give an argument as Triton's own launcher takes it: numbers of their own types, in tuples too."""
    if type(value) is tuple:
        return cast("Argument", tuple(map(_plain, value)))
    return int(value) if isinstance(value, Long) else cast("Argument", value)


def _through_triton(
    kernel: Jitted,
    grid: tuple[int, ...],
    arguments: Sequence[Argument],
    constants: Mapping[str, Constant],
    options: Options,
) -> None:
    """Launch as Triton does: its interpreter, or its own launcher, which compiles C code."""
    meta = {"num_warps": options.num_warps, "num_stages": options.num_stages, "enable_fp_fusion": True}
    first = cast("torch.Tensor", arguments[0])
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        kernel[grid](*arguments, **constants, **meta)


def default_launcher(kernel: Jitted) -> Launcher | None:
    """Give this process's launcher, or None where the call must go to Triton: an interpreted kernel, an AMD GPU."""
    if _default is None:
        if torch.version.hip is not None or not isinstance(kernel, triton.JITFunction):
            return None
        with _making:
            return _make_default()
    return _default


def _make_default() -> Launcher:
    global _default  # noqa: PLW0603 - made at the first call, since making it loads the CUDA driver
    if _default is None:
        _default = Launcher(CudaDriver())
    return _default


_default: Launcher | None = None
_making = threading.Lock()


# ---- variants -------------------------------------------------------------------------------------------------------


class Launcher:
    """Keeps the variants of kernels. Threads may share it."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._variants: dict[tuple[object, ...], Variant] = {}
        self._names: dict[int, tuple[list[str], list[str], list[str]]] = {}
        self._named: list[Jitted] = []  # kept, so that ids stay their own
        self._lock = threading.Lock()

    def variant(
        self,
        kernel: Jitted,
        constants: Mapping[str, Constant],
        options: Options,
        tuples: Mapping[str, Shape] = MappingProxyType({}),
    ) -> Variant:
        """Give the kernel with these constants and options, and tuples made up so; the same object every time."""
        # Triton hashes a kernel by its source, slowly; a variant holds its kernel, so the id stays its own.
        key = (id(kernel), options, *constants, *constants.values(), *tuples.items())
        found = self._variants.get(key)
        if found is None:
            with self._lock:
                found = self._variants.setdefault(key, Variant(self.driver, kernel, constants, options, tuples))
        return found

    def names(self, kernel: Jitted) -> tuple[list[str], list[str], list[str]]:
        """Give the names of a kernel's arguments, of those that are tuples, which come last, and of its constants."""
        found = self._names.get(id(kernel))
        if found is None:
            params = compiled_kernel(kernel).params
            passed = [param for param in params if not param.is_constexpr]
            tuples = [param.name for param in passed if is_tuple(param)]
            names = [param.name for param in passed]
            if names[len(names) - len(tuples) :] != tuples:
                raise ValueError(
                    f"kernel {compiled_kernel(kernel).__name__} must take its tuples after all else: {names}"
                )
            fixed = [param.name for param in params if param.is_constexpr]
            found = self._names[id(kernel)] = (names[: len(names) - len(tuples)], tuples, fixed)
            self._named.append(kernel)
        return found

    @property
    def bindings(self) -> int:
        """The number of kernels that were compiled or loaded so far."""
        return sum(variant.bindings for variant in self._variants.values())


class Variant:
    """A kernel with its constants and options, callable with a grid and arguments."""

    def __init__(
        self,
        driver: Driver,
        kernel: Jitted,
        constants: Mapping[str, Constant],
        options: Options,
        tuples: Mapping[str, Shape] = MappingProxyType({}),
    ) -> None:
        self._driver, self._kernel, self._constants, self._options = driver, kernel, dict(constants), options
        self._source: Kernel = compiled_kernel(kernel)
        self._tuples = dict(tuples)
        self._passed: list[Parameter | Leaf] = [
            param for param in self._source.params if not param.is_constexpr and not is_tuple(param)
        ]
        for name, shape in tuples.items():
            self._passed += [Leaf(leaf) for leaf, _ in leaves(name, shape)]
        # What the kernel does not say of its arguments, each call is asked: a pointer's dtype, or that it is None.
        self._open = [place for place, param in enumerate(self._passed) if not param.annotation_type]
        self._open_of = itemgetter(*self._open, self._open[0])  # one more, so that it always gives a tuple
        self._forms: dict[tuple[object, ...], Form] = {}
        self._lock = threading.Lock()

    @property
    def bindings(self) -> int:
        """The number of kernels that were compiled or loaded for this variant."""
        return sum(len(form.bound) for form in list(self._forms.values()))

    def __call__(self, grid: tuple[int, ...], arguments: Sequence[Argument]) -> None:
        """Launch; see `launch`.

        Raises:
            TypeError: an argument is a tensor map; those are made once, so the launch must be prepared.
        """
        bound, values = self._bound_for(arguments)
        if bound.binary.maps:
            raise TypeError(f"kernel {self._source.__name__} takes tensor maps: prepare its launch, then call that")
        bound(grid, values)

    def prepare(self, grid: tuple[int, ...], arguments: Sequence[Argument], pointers: Sequence[int]) -> Prepared:
        """Settle a launch with these arguments; calls will give those at the places ``pointers``, in that order."""
        bound, values = self._bound_for(arguments)
        tensors = [place for place, argument in enumerate(arguments) if isinstance(argument, torch.Tensor)]
        mapped = [place for place, argument in enumerate(arguments) if isinstance(argument, Mapped)]
        if sorted(pointers) != sorted(tensors + mapped) or not set(mapped).isdisjoint(pointers[: len(tensors)]):
            got = ", ".join(self._passed[place].name for place in pointers)
            needed = ", ".join(self._passed[place].name for place in tensors + mapped)
            order = ", those through maps last" * bool(mapped)
            raise ValueError(
                f"kernel {self._source.__name__} needs the addresses of {needed}{order}; got those of {got}"
            )
        maps = [(pointers.index(place), *cast("Mapped", arguments[place])) for place in mapped]
        return bound.prepare(grid, values[len(tensors) + 1 :], list(map(pointers.index, tensors)), maps)

    def _bound_for(self, arguments: Sequence[Argument]) -> tuple[Bound, list[Value]]:
        """Give the kernel for arguments of these types, and the values that its block holds."""
        if len(arguments) != len(self._passed):
            expected = ", ".join(param.name for param in self._passed)
            raise ValueError(f"kernel {self._source.__name__} takes {expected}; got {len(arguments)} arguments")
        types = tuple(map(type, self._open_of(arguments)))
        form = self._forms.get(types) or self._forms.setdefault(types, Form.of(arguments))
        values: list[object] = list(form.passed_of(arguments))
        key: list[object] = [_first(arguments).get_device()]
        for place in range(form.pointers):
            pointer = cast("torch.Tensor", values[place])
            values[place] = pointer.data_ptr()
            key.append(pointer.dtype)
        for place in form.mapped:
            tensor, how = cast("Mapped", arguments[place])
            key += (tensor.dtype, how.box, how.swizzle)
        bound = form.bound.get(tuple(key))
        if bound is None:
            bound = self._bind(form, tuple(key), arguments)
        return bound, cast("list[Value]", values)

    def _bind(self, form: Form, key: tuple[object, ...], arguments: Sequence[Argument]) -> Bound:
        with self._lock:
            bound = form.bound.get(key)
            if bound is None:
                device = _first(arguments).get_device()
                kinds, binary = self._compile(device, arguments)
                bound = form.bound[key] = Bound(self._driver, device, binary, kinds)
        return bound

    def _compile(self, device: int, arguments: Sequence[Argument]) -> tuple[list[str], Binary]:
        """Compile for a device and these types of arguments; give the types of those that are passed."""
        types: dict[str, Kind | None] = {}
        for place in self._open:
            name = self._passed[place].name
            types[name] = _kind(self._source.__name__, name, arguments[place], device)
        for name, shape in self._tuples.items():
            types[name] = _kinds(name, shape, types)
        kinds, _ = signature(self._source, types, self._constants)
        binary = binary_for(self._kernel, types, self._constants, self._driver.capability(device), self._options)
        return list(flat(kinds.values())), binary


class Leaf(NamedTuple):
    """An argument that is part of a tuple."""

    name: str
    annotation_type: str = ""


def _kinds(name: str, shape: Shape, types: dict[str, Kind | None]) -> Kind:
    """Give the types of a tuple's parts, taking those of its leaves out of ``types``."""
    return tuple(
        cast("Kind", types.pop(f"{name}.{place}")) if part is None else _kinds(f"{name}.{place}", part, types)
        for place, part in enumerate(shape)
    )


class Form(NamedTuple):
    """One way of giving a variant its arguments: which are None, and which of the others are pointers."""

    passed_of: Callable[[Sequence[Argument]], tuple[Argument, ...]]  # pointers, room for scratch memory's, numbers
    pointers: int
    mapped: list[int]
    bound: dict[tuple[object, ...], Bound]  # by device and dtypes

    @staticmethod
    def of(arguments: Sequence[Argument]) -> Form:
        """Take the form of these arguments.

        Raises:
            TypeError: the first is no tensor, so that nothing says where to run.
        """
        _first(arguments)
        passed = [place for place, argument in enumerate(arguments) if argument is not None]
        pointers = [place for place in passed if isinstance(arguments[place], torch.Tensor)]
        mapped = [place for place in passed if isinstance(arguments[place], Mapped)]
        numbers = [place for place in passed if place not in pointers and place not in mapped]
        places = [*pointers, 0, *numbers, *[0] * (not pointers and not numbers)]
        return Form(itemgetter(*places), len(pointers), mapped, {})


def _first(arguments: Sequence[Argument]) -> torch.Tensor:
    """Give the tensor that says where a kernel runs."""
    first = arguments[0]
    tensor = first.tensor if isinstance(first, Mapped) else first
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a kernel runs where its first argument is, so that must be a tensor; got {first!r}")
    return tensor


def _kind(kernel: str, name: str, argument: Argument, device: int) -> str | None:
    if argument is None:
        return None
    if isinstance(argument, Mapped):
        return kind_of(kernel, name, argument.tensor.dtype, argument.map)
    if not isinstance(argument, torch.Tensor):
        if type(argument) not in SCALARS:
            raise TypeError(
                f"kernel {kernel} cannot take {name} = {argument!r}; pass a tensor, int, float, bool or None"
            )
        return SCALARS[type(argument)]
    if argument.dtype not in POINTERS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in POINTERS)
        raise ValueError(f"kernel {kernel} cannot take {name} in {argument.dtype}; kernels know {known}")
    if argument.get_device() != device:
        raise ValueError(f"kernel {kernel} runs where its first argument is; {name} is on {argument.device}")
    return POINTERS[argument.dtype]
