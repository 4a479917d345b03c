"""Hold a backend to the error budget on a GPU: every named case and some larger ones, in every dtype.

    PYTHONPATH=src python benchmarks/gpu_check.py --json gpu_check.json

Most of the time goes into compiling one kernel for each set of features, so the cases are shared out over processes.
The exit code is 1 where anything failed. A refusal by the backend is listed and is no failure.
"""
# ruff: noqa: INP001, T201 - a script, and a script prints

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path

import torch

from tilewise import dispatch, testing
from tilewise.machine import detect
from tilewise.problem.problem import Options

DTYPES = ("float16", "bfloat16", "float32")
_LSE = Options(return_lse=True)
_CAUSAL = Options(causal=True, return_lse=True)

LARGER = {
    case.name: case
    for case in (
        testing.Case("d=64, 2048, causal", heads_q=4, len_q=2048, len_kv=2048, dim_qk=64, dim_v=64, options=_CAUSAL),
        testing.Case("d=128, 1111, causal, grouped", 1, 8, 2, 1111, 1111, 128, 128, options=_CAUSAL),
        testing.Case("d=128, 1000 x 1536", 2, 2, 2, 1000, 1536, 128, 128, options=_LSE),
        testing.Case("d=128, ragged tail", 1, 2, 2, 130, 129, 128, 128, options=_LSE),
        testing.Case(
            "d=128, window", 1, 2, 1, 900, 900, 128, 128, options=_LSE._replace(window_left=200, window_right=9)
        ),
        testing.Case("d=40", 1, 2, 2, 300, 300, 40, 40, options=_CAUSAL),
        testing.Case("d=80", 1, 2, 2, 300, 300, 80, 80, options=_CAUSAL),
        testing.Case("d=96", 1, 2, 2, 300, 300, 96, 96, options=_CAUSAL),
        testing.Case("d=192, 128", 1, 2, 2, 300, 300, 192, 128, options=_CAUSAL),
        testing.Case("d=256", 1, 2, 2, 517, 517, 256, 256, options=_CAUSAL),
        testing.Case("d=512", 1, 2, 1, 200, 200, 512, 512, options=_CAUSAL),
        testing.Case(
            "packed, uneven", 1, 4, 2, dim_qk=128, dim_v=128, lengths_q=(1, 700, 64, 0, 333, 129, 128), options=_CAUSAL
        ),
        testing.Case("d=128, bias", 1, 2, 2, 515, 515, 128, 128, bias="1hqk", options=_LSE),
        testing.Case("d=128, strided", 1, 2, 2, 300, 300, 128, 128, strided=True, options=_CAUSAL),
        testing.Case("d=128, dropout", 1, 2, 2, 300, 300, 128, 128, options=_CAUSAL._replace(dropout=0.1)),
        testing.Case(
            "d=64, many at once",
            2,
            4,
            2,
            333,
            444,
            64,
            64,
            bias="b1qk",
            mask="1hqk",
            sink="h",
            alibi="bh",
            ranges=((3, 400), (50, 444)),
            options=_CAUSAL._replace(softcap=5.0, dropout=0.1, window_left=250),
        ),
    )
}


@dataclass
class Outcome:
    """One case in one dtype: its errors as shares of what the budget allows, or what went wrong."""

    case: str
    dtype: str
    status: str
    seconds: float
    used: dict[str, float] = field(default_factory=dict)
    detail: str = ""


def check(name: str, dtype: str, backend: str, gradients: bool) -> Outcome:
    """Run one case and measure it."""
    case = (testing.CASES | LARGER)[name]
    start = time.perf_counter()
    used: dict[str, float] = {}
    try:
        call = case.build("cuda", dtype)
        reason = dispatch.load(backend).why_not(call.problem)
        if reason is not None:
            return Outcome(name, dtype, "refused", 0.0, detail=reason)
        report = testing.measure(testing.run(call, backend, gradients=gradients), call)
        used = {tensor: max(_share(e.max, e.max_budget), _share(e.mean, e.mean_budget)) for tensor, e in report.items()}
        bad = [tensor for tensor, found in report.items() if not found.within]
        status, detail = ("failed", f"over budget: {', '.join(bad)}") if bad else ("passed", "")
    except Exception:  # noqa: BLE001 - whatever it is belongs into the report
        status, detail = "failed", traceback.format_exc()[-3000:]
    return Outcome(name, dtype, status, time.perf_counter() - start, used, detail)


def _share(value: float, most: float) -> float:
    return value / most if most else float(value > 0)


def check_dropout(backend: str) -> Outcome:
    """Compare the dropout mask with the torch engine's, bit by bit: with v = 1, row by row, out shows what was kept."""
    start = time.perf_counter()
    case = replace(testing.CASES["dropout"], len_kv=64, dim_v=64)
    call = case.build("cuda", "float16")
    identity = torch.eye(64, device="cuda", dtype=torch.float16).expand(2, 2, 64, 64)
    call = replace(call, tensors=call.tensors._replace(v=identity))
    kept = [testing.run(call, name, gradients=False).out != 0 for name in (backend, "torch_tiled")]
    same = torch.equal(*kept) and 0 < int(kept[0].sum()) < kept[0].numel()
    return Outcome("dropout mask", "float16", "passed" if same else "failed", time.perf_counter() - start)


def main() -> None:
    """Check all, print what failed and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="triton_portable")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    parser.add_argument("--forward", action="store_true", help="leave out the gradients")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--json", type=Path, help="where to write everything that was measured")
    arguments = parser.parse_args()
    jobs = [(name, dtype) for name in testing.CASES | LARGER for dtype in arguments.dtypes if arguments.only in name]
    start = time.perf_counter()
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(check, *job, arguments.backend, not arguments.forward) for job in jobs]
        if not arguments.only:
            futures.append(pool.submit(check_dropout, arguments.backend))
        outcomes = []
        for future in futures:
            outcome = future.result()
            outcomes.append(outcome)
            if outcome.status != "passed":
                print(
                    f"{outcome.status}: {outcome.case}, {outcome.dtype}: {outcome.detail}\n    {outcome.used}",
                    flush=True,
                )
    counts = {status: sum(o.status == status for o in outcomes) for status in ("passed", "failed", "refused")}
    worst = max((share for o in outcomes for share in o.used.values()), default=0.0)
    seconds = time.perf_counter() - start
    print(f"{counts}, worst share of the budget {worst:.3f}, {seconds:.0f} s on {torch.cuda.get_device_name()}")
    if arguments.json:
        record = {
            "environment": detect.environment("cuda"),
            "command": " ".join(sys.argv),
            "summary": counts,
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(1 if counts["failed"] else 0)


if __name__ == "__main__":
    main()
