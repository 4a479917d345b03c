"""What holds for the stepper: it shows the engine's own numbers, each of them right, and takes any that fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tilewise import cli
from tilewise.backends.numpy_tiled import Tiling, tiled, tiled_backward
from tilewise.lab import step
from tilewise.lab.step import DEFAULT, TILING, Numbers


def tilewise(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tilewise", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


def drawn(len_q: int, len_kv: int, dim: int, dim_v: int) -> Numbers:
    rng = np.random.default_rng(3)
    sizes = ((len_q, dim), (len_kv, dim), (len_kv, dim_v), (len_q, dim_v))
    return Numbers(*(rng.standard_normal(size) for size in sizes))


CASES = [
    pytest.param(DEFAULT, TILING, 1.0, id="default"),
    pytest.param(drawn(5, 9, 3, 2), Tiling(9, block_q=2, block_kv=4), 0.5, id="ragged"),
    pytest.param(drawn(4, 6, 2, 2), Tiling(6, right=0, offset=2, block_q=3, block_kv=2), 1.0, id="causal"),
    pytest.param(
        drawn(5, 3, 2, 1), Tiling(3, right=0, offset=-2, block_q=2, block_kv=2), 1.0, id="rows that see nothing"
    ),
]


@pytest.mark.parametrize(("numbers", "tiling", "scale"), CASES)
def test_each_frame_holds_the_state_of_the_keys_seen_so_far(numbers: Numbers, tiling: Tiling, scale: float) -> None:
    watched = step.forward(numbers, tiling, scale)
    score = numbers.q @ numbers.k.T * scale
    score = np.where(tiling.visible(slice(0, len(numbers.q)), slice(0, len(numbers.k))), score, -np.inf)
    assert watched.frames
    for frame in watched.frames:
        seen = score[frame.rows, : frame.cols.stop]
        row_max = seen.max(axis=1)
        weights = np.exp(seen - np.where(np.isinf(row_max), 0, row_max)[:, None])
        np.testing.assert_allclose(frame.score, score[frame.rows, frame.cols], rtol=1e-13)
        np.testing.assert_allclose(frame.row_max, row_max, rtol=1e-13)
        np.testing.assert_allclose(frame.p, weights[:, frame.cols.start :], rtol=1e-12, atol=1e-300)
        np.testing.assert_allclose(frame.row_sum, weights.sum(axis=1), rtol=1e-12)
        np.testing.assert_allclose(frame.acc, weights @ numbers.v[: frame.cols.stop], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("numbers", "tiling", "scale"), CASES)
def test_results_are_the_engines_and_equal_the_untiled_formula(numbers: Numbers, tiling: Tiling, scale: float) -> None:
    watched = step.forward(numbers, tiling, scale)
    out, lse = tiled(*numbers[:3], tiling, scale)
    assert np.array_equal(watched.out, out)
    assert np.array_equal(watched.lse, lse)
    np.testing.assert_allclose(watched.exact_out, out, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(watched.exact_lse, lse, rtol=1e-13)
    back = step.backward(numbers, tiling, scale)
    grads = tiled_backward(*numbers[:3], out, lse, numbers.d_out, None, tiling, scale)
    for name, right in zip(("dq", "dk", "dv"), grads, strict=True):
        assert np.array_equal(back.grads[name], right)
        np.testing.assert_allclose(back.exact[name], right, rtol=1e-12, atol=1e-12)


def test_the_last_frame_of_each_gradient_holds_the_gradient() -> None:
    back = step.backward(DEFAULT, TILING, 1.0)
    np.testing.assert_array_equal(back.frames[-1].dq, back.grads["dq"])
    for frame in back.frames:
        np.testing.assert_array_equal(frame.dv, back.grads["dv"][frame.cols])  # one tile of queries sees all


def test_the_default_shows_a_maximum_that_moves_and_one_that_does_not() -> None:
    first, second = step.remarks(step.forward(DEFAULT, TILING, 1.0))
    assert first == (
        "Query 0: a larger score came, so what was summed is rescaled by 0.135 at keys 4-5, by 0.368 at keys 6-7."
    )
    assert second == "Query 1: its largest score stands in its first block; every later rescale is 1."


def test_the_softmax_of_a_row_is_shown_number_by_number() -> None:
    table = step.softmax_table([3.0, 1.0, 6.0, -np.inf])
    assert [row[1:4] for row in table.rows] == [
        ("3", "-inf -> 3", "0"),
        ("1", "3", "1"),
        ("6", "3 -> 6", "0.0498"),
        ("-inf", "6", "1"),
    ]
    assert float(table.rows[-1][4]) == pytest.approx(1 + np.exp(-3) + np.exp(-5), abs=0.005)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_small_numbers_are_shown_to_the_exact_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tilewise(monkeypatch, "step", "--backward") == 0
    told = capsys.readouterr().out
    for text in ("online softmax", "3 -> 5", "rescale", "row_sum", "acc", "exact", "ds = p (dp - delta)", "dk", "dv"):
        assert text in told


@pytest.mark.parametrize("kind", ["json", "npz"])
def test_numbers_come_from_a_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = drawn(3, 5, 2, 2)
    path = tmp_path / f"numbers.{kind}"
    if kind == "npz":
        np.savez(path, q=numbers.q, k=numbers.k, v=numbers.v)
    else:
        path.write_text(json.dumps({name: array.tolist() for name, array in zip("qkv", numbers, strict=False)}))
    found = step.load(path)
    assert np.array_equal(found.q, numbers.q)
    assert np.array_equal(found.d_out, np.ones((3, 2)))
    assert tilewise(monkeypatch, "step", "--file", str(path), "--block-q", "3", "--causal", "--scale", "0.5") == 0
    assert "queries 0-2 over blocks of keys" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ('{"q": [[1]], "k": [[1]]}', "must hold q, k and v"),
        ("[1]", "must hold q, k and v"),
        ("{", "must be JSON or .npz"),
        ('{"q": [[1, 2]], "k": [[1]], "v": [[1]]}', "q and k must have rows of one length, got 2 and 1"),
        ('{"q": [[1]], "k": [[1]], "v": [[1], [2]]}', "k and v must have as many rows, got 1 and 2"),
        ('{"q": [1], "k": [[1]], "v": [[1]]}', "q must be rows of numbers, got shape (1,)"),
        ('{"q": [["a"]], "k": [[1]], "v": [[1]]}', "q must be rows of numbers, all of one length"),
        ('{"q": [[1]], "k": [[1]], "v": [[1]], "d_out": [[1, 2]]}', "d_out must have shape (1, 1)"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line_and_exit_code_2(
    document: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "numbers.json"
    path.write_text(document)
    assert tilewise(monkeypatch, "step", "--file", str(path)) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert message in told.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--row", "3,x"), "row must be numbers with commas between them"),
        (("--block-kv", "0"), "block-kv must be 1 or more, got 0"),
        (("--file", "absent.json"), "cannot read absent.json"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tilewise(monkeypatch, "step", *words) == 2
    assert message in capsys.readouterr().err
