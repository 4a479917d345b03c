"""What holds for the rule of which tiles to visit: it is what a dense mask says, block by block and pair by pair.

`complaint` states the rule as properties of its answer; ``test_mutations.py`` holds mutilated rules to the same.
"""

from __future__ import annotations

import ast
import inspect
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tilewise.problem import blocks
from tilewise.problem.blocks import block_ranges, is_visible


class Question(NamedTuple):
    """The arguments of `block_ranges`."""

    tile_start: int
    tile_stop: int
    kv_start: int
    kv_stop: int
    left: int | None
    right: int | None
    offset: int
    block_kv: int


def dense(question: Question, keys: int) -> np.ndarray:
    """Build the mask of the tile's queries against keys 0 to ``keys``, row by row, as slices: (rows, keys)."""
    mask = np.zeros((question.tile_stop - question.tile_start, keys), dtype=bool)
    for row, query in zip(mask, range(question.tile_start, question.tile_stop), strict=True):
        start, stop = question.kv_start, question.kv_stop
        if question.left is not None:
            start = max(start, query + question.offset - question.left)
        if question.right is not None:
            stop = min(stop, query + question.offset + question.right + 1)
        row[max(start, 0) : max(stop, 0)] = True
    return mask


class Truth(NamedTuple):
    """What a dense mask says of its blocks: those that hold a visible pair, and those that hold nothing else."""

    seen: range
    whole: range
    wasted: int  # blocks that may be visited where no pair is visible at all


def truth_of(mask: np.ndarray, block: int, contradiction: int = 1) -> Truth:
    """Cut a mask (rows, keys) into blocks of keys. ``contradiction`` bounds the keys visited where none is visible."""
    by_block = mask.reshape(len(mask), -1, block)
    seen = np.flatnonzero(by_block.any(axis=(0, 2)))
    whole = np.flatnonzero(by_block.all(axis=(0, 2)))
    ranges = [range(found[0], found[-1] + 1) if len(found) else range(0) for found in (seen, whole)]
    assert [len(found) for found in ranges] == [len(seen), len(whole)], "a band meets neighbouring blocks"
    return Truth(ranges[0], ranges[1], (max(contradiction, 1) + block - 2) // block + 1)


def truth(question: Question) -> Truth:
    """Ask the dense mask. It is three blocks wider than the key range, so that a rule can be seen to reach too far."""
    keys = (max(question.kv_stop, 0) // question.block_kv + 3) * question.block_kv
    contradiction = 1
    if question.left is not None and question.right is not None and question.kv_start < question.kv_stop:
        contradiction = question.tile_stop - question.tile_start + question.left + question.right
    return truth_of(dense(question, keys), question.block_kv, contradiction)


def complaint(ranges: tuple[int, int, int, int], expected: Truth) -> str:
    """Say what is wrong with an answer of `block_ranges`; "" where all of its properties hold."""
    first, full_first, full_stop, stop = ranges
    if not all(isinstance(edge, int) for edge in ranges) or not 0 <= first <= full_first <= full_stop <= stop:
        return "not four ordered block numbers"
    if any(block not in range(first, stop) for block in expected.seen):
        return "a visible pair is missed"
    if any(block not in expected.whole for block in range(full_first, full_stop)):
        return "a hidden pair is taken for visible"
    if any(block not in range(full_first, full_stop) for block in expected.whole):
        return "a block without a hidden pair is masked"
    if expected.seen and range(first, stop) != expected.seen:
        return "a block without a visible pair is visited"
    if not expected.seen and stop - first > expected.wasted:
        return "many blocks are visited for nothing"
    return ""


sides = st.none() | st.integers(-30, 60) | st.sampled_from([0, -1, 1, -(10**12), 10**12])
positions = st.integers(-20, 60)
questions = st.builds(
    lambda start, rows, *rest: Question(start, start + rows, *rest),
    st.integers(0, 40),
    st.integers(1, 20),
    positions,
    positions,
    sides,
    sides,
    st.integers(-60, 60),
    st.integers(1, 20),
)


@settings(max_examples=1000, deadline=None)
@given(questions)
@example(Question(0, 4, 7, 5, None, None, 0, 4))  # an empty key range inside one block: that block alone is wasted
@example(Question(0, 4, 0, 8, -3, 1, 0, 4))  # a band whose sides pass each other
@example(Question(0, 1, 0, 0, None, None, 0, 1))
def test_no_visible_pair_is_missed_no_hidden_one_is_bare_and_no_block_is_wasted(question: Question) -> None:
    assert complaint(block_ranges(*question), truth(question)) == ""


@settings(max_examples=500, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 20),
    st.data(),
    sides,
    sides,
    st.integers(-40, 40),
    st.integers(1, 20),
)
def test_the_queries_that_see_a_tile_of_keys_come_from_the_same_rule_with_the_roles_swapped(
    len_q: int,
    kv_stop: int,
    kv_start: int,
    data: st.DataObject,
    left: int | None,
    right: int | None,
    offset: int,
    block_q: int,
) -> None:
    kv_stop += kv_start + 1
    tile_start = data.draw(st.integers(kv_start, kv_stop - 1))
    tile_stop = data.draw(st.integers(tile_start + 1, min(tile_start + 20, kv_stop)))
    mask = np.zeros(((len_q // block_q + 3) * block_q, kv_stop), dtype=bool)
    mask[:len_q] = dense(Question(0, len_q, kv_start, kv_stop, left, right, offset, 1), kv_stop)
    contradiction = 1 if left is None or right is None or not len_q else tile_stop - tile_start + left + right
    expected = truth_of(mask[:, tile_start:tile_stop].T, block_q, contradiction)
    ranges = block_ranges(tile_start, tile_stop, 0, len_q, right, left, -offset, block_q)
    assert complaint(ranges, expected) == ""


@pytest.mark.parametrize(
    ("len_q", "len_kv"), [(1, 1), (8, 8), (7, 12), (12, 7), (1, 9), (9, 1), (16, 33), (0, 5), (5, 0)]
)
@pytest.mark.parametrize(("block_q", "block_kv"), [(1, 1), (4, 4), (3, 5), (16, 16)])
@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_walking_all_tiles_meets_every_visible_pair_once_and_no_other(
    len_q: int, len_kv: int, block_q: int, block_kv: int, align: str
) -> None:
    offset = len_kv - len_q if align == "bottom_right" else 0
    for left, right in ((None, None), (None, 0), (0, 0), (3, 0), (2, 1), (None, 4), (5, None), (-2, 5), (50, 50)):
        met = np.zeros((len_q, len_kv), dtype=int)
        for tile_start in range(0, len_q, block_q):
            rows = np.arange(tile_start, min(tile_start + block_q, len_q))[:, None]
            tile = (tile_start, tile_start + len(rows), 0, len_kv, left, right, offset, block_kv)
            first, full_first, full_stop, stop = block_ranges(*tile)
            for block in range(first, stop):
                keys = np.arange(block * block_kv, min((block + 1) * block_kv, len_kv))
                masked = not full_first <= block < full_stop
                visible = is_visible(rows, keys, 0, len_kv, left, right, offset) if masked else True
                met[rows, keys] += visible
        expected = dense(Question(0, len_q, 0, len_kv, left, right, offset, 1), len_kv)
        assert (met == expected).all()


# ---- pair by pair ----


@settings(max_examples=300, deadline=None)
@given(questions)
def test_a_pair_is_visible_where_the_dense_mask_says_so_for_ints_numpy_and_torch(question: Question) -> None:
    expected = dense(question, 70)
    rows, keys = range(question.tile_start, question.tile_stop), range(70)
    rest = question[2:7]
    q_pos, kv_pos = np.asarray(rows)[:, None], np.asarray(keys)
    numpy = is_visible(q_pos, kv_pos, *rest)
    assert numpy.dtype == bool
    assert np.array_equal(np.broadcast_to(numpy, expected.shape), expected)
    tensors = is_visible(torch.from_numpy(q_pos), torch.from_numpy(kv_pos), *rest)
    assert tensors.dtype == torch.bool
    assert np.array_equal(tensors.expand(expected.shape).numpy(), expected)
    for row, query in enumerate(rows):
        for key in (0, 1, 17, 69):
            one = is_visible(query, key, *rest)
            assert isinstance(one, bool)
            assert one == expected[row, key]


@settings(max_examples=100, deadline=None)
@given(st.lists(questions, min_size=1, max_size=4), sides, sides)
def test_key_ranges_and_diagonals_may_differ_by_sequence(
    sequences: list[Question], left: int | None, right: int | None
) -> None:
    sequences = [question._replace(tile_start=0, tile_stop=9, left=left, right=right) for question in sequences]
    expected = np.stack([dense(question, 70) for question in sequences])
    columns = np.asarray([(question.kv_start, question.kv_stop, question.offset) for question in sequences])
    kv_start, kv_stop, offset = columns.T[:, :, None, None]
    q_pos, kv_pos = np.arange(9)[:, None], np.arange(70)
    numpy = is_visible(q_pos, kv_pos, kv_start, kv_stop, left, right, offset)
    assert np.array_equal(np.broadcast_to(numpy, expected.shape), expected)
    rows, keys, start, stop, diagonal = (torch.tensor(x) for x in (q_pos, kv_pos, kv_start, kv_stop, offset))
    visible = is_visible(rows, keys, start, stop, left, right, diagonal)
    assert np.array_equal(visible.expand(expected.shape).numpy(), expected)


# ---- what lets kernels compile the same source ----


class DeviceInt(int):
    """An integer whose division truncates, as a kernel's does; Python's floors."""

    def __add__(self, other: int) -> DeviceInt:
        return DeviceInt(int(self) + other)

    def __sub__(self, other: int) -> DeviceInt:
        return DeviceInt(int(self) - other)

    def __floordiv__(self, other: int) -> DeviceInt:
        quotient = abs(int(self)) // abs(int(other))
        return DeviceInt(quotient if (self < 0) == (other < 0) else -quotient)


@settings(max_examples=500, deadline=None)
@given(questions)
def test_division_that_truncates_gives_the_same_blocks_as_division_that_floors(question: Question) -> None:
    assert DeviceInt(-7) // 2 == -3
    on_device = block_ranges(*(None if x is None else DeviceInt(x) for x in question))  # type: ignore[arg-type]  # ints
    assert on_device == block_ranges(*question)


@pytest.mark.parametrize("function", [block_ranges, is_visible])
def test_the_source_uses_operators_and_builtin_min_and_max_alone(function: object) -> None:
    tree = ast.parse(inspect.getsource(blocks))
    bodies = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name == getattr(function, "__name__", "")
        and not node.decorator_list
    ]
    assert len(bodies) == 1
    allowed = (
        ast.Assign, ast.If, ast.Return, ast.Tuple, ast.Name, ast.Constant, ast.BinOp, ast.Compare, ast.Call,
        ast.operator, ast.cmpop, ast.expr_context, ast.Expr,
    )  # fmt: skip
    for statement in bodies[0].body:
        for node in ast.walk(statement):
            assert isinstance(node, allowed), ast.dump(node)
            if isinstance(node, ast.Call):
                assert isinstance(node.func, ast.Name)
                assert node.func.id in ("min", "max")
                assert len(node.args) == 2
