"""What holds for the breaks: each shows a wrong result, hides where luck hides it, and names tests that are there."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

import test_mutations
from tilewise import cli
from tilewise.backends import numpy_tiled
from tilewise.lab import breaks
from tilewise.lab.breaks import BREAKS, Break, Shown

ROOT = Path(__file__).parents[1]
IN_THE_ENGINE = [each for each in BREAKS if each.name not in {"timing", "shared-memory"}]


def tilewise(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tilewise", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_the_list_is_whole() -> None:
    assert [each.name for each in BREAKS] == [
        "no-max",
        "no-rescale",
        "no-load-mask",
        "no-score-mask",
        "timing",
        "shared-memory",
        "diagonal",
        "lse-base",
    ]


@pytest.mark.parametrize("each", BREAKS, ids=lambda each: each.name)
def test_the_tests_that_catch_it_are_there(each: Break) -> None:
    assert each.caught_by
    for name in each.caught_by:
        file, _, test = name.partition("::")
        function, _, case = test.partition("[")
        defined = {
            node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert function in defined, name
        if case:
            assert case.removesuffix("]") in {fault.what for fault in test_mutations.NUMPY_FAULTS}, name


@pytest.mark.parametrize("each", IN_THE_ENGINE, ids=lambda each: each.name)
def test_it_shows_where_luck_hides_it_and_where_not(each: Break) -> None:
    shown = each.show()
    assert any(one.wrong for one in shown)
    assert any(not one.wrong for one in shown)
    for one in shown:
        assert one.wrong == one.verdict.startswith("WRONG")
        assert one.expected != one.got or not one.wrong


def test_without_edits_the_engine_is_right_wherever_a_break_is_wrong() -> None:
    whole, full_tiles = breaks.edited(), breaks.edited(*breaks.FULL_TILES)
    last_block = 4.0 * (breaks.KEYS // breaks.BLOCK_KV)
    for levels in (200.0, last_block, -40.0):
        data = breaks.with_scores(levels)
        assert not breaks.compare("", whole, data).wrong
        assert not breaks.compare("", full_tiles, breaks.padded(data, float("nan"))).wrong


def test_an_edit_that_no_longer_fits_the_engine_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="mend the table of breaks"):
        breaks.edited(("no such line", "nothing"))
    with pytest.raises(RuntimeError, match="'score' must stand once"):
        breaks.edited(("score", "scores"))
    assert breaks.edited().LOG2E == numpy_tiled.LOG2E


# ---- timing and shared memory ---------------------------------------------------------------------------------------


@pytest.fixture
def _first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare two new processes: what they tell is tested where it is made."""
    monkeypatch.setattr(breaks.warmup, "timings", lambda _: {"cold": {"first": 0.5, "second": 0.002}})  # type: ignore[attr-defined]
    monkeypatch.setattr(breaks.detect, "best_device", lambda: "cpu")  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_first_call")
def test_a_cold_call_is_shown_beside_a_warm_one() -> None:
    cold, unsynchronised, right = breaks.show_timing()
    assert cold == Shown(
        "one call, cold, in a new process",
        "2 ms, the second call there",
        "500 ms",
        "250 times too slow",
        wrong=True,
    )
    assert not unsynchronised.wrong
    assert float(right.got.removesuffix(" ms")) > 0


@pytest.mark.usefixtures("_first_call")
def test_tiles_that_ask_for_too_much_are_told_from_those_that_fit() -> None:
    shown = breaks.show_shared_memory()
    sizes = [(one.setting, int(re.findall(r"\d+", one.got)[0]), one.wrong) for one in shown if "KiB" in one.got]
    room = {"H200": 227, "RTX 4090": 99}
    assert all(wrong == (size > room[setting.partition(":")[0]]) for setting, size, wrong in sizes)
    assert {wrong for _, _, wrong in sizes} == {True, False}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_a_call_that_nobody_waits_for_looks_fast() -> None:
    unsynchronised = breaks._unsynchronised("cuda", breaks._milliseconds_right("cuda"))
    assert unsynchronised.wrong


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_largest_tiles_fail_and_the_largest_that_run_are_named() -> None:
    *tried, summary = breaks._shared_memory_on_gpu()
    assert tried[0].wrong
    assert any(not one.wrong for one in tried)
    assert "times the fastest's time" in summary.verdict


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_first_call")
def test_every_break_tells_what_was_expected_what_came_out_why_and_who_notices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tilewise(monkeypatch, "break", "--all") == 0
    told = capsys.readouterr().out
    for each in BREAKS:
        assert f"{each.name}: {each.title}" in told
    for word in ("expected", "got", "why", "caught by"):
        assert told.count(f" {word} ") >= len(BREAKS)


def test_without_a_name_the_breaks_are_listed_and_an_unknown_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tilewise(monkeypatch, "break") == 0
    assert len(capsys.readouterr().out.splitlines()) == len(BREAKS)
    assert tilewise(monkeypatch, "break", "everything") == 2
    assert "break must be one of no-max, no-rescale" in capsys.readouterr().err
