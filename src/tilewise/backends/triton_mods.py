"""Users' functions and lists of tiles, laid out as the Triton kernels take them.

A kernel is compiled for the text of a function; the numbers and tensors in it are arguments. So another window, another
tensor or another length never compiles anew.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from tilewise.problem.mods import captured_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from tilewise.backends.block_lists import Blocks
    from tilewise.backends.launch import Parts
    from tilewise.kernels.share import Jitted
    from tilewise.machine.tiles import Tiles
    from tilewise.problem.mods import Captured, Mods
    from tilewise.problem.problem import Problem, Tensors

NONE: Mapping[str, Jitted | Parts | int | None] = MappingProxyType(
    {
        "mods": (),
        "SCORE_MOD": None,
        "SCORE_GRADIENT": None,
        "MASK_MOD": None,
        "LIST_Q": 0,
        "LIST_KV": 0,
        "LIST_BARE": True,
    }
)


def why_not_backward(problem: Problem) -> str | None:
    """Say why the kernels have no gradient of a problem's score_mod, or None."""
    score = None if problem.mods is None else problem.mods.score
    if score is None or score.gradient_source is not None:
        return None
    return f"has no derivative of the score_mod: {score.gradient_refusal}"


def within_lists(problem: Problem, sizes: Tiles) -> Tiles:
    """Shrink tiles until a tile of the lists is made of whole ones."""
    lists = None if problem.mods is None else problem.mods.lists
    if lists is None:
        return sizes
    block_q, block_kv = (size & -size for size in (lists.block_q, lists.block_kv))
    if sizes.block_q <= block_q and sizes.block_kv <= block_kv:
        return sizes
    return replace(sizes, block_q=min(sizes.block_q, block_q), block_kv=min(sizes.block_kv, block_kv))


def arguments(
    problem: Problem, tensors: Tensors, *, by_key: bool = False, scatter: bool = False
) -> Mapping[str, Jitted | Parts | int | None]:
    """Give the kernels' arguments and constants for a problem's functions and lists.

    Args:
        problem, tensors: the call.
        by_key: lists have a row for each tile of keys, as `key_gradients` walks them.
        scatter: gradients of the score_mod's tensors are added to their buffers. One kernel of a backward pass does it.
    """
    mods, captured = problem.mods, captured_of(tensors)
    if mods is None:
        return NONE
    d_tensors = captured.gradients if scatter else (None,) * len(captured.score)
    constants = () if mods.score is None else mods.score.constants
    mask_constants = () if mods.mask is None else mods.mask.constants
    parts: Parts = (
        tuple(map(tensor_parts, captured.score)),
        constants,
        tuple(map(tensor_parts, captured.mask)),
        mask_constants,
        (tuple(() if x is None else tensor_parts(x) for x in d_tensors), ((),) if scatter else ()),
        () if captured.blocks is None else _lists(mods, captured.blocks, by_key),
    )
    lists = mods.lists
    return {
        "mods": parts,
        **_functions(mods),
        "LIST_Q": 0 if lists is None else lists.block_q,
        "LIST_KV": 0 if lists is None else lists.block_kv,
        "LIST_BARE": lists is None or lists.bare,
    }


def tensor_parts(x: torch.Tensor) -> Parts:
    """Give a tensor as functions take it: where it lies, its strides, its sizes. Offsets in 32 bits are cheaper."""
    from tilewise.backends.launch import Long

    furthest = sum((size - 1) * abs(stride) for size, stride in zip(x.shape, x.stride(), strict=True))
    return (x, *map(Long if furthest >= 2**31 else int, x.stride()), *x.shape)


def _functions(mods: Mods) -> dict[str, Jitted | None]:
    """Give the functions, compiled for the device once for every text."""
    from tilewise.kernels.share import written

    score, mask = mods.score, mods.mask
    gradient = None if score is None else score.gradient_source
    return {
        "SCORE_MOD": None if score is None else written(score.source, "score_mod"),
        "SCORE_GRADIENT": None if gradient is None else written(gradient, "score_mod_gradient"),
        "MASK_MOD": None if mask is None else written(mask.source, "mask_mod"),
    }


def _lists(mods: Mods, blocks: Blocks, by_key: bool) -> Parts:
    """Give the lists, and how far apart the rows of sequences and heads are; 0 where they share them."""
    lists = mods.lists
    assert lists is not None  # noqa: S101 - it describes them
    rows = blocks.by_key if by_key else blocks.by_query
    tiles = lists.tiles_kv if by_key else lists.tiles_q
    strides = tiles * lists.heads if lists.batch > 1 else 0, tiles if lists.heads > 1 else 0
    return (*rows, *strides)


def pointers(captured: Captured, *, by_key: bool = False, scatter: bool = False) -> tuple[torch.Tensor, ...]:
    """List the tensors in the ``mods`` of a launch, in their order; options as in `arguments`."""
    blocks = captured.blocks
    lists = () if blocks is None else blocks.by_key if by_key else blocks.by_query
    into = (x for x in captured.gradients if x is not None) if scatter else ()
    return (*captured.score, *captured.mask, *into, *lists)


def pointer_names(captured: Captured, *, scatter: bool = False) -> list[str]:
    """Name them as a launch does: by their places."""
    lists = [] if captured.blocks is None else [f"mods.5.{place}" for place in range(4)]
    score, mask = (
        [f"mods.{part}.{x}.0" for x in range(count)]
        for part, count in ((0, len(captured.score)), (2, len(captured.mask)))
    )
    into = [f"mods.4.0.{place}.0" for place, x in enumerate(captured.gradients) if x is not None] if scatter else []
    return [*score, *mask, *into, *lists]
