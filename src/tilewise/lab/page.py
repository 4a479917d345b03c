"""A benchmark's report as one page: tables, plots, roofline, environment. `tilewise bench --html FILE`.

The page holds everything it needs and asks no network. It follows the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path

from tilewise.bench.cases import Case
from tilewise.bench.report import Report, Row
from tilewise.bench.show import Table, blocks
from tilewise.lab import roofline
from tilewise.lab.bounds import UNTILED
from tilewise.lab.plot import Plot, Series
from tilewise.lab.roofline import Point
from tilewise.machine import cost
from tilewise.machine.shape import Shape, flops

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;background:#fff;color:#222}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2.5rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px;margin:1rem 0}
caption{text-align:left;font-weight:bold;padding:.3rem 0}
th,td{padding:.15rem .6rem;text-align:right;border-bottom:1px solid #ddd}
th.left,td.left{text-align:left}tr.ours td{font-weight:bold}tr.gap td{border-bottom:2px solid #999}
.wide{overflow-x:auto}.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:1rem}
.plots svg{width:100%;height:auto}
@media (prefers-color-scheme:dark){body{background:#16181c;color:#ddd}th,td{border-color:#33363c}}
"""

# What is drawn against N: title, label, and the value of a row.
MEASURES: tuple[tuple[str, str, str, Callable[[Row], float | None]], ...] = (
    ("time", "Time", "ms", lambda row: None if row.median is None else row.median * 1e3),
    ("speed", "Throughput", "TFLOP/s", lambda row: row.tflops),
    ("memory", "Peak memory beyond the inputs", "MiB", lambda row: None if row.memory is None else row.memory / 2**20),
    ("error", "Largest error", "absolute", lambda row: None if row.worst is None else row.worst.max),
)


def plots(report: Report) -> dict[str, Plot]:
    """Give all plots of a report by name, such as "forward-time"."""
    drawn: dict[str, Plot] = {}
    for which in dict.fromkeys(row.which for row in report.rows):
        rows = [row for row in report.rows if row.which == which]
        for name, title, unit, value in MEASURES:
            series = list(_series(rows, value))
            if name == "error":
                series.append(_budget(rows))
            if any(each.points for each in series):
                drawn[f"{which}-{name}"] = Plot(f"{title}, {which}", "N", unit, series)
        found = points(report, which)
        if found:
            length = max(row.length for row in rows if row.median is not None)
            title = f"Roofline, {which}, N={length}, bytes by the model"
            drawn[f"{which}-roofline"] = roofline.plot(title, found, report.roof["bandwidth"], report.roof["matmul"])
    return drawn


def _series(rows: list[Row], value: Callable[[Row], float | None]) -> Iterator[Series]:
    for name in dict.fromkeys(row.name for row in rows):
        pairs = [(float(row.length), value(row)) for row in rows if row.name == name]
        yield Series(name, [(length, found) for length, found in pairs if found is not None])


def _budget(rows: list[Row]) -> Series:
    """Give the least that any implementation may be off by at each length."""
    allowed: dict[int, float] = {}
    for row in rows:
        if row.worst is not None:
            allowed[row.length] = min(row.worst.max_budget, allowed.get(row.length, row.worst.max_budget))
    return Series("error budget", [(float(length), most) for length, most in sorted(allowed.items())], "line")


def points(report: Report, which: str) -> list[Point]:
    """Give each implementation's place below the roof at the longest length timed, bytes by the model's best case."""
    timed = [row for row in report.rows if row.which == which and row.median is not None]
    length = max((row.length for row in timed), default=0)
    found = []
    for row in timed:
        if row.length == length and row.median:
            shape = _shape(report.settings, length)
            backward = which == "backward"
            if row.name in UNTILED:
                moved = cost.naive_backward(shape) if backward else cost.naive(shape)
            else:
                moved = cost.tiled_backward_best(shape) if backward else cost.tiled_best(shape)
            work = flops(shape, backward=backward)
            found.append(Point(row.name, work / moved.bytes, work / row.median))
    return found


def _shape(settings: Mapping[str, object], length: int) -> Shape:
    sizes = {name: settings[name] for name in ("batch", "heads_q", "heads_kv", "dim", "dtype", "device")}
    return Case(length=length, causal=bool(settings["causal"]), window=settings["window"], **sizes).shape  # type: ignore[arg-type]  # as the settings hold them


def page(report: Report) -> str:
    """Write a report as one HTML page."""
    title = f"tilewise bench on {report.environment.get('device')}"
    drawn = plots(report)
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(report.date)}: <code>{escape(report.command)}</code></p>",
    ]
    for which in dict.fromkeys(row.which for row in report.rows):
        figures = [plot.svg() for name, plot in drawn.items() if name.startswith(f"{which}-")]
        parts.append(f'<h2>{escape(which)}</h2><div class="plots">{"".join(figures)}</div>')
    parts.append("<h2>Tables</h2>")
    parts += [table_html(block) if isinstance(block, Table) else _paragraphs(block) for block in blocks(report)]
    parts.append("<h2>Environment</h2>")
    told = Table("", ("what", "value"), (0, 1))
    for name, value in {
        **report.environment,
        **{f"settings: {key}": each for key, each in report.settings.items()},
    }.items():
        told.add(str(name), str(value))
    return "\n".join([*parts, table_html(told), "</body></html>"]) + "\n"


def _paragraphs(text: str) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in text.splitlines() if line.strip())


def table_html(table: Table) -> str:
    """Write a table.

    >>> table = Table("t", ("a", "b"))
    >>> table.add("1", "<x>")
    >>> table_html(table).splitlines()[-2]
    '<tr><td>1</td><td class="left">&lt;x&gt;</td></tr>'
    """

    def cells(tag: str, row: tuple[str, ...] | list[str]) -> str:
        left = ' class="left"'
        return "".join(f"<{tag}{left if n in table.left else ''}>{escape(x)}</{tag}>" for n, x in enumerate(row))

    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    lines = [f'<div class="wide"><table>{caption}<tr>{cells("th", list(table.columns))}</tr>']
    for index, row in enumerate(table.rows):
        kinds = ["ours"] * any(cell.startswith("tilewise/") for cell in row[:2]) + ["gap"] * (index in table.ends)
        kind = f' class="{" ".join(kinds)}"' if kinds else ""
        lines.append(f"<tr{kind}>{cells('td', row)}</tr>")
    return "\n".join([*lines, "</table></div>"])


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Write each plot as .svg into a folder, which is made, and as .png too where vl-convert-python is there."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, plot in plots(report).items():
        for ending in (".svg", ".png") if _can_png() else (".svg",):
            path = folder / f"{name}{ending}"
            plot.write(path)
            written.append(path)
    return written


def _can_png() -> bool:
    from importlib.util import find_spec

    return find_spec("vl_convert") is not None
