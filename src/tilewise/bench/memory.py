"""How much memory a call takes at its peak, beyond its inputs and with its results.

torch on a CPU: the allocator reports every block it hands out and takes back to torch's profiler, those that kernels
ask for inside included, and the peak of their sum is what counts. What a library allocates behind torch's back (a
BLAS's packing buffers) is seen by nobody here; it does not grow with the length. NumPy: the same from ``tracemalloc``.
CUDA and ROCm: the caching allocator's own peak. MPS tells no peak.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def peak(run: Callable[[], T], device: str, meter: Literal["torch", "numpy"]) -> tuple[T, int | None]:
    """Run once and give its result and the bytes it held at its peak; None where the device does not tell.

    >>> _, held = peak(lambda: torch.zeros(1024) + torch.ones(1024), "cpu", "torch")
    >>> held >= 3 * 4096
    True
    """
    if meter == "numpy":
        return _numpy_peak(run)
    if device.startswith("cuda"):
        return _cuda_peak(run, torch.device(device))
    if device == "cpu":
        return _cpu_peak(run)
    return run(), None


def _numpy_peak(run: Callable[[], T]) -> tuple[T, int]:
    tracemalloc.start()
    try:
        result = run()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _cuda_peak(run: Callable[[], T], device: torch.device) -> tuple[T, int]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(run: Callable[[], T]) -> tuple[T, int]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler announces each start and stop on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        result = run()
    recorded = watched.profiler.kineto_results if watched.profiler is not None else None
    if recorded is None:
        raise RuntimeError("torch's profiler recorded nothing")
    changes = [(event.start_ns(), event.nbytes()) for event in recorded.events() if event.name() == "[memory]"]
    held = most = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        held += change
        most = max(most, held)
    return result, most
