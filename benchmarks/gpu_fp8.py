"""Hold the FP8 kernel to its numbers on this GPU, and try its settings.

    PYTHONPATH=src python benchmarks/gpu_fp8.py check
    PYTHONPATH=src python benchmarks/gpu_fp8.py sweep --sweep lazy=True,False stages=3,4 --cells 128:full:8192

``check`` draws problems of all kinds and holds each to the budget of ``tilewise.testing_fp8``. ``sweep`` times
every combination of the fields of `tilewise.backends.hopper_fp8.Settings` on cells of 16,384 tokens and 2,048 features.
All kernels of a cell are compiled first, in processes side by side, then timed in rounds that take turns.
"""
# ruff: noqa: INP001, T201, S311 - a script, and a script prints; problems, not secrets

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from tilewise import fp8, testing_fp8
from tilewise.backends import hopper_fp8
from tilewise.bench.clock import Stopwatch
from tilewise.machine import detect

TOKENS, HIDDEN, ROUNDS, SECONDS = 16384, 2048, 5, 0.02
Cell = tuple[int, bool, int]  # head dim, causal, length
CELLS: tuple[Cell, ...] = tuple(
    (dim, causal, length) for dim in (64, 128, 256) for causal in (False, True) for length in (2048, 8192, 16384)
)


# ---- right ----------------------------------------------------------------------------------------------------------


def draw(seed: int) -> tuple[str, fp8.Quantized, bool, str]:
    """Draw a problem: what it is, its tensors, causal and align."""
    pick = random.Random(seed)
    dim, heads_kv, group = pick.choice((64, 128, 256)), pick.choice((1, 2)), pick.choice((1, 2, 4))
    causal, align, packed = pick.random() < 0.5, pick.choice(("bottom_right", "top_left")), pick.random() < 0.4
    generator = torch.Generator("cuda").manual_seed(seed)
    cu_q = cu_k = None
    lengths: list[list[int]] = []
    shapes: list[tuple[int, ...]]
    if packed:
        count = pick.randrange(1, 6)
        lengths = [[pick.choice((0, 1, pick.randrange(1, 700))) for _ in range(count)] for _ in range(2)]
        lengths[1] = (lengths[1] * 6)[: len(lengths[0])]
        cu_q, cu_k = (
            torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device="cuda") for each in lengths
        )
        rows = [sum(each) + pick.choice((1, 90)) for each in lengths]
        shapes = [(rows[i > 0], heads_kv * (group if i == 0 else 1), dim) for i in range(3)]
    else:
        rows, batch = [pick.randrange(1, 2000) for _ in range(2)], pick.choice((1, 3))
        shapes = [(batch, heads_kv * (group if i == 0 else 1), rows[i > 0], dim) for i in range(3)]
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in shapes)
    v *= 10.0 ** pick.randrange(-4, 4)
    what = f"{shapes[0]} x {shapes[1]} causal={causal} {align}" + (f" packed {lengths}" if packed else "")
    return what, fp8.quantize(q * pick.choice((1, 4)), k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), causal, align


def check(count: int) -> int:
    """Compare as many problems as asked for; give how many are wrong."""
    wrong = 0
    for seed in range(count):
        what, quantized, causal, align = draw(seed)
        for chosen in candidates((quantized.q8.shape[-1], causal, 0), {}, packed=quantized.cu_seqlens_q is not None):
            out, lse = hopper_fp8.forward(
                quantized, causal=causal, align=align, return_lse=True, chosen=chosen  # type: ignore[arg-type]
            )  # fmt: skip
            report = testing_fp8.measure(out, lse, quantized, causal=causal, align=align)
            bad = any(not found.within for found in report.values())
            wrong += bad
            if bad or seed % 20 == 0:
                words = ", ".join(f"{name} {found.max:.2f} of its budget" for name, found in report.items())
                print(f"{'WRONG ' * bad}seed {seed}: {words}: {what}", flush=True)
    print(f"{wrong} of {count} wrong")
    return wrong


# ---- fast -----------------------------------------------------------------------------------------------------------


def inputs(cell: Cell) -> fp8.Quantized:
    """Draw a cell's tensors and quantise them."""
    dim, _, length = cell
    shape = TOKENS // length, HIDDEN // dim, length, dim
    return fp8.quantize(*(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)))


def candidates(cell: Cell, axes: dict[str, list[object]], *, packed: bool = False) -> list[hopper_fp8.Settings]:
    """Give the table's choice, then every combination of the fields' values."""
    dim, causal, _ = cell
    best = hopper_fp8.settings(dim, causal=causal, varlen=packed)
    changes = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    found = [best, *(best._replace(**change) for change in changes)]  # type: ignore[arg-type]
    return list(dict.fromkeys(found))


def settle(cell: Cell, chosen: hopper_fp8.Settings) -> str:
    """Compile what a cell needs, into the cache on disk; give what went wrong."""
    try:
        hopper_fp8.forward(inputs(cell), causal=cell[1], chosen=chosen)
        torch.cuda.synchronize()
    except Exception as failure:  # noqa: BLE001 - a setting that cannot be is a row that says so
        return f"{type(failure).__name__}: {failure}"[:150]
    return ""


def named(chosen: hopper_fp8.Settings, best: hopper_fp8.Settings) -> str:
    """Say in what settings differ from the table's."""
    changed = {name: x for name, x in chosen._asdict().items() if x != getattr(best, name)}
    return " ".join(f"{name}={x}" for name, x in changed.items()) or "table"


def measure(cell: Cell, found: list[hopper_fp8.Settings], failed: list[str]) -> dict[str, object]:
    """Time a cell's candidates; give TFLOP/s."""
    _, causal, length = cell
    quantized, watch = inputs(cell), Stopwatch("cuda")
    runs = {
        named(chosen, found[0]): lambda chosen=chosen: hopper_fp8.forward(quantized, causal=causal, chosen=chosen)
        for chosen, why in zip(found, failed, strict=True)
        if not why
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name in random.sample(list(runs), len(runs)):
            times[name] += watch.round(runs[name], SECONDS)
    flops = 4 * TOKENS * HIDDEN * length / (2 if causal else 1)
    rates = {name: flops / statistics.median(spent) / 1e12 for name, spent in times.items()}
    label = f"d={cell[0]} {'causal' if causal else 'full'} N={length}"
    ranked = sorted(rates.items(), key=lambda item: -item[1])
    print(label + ": " + ", ".join(f"{name} {rate:.0f}" for name, rate in ranked), flush=True)
    for chosen, why in zip(found, failed, strict=True):
        if why:
            print(f"  {named(chosen, found[0])}: {why}", flush=True)
    return {"cell": label, "tflops": rates}


def cell_of(text: str) -> Cell:
    """Read a cell such as 64:causal:2048."""
    dim, mask, length = text.split(":")
    return int(dim), mask == "causal", int(length)


def value_of(text: str) -> object:
    """Read a setting's value."""
    return {"True": True, "False": False}.get(text, int(text) if text.isdigit() else text)


def sweep(cells: list[Cell], axes: dict[str, list[object]], workers: int) -> list[dict[str, object]]:
    """Compile all, then measure."""
    jobs = [(cell, chosen) for cell in cells for chosen in candidates(cell, axes)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        said = dict(zip(jobs, pool.map(settle, *zip(*jobs, strict=True)), strict=True))
    found = {cell: candidates(cell, axes) for cell in cells}
    return [measure(cell, each, [said[cell, chosen] for chosen in each]) for cell, each in found.items()]


def main() -> int:
    """Check or sweep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("section", choices=("check", "sweep"))
    parser.add_argument("--count", type=int, default=120, help="of problems to check")
    parser.add_argument("--cells", nargs="+", type=cell_of, default=list(CELLS))
    parser.add_argument("--sweep", nargs="+", default=(), help="fields of the settings and their values: stages=3,4")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.section == "check":
        return check(arguments.count)
    axes = {name: [value_of(value) for value in values.split(",")] for name, values in (
        text.split("=") for text in arguments.sweep
    )}  # fmt: skip
    rows = sweep(arguments.cells, axes, arguments.workers)
    if arguments.json:
        head = {"environment": detect.environment("cuda"), "command": " ".join(["python", *sys.argv])}
        arguments.json.write_text(json.dumps({**head, "cells": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
