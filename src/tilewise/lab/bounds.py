"""What the counting model allows an implementation to move and to hold: the bounds that `tilewise measure` prints."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewise.backends.numpy_tiled import BLOCK_KV, BLOCK_Q
from tilewise.bench.cases import Case
from tilewise.bench.implementations import Pass, plan
from tilewise.machine import cost
from tilewise.machine.cost import Cost
from tilewise.machine.shape import flops

UNTILED = frozenset({"naive", "sdpa/math", "numpy/naive"})  # they hold the score matrix
ASSUMED_BLOCK = 64  # queries, and keys, in a tile of a kernel that tells nobody its tiles


@dataclass(frozen=True)
class Bounds:
    """What the model says of one row.

    Args:
        best: bytes of main memory where caches serve every reload. least: the same, less what may still lie in the L2
            cache when the kernel ends, and so is written after it was counted.
        worst: bytes of main memory where no cache helps; loads: bytes that multiprocessors load then, from anywhere.
        memory: bytes beyond the inputs at the peak. flops: that the visible pairs need.
        tiles: what was assumed, in words.
    """

    best: int
    least: int
    worst: int
    loads: int
    memory: int
    flops: int
    tiles: str


def bounds(name: str, case: Case, which: Pass, l2_bytes: int = 0) -> Bounds:
    """Say what the counting model allows an implementation to move.

    An untiled one: at best its kernels for product, softmax and product, at worst a pass more for each of scale, mask
    and dropout, and every tile of its products loading its operands anew. A tiled one: each operand once, or every tile
    of the outer loop loading the inner side anew; with its own tiles, or small ones where it does not tell them.
    """
    shape, backward = case.shape, which == "backward"
    if name in UNTILED:
        best = cost.naive_backward(shape) if backward else cost.naive(shape)
        worst = _untiled_worst(case, which)
        return _bounds(best, worst, case, which, l2_bytes, f"products in tiles of {ASSUMED_BLOCK}")
    block_q, block_kv, passes, told = _blocks(name, case, which)
    if backward:
        best = cost.tiled_backward_best(shape, block_q, block_kv)
        worst = cost.tiled_backward_worst(shape, block_q, block_kv, passes=2 if passes == 2 else 1)
    else:
        best, worst = cost.tiled_best(shape, block_q, block_kv), cost.tiled_worst(shape, block_q, block_kv)
    found = _bounds(best, worst, case, which, l2_bytes, told)
    if name != "numpy/tiled":
        return found
    # What lies on the chip elsewhere lies in memory here: a tile of scores, and one of dp beside it going back.
    tile = min(block_q, case.length) * min(block_kv, case.length) * shape.itemsize32
    return replace(found, memory=found.memory + tile * (2 if backward else 1))


def _bounds(best: Cost, worst: Cost, case: Case, which: Pass, l2_bytes: int, tiles: str) -> Bounds:
    work = flops(case.shape, backward=which == "backward")
    least = best.bytes_read + max(best.bytes_written - l2_bytes, 0)
    return Bounds(best.bytes, least, worst.bytes, worst.bytes_read, best.memory, work, tiles)


def _untiled_worst(case: Case, which: Pass) -> Cost:
    """Count a pass more for scale, mask and dropout each, and products whose tiles load their operands anew."""
    shape = case.shape
    len_q, len_kv, dim_qk, dim_v = shape.len_q, shape.len_kv, shape.dim_qk, shape.dim_v
    if which == "forward":
        once, more = cost.eager(shape), 0
        products: tuple[tuple[int, int, int], ...] = ((len_q, dim_qk, len_kv), (len_q, len_kv, dim_v))
    else:
        once, more = cost.naive_backward(shape), 3 * shape.size_scores * shape.itemsize
        products = (
            (len_kv, len_q, dim_v),
            (len_q, dim_v, len_kv),
            (len_q, len_kv, dim_qk),
            (len_kv, len_q, dim_qk),
        )
    anew = shape.batch * shape.heads_q * sum(_reloaded(*sizes) for sizes in products) * shape.itemsize
    read, written = once.bytes_read + more + anew, once.bytes_written + more
    return replace(once, bytes_read=read, bytes_written=written, bytes_onchip=read + written)


def _reloaded(rows: int, depth: int, columns: int) -> int:
    """Count the elements that a product (rows, depth) x (depth, columns) in square tiles loads beyond the first time.

    >>> _reloaded(64, 8, 64), _reloaded(128, 8, 64)
    (0, 512)
    """
    across, down = -(-columns // ASSUMED_BLOCK) - 1, -(-rows // ASSUMED_BLOCK) - 1
    return rows * depth * across + depth * columns * down


def _blocks(name: str, case: Case, which: Pass) -> tuple[int, int, int, str]:
    """Give block_q, block_kv and passes of a tiled implementation, and that in words."""
    backend = name.partition("/")[2]
    if name.startswith("tilewise/"):
        planned = plan(case, which, backend)
        if which == "forward" and planned.tiles is not None:
            tiles = planned.tiles
            return tiles.block_q, tiles.block_kv, 1, f"{tiles.block_q} x {tiles.block_kv}"
        if which == "backward" and backend == "triton_portable":
            from tilewise.backends import triton_portable

            both = triton_portable.backward_tiles(planned.problem)
            return both.q.block_q, both.kv.block_kv, 2, f"{both.kv.block_kv} keys, then {both.q.block_q} queries"
        if which == "backward" and backend == "hopper":
            from tilewise.backends import hopper_backward

            chosen = hopper_backward.settings(planned.problem)
            passes = 1 if chosen.dim <= 128 else 2
            return chosen.block_q, chosen.block_kv, passes, f"{chosen.block_q} x {chosen.block_kv}, {passes} passes"
    if name == "numpy/tiled":
        return BLOCK_Q, BLOCK_KV, 1, f"{BLOCK_Q} x {BLOCK_KV}"
    # Two passes over small tiles move most; a kernel that keeps its tiles to itself may work so.
    return ASSUMED_BLOCK, ASSUMED_BLOCK, 2, f"{ASSUMED_BLOCK} x {ASSUMED_BLOCK} assumed"
