"""What holds for the book: each page runs, opens with a guess, ends with folded answers, and hides no failure."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tilewise.bench import warmup

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "book").glob("*.md"))

_found = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
assert _found is not None
assert _found.loader is not None
hooks = importlib.util.module_from_spec(_found)
_found.loader.exec_module(hooks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs_and_its_asserts_hold(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # New processes are started by the timing page and by the example of a kernel, which have tests of their own.
    monkeypatch.setattr(warmup, "timings", lambda _: {"cold": {"first": 0.5, "second": 0.002}})
    monkeypatch.setattr(hooks, "_python", lambda _: "what the example prints")
    source = page.read_text(encoding="utf-8")
    shown = hooks.render(source, page.name)
    assert "{{" not in shown
    assert "```" not in shown, "a block that is not marked run or hide"
    assert shown.count("<pre><code>") >= source.count(" run\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_opens_with_a_guess_ends_with_folded_answers_and_names_files_that_are_there(page: Path) -> None:
    source = page.read_text(encoding="utf-8")
    assert "Write down a guess" in source.partition("\n## ")[0]
    assert source.rstrip().endswith("</details>")
    assert source.count("<details>") == source.count("</details>") >= 3
    for name in re.findall(r"`((?:src|tests|docs|examples)/[\w./-]+)`", source):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([\w./-]+\.md)\)|href=\"([\w./-]+)\.html\"", source):
        target = link[0] or f"{link[1]}.md"
        assert (page.parent / target).resolve().exists(), target


def test_every_page_has_its_place_in_the_book() -> None:
    listed = re.findall(r": (book/[\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == [f"book/{page.name}" for page in PAGES]


def test_a_block_is_shown_with_what_it_prints_and_its_names_live_on() -> None:
    shown = hooks.render("```python run\nx = 6 * 7\nprint(f'<{x}>')\n```\n\nx is {{ x }}.\n", "page")
    assert "x = 6 * 7" in shown
    assert "<pre><code>&lt;42&gt;</code></pre>" in shown
    assert shown.endswith("x is 42.\n")


def test_a_hidden_block_shows_its_last_line_alone() -> None:
    assert hooks.render("```python hide\npicture = '<svg/>'\npicture\n```", "page") == "<div><svg/></div>"
    assert hooks.render("```python hide\npicture = '<svg/>'\n```", "page") == ""


def test_a_command_is_shown_with_its_output_filtered_as_asked() -> None:
    shown = hooks.render("```console run\n$ tilewise step --row 1,3 | grep 0.135\n```", "page")
    assert re.search(r"<code>\$ tilewise step --row 1,3 \| grep 0.135\n +1 +3 +1 -&gt; 3 +0\.135 +1\.14</code>", shown)


@pytest.mark.parametrize(
    "text",
    [
        "```python run\nassert 1 == 2\n```",
        "{{ missing }}",
        "```console run\n$ tilewise step --block-q 0\n```",
        "```console run\n$ tilewise step | false\n```",
    ],
)
@pytest.mark.usefixtures("capsys")
def test_what_fails_ends_the_build_and_says_where(text: str) -> None:
    with pytest.raises(RuntimeError, match=r"page\.md: this failed"):
        hooks.render(text, "page.md")
