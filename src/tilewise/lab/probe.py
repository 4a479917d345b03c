"""A program to be watched by a profiler: one implementation, once, between cudaProfilerStart and cudaProfilerStop.

    python -m tilewise.lab.probe '{"name": "tilewise/hopper", "which": "forward", "case": {...}}'

The case holds the fields of `tilewise.bench.cases.Case`. Everything is compiled and warm before the profiler starts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch

from tilewise.bench.cases import Case
from tilewise.bench.implementations import Implementation, implementations


def specification(name: str, which: str, case: Case) -> str:
    """Write what `main` reads."""
    return json.dumps({"name": name, "which": which, "case": asdict(case)})


def named(name: str) -> Implementation:
    """Give an implementation by its name.

    Raises:
        ValueError: there is none.
    """
    known = {each.name: each for each in implementations()}
    if name not in known:
        raise ValueError(f"implementation must be one of {', '.join(known)}; got {name!r}")
    return known[name]


def main(text: str, start: Callable[[], object], stop: Callable[[], object]) -> None:
    """Prepare and warm up, then run once between start and stop."""
    given = json.loads(text)
    case = Case(**given["case"])
    run = named(given["name"]).prepare(case, case.inputs(0))
    backward = given["which"] == "backward"
    with run.active():
        if backward:
            run.open_backward()
        work = run.backward if backward else run.forward
        for _ in range(2):
            work()
        _synchronise(case.device)
        start()
        work()
        _synchronise(case.device)
        stop()


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    runtime = torch.cuda.cudart()
    main(sys.argv[1], runtime.cudaProfilerStart, runtime.cudaProfilerStop)
