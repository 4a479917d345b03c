"""How a run is timed.

On a CPU by torch.utils.benchmark, which repeats short runs in blocks. On CUDA and ROCm by events around each run, with
the L2 cache overwritten before it, so that every run finds its data in main memory, as it would between other layers.
On MPS by the wall clock around runs that are waited for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from tilewise.machine.device import MIB

MOST_RUNS = 100  # in one round
_L2_BYTES = 256 * MIB  # larger than the L2 of any GPU


class Spread(NamedTuple):
    """The middle of the times measured, and how far most of them lie from it: seconds."""

    p20: float
    median: float
    p80: float


def spread(times: Sequence[float]) -> Spread:
    """Give the median and the 20th and 80th percentile.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    Spread(p20=2.0, median=3.5, p80=5.0)
    """
    if len(times) == 1:
        return Spread(times[0], times[0], times[0])
    cuts = statistics.quantiles(times, n=5, method="inclusive")
    return Spread(cuts[0], statistics.median(times), cuts[3])


class Stopwatch:
    """Times rounds of runs on one device.

    Args:
        device: "cpu", "cuda", "mps".
        clock: what tells the time on a CPU.
    """

    def __init__(self, device: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device = torch.device(device)
        self.clock = clock
        self._flush: torch.Tensor | None = None
        if self.device.type == "cuda":
            self._flush = torch.empty(_L2_BYTES // 4, dtype=torch.int32, device=self.device)

    def round(self, run: Callable[[], object], seconds: float) -> list[float]:
        """Time runs for about so many seconds, at least one, after a warm-up; give the seconds of each run or block."""
        if self.device.type == "cuda":
            return self._events(run, seconds)
        if self.device.type == "mps":
            return self._waited(run, seconds)
        timer = Timer("run()", globals={"run": run}, timer=self.clock, num_threads=torch.get_num_threads())
        return list(timer.blocked_autorange(min_run_time=seconds).times)

    def synchronise(self) -> None:
        """Wait until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def _events(self, run: Callable[[], object], seconds: float) -> list[float]:
        run()
        self.synchronise()
        start = time.perf_counter()
        run()
        self.synchronise()
        count = max(1, min(MOST_RUNS, int(seconds / max(time.perf_counter() - start, 1e-6))))
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in pairs:
            if self._flush is not None:
                self._flush.zero_()
            begin.record()
            run()
            end.record()
        self.synchronise()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]

    def _waited(self, run: Callable[[], object], seconds: float) -> list[float]:
        run()
        self.synchronise()
        times: list[float] = []
        while sum(times) < seconds and len(times) < MOST_RUNS:
            start = time.perf_counter()
            run()
            self.synchronise()
            times.append(time.perf_counter() - start)
        return times
