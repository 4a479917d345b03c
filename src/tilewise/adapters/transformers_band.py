"""Which band of keys a mask function of transformers describes, found by calling it with symbols for the positions.

transformers describes a mask as a function of (batch, head, query, key) that compares the positions of a query and a
key, and calls it with tensors of indices. Here it is called once, with an `Index` for any query and one for any key.
What these comparisons give is a `Band`, and so is their conjunction; whatever else a function does with an index fails,
and then it describes no band.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch

# (batch, head, query, key) -> visible
MaskFunction = Callable[..., object]


@dataclass(frozen=True)
class Band:
    """The pairs with ``-left <= key - query <= right``; to the mask function, a boolean tensor.

    Args:
        left, right: inclusive counts of keys to each side; None = open.
        positions: key and query are not indices, but this tensor's entries at those indices.
        documents: both must have the same entry in this tensor, (batch, len).
    """

    left: int | None = None
    right: int | None = None
    positions: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    device: str = "any"

    def to(self, _device: object) -> Band:
        """Stay: a band is nowhere."""
        return self

    def __and__(self, other: Band) -> Band:
        return Band(
            _smaller(self.left, other.left),
            _smaller(self.right, other.right),
            self.positions if other.positions is None else other.positions,
            self.documents if other.documents is None else other.documents,
        )


def _smaller(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


@dataclass(frozen=True, eq=False)
class Index:
    """The index of any query or any key, plus ``shift``; with ``entries``, this tensor's entry at that index."""

    is_key: bool
    shift: int = 0
    entries: torch.Tensor | None = None

    def new_ones(self, _size: tuple[int, ...], dtype: torch.dtype | None = None) -> Band:  # noqa: ARG002  # as tensors
        """Give the band that hides nothing."""
        return Band()

    def __add__(self, shift: object) -> Index:
        return replace(self, shift=self.shift + shift) if isinstance(shift, int) else NotImplemented

    def __sub__(self, other: object) -> Index | Distance:
        if isinstance(other, int):
            return replace(self, shift=self.shift - other)
        plain = isinstance(other, Index) and self.is_plain() and other.is_plain()
        return Distance() if plain and self.is_key != cast("Index", other).is_key else NotImplemented

    def __le__(self, other: object) -> Band:
        if isinstance(other, Index) and self._goes_before(other):
            return Band(right=other.shift - self.shift, positions=self.entries)
        return NotImplemented

    def __gt__(self, other: object) -> Band:
        if isinstance(other, Index) and self._goes_before(other):
            return Band(left=self.shift - other.shift - 1, positions=self.entries)
        return NotImplemented

    def __ge__(self, other: object) -> Band:  # `query >= 0` is transformers' way to say True
        return Band() if isinstance(other, int) and other == 0 and self.is_plain() else NotImplemented

    def __eq__(self, other: object) -> Band:  # type: ignore[override]  # element by element, as tensors compare
        if isinstance(other, Index) and self.entries is not None and self.entries is other.entries:
            return Band(documents=self.entries)
        raise TypeError("an index equals nothing")

    __hash__ = None  # type: ignore[assignment]  # == gives no truth value

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Index:
        """Read ``tensor[batch, index]`` as the entry at that index."""
        if function is torch.Tensor.__getitem__ and isinstance(args[1], tuple) and len(args[1]) == 2:
            tensor, index = args[0], args[1][1]
            if isinstance(tensor, torch.Tensor) and isinstance(index, Index) and index.is_plain():
                return replace(index, entries=tensor)
        raise TypeError("only a look-up of one index has a meaning here")

    def is_plain(self) -> bool:
        """Say whether this is an index itself, neither shifted nor looked up."""
        return self.shift == 0 and self.entries is None

    def _goes_before(self, other: Index) -> bool:
        return self.is_key and not other.is_key and self.entries is other.entries


class Distance:
    """Query minus key, or key minus query."""

    def __abs__(self) -> Distance:
        return self

    def __le__(self, width: object) -> Band:
        return Band(width, width) if isinstance(width, int) else NotImplemented


def band_of(mask_function: MaskFunction) -> Band | None:
    """Find the band that a mask function describes.

    Returns:
        None where it is no band, or one that holds no key at all.

    >>> band_of(lambda batch, head, query, key: key <= query)
    Band(left=None, right=0, positions=None, documents=None, device='any')
    >>> band_of(lambda batch, head, query, key: (key > query - 4) & (key <= query)).left
    3
    >>> band_of(lambda batch, head, query, key: key % 2 == query % 2)
    """
    try:
        band = mask_function(0, 0, Index(is_key=False), Index(is_key=True))
    except (TypeError, AttributeError):
        return None
    if not isinstance(band, Band) or any(side is not None and side < 0 for side in (band.left, band.right)):
        return None
    # transformers finds documents by positions that do not rise by one: inside one, they differ as indices do.
    return None if band.documents is None and band.positions is not None else band
