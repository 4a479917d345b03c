"""What holds for the counter: its formulas are what it counts, and what it counts is what the NumPy engine moves."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import cli
from tilewise.backends.numpy_tiled import Step, Tiling, backward_steps, forward_steps
from tilewise.bench.show import Table
from tilewise.lab import count
from tilewise.lab.count import SECTIONS, Question, Way
from tilewise.machine import cost, detect
from tilewise.machine.device import Device, find
from tilewise.machine.shape import Shape

WIDE = {"lse", "delta", "dq"}  # kept in float32


def tilewise(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tilewise", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


# ---- formulas -------------------------------------------------------------------------------------------------------


def value_of(formula: str, question: Question) -> float:
    """Compute a formula as it is printed: a space, or nothing before a bracket, is a product."""
    text = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula.replace("^", "**"))
    known = {"N": question.length, "d": question.dim, "block_q": question.block_q, "block_kv": question.block_kv}
    result: float = eval(text, {}, known)  # noqa: S307  # a formula of ours
    return result


@pytest.mark.parametrize("way", [way for ways in SECTIONS.values() for way in ways], ids=lambda way: way.name)
@pytest.mark.parametrize(
    "question", [Question(), Question(64, 16, block_q=16, block_kv=8), Question(96, 8, block_q=8, block_kv=32)]
)
def test_each_formula_shown_is_what_is_counted(way: Way, question: Question) -> None:
    assert value_of(way.formula, question) == way.cost(question).elements


def test_heads_and_sequences_multiply_what_one_head_moves() -> None:
    one, many = Question(64, 16), Question(64, 16, batch=3, heads_q=4, heads_kv=4)
    for ways in SECTIONS.values():
        for way in ways:
            assert way.cost(many).elements == 12 * way.cost(one).elements


# ---- the NumPy engine's own records ---------------------------------------------------------------------------------


def bytes_moved(steps: Iterable[Step], shape: Shape) -> dict[str, int]:
    """Sum what the engine says it loaded and stored, in bytes."""
    moved = {"load": 0, "store": 0, "step": 0}
    for step in steps:
        moved[step.kind] += step.elements * (shape.itemsize32 if step.tensor in WIDE else shape.itemsize)
    return moved


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    left, right = (draw(st.one_of(st.none(), st.integers(0, 9))) for _ in range(2))
    len_q, len_kv = draw(st.integers(1, 13)), draw(st.integers(1, 13))
    dim_qk, dim_v = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Shape(1, 1, 1, len_q, len_kv, dim_qk, dim_v, 2, left, right, draw(st.integers(-4, 4)))


def arrays(shape: Shape) -> tuple[np.ndarray, ...]:
    sizes = (shape.len_q, shape.dim_qk), (shape.len_kv, shape.dim_qk), (shape.len_kv, shape.dim_v)
    return tuple(np.ones(size, np.float32) for size in sizes)


BLOCKS = st.integers(1, 6)


@settings(deadline=None, max_examples=60)
@given(shape=shapes(), block_q=BLOCKS, block_kv=BLOCKS)
def test_the_tiled_forward_pass_moves_what_the_engine_records(shape: Shape, block_q: int, block_kv: int) -> None:
    q, k, v = arrays(shape)
    out, lse = np.empty((shape.len_q, shape.dim_v), np.float32), np.empty(shape.len_q, np.float32)
    tiling = Tiling(shape.len_kv, 0, shape.left, shape.right, shape.offset, block_q, block_kv)
    steps = list(forward_steps(q, k, v, out, lse, tiling, 1.0))
    moved = bytes_moved(steps, shape)
    worst = cost.tiled_worst(shape, block_q, block_kv)
    assert (moved["load"], moved["store"]) == (worst.bytes_read, worst.bytes_written)
    keys = {row for step in steps if step.tensor == "k" for row in range(step.rows.start, step.rows.stop)}
    best = cost.tiled_best(shape, block_q, block_kv)
    once = q.size + len(keys) * (shape.dim_qk + shape.dim_v)
    assert best.bytes_read == once * shape.itemsize
    computed = sum(step.elements for step in steps if (step.kind, step.tensor) == ("step", "p"))
    assert worst.flops == best.flops == 2 * computed * (shape.dim_qk + shape.dim_v)


@settings(deadline=None, max_examples=60)
@given(shape=shapes(), block_q=BLOCKS, block_kv=BLOCKS)
def test_the_tiled_backward_pass_moves_what_the_engine_records(shape: Shape, block_q: int, block_kv: int) -> None:
    q, k, v = arrays(shape)
    out, lse = np.ones((shape.len_q, shape.dim_v), np.float32), np.ones(shape.len_q, np.float32)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    tiling = Tiling(shape.len_kv, 0, shape.left, shape.right, shape.offset, block_q, block_kv)
    steps = list(backward_steps(q, k, v, out, lse, out, None, dq, dk, dv, tiling, 1.0))
    moved = bytes_moved(steps, shape)
    # The engine is given a dq of zeros and leaves it in float32: setting it to zero, and turning it into its own dtype.
    outside_read = shape.size_q * shape.itemsize32
    outside_written = outside_read + shape.size_q * shape.itemsize
    expected = cost.tiled_backward_worst(shape, block_q, block_kv)
    assert (moved["load"] + outside_read, moved["store"] + outside_written) == (
        expected.bytes_read,
        expected.bytes_written,
    )
    computed = sum(step.elements for step in steps if (step.kind, step.tensor) == ("step", "ds"))
    assert expected.flops == 2 * computed * (3 * shape.dim_qk + 2 * shape.dim_v)


# ---- devices --------------------------------------------------------------------------------------------------------


def test_without_a_name_every_data_sheet_is_asked() -> None:
    names = {device.name for device in count.devices([], "float16")}
    assert {"H200", "H100 SXM", "L40S", "RTX 4090", "RTX 5090", "GB10", "B200", "MI300X", "M4 Max"} <= names


def test_main_memory_as_fast_as_on_chip_memory_leaves_arithmetic_as_the_limit() -> None:
    a100 = find("A100")
    (same,) = count.devices(["A100"], "float16", bandwidth=a100.onchip_bandwidth)
    naive = count.FORWARD[0].cost(Question())
    assert max(naive.seconds(a100, "float16"), key=naive.seconds(a100, "float16").__getitem__) == "memory"
    assert naive.time_floor(same, "float16") == naive.flops / 312e12


def test_here_is_this_machine_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "best_device", lambda: "cpu")
    monkeypatch.setattr(detect, "measure_rates", lambda *_: detect.Rates("float32", 2e10, 1e11))
    (here,) = count.devices(["here"], "float32")
    assert (here.bandwidth, here.rates["float32"]) == (2e10, 1e11)


# ---- what is printed ------------------------------------------------------------------------------------------------


def test_the_answer_holds_the_exercises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert tilewise(monkeypatch, "count", "--n", "16384", "--d", "128", "--device", "A100", "--backward") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "The score matrix takes 512 MiB, out and lse 4.06 MiB: 126 times less." in told
    assert "spares 512 MiB between the passes and adds 68.7 GFLOP, 25% of the backward pass" in told
    assert "163 KiB that a block has on an A100: 5.09" in told
    assert "4 N^2 + 4 N d 1,082,130,432" in told
    assert "7 N^2 + 8 N d" in told
    assert "…" not in told


def test_what_ifs_and_causality_change_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "count.json"
    words = ("count", "--device", "A100", "--bandwidth", "1000", "--sram-bandwidth", "2000", "--flops", "100")
    assert tilewise(monkeypatch, *words, "--causal", "--json", str(file)) == 0
    told = capsys.readouterr().out
    assert "causal" in told
    assert re.search(r"A100 80GB SXM +1,000 +2 +100 +100 ", told)
    forward = json.loads(file.read_text())["ways"]["forward"]
    seconds = forward["naive"]["seconds"]["A100 80GB SXM"]
    assert seconds["memory"] == forward["naive"]["bytes"] / 1e12
    assert seconds["on-chip"] == forward["naive"]["bytes_onchip"] / 2e12
    assert seconds["matrix"] == forward["naive"]["flops"] / 1e14


def test_a_device_of_which_nothing_is_known_has_no_floor() -> None:
    table = count.floors_table("", count.FORWARD[:1], Question(), [Device("unknown")])
    assert isinstance(table, Table)
    assert table.rows == [("unknown", "", "", "", "", "?")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--n", "0"), "n must be 1 or more, got 0"),
        (("--block-q", "-1"), "block-q must be 1 or more, got -1"),
        (("--heads", "3", "--heads-kv", "2"), "heads must be a multiple of heads-kv, got 3 and 2"),
        (("--dtype", "int8"), "dtype 'int8'"),
        (("--device", "abacus"), "device 'abacus' is not among the data sheets"),
        (("--flops", "0"), "flops must be above 0"),
        (("--json", "no/such/folder/x.json"), "cannot write no/such/folder/x.json"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tilewise(monkeypatch, "count", *words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert message in told.err
