"""What holds for the lab's pages: every line that they show of a command is one that the command prints."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest

from tilewise import cli

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "lab").glob("*.md"))
SHOWN = re.compile(r"^```console\n\$ tilewise ([^\n]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@cache
def shown() -> list[tuple[str, str, str]]:
    """Give (page, command, lines) of every block that shows a command with its output."""
    return [(page.name, *found) for page in PAGES for found in SHOWN.findall(page.read_text(encoding="utf-8"))]


def words(line: str) -> str:
    """Give a line with one blank for many, as columns are as wide as their longest cell, and no rounding errors.

    Those are written like 3.6e-07, and differ between processors.
    """
    return re.sub(r"\d\.\de[-+]\d\d", "...", " ".join(line.split()))


@pytest.mark.parametrize(("page", "command", "lines"), shown(), ids=lambda value: value.partition("\n")[0])
def test_every_line_shown_is_printed_by_the_command(
    page: str, command: str, lines: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tilewise", *command.split()])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    printed = [words(line) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines.splitlines() if words(line) not in printed] == []


def test_every_page_begins_with_a_guess_ends_with_questions_and_names_files_that_are_there() -> None:
    assert [page.stem for page in PAGES] == ["break-it", "counting-bytes", "measuring", "step"]
    assert {page for page, _, _ in shown()} == {"break-it.md", "counting-bytes.md", "step.md"}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "Write down a guess" in text.partition("\n## ")[0]
        assert text.rstrip().endswith("</details>")
        for name in re.findall(r"`((?:src|tests|docs)/[\w./-]+)`", text):
            assert (ROOT / name).exists(), name
