"""Line plots as SVG, written here so that a page needs neither a network nor a plotting library; PNG by vl-convert.

A plot follows the reader's light or dark setting. Series differ by marker as well as by colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Literal

Scale = Literal["linear", "log2", "log10"]

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 28, 34, 44
# Colours after Okabe and Ito, which those who see few colours can tell apart, of a lightness that shows on white and on
# black.
COLOURS = ("#2f7fd0", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#a0705f", "#8a8a8a")
MARKERS = ("circle", "square", "diamond", "triangle")
STYLE = """
.plot{background:#fff;font:12px system-ui,sans-serif}
.plot text{fill:#222}.plot .grid{stroke:#ddd}.plot .axis{stroke:#888}
@media (prefers-color-scheme:dark){.plot{background:#16181c}
.plot text{fill:#ddd}.plot .grid{stroke:#33363c}.plot .axis{stroke:#888}}
"""


@dataclass(frozen=True)
class Series:
    """Points of one name: (x, y); ``kind``: a line with markers, a line alone, or markers alone."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: Literal["both", "line", "marks"] = "both"


@dataclass(frozen=True)
class Plot:
    """What to draw. Points at or below 0 are left out where an axis is logarithmic."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_scale: Scale = "log2"
    y_scale: Scale = "log10"

    def points(self, series: Series) -> list[tuple[float, float]]:
        """Give a series' points that can be drawn."""
        return [
            (x, y)
            for x, y in series.points
            if math.isfinite(x)
            and math.isfinite(y)
            and (x > 0 or self.x_scale == "linear")
            and (y > 0 or self.y_scale == "linear")
        ]

    def svg(self) -> str:
        """Draw it.

        >>> drawn = Plot("t", "N", "ms", [Series("a", [(1, 1), (2, 4)])]).svg()
        >>> drawn.startswith("<svg"), drawn.count("<circle")
        (True, 3)
        """
        drawn = [self.points(series) for series in self.series]
        everything = [point for points in drawn for point in points] or [(1.0, 1.0)]
        across = _Axis.around([x for x, _ in everything], self.x_scale, LEFT, WIDTH - RIGHT)
        up = _Axis.around([y for _, y in everything], self.y_scale, HEIGHT - BOTTOM, TOP)
        legend = 18 * ((len(self.series) + 1) // 2) + 6
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" viewBox="0 0 {WIDTH} {HEIGHT + legend}">',
            f"<title>{escape(self.title)}</title><style>{STYLE}</style>",
            _text(WIDTH / 2, 18, self.title, "middle", 'font-weight="bold"'),
        ]
        parts += self._axes(across, up)
        for number, (series, points) in enumerate(zip(self.series, drawn, strict=True)):
            places = [(across.place(x), up.place(y)) for x, y in points]
            parts += _series(places, number, series.kind, [f"{series.name}: {x:g}, {y:g}" for x, y in points])
        for number, series in enumerate(self.series):
            x, y = LEFT + (number % 2) * (WIDTH - LEFT) / 2, HEIGHT + 18 * (number // 2) + 8
            parts += _series([(x, y), (x + 20, y)], number, series.kind, [])
            parts += _mark(x + 10, y, number, "") if series.kind != "line" else []
            parts.append(_text(x + 28, y + 4, series.name))
        return "\n".join([*parts, "</svg>"])

    def _axes(self, across: _Axis, up: _Axis) -> Iterator[str]:
        bottom, left = HEIGHT - BOTTOM, LEFT
        for value in across.ticks():
            x = across.place(value)
            yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
            yield _text(x, bottom + 16, _short(value), "middle")
        for value in up.ticks():
            y = up.place(value)
            yield f'<line class="grid" x1="{left}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield _text(left - 6, y + 4, _short(value), "end")
        yield f'<line class="axis" x1="{left}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
        yield f'<line class="axis" x1="{left}" x2="{left}" y1="{TOP}" y2="{bottom}"/>'
        yield _text((left + WIDTH - RIGHT) / 2, HEIGHT - 8, self.x_label, "middle")
        middle = (TOP + bottom) / 2
        yield _text(14, middle, self.y_label, "middle", f'transform="rotate(-90 14 {middle:.0f})"')

    def write(self, path: Path) -> None:
        """Write it as .svg or .png, by the file's name.

        Raises:
            ValueError: another ending, or PNG without vl-convert-python.
        """
        if path.suffix == ".svg":
            path.write_text(self.svg() + "\n", encoding="utf-8")
        elif path.suffix == ".png":
            path.write_bytes(png(self.svg()))
        else:
            raise ValueError(f"a plot is written as .svg or .png; got {path.name!r}")


def png(svg: str) -> bytes:
    """Turn SVG into PNG.

    Raises:
        ValueError: vl-convert-python is not installed.
    """
    try:
        vl_convert = import_module("vl_convert")
    except ImportError as error:
        raise ValueError("PNG needs vl-convert-python: pip install tilewise[report]; SVG needs nothing") from error
    drawn: bytes = vl_convert.svg_to_png(svg, scale=2)
    return drawn


@dataclass(frozen=True)
class _Axis:
    """Numbers from ``low`` to ``high`` on a stretch of the paper."""

    low: float
    high: float
    scale: Scale
    start: float
    stop: float

    @staticmethod
    def around(values: Sequence[float], scale: Scale, start: float, stop: float) -> _Axis:
        """Make an axis on which values lie: to the next tick on both sides."""
        low, high = min(values), max(values)
        if scale == "linear":
            low, high = min(low, 0.0), high if high > 0 else 1.0
            return _Axis(low, high * 1.05, scale, start, stop)
        base = 2.0 if scale == "log2" else 10.0
        least, most = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
        return _Axis(base**least, base ** max(most, least + 1), scale, start, stop)

    def place(self, value: float) -> float:
        """Give the place of a number on the paper."""
        if self.scale == "linear":
            share = (value - self.low) / (self.high - self.low)
        else:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Give round numbers, ten at the most."""
        if self.scale == "linear":
            step = 10.0 ** math.floor(math.log10(self.high - self.low))
            step = next(
                step * part for part in (0.1, 0.2, 0.5, 1.0, 2.0) if (self.high - self.low) / (step * part) <= 8
            )
            first = math.ceil(self.low / step)
            return [step * count for count in range(first, math.floor(self.high / step) + 1)]
        base = 2.0 if self.scale == "log2" else 10.0
        least, most = round(math.log(self.low, base)), round(math.log(self.high, base))
        stride = -(-(most - least + 1) // 10)
        return [base**power for power in range(least, most + 1, stride)]


def _short(value: float) -> str:
    """Write a tick: 16384 as 16384, a millionth as 1e-06.

    >>> _short(16384.0), _short(0.25), _short(2.0**20)
    ('16384', '0.25', '1048576')
    """
    return f"{value:.0f}" if value >= 1 and value == int(value) and value < 1e7 else f"{value:g}"


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _series(places: Sequence[tuple[float, float]], number: int, kind: str, names: Sequence[str]) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    parts = []
    if kind != "marks" and len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashes = ' stroke-dasharray="6 4"' if kind == "line" else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
    if kind != "line":
        for (x, y), name in zip(places, names, strict=False):
            parts += _mark(x, y, number, name)
    return parts


def _mark(x: float, y: float, number: int, name: str) -> list[str]:
    colour, shape = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    title = f"<title>{escape(name)}</title>" if name else ""
    if shape == "circle":
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{title}</circle>']
    corners = {
        "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
        "triangle": ((0, -5), (5, 4), (-5, 4)),
    }[shape]
    path = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return [f'<polygon points="{path}" fill="{colour}">{title}</polygon>']
