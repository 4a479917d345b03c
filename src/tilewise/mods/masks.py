"""Known masks. Each function gives a mask and the tensors that go with it, for ``mask_mod=`` and ``mask_tensors=``.

Tensors may be NumPy arrays or torch tensors, as the call's are. Numbers may change from call to call: kernels are
compiled once for all of them. `all_of` and `any_of` put masks together; `draw` shows one.

>>> print(draw(causal(), 3, 3))
#..
##.
###
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tilewise.mods.functions import as_index, maximum, minimum

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = np.ndarray | torch.Tensor

# In the bodies of masks, np.ndarray stands for whatever kind of values comes: arrays, tensors, numbers.
Values: TypeAlias = np.ndarray
Mask: TypeAlias = "tuple[Callable[..., object], tuple[Array, ...]]"


def draw(mask: Mask, len_q: int, len_kv: int, *, batch: int = 0, head: int = 0) -> str:
    """Draw a mask of a few positions: a line for each query, "#" where it sees a key, "." where it does not."""
    function, tensors = mask
    positions = np.arange(len_q)[:, None], np.arange(len_kv)[None, :]
    visible = function(batch, head, *(as_index(part, *tensors) for part in positions), *tensors)
    rows = np.broadcast_to(np.asarray(visible), (len_q, len_kv))
    return "\n".join("".join("#" if pair else "." for pair in row) for row in rows)


def causal() -> Mask:
    """A query sees the keys up to its own position: ``q_pos >= kv_pos``."""

    def mask(batch: Values, head: Values, q_pos: Values, kv_pos: Values) -> object:
        return q_pos >= kv_pos

    return mask, ()


def sliding_window(left: int, right: int = 0) -> Mask:
    """A query sees ``left`` keys before its position, ``right`` keys after it, and the one at it.

    >>> print(draw(sliding_window(1), 4, 4))
    #...
    ##..
    .##.
    ..##
    """

    def mask(batch: Values, head: Values, q_pos: Values, kv_pos: Values) -> object:
        return (q_pos - kv_pos <= left) & (kv_pos - q_pos <= right)

    return mask, ()


def dilated_window(reach: int, dilation: int) -> Mask:
    """A query sees the keys at a distance of at most ``reach``, to both sides, that is a multiple of ``dilation``.

    As in LongNet and in dilated sliding windows of Longformer (arXiv:2004.05150, section 3.1).

    >>> print(draw(dilated_window(2, 2), 5, 5))
    #.#..
    .#.#.
    #.#.#
    .#.#.
    ..#.#
    """

    def mask(batch: Values, head: Values, q_pos: Values, kv_pos: Values) -> object:
        # Remainders of positions, not of distances: a kernel then divides once for a row or a column, not for a pair.
        return (abs(q_pos - kv_pos) <= reach) & (q_pos % dilation == kv_pos % dilation)

    return mask, ()


def global_window(reach: int, is_global: Array) -> Mask:
    """A query sees the keys at a distance of at most ``reach``; global positions see all and are seen by all.

    As in Longformer (arXiv:2004.05150). ``is_global``: (length,) bool.

    >>> print(draw(global_window(0, np.array([True, False, False, False])), 4, 4))
    ####
    ##..
    #.#.
    #..#
    """

    def mask(batch: Values, head: Values, q_pos: Values, kv_pos: Values, is_global: Values) -> object:
        return (abs(q_pos - kv_pos) <= reach) | is_global[q_pos] | is_global[kv_pos]

    return mask, (is_global,)


def prefix_lm(prefix: int | Array) -> Mask:
    """All see the first ``prefix`` keys; behind them a query sees the keys up to its own position.

    ``prefix``: one length, or (batch,) ints for one of each sequence. T5 calls it a prefix LM (arXiv:1910.10683).

    >>> print(draw(prefix_lm(2), 4, 4))
    ##..
    ##..
    ###.
    ####
    """

    def mask(batch: Values, head: Values, q_pos: Values, kv_pos: Values) -> object:
        return (kv_pos < prefix) | (q_pos >= kv_pos)

    def mask_by_batch(batch: Values, head: Values, q_pos: Values, kv_pos: Values, prefix: Values) -> object:
        return (kv_pos < prefix[batch]) | (q_pos >= kv_pos)

    return (mask, ()) if isinstance(prefix, int) else (mask_by_batch, (prefix,))


def documents(document: Array, *, is_causal: bool = True) -> Mask:
    """Within a row of several documents, a query sees its own; up to its own position, if causal.

    ``document``: (length,) ints, or (batch, length), the number of each position's document.

    >>> print(draw(documents(np.array([0, 0, 0, 1, 1])), 5, 5))
    #....
    ##...
    ###..
    ...#.
    ...##
    """
    by_batch = len(document.shape) == 2

    def mask(batch: Values, head: Values, q_pos: Values, kv_pos: Values, document: Values) -> object:
        if by_batch:
            visible: Values = document[batch, q_pos] == document[batch, kv_pos]
        else:
            visible = document[q_pos] == document[kv_pos]
        return visible & (q_pos >= kv_pos) if is_causal else visible

    return mask, (document,)


def shared_prefix(document: Array, start: Array, prefix_of: Array) -> Mask:
    """Several continuations of one prompt, packed behind it without a copy of it.

    A query sees its own document up to its position, and the whole document that is its prefix.

    Args:
        document: (length,) ints, the number of each position's document.
        start: (documents + 1,) ints, where each document begins, and where the last one ends.
        prefix_of: (documents,) ints, of each document its prefix; a prefix is its own.

    >>> print(draw(shared_prefix(np.array([0, 0, 1, 1, 2, 2]), np.array([0, 2, 4, 6]), np.array([0, 0, 0])), 6, 6))
    #.....
    ##....
    ###...
    ####..
    ##..#.
    ##..##
    """

    def mask(
        batch: Values, head: Values, q_pos: Values, kv_pos: Values, document: Values, start: Values, prefix_of: Values
    ) -> object:
        own = document[q_pos]
        prefix = prefix_of[own]
        in_own = (kv_pos >= start[own]) & (kv_pos <= q_pos)
        in_prefix = (own != prefix) & (kv_pos >= start[prefix]) & (kv_pos < start[prefix + 1])
        return in_own | in_prefix

    return mask, (document, start, prefix_of)


def cross_images(image: Array, interval: Array) -> Mask:
    """Text sees the images that are shown to it, as in Flamingo (arXiv:2204.14198) and its followers.

    Args:
        image: (len_kv,) ints, the number of the image that a key belongs to.
        interval: (images, 2) ints, the queries that see an image, half open.

    >>> print(draw(cross_images(np.array([0, 0, 1, 1]), np.array([[0, 3], [2, 4]])), 4, 4))
    ##..
    ##..
    ####
    ..##
    """

    def mask(batch: Values, head: Values, q_pos: Values, kv_pos: Values, image: Values, interval: Values) -> object:
        shown = image[kv_pos]
        return (q_pos >= interval[shown, 0]) & (q_pos < interval[shown, 1])

    return mask, (image, interval)


def neighbourhood(height: int, width: int, kernel_height: int, kernel_width: int) -> Mask:
    """On a picture, row by row, each position sees the ones around it: neighbourhood attention (arXiv:2204.07143).

    The neighbourhood, ``kernel_height`` by ``kernel_width``, both odd, is moved inwards at the picture's border, so
    that every position sees equally many.

    >>> print(draw(neighbourhood(1, 6, 1, 3), 6, 6))
    ###...
    ###...
    .###..
    ..###.
    ...###
    ...###
    """
    _check_odd(kernel_height, kernel_width)
    reach_y, reach_x = kernel_height // 2, kernel_width // 2
    last_y, last_x = height - 1 - reach_y, width - 1 - reach_x

    def mask(batch: Values, head: Values, q_pos: Values, kv_pos: Values) -> object:
        centre_y = minimum(maximum(q_pos // width, reach_y), last_y)
        centre_x = minimum(maximum(q_pos % width, reach_x), last_x)
        return (abs(kv_pos // width - centre_y) <= reach_y) & (abs(kv_pos % width - centre_x) <= reach_x)

    return mask, ()


def tiled_window(canvas: tuple[int, int], kernel: tuple[int, int], tile: tuple[int, int], *, text: int = 0) -> Mask:
    """On a picture cut into tiles, each tile sees the tiles around it: sliding tile attention (arXiv:2502.04507).

    Positions run tile by tile. The window is moved inwards at the border. After the picture come ``text`` positions,
    which see everything and are seen by everything.

    Args:
        canvas: height and width of the picture.
        kernel: height and width of the window.
        tile: height and width of a tile; it divides both.
        text: positions of text after the picture.

    >>> print(draw(tiled_window((1, 8), (1, 6), (1, 2)), 8, 8))
    ######..
    ######..
    ######..
    ######..
    ..######
    ..######
    ..######
    ..######
    """
    for name, sizes in (("canvas", canvas), ("kernel", kernel)):
        if any(size % part for size, part in zip(sizes, tile, strict=True)):
            raise ValueError(f"the tile must divide the {name}; got {name} {sizes} and tile {tile}")
    area, picture = tile[0] * tile[1], canvas[0] * canvas[1]
    stop = picture + text
    columns = canvas[1] // tile[1]
    kernel_y, kernel_x = kernel[0] // tile[0], kernel[1] // tile[1]
    # Of an even number of tiles, one more lies before the centre.
    before_y, before_x = kernel_y // 2, kernel_x // 2
    after_y, after_x = (kernel_y - 1) // 2, (kernel_x - 1) // 2
    last_y, last_x = canvas[0] // tile[0] - 1 - after_y, columns - 1 - after_x

    def mask(batch: Values, head: Values, q_pos: Values, kv_pos: Values) -> object:
        q_tile, kv_tile = q_pos // area, kv_pos // area
        down = kv_tile // columns - minimum(maximum(q_tile // columns, before_y), last_y)
        across = kv_tile % columns - minimum(maximum(q_tile % columns, before_x), last_x)
        near = (down >= -before_y) & (down <= after_y) & (across >= -before_x) & (across <= after_x)
        return (kv_pos < stop) & ((near & (kv_pos < picture)) | (q_pos >= picture) | (kv_pos >= picture))

    return mask, ()


def all_of(*masks: Mask) -> Mask:
    """A query sees what all of the masks let it see.

    >>> print(draw(all_of(causal(), dilated_window(8, 2)), 4, 4))
    #...
    .#..
    #.#.
    .#.#
    """

    def mask(batch: Values, head: Values, q_pos: Values, kv_pos: Values, *tensors: Values) -> object:
        return reduce(operator.and_, _each(masks, batch, head, q_pos, kv_pos, tensors))

    return _joined(mask, masks)


def any_of(*masks: Mask) -> Mask:
    """A query sees what one of the masks lets it see.

    >>> print(draw(any_of(sliding_window(0), global_window(0, np.array([True, False, False]))), 3, 3))
    ###
    ##.
    #.#
    """

    def mask(batch: Values, head: Values, q_pos: Values, kv_pos: Values, *tensors: Values) -> object:
        return reduce(operator.or_, _each(masks, batch, head, q_pos, kv_pos, tensors))

    return _joined(mask, masks)


def _each(
    masks: tuple[Mask, ...], batch: Values, head: Values, q_pos: Values, kv_pos: Values, tensors: tuple[Values, ...]
) -> list[object]:
    """Ask every mask, each with its own of all tensors."""
    ahead = iter(tensors)
    return [function(batch, head, q_pos, kv_pos, *islice(ahead, len(own))) for function, own in masks]


def _joined(function: Callable[..., object], masks: tuple[Mask, ...]) -> Mask:
    if not masks:
        raise ValueError("got no mask; give at least one")
    return function, tuple(tensor for _, own in masks for tensor in own)


def _check_odd(*sizes: int) -> None:
    if any(size % 2 == 0 for size in sizes):
        raise ValueError(f"a neighbourhood has a centre, so its sides are odd; got {sizes}")
