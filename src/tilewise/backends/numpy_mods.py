"""Users' functions on NumPy arrays: what the engine to read does with a score_mod and a mask_mod, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tilewise.backends.numpy_tiled import Tiling

Function = Callable[..., np.ndarray]  # in the backward pass also of tensors, which torch differentiates


class Functions(NamedTuple):
    """``score(score, batch, head, q_pos, kv_pos)`` and ``mask(batch, head, q_pos, kv_pos)``, None for what is absent.

    The engine computes one head of one sequence: batch and head are 0.
    """

    score: Function | None = None
    mask: Function | None = None

    def visible(self, tiling: Tiling, rows: slice, cols: slice) -> np.ndarray:
        """Give the mask of a tile, (rows, cols)."""
        visible = tiling.visible(rows, cols)
        if self.mask is None:
            return visible
        both: np.ndarray = visible & np.asarray(self.mask(0, 0, *_positions(rows, cols)), bool)
        return both

    def change(self, score: np.ndarray, rows: slice, cols: slice) -> np.ndarray | None:
        """Let the function change a tile's scores, in base 2, in their place; give those that it was given, natural."""
        if self.score is None:
            return None
        given = score * math.log(2.0)
        score[...] = self.score(given, 0, 0, *_positions(rows, cols))
        score *= math.log2(math.e)
        return given

    def back(self, given: np.ndarray | None, rows: slice, cols: slice, ds: np.ndarray) -> None:
        """Take the gradient of new scores back to those given, in its place; torch finds the derivative."""
        if self.score is None or given is None:
            return
        import torch

        with torch.enable_grad():
            old = torch.from_numpy(np.where(ds == 0, 0, given)).requires_grad_()  # hidden ones may be NaN
            new = torch.as_tensor(self.score(old, 0, 0, *map(torch.from_numpy, _positions(rows, cols)))).expand(
                old.shape
            )
            found = None
            if new.requires_grad:
                arriving = torch.from_numpy(ds).to(new.dtype)
                found = torch.autograd.grad(new, old, arriving, allow_unused=True)[0]
        ds[...] = 0 if found is None else found.numpy()


NONE = Functions()


def _positions(rows: slice, cols: slice) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(rows.start, rows.stop)[:, None], np.arange(cols.start, cols.stop)[None, :]
