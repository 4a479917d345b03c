"""What a call's own functions add to it: a score_mod, a mask_mod, and lists of the tiles to visit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tilewise.problem.problem import Tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tilewise.backends.block_lists import Blocks
    from tilewise.mods.trace import Traced


class Lists(NamedTuple):
    """How lists of tiles are made up: batch and heads are 1 where all share them."""

    batch: int
    heads: int
    tiles_q: int
    tiles_kv: int
    block_q: int
    block_kv: int
    bare: bool  # nothing else hides a pair of a full tile


@dataclass(frozen=True, eq=False)
class Mods:
    """The functions as they were traced, and the makeup of the lists; None for each that is absent."""

    score: Traced | None = None
    mask: Traced | None = None
    lists: Lists | None = None

    def words(self) -> list[str]:
        """Name what there is, with what each function reads, and the tiles that the lists leave to visit."""
        found = []
        for label, traced in (("score_mod", self.score), ("mask_mod", self.mask)):
            if traced is not None:
                found.append(f"{label} (numbers: {len(traced.constants)}, tensors: {len(traced.ranks)})")
        if self.lists is not None:
            found.append(f"lists of {self.lists.block_q} x {self.lists.block_kv} tiles")
        return found


class Captured(NamedTuple):
    """The tensors of a call's functions, those of closures after those given.

    ``score_function(score, batch, head, q_pos, kv_pos, score_tensors)`` and ``mask_function(batch, head, q_pos, kv_pos,
    mask_tensors)`` compute on torch tensors. To ``gradients``, float32 or wider, a backward pass adds what the score's
    tensors get; None for each that asks for nothing.
    """

    score: tuple[torch.Tensor, ...] = ()
    mask: tuple[torch.Tensor, ...] = ()
    blocks: Blocks | None = None
    score_function: Callable[..., torch.Tensor] | None = None
    mask_function: Callable[..., torch.Tensor] | None = None
    gradients: tuple[torch.Tensor | None, ...] = ()


class ModTensors(Tensors):
    """The tensors of a call with functions of its own; ``captured`` are those of the functions."""

    captured: Captured

    @staticmethod
    def of(tensors: Tensors, captured: Captured) -> ModTensors:
        """Put the two together."""
        made = ModTensors(*tensors)
        made.captured = captured
        return made


NOTHING = Captured()


def captured_of(tensors: Sequence[torch.Tensor | None]) -> Captured:
    """Give what a call's functions captured; nothing where it has none."""
    return tensors.captured if isinstance(tensors, ModTensors) else NOTHING
