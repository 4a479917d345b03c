"""Show what each step of the Hopper forward kernel brings, and try other settings, beside cuDNN in the same run.

    PYTHONPATH=src python benchmarks/gpu_ladder.py --json ladder.json
    PYTHONPATH=src python benchmarks/gpu_ladder.py --sweep groups=2,3 stages=2,3,4 --cells 64:causal:2048

The ladder starts from copies, products and softmax in partitions of their own, one tile a program, and adds one setting
after the other (`tilewise.backends.hopper.Settings`). Cells have 16,384 tokens and 2,048 features in bfloat16. All
kernels of a cell are compiled first, in processes side by side, then timed in rounds that take turns.
"""
# ruff: noqa: INP001, T201 - a script, and a script prints

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from gpu_peers import pytorch
from torch.nn.attention import SDPBackend

from tilewise.autograd import problem_for
from tilewise.backends import hopper, triton_portable
from tilewise.bench.clock import Stopwatch
from tilewise.machine import detect
from tilewise.problem.problem import Options, Problem, Tensors

TOKENS, HIDDEN, ROUNDS, SECONDS = 16384, 2048, 5, 0.02
Cell = tuple[int, bool, int]  # head dim, causal, length
CELLS: tuple[Cell, ...] = tuple(
    (dim, causal, length) for dim in (64, 128, 256) for causal in (False, True) for length in (512, 8192)
)


def inputs(cell: Cell) -> tuple[Problem, Tensors]:
    """Draw a cell's tensors."""
    dim, causal, length = cell
    shape = TOKENS // length, HIDDEN // dim, length, dim
    tensors = Tensors(*(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)))
    return problem_for(tensors, Options(causal=causal, return_lse=True)), tensors


def rungs(problem: Problem) -> dict[str, hopper.Settings]:
    """Give the settings of each rung; the last is the table's choice."""
    best = hopper.settings(problem)
    now = best._replace(q_buffers=1, ping_pong=False, lazy=False, pack=False, schedule="each", stages=2)
    found = {"partitions": now}
    for name, change in (
        ("persistent", {"schedule": "static"}),
        ("two tiles of q", {"q_buffers": best.q_buffers}),
        ("tiles by a counter", {"schedule": best.schedule}),
        ("more stages", {"stages": best.stages}),
        ("turns", {"ping_pong": best.ping_pong}),
        ("lazy rescale", {"lazy": best.lazy}),
        ("packed rounding", {"pack": best.pack}),
    ):
        then = now._replace(**change)  # type: ignore[arg-type]
        if then != now:
            found[name] = now = then
    return found


def swept(problem: Problem, axes: dict[str, list[object]]) -> dict[str, hopper.Settings]:
    """Give every combination of the fields' values, and the table's choice."""
    best = hopper.settings(problem)
    found = {"table": best}
    for values in itertools.product(*axes.values()):
        change = dict(zip(axes, values, strict=True))
        found[" ".join(f"{name}={value}" for name, value in change.items())] = best._replace(**change)  # type: ignore[arg-type]
    return found


def settle(cell: Cell, chosen: hopper.Settings) -> str:
    """Compile what a cell needs, into the cache on disk; give what went wrong."""
    problem, tensors = inputs(cell)
    try:
        hopper.forward(problem, tensors, chosen)
        torch.cuda.synchronize()
    except Exception as failure:  # noqa: BLE001 - a setting that cannot be is a row that says so
        return f"{type(failure).__name__}: {failure}"[:150]
    return ""


def measure(cell: Cell, candidates: dict[str, hopper.Settings], failed: dict[str, str]) -> dict[str, object]:
    """Time a cell's candidates beside cuDNN and the portable kernel; give TFLOP/s."""
    dim, causal, length = cell
    problem, tensors = inputs(cell)
    q, k, v = tensors[:3]
    cudnn, watch = pytorch(SDPBackend.CUDNN_ATTENTION), Stopwatch("cuda")
    runs: dict[str, Callable[[], object]] = {
        "cudnn": lambda: cudnn.attend(q, k, v, causal),
        "plain Triton": lambda: triton_portable.forward(problem, tensors),
    }
    right = hopper.forward(problem, tensors)[0].float()
    for name, chosen in candidates.items():
        if not failed[name]:
            out = hopper.forward(problem, tensors, chosen)[0].float()
            if (out - right).norm() / right.norm() > 1e-2:
                failed[name] = "wrong"
                continue
            runs[name] = lambda chosen=chosen: hopper.forward(problem, tensors, chosen)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name in random.sample(list(runs), len(runs)):
            times[name] += watch.round(runs[name], SECONDS)
    flops = 4 * TOKENS * HIDDEN * length / (2 if causal else 1)
    rates = {name: flops / statistics.median(spent) / 1e12 for name, spent in times.items()}
    label = f"d={dim} {'causal' if causal else 'full'} N={length}"
    print(label + ": " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()), flush=True)
    return {
        "cell": label,
        "tflops": rates,
        "settings": {name: chosen._asdict() for name, chosen in candidates.items()},
        "failed": {name: why for name, why in failed.items() if why},
    }


def cell_of(text: str) -> Cell:
    """Read a cell such as 64:causal:2048."""
    dim, mask, length = text.split(":")
    return int(dim), mask == "causal", int(length)


def value_of(text: str) -> object:
    """Read a setting's value."""
    return {"True": True, "False": False}.get(text, int(text) if text.isdigit() else text)


def main() -> None:
    """Compile, then measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", nargs="+", type=cell_of, default=CELLS)
    parser.add_argument("--sweep", nargs="+", help="fields of the settings and their values, as stages=2,3,4")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    axes = {}
    for text in arguments.sweep or ():
        name, _, values = text.partition("=")
        axes[name] = [value_of(value) for value in values.split(",")]
    candidates = {}
    for cell in arguments.cells:
        problem, _ = inputs(cell)
        candidates[cell] = swept(problem, axes) if axes else rungs(problem)
    jobs = [(cell, name) for cell, named in candidates.items() for name in named]
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        found = pool.map(settle, [cell for cell, _ in jobs], [candidates[cell][name] for cell, name in jobs])
        failed = dict(zip(jobs, found, strict=True))
    results: dict[str, object] = {
        "environment": detect.environment("cuda"),
        "command": " ".join(["python", *sys.argv]),
    }
    rows = results["cells"] = [
        measure(cell, named, {name: failed[cell, name] for name in named}) for cell, named in candidates.items()
    ]
    print(f"{len(rows)} cells")  # type: ignore[arg-type]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
