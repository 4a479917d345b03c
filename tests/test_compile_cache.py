"""Compiled kernels on disk: made once by all processes together, read by the others, made anew where damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tilewise.backends import compile as compiling
from tilewise.backends.compile import Binary, kept

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "kernels"))


@pytest.mark.parametrize("damage", [b"", b"{}", b"\x7fELF without a head", None])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: bytes | None) -> None:
    binary = Binary("name", b"code\nwith a line", 128, 0, (8, 8), hidden=1)
    path = tmp_path / "one" / "kernel.bin"
    assert kept(path, lambda: binary) == binary
    path.write_bytes(path.read_bytes()[:-3] if damage is None else damage)
    other = replace(binary, threads=256)
    assert kept(path, lambda: other) == other
    assert kept(path, lambda: binary) == other


def test_a_folder_that_cannot_be_written_costs_the_cache_and_not_the_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    binary = Binary("name", b"code", 128, 0, (), hidden=0)
    assert kept(tmp_path / "file" / "kernel.bin", lambda: binary) == binary


MAKE_SLOWLY = """
import os, sys, time
from pathlib import Path
from tilewise.backends.compile import Binary, kept

folder = Path(sys.argv[1])
(folder / f"{os.getpid()}.here").touch()
while len(list(folder.glob("*.here"))) < 8:
    time.sleep(0.01)

def make():
    with (folder / "made").open("a") as file:
        file.write("once\\n")
    time.sleep(0.2)
    return Binary("name", os.urandom(64), 128, 0, (), hidden=0)

print(kept(folder / "kernel.bin", make).code.hex())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="files are not locked on Windows, where each process may compile")
def test_eight_processes_that_start_together_make_a_kernel_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKE_SLOWLY, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    printed = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * 8
    assert (tmp_path / "made").read_text() == "once\n"
    assert len(set(printed)) == 1
    assert len(printed[0].strip()) == 128


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert compiling.cache_folder().name == "kernels"
    monkeypatch.delenv("TILEWISE_CACHE_DIR")
    assert compiling.cache_folder() == Path("somewhere/tilewise")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compiling.cache_folder() == Path.home() / ".cache" / "tilewise"
