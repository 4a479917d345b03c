"""All-to-all: heads are traded for rows.

A rank that holds n / U rows of all heads gives every other rank of its group the heads that are that one's, and has
all n rows of heads / U heads then; attention over them needs nothing from anybody. The results go back the same way.
Source: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tilewise.distributed.agree import answers
from tilewise.distributed.ranges import Range, joined, size

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from tilewise.distributed.agree import Member

Parts = tuple[tuple[Range, ...], ...]  # the positions that each rank of the group holds


def places(parts: Parts) -> list[list[tuple[Range, Range]]]:
    """Say where each rank's rows stand once all are together: (range of its own rows, range among all), per rank.

    >>> places((((0, 2), (6, 8)), ((2, 6),)))
    [[((0, 2), (0, 2)), ((2, 4), (6, 8))], [((0, 4), (2, 6))]]
    """
    whole = joined(part for held in parts for part in held)
    found: list[list[tuple[Range, Range]]] = []
    for held in parts:
        own, here = 0, []
        for start, stop in held:
            before = sum(min(max(start, a), b) - a for a, b in whole)
            here.append(((own, own + stop - start), (before, before + stop - start)))
            own += stop - start
        found.append(here)
    return found


def gather_rows(x: torch.Tensor, parts: Parts, member: Member) -> torch.Tensor:
    """Turn (batch, heads, own rows, dim) into (batch, heads / U, all rows, dim), rows in the order of positions."""
    batch, heads, rows, dim = x.shape
    ranks, share = len(parts), heads // len(parts)
    sent = x.reshape(batch, ranks, share, rows, dim).movedim(1, 0).contiguous()
    blocks = _trade(sent.flatten(), [sent[0].numel()] * ranks, [batch * share * size(p) * dim for p in parts], member)
    result = x.new_empty((batch, share, sum(map(size, parts)), dim))
    for block, place, held in zip(blocks, places(parts), parts, strict=True):
        block = block.view(batch, share, size(held), dim)
        for own, among in place:
            result[:, :, slice(*among)] = block[:, :, slice(*own)]
    return result


def scatter_rows(x: torch.Tensor, parts: Parts, member: Member) -> torch.Tensor:
    """Turn (batch, heads / U, all rows, dim) back into (batch, heads, own rows, dim)."""
    batch, share, _, dim = x.shape
    ranks, rows = len(parts), size(parts[member.index % len(parts)])
    pieces = [
        torch.cat([x[:, :, slice(*among)] for _, among in place] or [x[:, :, :0]], dim=2).flatten()
        for place in places(parts)
    ]
    blocks = _trade(
        torch.cat(pieces), [piece.numel() for piece in pieces], [batch * share * rows * dim] * ranks, member
    )
    return torch.stack([block.view(batch, share, rows, dim) for block in blocks], dim=1).flatten(1, 2)


def _trade(sent: torch.Tensor, out_sizes: list[int], in_sizes: list[int], member: Member) -> tuple[torch.Tensor, ...]:
    received = sent.new_empty(sum(in_sizes))
    with answers(member):
        dist.all_to_all_single(received, sent, in_sizes, out_sizes, group=member.groups[-1])
    blocks: tuple[torch.Tensor, ...] = received.split(in_sizes)
    return blocks


class Exchange(torch.autograd.Function):
    """Both ways for autograd: (x, parts, member, gather) -> x; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, parts: Parts, member: Member, gather: bool) -> torch.Tensor:
        """Gather rows, or scatter them."""
        ctx.parts, ctx.member, ctx.gather = parts, member, gather  # type: ignore[attr-defined]
        return (gather_rows if gather else scatter_rows)(x, parts, member)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send gradients where their tensors came from."""
        back = Exchange.apply(gradient, ctx.parts, ctx.member, not ctx.gather)  # type: ignore[attr-defined,no-untyped-call]
        return back, None, None, None
