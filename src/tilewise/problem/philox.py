"""Dropout's random numbers: Philox4x32-10, the same bits in NumPy, torch and the kernels.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a position into
a number without any state, so the mask depends on nothing but the seed and the element: not on the tile sizes, not on
the backend. The counter is (kv_pos, q_pos, head, batch), the key the 64-bit seed, and the first output word is used.
Kernels call ``tl.philox``, whose word order and float conversion this file follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch

    Words = TypeVar("Words", np.ndarray, torch.Tensor)

WORD = 0xFFFFFFFF
KEY_STEP = (0x9E3779B9, 0xBB67AE85)
MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
INT31_TO_UNIT = 4.6566127342e-10  # largest float32 f with f * (2**31 - 1) < 1


def philox(seed: Words, counter: tuple[Words, Words, Words, Words], rounds: int = 10) -> Words:
    """Give the first word of Philox4x32 as int64 values in [0, 2**32).

    Args:
        seed: int64, one element; its low and high 32 bits are the key.
        counter: four int64 arrays that broadcast against each other; their low 32 bits count.

    int64 products wrap modulo 2**64, and the masks keep only what survives the wrap, so no unsigned type is needed.

    >>> import numpy as np
    >>> zero = np.zeros(1, np.int64)
    >>> hex(philox(zero, (zero, zero, zero, zero))[0])  # Random123's known answer
    '0x6627e8d5'
    """
    c0, c1, c2, c3 = (word & WORD for word in counter)
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(rounds):
        product_a = c0 * MULTIPLIER[0]
        product_b = c2 * MULTIPLIER[1]
        c0 = ((product_b >> 32) & WORD) ^ c1 ^ k0
        c1 = product_b & WORD
        c2 = ((product_a >> 32) & WORD) ^ c3 ^ k1
        c3 = product_a & WORD
        k0 = (k0 + KEY_STEP[0]) & WORD
        k1 = (k1 + KEY_STEP[1]) & WORD
    return c0


def is_kept(
    seed: torch.Tensor,
    dropout: float,
    q_pos: torch.Tensor,
    kv_pos: torch.Tensor,
    head: torch.Tensor,
    batch: torch.Tensor,
) -> torch.Tensor:
    """Say which elements of the probability matrix survive dropout: bool, in the broadcast shape of the positions.

    An element stays when its uniform number ``u`` in [0, 1) is at least ``dropout``.
    """
    word = philox(seed, (kv_pos, q_pos, head, batch))
    signed = (word ^ 0x80000000) - 0x80000000  # the same 32 bits, read as int32
    positive = signed ^ (signed >> 63)  # -x - 1 where x < 0
    uniform = positive.float() * INT31_TO_UNIT
    return uniform >= dropout
