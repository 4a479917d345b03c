"""The algorithm to read: exact attention, forward and backward, tile by tile, in NumPy.

Attention needs the softmax of a (len_q, len_kv) matrix of scores. This file never holds more than a tile of it. Going
along a row of tiles, the forward pass keeps three things for each query: the largest score so far (``row_max``), the
sum of the exponentials so far (``row_sum``) and the weighted sum of values so far (``acc``), both relative to
``row_max``. When a tile brings a larger score, the two sums are multiplied by one factor (``rescale``) and are right
again. What is left after the last tile is the softmax, exact to rounding. The backward pass keeps no probabilities
either: it computes them again, from the scores and from one number per query that the forward pass wrote down
(``lse``).

`forward_steps` and `backward_steps` are the algorithm. They write their results into arrays they are given and yield a
`Step` for every tile moved and every tile computed, for whoever wants to watch, count or draw. `tiled` and
`tiled_backward` run them to the end.

Base 2 inside, because exp2 is the cheaper exponential: scores are multiplied by log2(e) with the scale. Natural log
outside. A tile's probabilities take the place of its scores in memory, as they do in a GPU's registers, and that memory
is allocated once.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867; Dao et al.,
"FlashAttention", arXiv:2205.14135; Dao, "FlashAttention-2", arXiv:2307.08691 (algorithms 1 and 2).
"""

from __future__ import annotations

import math
from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tilewise.backends.numpy_mods import NONE, Functions
from tilewise.machine.tiles import Tiles
from tilewise.problem.blocks import block_ranges, is_visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from tilewise.problem.problem import Grads, Needs, Problem, Tensors

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

# Measured by benchmarks/numpy_reference.py. Large tiles amortise NumPy's cost per call; a float32 tile of this size is
# 1 MiB and still fits a core's second-level cache. Wider ones waste more along a causal diagonal.
BLOCK_Q = 512
BLOCK_KV = 512


class Step(NamedTuple):
    """One thing the algorithm did: loaded or stored part of a tensor, or computed a tile.

    ``tensor[rows, cols]`` is the part in question, a vector counting as one column. For "load" and "store" it lies in
    main memory, and ``elements`` were moved. For "step" it is the tile that was computed, of ``score``, ``p`` or
    ``ds``; rows are then positions of queries and cols of keys. ``numbers`` holds the arrays of a "step" by name. They
    are the algorithm's own, valid until the next Step is asked for: copy what is to be kept, and write to none.
    """

    kind: Literal["load", "store", "step"]
    tensor: str
    rows: slice
    cols: slice
    numbers: Mapping[str, np.ndarray] = MappingProxyType({})

    @property
    def elements(self) -> int:
        """Count the elements of the part."""
        rows, cols = self.rows, self.cols
        return int((rows.stop - rows.start) * (cols.stop - cols.start))


class Tiling(NamedTuple):
    """Which keys each query sees, and in tiles of what size they are visited.

    Query i sees keys ``i + offset - left`` to ``i + offset + right`` (None: open) inside ``[kv_start, kv_stop)``.

    The segments of a causal tile's row, here two bare blocks and a masked one:

    >>> [(block.start, block.stop, masked) for block, masked in Tiling(8, right=0, block_kv=2).kv_blocks(slice(3, 5))]
    [(0, 2, False), (2, 4, False), (4, 6, True)]
    """

    kv_stop: int
    kv_start: int = 0
    left: int | None = None
    right: int | None = None
    offset: int = 0
    block_q: int = BLOCK_Q
    block_kv: int = BLOCK_KV

    def q_tiles(self, len_q: int) -> Iterator[slice]:
        """Cut the queries into tiles."""
        return (slice(start, min(start + self.block_q, len_q)) for start in range(0, len_q, self.block_q))

    def kv_tiles(self) -> Iterator[slice]:
        """Cut the keys into tiles. They start at kv_start, so that no tile reaches out of the key range."""
        starts = range(self.kv_start, self.kv_stop, self.block_kv)
        return (slice(start, min(start + self.block_kv, self.kv_stop)) for start in starts)

    def kv_blocks(self, q_tile: slice) -> Iterator[tuple[slice, bool]]:
        """Give the blocks of keys that a tile of queries must visit, each with whether it needs a mask."""
        keys = (self.kv_start, self.kv_stop)
        ranges = block_ranges(q_tile.start, q_tile.stop, *keys, self.left, self.right, self.offset, self.block_kv)
        return _segments(ranges, self.block_kv, self.kv_stop)

    def q_blocks(self, kv_tile: slice, len_q: int) -> Iterator[tuple[slice, bool]]:
        """Give the blocks of queries that a tile of keys must visit: the same rule with the roles swapped."""
        keys = (kv_tile.start, kv_tile.stop)
        ranges = block_ranges(*keys, 0, len_q, self.right, self.left, -self.offset, self.block_q)
        return _segments(ranges, self.block_q, len_q)

    def visible(self, rows: slice, cols: slice) -> np.ndarray:
        """Give the mask of a tile, (rows, cols)."""
        q_pos = np.arange(rows.start, rows.stop)[:, None]
        kv_pos = np.arange(cols.start, cols.stop)[None, :]
        return is_visible(q_pos, kv_pos, self.kv_start, self.kv_stop, self.left, self.right, self.offset)


def _segments(ranges: tuple[int, int, int, int], size: int, stop: int) -> Iterator[tuple[slice, bool]]:
    """Go through the blocks of the three segments: masked, bare, masked."""
    first, full_first, full_stop, last = ranges
    for segment, masked in (
        (range(first, full_first), True),
        (range(full_first, full_stop), False),
        (range(full_stop, last), True),
    ):
        for block in segment:
            yield slice(block * size, min((block + 1) * size, stop)), masked


def forward_steps(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray, tiling: Tiling, scale: float,
    own: Functions = NONE,
) -> Iterator[Step]:  # fmt: skip
    """Compute attention, writing out and lse; yield what is done on the way. ``own`` holds users' functions.

    Shapes: q (len_q, dim_qk), k (len_kv, dim_qk), v (len_kv, dim_v), out (len_q, dim_v), lse (len_q,). Sums are kept in
    lse's dtype.
    """
    dims_qk, dims_v, one = slice(0, q.shape[1]), slice(0, v.shape[1]), slice(0, 1)
    scale_log2 = scale * LOG2E
    buffer = _buffer(len(q), tiling, lse.dtype)

    for rows in tiling.q_tiles(len(q)):
        q_tile = _load(q, rows, lse.dtype)
        yield Step("load", "q", rows, dims_qk)
        row_max = np.full(len(q_tile), -np.inf, lse.dtype)
        row_sum = np.zeros(len(q_tile), lse.dtype)
        acc = np.zeros((len(q_tile), v.shape[1]), lse.dtype)

        for cols, masked in tiling.kv_blocks(rows):
            k_tile = _load(k, cols, lse.dtype)
            yield Step("load", "k", cols, dims_qk)
            v_tile = _load(v, cols, lse.dtype)
            yield Step("load", "v", cols, dims_v)
            tile = buffer[: len(q_tile), : len(k_tile)]  # score, then p

            masked = masked or own.mask is not None
            if masked:
                visible = own.visible(tiling, rows, cols)
                seen = np.any(visible, axis=0)  # a NaN in a key that no row sees must not get through as 0 * NaN
                k_tile, v_tile = _only(seen, k_tile), _only(seen, v_tile)

            score = np.matmul(q_tile, k_tile.T, out=tile)
            score *= scale_log2
            own.change(score, rows, cols)
            if masked:
                np.copyto(score, -np.inf, where=~visible)
            yield Step("step", "score", rows, cols, {"score": score})

            row_max_new = np.maximum(row_max, score.max(axis=1))
            anchor = np.where(row_max_new == -np.inf, 0, row_max_new)  # a row that has seen nothing has no maximum
            p = np.exp2(np.subtract(score, anchor[:, None], out=tile), out=tile)
            rescale = np.exp2(row_max - anchor)
            row_sum = row_sum * rescale + p.sum(axis=1)
            acc = acc * rescale[:, None] + p @ v_tile
            row_max = row_max_new
            numbers = {"p": p, "row_max": row_max, "rescale": rescale, "row_sum": row_sum, "acc": acc}
            yield Step("step", "p", rows, cols, numbers)

        row_sum = np.where(row_sum == 0, 1, row_sum)  # acc is then 0 and row_max -inf, and so are out and lse
        out[rows] = acc / row_sum[:, None]
        yield Step("store", "out", rows, dims_v)
        lse[rows] = (row_max + np.log2(row_sum)) * LN2
        yield Step("store", "lse", rows, one)


def backward_steps(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    d_out: np.ndarray,
    d_lse: np.ndarray | None,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    tiling: Tiling,
    scale: float,
    own: Functions = NONE,
) -> Iterator[Step]:
    """Differentiate attention, adding to dq, dk and dv, which start as zeros; yield what is done on the way.

    A row's gradient needs a sum over the whole row, ``sum(p * dp, axis=1)``. It equals ``sum(d_out * out, axis=1)``,
    which needs no scores, so one cheap pass gets it for every row first: ``delta``. The gradient of lse joins it there,
    because d lse / d score = p. Then each tile of keys gathers its dk and dv from the queries that see it.

    Shapes as in `forward_steps`; each gradient has its tensor's shape, in lse's dtype.
    """
    dims_qk, dims_v, one = slice(0, q.shape[1]), slice(0, v.shape[1]), slice(0, 1)
    scale_log2 = scale * LOG2E
    score_buffer, dp_buffer = _buffer(len(q), tiling, lse.dtype), _buffer(len(q), tiling, lse.dtype)
    delta = np.empty_like(lse)

    for rows in tiling.q_tiles(len(q)):
        d_out_tile = _load(d_out, rows, lse.dtype)
        yield Step("load", "d_out", rows, dims_v)
        out_tile = _load(out, rows, lse.dtype)
        yield Step("load", "out", rows, dims_v)
        delta[rows] = (d_out_tile * out_tile).sum(axis=1)
        if d_lse is not None:
            delta[rows] -= d_lse[rows]
            yield Step("load", "d_lse", rows, one)
        yield Step("store", "delta", rows, one)

    for cols in tiling.kv_tiles():
        k_cols = _load(k, cols, lse.dtype)
        yield Step("load", "k", cols, dims_qk)
        v_cols = _load(v, cols, lse.dtype)
        yield Step("load", "v", cols, dims_v)
        dk_tile, dv_tile = np.zeros_like(k_cols), np.zeros_like(v_cols)

        for rows, masked in tiling.q_blocks(cols, len(q)):
            q_tile = _load(q, rows, lse.dtype)
            yield Step("load", "q", rows, dims_qk)
            d_out_tile = _load(d_out, rows, lse.dtype)
            yield Step("load", "d_out", rows, dims_v)
            lse_tile, delta_tile = lse[rows] * LOG2E, delta[rows]
            yield Step("load", "lse", rows, one)
            yield Step("load", "delta", rows, one)
            k_tile, v_tile = k_cols, v_cols

            masked = masked or own.mask is not None
            if masked:  # who takes no part in this tile is zeroed, as in the forward pass; here that goes both ways
                visible = own.visible(tiling, rows, cols)
                seen, sees = np.any(visible, axis=0), np.any(visible, axis=1)
                k_tile, v_tile = _only(seen, k_tile), _only(seen, v_tile)
                q_tile, d_out_tile, delta_tile = _only(sees, q_tile), _only(sees, d_out_tile), _only(sees, delta_tile)

            score = np.matmul(q_tile, k_tile.T, out=score_buffer[: len(q_tile), : len(k_tile)])
            score *= scale_log2
            given = own.change(score, rows, cols)
            if masked:
                np.copyto(score, -np.inf, where=~visible)
            anchor = np.where(lse_tile == -np.inf, 0, lse_tile)
            p = np.exp2(np.subtract(score, anchor[:, None], out=score), out=score)
            yield Step("step", "p", rows, cols, {"p": p})

            dv_tile += p.T @ d_out_tile
            dp = np.matmul(d_out_tile, v_tile.T, out=dp_buffer[: len(q_tile), : len(k_tile)])
            ds = np.multiply(p, np.subtract(dp, delta_tile[:, None], out=dp), out=dp)
            own.back(given, rows, cols, ds)
            dk_tile += ds.T @ q_tile
            yield Step("step", "ds", rows, cols, {"delta": delta_tile, "ds": ds, "dk": dk_tile, "dv": dv_tile})

            yield Step("load", "dq", rows, dims_qk)
            dq[rows] += ds @ k_tile * scale
            yield Step("store", "dq", rows, dims_qk)

        dk[cols] = dk_tile * scale
        yield Step("store", "dk", cols, dims_qk)
        dv[cols] = dv_tile
        yield Step("store", "dv", cols, dims_v)


def tiled(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, tiling: Tiling | None = None, scale: float | None = None,
    own: Functions = NONE,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Run `forward_steps` to its end.

    Args:
        q: (len_q, dim_qk), float16, float32 or float64.
        k: (len_kv, dim_qk).
        v: (len_kv, dim_v).
        tiling: what is visible, and the tile sizes; None: everything, in tiles of the default size.
        scale: what products of queries and keys are multiplied by; None: dim_qk ** -0.5.
        own: the user's functions of scores and positions.

    Returns:
        out (len_q, dim_v) in q's dtype and lse (len_q,), in float32 or, for float64, in float64. A query that sees no
        key has out 0 and lse -inf.

    >>> q = k = np.zeros((2, 4)); v = np.array([[1.0], [3.0]])
    >>> out, lse = tiled(q, k, v, Tiling(kv_stop=2, right=0))  # causal: row 0 sees one key, row 1 both
    >>> out.ravel().tolist(), np.exp(lse).round(6).tolist()
    ([1.0, 2.0], [1.0, 2.0])
    """
    out = np.empty((len(q), v.shape[1]), q.dtype)
    lse = np.empty(len(q), sum_dtype(q))
    _run(forward_steps(q, k, v, out, lse, _within(k, tiling), default_scale(q, scale), own))
    return out, lse


def tiled_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    d_out: np.ndarray,
    d_lse: np.ndarray | None = None,
    tiling: Tiling | None = None,
    scale: float | None = None,
    own: Functions = NONE,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run `backward_steps` to its end: the gradients of ``sum(out * d_out) + sum(lse * d_lse)``.

    Args:
        q, k, v, tiling, scale, own: as for `tiled`.
        out, lse: what `tiled` returned.
        d_out: (len_q, dim_v). d_lse: (len_q,), or None for zero.

    Returns:
        dq, dk and dv, each in its tensor's shape and dtype.
    """
    lse = lse.astype(sum_dtype(q), copy=False)
    dq, dk, dv = (np.zeros(x.shape, lse.dtype) for x in (q, k, v))
    tiling, scale = _within(k, tiling), default_scale(q, scale)
    _run(backward_steps(q, k, v, out, lse, d_out, d_lse, dq, dk, dv, tiling, scale, own))
    return dq.astype(q.dtype, copy=False), dk.astype(k.dtype, copy=False), dv.astype(v.dtype, copy=False)


def sum_dtype(q: np.ndarray) -> np.dtype:
    """Give the dtype that sums are kept in: float32, or q's where that is wider."""
    return np.promote_types(q.dtype, np.float32)


def default_scale(q: np.ndarray, scale: float | None) -> float:
    """Give the scale as a Python float, which leaves float32 arrays float32; without dimensions any scale will do."""
    return float(max(q.shape[1], 1) ** -0.5 if scale is None else scale)


def _within(k: np.ndarray, tiling: Tiling | None) -> Tiling:
    """Hold the key range to the keys there are."""
    tiling = Tiling(len(k)) if tiling is None else tiling
    return tiling._replace(kv_start=max(tiling.kv_start, 0), kv_stop=min(tiling.kv_stop, len(k)))


def _buffer(len_q: int, tiling: Tiling, dtype: np.dtype) -> np.ndarray:
    """Allocate one tile of scores."""
    return np.empty((min(tiling.block_q, len_q), max(min(tiling.block_kv, tiling.kv_stop), 0)), dtype)


def _load(x: np.ndarray, rows: slice, dtype: np.dtype) -> np.ndarray:
    """Bring some rows near: contiguous and in the dtype of the sums, copied only where they are not so already."""
    return np.ascontiguousarray(x[rows], dtype)


def _only(used: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Keep the rows of x that are used and zero the others."""
    return np.where(used.reshape(-1, *[1] * (x.ndim - 1)), x, 0)


def _run(steps: Iterator[Step]) -> None:
    """Go through all steps and keep none."""
    deque(steps, maxlen=0)


# ---- as a backend ---------------------------------------------------------------------------------------------------
# One sequence and one head after the other. torch is imported inside these functions: the algorithm above must run with
# NumPy alone.

name = "numpy_tiled"


def why_not(problem: Problem) -> str | None:
    """Say why the engine to read cannot serve a problem, or None."""
    score, mask = problem.score, problem.mask
    if problem.device_type != "cpu":
        return f"runs on the CPU, not on {problem.device_type}"
    if problem.kind == "cache" or "block_table" in problem.specs:
        return "keeps no cache"
    if problem.dtype == "bfloat16":
        return "NumPy has no bfloat16"
    for feature, asked in (
        ("softcap", bool(score.softcap)),
        ("bias", score.bias),
        ("ALiBi", score.alibi),
        ("sink", score.sink),
        ("dense mask", mask.dense),
        ("dropout", bool(problem.dropout)),
        ("score_mod and mask_mod", problem.mods is not None),
    ):
        if asked:
            return f"leaves out {feature}, to stay short"
    return None


def tiles(problem: Problem) -> Tiles:
    """Give the tile sizes for a problem."""
    return Tiles(BLOCK_Q, BLOCK_KV)


def forward(problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse, head by head."""
    from tilewise.backends.outputs import empty_lse, empty_out

    out = empty_out(tensors.q, problem.dim_v, problem.layout).zero_()
    lse = empty_lse(tensors.q).fill_(-math.inf)
    q, k, v, into = (_by_heads(problem, x) for x in (tensors.q, tensors.k, tensors.v, out))
    lse_rows = _array(lse) if problem.kind == "dense" else _array(lse)[None]
    for head, kv_head, tiling in _heads(problem, tensors):
        into[head], lse_rows[head] = tiled(q[head], k[kv_head], v[kv_head], tiling, problem.score.scale)
    return out, lse


def backward(
    problem: Problem,
    tensors: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    needs: Needs,
) -> Grads:
    """Differentiate `forward`, head by head; heads that share keys add up."""
    import torch

    from tilewise.backends.outputs import sum_dtype as torch_sum_dtype
    from tilewise.problem.problem import Grads

    exact = torch_sum_dtype(tensors.q.dtype)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    totals = [torch.zeros_like(x, dtype=exact) for x in (tensors.q, tensors.k, tensors.v)]
    q, k, v, saved, given = (_by_heads(problem, x) for x in (tensors.q, tensors.k, tensors.v, out, d_out))
    dq, dk, dv = (_by_heads(problem, x) for x in totals)
    lse_rows, d_lse_rows = (_array(x) if problem.kind == "dense" else _array(x)[None] for x in (lse, d_lse))
    for head, kv_head, tiling in _heads(problem, tensors):
        row = lse_rows[head], d_lse_rows[head]
        qkv = q[head], k[kv_head], v[kv_head]
        parts = tiled_backward(*qkv, saved[head], row[0], given[head], row[1], tiling, problem.score.scale)
        for total, place, part in zip((dq, dk, dv), (head, kv_head, kv_head), parts, strict=True):
            total[place] += part
    dq_out, dk_out, dv_out = (
        x.to(tensors.q.dtype) if need else None for x, need in zip(totals, needs[:3], strict=True)
    )
    return Grads(dq_out, dk_out, dv_out, None, None)


Place = tuple[int, int, slice]  # batch, head, rows or keys


def _heads(problem: Problem, tensors: Tensors) -> Iterator[tuple[Place, Place, Tiling]]:
    """Go through every head of every sequence: its place in q, its place in k and v, and what it sees."""
    band = problem.mask.band
    for number in range(problem.batch):
        batch, rows, keys = number, slice(0, problem.len_q), slice(0, problem.len_kv)
        kv_start, kv_stop = 0, problem.len_kv
        if problem.kind == "varlen" and tensors.cu_seqlens_q is not None:
            bounds = tensors.cu_seqlens_q if tensors.cu_seqlens_k is None else tensors.cu_seqlens_k
            batch, rows, keys = (
                0,
                slice(*tensors.cu_seqlens_q[number:][:2].tolist()),
                slice(*bounds[number:][:2].tolist()),
            )
            kv_stop = keys.stop - keys.start
        if tensors.kv_start is not None:
            kv_start = int(tensors.kv_start[number])
        if tensors.kv_stop is not None:
            kv_stop = int(tensors.kv_stop[number])
        offset = band.offset(rows.stop - rows.start, keys.stop - keys.start)
        tiling = Tiling(kv_stop, kv_start, band.left, band.right, offset)
        for head in range(problem.heads_q):
            yield (batch, head, rows), (batch, head // problem.group, keys), tiling


def _by_heads(problem: Problem, x: torch.Tensor) -> np.ndarray:
    """View a tensor as an array (batch, heads, len, dim); packed tokens are one batch."""
    array = _array(x)
    return array if problem.kind == "dense" else array.transpose(1, 0, 2)[None]


def _array(x: torch.Tensor) -> np.ndarray:
    """View a tensor's memory."""
    array: np.ndarray = x.detach().numpy()
    return array
