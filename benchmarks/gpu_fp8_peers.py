"""Set attention in FP8 beside FlashAttention-3's FP8 on an H200: what is lost, and how fast it is.

    PYTHONPATH=src:$PEERS python benchmarks/gpu_fp8_peers.py --json fp8.json

Sections: check (each feature within the budget of ``tilewise.testing_fp8``; the quantiser beside PyTorch's operators),
errors (against float64, from quantising to out: normal inputs, and ones of which one in a thousand has a hundred times
the variance on top), speed (16,384 tokens, 2,048 features; on quantised tensors, all implementations of a cell taking
turns, the median counts; beside it bf16, the quantiser, and both together).

FlashAttention-3 gets what serves it best: v as it lies, and v with its keys side by side, which spares it a transpose.
On a CPU ``--device cpu --backend torch_tiled`` with small ``--lengths`` runs the script's own logic.
"""
# ruff: noqa: INP001, T201 - a script, and a script prints

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_peers import fa3

import tilewise
from tilewise import fp8, testing_fp8
from tilewise.backends import quantize as host
from tilewise.bench.clock import Stopwatch
from tilewise.machine import detect
from tilewise.problem.fp8 import BLOCK, LARGEST, block_count, key_of_slot

ROUNDS, SECONDS = 5, 0.02
SAMPLES = 16  # of inputs: what rounds k and v is common to all rows, so that one sample's error varies by 2 %
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[..., torch.Tensor]


class Setting(NamedTuple):
    """Where to measure, and what."""

    device: str
    backend: str
    dims: list[int]
    lengths: list[int]
    tokens: int
    hidden: int
    error_length: int
    workers: int


def draw(shape: tuple[int, ...], device: str, seed: int, *, outliers: bool = False) -> torch.Tensor:
    """Draw bf16 numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, device=device, generator=generator)
    if outliers:
        rare = torch.rand(shape, device=device, generator=generator) < 1e-3
        x += rare * torch.randn(shape, device=device, generator=generator) * 10  # variance 100
    return x.bfloat16()


def rms(x: torch.Tensor) -> float:
    """Give the root mean square."""
    return x.double().square().mean().sqrt().item()


# ---- the peer -------------------------------------------------------------------------------------------------------


def peer() -> Attend | None:
    """Give FlashAttention-3's function of tensors (batch, len, heads, dim), where it is beside us."""
    try:
        fa3()
    except ImportError as absent:
        print(f"fa3 is not beside us: {absent}")
        return None
    import fa3_fwd_interface

    def call(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        result = fa3_fwd_interface.flash_attn_func(*tensors, **options)
        return result[0] if isinstance(result, tuple) else result

    return call


def for_peer(three: Three, *, by_head: bool, keys_dense: bool) -> dict[str, object]:
    """Quantise (batch, heads, len, dim) as the peer takes it: one scale a tensor, or one for each head of an entry."""
    given: dict[str, object] = {}
    for name, x in zip("qkv", three, strict=True):
        size = x.float().abs()
        largest = size.amax((2, 3)) if by_head else size.amax().expand(x.shape[:2])
        scale = (largest / LARGEST).contiguous()
        x8 = (x.float() / scale[..., None, None]).to(torch.float8_e4m3fn)
        if name == "v" and keys_dense:
            given[name] = x8.transpose(2, 3).contiguous().permute(0, 3, 1, 2)
        else:
            given[name] = x8.transpose(1, 2).contiguous()
        given[f"{name}_descale"] = scale
    return given


def one_scale(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> fp8.Quantized:
    """Quantise for our kernel with one scale a tensor, a power of two."""
    scales = [2.0 ** math.ceil(math.log2(x.float().abs().max().item() / LARGEST)) for x in (q, k, v)]
    q8, k8, v8 = ((x.float() / s).to(torch.float8_e4m3fn) for x, s in zip((q, k, v), scales, strict=True))
    count = [block_count(x.shape[2]) for x in (q, k)]
    padded = torch.nn.functional.pad(v8.float(), (0, 0, 0, count[1] * BLOCK - v.shape[2])).unflatten(2, (-1, BLOCK))
    ordered = padded[..., key_of_slot(torch.arange(BLOCK, device=v.device)), :].flatten(2, 3).mT
    full = [q.new_full((*q.shape[:2], count[0]), scales[0], dtype=torch.float32)]
    full += [k.new_full((*k.shape[:2], count[1]), s, dtype=torch.float32) for s in scales[1:]]
    return fp8.Quantized(q8.contiguous(), k8.contiguous(), ordered.contiguous().to(torch.float8_e4m3fn), *full)


# ---- right ----------------------------------------------------------------------------------------------------------

Case = tuple[str, Three, tuple[torch.Tensor, torch.Tensor] | None, dict[str, object]]


def cases(dim: int, device: str) -> Iterator[Case]:
    """Give each feature: q, k, v, the lengths of packed sequences, and options."""

    def dense(
        len_q: int, len_kv: int, heads_q: int = 4, heads_kv: int = 2, *, outliers: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shapes = (2, heads_q, len_q, dim), (2, heads_kv, len_kv, dim), (2, heads_kv, len_kv, dim)
        q, k, v = (draw(shape, device, seed, outliers=outliers) for seed, shape in enumerate(shapes))
        return q, k, v

    yield "plain", dense(1024, 1024, 4, 4), None, {}
    yield "causal, grouped heads", dense(1024, 1024), None, {"causal": True}
    yield "odd lengths", dense(333, 777), None, {}
    yield "causal, more keys", dense(333, 777), None, {"causal": True}
    yield "causal, more queries: empty rows", dense(777, 333), None, {"causal": True}
    yield "causal, top left", dense(333, 777), None, {"causal": True, "align": "top_left"}
    yield "one query", dense(1, 500), None, {}
    yield "negative scale", dense(300, 300), None, {"scale": -0.1}
    yield "outliers", dense(1024, 1024, outliers=True), None, {"causal": True}
    q, k, v = dense(600, 900)
    sizes = torch.tensor([1.0, 1e-3, 30.0, 0.0, 1.0, 1e2, 1e-4, 1.0], device=device).repeat_interleave(BLOCK)
    yield "blocks of v of all sizes", (q, k, (v * sizes[:900, None]).bfloat16()), None, {}
    yield "float16", (q.half(), k.half(), v.half()), None, {}
    lengths = torch.tensor([[0, 130, 130, 131, 700, 1000], [0, 257, 257, 260, 700, 1001]], device=device)
    shapes = ((1010, 4, dim), (1003, 2, dim), (1003, 2, dim))
    q, k, v = (draw(shape, device, seed) for seed, shape in enumerate(shapes))
    for causal in (False, True):
        yield f"packed{', causal' * causal}", (q, k, v), (lengths[0], lengths[1]), {"causal": causal}


def check(setting: Setting) -> list[dict[str, object]]:
    """Hold each feature to the budget; on a GPU in processes side by side, since most of the time goes to compiling."""
    names = [name for name, *_ in cases(setting.dims[0], "cpu")]
    jobs = [(setting, dim, name) for name in names for dim in setting.dims]
    records: list[dict[str, object]] = []
    if setting.device == "cuda":
        with ProcessPoolExecutor(setting.workers, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(check_case, jobs))
    else:
        found = list(map(check_case, jobs))
    for record in itertools.chain(*found):
        records.append(record)
        print(f"{'ok   ' if record['within'] else 'WRONG'} d={record['dim']} {record['case']}, "
              f"rotate={record['rotate']}: {record['words']}", flush=True)  # fmt: skip
    print(f"{sum(not record['within'] for record in records)} of {len(records)} wrong", flush=True)
    return records + [check_quantiser(dim, setting.device) for dim in setting.dims]


def check_case(job: tuple[Setting, int, str]) -> list[dict[str, object]]:
    """Hold one feature to the budget, with and without a rotation; whatever is raised is a record that says so."""
    setting, dim, wanted = job
    records: list[dict[str, object]] = []
    for name, (q, k, v), cu, options in cases(dim, setting.device):
        for rotate in (True, False) if name == wanted else ():
            record: dict[str, object] = {"dim": dim, "case": name, "rotate": rotate}
            try:
                lengths = {} if cu is None else {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
                quantized = fp8.quantize(q, k, v, rotate=rotate, **lengths)
                out, lse = fp8.attention(quantized, return_lse=True, backend=setting.backend, **options)  # type: ignore[call-overload]
                found = testing_fp8.measure(out, lse, quantized, **options)  # type: ignore[arg-type]
            except Exception as failure:  # noqa: BLE001 - the other cases are still wanted
                records.append(record | {"within": False, "words": f"{type(failure).__name__}: {failure}"[:300]})
                continue
            words = ", ".join(
                f"{what} {e.max:.3f} of the most, mean {e.mean / max(e.mean_budget, 1e-300):.3f}"
                for what, e in found.items()
            )
            record |= {"within": all(e.within for e in found.values()), "words": words}
            records.append(record | {what: dataclasses.asdict(e) for what, e in found.items()})
    return records


def check_quantiser(dim: int, device: str) -> dict[str, object]:
    """Compare the kernel that quantises with PyTorch's operators, byte by byte."""
    x = draw((2, 3, 1000, dim), device, 1, outliers=True)
    shares = {}
    for name, matrix in (("as it is", None), ("rotated", host.rotation(dim, 0, x.device, x.dtype))):
        for transposed in (False, True):
            got = host.quantize(x, None, matrix, 1.0, transposed=transposed)
            right = host._by_operators(x, None, matrix, 1.0, transposed=transposed)  # noqa: SLF001
            differing = (got.x8.view(torch.uint8) != right.x8.view(torch.uint8)).double().mean().item()
            shares[f"{name}{', transposed' * transposed}"] = differing
    print(f"d={dim} quantiser, share of bytes that differ: {shares}", flush=True)
    return {"dim": dim, "differing": shares}


# ---- what is lost ---------------------------------------------------------------------------------------------------


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend in float64, some rows at a time."""
    k64, v64, scale = k.double().mT, v.double(), q.shape[-1] ** -0.5
    return torch.cat([torch.softmax(rows.double() @ k64 * scale, -1) @ v64 for rows in q.split(1024, 2)], 2)


def errors(setting: Setting) -> list[dict[str, object]]:
    """Measure the root mean square of the errors against float64 on the inputs themselves."""
    attend, records = peer() if setting.device == "cuda" else None, []
    for dim in setting.dims:
        for inputs in ("normal", "outliers"):
            shape, ours = (1, 4, setting.error_length, dim), partial(fp8.attention, backend=setting.backend)
            squares: dict[str, list[float]] = {}
            for sample in range(SAMPLES):
                q, k, v = (draw(shape, setting.device, 3 * sample + i, outliers=inputs == "outliers") for i in range(3))
                right = exact(q, k, v)
                outs = {
                    "ours": ours(fp8.quantize(q, k, v)),
                    "ours, not rotated": ours(fp8.quantize(q, k, v, rotate=False)),
                    "ours, one scale a tensor": ours(one_scale(q, k, v)),
                }
                for name, by_head in (("fa3, one scale a tensor", False), ("fa3, a scale a head", True)):
                    if attend is not None:
                        given = for_peer((q, k, v), by_head=by_head, keys_dense=False)
                        outs[name] = attend(**given).transpose(1, 2)
                for name, out in outs.items():
                    squares.setdefault(name, []).append(rms(out - right) ** 2)
            found = {name: math.sqrt(statistics.fmean(each)) for name, each in squares.items()}
            factors = {name: error / found["ours"] for name, error in found.items() if name != "ours"}
            records.append({"dim": dim, "inputs": inputs, "length": shape[2], "samples": SAMPLES, "rms_error": found,
                            "factors": factors, "rms_out": rms(right)})  # fmt: skip
            words = ", ".join(f"{name} {error:.3e} ({error / found['ours']:.2f})" for name, error in found.items())
            print(f"d={dim} N={shape[2]} {inputs}: {words}", flush=True)
    return records


# ---- how fast -------------------------------------------------------------------------------------------------------


def settle(job: tuple[Setting, int, bool]) -> None:
    """Compile what one head dim needs, into the cache on disk."""
    setting, dim, causal = job
    q, k, v = (draw((1, 1, setting.lengths[0], dim), setting.device, i) for i in range(3))
    fp8.attention(fp8.quantize(q, k, v), causal=causal, backend=setting.backend)
    tilewise.attention(q, k, v, causal=causal)


def runs_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    setting: Setting,
    attend: Attend | None,
) -> dict[str, Callable[[], torch.Tensor | fp8.Quantized]]:
    """Give what is timed in a cell; out is (batch, heads, len, dim)."""
    quantized = fp8.quantize(q, k, v)
    runs: dict[str, Callable[[], torch.Tensor | fp8.Quantized]] = {
        "ours": lambda: fp8.attention(quantized, causal=causal, backend=setting.backend),
        "bf16": lambda: tilewise.attention(q, k, v, causal=causal),
        "quantise": lambda: fp8.quantize(q, k, v),
        "both": lambda: tilewise.attention(q, k, v, causal=causal, fp8=True, backend=setting.backend),
    }
    if attend is not None:
        for name, keys_dense in (("fa3", False), ("fa3, keys dense", True)):
            given = for_peer((q, k, v), by_head=True, keys_dense=keys_dense)
            runs[name] = lambda given=given: attend(causal=causal, **given).transpose(1, 2)  # type: ignore[misc]
    return runs


def judge(run: Callable[[], torch.Tensor | fp8.Quantized], right: torch.Tensor) -> tuple[float | None, str]:
    """Run once; give how far out is from the right one, relative, and what is wrong."""
    try:
        out = run()
    except Exception as error:  # noqa: BLE001 - a peer that cannot is a row that says so
        return None, f"{type(error).__name__}: {error}"[:200]
    if not isinstance(out, torch.Tensor):
        return None, ""
    off = rms(out.float() - right) / rms(right)
    return off, "" if off < 0.1 else f"off by {off:.3f}"


def cell(dim: int, causal: bool, length: int, setting: Setting, attend: Attend | None) -> dict[str, object]:
    """Check and time one cell."""
    shape = setting.tokens // length, setting.hidden // dim, length, dim
    q, k, v = (draw(shape, setting.device, i) for i in range(3))
    runs, failed, off = runs_of(q, k, v, causal, setting, attend), {}, {}
    right = tilewise.attention(q, k, v, causal=causal).float()
    for name, run in runs.items():
        off[name], why = judge(run, right)
        if why:
            failed[name] = why
    times: dict[str, list[float]] = {name: [] for name in runs if name not in failed}
    watch = Stopwatch(setting.device)
    for _ in range(ROUNDS):
        for name in random.sample(list(times), len(times)):
            times[name] += watch.round(runs[name], SECONDS)
    median = {name: statistics.median(spent) for name, spent in times.items()}
    flops = 4 * setting.tokens * setting.hidden * length / (2 if causal else 1)
    rates = {name: flops / t / 1e12 for name, t in median.items() if name != "quantise"}
    best = max((rate for name, rate in rates.items() if name.startswith("fa3")), default=math.nan)
    ratio = rates.get("ours", math.nan) / best
    label = f"d={dim} {'causal' if causal else 'full'} N={length}"
    words = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    quantise = f"quantise {1e6 * median['quantise']:.0f} us" if "quantise" in median else ""
    print(f"{label:<22} {words}  {quantise}  ratio {ratio:.3f}  {failed or ''}", flush=True)
    return {"cell": label, "dim": dim, "tflops": rates, "ms": {name: 1e3 * t for name, t in median.items()},
            "ratio": ratio, "off": off, "failed": failed}  # fmt: skip


def speed(setting: Setting) -> dict[str, object]:
    """Time every cell; the ratio is to the better of the peer's two ways, and its geometric mean what counts."""
    attend = None
    if setting.device == "cuda":
        jobs = [(setting, dim, causal) for dim in setting.dims for causal in (False, True)]
        with ProcessPoolExecutor(setting.workers, mp_context=get_context("spawn")) as pool:
            list(pool.map(settle, jobs))
        attend = peer()
    cells = [
        cell(dim, causal, length, setting, attend)
        for dim in setting.dims for causal in (False, True) for length in setting.lengths
    ]  # fmt: skip
    means = {}
    for dim in (None, *setting.dims):
        ratios = [c["ratio"] for c in cells if dim in (None, c["dim"])]
        known = [r for r in ratios if isinstance(r, float) and r > 0]
        means["all" if dim is None else f"d={dim}"] = statistics.geometric_mean(known) if known else None
    print(f"geometric means of the ratio to the peer's better way: {means}", flush=True)
    return {"cells": cells, "geometric_means": means}


def main() -> int:
    """Run the sections asked for; exit with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sections", nargs="+", default=["check", "errors", "speed"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="hopper_fp8")
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 4096, 8192, 16384])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--error-length", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    setting = Setting(*(getattr(given, name) for name in Setting._fields))
    sections: dict[str, Callable[[Setting], object]] = {"check": check, "errors": errors, "speed": speed}
    results: dict[str, object] = {
        "environment": detect.environment(setting.device), "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip
    with torch.no_grad():
        for name in given.sections:
            start = time.perf_counter()
            results[name] = sections[name](setting)
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
            if given.json:
                given.json.write_text(json.dumps(results, indent=1) + "\n")
    checked = results.get("check", [])
    return int(any(record.get("within") is False for record in checked))  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
