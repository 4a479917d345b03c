"""Measure against the model: `tilewise measure`.

On a GPU each implementation runs under Nsight Compute, and the bytes that main memory moved stand between the least
that the model allows (each operand once) and the most (every reload a miss). On a CPU no counter tells bytes; there the
peak memory and the time of NumPy's two forms stand beside what the model says of them, length by length.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from tilewise.bench import memory
from tilewise.bench.cases import DTYPES, Case
from tilewise.bench.clock import Stopwatch, spread
from tilewise.bench.implementations import Pass, Run
from tilewise.bench.judge import Judge
from tilewise.bench.provenance import provenance
from tilewise.bench.show import Table, mebibytes, milliseconds, three
from tilewise.lab import roofline
from tilewise.lab.bounds import Bounds, bounds
from tilewise.lab.counters import CountersError, Kernel, Ncu, find_ncu
from tilewise.lab.plot import Plot
from tilewise.lab.probe import named, specification
from tilewise.lab.roofline import Point
from tilewise.machine import detect
from tilewise.machine.device import Device

Tell = Callable[[str, float], None]

GPU_NAMES = ("naive", "sdpa/flash", "sdpa/efficient", "sdpa/cudnn", "tilewise/hopper", "tilewise/triton_portable")
CPU_NAMES = ("numpy/naive", "numpy/tiled")
CPU_LENGTHS = (512, 1024, 2048, 4096)
SECONDS = 0.2  # that a row is timed
_FAILURES = (RuntimeError, MemoryError, ValueError, TypeError, NotImplementedError, ArithmeticError)


@dataclass(frozen=True)
class Row:
    """One implementation, one direction, one length, as predicted and as measured; None where it was not.

    Args:
        seconds: median of a run; floor: the least by the model on the measured roof.
        read, written: bytes of main memory; loads: bytes that multiprocessors loaded. memory: bytes at the peak.
        kernels: what the counters said of each kernel.
        note: why something is missing or unusual.
    """

    name: str
    which: str
    length: int
    bounds: Bounds
    floor: float
    seconds: float | None = None
    read: float | None = None
    written: float | None = None
    loads: float | None = None
    memory: int | None = None
    kernels: tuple[Kernel, ...] = ()
    note: str = ""

    @property
    def moved(self) -> float | None:
        """Bytes of main memory, both ways, as counted."""
        return None if self.read is None or self.written is None else self.read + self.written

    @property
    def verdict(self) -> str:
        """Say where the bytes counted stand between the bounds; "" where none were counted."""
        if self.moved is None:
            return ""
        if self.moved < self.bounds.least:
            return "BELOW"
        return "inside" if self.moved <= self.bounds.worst else "ABOVE"

    @property
    def point(self) -> Point | None:
        """Its place below the roof: by the bytes counted, else by the model's best case."""
        moved = self.moved or self.bounds.best
        if self.seconds is None or not moved:
            return None
        return Point(self.name, self.bounds.flops / moved, self.bounds.flops / self.seconds)


@dataclass(frozen=True)
class Report:
    """Everything one command found, and where."""

    command: str
    date: str
    environment: Mapping[str, object]
    case: Mapping[str, object]
    roof: Mapping[str, float]
    sheet: Mapping[str, float | None]
    rows: tuple[Row, ...]
    absent: Mapping[str, str]
    notes: tuple[str, ...] = field(default=())

    @property
    def sound(self) -> bool:
        """True where no row failed, and all bytes that were counted stand inside the bounds."""
        return all(row.seconds is not None and row.verdict in {"", "inside"} for row in self.rows)

    def to_json(self) -> str:
        """Write all of it."""
        record = asdict(self)
        for entry, row in zip(record["rows"], self.rows, strict=True):
            entry["verdict"] = row.verdict
        return json.dumps(record, indent=1)


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Measurement:
    """One command under way.

    Args:
        cases: what to run, one for each length.
        names: the implementations. passes: the directions.
        ncu: counts bytes; None: there is no counter, for the reason ``uncounted``.
    """

    cases: Sequence[Case]
    names: Sequence[str]
    passes: Sequence[Pass]
    ncu: Ncu | None = None
    uncounted: str = ""
    tell: Tell = lambda _text, _share: None

    def run(self) -> Report:
        """Run everything."""
        device = self.cases[0].device
        date = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        self.tell("copy and matrix rates", 0.0)
        rates = detect.measure_rates(device, self.cases[0].dtype)
        sheet = detect.detect(device)
        here = rates.on(sheet)
        rows: list[Row] = []
        absent: dict[str, str] = {}
        work = [(case, which, name) for case in self.cases for which in self.passes for name in self.names]
        for number, (case, which, name) in enumerate(work):
            self.tell(f"{which} N={case.length} {name}", number / len(work))
            reason = named(name).absent(case, which)
            if reason is None:
                rows.append(self._row(name, case, which, here))
            else:
                absent[f"{name} ({which})"] = reason
        environment, command = provenance(device)
        notes = [self.uncounted] * bool(self.uncounted) + (self.ncu.missing() if self.ncu else []) + _busy()
        return Report(
            command=command,
            date=date,
            environment=environment,
            case=asdict(self.cases[0]),
            roof={"bandwidth": rates.bandwidth, "matmul": rates.matmul},
            sheet={"bandwidth": sheet.bandwidth, "matmul": sheet.rates.get(self.cases[0].dtype)},
            rows=tuple(rows),
            absent=absent,
            notes=tuple(notes),
        )

    def _row(self, name: str, case: Case, which: Pass, here: Device) -> Row:
        implementation = named(name)
        predicted = implementation.predict(case, which)
        told = bounds(name, case, which, here.l2_bytes or 0 if case.device != "cpu" else 0)
        row = Row(name, which, case.length, told, predicted.time_floor(here, case.dtype))
        try:
            run = implementation.prepare(case, case.inputs(0))
            with run.active():
                row = _timed(row, run, case, implementation.meter == "numpy")
            wrong = _wrong(run, case, which)
        except _FAILURES as error:
            return replace(row, note=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
        finally:
            if case.device.startswith("cuda"):
                torch.cuda.empty_cache()
        if wrong:
            return replace(row, seconds=None, note=wrong)
        return row if self.ncu is None else self._counted(row, case)

    def _counted(self, row: Row, case: Case) -> Row:
        """Count the bytes of a row in a process of its own, under the tool."""
        if self.ncu is None:
            return row
        program = sys.executable, "-m", "tilewise.lab.probe", specification(row.name, row.which, case)
        try:
            kernels = self.ncu.count(*program)
        except CountersError as error:
            return replace(row, note=str(error))
        return replace(
            row,
            read=_sum([kernel.read for kernel in kernels]),
            written=_sum([kernel.written for kernel in kernels]),
            loads=_sum([kernel.loads for kernel in kernels]),
            kernels=tuple(kernels),
        )


def _timed(row: Row, run: Run, case: Case, with_numpy: bool) -> Row:
    """Take the peak memory of one run and the median time of several."""
    backward = row.which == "backward"
    if backward:
        run.open_backward()
    work = run.backward if backward else run.forward
    work()
    _, peak = memory.peak(work, case.device, "numpy" if with_numpy else "torch")
    times = Stopwatch(case.device).round(work, SECONDS)
    if backward:
        run.close_backward()
    return replace(row, seconds=spread(times).median, memory=peak)


def _wrong(run: Run, case: Case, which: Pass) -> str:
    """Hold a run to the error budget on some rows; say what is wrong, or ""."""
    judge = Judge(case, case.inputs(0), gradients=which == "backward", scores=2**21)
    with run.active():
        found = judge.measure(run.outcome(judge.d_out))
    return "; ".join(
        f"{name} is off by {error.max:.1e}, {error.max_budget:.1e} may be"
        for name, error in found.items()
        if not error.within
    )


def _busy() -> list[str]:
    """Say so where others keep the machine busy: the threads of a matrix product then wait for each other."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cores = os.cpu_count() or 1
    if load < cores:
        return []
    return [f"The machine is busy (load {load:.1f} on {cores} cores): times are longer than they need be."]


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) and values else None


# ---- asking for it --------------------------------------------------------------------------------------------------


def cases(
    device: str | None,
    *,
    lengths: Sequence[int] | None = None,
    dim: int | None = None,
    batch: int = 1,
    heads_q: int | None = None,
    heads_kv: int | None = None,
    dtype: str | None = None,
    causal: bool = False,
) -> list[Case]:
    """Fill in what was not given (None) by what suits the device; one case for each length, shortest first.

    Raises:
        ValueError: a size below 1, a dtype or device that is not here.
    """
    device = device or detect.best_device()
    detect.detect(device)
    cpu = device == "cpu"
    heads_q = heads_q if heads_q is not None else 1 if cpu else 16
    heads_kv = heads_q if heads_kv is None else heads_kv
    dim = dim if dim is not None else 64 if cpu else 128
    dtype = dtype or ("float32" if cpu else "bfloat16")
    lengths = sorted(lengths or (CPU_LENGTHS if cpu else (8192,)))
    for name, value in {"n": lengths[0], "d": dim, "batch": batch, "heads": heads_q, "heads-kv": heads_kv}.items():
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    if heads_q % heads_kv:
        raise ValueError(f"heads must be a multiple of heads-kv, got {heads_q} and {heads_kv}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    return [Case(length, batch, heads_q, heads_kv, dim, dtype, device, causal) for length in lengths]


def measure(
    asked: Sequence[Case], *, only: Sequence[str] = (), backward: bool = False, ncu: str | None = None, tell: Tell
) -> Report:
    """Run what was asked for; without a counter of bytes the report says why there is none.

    Raises:
        ValueError: a name that no implementation has.
    """
    on_cpu = asked[0].device == "cpu"
    names = only or (CPU_NAMES if on_cpu else GPU_NAMES)
    for name in names:
        named(name)
    passes: tuple[Pass, ...] = ("forward", "backward") if backward else ("forward",)
    if on_cpu:
        return Measurement(asked, names, passes, None, "no counter tells the bytes of a CPU's memory", tell).run()
    try:
        counter, reason = find_ncu(ncu), ""
    except CountersError as error:
        counter, reason = None, f"bytes are not counted: {error}"
    return Measurement(asked, names, passes, counter, reason, tell).run()


# ---- what is shown --------------------------------------------------------------------------------------------------


def blocks(report: Report) -> Iterator[Table | str]:
    """Yield what a report says: calibration, tables, roofline."""
    yield heading(report)
    on_gpu = report.case["device"] != "cpu"
    for which in dict.fromkeys(row.which for row in report.rows):
        rows = [row for row in report.rows if row.which == which]
        yield bytes_table(rows) if on_gpu else numpy_table(rows)
        yield from _remarks(rows)
        length = rows[-1].length
        points = points_of(rows, length)
        if points:
            drawn = roofline.sketch(points, report.roof["bandwidth"], report.roof["matmul"])
            counted = "" if any(row.moved for row in rows) else ", bytes by the model's best case"
            yield "\n".join([f"roofline, {which}, N={length}{counted}", *drawn])
    yield from (f"not here: {name}: {reason}" for name, reason in report.absent.items())
    yield from report.notes


def points_of(rows: Sequence[Row], length: int) -> list[Point]:
    """Give the points of the rows of one length."""
    return [row.point for row in rows if row.length == length and row.point is not None]


def heading(report: Report) -> str:
    """Say what was measured on what, and how this device's speeds compare with its data sheet."""
    case, roof = report.case, report.roof
    sizes = f"B={case['batch']} H={case['heads_q']} d={case['dim']} {case['dtype']}" + " causal" * bool(case["causal"])
    told = [f"copy {roof['bandwidth'] / 1e9:,.1f} GB/s", f"matrix product {roof['matmul'] / 1e12:,.3g} TFLOP/s"]
    for place, key in enumerate(("bandwidth", "matmul")):
        sheet = report.sheet[key]
        if sheet is not None:
            told[place] += f" ({roof[key] / sheet:.0%} of the data sheet)"
    return f"{report.environment.get('device')}: {sizes}\nmeasured here: {', '.join(told)}"


def bytes_table(rows: Sequence[Row]) -> Table:
    """Set the bytes predicted and counted side by side."""
    columns = (
        "N",
        "implementation",
        "ms",
        "floor",
        "TFLOP/s",
        "best MiB",
        "counted",
        "worst",
        "",
        "loads",
        "most",
        "tiles",
    )
    table = Table(f"{rows[0].which}: main memory, predicted and counted; loads by multiprocessors", columns, (1, 8, 11))
    for row in rows:
        speed = "" if row.seconds is None else three(row.bounds.flops / row.seconds / 1e12)
        table.add(
            str(row.length),
            row.name,
            "" if row.seconds is None else milliseconds(row.seconds),
            milliseconds(row.floor),
            speed,
            mebibytes(row.bounds.best),
            "" if row.moved is None else mebibytes(round(row.moved)),
            mebibytes(row.bounds.worst),
            row.verdict,
            "" if row.loads is None else mebibytes(round(row.loads)),
            mebibytes(row.bounds.loads),
            row.bounds.tiles,
        )
    return table


def numpy_table(rows: Sequence[Row]) -> Table:
    """Set time and peak memory beside the model's, length by length."""
    columns = ("N", "implementation", "ms", "floor ms", "x floor", "peak MiB", "model MiB", "x model", "GFLOP/s")
    table = Table(f"{rows[0].which}: time and peak memory, and what the model says", columns)
    before = rows[0].length
    for row in rows:
        if row.length != before:
            table.gap()
        before = row.length
        seconds, held = row.seconds, row.memory
        table.add(
            str(row.length),
            row.name,
            "" if seconds is None else milliseconds(seconds),
            milliseconds(row.floor),
            "" if seconds is None else three(seconds / row.floor),
            mebibytes(held),
            mebibytes(row.bounds.memory),
            "" if held is None else three(held / row.bounds.memory),
            "" if seconds is None else three(row.bounds.flops / seconds / 1e9),
        )
    return table


def _remarks(rows: Sequence[Row]) -> Iterator[str]:
    """Say what grew how, what stands outside its bounds, and what failed."""
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name and row.memory]
        if len(mine) > 1:
            first, last = mine[0], mine[-1]
            grown = (last.memory or 0) / (first.memory or 1)
            model = last.bounds.memory / first.bounds.memory
            yield (
                f"{name}: {last.length // first.length} times the length takes {three(grown)} times the memory; "
                f"by the model {three(model)} times."
            )
    for row in rows:
        if row.verdict in {"BELOW", "ABOVE"} and row.moved is not None:
            side = row.bounds.least if row.verdict == "BELOW" else row.bounds.worst
            biggest = max(row.kernels, key=lambda kernel: (kernel.read or 0) + (kernel.written or 0))
            share = ((biggest.read or 0) + (biggest.written or 0)) / row.moved
            yield (
                f"N={row.length} {row.name}: {row.verdict} the bound of {mebibytes(side)} MiB by "
                f"{three(abs(row.moved - side) / 2**20)} MiB; {len(row.kernels)} kernels, {share:.0%} of it in "
                f"{biggest.name[:60]}."
            )
        if row.note:
            yield f"N={row.length} {row.name}: {row.note}"


def picture(report: Report) -> Plot:
    """Draw the roofline of the first direction at its last length."""
    first = report.rows[0].which if report.rows else "forward"
    rows = [row for row in report.rows if row.which == first]
    points = points_of(rows, rows[-1].length) if rows else []
    title = f"Roofline, {first}, N={rows[-1].length}" if rows else "Roofline"
    return roofline.plot(title, points, report.roof["bandwidth"], report.roof["matmul"])
