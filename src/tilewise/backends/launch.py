"""Launch kernels: one launcher for all of them, which needs no C compiler and little of the host's time.

`launch` takes a kernel, a grid, the arguments and the constants, as ``kernel[grid](...)`` does in Triton. On an NVIDIA
GPU it goes past Triton's launcher, which compiles C code in every new process without a cache and spends its time on
questions whose answers do not change:

1. a *variant* is a kernel with its constants and options;
2. a variant is *bound* once for a device and the dtypes of its arguments: compiled by `tilewise.backends.compile`,
   loaded through the CUDA driver, its argument block laid out in memory;
3. a call fills that block and calls ``cuLaunchKernelEx``.

Kernels say in their annotations what type their numbers have; without one, an argument is a pointer, or an i32 or fp32
that may also be None. Values never choose a variant: what a kernel may know of them is among its constants. That all
tensors lie on one device is checked when a variant is bound and not again: callers have checked it before.

Elsewhere the call goes to Triton: on AMD GPUs to its launcher, which does compile C code, and under TRITON_INTERPRET=1
to its interpreter.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from operator import itemgetter
from typing import NamedTuple, Protocol, cast

import torch
import triton

from tilewise.backends.compile import Binary, Constant, Kernel, Options, binary_for, compiled_kernel, signature
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
INVALID_CONTEXT = 201
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
COOPERATIVE, PROGRAMMATIC_SERIALIZATION = 2, 6  # CU_LAUNCH_ATTRIBUTE_...
SHARED_WITHOUT_ASKING = 48 << 10
CONFIG = "@7IQQI4x"  # CUlaunchConfig: grid, block, shared memory; stream; attributes and their number
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
) -> None:
    """Run a kernel as `launch` does, with arguments and constants by name; names that it does not take are left out.

    Raises:
        KeyError: an argument is not among them. Whatever `launch` raises.
    """
    if 0 in grid:
        return
    options = Options(num_warps, num_stages)
    launcher = default_launcher(kernel)
    if launcher is not None:
        passed, fixed = launcher.names(kernel)
        constants = {name: cast("Constant", named[name]) for name in fixed}
        launcher.variant(kernel, constants, options)(grid, [cast("Argument", named[name]) for name in passed])
        return
    _through_triton(kernel, grid, [cast("Argument", named[name]) for name in kernel.arg_names], {}, options)


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


class Driver(Protocol):
    """What a launcher asks of the machine. Devices are counted as torch counts them."""

    def capability(self, device: int) -> int:
        """Give a device's compute capability: 90 for 9.0."""

    def stream(self, device: int) -> int:
        """Give the handle of torch's current stream."""

    def current_device(self) -> int:
        """Give the device that the calling thread works on."""

    def memory(self, size: int, device: int) -> torch.Tensor:
        """Take memory that may be given back as soon as the launch is enqueued."""

    def load(self, binary: Binary, device: int) -> int:
        """Load a kernel; give the function's handle."""

    def start(self, config: int, function: int, parameters: int, extra: None) -> int:
        """Enqueue a launch on the current device from blocks at these addresses; give the driver's code, 0 = done."""

    def enter(self, device: int) -> None:
        """Make a device's context the thread's own."""

    def explain(self, code: int) -> str:
        """Put an error code in words."""


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
        if len(arguments) != len(self._passed):
            expected = ", ".join(param.name for param in self._passed)
            raise ValueError(f"kernel {self._source.__name__} takes {expected}; got {len(arguments)} arguments")
        types = tuple(map(type, self._open_of(arguments)))
        form = self._forms.get(types) or self._forms.setdefault(types, Form.of(arguments))
        values = list(form.passed_of(arguments))
        key: list[object] = [cast("torch.Tensor", values[0]).get_device()]
        for place in form.pointers:
            pointer = cast("torch.Tensor", values[place])
            values[place] = pointer.data_ptr()
            key.append(pointer.dtype)
        bound = form.bound.get(tuple(key))
        if bound is None:
            bound = self._bind(form, tuple(key), arguments)
        bound(grid, values)

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

    passed_of: Callable[[Sequence[Argument]], tuple[Argument, ...]]  # the last one is there to make it a tuple
    pointers: list[int]
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
        pointers = [number for number, place in enumerate(passed) if isinstance(arguments[place], torch.Tensor)]
        return Form(itemgetter(*passed, passed[0]), pointers, {})


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


class Bound:
    """A loaded kernel and the memory that its launches are described in.

    One block holds the launch's configuration and, behind it, the arguments; a second holds the address of each
    argument, as the driver wants them. The driver has read both when a launch returns, so one lock makes them
    everybody's.
    """

    def __init__(self, driver: Driver, device: int, binary: Binary, kinds: Sequence[str]) -> None:
        self._driver, self._device, self._binary = driver, device, binary
        codes = ["Q" if kind[0] == "*" else CODES[kind] for kind in kinds]
        self._layout = struct.Struct(f"{CONFIG}{''.join(codes)}QQ")  # two more: scratch memory and null
        self._block = (ctypes.c_uint64 * (-(-self._layout.size // 8)))()
        start = ctypes.addressof(self._block)
        ends = [struct.calcsize(CONFIG + "".join(codes[: count + 1])) for count in range(len(codes))]
        places = [start + end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        scratch, null = start + self._layout.size - 16, start + self._layout.size - 8
        places += [scratch, *[null] * binary.hidden][: binary.hidden]
        self._parameters = (ctypes.c_void_p * len(places))(*places)
        attributes = [COOPERATIVE] * binary.cooperative + [PROGRAMMATIC_SERIALIZATION] * binary.pdl
        packed = b"".join(ATTRIBUTE.pack(number, 1) for number in attributes)
        self._attributes = ctypes.create_string_buffer(packed, 2 * ATTRIBUTE.size)
        self._fixed = (binary.threads, 1, 1, binary.shared)
        self._ends = (ctypes.addressof(self._attributes), len(attributes))
        self._at = start, driver.load(binary, device), ctypes.addressof(self._parameters), None
        self._lock = threading.Lock()

    def __call__(self, grid: tuple[int, ...], values: list[Argument]) -> None:
        """Launch with arguments that are numbers by now: addresses, integers, floats. The last is not passed."""
        if self._driver.current_device() == self._device:
            self._start(grid, values)
        else:
            with torch.cuda.device(self._device):
                self._start(grid, values)

    def _start(self, grid: tuple[int, ...], values: list[Argument]) -> None:
        driver = self._driver
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        scratch = driver.memory(x * y * z * self._binary.scratch, self._device) if self._binary.scratch else None
        values[-1] = 0 if scratch is None else scratch.data_ptr()
        stream = driver.stream(self._device)
        with self._lock:
            try:
                self._layout.pack_into(self._block, 0, x, y, z, *self._fixed, stream, *self._ends, *values, 0)
            except struct.error as error:
                raise ValueError(f"kernel {self._binary.name} cannot take {values[:-1]}: {error}") from error
            code = driver.start(*self._at)
            if code == INVALID_CONTEXT:  # a thread's first use of CUDA: torch makes the context its own lazily
                driver.enter(self._device)
                code = driver.start(*self._at)
        if code:
            raise RuntimeError(
                f"kernel {self._binary.name} could not be launched over {(x, y, z)} programs of {self._binary.threads} "
                f"threads and {self._binary.shared} bytes of shared memory: {driver.explain(code)}"
            )


class CudaDriver:
    """The CUDA driver, through its own library."""

    def __init__(self) -> None:
        library = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
        try:
            self._cuda = cuda = ctypes.CDLL(library)
        except OSError as error:
            raise RuntimeError(f"kernels need an NVIDIA GPU and its driver, {library}: {error}") from error
        self.start = cuda.cuLaunchKernelEx
        self.start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self.stream = _raw_stream()
        self.current_device = torch.cuda.current_device
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def capability(self, device: int) -> int:
        """Give a device's compute capability: 90 for 9.0."""
        major, minor = torch.cuda.get_device_capability(device)
        return major * 10 + minor

    def memory(self, size: int, device: int) -> torch.Tensor:
        """Take memory that may be given back as soon as the launch is enqueued: torch reuses it in stream order."""
        return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))

    def enter(self, device: int) -> None:
        """Make a device's primary context, which torch uses, the thread's own."""
        context = self._contexts.get(device)
        if context is None:
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self._check(self._cuda.cuInit(0))
            self._check(self._cuda.cuDeviceGet(ctypes.byref(number), device))
            self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
            self._contexts[device] = context
        self._check(self._cuda.cuCtxSetCurrent(context))

    def load(self, binary: Binary, device: int) -> int:
        """Load a kernel on a device and let it have the shared memory that it needs; give the function's handle."""
        with torch.cuda.device(device):
            self.enter(device)
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._check(self._cuda.cuModuleLoadData(ctypes.byref(module), binary.code))
            self._check(self._cuda.cuModuleGetFunction(ctypes.byref(function), module, binary.name.encode()))
            if binary.shared > SHARED_WITHOUT_ASKING:
                self._check(self._cuda.cuFuncSetCacheConfig(function, PREFER_SHARED))
                self._check(self._cuda.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, binary.shared))
        return cast("int", function.value)

    def explain(self, code: int) -> str:
        """Put an error code in words."""
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(code, ctypes.byref(text))
        return f"{(text.value or b'unknown error').decode()} (CUDA driver error {code})"

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the CUDA driver refuses to load a kernel: {self.explain(code)}")


def _raw_stream() -> Callable[[int], int]:
    """Give torch's question for the current stream's handle: its own for compiled code, far cheaper than an object."""
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)
