"""What attention costs: operations, elements and bytes moved, memory, and the least time they take.

A `Shape` describes one call. One function for each way of computing gives its `Cost`: `naive`, `eager`, `fa1`,
`tiled_worst`, `tiled_best`, `decode`, their backward passes, and `softmax` for the row softmax alone. Counts are exact
integers. ``elements`` counts what moves between main memory and the chip in the inputs' dtype, as the papers count;
bytes add what is kept in float32 (``lse``, ``delta``, a running ``dq``; float64 beside float64 inputs). Matrix products
of whole matrices load each operand once. Masks and biases are not counted.

Papers named below: FA-1 is Dao et al. 2022, "FlashAttention" (arXiv:2205.14135); FA-2 is Dao 2023, "FlashAttention-2"
(arXiv:2307.08691); online softmax is Milakov and Gimelshein 2018 (arXiv:1805.02867).

>>> shape = Shape.square(16384, 128)
>>> [count(shape).elements for count in (naive, tiled_best)]
[1082130432, 8388608]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from tilewise.machine.device import dtype_name
from tilewise.machine.shape import Shape, Visits, visits

if TYPE_CHECKING:
    from tilewise.machine.device import Device


@dataclass(frozen=True)
class Cost:
    """What one way of computing does and moves. Costs of parts of a call add up.

    Args:
        flops: operations of the matrix products as executed: masked pairs that are computed anyway count.
        elements: elements of the inputs' dtype that cross between main memory and the chip, read or written.
        bytes_read, bytes_written: the same in bytes, with float32 statistics.
        bytes_onchip: bytes that pass through on-chip memory; more than cross to main memory where caches serve loads.
        memory: bytes of main memory taken beyond the inputs, results included, at the peak.
    """

    flops: int
    elements: int
    bytes_read: int
    bytes_written: int
    bytes_onchip: int
    memory: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.elements + other.elements,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.bytes_onchip + other.bytes_onchip,
            self.memory + other.memory,
        )

    @property
    def bytes(self) -> int:
        """Bytes that cross between main memory and the chip, both ways."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations for each byte that crosses. Compare with `Device.ridge_point`.

        >>> shape = Shape.square(16384, 128)
        >>> [round(count(shape).intensity) for count in (naive, tiled_best)]
        [64, 8160]
        """
        return self.flops / self.bytes if self.bytes else 0.0

    def seconds(self, device: Device, dtype: object) -> dict[str, float]:
        """Give the time that each part of the device needs at its full speed; parts without a figure are left out.

        Keys: ``"matrix"`` (flops / rate), ``"memory"`` (bytes / bandwidth), ``"on-chip"`` (on-chip bytes / on-chip
        bandwidth). Exponentials and launches are not counted. For what-ifs see `Device.what_if`.
        """
        speeds = {
            "matrix": (self.flops, device.rates.get(dtype_name(dtype))),
            "memory": (self.bytes, device.bandwidth),
            "on-chip": (self.bytes_onchip, device.onchip_bandwidth),
        }
        return {part: work / speed for part, (work, speed) in speeds.items() if speed is not None}

    def time_floor(self, device: Device, dtype: object) -> float:
        """Give the least time in seconds: the slowest part's, all others hidden behind it.

        Source: Williams, Waterman and Patterson 2009, "Roofline", with on-chip memory as one more roof.

        Raises:
            ValueError: the device has no speed at all.

        >>> from tilewise.machine.device import find
        >>> shape, a100 = Shape.square(16384, 128), find("A100")
        >>> [f"{1e3 * count(shape).time_floor(a100, 'fp16'):.2f} ms" for count in (naive, tiled_best)]
        ['1.06 ms', '0.44 ms']
        """
        seconds = self.seconds(device, dtype)
        if not seconds:
            raise ValueError(
                f"device {device.name!r} has no bandwidth and no rate for {dtype}; measure them with "
                "detect.measure_rates() or give them with Device.what_if()"
            )
        return max(seconds.values())


def _cost(
    shape: Shape, flops: int, read: int, written: int, memory: int, *, read32: int = 0, written32: int = 0
) -> Cost:
    """Build a cost from elements and float32 numbers moved; all of it passes through on-chip memory."""
    bytes_read = read * shape.itemsize + read32 * shape.itemsize32
    bytes_written = written * shape.itemsize + written32 * shape.itemsize32
    return Cost(flops, read + written, bytes_read, bytes_written, bytes_read + bytes_written, memory)


def naive(shape: Shape) -> Cost:
    """Cost of three kernels: scores written, read for softmax, probabilities written, read for the second product.

    4 N^2 + 4 N d elements (FA-1 algorithm 0 and theorem 2). Masked pairs cost as much as visible ones. Memory: out and,
    while softmax runs, two score matrices.

    >>> naive(Shape.square(16384, 128)).elements == 4 * 16384**2 + 4 * 16384 * 128
    True
    """
    return eager(shape, scale=False, mask=False, dropout=False)


def eager(shape: Shape, *, scale: bool = True, mask: bool = True, dropout: bool = True) -> Cost:
    """Cost of one kernel for each line of code: every extra pass reads and writes the score matrix once more.

    (4 + 2 passes) N^2 + 4 N d elements: FA-1 algorithm 0 with scale, mask and dropout as passes of their own.

    >>> eager(Shape.square(16384, 128)).elements == 10 * 16384**2 + 4 * 16384 * 128
    True
    """
    passes = 2 + scale + mask + dropout  # between the products, softmax included; each reads and writes
    scores = shape.size_scores
    read = shape.size_q + shape.size_kv + passes * scores
    written = shape.size_out + passes * scores
    work = 2 * scores * shape.depth(1, 1)
    return _cost(shape, work, read, written, (shape.size_out + 2 * scores) * shape.itemsize)


def naive_backward(shape: Shape) -> Cost:
    """Cost of the backward pass with the probabilities kept from the forward pass: four products.

    7 N^2 + 8 N d elements (FA-1 appendix B, algorithm 3): p read twice; dp written and read; ds written and read twice.
    Memory: p, dp and ds at once, and the three gradients.

    >>> naive_backward(Shape.square(16384, 128)).elements == 7 * 16384**2 + 8 * 16384 * 128
    True
    """
    scores, grads = shape.size_scores, shape.size_q + shape.size_kv
    read = 5 * scores + shape.size_q + shape.size_kv + 2 * shape.size_out
    return _cost(shape, 2 * scores * shape.depth(2, 2), read, 2 * scores + grads, (3 * scores + grads) * shape.itemsize)


def fa1(shape: Shape, block_q: int, block_kv: int) -> Cost:
    """Cost of the loop order of FA-1: keys outside, so the running out and both statistics go to memory and back.

    3 N d (1 + N / block_kv) elements (FA-1 algorithm 1): each key tile reads q and out and writes out; k and v are read
    once for each query head; out is set to zero first. With `fa1_blocks` this is theorem 2's order of N^2 d^2 / M.

    >>> fa1(Shape.square(16384, 128), 128, 128).elements == 3 * 16384 * 128 * (1 + 128)
    True
    """
    heads, dims = shape.batch * shape.heads_q, shape.dim_qk + shape.dim_v
    seen = visits(shape, block_q, block_kv, outer="kv")
    inner = heads * seen.loaded  # query rows loaded, over all key tiles
    return _cost(
        shape,
        2 * heads * seen.pairs * shape.depth(1, 1),
        heads * shape.len_kv * dims + inner * dims,
        shape.size_out + inner * shape.dim_v,
        shape.size_out * shape.itemsize + 2 * shape.rows * shape.itemsize32,
        read32=2 * inner,
        written32=2 * (shape.rows + inner),
    )


def fa1_blocks(dim: int, onchip_elements: int) -> tuple[int, int]:
    """Give FA-1's (block_q, block_kv) for on-chip memory of so many elements (algorithm 1, line 1).

    block_kv = ceil(M / 4d), block_q = min(block_kv, d).

    >>> fa1_blocks(128, 163 * 1024 // 2)
    (128, 163)
    """
    block_kv = -(-onchip_elements // (4 * dim))
    return min(block_kv, dim), block_kv


def fa1_reduction(dim: int, onchip_elements: int) -> float:
    """Give the order of FA-1's saving in elements moved, M / d^2 (theorem 2: N^2 against N^2 d^2 / M).

    >>> round(fa1_reduction(128, 163 * 1024 // 2), 2)  # an A100's block, float16
    5.09
    """
    return onchip_elements / dim**2


def tiled_worst(shape: Shape, block_q: int, block_kv: int) -> Cost:
    """Cost of the tiled forward pass where no cache helps: every query tile loads its keys and values anew.

    2 N d + 2 N^2 d / block_q elements, and ``lse``: q and out pass once (FA-2 algorithm 1, queries outside). The larger
    block_q, the fewer reloads; block_kv matters only at a mask's edge. Memory: out and lse.

    >>> tiled_worst(Shape.square(16384, 128), 128, 64).elements == 2 * 16384 * 128 + 2 * 16384**2 * 128 // 128
    True
    """
    heads = shape.batch * shape.heads_q
    seen = visits(shape, block_q, block_kv)
    return _tiled(shape, seen, heads * seen.loaded * (shape.dim_qk + shape.dim_v))


def tiled_best(shape: Shape, block_q: int = 128, block_kv: int = 128) -> Cost:
    """Cost of the tiled forward pass where caches serve every reload: each operand crosses once.

    4 N d elements, and ``lse``: the least that any kernel can move. Keys that nobody sees are not read. What
    `tiled_worst` moves passes through on-chip memory all the same.

    >>> best = tiled_best(Shape.square(16384, 128))
    >>> best.elements, best.memory  # out and lse: 126 times less than the score matrix
    (8388608, 4259840)
    """
    seen = visits(shape, block_q, block_kv)
    keys = shape.batch * shape.heads_kv * seen.touched * (shape.dim_qk + shape.dim_v)
    return _cached(_tiled(shape, seen, keys), tiled_worst(shape, block_q, block_kv))


def _tiled(shape: Shape, seen: Visits, keys: int) -> Cost:
    """Give the tiled forward pass's cost with so many elements of k and v read."""
    return _cost(
        shape,
        2 * shape.batch * shape.heads_q * seen.pairs * shape.depth(1, 1),
        shape.size_q + keys,
        shape.size_out,
        shape.size_out * shape.itemsize + shape.rows * shape.itemsize32,
        written32=shape.rows,
    )


def _cached(best: Cost, worst: Cost) -> Cost:
    """Give the best case the on-chip traffic of the worst: caches serve reloads, they do not spare them."""
    return Cost(best.flops, best.elements, best.bytes_read, best.bytes_written, worst.bytes, best.memory)


def tiled_backward_worst(shape: Shape, block_q: int, block_kv: int, *, passes: Literal[1, 2] = 1) -> Cost:
    """Cost of the tiled backward pass where no cache helps.

    First ``delta`` from out and d_out. Then, keys outside, each key tile loads q and d_out; the query heads that share
    a key head are summed inside. ``dq`` either goes to memory and back in float32 with each key tile (``passes=1``:
    FA-2 algorithm 2, without the inner load of out, since delta takes its place) or has a second pass of its own,
    queries outside, that computes scores and dp again (``passes=2``: seven products, no atomics).

    One pass: 7 N d + 2 N^2 d / block_kv elements, and in float32 2 N d + 2 N^2 d / block_kv of dq and
    N + 2 N^2 / block_kv of lse and delta. Two: 9 N d + 2 N^2 d (1 / block_kv + 1 / block_q) elements, and
    3 N + 2 N^2 / block_kv of lse and delta.

    >>> n, d, b = 16384, 128, 64
    >>> tiled_backward_worst(Shape.square(n, d), b, b).elements == 7 * n * d + 2 * n**2 * d // b
    True
    >>> tiled_backward_worst(Shape.square(n, d), b, b, passes=2).elements == 9 * n * d + 4 * n**2 * d // b
    True
    """
    heads, dims = shape.batch * shape.heads_q, shape.dim_qk + shape.dim_v
    seen = visits(shape, block_q, block_kv, outer="kv")
    inner = heads * seen.loaded  # query rows loaded, over all key tiles
    read = 2 * shape.size_out + shape.size_kv + inner * dims
    written = shape.size_q + shape.size_kv
    read32, written32 = 2 * inner, shape.rows  # lse and delta; delta
    work = 2 * heads * seen.pairs * shape.depth(3, 2)
    memory = written * shape.itemsize + shape.rows * shape.itemsize32
    if passes == 1:
        running = inner * shape.dim_qk
        read32 += running + shape.size_q  # the last read turns dq into its own dtype
        written32 += running + shape.size_q  # the first write sets it to zero
        memory += shape.size_q * shape.itemsize32
    else:
        by_query = visits(shape, block_q, block_kv)
        read += shape.size_q + shape.size_out + heads * by_query.loaded * dims
        read32 += 2 * shape.rows
        work = 2 * heads * (seen.pairs * shape.depth(2, 2) + by_query.pairs * shape.depth(2, 1))
    return _cost(shape, work, read, written, memory, read32=read32, written32=written32)


def tiled_backward_best(shape: Shape, block_q: int = 128, block_kv: int = 128) -> Cost:
    """Cost of the tiled backward pass where caches serve every reload: each operand crosses once.

    8 N d elements (q, k, v, out and d_out in, three gradients out), and 3 N of lse and delta; five products.

    >>> tiled_backward_best(Shape.square(16384, 128)).elements == 8 * 16384 * 128
    True
    """
    heads = shape.batch * shape.heads_q
    seen = visits(shape, block_q, block_kv, outer="kv")
    grads = shape.size_q + shape.size_kv
    best = _cost(
        shape,
        2 * heads * seen.pairs * shape.depth(3, 2),
        shape.size_q + shape.size_kv + 2 * shape.size_out,
        grads,
        grads * shape.itemsize + shape.rows * shape.itemsize32,
        read32=2 * shape.rows,
        written32=shape.rows,
    )
    return _cached(best, tiled_backward_worst(shape, block_q, block_kv))


def decode(shape: Shape, splits: int = 1) -> Cost:
    """Cost of attention over a cache with few queries: the visible keys and values cross once for each key head.

    2 N d + 2 d elements for one query and one head: in 16 bits one operation a byte for each query head that shares
    the keys, whatever N. With ``splits`` each part reads q and leaves a float32 partial (out, lse) that a second kernel
    reads and merges (FA-1 section 3.1; Dao et al. 2023, "Flash-Decoding for long-context inference").

    >>> decode(Shape(1, 32, 8, 1, 16384, 128, 128)).elements == 2 * 8 * 16384 * 128 + 2 * 32 * 128
    True
    """
    if splits < 1:
        raise ValueError(f"splits must be 1 or more, got {splits}")
    seen = visits(shape, max(shape.len_q, 1), 1)  # all queries in one tile, keys one by one: exactly what is seen
    keys = shape.batch * shape.heads_kv * seen.touched * (shape.dim_qk + shape.dim_v)
    partial = splits * (shape.size_out + shape.rows) if splits > 1 else 0
    return _cost(
        shape,
        2 * shape.batch * shape.heads_q * seen.pairs * shape.depth(1, 1),
        splits * shape.size_q + keys,
        shape.size_out,
        shape.size_out * shape.itemsize + (shape.rows + partial) * shape.itemsize32,
        read32=partial,
        written32=partial + shape.rows,
    )


class Recomputation(NamedTuple):
    """What computing p again in the backward pass saves, in bytes of memory, and costs, in operations."""

    bytes_saved: int
    flops_added: int


def recomputation(shape: Shape) -> Recomputation:
    """Set the memory that p would take between the passes, less the lse kept instead, against one product more.

    Source: FA-1 section 3.1. The backward pass grows from four products to five, the whole from six to seven.

    >>> saved, added = recomputation(Shape.square(16384, 128))
    >>> saved // 2**20, added / naive_backward(Shape.square(16384, 128)).flops  # MiB, and a quarter more
    (511, 0.25)
    """
    saved = shape.size_scores * shape.itemsize - shape.rows * shape.itemsize32
    return Recomputation(saved, 2 * shape.pairs * shape.dim_qk)


# For each row softmax: times the matrix is read, times a column of statistics is read, and the same written.
_SOFTMAX_PASSES = {
    "eager": (5, 2, 3, 2),
    "naive": (2, 0, 1, 0),
    "safe": (3, 0, 1, 0),
    "online": (2, 0, 1, 0),
    "fused": (1, 0, 1, 0),
}


def softmax(
    rows: int,
    columns: int,
    kind: Literal["eager", "naive", "safe", "online", "fused"] = "online",
    itemsize: int = 2,
) -> Cost:
    """Cost of a row softmax. Five operations an element are counted: maximum, difference, exponential, sum, quotient.

    ``"safe"`` reads a row three times (maximum, sum, result) and ``"online"`` twice, since maximum and sum share a
    pass; both write once: 4 accesses an element against 3, as many as ``"naive"``, which subtracts no maximum (online
    softmax, sections 2 and 3). ``"fused"`` keeps the row on the chip: one read, one write. ``"eager"`` is five kernels:
    5 M N + 2 M read, 3 M N + 2 M written for M rows of N (Triton's tutorial on fused softmax).

    >>> [softmax(1, 1000, kind).elements for kind in ("safe", "online", "fused")]
    [4000, 3000, 2000]
    """
    if kind not in _SOFTMAX_PASSES:
        raise ValueError(f"kind must be one of {', '.join(_SOFTMAX_PASSES)}; got {kind!r}")
    reads, reads_row, writes, writes_row = _SOFTMAX_PASSES[kind]
    size = rows * columns
    read, written = reads * size + reads_row * rows, writes * size + writes_row * rows
    memory = 2 * size + rows if kind == "eager" else size
    moved = read + written
    return Cost(5 * size, moved, read * itemsize, written * itemsize, moved * itemsize, memory * itemsize)
