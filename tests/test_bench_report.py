"""What holds of the benchmark's reports: that they last, that they are compared fairly, and what they show."""

from __future__ import annotations

import math
import os
import subprocess
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from tilewise.bench import real_input, run, show
from tilewise.bench.compare import compare
from tilewise.bench.implementations import implementations
from tilewise.bench.provenance import commit
from tilewise.bench.report import Agreement, Report, Row, TensorError
from tilewise.bench.run import Bench, Settings
from tilewise.machine import detect
from tilewise.machine.device import GIB

KNOWN = {each.name: each for each in implementations()}


# ---- reports ----


def report_of(*rows: Row, **changes: object) -> Report:
    values: dict[str, object] = {
        "command": "tilewise bench",
        "date": "2026-01-01T00:00:00+00:00",
        "environment": {"device": "a CPU", "threads": 2, "torch": "2.9"},
        "settings": {"batch": 1, "heads_q": 8, "heads_kv": 8, "dim": 64, "dtype": "float32", "causal": False,
                     "window": None, "alibi": False, "seconds": 300.0},
        "roof": {"bandwidth": 1e10, "matmul": 1e11},
        "chosen": {"forward": "torch_sdpa"},
        "absent": {},
        "rows": rows,
    }  # fmt: skip
    return Report(**{**values, **changes})  # type: ignore[arg-type]


def timed(name: str, length: int, seconds: float, **changes: object) -> Row:
    error = TensorError("out", 1e-7, 2e-7, 1e-8, 2e-8)
    row = Row(name, "forward", length, "ok", "", (seconds,), seconds, seconds * 0.99, seconds * 1.01, 1.0, None, 1000)
    return replace(row, **{"errors": (error,), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 99}', '{"format": 1}', '{"format": 1, "rows": [{}]}'])
def test_what_is_no_report_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"old\.json is (not|a damaged)"):
        Report.load(file)
    with pytest.raises(ValueError, match=r"cannot read .*absent\.json"):
        Report.load(tmp_path / "absent.json")


def test_comparing_finds_what_became_worse_and_nothing_else() -> None:
    less_exact = (TensorError("out", 2e-7, 4e-7, 1e-8, 2e-8),)
    old = report_of(*(timed(name, 512, 1.0) for name in "abcdef"), timed("gone", 512, 1.0))
    new = report_of(
        timed("a", 512, 1.2),
        timed("b", 512, 1.04),  # within the margin
        timed("c", 512, 1.0, errors=less_exact),
        timed("d", 512, 1.0, memory=2000),
        timed("e", 512, 1.0, status="wrong", median=None, note="out is off"),
        timed("f", 512, 0.5),  # better
        timed("new", 512, 9.0),
    )
    lines = compare(old, new)
    assert [line.split()[:3] for line in lines] == [
        ["slower:", "forward", "a"],
        ["less", "exact:", "forward"],
        ["larger:", "forward", "d"],
        ["lost:", "forward", "e"],
        ["gone:", "forward", "gone"],
    ]
    assert "1.20 times" in lines[0]


def test_a_slower_median_within_the_old_spread_is_noise() -> None:
    old = report_of(timed("a", 512, 1.0, p80=1.5))
    assert compare(old, report_of(timed("a", 512, 1.3))) == ["nothing became worse in 1 common rows"]


def test_comparing_says_when_the_machines_differ() -> None:
    old = report_of(timed("a", 512, 1.0))
    new = report_of(timed("a", 512, 1.0), environment={"device": "a GPU", "threads": 2, "torch": "2.9"})
    assert compare(old, new)[0] == "differs: device: a CPU then, a GPU now"


def test_the_closing_lines_tell_the_worst_beside_the_best() -> None:
    rows = [
        timed("tilewise/torch_sdpa", 512, 1.0, ratio=1.21),
        timed("tilewise/torch_sdpa", 1024, 1.0, ratio=0.43),
        timed("tilewise/torch_sdpa", 2048, 1.0, ratio=None, median=None, status="memory"),
    ]
    lines = list(show.summary(report_of(*rows, real_input=(Agreement("naive", True),), seconds=12.0)))
    assert "1.21 times" in lines[0]
    assert "(N=512)" in lines[0]
    assert "0.43 times" in lines[0]
    assert "not timed: N=2048 no memory" in lines[1]
    assert lines[-1].startswith("agree on the real input: yes")


def test_markdown_and_terminal_show_the_same_cells() -> None:
    report = report_of(timed("naive", 512, 0.0123), timed("tilewise/torch_sdpa", 512, 0.00456, ratio=1.1))
    text = show.markdown(report)
    for cells in show.rows_table(report, "forward").rows:
        assert "| " + " | ".join(cells) + " |" in text
    assert "12.3" in text
    assert "tilewise/torch_sdpa*" in text


def test_a_commit_is_told_for_a_checkout_of_tilewise_alone(tmp_path: Path) -> None:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]

    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True, env=environment
        )

    installed, checkout = tmp_path / ".venv" / "tilewise", tmp_path / "src" / "tilewise"
    for folder in (installed, checkout):
        folder.mkdir(parents=True)
        (folder / "file.py").write_text("")
    assert commit(checkout) is None, "not yet a checkout"
    git("init")
    git("add", "src")
    git("commit", "-m", "all")
    head = commit(checkout)
    assert head is not None
    assert len(head) == 40
    assert commit(installed) is None, "some other project's commit is not ours"
    (checkout / "file.py").write_text("changed")
    assert commit(checkout) == head + "+"


@pytest.fixture
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time as little as can be, and leave out the roof and the real input."""
    monkeypatch.setattr(run, "ROUND_SECONDS", 0.001)
    monkeypatch.setattr(run, "agreement", lambda *_: ((), ""))
    monkeypatch.setattr(detect, "measure_rates", lambda *_: detect.Rates("float32", 1e10, 1e11))


def small_report(**changes: object) -> Report:
    """Run a benchmark that takes a second."""
    known = [KNOWN[name] for name in ("sdpa/flash", "sdpa/math", "tilewise/torch_tiled")]
    shape = Settings("cpu", "float32", (64, 128), 1, 2, 2, 16, seconds=60.0, memory=4 * GIB)
    return Bench(replace(shape, **changes), known).run()  # type: ignore[arg-type]  # fields of Settings


@pytest.mark.usefixtures("_brief")
def test_a_report_survives_json() -> None:
    report = small_report(backward=True)
    infinite = TensorError("out", math.inf, 0.0, math.inf, 0.0)
    report = replace(report, real_input=(Agreement("naive", False, (infinite,), "NaN where there is none"),))
    assert Report.from_json(report.to_json()) == report
    assert "Infinity" not in report.to_json()
    told = report.environment
    assert {"tilewise", "torch", "device", "threads", "commit", "variables"} <= set(told)


@pytest.mark.usefixtures("_brief")
def test_beside_sdpas_dense_mask_the_memory_of_both_is_shown() -> None:
    report = small_report(window=8)
    table = show.memory_table(report, "forward")
    assert [cells[:2] for cells in table.rows] == [
        ("64", "sdpa/flash"),
        ("64", "sdpa/math"),
        ("128", "sdpa/flash"),
        ("128", "sdpa/math"),
    ]
    assert [row.dense for row in report.rows if row.name == "sdpa/flash"] == [64**2 * 4, 128**2 * 4]
    assert [row.dense for row in report.rows if row.name == "tilewise/torch_tiled"] == [0, 0]


# ---- the real input ----


def capture(folder: Path, **arrays: np.ndarray) -> None:
    (folder / "data").mkdir()
    np.savez(folder / "data" / real_input.CAPTURE, **arrays)  # type: ignore[arg-type]  # NumPy's stub means allow_pickle


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


def test_on_a_capture_with_padding_all_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "files", lambda _: tmp_path)
    capture(tmp_path, q=drawn(3, 20, 8), k=drawn(3, 20, 8), v=drawn(3, 20, 8), kv_stop=np.array(13))
    found, note = real_input.agreement("cpu", "float32", tuple(KNOWN.values()))
    assert {"naive", "sdpa/flash", "sdpa/math", "tilewise/torch_tiled"} <= {entry.name for entry in found}
    assert all(entry.agrees for entry in found)
    assert all({error.tensor for error in entry.errors} >= {"out", "dq", "dk", "dv"} for entry in found)
    assert "3 heads, 20 tokens, d=8, keys from 13 on hidden" in note


def test_who_does_not_agree_on_the_real_input_is_shown_and_makes_the_report_unsound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "files", lambda _: tmp_path)
    capture(tmp_path, q=drawn(2, 20, 8), k=drawn(2, 20, 8), v=drawn(2, 20, 8))
    causal = replace(KNOWN["naive"], prepare=lambda case, x: KNOWN["naive"].prepare(replace(case, causal=True), x))
    found, _ = real_input.agreement("cpu", "float32", (causal, KNOWN["sdpa/math"]))
    assert [(entry.name, entry.agrees) for entry in found] == [("naive", False), ("sdpa/math", True)]
    assert not report_of(real_input=found).sound
    assert show.agreement_table(found).rows[0][-1] == "NO"


def test_an_installation_without_the_capture_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "files", lambda _: tmp_path)
    found, _ = real_input.agreement("cpu", "float32", ())
    assert [(entry.agrees, entry.note) for entry in found] == [(False, "this installation lacks the file")]


def test_all_agree_on_the_capture_of_the_package() -> None:
    found, _ = real_input.agreement("cpu", "float32", tuple(KNOWN.values()))
    assert {entry.name: entry.note for entry in found if not entry.agrees} == {}
    assert {"naive", "sdpa/flash", "sdpa/math", "tilewise/torch_sdpa", "tilewise/torch_tiled"} <= {
        e.name for e in found
    }
