"""The roofline: what a device allows at each arithmetic intensity, and where implementations stand below it.

Source: Williams, Waterman and Patterson 2009, "Roofline". At an intensity of I operations a byte no more than
``min(I * bandwidth, rate)`` operations a second can be done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tilewise.bench.show import three
from tilewise.lab.plot import Plot, Series

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Point(NamedTuple):
    """One implementation: operations for each byte of main memory, and operations a second."""

    name: str
    intensity: float
    speed: float


def roof(intensity: float, bandwidth: float, rate: float) -> float:
    """Give the most operations a second at an intensity.

    >>> roof(10.0, 2e12, 1e14), roof(100.0, 2e12, 1e14)
    (20000000000000.0, 100000000000000.0)
    """
    return min(intensity * bandwidth, rate)


def sketch(points: Sequence[Point], bandwidth: float, rate: float, *, width: int = 72, height: int = 18) -> list[str]:
    r"""Draw the roof and the points with letters; both axes are logarithmic.

    >>> print("\n".join(sketch([Point("it", 1.0, 1e12)], 1e12, 1e13, width=24, height=5)[:6]))
         10 |           -------------
            |        ---
            |     ---
            |  ---
        0.8 |-a
            +------------------------
    """
    ridge = rate / bandwidth
    usable = [point for point in points if point.intensity > 0 and point.speed > 0]
    left = math.log(min([ridge / 8, *(point.intensity for point in usable)]) / 1.25)
    right = math.log(max([ridge * 8, *(point.intensity for point in usable)]) * 1.25)
    top = math.log(rate)
    bottom = math.log(min([math.exp(left) * bandwidth, *(point.speed for point in usable)]))
    rows = [[" "] * width for _ in range(height)]

    def place(speed: float) -> int:
        share = (math.log(speed) - bottom) / max(top - bottom, 1e-9)
        return height - 1 - min(max(round(share * (height - 1)), 0), height - 1)

    for column in range(width):
        intensity = math.exp(left + (right - left) * column / (width - 1))
        rows[place(roof(intensity, bandwidth, rate))][column] = "-"
    legend = []
    for letter, point in zip(LETTERS, usable, strict=False):
        column = round((math.log(point.intensity) - left) / (right - left) * (width - 1))
        while column < width - 1 and rows[place(point.speed)][column] in LETTERS:
            column += 1  # beside who stands there already
        rows[place(point.speed)][column] = letter
        share = point.speed / roof(point.intensity, bandwidth, rate)
        legend.append(
            f"  {letter}  {point.name}: {three(point.intensity)} FLOP/byte, {three(point.speed / 1e12)} TFLOP/s, "
            f"{share:.0%} of the roof"
        )
    marks = {0: rate / 1e12, height - 1: math.exp(bottom) / 1e12}
    lines = [f"{three(marks[row]) if row in marks else '':>11} |{''.join(cells)}" for row, cells in enumerate(rows)]
    lines.append(f"{'':>11} +{'-' * width}")
    ends = f"{three(math.exp(left))}", f"ridge {three(ridge)}", f"{three(math.exp(right))} FLOP/byte"
    lines.append(f"{'TFLOP/s':>11}  {ends[0]}{ends[1]:^{width - len(ends[0]) - len(ends[2])}}{ends[2]}".rstrip())
    return [line.rstrip() for line in lines] + legend


def plot(title: str, points: Sequence[Point], bandwidth: float, rate: float) -> Plot:
    """Draw the same as a picture."""
    ridge = rate / bandwidth
    intensities = [ridge / 8, ridge * 8, *(point.intensity for point in points if point.intensity > 0)]
    corners = [min(intensities), ridge, max(intensities)]
    line = [(x, roof(x, bandwidth, rate) / 1e12) for x in corners]
    series = [Series(point.name, [(point.intensity, point.speed / 1e12)], "marks") for point in points]
    series.append(Series("roof, as measured", line, "line"))  # last, so that colours are those of the other plots
    return Plot(title, "FLOP for each byte of main memory", "TFLOP/s", series, "log10", "log10")
