"""The ring: keys and values travel, partial results are merged, gradients travel home.

In step s every rank computes with the keys of the rank s places before it, and those of step s + 1 are on their way
meanwhile. Each block goes straight from its owner to the rank that needs it, and only the part that is needed: a hop
that no window reaches moves nothing. In the backward pass each rank receives the same keys again, differentiates its
queries' part of the loss with the saved lse of the whole row, and sends dk and dv home, where they are added up.

The heads are taken in groups whose keys and values fill `HOP_BYTES`: what a hop needs beyond the results is as large as
a group, not as the whole. Messages of one group travel while another computes.

Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers" (arXiv:2310.01889); the order of
chunks as in Brandon et al. 2023, "Striped Attention" (arXiv:2311.09431), with two long stripes a rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from tilewise import autograd, dispatch
from tilewise.api import merge
from tilewise.backends.outputs import sum_dtype
from tilewise.distributed.agree import answers
from tilewise.problem.problem import Grads, Needs, Options, Tensors

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from tilewise.distributed.agree import Member
    from tilewise.distributed.ranges import Piece, Range, Sharding

HOP_BYTES = 128 * 2**20  # keys and values of a hop: large enough to fill a GPU and a link, small beside the whole
MERGE_BYTES = 64 * 2**20  # of float32 results that are merged at a time


class Score(NamedTuple):
    """How scores are made and by whom, the same in every hop."""

    scale: float | None
    softcap: float
    deterministic: bool
    backend: str | None


# ---- one call of a hop ----------------------------------------------------------------------------------------------


def _forward(piece: Piece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Score) -> tuple[torch.Tensor, ...]:
    """Compute (out, lse) of a piece's rows over its keys; all tensors are (batch, heads, len, dim)."""
    tensors, options = _call(piece, q, k, v, score)
    out, lse = autograd.run(tensors, options)
    return (out, lse) if piece.bounds is None else (out.transpose(0, 1)[None], lse[None])


def _backward(piece: Piece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Score, row: Row) -> Grads:
    """Differentiate a piece. ``row`` holds what is known of whole rows: with their lse the pieces' gradients add up."""
    tensors, options = _call(piece, q, k, v, score)
    out, lse, d_out, d_lse = (None if x is None else x[:, :, slice(*piece.rows)] for x in row)
    if out is None or lse is None:
        raise TypeError("a row has no results")
    if piece.bounds is not None:
        out, d_out = out[0].transpose(0, 1), None if d_out is None else d_out[0].transpose(0, 1)
        lse, d_lse = lse[0], None if d_lse is None else d_lse[0]
    problem = autograd.problem_for(tensors, options)
    grads = dispatch.backward(problem, tensors, out, lse, d_out, d_lse, Needs(), options.backend)
    if piece.bounds is None:
        return grads
    return Grads(*(None if x is None else x.transpose(0, 1)[None] for x in grads))


def _call(piece: Piece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Score) -> tuple[Tensors, Options]:
    q, k, v = q[:, :, slice(*piece.rows)], k[:, :, slice(*piece.keys)], v[:, :, slice(*piece.keys)]
    options = Options(
        window_left=piece.left,
        window_right=piece.right,
        align="top_left",
        scale=score.scale,
        softcap=score.softcap,
        deterministic=score.deterministic,
        return_lse=True,
        backend=score.backend,
    )
    if piece.bounds is None:
        return Tensors(q, k, v), options
    longest = max(stop - start for start, stop in pairwise(piece.bounds))
    bounds = _on_device(piece.bounds, q.device)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    tensors = Tensors(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    return tensors, options._replace(max_seqlen_q=longest, max_seqlen_k=longest)


@lru_cache(maxsize=64)
def _on_device(bounds: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32, device=device)


class Row(NamedTuple):
    """Results of whole rows and the gradients that arrive for them: (batch, heads, len[, dim_v])."""

    out: torch.Tensor | None
    lse: torch.Tensor | None
    d_out: torch.Tensor | None
    d_lse: torch.Tensor | None


@dataclass
class _Merged:
    """Partial results of some heads, joined as they come; float32 or better."""

    out: torch.Tensor
    lse: torch.Tensor
    written: list[Range] = field(default_factory=list)

    @staticmethod
    def empty(q: torch.Tensor, dim_v: int) -> _Merged:
        """Start with rows that see nothing."""
        exact = sum_dtype(q.dtype)
        out = torch.zeros((*q.shape[:3], dim_v), dtype=exact, device=q.device)
        return _Merged(out, torch.full(q.shape[:3], -math.inf, dtype=exact, device=q.device))

    def add(self, rows: Range, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Join a part into its rows, a few heads at a time; a part that is the first of its rows is copied."""
        first = all(rows[1] <= start or stop <= rows[0] for start, stop in self.written)
        self.written.append(rows)
        own_out, own_lse = self.out[:, :, slice(*rows)], self.lse[:, :, slice(*rows)]
        if first:
            own_out.copy_(out)
            own_lse.copy_(lse)
            return
        step = max(1, MERGE_BYTES // max(own_out[:, :1].numel() * own_out.element_size(), 1))
        for head in range(0, out.shape[1], step):
            part = slice(head, head + step)
            outs = [own_out[:, part], out[:, part].to(own_out.dtype)]
            merged, merged_lse = merge(outs, [own_lse[:, part], lse[:, part]])
            own_out[:, part].copy_(merged)
            own_lse[:, part].copy_(merged_lse)


# ---- what travels ---------------------------------------------------------------------------------------------------


class Transfer:
    """Tensors under way from one rank while others go to another; ``wait`` gives what arrived.

    The sender's tensors are kept until then. On a GPU waiting holds up the stream, not the host.
    """

    def __init__(self, ring: Ring, sent: list[torch.Tensor], to: int, received: list[torch.Tensor], of: int) -> None:
        self.ring, self.sent, self.received = ring, sent, received
        group = ring.member.groups[0]
        to, of = ring.global_rank(to), ring.global_rank(of)
        ops = [dist.P2POp(dist.isend, x, to, group) for x in sent]
        ops += [dist.P2POp(dist.irecv, x, of, group) for x in received]
        with answers(ring.member):
            self.works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> list[torch.Tensor]:
        """Wait for everything sent and received."""
        with answers(self.ring.member):
            for work in self.works:
                work.wait()
        self.works, self.sent = [], []
        return self.received


@dataclass(frozen=True)
class Hop:
    """One step for one group of heads; heads count in k."""

    heads: Range
    step: int


@dataclass(frozen=True)
class Ring:
    """One call on the ring: who this rank is and what is whose."""

    member: Member
    sharding: Sharding

    @property
    def rank(self) -> int:
        """This rank's place."""
        return self.member.index // self.sharding.exchange

    @property
    def size(self) -> int:
        """How many there are."""
        return self.sharding.ring

    def global_rank(self, place: int) -> int:
        """Give the rank at a place of this ring."""
        return self.member.ranks[place * self.sharding.exchange + self.member.index % self.sharding.exchange]

    def source(self, step: int) -> int:
        """Say whose keys this rank computes with in a step."""
        return (self.rank - step) % self.size

    def reader(self, step: int) -> int:
        """Say who computes with this rank's keys in a step."""
        return (self.rank + step) % self.size

    def hops(self, k: torch.Tensor, v: torch.Tensor) -> list[Hop]:
        """Give all hops in order, head group by head group; every rank finds the same list."""
        batch, heads = k.shape[:2]
        longest = -(-self.sharding.length_kv // self.size)
        head_bytes = batch * longest * (k.shape[-1] + v.shape[-1]) * k.element_size()
        together = min(heads, -(-HOP_BYTES // max(head_bytes, 1)))
        starts = range(0, heads, max(together, 1))
        return [Hop((start, min(start + together, heads)), step) for start in starts for step in range(self.size)]

    def fetch(self, hop: Hop, k: torch.Tensor, v: torch.Tensor) -> Transfer | None:
        """Send a hop's keys and values on their way: this rank's to their reader, the source's to this rank."""
        if hop.step == 0:
            return None
        source, reader = self.source(hop.step), self.reader(hop.step)
        heads, sent, wanted = slice(*hop.heads), self.sharding.needs(reader, self.rank), self.needs(hop)
        count = wanted[1] - wanted[0]
        return Transfer(
            self,
            [x[:, heads, slice(*sent)].contiguous() for x in (k, v)] if sent[1] else [],
            reader,
            [_like(x, hop, count) for x in (k, v)] if count else [],
            source,
        )

    def give_back(self, hop: Hop, k: torch.Tensor, v: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Transfer:
        """Send a hop's gradients home, in the dtype of k, and have this rank's own come from their reader."""
        start, stop = self.sharding.needs(self.reader(hop.step), self.rank)
        return Transfer(
            self,
            [x.to(k.dtype).contiguous() for x in (dk, dv)] if dk.shape[2] else [],
            self.source(hop.step),
            [_like(x, hop, stop - start) for x in (k, v)] if stop else [],
            self.reader(hop.step),
        )

    def needs(self, hop: Hop) -> Range:
        """Give the source's keys that this rank needs in a hop."""
        return self.sharding.needs(self.rank, self.source(hop.step))

    def pieces(self, hop: Hop) -> list[Piece]:
        """Give a hop's calls, their keys counted from the first that was sent; at home from the first there is."""
        start = self.needs(hop)[0] if hop.step else 0
        return [
            piece._replace(keys=(piece.keys[0] - start, piece.keys[1] - start))
            for piece in self.sharding.hop(self.rank, self.source(hop.step))
        ]


def _like(x: torch.Tensor, hop: Hop, length: int) -> torch.Tensor:
    return torch.empty((x.shape[0], hop.heads[1] - hop.heads[0], length, x.shape[3]), dtype=x.dtype, device=x.device)


# ---- the two passes -------------------------------------------------------------------------------------------------


def ring_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, score: Score
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out (batch, heads_q, rows, dim_v) and lse (batch, heads_q, rows) of this rank's rows."""
    group = q.shape[1] // max(k.shape[1], 1)
    out, lse = q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3], dtype=sum_dtype(q.dtype))
    merged = _Merged.empty(q[:, :0], v.shape[-1])
    hops = ring.hops(k, v)
    coming: Transfer | None = None
    for index, hop in enumerate(hops):
        following = ring.fetch(hops[index + 1], k, v) if index + 1 < len(hops) else None
        heads, heads_q = slice(*hop.heads), slice(hop.heads[0] * group, hop.heads[1] * group)
        if hop.step == 0:
            merged = _Merged.empty(q[:, heads_q], v.shape[-1])
        keys, values = _arrived(coming, k[:, heads], v[:, heads])
        for piece in ring.pieces(hop):
            merged.add(piece.rows, *_forward(piece, q[:, heads_q], keys, values, score))
        if hop.step == ring.size - 1:
            out[:, heads_q].copy_(merged.out)
            lse[:, heads_q].copy_(merged.lse)
        coming = following
    return out, lse


def _arrived(coming: Transfer | None, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the keys and values of a hop: this rank's own in the first, what was sent in the others."""
    if coming is None:
        return k, v
    received = coming.wait()
    return (received[0], received[1]) if received else (k[:, :, :0], v[:, :, :0])


class _Home:
    """The gradients of some heads' keys and values, added up where those live; float32 or better."""

    def __init__(self, hop: Hop, k: torch.Tensor, v: torch.Tensor) -> None:
        heads = slice(*hop.heads)
        self.heads = heads
        self.sums = [torch.zeros_like(x[:, heads], dtype=sum_dtype(x.dtype)) for x in (k, v)]

    def add(self, keys: Range, grads: list[torch.Tensor]) -> None:
        """Add the gradients of a range of this rank's keys."""
        for total, grad in zip(self.sums, grads, strict=True):
            total[:, :, slice(*keys)].add_(grad)


def ring_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: Row, ring: Ring, score: Score
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute dq, dk and dv of this rank's rows and keys."""
    group = q.shape[1] // max(k.shape[1], 1)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    hops = ring.hops(k, v)
    coming: Transfer | None = None
    returning: tuple[Hop, _Home, Transfer] | None = None
    home = _Home(Hop((0, 0), 0), k, v)
    sums = q[:, :0]

    def settle(hop: Hop, home: _Home, transfer: Transfer | None) -> None:
        """Add what came home; after a head group's last step its gradients are whole."""
        received = transfer.wait() if transfer is not None else []
        if received:
            home.add(ring.sharding.needs(ring.reader(hop.step), ring.rank), received)
        if hop.step == ring.size - 1:
            for whole, total in zip((dk, dv), home.sums, strict=True):
                whole[:, home.heads].copy_(total)

    for index, hop in enumerate(hops):
        following = ring.fetch(hops[index + 1], k, v) if index + 1 < len(hops) else None
        heads, heads_q = slice(*hop.heads), slice(hop.heads[0] * group, hop.heads[1] * group)
        if hop.step == 0:
            home = _Home(hop, k, v)
            sums = torch.zeros_like(q[:, heads_q], dtype=sum_dtype(q.dtype))
        keys, values = _arrived(coming, k[:, heads], v[:, heads])
        part = Row(*(None if x is None else x[:, heads_q] for x in row))
        found = _hop_gradients(ring.pieces(hop), q[:, heads_q], keys, values, part, score, sums)
        if hop.step == 0:
            home.add((0, k.shape[2]), list(found))
        sent = None if hop.step == 0 else (hop, home, ring.give_back(hop, k, v, *found))
        if returning is not None:
            settle(*returning)
        if hop.step == ring.size - 1:
            dq[:, heads_q].copy_(sums)
        if hop.step == 0 and ring.size == 1:
            settle(hop, home, None)
        returning, coming = sent, following
    if returning is not None:
        settle(*returning)
    return dq, dk, dv


def _hop_gradients(
    pieces: list[Piece],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row: Row,
    score: Score,
    dq: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiate a hop: add to dq, and give dk and dv of the keys at hand."""
    if len(pieces) == 1 and pieces[0].keys == (0, k.shape[2]):  # no sum, so no float32
        grads = _backward(pieces[0], q, k, v, score, row)
        return _add(grads, pieces[0], dq, [])
    sums = [torch.zeros_like(x, dtype=sum_dtype(x.dtype)) for x in (k, v)]
    for piece in pieces:
        _add(_backward(piece, q, k, v, score, row), piece, dq, sums)
    return sums[0], sums[1]


def _add(grads: Grads, piece: Piece, dq: torch.Tensor, sums: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    if grads.dq is None or grads.dk is None or grads.dv is None:
        raise TypeError("a backend left out a gradient")
    dq[:, :, slice(*piece.rows)].add_(grads.dq)
    for total, grad in zip(sums, (grads.dk, grads.dv), strict=False):
        total[:, :, slice(*piece.keys)].add_(grad)
    return grads.dk, grads.dv


class RingAttention(torch.autograd.Function):
    """The ring for autograd: (q, k, v, ring, score) -> (out, lse)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run, and keep what the gradients need."""
        out, lse = ring_forward(q, k, v, ring, score)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.score = ring, score  # type: ignore[attr-defined]
        return out, lse

    @staticmethod
    def backward(
        ctx: FunctionCtx, d_out: torch.Tensor | None, d_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Differentiate. What has no gradient here may have one elsewhere, so every rank must take part."""
        if torch.is_grad_enabled():  # torch's own once_differentiable would let a zero pass for the second derivative
            raise NotImplementedError(
                "context_parallel_attention has no second derivative; got create_graph=True. tilewise.attention has one"
            )
        q, k, v, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        if d_out is None:
            d_out = torch.zeros_like(out)
        row = Row(out, lse, d_out, d_lse)
        grads = ring_backward(q, k, v, row, ctx.ring, ctx.score)  # type: ignore[attr-defined]
        return (*grads, None, None)
