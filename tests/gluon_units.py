"""The copy engine and the tensor cores, as a kernel sees them: begun now, done later, waited for by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from gluon_machine import Misuse, Shared, here, switch
from gluon_values import OF_TORCH, Array, DType, Tensor, memory_of, poison, rounded, tensor, to_numpy

# ---- copies ---------------------------------------------------------------------------------------------------------


class TensorMap:
    """A tensor as the copy engine sees it: base, sizes, strides in elements, and the box that one copy moves.

    Addresses wrap at 2**64 bytes as on the GPU, so that strides may lead behind the base by leading far before it. What
    lies outside the sizes is zero when loaded and dropped when stored; what lies inside them has to be the tensor's.
    """

    def __init__(self, whole: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> None:
        self.memory, self.item = memory_of(whole), whole.element_size()
        self.shape, self.strides, self.block_shape = tuple(sizes), tuple(strides), [int(size) for size in box]
        self.dtype = OF_TORCH[whole.dtype]
        self.layout = gl.NVMMASharedLayout.get_default_for(self.block_shape, self.dtype)
        self.bytes = int(np.prod(self.block_shape)) * self.item
        self.block_type = SimpleNamespace(shape=self.block_shape, element_ty=self.dtype, nbytes=self.bytes)
        self.check(whole)

    def check(self, whole: torch.Tensor) -> None:
        """Hold the map to what cuTensorMapEncodeTiled accepts."""
        steps = [stride * self.item for stride in self.strides[:-1]]
        if not len(self.shape) == len(self.strides) == len(self.block_shape) <= 5:
            raise ValueError(f"a map has up to 5 axes, each with size, stride and box; got {self}")
        if self.strides[-1] != 1 or whole.data_ptr() % 16 or any(step % 16 or not 0 <= step < 2**40 for step in steps):
            raise ValueError(f"base and strides must be multiples of 16 bytes, the last stride 1; got {self}")
        if max(self.block_shape) > 256 or not all(1 <= size <= 2**32 for size in self.shape):
            raise ValueError(f"a box has up to 256 elements an axis, and an axis 1 to 2**32; got {self}")

    def __str__(self) -> str:
        return f"sizes {self.shape}, strides {self.strides}, box {self.block_shape}"

    def inside(self, corner: Sequence[int]) -> tuple[torch.Tensor, tuple[slice, ...]] | None:
        """Give the part of the box at ``corner`` inside the sizes: that memory, and its place in the box."""
        places = []
        for first, size, box in zip(corner, self.shape, self.block_shape, strict=True):
            places.append(slice(max(0, -first), min(box, size - first)))
            if places[-1].start >= places[-1].stop:
                return None
        address = sum((first + at.start) * step for first, at, step in zip(corner, places, self.strides, strict=True))
        start = address * self.item % 2**64 // self.item
        counts = [at.stop - at.start for at in places]
        steps = [step if count > 1 else 0 for count, step in zip(counts, self.strides, strict=True)]
        last = start + sum((count - 1) * step for count, step in zip(counts, steps, strict=True))
        if last >= self.memory.numel():
            raise IndexError(
                f"a copy at {list(corner)} leaves the tensor: element {last} of {self.memory.numel()}; {self}"
            )
        return self.memory.as_strided(counts, steps, self.memory.storage_offset() + start), tuple(places)


def tensor_map(
    whole: torch.Tensor, shape: Sequence[int] | None = None, strides: Sequence[int] | None = None, *, box: Sequence[int]
) -> TensorMap:
    """Describe a tensor to the copy engine; sizes and strides are its own unless given."""
    return TensorMap(
        whole, whole.shape if shape is None else shape, whole.stride() if strides is None else strides, box
    )


def corner_of(rows: TensorMap, coordinates: Sequence[Any], tile: Shared, what: str) -> list[int]:
    corner = [int(tensor(each)) for each in coordinates]
    if len(corner) != len(rows.shape) or list(tile.shape) != rows.block_shape or tile.dtype != rows.dtype:
        raise Misuse(f"{what} at {corner} between a map ({rows}) and shared memory of {tile.dtype} {list(tile.shape)}")
    if not all(-(2**31) <= each < 2**31 for each in corner):
        raise Misuse(f"{what} at {corner}: coordinates are int32")
    tile.seen_by_hardware(what)
    return corner


def tma_load(rows: TensorMap, coord: Sequence[Any], barrier: Shared, result: Shared, pred: Any = True) -> None:
    """Begin to load. Until it is done the tile holds neither old nor new numbers, but NaN."""
    if not pred:
        return
    partition, meeting = here(), barrier.barrier()
    meeting.check()
    barrier.seen_by_hardware("the end of tma_load")
    corner = corner_of(rows, coord, result, "tma_load")
    found = rows.inside(corner)

    def arrive() -> None:
        result.data[...] = 0
        result.notes.loading[...] = False
        if found is not None:
            memory, place = found
            result.data[place] = to_numpy(memory)
        meeting.receive(rows.bytes)

    if partition.scheduler.late:
        arrive()
    else:
        result.data[...] = poison((1,), result.dtype)
        if result.notes.loading.any():
            raise Misuse("tma_load into shared memory into which another load is under way")
        result.notes.loading[...] = True
        partition.scheduler.copies.append((partition, arrive))
    switch()


def _store(change: Callable[[torch.Tensor, torch.Tensor], object], what: str) -> Callable[..., None]:
    def begin(rows: TensorMap, coord: Sequence[Any], src: Shared) -> None:
        found = rows.inside(corner_of(rows, coord, src, what))

        def write() -> None:
            if found is not None:
                memory, place = found
                change(memory, torch.from_numpy(src.data[place].copy()).to(memory.dtype))

        later = here().scheduler.late
        if not later:
            write()
        here().stores.append(write if later else lambda: None)
        switch()

    return begin


tma_store = _store(lambda memory, values: memory.copy_(values), "tma_store")
tma_add = _store(lambda memory, values: memory.add_(values), "tma_add")


def tma_store_wait(pendings: Any) -> None:
    switch()
    while len(here().stores) > int(pendings):
        here().stores.popleft()()


# ---- products -------------------------------------------------------------------------------------------------------


class Product:
    """``a b + acc``, under way: only `warpgroup_mma_wait` turns it into a tensor."""

    def __init__(self, a: Tensor | Shared, b: Shared, acc: Tensor | Product, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.dtype: DType = acc.dtype
        self.layout: object = acc.layout
        self.shape: tuple[int, ...] = acc.shape
        self.result: Tensor | None = None
        self.waited_for = False

    @property
    def type(self) -> Product:
        return self

    def compute(self) -> Tensor:
        if self.result is None:
            product: Array = self.a.data @ self.b.data
            if self.use_acc:
                product = product + (self.acc.compute() if isinstance(self.acc, Product) else self.acc).data
            self.result = Tensor(rounded(product, self.dtype), self.dtype, self.layout)
        return self.result


def warpgroup_mma(
    a: Tensor | Shared, b: Shared, acc: Tensor | Product, *, use_acc: Any = True, is_async: bool = False, **_: object
) -> Any:
    """Begin a product. Operands of 16 or 8 bits, of one dtype, the right one from shared memory, sum in float32.

    Those of 8 bits are read along the summed axis alone: it has to be the dense one.
    """
    if (a.shape[0], a.shape[1], b.shape[1]) != (acc.shape[0], b.shape[0], acc.shape[1]):
        raise Misuse(f"a product of {a.shape} and {b.shape} into {acc.shape}")
    bits = a.dtype.primitive_bitwidth
    if a.dtype != b.dtype or bits not in (8, 16) or acc.dtype != gl.float32:
        raise Misuse(f"a product of {a.dtype} and {b.dtype} into {acc.dtype}")
    if bits == 8 and any(x.data.strides[axis] != x.data.itemsize for x, axis in ((a, 1), (b, 0))):
        raise Misuse("a product of 8-bit operands, one of which does not lie dense along the summed axis")
    if here().warps % 4 or a.shape[0] % 64:
        raise Misuse(f"a product of {a.shape[0]} rows by {here().warps} warps: four warps multiply 64 rows")
    for operand in (a, b):
        if isinstance(operand, Shared):
            operand.seen_by_hardware("warpgroup_mma")
    begun = Product(a, b, acc, bool(use_acc))
    if not here().scheduler.late:
        begun.compute()
    here().products.append(begun)
    return begun if is_async else warpgroup_mma_wait(0, deps=(begun,))


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Sequence[Any] = ()) -> Any:
    """Wait until so few products are under way, and give ``deps`` as tensors.

    What a product reads from registers has to be among the deps of the wait that ends it: the compiler would give those
    registers to something else. Not so 8-bit numbers, which the compiler does not take there: `sync.bytes_of` makes
    each product its own copy.
    """
    switch()
    if any(isinstance(each, Tensor) and each.dtype.primitive_bitwidth == 8 for each in deps):
        raise Misuse("warpgroup_mma_wait takes no 8-bit numbers among its deps")
    while len(here().products) > int(num_outstanding):
        done = here().products.popleft()
        done.compute()
        done.waited_for = True
        in_registers = isinstance(done.a, Tensor) and done.a.dtype.primitive_bitwidth != 8
        if in_registers and not any(each is done.a for each in deps):
            raise Misuse("a product's left operand, in registers, is not among the deps of the wait that ends it")
    results = []
    for each in deps:
        if isinstance(each, Product) and not each.waited_for:
            raise Misuse(f"warpgroup_mma_wait({num_outstanding}) gives a product that may still be under way")
        results.append(each.compute() if isinstance(each, Product) else each)
    return results[0] if len(results) == 1 else tuple(results)
