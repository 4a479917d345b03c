"""Tune the Triton kernels on this GPU, as ``tilewise tune`` does, where typer and rich are not installed.

PYTHONPATH=src python benchmarks/gpu_tune.py --table sm_90.json --json trials.json
"""
# ruff: noqa: INP001, T201 - a script, and a script prints

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from tilewise.bench import tune


def main() -> None:
    """Tune what is asked for, print the best of each and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", default=())
    parser.add_argument("--dims", nargs="+", default=())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    jobs = tune.jobs(arguments.kinds, arguments.dims, arguments.dtype)
    trials = tune.tune(jobs, partial(print, flush=True), arguments.workers)
    for line in tune.summary(trials):
        print(line, flush=True)
    tune.write(tune.rows(trials), arguments.table)
    if arguments.json:
        arguments.json.write_text(tune.to_json(trials) + "\n")


if __name__ == "__main__":
    main()
