"""What the commands share: examples below their help, lists of numbers, a console, a progress bar.

Nothing is loaded here before it is needed, so that ``tilewise --help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable

WIDEST = 240  # columns of a table


def example(*lines: str) -> str:
    """Write examples so that they stand below a command's help as they are typed."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def words(given: list[str]) -> list[str]:
    """Take apart what has commas or spaces between.

    >>> words(["64,128", "256"])
    ['64', '128', '256']
    """
    return [word for text in given for word in text.replace(",", " ").split()]


def whole_numbers(given: list[str] | None, what: str = "lengths") -> tuple[int, ...] | None:
    """Read whole numbers with commas between them; None where nothing was given.

    Raises:
        ValueError: something else; ``what`` says of what.
    """
    if not given:
        return None
    found = words(given)
    if not found or not all(word.isdecimal() for word in found):
        raise ValueError(f"{what} must be whole numbers with commas between them, got {' '.join(given)!r}")
    return tuple(int(word) for word in found)


def writable(*files: Path | None) -> None:
    """Refuse files whose folder is not there, before anything is computed.

    Raises:
        ValueError: it names the file.
    """
    for file in files:
        if file is not None and not file.resolve().parent.is_dir():
            raise ValueError(f"cannot write {file}: there is no folder {file.parent}")


def open_console() -> Console:
    """Give a console that prints plain text and never cuts a table off; a narrow terminal breaks its lines instead."""
    from rich.console import Console

    from tilewise.bench.show import WIDTH

    console = Console(highlight=False, markup=False)
    console.width = max(console.width, WIDTH)
    return console


def print_blocks(blocks: Iterable[ConsoleRenderable | str]) -> None:
    """Print text and tables in order; a terminal breaks lines of text where it likes, and no cell is ever cut off."""
    console = open_console()
    width = console.width
    for block in blocks:
        text = isinstance(block, str)
        console.width = width if text else max(width, WIDEST)
        console.print(block, soft_wrap=text and console.is_terminal)


@contextmanager
def show_progress() -> Iterator[Callable[[str, float], None]]:
    """Show on stderr, where that is a terminal, what is being done and how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    shown = console.is_terminal
    # Drawn between runs and never by a thread of its own, which would take time from what is being timed.
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not shown) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda doing, done: progress.update(task, completed=done, description=doing, refresh=True)
