"""Every count of machine/cost.py against loops that compute attention through a memory which counts what passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tilewise.machine import cost
from tilewise.machine.cost import Cost
from tilewise.machine.shape import Shape
from tilewise.problem.blocks import block_ranges, is_visible

STATE = {"lse", "delta", "row_max", "row_sum", "dq_sum", "out_part", "lse_part"}  # kept in float32 or wider


class Memory:
    """Named arrays, (batch, heads, length, ...). Every load and store is counted.

    ``read`` and ``written`` count elements of the inputs' dtype, ``read32`` and ``written32`` those of `STATE`. With
    ``cached`` an element is counted as read the first time only; ``onchip`` counts every time, in bytes.
    """

    def __init__(self, shape: Shape, arrays: dict[str, np.ndarray], *, cached: bool = False) -> None:
        self.shape, self.arrays, self.cached = shape, arrays, cached
        self.seen = {name: np.zeros(array.shape, bool) for name, array in arrays.items()}
        self.read = self.written = self.read32 = self.written32 = self.onchip = self.flops = 0

    def new(self, name: str, *size: int) -> None:
        self.arrays[name] = np.full(size, np.nan)
        self.seen[name] = np.zeros(size, bool)

    def load(self, name: str, *index: int | slice) -> np.ndarray:
        part: np.ndarray = self.arrays[name][index].copy()
        count = part.size - int(self.seen[name][index].sum()) if self.cached else part.size
        self.seen[name][index] = True
        self._count(name, part.size)
        if name in STATE:
            self.read32 += count
        else:
            self.read += count
        return part

    def store(self, name: str, value: np.ndarray, *index: int | slice) -> None:
        self.arrays[name][index] = value
        self._count(name, value.size)
        if name in STATE:
            self.written32 += value.size
        else:
            self.written += value.size

    def dot(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        product: np.ndarray = left @ right
        return product

    def _count(self, name: str, size: int) -> None:
        self.onchip += size * (max(4, self.shape.itemsize) if name in STATE else self.shape.itemsize)

    def assert_matches(self, expected: Cost) -> None:
        width, wide = self.shape.itemsize, max(4, self.shape.itemsize)
        counted = (
            self.flops,
            self.read + self.written,
            self.read * width + self.read32 * wide,
            self.written * width + self.written32 * wide,
            self.onchip,
        )
        assert counted == (
            expected.flops,
            expected.elements,
            expected.bytes_read,
            expected.bytes_written,
            expected.bytes_onchip,
        )

    def bytes_beyond(self, *names: str) -> int:
        """Bytes of these arrays."""
        wide = max(4, self.shape.itemsize)
        return sum(self.arrays[n].size * (wide if n in STATE else self.shape.itemsize) for n in names)


def inputs(shape: Shape) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0).standard_normal
    query, key = (shape.batch, shape.heads_q, shape.len_q), (shape.batch, shape.heads_kv, shape.len_kv)
    return {"q": draw((*query, shape.dim_qk)), "k": draw((*key, shape.dim_qk)), "v": draw((*key, shape.dim_v))}


def visible(shape: Shape) -> np.ndarray:
    q_pos, kv_pos = np.arange(shape.len_q)[:, None], np.arange(shape.len_kv)[None]
    seen = is_visible(q_pos, kv_pos, 0, shape.len_kv, shape.left, shape.right, shape.offset)
    return np.broadcast_to(seen, (shape.len_q, shape.len_kv))  # without a band every row is the same


def heads(shape: Shape) -> Iterable[tuple[int, int, int]]:
    """(batch, query head, key head) of every query head."""
    group = shape.heads_q // shape.heads_kv
    return ((b, h, h // group) for b in range(shape.batch) for h in range(shape.heads_q))


def tiles(length: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def visited(shape: Shape, block_q: int, block_kv: int) -> Iterator[tuple[slice, list[slice]]]:
    """Each query tile with the key tiles that it visits."""
    for rows in tiles(shape.len_q, block_q):
        rule = (rows.start, rows.stop, 0, shape.len_kv, shape.left, shape.right, shape.offset, block_kv)
        first, _, _, stop = block_ranges(*rule)
        yield rows, tiles(shape.len_kv, block_kv)[first:stop]


def visited_by_keys(shape: Shape, block_q: int, block_kv: int) -> Iterator[tuple[slice, list[slice]]]:
    """Each key tile with the query tiles that it visits: the roles swapped."""
    roles = replace(
        shape, len_q=shape.len_kv, len_kv=shape.len_q, left=shape.right, right=shape.left, offset=-shape.offset
    )
    return visited(roles, block_kv, block_q)


def exponentials(score: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row maxima, p = exp(score - row maximum), and row sums; rows that see nothing give -inf, 0 and 0."""
    score = np.where(seen, score, -np.inf)
    row_max = score.max(1, keepdims=True, initial=-np.inf)
    p = np.exp(score - np.where(np.isinf(row_max), 0, row_max))
    return row_max, p, p.sum(1, keepdims=True)


def softmax_rows(score: np.ndarray, seen: np.ndarray) -> np.ndarray:
    _, p, row_sum = exponentials(score, seen)
    rows: np.ndarray = p / np.where(row_sum == 0, 1, row_sum)
    return rows


def merge(
    acc: np.ndarray, row_max: np.ndarray, row_sum: np.ndarray, score: np.ndarray, seen: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Take one more tile of keys and values into the running state."""
    tile_max, p, tile_sum = exponentials(score, seen)
    row_max_new = np.maximum(row_max, tile_max)
    anchor = np.where(np.isinf(row_max_new), 0, row_max_new)
    old, new = np.exp(row_max - anchor), np.exp(tile_max - anchor)
    return acc * old + new * (p @ value), row_max_new, row_sum * old + tile_sum * new


def simulate_eager(shape: Shape, passes: int) -> Memory:
    """A product, ``passes`` kernels that read and write all scores (the last is the softmax), a product."""
    memory = Memory(shape, inputs(shape))
    memory.new("out", shape.batch, shape.heads_q, shape.len_q, shape.dim_v)
    for name in ("a", "b"):  # each pass reads the one and writes the other
        memory.new(name, shape.batch, shape.heads_q, shape.len_q, shape.len_kv)
    for b in range(shape.batch):
        for g in range(shape.heads_kv):
            key, value = memory.load("k", b, g), memory.load("v", b, g)
            for h in (h for b_, h, g_ in heads(shape) if (b_, g_) == (b, g)):
                memory.store("a", memory.dot(memory.load("q", b, h), key.T), b, h)
                for number in range(passes):
                    score = memory.load("ab"[number % 2], b, h)
                    result = softmax_rows(score, visible(shape)) if number == passes - 1 else score
                    memory.store("ba"[number % 2], result, b, h)
                memory.store("out", memory.dot(memory.load("ab"[passes % 2], b, h), value), b, h)
    return memory


def simulate_tiled(shape: Shape, block_q: int, block_kv: int, *, cached: bool = False) -> Memory:
    memory = Memory(shape, inputs(shape), cached=cached)
    memory.new("out", shape.batch, shape.heads_q, shape.len_q, shape.dim_v)
    memory.new("lse", shape.batch, shape.heads_q, shape.len_q, 1)
    seen = visible(shape)
    for b, h, g in heads(shape):
        for rows, wanted in visited(shape, block_q, block_kv):
            query = memory.load("q", b, h, rows)
            count = len(query)
            acc, row_max, row_sum = np.zeros((count, shape.dim_v)), np.full((count, 1), -np.inf), np.zeros((count, 1))
            for columns in wanted:
                score = memory.dot(query, memory.load("k", b, g, columns).T)
                value = memory.load("v", b, g, columns)
                memory.flops += 2 * score.size * shape.dim_v
                acc, row_max, row_sum = merge(acc, row_max, row_sum, score, seen[rows, columns], value)
            memory.store("out", acc / np.where(row_sum == 0, 1, row_sum), b, h, rows)
            with np.errstate(divide="ignore"):
                memory.store("lse", row_max + np.log(row_sum), b, h, rows)
    return memory


def simulate_fa1(shape: Shape, block_q: int, block_kv: int) -> Memory:
    memory = Memory(shape, inputs(shape))
    for name, width in (("out", shape.dim_v), ("row_max", 1), ("row_sum", 1)):
        memory.new(name, shape.batch, shape.heads_q, shape.len_q, width)
        start = -np.inf if name == "row_max" else 0.0
        memory.store(name, np.full((shape.batch, shape.heads_q, shape.len_q, width), start), slice(None))
    seen = visible(shape)
    for b, h, g in heads(shape):
        for columns, wanted in visited_by_keys(shape, block_q, block_kv):
            key, value = memory.load("k", b, g, columns), memory.load("v", b, g, columns)
            for rows in wanted:
                score = memory.dot(memory.load("q", b, h, rows), key.T)
                out, row_max, row_sum = (memory.load(name, b, h, rows) for name in ("out", "row_max", "row_sum"))
                memory.flops += 2 * score.size * shape.dim_v
                acc, row_max, row_sum = merge(out * row_sum, row_max, row_sum, score, seen[rows, columns], value)
                memory.store("out", acc / np.where(row_sum == 0, 1, row_sum), b, h, rows)
                memory.store("row_max", row_max, b, h, rows)
                memory.store("row_sum", row_sum, b, h, rows)
    return memory


def backward_memory(shape: Shape, *, cached: bool = False) -> Memory:
    """The inputs of a backward pass: those of the forward pass, its results, and d_out."""
    forward = simulate_tiled(shape, 16, 16).arrays
    memory = Memory(shape, forward, cached=cached)
    memory.arrays["d_out"] = np.random.default_rng(1).standard_normal(forward["out"].shape)
    memory.seen["d_out"] = np.zeros(forward["out"].shape, bool)
    for name in ("q", "k", "v"):
        memory.new(f"d{name}", *forward[name].shape)
    return memory


def p_and_ds(
    memory: Memory,
    operands: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    statistics: tuple[np.ndarray, np.ndarray],
    seen: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    (query, key, value, d_out), (lse, delta) = operands, statistics
    score = np.where(seen, memory.dot(query, key.T), -np.inf)
    p = np.exp(score - np.where(np.isinf(lse), 0, lse))
    return p, p * (memory.dot(d_out, value.T) - delta)


def simulate_naive_backward(shape: Shape) -> Memory:
    """FA-1's algorithm 3, one kernel a step; p is kept from the forward pass."""
    memory = backward_memory(shape)
    for name in ("p", "dp", "ds"):
        memory.new(name, shape.batch, shape.heads_q, shape.len_q, shape.len_kv)
    load, store, dot = memory.load, memory.store, memory.dot
    seen = visible(shape)
    for b, h, g in heads(shape):
        memory.arrays["p"][b, h] = softmax_rows(memory.arrays["q"][b, h] @ memory.arrays["k"][b, g].T, seen)
        store("dv", dot(load("p", b, h).T, load("d_out", b, h)), b, g)
        store("dp", dot(load("d_out", b, h), load("v", b, g).T), b, h)
        p, dp = load("p", b, h), load("dp", b, h)
        store("ds", p * (dp - (p * dp).sum(1, keepdims=True)), b, h)
        store("dq", dot(load("ds", b, h), load("k", b, g)), b, h)
        store("dk", dot(load("ds", b, h).T, load("q", b, h)), b, g)
    return memory


def simulate_tiled_backward(
    shape: Shape, block_q: int, block_kv: int, passes: int, *, cached: bool = False, recompute: bool = True
) -> Memory:
    memory = backward_memory(shape, cached=cached)
    memory.new("delta", shape.batch, shape.heads_q, shape.len_q, 1)
    group, seen = shape.heads_q // shape.heads_kv, visible(shape)
    for b, h, _ in heads(shape):
        memory.store("delta", (memory.load("out", b, h) * memory.load("d_out", b, h)).sum(1, keepdims=True), b, h)
    if passes == 1:
        memory.new("dq_sum", *memory.arrays["q"].shape)
        memory.store("dq_sum", np.zeros(memory.arrays["q"].shape), slice(None))
    for b in range(shape.batch):
        for g in range(shape.heads_kv):
            for columns, wanted in visited_by_keys(shape, block_q, block_kv):
                key, value = memory.load("k", b, g, columns), memory.load("v", b, g, columns)
                dk, dv = np.zeros(key.shape), np.zeros(value.shape)
                for h in range(g * group, (g + 1) * group):
                    for rows in wanted:
                        query, d_out = memory.load("q", b, h, rows), memory.load("d_out", b, h, rows)
                        statistics = memory.load("lse", b, h, rows), memory.load("delta", b, h, rows)
                        p, ds = p_and_ds(memory, (query, key, value, d_out), statistics, seen[rows, columns])
                        dv += memory.dot(p.T, d_out)
                        dk += memory.dot(ds.T, query)
                        if passes == 1:
                            running = memory.load("dq_sum", b, h, rows)
                            memory.store("dq_sum", running + memory.dot(ds, key), b, h, rows)
                memory.store("dk", dk, b, g, columns)
                memory.store("dv", dv, b, g, columns)
    if passes == 1:
        memory.store("dq", memory.load("dq_sum", slice(None)), slice(None))
        return memory
    for b, h, g in heads(shape):
        for rows, wanted in visited(shape, block_q, block_kv):
            query, d_out = memory.load("q", b, h, rows), memory.load("d_out", b, h, rows)
            statistics = memory.load("lse", b, h, rows), memory.load("delta", b, h, rows)
            dq = np.zeros(query.shape)
            for columns in wanted:
                key, value = memory.load("k", b, g, columns), memory.load("v", b, g, columns)
                before = memory.flops
                _, ds = p_and_ds(memory, (query, key, value, d_out), statistics, seen[rows, columns])
                memory.flops = memory.flops if recompute else before
                dq += memory.dot(ds, key)
            memory.store("dq", dq, b, h, rows)
    return memory


def simulate_decode(shape: Shape, splits: int) -> Memory:
    """Key heads outside; the query heads that share one are one tile. Then, with splits, a kernel that merges."""
    memory = Memory(shape, inputs(shape))
    memory.new("out", shape.batch, shape.heads_q, shape.len_q, shape.dim_v)
    memory.new("lse", shape.batch, shape.heads_q, shape.len_q, 1)
    memory.new("out_part", splits, *memory.arrays["out"].shape)
    memory.new("lse_part", splits, *memory.arrays["lse"].shape)
    seen = visible(shape)
    used = [slice(kv, kv + 1) for kv in np.flatnonzero(seen.any(0)).tolist()]
    parts = [used[i * len(used) // splits : (i + 1) * len(used) // splits] for i in range(splits)]
    group = shape.heads_q // shape.heads_kv
    for b in range(shape.batch):
        for g in range(shape.heads_kv):
            packed = slice(g * group, (g + 1) * group)
            for number, part in enumerate(parts):
                query = memory.load("q", b, packed).reshape(-1, shape.dim_qk)
                rows = np.tile(seen, (group, 1))
                count = len(query)
                state = np.zeros((count, shape.dim_v)), np.full((count, 1), -np.inf), np.zeros((count, 1))
                for columns in part:
                    score = memory.dot(query, memory.load("k", b, g, columns).T)
                    memory.flops += 2 * score.size * shape.dim_v
                    state = merge(*state, score, rows[:, columns], memory.load("v", b, g, columns))
                acc, row_max, row_sum = state
                out = (acc / np.where(row_sum == 0, 1, row_sum)).reshape(group, shape.len_q, shape.dim_v)
                with np.errstate(divide="ignore"):
                    lse = (row_max + np.log(row_sum)).reshape(group, shape.len_q, 1)
                where: tuple[int | slice, ...] = (b, packed)
                if splits > 1:
                    memory.store("out_part", out, number, *where)
                    memory.store("lse_part", lse, number, *where)
                else:
                    memory.store("out", out, *where)
                    memory.store("lse", lse, *where)
    if splits > 1:
        out, lse = memory.load("out_part", slice(None)), memory.load("lse_part", slice(None))
        top = lse.max(0)
        weight = np.exp(lse - np.where(np.isinf(top), 0, top))
        total = weight.sum(0)
        memory.store("out", (out * weight).sum(0) / np.where(total == 0, 1, total), slice(None))
        with np.errstate(divide="ignore"):
            memory.store("lse", top + np.log(total), slice(None))
    return memory


def exact(shape: Shape) -> np.ndarray:
    """The answer that every simulation must give, or it would prove nothing about what has to move."""
    arrays, out = inputs(shape), np.empty((shape.batch, shape.heads_q, shape.len_q, shape.dim_v))
    for b, h, g in heads(shape):
        out[b, h] = softmax_rows(arrays["q"][b, h] @ arrays["k"][b, g].T, visible(shape)) @ arrays["v"][b, g]
    return out


def exact_gradients(shape: Shape) -> dict[str, np.ndarray]:
    arrays = backward_memory(shape).arrays
    grads = {f"d{name}": np.zeros_like(arrays[name]) for name in "qkv"}
    for b, h, g in heads(shape):
        query, key, value, d_out = arrays["q"][b, h], arrays["k"][b, g], arrays["v"][b, g], arrays["d_out"][b, h]
        p = softmax_rows(query @ key.T, visible(shape))
        dp = d_out @ value.T
        ds = p * (dp - (p * dp).sum(1, keepdims=True))
        grads["dq"][b, h] += ds @ key
        grads["dk"][b, g] += ds.T @ query
        grads["dv"][b, g] += p.T @ d_out
    return grads


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    assert np.abs(got - expected).max(initial=0) <= 1e-12 * max(1, np.abs(expected).max(initial=0))


def assert_same_gradients(memory: Memory) -> None:
    for name, expected in exact_gradients(memory.shape).items():
        assert_same(memory.arrays[name], expected)


@st.composite
def shapes(draw: st.DrawFn, most: int = 12) -> Shape:
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    left, right = draw(st.none() | st.integers(-3, 9)), draw(st.none() | st.integers(-3, 9))
    assume(left is None or right is None or left + right >= 0)
    return Shape(
        draw(st.integers(1, 2)),
        heads_kv * group,
        heads_kv,
        draw(st.integers(1, most)),
        draw(st.integers(1, most)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([2, 4, 8])),
        left,
        right,
        draw(st.integers(-8, 8)),
    )


blocks = st.integers(1, 6)
SQUARE = Shape.square(16, 4, heads=2)
CAUSAL = Shape(2, 4, 2, 9, 13, 3, 5, 2, None, 0, 4)  # grouped heads, ragged tiles, unequal lengths and dims
WINDOW = Shape(1, 2, 1, 11, 11, 2, 3, 4, 2, 1, 0)
CASES = pytest.mark.parametrize("shape", [SQUARE, CAUSAL, WINDOW], ids=["square", "causal", "window"])


@CASES
@pytest.mark.parametrize("extra", [(), ("scale",), ("scale", "mask"), ("scale", "mask", "dropout")])
def test_naive_and_eager_move_what_their_kernels_load_and_store(shape: Shape, extra: tuple[str, ...]) -> None:
    memory = simulate_eager(shape, passes=1 + len(extra))
    assert_same(memory.arrays["out"], exact(shape))
    expected = cost.eager(shape, scale="scale" in extra, mask="mask" in extra, dropout="dropout" in extra)
    memory.assert_matches(expected)
    assert expected.memory == memory.bytes_beyond("a", "b", "out")
    if not extra:
        assert cost.naive(shape) == expected


@settings(deadline=None, max_examples=50)
@given(shape=shapes(), block_q=blocks, block_kv=blocks)
def test_the_tiled_forward_pass_moves_what_its_loops_load_and_store(shape: Shape, block_q: int, block_kv: int) -> None:
    worst = simulate_tiled(shape, block_q, block_kv)
    assert_same(worst.arrays["out"], exact(shape))
    worst.assert_matches(cost.tiled_worst(shape, block_q, block_kv))
    best = cost.tiled_best(shape, block_q, block_kv)
    simulate_tiled(shape, block_q, block_kv, cached=True).assert_matches(best)
    assert best.memory == cost.tiled_worst(shape, block_q, block_kv).memory == worst.bytes_beyond("out", "lse")


@settings(deadline=None, max_examples=50)
@given(shape=shapes(), block_q=blocks, block_kv=blocks)
def test_keys_outside_move_what_the_loops_of_flashattention_1_load_and_store(
    shape: Shape, block_q: int, block_kv: int
) -> None:
    memory = simulate_fa1(shape, block_q, block_kv)
    assert_same(memory.arrays["out"], exact(shape))
    expected = cost.fa1(shape, block_q, block_kv)
    memory.assert_matches(expected)
    assert expected.memory == memory.bytes_beyond("out", "row_max", "row_sum")


@settings(deadline=None, max_examples=50)
@given(shape=shapes(), block_q=blocks, block_kv=blocks)
def test_the_tiled_backward_pass_moves_what_its_loops_load_and_store(shape: Shape, block_q: int, block_kv: int) -> None:
    one = simulate_tiled_backward(shape, block_q, block_kv, passes=1)
    assert_same_gradients(one)
    expected = cost.tiled_backward_worst(shape, block_q, block_kv)
    one.assert_matches(expected)
    assert expected.memory == one.bytes_beyond("dq", "dk", "dv", "delta", "dq_sum")

    two = simulate_tiled_backward(shape, block_q, block_kv, passes=2)
    assert_same_gradients(two)
    expected = cost.tiled_backward_worst(shape, block_q, block_kv, passes=2)
    two.assert_matches(expected)
    assert expected.memory == two.bytes_beyond("dq", "dk", "dv", "delta")


@CASES
def test_the_best_backward_pass_moves_each_operand_once(shape: Shape) -> None:
    # Two passes through a cache load everything once; the scores of the second pass stand for those of the first.
    memory = simulate_tiled_backward(shape, 4, 3, passes=2, cached=True, recompute=False)
    best = cost.tiled_backward_best(shape, 4, 3)
    assert memory.flops == best.flops
    assert memory.read + memory.written == best.elements
    wide = shape.itemsize32
    assert memory.read * shape.itemsize + memory.read32 * wide == best.bytes_read
    assert memory.written * shape.itemsize + memory.written32 * wide == best.bytes_written
    assert best.bytes_onchip == cost.tiled_backward_worst(shape, 4, 3).bytes
    assert best.memory == memory.bytes_beyond("dq", "dk", "dv", "delta")


@pytest.mark.parametrize("shape", [SQUARE, Shape(2, 3, 3, 9, 13, 3, 5, 4, None, 0, 4)], ids=["square", "causal"])
def test_the_naive_backward_pass_moves_what_its_kernels_load_and_store(shape: Shape) -> None:
    memory = simulate_naive_backward(shape)
    assert_same_gradients(memory)
    expected = cost.naive_backward(shape)
    memory.assert_matches(expected)
    assert expected.memory == memory.bytes_beyond("p", "dp", "ds", "dq", "dk", "dv")


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("len_q", [1, 3])
@pytest.mark.parametrize("left", [None, 6])
def test_decoding_moves_what_its_loops_load_and_store(splits: int, len_q: int, left: int | None) -> None:
    shape = Shape(2, 6, 2, len_q, 17, 4, 3, 2, left, 0, 17 - len_q)
    memory = simulate_decode(shape, splits)
    assert_same(memory.arrays["out"], exact(shape))
    expected = cost.decode(shape, splits)
    memory.assert_matches(expected)
    partial = ("out_part", "lse_part") if splits > 1 else ()
    assert expected.memory == memory.bytes_beyond("out", "lse", *partial)
