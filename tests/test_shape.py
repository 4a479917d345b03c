"""What a call amounts to: pairs, tiles and operations, against a look at every pair."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from tilewise.machine.shape import Shape, flops, nominal_flops, visible_pairs, visits
from tilewise.problem.blocks import is_visible
from tilewise.problem.problem import Options, Spec, describe

N, D = 16384, 128  # the textbook's case
CAUSAL = Shape(2, 4, 2, 9, 13, 3, 5, 2, None, 0, 4)  # grouped heads, ragged tiles, unequal lengths and dims


def visible(shape: Shape) -> np.ndarray:
    q_pos, kv_pos = np.arange(shape.len_q)[:, None], np.arange(shape.len_kv)[None]
    seen = is_visible(q_pos, kv_pos, 0, shape.len_kv, shape.left, shape.right, shape.offset)
    return np.broadcast_to(seen, (shape.len_q, shape.len_kv))  # without a band every row is the same


def tiles(length: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    left, right = draw(st.none() | st.integers(-3, 9)), draw(st.none() | st.integers(-3, 9))
    assume(left is None or right is None or left + right >= 0)
    return Shape(
        draw(st.integers(1, 2)),
        heads_kv * group,
        heads_kv,
        draw(st.integers(1, 30)),
        draw(st.integers(1, 30)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([2, 4, 8])),
        left,
        right,
        draw(st.integers(-8, 8)),
    )


blocks = st.integers(1, 6)


@given(shape=shapes(), block_q=blocks, block_kv=blocks, outer=st.sampled_from(["q", "kv"]))
def test_visited_tiles_match_a_look_at_every_tile(shape: Shape, block_q: int, block_kv: int, outer: str) -> None:
    side, block_outer, block_inner = visible(shape), block_q, block_kv
    if outer == "kv":
        side, block_outer, block_inner = side.T, block_kv, block_q
    masked = full = pairs = loaded = 0
    touched: set[int] = set()
    for rows in tiles(side.shape[0], block_outer):
        for columns in tiles(side.shape[1], block_inner):
            tile = side[rows, columns]
            if tile.any():
                whole = bool(tile.all()) and columns.stop - columns.start == block_inner  # a ragged tile is masked
                masked, full = masked + (not whole), full + whole
                pairs, loaded = pairs + tile.size, loaded + columns.stop - columns.start
                touched.update(range(columns.start, columns.stop))
    found, needed = (
        visits(shape, block_q, block_kv, "q" if outer == "q" else "kv"),
        (masked, full, pairs, loaded, len(touched)),
    )
    if side.shape[1] % block_inner == 0:
        assert found == needed
    else:  # the rule may visit a ragged last tile in vain
        assert all(have >= need for have, need in zip(found, needed, strict=True))
        assert found.full == full


@given(
    len_q=st.integers(0, 20),
    len_kv=st.integers(0, 20),
    left=st.none() | st.integers(-30, 30),
    right=st.none() | st.integers(-30, 30),
    offset=st.integers(-30, 30),
)
def test_visible_pairs_match_a_look_at_every_pair(
    len_q: int, len_kv: int, left: int | None, right: int | None, offset: int
) -> None:
    shape = Shape(1, 1, 1, len_q, len_kv, 1, 1, 2, left, right, offset)
    assert shape.pairs == visible_pairs(len_q, len_kv, left, right, offset) == visible(shape).sum()


def test_operations_are_those_of_two_and_five_products_of_the_visible_pairs() -> None:
    assert flops(Shape.square(N, D)) == 4 * N * N * D
    assert flops(Shape.square(N, D), backward=True) * 2 == flops(Shape.square(N, D)) * 5
    assert flops(CAUSAL) == 2 * 8 * visible(CAUSAL).sum() * (3 + 5)
    assert flops(CAUSAL, backward=True) == 2 * 8 * visible(CAUSAL).sum() * (3 * 3 + 2 * 5)


def test_benchmarks_count_half_of_all_pairs_when_causal() -> None:
    causal = Shape.square(N, D, batch=2, heads=4, causal=True)
    assert nominal_flops(causal) == 2 * 4 * 2 * N * N * D
    assert nominal_flops(causal, backward=True) * 2 == nominal_flops(causal) * 5
    assert 1 < flops(causal) / nominal_flops(causal) < 1 + 2 / N
    for full in (Shape.square(N, D), Shape(1, 1, 1, N, N, D, D, right=1), Shape(1, 1, 1, N, N, D, D, left=9, right=0)):
        assert nominal_flops(full) == 4 * N * N * D


def test_a_call_gives_its_shape() -> None:
    q = Spec((2, 4, 9, 3), (108, 27, 3, 1), "float16", "cpu")
    k = Spec((2, 2, 13, 3), (78, 39, 3, 1), "float16", "cpu")
    v = Spec((2, 2, 13, 5), (130, 65, 5, 1), "float16", "cpu")
    assert Shape.of(describe({"q": q, "k": k, "v": v}, Options(causal=True))) == CAUSAL


def test_a_packed_call_gives_the_shape_of_one_long_sequence() -> None:
    q, cu_seqlens = Spec((9, 4, 8), (32, 8, 1), "float32", "cpu"), Spec((3,), (1,), "int32", "cpu")
    given = {"q": q, "k": q, "v": q, "cu_seqlens_q": cu_seqlens}
    assert Shape.of(describe(given, Options())) == Shape(1, 4, 4, 9, 9, 8, 8, 4)
