"""Tune the Triton kernels on this GPU, as ``tilewise tune`` does, where typer and rich are not installed.

PYTHONPATH=src python benchmarks/gpu_tune.py --table sm_90.json --json trials.json
"""
# ruff: noqa: INP001, T201 - a script, and a script prints

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tilewise.bench import tune
from tilewise.machine import detect


def main() -> None:
    """Tune what is asked for, print the best of each and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", default=tune.kinds(), choices=tune.kinds())
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    jobs = [tune.Job(kind, dim, arguments.dtype, "cuda") for kind in arguments.kinds for dim in arguments.dims]
    trials = tune.tune(jobs, partial(print, flush=True), arguments.workers)
    for job, tried in trials.items():
        print(f"{job.kind} d={job.dim} {job.dtype}")
        for trial in tried[:5]:
            print(f"  {trial.tiles}  {['%.3f' % (1e3 * s) for s in trial.seconds]} ms  {trial.failure}")
        failed = [trial for trial in tried if trial.failure]
        print(f"  {len(failed)} failed: {failed[0].failure if failed else ''}", flush=True)
    tune.write(tune.rows(trials), detect.detect("cuda").target, arguments.table)
    if arguments.json:
        record = {f"{job.kind} d={job.dim} {job.dtype}": [asdict(t) for t in tried] for job, tried in trials.items()}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
