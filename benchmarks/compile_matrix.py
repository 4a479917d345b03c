"""Compile every kernel for every target, with no GPU, with one release of Triton or several.

``PYTHONPATH=src python benchmarks/compile_matrix.py [--triton FOLDER ...] [--targets 80 90 gfx942] [--kernels softmax]
[--out FILE]``

Prints a line for each kernel, target and release: registers, bytes spilled a thread, shared memory a block, seconds.
FOLDER holds another release, made by ``pip install --no-deps --target FOLDER triton==3.9.0``; without any, the
installed one is used. ``make compile-matrix`` does both. The exit code is 1 where something did not compile.
"""
# ruff: noqa: INP001, T201, S603, BLE001 - a script prints, starts Python, and records whatever fails

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import tilewise
from tilewise.backends.compile import Compiled, Options, Target, compile_for, resources
from tilewise.bench.provenance import commit
from tilewise.machine.device import Capability

ROOT = Path(__file__).parents[1]
TARGETS: tuple[Target, ...] = (75, 80, 86, 89, 90, 100, 120, 121, "gfx942")


class Case(NamedTuple):
    """One kernel, as a call would launch it on a target."""

    label: str
    build: Callable[[], Compiled]


def softmax_cases(target: Target) -> Iterator[Case]:
    """Give the row softmax in its forms: whole rows, long rows, rows that lie across."""
    from tilewise.backends.triton_softmax import Axes, choose_tiling, facts_of, kernel_and_constants

    warp = 64 if isinstance(target, str) else 32
    for dtype, itemsize in (("fp16", 2), ("fp32", 4), ("fp64", 8)):
        for cols, across in ((256, False), (8192, False), (262144, False), (128, True)):
            for tensors, names in ((2, ("x_ptr", "out_ptr")), (3, ("p_ptr", "dp_ptr", "ds_ptr"))):
                axes = Axes((1, 8192, cols), ((0, 1, 8192) if across else (0, cols, 1),) * tensors)
                facts = facts_of(axes, itemsize, aligned=True)
                tiling = choose_tiling(axes, facts, itemsize, tensors, 132, warp)
                kernel, constants = kernel_and_constants(facts, tiling, tensors)
                label = f"softmax{' backward' if tensors == 3 else ''} {dtype} {cols}{' across' if across else ''}"
                types = dict.fromkeys(names, f"*{dtype}")
                options = Options(tiling.num_warps, 1)
                yield Case(label, partial(compile_for, kernel, types, constants, target, options))


def attention_cases(target: Target) -> Iterator[Case]:
    """Give every kernel of attention in float16, as `tests/test_triton_compile.py` holds it to the target's limits."""
    checks = checks_of("test_triton_compile")
    capability: Capability = target if isinstance(target, str) else divmod(target, 10)
    dim = 16 if capability == (7, 5) else 64  # without tensor cores a product is unrolled, which takes its time
    for kernel in checks.KERNELS:

        def build(kernel: str = kernel) -> Compiled:
            with pytest.MonkeyPatch.context() as patch:
                call = checks.attention_case(kernel, dim).build("cpu", "float16")
                compiled: Compiled = checks.compile_launch(checks.launches(call, capability, patch)[kernel], capability)
            return compiled

        yield Case(f"{kernel} fp16 d={dim}", build)


def decode_cases(target: Target) -> Iterator[Case]:
    """Give the kernels of decoding in float16, as `tests/test_decode_compile.py` holds them to the target's limits."""
    checks = checks_of("test_decode_compile")
    capability: Capability = target if isinstance(target, str) else divmod(target, 10)
    for name, case in checks.CASES.items():
        for kernel in ("attention_decode", "append_tokens") if case.new else ("attention_decode",):

            def build(case: object = case, kernel: str = kernel) -> Compiled:
                with pytest.MonkeyPatch.context() as patch:
                    launch = checks.launches(case, "float16", capability, patch)[kernel]
                    compiled: Compiled = checks.compiled(launch, capability)
                return compiled

            yield Case(f"{kernel} fp16 d=64 {name}", build)


def hopper_cases(target: Target) -> Iterator[Case]:
    """Give the kernels for Hopper, as their tests hold them to a table of what they take; for that target alone."""
    if target != 90:
        return
    checks = checks_of("test_hopper_forward")
    for name, variant in (checks.VARIANTS | checks.SLOW).items():
        yield Case(f"hopper forward bf16 {name}", partial(checks.compiled_variant, variant))
    backward_checks = checks_of("test_hopper_backward")
    for row in backward_checks.TAKES:

        def build(row: object = row) -> Compiled:
            with pytest.MonkeyPatch.context() as patch:
                compiled: Compiled = backward_checks.compiled_row(row, patch)
            return compiled

        yield Case(f"hopper {row[0]} bf16 d={row[1]} {row[2]}", build)


@cache
def checks_of(name: str) -> ModuleType:
    """Load the tests that catch what a backend would launch."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("this script needs the tests beside it")
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(ROOT / "tests"))  # where tests find what they share
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


CASES = (softmax_cases, attention_cases, decode_cases, hopper_cases)


def measure(case: Case, target: Target) -> dict[str, object]:
    """Compile one case for one target."""
    start = time.perf_counter()
    row: dict[str, object] = {"kernel": case.label, "target": target}
    try:
        row |= resources(case.build())._asdict()
    except Exception as failure:
        row["failed"] = f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:300]
    return {**row, "seconds": round(time.perf_counter() - start, 2)}


def with_installed(targets: list[Target], kernels: list[str]) -> list[dict[str, object]]:
    """Compile everything, or the kernels whose labels begin with one of some words, with the installed Triton."""
    import triton

    rows = []
    for target in targets:
        for case in (case for cases in CASES for case in cases(target)):
            if not kernels or case.label.startswith(tuple(kernels)):
                rows.append({"triton": triton.__version__, **measure(case, target)})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def with_release(folder: Path, targets: list[Target], kernels: list[str]) -> list[dict[str, object]]:
    """Compile everything in a process that finds another release first."""
    path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, __file__, "--targets", *map(str, targets), "--kernels", *kernels]
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
    parser.add_argument("--kernels", nargs="*", default=[], help="how their labels begin; all without it")
    parser.add_argument("--out", type=Path, help="write all rows here, as JSON")
    options = parser.parse_args()
    targets: list[Target] = [int(name) if name.isdigit() else name for name in options.targets]
    rows: list[dict[str, object]] = []
    counts = []
    for folder in options.triton:
        found = with_release(folder, targets, options.kernels)
        counts.append(len(found))
        rows += found
    if not options.triton:
        rows = with_installed(targets, options.kernels)
    if options.out:
        kernels = ["--kernels", *options.kernels] if options.kernels else []
        document = {
            "command": shlex.join(["benchmarks/compile_matrix.py", *kernels]),
            "commit": commit(Path(tilewise.__file__).parent),
            "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        }
        # Without the seconds: what Triton has in its cache takes none.
        lines = ",\n".join("  " + json.dumps({k: v for k, v in row.items() if k != "seconds"}) for row in rows)
        options.out.write_text(f'{json.dumps(document)[:-1]}, "rows": [\n{lines}\n]}}\n')
    # A release whose process died has fewer rows than the others.
    sys.exit(any("failed" in row for row in rows) or not rows or len(set(counts)) > 1)


if __name__ == "__main__":
    main()
