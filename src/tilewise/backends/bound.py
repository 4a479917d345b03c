"""A kernel loaded on one device: the memory that its launches are described in, and the calls that start them."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Iterable, Sequence

import torch

from tilewise.backends.compile import Binary, rank_of
from tilewise.backends.driver import INVALID_CONTEXT, MAP_BYTES, Driver
from tilewise.backends.tensor_map import TensorMap, encoded

Value = int | float | None  # a pointer's address, or a number

CODES = {
    "i1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip

# Numbers of the CUDA driver's interface.
COOPERATIVE, PROGRAMMATIC_SERIALIZATION = 2, 6  # CU_LAUNCH_ATTRIBUTE_...
CONFIG = "@7IQQI4x"  # CUlaunchConfig: grid, block, shared memory; stream; attributes and their number
STREAM, ADDRESSES = 32, 56  # where in a block the stream stands, and where the configuration ends
ATTRIBUTE = struct.Struct("@I4xI60x")  # CUlaunchAttribute: its number, the value in the first word of a union


class Block:
    """The memory that launches of one kernel are described in.

    It holds the launch's configuration, the addresses of tensors and of scratch memory, then the other arguments, and
    beside them the tensor maps. A table says where each parameter of the kernel stands, which is why addresses may come
    first and in any order. The driver has read all of it when a launch returns, so one lock makes it everybody's.
    """

    def __init__(self, binary: Binary, function: int, kinds: Sequence[str], slots: Sequence[int] | None = None) -> None:
        pointers = sum(kind[0] == "*" for kind in kinds)
        free = iter(range(pointers) if slots is None else slots)
        layout = f"{CONFIG}{pointers + 1}Q"
        numbers: dict[int, int] = {}
        for index, kind in enumerate(kinds):
            if kind in CODES:
                layout += CODES[kind]
                numbers[index] = struct.calcsize(layout) - struct.calcsize(CODES[kind])
        self._layout = struct.Struct(layout)
        null = -(-self._layout.size // 8)  # one word more than is ever written
        self.memory = (ctypes.c_uint64 * (null + 1))()
        start = ctypes.addressof(self.memory)
        count = sum(kind.startswith("tensordesc") for kind in kinds)
        self.maps = (ctypes.c_uint64 * (MAP_BYTES // 8 * count + 8))()
        first_map = -(-ctypes.addressof(self.maps) // 64) * 64  # the driver reads maps from multiples of 64 bytes
        self.first_map = (first_map - ctypes.addressof(self.maps)) // 8
        table: list[int] = []
        for index, kind in enumerate(kinds):
            if kind[0] == "*":
                table.append(start + ADDRESSES + 8 * next(free))
            elif kind in CODES:
                table.append(start + numbers[index])
            else:  # the map, then its sizes and strides as numbers, which no kernel of ours reads
                table += [first_map, *[start + 8 * null] * (2 * rank_of(kind))]
                first_map += MAP_BYTES
        hidden = [ADDRESSES + 8 * pointers, *[8 * null] * binary.hidden][: binary.hidden]
        table += [start + place for place in hidden]
        self._table = (ctypes.c_void_p * len(table))(*table)
        attributes = [COOPERATIVE] * binary.cooperative + [PROGRAMMATIC_SERIALIZATION] * binary.pdl
        packed = b"".join(ATTRIBUTE.pack(number, 1) for number in attributes)
        self._attributes = ctypes.create_string_buffer(packed, 2 * ATTRIBUTE.size)
        self._fixed = (binary.threads, 1, 1, binary.shared)
        self._ends = (ctypes.addressof(self._attributes), len(attributes))
        self._name = binary.name
        self.at = start, function, ctypes.addressof(self._table), None
        self.lock = threading.Lock()

    def fill(self, grid: tuple[int, int, int], stream: int, values: Sequence[Value]) -> None:
        """Write all but maps: addresses, scratch memory's among them, and numbers, in the order of the kernel."""
        try:
            self._layout.pack_into(self.memory, 0, *grid, *self._fixed, stream, *self._ends, *values)
        except struct.error as error:
            raise ValueError(f"kernel {self._name} cannot take {tuple(values)}: {error}") from error

    def place_map(self, number: int, image: bytes) -> int:
        """Write a tensor map; give the word of ``maps`` in which its address stands."""
        word = self.first_map + MAP_BYTES // 8 * number
        ctypes.memmove(ctypes.addressof(self.maps) + 8 * word, image, MAP_BYTES)
        return word


class Bound:
    """A loaded kernel, called with a grid and all values, or prepared for calls that differ in addresses alone."""

    def __init__(self, driver: Driver, device: int, binary: Binary, kinds: Sequence[str]) -> None:
        self.driver, self.device, self.binary = driver, device, binary
        self._kinds = kinds
        self._pointers = sum(kind[0] == "*" for kind in kinds)
        self._function = driver.load(binary, device)
        self._block = Block(binary, self._function, kinds)

    def __call__(self, grid: tuple[int, ...], values: list[Value]) -> None:
        """Launch with addresses, room for one more, and numbers."""
        if self.driver.current_device() == self.device:
            self._start(programs(grid), values)
        else:
            with torch.cuda.device(self.device):
                self._start(programs(grid), values)

    def _start(self, grid: tuple[int, int, int], values: list[Value]) -> None:
        block, scratch = self._block, self.scratch(grid)
        values[self._pointers] = 0 if scratch is None else scratch.data_ptr()
        stream = self.driver.stream(self.device)
        with block.lock:
            block.fill(grid, stream, values)
            code = self.driver.start(*block.at)
            if code:
                self.start_again(code, block, grid)

    def prepare(
        self,
        grid: tuple[int, ...],
        values: Sequence[Value],
        slots: Sequence[int],
        maps: Sequence[tuple[int, torch.Tensor, TensorMap]] = (),
    ) -> Prepared:
        """Settle all but the addresses.

        Args:
            grid, values: as in a call, without the pointers.
            slots: for each pointer of the kernel, which of a call's pointers it is.
            maps: for each tensor map of the kernel, which of a call's tensors it is made for, one like that, and how.
        """
        block = Block(self.binary, self._function, self._kinds, slots)
        block.fill(programs(grid), 0, [*[0] * (self._pointers + 1), *values])
        words = []
        for number, (place, tensor, how) in enumerate(maps):
            image = encoded(self.driver, tensor, how, self.binary.maps[number])
            words.append((place, block.place_map(number, image)))
        return Prepared(self, block, programs(grid), self._pointers, words)

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
    """A launch in which everything is settled but where its tensors lie.

    Called with the tensors behind its pointers, in the order of its making, then those behind its tensor maps. A map
    holds its tensor's address in its first eight bytes (`tensor_map.encoded` has made sure), so it is written there.
    """

    def __init__(
        self,
        bound: Bound,
        block: Block,
        grid: tuple[int, int, int],
        pointers: int,
        maps: Sequence[tuple[int, int]],
    ) -> None:
        self._bound, self._block, self._grid, self._pointers = bound, block, grid, pointers
        driver = bound.driver
        self._device, self._current, self._stream, self._go = (
            bound.device,
            driver.current_device,
            driver.stream,
            driver.start,
        )
        self._scratch = bool(bound.binary.scratch)
        self._pack = struct.Struct(f"@{pointers + self._scratch}Q").pack_into
        self._maps = tuple(maps)

    def __call__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Launch on the device's current stream."""
        if self._current() != self._device:
            with torch.cuda.device(self._device):
                self(tensors)
            return
        block = self._block
        addresses = [tensor.data_ptr() for tensor in tensors]
        with block.lock:
            if self._maps:
                for place, word in self._maps:
                    block.maps[word] = addresses[place]
                del addresses[self._pointers :]
            if self._scratch:
                scratch = self._bound.scratch(self._grid)
                addresses.append(0 if scratch is None else scratch.data_ptr())
            block.memory[STREAM // 8] = self._stream(self._device)
            self._pack(block.memory, ADDRESSES, *addresses)
            code = self._go(*block.at)
            if code:
                self._bound.start_again(code, block, self._grid)


def programs(grid: tuple[int, ...]) -> tuple[int, int, int]:
    """Give a grid all of its three axes."""
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    return x, y, z
