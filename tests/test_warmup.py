"""Warming up: kernels compiled ahead of time for a GPU that is not here, once for all processes; a first call timed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tilewise.bench import warmup
from tilewise.machine import detect

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter leaves nothing to compile"),
]


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def kept(folder: Path) -> list[str]:
    return sorted(file.name.partition("-")[0] for file in (folder / "kernels").glob("*.bin"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


ONE_JOB = """
import os, sys, time
from pathlib import Path
from tilewise.bench import warmup
from tilewise.machine import detect

warmup.look_like(90)
folder = Path(sys.argv[1])
(folder / f"{os.getpid()}.here").touch()
while len(list(folder.glob("*.here"))) < 8:
    time.sleep(0.01)
print(warmup.make(warmup.Job("decode", 16, "float16", appends=True)).compiled)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="files are not locked on Windows, where each process may compile")
def test_eight_processes_that_start_together_compile_each_kernel_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ONE_JOB, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    compiled = [int(process.communicate()[0]) for process in started]
    assert kept(tmp_path) == ["append_tokens", "attention_decode"]
    assert sum(compiled) == 2


def test_a_warm_up_compiles_for_a_gpu_that_is_not_here_and_a_second_finds_all(tmp_path: Path) -> None:
    job = warmup.Job("decode", 16, "float16")
    told: list[tuple[str, float]] = []
    first = list(warmup.warm_up([job], 90, 8, lambda doing, share: told.append((doing, share))))
    assert [(done.job, done.compiled, done.refusal) for done in first] == [(job, 1, "")]
    assert told == [("decode d=16 float16, group 1", 1.0)]
    assert kept(tmp_path) == ["attention_decode"]
    assert [done.compiled for done in warmup.warm_up([job], 90, 1)] == [0]


def test_the_command_says_what_it_compiled_and_where(tmp_path: Path) -> None:
    done = run("-m", "tilewise", "warmup", "--target", "sm_80", "--dim", "16", "--dtype", "float16",
               "--kinds", "forward", "--workers", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 calls on sm_80: 2 kernels compiled" in done.stdout
    assert str(tmp_path / "kernels") in done.stdout
    assert kept(tmp_path) == ["attention_forward"] * 2


def test_what_no_kernel_serves_is_said_and_is_no_success() -> None:
    done = list(warmup.warm_up([warmup.Job("forward", 16, "bfloat16")], 75, 1))
    assert "bfloat16 needs compute capability 8.0" in done[0].refusal or "serves it" in done[0].refusal


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kinds": ("sideways",)}, "kinds must be among forward, backward, decode; got sideways"),
        ({"dtypes": ("int8",)}, "dtypes must be among float16, bfloat16, float32; got int8"),
        ({"dims": (0,)}, "head dims must be 1 or more; got 0"),
        ({"dims": ()}, "head dims must be 1 or more; got none"),
    ],
)
def test_what_there_is_not_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        warmup.jobs(**given)


def test_targets_are_nvidia_architectures() -> None:
    assert warmup.target_of("sm_121") == 121
    assert warmup.target_of("9.0") == 90
    for name in ("gfx942", "sm_70", "sm_", "h100"):
        with pytest.raises(ValueError, match="must be an NVIDIA architecture from sm_75 on"):
            warmup.target_of(name)


def test_without_a_gpu_a_target_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = detect.detect("cpu")
    monkeypatch.setattr(detect, "detect", lambda *_: cpu)
    with pytest.raises(ValueError, match="name a target to compile for, such as sm_90"):
        warmup.target_of(None)


def test_a_first_call_is_timed_cold_and_warm_in_processes_of_their_own() -> None:
    found = warmup.timings("cpu", dim=16)
    assert set(found) == {"cold", "warm"}
    assert all(seconds > 0 for times in found.values() for seconds in times.values())
    lines = dict(warmup.timing_lines(found))
    assert lines["first call, cold"] == f"{found['cold']['first']:.2f} s, compiling"
    assert f"{found['warm']['first']:.2f} s" in lines["first call, warm"]


def test_a_first_call_that_fails_says_why() -> None:
    with pytest.raises(ValueError, match="the first call on nowhere failed"):
        warmup.timings("nowhere")
