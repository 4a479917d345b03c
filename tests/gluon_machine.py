"""The parts of a Hopper SM that a warp-specialised kernel can get wrong: who runs when, barriers, copies, products.

Each partition is a thread, but one runs at a time: at every point where partitions can meet, `Scheduler.switch` chooses
who goes on, by numbers drawn from a seed. So a run can be repeated, and where nobody can go on, that is a deadlock and
is reported as one. Copies and products may take effect at any time between their beginning and their wait. Two extremes
find most mistakes:

    late=False   products and stores when they begin, loads when nobody can go on without them: a read too early
    late=True    loads when they begin, products and stores when they are waited for: a buffer filled again too early
"""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gluon_values import Array, DType, Tensor, poison

SHARED_MEMORY = 227 * 1024  # bytes that one block may have
MOST_SWITCHES = 1_000_000
MOST_POLLS = 1_000  # of memory, with nobody doing anything else
OWN_FILES = ("gluon_emulator", "gluon_machine", "gluon_units", "gluon_values", "threading")  # not a kernel's


class Misuse(RuntimeError):  # noqa: N818 - named for what the kernel does
    """The kernel does what the hardware would not forgive, or not define."""


class Deadlock(RuntimeError):  # noqa: N818 - as above
    """No partition can go on."""


class Abandoned(BaseException):
    """Ends the threads of a run that has failed; not for anybody to catch."""


# ---- who runs when --------------------------------------------------------------------------------------------------

HERE = threading.local()


def here() -> Partition:
    """Give the partition that is running."""
    found: Partition = HERE.partition
    return found


class Partition:
    """Some warps of a block, as one thread: what it has begun, and what it waits for."""

    def __init__(self, scheduler: Scheduler, block: Block | None, warps: int, name: str) -> None:
        self.scheduler, self.warps, self.name = scheduler, warps, name
        self.block: Block = block if block is not None else Block((0, 0, 0), (1, 1, 1))
        self.speed = 2.0 ** scheduler.random.uniform(-5, 5)
        self.baton = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None
        self.waits_for = ""
        self.over = False
        self.products: deque[Any] = deque()  # begun and not waited for, as are stores
        self.stores: deque[Callable[[], None]] = deque()
        self.unfenced: list[Array] = []  # which elements of shared memory copies and products cannot see yet
        self.thread: threading.Thread | None = None

    def finish(self) -> None:
        """Hold the partition to having waited for all that it began."""
        for begun, waited in ((self.products, "warpgroup_mma_wait"), (self.stores, "tma_store_wait")):
            if begun:
                raise Misuse(f"{self.name} ends with {len(begun)} that no {waited} covers")

    def __str__(self) -> str:
        line = "ran on"
        frame = sys._current_frames().get(self.thread.ident or 0) if self.thread else None
        while frame is not None and Path(frame.f_code.co_filename).stem in OWN_FILES:
            frame = frame.f_back
        if frame is not None:
            line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        return f"block {self.block.index} {self.name}, {line}: {self.waits_for or 'can go on'}"


class Scheduler:
    """Lets one partition run at a time, in an order drawn from a seed."""

    def __init__(self, seed: int, late: bool) -> None:
        self.random = random.Random(seed)  # noqa: S311 - an order of events, no secret
        self.late = late
        self.partitions: list[Partition] = []
        self.copies: list[tuple[Partition, Callable[[], None]]] = []  # begun, and not arrived
        self.haste = self.random.choice((0.0, 0.3))  # of copies that nobody needs yet
        self.error: BaseException | None = None
        self.finished = threading.Event()
        self.switches = self.polls = 0

    def start(self, partition: Partition, work: Callable[[], None]) -> None:
        """Add a partition, which runs when it is first chosen."""

        def body() -> None:
            partition.baton.acquire()
            HERE.partition = partition
            try:
                with np.errstate(all="ignore"):
                    if self.error is None:
                        work()
                self.partitions.remove(partition)
                partition.over = True
                if self.partitions:
                    self.choose().baton.release()
                else:
                    self.finished.set()
            except Abandoned:
                pass
            except BaseException as error:  # noqa: BLE001 - it is raised again where the run was started
                self.error = error
                for other in self.partitions:
                    other.baton.release()
                self.finished.set()

        self.partitions.append(partition)
        partition.thread = threading.Thread(target=body, name=partition.name, daemon=True)
        partition.thread.start()

    def run(self) -> None:
        """Run all partitions to their ends; raises what any of them raised."""
        threads = [partition.thread for partition in self.partitions]
        self.choose().baton.release()
        self.finished.wait()
        for thread in threads:
            if thread is not None:
                thread.join(timeout=10)
        if self.error is not None:
            raise self.error

    def switch(self, ready: Callable[[], bool] | None = None, waits_for: str = "", polls: bool = False) -> None:
        """Let somebody run, perhaps the caller again; with ``ready`` the caller only once that holds.

        Who ``polls`` reads global memory, perhaps again and again until somebody else writes there.
        """
        partition = here()
        self.polls = self.polls + 1 if polls else 0
        partition.ready, partition.waits_for = ready, waits_for
        chosen = self.choose()
        if chosen is not partition:
            chosen.baton.release()
            partition.baton.acquire()
            if self.error is not None:
                raise Abandoned
        partition.ready, partition.waits_for = None, ""

    def choose(self) -> Partition:
        while True:
            self.switches += 1
            able = [partition for partition in self.partitions if partition.ready is None or partition.ready()]
            if self.copies and (not able or self.random.random() < self.haste):
                _, arrive = self.copies.pop(self.random.randrange(len(self.copies)))
                arrive()
            elif able and self.switches < MOST_SWITCHES and self.polls < MOST_POLLS:
                return able[0] if len(able) == 1 else self.random.choices(able, [each.speed for each in able])[0]
            else:
                raise Deadlock(self.report("no partition can go on" if not able else "the kernel does not end"))

    def report(self, what: str) -> str:
        blocks = {partition.block.index: partition.block for partition in self.partitions}
        states = [str(partition) for partition in self.partitions]
        states += [f"block {index} {line}" for index, block in blocks.items() for line in block.state()]
        return "\n  ".join((what, *states, f"{len(self.copies)} loads under way"))


def switch(ready: Callable[[], bool] | None = None, waits_for: str = "", polls: bool = False) -> None:
    here().scheduler.switch(ready, waits_for, polls)


# ---- barriers -------------------------------------------------------------------------------------------------------


class Barrier:
    """An mbarrier: a phase is complete when all arrivals are in, and all the bytes that were announced."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.count = 0  # arrivals of a phase; 0 until init
        self.missing = 0
        self.bytes = 0
        self.completed = 0
        self.words: tuple[Tensor, Tensor] | None = None  # what `put` left, where the slot is no barrier

    def init(self, count: int) -> None:
        if self.count:
            raise Misuse(f"{self.label} is initialised twice")
        self.count = self.missing = count

    def arrive(self, count: int) -> None:
        self.check()
        if count > self.missing:
            raise Misuse(f"{self.label}: {count} arrivals where {self.missing} of {self.count} are missing")
        self.missing -= count
        self.complete()

    def receive(self, size: int) -> None:
        self.bytes -= size
        self.complete()

    def complete(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.completed += 1
            self.missing = self.count

    def check(self) -> None:
        if not self.count:
            raise Misuse(f"{self.label} was never initialised")

    def wait(self, phase: int) -> None:
        self.check()
        if phase not in (0, 1):
            raise Misuse(f"{self.label}: phase {phase} is neither 0 nor 1")
        switch(lambda: self.completed % 2 != phase, f"waits for {self.label}, phase {phase}")

    def state(self) -> str:
        return (
            f"{self.label}: {self.completed} phases complete, {self.missing} of {self.count} arrivals and "
            f"{self.bytes} bytes missing"
        )


class NamedBarrier:
    """A hardware barrier of threads, as PTX's bar.sync and bar.arrive use it."""

    def __init__(self, number: int) -> None:
        self.number, self.threads, self.arrived, self.generation = number, 0, 0, 0

    def arrive(self, threads: int) -> None:
        if not 8 <= self.number < 16:
            raise Misuse(f"named barrier {self.number}: ids 8 to 15 are free")
        if self.arrived and threads != self.threads:
            raise Misuse(f"named barrier {self.number} is used with {threads} and with {self.threads} threads")
        self.threads = threads
        self.arrived += 32 * here().warps
        if self.arrived > threads:
            raise Misuse(f"named barrier {self.number}: {self.arrived} threads arrive where {threads} meet")
        if self.arrived == threads:
            self.arrived, self.generation = 0, self.generation + 1

    def sync(self, threads: int) -> None:
        generation = self.generation
        self.arrive(threads)
        switch(lambda: self.generation != generation, f"waits at named barrier {self.number} of {threads} threads")


# ---- shared memory --------------------------------------------------------------------------------------------------


class Block:
    """One program: its place in the grid, its shared memory and its barriers."""

    def __init__(self, index: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.index, self.grid = index, grid
        self.size = 0
        self.barriers: list[Array] = []
        self.named: dict[int, NamedBarrier] = {}
        self.specialized = False

    def allocate(self, dtype: DType, shape: Sequence[int], layout: object, value: Tensor | None = None) -> Shared:
        shape = [int(size) for size in shape]
        self.size += int(np.prod(shape)) * dtype.primitive_bitwidth // 8
        if self.size > SHARED_MEMORY:
            raise Misuse(f"{self.size} bytes of shared memory: a block may have {SHARED_MEMORY}")
        if type(layout).__name__ == "MBarrierLayout":
            labels = [f"barrier {i}" for i in range(int(np.prod(shape)))]
            if self.barriers:
                labels = [f"{label} of array {len(self.barriers)}" for label in labels]
            slots = np.array([Barrier(label) for label in labels], dtype=object).reshape(shape)
            self.barriers.append(slots)
            return Shared(slots, Notes(shape), dtype, layout)
        memory = Shared(poison(shape, dtype), Notes(shape), dtype, layout)
        if value is not None:
            memory.store(value)
        return memory

    def slot(self, number: Any) -> Barrier:
        """Find a slot of the kernel's one array of barriers."""
        if len(self.barriers) != 1:
            raise Misuse(f"slots are those of one array; the kernel has {len(self.barriers)} arrays of barriers")
        slots = self.barriers[0].reshape(-1)
        if not 0 <= int(number) < slots.size:
            raise Misuse(f"slot {int(number)} of {slots.size} barriers")
        found: Barrier = slots[int(number)]
        return found

    def named_barrier(self, number: int) -> NamedBarrier:
        return self.named.setdefault(number, NamedBarrier(number))

    def state(self) -> Iterator[str]:
        for slots in self.barriers:
            yield from (slot.state() for slot in slots.reshape(-1) if slot.count)
        for named in self.named.values():
            yield f"named barrier {named.number}: {named.arrived} of {named.threads} threads arrived"

    def finish(self) -> None:
        for named in self.named.values():
            if named.arrived:
                raise Misuse(f"named barrier {named.number} ends with {named.arrived} threads that nobody meets")


class Notes:
    """What is known of each number in shared memory: written and not fenced since; a load into it under way."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.unfenced, self.loading = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)

    def view(self, change: Callable[[Array], Array]) -> Notes:
        seen = copy.copy(self)
        seen.unfenced, seen.loading = change(self.unfenced), change(self.loading)
        return seen


class Shared:
    """A tile of shared memory, or part of one: views look at the same numbers, and at the same notes about them."""

    def __init__(self, data: Array, notes: Notes, dtype: DType, layout: object) -> None:
        self.data, self.notes, self.dtype, self.layout = data, notes, dtype, layout

    @property
    def type(self) -> Shared:
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def view(self, change: Callable[[Array], Array]) -> Shared:
        data = change(self.data)
        if not np.shares_memory(data, self.data):
            raise Misuse(f"shared memory of shape {self.shape} cannot be seen this way without being copied")
        return Shared(data, self.notes.view(change), self.dtype, self.layout)

    def index(self, number: Any) -> Shared:
        place = int(number)
        if not 0 <= place < self.shape[0]:
            raise Misuse(f"buffer {place} of {self.shape[0]}")
        return self.view(lambda data: data[place : place + 1].reshape(data.shape[1:]))

    def slice(self, start: Any, length: Any, dim: Any = 0) -> Shared:
        first, count, axis = int(start), int(length), int(dim)
        if first < 0 or first + count > self.shape[axis]:
            raise Misuse(f"elements {first} to {first + count} of an axis of {self.shape[axis]}")
        return self.view(lambda data: data[(slice(None),) * axis + (slice(first, first + count),)])

    def permute(self, order: Sequence[Any]) -> Shared:
        return self.view(lambda data: data.transpose([int(axis) for axis in order]))

    def reshape(self, shape: Sequence[Any]) -> Shared:
        return self.view(lambda data: data.reshape([int(size) for size in shape]))

    def load(self, layout: object = None) -> Tensor:
        switch()
        return Tensor(self.data.copy(), self.dtype, layout)

    def store(self, value: Tensor) -> None:
        switch()
        if value.shape != self.shape or value.dtype != self.dtype:
            raise Misuse(f"a tensor {value!r} is stored to shared memory of {self.dtype} {list(self.shape)}")
        if self.notes.loading.any():
            raise Misuse("shared memory is stored to while a load into it is under way")
        self.data[...] = value.data
        self.wrote()

    def wrote(self) -> None:
        """Note that threads wrote here, which copies and products do not see before a fence."""
        self.notes.unfenced[...] = True
        here().unfenced.append(self.notes.unfenced)

    def seen_by_hardware(self, what: str) -> None:
        """Hold what a copy or a product works on to having been fenced since a thread wrote to it."""
        if self.notes.unfenced.any():
            raise Misuse(f"{what} works on shared memory that was stored to with no fence_async_shared since")

    def barrier(self) -> Barrier:
        if self.data.dtype != object or self.data.size != 1:
            raise Misuse(f"one mbarrier is expected here; got shared memory of {self.dtype} {list(self.shape)}")
        found: Barrier = self.data.reshape(-1)[0]
        return found


def fence_async_shared(cluster: bool = False) -> None:
    for written in here().unfenced:
        written[...] = False
    here().unfenced.clear()
