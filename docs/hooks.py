# ruff: noqa: INP001  # mkdocs loads this file by its path
"""Runs what the book shows when it is built: mkdocs hands each page over here before it is turned into HTML.

In a page under book/

- a block ```` ```console run ```` shows each line ``$ tilewise ...`` or ``$ python FILE ...`` with what it prints; a
  filter such as ``| head -9`` may follow;
- a block ```` ```python run ```` is shown with what it prints, and its names live on to the end of the page;
- a block ```` ```python hide ```` is run alike but not shown; if its last line is a picture or a table, that is;
- ``{{ expression }}`` is its value.

Whatever raises, an assert too, ends the build.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from html import escape
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from tilewise import cli
from tilewise.bench.show import Table
from tilewise.lab.views import styled

ROOT = Path(__file__).parents[1]
PART = re.compile(r"^```(console|python) (run|hide)\n(.*?)^```$|\{\{ (.+?) \}\}", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: object, **_: object) -> str:
    """Take a page from mkdocs and give it back with its blocks run."""
    name = str(getattr(getattr(page, "file", None), "src_uri", ""))
    return render(markdown, name) if name.startswith("book/") else markdown


def render(text: str, name: str) -> str:
    """Run a page's blocks in order, and put what they give in their place.

    Raises:
        RuntimeError: one of them failed; the cause is chained.
    """
    names: dict[str, object] = {}

    def replaced(found: re.Match[str]) -> str:
        language, kind, block, expression = found.groups()
        try:
            if expression:
                return escape(str(eval(expression, names)))  # noqa: S307  # our own pages
            if language == "console":
                return _shown("\n".join(command(line) for line in block.splitlines()))
            return run(block, names, shown=kind == "run")
        except Exception as error:
            raise RuntimeError(f"{name}: this failed with {error!r}:\n{found[0]}") from error

    return PART.sub(replaced, text)


def run(block: str, names: dict[str, object], *, shown: bool) -> str:
    """Run Python code; give it with what it prints, or only the picture or table that its last line is."""
    tree = ast.parse(block)
    end = tree.body[-1] if tree.body else None
    last = ast.Expression(end.value) if isinstance(end, ast.Expr) and not shown else None
    tree.body = tree.body[:-1] if last else tree.body
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(tree, "<page>", "exec"), names)  # noqa: S102  # our own pages
        value = eval(compile(last, "<page>", "eval"), names) if last else None  # noqa: S307
    if shown:
        return _shown(block.rstrip()) + (_shown(printed.getvalue().rstrip()) if printed.getvalue() else "")
    return f"<div>{styled(value) if isinstance(value, Table) else value}</div>" if value is not None else ""


def command(line: str) -> str:
    """Run one line of a console, and give it with what it prints."""
    words, _, after = line.removeprefix("$ ").partition(" | ")
    program, *arguments = words.split()
    text = _tilewise(arguments) if program == "tilewise" else _python(arguments)
    if after:
        done = subprocess.run(["sh", "-c", after], input=text, capture_output=True, text=True, check=True)  # noqa: S603, S607
        text = done.stdout
    return f"{line}\n{text.rstrip()}"


def _tilewise(arguments: list[str]) -> str:
    """Run the command line in this process, where everything is loaded already."""
    printed = io.StringIO()
    wide = mock.patch.dict(os.environ, COLUMNS="118")
    with mock.patch.object(sys, "argv", ["tilewise", *arguments]), redirect_stdout(printed), wide:
        try:
            cli.main()
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"exit code {stop.code}") from stop
    return printed.getvalue()


def _python(arguments: list[str]) -> str:
    """Run one of the examples; they need Triton, which not every system has."""
    if find_spec("triton") is None:
        return "(not run: no Triton on the machine that built this page)"
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout


def _shown(text: str) -> str:
    """Write text as a block of code; as HTML, so that it may stand inside folded answers."""
    return f"\n<pre><code>{escape(text)}</code></pre>\n"
