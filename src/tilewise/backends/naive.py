"""The untiled formula, forward and backward: the one oracle, and the low-precision yardstick.

Everything here is written as in a textbook: the whole score matrix, base e, no tricks. It runs on NumPy (up to
longdouble) and on torch from the same source. Arrays are 4-D, (batch, heads, len, dim); heads_q may be a multiple of
heads_kv, and query head h then reads key head ``h // (heads_q // heads_kv)``. Inside, heads_q is split into
(heads_kv, group), so that keys and values broadcast over the group.

Source: Vaswani et al., "Attention is all you need", arXiv:1706.03762, section 3.2.1; the gradients are those of Dao et
al., "FlashAttention", arXiv:2205.14135, appendix B.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from tilewise.problem.blocks import is_visible

if TYPE_CHECKING:
    import numpy as np
    import torch

Array = TypeVar("Array", "np.ndarray", "torch.Tensor")


class Terms(NamedTuple, Generic[Array]):
    """Everything beside q, k and v that shapes the result. Defaults leave plain attention.

    ``offset``, ``kv_start`` and ``kv_stop`` are ints or (batch,) arrays; ``bias``, ``mask`` and ``keep`` broadcast to
    (batch, heads_q, len_q, len_kv); ``sink`` and ``alibi_slopes`` are (heads_q,) or (batch, heads_q). ``keep`` is
    dropout's bool mask and ``dropout`` its probability.
    """

    left: int | None = None
    right: int | None = None
    offset: int | Array = 0
    kv_start: int | Array = 0
    kv_stop: int | Array | None = None
    scale: float | None = None
    softcap: float = 0.0
    alibi_slopes: Array | None = None
    bias: Array | None = None
    mask: Array | None = None
    sink: Array | None = None
    keep: Array | None = None
    dropout: float = 0.0


class Grads(NamedTuple, Generic[Array]):
    """The gradients, each in its input's shape; None where there was no such input."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsink: Array | None


class _Scores(NamedTuple, Generic[Array]):
    score: Array  # (batch, heads_kv, group, len_q, len_kv), -inf where hidden
    slope: Array | float  # derivative of the softcap
    q: Array  # (batch, heads_kv, group, len_q, dim_qk), unscaled
    k: Array  # (batch, heads_kv, 1, len_kv, dim_qk), zero where no query sees the key
    v: Array
    sink: Array | None  # (batch, heads_kv, group, 1, 1)
    factor: Array | None  # what dropout multiplies p by


def _scores(xp: ModuleType, q: Array, k: Array, v: Array, terms: Terms[Array]) -> _Scores[Array]:
    batch, heads_q, len_q, dim_qk = q.shape
    heads_kv, len_kv = k.shape[1:3]
    group = heads_q // heads_kv

    def per_batch(x: int | Array) -> int | Array:
        return x if isinstance(x, int) else x.reshape(batch, 1, 1, 1, 1)

    def per_head(x: Array) -> Array:
        split: Array = xp.broadcast_to(x, (batch, heads_q)).reshape(batch, heads_kv, group, 1, 1)
        return split

    def matrix(x: Array) -> Array:
        wide: Array = xp.broadcast_to(x, (batch, heads_q, len_q, len_kv))
        return wide.reshape(batch, heads_kv, group, len_q, len_kv)

    q_pos = xp.arange(len_q, device=q.device)[:, None]
    kv_pos = xp.arange(len_kv, device=q.device)[None, :]
    offset, kv_start = per_batch(terms.offset), per_batch(terms.kv_start)
    kv_stop = len_kv if terms.kv_stop is None else per_batch(terms.kv_stop)
    visible = is_visible(q_pos, kv_pos, kv_start, kv_stop, terms.left, terms.right, offset)
    if terms.mask is not None:
        visible = visible & matrix(terms.mask)
    visible = xp.broadcast_to(visible, (batch, heads_kv, group, len_q, len_kv))

    q = q.reshape(batch, heads_kv, group, len_q, dim_qk)
    seen = xp.any(visible, -2)[..., None]  # NaN in a key or value that no query sees must not spread through 0 * NaN
    k = xp.where(seen, k[:, :, None], 0)
    v = xp.where(seen, v[:, :, None], 0)

    scale = dim_qk**-0.5 if terms.scale is None else terms.scale
    score = (q * scale) @ xp.swapaxes(k, -1, -2)
    slope: Array | float = 1.0
    if terms.softcap:
        capped = xp.tanh(score / terms.softcap)
        score, slope = terms.softcap * capped, 1 - capped**2
    if terms.bias is not None:
        score = score + matrix(terms.bias)
    if terms.alibi_slopes is not None:
        distance = abs(q_pos + offset - kv_pos)
        score = score - per_head(terms.alibi_slopes) * distance
    score = xp.where(visible, score, -math.inf)
    factor = None if terms.keep is None else matrix(terms.keep) / (1 - terms.dropout)
    sink = None if terms.sink is None else per_head(terms.sink)
    return _Scores(score, slope, q, k, v, sink, factor)


def naive(xp: ModuleType, q: Array, k: Array, v: Array, terms: Terms[Array] | None = None) -> tuple[Array, Array]:
    """Compute attention with the whole score matrix in memory.

    ``out = softmax(score) @ v`` and ``lse = log(sum(exp(score)))`` over the visible keys and the sink. A row with
    nothing to see has out 0 and lse -inf.

    Args:
        xp: the module that computes: numpy or torch.
        q: (batch, heads_q, len_q, dim_qk).
        k: (batch, heads_kv, len_kv, dim_qk).
        v: (batch, heads_kv, len_kv, dim_v).
        terms: masks and score options.

    Returns:
        out (batch, heads_q, len_q, dim_v) and lse (batch, heads_q, len_q), both in q's dtype.

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 2, 4)); v = np.array([[[[1.0], [3.0]]]])
    >>> out, lse = naive(np, q, k, v, Terms(right=0))  # causal: row 0 sees one key, row 1 both
    >>> out.ravel().tolist(), np.exp(lse).round(6).ravel().tolist()
    ([1.0, 2.0], [1.0, 2.0])
    """
    batch, heads_q, len_q, _ = q.shape
    terms = Terms() if terms is None else terms
    score, _, _, _, v, sink, factor = _scores(xp, q, k, v, terms)
    # The sink stands as one more column. Without one, a column of -inf keeps the maximum of an empty row defined.
    column = xp.full((*score.shape[:-1], 1), -math.inf, dtype=score.dtype, device=score.device)
    column = column if sink is None else xp.broadcast_to(sink, column.shape)
    score = xp.concatenate([score, column], -1)
    row_max = xp.amax(score, -1)[..., None]
    row_max = xp.where(row_max == -math.inf, 0, row_max)
    p = xp.exp(score - row_max)
    row_sum = p.sum(-1)[..., None]
    empty = row_sum == 0
    p = (p / xp.where(empty, 1, row_sum))[..., :-1]
    p = p if factor is None else p * factor
    out = p @ v
    lse = xp.where(empty, -math.inf, row_max + xp.log(xp.where(empty, 1, row_sum)))
    return out.reshape(batch, heads_q, len_q, v.shape[-1]), lse.reshape(batch, heads_q, len_q)


def naive_backward(
    xp: ModuleType,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None = None,
    terms: Terms[Array] | None = None,
) -> Grads[Array]:
    """Differentiate `naive`: the gradients of ``sum(out * d_out) + sum(lse * d_lse)``.

    With ``p = exp(score - lse)`` and ``dp = d_out @ v.T``, the score's gradient is ``ds = p * (dp - delta)``, where
    ``delta = sum(d_out * out) - d_lse`` gathers all that a row's normalisation owes.

    Args:
        xp: the module that computes: numpy or torch.
        q, k, v, terms: as for `naive`.
        out, lse: what `naive` returned.
        d_out: (batch, heads_q, len_q, dim_v). d_lse: (batch, heads_q, len_q) or None for zero.
    """
    terms = Terms() if terms is None else terms
    scores = _scores(xp, q, k, v, terms)
    rows = scores.score.shape[:-1]
    lse = xp.where(lse == -math.inf, 0, lse).reshape(*rows, 1)
    delta = (out * d_out).sum(-1) if d_lse is None else (out * d_out).sum(-1) - d_lse
    delta = delta.reshape(*rows, 1)
    d_out = d_out.reshape(*rows, d_out.shape[-1])

    p = xp.exp(scores.score - lse)
    dp = d_out @ xp.swapaxes(scores.v, -1, -2)
    p_dropped = p
    if scores.factor is not None:
        p_dropped, dp = p * scores.factor, dp * scores.factor
    ds = p * (dp - delta)
    dv = xp.swapaxes(p_dropped, -1, -2) @ d_out
    dbias = None if terms.bias is None else _sum_to(ds.reshape(*q.shape[:3], k.shape[2]), terms.bias.shape)
    ds = ds * scores.slope
    scale = q.shape[-1] ** -0.5 if terms.scale is None else terms.scale
    dq = ds @ scores.k * scale
    dk = xp.swapaxes(ds, -1, -2) @ (scores.q * scale)
    dsink = None
    if scores.sink is not None and terms.sink is not None:
        dsink = -xp.exp(scores.sink - lse) * delta
        dsink = _sum_to(dsink.sum((-1, -2)).reshape(q.shape[:2]), terms.sink.shape)
    return Grads(dq.reshape(q.shape), dk.sum(2), dv.sum(2), dbias, dsink)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Add up the axes along which a tensor of ``shape`` was broadcast to x's."""
    x = x.sum(tuple(range(x.ndim - len(shape)))) if x.ndim > len(shape) else x
    wide = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return x.sum(wide).reshape(shape) if wide else x
