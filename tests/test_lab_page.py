"""What holds for a report's page: it is sound HTML, holds everything, asks no network, and plots what was measured."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tilewise import cli
from tilewise.bench import plan, run
from tilewise.bench.report import Report, Row, TensorError
from tilewise.bench.show import Table
from tilewise.lab import page
from tilewise.machine import detect

SETTINGS = {"batch": 1, "heads_q": 2, "heads_kv": 2, "dim": 16, "dtype": "float32", "device": "cpu", "causal": False}
SETTINGS |= {"window": None, "alibi": False, "seconds": 60.0}
ERROR = TensorError("out", 1e-7, 4e-7, 1e-8, 1e-7)


def row(name: str, which: str, length: int, seconds: float) -> Row:
    return Row(
        name,
        which,
        length,
        "ok",
        times=(seconds,),
        median=seconds,
        p20=seconds,
        p80=seconds,
        tflops=1e-3 / seconds,
        memory=length * 1000,
        errors=(ERROR,),
        predicted=seconds / 2,
    )


REPORT = Report(
    command="tilewise bench --html <page>",
    date="2026-01-01T00:00:00+00:00",
    environment={"device": "a & b", "sms": 2, "threads": 2, "tilewise": "0", "capability": "cpu"},
    settings=SETTINGS,
    roof={"bandwidth": 1e10, "matmul": 1e11},
    chosen={"forward": "torch_tiled", "backward": "torch_tiled"},
    absent={"sdpa/cudnn": "no GPU"},
    rows=tuple(
        row(name, which, length, length * 1e-5 * (number + 1))
        for which in ("forward", "backward")
        for length in (256, 512)
        for number, name in enumerate(("naive", "sdpa/flash", "tilewise/torch_tiled"))
    ),
)


class Tags(HTMLParser):
    """Checks that what is opened is closed, and gathers tags and text."""

    VOID = frozenset({"meta", "line", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, _attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, _attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    return tags


def test_the_page_is_sound_holds_everything_and_asks_no_network() -> None:
    text = page.page(REPORT)
    tags = read(text)
    assert tags.seen.count("svg") == 10, "time, speed, memory, error and roofline, forward and backward"
    told = " ".join("".join(tags.text).split())
    for words in (
        "a & b",
        "tilewise bench --html <page>",
        "naive",
        "sdpa/cudnn: no GPU",
        "error budget",
        "Environment",
    ):
        assert words in told
    assert "script" not in tags.seen
    assert re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg")""", text) == []
    assert "prefers-color-scheme:dark" in text


def test_every_plot_shows_what_was_measured() -> None:
    drawn = page.plots(REPORT)
    assert list(drawn) == [
        f"{which}-{name}"
        for which in ("forward", "backward")
        for name in ("time", "speed", "memory", "error", "roofline")
    ]
    naive = drawn["forward-time"].series[0]
    assert (naive.name, list(naive.points)) == ("naive", [(256.0, 2.56), (512.0, 5.12)])
    assert drawn["forward-memory"].series[1].points[0] == (256.0, 256000 / 2**20)
    assert drawn["backward-error"].series[-1].points == [(256.0, 4e-7), (512.0, 4e-7)]
    (x, y) = drawn["forward-roofline"].series[0].points[0]
    n, d, heads = 512, 16, 2
    moved = 4 * heads * (4 * n * n + 4 * n * d)
    work = 4 * heads * n * n * d
    assert x == work / moved
    assert y == pytest.approx(work / 5.12e-3 / 1e12)


def test_what_was_not_measured_is_not_drawn() -> None:
    bare = replace(REPORT, rows=(Row("naive", "forward", 256, "memory", "needs much"),))
    assert page.plots(bare) == {}
    assert "no memory: needs much" in "".join(read(page.page(bare)).text)


def test_a_table_is_written_with_its_marks() -> None:
    table = Table("t", ("N", "name"))
    table.add("1", "tilewise/x")
    table.gap()
    table.add("2", "y")
    text = page.table_html(table)
    assert '<tr class="ours gap"><td>1</td><td class="left">tilewise/x</td></tr>' in text
    assert "<caption>t</caption>" in text


def test_bench_writes_the_page_and_the_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "ROUND_SECONDS", 0.001)
    monkeypatch.setattr(plan, "MOST_ROUNDS", plan.LEAST_ROUNDS)
    monkeypatch.setattr(detect, "measure_rates", lambda *_: detect.Rates("float32", 1e10, 1e11))
    file, folder, kept = tmp_path / "page.html", tmp_path / "plots", tmp_path / "kept.json"
    words = ["bench", "--lengths", "16,32", "--only", "naive", "--seconds", "60", "--device", "cpu"]
    words += ["--html", str(file), "--plots", str(folder), "--json", str(kept)]
    monkeypatch.setattr(sys, "argv", ["tilewise", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert read(file.read_text()).seen.count("svg") == 5
    assert (folder / "forward-roofline.svg").read_text().startswith("<svg")
    assert page.page(Report.from_json(kept.read_text())) == file.read_text()
    assert json.loads(kept.read_text())["rows"]
    capsys.readouterr()
