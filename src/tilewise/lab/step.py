"""Watch the algorithm: every number of the online softmax and of a tile's run over blocks of keys: `tilewise step`.

The numbers are those that the NumPy engine works with (`backends/numpy_tiled.py`), copied from the `Step` records that
it yields. Inside it counts in base 2; here scores and maxima are turned into natural units, in which one reads them.

>>> [frame.row_max.round(6).tolist() for frame in forward(DEFAULT, TILING, 1.0).frames]
[[3.0, 4.0], [3.0, 4.0], [5.0, 4.0], [6.0, 4.0]]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tilewise.backends.naive import Terms, naive, naive_backward
from tilewise.backends.numpy_tiled import LOG2E, Tiling, backward_steps, forward_steps
from tilewise.bench.show import Table, three


class Numbers(NamedTuple):
    """What attention is computed of: q (len_q, dim), k (len_kv, dim), v (len_kv, dim_v), d_out (len_q, dim_v)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_out: np.ndarray


# Queries are unit vectors, so that a query's scores are a column of k, to be read off. The first query's maximum rises
# until the last block; the second one's stands in the first block, and nothing is ever rescaled.
DEFAULT = Numbers(
    q=np.array([[1.0, 0.0], [0.0, 1.0]]),
    k=np.array([[1.0, 4.0], [3.0, 2.0], [2.0, 1.0], [0.0, 3.0], [5.0, 0.0], [4.0, 1.0], [1.0, 2.0], [6.0, 0.0]]),
    v=np.array([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0], [4.0, 0.0], [5.0, 1.0], [6.0, 0.0], [7.0, 1.0], [8.0, 0.0]]),
    d_out=np.array([[1.0, 0.0], [0.0, 1.0]]),
)
TILING = Tiling(kv_stop=8, block_q=2, block_kv=2)


def load(path: Path) -> Numbers:
    """Read q, k, v and, if there is one, d_out (else ones) from a JSON object of lists of rows, or an .npz archive.

    Raises:
        ValueError: the file cannot be read, or its arrays do not fit together; the message says how.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path) as archive:
                found: object = {name: archive[name] for name in archive.files}
        else:
            found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} must be JSON or .npz: {error}") from error
    if not isinstance(found, dict) or not {"q", "k", "v"} <= set(found) <= {"q", "k", "v", "d_out"}:
        raise ValueError(f"{path} must hold q, k and v, and may hold d_out")
    return numbers_of(**found)


def numbers_of(q: object, k: object, v: object, d_out: object = None) -> Numbers:
    """Turn lists of rows into arrays that fit together; d_out None: ones.

    Raises:
        ValueError: they do not.
    """
    arrays = {}
    for name, value in {"q": q, "k": k, "v": v, "d_out": d_out}.items():
        if value is None:
            continue
        try:
            arrays[name] = np.asarray(value, np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} must be rows of numbers, all of one length: {error}") from error
        if arrays[name].ndim != 2 or not arrays[name].size:
            raise ValueError(f"{name} must be rows of numbers, got shape {arrays[name].shape}")
    shapes = {name: array.shape for name, array in arrays.items()}
    if shapes["q"][1] != shapes["k"][1]:
        raise ValueError(f"q and k must have rows of one length, got {shapes['q'][1]} and {shapes['k'][1]}")
    if shapes["k"][0] != shapes["v"][0]:
        raise ValueError(f"k and v must have as many rows, got {shapes['k'][0]} and {shapes['v'][0]}")
    size = shapes["q"][0], shapes["v"][1]
    if shapes.get("d_out", size) != size:
        raise ValueError(f"d_out must have shape {size}, as out has; got {shapes['d_out']}")
    return Numbers(arrays["q"], arrays["k"], arrays["v"], arrays.get("d_out", np.ones(size)))


def numbers_in(text: str) -> list[float]:
    """Read numbers with commas between them.

    Raises:
        ValueError: something else.

    >>> numbers_in("3, 1,-inf")
    [3.0, 1.0, -inf]
    """
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"row must be numbers with commas between them, such as 3,1,6; got {text!r}") from None


def tiling_of(numbers: Numbers, block_q: int, block_kv: int, *, causal: bool) -> Tiling:
    """Say what is visible and in which tiles; when causal, the last query sees all keys.

    Raises:
        ValueError: a block below 1.
    """
    for name, block in (("block-q", block_q), ("block-kv", block_kv)):
        if block < 1:
            raise ValueError(f"{name} must be 1 or more, got {block}")
    len_q, len_kv = len(numbers.q), len(numbers.k)
    return Tiling(len_kv, 0, None, 0 if causal else None, len_kv - len_q, block_q, block_kv)


# ---- what happened --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """One tile of the forward pass, as it left the state of its rows.

    Args:
        rows, cols: queries and keys of the tile.
        score: (rows, cols), natural units; -inf where a key is hidden.
        p: (rows, cols), exp(score - row_max).
        row_max, rescale, row_sum: (rows,); acc: (rows, dim_v).
    """

    rows: slice
    cols: slice
    score: np.ndarray
    p: np.ndarray
    row_max: np.ndarray
    rescale: np.ndarray
    row_sum: np.ndarray
    acc: np.ndarray


class Forward(NamedTuple):
    """A whole forward pass: its frames, its results, and what the untiled formula says."""

    frames: list[Frame]
    out: np.ndarray
    lse: np.ndarray
    exact_out: np.ndarray
    exact_lse: np.ndarray


def forward(numbers: Numbers, tiling: Tiling, scale: float) -> Forward:
    """Run the engine and keep what it yields."""
    q, k, v, _ = numbers
    out, lse = np.empty((len(q), v.shape[1])), np.empty(len(q))
    frames, score = [], np.empty(0)
    for step in forward_steps(q, k, v, out, lse, tiling, scale):
        if step.kind != "step":
            continue
        if step.tensor == "score":
            score = step.numbers["score"] / LOG2E
            continue
        kept = {name: step.numbers[name].copy() for name in ("p", "rescale", "row_sum", "acc")}
        frames.append(Frame(step.rows, step.cols, score, row_max=step.numbers["row_max"] / LOG2E, **kept))
    exact_out, exact_lse = naive(np, q[None, None], k[None, None], v[None, None], _terms(tiling, scale))
    return Forward(frames, out, lse, exact_out[0, 0], exact_lse[0, 0])


def _terms(tiling: Tiling, scale: float) -> Terms[np.ndarray]:
    return Terms(left=tiling.left, right=tiling.right, offset=tiling.offset, scale=scale)


@dataclass(frozen=True)
class BackwardFrame:
    """One tile of the backward pass, and what it added to.

    Args:
        rows, cols: queries and keys of the tile.
        p, ds: (rows, cols); delta: (rows,).
        dk, dv: gathered so far for the tile's keys, dk still without the scale. dq: so far, of the tile's queries.
    """

    rows: slice
    cols: slice
    p: np.ndarray
    delta: np.ndarray
    ds: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dq: np.ndarray


class Backward(NamedTuple):
    """A whole backward pass: its frames, the gradients by name, and what the untiled formula says."""

    frames: list[BackwardFrame]
    grads: dict[str, np.ndarray]
    exact: dict[str, np.ndarray]


def backward(numbers: Numbers, tiling: Tiling, scale: float) -> Backward:
    """Run the engine forward for out and lse, then back, and keep what it yields."""
    q, k, v, d_out = numbers
    first = forward(numbers, tiling, scale)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    frames: list[BackwardFrame] = []
    kept: dict[str, np.ndarray] = {}
    cols = slice(0, 0)
    for step in backward_steps(q, k, v, first.out, first.lse, d_out, None, dq, dk, dv, tiling, scale):
        if step.kind == "step":
            kept |= {name: array.copy() for name, array in step.numbers.items()}
            cols = step.cols
        elif (step.kind, step.tensor) == ("store", "dq"):
            frames.append(BackwardFrame(rows=step.rows, cols=cols, dq=dq[step.rows].copy(), **kept))
    one_head = [x[None, None] for x in numbers]
    found = naive_backward(np, one_head[0], one_head[1], one_head[2], one_head[3], terms=_terms(tiling, scale))
    exact = {"dq": found.dq[0, 0], "dk": found.dk[0, 0], "dv": found.dv[0, 0]}
    return Backward(frames, {"dq": dq, "dk": dk, "dv": dv}, exact)


# ---- what is shown --------------------------------------------------------------------------------------------------


def softmax_table(row: Sequence[float]) -> Table:
    """Show the online softmax number by number: the engine on one query, with blocks of one key.

    >>> softmax_table([1.0, 3.0]).rows
    [('0', '1', '-inf -> 1', '0', '1'), ('1', '3', '1 -> 3', '0.135', '1.14')]
    """
    x = np.asarray(row, np.float64)[:, None]
    numbers = Numbers(np.ones((1, 1)), x, np.ones_like(x), np.ones((1, 1)))
    watched = forward(numbers, Tiling(len(x), block_q=1, block_kv=1), 1.0)
    table = Table("online softmax of a row, number by number", ("key", "score", "row_max", "rescale", "row_sum"), (2,))
    before = -np.inf
    for frame in watched.frames:
        after = float(frame.row_max[0])
        table.add(
            str(frame.cols.start),
            number(frame.score[0, 0]),
            moved(before, after),
            number(frame.rescale[0]),
            number(frame.row_sum[0]),
        )
        before = after
    return table


def forward_tables(watched: Forward) -> Iterator[Table]:
    """Show each query tile's run over blocks of keys, and what came out beside the exact answer."""
    rows: slice | None = None
    table = Table("", ())
    before: list[float] = []
    for frame in watched.frames:
        if frame.rows != rows:
            if rows is not None:
                yield table
            rows, before = frame.rows, [-np.inf] * (frame.rows.stop - frame.rows.start)
            title = f"{_span('query', frame.rows)} over blocks of keys"
            table = Table(title, ("keys", "query", "scores", "row_max", "rescale", "row_sum", "acc"), (0, 2, 3, 6))
        for index in range(frame.rows.stop - frame.rows.start):
            after = float(frame.row_max[index])
            table.add(
                "" if index else f"{frame.cols.start}-{frame.cols.stop - 1}",
                str(frame.rows.start + index),
                vector(frame.score[index]),
                moved(before[index], after),
                number(frame.rescale[index]),
                number(frame.row_sum[index]),
                vector(frame.acc[index]),
            )
            before[index] = after
        table.gap()
    if rows is not None:
        yield table
    answer = Table("the answer", ("query", "out = acc / row_sum", "exact", "lse", "exact", "off by at most"), (1, 2))
    for query, (out, lse, right, right_lse) in enumerate(
        zip(watched.out, watched.lse, watched.exact_out, watched.exact_lse, strict=True)
    ):
        off = max(float(np.abs(out - right).max()), 0.0 if lse == right_lse else abs(float(lse - right_lse)))
        answer.add(str(query), vector(out), vector(right), number(lse), number(right_lse), f"{off:.1e}")
    yield answer


def backward_tables(watched: Backward) -> Iterator[Table]:
    """Show what each tile adds to the gradients, and the gradients beside the exact ones."""
    table = Table(
        "keys outside, queries inside: dk and dv gather on the chip, dq in memory",
        ("keys", "query", "p = exp(score - lse)", "delta", "ds = p (dp - delta)", "dq so far"),
        (0, 2, 4, 5),
    )
    cols: slice | None = None
    for frame in watched.frames:
        if cols is not None and frame.cols != cols:
            table.gap()
        for index in range(frame.rows.stop - frame.rows.start):
            table.add(
                f"{frame.cols.start}-{frame.cols.stop - 1}" if index == 0 and frame.cols != cols else "",
                str(frame.rows.start + index),
                vector(frame.p[index]),
                number(frame.delta[index]),
                vector(frame.ds[index]),
                vector(frame.dq[index]),
            )
        cols = frame.cols
    yield table
    for name, got in watched.grads.items():
        answer = Table(name, ("row", name, "exact", "off by at most"), (1, 2))
        for row, (values, right) in enumerate(zip(got, watched.exact[name], strict=True)):
            answer.add(str(row), vector(values), vector(right), f"{np.abs(values - right).max():.1e}")
        yield answer


def remarks(watched: Forward) -> Iterator[str]:
    """Say in words where sums were rescaled, and where never."""
    rescued: dict[int, list[str]] = {}
    for frame in watched.frames:
        for index in range(frame.rows.stop - frame.rows.start):
            told = rescued.setdefault(frame.rows.start + index, [])
            factor = float(frame.rescale[index])
            if 0 < factor < 1:
                told.append(f"by {number(factor)} at keys {frame.cols.start}-{frame.cols.stop - 1}")
    for query, told in rescued.items():
        if told:
            yield f"Query {query}: a larger score came, so what was summed is rescaled {', '.join(told)}."
        else:
            yield f"Query {query}: its largest score stands in its first block; every later rescale is 1."


def number(value: float) -> str:
    """Write a number briefly.

    >>> number(3.0), number(0.1353352), number(-float("inf")), number(-0.00001)
    ('3', '0.135', '-inf', '-1.0e-05')
    """
    value = float(value)
    if not np.isfinite(value) or value == 0:
        return "0" if value == 0 else str(value)
    return f"{value:.1e}" if abs(value) < 1e-3 else three(value)


def vector(values: np.ndarray) -> str:
    """Write a row of numbers."""
    return "  ".join(number(value) for value in values)


def moved(before: float, after: float) -> str:
    """Write a maximum, and what it was where it rose."""
    return number(after) if before == after else f"{number(before)} -> {number(after)}"


def _span(what: str, part: slice) -> str:
    last = part.stop - 1
    return f"{what} {part.start}" if last == part.start else f"queries {part.start}-{last}"
