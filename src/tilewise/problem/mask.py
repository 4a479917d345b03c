"""What each query may see: a band about the diagonal, a range of keys per sequence, and, where asked, a dense mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Align = Literal["bottom_right", "top_left"]

FAR = 2**30  # a side of so many keys is open: no sequence is that long, and positions stay below 2**31 on a device


@dataclass(frozen=True)
class Band:
    """The diagonal band: query i sees keys ``i + offset - left`` to ``i + offset + right``, both inclusive.

    ``None`` leaves a side open, and any integer is allowed. ``align`` fixes the offset: ``"bottom_right"`` puts the
    last query beside the last key (offset = len_kv - len_q), ``"top_left"`` the first query beside the first key.

    >>> Band.of(causal=True, window=(2, 5), align="bottom_right")
    Band(left=2, right=0, align='bottom_right')
    >>> Band(left=2, right=0).offset(len_q=3, len_kv=10)
    7
    """

    left: int | None = None
    right: int | None = None
    align: Align = "bottom_right"

    @staticmethod
    def of(causal: bool, window: tuple[int | None, int | None] | None, align: Align = "bottom_right") -> Band:
        """Translate the user's ``causal`` and ``window`` (counts of keys; None, -1 or 2**30 on = open) into a band."""
        sides = (None, None) if window is None else window
        left, right = (None if side is None or side == -1 or side >= FAR else side for side in sides)
        if causal:
            right = 0 if right is None else min(right, 0)
        return Band(left, right, align)

    @property
    def is_open(self) -> bool:
        """True where the band hides nothing."""
        return self.left is None and self.right is None

    def offset(self, len_q: int, len_kv: int) -> int:
        """Give the key position on query 0's diagonal, for a sequence of these lengths."""
        return len_kv - len_q if self.align == "bottom_right" else 0


@dataclass(frozen=True)
class Mask:
    """Everything that hides a score: the band, per-sequence key ranges (``ranged``) and a dense mask (``dense``)."""

    band: Band = Band()
    ranged: bool = False
    dense: bool = False
