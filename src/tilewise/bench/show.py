"""How a report looks: the same cells as a table for terminals and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from tilewise.bench.report import Agreement, Report, Row, TensorError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

COLUMNS = ("N", "implementation", "ms", "20-80 %", "TFLOP/s", "x SDPA", "extra MiB", "error", "budget", "model ms")
MEMORY_COLUMNS = ("N", "SDPA", "MiB", "of it dense", "tilewise", "MiB", "SDPA / tilewise")
UNUSUAL = {"memory": "no memory", "time": "no time", "wrong": "WRONG", "failed": "failed"}
WIDTH = 118  # where the output is no terminal


class Table:
    """A titled table of text; ``left`` names the columns that are left-aligned."""

    def __init__(self, title: str, columns: Sequence[str], left: Sequence[int] = (1,)) -> None:
        self.title = title
        self.columns = columns
        self.left = left
        self.rows: list[tuple[str, ...]] = []
        self.ends: set[int] = set()  # rows with a gap behind them

    def add(self, *cells: str) -> None:
        """Add one row."""
        self.rows.append(cells)

    def gap(self) -> None:
        """Leave a gap behind the last row."""
        self.ends.add(len(self.rows) - 1)

    def markdown(self) -> str:
        """Write it in Markdown."""
        rule = ["---" if index in self.left else "---:" for index in range(len(self.columns))]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, rule, *self.rows)]
        return "\n".join([*([f"**{self.title}**", ""] if self.title else []), *lines])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = RichTable(
            title=self.title or None,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for index, name in enumerate(self.columns):
            table.add_column(name, justify="left" if index in self.left else "right", no_wrap=True)
        for index, cells in enumerate(self.rows):
            style = "bold" if any(cell.startswith("tilewise/") for cell in cells[:2]) else None
            table.add_row(*(Text(cell) for cell in cells), style=style, end_section=index in self.ends)
        yield table


def blocks(report: Report) -> Iterator[Table | str]:
    """Yield what a report says, in order: text and tables."""
    yield heading(report)
    for which in dict.fromkeys(row.which for row in report.rows):
        yield rows_table(report, which)
    yield from footnotes(report)
    if report.settings.get("window") is not None or report.settings.get("alibi"):
        yield from (table for which in report.chosen if (table := memory_table(report, which)).rows)
    if report.real_input:
        yield f"real input: {report.real_input_note}"
        yield agreement_table(report.real_input)
    yield "\n".join(summary(report))


def markdown(report: Report) -> str:
    """Write a whole report in Markdown."""
    return "\n\n".join(x.markdown() if isinstance(x, Table) else x.replace("\n", "\n\n") for x in blocks(report)) + "\n"


def heading(report: Report) -> str:
    """Say what was measured on what, and what the roof is."""
    told, settings = report.environment, report.settings
    problem = [f"B={settings['batch']}", f"H={settings['heads_q']}", f"d={settings['dim']}", str(settings["dtype"])]
    if settings["heads_kv"] != settings["heads_q"]:
        problem.insert(2, f"H_kv={settings['heads_kv']}")
    problem += ["causal"] * bool(settings["causal"]) + ["ALiBi"] * bool(settings["alibi"])
    if settings["window"] is not None:
        problem.append(f"window {settings['window']}")
    versions = [f"{name} {told[name]}" for name in ("torch", "triton", "numpy") if told.get(name)]
    roof = (
        f"copy {report.roof['bandwidth'] / 1e9:,.1f} GB/s, matrix product {report.roof['matmul'] / 1e12:,.3g} TFLOP/s"
    )
    units = "cores" if told.get("capability") == "cpu" else "SMs"
    parts = [str(told.get("device"))] + [f"{told.get('sms')} {units}"] * bool(told.get("sms"))
    machine = ", ".join([*parts, f"{told.get('threads')} CPU threads", *versions])
    return f"tilewise {told.get('tilewise')} on {machine}\n{', '.join(problem)}; measured roof: {roof}"


def rows_table(report: Report, which: str) -> Table:
    """Set all implementations of one direction side by side."""
    table = Table(f"{which}", COLUMNS)
    before: int | None = None
    for row in (row for row in report.rows if row.which == which):
        if before is not None and row.length != before:
            table.gap()
        best = report.best_sdpa(which, row.length)
        table.add(*_cells(row, repeated=row.length == before, chosen=report.chosen.get(which), best=best))
        before = row.length
    return table


def _cells(row: Row, *, repeated: bool, chosen: str | None, best: Row | None) -> tuple[str, ...]:
    name = row.name + ("*" if row.name == f"tilewise/{chosen}" else "")
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    if best is not None and row.name == best.name:
        ratio = "best"
    middle = milliseconds(row.median) if row.median is not None else UNUSUAL.get(row.status, "")
    around = "" if row.p20 is None or row.p80 is None else f"{milliseconds(row.p20)}-{milliseconds(row.p80)}"
    return (
        "" if repeated else str(row.length),
        name,
        middle,
        around,
        "" if row.tflops is None else three(row.tflops),
        ratio,
        mebibytes(row.memory),
        *error_cells(row.worst),
        "" if row.predicted is None else milliseconds(row.predicted),
    )


def footnotes(report: Report) -> Iterator[str]:
    """Yield what did not fit in a cell."""
    lines = [
        f"N={row.length} {row.which} {row.name}: {UNUSUAL[row.status]}: {row.note}" for row in report.rows if row.note
    ]
    reasons: dict[str, list[str]] = {}
    for name, reason in report.absent.items():
        reasons.setdefault(reason, []).append(name)
    lines += [f"not here: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if report.rows:
        lines.append(
            "* is what tilewise takes by itself. ms: median, and 20th to 80th percentile, of interleaved rounds. "
            "x SDPA: speed against the fastest of SDPA's kernels. extra MiB: peak beyond q, k, v; results and dense "
            "masks included. error: the largest error against float64 of out, or of the worst gradient, beside what it "
            "may be. model ms: the least time by the counting model on the measured roof, said before the run."
        )
    lines += report.notes
    yield "\n".join(lines)


def memory_table(report: Report, which: str) -> Table:
    """Set the memory of SDPA with its dense mask beside that of tilewise, length by length."""
    table = Table(f"peak extra memory, {which}: SDPA is given a dense mask, tilewise the rule", MEMORY_COLUMNS, (1, 4))
    chosen = f"tilewise/{report.chosen.get(which)}"
    for length in dict.fromkeys(row.length for row in report.rows):
        rows = [row for row in report.rows if (row.which, row.length) == (which, length)]
        ours = next((row for row in rows if row.name == chosen), None)
        for row in (row for row in rows if row.name.startswith("sdpa/")):
            if ours is None:
                continue
            both = row.memory is not None and ours.memory
            table.add(
                str(length),
                row.name,
                mebibytes(row.memory) or UNUSUAL.get(row.status, ""),
                mebibytes(row.dense),
                ours.name,
                mebibytes(ours.memory) or UNUSUAL.get(ours.status, ""),
                f"{(row.memory or 0) / (ours.memory or 1):.1f}" if both else "",
            )
    return table


def agreement_table(found: Sequence[Agreement]) -> Table:
    """Say who agrees on the real input."""
    table = Table("", ("implementation", "worst tensor", "error", "budget", "agree"), (0, 1))
    for entry in found:
        worst = entry.worst
        told = worst.tensor if worst else entry.note
        table.add(entry.name, told, *error_cells(worst), "yes" if entry.agrees else "NO")
    return table


def summary(report: Report) -> Iterator[str]:
    """Say in a few lines how tilewise fared: the best and the worst of it."""
    for name in dict.fromkeys(row.name for row in report.rows if row.name.startswith("tilewise/")):
        for which in report.chosen:
            rows = [row for row in report.rows if row.name == name and row.which == which]
            timed = [(row.ratio, row) for row in rows if row.ratio is not None]
            mine = " (its own choice)" if name == f"tilewise/{report.chosen[which]}" else ""
            if timed:
                best, worst = max(timed, key=lambda pair: pair[0]), min(timed, key=lambda pair: pair[0])
                told = f"{name}{mine}, {which}: {best[0]:.2f} times the speed of SDPA's fastest kernel"
                at = f" at best (N={best[1].length}), {worst[0]:.2f} times at worst (N={worst[1].length})"
                yield told + (at if len(timed) > 1 else f" (N={best[1].length})")
            untimed = [f"N={row.length} {UNUSUAL[row.status]}" for row in rows if row.status != "ok"]
            if untimed:
                yield f"{name}, {which}: not timed: {', '.join(untimed)}"
    if report.real_input:
        verdict = "yes" if all(entry.agrees for entry in report.real_input) else "NO"
        yield f"agree on the real input: {verdict}. {report.seconds:.0f} s of {report.settings['seconds']:.0f} s."


# ---- numbers --------------------------------------------------------------------------------------------------------


def three(value: float) -> str:
    """Write a number with three digits that count, and no exponent.

    >>> three(0.012345), three(1.2345), three(123.45), three(12345.6)
    ('0.0123', '1.23', '123', '12346')
    """
    if value >= 100:
        return f"{value:.0f}"
    text = f"{value:.3g}"
    return f"{value:.6f}" if "e" in text else text


def milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds."""
    return three(seconds * 1e3)


def mebibytes(size: int | None) -> str:
    """Write bytes as MiB, or nothing."""
    return "" if size is None else three(size / 2**20)


def error_cells(error: TensorError | None) -> tuple[str, str]:
    """Write a tensor's largest error and its budget."""
    return ("", "") if error is None else (f"{error.max:.1e}", f"{error.max_budget:.1e}")
