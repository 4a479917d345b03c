"""Hold the Hopper kernels to what is promised of them beyond single cases: errors, random problems, equal bits.

    PYTHONPATH=src python benchmarks/gpu_hopper.py --json hopper.json

Sections: outliers (errors against float64 beside FlashAttention-3, on normal inputs and with one element in a thousand
a hundred times as large in variance), random (problems drawn from printed seeds, each within the budget of
``tilewise.testing``), equal (one deterministic backward pass, many times, bit by bit).
"""
# ruff: noqa: INP001, T201, S311 - a script, and a script prints; problems, not secrets

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
from gpu_peers import flash, ours

from tilewise import dispatch, testing
from tilewise.machine import detect
from tilewise.problem.problem import Options

LSE = Options(return_lse=True)
# What a kernel is compiled for, so that random problems meet few kernels: the features; dtype and head dim are drawn.
FEATURES = {
    "plain": LSE,
    "causal": LSE._replace(causal=True),
    "causal, top-left": LSE._replace(causal=True, align="top_left"),
    "window": LSE._replace(window_left=0, window_right=0),
    "causal window, softcap, sink": LSE._replace(causal=True, window_left=0, softcap=7.0),
    "ranges": LSE._replace(causal=True),
    "packed": LSE._replace(causal=True),
    "packed window, sink": LSE._replace(window_left=0, window_right=0),
}


def outliers(backend: str) -> list[dict[str, object]]:
    """Set the error of the forward pass beside FlashAttention-3's, both against float64."""
    peers = {name: peer for name, peer in flash(backward=False).items() if name == "fa3"} | {backend: ours(backend)}
    records = []
    for dim in (64, 128, 256):
        for inputs in ("normal", "outliers"):
            generator = torch.Generator("cuda").manual_seed(dim)
            q, k, v = (_draw((2, 4, 2048, dim), inputs == "outliers", generator) for _ in range(3))
            right = torch.softmax(q.double() @ k.double().mT * dim**-0.5, -1) @ v.double()
            rms = {}
            for name, peer in peers.items():
                turned = [x.transpose(1, 2).contiguous() if peer.layout == "bshd" else x for x in (q, k, v)]
                out = peer.attend(*turned, False)
                out = out.transpose(1, 2) if peer.layout == "bshd" else out
                rms[name] = (out.double() - right).square().mean().sqrt().item()
            records.append({"dim": dim, "inputs": inputs, "rms_error": rms})
            print(f"d={dim} {inputs}: rms error " + ", ".join(f"{name} {e:.3e}" for name, e in rms.items()), flush=True)
    return records


def _draw(shape: tuple[int, ...], outliers: bool, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, device="cuda", generator=generator)
    if outliers:
        rare = torch.rand(shape, device="cuda", generator=generator) < 1e-3
        x += rare * torch.randn(shape, device="cuda", generator=generator) * 10  # variance 100
    return x.bfloat16()


def problem(seed: int) -> tuple[testing.Case, str]:
    """Draw one problem: a case and its dtype."""
    draw = random.Random(seed)
    name = draw.choice(list(FEATURES))
    options, heads_kv = FEATURES[name], draw.choice((1, 2, 3))
    dim = draw.choice((64, 64, 128, 128, 256))
    len_q, len_kv = (int(2 ** draw.uniform(0, 10)) for _ in range(2))
    if draw.random() < 0.5:
        len_kv = len_q
    if options.window_left is not None:
        options = options._replace(window_left=draw.randrange(300))
    if options.window_right is not None:
        options = options._replace(window_right=draw.randrange(300))
    case = testing.Case(
        f"{name}, seed {seed}", draw.randrange(1, 4), heads_kv * draw.choice((1, 1, 2, 4)), heads_kv, len_q, len_kv,
        dim, dim, options=options, sink="h" if "sink" in name else "",
    )  # fmt: skip
    if "packed" in name:
        lengths = tuple(
            draw.choice((0, 1, draw.randrange(600), draw.randrange(64))) for _ in range(draw.randrange(1, 7))
        )
        case = replace(case, lengths_q=lengths, tail=draw.choice((0, 5)))
    if name == "ranges":
        ends = [sorted((draw.randrange(len_kv + 1), draw.randrange(len_kv + 1))) for _ in range(case.batch)]
        case = replace(case, ranges=tuple((start, stop) for start, stop in ends))
    return case, draw.choice(("bfloat16", "float16"))


def one(seed: int, backend: str) -> tuple[str, str, float]:
    """Run one random problem; give its outcome, words on it and the largest share of the budget."""
    torch.set_num_threads(1)  # each of many processes judges packed sequences on the CPU
    case, dtype = problem(seed)
    try:
        call = case.build("cuda", dtype, seed)
        reason = dispatch.load(backend).why_not(call.problem)
        if reason is not None:
            return "refused", f"{case.name}: {reason}", 0.0
        report = testing.measure(testing.run(call, backend), call)
    except Exception:  # noqa: BLE001 - whatever it is belongs into the report
        return "failed", f"{case}, {dtype}: {traceback.format_exc()[-1500:]}", 0.0
    shares = [e.max / e.max_budget for e in report.values() if e.max_budget]
    bad = [name for name, found in report.items() if not found.within]
    return ("failed" if bad else "passed"), f"{case}, {dtype}: {bad}", max(shares, default=0.0)


def random_problems(backend: str, count: int, workers: int) -> dict[str, object]:
    """Run problems from seeds 0 to count - 1, shared out over processes."""
    start = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(one, range(count), [backend] * count, chunksize=max(count // workers // 8, 1)))
    for status, words, _ in outcomes:
        if status != "passed":
            print(f"{status}: {words}", flush=True)
    counts = Counter(status for status, _, _ in outcomes)
    worst = max(share for _, _, share in outcomes)
    print(
        f"seeds 0 to {count - 1}: {dict(counts)}, worst {worst:.3f} of the budget, {time.perf_counter() - start:.0f} s"
    )
    return {"seeds": [0, count - 1], "counts": dict(counts), "worst_share": worst}


def equal(backend: str, runs: int) -> list[dict[str, object]]:
    """Differentiate one problem many times with deterministic=True and compare all bits."""
    records = []
    for dim in (64, 128, 256):
        options = Options(causal=True, return_lse=True, deterministic=True)
        call = testing.Case("equal", 2, 4, 2, 2048, 2048, dim, dim, options=options).build("cuda", "bfloat16")
        first = testing.run(call, backend)
        differing = 0
        for _ in range(runs - 1):
            again = testing.run(call, backend)
            differing += any(x is not None and not torch.equal(x, y) for x, y in zip(first, again, strict=True))
        records.append({"dim": dim, "runs": runs, "differing": differing})
        print(f"d={dim}: {runs} runs, {differing} with other bits than the first", flush=True)
    return records


def main() -> None:
    """Run the sections asked for; exit with 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--sections", nargs="+", default=["outliers", "random", "equal"])
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sections: dict[str, Callable[[], object]] = {
        "outliers": lambda: outliers(arguments.backend),
        "random": lambda: random_problems(arguments.backend, arguments.problems, arguments.workers),
        "equal": lambda: equal(arguments.backend, arguments.runs),
    }
    results: dict[str, object] = {"environment": detect.environment("cuda"), "command": " ".join(["python", *sys.argv])}
    for name in arguments.sections:
        results[name] = sections[name]()
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
