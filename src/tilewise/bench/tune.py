"""Find the fastest tiles of the kernels on this GPU and write them into its table, with their provenance.

Candidates are all tiles that fit shared memory by estimate. Each is compiled by a pool of processes, held to the error
budget on a small problem, then timed on long and short, causal and full problems, in rounds that take turns; the
geometric mean decides. Nothing is tuned at import or in a first call: kernels read the table and no more.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, get_args

import torch

from tilewise import testing
from tilewise.backends import triton_portable
from tilewise.bench.clock import Stopwatch, spread
from tilewise.machine import detect
from tilewise.machine.tiles import Tiles, default_tiles, estimate_shared_memory, padded_dim, shared_memory_limit
from tilewise.problem.problem import Needs, Options
from tilewise.testing import Call, Case, Results

Kind = Literal["forward", "backward_kv", "backward_q"]
TOKENS, HIDDEN = 16384, 2048  # batch * length and heads * dim of the problems that are timed
LENGTHS = (2048, 8192)
ROUNDS = 3
SHOWN = 5  # of each job
DIMS = ("64", "128", "256")
DTYPES = ("float16", "bfloat16", "float32")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What is tuned: one kind of pass at one head dim and dtype."""

    kind: Kind
    dim: int
    dtype: str
    device: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()

    def candidates(self) -> list[Tiles]:
        """List the tiles that fit, the table's own (or the default) first."""
        capability = detect.detect(self.device).capability
        now = default_tiles(capability, self.dim, self.dim, self.itemsize, self.kind)
        limit = shared_memory_limit(capability)
        listed = [now]
        for tiles in _grid(self.kind):
            fits = estimate_shared_memory(tiles, self.dim, self.dim, self.itemsize, self.kind) <= limit
            if fits and tiles not in listed:
                listed.append(tiles)
        return listed

    def problem(self, length: int, causal: bool) -> Case:
        """Make the problem of one length."""
        batch, heads = max(TOKENS // length, 1), max(HIDDEN // self.dim, 1)
        return Case("tuned", batch, heads, heads, length, length, self.dim, self.dim, options=Options(causal=causal))


@dataclass(frozen=True)
class Trial:
    """One candidate's times, one for each problem; or why it has none."""

    tiles: Tiles
    seconds: tuple[float, ...] = ()
    failure: str = ""

    @property
    def score(self) -> float:
        """The geometric mean of the times; infinite where it failed."""
        return math.exp(sum(map(math.log, self.seconds)) / len(self.seconds)) if self.seconds else math.inf


def _grid(kind: Kind) -> Iterator[Tiles]:
    """List what has ever been fastest somewhere: owned rows of 64 or 128, and what streams past them no more."""
    for owned in (64, 128):
        for streamed in (32, 64, 128) if kind == "forward" else (32, 64):
            blocks = (streamed, owned) if kind == "backward_kv" else (owned, streamed)
            for num_warps in (4, 8) if owned == 128 else (4,):  # 64 rows in 8 warps compute scores twice
                for num_stages in (2, 3, 4) if kind == "forward" else (1, 2, 3):
                    yield Tiles(*blocks, num_warps, num_stages)
    if kind == "forward":
        yield Tiles(64, 64, 4, 3, max_registers=128)  # four programs an SM


def jobs(kinds: Sequence[str] = (), dims: Sequence[str] = (), dtype: str = "bfloat16") -> list[Job]:
    """Name what to tune on this machine's GPU; without kinds or dims all kinds, and the head dims 64, 128 and 256.

    Raises:
        ValueError: there is no GPU, or a kind, dim or dtype that no kernel has.
    """
    for kind in kinds:
        if kind not in get_args(Kind):
            raise ValueError(f"kinds must be among {', '.join(get_args(Kind))}; got {kind!r}")
    for dim in dims:
        if not dim.isdecimal() or not 1 <= int(dim) <= 512:
            raise ValueError(f"dims must be whole numbers from 1 to 512; got {dim!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    device = detect.best_device()
    if device != "cuda":
        raise ValueError(f"tuning times kernels on a GPU that torch can use as cuda; torch finds {device!r}")
    chosen = [kind for kind in get_args(Kind) if not kinds or kind in kinds]
    return [Job(kind, int(dim), dtype, device) for kind in chosen for dim in dims or DIMS]


def run(call: Call, kind: Kind, tiles: Tiles) -> Callable[[], object]:
    """Give a function that runs one pass of a call with these tiles."""
    problem, tensors = call.problem, call.tensors
    if kind == "forward":
        return lambda: triton_portable.forward(problem, tensors, tiles)
    out, lse = triton_portable.forward(problem, tensors)
    needs = Needs(dq=False) if kind == "backward_kv" else Needs(dk=False, dv=False)
    return lambda: triton_portable.backward(
        problem, tensors, out, lse, call.d_out, None, needs, triton_portable.BackwardTiles(tiles, tiles)
    )


def _results(call: Call, kind: Kind, tiles: Tiles) -> Results:
    """Run one pass with these tiles and the others, where they are needed, with the table's."""
    problem, tensors = call.problem, call.tensors
    if kind == "forward":
        return Results(*triton_portable.forward(problem, tensors, tiles))
    own = triton_portable.backward_tiles(problem)
    chosen = own._replace(kv=tiles) if kind == "backward_kv" else own._replace(q=tiles)
    out, lse = triton_portable.forward(problem, tensors)
    grads = triton_portable.backward(problem, tensors, out, lse, call.d_out, call.d_lse, Needs(), chosen)
    return Results(out, lse, *grads)


def try_out(job: Job, tiles: Tiles) -> str:
    """Compile a candidate, and hold it to the error budget on a small ragged problem; give what is wrong, or ""."""
    try:
        for causal in (False, True):
            case = replace(job.problem(300, causal), batch=1, heads_q=2, heads_kv=2)
            call = case.build(job.device, job.dtype)
            testing.check(_results(call, job.kind, tiles), call)
    except Exception as error:  # noqa: BLE001  # a candidate that fails in any way is out, with its reason
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def tune(jobs: Sequence[Job], tell: Tell = lambda _: None, workers: int = 8) -> dict[Job, list[Trial]]:
    """Try all candidates of all jobs; the trials of each job come back fastest first."""
    pairs = [(job, tiles) for job in jobs for tiles in job.candidates()]
    tell(f"compiling and checking {len(pairs)} candidates")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        failures = list(pool.map(try_out, *zip(*pairs, strict=True)))
    trials: dict[Job, list[Trial]] = {}
    for job in jobs:
        own = [(tiles, failure) for (other, tiles), failure in zip(pairs, failures, strict=True) if other == job]
        sound = [tiles for tiles, failure in own if not failure]
        tell(f"timing {len(sound)} of {len(own)} candidates: {job.kind}, d={job.dim}, {job.dtype}")
        failed = [Trial(tiles, failure=failure) for tiles, failure in own if failure]
        trials[job] = sorted(_time(job, sound), key=lambda trial: trial.score) + failed
    return trials


def _time(job: Job, candidates: Sequence[Tiles]) -> list[Trial]:
    watch = Stopwatch(job.device)
    seconds: dict[Tiles, list[float]] = {tiles: [] for tiles in candidates}
    for length in LENGTHS:
        for causal in (False, True):
            call = job.problem(length, causal).build(job.device, job.dtype)
            runs = {tiles: run(call, job.kind, tiles) for tiles in candidates}
            times: dict[Tiles, list[float]] = {tiles: [] for tiles in candidates}
            for _ in range(ROUNDS):
                for tiles, one in runs.items():
                    times[tiles] += watch.round(one, 0.01)
            for tiles in candidates:
                seconds[tiles].append(spread(times[tiles]).median)
    return [Trial(tiles, tuple(found)) for tiles, found in seconds.items()]


def rows(trials: dict[Job, list[Trial]]) -> list[dict[str, object]]:
    """Give the fastest of each job as rows of a table."""
    found = []
    for job, tried in trials.items():
        if tried and tried[0].seconds:
            provenance = {
                "device": detect.detect(job.device).name,
                "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
                "triton": version("triton"),
                "command": f"tilewise tune --kinds {job.kind} --dims {job.dim} --dtype {job.dtype}",
            }
            row = {"kind": job.kind, "dim_qk": padded_dim(job.dim), "dim_v": padded_dim(job.dim)}
            found.append(row | {"itemsize": job.itemsize} | asdict(tried[0].tiles) | {"provenance": provenance})
    return found


def summary(trials: Mapping[Job, Sequence[Trial]]) -> Iterator[str]:
    """Say of each job which tiles were fastest, and what failed."""
    for job, tried in trials.items():
        yield f"{job.kind} d={job.dim} {job.dtype}"
        for trial in [trial for trial in tried if trial.seconds][:SHOWN]:
            yield f"  {trial.tiles}  {', '.join(f'{1e3 * seconds:.3f}' for seconds in trial.seconds)} ms"
        failed = [trial for trial in tried if trial.failure]
        if failed:
            yield f"  {len(failed)} failed, the first: {failed[0].tiles}: {failed[0].failure}"


def to_json(trials: Mapping[Job, Sequence[Trial]]) -> str:
    """Write everything that was tried."""
    record = {
        f"{job.kind} d={job.dim} {job.dtype}": [asdict(trial) for trial in tried] for job, tried in trials.items()
    }
    return json.dumps(record, indent=1)


def write(new: Sequence[dict[str, object]], path: Path, target: str | None = None) -> None:
    """Write rows into a target's table, in the place of older ones for the same kernel, dims and item size.

    Args:
        new: what `rows` gave. path: the table, which need not be there. target: None = this machine's GPU.
    """
    target = target or detect.detect().target
    old: list[dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []

    def key(row: dict[str, object]) -> tuple[object, ...]:
        return tuple(row[name] for name in ("kind", "dim_qk", "dim_v", "itemsize"))

    replaced = {key(row) for row in new}
    kept = [row for row in old if key(row) not in replaced]
    ordered = sorted([*kept, *new], key=lambda row: tuple(map(str, key(row))))
    lines = ",\n".join("  " + json.dumps(row) for row in ordered)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"target": "{target}", "rows": [\n{lines}\n]}}\n', encoding="utf-8")
