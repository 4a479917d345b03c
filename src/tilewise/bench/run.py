"""The benchmark itself: what is run, in which order, and what becomes of what cannot be run.

For each length, shortest first, and each direction: rows that would not fit in memory or time are set aside with the
number; then each implementation runs once, which gives its peak memory, its error and a first idea of its time; those
that keep the error budget are timed in rounds that take turns.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tilewise.bench import memory
from tilewise.bench.cases import DTYPES, Case
from tilewise.bench.clock import Stopwatch, spread
from tilewise.bench.implementations import Implementation, Pass, Run, implementations, plan
from tilewise.bench.judge import ORACLE_BYTES, Judge
from tilewise.bench.plan import Budget, admit, round_seconds, rounds
from tilewise.bench.provenance import provenance
from tilewise.bench.real_input import agreement
from tilewise.bench.report import Report, Row, TensorError
from tilewise.machine import detect
from tilewise.machine.device import GIB, MIB
from tilewise.testing import Error

Tell = Callable[[str, float], None]  # what is being done, and how much of the whole is done

ROUND_SECONDS = 0.05  # that a round gives to a run which is shorter
WARM_SECONDS = 0.5  # a run shorter than that is warmed up before it is measured for the first time
_CPU_SCORES, _GPU_SCORES = 2**23, 2**25  # what the oracle looks at, at the most
STEADY = 1.2  # a roof that rises by more than that was measured on a busy machine
_FAILURES = (RuntimeError, MemoryError, ValueError, TypeError, NotImplementedError, ArithmeticError)


@dataclass(frozen=True)
class Settings:
    """What to measure and how much it may take.

    Args:
        device, dtype: where, and in what.
        lengths: of queries and keys alike.
        batch, heads_q, heads_kv, dim: the other sizes.
        causal, window, alibi: as in `Case`.
        backward: measure the backward pass too.
        only: names or families to run; empty: all that fit the device.
        seconds: for everything.
        memory: bytes for everything, inputs and all.
        seed: of the data.
    """

    device: str
    dtype: str
    lengths: tuple[int, ...]
    batch: int
    heads_q: int
    heads_kv: int
    dim: int
    causal: bool = False
    window: int | None = None
    alibi: bool = False
    backward: bool = False
    only: tuple[str, ...] = ()
    seconds: float = 300.0
    memory: int = 8 * GIB
    seed: int = 0

    def __post_init__(self) -> None:
        positive: dict[str, float] = {
            "lengths": min(self.lengths, default=0),
            "batch": self.batch,
            "heads": self.heads_q,
        }
        positive |= {"heads-kv": self.heads_kv, "dim": self.dim, "seconds": self.seconds, "memory": self.memory}
        for name, value in positive.items():
            if value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads must be a multiple of heads-kv, got {self.heads_q} and {self.heads_kv}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        if self.window is not None and self.window < 0:
            raise ValueError(f"window counts the keys to each side, 0 or more; got {self.window}")

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The directions to measure."""
        return ("forward", "backward") if self.backward else ("forward",)

    def case(self, length: int) -> Case:
        """Give the problem at a length."""
        return Case(
            length,
            self.batch,
            self.heads_q,
            self.heads_kv,
            self.dim,
            self.dtype,
            self.device,
            self.causal,
            self.window,
            self.alibi,
        )


def default_settings(device: str | None = None, **given: object) -> Settings:
    """Fill in what was not given (None) by what suits the device.

    CPU: B=1, H=8, d=64, float32, lengths 512 to 8192, or 4096 to 16384 where PyTorch needs a dense mask; half of the
    free memory. GPU: B=1, H=32, d=128, float16, 512 to 32768; nearly all free memory. Five minutes.

    Raises:
        ValueError: a value out of range, or a device that is not here.
    """
    device = device or detect.best_device()
    detect.detect(device)
    cpu = device == "cpu"
    dense = given.get("window") is not None or bool(given.get("alibi"))
    free = detect.free_memory(device) or 8 * GIB
    heads = given.get("heads_q") or (8 if cpu else 32)
    defaults: dict[str, object] = {
        "dtype": "float32" if cpu else "float16",
        "lengths": ((4096, 8192, 16384) if dense else (512, 1024, 2048, 4096, 8192))
        if cpu
        else (512, 1024, 2048, 4096, 8192, 16384, 32768),
        "batch": 1,
        "heads_q": heads,
        "heads_kv": heads,
        "dim": 64 if cpu else 128,
        "memory": free // 2 if cpu else free * 19 // 20,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return Settings(device=device, **{**defaults, **given})  # type: ignore[arg-type]  # Settings checks the values


def select(settings: Settings, known: Sequence[Implementation]) -> list[Implementation]:
    """Choose implementations by name or family; NumPy's run beside a GPU only when named.

    Raises:
        ValueError: nothing goes by a name.
    """
    if not settings.only:
        return [each for each in known if settings.device == "cpu" or each.meter != "numpy"]
    wanted = [name.lower() for name in settings.only]
    for name in wanted:
        if not any(name in {each.name, each.family} for each in known):
            names = ", ".join(dict.fromkeys(x for each in known for x in (each.family, each.name)))
            raise ValueError(f"only must name some of {names}; got {name!r}")
    return [each for each in known if each.name in wanted or each.family in wanted]


@dataclass
class Bench:
    """One benchmark under way.

    Args:
        settings: what to measure.
        known: the implementations to choose from.
        tell: is told what is being done.
        clock: what tells the time, in a test perhaps a clock of its own.
    """

    settings: Settings
    known: Sequence[Implementation] = field(default_factory=implementations)
    tell: Tell = lambda *_: None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.chosen = select(self.settings, self.known)
        self.watch = Stopwatch(self.settings.device, self.clock)
        self.groups = [
            (length, which) for length in sorted(set(self.settings.lengths)) for which in self.settings.passes
        ]
        floor = 1e9 if self.settings.device == "cpu" else 5e12  # operations that take about as long as what is fixed
        pairs = [self.settings.case(n).shape.size_scores * (3.5 if w == "backward" else 1) for n, w in self.groups]
        weights = [4.0 * self.settings.dim * each + floor for each in pairs]  # untiled forms compute hidden pairs too
        self.budget = Budget(self.settings.seconds, weights, self.clock)
        self._total = sum(weights)
        self._done = [sum(weights[:group]) / self._total for group in range(len(weights) + 1)]
        self._measured: dict[tuple[str, str], float] = {}  # seconds of a run / predicted, at the last length
        self._notes: dict[str, None] = {}

    def run(self) -> Report:
        """Measure everything and give the report."""
        if self.settings.device.startswith("cuda"):
            with torch.cuda.device(self.settings.device):
                return self._run()
        return self._run()

    def _run(self) -> Report:
        settings = self.settings
        date = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        self.tell("measuring the roof", 0.0)
        rates = detect.measure_rates(settings.device, settings.dtype)
        self.device = rates.on(detect.detect(settings.device))
        self.budget.kept = 2 * self.budget.spent  # the roof is measured again at the end
        self.tell("real input", 0.0)
        real, note = agreement(settings.device, settings.dtype, self.known)
        absent = self._absent()
        rows = [row for group in range(len(self.groups)) for row in self._group(group, absent)]
        self.tell("the roof again", 1.0)
        after = detect.measure_rates(settings.device, settings.dtype)
        if after.matmul > STEADY * rates.matmul or after.bandwidth > STEADY * rates.bandwidth:
            again = f"copy {after.bandwidth / 1e9:,.1f} GB/s, matrix product {after.matmul / 1e12:,.3g} TFLOP/s"
            self._notes[
                f"The machine was busy at first: at the end its roof was {again}, and model ms is too large."
            ] = None
        if settings.backward:
            self._notes["A backward row's time is of the backward pass alone, its memory of both passes."] = None
        environment, command = provenance(settings.device)
        rows = _with_ratios(rows)
        return Report(
            command=command,
            date=date,
            environment=environment,
            settings=_plain(settings),
            roof={
                "bandwidth": rates.bandwidth,
                "matmul": rates.matmul,
                "bandwidth_after": after.bandwidth,
                "matmul_after": after.matmul,
            },
            chosen={which: plan(settings.case(settings.lengths[0]), which).backend for which in settings.passes},
            absent=_by_name(absent, len(settings.passes)),
            rows=tuple(sorted(rows, key=lambda row: (settings.passes.index(row.which), row.length))),
            real_input=real,
            real_input_note=note,
            notes=tuple(self._notes),
            seconds=self.budget.spent,
        )

    def _absent(self) -> dict[tuple[str, Pass], str]:
        """Ask each implementation, once for each direction, whether it is here at all."""
        absent: dict[tuple[str, Pass], str] = {}
        case = self.settings.case(self.settings.lengths[0])
        for each in self.chosen:
            for which in self.settings.passes:
                reason = each.absent(case, which)
                if reason is not None:
                    absent[each.name, which] = reason
        return absent

    # ---- one length, one direction ----

    def _group(self, group: int, absent: Mapping[tuple[str, Pass], str]) -> list[Row]:
        length, which = self.groups[group]
        case = self.settings.case(length)
        present = [each for each in self.chosen if (each.name, which) not in absent]
        rows = {each.name: self._blank(each, case, which) for each in present}
        fitting = self._fitting(present, case, which, rows)
        self._admit(fitting, self.budget.limit(group), rows)
        begun = [each for each in fitting if rows[each.name].status == "ok"]
        if begun:
            try:
                self._measure(group, begun, case, which, rows)
            except _FAILURES as error:  # the data or the oracle, which all rows need
                for each in begun:
                    rows[each.name] = _failed(rows[each.name], error)
            self._free()
        return list(rows.values())

    def _blank(self, each: Implementation, case: Case, which: Pass) -> Row:
        cost = each.predict(case, which)
        seconds = cost.time_floor(self.device, case.dtype)
        return Row(each.name, which, case.length, "ok", predicted=seconds, predicted_memory=cost.memory)

    def _fitting(
        self, present: Sequence[Implementation], case: Case, which: Pass, rows: dict[str, Row]
    ) -> list[Implementation]:
        """Set aside what would not fit in memory, before anything is allocated."""
        limit = self.settings.memory
        always = case.input_bytes * (2 if which == "forward" else 4)  # and what the oracle keeps
        at_once = self._scores(case) * ORACLE_BYTES
        needs = {each.name: always + max(each.need(case, which), at_once) for each in present}
        dense = {each.name: each.dense(case) for each in present}
        # Those who need a dense matrix share it, and it stays while all others run.
        shared = max((size for name, size in dense.items() if needs[name] + size <= limit), default=0)
        fitting = []
        for each in present:
            need = needs[each.name] + max(dense[each.name], shared)
            if need <= limit:
                fitting.append(each)
            else:
                note = f"needs {_size(need)}, {_size(limit)} may be used"
                rows[each.name] = replace(rows[each.name], status="memory", note=note)
        return fitting

    def _admit(self, fitting: Sequence[Implementation], limit: float, rows: dict[str, Row]) -> None:
        """Set aside what would take too long, by what was measured before or, at first, by the model."""
        estimates = {each.name: self._estimate(each, rows[each.name]) for each in fitting}
        for name, need in admit(estimates, limit).items():
            rows[name] = replace(rows[name], status="time", note=self._no_time(need, limit))

    def _no_time(self, need: float, limit: float) -> str:
        left = f"{limit:.0f} s of {self.settings.seconds:.0f} s are left for this length"
        return f"needs about {need:.0f} s with the quicker rows, {left}"

    def _estimate(self, each: Implementation, row: Row) -> float:
        slowness = self._measured.get((each.name, row.which), each.slowness)
        return (row.predicted or 0.0) * slowness

    def _scores(self, case: Case) -> int:
        """Scores that the oracle looks at, within an eighth of the memory."""
        most = _CPU_SCORES if case.device == "cpu" else _GPU_SCORES
        least = 3 * case.batch * case.heads_q * case.length  # three rows of each head
        everything = case.batch * case.heads_q * case.length**2
        return min(max(min(most, self.settings.memory // 8 // ORACLE_BYTES), least), everything)

    def _measure(
        self, group: int, begun: Sequence[Implementation], case: Case, which: Pass, rows: dict[str, Row]
    ) -> None:
        """Check each, then time those that passed."""
        share, limit, start = self.budget.share(group), self.budget.limit(group), self.budget.spent
        self._say(group, 0.0, f"{which} N={case.length}: data and oracle")
        inputs = case.inputs(self.settings.seed)
        judge = Judge(case, inputs, gradients=which == "backward", scores=self._scores(case))
        if judge.share < 1:
            looked = sum(stop - start for start, stop in judge.rows)
            self._notes[f"At N={case.length} errors are of {looked} rows of every head: first, middle and last."] = None
        ready: dict[str, Run] = {}
        once: dict[str, float] = {}
        for index, each in enumerate(begun):
            self._say(group, 0.3 * index / len(begun), f"{which} N={case.length}: checking {each.name}")
            try:
                run = each.prepare(case, inputs)
                rows[each.name], once[each.name] = self._check(each, run, judge, rows[each.name])
            except _FAILURES as error:
                rows[each.name] = _failed(rows[each.name], error)
            else:
                predicted = rows[each.name].predicted or 0.0
                self._measured[each.name, which] = once[each.name] / predicted if predicted else each.slowness
                if rows[each.name].status == "ok":
                    ready[each.name] = run
            self._free()
        spent = self.budget.spent - start
        self._time(group, ready, {name: once[name] for name in ready}, share - spent, limit - spent, rows)

    def _check(self, each: Implementation, run: Run, judge: Judge, row: Row) -> tuple[Row, float]:
        """Run once, warm where that is cheap: peak memory, errors, and the seconds of one run."""
        with run.active():
            warm = self.settings.device != "cpu" or self._estimate(each, row) < WARM_SECONDS
            if warm:
                run.outcome(judge.d_out)
                self.watch.synchronise()

            begin = self.clock()
            outcome, peak = memory.peak(lambda: run.outcome(judge.d_out), self.settings.device, each.meter)
            seconds = self.clock() - begin
            if warm:  # again without the meter, which weighs on short runs
                begin = self.clock()
                run.outcome(judge.d_out)
                self.watch.synchronise()
                seconds = self.clock() - begin
        errors = tuple(_tensor_error(name, error) for name, error in judge.measure(outcome).items())
        wrong = [error for error in errors if not error.within]
        note = "; ".join(_excess(error) for error in wrong)
        held = None if peak is None else peak + run.prepared_bytes
        row = replace(row, errors=errors, memory=held, dense=run.prepared_bytes, note=note)
        return (replace(row, status="wrong") if wrong else row), seconds

    def _time(
        self,
        group: int,
        ready: Mapping[str, Run],
        once: Mapping[str, float],
        share: float,
        limit: float,
        rows: dict[str, Row],
    ) -> None:
        """Time in interleaved rounds, so that whatever disturbs the machine disturbs all alike."""
        length, which = self.groups[group]
        counts, dropped = rounds(once, ROUND_SECONDS, share, limit)
        for name, need in dropped.items():
            note = f"one run took {once[name]:.2g} s; timing {self._no_time(need, max(limit, 0.0))}"
            rows[name] = replace(rows[name], status="time", note=note)
        times: dict[str, list[float]] = {name: [] for name in counts}
        for turn in range(max(counts.values(), default=0)):
            for name in [name for name, count in counts.items() if turn < count and rows[name].status == "ok"]:
                need = round_seconds(max([once[name], *times[name][-1:]]), ROUND_SECONDS)
                if need > self.budget.left:  # the machine has become slower
                    continue
                done = 0.3 + 0.7 * turn / max(counts.values())
                self._say(group, done, f"{which} N={length}: round {turn + 1}, {name}")
                try:
                    times[name] += self._round(ready[name], which)
                except _FAILURES as error:
                    rows[name] = _failed(rows[name], error)
                    self._free()
        for name in counts:
            if not times[name] and rows[name].status == "ok":
                note = f"the machine has become slower, no time is left; one run took {once[name]:.2g} s"
                rows[name] = replace(rows[name], status="time", note=note)
        work = self.settings.case(length).flops(backward=which == "backward")
        for name, measured in times.items():
            if rows[name].status != "ok":
                continue
            p20, median, p80 = spread(measured)
            rows[name] = replace(
                rows[name], times=tuple(measured), median=median, p20=p20, p80=p80, tflops=work / median / 1e12
            )

    def _round(self, run: Run, which: Pass) -> list[float]:
        with run.active():
            if which == "forward":
                return self.watch.round(run.forward, ROUND_SECONDS)
            run.open_backward()
            try:
                return self.watch.round(run.backward, ROUND_SECONDS)
            finally:
                run.close_backward()

    def _say(self, group: int, part: float, doing: str) -> None:
        begin, end = self._done[group], self._done[group + 1]
        self.tell(doing, begin + part * (end - begin))

    def _free(self) -> None:
        """Give cached GPU memory back, so that one implementation's leavings do not crowd the next."""
        if self.settings.device.startswith("cuda"):
            torch.cuda.empty_cache()


def _with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Set each row's speed against the fastest SDPA row of its length and direction."""
    best: dict[tuple[str, int], float] = {}
    for row in rows:
        if row.name.startswith("sdpa/") and row.median is not None:
            key = row.which, row.length
            best[key] = min(best.get(key, row.median), row.median)
    return [
        row
        if row.median is None or (row.which, row.length) not in best
        else replace(row, ratio=best[row.which, row.length] / row.median)
        for row in rows
    ]


def _by_name(absent: Mapping[tuple[str, Pass], str], passes: int) -> dict[str, str]:
    """Name the direction only where the other one is served, or is refused for another reason."""
    reasons: dict[str, list[tuple[Pass, str]]] = {}
    for (name, which), reason in absent.items():
        reasons.setdefault(name, []).append((which, reason))
    named: dict[str, str] = {}
    for name, found in reasons.items():
        if len(found) == passes and len({reason for _, reason in found}) == 1:
            named[name] = found[0][1]
        else:
            named.update({f"{name} ({which})": reason for which, reason in found})
    return named


def _excess(error: TensorError) -> str:
    """Say by how much a tensor is over its budget: its largest error, or its mean where that alone is too large."""
    if error.max > error.max_budget:
        return f"{error.tensor} is off by {error.max:.1e}, {error.max_budget:.1e} may be"
    return f"{error.tensor} is off by {error.mean:.1e} on average, {error.mean_budget:.1e} may be"


def _tensor_error(name: str, error: Error) -> TensorError:
    return TensorError(name, error.max, error.max_budget, error.mean, error.mean_budget)


def _failed(row: Row, error: BaseException) -> Row:
    """Give a row that says what went wrong; memory that ran out is a status of its own."""
    text = " ".join(str(error).split())[:160]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text:
        return replace(row, status="memory", note=f"ran out of memory: {text or type(error).__name__}")
    return replace(row, status="failed", note=f"{type(error).__name__}: {text}")


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def _plain(settings: Settings) -> dict[str, object]:
    values = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
