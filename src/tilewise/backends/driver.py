"""What the launcher asks of the machine, and the CUDA driver that answers, through its own library."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Protocol, cast

import torch

from tilewise.backends.compile import Binary

# Numbers of the CUDA driver's interface.
INVALID_CONTEXT = 201
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
SHARED_WITHOUT_ASKING = 48 << 10
MAP_BYTES = 128
MAP_DTYPES = {torch.float8_e4m3fn: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # ..._DATA_TYPE_...
MAP_PROMOTE_128 = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


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

    def encode_map(
        self,
        dtype: torch.dtype,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        swizzle: int,
    ) -> bytes:
        """Encode a tensor map; axes from the outermost, strides in elements, swizzle by the driver's number."""

    def move_map(self, image: bytes, address: int) -> bytes:
        """Give a tensor map another address."""

    def explain(self, code: int) -> str:
        """Put an error code in words."""


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
        self.current_device = _raw_device()
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

    def encode_map(
        self,
        dtype: torch.dtype,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        swizzle: int,
    ) -> bytes:
        """Encode a tensor map; axes from the outermost, strides in elements, swizzle by the driver's number."""
        _held, place = _map_memory()
        rank = len(shape)
        sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
        steps = (ctypes.c_uint64 * rank)(*(stride * dtype.itemsize for stride in reversed(strides[:-1])))
        boxes, ones = (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*[1] * rank)
        self._check(
            self._cuda.cuTensorMapEncodeTiled(
                ctypes.c_void_p(place), MAP_DTYPES[dtype], rank, ctypes.c_void_p(address), sizes, steps, boxes, ones,
                0, swizzle, MAP_PROMOTE_128, 0,
            ),
            f"encode a tensor map of shape {shape}, strides {strides}, box {box} at {address:#x}",
        )  # fmt: skip
        return ctypes.string_at(place, MAP_BYTES)

    def move_map(self, image: bytes, address: int) -> bytes:
        """Give a tensor map another address."""
        _held, place = _map_memory()
        ctypes.memmove(place, image, MAP_BYTES)
        code = self._cuda.cuTensorMapReplaceAddress(ctypes.c_void_p(place), ctypes.c_void_p(address))
        self._check(code, "move a tensor map")
        return ctypes.string_at(place, MAP_BYTES)

    def explain(self, code: int) -> str:
        """Put an error code in words."""
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(code, ctypes.byref(text))
        return f"{(text.value or b'unknown error').decode()} (CUDA driver error {code})"

    def _check(self, code: int, what: str = "load a kernel") -> None:
        if code:
            raise RuntimeError(f"the CUDA driver refuses to {what}: {self.explain(code)}")


def _map_memory() -> tuple[ctypes.Array[ctypes.c_char], int]:
    """Take memory for a tensor map, and its first address on 64 bytes; the memory must be held while that is used."""
    raw = ctypes.create_string_buffer(MAP_BYTES + 64)
    return raw, -(-ctypes.addressof(raw) // 64) * 64


def _raw_stream() -> Callable[[int], int]:
    """Give torch's question for the current stream's handle: its own for compiled code, far cheaper than an object."""
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)


def _raw_device() -> Callable[[], int]:
    """Give torch's question for the thread's device, without the check that CUDA is in use, where torch has it."""
    raw: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)  # noqa: SLF001
    return raw or torch.cuda.current_device
