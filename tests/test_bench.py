"""What holds of the ways of computing that are set side by side, of their judge and of the meters."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise import testing
from tilewise.bench import memory
from tilewise.bench.cases import Case, Inputs
from tilewise.bench.clock import Stopwatch
from tilewise.bench.implementations import Implementation, Outcome, Pass, implementations
from tilewise.bench.judge import Judge, sampled_rows
from tilewise.machine.device import MIB
from tilewise.problem.problem import Options, Tensors

KNOWN = {each.name: each for each in implementations()}
SMALL = Case(48, 2, 4, 2, 16, "float32", "cpu")


# ---- implementations ----


def served(case: Case, which: Pass) -> list[Implementation]:
    return [each for each in KNOWN.values() if each.absent(case, which) is None]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"window": 5},
        {"window": 5, "causal": True},
        {"alibi": True},
        {"alibi": True, "causal": True},
        {"kv_stop": 31},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "causal": True},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_every_implementation_keeps_the_error_budget_forward_and_backward(changes: dict[str, object]) -> None:
    case = replace(SMALL, **changes)  # type: ignore[arg-type]
    inputs = case.inputs(0)
    judge = Judge(case, inputs, gradients=True, scores=10**9)
    names = set()
    for each in served(case, "backward"):
        ready = each.prepare(case, inputs)
        with ready.active():
            errors = judge.measure(ready.outcome(judge.d_out))
        assert {name: error for name, error in errors.items() if not error.within} == {}, each.name
        assert {"out", "dq", "dk", "dv"} <= set(errors), each.name
        names.add(each.name)
    assert {"naive", "sdpa/math", "tilewise/torch_tiled"} <= names


def test_the_timed_calls_give_what_was_checked() -> None:
    inputs = SMALL.inputs(0)
    for each in served(SMALL, "backward"):
        ready = each.prepare(SMALL, inputs)
        with ready.active():
            checked = ready.outcome(inputs.d_out)
            out = torch.as_tensor(ready.forward())
            ready.open_backward()
            grads = ready.backward()
            again = ready.backward()
            ready.close_backward()
        torch.testing.assert_close(out, checked.out, msg=each.name)
        assert isinstance(grads, tuple)
        assert isinstance(again, tuple)
        for first, second, expected in zip(grads, again, (checked.dq, checked.dk, checked.dv), strict=True):
            torch.testing.assert_close(torch.as_tensor(first), expected, msg=each.name)
            torch.testing.assert_close(torch.as_tensor(second), expected, msg=each.name)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("changes", [{}, {"causal": True}, {"window": 9}, {"alibi": True}], ids=str)
def test_what_is_said_to_be_needed_before_a_run_covers_what_it_then_takes(
    changes: dict[str, object], which: Pass
) -> None:
    case = replace(SMALL, length=1024, batch=1, heads_q=4, heads_kv=4, dim=32, **changes)  # type: ignore[arg-type]
    inputs = case.inputs(0)
    for each in served(case, which):
        ready = each.prepare(case, inputs)
        d_out = inputs.d_out if which == "backward" else None
        with ready.active():
            _, held = memory.peak(lambda ready=ready, d_out=d_out: ready.outcome(d_out), "cpu", each.meter)  # type: ignore[misc]
        assert held is not None
        assert held <= each.need(case, which), each.name
        assert ready.prepared_bytes <= each.dense(case), each.name


def test_who_needs_the_same_dense_mask_shares_it() -> None:
    case = replace(SMALL, window=5)
    inputs = case.inputs(0)
    for name in ("sdpa/math", "sdpa/flash", "naive", "tilewise/torch_tiled"):
        KNOWN[name].prepare(case, inputs)
    assert inputs.made is not None
    assert set(inputs.made) == {"dense", "hidden"}


def test_an_untiled_form_is_said_to_need_its_score_matrices() -> None:
    case = replace(SMALL, length=32768)
    matrix = case.batch * case.heads_q * case.length**2 * 4
    for name in ("naive", "sdpa/math"):
        assert KNOWN[name].need(case, "forward") >= 2 * matrix
        assert KNOWN[name].need(case, "backward") >= 3 * matrix
    for name in ("sdpa/flash", "tilewise/torch_tiled", "numpy/tiled"):
        assert KNOWN[name].need(case, "backward") < matrix / 8


def test_what_is_not_here_says_why() -> None:
    reason = KNOWN["sdpa/cudnn"].absent(SMALL, "forward")
    if not torch.cuda.is_available():
        assert reason is not None
        assert "\n" not in reason
    assert KNOWN["numpy/tiled"].absent(replace(SMALL, dtype="bfloat16"), "forward") == "NumPy has no bfloat16"
    assert "window" in (KNOWN["tilewise/torch_sdpa"].absent(replace(SMALL, window=3), "forward") or "")


def test_flops_are_counted_as_this_field_does() -> None:
    case = Case(1024, 2, 8, 8, 64, "float32", "cpu")
    full = 4 * 2 * 8 * 1024**2 * 64
    assert case.flops(backward=False) == full
    assert replace(case, causal=True).flops(backward=False) == full // 2
    assert case.flops(backward=True) == full * 5 // 2
    seen = sum(min(i + 9, 1024) - max(i - 8, 0) for i in range(1024))  # in a window, what is visible
    assert replace(case, window=8).flops(backward=False) == full * seen // 1024**2


# ---- the judge ----


def test_where_all_rows_are_looked_at_the_judge_measures_what_the_test_suite_measures() -> None:
    case = replace(SMALL, causal=True, dtype="float16")
    inputs = case.inputs(0)
    options = Options(causal=True, return_lse=True)
    lse_shape = (case.batch, case.heads_q, case.length)
    call = testing.Call(Tensors(*inputs[:3]), options, inputs.d_out, torch.zeros(lse_shape))
    got = testing.run(call, "torch_tiled")
    judge = Judge(case, inputs, gradients=True, scores=10**9)
    measured = judge.measure(Outcome(got.out, got.lse, got.dq, got.dk, got.dv))
    assert judge.share == 1
    assert measured == testing.check(got, call)


def wrong_at(row: int, case: Case, inputs: Inputs) -> Outcome:
    """Compute all as it should be but one query row, which sees its keys' values doubled."""
    right = KNOWN["naive"].prepare(case, inputs).outcome(None)
    out = right.out.clone()
    out[:, :, row] *= 2
    return right._replace(out=out)


@pytest.mark.parametrize("row", [0, 47, 24])
def test_a_sample_finds_a_wrong_row_that_it_looks_at(row: int) -> None:
    inputs = SMALL.inputs(0)
    judge = Judge(SMALL, inputs, gradients=False, scores=SMALL.batch * SMALL.heads_q * SMALL.length * 9)
    assert judge.share == 9 / 48
    assert judge.measure(KNOWN["naive"].prepare(SMALL, inputs).outcome(None))["out"].within
    assert not judge.measure(wrong_at(row, SMALL, inputs))["out"].within


@pytest.mark.parametrize("tensor", ["dq", "dk", "dv"])
def test_a_sample_judges_every_gradient(tensor: str) -> None:
    case = replace(SMALL, causal=True)
    inputs = case.inputs(0)
    judge = Judge(case, inputs, gradients=True, scores=case.batch * case.heads_q * case.length * 9)
    ready = KNOWN["tilewise/torch_tiled"].prepare(case, inputs)
    right = ready.outcome(judge.d_out)
    assert all(error.within for error in judge.measure(right).values())
    spoilt = getattr(right, tensor).clone()
    spoilt[0, 0, 0] += spoilt.abs().max() * 1e-3
    measured = judge.measure(right._replace(**{tensor: spoilt}))
    assert [name for name, error in measured.items() if not error.within] == [tensor]


@pytest.mark.parametrize(("length", "count"), [(1, 1), (2, 1), (3, 1), (7, 3), (100, 99), (5, 100), (8192, 64)])
def test_sampled_rows_lie_apart_and_within(length: int, count: int) -> None:
    rows = sampled_rows(length, count)
    edges = [edge for pair in rows for edge in pair]
    assert edges == sorted(edges)
    assert edges[0] == 0
    assert edges[-1] <= length
    assert all(start < stop for start, stop in rows)
    assert sum(stop - start for start, stop in rows) <= max(count, 3)


# ---- memory ----


def test_the_meter_counts_what_is_held_at_once_and_not_what_came_and_went() -> None:
    def work() -> torch.Tensor:
        for _ in range(5):
            torch.ones(MIB)  # 4 MiB each, given back
        return torch.ones(MIB) + torch.ones(MIB)

    _, held = memory.peak(work, "cpu", "torch")
    assert held is not None
    assert 12 * MIB <= held < 12 * MIB + 4096


def test_the_meter_counts_what_a_kernel_allocates_inside() -> None:
    case = replace(SMALL, length=512, heads_kv=4)
    ready = KNOWN["sdpa/flash"].prepare(case, case.inputs(0))
    with ready.active():
        outcome, held = memory.peak(lambda: ready.outcome(None), "cpu", "torch")
    results = outcome.out.nbytes + case.batch * case.heads_q * case.length * 4  # and its lse
    assert held is not None
    assert held > results, "working space must show"


def test_the_meter_of_numpy_counts_results_and_temporaries() -> None:
    def work() -> np.ndarray:
        left, right = np.ones(MIB), np.ones(MIB)
        return left + right

    _, held = memory.peak(work, "cpu", "numpy")
    assert held is not None
    assert 3 * 8 * MIB <= held < 3 * 8 * MIB + 65536


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux, which resets a process's peak")
def test_the_meter_agrees_with_what_the_operating_system_saw() -> None:
    code = """
import re, sys, torch
from pathlib import Path
from tilewise.bench import memory
from tilewise.bench.cases import Case
from tilewise.bench.implementations import implementations
case = Case(2048, 1, 8, 8, 64, "float32", "cpu")
ready = next(x for x in implementations() if x.name == "naive").prepare(case, case.inputs(0))
def kib(field): return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
small = Case(64, 1, 8, 8, 64, "float32", "cpu")
next(x for x in implementations() if x.name == "naive").prepare(small, small.inputs(0)).forward()
Path("/proc/self/clear_refs").write_text("5")
before = kib("VmRSS")
ready.forward()
seen = (kib("VmHWM") - before) * 1024
print(seen, memory.peak(ready.forward, "cpu", "torch")[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seen, told = (int(word) for word in done.stdout.split())
    assert told == pytest.approx(seen, rel=0.1)


# ---- the clock ----


def test_the_stopwatch_tells_a_run_of_known_length() -> None:
    now = 0.0

    def work() -> None:
        nonlocal now
        now += 0.25

    times = Stopwatch("cpu", lambda: now).round(work, 1.0)
    assert times == [0.25] * 4
