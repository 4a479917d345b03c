"""What holds for the NumPy reference: its softmaxes agree, its states merge, and it refuses what it cannot mean."""

# ruff: noqa: E741 - l is the papers' name

from __future__ import annotations

import math
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.reference import (
    merge,
    naive_attention,
    online_max_sum,
    online_softmax_weighted_sum,
    softmax_online,
    softmax_safe,
    tiled_attention,
    tiled_attention_backward,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

EPS = float(np.finfo(np.float64).eps)

scores = st.lists(st.one_of(st.floats(-1e3, 1e3), st.just(-math.inf)), max_size=12)


def rounding(count: int) -> float:
    """Bound the relative error of a sum of ``count`` exponentials, each rescaled up to ``count`` times."""
    return (3 * count + 8) * EPS


def numbers(state: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    m, l = state
    return float(m), float(l)


def exact_state(x: list[float]) -> tuple[float, float]:
    """Compute (m, l) with Python's exact summation."""
    m = max(x, default=-math.inf)
    return m, math.fsum(math.exp(score - m) for score in x if score > -math.inf)


@given(scores)
def test_the_online_maximum_and_sum_are_those_of_two_passes(x: list[float]) -> None:
    m, l = numbers(online_max_sum(np.array(x, np.float64)))
    exact_m, exact_l = exact_state(x)
    assert m == exact_m
    assert abs(l - exact_l) <= rounding(len(x)) * exact_l


@given(scores)
def test_both_softmaxes_agree_and_sum_to_one(x: list[float]) -> None:
    safe, online = softmax_safe(np.array(x, np.float64)), softmax_online(np.array(x, np.float64))
    bound = rounding(len(x))
    assert (np.abs(safe - online) <= bound * safe).all()
    if any(score > -math.inf for score in x):
        assert abs(safe.sum() - 1) <= bound
    else:
        assert (safe == 0).all()


@given(st.lists(scores, max_size=8), st.randoms())
def test_any_number_of_states_merge_in_any_order_empty_ones_included(chunks: list[list[float]], random: Random) -> None:
    exact_m, exact_l = exact_state([score for chunk in chunks for score in chunk])
    states = [online_max_sum(np.array(chunk, np.float64)) for chunk in chunks]
    random.shuffle(states)
    bound = rounding(sum(len(chunk) for chunk in chunks) + len(chunks)) * exact_l
    m, l = numbers(merge(*states))
    assert m == exact_m
    assert abs(l - exact_l) <= bound
    one_by_one = merge()
    for state in states:
        one_by_one = merge(state, one_by_one)
    m, l = numbers(one_by_one)
    assert m == exact_m
    assert abs(l - exact_l) <= bound


def test_merging_nothing_gives_the_empty_state_and_the_empty_state_changes_nothing() -> None:
    empty, state = (-math.inf, 0.0), (2.0, 3.0)
    assert numbers(merge()) == numbers(merge(empty)) == numbers(merge(empty, empty)) == empty
    assert numbers(merge(state)) == numbers(merge(empty, state)) == numbers(merge(state, empty)) == state


def test_states_of_many_rows_merge_row_by_row() -> None:
    x = np.random.default_rng(0).standard_normal((4, 9))
    x[1], x[2, :5] = -np.inf, -np.inf
    m, l = merge(online_max_sum(x[:, :5]), online_max_sum(x[:, 5:]))
    for row in range(4):
        exact_m, exact_l = exact_state(x[row].tolist())
        assert m[row] == exact_m
        assert abs(l[row] - exact_l) <= rounding(9) * exact_l


@given(scores, st.integers(1, 15))
def test_the_weighted_sum_in_one_pass_is_softmax_times_values(x: list[float], block_size: int) -> None:
    v = np.random.default_rng(len(x)).standard_normal((len(x), 3))
    hidden = np.isneginf(np.array(x, np.float64))
    wanted = softmax_safe(np.array(x, np.float64)) @ v
    bound = rounding(len(x)) * (softmax_safe(np.array(x, np.float64)) @ abs(v))
    v[hidden] = np.nan  # what is hidden counts for nothing
    found = online_softmax_weighted_sum(np.array(x, np.float64), v, block_size=block_size)
    assert found.shape == (3,)
    assert (np.abs(found - wanted) <= bound).all()


def test_softmax_works_along_the_last_axis_and_keeps_single_precision() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    x[0, 0] = -np.inf
    for softmax in (softmax_safe, softmax_online):
        p = softmax(x)
        assert p.shape == x.shape
        assert p.dtype == np.float32
        assert (p[0, 0] == 0).all()
        assert (np.abs(p.sum(axis=-1).ravel()[1:] - 1) <= 8 * np.finfo(np.float32).eps).all()


@pytest.mark.parametrize("softmax", [softmax_safe, softmax_online])
def test_integers_are_taken_as_numbers(softmax: Callable[[list[float]], np.ndarray]) -> None:
    assert np.array_equal(softmax([2, 1, 5, 3]), softmax([2.0, 1.0, 5.0, 3.0]))


def test_nan_is_passed_on_and_not_hidden() -> None:
    assert np.isnan(softmax_safe([1.0, math.nan])).all()
    assert np.isnan(softmax_online([1.0, math.nan])).all()
    assert np.isnan(online_max_sum([math.nan, 1.0])).all()


# ---- attention: what the user's words mean ----


def draw(len_q: int, len_kv: int, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((len_q, 8), (len_kv, 8), (len_kv, 5)))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def by_loops(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, window: tuple[int | None, int | None] | None
) -> np.ndarray:
    """Compute attention one query and one key at a time, the mask written out in words of distance."""
    out = np.zeros((len(q), v.shape[1]))
    left, right = (None, None) if window is None else window
    for i in range(len(q)):
        seen = []
        for j in range(len(k)):
            ahead = j - (i + len(k) - len(q))  # keys past the diagonal that ends at the last query and the last key
            too_far_ahead = (causal and ahead > 0) or (right not in (None, -1) and ahead > right)
            too_far_behind = left not in (None, -1) and -ahead > left
            if not (too_far_ahead or too_far_behind):
                seen.append(j)
        weights = [math.exp(float(q[i] @ k[j]) / math.sqrt(q.shape[1])) for j in seen]
        for j, weight in zip(seen, weights, strict=True):
            out[i] += weight / math.fsum(weights) * v[j]
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (2, 3), (-1, 1), (3, None), (0, 0), (None, -1)])
@pytest.mark.parametrize(("len_q", "len_kv"), [(9, 9), (5, 12), (12, 5), (1, 7)])
def test_causal_and_window_mean_what_a_plain_loop_says(
    len_q: int, len_kv: int, window: tuple[int | None, int | None] | None, causal: bool
) -> None:
    q, k, v = draw(len_q, len_kv)
    wanted = by_loops(q, k, v, causal, window)
    out, _ = tiled_attention(q, k, v, causal=causal, window=window, block_q=4, block_kv=3)
    bound = 1e-14 * np.abs(v).max()
    assert np.abs(naive_attention(q, k, v, causal=causal, window=window) - wanted).max() <= bound
    assert np.abs(out - wanted).max() <= bound


def test_scale_multiplies_the_products_and_may_be_negative() -> None:
    q, k, v = draw(6, 6)
    for scale in (0.3, -0.3):
        out, lse = tiled_attention(q, k, v, scale=scale)
        direct, direct_lse = tiled_attention(q * scale, k, v, scale=1.0)
        assert np.abs(out - direct).max() <= 1e-14 * np.abs(v).max()
        assert np.abs(lse - direct_lse).max() <= 1e-14 * np.abs(lse).max()
        assert np.abs(naive_attention(q, k, v, scale=scale) - out).max() <= 1e-14 * np.abs(v).max()


@pytest.mark.parametrize(
    ("causal", "window", "scale"),
    [(False, None, None), (True, None, None), (False, (3, 1), None), (True, (2, 2), -0.2)],
)
def test_gradients_of_the_public_function_are_what_central_differences_find(
    causal: bool, window: tuple[int, int] | None, scale: float | None
) -> None:
    arrays = draw(7, 9)
    d_out = np.random.default_rng(1).standard_normal((7, 5))

    def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return tiled_attention(q, k, v, causal=causal, window=window, scale=scale, block_q=3, block_kv=4)

    out, lse = forward(*arrays)
    grads = tiled_attention_backward(
        *arrays, out, lse, d_out, causal=causal, window=window, scale=scale, block_q=2, block_kv=5
    )
    # A central difference is off by about step**2 + eps * |loss| / step, least near eps ** (1/3).
    step = EPS ** (1 / 3)
    allowed = 10 * step**2 * (1 + float(np.abs(out * d_out).sum()))
    for which, gradient in enumerate(grads):
        for index in np.ndindex(gradient.shape):
            losses = []
            for sign in (1, -1):
                q, k, v = (x.copy() for x in arrays)
                (q, k, v)[which][index] += sign * step
                losses.append(float((forward(q, k, v)[0] * d_out).sum()))
            assert abs((losses[0] - losses[1]) / (2 * step) - gradient[index]) <= allowed


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    q, k, v = draw(6, 2)
    out, lse = tiled_attention(q, k, v, causal=True)
    assert (out[:4] == 0).all()
    assert (naive_attention(q, k, v, causal=True)[:4] == 0).all()
    assert (lse[:4] == -np.inf).all()
    assert np.isfinite(lse[4:]).all()


@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 4), (4, 0), (0, 0)])
def test_no_queries_or_no_keys_are_allowed(len_q: int, len_kv: int) -> None:
    q, k, v = draw(len_q, len_kv)
    out, lse = tiled_attention(q, k, v, causal=True)
    assert np.array_equal(out, np.zeros((len_q, 5)))
    assert np.array_equal(naive_attention(q, k, v, causal=True), out)
    assert all((x == 0).all() for x in tiled_attention_backward(q, k, v, out, lse, np.ones_like(out)))


def test_half_precision_is_computed_in_single() -> None:
    q, k, v = draw(6, 7, "float16")
    wide = [x.astype(np.float32) for x in (q, k, v)]
    assert np.array_equal(naive_attention(q, k, v), naive_attention(*wide).astype(np.float16))
    assert np.array_equal(tiled_attention(q, k, v)[0], tiled_attention(*wide)[0].astype(np.float16))


# ---- what is refused, and in which words ----

Q, K, V = draw(4, 6)
OUT, LSE = tiled_attention(Q, K, V)

Case = tuple["Callable[..., object]", tuple[object, ...], dict[str, object], type[Exception], str]
REFUSED: dict[str, Case] = {
    "q with a batch axis": (tiled_attention, (Q[None], K, V), {}, ValueError, r"2 axes \(len, dim\); got q \(1, 4"),
    "dims that differ": (tiled_attention, (Q[:, :3], K, V), {}, ValueError, "same dim_qk"),
    "a value too few": (tiled_attention, (Q, K, V[:-1]), {}, ValueError, "same length"),
    "two dtypes": (naive_attention, (Q, K.astype(np.float32), V), {}, TypeError, "k float32"),
    "integers": (naive_attention, ([[1]], [[1]], [[1]]), {}, TypeError, "float16, float32 or float64; got q int"),
    "a window below -1": (tiled_attention, (Q, K, V), {"window": (-2, 0)}, ValueError, "window's left side.*got -2"),
    "a window of one": (naive_attention, (Q, K, V), {"window": 3}, ValueError, r"pair \(left, right\); got 3"),
    "half a key": (naive_attention, (Q, K, V), {"window": (1.5, 0)}, TypeError, "integers; got 1.5"),
    "an infinite scale": (naive_attention, (Q, K, V), {"scale": math.inf}, ValueError, "scale must be finite; got inf"),
    "no rows in a tile": (tiled_attention, (Q, K, V), {"block_q": 0}, ValueError, "block_q must be 1 or more; got 0"),
    "a negative tile": (tiled_attention, (Q, K, V), {"block_kv": -8}, ValueError, "block_kv must be 1 or more"),
    "half a row": (tiled_attention, (Q, K, V), {"block_q": 2.5}, TypeError, "block_q.*got 2.5"),
    "out of another shape": (tiled_attention_backward, (Q, K, V, OUT[1:], LSE, OUT), {}, ValueError, "^out must"),
    "lse of another shape": (tiled_attention_backward, (Q, K, V, OUT, LSE[1:], OUT), {}, ValueError, "^lse must"),
    "d_out of another shape": (tiled_attention_backward, (Q, K, V, OUT, LSE, Q), {}, ValueError, "^d_out must"),
    "scores and values that differ": (online_softmax_weighted_sum, ([1.0], V), {}, ValueError, "x must be"),
    "blocks of nothing": (online_softmax_weighted_sum, ([1.0], [[1.0]], 0), {}, ValueError, "block_size.*got 0"),
    "a single score": (softmax_safe, (1.0,), {}, ValueError, "at least one axis"),
    "complex scores": (online_max_sum, ([1j],), {}, TypeError, "real numbers; got complex128"),
    "a list of states": (merge, ([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)],), {}, TypeError, "with \\*"),
    "a state of one": (merge, ((1.0, 1.0), 2.0), {}, TypeError, "pair \\(m, l\\); got tuple, float"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_in_words(case: Case) -> None:
    function, args, options, error, text = case
    with pytest.raises(error, match=text):
        function(*args, **options)


# ---- what it needs ----


def test_the_reference_loads_no_third_party_module_but_numpy() -> None:
    code = """
import sys
import numpy as np
before = set(sys.modules)
from tilewise.reference import merge, naive_attention, online_max_sum, tiled_attention, tiled_attention_backward
x = np.ones((3, 2))
naive_attention(x, x, x)
tiled_attention_backward(x, x, x, *tiled_attention(x, x, x, causal=True), x, causal=True)
merge(online_max_sum(x), online_max_sum(x))
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded - set(sys.stdlib_module_names) - {"numpy"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tilewise"]
