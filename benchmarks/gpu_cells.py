"""Set tilewise beside PyTorch's kernels on a GPU: throughput by cell, and the special cases.

    PYTHONPATH=src python benchmarks/gpu_cells.py --backend triton_portable --json cells.json

All implementations of a cell run in one process, in rounds that take turns in shuffled order, the L2 cache overwritten
before each run; the median counts. Before anything is timed, its error is held to the budget of ``tilewise.testing`` on
sampled rows. TFLOP/s are 4 b h n^2 d, halved when causal, times 2.5 for the backward pass, which is timed alone.
Sections: cells (bf16, 16,384 tokens, 2,048 features), fp32, window, varlen, memory, host.
"""
# ruff: noqa: INP001, T201 - a script, and a script prints

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gpu_peers import Peer, flash, flex, ours, pytorch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import tilewise
from tilewise.bench.cases import Case, Inputs
from tilewise.bench.clock import Stopwatch
from tilewise.bench.implementations import Outcome
from tilewise.bench.judge import Judge
from tilewise.machine import detect

PEERS = ("fa2", "cudnn", "fa3", "fa4", "flex")
TOKENS, HIDDEN = 16384, 2048
ROUNDS, SECONDS = 5, 0.02
DEVICE = "cuda"


class Pass:
    """One implementation on one cell's data: a forward run, and a backward run over a kept graph."""

    def __init__(self, peer: Peer, inputs: Inputs, causal: bool, backward: bool) -> None:
        self.turned = peer.layout == "bshd"
        self.leaves = tuple(self._own(x).detach().requires_grad_(backward) for x in inputs[:3])
        self.call = lambda: peer.attend(*self.leaves, causal)  # type: ignore[call-arg]
        self.d_out = None if inputs.d_out is None else self._own(inputs.d_out)
        self.out = self.call() if backward else None

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        """Give a tensor the layout of the implementation, in memory too."""
        return x.transpose(1, 2).contiguous() if self.turned else x

    def outcome(self, judge: Judge) -> Outcome:
        """Run once for the judge."""
        out = self.call()
        grads = () if judge.d_out is None else torch.autograd.grad(out, self.leaves, self._own(judge.d_out))
        out, *grads = (x.detach().transpose(1, 2) if self.turned else x.detach() for x in (out, *grads))
        return Outcome(out, None, *grads)

    def run(self) -> object:
        """Run what is timed."""
        if self.out is None:
            return self.call()
        return torch.autograd.grad(self.out, self.leaves, self.d_out, retain_graph=True)


def measure(case: Case, peers: dict[str, Peer], *, backward: bool, check: bool = True) -> dict[str, object]:
    """Check and time one cell; give times in ms, TFLOP/s and what failed."""
    inputs, watch = case.inputs(0), Stopwatch(DEVICE)
    judge = Judge(case, inputs, gradients=backward, scores=2**25) if check else None
    runs: dict[str, Pass] = {}
    failed: dict[str, str] = {}
    for name, peer in peers.items():
        try:
            one = Pass(peer, inputs, case.causal, backward)
            if judge is not None:
                bad = {k: str(e) for k, e in judge.measure(one.outcome(judge)).items() if not e.within}
                if bad:
                    failed[name] = f"over the error budget: {bad}"
                    if name.startswith("tilewise"):
                        continue  # a peer is shown all the same, ours is not
            runs[name] = one
        except Exception as error:  # noqa: BLE001 - a peer that cannot is a row that says so
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name in random.sample(list(runs), len(runs)):
            times[name] += watch.round(runs[name].run, SECONDS)
    flops = case.flops(backward=backward)
    found = {name: statistics.median(spent) for name, spent in times.items()}
    return {
        "case": str(case),
        "backward": backward,
        "ms": {name: 1e3 * t for name, t in found.items()},
        "tflops": {name: flops / t / 1e12 for name, t in found.items()},
        "failed": failed,
    }


def line(label: str, record: dict[str, object]) -> None:
    """Print one cell."""
    tflops, failed = record["tflops"], record["failed"]
    cells = "  ".join(f"{name} {value:6.1f}" for name, value in tflops.items())  # type: ignore[attr-defined]
    print(f"{label:<34} {cells}" + (f"   {failed}" if failed else ""), flush=True)


def cells(
    backends: list[str], dims: list[int], lengths: list[int], passes: list[bool], chosen: list[str]
) -> list[dict[str, object]]:
    """Measure the throughput of every head dim, mask and length, beside the chosen peers."""
    compiled = flex() if "flex" in chosen else None
    records = []
    for backward in passes:
        others = {"fa2": pytorch(SDPBackend.FLASH_ATTENTION), "cudnn": pytorch(SDPBackend.CUDNN_ATTENTION)}
        others |= flash(backward=backward) if {"fa3", "fa4"} & set(chosen) else {}
        for dim in dims:
            for causal in (False, True):
                for length in (n for n in lengths if n > 512 or not backward):
                    heads = HIDDEN // dim
                    case = Case(length, TOKENS // length, heads, heads, dim, "bfloat16", DEVICE, causal=causal)
                    peers = {name: peer for name, peer in others.items() if name in chosen}
                    if compiled is not None and length == 8192:
                        peers["flex"] = compiled
                    peers |= {f"tilewise/{name}": ours(name) for name in backends}
                    record = measure(case, peers, backward=backward)
                    records.append(record)
                    line(f"{'bwd' if backward else 'fwd'} d={dim} {'causal' if causal else 'full'} N={length}", record)
                    gc.collect()
                    torch.cuda.empty_cache()
    return records


def exact(backends: list[str]) -> list[dict[str, object]]:
    """Measure float32 without TF32, N=4096."""
    torch.backends.cuda.matmul.allow_tf32 = False
    case = Case(4096, 1, 32, 32, 128, "float32", DEVICE)
    peers = {"efficient": pytorch(SDPBackend.EFFICIENT_ATTENTION), "math": pytorch(SDPBackend.MATH)}
    record = measure(case, peers | {f"tilewise/{name}": ours(name) for name in backends}, backward=False)
    line("fp32 exact N=4096 d=128", record)
    return [record]


def window(backends: list[str]) -> list[dict[str, object]]:
    """Set the time of a causal window of 1024 of 16,384 keys beside its share of the full causal operations."""
    records = []
    for name in backends:
        case = Case(16384, 1, 16, 16, 128, "bfloat16", DEVICE, causal=True)
        full = measure(case, {name: ours(name)}, backward=False)
        narrow = measure(
            case,
            {name: ours(name, window=(1023, 0))},
            backward=False,
            check=False,
        )
        pairs, all_pairs = sum(min(i + 1, 1024) for i in range(16384)), 16384 * 16385 // 2
        share = pairs / all_pairs
        cost = narrow["ms"][name] / full["ms"][name]  # type: ignore[index]
        records.append({"backend": name, "share_of_flops": share, "share_of_time": cost, "excess": cost / share})
        print(f"window 1024 of 16384, {name}: {cost / share:.2f} times its share", flush=True)
    return records


def varlen(backends: list[str]) -> list[dict[str, object]]:
    """Set uneven documents beside the dense kernel: TFLOP/s on visible work."""
    generator = random.Random(0)  # noqa: S311 - lengths, not secrets
    records = []
    for name in backends:
        for causal in (False, True):
            lengths: list[int] = []
            while sum(lengths) < 65536:
                lengths.append(int(math.exp(generator.uniform(math.log(64), math.log(8192)))))
            total = sum(lengths)
            q, k, v = (torch.randn(total, 16, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
            cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
            watch, longest = Stopwatch(DEVICE), max(lengths)

            options = {"max_seqlen_q": longest, "max_seqlen_k": longest, "causal": causal, "backend": name}
            packed = partial(tilewise.attention_varlen, q, k, v, cu, **options)
            # The same visible work in equal documents of the length that has as many pairs a token.
            even = sum(n * n for n in lengths) // total
            batch = max(total // even, 1)
            case = Case(even, batch, 16, 16, 128, "bfloat16", DEVICE, causal=causal)
            dense = measure(case, {name: ours(name)}, backward=False, check=False)
            seconds = statistics.median([t for _ in range(ROUNDS) for t in watch.round(packed, SECONDS)])
            flops = sum(4 * 16 * n * n * 128 for n in lengths) / (2 if causal else 1)
            rate, even_rate = flops / seconds / 1e12, dense["tflops"][name]  # type: ignore[index]
            records.append(
                {"backend": name, "causal": causal, "documents": len(lengths), "tflops": rate, "dense": even_rate}
            )
            print(
                f"varlen {name} causal={causal}: {rate:.1f} of {even_rate:.1f} TFLOP/s, {rate / even_rate:.2f}",
                flush=True,
            )
    return records


def memory(backends: list[str]) -> list[dict[str, object]]:
    """Measure the memory of one long call beyond its inputs."""
    records = []
    for name in backends:
        q, k, v = (torch.randn(1, 32, 32768, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True, backend=name)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        results = out.nbytes + lse.nbytes
        records.append({"backend": name, "peak": peak, "out_and_lse": results, "beyond": peak - results})
        print(f"memory {name}: {peak / 2**20:.1f} MiB, {(peak - results) / 2**20:.1f} beyond out and lse", flush=True)
    return records


def host(backends: list[str]) -> list[dict[str, object]]:
    """Measure the host's time of a call under no_grad, from call to return, the device kept idle, beside SDPA's."""
    q, k, v = (torch.randn(1, 8, 64, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    peers = {"fa2": pytorch(SDPBackend.FLASH_ATTENTION), "cudnn": pytorch(SDPBackend.CUDNN_ATTENTION)}
    peers |= {f"tilewise/{name}": ours(name) for name in backends}
    spent: dict[str, list[float]] = {name: [] for name in peers}
    contexts = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    with torch.no_grad():
        for _ in range(20):
            for name in random.sample(list(peers), len(peers)):
                call = (lambda: sdpa(q, k, v)) if name in contexts else (lambda: peers[name].attend(q, k, v, False))  # noqa: B023
                with sdpa_kernel(contexts.get(name, SDPBackend.MATH)):  # entered outside the time
                    for _ in range(20):
                        call()
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    for _ in range(50):
                        call()
                    spent[name].append((time.perf_counter() - start) / 50)
                    torch.cuda.synchronize()
    microseconds = {name: 1e6 * statistics.median(times) for name, times in spent.items()}
    print("host us a call: " + "  ".join(f"{name} {value:.1f}" for name, value in microseconds.items()), flush=True)
    return [{"microseconds": microseconds}]


def main() -> None:
    """Measure the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", nargs="+", default=["triton_portable"])
    parser.add_argument("--sections", nargs="+", default=["cells", "fp32", "window", "varlen", "memory", "host"])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192, 16384])
    parser.add_argument("--passes", nargs="+", default=["forward", "backward"])
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    passes = [name == "backward" for name in arguments.passes]
    sections: dict[str, Callable[[], list[dict[str, object]]]] = {
        "cells": lambda: cells(arguments.backend, arguments.dims, arguments.lengths, passes, arguments.peers),
        "fp32": lambda: exact(arguments.backend),
        "window": lambda: window(arguments.backend),
        "varlen": lambda: varlen(arguments.backend),
        "memory": lambda: memory(arguments.backend),
        "host": lambda: host(arguments.backend),
    }
    rates = detect.measure_rates(DEVICE, "bfloat16")
    print(f"roof: copy {rates.bandwidth / 1e12:.2f} TB/s, bf16 matrix product {rates.matmul / 1e12:.0f} TFLOP/s")
    results: dict[str, object] = {
        "environment": detect.environment(DEVICE),
        "command": " ".join(["python", *sys.argv]),
        "roof": rates._asdict(),
    }
    for name in arguments.sections:
        try:
            results[name] = sections[name]()
        except Exception as error:  # noqa: BLE001 - the other sections are still wanted
            results[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {results[name]}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
