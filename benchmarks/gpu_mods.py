"""Set scores and masks that users write beside PyTorch's compiled flex_attention: errors, times, and compiling anew.

    PYTHONPATH=src python benchmarks/gpu_mods.py --json mods.json

Each case of the collection is written twice: tilewise takes the function of `tilewise.mods`, PyTorch one in its own
style. Every case has a process of its own, so that all compile at the same time; then one after the other is timed on a
GPU that is otherwise idle, forward and backward, both implementations in rounds that take turns in shuffled order, the
L2 cache overwritten before each run; the median counts. Sections: check (a small shape against the formula in float64,
with the budget of ``tilewise.testing``), speed (bf16, ratios of times; above 1.00 tilewise is faster), changes (what
compiles anew when a length, a captured tensor's values or a window change). With --dry all of it runs at tiny sizes on
a CPU, where PyTorch computes without compiling and has no backward pass.
"""
# ruff: noqa: INP001, T201, ARG005 - a script, and a script prints; scores and masks take what they are given

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch
from torch.nn.attention import flex_attention as theirs

import tilewise
from tilewise import testing
from tilewise.backends.block_lists import Blocks
from tilewise.bench.clock import Stopwatch
from tilewise.machine import detect
from tilewise.mods import masks, scores

Function = Callable[..., torch.Tensor]
Found = dict[str, dict[str, dict[str, float]]]  # what is measured: by implementation, or by pass
ROUNDS, SECONDS = 5, 0.02


@dataclass(frozen=True)
class Shape:
    """What is computed, and where."""

    batch: int = 2
    heads: int = 16
    length: int = 8192
    dim: int = 64
    dtype: str = "bfloat16"
    device: str = "cuda"

    @property
    def compiles(self) -> bool:
        """PyTorch's implementation is compiled, and has a backward pass."""
        return self.device != "cpu"


SMALL = Shape(2, 4, 1024, 64)
DRY = Shape(1, 2, 256, 16, "float32", "cpu")


# ---- the collection -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One score and mask: tilewise's function and tensors, PyTorch's closure, and the table that wants a gradient."""

    score: tuple[Function, tuple[torch.Tensor, ...]] | None = None
    flex_score: Function | None = None
    mask: tuple[Function, tuple[torch.Tensor, ...]] | None = None
    flex_mask: Function | None = None
    table: torch.Tensor | None = None


def _causal(shape: Shape) -> Case:
    return Case(mask=masks.causal(), flex_mask=lambda b, h, q, kv: q >= kv)


def _window(shape: Shape) -> Case:
    size = shape.length // 8
    return Case(mask=masks.sliding_window(size), flex_mask=lambda b, h, q, kv: (q >= kv) & (q - kv <= size))


def _prefix(shape: Shape) -> Case:
    size = shape.length // 4
    return Case(mask=masks.prefix_lm(size), flex_mask=lambda b, h, q, kv: (kv < size) | (q >= kv))


def _documents(shape: Shape) -> Case:
    document = (torch.arange(shape.length, device=shape.device).double() / shape.length).sqrt().mul(12).int()
    mask = masks.documents(document)
    return Case(mask=mask, flex_mask=lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv))


def _alibi(shape: Shape) -> Case:
    rate = -8.0 / shape.heads
    return replace(
        _causal(shape),
        score=scores.alibi(shape.heads),
        flex_score=lambda score, b, h, q, kv: score - torch.exp2((h + 1) * rate) * (q - kv).abs(),
    )


def _t5(shape: Shape, *, learned: bool = False) -> Case:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(32, shape.heads, generator=generator).to(shape.device)
    score_mod, (by_distance,) = scores.relative_bias(table)
    by_distance = by_distance.detach().requires_grad_(learned)

    def flex(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return score + by_distance[torch.clamp(kv - q, -128, 128) + 128, h]

    return Case(score=(score_mod, (by_distance,)), flex_score=flex, table=by_distance if learned else None)


def _softcap(shape: Shape) -> Case:
    return replace(
        _causal(shape),
        score=scores.softcap(20.0),
        flex_score=lambda score, b, h, q, kv: 20.0 * torch.tanh(score / 20.0),
    )


def _dilated(shape: Shape) -> Case:
    reach = shape.length // 8
    return Case(
        mask=masks.dilated_window(reach, 4),
        flex_mask=lambda b, h, q, kv: ((q - kv).abs() <= reach) & ((q - kv).abs() % 4 == 0),
    )


def _natten(shape: Shape) -> Case:
    width = 2 ** (int(math.log2(shape.length)) // 2)
    height, reach = shape.length // width, 6

    def flex(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        y = torch.clamp(q // width, reach, height - 1 - reach)
        x = torch.clamp(q % width, reach, width - 1 - reach)
        return ((kv // width - y).abs() <= reach) & ((kv % width - x).abs() <= reach)

    return Case(mask=masks.neighbourhood(height, width, 2 * reach + 1, 2 * reach + 1), flex_mask=flex)


def _shared_prefix(shape: Shape) -> Case:
    prompt, answers = shape.length // 4, 6
    edges = [0, *(prompt + (shape.length - prompt) * part // answers for part in range(answers + 1))]
    start = torch.tensor(edges, device=shape.device, dtype=torch.int32)
    document = torch.searchsorted(start[1:].contiguous(), torch.arange(shape.length, device=shape.device), right=True)
    document = document.int()

    def flex(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        own = document[q]
        return ((document[kv] == own) & (q >= kv)) | ((own > 0) & (kv < prompt))

    return Case(mask=masks.shared_prefix(document, start, torch.zeros_like(start)), flex_mask=flex)


COLLECTION: dict[str, Callable[[Shape], Case]] = {
    "causal": _causal,
    "window": _window,
    "prefix-lm": _prefix,
    "documents": _documents,
    "alibi": _alibi,
    "t5 bias": _t5,
    "t5 bias learned": lambda shape: _t5(shape, learned=True),
    "softcap": _softcap,
    "dilated": _dilated,
    "natten": _natten,
    "shared prefix": _shared_prefix,
}


# ---- both implementations -------------------------------------------------------------------------------------------


class Attend:
    """One case on one shape: data, and both implementations, forward and backward over a kept graph."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.shape, self.case = shape, COLLECTION[name](shape)
        generator = torch.Generator(shape.device).manual_seed(0)
        size = (shape.batch, shape.heads, shape.length, shape.dim)

        def draw() -> torch.Tensor:
            drawn = torch.randn(size, generator=generator, device=shape.device, dtype=torch.float32)
            return drawn.to(getattr(torch, shape.dtype))

        self.leaves = [draw().requires_grad_() for _ in range(3)]
        self.d_out = draw()
        if self.case.table is not None:
            self.leaves.append(self.case.table)
        self.forwards = {"tilewise": self._ours(), "flex": self._flex()}

    def _ours(self) -> Callable[[], torch.Tensor]:
        case, shape = self.case, self.shape
        score_mod, score_tensors = case.score or (None, ())
        blocks = None
        if case.mask is not None:
            sizes = {"batch": shape.batch, "heads": shape.heads, "len_q": shape.length, "len_kv": shape.length}
            blocks = Blocks.of(*case.mask, device=shape.device, **sizes)
        options = {"score_mod": score_mod, "score_tensors": score_tensors, "blocks": blocks}
        return lambda: tilewise.attention(*self.leaves[:3], **options)  # type: ignore[call-overload, no-any-return]

    def _flex(self) -> Callable[[], torch.Tensor]:
        case, shape = self.case, self.shape
        function = theirs.flex_attention
        if shape.compiles:
            import torch._functorch.config

            torch._functorch.config.donated_buffer = False  # noqa: SLF001  # the backward pass is timed over one graph
            function = torch.compile(function, dynamic=False)
        else:
            theirs._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # type: ignore[attr-defined]  # noqa: SLF001
        block_mask = None
        if case.flex_mask is not None:
            length = shape.length
            block_mask = theirs.create_block_mask(case.flex_mask, None, None, length, length, device=shape.device)
        leaves = self.leaves[:3] if shape.compiles else [x.detach() for x in self.leaves[:3]]
        return lambda: function(*leaves, score_mod=case.flex_score, block_mask=block_mask)  # type: ignore[return-value]

    def differentiable(self, which: str) -> bool:
        """Say whether an implementation has a backward pass here."""
        return which == "tilewise" or self.shape.compiles

    def backward(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Differentiate a result that is kept."""
        return torch.autograd.grad(out, self.leaves, self.d_out, retain_graph=True)

    def first_call(self, which: str) -> float:
        """Run both passes for the first time, which compiles; give the seconds."""
        start = time.perf_counter()
        out = self.forwards[which]()
        if self.differentiable(which):
            self.backward(out)
        Stopwatch(self.shape.device).synchronise()
        return time.perf_counter() - start

    def formula(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Compute out, lse and gradients with the whole score matrix, from PyTorch's closures."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.leaves[:3]]
        q, k, v = leaves
        (batch, heads, length), device = q.shape[:3], q.device
        places = (
            torch.arange(batch, device=device).view(-1, 1, 1, 1),
            torch.arange(heads, device=device).view(-1, 1, 1),
            torch.arange(length, device=device)[:, None],
            torch.arange(length, device=device)[None, :],
        )
        score = q @ k.mT * self.shape.dim**-0.5
        if self.case.flex_score is not None:
            score = self.case.flex_score(score, *places).to(dtype)
        if self.case.flex_mask is not None:
            score = torch.where(self.case.flex_mask(*places), score, -math.inf)
        lse = score.logsumexp(-1)
        out = torch.exp(score - lse[..., None]) @ v
        wanted = leaves if self.case.table is None else [*leaves, self.case.table]
        return out.detach(), lse.detach(), *torch.autograd.grad(out, wanted, self.d_out.to(dtype))

    def check(self) -> Found:
        """Measure both implementations' errors against float64; tilewise's are held to the budget."""
        right, low = self.formula(torch.float64), self.formula(getattr(torch, self.shape.dtype))
        found: Found = {}
        for which, forward in self.forwards.items():
            out = forward()
            results = [out.detach(), *(self.backward(out) if self.differentiable(which) else ())]
            found[which] = {}
            pairs = zip(
                ("out", "dq", "dk", "dv", "dtable"), results, (right[0], *right[2:]), (low[0], *low[2:]), strict=False
            )
            for name, got, ref, yard in pairs:
                eps = torch.finfo(got.dtype).eps
                stored = right[1].abs().max().item() * 2**-23 / eps  # lse is stored in float32
                error = testing.error(got, ref, yard, eps, 0.0 if name == "out" else stored)
                found[which][name] = {**asdict(error), "within": error.within}
        return found

    def time(self) -> dict[str, dict[str, float]]:
        """Time both passes of both implementations, in turns: milliseconds."""
        watch = Stopwatch(self.shape.device)
        kept = {which: forward() for which, forward in self.forwards.items()}
        found: dict[str, dict[str, float]] = {}
        for name in ("forward", "backward"):
            runs: dict[str, Callable[[], object]] = {}
            for which, forward in self.forwards.items():
                if name == "forward":
                    runs[which] = forward
                elif self.differentiable(which):
                    runs[which] = lambda out=kept[which]: self.backward(out)  # type: ignore[misc]
            times: dict[str, list[float]] = {which: [] for which in runs}
            for _ in range(ROUNDS):
                for which in random.sample(list(runs), len(runs)):
                    times[which] += watch.round(runs[which], SECONDS)
            found[name] = {which: 1e3 * statistics.median(spent) for which, spent in times.items()}
        return found


# ---- changes --------------------------------------------------------------------------------------------------------


def near_and_within(window: int, document: torch.Tensor) -> tuple[Function, Function]:
    """Give a score and a mask that capture a number and a tensor."""
    return (
        lambda score, b, h, q, kv: score - (q - kv).abs() / window,
        lambda b, h, q, kv: (q - kv <= window) & (document[q] == document[kv]),
    )


def changes(shape: Shape) -> list[dict[str, object]]:
    """Change length, window and captured values; count what compiles anew, and time each first call."""
    length, document = shape.length // 2, torch.arange(shape.length, device=shape.device) // 300
    steps = {
        "first call": (length, near_and_within(length // 8, document)),
        "another length": (length - 100, near_and_within(length // 8, document)),
        "another window": (length, near_and_within(length // 8 + 77, document)),
        "other values": (length, near_and_within(length // 8, document // 2)),
    }
    compiled = torch.compile(theirs.flex_attention) if shape.compiles else theirs.flex_attention

    def ours(leaves: list[torch.Tensor], score: Function, mask: Function) -> torch.Tensor:
        size = leaves[0].shape[2]
        blocks = Blocks.of(mask, len_q=size, len_kv=size, device=shape.device)
        return tilewise.attention(*leaves, score_mod=score, blocks=blocks)  # type: ignore[call-overload, no-any-return]

    def flex(leaves: list[torch.Tensor], score: Function, mask: Function) -> torch.Tensor:
        size = leaves[0].shape[2]
        block_mask = theirs.create_block_mask(mask, None, None, size, size, device=shape.device)
        given = leaves if shape.compiles else [x.detach() for x in leaves]
        return compiled(*given, score_mod=score, block_mask=block_mask)  # type: ignore[return-value]

    records: list[dict[str, object]] = []
    for step, (size, functions) in steps.items():
        data = torch.randn(3, 1, 2, size, shape.dim, device=shape.device, dtype=getattr(torch, shape.dtype))
        for which, attend, counted in (("tilewise", ours, ours_compiled), ("flex", flex, flex_compiled)):
            leaves = [x.requires_grad_() for x in data.clone()]
            before, start = counted(), time.perf_counter()
            out = attend(leaves, *functions)
            if out.requires_grad:
                out.sum().backward()
            Stopwatch(shape.device).synchronise()
            seconds = time.perf_counter() - start
            records.append({"step": step, "which": which, "compiled": counted() - before, "seconds": seconds})
    return records


def ours_compiled() -> int:
    """Count the kernels that this process compiled or loaded."""
    from tilewise.backends import launch

    launcher = launch._default  # noqa: SLF001 - none where nothing was launched
    return 0 if launcher is None else launcher.bindings


def flex_compiled() -> int:
    """Count the graphs that torch compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])  # noqa: SLF001


# ---- processes ------------------------------------------------------------------------------------------------------


class Worker:
    """What one process does for one case: compile, then wait to be told what to do."""

    def __init__(self, name: str, shapes: dict[str, Shape]) -> None:
        self.name, self.shapes = name, shapes
        self.attends: dict[str, Attend] = {}

    def prepare(self) -> dict[str, dict[str, float | str]]:
        """Compile everything: seconds of each first call. Where PyTorch's fails, tilewise is measured alone."""
        seconds: dict[str, dict[str, float | str]] = {}
        for key, shape in self.shapes.items():
            attend = self.attends[key] = Attend(self.name, shape)
            seconds[key] = {"tilewise": attend.first_call("tilewise")}
            try:
                seconds[key]["flex"] = attend.first_call("flex")
            except Exception as error:  # noqa: BLE001 - a peer that cannot is a row that says so
                seconds[key]["flex"] = f"{type(error).__name__}: {error}"[:300]
                del attend.forwards["flex"]
        return seconds

    def check(self) -> Found:
        """Measure errors on the small shape."""
        return self.attends["check"].check()

    def time(self, key: str) -> dict[str, dict[str, float]]:
        """Time one shape."""
        return self.attends[key].time()

    def changes(self) -> list[dict[str, object]]:
        """See what compiles anew."""
        return changes(self.shapes["changes"])


def serve(name: str, shapes: dict[str, Shape], line: Connection) -> None:
    """Do what the line asks for, until nobody is there to ask."""
    worker = Worker(name, shapes)
    while True:
        try:
            asked = line.recv()
        except EOFError:  # nobody asks any more
            return
        try:
            answer = getattr(worker, asked[0])(*asked[1:])
        except Exception:  # noqa: BLE001 - whatever it is belongs into the report
            answer = traceback.format_exc()[-1500:]
        line.send(answer)


class Remote:
    """A worker in a process of its own, or in this one."""

    def __init__(self, name: str, shapes: dict[str, Shape], *, here: bool) -> None:
        self.here = Worker(name, shapes) if here else None
        self.asked: tuple[object, ...] = ()
        if not here:
            context = get_context("spawn")
            self.line, other = context.Pipe()
            self.process = context.Process(target=serve, args=(name, shapes, other), daemon=True)
            self.process.start()
            other.close()  # so that the line ends if the process does

    def ask(self, *asked: object) -> None:
        """Begin something."""
        self.asked = asked
        if self.here is None:
            with suppress(OSError):  # of a process that died; the answer will say so
                self.line.send(asked)

    def answer(self, seconds: float = 400.0) -> object:
        """Wait for what was begun; text instead of a result says what went wrong."""
        if self.here is not None:
            return getattr(self.here, str(self.asked[0]))(*self.asked[1:])
        try:
            return self.line.recv() if self.line.poll(seconds) else f"no answer within {seconds:.0f} s"
        except (EOFError, OSError):
            return "the process died"

    def end(self) -> None:
        """Stop the process."""
        if self.here is None:
            self.process.kill()


# ---- told -----------------------------------------------------------------------------------------------------------


def tell_check(name: str, found: Found | str) -> bool:
    """Print errors beside what they may be; False where tilewise exceeds it."""
    if isinstance(found, str):
        print(f"check {name}: FAILED {found}", flush=True)
        return False
    for which, errors in found.items():
        cells = "  ".join(f"{key} {e['max']:.1e} of {e['max_budget']:.1e}" for key, e in errors.items())
        bad = [key for key, e in errors.items() if not e["within"]]
        print(f"check {name:<16} {which:<9} {cells}" + (f"  OVER: {bad}" if bad else ""), flush=True)
    return all(e["within"] for e in found["tilewise"].values())


def tell_speed(name: str, key: str, found: dict[str, dict[str, float]] | str, ratios: dict[str, list[float]]) -> None:
    """Print times, and gather PyTorch's over ours."""
    if isinstance(found, str):
        print(f"speed {name} {key}: FAILED {found}", flush=True)
        return
    cells = []
    for way, times in found.items():
        cell = f"{way} {times['tilewise']:.3f} ms"
        if "flex" in times:
            ratio = times["flex"] / times["tilewise"]
            ratios.setdefault(f"{key} {way}", []).append(ratio)
            cell += f", flex {times['flex']:.3f}, ratio {ratio:.2f}"
        cells.append(cell)
    print(f"speed {name:<16} {key:<6} {'   '.join(cells)}", flush=True)


def tell_changes(records: list[dict[str, object]] | str, *, compiles: bool) -> bool:
    """Print what compiled; False where tilewise did after the first call."""
    if isinstance(records, str):
        print(f"changes: FAILED {records}", flush=True)
        return False
    for record in records:
        print("changes {step:<15} {which:<9} {compiled} compiled, {seconds:.2f} s".format_map(record), flush=True)
    first, *later = [int(str(r["compiled"])) for r in records if r["which"] == "tilewise"]
    return (first > 0) == compiles and not any(later)


def run(arguments: argparse.Namespace) -> tuple[dict[str, object], bool]:
    """Run the sections asked for; give the results, and whether all that must hold does."""
    base = DRY if arguments.dry else Shape()
    wanted: dict[str, Shape] = {"check": DRY if arguments.dry else SMALL} if "check" in arguments.sections else {}
    keys = []
    if "speed" in arguments.sections:
        keys = [f"d={dim}" for dim in arguments.dims]
        wanted |= {f"d={dim}": replace(base, dim=dim) for dim in arguments.dims}
    results: dict[str, object] = {}
    sound, start = True, time.perf_counter()
    workers = {name: Remote(name, wanted, here=arguments.dry) for name in arguments.cases if wanted}
    other = Remote("", {"changes": base}, here=arguments.dry) if "changes" in arguments.sections else None
    for worker in workers.values():
        worker.ask("prepare")
    if other is not None:
        other.ask("changes")
    first = {name: worker.answer() for name, worker in workers.items()}
    results["first call, s"] = first
    for name, seconds in first.items():
        print(f"first call {name:<16} {seconds}", flush=True)
    if other is not None:
        results["changes"] = other.answer()
        sound &= tell_changes(cast("list[dict[str, object]] | str", results["changes"]), compiles=base.compiles)
        other.end()
    print(f"all compiled after {time.perf_counter() - start:.0f} s", flush=True)
    checks: dict[str, object] = {}
    speeds: dict[str, object] = {}
    ratios: dict[str, list[float]] = {}
    for name, worker in workers.items():
        if "check" in wanted:
            worker.ask("check")
            checks[name] = worker.answer()
            sound &= tell_check(name, cast("Found | str", checks[name]))
        for key in keys:
            worker.ask("time", key)
            speeds[f"{name} {key}"] = found = worker.answer()
            sound &= not isinstance(found, str)
            tell_speed(name, key, cast("dict[str, dict[str, float]] | str", found), ratios)
        worker.end()
    means = {key: statistics.geometric_mean(values) for key, values in ratios.items()}
    for key, mean in means.items():
        print(f"{key}: tilewise is {mean:.2f} times as fast, geometric mean of {len(ratios[key])}", flush=True)
    results |= {"check": checks, "speed": speeds, "geometric means": means}
    return results, sound


def main() -> None:
    """Measure; exit with 1 where an error is over its budget, something failed, or compiled anew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sections", nargs="+", default=["check", "speed", "changes"])
    parser.add_argument("--cases", nargs="+", default=list(COLLECTION), choices=list(COLLECTION))
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # every case has a process already
    arguments.dims = [DRY.dim] if arguments.dry else arguments.dims
    results, sound = run(arguments)
    device = DRY.device if arguments.dry else Shape().device
    results |= {"environment": detect.environment(device), "command": " ".join(["python", *sys.argv])}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(not sound)


if __name__ == "__main__":
    main()
