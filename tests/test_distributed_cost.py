"""Who holds and sees what on many ranks, brute-forced; and what the model says that it costs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.distributed import cost, explain
from tilewise.distributed.cost import LINKS, Link, choose, hidden_length, way
from tilewise.distributed.ranges import ORDERS, Piece, Sharding, rows_of
from tilewise.machine.shape import Shape, visible_pairs

PAGE = Path(__file__).parents[1] / "docs" / "distributed.md"
RATE = 6e14
sides = st.one_of(st.none(), st.integers(0, 12))


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    length = draw(st.integers(0, 40))
    documents = draw(st.booleans())
    length_kv = length if documents else draw(st.integers(0, 40))
    cuts = draw(st.lists(st.integers(0, length), min_size=1, max_size=5)) if documents else []
    return Sharding(
        length,
        length_kv,
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(ORDERS)),
        draw(sides),
        draw(sides),
        0 if documents else draw(st.sampled_from((0, length_kv - length))),
        (0, *sorted(cuts)) if documents else None,
    )


def visible(sharding: Sharding) -> np.ndarray:
    """Say pair by pair what the whole sequence's queries see."""
    q_pos, kv_pos = np.arange(sharding.length_q)[:, None], np.arange(sharding.length_kv)[None]
    seen = np.ones((sharding.length_q, sharding.length_kv), dtype=bool)
    if sharding.left is not None:
        seen &= kv_pos >= q_pos + sharding.offset - sharding.left
    if sharding.right is not None:
        seen &= kv_pos <= q_pos + sharding.offset + sharding.right
    if sharding.bounds is not None:
        q_document, kv_document = (np.searchsorted(sharding.bounds, x, side="right") for x in (q_pos, kv_pos))
        seen &= (q_document == kv_document) & (q_pos < sharding.bounds[-1])
    return seen


def computed(piece: Piece) -> np.ndarray:
    """Say pair by pair what one call of attention sees."""
    row, key = np.arange(piece.rows[1] - piece.rows[0])[:, None], np.arange(piece.keys[1] - piece.keys[0])[None]
    seen = np.ones((row.size, key.size), dtype=bool)
    if piece.left is not None:
        seen &= key >= row - piece.left
    if piece.right is not None:
        seen &= key <= row + piece.right
    if piece.bounds is not None:
        q_document, kv_document = (np.searchsorted(piece.bounds, x, side="right") for x in (row, key))
        seen &= (q_document == kv_document) & (row < piece.bounds[-1])
    return seen


def positions(ranges: tuple[tuple[int, int], ...]) -> np.ndarray:
    return np.concatenate([np.arange(*part) for part in ranges] or [np.arange(0)])


@settings(max_examples=300, deadline=None)
@given(shardings())
def test_the_hops_together_compute_each_visible_pair_once(sharding: Sharding) -> None:
    times = np.zeros((sharding.length_q, sharding.length_kv), dtype=int)
    for rank in range(sharding.ring):
        rows = positions(sharding.queries(rank))
        for source in range(sharding.ring):
            keys = positions(sharding.keys(source))
            start, stop = sharding.needs(rank, source)
            for piece in sharding.hop(rank, source):
                assert start <= piece.keys[0] < piece.keys[1] <= stop
                assert piece.rows[0] < piece.rows[1]
                assert (piece.left or 0) >= 0
                assert (piece.right or 0) >= 0  # what attention accepts as a window
                times[np.ix_(rows[slice(*piece.rows)], keys[slice(*piece.keys)])] += computed(piece)
    assert np.array_equal(times, visible(sharding).astype(int))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("ranks", "length"), [(1, 7), (3, 50), (8, 5), (4, 64)])
def test_each_position_is_held_once(order: str, ranks: int, length: int) -> None:
    held = [positions(rows_of(rank, ranks, length, order)) for rank in range(ranks)]  # type: ignore[arg-type]
    assert sorted(np.concatenate(held).tolist()) == list(range(length))
    assert max(map(len, held)) - min(map(len, held)) <= 2


def test_causal_work_is_even_in_zigzag_order_and_not_in_contiguous_order() -> None:
    def pairs(order: str) -> list[int]:
        held = [positions(rows_of(rank, 8, 4096, order)) for rank in range(8)]  # type: ignore[arg-type]
        return [int((rows + 1).sum()) for rows in held]

    assert max(pairs("zigzag")) == min(pairs("zigzag"))
    assert max(pairs("contiguous")) > 10 * min(pairs("contiguous"))


def test_a_hop_that_no_window_reaches_is_skipped() -> None:
    sharding = Sharding(4096, 4096, 8, 1, "contiguous", left=100, right=0)
    reached = [[bool(sharding.hop(rank, source)) for source in range(8)] for rank in range(8)]
    assert reached == [[source in (rank - 1, rank) for source in range(8)] for rank in range(8)]
    assert sharding.needs(3, 2) == (412, 512)


# ---- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [8, 64, 1024])
@pytest.mark.parametrize("link", ["nvlink4", "infiniband400"])
@pytest.mark.parametrize("heads_kv", [32, 8])
def test_from_the_length_on_that_the_model_names_hops_are_hidden(ring: int, link: str, heads_kv: int) -> None:
    def spare(length: int) -> float:
        """Give how much longer a hop computes than it travels."""
        rows = length / ring
        travel = LINKS[link].latency + rows * heads_kv * 2 * 128 * 2 / LINKS[link].bandwidth
        return rows * rows / 2 * 32 * 4 * 128 / RATE - travel

    length = hidden_length(Shape(1, 32, heads_kv, 8, 8, 128, 128, 2, None, 0), ring, rate=RATE, link=LINKS[link])
    assert spare(length) >= 0 > spare(length - ring)
    whole = Shape(1, 32, heads_kv, 2 * length, 2 * length, 128, 128, 2, None, 0)
    assert way(whole, ring, rate=RATE, link=LINKS[link]).exposed == (0.0, 0.0)


def test_what_moves_is_what_the_formulas_say() -> None:
    length, ranks = 65536, 64
    shape = Shape(2, 32, 8, length, length, 128, 128, 2, None, None)
    ring, both = way(shape, ranks, rate=RATE), way(shape, 16, 4, rate=RATE)
    assert ring.ring_bytes == (2 * 8 * (length - length // ranks) * 2 * 128 * 2, 2 * ring.ring_bytes[0])
    assert ring.exchange_bytes == 0
    assert both.exchange_bytes == 2 * (length // ranks) * 3 // 4 * (2 * 32 + 2 * 8) * 128 * 2
    assert both.ring_bytes[0] == 2 * 8 // 4 * (length - length // 16) * 2 * 128 * 2
    assert sum(ring.compute) == 3.5 * 4 * 2 * 32 * length * length * 128 / ranks / RATE
    causal = way(Shape(2, 32, 8, length, length, 128, 128, 2, None, 0), ranks, rate=RATE)
    assert causal.ring_bytes == (ring.ring_bytes[0], ring.ring_bytes[0] * 3 // 2)
    assert causal.compute[0] == visible_pairs(length, length, None, 0, 0) * 2 * 32 * 4 * 128 / ranks / RATE


def test_a_short_sequence_goes_all_to_all_where_heads_allow_and_round_the_ring_elsewhere() -> None:
    assert choose(Shape.square(8192, 128, causal=True, heads=32), 8) == "all_to_all"
    assert choose(Shape.square(8192, 128, causal=True, heads=12), 8) == "ring"
    assert choose(Shape.square(1 << 20, 128, causal=True, heads=32), 8) == "ring"
    assert choose(Shape.square(0, 128, heads=32), 8) == "ring"
    assert choose(Shape(1, 32, 1, 4096, 4096, 128, 128), 2) == "ring"


def test_explain_prints_bytes_rule_and_choice_for_ranks_that_are_not_there() -> None:
    q = torch.empty(1, 32, 1024, 128, dtype=torch.bfloat16, device="meta")
    plan = explain(q, q[:, :8], q[:, :8], mesh=64, causal=True, link="infiniband400")
    text = str(plan)
    assert "attention over 64 ranks: N=65,536, 1,024 rows a rank, 32 heads over 8, d=128, bfloat16, causal" in text
    assert "all-to-all of 64    32 and 8 heads do not divide by 64" in text
    assert f"{plan.ways[0].forward_bytes / 2**20:,.1f}" in text
    assert "rule    the ring where its hops hide" in text
    assert f"method  ring: ring of 64; fastest by this model: {plan.fastest.name}" in text
    assert plan.fastest.exchange > 1  # too short to hide between machines
    combined = explain(q, q, q, mesh=(8, 8), causal=True)
    assert (combined.method, combined.chosen.name) == ("ring x all_to_all", "ring of 8 x 8")


def test_an_unknown_link_is_refused_and_a_link_of_ones_own_is_taken() -> None:
    q = torch.empty(1, 8, 64, 32, device="meta")
    with pytest.raises(ValueError, match=r"link must be one of nvlink4, .* or a Link; got 'string'"):
        explain(q, q, q, mesh=2, link="string")
    assert explain(q, q, q, mesh=2, rate=1e12, link=Link(1e9)).link == Link(1e9)


def test_the_pages_table_is_what_the_model_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    row = r"^\| (\d[\d,]*) \| ([\w ]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,.]+) \| ([\d,.]+) \|$"
    rows = re.findall(row, text, re.MULTILINE)
    assert len(rows) == 6
    for ranks, link, *told in rows:
        ring = int(ranks.replace(",", ""))
        speed = LINKS[{"NVLink 4": "nvlink4", "InfiniBand 400": "infiniband400"}[link]]
        shape = Shape.square(1 << 20, 128, causal=True, heads=32)
        grouped = Shape(1, 32, 8, 1 << 20, 1 << 20, 128, 128, 2, None, 0)
        one = way(shape, ring, rate=cost.SHARE * 989.4e12, link=speed)
        lengths = [hidden_length(x, ring, rate=cost.SHARE * 989.4e12, link=speed) for x in (shape, grouped)]
        moved = [f"{x / 2**30:.2f}" for x in (one.forward_bytes, one.backward_bytes)]
        assert told == [*(f"{length:,}" for length in lengths), *moved], ranks
