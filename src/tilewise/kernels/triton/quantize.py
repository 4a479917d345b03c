"""Quantising to FP8 (e4m3) in one pass: rotate, find the block's largest magnitude, scale, round, store.

A program takes one block of rows of one head. Without a rotation its results are those of `tilewise.backends.quantize`
bit for bit; a rotated number's sum may round otherwise in its last place.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.share import kernel, share
from tilewise.kernels.triton.steps import clamped, sequence_of_tile
from tilewise.problem import fp8

key_of_slot = share(fp8.key_of_slot)
exponent_bits = share(fp8.exponent_bits)
BLOCK = tl.constexpr(fp8.BLOCK)
LARGEST = tl.constexpr(fp8.LARGEST)
SMALLEST = tl.constexpr(fp8.SMALLEST)
LEAST_NORMAL = tl.constexpr(2.0**-6)
SUBNORMALS = tl.constexpr(2.0**9)  # e4m3's steps from 0 to 1 below its normal numbers


@triton.jit
def load_rows(x, rows, first_dim, stop, COUNT: tl.constexpr, UNIT: tl.constexpr):
    """Load COUNT columns of some rows of a matrix (pointer, row_stride, dim_stride), zeros from row ``stop`` on."""
    base, row_stride, dim_stride = x
    dims = first_dim + tl.arange(0, COUNT)
    if UNIT > 1:
        offsets = rows.to(tl.int64)[:, None] * (row_stride * UNIT) + dims[None, :]
    else:
        offsets = rows.to(tl.int64)[:, None] * row_stride + dims[None, :] * dim_stride
    return tl.load(base + offsets, mask=(rows < stop)[:, None], other=0.0)


@triton.jit
def rotated_rows(x, rows, stop, rotation_ptr, DIM: tl.constexpr, UNIT: tl.constexpr):
    """Load rows times the rotation, a matrix of 1 and -1, in pieces that fit any chip's shared memory."""
    columns = tl.arange(0, DIM)
    acc = tl.zeros((BLOCK, DIM), tl.float32)
    for first in range(0, DIM, 64):
        piece = load_rows(x, rows, first, stop, 64, UNIT)
        signs = tl.multiple_of(rotation_ptr + first * DIM, 16)
        matrix = tl.load(signs + (tl.arange(0, 64)[:, None] * DIM + columns[None, :]))
        acc = tl.dot(piece, matrix.to(piece.dtype), acc)
    return acc


@triton.jit
def rounded(x, BY_HAND: tl.constexpr):
    """Round |x| <= 448 to e4m3, ties to even; by hand to its bytes, where the target has no conversion."""
    if BY_HAND:
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        size = tl.minimum(tl.abs(x), LARGEST)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # 3 bits stay, the exponent's bias is 7
        # A sum in which the last place counts whole numbers; they run on into the least normal number's byte.
        subnormal = (size * SUBNORMALS + 2.0**23).to(tl.int32, bitcast=True) & 0xFF
        byte = tl.where(size < LEAST_NORMAL, subnormal, normal)
        x8 = (sign | tl.where(x != x, 0x7F, byte)).to(tl.uint8)  # noqa: PLR0124  # NaN alone differs from itself
    else:
        x8 = x.to(tl.float8e4nv)
    return x8


@kernel
def quantize_blocks(
    x_ptr, x8_ptr, scale_ptr, rotation_ptr, cu_ptr,
    batch_stride: tl.int64, head_stride: tl.int64, row_stride: tl.int64, dim_stride: tl.int64,
    batch_rows: tl.int64, head_rows: tl.int64, rows_apart: tl.int64,
    blocks: tl.int32, heads: tl.int32, total: tl.int32, sequences: tl.int32, factor: tl.float32,
    DIM: tl.constexpr, TRANSPOSED: tl.constexpr, UNIT: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Quantise one block of rows of x; scales are (batch, heads, blocks), times ``factor``, a power of two.

    x8 is dense along its rows of DIM, and the last strides count such rows.

    TRANSPOSED, x8 is (batch, heads, DIM, blocks * BLOCK), its keys in the order of `key_of_slot`, zeros behind the
    last. The strides of x count UNIT elements but for the last axis's, which is 1 where UNIT is not.
    """
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % heads
    entry = (tl.program_id(0) // blocks // heads).to(tl.int64)
    start = block * BLOCK
    stop = total
    if cu_ptr is not None:
        sequence = sequence_of_tile(block, cu_ptr, sequences, total, BLOCK)
        base = clamped(tl.load(cu_ptr + sequence), total)
        stop = clamped(tl.load(cu_ptr + tl.minimum(sequence + 1, sequences)), total)
        start = base + (block - (base // BLOCK + sequence)) * BLOCK
    slots = tl.arange(0, BLOCK)
    rows = start + (key_of_slot(slots) if TRANSPOSED else slots)
    x_ptr += (entry * batch_stride + head * head_stride) * UNIT
    if UNIT > 1:
        x_ptr = tl.multiple_of(x_ptr, 16)
    matrix = (x_ptr, row_stride, dim_stride)
    if rotation_ptr is not None:
        x = rotated_rows(matrix, rows, stop, rotation_ptr, DIM, UNIT)
    else:
        x = load_rows(matrix, rows, 0, stop, DIM, UNIT).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x)), SMALLEST)
    exponent = exponent_bits(largest.to(tl.int32, bitcast=True))
    x8 = rounded(x * ((254 - exponent) << 23).to(tl.float32, bitcast=True), BY_HAND)
    owner = (entry * heads + head) * blocks + block
    tl.store(scale_ptr + owner, (exponent << 23).to(tl.float32, bitcast=True) * factor)
    dims = tl.arange(0, DIM)
    if TRANSPOSED:
        x8_ptr = tl.multiple_of(x8_ptr + (owner // blocks * DIM * blocks + block) * BLOCK, 16)
        tl.store(x8_ptr + (dims.to(tl.int64)[None, :] * (blocks * BLOCK) + slots[:, None]), x8)
    else:
        x8_ptr = tl.multiple_of(x8_ptr + (entry * batch_rows + head * head_rows) * DIM, 16)
        lines = rows.to(tl.int64) * rows_apart
        tl.store(x8_ptr + (lines[:, None] * DIM + dims[None, :]), x8, mask=(rows < stop)[:, None])
