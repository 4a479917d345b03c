"""Scores and masks that users write: functions to write them with, a collection of known ones, and their translation.

    score_mod(score, batch, head, q_pos, kv_pos, *tensors) -> score
    mask_mod(batch, head, q_pos, kv_pos, *tensors) -> bool, True where the query sees the key

Both are ordinary Python functions of arithmetic, comparisons, ``& | ~``, the functions below (or torch's own) and loads
such as ``tensors[0][head, q_pos]``. A score is what the softmax's exponential gets, in natural-log units; positions
count from 0 in their own sequence, and ``head`` counts the queries' heads.

>>> import numpy as np
>>> def fading(score, batch, head, q_pos, kv_pos):
...     return score - 0.5 * abs(q_pos - kv_pos)
>>> fading(np.zeros(3), 0, 0, 1, np.arange(3)).tolist()
[-0.5, 0.0, -0.5]

`masks` and `scores` hold known ones. What a GPU gets is made from the same function: see `tilewise.mods.trace`.
"""

from __future__ import annotations

from tilewise.mods import masks, scores
from tilewise.mods.functions import (
    cos,
    exp,
    exp2,
    floor,
    log,
    log1p,
    log2,
    maximum,
    minimum,
    sigmoid,
    sin,
    sqrt,
    tanh,
    where,
)

__all__ = [
    "cos",
    "exp",
    "exp2",
    "floor",
    "log",
    "log1p",
    "log2",
    "masks",
    "maximum",
    "minimum",
    "scores",
    "sigmoid",
    "sin",
    "sqrt",
    "tanh",
    "where",
]
