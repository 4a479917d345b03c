"""Launch kernels: one launcher for all of them, which needs no C compiler and little of the host's time.

`launch` takes a kernel, a grid, the arguments and the constants, as ``kernel[grid](...)`` does in Triton. On an NVIDIA
GPU it goes past Triton's launcher, which compiles C code in every new process without a cache and spends its time on
questions whose answers do not change:

1. a *variant* is a kernel with its constants and options;
2. a variant is *bound* once for a device and the dtypes of its arguments: compiled by `tilewise.backends.compile`,
   loaded through the CUDA driver, its argument block laid out in memory;
3. a call fills that block and calls ``cuLaunchKernelEx``;
4. where calls differ only in where their tensors lie, a launch is *prepared*: it has a block of its own in which
   everything else stands already, and a call writes addresses.

Kernels say in their annotations what type their numbers have; without one, an argument is a pointer, or an i32 or fp32
that may also be None. Values never choose a variant: what a kernel may know of them is among its constants. That all
tensors lie on one device is checked when a variant is bound and not again: callers have checked it before.

Elsewhere the call goes to Triton: on AMD GPUs to its launcher, which does compile C code, and under TRITON_INTERPRET=1
to its interpreter.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from operator import itemgetter
from typing import NamedTuple, cast

import torch
import triton

from tilewise.backends.compile import Binary, Constant, Kernel, Options, binary_for, compiled_kernel, signature
from tilewise.backends.driver import INVALID_CONTEXT, CudaDriver, Driver
from tilewise.kernels.share import Jitted

Argument = torch.Tensor | int | float | None

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
SCALARS: dict[object, str] = {int: "i32", float: "fp32", bool: "i1"}
CODES = {
    "i1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip

# Numbers of the CUDA driver's interface.
COOPERATIVE, PROGRAMMATIC_SERIALIZATION = 2, 6  # CU_LAUNCH_ATTRIBUTE_...
CONFIG = "@7IQQI4x"  # CUlaunchConfig: grid, block, shared memory; stream; attributes and their number
STREAM, ADDRESSES = 32, 56  # where in a block the stream stands, and where the configuration ends
ATTRIBUTE = struct.Struct("@I4xI60x")  # CUlaunchAttribute: its number, the value in the first word of a union


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
    named: Mapping[str, Argument | Constant],
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    maxnreg: int | None = None,
) -> None:
    """Run a kernel as `launch` does, with arguments and constants by name; names that it does not take are left out.

    Raises:
        KeyError: an argument is not among them. Whatever `launch` raises.
    """
    if 0 in grid:
        return
    options = Options(num_warps, num_stages, maxnreg)
    launcher = default_launcher(kernel)
    if launcher is not None:
        passed, fixed = launcher.names(kernel)
        constants = {name: cast("Constant", named[name]) for name in fixed}
        launcher.variant(kernel, constants, options)(grid, [cast("Argument", named[name]) for name in passed])
        return
    _through_triton(kernel, grid, [cast("Argument", named[name]) for name in kernel.arg_names], {}, options)


def prepare_named(
    kernel: Jitted,
    grid: tuple[int, ...],
    named: Mapping[str, Argument | Constant],
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
        pointers: the names of all the tensors that the kernel takes, in the order in which calls will give them.

    Returns:
        What launches when it is called with tensors of those dtypes on that device; None where launches go to Triton.
    """
    launcher = default_launcher(kernel)
    if launcher is None:
        return None
    passed, fixed = launcher.names(kernel)
    constants = {name: cast("Constant", named[name]) for name in fixed}
    variant = launcher.variant(kernel, constants, Options(num_warps, num_stages, maxnreg))
    return variant.prepare(grid, [cast("Argument", named[name]) for name in passed], list(map(passed.index, pointers)))


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
        self._names: dict[int, tuple[list[str], list[str]]] = {}
        self._named: list[Jitted] = []  # kept, so that ids stay their own
        self._lock = threading.Lock()

    def variant(self, kernel: Jitted, constants: Mapping[str, Constant], options: Options) -> Variant:
        """Give the kernel with these constants and options; the same object every time."""
        # Triton hashes a kernel by its source, slowly; a variant holds its kernel, so the id stays its own.
        key = (id(kernel), options, *constants, *constants.values())
        found = self._variants.get(key)
        if found is None:
            with self._lock:
                found = self._variants.setdefault(key, Variant(self.driver, kernel, constants, options))
        return found

    def names(self, kernel: Jitted) -> tuple[list[str], list[str]]:
        """Give the names of a kernel's arguments and of its constants."""
        found = self._names.get(id(kernel))
        if found is None:
            params = compiled_kernel(kernel).params
            split = [[param.name for param in params if param.is_constexpr == fixed] for fixed in (False, True)]
            found = self._names[id(kernel)] = (split[0], split[1])
            self._named.append(kernel)
        return found

    @property
    def bindings(self) -> int:
        """The number of kernels that were compiled or loaded so far."""
        return sum(variant.bindings for variant in self._variants.values())


class Variant:
    """A kernel with its constants and options, callable with a grid and arguments."""

    def __init__(self, driver: Driver, kernel: Jitted, constants: Mapping[str, Constant], options: Options) -> None:
        self._driver, self._kernel, self._constants, self._options = driver, kernel, dict(constants), options
        self._source: Kernel = compiled_kernel(kernel)
        self._passed = [param for param in self._source.params if not param.is_constexpr]
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
        """Launch; see `launch`."""
        bound, values = self._bound_for(arguments)
        bound(grid, values)

    def prepare(self, grid: tuple[int, ...], arguments: Sequence[Argument], pointers: Sequence[int]) -> Prepared:
        """Settle a launch with these arguments; calls will give those at the places ``pointers``, in that order."""
        bound, values = self._bound_for(arguments)
        tensors = [place for place, argument in enumerate(arguments) if isinstance(argument, torch.Tensor)]
        if sorted(pointers) != tensors:
            got = ", ".join(self._passed[place].name for place in pointers)
            needed = ", ".join(self._passed[place].name for place in tensors)
            raise ValueError(f"kernel {self._source.__name__} needs the addresses of {needed}; got those of {got}")
        return bound.prepare(grid, values, list(map(pointers.index, tensors)))

    def _bound_for(self, arguments: Sequence[Argument]) -> tuple[Bound, list[Argument]]:
        """Give the kernel for arguments of these types, and the values that its block holds."""
        if len(arguments) != len(self._passed):
            expected = ", ".join(param.name for param in self._passed)
            raise ValueError(f"kernel {self._source.__name__} takes {expected}; got {len(arguments)} arguments")
        types = tuple(map(type, self._open_of(arguments)))
        form = self._forms.get(types) or self._forms.setdefault(types, Form.of(arguments))
        values = list(form.passed_of(arguments))
        key: list[object] = [cast("torch.Tensor", values[0]).get_device()]
        for place in range(form.pointers):
            pointer = cast("torch.Tensor", values[place])
            values[place] = pointer.data_ptr()
            key.append(pointer.dtype)
        bound = form.bound.get(tuple(key))
        if bound is None:
            bound = self._bind(form, tuple(key), arguments)
        return bound, values

    def _bind(self, form: Form, key: tuple[object, ...], arguments: Sequence[Argument]) -> Bound:
        with self._lock:
            bound = form.bound.get(key)
            if bound is None:
                device = cast("torch.Tensor", arguments[0]).get_device()
                kinds, binary = self._compile(device, arguments)
                bound = form.bound[key] = Bound(self._driver, device, binary, kinds)
        return bound

    def _compile(self, device: int, arguments: Sequence[Argument]) -> tuple[list[str], Binary]:
        """Compile for a device and these types of arguments; give the types of those that are passed."""
        types: dict[str, str | None] = {}
        for place in self._open:
            name = self._passed[place].name
            types[name] = _kind(self._source.__name__, name, arguments[place], device)
        kinds, _ = signature(self._source, types, self._constants)
        binary = binary_for(self._kernel, types, self._constants, self._driver.capability(device), self._options)
        return [kind for param in self._passed if (kind := kinds[param.name]) != "constexpr"], binary


class Form(NamedTuple):
    """One way of giving a variant its arguments: which are None, and which of the others are pointers."""

    passed_of: Callable[[Sequence[Argument]], tuple[Argument, ...]]  # pointers, room for scratch memory's, numbers
    pointers: int
    bound: dict[tuple[object, ...], Bound]  # by device and dtypes

    @staticmethod
    def of(arguments: Sequence[Argument]) -> Form:
        """Take the form of these arguments.

        Raises:
            TypeError: the first is no tensor, so that nothing says where to run.
        """
        if not isinstance(arguments[0], torch.Tensor):
            raise TypeError(
                f"a kernel runs where its first argument is, so that must be a tensor; got {arguments[0]!r}"
            )
        passed = [place for place, argument in enumerate(arguments) if argument is not None]
        pointers = [place for place in passed if isinstance(arguments[place], torch.Tensor)]
        numbers = [place for place in passed if place not in pointers]
        places = [*pointers, pointers[0], *numbers]
        return Form(itemgetter(*places), len(pointers), {})


def _kind(kernel: str, name: str, argument: Argument, device: int) -> str | None:
    if argument is None:
        return None
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


# ---- launching ------------------------------------------------------------------------------------------------------


class Block:
    """The memory that launches of one kernel are described in.

    It holds the launch's configuration, the addresses of tensors and of scratch memory, then the other arguments. A
    table says where each parameter of the kernel stands, which is why addresses may come first and in any order. The
    driver has read both when a launch returns, so one lock makes them everybody's.
    """

    def __init__(self, binary: Binary, function: int, kinds: Sequence[str], slots: Sequence[int] | None = None) -> None:
        pointers = sum(kind[0] == "*" for kind in kinds)
        free = iter(range(pointers) if slots is None else slots)
        layout, places = f"{CONFIG}{pointers + 1}Q", []
        for kind in kinds:
            if kind[0] == "*":
                places.append(ADDRESSES + 8 * next(free))
            else:
                layout += CODES[kind]
                places.append(struct.calcsize(layout) - struct.calcsize(CODES[kind]))
        self._layout = struct.Struct(layout)
        null = -(-self._layout.size // 8)  # one word more than is ever written
        places += [ADDRESSES + 8 * pointers, *[8 * null] * binary.hidden][: binary.hidden]
        self.memory = (ctypes.c_uint64 * (null + 1))()
        start = ctypes.addressof(self.memory)
        self._table = (ctypes.c_void_p * len(places))(*(start + place for place in places))
        attributes = [COOPERATIVE] * binary.cooperative + [PROGRAMMATIC_SERIALIZATION] * binary.pdl
        packed = b"".join(ATTRIBUTE.pack(number, 1) for number in attributes)
        self._attributes = ctypes.create_string_buffer(packed, 2 * ATTRIBUTE.size)
        self._fixed = (binary.threads, 1, 1, binary.shared)
        self._ends = (ctypes.addressof(self._attributes), len(attributes))
        self._name = binary.name
        self.at = start, function, ctypes.addressof(self._table), None
        self.lock = threading.Lock()

    def fill(self, grid: tuple[int, int, int], stream: int, values: Sequence[Argument]) -> None:
        """Write everything: addresses, scratch memory's among them, and numbers, in the order of the kernel."""
        try:
            self._layout.pack_into(self.memory, 0, *grid, *self._fixed, stream, *self._ends, *values)
        except struct.error as error:
            raise ValueError(f"kernel {self._name} cannot take {tuple(values)}: {error}") from error


class Bound:
    """A loaded kernel, called with a grid and all values, or prepared for calls that differ in addresses alone."""

    def __init__(self, driver: Driver, device: int, binary: Binary, kinds: Sequence[str]) -> None:
        self.driver, self.device, self.binary = driver, device, binary
        self._kinds = kinds
        self._pointers = sum(kind[0] == "*" for kind in kinds)
        self._function = driver.load(binary, device)
        self._block = Block(binary, self._function, kinds)

    def __call__(self, grid: tuple[int, ...], values: list[Argument]) -> None:
        """Launch with addresses, room for one more, and numbers."""
        if self.driver.current_device() == self.device:
            self._start(programs(grid), values)
        else:
            with torch.cuda.device(self.device):
                self._start(programs(grid), values)

    def _start(self, grid: tuple[int, int, int], values: list[Argument]) -> None:
        block, scratch = self._block, self.scratch(grid)
        values[self._pointers] = 0 if scratch is None else scratch.data_ptr()
        stream = self.driver.stream(self.device)
        with block.lock:
            block.fill(grid, stream, values)
            code = self.driver.start(*block.at)
            if code:
                self.start_again(code, block, grid)

    def prepare(self, grid: tuple[int, ...], values: list[Argument], slots: Sequence[int]) -> Prepared:
        """Settle all but the addresses; ``slots`` says for each pointer of the kernel which of the calls' it is."""
        block = Block(self.binary, self._function, self._kinds, slots)
        block.fill(programs(grid), 0, [*[0] * (self._pointers + 1), *values[self._pointers + 1 :]])
        return Prepared(self, block, programs(grid), self._pointers)

    def scratch(self, grid: tuple[int, int, int]) -> torch.Tensor | None:
        """Take the memory that the compiler asks for beside the arguments, if it does."""
        size = self.binary.scratch
        return self.driver.memory(math.prod(grid) * size, self.device) if size else None

    def start_again(self, code: int, block: Block, grid: tuple[int, int, int]) -> None:
        """Mend what made a launch fail, or say what it was."""
        if code == INVALID_CONTEXT:  # a thread's first use of CUDA: torch makes the context its own lazily
            self.driver.enter(self.device)
            code = self.driver.start(*block.at)
        if code:
            raise RuntimeError(
                f"kernel {self.binary.name} could not be launched over {grid} programs of {self.binary.threads} "
                f"threads and {self.binary.shared} bytes of shared memory: {self.driver.explain(code)}"
            )


class Prepared:
    """A launch in which everything is settled but where its tensors lie."""

    def __init__(self, bound: Bound, block: Block, grid: tuple[int, int, int], pointers: int) -> None:
        self._bound, self._block, self._grid = bound, block, grid
        self._driver, self._device = bound.driver, bound.device
        self._scratch = bool(bound.binary.scratch)
        self._addresses = struct.Struct(f"@{pointers + self._scratch}Q")

    def __call__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Launch on the device's current stream."""
        if self._driver.current_device() == self._device:
            self._start(tensors)
        else:
            with torch.cuda.device(self._device):
                self._start(tensors)

    def _start(self, tensors: Iterable[torch.Tensor]) -> None:
        driver, block = self._driver, self._block
        addresses = [tensor.data_ptr() for tensor in tensors]
        scratch = self._bound.scratch(self._grid) if self._scratch else None
        if scratch is not None:
            addresses.append(scratch.data_ptr())
        stream = driver.stream(self._device)
        with block.lock:
            block.memory[STREAM // 8] = stream
            self._addresses.pack_into(block.memory, ADDRESSES, *addresses)
            code = driver.start(*block.at)
            if code:
                self._bound.start_again(code, block, self._grid)


def programs(grid: tuple[int, ...]) -> tuple[int, int, int]:
    """Give a grid all of its three axes."""
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    return x, y, z
