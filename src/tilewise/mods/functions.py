"""The functions that scores and masks are written with, for NumPy arrays, torch tensors and plain numbers alike.

A function of scores or masks meets three kinds of values: NumPy arrays in `tilewise.reference`, torch tensors in the
backends on torch and while it is translated for a GPU, and numbers when somebody tries it by hand. Arithmetic, comparisons,
``& | ~`` and indexing mean the same for all three; what is written by name stands here.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TypeVar

import numpy as np

Values = TypeVar("Values")


def _library(*values: object) -> ModuleType:
    """Give torch where one of the values is a tensor, else NumPy; without a tensor around, torch stays unloaded."""
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(value, torch.Tensor) for value in values):
        return torch
    return np


def _pair(first: object, second: object) -> tuple[ModuleType, object, object]:
    """Give the library of two values, and both as torch wants them: it compares no tensor with a plain number."""
    library = _library(first, second)
    if library is not np:
        first = first if isinstance(first, library.Tensor) else library.as_tensor(first, device=second.device)  # type: ignore[attr-defined]
        second = second if isinstance(second, library.Tensor) else library.as_tensor(second, device=first.device)
    return library, first, second


def where(condition: object, value: Values, otherwise: object) -> Values:
    """Choose ``value`` where the condition holds, and ``otherwise`` elsewhere.

    >>> where(np.arange(3) > 1, 1.0, 0.0).tolist()
    [0.0, 0.0, 1.0]
    """
    result: Values = _library(condition, value, otherwise).where(condition, value, otherwise)
    return result


def minimum(first: object, second: object) -> object:
    """Give the smaller of two values, element by element."""
    library, first, second = _pair(first, second)
    return library.minimum(first, second)


def maximum(first: object, second: object) -> object:
    """Give the larger of two values, element by element."""
    library, first, second = _pair(first, second)
    return library.maximum(first, second)
