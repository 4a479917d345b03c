"""What holds for the lab's commands: the examples below their help work as printed, and help answers at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise import cli
from tilewise.bench import warmup
from tilewise.bench.terminal import writable
from tilewise.lab import measure
from tilewise.lab.commands import COMMANDS
from tilewise.machine import detect


def tilewise(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tilewise", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.parametrize("command", [name for name, _, _ in COMMANDS])
def test_the_examples_in_each_help_work_as_printed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(detect, "measure_rates", lambda *_: detect.Rates("float32", 1e10, 1e11))
    monkeypatch.setattr(warmup, "timings", lambda _: {"cold": {"first": 0.5, "second": 0.002}})
    monkeypatch.setattr(measure, "SECONDS", 0.001)
    assert tilewise(monkeypatch, command, "--help") == 0
    examples = re.findall(r"^ +tilewise (.+)$", capsys.readouterr().out.partition("Example")[2], re.MULTILINE)
    assert examples
    for line in examples:
        assert tilewise(monkeypatch, *line.split()) == 0, line
        assert capsys.readouterr().out.count("\n") > 5


def test_help_of_the_lab_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; sys.argv = ['tilewise', 'measure', '--help']\n"
        "from tilewise import cli\n"
        "try: cli.main()\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(cli.__file__).parents[1])!r})\n{code}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "[]"


def test_a_file_in_a_folder_that_is_not_there_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    writable(None, tmp_path / "there.json")
    with pytest.raises(ValueError, match="there is no folder"):
        writable(tmp_path / "absent" / "file.json")
