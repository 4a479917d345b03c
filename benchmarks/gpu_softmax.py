"""Time the row softmax on a GPU, forward and backward, beside what else can compute it and beside a plain copy.

``PYTHONPATH=src python benchmarks/gpu_softmax.py [--dtype float16] [--sweep] [--out FILE]`` prints one JSON object.
Times are medians over interleaved rounds, the L2 cache overwritten before every run; TB/s counts every tensor once,
read or written. An implementation is held to the error budget in the same run before it is timed. ``--sweep`` also
times other tilings of ours, to choose the defaults by.
"""
# ruff: noqa: INP001, T201, S101, BLE001 - a script prints, and an implementation that does not run is recorded as such

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from tilewise.backends import triton_softmax
from tilewise.backends.compile import Options, binary_for
from tilewise.backends.launch import POINTERS
from tilewise.backends.triton_softmax import Facts, Tiling, kernel_and_constants
from tilewise.testing import error

SHAPES = ((131072, 256), (8192, 1024), (8192, 4096), (8192, 16384), (8192, 32768), (4096, 65536), (1024, 262144))
JUDGED_ROWS = 64

Run = Callable[[], torch.Tensor]


def eager(x: torch.Tensor) -> torch.Tensor:
    """Compute the softmax in five kernels."""
    largest = x.max(-1, keepdim=True).values
    shifted = x - largest
    p = torch.exp(shifted)
    row_sum = p.sum(-1, keepdim=True)
    return p / row_sum


def within(got: torch.Tensor, ref: torch.Tensor, low: torch.Tensor) -> dict[str, object]:
    """Hold some rows of a result to the budget."""
    found = error(got[:JUDGED_ROWS], ref, low, torch.finfo(got.dtype).eps)
    return {"max error": found.max, "budget": found.max_budget, "within": found.within}


class Clock:
    """Times runs by CUDA events, each on a cold L2 cache."""

    def __init__(self) -> None:
        self._flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")

    def once(self, run: Run, repeats: int) -> list[float]:
        """Give the seconds of some runs."""
        events = []
        for _ in range(repeats):
            self._flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            events.append((start, stop))
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) * 1e-3 for start, stop in events]

    def compare(
        self, runs: dict[str, Run], size: int, rounds: int = 7, repeats: int = 8
    ) -> dict[str, dict[str, float]]:
        """Time several in turns; give TB/s and the spread of the middle 60 % in microseconds."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            self.once(run, 3)
        for turn in range(rounds):
            order = list(runs) if turn % 2 else list(runs)[::-1]
            for name in order:
                times[name] += self.once(runs[name], repeats)
        found = {}
        for name, values in times.items():
            cuts = statistics.quantiles(values, n=5, method="inclusive")
            found[name] = {
                "TB/s": round(size / statistics.median(values) / 1e12, 3),
                "median us": round(statistics.median(values) * 1e6, 2),
                "p20 us": round(cuts[0] * 1e6, 2),
                "p80 us": round(cuts[3] * 1e6, 2),
            }
        return found


def tilings(cols: int, itemsize: int, tensors: int) -> dict[str, Tiling]:
    """List tilings worth a try for dense rows: whole rows by threads, online ones by block and rows in flight."""
    unit, sms = 16 // itemsize, torch.cuda.get_device_properties(0).multi_processor_count
    block = 1 << (cols - 1).bit_length()
    found = {}
    if block <= 65536:
        for num_warps in (1, 2, 4, 8, 16, 32):
            for rows in (1, 2, 4, 8, 16, 32):
                held = rows * block / (32 * num_warps)
                if unit <= held <= 64 // (tensors - 1) and (rows == 1 or block <= 1024):
                    found[f"once {rows}x{block} w{num_warps}"] = Tiling(False, rows, block, 1, num_warps)
    if cols >= 16384:
        for num_warps in (8, 16, 32):
            for held in (16, 32):
                lanes = 32 * num_warps * held // unit // (tensors - 1)
                for share in (1, 2, 3, 4):
                    if share * num_warps <= 64:
                        name = f"online {lanes}x{unit} w{num_warps} x{share}"
                        found[name] = Tiling(True, 1, lanes, unit, num_warps, share * sms)
    return found


def compile_ahead(cols: int, dtype: torch.dtype, tensors: int, tiling: Tiling, capability: int) -> None:
    """Compile one tiling of dense rows into the cache on disk."""
    unit = 16 // dtype.itemsize
    kernel, constants = kernel_and_constants(Facts("cols", unit, 1, unit), tiling, tensors)
    names = ("x_ptr", "out_ptr") if tensors == 2 else ("p_ptr", "dp_ptr", "ds_ptr")
    binary_for(kernel, dict.fromkeys(names, POINTERS[dtype]), constants, capability, Options(tiling.num_warps, 1))


def compile_sweep(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
    """Compile all that a sweep will time, in several processes."""
    major, minor = torch.cuda.get_device_capability()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(compile_ahead, cols, dtype, tensors, tiling, major * 10 + minor)
            for _, cols in shapes
            for tensors in (2, 3)
            for tiling in tilings(cols, dtype.itemsize, tensors).values()
        ]
        for job in jobs:
            job.result()


def forward(rows: int, cols: int, dtype: torch.dtype, clock: Clock, sweep: bool) -> dict[str, object]:
    """Measure one shape's forward pass."""
    x = torch.randn(rows, cols, device="cuda", dtype=dtype)
    runs: dict[str, Run] = {
        "clone": x.clone,
        "tilewise": lambda: triton_softmax.softmax(x, -1),
        "torch.softmax": lambda: torch.softmax(x, -1),
        "eager, 5 kernels": lambda: eager(x),
    }
    compiled = torch.compile(eager)
    runs["torch.compile"] = lambda: compiled(x)
    if sweep:
        for name, tiling in tilings(cols, x.element_size(), 2).items():
            runs[name] = partial(triton_softmax.softmax, x, -1, tiling)
    few = x[:JUDGED_ROWS]
    ref, low = torch.softmax(few.double(), -1), torch.softmax(few, -1)
    return measured(runs, lambda got: within(got, ref, low), 2 * x.numel() * x.element_size(), clock)


def backward(rows: int, cols: int, dtype: torch.dtype, clock: Clock, sweep: bool) -> dict[str, object]:
    """Measure one shape's backward pass, on the same p and dp for all."""
    p = torch.softmax(torch.randn(rows, cols, device="cuda", dtype=dtype), -1)
    dp = torch.randn_like(p)
    ds = torch.empty_like(p)
    theirs = torch.ops.aten._softmax_backward_data  # noqa: SLF001 - what autograd calls
    runs: dict[str, Run] = {
        "add, the same traffic": lambda: torch.add(p, dp, out=ds),
        "tilewise": lambda: triton_softmax.softmax_backward(p, dp, -1),
        "torch.softmax": lambda: theirs(dp, p, -1, dtype),
    }
    if sweep:
        for name, tiling in tilings(cols, p.element_size(), 3).items():
            runs[name] = partial(triton_softmax.softmax_backward, p, dp, -1, tiling)
    few, few_dp = p[:JUDGED_ROWS], dp[:JUDGED_ROWS]
    exact, exact_dp = few.double(), few_dp.double()
    ref = exact * (exact_dp - (exact * exact_dp).sum(-1, keepdim=True))
    low = theirs(few_dp, few, -1, dtype)
    return measured(runs, lambda got: within(got, ref, low), 3 * p.numel() * p.element_size(), clock)


def measured(
    runs: dict[str, Run], judge: Callable[[torch.Tensor], dict[str, object]], size: int, clock: Clock
) -> dict[str, object]:
    """Judge what computes a softmax, then time what passed."""
    found: dict[str, object] = {}
    passed = {}
    for name, run in runs.items():
        if name in {"clone", "add, the same traffic"}:
            passed[name] = run
            continue
        try:
            verdict = judge(run())
        except Exception as refusal:
            found[name] = {"does not run": repr(refusal)[:300]}
            continue
        found[name] = verdict
        if verdict["within"] or name == "eager, 5 kernels":  # eager is shown whatever its rounding
            passed[name] = run
    times = clock.compare(passed, size)
    roof = next(iter(times.values()))["TB/s"]
    for name, figures in times.items():
        judged = found.get(name, {})
        assert isinstance(judged, dict)
        found[name] = {**figures, "of the copy": round(figures["TB/s"] / roof, 3), **judged}
    return found


def main() -> None:
    """Measure all shapes; print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--shapes", nargs="*", help="rows x cols, such as 8192x4096")
    parser.add_argument("--out", type=Path, help="write the report here too")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes or ()] or SHAPES
    if options.sweep:
        compile_sweep(shapes, dtype)
    clock, results = Clock(), {}
    for rows, cols in shapes:
        for name, measure in (("forward", forward), ("backward", backward)):
            results[f"{name} {rows}x{cols}"] = found = measure(rows, cols, dtype, clock, options.sweep)
            line = {k: v.get("TB/s") for k, v in found.items() if isinstance(v, dict)}
            print(name, rows, cols, line, file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
    import triton

    environment = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": options.dtype,
    }
    text = json.dumps({**environment, "results": results}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
