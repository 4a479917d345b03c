"""What the lab's page and the book draw: memory ladder, bars of bytes, masks by tiles, steps, joined splits, roofline.

Nothing is computed here that another module computes already: counts come from `lab/count.py`, steps from
`lab/step.py`, tiles from `problem/blocks.py`, joined parts from `api.merge`. Pictures are SVG text that follows the
reader's light or dark setting.

>>> tiles = mask_tiles(Mask(8, 8, right=0), 4, 2)
>>> [sum(tile.kind == kind for tile in tiles) for kind in KINDS]
[2, 4, 2]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from tilewise.bench.show import Table, mebibytes, milliseconds, three
from tilewise.lab.count import BACKWARD, FORWARD, Question, Way
from tilewise.lab.page import table_html
from tilewise.lab.plot import Plot, Series
from tilewise.lab.roofline import roof
from tilewise.lab.step import Forward, Frame, Numbers, moved, number, vector
from tilewise.machine.device import GIB, KIB, MIB, Device, dtype_name
from tilewise.problem.blocks import block_ranges, is_visible

# Blue and orange differ for all eyes, and kinds of tiles differ by what is drawn in them too.
STYLE = """
.view{background:#fff;font:13px system-ui,sans-serif;max-width:100%;height:auto}
.view text{fill:#222}.view .bar,.view .seen{fill:#2f7fd0}.view .tile{fill:none;stroke:#777}
.view .partial{fill:#f6c9a0;stroke:#b34700}.view .full{fill:#bcd8f5;stroke:#1d5c9c}
.view .skipped{fill:#f1f1f1;stroke:#aaa}
.view .now{fill:none;stroke:#b34700;stroke-width:3}.view .faint{fill:#666}.view .done{fill:#dcebfa}
@media (prefers-color-scheme:dark){
.view{background:#16181c}.view text{fill:#ddd}.view .bar,.view .seen{fill:#5aa2ea}.view .tile{stroke:#888}
.view .partial{fill:#5a3413;stroke:#f0a060}.view .full{fill:#1c3c5e;stroke:#8cc0f4}
.view .skipped{fill:#22252a;stroke:#555}
.view .now{stroke:#ffb070}.view .faint{fill:#aaa}.view .done{fill:#1b2c40}}
"""
TABLE_STYLE = """
.lab table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px;margin:.5rem 0}
.lab caption{text-align:left;font-weight:bold;padding:.3rem 0;caption-side:top}.lab .wide{overflow-x:auto}
.lab table th,.lab table td{padding:.15rem .6rem;text-align:right;border-bottom:1px solid #8886;white-space:pre}
.lab table th.left,.lab table td.left{text-align:left}.lab tr.gap td{border-bottom:2px solid #888}
"""
CACHED = "tiled, reloads cached"


def svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """Put parts on a sheet of paper; the title is what a screen reader says."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="view" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
    sizes = f'width="{width:.0f}" height="{height:.0f}">'
    return "\n".join([head + sizes, f"<title>{escape(title)}</title><style>{STYLE}</style>", *parts, "</svg>"])


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    """Write words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Draw a rectangle of a kind."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}"/>'


def styled(table: Table) -> str:
    """Write a table as HTML that brings its own looks."""
    return f'<div class="lab"><style>{TABLE_STYLE}</style>{table_html(table)}</div>'


class Bar(NamedTuple):
    """A name, a length from 0 to 1, and what is written behind it."""

    name: str
    share: float
    words: str


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Draw bars side by side.

    >>> bars("t", [Bar("a", 1.0, "1"), Bar("b", 0.5, "2")]).count('class="bar"')
    2
    """
    left, most, line = 200.0, 300.0, 28.0
    parts = []
    for index, bar in enumerate(rows):
        y = 8 + index * line
        parts.append(text(left - 8, y + 15, bar.name, "end"))
        parts.append(box(left, y + 2, max(bar.share * most, 1.5), line - 9, "bar"))
        parts.append(text(left + bar.share * most + 8, y + 15, bar.words))
    return svg(720, 12 + len(rows) * line, title, parts)


# ---- memory ladder --------------------------------------------------------------------------------------------------


class Level(NamedTuple):
    """One level of memory: all of it on the device in bytes, its bytes a second where known, and how it is shared."""

    name: str
    size: int
    bandwidth: float | None
    shared: str


def levels(device: Device) -> list[Level]:
    """Give what a device has, from the nearest level to main memory; levels that nobody tells are left out.

    >>> from tilewise.machine.device import find
    >>> [level.name for level in levels(find("A100"))]
    ['registers', 'shared memory and L1', 'L2 cache', 'main memory']
    """
    units, cpu = device.sms or 1, device.capability is None
    unit = "core" if cpu else "multiprocessor"
    l2 = device.l2_bytes
    found = (
        ("registers", _times(device.registers_per_sm, 4 * units), None, f"of each {unit}"),
        ("L1 caches", _times(device.l1_bytes, units), None, f"of each {unit}"),
        ("shared memory and L1", _times(device.shared_per_sm, units), device.onchip_bandwidth, f"of each {unit}"),
        (
            "L2 caches" if cpu else "L2 cache",
            _times(l2, units if cpu else 1),
            None,
            "of each core" if cpu else "of all",
        ),
        ("L3 cache", device.l3_bytes, None, "of all"),
        ("main memory", device.memory_bytes, device.bandwidth, "of all"),
    )
    return [Level(name, size, speed, shared) for name, size, speed, shared in found if size]


def _times(size: int | None, count: int) -> int | None:
    return None if size is None else size * count


def written(size: float) -> str:
    """Write a number of bytes.

    >>> written(164 * 1024), written(80 * 2**30)
    ('164 KiB', '80 GiB')
    """
    unit, name = next((each for each in ((GIB, "GiB"), (MIB, "MiB")) if size >= each[0]), (KIB, "KiB"))
    return f"{three(size / unit)} {name}"


def ladder_table(device: Device) -> Table:
    """Set the levels below one another: how large, how fast, how long to read it all once."""
    table = Table(device.name, ("level", "size", "TB/s", "read once, us", "shared"), (0, 4))
    for level in levels(device):
        speed = level.bandwidth
        table.add(
            level.name,
            written(level.size),
            "" if speed is None else three(speed / 1e12),
            "" if speed is None else three(1e6 * level.size / speed),
            level.shared,
        )
    return table


def ladder(device: Device) -> str:
    """Draw the levels; each step of a bar's length is the same factor."""
    found = levels(device)
    rows = []
    for level in found:
        share = np.log(level.size / 2**14) / np.log(2**40 / 2**14)
        speed = "" if level.bandwidth is None else f", {three(level.bandwidth / 1e12)} TB/s"
        rows.append(Bar(level.name, float(np.clip(share, 0.01, 1)), written(level.size) + speed))
    return bars(f"memory ladder of {device.name}, logarithmic", rows)


# ---- bytes ----------------------------------------------------------------------------------------------------------


def ways(*, backward: bool, cached: bool) -> list[Way]:
    """Give the ways of computing to set side by side: the tiled ones with their reloads from cache, or from memory.

    >>> [way.name for way in ways(backward=False, cached=True)][-1]
    'tiled, reloads cached'
    """
    every = BACKWARD if backward else FORWARD
    return [way for way in every if not way.name.startswith("tiled") or (way.name == CACHED) == cached]


def byte_bars(question: Question, chosen: Sequence[Way]) -> str:
    """Draw the bytes that each way moves through main memory, in proportion."""
    costs = [way.cost(question) for way in chosen]
    most = max(cost.bytes for cost in costs)
    rows = [
        Bar(way.name, cost.bytes / most, f"{mebibytes(cost.bytes)} MiB, {three(cost.intensity)} FLOP/byte")
        for way, cost in zip(chosen, costs, strict=True)
    ]
    return bars(f"bytes through main memory: {question}", rows)


def floor_words(question: Question, chosen: Sequence[Way], device: Device) -> Iterator[str]:
    """Say what each way takes at the least on a device, and what takes it."""
    for way in chosen:
        seconds = way.cost(question).seconds(device, question.dtype)
        if seconds:
            slowest = max(seconds, key=lambda part: seconds[part])
            yield f"{way.name}: {milliseconds(seconds[slowest])} ms at the least, held by {slowest}"


def roofline(question: Question, chosen: Sequence[Way], device: Device) -> Plot | None:
    """Draw a device's roof, and the most that each way may reach below it; None where a speed is not known."""
    rate, ridge = device.rates.get(dtype_name(question.dtype)), device.ridge_point(question.dtype)
    if rate is None or ridge is None or device.bandwidth is None:
        return None
    series, spread = [], [ridge / 8, ridge * 8]
    for way in chosen:
        cost = way.cost(question)
        spread.append(cost.intensity)
        speed = cost.flops / cost.time_floor(device, question.dtype)
        series.append(Series(way.name, [(cost.intensity, speed / 1e12)], "marks"))
    corners = [min(spread), ridge, max(spread)]
    line = [(x, roof(x, device.bandwidth, rate) / 1e12) for x in corners]
    series.append(Series(f"roof of {device.name}, ridge {three(ridge)}", line, "line"))
    return Plot("At the most", "FLOP for each byte of main memory", "TFLOP/s", series, "log10", "log10")


# ---- masks ----------------------------------------------------------------------------------------------------------

Kind = Literal["skipped", "partial", "full"]
KINDS: tuple[Kind, ...] = ("skipped", "partial", "full")


@dataclass(frozen=True)
class Mask:
    """Queries, keys and the band between them, as `tilewise.problem.blocks` takes it."""

    len_q: int
    len_kv: int
    left: int | None = None
    right: int | None = None
    offset: int = 0


class Tile(NamedTuple):
    """One tile: its first query and key, its size as far as there are queries and keys, and what is done with it."""

    q_start: int
    kv_start: int
    q_size: int
    kv_size: int
    kind: Kind


def mask_tiles(mask: Mask, block_q: int, block_kv: int) -> list[Tile]:
    """Say of each tile whether it is skipped, visited with a mask, or visited without."""
    tiles = []
    for q_start in range(0, mask.len_q, block_q):
        q_stop = min(q_start + block_q, mask.len_q)
        first, full_first, full_stop, stop = block_ranges(
            q_start, q_stop, 0, mask.len_kv, mask.left, mask.right, mask.offset, block_kv
        )
        for block, kv_start in enumerate(range(0, mask.len_kv, block_kv)):
            kv_size = min(block_kv, mask.len_kv - kv_start)
            inside = first <= block < stop
            kind: Kind = "skipped" if not inside else "full" if full_first <= block < full_stop else "partial"
            tiles.append(Tile(q_start, kv_start, q_stop - q_start, kv_size, kind))
    return tiles


def mask_words(tiles: Sequence[Tile]) -> str:
    """Count the tiles of each kind.

    >>> mask_words(mask_tiles(Mask(8, 8, right=0), 4, 2))
    '8 tiles: 2 skipped, 4 partial, 2 full'
    """
    counts = ", ".join(f"{sum(tile.kind == kind for tile in tiles)} {kind}" for kind in KINDS)
    return f"{len(tiles)} tiles: {counts}"


def mask_picture(mask: Mask, block_q: int, block_kv: int) -> str:
    """Draw the tiles by kind, and in partial ones the pairs that are visible; queries go down, keys to the right."""
    tiles = mask_tiles(mask, block_q, block_kv)
    cell = min(24.0, 420.0 / max(mask.len_q, mask.len_kv))
    left, top = 64.0, 30.0
    seen = is_visible(
        np.arange(mask.len_q)[:, None],
        np.arange(mask.len_kv)[None, :],
        0,
        mask.len_kv,
        mask.left,
        mask.right,
        mask.offset,
    )
    seen = np.broadcast_to(seen, (mask.len_q, mask.len_kv))
    parts = [text(left, 18, "keys"), text(left - 8, top + 14, "queries", "end")]
    for tile in tiles:
        x, y = left + tile.kv_start * cell, top + tile.q_start * cell
        parts.append(box(x, y, tile.kv_size * cell, tile.q_size * cell, tile.kind))
        if tile.kind == "partial":
            for row in range(tile.q_size):
                columns = np.flatnonzero(seen[tile.q_start + row, tile.kv_start : tile.kv_start + tile.kv_size])
                if columns.size:  # a row sees an interval of keys
                    width = (int(columns[-1]) - int(columns[0]) + 1) * cell
                    parts.append(
                        box(x + int(columns[0]) * cell, y + row * cell + 0.2 * cell, width, 0.6 * cell, "seen")
                    )
    beside = left + mask.len_kv * cell + 24
    legend = {"skipped": "not visited", "partial": "visited, with a mask", "full": "visited, without a mask"}
    for index, (kind, words) in enumerate(legend.items()):
        parts += [
            box(beside, top + index * 26, 18, 18, kind),
            text(beside + 26, top + 14 + index * 26, f"{kind}: {words}"),
        ]
    parts += [box(beside, top + 83, 18, 8, "seen"), text(beside + 26, top + 92, "visible, in a partial tile")]
    height = max(top + mask.len_q * cell + 12, 140)
    return svg(beside + 240, height, mask_words(tiles), parts)


# ---- steps ----------------------------------------------------------------------------------------------------------


def step_picture(numbers: Numbers, frames: Sequence[Frame], at: int) -> str:
    """Draw the scores of the tiles that the run has reached, the one at ``at`` framed; at 0 none is reached."""
    len_q, len_kv, cell, left, top = len(numbers.q), len(numbers.k), 52.0, 80.0, 28.0
    parts = [text(left + (key + 0.5) * cell, 18, f"key {key}", "middle") for key in range(len_kv)]
    parts += [text(left - 8, top + (query + 0.5) * cell + 4, f"query {query}", "end") for query in range(len_q)]
    for query in range(len_q):
        for key in range(len_kv):
            parts.append(box(left + key * cell, top + query * cell, cell, cell, "tile"))
    for frame in frames[:at]:
        for row, query in enumerate(range(frame.rows.start, frame.rows.stop)):
            for column, key in enumerate(range(frame.cols.start, frame.cols.stop)):
                x, y = left + key * cell, top + query * cell
                parts.append(box(x, y, cell, cell, "done"))
                parts.append(text(x + cell / 2, y + cell / 2 + 5, number(frame.score[row, column]), "middle"))
    if at:
        rows, cols = frames[at - 1].rows, frames[at - 1].cols
        sides = (cols.stop - cols.start) * cell - 3, (rows.stop - rows.start) * cell - 3
        parts.append(box(left + cols.start * cell + 1.5, top + rows.start * cell + 1.5, *sides, "now"))
    title = f"step {at} of {len(frames)}: scores computed so far"
    return svg(left + len_kv * cell + 12, top + len_q * cell + 12, title, parts)


def step_table(frames: Sequence[Frame], at: int) -> Table:
    """Show what the step at ``at`` (1 is the first) made of the state of its rows."""
    frame = frames[at - 1]
    earlier = [one.row_max for one in frames[: at - 1] if one.rows == frame.rows]
    table = Table(
        f"queries {frame.rows.start}-{frame.rows.stop - 1}, keys {frame.cols.start}-{frame.cols.stop - 1}",
        ("query", "scores", "row_max", "rescale", "p", "row_sum", "acc"),
        (1, 2, 4, 6),
    )
    for index in range(frame.rows.stop - frame.rows.start):
        table.add(
            str(frame.rows.start + index),
            vector(frame.score[index]),
            moved(float(earlier[-1][index]) if earlier else -np.inf, float(frame.row_max[index])),
            number(frame.rescale[index]),
            vector(frame.p[index]),
            number(frame.row_sum[index]),
            vector(frame.acc[index]),
        )
    return table


def answer_table(watched: Forward) -> Table:
    """Show the results beside those of the untiled formula."""
    table = Table("the answer", ("query", "out = acc / row_sum", "exact", "lse", "exact lse"), (1, 2))
    for query, (out, right) in enumerate(zip(watched.out, watched.exact_out, strict=True)):
        table.add(str(query), vector(out), vector(right), number(watched.lse[query]), number(watched.exact_lse[query]))
    return table


# ---- joining splits -------------------------------------------------------------------------------------------------


def split_table(numbers: Numbers, query: int, parts: int) -> Table:
    """Attend to parts of the keys one by one, join the results by `tilewise.merge`, and set the whole beside them.

    Raises:
        ValueError: fewer than one part, or more than there are keys.

    >>> from tilewise.lab.step import DEFAULT
    >>> [row[0] for row in split_table(DEFAULT, 0, 2).rows]
    ['keys 0-3', 'keys 4-7', 'joined', 'all at once']
    """
    import torch

    from tilewise import api

    length = len(numbers.k)
    if not 1 <= parts <= length:
        raise ValueError(f"parts must be between 1 and the {length} keys, got {parts}")
    q = torch.from_numpy(numbers.q[query : query + 1])[None, None]
    k, v = (torch.from_numpy(x)[None, None] for x in (numbers.k, numbers.v))
    cuts = [length * part // parts for part in range(parts + 1)]
    ranges = [slice(start, stop) for start, stop in pairwise(cuts)]
    found = [api.attention(q, k[:, :, part], v[:, :, part], scale=1.0, return_lse=True) for part in ranges]
    out, lse = api.merge([one[0] for one in found], [one[1] for one in found])
    whole, whole_lse = api.attention(q, k, v, scale=1.0, return_lse=True)
    table = Table("", ("", "out", "lse", "weight = exp(lse of the part - lse)"), (0, 1))
    for part, (part_out, part_lse) in zip(ranges, found, strict=True):
        weight = float((part_lse - lse).exp())
        table.add(
            f"keys {part.start}-{part.stop - 1}",
            vector(part_out[0, 0, 0].numpy()),
            number(part_lse.item()),
            number(weight),
        )
    table.gap()
    table.add("joined", vector(out[0, 0, 0].numpy()), number(lse.item()), "")
    off = float((out - whole).abs().max())
    table.add("all at once", vector(whole[0, 0, 0].numpy()), number(whole_lse.item()), f"off by {off:.0e}")
    return table
