"""The untiled formula, forward and backward: the one oracle, and the low-precision yardstick.

Everything here is written as in a textbook: the whole score matrix, base e, no tricks. It runs on NumPy (up to
longdouble) and on torch from the same source. Arrays are 4-D, (batch, heads, len, dim); heads_q may be a multiple of
heads_kv, and query head h then reads key head ``h // (heads_q // heads_kv)``. Inside, heads_q is split into
(heads_kv, group), so that keys and values broadcast over the group.

Source: Vaswani et al., "Attention is all you need", arXiv:1706.03762, section 3.2.1; the gradients are those of Dao et
al., "FlashAttention", arXiv:2205.14135, appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Generic, NamedTuple, TypedDict, TypeVar

from tilewise.problem.blocks import is_visible

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tilewise.problem.problem import Grads as TensorGrads
    from tilewise.problem.problem import Needs, Problem, Tensors

Array = TypeVar("Array", "np.ndarray", "torch.Tensor")


@dataclass(frozen=True)
class Terms(Generic[Array]):
    """Everything beside q, k and v that shapes the result. Defaults leave plain attention.

    ``offset``, ``kv_start`` and ``kv_stop`` are ints or (batch,) arrays; ``bias``, ``mask`` and ``keep`` broadcast to
    (batch, heads_q, len_q, len_kv); ``sink`` and ``alibi_slopes`` are (heads_q,) or (batch, heads_q). ``keep`` is
    dropout's bool mask and ``dropout`` its probability.

    ``score_mod(score, batch, head, q_pos, kv_pos)`` and ``mask_mod(batch, head, q_pos, kv_pos)`` are users' functions;
    ``score_gradient(score, batch, head, q_pos, kv_pos, d_score)`` is the first's derivative. Of the batch they are told
    the entries' numbers, counted from ``sequence``.
    """

    left: int | None = None
    right: int | None = None
    offset: int | Array = 0
    kv_start: int | Array = 0
    kv_stop: int | Array | None = None
    scale: float | None = None
    softcap: float = 0.0
    alibi_slopes: Array | None = None
    bias: Array | None = None
    mask: Array | None = None
    sink: Array | None = None
    keep: Array | None = None
    dropout: float = 0.0
    score_mod: Callable[..., Array] | None = None
    score_gradient: Callable[..., Array] | None = None
    mask_mod: Callable[..., Array] | None = None
    sequence: int = 0


@dataclass(frozen=True)
class Grads(Generic[Array]):
    """The gradients, each in its input's shape; None where there was no such input."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsink: Array | None


@dataclass(frozen=True)
class _Scores(Generic[Array]):
    score: Array  # (batch, heads_kv, group, len_q, len_kv), -inf where hidden
    given: Array  # what a score_mod was given, 0 where hidden
    pairs: tuple[Array, Array, Array, Array]  # batch, head, q_pos, kv_pos
    slope: Array | float  # derivative of the softcap
    q: Array  # (batch, heads_kv, group, len_q, dim_qk), unscaled
    k: Array  # (batch, heads_kv, 1, len_kv, dim_qk), zero where no query sees the key
    v: Array
    sink: Array | None  # (batch, heads_kv, group, 1, 1)
    keep: Array | None  # what dropout leaves


def _scores(xp: ModuleType, q: Array, k: Array, v: Array, terms: Terms[Array]) -> _Scores[Array]:
    batch, heads_q, len_q, dim_qk = q.shape
    heads_kv, len_kv = k.shape[1:3]
    group = heads_q // heads_kv

    def per_batch(x: int | Array) -> int | Array:
        return x if isinstance(x, int) else x.reshape(batch, 1, 1, 1, 1)

    def per_head(x: Array) -> Array:
        split: Array = xp.broadcast_to(x, (batch, heads_q)).reshape(batch, heads_kv, group, 1, 1)
        return split

    def matrix(x: Array) -> Array:
        wide: Array = xp.broadcast_to(x, (batch, heads_q, len_q, len_kv))
        return wide.reshape(batch, heads_kv, group, len_q, len_kv)

    q_pos = xp.arange(len_q, device=q.device)[:, None]
    kv_pos = xp.arange(len_kv, device=q.device)[None, :]
    offset, kv_start = per_batch(terms.offset), per_batch(terms.kv_start)
    kv_stop = len_kv if terms.kv_stop is None else per_batch(terms.kv_stop)
    visible = is_visible(q_pos, kv_pos, kv_start, kv_stop, terms.left, terms.right, offset)
    pairs = (
        xp.arange(terms.sequence, terms.sequence + batch, device=q.device).reshape(batch, 1, 1, 1, 1),
        xp.arange(heads_q, device=q.device).reshape(1, heads_kv, group, 1, 1),
        q_pos,
        kv_pos,
    )
    if terms.mask is not None:
        visible = visible & matrix(terms.mask)
    if terms.mask_mod is not None:
        visible = visible & terms.mask_mod(*pairs)
    visible = xp.broadcast_to(visible, (batch, heads_kv, group, len_q, len_kv))

    q = q.reshape(batch, heads_kv, group, len_q, dim_qk)
    seen = xp.any(visible, -2)[..., None]  # NaN in a key or value that no query sees must not spread through 0 * NaN
    k = xp.where(seen, k[:, :, None], 0)
    v = xp.where(seen, v[:, :, None], 0)

    scale = dim_qk**-0.5 if terms.scale is None else terms.scale
    score = (q * scale) @ xp.swapaxes(k, -1, -2)
    slope: Array | float = 1.0
    if terms.softcap:
        capped = xp.tanh(score / terms.softcap)
        score, slope = terms.softcap * capped, 1 - capped**2
    if terms.bias is not None:
        score = score + matrix(terms.bias)
    if terms.alibi_slopes is not None:
        distance = abs(q_pos + offset - kv_pos)
        score = score - per_head(terms.alibi_slopes) * distance
    given = score
    if terms.score_mod is not None:
        given = xp.where(visible, score, 0)
        score = xp.broadcast_to(terms.score_mod(given, *pairs), score.shape)
    score = xp.where(visible, score, -math.inf)
    keep = None if terms.keep is None else matrix(terms.keep)
    sink = None if terms.sink is None else per_head(terms.sink)
    return _Scores(score, given, pairs, slope, q, k, v, sink, keep)


def naive(xp: ModuleType, q: Array, k: Array, v: Array, terms: Terms[Array] | None = None) -> tuple[Array, Array]:
    """Compute attention with the whole score matrix in memory.

    ``out = softmax(score) @ v`` and ``lse = log(sum(exp(score)))`` over the visible keys and the sink. A row with
    nothing to see has out 0 and lse -inf.

    Args:
        xp: the module that computes: numpy or torch.
        q: (batch, heads_q, len_q, dim_qk).
        k: (batch, heads_kv, len_kv, dim_qk).
        v: (batch, heads_kv, len_kv, dim_v).
        terms: masks and score options.

    Returns:
        out (batch, heads_q, len_q, dim_v) and lse (batch, heads_q, len_q), both in q's dtype.

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 2, 4)); v = np.array([[[[1.0], [3.0]]]])
    >>> out, lse = naive(np, q, k, v, Terms(right=0))  # causal: row 0 sees one key, row 1 both
    >>> out.ravel().tolist(), np.exp(lse).round(6).ravel().tolist()
    ([1.0, 2.0], [1.0, 2.0])
    """
    batch, heads_q, len_q, _ = q.shape
    terms = Terms() if terms is None else terms
    scores = _scores(xp, q, k, v, terms)
    p, _, lse = _softmax(xp, scores)
    p = _dropped(xp, p, scores.keep, terms.dropout)
    out = p @ scores.v
    return out.reshape(batch, heads_q, len_q, v.shape[-1]), lse.reshape(batch, heads_q, len_q)


def _softmax(xp: ModuleType, scores: _Scores[Array]) -> tuple[Array, Array, Array]:
    """Give p (..., len_kv), the sink's share of each row (..., 1) and lse (..., 1)."""
    hidden: Array = scores.score
    # The sink stands as one more column. Without one, a column of -inf keeps the maximum of an empty row defined.
    column = xp.full((*hidden.shape[:-1], 1), -math.inf, dtype=hidden.dtype, device=hidden.device)
    column = column if scores.sink is None else xp.broadcast_to(scores.sink, column.shape)
    score = xp.concatenate([hidden, column], -1)
    row_max = xp.amax(score, -1)[..., None]
    row_max = xp.where(row_max == -math.inf, 0, row_max)
    p = xp.exp(score - row_max)
    row_sum = p.sum(-1)[..., None]
    empty = row_sum == 0
    p = p / xp.where(empty, 1, row_sum)
    lse = xp.where(empty, -math.inf, row_max + xp.log(xp.where(empty, 1, row_sum)))
    return p[..., :-1], p[..., -1:], lse


def _dropped(xp: ModuleType, x: Array, keep: Array | None, dropout: float) -> Array:
    """Zero what dropout drops and scale up what stays."""
    if keep is None:
        return x
    scaled: Array = xp.where(keep, x / (1 - dropout), 0)
    return scaled


def naive_backward(
    xp: ModuleType,
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    d_lse: Array | None = None,
    terms: Terms[Array] | None = None,
) -> Grads[Array]:
    """Differentiate `naive`: the gradients of ``sum(out * d_out) + sum(lse * d_lse)``.

    With ``dp = d_out @ v.T``, the score's gradient is ``ds = p * (dp - delta)``, where
    ``delta = sum(p * dp) - d_lse`` gathers all that a row's normalisation owes.

    Args:
        xp: the module that computes: numpy or torch.
        q, k, v, terms: as for `naive`.
        d_out: (batch, heads_q, len_q, dim_v). d_lse: (batch, heads_q, len_q) or None for zero.
    """
    terms = Terms() if terms is None else terms
    scores = _scores(xp, q, k, v, terms)
    p, p_sink, _ = _softmax(xp, scores)
    rows = p.shape[:-1]
    d_out = d_out.reshape(*rows, d_out.shape[-1])

    dv = xp.swapaxes(_dropped(xp, p, scores.keep, terms.dropout), -1, -2) @ d_out
    dp = _dropped(xp, d_out @ xp.swapaxes(scores.v, -1, -2), scores.keep, terms.dropout)
    delta = (p * dp).sum(-1)[..., None]
    delta = delta if d_lse is None else delta - d_lse.reshape(*rows, 1)
    ds = p * (dp - delta)
    if terms.score_gradient is not None:
        ds = terms.score_gradient(scores.given, *scores.pairs, ds)
    dbias = None if terms.bias is None else _sum_to(ds.reshape(*q.shape[:3], k.shape[2]), terms.bias.shape)
    ds = ds * scores.slope
    scale = q.shape[-1] ** -0.5 if terms.scale is None else terms.scale
    dq = ds @ scores.k * scale
    dk = xp.swapaxes(ds, -1, -2) @ (scores.q * scale)
    dsink = None
    if terms.sink is not None:
        dsink = _sum_to((-p_sink * delta).sum((-1, -2)).reshape(q.shape[:2]), terms.sink.shape)
    return Grads(dq.reshape(q.shape), dk.sum(2), dv.sum(2), dbias, dsink)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Add up the axes along which a tensor of ``shape`` was broadcast to x's."""
    x = x.sum(tuple(range(x.ndim - len(shape)))) if x.ndim > len(shape) else x
    wide = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return x.sum(wide).reshape(shape) if wide else x


# ---- as a backend ---------------------------------------------------------------------------------------------------
# torch is imported inside these functions: the formula above must run with NumPy alone.

name = "naive"


class _Piece(NamedTuple):
    """One dense batch of a problem: all of it, or one sequence of a varlen call with its rows and keys."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    terms: Terms[torch.Tensor]
    rows: slice
    keys: slice
    sequence: int


def why_not(problem: Problem) -> str | None:
    """Say why the untiled formula cannot serve a problem, or None."""
    if problem.kind == "cache":
        return "keeps no cache"
    if problem.kind == "varlen" and problem.device_type != "cpu":
        return "would have to read sequence bounds from the device"
    if "block_table" in problem.specs:
        return "reads no pages"
    return None


def tiles(problem: Problem) -> None:
    """There are no tiles."""


def forward(problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse, the whole score matrix in memory; lse in float32 at least, by a pass of its own."""
    import torch

    from tilewise.backends.outputs import empty_lse, empty_out, sum_dtype

    out = empty_out(tensors.q, problem.dim_v, problem.layout).zero_()
    lse = empty_lse(tensors.q).fill_(-math.inf)
    for piece in _pieces(problem, tensors):
        part = naive(torch, piece.q, piece.k, piece.v, piece.terms)
        exact = sum_dtype(out.dtype)
        if exact != out.dtype:
            q, k, v = (x.to(exact) for x in (piece.q, piece.k, piece.v))
            bias, slopes, sink = (
                None if x is None else x.to(exact)
                for x in (piece.terms.bias, piece.terms.alibi_slopes, piece.terms.sink)
            )
            terms = replace(piece.terms, bias=bias, alibi_slopes=slopes, sink=sink, **_mods(tensors, exact))
            part = part[0], naive(torch, q, k, v, terms)[1]
        if problem.kind == "dense":
            out.copy_(part[0])
            lse.copy_(part[1])
        else:
            out[piece.rows] = part[0][0].transpose(0, 1)
            lse[:, piece.rows] = part[1][0]
    return out, lse


def backward(
    problem: Problem,
    tensors: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    needs: Needs,
) -> TensorGrads:
    """Differentiate `forward`."""
    import torch

    from tilewise.problem.problem import Grads as TensorGrads

    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    total = [
        None if x is None else torch.zeros_like(x)
        for x in (tensors.q, tensors.k, tensors.v, tensors.bias, tensors.sink)
    ]
    for piece in _pieces(problem, tensors):
        given = d_out, d_lse.to(out.dtype)
        if problem.kind == "varlen":
            given = given[0][piece.rows].transpose(0, 1)[None], given[1][None, :, piece.rows]
        grads = naive_backward(torch, piece.q, piece.k, piece.v, *given, piece.terms)
        _add(problem, piece, grads, total)
    return TensorGrads(*(x if need else None for x, need in zip(total, needs, strict=True)))


def _add(problem: Problem, piece: _Piece, grads: Grads[torch.Tensor], total: list[torch.Tensor | None]) -> None:
    """Add one piece's gradients to the whole call's."""
    places: list[object] = [Ellipsis] * 5
    parts: list[torch.Tensor | None] = [grads.dq, grads.dk, grads.dv, grads.dbias, grads.dsink]
    if problem.kind == "varlen":
        places = [piece.rows, piece.keys, piece.keys, (slice(None), piece.rows, slice(piece.k.shape[2])), Ellipsis]
        parts[:3] = [part[0].transpose(0, 1) for part in (grads.dq, grads.dk, grads.dv)]
        parts[3] = None if grads.dbias is None else grads.dbias[0]
        if grads.dsink is not None and grads.dsink.ndim == 2:
            places[4], parts[4] = piece.sequence, grads.dsink[0]
    for target, place, part in zip(total, places, parts, strict=True):
        if target is not None and part is not None:
            target[place] += part.to(target.dtype)  # type: ignore[index]  # slices and Ellipsis


def _pieces(problem: Problem, tensors: Tensors) -> Iterator[_Piece]:
    """Cut a problem into dense batches."""
    q, k, v, band = tensors.q, tensors.k, tensors.v, problem.mask.band
    score = problem.score
    shared: Terms[torch.Tensor] = Terms(
        left=band.left, right=band.right, scale=score.scale, softcap=score.softcap, **_mods(tensors, q.dtype)
    )

    def cast(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.to(q.dtype)

    if problem.kind == "dense":
        terms = replace(
            shared,
            offset=band.offset(problem.len_q, problem.len_kv),
            kv_start=0 if tensors.kv_start is None else tensors.kv_start,
            kv_stop=tensors.kv_stop,
            alibi_slopes=cast(tensors.alibi_slopes),
            bias=cast(tensors.bias),
            mask=tensors.mask,
            sink=cast(tensors.sink),
            keep=_keep(problem, tensors, problem.batch, problem.len_q, problem.len_kv, 0),
            dropout=problem.dropout,
        )
        yield _Piece(q, k, v, terms, slice(None), slice(None), 0)
        return
    if tensors.cu_seqlens_q is None:
        return
    edges_q = tensors.cu_seqlens_q.tolist()
    edges_k = edges_q if tensors.cu_seqlens_k is None else tensors.cu_seqlens_k.tolist()
    for sequence in range(problem.batch):
        rows, keys = slice(*edges_q[sequence : sequence + 2]), slice(*edges_k[sequence : sequence + 2])
        len_q, len_kv = rows.stop - rows.start, keys.stop - keys.start
        per_head = [
            cast(x if x is None or x.ndim == 1 else x[sequence : sequence + 1])
            for x in (tensors.alibi_slopes, tensors.sink)
        ]
        terms = replace(
            shared,
            offset=band.offset(len_q, len_kv),
            alibi_slopes=per_head[0],
            bias=None if tensors.bias is None else cast(tensors.bias[None, :, rows, :len_kv]),
            sink=per_head[1],
            keep=_keep(problem, tensors, 1, len_q, len_kv, sequence),
            dropout=problem.dropout,
            sequence=sequence,
        )
        q_piece, k_piece, v_piece = (x[part].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys)))
        yield _Piece(q_piece, k_piece, v_piece, terms, rows, keys, sequence)


class _Functions(TypedDict):
    """The user's functions among `Terms`."""

    score_mod: Callable[..., torch.Tensor] | None
    score_gradient: Callable[..., torch.Tensor] | None
    mask_mod: Callable[..., torch.Tensor] | None


def _mods(tensors: Tensors, dtype: torch.dtype) -> _Functions:
    """Give the user's functions, computing in a dtype."""
    import torch

    from tilewise.backends.torch_mods import MaskMod, Pairs, ScoreMod
    from tilewise.problem.mods import captured_of

    score, mask, blocks = ScoreMod.of(tensors, dtype), MaskMod.of(tensors), captured_of(tensors).blocks

    def visible(*pairs: torch.Tensor) -> torch.Tensor:
        shown = True if mask is None else mask(Pairs(*pairs))
        if blocks is None:
            return torch.as_tensor(shown)
        _, head, q_pos, kv_pos = pairs
        shape = (len(pairs[0]), *head.shape[1:3], q_pos.shape[0], kv_pos.shape[1])
        flat = torch.as_tensor(shown).expand(shape).flatten(1, 2)
        listed = blocks.visible(q_pos, kv_pos, flat).expand(flat.shape)
        return listed.reshape(shape)

    return {
        "score_mod": None if score is None else lambda given, *pairs: score(given, Pairs(*pairs)),
        "score_gradient": None
        if score is None
        else lambda given, *rest: score.gradient(given, Pairs(*rest[:4]), rest[4]),
        "mask_mod": None if mask is None and blocks is None else visible,
    }


def _keep(
    problem: Problem, tensors: Tensors, batch: int, len_q: int, len_kv: int, sequence: int
) -> torch.Tensor | None:
    """Draw dropout's mask for a whole batch: (batch, heads_q, len_q, len_kv)."""
    import torch

    from tilewise.problem.philox import is_kept

    if not problem.dropout or tensors.seed is None:
        return None
    device = tensors.q.device
    number = torch.arange(sequence, sequence + batch, device=device)[:, None, None, None]
    heads = torch.arange(problem.heads_q, device=device)[:, None, None]
    q_pos, kv_pos = torch.arange(len_q, device=device)[:, None], torch.arange(len_kv, device=device)
    return is_kept(tensors.seed, problem.dropout, q_pos, kv_pos, heads, number)
