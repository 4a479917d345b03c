"""What holds of `tilewise bench --op softmax`: it times what is right, says what is not, and keeps what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilewise import cli
from tilewise.bench import row_softmax
from tilewise.bench.row_softmax import Bench, Pass, Row, Run, Settings, cells, default_settings

QUICK = ("--op", "softmax", "--device", "cpu", "--shapes", "8x32,3x5")
WITHOUT_COMPILER = ("eager", "torch.softmax", "tilewise")


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time as little as can be: these tests do not look at how fast anything is."""
    monkeypatch.setattr(row_softmax, "ROUNDS", 2)
    monkeypatch.setattr(row_softmax, "ROUND_SECONDS", 1e-4)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["tilewise", "bench", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


def settings(**changes: object) -> Settings:
    given: dict[str, object] = {"shapes": ((70, 40),), "only": WITHOUT_COMPILER}
    return default_settings("cpu", **{**given, **changes})


@pytest.mark.parametrize("dtype", row_softmax.DTYPES)
def test_everything_is_timed_beside_a_copy_and_within_its_budget(dtype: str) -> None:
    report = Bench(settings(dtype=dtype, backward=True)).run()
    assert report.sound
    names = ["copy", "tilewise/torch_ops", "torch.softmax", "eager"]
    assert [(row.which, row.name) for row in report.rows] == [
        (w, name) for w in ("forward", "backward") for name in names
    ]
    for row in report.rows:
        assert row.median is not None
        assert row.of_copy is not None
        assert row.size == (2 if row.which == "forward" else 3) * 70 * 40 * getattr(torch, dtype).itemsize
        assert (row.error is None) == (row.name == "copy")
        assert all(cells(row)[:6])


def test_what_is_wrong_or_does_not_run_is_a_row_that_says_so_and_is_not_timed() -> None:
    def more(which: Pass, tensors: Sequence[torch.Tensor]) -> Mapping[str, Run]:
        def broken() -> torch.Tensor:
            raise RuntimeError("no such\ninstruction")

        return {"off by a little": lambda: torch.softmax(tensors[0], -1) * 1.01, "broken": broken}

    report = Bench(settings(), more=more).run()
    rows = {row.name: row for row in report.rows}
    assert not rows["off by a little"].within
    assert rows["off by a little"].median is None
    assert rows["broken"].note == "does not run: RuntimeError: no such instruction"
    assert cells(rows["off by a little"])[2] == "WRONG"
    assert cells(rows["broken"])[2] == "failed"
    assert "broken: does not run" in row_softmax.footnotes(report)
    assert report.sound, "what is not ours does not count"
    ours = [replace(row, within=False) if row.name.startswith("tilewise/") else row for row in report.rows]
    assert not replace(report, rows=tuple(ours)).sound


def test_a_wrong_last_row_is_seen() -> None:
    def more(which: Pass, tensors: Sequence[torch.Tensor]) -> Mapping[str, Run]:
        wrong = torch.softmax(tensors[0], -1)
        wrong[-1] = 0
        return {"all but the last": lambda: wrong}

    rows = {row.name: row for row in Bench(settings(shapes=((1000, 8),)), more=more).run().rows}
    assert not rows["all but the last"].within


def test_what_does_not_fit_in_memory_or_time_is_left_out_and_named() -> None:
    huge = Bench(settings(shapes=((1 << 30, 1 << 20),))).run()
    assert huge.rows == ()
    assert "forward 1073741824x1048576: not measured: needs 33554432.0 GiB of memory" in row_softmax.footnotes(huge)
    late = Bench(settings(seconds=1e-9)).run()
    assert late.notes == ("forward 70x40: not measured: the 0 s are over",)


def test_torch_compiles_the_eager_version_or_the_row_says_why_not() -> None:
    (_, row) = Bench(settings(shapes=((8, 32),), only=("torch.compile",))).run().rows
    assert row.median is not None or row.note.startswith("does not run: ")
    assert row.within


def test_the_command_prints_tables_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, text = tmp_path / "out.json", tmp_path / "out.md"
    only = [word for name in WITHOUT_COMPILER for word in ("--only", name)]
    words = (*QUICK, *only, "--backward", "--json", str(kept), "--markdown", str(text))
    assert command(monkeypatch, *words) == 0
    out = capsys.readouterr().out
    assert "tilewise/torch_ops" in out
    assert "GB/s" in out
    assert "…" not in out, "a cell was cut off"
    found = json.loads(kept.read_text())
    assert set(found["results"]) == {
        f"{which} {shape}" for which in ("forward", "backward") for shape in ("8x32", "3x5")
    }
    assert set(found["results"]["forward 3x5"]["torch.softmax"]) == {
        "GB/s", "median us", "p20 us", "p80 us", "of the copy", "max error", "budget", "within",
    }  # fmt: skip
    assert {"device", "torch", "commit", "command", "date"} <= set(found)
    assert "| rows x columns | implementation |" in text.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--op", "sum"), "op must be attention or softmax; got 'sum'"),
        (("--op", "softmax", "--heads", "3"), "--heads is no option of --op softmax"),
        (("--op", "softmax", "--causal"), "--causal is no option of --op softmax"),
        (("--op", "softmax", "--heads-kv", "3"), "--heads-kv is no option of --op softmax"),
        (("--op", "softmax", "--compare", "old.json"), "--compare is no option of --op softmax"),
        (("--shapes", "3x4"), "--shapes is no option of --op attention"),
        (("--op", "softmax", "--shapes", "3x"), "shapes must be rows x columns, such as 8192x4096; got '3x'"),
        (("--op", "softmax", "--shapes", "0x4"), "shapes must be rows x columns, both above 0; got 0x4"),
        (("--op", "softmax", "--dtype", "int8"), "dtype must be one of float16, bfloat16, float32, float64"),
        (("--op", "softmax", "--seconds", "0"), "seconds must be above 0, got 0.0"),
        ((*QUICK, "--only", "fast"), "only must name some of copy, tilewise, torch.softmax, eager, torch.compile"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, *words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert message in told.err


def test_an_unsound_benchmark_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(self: row_softmax.Judge, row: Row, run: Run) -> Row:
        return replace(row, within=False, error=1.0, budget=0.5)

    monkeypatch.setattr(row_softmax.Judge, "hold", hold)
    assert command(monkeypatch, *QUICK, "--only", "tilewise") == 1
