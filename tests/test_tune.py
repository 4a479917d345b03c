"""What holds of tuning but for the times themselves, which only a GPU can tell."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from tilewise import cli
from tilewise.bench import tune
from tilewise.bench.tune import Job, Trial
from tilewise.machine import detect
from tilewise.machine.device import Device, find
from tilewise.machine.tiles import Tiles, default_tiles, estimate_shared_memory, shared_memory_limit
from tilewise.testing import Call

HOPPER = find("H200")
TURING = Device("a small GPU", capability=(7, 5), source="made up")


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "detect", lambda _=None: HOPPER)
    monkeypatch.setattr(detect, "best_device", lambda: "cuda")


@contextmanager
def pool(*_: object, **__: object) -> Iterator[SimpleNamespace]:
    """Run jobs where they are asked for."""
    yield SimpleNamespace(map=map)


class Watch:
    """Says that a run takes what the run says that it takes."""

    def __init__(self, device: str) -> None: ...

    def round(self, run: Callable[[], float], seconds: float) -> list[float]:
        assert seconds > 0
        return [run()] * 3


def seconds_of(tiles: Tiles) -> float:
    return 1e-6 * (1 + (tiles.block_q * tiles.block_kv) % 7 + tiles.num_stages / 10 + tiles.num_warps / 100)


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("kind", ["forward", "backward_kv", "backward_q"])
@pytest.mark.parametrize("dim", [64, 256])
def test_candidates_begin_with_what_is_used_now_fit_and_come_once(kind: tune.Kind, dim: int) -> None:
    job = Job(kind, dim, "bfloat16", "cuda")
    found = job.candidates()
    assert found[0] == default_tiles(HOPPER.capability, dim, dim, 2, kind)
    assert len(found) == len(set(found)) > 3
    limit = shared_memory_limit(HOPPER.capability)
    assert all(estimate_shared_memory(tiles, dim, dim, 2, kind) <= limit for tiles in found[1:])


def test_a_gpu_with_less_shared_memory_has_fewer_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for device in (HOPPER, TURING):
        monkeypatch.setattr(detect, "detect", lambda _, device=device: device)
        counts.append(len(Job("forward", 128, "float16", "cuda").candidates()))
    assert counts[0] > counts[1] >= 1


def test_problems_of_all_lengths_and_dims_have_the_same_tokens_and_width() -> None:
    for dim in (64, 128, 256):
        for length in tune.LENGTHS:
            case = Job("forward", dim, "float16", "cuda").problem(length, causal=True)
            assert case.batch * case.len_q == tune.TOKENS
            assert case.heads_q * case.dim_qk == tune.HIDDEN


@pytest.mark.usefixtures("_on_a_gpu")
def test_trials_come_fastest_first_and_failures_last(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job(kind, 64, "float32", "cpu") for kind in ("forward", "backward_kv", "backward_q")]
    broken = {job: job.candidates()[1::2] for job in jobs}

    def run(call: Call, kind: tune.Kind, tiles: Tiles) -> Callable[[], float]:
        return lambda: seconds_of(tiles) * call.problem.len_q * (1 if call.options.causal else 2)

    monkeypatch.setattr(tune, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(tune, "try_out", lambda job, tiles: "too slow to wait for" if tiles in broken[job] else "")
    monkeypatch.setattr(tune, "Stopwatch", Watch)
    monkeypatch.setattr(tune, "run", run)
    monkeypatch.setattr(tune, "TOKENS", 64)
    monkeypatch.setattr(tune, "LENGTHS", (16, 64))
    told: list[str] = []
    trials = tune.tune(jobs, told.append)
    for job in jobs:
        tried = trials[job]
        sound = [trial for trial in tried if not trial.failure]
        assert {trial.tiles for trial in tried} == set(job.candidates())
        assert [trial.tiles for trial in tried[len(sound) :]] == broken[job]
        assert [trial.tiles for trial in sound] == sorted((trial.tiles for trial in sound), key=seconds_of)
        assert len(sound[0].seconds) == 4  # two lengths, causal and full
        assert all(trial.score == float("inf") for trial in tried[len(sound) :])
    assert any("float32" in line for line in told)
    lines = list(tune.summary(trials))
    assert lines[0] == "forward d=64 float32"
    assert lines[1].startswith(f"  {trials[jobs[0]][0].tiles}  ")
    assert any("failed, the first: " in line and "too slow to wait for" in line for line in lines)
    assert len(json.loads(tune.to_json(trials))["forward d=64 float32"]) == len(trials[jobs[0]])


@pytest.mark.usefixtures("_on_a_gpu")
def test_a_table_takes_new_rows_in_the_place_of_old_ones_and_is_read_again(
    tmp_path: Path,
) -> None:
    forward, failed = Job("forward", 80, "bfloat16", "cuda"), Job("backward_kv", 128, "bfloat16", "cuda")
    first, second = Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)
    table = tmp_path / "new" / f"{HOPPER.target}.json"
    none = [Trial(second, failure="does not compile")]
    for tiles in (second, first):
        tune.write(tune.rows({forward: [Trial(tiles, (1e-3,))], failed: none}), table)
    tune.write(tune.rows({Job("forward", 64, "float32", "cuda"): [Trial(second, (1e-3,))]}), table)
    written = json.loads(table.read_text())
    assert written["target"] == HOPPER.target == "sm_90"
    assert [(row["dim_qk"], row["itemsize"], row["block_q"]) for row in written["rows"]] == [(128, 2, 128), (64, 4, 64)]
    provenance = written["rows"][0]["provenance"]
    assert provenance["device"] == HOPPER.name
    assert provenance["command"] == "tilewise tune --kinds forward --dims 80 --dtype bfloat16"

    assert default_tiles((9, 0), 80, 80, 2, "forward", table.parent) == first


@pytest.mark.usefixtures("_on_a_gpu")
def test_jobs_are_every_kind_at_every_dim_unless_some_are_named() -> None:
    assert [(job.kind, job.dim) for job in tune.jobs()] == [
        (kind, dim) for kind in ("forward", "backward_kv", "backward_q") for dim in (64, 128, 256)
    ]
    assert tune.jobs(["backward_q"], ["96"], "float16") == [Job("backward_q", 96, "float16", "cuda")]


# ---- the command ----


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["tilewise", "tune", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "tuning times kernels on a GPU that torch can use as cuda; torch finds 'cpu'"),
        (("--kinds", "sideways"), "kinds must be among forward, backward_kv, backward_q; got 'sideways'"),
        (("--dims", "64,x"), "dims must be whole numbers from 1 to 512; got 'x'"),
        (("--dtype", "int8"), "dtype must be one of float16, bfloat16, float32; got 'int8'"),
        (("--workers", "0"), "workers must be above 0, got 0"),
        (("--table", "no/such/folder/x.json"), "cannot write no/such/folder/x.json"),
    ],
)
def test_a_bad_option_or_no_gpu_is_one_line_and_exit_code_2(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(detect, "best_device", lambda: "cpu")
    assert command(monkeypatch, *words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert message in told.err


@pytest.mark.usefixtures("_on_a_gpu")
def test_the_command_tells_the_fastest_and_writes_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tuned(jobs: list[Job], tell: tune.Tell, workers: int) -> dict[Job, list[Trial]]:
        tell(f"with {workers} workers")
        return {job: [Trial(Tiles(64, 64), (1e-3,)), Trial(Tiles(64, 32), failure="no")] for job in jobs}

    monkeypatch.setattr(tune, "tune", tuned)
    table, times = tmp_path / "sm_90.json", tmp_path / "times.json"
    assert command(monkeypatch, "--dims", "64,128", "--workers", "3", "--table", str(table), "--json", str(times)) == 0
    out = capsys.readouterr().out
    assert "with 3 workers" in out
    assert "backward_q d=128 bfloat16" in out
    assert len(json.loads(table.read_text())["rows"]) == 6
    assert set(json.loads(times.read_text())) == {
        f"{kind} d={dim} bfloat16" for kind in ("forward", "backward_kv", "backward_q") for dim in (64, 128)
    }
