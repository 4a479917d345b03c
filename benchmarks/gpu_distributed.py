"""Set attention over several GPUs of one machine beside one of them: right, how fast, how much memory.

    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/gpu_distributed.py --json distributed.json

Sections: check (small cases of every kind, forward and backward, to the budget of ``tilewise.testing``), speed (one
long causal sequence: forward, and forward and backward, on one GPU and on all, each way to spread it; the long results
are held to the budget on sampled rows first), hops (the same with other sizes of a hop). The median of several runs
counts, a run being as long as on the slowest rank. Throughput is 4 b h n^2 d / 2 operations, 3.5 times that for
both passes. The cost model's answer stands beside, from the link and the rate that were measured here.
"""
# ruff: noqa: INP001, T201 - a script, and a script prints

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tilewise
from tilewise import testing
from tilewise.bench.cases import Case, Inputs
from tilewise.bench.implementations import Outcome
from tilewise.bench.judge import Judge
from tilewise.bench.provenance import provenance
from tilewise.distributed import context_parallel_attention, ring, split, unsplit
from tilewise.distributed.context_parallel import Method
from tilewise.distributed.cost import Link, way
from tilewise.distributed.ranges import Order
from tilewise.problem.problem import Options

ROUNDS = 5
LSE = Options(return_lse=True)
CAUSAL = LSE._replace(causal=True)
DOCUMENTS = (700, 1, 1300, 0, 2095)


class Check(NamedTuple):
    """A small case and how it is spread."""

    case: testing.Case
    method: Method = "ring"
    dtype: str = "bfloat16"
    order: Order = "zigzag"


def case(name: str, options: Options, length: int = 2048, dim: int = 128, heads_kv: int = 8) -> testing.Case:
    """Name a square case of 8 query heads."""
    sizes = {"len_q": length, "len_kv": length, "dim_qk": dim, "dim_v": dim, "heads_q": 8, "heads_kv": heads_kv}
    return testing.Case(name, options=options, **sizes)  # type: ignore[arg-type]  # all of them integers


def packed(name: str, options: Options) -> testing.Case:
    """Name a case of packed documents."""
    return testing.Case(name, heads_q=8, heads_kv=4, dim_qk=128, dim_v=128, lengths_q=DOCUMENTS, options=options)


NARROW, BOTH = CAUSAL._replace(window_left=300), LSE._replace(window_left=300, window_right=7)
CHECKS = (
    Check(case("plain", LSE, dim=64)),
    Check(case("causal", CAUSAL)),
    Check(case("causal, uneven", CAUSAL, 2051)),
    Check(case("causal, grouped", CAUSAL, heads_kv=2), dtype="float16"),
    Check(case("causal, d=256", CAUSAL, 1024, 256)),
    Check(case("causal, float32", CAUSAL, 1024, 64, 4), dtype="float32", order="contiguous"),
    Check(case("window", NARROW), order="contiguous"),
    Check(case("window, uneven", BOTH, 2051)),
    Check(case("causal", CAUSAL), "all_to_all"),
    Check(case("causal, grouped, uneven", CAUSAL, 2051, 64, 4), "all_to_all", "float16"),
    Check(packed("packed causal", CAUSAL)),
    Check(packed("packed window", LSE._replace(window_left=99))),
    Check(packed("packed causal", CAUSAL), "all_to_all"),
)


def say(text: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


# ---- right ----------------------------------------------------------------------------------------------------------


def check(mesh: DeviceMesh) -> list[dict[str, object]]:
    """Hold every kind of call to the budget."""
    return [_check(mesh, one) for one in CHECKS]


def _check(mesh: DeviceMesh, one: Check) -> dict[str, object]:
    call = one.case.build("cuda", one.dtype)
    tensors, options, dim = call.tensors, call.options, 0 if one.case.varlen else 2
    take = partial(split, mesh=mesh, order=one.order)
    q, k, v = (take(x, dim=dim).requires_grad_() for x in tensors[:3])
    out, lse = context_parallel_attention(
        q,
        k,
        v,
        mesh=mesh,
        causal=options.causal,
        window=(options.window_left, options.window_right),
        cu_seqlens=None if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.cpu(),
        return_lse=True,
        method=one.method,
        order=one.order,
    )
    arriving = take(call.d_out, dim=dim), take(call.d_lse, dim=call.d_lse.ndim - 1)
    grads = torch.autograd.grad((out, lse), (q, k, v), arriving)
    whole = [unsplit(x, mesh, dim=dim, order=one.order) for x in (out, *grads)]
    whole_lse = unsplit(lse, mesh, dim=lse.ndim - 1, order=one.order)
    found = testing.measure(testing.Results(whole[0], whole_lse, *whole[1:]), call)
    bad = {name: str(error) for name, error in found.items() if not error.within}
    say(f"{one.case.name:<26} {one.method:<11} {one.dtype:<9} {one.order:<11} {bad or 'within budget'}")
    shares = {name: error.max / max(error.max_budget, 1e-300) for name, error in found.items()}
    return {**one._asdict(), "case": one.case.name, "share_of_budget": shares, "bad": bad}


# ---- how fast -------------------------------------------------------------------------------------------------------


class Run:
    """One way to compute a long call, ready to run: on one GPU where ``mesh`` is None, else on all."""

    def __init__(self, inputs: Inputs, mesh: DeviceMesh | None, method: Method, order: Order) -> None:
        self.mesh, self.method, self.order = mesh, method, order
        self.q, self.k, self.v = (self.part(x).clone().requires_grad_() for x in inputs[:3])
        self.d_out = self.part(inputs.d_out).clone()

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Take what this rank holds."""
        return x if self.mesh is None else split(x, self.mesh, dim=2, order=self.order)

    def call(self) -> torch.Tensor:
        """Run the forward pass."""
        if self.mesh is None:
            return tilewise.attention(self.q, self.k, self.v, causal=True)
        out = context_parallel_attention(
            self.q, self.k, self.v, mesh=self.mesh, causal=True, method=self.method, order=self.order
        )
        assert isinstance(out, torch.Tensor)  # noqa: S101  # without return_lse it is one
        return out

    def forward(self) -> None:
        """Run the forward pass alone."""
        with torch.no_grad():
            self.call()

    def both(self) -> tuple[torch.Tensor, ...]:
        """Run both passes and give out and the gradients."""
        out = self.call()
        return out.detach(), *torch.autograd.grad(out, (self.q, self.k, self.v), self.d_out)

    def judged(self, judge: Judge | None, d_out: torch.Tensor) -> dict[str, str]:
        """Hold the long results to the budget on sampled rows; {} where they keep it, and where nobody judges."""
        self.d_out, before = self.part(d_out), self.d_out
        results = self.both()
        self.d_out = before
        if self.mesh is not None:
            results = tuple(unsplit(x, self.mesh, dim=2, order=self.order) for x in results)
        found = {} if judge is None else judge.measure(Outcome(results[0], None, *results[1:]))
        return {name: str(error) for name, error in found.items() if not error.within}


def seconds(run: Callable[[], object]) -> float:
    """Time one run by the device's clock, from a common start to the end of the slowest rank."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    dist.barrier()
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    taken = torch.tensor([start.elapsed_time(stop) / 1e3], device="cuda")
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def peak(run: Callable[[], object]) -> int:
    """Measure what a run holds at its peak, inputs and results included, on the rank that holds most."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    torch.cuda.synchronize()
    held = torch.tensor([torch.cuda.max_memory_allocated()], device="cuda")
    del results
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return int(held.item())


def bandwidth(mesh: DeviceMesh, count: int = 2**28) -> float:
    """Measure the bytes a second that each rank gets from the one before it while it sends as many on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = (torch.empty(count, dtype=torch.uint8, device="cuda") for _ in range(2))

    def run() -> None:
        ops = [
            dist.P2POp(dist.isend, sent, (rank + 1) % ranks, mesh.get_group()),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks, mesh.get_group()),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    run()
    return count / min(seconds(run) for _ in range(5))


WAYS: dict[str, tuple[Method, Order]] = {
    "ring, zigzag": ("ring", "zigzag"),
    "ring, contiguous": ("ring", "contiguous"),
    "all-to-all": ("all_to_all", "zigzag"),
}


def judge_all(mesh: DeviceMesh, case: Case, inputs: Inputs) -> dict[str, dict[str, str]]:
    """Hold every way's long results to the budget; the first rank judges."""
    judge = Judge(case, inputs, gradients=True, scores=2**25)
    bad = {}
    for name, (over, method, order) in ways(mesh).items():
        run = Run(inputs, over, method, order)
        bad[name] = run.judged(None if dist.get_rank() else judge, inputs.d_out if judge.d_out is None else judge.d_out)
        say(f"{name:<18} {'exceeds the budget: ' + str(bad[name]) if bad[name] else 'within budget'}")
    return bad


def ways(mesh: DeviceMesh) -> dict[str, tuple[DeviceMesh | None, Method, Order]]:
    """Name the ways to compute a long call."""
    found: dict[str, tuple[DeviceMesh | None, Method, Order]] = {"one GPU": (None, "ring", "zigzag")}
    return found | {name: (mesh, method, order) for name, (method, order) in WAYS.items()}


def free() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    torch.cuda.empty_cache()


def timed(case: Case, over: DeviceMesh | None, method: Method, order: Order) -> tuple[dict[str, list[float]], int]:
    """Time a way alone on the device, forward and both passes, and measure its memory. One GPU means the first."""
    free()
    run = Run(case.inputs(0), over, method, order)
    free()
    idle = over is None and dist.get_rank() > 0
    passes: dict[str, Callable[[], object]] = {"forward": run.forward, "both": run.both}
    if idle:
        passes = dict.fromkeys(passes, lambda: None)
    for one in passes.values():
        one()
    held = peak(passes["both"])
    return {name: [seconds(one) for _ in range(ROUNDS)] for name, one in passes.items()}, held


def speed(mesh: DeviceMesh, case: Case) -> dict[str, object]:
    """Measure one GPU and every way over all of them."""
    ranks = dist.get_world_size()
    bad = judge_all(mesh, case, case.inputs(0))
    link = bandwidth(mesh)
    say(f"link {link / 1e9:.0f} GB/s each way")
    flops = {"forward": case.flops(backward=False), "both": case.flops(backward=False) * 7 / 2}
    records: dict[str, dict[str, object]] = {}
    alone: dict[str, float] = {}
    alone_held = 0
    for name, (over, method, order) in ways(mesh).items():
        times, held = timed(case, over, method, order)
        middle = {label: statistics.median(found) for label, found in times.items()}
        alone, alone_held = alone or middle, alone_held or held
        ring_size, exchange = (1, ranks) if method == "all_to_all" else (ranks, 1)
        model = way(
            case.shape,
            ring_size,
            exchange,
            rate=flops["both"] / alone["both"],
            link=Link(link),
            near=Link(link),
            order=order,
        )
        records[name] = {
            "seconds": times,
            "tflops": {label: flops[label] / t / 1e12 for label, t in middle.items()},
            "times_one_gpu": {label: alone[label] / t for label, t in middle.items()},
            "peak_bytes": held,
            "share_of_one_gpus_memory": held / alone_held,
            "model_seconds": None if over is None else {"both": model.seconds, "exposed": sum(model.exposed)},
            "model_received_bytes": None if over is None else (model.forward_bytes, model.backward_bytes),
            "bad": bad[name],
        }
        told = "  ".join(
            f"{label} {1e3 * t:.1f} ms, {flops[label] / t / 1e12:.0f} TFLOP/s, {alone[label] / t:.3f} x"
            for label, t in middle.items()
        )
        expected = "" if over is None else f"; model {1e3 * model.seconds:.1f} ms"
        say(f"{name:<18} {told}{expected}; {held / 2**30:.2f} GiB, {held / alone_held:.3f} of one")
    return {"case": str(case), "ranks": ranks, "link_bytes_a_second": link, "ways": records}


def hops(mesh: DeviceMesh, case: Case) -> list[dict[str, object]]:
    """Measure the ring with hops of other sizes."""
    records: list[dict[str, object]] = []
    before = ring.HOP_BYTES
    for size in (32, 64, 128, 256, 512, 2048):
        ring.HOP_BYTES = size * 2**20
        times, held = timed(case, mesh, "ring", "zigzag")
        middle = {label: statistics.median(found) for label, found in times.items()}
        records.append({"hop_mib": size, "seconds": times, "peak_bytes": held})
        told = ", ".join(f"{label} {1e3 * t:.1f} ms" for label, t in middle.items())
        say(f"hops of {size} MiB: {told}, {held / 2**30:.2f} GiB")
    ring.HOP_BYTES = before
    return records


def main() -> None:
    """Measure the sections asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sections", nargs="+", default=["check", "speed", "hops"])
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-kv", type=int, default=None)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    case = Case(given.length, 1, given.heads, given.heads_kv or given.heads, given.dim, "bfloat16", "cuda", causal=True)
    sections: dict[str, Callable[[], object]] = {
        "check": partial(check, mesh),
        "speed": partial(speed, mesh, case),
        "hops": partial(hops, mesh, case),
    }
    environment, command = provenance("cuda")
    results: dict[str, object] = {
        "environment": environment,
        "command": f"torchrun {command}",
        "gpus": dist.get_world_size(),
    }
    for name in given.sections:
        try:
            results[name] = sections[name]()
        except Exception as error:  # noqa: BLE001 - the other sections are still wanted
            results[name] = f"{type(error).__name__}: {error}"
            print(f"rank {dist.get_rank()}, {name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        if given.json and dist.get_rank() == 0:
            given.json.write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
