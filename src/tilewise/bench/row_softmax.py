"""The row softmax beside what else can compute it, and beside a plain copy: no softmax is faster than that.

Every implementation is first held to the error budget on some rows, then timed in rounds that take turns. GB/s counts
every tensor once, read or written. Needs neither typer nor rich, but for `table`.
"""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch

from tilewise import api, dispatch
from tilewise.bench.clock import Stopwatch, spread
from tilewise.bench.provenance import provenance
from tilewise.machine import detect
from tilewise.testing import error

if TYPE_CHECKING:
    from tilewise.bench.show import Table

Pass = Literal["forward", "backward"]
Run = Callable[[], torch.Tensor]
Tell = Callable[[str, float], None]
More = Callable[[Pass, Sequence[torch.Tensor]], Mapping[str, Run]]

GPU_SHAPES = ((131072, 256), (8192, 1024), (8192, 4096), (8192, 16384), (8192, 32768), (4096, 65536), (1024, 262144))
CPU_SHAPES = ((8192, 256), (2048, 1024), (512, 4096), (128, 16384), (32, 65536))
DTYPES = ("float16", "bfloat16", "float32", "float64")
COPY, EAGER = "copy", "eager"
JUDGED_ROWS = 64
ROUNDS, ROUND_SECONDS = 5, 0.02
ROOM = 8  # tensors of the data's size that there must be room for
COLUMNS = ("rows x columns", "implementation", "us", "20-80 %", "GB/s", "of the copy", "error", "budget")


@dataclass(frozen=True)
class Settings:
    """What to measure; shapes are (rows, columns)."""

    device: str
    dtype: str
    shapes: tuple[tuple[int, int], ...]
    backward: bool = False
    only: tuple[str, ...] = ()
    seconds: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        if self.seconds <= 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")
        for rows, cols in self.shapes:
            if rows < 1 or cols < 1:
                raise ValueError(f"shapes must be rows x columns, both above 0; got {rows}x{cols}")

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The directions to measure."""
        return ("forward", "backward") if self.backward else ("forward",)


def default_settings(device: str | None = None, **given: object) -> Settings:
    """Fill in what was not given (None): float16 and long rows on a GPU, float32 and less data on a CPU.

    Raises:
        ValueError: a value out of range, or a device that is not here.
    """
    device = device or detect.best_device()
    detect.detect(device)
    cpu = device == "cpu"
    defaults = {"dtype": "float32" if cpu else "float16", "shapes": CPU_SHAPES if cpu else GPU_SHAPES}
    return Settings(device, **{**defaults, **{k: v for k, v in given.items() if v is not None}})  # type: ignore[arg-type]


def parse_shape(text: str) -> tuple[int, int]:
    """Read "8192x4096".

    Raises:
        ValueError: it is something else.
    """
    rows, _, cols = text.strip().partition("x")
    if not (rows.isdecimal() and cols.isdecimal()):
        raise ValueError(f"shapes must be rows x columns, such as 8192x4096; got {text!r}")
    return int(rows), int(cols)


@dataclass(frozen=True)
class Row:
    """One implementation on one shape in one direction; times in seconds, None where it was not timed."""

    name: str
    which: Pass
    rows: int
    cols: int
    size: int
    note: str = ""
    p20: float | None = None
    median: float | None = None
    p80: float | None = None
    of_copy: float | None = None
    error: float | None = None
    budget: float | None = None
    within: bool = True
    failed: bool = False

    def to_json(self) -> dict[str, object]:
        """Write its figures."""
        found: dict[str, object] = {}
        if self.median is not None and self.p20 is not None and self.p80 is not None:
            found["GB/s"] = float(f"{self.size / self.median / 1e9:.4g}")
            found |= {f"{name} us": round(getattr(self, name) * 1e6, 2) for name in ("median", "p20", "p80")}
        if self.of_copy is not None:
            found["of the copy"] = round(self.of_copy, 3)
        if self.error is not None:
            found |= {"max error": self.error, "budget": self.budget, "within": self.within}
        return found | ({"note": self.note} if self.note else {})


@dataclass(frozen=True)
class Report:
    """Everything that was found, and where."""

    command: str
    date: str
    environment: Mapping[str, object]
    settings: Settings
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """True where tilewise ran and kept its budget everywhere."""
        ours = [row for row in self.rows if row.name.startswith("tilewise/")]
        return all(row.within and row.median is not None for row in ours)

    def to_json(self) -> str:
        """Write all of it."""
        results: dict[str, dict[str, object]] = {}
        for row in self.rows:
            results.setdefault(f"{row.which} {row.rows}x{row.cols}", {})[row.name] = row.to_json()
        head = {"command": self.command, "date": self.date, "dtype": self.settings.dtype}
        return json.dumps({**head, **self.environment, "results": results, "notes": self.notes}, indent=1)


# ---- what is set side by side ---------------------------------------------------------------------------------------


def eager(x: torch.Tensor) -> torch.Tensor:
    """Compute the softmax as five operators: each reads and writes main memory."""
    row_max = x.amax(-1, keepdim=True)
    score = x - row_max
    p = torch.exp(score)
    row_sum = p.sum(-1, keepdim=True)
    return p / row_sum


def eager_backward(p: torch.Tensor, dp: torch.Tensor) -> torch.Tensor:
    """Compute the gradient as four operators."""
    terms = p * dp
    delta = terms.sum(-1, keepdim=True)
    return p * (dp - delta)


def implementations(which: Pass, tensors: Sequence[torch.Tensor]) -> dict[str, Run]:
    """Give what computes a softmax of (x,), or the gradient from (p, dp), and first a copy of the same traffic."""
    ours = "tilewise/torch_ops" if dispatch.softmax_kernels(tensors[0]) is None else "tilewise/triton_softmax"
    if which == "forward":
        (x,) = tensors
        return {
            COPY: x.clone,
            ours: lambda: api.softmax(x),
            "torch.softmax": lambda: torch.softmax(x, -1),
            EAGER: lambda: eager(x),
            "torch.compile": lambda: _compiled(eager, x)(x),
        }
    p, dp = tensors
    ds = torch.empty_like(p)
    theirs = torch.ops.aten._softmax_backward_data  # noqa: SLF001  # what autograd calls
    return {
        COPY: lambda: torch.add(p, dp, out=ds),  # reads two tensors and writes one, as the gradient does
        ours: lambda: dispatch.softmax_backward(p, dp, -1),
        "torch.softmax": lambda: theirs(dp, p, -1, p.dtype),
        EAGER: lambda: eager_backward(p, dp),
        "torch.compile": lambda: _compiled(eager_backward, p)(p, dp),
    }


_graphs: dict[tuple[object, ...], Callable[..., torch.Tensor]] = {}


def _compiled(function: Callable[..., torch.Tensor], x: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Give a function compiled by torch for one shape alone."""
    key = (function, x.shape, x.dtype, x.device)
    if key not in _graphs:
        torch.compiler.reset()  # past some number of shapes it would compile no more
        _graphs.clear()
        _graphs[key] = torch.compile(function, dynamic=False)
    return _graphs[key]


def chosen(settings: Settings, runs: Mapping[str, Run]) -> dict[str, Run]:
    """Take the copy, and what was asked for by name or family.

    Raises:
        ValueError: nothing goes by a name.
    """
    if not settings.only:
        return dict(runs)
    families = {name: name.partition("/")[0] for name in runs}
    for name in settings.only:
        if name not in {*runs, *families.values()}:
            raise ValueError(f"only must name some of {', '.join(dict.fromkeys(families.values()))}; got {name!r}")
    return {name: run for name, run in runs.items() if {name, families[name]} & {COPY, *settings.only}}


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """One benchmark under way.

    Args:
        settings: what to measure.
        tell: is told what is being done, and the share of it that is done.
        more: gives further implementations, such as other tilings of ours.
    """

    settings: Settings
    tell: Tell = lambda *_: None
    more: More = lambda *_: {}
    notes: list[str] = field(default_factory=list)

    def run(self) -> Report:
        """Measure everything and give the report."""
        settings, rows = self.settings, []
        date = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        watch = Stopwatch(settings.device)
        groups = [(shape, which) for which in settings.passes for shape in settings.shapes]
        begin = time.perf_counter()
        for number, ((size_rows, size_cols), which) in enumerate(groups):
            self.tell(f"{which} {size_rows}x{size_cols}", number / len(groups))
            reason = self._obstacle(size_rows * size_cols, time.perf_counter() - begin)
            if reason:
                self.notes.append(f"{which} {size_rows}x{size_cols}: not measured: {reason}")
            else:
                rows += list(self._group(watch, which, size_rows, size_cols))
        environment, command = provenance(settings.device)
        return Report(command, date, environment, settings, tuple(rows), tuple(self.notes))

    def _obstacle(self, elements: int, spent: float) -> str:
        if spent > self.settings.seconds:
            return f"the {self.settings.seconds:.0f} s are over"
        need = ROOM * elements * getattr(torch, self.settings.dtype).itemsize
        free = detect.free_memory(self.settings.device)
        return f"needs {need / 2**30:.1f} GiB of memory" if free is not None and need > free else ""

    def _group(self, watch: Stopwatch, which: Pass, rows: int, cols: int) -> Iterator[Row]:
        """Judge and time everything on one shape in one direction."""
        settings = self.settings
        dtype: torch.dtype = getattr(torch, settings.dtype)
        torch.manual_seed(settings.seed)
        x = torch.randn(rows, cols, device=settings.device).to(dtype)
        tensors = (x,) if which == "forward" else (torch.softmax(x, -1), x)
        size = (len(tensors) + 1) * x.numel() * x.element_size()
        runs = chosen(settings, implementations(which, tensors)) | dict(self.more(which, tensors))
        found = {name: Row(name, which, rows, cols, size) for name in runs}
        judge = Judge(which, tensors)
        found |= {name: judge.hold(found[name], run) for name, run in runs.items() if name != COPY}
        # The eager version is shown whatever its rounding: it is what the others are measured against.
        timed = {name: run for name, run in runs.items() if found[name].within or name == EAGER}
        timed = {name: run for name, run in timed.items() if not found[name].failed}
        times: dict[str, list[float]] = {name: [] for name in timed}
        for turn in range(ROUNDS):
            for name in list(timed)[:: -1 if turn % 2 else 1]:
                times[name] += watch.round(timed[name], ROUND_SECONDS)
        copy = spread(times[COPY]).median
        for name, row in found.items():
            around = spread(times[name]) if name in times else None
            yield row if around is None else replace(row, **around._asdict(), of_copy=copy / around.median)


class Judge:
    """The oracle in float64 on the first and the last rows, and what the dtype itself loses."""

    def __init__(self, which: Pass, tensors: Sequence[torch.Tensor]) -> None:
        few = [self._sample(x) for x in tensors]
        exact = [x.double() for x in few]
        if which == "forward":
            self._ref, self._low = torch.softmax(exact[0], -1), torch.softmax(few[0], -1)
        else:
            theirs = torch.ops.aten._softmax_backward_data  # noqa: SLF001  # what autograd calls
            self._ref, self._low = eager_backward(*exact), theirs(few[1], few[0], -1, few[0].dtype)
        dtype = tensors[0].dtype
        self._eps = torch.finfo(dtype).eps
        self._terms = tensors[0].shape[-1] ** 0.5 if dtype == torch.float64 else 0.0  # then the oracle rounds too

    @staticmethod
    def _sample(x: torch.Tensor) -> torch.Tensor:
        """Take rows to the CPU, since some GPUs have no float64."""
        half = JUDGED_ROWS // 2
        return (x if len(x) <= JUDGED_ROWS else torch.cat((x[:half], x[-half:]))).cpu()

    def hold(self, row: Row, run: Run) -> Row:
        """Run an implementation once and give the row with its error, or with why it does not run here."""
        try:
            got = self._sample(run())
        except Exception as failure:  # noqa: BLE001  # whatever it is, it is a row that says so
            text = " ".join(f"{type(failure).__name__}: {failure}".split())
            return replace(row, failed=True, note=f"does not run: {text[:160]}")
        found = error(got, self._ref, self._low, self._eps, self._terms)
        note = "" if found.within else "over its error budget"
        return replace(row, error=found.max, budget=found.max_budget, within=found.within, note=note)


# ---- showing --------------------------------------------------------------------------------------------------------


def cells(row: Row) -> tuple[str, ...]:
    """Write a row, under `COLUMNS`."""
    shape = f"{row.rows} x {row.cols}"
    judged = ("", "") if row.error is None or row.budget is None else (f"{row.error:.1e}", f"{row.budget:.1e}")
    if row.median is None or row.p20 is None or row.p80 is None or row.of_copy is None:
        return (shape, row.name, "WRONG" if not row.within else "failed", "", "", "", *judged)
    us, p20, p80 = (f"{seconds * 1e6:,.1f}" for seconds in (row.median, row.p20, row.p80))
    rate = f"{row.size / row.median / 1e9:,.1f}"
    return shape, row.name, us, f"{p20}-{p80}", rate, f"{row.of_copy:.2f}", *judged


def footnotes(report: Report) -> str:
    """Say what did not fit in a cell."""
    lines = [f"{row.which} {row.rows}x{row.cols} {row.name}: {row.note}" for row in report.rows if row.note]
    lines.append(
        "us: median, and 20th to 80th percentile, of interleaved rounds. GB/s: every tensor counted once, read or "
        "written. error: the largest against float64, on the first and last rows, beside what it may be. eager: five "
        "operators forward, four backward. The copy of a backward pass is an addition, with the same traffic."
    )
    return "\n".join([*lines, *report.notes])


def heading(report: Report) -> str:
    """Say what was measured on what."""
    told = report.environment
    versions = [f"{name} {told[name]}" for name in ("torch", "triton") if told.get(name)]
    where = ", ".join([str(told.get("device")), f"{told.get('threads')} CPU threads", *versions])
    return f"tilewise {told.get('tilewise')} on {where}\nrow softmax, {report.settings.dtype}"


def table(report: Report, which: Pass) -> Table:
    """Set all implementations of one direction side by side."""
    from tilewise.bench.show import Table

    shown = Table(which, COLUMNS)
    before = ""
    for row in (row for row in report.rows if row.which == which):
        shape, *others = cells(row)
        if before and shape != before:
            shown.gap()
        shown.add("" if shape == before else shape, *others)
        before = shape
    return shown
