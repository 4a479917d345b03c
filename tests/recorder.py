"""A CUDA driver for tests: it reads each launch from memory as the real one would, and starts nothing."""

from __future__ import annotations

import ctypes

import torch

from tilewise.backends.compile import Binary

SM90 = 90


class Config(ctypes.Structure):
    """CUlaunchConfig, declared as the driver's header does."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class Recorder:
    """A driver that reads each launch from memory as the real one would, and starts nothing."""

    # ruff: noqa: ARG002 - one device is like another here

    def __init__(self, capability: int = SM90) -> None:
        self.number = capability
        self.loaded: list[Binary] = []
        self.launches: list[tuple[Config, int, list[bytes]]] = []
        self.entered: list[int] = []
        self.codes: list[int] = []
        self.taken: list[torch.Tensor] = []
        self.maps: list[tuple[object, ...]] = []
        self.moves_wrongly = 0
        self.map_places: list[int] = []

    def capability(self, device: int) -> int:
        return self.number

    def stream(self, device: int) -> int:
        return 0x5EA

    def current_device(self) -> int:
        return -1  # as torch counts the CPU

    def memory(self, size: int, device: int) -> torch.Tensor:
        self.taken.append(torch.empty(size, dtype=torch.uint8))
        return self.taken[-1]

    def load(self, binary: Binary, device: int) -> int:
        self.loaded.append(binary)
        return len(self.loaded)

    def start(self, config: int, function: int, parameters: int, extra: None) -> int:
        if self.codes:
            return self.codes.pop(0)
        sizes = self.loaded[function - 1].parameters
        addresses = (ctypes.c_void_p * len(sizes)).from_address(parameters)
        read = [ctypes.string_at(address or 0, size) for address, size in zip(addresses, sizes, strict=True)]
        self.map_places = [place for place, size in zip(addresses, sizes, strict=True) if size == 128 and place]
        self.launches.append((Config.from_buffer_copy(ctypes.string_at(config, ctypes.sizeof(Config))), function, read))
        return 0

    def enter(self, device: int) -> None:
        self.entered.append(device)

    def encode_map(
        self,
        dtype: torch.dtype,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        swizzle: int,
    ) -> bytes:
        self.maps.append((dtype, shape, strides, box, swizzle))
        return address.to_bytes(8, "little") + bytes([len(self.maps) % 256] * 120)

    def move_map(self, image: bytes, address: int) -> bytes:
        return (address ^ self.moves_wrongly).to_bytes(8, "little") + image[8:]

    def explain(self, code: int) -> str:
        return f"error {code}"


def integer(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)
