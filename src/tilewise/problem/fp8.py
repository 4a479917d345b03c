"""How tensors in FP8 (e4m3) are laid out: blocks of rows with a scale each, and where a key stands among its values.

A scale is a power of two, so that quantising rounds once, and what was quantised is exact in bfloat16 and float32.

The products of two 8-bit matrices sum along an axis that lies dense in memory, so v is stored transposed. A tile of p
leaves the first product spread over threads, and enters the second one as they hold it, if v's keys stand in the order
in which the matrix units take p: `key_of_slot`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import torch

BLOCK = 128  # rows of q, k and v that share a scale
LARGEST = 448.0  # the largest number of e4m3: 1.75 * 2**8
ROUNDOFF = 2.0**-4  # half the distance between neighbours, relative, from the least normal number 2**-6 on
SMALLEST = 2.0**-60  # what the largest magnitude of a block counts as at least, so that zeros have a scale too
DIMS = (64, 128, 256)


def block_count(rows: int, sequences: int | None = None) -> int:
    """Count the blocks of rows, or those of packed sequences, each of which may end in a part of a block.

    Sequence s begins at block ``cu_seqlens[s] // BLOCK + s``: a rule that needs no length on the host.

    >>> block_count(300), block_count(300, sequences=2)
    (3, 5)
    """
    return -(-rows // BLOCK) if sequences is None else rows // BLOCK + sequences + 1


@overload
def exponent_bits(largest_bits: int) -> int: ...
@overload
def exponent_bits(largest_bits: torch.Tensor) -> torch.Tensor: ...
def exponent_bits(largest_bits):  # type: ignore[no-untyped-def]
    """Give the exponent field of the least power of two that makes a float32 at most 448, from that float's bits.

    A float 1.m * 2**e needs 2**(e - 8) where 1.m is at most 1.75, else twice that: the sum carries where it is more.

    >>> import numpy as np
    >>> bits = np.array([448.0, 448.1, 1.0, 2.0], np.float32).view(np.int32)
    >>> (exponent_bits(bits) - 127).tolist()
    [0, 1, -8, -7]
    """
    return ((largest_bits + 0x1FFFFF) >> 23) - 8


@overload
def key_of_slot(slot: int) -> int: ...
@overload
def key_of_slot(slot: torch.Tensor) -> torch.Tensor: ...
def key_of_slot(slot):  # type: ignore[no-untyped-def]
    """Give the key of a block that stands at a slot of v: an order inside each 16 keys.

    A thread holds p of the keys 2c, 2c + 1, 2c + 8, 2c + 9 of each 16, and takes the slots 4c to 4c + 3.
    Source: the PTX ISA, wgmma's layout of accumulators and that of an 8-bit matrix A in registers.

    >>> [key_of_slot(slot) for slot in range(16)]
    [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    """
    return slot - slot % 16 + slot % 4 // 2 * 8 + slot % 16 // 4 * 2 + slot % 2
