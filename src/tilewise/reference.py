"""Attention in NumPy, to read and to check against: from a softmax that does not overflow to tiled attention.

The functions build on each other. Read them in this order:

1. `softmax_safe`: the softmax, in three passes over its input.
2. `online_max_sum`: the first two passes become one, because a sum taken relative to an old maximum can be rescaled.
3. `softmax_online`: the softmax in two passes.
4. `merge`: partial results over any pieces of the input combine exactly, in any order.
5. `online_softmax_weighted_sum`: with values to weigh, one pass is enough. This is attention for a single query.
6. `naive_attention`, `tiled_attention`, `tiled_attention_backward`: attention with the whole score matrix, and the same
   result with never more than one tile of it. ``backends/naive.py`` and ``backends/numpy_tiled.py`` hold their code.

Throughout, ``m`` is a maximum of scores and ``l`` the sum of ``exp(score - m)``, as in the papers. Over no scores at
all, or none but -inf, ``m`` is -inf and ``l`` is 0: a query that sees no key gets zeros, never NaN.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867; Dao et al.,
"FlashAttention", arXiv:2205.14135; Dao, "FlashAttention-2", arXiv:2307.08691. This module needs NumPy alone.
"""

# ruff: noqa: E741 - l is the papers' name

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np

from tilewise.backends import numpy_tiled
from tilewise.backends.naive import Terms, naive
from tilewise.backends.numpy_mods import Function, Functions
from tilewise.problem.problem import Options, check_band, fail, mismatch

__all__ = [
    "merge",
    "naive_attention",
    "online_max_sum",
    "online_softmax_weighted_sum",
    "softmax_online",
    "softmax_safe",
    "tiled_attention",
    "tiled_attention_backward",
]

Scores = np.ndarray | Sequence[float]
State = tuple[np.ndarray, np.ndarray]  # (m, l), one of each for every row of scores


def softmax_safe(x: Scores) -> np.ndarray:
    """Compute the softmax along the last axis, without overflow.

    ``softmax(x)_i = exp(x_i - m) / sum_j exp(x_j - m)`` with ``m = max(x)``. Subtracting the maximum changes nothing in
    exact arithmetic and keeps every exponential at 1 or below. It takes three passes: maximum, sum, division.

    Args:
        x: (..., n) scores, -inf for a hidden one.

    Returns:
        Probabilities, in x's shape; zeros where all of x is -inf.

    Source: Milakov and Gimelshein, arXiv:1805.02867, algorithm 2.

    >>> softmax_safe([1000.0, 1001.0, 1002.0]).round(4)  # exp(1000.0) alone would be infinite
    array([0.09  , 0.2447, 0.6652])
    """
    x = _scores(x)
    m = x.max(axis=-1, keepdims=True, initial=-np.inf)
    p: np.ndarray = np.exp(x - _finite(m))
    l = p.sum(axis=-1, keepdims=True)
    p /= _not_zero(l)
    return p


def online_max_sum(x: Scores) -> State:
    """Find the maximum and the sum of exponentials in a single pass along the last axis.

    A new score may raise the maximum. What was summed so far is then too large by ``exp(m_new - m)``, and one
    multiplication puts it right::

        m_new = max(m, x_i)
        l     = l * exp(m - m_new) + exp(x_i - m_new)
        m     = m_new

    Args:
        x: (..., n) scores, -inf for a hidden one.

    Returns:
        (m, l), each of shape (...). ``m + log(l)`` is the log-sum-exp of x.

    Source: Milakov and Gimelshein, arXiv:1805.02867, algorithm 3.

    >>> m, l = online_max_sum([2.0, 1.0, 5.0, 3.0])
    >>> print(f"m={m:.0f} l={l:.4f}")  # l = exp(-3) + exp(-4) + 1 + exp(-2)
    m=5 l=1.2034
    """
    x = _scores(x)
    m = np.full(x.shape[:-1], -np.inf, x.dtype)
    l = np.zeros(x.shape[:-1], x.dtype)
    for i in range(x.shape[-1]):
        x_i = x[..., i]
        m_new = np.maximum(m, x_i)
        anchor = _finite(m_new)
        l = l * np.exp(m - anchor) + np.exp(x_i - anchor)
        m = m_new
    return np.asarray(m), np.asarray(l)


def softmax_online(x: Scores) -> np.ndarray:
    """Compute the softmax along the last axis in two passes: `online_max_sum`, then the division.

    Args:
        x: (..., n) scores, -inf for a hidden one.

    Returns:
        Probabilities, in x's shape, equal to those of `softmax_safe` to rounding.

    Source: Milakov and Gimelshein, arXiv:1805.02867, algorithm 3.

    >>> softmax_online([2.0, 1.0, 5.0, 3.0]).round(4)
    array([0.0414, 0.0152, 0.831 , 0.1125])
    """
    x = _scores(x)
    m, l = (np.expand_dims(state, -1) for state in online_max_sum(x))
    p: np.ndarray = np.exp(x - _finite(m)) / _not_zero(l)
    return p


def merge(*states: State | tuple[float, float]) -> State:
    """Combine the states (m, l) of separate pieces into the state of the whole.

    ``m = max_j m_j`` and ``l = sum_j l_j * exp(m_j - m)``. The operation is associative and commutative, and the state
    of no scores, (-inf, 0), changes nothing. So the pieces may be of any size, in any order, on different machines.

    Args:
        states: any number of pairs (m, l), scalars or arrays whose shapes broadcast together. A state with ``m = -inf``
            holds nothing.

    Returns:
        (m, l) of the whole; (-inf, 0) for no states at all.

    Source: Milakov and Gimelshein, arXiv:1805.02867, section 3.1.

    The scores 3, 1, 6, 2 in blocks of two. The second block raises the maximum from 3 to 6, so what the first one
    summed is rescaled by alpha = exp(3 - 6):

    >>> first, second = online_max_sum([3.0, 1.0]), online_max_sum([6.0, 2.0])
    >>> print(f"m={first[0]:.0f} l={first[1]:.4f}, then m={second[0]:.0f} l={second[1]:.4f}")
    m=3 l=1.1353, then m=6 l=1.0183
    >>> alpha = np.exp(first[0] - second[0])
    >>> print(f"alpha={alpha:.4f} l={first[1] * alpha + second[1]:.4f}")
    alpha=0.0498 l=1.0748
    >>> m, l = merge(first, second)
    >>> print(f"m={m:.0f} l={l:.4f} log-sum-exp={m + np.log(l):.4f}")
    m=6 l=1.0748 log-sum-exp=6.0722

    However the scores are scaled and split, the whole comes out the same:

    >>> x = np.random.default_rng(0).standard_normal(1000)
    >>> for scale in (1, 10, 100):
    ...     chunks = np.split(scale * x, [1, 3, 10, 100, 101, 640])  # seven, of 1, 2, 7, 90, 1, 539 and 360 scores
    ...     m, l = merge(*(online_max_sum(chunk) for chunk in chunks))
    ...     whole_m, whole_l = online_max_sum(scale * x)
    ...     rounding = len(x) * np.finfo(np.float64).eps
    ...     print(len(chunks), bool(m == whole_m), bool(abs(l / whole_l - 1) < rounding))
    7 True True
    7 True True
    7 True True
    """
    if not states:
        return np.array(-np.inf), np.array(0.0)
    try:
        maxima, sums = zip(*((m, l) for m, l in states), strict=True)
    except (TypeError, ValueError):
        got = ", ".join(type(state).__name__ for state in states)
        raise mismatch("merge takes states, each a pair (m, l)", got, "Unpack a list of states with *") from None
    arrays = np.broadcast_arrays(*maxima, *sums)
    m_all, l_all = np.stack(arrays[: len(states)]), np.stack(arrays[len(states) :])
    m = m_all.max(axis=0)
    l = (l_all * np.exp(m_all - _finite(m))).sum(axis=0)
    return np.asarray(m), np.asarray(l)


def online_softmax_weighted_sum(x: Scores, v: np.ndarray, block_size: int = 128) -> np.ndarray:
    """Compute ``softmax(x) @ v`` in a single pass over x and v, in blocks.

    The weighted sum of values can be rescaled like the sum of exponentials, so neither needs the final maximum::

        m_new = max(m, max(x_block))
        p     = exp(x_block - m_new)
        alpha = exp(m - m_new)
        l     = l * alpha + sum(p)
        acc   = acc * alpha + p @ v_block
        m     = m_new

    and at the end the result is ``acc / l``. This is attention for one query: x holds its products with the keys.

    Args:
        x: (n,) scores, -inf for a hidden one.
        v: (n, d) values. A value whose score is -inf counts for nothing, NaN included.
        block_size: scores taken at a time, 1 or more.

    Returns:
        (d,) weighted mean of the values; zeros where all of x is -inf or n is 0.

    Raises:
        ValueError: x is not 1-D, v not 2-D, their lengths differ, or block_size is below 1.

    Source: Dao et al., arXiv:2205.14135, section 3.1, in the form of Dao, arXiv:2307.08691, which divides once.

    >>> v = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    >>> online_softmax_weighted_sum([3.0, 1.0, 6.0, 2.0], v, block_size=2).round(4)
    array([0.9767, 0.9366])
    >>> (softmax_safe([3.0, 1.0, 6.0, 2.0]) @ v).round(4)
    array([0.9767, 0.9366])
    """
    x, v = _scores(x), _scores(v)
    if x.ndim != 1 or v.ndim != 2 or len(x) != len(v):
        raise fail("x must be (n,) and v (n, d)", f"x {x.shape}, v {v.shape}", "Pass one score for each row of v")
    block_size = _block("block_size", block_size)
    m, l = np.array(-np.inf, x.dtype), np.array(0, x.dtype)
    acc = np.zeros(v.shape[1], np.result_type(x, v))
    for start in range(0, len(x), block_size):
        x_block, v_block = x[start : start + block_size], v[start : start + block_size]
        v_block = np.where((x_block == -np.inf)[:, None], 0, v_block)
        m_new = np.maximum(m, x_block.max())
        anchor = _finite(m_new)
        p = np.exp(x_block - anchor)
        alpha = np.exp(m - anchor)
        l = l * alpha + p.sum()
        acc = acc * alpha + p @ v_block
        m = m_new
    weighted: np.ndarray = acc / _not_zero(l)
    return weighted


def naive_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    score_mod: Function | None = None,
    mask_mod: Function | None = None,
) -> np.ndarray:
    """Compute attention with the whole score matrix in memory: ``softmax(scale * q @ k.T) @ v``.

    Args:
        q: (len_q, dim_qk), float16, float32 or float64.
        k: (len_kv, dim_qk), in q's dtype.
        v: (len_kv, dim_v), in q's dtype.
        causal: let query i see only keys up to ``i + len_kv - len_q``, so that the last query sees all.
        window: (left, right), how many keys a query sees to each side of that diagonal; None or -1 = all.
        scale: what products are multiplied by; None: ``dim_qk ** -0.5``.
        score_mod: ``score_mod(score, batch, head, q_pos, kv_pos)`` gives the new score, in natural-log units.
        mask_mod: ``mask_mod(batch, head, q_pos, kv_pos)``, True = visible, if all else leaves it so. Both are written
            with arithmetic and `tilewise.mods`; batch and head are 0 here.

    Returns:
        out (len_q, dim_v) in q's dtype; zeros for a query that sees no key. float16 is computed in float32.

    Raises:
        ValueError: wrong shapes, a window below -1, a scale that is not finite.
        TypeError: wrong dtypes.

    Source: Vaswani et al., "Attention is all you need", arXiv:1706.03762, section 3.2.1.

    >>> q = k = np.zeros((2, 4)); v = np.array([[1.0], [3.0]])
    >>> naive_attention(q, k, v).ravel().tolist(), naive_attention(q, k, v, causal=True).ravel().tolist()
    ([2.0, 2.0], [1.0, 2.0])
    """
    q, k, v = _attention_inputs(q, k, v)
    tiling = _tiling(q, k, causal, window, 1, 1)
    terms: Terms[np.ndarray] = Terms(
        left=tiling.left, right=tiling.right, offset=tiling.offset, scale=_scale(q, scale), score_mod=score_mod,
        mask_mod=mask_mod,
    )  # fmt: skip
    wide = numpy_tiled.sum_dtype(q)
    wide_q, wide_k, wide_v = (x[None, None].astype(wide, copy=False) for x in (q, k, v))
    out, _ = naive(np, wide_q, wide_k, wide_v, terms)
    narrow: np.ndarray = out[0, 0].astype(q.dtype, copy=False)
    return narrow


def tiled_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    score_mod: Function | None = None,
    mask_mod: Function | None = None,
    block_q: int = numpy_tiled.BLOCK_Q,
    block_kv: int = numpy_tiled.BLOCK_KV,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention tile by tile: equal to `naive_attention` to rounding, in memory linear in the lengths.

    Tiles that hold no visible pair are skipped. `tilewise.backends.numpy_tiled.forward_steps` is the algorithm.

    Args:
        q, k, v, causal, window, scale, score_mod, mask_mod: as for `naive_attention`.
        block_q, block_kv: the size of a tile, 1 or more; the lengths need not be multiples.

    Returns:
        out (len_q, dim_v) in q's dtype and lse (len_q,), the log-sum-exp of each query's visible scores, in float32 or,
        for float64, in float64. A query that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: wrong shapes, a window below -1, a scale that is not finite, a tile size below 1.
        TypeError: wrong dtypes.

    Source: Dao, arXiv:2307.08691, algorithm 1.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((5, 8)), rng.standard_normal((7, 8)), rng.standard_normal((7, 3))
    >>> out, lse = tiled_attention(q, k, v, causal=True, block_q=2, block_kv=3)
    >>> np.allclose(out, naive_attention(q, k, v, causal=True), rtol=0, atol=1e-14)
    True
    """
    q, k, v = _attention_inputs(q, k, v)
    tiling, own = _tiling(q, k, causal, window, block_q, block_kv), Functions(score_mod, mask_mod)
    return numpy_tiled.tiled(q, k, v, tiling, _scale(q, scale), own)


def tiled_attention_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    d_out: np.ndarray,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    score_mod: Function | None = None,
    mask_mod: Function | None = None,
    block_q: int = numpy_tiled.BLOCK_Q,
    block_kv: int = numpy_tiled.BLOCK_KV,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the gradients of ``sum(out * d_out)`` tile by tile, in memory linear in the lengths.

    The probabilities are computed again: ``p = exp(score - lse)``. With ``dp = d_out @ v.T`` and
    ``delta = sum(d_out * out, axis=1)``, the scores' gradient is ``ds = p * (dp - delta)``, and from it
    ``dq = scale * ds @ k``, ``dk = scale * ds.T @ q`` and ``dv = p.T @ d_out``.
    `tilewise.backends.numpy_tiled.backward_steps` is the algorithm.

    Args:
        q, k, v, causal, window, scale, score_mod, mask_mod, block_q, block_kv: as for `tiled_attention`. A score_mod's
            derivative is found by torch, which must be there, and on whose tensors it must compute too.
        out, lse: what `tiled_attention` returned for them; tile sizes may differ.
        d_out: (len_q, dim_v), the gradient that reaches out.

    Returns:
        dq, dk and dv, each in its tensor's shape and dtype; zeros for queries that see no key and keys nobody sees.

    Raises:
        ValueError, TypeError: as for `tiled_attention`, and for wrong shapes of out, lse or d_out.

    Source: Dao, arXiv:2307.08691, algorithm 2.

    A key's gradient is what moving it changes. Here the first number of the first key is moved by 1e-6 each way:

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((5, 8)), rng.standard_normal((7, 8)), rng.standard_normal((7, 3))
    >>> out, lse = tiled_attention(q, k, v)
    >>> dq, dk, dv = tiled_attention_backward(q, k, v, out, lse, d_out=np.ones_like(out))
    >>> step = np.zeros_like(k); step[0, 0] = 1e-6
    >>> rise = tiled_attention(q, k + step, v)[0].sum() - tiled_attention(q, k - step, v)[0].sum()
    >>> bool(abs(dk[0, 0] - rise / 2e-6) < 1e-8)
    True
    """
    q, k, v = _attention_inputs(q, k, v)
    out, lse, d_out = (np.asarray(x) for x in (out, lse, d_out))
    rows = (len(q), v.shape[1])
    for name, x, shape in (("out", out, rows), ("lse", lse, (len(q),)), ("d_out", d_out, rows)):
        if x.shape != shape:
            mend = "Pass what tiled_attention returned, and a d_out like out"
            raise fail(f"{name} must have shape {shape}", x.shape, mend)
    tiling = _tiling(q, k, causal, window, block_q, block_kv)
    own = Functions(score_mod, mask_mod)
    return numpy_tiled.tiled_backward(q, k, v, out, lse, d_out, tiling=tiling, scale=_scale(q, scale), own=own)


def _finite(m: np.ndarray) -> np.ndarray:
    """Give what to subtract from scores whose maximum is m: -inf - -inf would be NaN, -inf - 0 is -inf."""
    return np.where(m == -np.inf, 0, m)


def _not_zero(l: np.ndarray) -> np.ndarray:
    """Give what to divide by: a sum over nothing is 0, and so is what it divides."""
    return np.where(l == 0, 1, l)


def _scores(x: Scores) -> np.ndarray:
    """Take an array of floats, or of integers as float64, with at least one axis."""
    x = np.asarray(x)
    x = x.astype(np.float64) if x.dtype.kind in "iub" else x
    if x.dtype.kind != "f":
        raise mismatch("scores must be real numbers", x.dtype, "Pass an array of floats")
    if x.ndim == 0:
        raise fail("scores must have at least one axis", "a single number", "Put it into a list")
    return x


def _attention_inputs(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hold q, k and v to their axes, lengths and dtypes."""
    q, k, v = (np.asarray(x) for x in (q, k, v))
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 2:
        raise fail("q, k and v must have 2 axes (len, dim)", shapes, "tilewise.attention takes batches and heads")
    if q.shape[1] != k.shape[1]:
        raise fail("q and k must have the same dim_qk", shapes, "Only v may have another dim")
    if len(k) != len(v):
        raise fail("k and v must have the same length", shapes, "Pass one value for each key")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (np.float16, np.float32, np.float64):
        dtypes = f"q {q.dtype}, k {k.dtype}, v {v.dtype}"
        raise mismatch("q, k and v must share one dtype: float16, float32 or float64", dtypes, "Use astype")
    return q, k, v


def _tiling(
    q: np.ndarray,
    k: np.ndarray,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    block_q: int,
    block_kv: int,
) -> numpy_tiled.Tiling:
    """Translate what the user asked for into the band and the tiles."""
    try:
        left, right = (None, None) if window is None else window
    except (TypeError, ValueError):
        mend = "None leaves a side open"
        raise fail("window must be a pair (left, right)", repr(window), mend) from None
    left, right = (None if side is None else _integer("window", side) for side in (left, right))
    band = check_band(Options(causal=bool(causal), window_left=left, window_right=right))
    return numpy_tiled.Tiling(
        kv_stop=len(k),
        left=band.left,
        right=band.right,
        offset=band.offset(len(q), len(k)),
        block_q=_block("block_q", block_q),
        block_kv=_block("block_kv", block_kv),
    )


def _scale(q: np.ndarray, scale: float | None) -> float:
    """Give the scale, which must be finite."""
    scale = numpy_tiled.default_scale(q, scale)
    if not math.isfinite(scale):
        raise fail("scale must be finite", scale, "Leave it None for dim_qk ** -0.5")
    return scale


def _integer(name: str, value: int) -> int:
    """Take a Python or NumPy integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise mismatch(f"{name} must hold integers", repr(value), "Pass whole numbers") from None


def _block(name: str, value: int) -> int:
    """Take a tile size, 1 or more."""
    value = _integer(name, value)
    if value < 1:
        raise fail(f"{name} must be 1 or more", value, "It counts the rows of a tile")
    return value
