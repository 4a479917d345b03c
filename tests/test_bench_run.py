"""What holds of the benchmark's run: what it begins, what it sets aside, how it keeps its time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from tilewise.bench import plan, run, show
from tilewise.bench.cases import Case, Inputs
from tilewise.bench.implementations import Implementation, Outcome, Run, TorchRun, implementations
from tilewise.bench.report import Report, Row
from tilewise.bench.run import Bench, Settings, default_settings
from tilewise.machine import detect
from tilewise.machine.detect import Rates
from tilewise.machine.device import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

KNOWN = {each.name: each for each in implementations()}


def settings(**changes: object) -> Settings:
    values: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "lengths": (32,),
        "batch": 1,
        "heads_q": 2,
        "heads_kv": 2,
        "dim": 16,
        "seconds": 60.0,
        "memory": 4 * GIB,
    }
    return Settings(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes a second and is tested elsewhere: the roof and the real input."""
    monkeypatch.setattr(detect, "measure_rates", lambda *_: Rates("float32", 1e10, 1e11))
    monkeypatch.setattr(run, "ROUND_SECONDS", 0.01)
    monkeypatch.setattr(run, "agreement", lambda *_: ((), ""))


# ---- what becomes of what cannot be run ----


@dataclass
class Broken(TorchRun):
    """A run that raises in place of computing, after so many runs that work."""

    error: type[Exception] = RuntimeError
    text: str = ""
    works: int = 0

    def outcome(self, d_out: torch.Tensor | None) -> Outcome:
        self._work()
        return super().outcome(d_out)

    def forward(self) -> object:
        self._work()
        return super().forward()

    def _work(self) -> None:
        if not self.works:
            raise self.error(self.text)
        self.works -= 1


def broken(error: type[Exception], text: str, works: int = 0) -> Implementation:
    def prepare(case: Case, inputs: Inputs) -> Run:
        sound = KNOWN["naive"].prepare(case, inputs)
        assert isinstance(sound, TorchRun)
        return Broken(sound.function, inputs, error=error, text=text, works=works)

    return replace(KNOWN["naive"], name="peer/broken", prepare=prepare)


def only_row(report: Report, name: str) -> Row:
    (row,) = [row for row in report.rows if row.name == name]
    return row


@pytest.mark.usefixtures("_quick")
def test_an_implementation_that_would_not_fit_is_a_row_with_the_number_and_is_never_begun() -> None:
    def never(case: Case, inputs: Inputs) -> Run:
        raise AssertionError("it was begun")

    greedy = replace(KNOWN["naive"], name="peer/greedy", prepare=never, need=lambda *_: 90 * GIB)
    report = Bench(settings(memory=2 * GIB), (greedy, KNOWN["sdpa/math"])).run()
    row = only_row(report, "peer/greedy")
    assert (row.status, row.note) == ("memory", "needs 90.0 GiB, 2.0 GiB may be used")
    assert row.times == ()
    assert only_row(report, "sdpa/math").status == "ok"
    assert any("peer/greedy" in line and "90.0 GiB" in line for line in "".join(show.footnotes(report)).splitlines())


@pytest.mark.usefixtures("_quick")
def test_a_dense_mask_counts_for_all_who_run_beside_it() -> None:
    heavy = replace(KNOWN["sdpa/math"], need=lambda *_: GIB, dense=lambda _: 2 * GIB)
    beside = replace(KNOWN["naive"], need=lambda *_: 3 * GIB)
    too_heavy = replace(KNOWN["sdpa/flash"], need=lambda *_: GIB, dense=lambda _: 9 * GIB)
    report = Bench(settings(memory=4 * GIB), (heavy, beside, too_heavy)).run()
    told = {row.name: row.note for row in report.rows}
    assert told["sdpa/math"] == ""
    assert told["naive"].startswith("needs 5.0 GiB"), "with the mask that SDPA holds"
    assert told["sdpa/flash"].startswith("needs 10.0 GiB")


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("error", "text", "status"),
    [
        (torch.OutOfMemoryError, "tried to allocate 64 GiB", "memory"),
        (MemoryError, "", "memory"),
        (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes", "memory"),
        (RuntimeError, "no such kernel", "failed"),
        (ValueError, "cannot serve", "failed"),
    ],
)
@pytest.mark.parametrize("works", [0, 5])
def test_what_raises_becomes_a_row_and_the_others_go_on(
    error: type[Exception], text: str, status: str, works: int
) -> None:
    report = Bench(settings(), (broken(error, text, works), KNOWN["sdpa/math"])).run()
    row = only_row(report, "peer/broken")
    assert row.status == status
    assert text in row.note
    assert row.note
    assert row.median is None
    assert only_row(report, "sdpa/math").median is not None


@pytest.mark.usefixtures("_quick")
def test_data_that_do_not_fit_are_no_crash_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(case: Case, seed: int) -> Inputs:
        raise torch.OutOfMemoryError("tried to allocate 64 GiB")

    monkeypatch.setattr(Case, "inputs", full)
    report = Bench(settings(), (KNOWN["naive"], KNOWN["tilewise/torch_tiled"])).run()
    assert [row.status for row in report.rows] == ["memory", "memory"]


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("backward", [False, True])
def test_who_exceeds_the_error_budget_is_shown_and_never_timed(backward: bool) -> None:
    timed = []

    @dataclass
    class Watched(TorchRun):
        def forward(self) -> object:
            timed.append("forward")
            return super().forward()

        def backward(self) -> object:
            timed.append("backward")
            return super().backward()

    def prepare(case: Case, inputs: Inputs) -> Run:
        sound = KNOWN["naive"].prepare(case, inputs)
        assert isinstance(sound, TorchRun)

        def rounded(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: bool
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return sound.function(q.half().float(), k, v, lse)

        return Watched(rounded, inputs)

    careless = replace(KNOWN["naive"], name="tilewise/careless", prepare=prepare)
    report = Bench(settings(backward=backward), (careless, KNOWN["sdpa/math"])).run()
    rows = [row for row in report.rows if row.name == "tilewise/careless"]
    assert [row.status for row in rows] == ["wrong"] * (1 + backward)
    assert all(row.median is None and row.times == () and row.worst is not None for row in rows)
    assert all("is off by" in row.note for row in rows)
    assert timed == []
    assert not report.sound
    cells = show.rows_table(report, "forward").rows[0]
    assert cells[1:4] == ("tilewise/careless", "WRONG", "")


# ---- time ----


class FakeClock:
    """Tells a time that passes only when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Worker:
    """A run that takes the seconds it is told to, and gives right answers."""

    clock: FakeClock
    seconds: float
    sound: Run
    prepared_bytes: int = 0

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def forward(self) -> object:
        self.clock.now += self.seconds
        return None

    def open_backward(self) -> None:
        self.clock.now += self.seconds

    def backward(self) -> object:
        self.clock.now += 2.5 * self.seconds
        return None

    def close_backward(self) -> None:
        pass

    def outcome(self, d_out: torch.Tensor | None) -> Outcome:
        self.clock.now += self.seconds * (1 if d_out is None else 3.5)
        return self.sound.outcome(d_out)


def working(clock: FakeClock, name: str, at_64: float) -> Implementation:
    """Make an implementation that takes so many seconds at length 64, and grows with the square."""

    def prepare(case: Case, inputs: Inputs) -> Run:
        return Worker(clock, at_64 * (case.length / 64) ** 2, KNOWN["naive"].prepare(case, inputs))

    return replace(KNOWN["naive"], name=name, prepare=prepare)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("speed", [0.01, 0.3, 3.0, 40.0])
def test_five_minutes_are_kept_and_what_is_dropped_for_them_says_so(speed: float, backward: bool) -> None:
    clock = FakeClock()
    names = {"sdpa/quick": speed / 3, "tilewise/middling": speed, "numpy/slow": 4 * speed}
    known = [working(clock, name, at_64) for name, at_64 in names.items()]
    report = Bench(settings(lengths=(64, 128, 256), seconds=300.0, backward=backward), known, clock=clock).run()
    # The first length's rows are begun on the model's word alone, so that one run of each may come too many.
    assert clock.now <= 300 + (sum(names.values()) * 3.5 if speed > 10 else 0)
    assert len(report.rows) == 9 * (1 + backward)
    dropped = [row for row in report.rows if row.status == "time"]
    assert all(" s of 300 s are left for this length" in row.note and row.times == () for row in dropped)
    if speed == 0.01:
        assert dropped == []
    if speed == 0.3:
        assert {row.name for row in dropped} <= {"tilewise/middling", "numpy/slow"}
        assert clock.now > 80, "time that is there is used"
    if speed >= 3:
        assert ("numpy/slow", 256) in {(row.name, row.length) for row in dropped}


@pytest.mark.usefixtures("_quick")
def test_a_machine_that_becomes_slower_does_not_break_the_plan() -> None:
    clock = FakeClock()

    class Slowing(Worker):
        def forward(self) -> object:
            self.seconds *= 1.6
            return super().forward()

    def slowing(name: str) -> Implementation:
        def prepare(case: Case, inputs: Inputs) -> Run:
            return Slowing(clock, 0.5, KNOWN["naive"].prepare(case, inputs))

        return replace(KNOWN["naive"], name=name, prepare=prepare)

    report = Bench(settings(seconds=60.0), [slowing("peer/a"), slowing("peer/b")], clock=clock).run()
    assert clock.now < 75, "the last run begun may come too late, no other"
    assert {row.status for row in report.rows} == {"ok"}


@pytest.mark.usefixtures("_quick")
def test_what_is_slow_only_the_first_time_is_timed_all_the_same() -> None:
    clock = FakeClock()

    class Compiled(Worker):
        def outcome(self, d_out: torch.Tensor | None) -> Outcome:
            clock.now, self.cold = clock.now + self.cold, 0.0
            return super().outcome(d_out)

        cold = 2.0

    def compiled(name: str) -> Implementation:
        def prepare(case: Case, inputs: Inputs) -> Run:
            return Compiled(clock, 0.001, KNOWN["naive"].prepare(case, inputs))

        return replace(KNOWN["naive"], name=name, prepare=prepare)

    known = [compiled(f"peer/{letter}") for letter in "abcde"]
    report = Bench(settings(lengths=(16, 32, 64, 128), seconds=100.0), known, clock=clock).run()
    assert {row.status for row in report.rows} == {"ok"}


@pytest.mark.usefixtures("_quick")
def test_rounds_take_turns() -> None:
    clock, order = FakeClock(), []

    class Turn(Worker):
        def forward(self) -> object:
            order.append(self.seconds)
            return super().forward()

    def turning(name: str, seconds: float) -> Implementation:
        def prepare(case: Case, inputs: Inputs) -> Run:
            return Turn(clock, seconds, KNOWN["naive"].prepare(case, inputs))

        return replace(KNOWN["naive"], name=name, prepare=prepare)

    report = Bench(settings(), [turning("peer/a", 1.0), turning("peer/b", 1.5)], clock=clock).run()
    turns = [each for index, each in enumerate(order) if index == 0 or each != order[index - 1]]
    assert turns[:6] == [1.0, 1.5] * 3
    assert order.count(1.0) > order.count(1.5), "what is quick takes part in more rounds"
    assert only_row(report, "peer/a").median == 1.0


def test_with_little_time_the_quickest_are_kept() -> None:
    dropped = plan.admit({"a": 1.0, "b": 100.0, "c": 2.0}, left=30.0)
    assert set(dropped) == {"b"}
    counts, late = plan.rounds({"a": 1.0, "c": 50.0}, 0.05, share=15.0, left=20.0)
    assert (counts, set(late)) == ({"a": 6}, {"c"})


@pytest.mark.usefixtures("_quick")
def test_ratios_stand_against_sdpas_fastest_kernel() -> None:
    clock = FakeClock()
    known = [working(clock, n, s) for n, s in (("sdpa/a", 0.2), ("sdpa/b", 0.1), ("tilewise/x", 0.05), ("naive", 0.4))]
    report = Bench(settings(lengths=(64,)), known, clock=clock).run()
    ratios = {row.name: round(row.ratio or 0, 3) for row in report.rows}
    assert ratios == {"sdpa/a": 0.5, "sdpa/b": 1.0, "tilewise/x": 2.0, "naive": 0.25}
    cells = {row[1]: row[5] for row in show.rows_table(report, "forward").rows}
    assert cells == {"sdpa/a": "0.50", "sdpa/b": "best", "tilewise/x": "2.00", "naive": "0.25"}


# ---- settings ----


def test_a_window_asks_for_the_lengths_at_which_a_dense_mask_hurts() -> None:
    assert default_settings("cpu").lengths == (512, 1024, 2048, 4096, 8192)
    assert default_settings("cpu", window=256).lengths == (4096, 8192, 16384)
    assert default_settings("cpu", window=256, lengths=(64,)).lengths == (64,)


def test_half_of_the_free_memory_is_what_a_cpu_may_use() -> None:
    free = detect.free_memory("cpu")
    assert free is not None
    assert default_settings("cpu").memory == pytest.approx(free / 2, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ()}, "lengths must be above 0"),
        ({"lengths": (0,)}, "lengths must be above 0"),
        ({"heads_q": 8, "heads_kv": 3}, "heads must be a multiple of heads-kv, got 8 and 3"),
        ({"seconds": -1.0}, "seconds must be above 0"),
        ({"dtype": "int8"}, "dtype must be one of float16"),
        ({"window": -1}, "window counts"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_names_and_families_choose_and_unknown_ones_are_refused() -> None:
    known = tuple(KNOWN.values())

    def names(only: Sequence[str], device: str = "cpu") -> set[str]:
        chosen = run.select(replace(settings(only=tuple(only)), device=device), known)
        return {each.name for each in chosen}

    assert names(["SDPA/flash", "naive"]) == {"sdpa/flash", "naive"}
    assert names(["numpy"]) == {"numpy/naive", "numpy/tiled"}
    assert names([]) == set(KNOWN)
    assert names([], "cuda") == {name for name in KNOWN if not name.startswith("numpy/")}
    assert names(["numpy/tiled"], "cuda") == {"numpy/tiled"}
    with pytest.raises(ValueError, match=r"only must name some of naive, sdpa.*got 'flash'"):
        names(["flash"])
