"""Time and memory of the NumPy reference: the whole score matrix against tiles.

Prints a table for several lengths: ``python benchmarks/numpy_reference.py [--causal] [--lengths 1024 4096]``. Three
implementations take turns, so that noise hits all alike, and each time is a median:

* naive: `tilewise.reference.naive_attention`, the formula with every option it has;
* lean: the fastest untiled form known to us, plain attention alone, in place wherever NumPy allows it;
* tiled: `tilewise.reference.tiled_attention`.

Memory is the peak that tracemalloc sees in one call, the result included. An implementation that would need more than
half of the free memory is not run. Nothing is timed before tiled has been held to the others' results.

OpenBLAS waits for all its threads at the end of every product, and tiled makes many products where naive makes two. On
a machine that is busy with other work these waits are most of what is measured: run it with OPENBLAS_NUM_THREADS=1
there, and read the load that the first line prints.
"""
# ruff: noqa: INP001, T201 - a script, and a script prints

from __future__ import annotations

import argparse
import os
import statistics
import time
import tracemalloc
from typing import TYPE_CHECKING

# OpenBLAS reads these when NumPy is imported; what another program needed must not slow this one.
for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(variable, None)

import numpy as np  # noqa: E402

from tilewise.reference import naive_attention, tiled_attention  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[[], np.ndarray]


def lean_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool) -> np.ndarray:
    """Compute attention with one (len_q, len_kv) matrix and no other, q, k and v equally long."""
    p = (q * q.dtype.type(q.shape[1] ** -0.5)) @ k.T
    if causal:
        for row in range(len(q)):
            p[row, row + 1 :] = -np.inf
    p -= p.max(axis=1, keepdims=True)
    np.exp(p, out=p)
    row_sum = p.sum(axis=1, keepdims=True)
    out: np.ndarray = p @ v
    out /= row_sum
    return out


def peak_bytes(run: Run) -> int:
    """Give the most memory that one call holds at a time."""
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def medians(runs: dict[str, Run], repeats: int) -> dict[str, float]:
    """Time the runs in turns, after one warm-up each; seconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def row(length: int, dim: int, causal: bool, repeats: int) -> str:
    """Measure one length and format its row of the table."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((length, dim)).astype(np.float32) for _ in range(3))
    runs: dict[str, Run] = {
        "naive": lambda: naive_attention(q, k, v, causal=causal),
        "lean": lambda: lean_attention(q, k, v, causal=causal),
        "tiled": lambda: tiled_attention(q, k, v, causal=causal)[0],
    }
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    matrices = {"naive": 6, "lean": 1, "tiled": 0}  # score matrices held at a time, rounded up
    runs = {name: run for name, run in runs.items() if 4 * length**2 * matrices[name] < free / 2}
    results = {name: run() for name, run in runs.items()}
    for name, result in results.items():
        error = float(np.abs(result - results["tiled"]).max())
        if not error < 1e-5:
            raise SystemExit(f"N={length}: tiled differs from {name} by {error:.1e}; not timed")
    peaks = {name: peak_bytes(run) for name, run in runs.items()}
    times = medians(runs, repeats)

    def cells(name: str) -> list[str]:
        if name not in runs:
            return ["would not fit", "", "", ""]
        ratios = (f"{times['tiled'] / times[name]:.2f}", f"1/{peaks[name] / peaks['tiled']:.0f}")
        return [f"{times[name] * 1e3:.1f}", f"{peaks[name] / 1e6:.1f}", *ratios]

    return "| " + " | ".join([str(length), *cells("tiled")[:2], *cells("naive"), *cells("lean")]) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time and memory of tiled against naive attention in NumPy.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    print(
        f"float32, dim {options.dim}, causal {options.causal}, NumPy {np.__version__}, {os.cpu_count()} cores, ", end=""
    )
    print(f"{os.environ.get('OPENBLAS_NUM_THREADS', 'default')} BLAS threads, ", end="")
    print(f"median of {options.repeats}, load {os.getloadavg()[0]:.1f} at the start")
    head = ["N", "tiled ms", "tiled MB"]
    for name in ("naive", "lean"):
        head += [f"{name} ms", f"{name} MB", f"time tiled/{name}", f"memory tiled/{name}"]
    print("| " + " | ".join(head) + " |")
    print("|" + "---:|" * len(head))
    for length in options.lengths:
        print(row(length, options.dim, options.causal, options.repeats), flush=True)


if __name__ == "__main__":
    main()
