"""What holds for the lab's page: each control changes what it should, by keyboard too, in light and dark, offline."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tilewise import cli
from tilewise.lab import serve, step, views
from tilewise.lab.count import Question
from tilewise.lab.views import KINDS, Mask, mask_tiles, mask_words
from tilewise.machine.device import find
from tilewise.problem.blocks import is_visible

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

SOURCE = str(Path(cli.__file__).parents[1])
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_MS = 30_000  # a shared machine may be slow; what does come comes within a second


# ---- what is drawn, without a browser ----


@pytest.mark.parametrize(
    "mask", [Mask(9, 7), Mask(8, 8, right=0), Mask(10, 6, 2, 0, -4), Mask(5, 11, 3, 1, 6)], ids=str
)
@pytest.mark.parametrize("blocks", [(1, 1), (4, 3), (2, 5), (16, 16)])
def test_the_tiles_drawn_are_skipped_partial_and_full_as_their_pairs_are(mask: Mask, blocks: tuple[int, int]) -> None:
    tiles = mask_tiles(mask, *blocks)
    q_pos, kv_pos = np.arange(mask.len_q)[:, None], np.arange(mask.len_kv)[None, :]
    band = (mask.left, mask.right, mask.offset)
    seen = np.broadcast_to(is_visible(q_pos, kv_pos, 0, mask.len_kv, *band), (mask.len_q, mask.len_kv))
    covered = np.zeros_like(seen, dtype=int)
    for tile in tiles:
        place = np.s_[tile.q_start : tile.q_start + tile.q_size, tile.kv_start : tile.kv_start + tile.kv_size]
        covered[place] += 1
        if tile.kind == "skipped":
            assert not seen[place].any()
        elif tile.kind == "full":
            assert seen[place].all()
    assert (covered == 1).all()
    drawn = views.mask_picture(mask, *blocks)
    for kind in KINDS:  # one more of each in the legend
        assert drawn.count(f'class="{kind}"') == sum(tile.kind == kind for tile in tiles) + 1


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_joined_parts_are_the_whole(parts: int) -> None:
    *each, joined, whole = views.split_table(step.DEFAULT, 0, parts).rows
    assert len(each) == parts
    assert joined[1:3] == whole[1:3]
    assert sum(float(row[3]) for row in each) == pytest.approx(1, abs=0.01)  # three digits each


def test_more_parts_than_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and the 8 keys, got 9"):
        views.split_table(step.DEFAULT, 0, 9)


def test_the_ladder_tells_what_the_data_sheet_says() -> None:
    rows = views.ladder_table(find("A100")).rows
    assert [row[:3] for row in rows] == [
        ("registers", "27 MiB", ""),
        ("shared memory and L1", "17.3 MiB", "19.5"),
        ("L2 cache", "40 MiB", ""),
        ("main memory", "80 GiB", "2.04"),
    ]


def test_without_marimo_the_command_says_what_to_install_and_what_serves_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["tilewise", "lab"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "pip install 'tilewise[lab]'" in told
    assert "tilewise count" in told


def test_a_port_that_is_taken_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda _: object())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"is not to be had.*--port 0 takes a free one"):
            serve.serve(taken.getsockname()[1], browser=False, tell=print)


# ---- the page in a browser ----


class Lab:
    """The page, opened, with all that the browser asked for and complained of."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.asked: list[str] = []
        self.errors: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda told: self.errors.append(told.text) if told.type == "error" else None)

    def control(self, kind: str, label: str, nth: int = 0) -> Locator:
        """Find a control by its label; some labels stand more than once."""
        role = {"slider": "slider", "switch": "switch", "dropdown": "combobox"}[kind]
        labelled = self.page.locator(f"marimo-{kind}").filter(has=self.page.get_by_text(label, exact=True))
        return labelled.nth(nth).get_by_role(role)  # type: ignore[arg-type]  # a role's name, of a fixed set

    def press(self, key: str, kind: str, label: str, nth: int = 0) -> None:
        """Press a key on a control."""
        self.control(kind, label, nth).press(key)

    def sees(self, kind: str, words: str) -> None:
        """Wait for a picture with this title ("img") or for text."""
        shown = self.page.get_by_role("img", name=words) if kind == "img" else self.page.get_by_text(words)
        shown.filter(visible=True).first.wait_for()  # titles of pictures are texts that do not show


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if util.find_spec("marimo") is None or util.find_spec("playwright") is None:
        pytest.skip("marimo or playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "tilewise", "lab", "--no-browser"]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    try:
        address = re.findall(r"http://[\d.:]+", server.stdout.readline())[0]
        with sync_playwright() as playwright:
            # The sandbox needs rights that a container seldom has; the only page opened is our own.
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            opened = Lab(browser.new_page(viewport={"width": 1100, "height": 900}), address)
            opened.page.goto(address)
            opened.sees("text", "all at once")  # the last thing on the page
            yield opened
            browser.close()
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


@pytest.fixture(autouse=True)
def _no_complaints(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "lab" in request.fixturenames:
        assert request.getfixturevalue("lab").errors == []


@pytest.mark.browser
def test_the_page_asks_nobody_but_its_own_server(lab: Lab) -> None:
    assert len(lab.asked) > 5
    foreign = [url for url in lab.asked if not url.startswith((lab.address, "data:", "blob:"))]
    assert foreign == []


@pytest.mark.browser
def test_the_counters_controls_change_what_is_counted(lab: Lab) -> None:
    asked = Question(length=16384, dim=128)

    def counted(*, backward: bool = False, cached: bool = False) -> None:
        lab.sees("img", f"bytes through main memory: {asked}")
        for way in views.ways(backward=backward, cached=cached):
            lab.sees("text", f"{way.cost(asked).elements:,}")

    counted()
    for label, key, change in (
        ("N", "ArrowLeft", {"length": 8192}),
        ("d", "ArrowLeft", {"dim": 64}),
        ("heads", "ArrowRight", {"heads_q": 2, "heads_kv": 2}),
        ("block_q", "ArrowRight", {"block_q": 256}),
        ("block_kv", "ArrowRight", {"block_kv": 128}),
    ):
        lab.press(key, "slider", label)
        asked = Question(**{**vars(asked), **change})
        lab.sees("img", f"bytes through main memory: {asked}")
    lab.control("dropdown", "dtype").select_option("float32")
    lab.press("Space", "switch", "causal")
    asked = Question(**{**vars(asked), "dtype": "float32", "causal": True})
    counted()
    lab.press("Space", "switch", "best case: reloads come from cache")
    counted(cached=True)
    lab.press("Space", "switch", "backward")
    counted(backward=True, cached=True)


@pytest.mark.browser
def test_the_device_chosen_has_its_ladder_and_its_roof(lab: Lab) -> None:
    for name in ("A100 80GB SXM", "H200"):
        lab.control("dropdown", "device").select_option(name)
        lab.sees("img", f"memory ladder of {name}, logarithmic")
        for level in views.levels(find(name)):
            lab.sees("text", views.written(level.size))
        lab.sees("text", f"roof of {name}")
    lab.control("dropdown", "device").select_option("this machine")
    lab.control("dropdown", "dtype").select_option("float32")
    lab.sees("text", "no speeds are known in float32")
    lab.page.get_by_role("button", name="measure this machine").press("Enter")
    lab.page.get_by_text("no speeds are known").wait_for(state="hidden")
    lab.sees("img", "At the most")


@pytest.mark.browser
def test_the_stepper_steps_plays_and_begins_anew(lab: Lab) -> None:
    def frames(block_q: int, block_kv: int, *, causal: bool = False) -> int:
        return len(
            step.forward(step.DEFAULT, step.tiling_of(step.DEFAULT, block_q, block_kv, causal=causal), 1.0).frames
        )

    def click(name: str) -> None:
        lab.page.get_by_role("button", name=name, exact=True).press("Enter")

    lab.sees("text", "step 0 of 4")
    for at in (1, 2, 3):
        click("step")
        lab.sees("img", f"step {at} of 4: scores computed so far")
    lab.sees("text", "3 -> 5")  # the maximum of query 0 rises at keys 4 and 5
    click("back")
    lab.sees("text", "step 2 of 4")
    click("from the start")
    lab.sees("text", "step 0 of 4")
    lab.press("Space", "switch", "play")
    lab.sees("text", "step 4 of 4")
    lab.sees("text", "Query 0: a larger score came")
    lab.press("Space", "switch", "play")
    lab.press("ArrowRight", "slider", "keys in a block")
    lab.sees("text", f"step 0 of {frames(2, 3)}")
    lab.press("ArrowLeft", "slider", "queries in a tile")
    lab.sees("text", f"step 0 of {frames(1, 3)}")
    lab.press("End", "slider", "keys in a block")
    lab.sees("text", f"step 0 of {frames(1, 8)}")
    # Another mask begins anew too, and nothing that is seen at step 0 tells when: steps taken before that are undone.
    lab.press("Space", "switch", "causal", nth=1)
    for _ in range(3):
        click("from the start")
        lab.sees("text", "step 0 of 2")
        click("step")
        lab.page.wait_for_timeout(1000)
        click("step")
        lab.page.wait_for_timeout(1000)
        last = lab.page.get_by_role("img", name="step 2 of 2")
        if last.count() and "-inf" in last.inner_html():
            break
    lab.sees("img", "step 2 of 2")
    assert "-inf" in lab.page.get_by_role("img", name="step 2 of 2").inner_html()


@pytest.mark.browser
def test_the_masks_controls_change_the_tiles(lab: Lab) -> None:
    def drawn(mask: Mask, block_q: int, block_kv: int) -> None:
        lab.sees("img", mask_words(mask_tiles(mask, block_q, block_kv)))

    drawn(Mask(24, 24, None, 0, 0), 4, 4)
    lab.press("Home", "slider", "queries")
    drawn(Mask(4, 24, None, 0, 20), 4, 4)
    lab.press("Space", "switch", "last query sees the last key")
    drawn(Mask(4, 24, None, 0, 0), 4, 4)
    lab.press("End", "slider", "queries")
    lab.press("End", "slider", "keys")
    drawn(Mask(48, 48, None, 0, 0), 4, 4)
    lab.press("ArrowRight", "slider", "block_q", nth=1)
    lab.press("ArrowLeft", "slider", "block_kv", nth=1)
    drawn(Mask(48, 48, None, 0, 0), 8, 2)
    lab.press("Space", "switch", "window")
    drawn(Mask(48, 48, 8, 0, 0), 8, 2)
    lab.press("End", "slider", "keys behind")
    drawn(Mask(48, 48, 24, 0, 0), 8, 2)
    lab.press("Space", "switch", "causal", nth=2)
    drawn(Mask(48, 48, 24, None, 0), 8, 2)


@pytest.mark.browser
def test_the_parts_joined_are_as_many_and_of_the_query_that_was_asked_for(lab: Lab) -> None:
    lab.press("ArrowRight", "slider", "parts")
    for name, query in (("query 0", 0), ("query 1", 1)):
        lab.control("dropdown", "of").select_option(name)
        for row in views.split_table(step.DEFAULT, query, 3).rows:
            lab.page.get_by_role("row", name=" ".join(" ".join(row[:3]).split())).first.wait_for()


FOCUSED = """() => { let at = document.activeElement;
while (at && at.shadowRoot && at.shadowRoot.activeElement) at = at.shadowRoot.activeElement;
return at.getAttribute("role") || at.tagName.toLowerCase(); }"""


@pytest.mark.browser
def test_every_control_is_reached_by_the_tab_key(lab: Lab) -> None:
    present = {tag: lab.page.locator(f"marimo-{tag}").count() for tag in ("slider", "switch", "dropdown", "button")}
    lab.page.mouse.click(2, 2)
    reached = []
    for _ in range(sum(present.values()) + 10):
        lab.page.keyboard.press("Tab")
        reached.append(lab.page.evaluate(FOCUSED))
    assert reached.count("slider") >= present["slider"] == 13
    assert reached.count("switch") >= present["switch"] == 8
    assert reached.count("select") >= present["dropdown"] == 3
    assert reached.count("button") >= present["button"] == 4


# Ink and paper of pictures and of tables as red, green, blue; a canvas knows every notation of colours.
COLOURS = """() => {
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const read = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data]; };
const style = (at) => getComputedStyle(document.querySelector(at));
let behind = document.querySelector(".lab td");
while (behind.parentElement && read(getComputedStyle(behind).backgroundColor)[3] == 0) behind = behind.parentElement;
return [style(".view text").fill, style(".view").backgroundColor, style(".lab td").color,
  getComputedStyle(behind).backgroundColor].map(read); }"""


def luminance(colour: list[int]) -> float:
    """Give the relative luminance of red, green, blue from 0 to 255, after WCAG 2."""
    shares = [part / 255 for part in colour[:3]]
    linear = [share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_text_stands_out_in_light_and_in_dark(lab: Lab, scheme: str) -> None:
    lab.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]  # one of its two names
    lab.page.wait_for_timeout(300)
    colours = [luminance(colour) for colour in lab.page.evaluate(COLOURS)]
    for ink, paper in (colours[:2], colours[2:]):
        assert (paper < ink) == (scheme == "dark")
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 7
