"""What spreading a sequence costs: bytes each way, when they hide behind the arithmetic, and which way to take.

With b the batch, N the length, W ranks, H query heads over G key heads, head dim d and e bytes an element, a rank
receives in the forward pass

    ring         b G (N - N / W) 2 d e           keys and values of all others; moved while the kernels compute
    all-to-all   b (N / W) (1 - 1 / W) (2 H + 2 G) d e   its share of q, k, v and out; moved while nothing computes

and in the backward pass as much again for all-to-all (d_out, dq, dk, dv), twice as much for the ring (k and v, then dk
and dv). Where the mask hides part of a rank's keys from all queries of another, that part does not travel: in a causal
zigzag ring the second half of what earlier ranks hold. Rank 0 then receives all of the above, the last rank half of it,
and the backward pass moves 1.5 times as much on every rank.

A hop of the ring is hidden where its computation lasts longer than its transfer:

    (N / W)^2 2 d H f 2 / rate >= (N / W) 2 G d e / bandwidth, so N / W >= e G rate / (2 f H bandwidth)

with f the visible share of a hop's pairs, 1/2 when causal. Shares of q's rows shrink as 1 / W and so do hops' keys, but
their computation shrinks as 1 / W^2: the longer the part of a rank, the better for the ring.

The rule: the ring where its hops hide; else all-to-all where the heads divide and it moves less; else the ring. On a
mesh of both, all-to-all belongs between the GPUs of one machine, and the ring between machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from tilewise.distributed.ranges import Order, Sharding, size
from tilewise.machine.device import dtype_name, find
from tilewise.machine.shape import Shape, flops
from tilewise.problem.mask import Align, Band
from tilewise.problem.problem import fail

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from tilewise.arguments import Window


class Link(NamedTuple):
    """What joins two ranks: bytes a second in one direction, and seconds until the first one arrives."""

    bandwidth: float
    latency: float = 1e-5


# Bandwidth: data sheets, in one direction. Latency: the order of a message between kernels.
LINKS = {
    "nvlink4": Link(450e9),  # H100, H200
    "nvlink5": Link(900e9),  # B200
    "nvlink3": Link(300e9),  # A100
    "pcie5": Link(63e9),
    "infiniband400": Link(50e9),
}
SHARE = 0.6  # of the data sheet's matrix rate that attention reaches
FLOPS_A_BYTE = 1300  # 0.6 of an H200's rate over NVLink 4: what the rule takes for a mesh whose links nobody named


@dataclass(frozen=True)
class Way:
    """One way to spread a call, and what it costs the busiest rank.

    Args:
        ring, exchange: ranks that keys travel between, and ranks that trade heads for rows.
        ring_bytes: received on the ring, in the forward and in the backward pass.
        exchange_bytes: received from those that trade heads, in either pass.
        hidden_from: the length from which a hop of the ring is hidden; 0 where nothing travels.
        compute, exposed: seconds of the forward and the backward pass: arithmetic, and transfers that it does not hide.
        refusal: why it cannot be, or "".
    """

    ring: int
    exchange: int
    ring_bytes: tuple[int, int]
    exchange_bytes: int
    hidden_from: int
    compute: tuple[float, float]
    exposed: tuple[float, float]
    refusal: str = ""

    @property
    def name(self) -> str:
        """The words for it."""
        if self.exchange == 1:
            return f"ring of {self.ring}"
        return f"all-to-all of {self.exchange}" if self.ring == 1 else f"ring of {self.ring} x {self.exchange}"

    @property
    def forward_bytes(self) -> int:
        """All that a rank receives in the forward pass."""
        return self.ring_bytes[0] + self.exchange_bytes

    @property
    def backward_bytes(self) -> int:
        """All that a rank receives in the backward pass."""
        return self.ring_bytes[1] + self.exchange_bytes

    @property
    def seconds(self) -> float:
        """Both passes."""
        return sum(self.compute) + sum(self.exposed)


def way(
    shape: Shape,
    ring: int,
    exchange: int = 1,
    *,
    rate: float,
    link: Link = LINKS["nvlink4"],
    near: Link = LINKS["nvlink4"],
    order: Order = "zigzag",
) -> Way:
    """Count one way to spread a whole call over ring x exchange ranks.

    Args:
        shape: the call on whole sequences.
        rate: operations a second that one rank's attention reaches.
        link, near: what joins the ranks of the ring, and those that trade heads.

    >>> shape = Shape.square(131072, 128, causal=True, heads=32)
    >>> one = way(shape, 2, rate=6e14)
    >>> one.forward_bytes == 32 * 65536 * 2 * 128 * 2, one.hidden_from < 131072
    (True, True)
    """
    ranks = ring * exchange
    head_row = shape.batch * (shape.dim_qk + shape.dim_v) * shape.itemsize
    keys = _most_keys(shape, ring, exchange, order)
    ring_bytes = keys[0] * head_row * shape.heads_kv // exchange, keys[1] * head_row * shape.heads_kv // exchange
    rows_q, rows_kv = -(-shape.len_q // ranks), -(-shape.len_kv // ranks)
    whole = (rows_q * shape.heads_q + rows_kv * shape.heads_kv) * head_row
    exchange_bytes = whole * (exchange - 1) // exchange
    compute = tuple(flops(shape, backward=backward) / ranks / rate for backward in (False, True))
    exposed = []
    for received, seconds in zip(ring_bytes, compute, strict=True):
        travelling = received / link.bandwidth + (ring - 1) * link.latency
        trading = exchange_bytes / near.bandwidth + 4 * near.latency if exchange > 1 else 0.0
        hidden = seconds * (ring - 1) / ring
        exposed.append(trading + max(0.0, travelling - hidden))
    odd = exchange > 1 and (shape.heads_q % exchange or shape.heads_kv % exchange)
    return Way(
        ring,
        exchange,
        ring_bytes,
        exchange_bytes,
        hidden_length(shape, ring, rate=rate, link=link) if ring > 1 else 0,
        (compute[0], compute[1]),
        (exposed[0], exposed[1]),
        f"{shape.heads_q} and {shape.heads_kv} heads do not divide by {exchange}" if odd else "",
    )


def _most_keys(shape: Shape, ring: int, exchange: int, order: Order) -> tuple[int, int]:
    """Count the keys, and keys and gradients of keys, that reach the busiest of the first, middle and last rank."""
    sharding = Sharding(shape.len_q, shape.len_kv, ring, exchange, order, shape.left, shape.right, shape.offset)
    forward = backward = 0
    for rank in {0, ring // 2, ring - 1}:
        others = [other for other in range(ring) if other != rank]
        fetched = sum(size([sharding.needs(rank, other)]) for other in others)
        forward = max(forward, fetched)
        backward = max(backward, fetched + sum(size([sharding.needs(other, rank)]) for other in others))
    return forward, backward


def hidden_length(shape: Shape, ring: int, *, rate: float, link: Link = LINKS["nvlink4"]) -> int:
    """Give the length from which a forward hop of the ring takes no longer than the arithmetic that it hides behind.

    It solves ``rows^2 c / rate = latency + rows m / bandwidth`` for the rows of a rank of the ring, with c operations a
    pair of rows and m bytes a row. The backward pass, with 2.5 times the operations for twice the bytes, hides sooner.

    >>> shape = Shape.square(8, 128, causal=True, heads=32)
    >>> [hidden_length(shape, ring, rate=6e14, link=Link(450e9, 0.0)) for ring in (8, 64, 1024)]
    [21334, 170667, 2730667]
    """
    share = 0.5 if shape.right == 0 else 1.0
    work = share * 2 * shape.batch * shape.heads_q * (shape.dim_qk + shape.dim_v) / rate
    moved = shape.batch * shape.heads_kv * (shape.dim_qk + shape.dim_v) * shape.itemsize / link.bandwidth
    rows = (moved + math.sqrt(moved * moved + 4 * work * link.latency)) / (2 * work)
    return math.ceil(ring * rows - 1e-6)


def choose(shape: Shape, ranks: int) -> Literal["ring", "all_to_all"]:
    """Choose for a 1-D mesh by the rule above, from the shape alone: so that every rank chooses the same.

    >>> [choose(Shape.square(length, 128, causal=True, heads=32), 8) for length in (131072, 8192)]
    ['ring', 'all_to_all']
    """
    if (
        ranks == 1
        or not shape.pairs
        or shape.len_kv >= hidden_length(shape, ranks, rate=FLOPS_A_BYTE, link=Link(1.0, 0.0))
    ):
        return "ring"
    other = way(shape, 1, ranks, rate=1.0)
    return (
        "all_to_all"
        if not other.refusal and other.forward_bytes < way(shape, ranks, rate=1.0).forward_bytes
        else "ring"
    )


# ---- explain --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """All ways to spread one call; ``str()`` prints them with the rule.

    ``method`` is what the call would take on a 1-D mesh, and "ring x all_to_all" on a 2-D one; ``fastest`` is the way
    that the model holds for the fastest on these links.
    """

    shape: Shape
    dtype: str
    ranks: int
    method: str
    ways: tuple[Way, ...]
    rate: float
    link: Link
    near: Link
    order: Order
    chosen: Way = field(repr=False)

    @property
    def fastest(self) -> Way:
        """The way with the least time."""
        return min((one for one in self.ways if not one.refusal), key=lambda one: one.seconds)

    def __str__(self) -> str:
        shape = self.shape
        mask = "causal" if shape.left is None and shape.right == 0 else f"left {shape.left}, right {shape.right}"
        head = (
            f"attention over {self.ranks} ranks: N={shape.len_kv:,}, {shape.len_q // self.ranks:,} rows a rank, "
            f"{shape.heads_q} heads over {shape.heads_kv}, d={shape.dim_qk}, {self.dtype}, {mask}, {self.order}"
        )
        speeds = (
            f"  {self.rate / 1e12:.0f} TFLOP/s a rank; ring over {self.link.bandwidth / 1e9:.0f} GB/s, "
            f"all-to-all over {self.near.bandwidth / 1e9:.0f} GB/s, each way"
        )
        lines = [
            head,
            speeds,
            f"  {'way':<18}{'MiB fwd':>11}{'MiB bwd':>11}{'hidden from N':>15}{'compute ms':>12}{'exposed ms':>12}",
        ]
        for one in self.ways:
            if one.refusal:
                lines.append(f"  {one.name:<18}  {one.refusal}")
                continue
            hidden = f"{one.hidden_from:,}" if one.hidden_from else "-"
            lines.append(
                f"  {one.name:<18}{one.forward_bytes / 2**20:>11,.1f}{one.backward_bytes / 2**20:>11,.1f}{hidden:>15}"
                f"{1e3 * sum(one.compute):>12,.2f}{1e3 * sum(one.exposed):>12,.2f}"
            )
        lines += [
            "  rule    the ring where its hops hide behind the arithmetic; else all-to-all where the heads divide and",
            "          it moves less; else the ring. On a 2-D mesh all-to-all inside a machine, the ring between",
            f"  method  {self.method}: {self.chosen.name}; fastest by this model: {self.fastest.name}",
        ]
        return "\n".join(lines)


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: DeviceMesh | tuple[int, ...] | int,
    causal: bool = False,
    window: Window | None = None,
    align: Align = "bottom_right",
    order: Order = "zigzag",
    device: str = "H200",
    rate: float | None = None,
    link: str | Link = "nvlink4",
    near: str | Link = "nvlink4",
) -> Plan:
    """Say what `context_parallel_attention` would move and how long it takes, for every way to spread the call.

    Nothing is computed and nobody is asked; q, k and v may be meta tensors, and the mesh only its sizes.

    Args:
        q, k, v: one rank's part, (batch, heads, rows, dim); every rank is taken to hold as many rows.
        mesh: a DeviceMesh, its sizes (ring, all-to-all), or a number of ranks.
        causal, window, align, order: as in the call.
        device: whose data sheet gives the rate, 0.6 of which attention is taken to reach; rate: or the rate itself,
            operations a second.
        link, near: what joins the ranks of the ring, and those that trade heads: a name of `LINKS` or a Link.

    Raises:
        ValueError: an unknown link or device.

    >>> import torch
    >>> q = torch.empty(1, 32, 16384, 128, dtype=torch.bfloat16, device="meta")
    >>> plan = explain(q, q, q, mesh=8, causal=True)
    >>> plan.method, [one.name for one in plan.ways]
    ('ring', ['ring of 8', 'ring of 4 x 2', 'ring of 2 x 4', 'all-to-all of 8'])
    """
    sizes = (mesh,) if isinstance(mesh, int) else mesh if isinstance(mesh, tuple) else tuple(mesh.mesh.shape)
    ranks = math.prod(sizes)
    band = Band.of(causal, window, align)
    len_q, len_kv = q.shape[2] * ranks, k.shape[2] * ranks
    dims = q.shape[3], v.shape[3], q.element_size()
    shape = Shape(
        q.shape[0], q.shape[1], k.shape[1], len_q, len_kv, *dims, band.left, band.right, band.offset(len_q, len_kv)
    )
    dtype = dtype_name(q.dtype)
    rate = rate or SHARE * find(device).rates[dtype]
    over, inside = _link(link), _link(near)

    def count(ring: int, exchange: int) -> Way:
        return way(shape, ring, exchange, rate=rate, link=over if ring > 1 else inside, near=inside, order=order)

    ways = tuple(count(ranks // inner, inner) for inner in range(1, ranks + 1) if ranks % inner == 0)
    method = choose(shape, ranks) if len(sizes) == 1 else "ring x all_to_all"
    taken = sizes if len(sizes) == 2 else (1, ranks) if method == "all_to_all" else (ranks, 1)
    chosen = next(one for one in ways if (one.ring, one.exchange) == taken)
    shown = tuple(one for one in ways if not one.refusal or one is chosen or one.ring == 1)
    return Plan(shape, dtype, ranks, method, shown, rate, over, inside, order, replace(chosen))


def _link(link: str | Link) -> Link:
    if isinstance(link, Link):
        return link
    if link not in LINKS:
        raise fail(f"link must be one of {', '.join(LINKS)}, or a Link", repr(link), "Give its bandwidth each way")
    return LINKS[link]
