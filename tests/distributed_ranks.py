"""What runs in the ranks of the tests of tilewise.distributed, and how the ranks are started.

A rank is a process of its own with one thread. It runs every case of its list and puts what went wrong on a queue: a
word for the case and the traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tilewise import testing
from tilewise.distributed import context_parallel_attention, split, unsplit
from tilewise.distributed.context_parallel import Method
from tilewise.distributed.ranges import Order
from tilewise.problem.problem import Options

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Failures = list[tuple[str, str]]
Body = Callable[[int, int], Failures]  # (rank, world) -> failures


# ---- ranks ----------------------------------------------------------------------------------------------------------


def _rank(body: Body, rank: int, world: int, file: str, seconds: float, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", f"file://{file}", rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
        )
        found = body(rank, world)
    except BaseException:  # noqa: BLE001 - the test must hear of it
        found = [("the rank itself", traceback.format_exc())]
    results.put((rank, found))
    results.close()
    results.join_thread()
    os._exit(0)  # groups that a test broke on purpose would be waited for at a regular end


def run_ranks(body: Body, world: int, folder: Path, *, timeout: float = 60, dying: tuple[int, ...] = ()) -> Failures:
    """Start ranks, wait for all that are not to die, and give their failures, each named by its rank."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    file = str(folder / "store")
    ranks = [
        context.Process(target=_rank, args=(body, rank, world, file, timeout, results), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    failures: Failures = []
    waiting, deadline = set(range(world)) - set(dying), time.monotonic() + 240
    while waiting and time.monotonic() < deadline:
        try:
            rank, found = results.get(timeout=1)
        except queue.Empty:
            gone = [rank for rank in waiting if ranks[rank].exitcode not in (None, 0)]
            failures += [(f"rank {rank}", f"exit code {ranks[rank].exitcode}") for rank in gone]
            waiting -= set(gone)
            continue
        waiting.discard(rank)
        failures += [(f"rank {rank}: {name}", told) for name, told in found]
    failures += [(f"rank {rank}", "did not end") for rank in waiting]
    for process in ranks:
        process.kill()
        process.join()
    return failures


def collect(cases: dict[str, Callable[[], None]]) -> Failures:
    """Run cases and keep what they raise."""
    return [failure for name, case in cases.items() for failure in _failure(name, case)]


def _failure(name: str, case: Callable[[], None]) -> Failures:
    try:
        case()
    except BaseException:  # noqa: BLE001 - pytest's own, too; told with its case
        return [(name, traceback.format_exc())]
    return []


# ---- against the oracle ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A case of `tilewise.testing` and how it is spread; ``sizes`` of the mesh, () for one axis of all ranks."""

    case: testing.Case
    method: Method | None = "ring"
    sizes: tuple[int, ...] = ()
    order: Order = "zigzag"
    dtype: str = "float32"

    def __str__(self) -> str:
        way = " x ".join(map(str, self.sizes)) or self.method
        return f"{self.case.name}, {way}, {self.order}, {self.dtype}"


def check(spread: Spread, mesh: DeviceMesh) -> None:
    """Hold a spread call, forward and backward, to the budget of the same call in one process."""
    case, call = spread.case, spread.case.build("cpu", spread.dtype)
    dim = 0 if case.varlen else 2
    tensors = call.tensors
    q, k, v = (split(x, mesh, dim=dim, order=spread.order).requires_grad_() for x in (tensors.q, tensors.k, tensors.v))
    d_out = split(call.d_out, mesh, dim=dim, order=spread.order)
    d_lse = split(call.d_lse, mesh, dim=call.d_lse.ndim - 1, order=spread.order)
    out, lse = context_parallel_attention(
        q,
        k,
        v,
        mesh=mesh,
        causal=call.options.causal,
        window=(call.options.window_left, call.options.window_right),
        align=call.options.align,
        scale=call.options.scale,
        softcap=call.options.softcap,
        cu_seqlens=tensors.cu_seqlens_q,
        return_lse=True,
        method=spread.method,
        order=spread.order,
    )
    torch.autograd.backward((out, lse), (d_out, d_lse))
    grads = (x.grad for x in (q, k, v))
    whole_out, dq, dk, dv = (unsplit(x, mesh, dim=dim, order=spread.order) for x in (out, *grads) if x is not None)
    whole_lse = unsplit(lse, mesh, dim=lse.ndim - 1, order=spread.order)
    if dist.get_rank() == 0:  # all ranks have the whole by now; one judge is enough
        testing.check(testing.Results(whole_out, whole_lse, dq, dk, dv), call)


def options(**given: object) -> Options:
    """Give options that ask for lse."""
    return Options(return_lse=True, **given)  # type: ignore[arg-type]  # as given
