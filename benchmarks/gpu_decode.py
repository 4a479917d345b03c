"""Check decoding on a GPU and set it beside its peers: TB/s of keys and values read, by cell, and the special cases.

    PYTHONPATH=src python benchmarks/gpu_decode.py --json decode.json

All implementations of a cell run in one process, in rounds that take turns in shuffled order, the L2 cache overwritten
before each run; the median counts. What is timed has passed the error budget first. The peers are PyTorch's FA2 and
cuDNN, FlexAttention with --flex, and FA3 where its wheel is found.

Sections: check (correctness, shared out over processes), cells, paged, uneven, invariant, stored (8-bit caches),
append, host, graph; and, only when named, sweep (tiles and splits).
"""
# ruff: noqa: INP001, T201 - a script, and a script prints

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import tilewise
from tilewise import autograd, testing
from tilewise.backends import triton_decode
from tilewise.bench.clock import Stopwatch
from tilewise.bench.decoding import Case
from tilewise.machine import detect
from tilewise.machine.tiles import Tiles
from tilewise.problem.cache import CacheOptions, CacheTensors
from tilewise.problem.problem import Options, Tensors

Run = Callable[[], object]
DEVICE, BACKEND = "cuda", "triton_portable"
HEADS_Q, HEADS_KV, DIM = 32, 8, 128
CELLS = ((1, 8192), (1, 131072), (8, 8192), (8, 32768), (64, 4096), (128, 8192))
ROUNDS, SECONDS = 7, 0.02
SWEPT = (  # keys in a block, stages, warps, registers
    (32, 4, 4, 128), (64, 2, 4, 128), (64, 3, 4, None), (64, 3, 4, 168), (64, 3, 4, 128), (64, 4, 4, 168),
    (128, 2, 4, None), (128, 3, 4, None), (128, 2, 8, None),
)  # fmt: skip


# ---- correctness ----------------------------------------------------------------------------------------------------

_BIG = Case("", 8, 2, 1, 128, 128, 3000, (2500, 1, 0, 2999))
CASES = [
    replace(_BIG, name="plain"),
    replace(_BIG, name="one split", num_splits=1),
    replace(_BIG, name="many splits", num_splits=300),
    replace(_BIG, name="batch invariant", batch_invariant=True),
    replace(_BIG, name="append, rotary", capacity=3100, new=5, len_q=5, rotary=128),
    replace(_BIG, name="append, half rotary, pages", capacity=3100, new=1, rotary=64, interleaved=False, page_size=16),
    replace(_BIG, name="pages of 1", page_size=1),
    replace(_BIG, name="pages of 7", page_size=7),
    replace(_BIG, name="pages of 16, queries", page_size=16, len_q=4),
    replace(_BIG, name="pages of 64", page_size=64),
    replace(_BIG, name="pages of 256, sink", page_size=256, sink="h"),
    replace(_BIG, name="left padding, rows, ALiBi", leftpad=(100, 0, 3, 64), rows=3, alibi="h"),
    replace(_BIG, name="window", window=(500, 0), len_q=3),
    replace(_BIG, name="window, invariant", window=(500, 0), len_q=3, batch_invariant=True),
    replace(_BIG, name="both sides, softcap", window=(300, 20), causal=False, softcap=5.0),
    replace(_BIG, name="top-left, sink by batch", align="top_left", len_q=6, sink="bh"),
    replace(_BIG, name="int8", stored="int8", capacity=3100, new=2),
    replace(_BIG, name="e4m3", stored="float8_e4m3fn", capacity=3100, new=2),
    replace(_BIG, name="e5m2, pages", stored="float8_e5m2", capacity=3100, new=2, page_size=16, rotary=128),
    replace(_BIG, name="64 queries", len_q=64),
    replace(_BIG, name="300 queries, splits", len_q=300, num_splits=3),
    replace(_BIG, name="d=64, one head for all", heads_kv=1, dim_qk=64, dim_v=64),
    replace(_BIG, name="d=256", dim_qk=256, dim_v=256),
    replace(_BIG, name="d=192, 128", dim_qk=192, dim_v=128),
    replace(_BIG, name="d=80", dim_qk=80, dim_v=80, num_splits=5),
    replace(_BIG, name="d=40, 24, layout", dim_qk=40, dim_v=24, layout="bhsd"),
    replace(_BIG, name="d=33", dim_qk=33, dim_v=33, page_size=16),
]  # fmt: skip
DTYPES = ("float16", "bfloat16", "float32")


@dataclass
class Outcome:
    """One case in one dtype: its largest share of what the budget allows, or what went wrong."""

    case: str
    dtype: str
    share: float
    detail: str = ""


def check_case(number: int, dtype: str) -> Outcome:
    """Check one case."""
    case = CASES[number]
    try:
        report = case.build(DEVICE, dtype).check(BACKEND)
    except Exception:  # noqa: BLE001 - whatever it is belongs into the report
        return Outcome(case.name, dtype, float("inf"), traceback.format_exc()[-1500:])
    shares = [found.max / found.max_budget for found in report.values() if found.max_budget]
    return Outcome(case.name, dtype, max(shares, default=0.0))


def check(workers: int) -> list[dict[str, object]]:
    """Check every case in every dtype."""
    jobs = list(itertools.product(range(len(CASES)), DTYPES))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(check_case, *zip(*jobs, strict=True)))
    for outcome in outcomes:
        if outcome.detail:
            print(f"failed: {outcome.case}, {outcome.dtype}: {outcome.detail}")
    good = [outcome.share for outcome in outcomes if not outcome.detail]
    print(f"check: {len(good)} of {len(outcomes)} within budget, worst share {max(good, default=0):.2f}", flush=True)
    return [vars(outcome) for outcome in outcomes]


# ---- one cell -------------------------------------------------------------------------------------------------------


class Cell:
    """A batch of sequences, one query each, and the ways to attend from it to its cache."""

    def __init__(self, batch: int, length: int, **options: object) -> None:
        self.batch, self.length = batch, length
        self.options = CacheOptions(**options)  # type: ignore[arg-type]  # named by callers
        make = torch.Generator(DEVICE).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=make, device=DEVICE, dtype=torch.bfloat16)

        self.q = normal(batch, 1, HEADS_Q, DIM)
        self.k, self.v = (normal(batch, length, HEADS_KV, DIM) for _ in range(2))
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)

    @property
    def tensors(self) -> CacheTensors:
        """The call as it is."""
        return CacheTensors(self.q, self.k, self.v, cache_seqlens=self.lengths)

    @property
    def moved(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.batch * self.length * HEADS_KV * DIM * 2

    def paged(self, size: int) -> CacheTensors:
        """Lay the same cache out in pages in random order."""
        per_row = -(-self.length // size)
        order = torch.randperm(self.batch * per_row, device=DEVICE)
        pages = [torch.empty(len(order), size, HEADS_KV, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        for page, whole in zip(pages, (self.k, self.v), strict=True):
            page[order] = whole.view(-1, size, HEADS_KV, DIM)
        table = order.view(self.batch, per_row).int()
        return CacheTensors(self.q, pages[0], pages[1], cache_seqlens=self.lengths, block_table=table)

    def judge(self, run: Run) -> None:
        """Hold a run's out (and lse) of a few sequences to the oracle."""
        given = run()
        out = given[0] if isinstance(given, tuple) else given
        assert isinstance(out, torch.Tensor)  # noqa: S101 - for the type checker
        out = out if out.shape[1] == HEADS_Q else out.transpose(1, 2)
        for number, length in enumerate(self.lengths[:2].tolist()):
            one = slice(number, number + 1)
            k, v = (x[one, :length].transpose(1, 2) for x in (self.k, self.v))
            call = testing.Call(Tensors(self.q[one].transpose(1, 2), k, v), Options(), torch.empty(0), torch.empty(0))
            ref, low = testing.oracle(call, gradients=False), testing.yardstick(call, gradients=False)
            found = testing.error(out[one], ref.out, low.out, torch.finfo(torch.bfloat16).eps)
            if not found.within:
                raise ArithmeticError(f"over the error budget: {found}")


def ours(tensors: CacheTensors, options: CacheOptions) -> Run:
    """Give the settled call, as the front door makes it when it has met one like it."""
    settled = triton_decode.prepare(autograd.problem_for(tensors, options))
    return lambda: settled(tensors)


def peers(cell: Cell, flex: bool) -> dict[str, Run]:
    """Give what others offer for the same call; SDPA's are given keys and values head by head, as it has them."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (cell.q, cell.k, cell.v))

    def pytorch(backend: SDPBackend) -> Run:
        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return sdpa(q, k, v, enable_gqa=True)

        return run

    found: dict[str, Run] = {"fa2": pytorch(SDPBackend.FLASH_ATTENTION), "cudnn": pytorch(SDPBackend.CUDNN_ATTENTION)}
    try:
        fa3 = importlib.import_module("fa3_fwd_interface").flash_attn_with_kvcache
        found["fa3"] = lambda: fa3(cell.q, cell.k, cell.v, cache_seqlens=cell.lengths)
    except (ImportError, AttributeError, OSError):
        pass
    if flex:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        found["flex"] = lambda: compiled(q, k, v, enable_gqa=True)
    return found


def rounds(runs: dict[str, Run], rounds_: int = ROUNDS) -> dict[str, float]:
    """Time runs in rounds that take turns; give the median seconds of each."""
    watch, times = Stopwatch(DEVICE), {name: list[float]() for name in runs}
    for _ in range(rounds_):
        for name in random.sample(list(runs), len(runs)):
            times[name] += watch.round(runs[name], SECONDS)
    return {name: statistics.median(spent) for name, spent in times.items()}


def measure(
    label: str, cell: Cell, runs: dict[str, Run], moved: int | None = None, judged: bool = True
) -> dict[str, object]:
    """Check and time the runs of a cell."""
    failed: dict[str, str] = {}
    for name in list(runs):
        try:
            cell.judge(runs[name]) if judged else runs[name]()
        except Exception as error:  # noqa: BLE001, PERF203 - a peer that cannot is a row that says so
            failed[name] = f"{type(error).__name__}: {error}"[:200]
            del runs[name]
    found = rounds(runs)
    rates = {name: (moved or cell.moved) / spent / 1e12 for name, spent in found.items()}
    cells = "  ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
    print(f"{label:<22} TB/s: {cells}" + (f"   {failed}" if failed else ""), flush=True)
    return {"cell": label, "us": {name: 1e6 * spent for name, spent in found.items()}, "tb_s": rates, "failed": failed}


# ---- sections -------------------------------------------------------------------------------------------------------


def cells(flex: bool) -> list[dict[str, object]]:
    """Measure the six cells beside the peers."""
    records = []
    for batch, length in CELLS:
        cell = Cell(batch, length)
        runs = peers(cell, flex) | {"tilewise": ours(cell.tensors, cell.options)}
        records.append(measure(f"B={batch} N={length}", cell, runs))
        del cell, runs
        torch.cuda.empty_cache()
    ratios = []
    for record in records:
        rates: dict[str, float] = record["tb_s"]  # type: ignore[assignment]
        own = rates.pop("tilewise", 0.0)
        ratios.append(own / max(rates.values(), default=1.0))
        rates["tilewise"] = own
    mean = statistics.geometric_mean(max(ratio, 1e-9) for ratio in ratios)
    print(f"beside the best peer: {', '.join(f'{r:.2f}' for r in ratios)}; geometric mean {mean:.3f}", flush=True)
    return records


def paged() -> list[dict[str, object]]:
    """Set pages in random order beside the cache in one piece."""
    records = []
    for batch, length in ((1, 131072), (8, 8192), (64, 4096)):
        cell = Cell(batch, length)
        runs = {"whole": ours(cell.tensors, cell.options)}
        runs |= {f"pages of {size}": ours(cell.paged(size), cell.options) for size in (16, 64, 256)}
        records.append(measure(f"paged B={batch} N={length}", cell, runs))
    return records


def uneven() -> list[dict[str, object]]:
    """Set 64 sequences of 16 to 32,768 tokens beside 64 equal ones with as many tokens in all."""
    lengths = [round(16 * 2048 ** (n / 63)) for n in range(64)]
    random.Random(0).shuffle(lengths)  # noqa: S311 - lengths, not secrets
    total = sum(lengths)
    cell = Cell(64, 32768)
    cell.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    whole, pages = cell.tensors, cell.paged(16)
    even = cell.tensors._replace(cache_seqlens=torch.full_like(cell.lengths, total // 64))
    runs = {name: ours(x, cell.options) for name, x in (("uneven", whole), ("uneven, paged", pages), ("even", even))}
    cell.judge(runs["uneven"])
    cell.judge(runs["uneven, paged"])
    return [measure("64 uneven sequences", cell, runs, 2 * total * HEADS_KV * DIM * 2, judged=False)]


def invariant() -> list[dict[str, object]]:
    """Measure what batch invariance costs, and that it holds."""
    records = []
    for batch, length in CELLS[:5]:
        cell, strict = Cell(batch, length), CacheOptions(batch_invariant=True)
        runs = {"tilewise": ours(cell.tensors, cell.options), "invariant": ours(cell.tensors, strict)}
        alone = CacheTensors(cell.q[-1:], cell.k[-1:], cell.v[-1:], cache_seqlens=cell.lengths[-1:])
        same = torch.equal(runs["invariant"]()[0][-1:], ours(alone, strict)()[0])  # type: ignore[index]
        records.append(measure(f"invariant B={batch} N={length}", cell, runs) | {"bits_hold": same})
        print(f"    the last row's bits are those of a batch of one: {same}", flush=True)
    return records


def stored() -> list[dict[str, object]]:
    """Set 8-bit caches beside bfloat16: TB/s of the bfloat16 bytes, so that twice is the most."""
    records = []
    for batch, length in ((1, 131072), (8, 32768), (64, 4096)):
        cell = Cell(batch, length)
        scale = torch.full((HEADS_KV,), 0.05, device=DEVICE)
        runs = {"bfloat16": ours(cell.tensors, cell.options)}
        for kind in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
            small = [(x.float() * 20).clamp(-100, 100).to(kind) for x in (cell.k, cell.v)]
            tensors = cell.tensors._replace(k_cache=small[0], v_cache=small[1], k_scale=scale, v_scale=scale)
            runs[str(kind)[6:]] = ours(tensors, cell.options)
        records.append(measure(f"stored B={batch} N={length}", cell, runs, judged=False))
    return records


def append() -> list[dict[str, object]]:
    """Measure what appending a token and turning it costs."""
    records = []
    for batch, length in ((1, 8192), (64, 4096)):
        cell = Cell(batch, length)
        held = cell.lengths - 1
        k, v = (x[:, :1].clone() for x in (cell.k, cell.v))
        angle = torch.rand(length, DIM // 2, device=DEVICE)
        new = cell.tensors._replace(k=k, v=v, cache_seqlens=held)
        turned = new._replace(rotary_cos=angle.cos(), rotary_sin=angle.sin())
        runs = {"plain": ours(cell.tensors, cell.options), "append": ours(new, cell.options)}
        runs["append, rotary"] = ours(turned, cell.options)
        records.append(measure(f"append B={batch} N={length}", cell, runs, judged=False))
    return records


def host() -> list[dict[str, object]]:
    """Measure the host's time of a call under no_grad, from call to return, beside SDPA's."""
    cell = Cell(1, 256)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (cell.q, cell.k, cell.v))
    settled = ours(cell.tensors, cell.options)
    runs: dict[str, Run] = {
        "fa2": lambda: sdpa(q, k, v, enable_gqa=True),
        "cudnn": lambda: sdpa(q, k, v, enable_gqa=True),
        "tilewise": lambda: tilewise.attention_with_kvcache(cell.q, cell.k, cell.v, cache_seqlens=cell.lengths),
        "tilewise, settled": settled,
    }
    contexts = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    spent: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for _ in range(20):
            for name in random.sample(list(runs), len(runs)):
                with sdpa_kernel(contexts.get(name, SDPBackend.MATH)):  # entered outside the time
                    for _ in range(20):
                        runs[name]()
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    for _ in range(50):
                        runs[name]()
                    spent[name].append((time.perf_counter() - start) / 50)
                    torch.cuda.synchronize()
    microseconds = {name: 1e6 * statistics.median(times) for name, times in spent.items()}
    print("host us a call: " + "  ".join(f"{name} {value:.1f}" for name, value in microseconds.items()), flush=True)
    return [{"microseconds": microseconds}]


def graph() -> list[dict[str, object]]:
    """Capture a step that appends, replay it with other lengths on the device, and compare with calls of their own."""
    cell = Cell(4, 4096)
    lengths = torch.tensor([100, 0, 4000, 2048], dtype=torch.int32, device=DEVICE)
    k, v = (x[:, :1].clone() for x in (cell.k, cell.v))
    caches = cell.k.clone(), cell.v.clone()

    def step(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        return tilewise.attention_with_kvcache(cell.q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths)

    step(*caches)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*caches)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = step(*caches)
    good = True
    for shift in range(5):
        lengths.copy_(torch.tensor([100 + shift, shift * 700, 4000 - shift, 17], device=DEVICE))
        captured.replay()
        own = caches[0].clone(), caches[1].clone()
        good = good and torch.equal(out, step(*own)) and torch.equal(caches[0], own[0])
    print(f"graph: replays with other lengths equal calls of their own: {good}", flush=True)
    runs: dict[str, Run] = {"calls": lambda: step(*caches), "replays": captured.replay}
    return [{"equal": good, "us": {name: 1e6 * spent for name, spent in rounds(runs).items()}}]


@contextmanager
def with_tiles(sizes: Tiles) -> Iterator[None]:
    """Let calls be settled with these tiles."""
    triton_decode._prepared.cache_clear()  # noqa: SLF001 - settled calls keep their tiles
    with patch.object(triton_decode, "default_tiles", lambda *_: sizes):
        yield
    triton_decode._prepared.cache_clear()  # noqa: SLF001


def sweep(page_size: int) -> list[dict[str, object]]:
    """Time tiles and numbers of splits on every cell."""
    records: list[dict[str, object]] = []
    for batch, length in CELLS:
        cell = Cell(batch, length)
        tensors = cell.paged(page_size) if page_size else cell.tensors
        enough = -(-132 // (batch * HEADS_KV))
        counts = sorted(
            {n for n in (1, 2, 4, 8, enough, 2 * enough, 3 * enough, 4 * enough, 8 * enough) if n <= length // 64}
        )
        runs: dict[str, Run] = {}
        for block_kv, stages, warps, registers in SWEPT:
            with with_tiles(Tiles(16, block_kv, warps, stages, registers)):
                for count in [None, *counts]:
                    run = ours(tensors, CacheOptions(num_splits=count))
                    try:
                        run()
                    except Exception as error:  # noqa: BLE001 - what does not fit is left out
                        print(f"    {block_kv} keys, {stages} stages, {warps} warps: {error}"[:150])
                        break
                    runs[f"{block_kv}x{stages}w{warps}r{registers or ''}/{count or 'rule'}"] = run
        found = rounds(runs, 3)
        best = sorted(found, key=found.__getitem__)
        print(
            f"B={batch} N={length}: " + "  ".join(f"{n} {cell.moved / found[n] / 1e12:.2f}" for n in best[:6]),
            flush=True,
        )
        print(
            "      by rule: " + "  ".join(f"{n} {cell.moved / found[n] / 1e12:.2f}" for n in best if "rule" in n),
            flush=True,
        )
        records.append({"cell": f"B={batch} N={length}", "us": {name: 1e6 * spent for name, spent in found.items()}})
        torch.cuda.empty_cache()
    return records


def main() -> None:
    """Measure the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sections: dict[str, Callable[[], list[dict[str, object]]]] = {
        "check": lambda: check(arguments.workers),
        "cells": lambda: cells(arguments.flex),
        "paged": paged,
        "uneven": uneven,
        "invariant": invariant,
        "stored": stored,
        "append": append,
        "host": host,
        "graph": graph,
        "sweep": lambda: sweep(arguments.page_size),
    }
    parser.add_argument("--sections", nargs="+", default=list(sections)[:-1], choices=sections)
    parser.add_argument("--flex", action="store_true", help="compile FlexAttention and set it beside")
    parser.add_argument("--page-size", type=int, default=0, help="of the sweep; 0 = a cache in one piece")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rates = detect.measure_rates(DEVICE, "bfloat16")
    print(f"roof: copy {rates.bandwidth / 1e12:.2f} TB/s")
    results: dict[str, object] = {
        "environment": detect.environment(DEVICE),
        "command": " ".join(["python", *sys.argv]),
        "roof": rates._asdict(),
    }
    bad = False
    for name in arguments.sections:
        try:
            results[name] = sections[name]()
        except Exception as error:  # noqa: BLE001 - the other sections are still wanted
            results[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {traceback.format_exc()[-2000:]}", flush=True)
            bad = True
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    checked = results.get("check", [])
    sys.exit(bad or any(row["detail"] for row in checked))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
