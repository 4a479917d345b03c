"""One sequence over many ranks: the public function, and the helpers that split a sequence and join it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast, overload

import torch
import torch.distributed as dist

from tilewise import autograd, dispatch
from tilewise.arguments import Window, autocast, check_rank, check_tensors, sides
from tilewise.distributed.agree import Description, Member, agree, answers, join, outside_graphs
from tilewise.distributed.cost import choose
from tilewise.distributed.exchange import Exchange
from tilewise.distributed.ranges import ORDERS, Order, Range, Sharding, rows_of, size
from tilewise.distributed.ring import Ring, RingAttention, Score
from tilewise.machine.shape import Shape
from tilewise.problem.mask import Band
from tilewise.problem.problem import Options, Tensors, fail, mismatch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tilewise.problem.mask import Align
    from tilewise.problem.problem import Layout

Method = Literal["ring", "all_to_all"]
METHODS: tuple[Method, ...] = ("ring", "all_to_all")


# ---- splitting ------------------------------------------------------------------------------------------------------


def _held(length: int, mesh: DeviceMesh, order: Order) -> tuple[Range, ...]:
    if order not in ORDERS:
        raise fail(f"order must be one of {', '.join(ORDERS)}", repr(order), "Use the same for split and attention")
    ranks = mesh.mesh.flatten().tolist()
    if dist.get_rank() not in ranks:
        raise fail(f"rank {dist.get_rank()} is not in the mesh", ranks, "Call only on ranks of the mesh")
    return rows_of(ranks.index(dist.get_rank()), len(ranks), length, order)


def split(x: torch.Tensor, mesh: DeviceMesh, *, dim: int, order: Order = "zigzag") -> torch.Tensor:
    """Take this rank's part of a tensor that every rank has whole, such as tokens or labels; differentiable.

    Args:
        x: any shape; ``dim`` is its sequence axis, of any length.
        mesh: 1-D, or 2-D as (ring, all-to-all).
        order: "zigzag", a chunk from the front and its mirror image from the back, for causal attention; "contiguous"
            for narrow windows. Attention must be called with the same.

    Raises:
        ValueError: an unknown order, or a rank outside the mesh.
    """
    parts = [x.narrow(dim, start, stop - start) for start, stop in _held(x.shape[dim], mesh, order)]
    return torch.cat(parts or [x.narrow(dim, 0, 0)], dim=dim)


def positions(length: int, mesh: DeviceMesh, *, order: Order = "zigzag") -> torch.Tensor:
    """Give the positions (rows,) int64 of this rank's rows in a sequence of ``length``, for rotary and its like."""
    return split(torch.arange(length, device=mesh.device_type), mesh, dim=0, order=order)


def unsplit(x: torch.Tensor, mesh: DeviceMesh, *, dim: int, order: Order = "zigzag") -> torch.Tensor:
    """Join the parts of all ranks: each gets the whole, without a gradient; the inverse of `split`.

    Args:
        x: this rank's part; only ``dim`` may differ between ranks.
        mesh, dim, order: as in `split`.

    Raises:
        ValueError: parts whose lengths are not those of `split`.
    """
    member = join(mesh)
    moved = x.detach().movedim(dim, 0)
    rest = tuple(moved.shape[1:])
    mine = Description(
        (("shape beside the sequence axis", f"{rest}"), ("dtype", f"{x.dtype}")), (("rows", len(moved)),)
    )
    lengths = [dict(one.own)["rows"] for one in agree(member, mine)]
    total, ranks = sum(lengths), len(lengths)
    parts = [rows_of(rank, ranks, total, order) for rank in range(ranks)]
    if [size(part) for part in parts] != lengths:
        got = f"{lengths} in place of {[size(part) for part in parts]}"
        raise fail(f"parts must have the lengths that split gives {total} rows in {order} order", got, "Use split")
    padded = moved.new_zeros((max(lengths), *rest))
    padded[: len(moved)] = moved
    whole = moved.new_empty((total, *rest))
    for rank, block in enumerate(gather(padded, member)):
        row = 0
        for start, stop in parts[rank]:
            whole[start:stop] = block[row : row + stop - start]
            row += stop - start
    return whole.movedim(0, dim)


def gather(x: torch.Tensor, member: Member) -> list[torch.Tensor]:
    """Give what every rank of the mesh has, in the mesh's order, axis by axis."""
    for group in reversed(member.groups):
        blocks = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        with answers(member):
            dist.all_gather(blocks, x.contiguous(), group=group)
        x = torch.stack(blocks)
    return list(x.flatten(0, len(member.groups) - 1))


# ---- attention ------------------------------------------------------------------------------------------------------


@overload
def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: DeviceMesh,
    causal: bool = ...,
    window: Window | None = ...,
    align: Align = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    cu_seqlens: Sequence[int] | torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    layout: Layout = ...,
    method: Method | None = ...,
    order: Order = ...,
    backend: str | None = ...,
) -> torch.Tensor: ...
@overload
def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: DeviceMesh,
    causal: bool = ...,
    window: Window | None = ...,
    align: Align = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    cu_seqlens: Sequence[int] | torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: bool,
    layout: Layout = ...,
    method: Method | None = ...,
    order: Order = ...,
    backend: str | None = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@outside_graphs
def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: DeviceMesh,
    causal: bool = False,
    window: Window | None = None,
    align: Align = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    layout: Layout = "bhsd",
    method: Method | None = None,
    order: Order = "zigzag",
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute exact attention over one sequence that is spread over ranks; see `tilewise.attention` for the formula.

    Every rank of the mesh calls with its own rows, as `split` gives them, and gets the results of its own rows. Where
    one rank's tensors want a gradient all ranks' must, and all must run the backward pass.

    Args:
        q: (batch, heads_q, own rows, dim_qk); with cu_seqlens (own rows, heads_q, dim_qk).
        k: (batch, heads_kv, own keys, dim_qk), v: likewise with dim_v; with cu_seqlens as q.
        mesh: a 1-D DeviceMesh, or a 2-D one as (ring, all-to-all): rows of ranks that trade heads, and a ring of rows.
        causal, window, align, scale, softcap: as in `tilewise.attention`, over the whole sequence.
        cu_seqlens: cumulative lengths of documents packed end to end, of the whole sequence, as integers or a tensor
            on the CPU: the host plans by them.
        deterministic: gradients bitwise equal over runs.
        return_lse: also return lse.
        layout: "bhsd" or "bshd"; not with cu_seqlens.
        method: for a 1-D mesh "ring" or "all_to_all"; None takes what `explain` recommends, on every rank the same.
        order: as given to `split`.
        backend: computes the parts; None has each chosen.

    Returns:
        out in q's shape with dim_v; with return_lse also lse (batch, heads_q, own rows), with cu_seqlens
        (heads_q, own rows), natural log, differentiable.

    Raises:
        TypeError, ValueError: bad input, alike on every rank of the mesh, before anything is computed.
        RuntimeError: a rank died, or did not come to this call within the group's timeout.

    Source: Liu et al., arXiv:2310.01889 (ring); Jacobs et al., arXiv:2309.14509 (all-to-all).

    Example, for ``torchrun --nproc-per-node 2``::

        mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))
        q, k, v = (split(x, mesh, dim=2) for x in (q, k, v))  # (batch, heads, len, dim)
        out = context_parallel_attention(q, k, v, mesh=mesh, causal=True)
    """
    member = join(mesh)
    packed = cu_seqlens is not None
    failure, mine, bounds = "", Description(), None
    try:
        check_tensors(q=q, k=k, v=v)
        q, k, v = autocast(q, k, v)
        q, k, v = _as_bhsd(q, k, v, layout, packed)
        bounds = _bounds(cu_seqlens)
        left, right = sides(window)
        options = Options(causal, left, right, align, scale, softcap or 0.0, backend=backend)
        dispatch.choose(autograd.problem_for(Tensors(q, k, v), options), backend)
        mine = _description(q, k, v, options, bounds, mesh, (deterministic, return_lse, layout, method, order))
    except (TypeError, ValueError) as error:
        failure = f"{error}"
        mine = Description(failure=failure)
    found = agree(member, mine)
    sharding = _plan(found, q, k, v, mesh, bounds, Band.of(causal, window, align), method, order)
    # Settled now: the backward pass may run in a thread that does not see use_backend.
    score = Score(scale, softcap or 0.0, deterministic, backend or dispatch.requested())
    out, lse = _attend(q, k, v, Ring(member, sharding), score, return_lse)
    if packed:
        out, lse = out[0].transpose(0, 1), lse[0]
    elif layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _as_bhsd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, packed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """View everything as (batch, heads, len, dim)."""
    if layout not in ("bhsd", "bshd"):
        raise fail('layout must be "bhsd" or "bshd"', repr(layout), "Name the order of q's axes")
    check_rank(3 if packed else 4, q=q, k=k, v=v)
    if packed:
        return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    if layout == "bshd":
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q, k, v


def _bounds(cu_seqlens: Sequence[int] | torch.Tensor | None) -> tuple[int, ...] | None:
    """Take the documents' bounds as plain integers."""
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.device.type != "cpu":
        mend = "Keep a copy on the CPU: the host plans by it, and must not wait for the device"
        raise fail("cu_seqlens must be integers or a tensor on the CPU", f"{cu_seqlens.device}", mend)
    bounds = tuple(cu_seqlens.flatten().tolist() if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens)
    if any(isinstance(bound, bool) or not isinstance(bound, int) for bound in bounds):
        raise mismatch("cu_seqlens must be integers", f"{bounds}", "Pass [0, len_0, len_0 + len_1, ...]")
    if not bounds or bounds[0] != 0 or list(bounds) != sorted(bounds):
        raise fail("cu_seqlens must start at 0 and never fall", list(bounds), "Pass the cumulative sum of the lengths")
    return bounds


def _description(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    bounds: tuple[int, ...] | None,
    mesh: DeviceMesh,
    others: tuple[object, ...],
) -> Description:
    """Describe this rank's call to the others."""
    if q.device.type != mesh.device_type:
        raise fail(f"tensors must be on the mesh's devices, {mesh.device_type}", f"{q.device}", "Move them there")
    deterministic, return_lse, layout, method, order = others
    if order not in ORDERS:
        raise fail(f"order must be one of {', '.join(ORDERS)}", repr(order), "Use what split was given")
    if method not in (None, *METHODS) or (mesh.ndim == 2 and method is not None):
        mend = "A 2-D mesh combines both, so leave it None there"
        raise fail(f"method must be None or, for a 1-D mesh, one of {', '.join(METHODS)}", repr(method), mend)
    grad = torch.is_grad_enabled()
    wanted = [name for name, x in (("q", q), ("k", k), ("v", v)) if grad and x.requires_grad]
    common = {
        "batch, heads and head dim of q": (*q.shape[:2], q.shape[3]),
        "batch, heads and head dim of k": (*k.shape[:2], k.shape[3]),
        "batch, heads and head dim of v": (*v.shape[:2], v.shape[3]),
        "dtype": q.dtype,
        "options": options._replace(backend=None),
        "cu_seqlens": bounds,
        "tensors that want a gradient": wanted,
        "deterministic": deterministic,
        "return_lse": return_lse,
        "layout": layout,
        "method": method,
        "order": order,
    }
    return Description(
        tuple((name, str(value)) for name, value in common.items()), (("queries", q.shape[2]), ("keys", k.shape[2]))
    )


def _plan(
    found: tuple[Description, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mesh: DeviceMesh,
    bounds: tuple[int, ...] | None,
    band: Band,
    method: Method | None,
    order: Order,
) -> Sharding:
    """Turn what the ranks agreed on into who holds and sees what; what is wrong here is wrong on all ranks alike."""
    lengths = {name: [dict(one.own)[name] for one in found] for name in ("queries", "keys")}
    for name, held in lengths.items():
        want = [size(rows_of(rank, len(held), sum(held), order)) for rank in range(len(held))]
        if held != want:
            got = f"{held} in place of {want}"
            raise fail(f"ranks must hold the {name} that split gives them in {order} order", got, "Use split")
    total_q, total_kv = sum(lengths["queries"]), sum(lengths["keys"])
    if bounds is not None and (total_q != total_kv or bounds[-1] > total_q):
        got = f"{total_q} queries, {total_kv} keys, cu_seqlens to {bounds[-1]}"
        raise fail("packed documents have as many queries as keys, and end where those end", got, "Check the lengths")
    offset = 0 if bounds is not None else band.offset(total_q, total_kv)
    dims = q.shape[3], v.shape[3], q.element_size()
    shape = Shape(q.shape[0], q.shape[1], k.shape[1], total_q, total_kv, *dims, band.left, band.right, offset)
    ranks = len(found)
    if mesh.ndim == 2:
        ring, exchange = mesh.mesh.shape
    else:
        ring, exchange = (1, ranks) if (method or choose(shape, ranks)) == "all_to_all" else (ranks, 1)
    if q.shape[1] % exchange or k.shape[1] % exchange:
        got = f"{q.shape[1]} and {k.shape[1]} heads on {exchange} ranks"
        raise fail("all-to-all needs heads of q and k that divide by its ranks", got, 'Use method="ring"')
    return Sharding(total_q, total_kv, ring, exchange, order, band.left, band.right, offset, bounds)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, score: Score, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trade heads for rows where there is anybody to trade with, go round the ring, and trade back."""
    member, sharding = ring.member, ring.sharding
    if sharding.exchange == 1:
        return cast("tuple[torch.Tensor, torch.Tensor]", RingAttention.apply(q, k, v, ring, score))  # type: ignore[no-untyped-call]
    first = ring.rank * sharding.exchange
    members = range(first, first + sharding.exchange)
    rows, keys = (
        tuple(sharding.of_member(one, length) for one in members) for length in (sharding.length_q, sharding.length_kv)
    )
    q = Exchange.apply(q, rows, member, True)  # type: ignore[no-untyped-call]
    k, v = (Exchange.apply(x, keys, member, True) for x in (k, v))  # type: ignore[no-untyped-call]
    out, lse = RingAttention.apply(q, k, v, ring, score)  # type: ignore[no-untyped-call]
    out = Exchange.apply(out, rows, member, False)  # type: ignore[no-untyped-call]
    if return_lse:
        lse = Exchange.apply(lse[..., None], rows, member, False)[..., 0]  # type: ignore[no-untyped-call]
    return out, lse
