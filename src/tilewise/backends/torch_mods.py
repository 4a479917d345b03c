"""Users' functions on torch tensors: a score_mod with its gradient, found by torch, and a mask_mod."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.problem.mods import captured_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewise.problem.problem import Tensors


class Pairs(NamedTuple):
    """Which pairs of query and key a tile of scores holds; all broadcast against the scores."""

    batch: torch.Tensor
    head: torch.Tensor
    q_pos: torch.Tensor
    kv_pos: torch.Tensor


class ScoreMod(NamedTuple):
    """A score_mod with its tensors; to ``gradients`` theirs are added, None where not asked for."""

    function: Callable[..., torch.Tensor]
    tensors: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]

    @staticmethod
    def of(tensors: Tensors, dtype: torch.dtype) -> ScoreMod | None:
        """Give a call's score_mod, its tensors' numbers in ``dtype``; None where it has none."""
        captured = captured_of(tensors)
        if captured.score_function is None:
            return None
        gradients = captured.gradients or (None,) * len(captured.score)
        return ScoreMod(captured.score_function, _converted(captured.score, dtype), gradients)

    def __call__(self, score: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        """Give the new scores, in the old ones' shape and dtype."""
        return self._apply(score, pairs, self.tensors)

    def _apply(self, score: torch.Tensor, pairs: Pairs, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        made = torch.as_tensor(self.function(score, *pairs, tensors), device=score.device)
        return made.to(score.dtype).expand(score.shape)

    def gradient(self, score: torch.Tensor, pairs: Pairs, d_score: torch.Tensor) -> torch.Tensor:
        """Take the gradient of new scores back to those given, adding the tensors' shares to ``gradients``.

        The gradient is 0 at hidden pairs; their scores should be numbers, since 0 times an infinite slope is NaN.
        """
        wanted = [n for n, into in enumerate(self.gradients) if into is not None]
        with torch.enable_grad():
            given = score.detach().requires_grad_()
            tensors = [x.detach() for x in self.tensors]
            for n in wanted:
                tensors[n].requires_grad_()
            made = self._apply(given, pairs, tuple(tensors))
            if not made.requires_grad:
                return torch.zeros_like(score)
            inputs = [given, *(tensors[n] for n in wanted)]
            found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(made, inputs, d_score, allow_unused=True)
        for n, share in zip(wanted, found[1:], strict=True):
            into = self.gradients[n]
            if into is not None and share is not None:
                into += share
        return torch.zeros_like(score) if found[0] is None else found[0]


class MaskMod(NamedTuple):
    """A mask_mod with its tensors."""

    function: Callable[..., torch.Tensor]
    tensors: tuple[torch.Tensor, ...]

    @staticmethod
    def of(tensors: Tensors) -> MaskMod | None:
        """Give a call's mask_mod; None where it has none."""
        captured = captured_of(tensors)
        return None if captured.mask_function is None else MaskMod(captured.mask_function, captured.mask)

    def __call__(self, pairs: Pairs) -> torch.Tensor:
        """Say which pairs are visible; broadcasts against the scores."""
        return torch.as_tensor(self.function(*pairs, self.tensors), device=pairs.q_pos.device).bool()


def _converted(tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in tensors)
