"""What holds for the NumPy algorithm: it equals the untiled formula, says what it moves, and holds one tile."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.backends import numpy_tiled
from tilewise.backends.naive import Terms, naive, naive_backward
from tilewise.backends.numpy_tiled import Step, Tiling, tiled, tiled_backward
from tilewise.problem.blocks import is_visible
from tilewise.reference import naive_attention, tiled_attention


class Inputs(NamedTuple):
    """The arrays of one call, forward and backward, 2-D."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_out: np.ndarray
    d_lse: np.ndarray


class Results(NamedTuple):
    """What a call gives."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def draw(len_q: int, len_kv: int, dim_qk: int = 8, dim_v: int = 8, dtype: str = "float64", seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    shapes = ((len_q, dim_qk), (len_kv, dim_qk), (len_kv, dim_v), (len_q, dim_v), (len_q,))
    return Inputs(*(rng.standard_normal(shape).astype(dtype) for shape in shapes))


def mask_of(inputs: Inputs, tiling: Tiling) -> np.ndarray:
    q_pos, kv_pos = np.arange(len(inputs.q))[:, None], np.arange(len(inputs.k))[None, :]
    visible = is_visible(q_pos, kv_pos, tiling.kv_start, tiling.kv_stop, tiling.left, tiling.right, tiling.offset)
    return np.broadcast_to(visible, (len(inputs.q), len(inputs.k)))


def by_tiles(inputs: Inputs, tiling: Tiling, scale: float | None = None) -> Results:
    q, k, v, d_out, d_lse = inputs
    out, lse = tiled(q, k, v, tiling, scale)
    return Results(out, lse, *tiled_backward(q, k, v, out, lse, d_out, d_lse, tiling, scale))


def by_formula(inputs: Inputs, tiling: Tiling, scale: float | None = None) -> Results:
    """Ask the oracle, in float64."""
    q, k, v, d_out, d_lse = (x[None, None].astype(np.float64) for x in inputs)
    terms: Terms[np.ndarray] = Terms(
        left=tiling.left,
        right=tiling.right,
        offset=tiling.offset,
        kv_start=tiling.kv_start,
        kv_stop=min(tiling.kv_stop, k.shape[2]),
        scale=scale,
    )
    out, lse = naive(np, q, k, v, terms)
    grads = naive_backward(np, q, k, v, d_out, d_lse=d_lse, terms=terms)
    return Results(*(x[0, 0] for x in (out, lse, grads.dq, grads.dk, grads.dv)))


def rounding(inputs: Inputs, tiling: Tiling, scale: float | None = None) -> Results:
    """Bound, element by element, what rounding can do to each result.

    A sum of n products is off by at most n * eps times the sum of their absolute values. A probability is off by its
    exponent's absolute error on top, which is (dim_qk + 4) * eps times the largest score in absolute values. Every
    result is a short chain of such sums, so the same chain over absolute values, times eps and the number of
    operations in it, bounds it.
    """
    reference = by_formula(inputs, tiling, scale)
    lse = np.where(np.isfinite(reference.lse), reference.lse, 0)
    scale = inputs.q.shape[1] ** -0.5 if scale is None else scale
    score = (inputs.q.astype(np.float64) * scale) @ inputs.k.astype(np.float64).T
    p = np.where(mask_of(inputs, tiling), np.exp(np.minimum(score - lse[:, None], 0)), 0)
    q, k, v, d_out, d_lse = (abs(x.astype(np.float64)) for x in inputs)
    scale = abs(scale)
    largest = float((scale * q @ k.T).max(initial=0)) + float(abs(lse).max(initial=0))
    operations = (q.shape[1] + 4) * (largest + 1) + q.shape[1] + v.shape[1] + len(q) + len(k) + 8
    eps = operations * float(np.finfo(inputs.q.dtype if inputs.q.dtype != np.float16 else np.float32).eps)
    delta = (d_out * (p @ v)).sum(axis=1)
    from_out = float(np.finfo(inputs.q.dtype).eps) * delta  # backward reads out, which was rounded to q's dtype
    ds = p * (eps * (d_out @ v.T + (delta + d_lse)[:, None]) + from_out[:, None])
    return Results(eps * (p @ v), eps * (1 + abs(lse)), scale * ds @ k, scale * ds.T @ q, eps * (p.T @ d_out))


def assert_equal_to_rounding(inputs: Inputs, tiling: Tiling, scale: float | None = None) -> None:
    found, wanted = by_tiles(inputs, tiling, scale), by_formula(inputs, tiling, scale)
    for name, x, reference, bound in zip(Results._fields, found, wanted, rounding(inputs, tiling, scale), strict=True):
        assert x.shape == reference.shape, name
        same = x == reference  # where infinite
        error = np.abs(np.where(same, 0, x) - np.where(same, 0, reference))
        narrow = abs(reference) * float(np.finfo(x.dtype).eps)  # the result's own rounding, large in float16
        assert (error <= bound + np.where(same, 0, narrow)).all(), f"{name} is off by {error.max()}"


BANDS = {
    "plain": {},
    "causal": {"right": 0},
    "window": {"left": 5, "right": 3},
    "causal window": {"left": 40, "right": 0},
    "window behind the diagonal": {"left": 70, "right": -30},
}


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize(("len_q", "len_kv"), [(512, 512), (300, 777), (777, 300)])
def test_forward_in_double_precision_equals_the_formula_to_1e_14(len_q: int, len_kv: int, band: dict[str, int]) -> None:
    inputs = draw(len_q, len_kv, dim_qk=64, dim_v=48)
    wanted = by_formula(inputs, Tiling(len_kv, offset=len_kv - len_q, **band)).out
    for block_q, block_kv in ((64, 64), (100, 37), (1024, 1024)):
        tiling = Tiling(len_kv, offset=len_kv - len_q, block_q=block_q, block_kv=block_kv, **band)
        out, _ = tiled(inputs.q, inputs.k, inputs.v, tiling)
        assert np.abs(out - wanted).max() <= 1e-14 * np.abs(wanted).max()


@given(data=st.data())
def test_any_band_key_range_lengths_and_tiles_give_the_formula_and_its_gradients(data: st.DataObject) -> None:
    length, block = st.integers(0, 20), st.integers(1, 24)
    side, any_int = st.one_of(st.none(), st.integers(-12, 24)), st.integers(-24, 24)
    inputs = draw(
        data.draw(length),
        data.draw(length),
        dim_qk=data.draw(st.integers(1, 9)),
        dim_v=data.draw(st.integers(1, 9)),
        seed=data.draw(st.integers(0, 5)),
    )
    tiling = Tiling(
        kv_start=data.draw(st.integers(0, 24)),
        kv_stop=data.draw(st.integers(0, 24)),
        left=data.draw(side),
        right=data.draw(side),
        offset=data.draw(any_int),
        block_q=data.draw(block),
        block_kv=data.draw(block),
    )
    assert_equal_to_rounding(inputs, tiling, data.draw(st.sampled_from([None, 1.0, -0.7, 0.0])))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_every_dtype_is_as_exact_as_its_rounding_allows(dtype: str, band: dict[str, int]) -> None:
    inputs = draw(70, 90, dim_qk=16, dim_v=24, dtype=dtype)
    assert_equal_to_rounding(inputs, Tiling(90, offset=20, block_q=32, block_kv=16, **band))


def test_half_precision_is_computed_in_single_and_returned_in_half() -> None:
    inputs = draw(9, 11, dtype="float16")
    found = by_tiles(inputs, Tiling(11, block_q=4, block_kv=4))
    assert [x.dtype.name for x in found] == ["float16", "float32", "float16", "float16", "float16"]
    single = by_tiles(Inputs(*(x.astype(np.float32) for x in inputs)), Tiling(11, block_q=4, block_kv=4))
    assert np.array_equal(found.out, single.out.astype(np.float16))


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_gradients_are_what_central_differences_find(band: dict[str, int]) -> None:
    inputs = draw(60, 75, dim_qk=3, dim_v=4)
    tiling = Tiling(75, kv_start=2, offset=15, block_q=16, block_kv=32, **band)
    lse_weight = np.where(mask_of(inputs, tiling).any(axis=1), inputs.d_lse, 0)

    def loss(arrays: Inputs) -> float:
        out, lse = tiled(arrays.q, arrays.k, arrays.v, tiling)
        return float((out * inputs.d_out).sum() + (np.where(lse == -np.inf, 0, lse) * lse_weight).sum())

    found = by_tiles(inputs, tiling)
    # A central difference is off by about step**2 + eps * |loss| / step, least near eps ** (1/3).
    step = float(np.finfo(np.float64).eps) ** (1 / 3)
    allowed = 10 * step**2 * (1 + abs(loss(inputs)))
    rng = np.random.default_rng(1)
    for name, gradient in (("q", found.dq), ("k", found.dk), ("v", found.dv)):
        for _ in range(40):
            index = tuple(rng.integers(gradient.shape))
            up, down = (inputs._replace(**{name: getattr(inputs, name).copy()}) for _ in range(2))
            getattr(up, name)[index] += step
            getattr(down, name)[index] -= step
            assert abs((loss(up) - loss(down)) / (2 * step) - gradient[index]) <= allowed


def test_a_row_that_sees_no_key_gives_zeros_and_no_gradient_whatever_is_in_it() -> None:
    inputs = draw(12, 7)
    tiling = Tiling(7, right=0, offset=-5, block_q=4, block_kv=3)  # causal: queries 0 to 4 come before the first key
    clean = by_tiles(inputs, tiling)
    assert (clean.out[:5] == 0).all()
    assert (clean.lse[:5] == -np.inf).all()
    assert (clean.dq[:5] == 0).all()
    for x in (inputs.q, inputs.d_out, inputs.d_lse):
        x[:5] = np.nan
    for name, x, wanted in zip(Results._fields, by_tiles(inputs, tiling), clean, strict=True):
        assert np.array_equal(x, wanted), name


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(13, kv_start=3, block_q=4, block_kv=8),
        Tiling(20, left=2, right=1, offset=9, block_q=4, block_kv=8),
        Tiling(16, kv_start=5, right=0, offset=2, block_q=3, block_kv=5),
    ],
)
def test_what_lies_in_a_key_or_value_that_nobody_sees_changes_nothing(tiling: Tiling, poison: float) -> None:
    inputs = draw(6, 20)
    hidden = ~mask_of(inputs, tiling).any(axis=0)
    assert hidden.any()
    clean = by_tiles(inputs, tiling)
    inputs.k[hidden] = inputs.v[hidden] = poison
    for name, x, wanted in zip(Results._fields, by_tiles(inputs, tiling), clean, strict=True):
        assert np.array_equal(x, wanted), name


@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys_give_defined_results(len_q: int, len_kv: int) -> None:
    found = by_tiles(draw(len_q, len_kv, dim_v=3), Tiling(len_kv))
    assert found.out.shape == (len_q, 3)
    assert (found.lse == -np.inf).all()
    assert all((x == 0).all() for x in (found.out, found.dq, found.dk, found.dv))


def test_scores_far_apart_neither_overflow_nor_lose_the_largest() -> None:
    inputs = draw(4, 30)
    inputs.k[-1] = 1e150 * inputs.q[0]
    found = by_tiles(inputs, Tiling(30, block_q=4, block_kv=4))
    assert all(np.isfinite(x).all() for x in found)
    assert np.array_equal(found.out[0], inputs.v[-1])


def test_views_with_any_strides_give_what_their_copies_give() -> None:
    inputs = draw(10, 12)
    views = Inputs(*(np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3] if x.ndim == 2 else x for x in inputs))
    views = views._replace(d_out=np.broadcast_to(np.float64(0.5), inputs.d_out.shape), v=inputs.v[::-1])
    copies = Inputs(*(x.copy() for x in views))
    assert not views.q.flags.c_contiguous
    tiling = Tiling(12, right=0, offset=2, block_q=4, block_kv=5)
    for x, wanted in zip(by_tiles(views, tiling), by_tiles(copies, tiling), strict=True):
        assert np.array_equal(x, wanted)


# ---- the steps ----


def forward_steps(inputs: Inputs, tiling: Tiling) -> tuple[list[Step], np.ndarray, np.ndarray]:
    """Run the forward pass and keep its steps, numbers copied."""
    out, lse = np.full_like(inputs.d_out, np.nan), np.full_like(inputs.d_lse, np.nan)
    scale = numpy_tiled.default_scale(inputs.q, None)
    steps = numpy_tiled.forward_steps(inputs.q, inputs.k, inputs.v, out, lse, tiling, scale)
    kept = [step._replace(numbers={name: x.copy() for name, x in step.numbers.items()}) for step in steps]
    return kept, out, lse


def backward_steps(inputs: Inputs, tiling: Tiling) -> list[Step]:
    q, k, v, d_out, d_lse = inputs
    out, lse = tiled(q, k, v, tiling)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    scale = numpy_tiled.default_scale(q, None)
    return list(numpy_tiled.backward_steps(q, k, v, out, lse, d_out, d_lse, dq, dk, dv, tiling, scale))


def moved(steps: list[Step], kind: str) -> Counter[str]:
    """Add up the elements of each tensor that were loaded or stored."""
    elements: Counter[str] = Counter()
    for step in steps:
        if step.kind == kind:
            elements[step.tensor] += step.elements
    return elements


def visited(inputs: Inputs, tiling: Tiling) -> list[tuple[slice, slice]]:
    """Find by looking at every pair which tiles hold a visible one."""
    mask = mask_of(inputs, tiling)
    tiles = []
    for q_start in range(0, len(inputs.q), tiling.block_q):
        for kv_start in range(0, len(inputs.k), tiling.block_kv):
            rows = slice(q_start, min(q_start + tiling.block_q, len(inputs.q)))
            cols = slice(kv_start, min(kv_start + tiling.block_kv, len(inputs.k)))
            if mask[rows, cols].any():
                tiles.append((rows, cols))
    return tiles


def size(tile: slice) -> int:
    return int(tile.stop - tile.start)


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize(("block_q", "block_kv"), [(16, 16), (32, 8), (7, 50), (200, 200)])
def test_the_steps_move_what_a_count_over_all_pairs_says(block_q: int, block_kv: int, band: dict[str, int]) -> None:
    inputs = draw(100, 120, dim_qk=5, dim_v=3)
    tiling = Tiling(120, offset=20, block_q=block_q, block_kv=block_kv, **band)
    tiles = visited(inputs, tiling)
    rows, cols = sum(size(rows) for rows, _ in tiles), sum(size(cols) for _, cols in tiles)

    forward, _, _ = forward_steps(inputs, tiling)
    assert moved(forward, "load") == {"q": 100 * 5, "k": cols * 5, "v": cols * 3}
    assert moved(forward, "store") == {"out": 100 * 3, "lse": 100}
    assert [(step.rows, step.cols) for step in forward if step.tensor == "p"] == tiles

    backward = backward_steps(inputs, tiling)
    computed = [(step.rows, step.cols) for step in backward if step.tensor == "p"]
    assert all(tile in computed for tile in tiles)
    assert len({(rows.start, cols.start) for rows, cols in computed}) == len(computed)
    assert all(tile in tiles or not mask_of(inputs, tiling)[:, tile[1]].any() for tile in computed)
    rows = sum(size(rows) for rows, _ in computed)
    assert moved(backward, "load") == {
        "k": 120 * 5,
        "v": 120 * 3,
        "q": rows * 5,
        "dq": rows * 5,
        "d_out": (rows + 100) * 3,
        "out": 100 * 3,
        "lse": rows,
        "delta": rows,
        "d_lse": 100,
    }
    assert moved(backward, "store") == {"delta": 100, "dq": rows * 5, "dk": 120 * 5, "dv": 120 * 3}


def test_after_each_tile_the_state_is_the_softmax_of_the_keys_seen_so_far() -> None:
    inputs = draw(24, 40)
    tiling = Tiling(40, right=0, offset=16, block_q=8, block_kv=8)
    steps, out, lse = forward_steps(inputs, tiling)
    before = np.array(-np.inf)
    for step in steps:
        if step.tensor == "q":
            before = np.array(-np.inf)
        if step.tensor == "p":
            row_max, row_sum, acc = (step.numbers[name] for name in ("row_max", "row_sum", "acc"))
            so_far = tiling._replace(kv_stop=step.cols.stop)
            wanted, bound = by_formula(inputs, so_far), rounding(inputs, so_far)
            rows = step.rows
            assert (np.abs(acc / row_sum[:, None] - wanted.out[rows]) <= bound.out[rows]).all()
            natural = (row_max + np.log2(row_sum)) * math.log(2)
            assert (np.abs(natural - wanted.lse[rows]) <= bound.lse[rows]).all()
            assert np.array_equal(step.numbers["rescale"], np.exp2(before - row_max))
            before = row_max
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


def test_a_step_of_scores_holds_the_masked_scores_in_base_two() -> None:
    inputs = draw(8, 8, dim_qk=4)
    steps, _, _ = forward_steps(inputs, Tiling(8, right=0, block_q=4, block_kv=4))
    scores = {(step.rows.start, step.cols.start): step.numbers["score"] for step in steps if step.tensor == "score"}
    assert set(scores) == {(0, 0), (4, 0), (4, 4)}
    whole = inputs.q @ inputs.k.T * (0.5 * math.log2(math.e))
    eps = float(np.finfo(np.float64).eps)
    largest = 4 * float((abs(inputs.q) @ abs(inputs.k).T).max())
    assert (np.abs(scores[4, 0] - whole[4:, :4]) <= largest * eps).all()
    assert np.array_equal(np.isneginf(scores[4, 4]), ~np.tri(4, dtype=bool))


def test_tiles_whose_pairs_are_all_visible_carry_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masked = []

    def spy(self: Tiling, rows: slice, cols: slice) -> np.ndarray:
        masked.append((rows.start, cols.start))
        return visible(self, rows, cols)

    visible = Tiling.visible
    monkeypatch.setattr(Tiling, "visible", spy)
    inputs = draw(32, 32)
    by_tiles(inputs, Tiling(32, right=0, block_q=8, block_kv=8))
    diagonal = [(0, 0), (8, 8), (16, 16), (24, 24)]
    assert masked == diagonal * 2  # forward, then backward
    masked.clear()
    by_tiles(inputs, Tiling(32, block_q=8, block_kv=8))
    assert not masked


def test_the_default_key_range_is_all_keys_and_a_longer_one_is_cut() -> None:
    q, k, v, _, _ = draw(5, 9)
    wanted = tiled(q, k, v, Tiling(9))
    for tiling in (None, Tiling(1000), Tiling(9, kv_start=-4)):
        assert all(np.array_equal(x, y) for x, y in zip(tiled(q, k, v, tiling), wanted, strict=True))


# ---- memory ----


def peak_bytes(function: object, *args: object, **options: object) -> int:
    assert callable(function)
    tracemalloc.start()
    try:
        function(*args, **options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("causal", [False, True])
def test_the_forward_pass_needs_a_twentieth_of_the_extra_memory_of_the_formula(causal: bool) -> None:
    q, k, v, _, _ = draw(4096, 4096, 64, 64, "float32")
    peak = peak_bytes(tiled_attention, q, k, v, causal=causal)
    matrix = 4 * 4096 * 4096  # what any untiled form holds at the least
    assert peak <= matrix / 20
    assert peak <= peak_bytes(naive_attention, q, k, v, causal=causal) / 20


def test_memory_of_forward_and_backward_grows_with_the_length_and_not_its_square() -> None:
    peaks = []
    for length in (2048, 4096):
        inputs = draw(length, length, 64, 64, "float32")
        peaks.append(peak_bytes(by_tiles, inputs, Tiling(length)))
    assert peaks[1] < 2 * peaks[0]
