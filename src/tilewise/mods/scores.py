"""Known scores. Each function gives a score and the tensors that go with it, for ``score_mod=`` and ``score_tensors=``.

Tensors may be NumPy arrays or torch tensors, as the call's are, and get gradients if they ask for them. Numbers may
change from call to call: kernels are compiled once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tilewise.mods.functions import as_index, exp2, log, maximum, minimum, sigmoid, tanh

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = np.ndarray | torch.Tensor

# In the bodies of scores, np.ndarray stands for whatever kind of values comes: arrays, tensors, numbers.
Values: TypeAlias = np.ndarray
Score: TypeAlias = "tuple[Callable[..., object], tuple[Array, ...]]"


def alibi(heads: int) -> Score:
    """Nearer keys score more, by a slope for each head: ALiBi (arXiv:2108.12409).

    ``score - slope * |q_pos - kv_pos|``, where the slope of head h, counted from 0, is ``2 ** (-8 * (h + 1) / heads)``:
    the paper's slopes, if heads is a power of two.

    >>> function, tensors = alibi(8)
    >>> function(np.zeros(3), 0, 0, 2, np.arange(3)).tolist()
    [-1.0, -0.5, 0.0]
    """
    rate = -8.0 / heads

    def score_mod(score: Values, batch: Values, head: Values, q_pos: Values, kv_pos: Values) -> object:
        return score - exp2((head + 1) * rate) * abs(q_pos - kv_pos)

    return score_mod, ()


def softcap(cap: float) -> Score:
    """Hold scores within (-cap, cap): ``cap * tanh(score / cap)``, as Gemma 2 does (arXiv:2408.00118).

    >>> function, tensors = softcap(2.0)
    >>> function(np.array([0.0, 1000.0]), 0, 0, 0, 0).tolist()
    [0.0, 2.0]
    """

    def score_mod(score: Values, batch: Values, head: Values, q_pos: Values, kv_pos: Values) -> object:
        return cap * tanh(score / cap)

    return score_mod, ()


def relative_bias(table: Array, *, max_distance: int = 128, is_bidirectional: bool = True) -> Score:
    """Add a learned number for each head and bucket of distances, as T5 does (arXiv:1910.10683).

    Half of the buckets (of each direction's) hold one distance each; the others widen with the logarithm up to
    ``max_distance``, and the last holds all that is further.

    The table is spread over all distances here, once a call and outside the kernels, and its gradient flows back
    through that.

    Args:
        table: (buckets, heads), as T5 keeps it.
        max_distance: from here on all distances are one.
        is_bidirectional: True for encoders; False for decoders, which see no later key.

    >>> function, tensors = relative_bias(np.arange(32.0)[:, None])
    >>> function(np.zeros(5), 0, 0, 200, np.array([0, 190, 200, 201, 1000]), *tensors).tolist()
    [15.0, 8.0, 0.0, 17.0, 31.0]
    """
    buckets = table.shape[0]
    distance = np.arange(-max_distance, max_distance + 1)  # kv_pos - q_pos
    by_distance = table[as_index(t5_bucket(distance, buckets, max_distance, is_bidirectional), table)]

    def score_mod(
        score: Values, batch: Values, head: Values, q_pos: Values, kv_pos: Values, by_distance: Values
    ) -> object:
        # Clamped at 0, an index is known to count from the tensor's beginning: a kernel then spends nothing on others.
        place = minimum(maximum(kv_pos - q_pos + max_distance, 0), 2 * max_distance)
        return score + by_distance[place, head]

    return score_mod, (by_distance,)


def t5_bucket(distance: np.ndarray, buckets: int, max_distance: int, is_bidirectional: bool) -> np.ndarray:
    """Give T5's bucket of each distance ``kv_pos - q_pos``: ints of the same shape.

    >>> t5_bucket(np.array([-1, 0, 1, -20, 500]), 32, 128, True).tolist()
    [1, 0, 17, 10, 31]
    """
    first = np.zeros_like(distance)
    if is_bidirectional:
        buckets //= 2
        first = np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    single = buckets // 2
    # In float32, as T5 computes it: a distance just at a border falls as it does there.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / single) / math.log(max_distance / single)
    wide = single + (ratio * (buckets - single)).astype(distance.dtype)
    bucket: np.ndarray = first + np.where(distance < single, distance, np.minimum(wide, buckets - 1))
    return bucket


def sandwich(heads: int, like: Array, *, max_distance: int, dim: int = 128) -> Score:
    """Add what sinusoidal positions have in common, weaker from head to head: Sandwich (arXiv:2212.10356).

    ``score + sum_i cos(distance / 10000 ** (2 * i / dim)) * heads / (8 * (head + 1))``, i from 0 to dim / 2.

    Args:
        heads: of the queries.
        like: a tensor of the call, for its library and device.
        max_distance: the largest distance of a query and a key; larger ones count as this.
        dim: of the positions that the paper begins with.

    >>> function, tensors = sandwich(8, np.zeros(0), max_distance=16, dim=2)
    >>> function(np.zeros(2), 0, 0, 3, np.array([3, 2]), *tensors).round(4).tolist()
    [1.0, 0.5403]
    """
    frequency = 10000.0 ** (-2.0 * np.arange(dim // 2) / dim)
    common = np.cos(np.arange(max_distance + 1)[:, None] * frequency).sum(axis=1).astype(np.float32)
    by_distance = as_index(common, like)
    strength = heads / 8.0

    def score_mod(
        score: Values, batch: Values, head: Values, q_pos: Values, kv_pos: Values, by_distance: Values
    ) -> object:
        return score + by_distance[minimum(abs(q_pos - kv_pos), max_distance)] * (strength / (head + 1))

    return score_mod, (by_distance,)


def activation(function: Callable[[Values], Values] = sigmoid, *, offset: float = 0.0) -> Score:
    """Weigh keys by a function of the score in place of its exponential: ``log(function(score) + offset)``.

    The softmax of that is ``(function(score) + offset) / sum``, and the logarithm of the sum is what ``return_lse``
    gives: so ``out * exp(lse) - offset * sum(v)``, over the visible v, is attention without normalisation.
    ``function(score) + offset`` must be positive, since gradients divide by it.

    >>> score_mod, tensors = activation(sigmoid)
    >>> np.exp(score_mod(np.array([0.0]), 0, 0, 0, 0)).round(4).tolist()
    [0.5]
    """

    def score_mod(score: Values, batch: Values, head: Values, q_pos: Values, kv_pos: Values) -> object:
        return log(function(score) + offset)

    return score_mod, ()


def pair_bias(table: Array, kind: Array) -> Score:
    """Add a learned number for each head and kind of pair, as Graphormer does for distances in a graph.

    Source: arXiv:2106.05234, the spatial encoding.

    Args:
        table: (heads, kinds).
        kind: (batch, len_q, len_kv) ints, the kind of each pair, such as the length of the shortest path.

    >>> function, tensors = pair_bias(np.array([[0.0, -1.0]]), np.array([[[0, 1], [1, 0]]]))
    >>> function(np.zeros(2), 0, 0, 1, np.arange(2), *tensors).tolist()
    [-1.0, 0.0]
    """

    def score_mod(
        score: Values, batch: Values, head: Values, q_pos: Values, kv_pos: Values, table: Values, kind: Values
    ) -> object:
        return score + table[head, kind[batch, q_pos, kv_pos]]

    return score_mod, (table, kind)
