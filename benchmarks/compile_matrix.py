"""Compile every kernel for every target, with no GPU, with one release of Triton or several.

``PYTHONPATH=src python benchmarks/compile_matrix.py [--triton FOLDER ...] [--targets 80 90 gfx942] [--out FILE]``

Prints a line for each kernel, target and release: registers, bytes spilled a thread, shared memory a block, seconds.
FOLDER holds another release, made by ``pip install --no-deps --target FOLDER triton==3.9.0``; without any, the
installed one is used. The exit code is 1 where something did not compile, and a refusal that is meant is none.
"""
# ruff: noqa: INP001, T201, S603, BLE001 - a script prints, starts Python, and records whatever fails

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tilewise.backends.compile import Constant, Options, Target, compile_for, resources
from tilewise.kernels.share import Jitted

TARGETS: tuple[Target, ...] = (75, 80, 86, 89, 90, 100, 120, 121, "gfx942")


class Case(NamedTuple):
    """One kernel as a call would launch it: types of what the kernel does not annotate, constants and options."""

    label: str
    kernel: Jitted
    types: Mapping[str, str | None]
    constants: Mapping[str, Constant]
    options: Options


def softmax_cases() -> Iterator[Case]:
    """Give the row softmax in its forms: whole rows, long rows, rows that lie across."""
    from tilewise.backends.triton_softmax import Axes, choose_tiling, facts_of, kernel_and_constants

    for dtype, itemsize in (("fp16", 2), ("fp32", 4), ("fp64", 8)):
        for cols, across in ((256, False), (8192, False), (262144, False), (128, True)):
            for tensors, names in ((2, ("x_ptr", "out_ptr")), (3, ("p_ptr", "dp_ptr", "ds_ptr"))):
                axes = Axes((1, 8192, cols), ((0, 1, 8192) if across else (0, cols, 1),) * tensors)
                facts = facts_of(axes, itemsize, aligned=True)
                tiling = choose_tiling(axes, facts, itemsize, tensors, 132, 50 << 20)
                kernel, constants = kernel_and_constants(facts, tiling, tensors)
                label = f"softmax{' backward' if tensors == 3 else ''} {dtype} {cols}{' across' if across else ''}"
                types = dict.fromkeys(names, f"*{dtype}")
                yield Case(label, kernel, types, constants, Options(tiling.num_warps, 1))


CASES = (softmax_cases,)


def measure(case: Case, target: Target) -> dict[str, object]:
    """Compile one case for one target."""
    start = time.perf_counter()
    row: dict[str, object] = {"kernel": case.label, "target": target}
    try:
        taken = resources(compile_for(case.kernel, case.types, case.constants, target, case.options))
        row |= taken._asdict()
    except Exception as failure:
        row["failed"] = f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:300]
    return {**row, "seconds": round(time.perf_counter() - start, 2)}


def with_installed(targets: list[Target]) -> list[dict[str, object]]:
    """Compile everything with the release of Triton that this process imports."""
    import triton

    rows = []
    for case in (case for cases in CASES for case in cases()):
        for target in targets:
            rows.append({"triton": triton.__version__, **measure(case, target)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def with_release(folder: Path, targets: list[Target]) -> list[dict[str, object]]:
    """Compile everything in a process that finds another release first."""
    path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, __file__, "--targets", *map(str, targets)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout, end="", flush=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Compile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", nargs="*", type=Path, default=[], help="folders of other releases")
    parser.add_argument("--targets", nargs="*", default=[str(target) for target in TARGETS])
    parser.add_argument("--out", type=Path, help="write all rows here, as JSON")
    options = parser.parse_args()
    targets: list[Target] = [int(name) if name.isdigit() else name for name in options.targets]
    rows: list[dict[str, object]] = []
    for folder in options.triton:
        rows += with_release(folder, targets)
    if not options.triton:
        rows = with_installed(targets)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(any("failed" in row for row in rows) or not rows)


if __name__ == "__main__":
    main()
