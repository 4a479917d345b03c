"""Run a kernel written in Gluon on the CPU: its own source, on NumPy, with everything asynchronous at odd times.

Gluon has no interpreter. `emulate` takes the Python function behind a kernel, and behind every function it calls, and
gives it other globals: ``gl``, ``tma_load``, the functions of kernels/gluon/sync.py and so on become those of this file
and its three neighbours. Masks, phases of rings, stale buffers and deadlocks are found so; layouts, registers and the
inline assembly itself are not: those are for the compiler and the GPU.

    rows = tensor_map(x, box=(64, 128))
    emulate(kernel, (4,), {"x_map": rows, "out_ptr": out, "length": 100}, {"BLOCK": 64}, seed=3, late=True)

Arguments are torch tensors on the CPU (the kernel sees pointers), maps, numbers and None; results are written into the
tensors. Run several seeds, and both values of ``late``: see gluon_machine.py.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton
from triton import language as tl
from triton.runtime.jit import ConstexprFunction

import gluon_machine as machine
import gluon_units as units
from gluon_machine import Block, Deadlock, Misuse, Partition, Scheduler, here
from gluon_units import TensorMap, tensor_map
from gluon_values import FUNCTIONS, OF_TORCH, Pointer, Tensor, load, loop, rounded, tensor
from tilewise.kernels.gluon import compat, sync
from tilewise.kernels.gluon.compat import gl, mbarrier

__all__ = ["Deadlock", "Misuse", "TensorMap", "emulate", "tensor_map"]

# ---- the language, in the emulator's words --------------------------------------------------------------------------


class Language:
    """Stands for ``gl`` and ``tl``: the emulated functions, and what is data there, dtypes and layouts, as it is."""

    def __getattr__(self, name: str) -> Any:
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        value = getattr(gl, name)
        if isinstance(value, type | gl.dtype):
            return value
        raise NotImplementedError(f"the emulator does not know gl.{name}: add it to FUNCTIONS")


class Module:
    """Stands for a module of kernels: its functions as the emulator runs them."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return translated(getattr(self.module, name))


def program_id(axis: int) -> Tensor:
    return tensor(here().block.index[axis])


def num_programs(axis: int) -> Tensor:
    return tensor(here().block.grid[axis])


def allocate(dtype: Any, shape: Sequence[int], layout: object, value: Tensor | None = None) -> machine.Shared:
    return here().block.allocate(dtype, shape, layout, value)


def atomic_add(pointer: Pointer, value: Any, mask: Any = None, **_: object) -> Tensor:
    """Add, and give what was there; elements that meet at one address add up, and which was first is not said."""
    machine.switch(polls=True)
    before = load(pointer, mask)
    enabled, offset = pointer.reached(mask, tensor(value).data)
    added = torch.from_numpy(np.broadcast_to(tensor(value).data, offset.shape)[enabled].reshape(-1).copy())
    places = torch.from_numpy(offset[enabled].reshape(-1))
    pointer.memory.index_put_((places,), added.to(pointer.memory.dtype), accumulate=True)
    return before


def warp_specialize(
    functions_and_args: Sequence[Any], worker_num_warps: Sequence[int], worker_num_regs: object = None
) -> Any:
    """Run each function as a partition of its own; the first one as the caller."""
    caller = here()
    if caller.block.specialized:
        raise Misuse("a kernel has one warp_specialize")
    caller.block.specialized = True
    (first, arguments), *rest = functions_and_args
    workers = []
    for number, ((function, given), warps) in enumerate(zip(rest, worker_num_warps, strict=True), start=1):
        worker = Partition(caller.scheduler, caller.block, warps, f"partition {number} ({function.__name__})")

        def work(worker: Partition = worker, function: Any = function, given: Any = given) -> None:
            function(*given)
            worker.finish()

        caller.scheduler.start(worker, work)
        workers.append(worker)
    caller.name = f"partition 0 ({first.__name__})"
    result = first(*arguments)
    machine.switch(lambda: all(worker.over for worker in workers), "has ended, and waits for the other partitions")
    return result


class MBarrier:
    """Stands for the module mbarrier."""

    MBarrierLayout = mbarrier.MBarrierLayout

    @staticmethod
    def init(bar: machine.Shared, count: int) -> None:
        bar.barrier().init(int(count))
        bar.wrote()

    @staticmethod
    def expect(bar: machine.Shared, size: Any, pred: Any = True) -> None:
        if pred:
            bar.barrier().bytes += int(size)
            bar.barrier().arrive(1)

    @staticmethod
    def arrive(bar: machine.Shared, *, count: int = 1, pred: Any = True) -> None:
        if pred:
            bar.barrier().arrive(int(count))
        machine.switch()

    @staticmethod
    def wait(bar: machine.Shared, phase: Any, pred: Any = True, **_: object) -> None:
        if pred:
            bar.barrier().wait(int(phase))


# ---- the tricks of sync.py ------------------------------------------------------------------------------------------


def arrive(slot: Any, lane: Any, bar_off: int) -> None:
    if int(lane) == 0:
        here().block.slot(slot).arrive(here().warps)
    machine.switch()


def wait(slot: Any, phase: Any, bar_off: int) -> None:
    here().block.slot(slot).wait(int(phase))


def wait_if(condition: Any, slot: Any, phase: Any, bar_off: int) -> None:
    if condition:
        wait(slot, phase, bar_off)


def named_sync(number: int, threads: int) -> None:
    here().block.named_barrier(number).sync(threads)


def named_arrive(number: int, threads: int) -> None:
    here().block.named_barrier(number).arrive(threads)
    machine.switch()


def put(slot: Any, x: Any, y: Any, lane: Any, bar_off: int) -> None:
    place = here().block.slot(slot)
    if place.count:
        raise Misuse(f"{place.label} is overwritten by put")
    if int(lane) == 0:
        place.words = (tensor(x).to(gl.int32), tensor(y).to(gl.int32))


def get(slot: Any, bar_off: int) -> tuple[Tensor, Tensor]:
    machine.switch()
    words = here().block.slot(slot).words
    if words is None:
        raise Misuse(f"get({int(slot)}) before any put")
    return words


def count(counter: Pointer) -> Tensor:
    if here().warps != 1:
        raise Misuse(f"count in a partition of {here().warps} warps, each of which would take a ticket")
    return atomic_add(counter, 1)


def rescale_if_moved(acc: Tensor, rescale: Tensor) -> Tensor:
    if acc.shape[0] != 64 or rescale.shape != (64,) or here().warps != 4:
        raise Misuse(f"rescale_if_moved is for (64, dim) and (64,) in four warps; got {acc!r} and {rescale!r}")
    return Tensor(acc.data * rescale.data[:, None], acc.dtype, acc.layout)


def pack_e4m3(*parts: Tensor) -> Tensor:
    rounded_parts = [torch.from_numpy(x.data).clamp(-448, 448).to(torch.float8_e4m3fn) for x in parts]
    four = torch.stack(rounded_parts, -1).view(torch.int32)[..., 0]
    return Tensor(four.numpy(), gl.int32, parts[0].layout)


def bytes_of(x: Tensor) -> Tensor:
    fours = x.data.reshape(*x.shape[:-1], -1, 4)
    if (fours != fours[..., :1]).any():
        raise Misuse("bytes_of sees four neighbours that are not one int32")
    whole = torch.from_numpy(fours[..., :1].copy()).view(torch.float8_e4m3fn).float()
    return Tensor(whole.numpy().reshape(x.shape), gl.float8e4nv, x.layout)


def log2_of_power(x: Tensor) -> Tensor:
    mantissa, exponent = np.frexp(x.data)
    if np.any(mantissa != 0.5):
        raise Misuse(f"log2_of_power of {x.data}, which is no power of two")
    return Tensor((exponent - 1).astype(np.float32), gl.float32, x.layout)


def one_beyond(x: Tensor, border: Tensor) -> Tensor:
    return Tensor((np.abs(x.data) > tensor(border).data).astype(np.float32), gl.float32, x.layout)


TRICKS: dict[str, Callable[..., Any]] = {
    "arrive": arrive, "wait": wait, "wait_if": wait_if, "named_sync": named_sync, "named_arrive": named_arrive,
    "put": put, "get": get, "count": count, "rescale_if_moved": rescale_if_moved,
    "lane_id": lambda: tensor(0), "first_lane": lambda x: x, "pack": lambda x, dtype: x.to(dtype),
    "exp2_shared": lambda y, _: Tensor(np.exp2(np.maximum(y.data, -126)), y.dtype, y.layout),
    "pack_e4m3": pack_e4m3, "bytes_of": bytes_of, "log2_of_power": log2_of_power,
    "inverse_of_power": lambda x: 1.0 / x, "one_beyond": one_beyond,
}  # fmt: skip
FUNCTIONS.update(
    program_id=program_id, num_programs=num_programs, allocate_shared_memory=allocate, atomic_add=atomic_add,
    warp_specialize=warp_specialize, thread_barrier=machine.switch, barrier=machine.switch,
    num_warps=lambda: here().warps,
)  # fmt: skip
LANGUAGE = Language()
UNITS = ("tma_load", "tma_store", "tma_add", "tma_store_wait", "warpgroup_mma", "warpgroup_mma_wait")
REPLACED: dict[int, Any] = {
    id(gl): LANGUAGE, id(tl): LANGUAGE, id(mbarrier): MBarrier, id(sync): Module(sync), id(compat): Module(compat),
    id(compat.thread_barrier): machine.switch, id(compat.warp_specialize): warp_specialize,
    id(compat.fence_async_shared): machine.fence_async_shared,
    **{id(getattr(compat, name)): getattr(units, name) for name in UNITS},
    **{id(getattr(sync, name)): trick for name, trick in TRICKS.items()},
}  # fmt: skip

# ---- a kernel's functions with other globals ------------------------------------------------------------------------

_known: dict[int, tuple[object, types.FunctionType]] = {}


def translated(value: Any) -> Any:
    """Give what stands for a global of a kernel's file while it is emulated."""
    if id(value) in REPLACED:
        return REPLACED[id(value)]
    if isinstance(value, gl.constexpr):
        return value.value
    if isinstance(value, triton.JITFunction):
        return rebound(value)
    if isinstance(value, ConstexprFunction):
        return lambda *given, **named: plain(value.fn(*given, **named))
    if isinstance(value, types.ModuleType) and value.__name__.startswith("tilewise.kernels."):
        return Module(value)
    return value


def plain(value: Any) -> Any:
    """Take off what marks a value as known at compile time."""
    if isinstance(value, gl.constexpr):
        return plain(value.value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(plain, value))
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def names_in(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*(names_in(each) for each in inner))


def rebound(kernel: Any) -> types.FunctionType:
    """Make the Python function behind a kernel run on what stands for its globals."""
    if id(kernel) not in _known:
        source = kernel.fn
        scope: dict[str, Any] = {"range": loop, "__builtins__": __builtins__}
        cells = tuple(types.CellType(translated(cell.cell_contents)) for cell in source.__closure__ or ())
        copy = types.FunctionType(source.__code__, scope, source.__name__, source.__defaults__, cells)
        _known[id(kernel)] = (kernel, copy)  # before its globals, which may name it
        used = names_in(source.__code__) & source.__globals__.keys()
        scope.update({name: translated(source.__globals__[name]) for name in used})
    return _known[id(kernel)][1]


# ---- launching ------------------------------------------------------------------------------------------------------


def argument(value: Any, name: str, annotated: str) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer.to(value, name)
    if value is None or isinstance(value, TensorMap):
        return value
    number = tensor(value)
    kinds = {str(dtype): dtype for dtype in OF_TORCH.values()}
    kind = next((dtype for text, dtype in kinds.items() if annotated == text.replace("int", "i")), number.dtype)
    return Tensor(rounded(np.asarray(value), kind), kind)


def emulate(
    kernel: Any,
    grid: Sequence[int],
    arguments: Mapping[str, Any],
    constants: Mapping[str, Any],
    *,
    num_warps: int = 4,
    seed: int = 0,
    late: bool = False,
    resident: int = 1,
) -> None:
    """Run a kernel over a grid; ``resident`` programs at a time, in the order of their numbers.

    Raises:
        Deadlock: nobody can go on; the text tells where each partition stands and what each barrier lacks.
        Misuse: something that the hardware would not forgive, such as a product of memory that was not fenced.
        IndexError: a pointer or a copy leaves its tensor.
        OverflowError: an integer does not fit its type.
    """
    function = rebound(kernel)
    given = {
        param.name: constants[param.name]
        if param.name in constants
        else argument(arguments[param.name], param.name, param.annotation_type)
        for param in kernel.params
        if param.name in constants or param.name in arguments
    }
    unknown = (arguments.keys() | constants.keys()) - given.keys()
    if unknown:
        raise TypeError(f"{function.__name__} has no parameters {sorted(unknown)}")
    sizes = (*grid, 1, 1)[:3]
    scheduler = Scheduler(seed, late)
    numbers = itertools.product(*(range(size) for size in reversed(sizes)))

    def work(partition: Partition) -> None:
        for number in numbers:
            partition.block = Block(number[::-1], sizes)
            function(**given)
            partition.finish()
            if any(owner.block is partition.block for owner, _ in scheduler.copies):
                raise Misuse(f"block {partition.block.index} ends while a load into its memory is under way")
            partition.block.finish()

    for _ in range(resident):
        partition = Partition(scheduler, None, num_warps, f"the kernel ({function.__name__})")
        scheduler.start(partition, functools.partial(work, partition))
    scheduler.run()
