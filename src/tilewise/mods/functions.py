"""The functions that scores and masks are written with, for NumPy arrays, torch tensors and plain numbers alike.

A score or a mask meets three kinds of values: NumPy arrays in `tilewise.reference`, torch tensors in the backends on
torch and while it is translated for a GPU, and numbers when somebody tries it by hand. Arithmetic, comparisons,
``& | ~``, ``abs`` and indexing mean the same for all three; what is written by other names stands here. Torch's own
functions do as well, where no NumPy array comes.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TypeVar

import numpy as np

Values = TypeVar("Values")


def library_of(*values: object) -> ModuleType:
    """Give torch where one of the values is a tensor, else NumPy; without a tensor around, torch stays unloaded."""
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(value, torch.Tensor) for value in values):
        return torch
    return np


def as_index(index: np.ndarray, *like: object) -> np.ndarray:
    """Give an index in the library of the arrays beside it, on their device."""
    library = library_of(*like)
    if library is np:
        return index
    device = next(value for value in like if isinstance(value, library.Tensor)).device
    result: np.ndarray = library.as_tensor(index, device=device)
    return result


def _apply(name: str, x: Values) -> Values:
    result: Values = getattr(library_of(x), name)(x)
    return result


def _apply_pair(name: str, first: Values, second: object) -> Values:
    """Apply a function of two values; torch wants both to be tensors."""
    library = library_of(first, second)
    pair: list[object] = [first, second]
    if library is not np:
        device = next(value for value in pair if isinstance(value, library.Tensor)).device
        pair = [library.as_tensor(value, device=device) for value in pair]
    result: Values = getattr(library, name)(*pair)
    return result


def where(condition: object, value: Values, otherwise: object) -> Values:
    """Choose ``value`` where the condition holds, and ``otherwise`` elsewhere.

    >>> where(np.arange(3) > 1, 1.0, 0.0).tolist()
    [0.0, 0.0, 1.0]
    """
    result: Values = library_of(condition, value, otherwise).where(condition, value, otherwise)
    return result


def minimum(first: Values, second: object) -> Values:
    """Give the smaller of two values, element by element."""
    return _apply_pair("minimum", first, second)


def maximum(first: Values, second: object) -> Values:
    """Give the larger of two values, element by element."""
    return _apply_pair("maximum", first, second)


def exp(x: Values) -> Values:
    """Give e to the power of x."""
    return _apply("exp", x)


def exp2(x: Values) -> Values:
    """Give 2 to the power of x."""
    return _apply("exp2", x)


def log(x: Values) -> Values:
    """Give the natural logarithm; -inf of 0."""
    with np.errstate(divide="ignore"):
        return _apply("log", x)


def log2(x: Values) -> Values:
    """Give the logarithm to base 2; -inf of 0."""
    with np.errstate(divide="ignore"):
        return _apply("log2", x)


def log1p(x: Values) -> Values:
    """Give ``log(1 + x)``, exactly for small x too; -inf of -1."""
    with np.errstate(divide="ignore"):
        return _apply("log1p", x)


def sqrt(x: Values) -> Values:
    """Give the square root."""
    return _apply("sqrt", x)


def sin(x: Values) -> Values:
    """Give the sine of an angle in radians."""
    return _apply("sin", x)


def cos(x: Values) -> Values:
    """Give the cosine of an angle in radians."""
    return _apply("cos", x)


def tanh(x: Values) -> Values:
    """Give the hyperbolic tangent."""
    return _apply("tanh", x)


def sigmoid(x: Values) -> Values:
    """Give ``1 / (1 + exp(-x))``.

    >>> sigmoid(np.array([-1000.0, 0.0, 1000.0])).tolist()
    [0.0, 0.5, 1.0]
    """
    if library_of(x) is np:  # which has no sigmoid; and exp(1000) would overflow
        return 0.5 * tanh(0.5 * x) + 0.5  # type: ignore[operator, return-value]
    return _apply("sigmoid", x)


def floor(x: Values) -> Values:
    """Round down to a whole number, of the type that x has."""
    return _apply("floor", x)
