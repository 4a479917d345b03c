"""Time the row softmax on a GPU as ``tilewise bench --op softmax --backward`` does, where typer and rich are missing.

``PYTHONPATH=src python benchmarks/gpu_softmax.py [--dtype float16] [--shapes 8192x4096 ...] [--sweep] [--out FILE]``
prints one line for each row. ``--sweep`` also times other tilings of ours, to choose the defaults by, on the shapes
where a choice is to be made.
"""
# ruff: noqa: INP001, T201 - a script prints

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from tilewise.backends import triton_softmax
from tilewise.backends.compile import Options, binary_for
from tilewise.backends.launch import POINTERS
from tilewise.backends.triton_softmax import Facts, Tiling, kernel_and_constants
from tilewise.bench.row_softmax import Bench, Pass, Run, cells, default_settings, footnotes, heading, parse_shape

SWEPT = ((8192, 1024), (8192, 32768), (4096, 65536), (1024, 262144))


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


def compile_sweep(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
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


def swept(which: Pass, tensors: Sequence[torch.Tensor]) -> Mapping[str, Run]:
    """Give our softmax in every tiling worth a try."""
    both: dict[Pass, Callable[..., torch.Tensor]] = {
        "forward": triton_softmax.softmax,
        "backward": triton_softmax.softmax_backward,
    }
    cols, itemsize = tensors[0].shape[-1], tensors[0].element_size()
    found = tilings(cols, itemsize, len(tensors) + 1)
    return {name: partial(both[which], *tensors, -1, tiling) for name, tiling in found.items()}


def main() -> int:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--shapes", nargs="*", type=parse_shape, help="rows x columns, such as 8192x4096")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--out", type=Path, help="write the report here")
    options = parser.parse_args()
    shapes = tuple(options.shapes or ()) or (SWEPT if options.sweep else None)
    settings = default_settings("cuda", dtype=options.dtype, shapes=shapes, backward=True, seconds=options.seconds)
    if options.sweep:
        compile_sweep(settings.shapes, getattr(torch, settings.dtype))
    bench = Bench(settings, lambda doing, _: print(doing, file=sys.stderr, flush=True))
    if options.sweep:
        bench.more = swept
    report = bench.run()
    print(heading(report))
    for row in report.rows:
        print(f"{row.which:8} ", "  ".join(f"{cell:>14}" for cell in cells(row)))
    print(footnotes(report))
    if options.out:
        options.out.write_text(report.to_json() + "\n")
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())
