"""The documentation is true: what it quotes stands in the files that it names, and its numbers in the results."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "docs" / "hopper.md", *sorted((ROOT / "docs" / "kernels").glob("*.md"))]
BLOCK = re.compile(r"(?:^From `([^`]+)`:\n\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEFAULT_TILES = "online 2048x8 w32 x2"  # how the sweep names what is now the default for long rows


def quotations(page: Path) -> list[tuple[str, str]]:
    """Give (file, code) of every block of a page; "" where no file is named."""
    return [(file, code) for file, _, code in BLOCK.findall(page.read_text(encoding="utf-8"))]


def contains(text: str, code: str) -> bool:
    """Say whether lines stand in a text, indented as they are or as a whole otherwise."""
    lines, wanted = text.splitlines(), textwrap.dedent(code).splitlines()
    return any(
        textwrap.dedent("\n".join(lines[start : start + len(wanted)])).splitlines() == wanted
        for start in range(len(lines) - len(wanted) + 1)
        if lines[start].strip() == wanted[0].strip()
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_quotation_stands_in_the_file_that_it_names(page: Path) -> None:
    found = quotations(page)
    assert found
    for file, code in found:
        assert file, f"{page.name} quotes without a file:\n{code}"
        assert contains((ROOT / file).read_text(encoding="utf-8"), code), f"not in {file}:\n{code}"


def test_a_quotation_that_differs_is_seen() -> None:
    text = "def f():\n    a = 1\n    b = 2\n    return a\n"
    assert contains(text, "a = 1\nb = 2\n")
    assert contains(text, "    b = 2\n    return a\n")
    assert not contains(text, "a = 1\nb = 3\n")
    assert not contains(text, "a = 1\n    b = 2\n")
    assert not contains(text, "b = 2\na = 1\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = set(re.findall(r"`((?:src|examples|tests|benchmarks)/[\w./-]+)`", page.read_text(encoding="utf-8")))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.skipif(not RESULTS.is_dir(), reason="a source archive carries no results")
def test_the_softmax_pages_numbers_are_those_of_the_results() -> None:
    text = (ROOT / "docs" / "kernels" / "row-softmax.md").read_text(encoding="utf-8")
    number = r" ([\d.]+) \|"
    rows = re.findall(rf"^\| (\d+) x (\d+) \|{number}{number}{number} `([\w.-]+)` \|$", text, re.MULTILINE)
    assert len(rows) == 6
    for size_rows, cols, *told, file in rows:
        results = json.loads((RESULTS / file).read_text(encoding="utf-8"))["results"]
        found = results[f"forward {size_rows}x{cols}"]
        ours = DEFAULT_TILES if "sweep" in file else "tilewise"
        measured = [found[name]["of the copy"] for name in (ours, "torch.softmax", "torch.compile")]
        assert told == [f"{share:.2f}" for share in measured], (size_rows, cols)
