"""What each way of computing attention moves, and the least time that takes on a device: `tilewise count`.

`machine/cost.py` counts; here its counts are named, each with its formula and its source, and set side by side.

>>> {way.name: way.cost(Question()).elements for way in FORWARD[:1]}
{'naive': 1082130432}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilewise.bench.show import Table, mebibytes, milliseconds, three
from tilewise.machine import cost, detect
from tilewise.machine.cost import Cost
from tilewise.machine.device import DEVICES, ITEMSIZE, KIB, Device, dtype_name, find
from tilewise.machine.shape import Shape, visits

HERE = "here"  # the device at hand, with its speeds as measured


@dataclass(frozen=True)
class Question:
    """One call to count.

    Args:
        length: queries, and keys.
        dim: head dim.
        batch, heads_q, heads_kv: sequences, query heads, key heads.
        dtype: of q, k, v and out.
        causal: hide keys behind the diagonal.
        block_q, block_kv: the tile of the tiled ways and of FA-1's loops.

    Raises:
        ValueError: a size below 1, or a dtype that is not known.
    """

    length: int = 16384
    dim: int = 128
    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    dtype: str = "float16"
    causal: bool = False
    block_q: int = 128
    block_kv: int = 64

    def __post_init__(self) -> None:
        sizes = {"n": self.length, "d": self.dim, "batch": self.batch, "heads": self.heads_q}
        sizes |= {"heads-kv": self.heads_kv, "block-q": self.block_q, "block-kv": self.block_kv}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads must be a multiple of heads-kv, got {self.heads_q} and {self.heads_kv}")
        dtype_name(self.dtype)

    @property
    def shape(self) -> Shape:
        """The call as the counting model takes it."""
        return self._with_queries(self.length)

    @property
    def last_query(self) -> Shape:
        """The same call with one query, the newest, which sees all keys: a step of decoding."""
        return self._with_queries(1)

    def _with_queries(self, len_q: int) -> Shape:
        return Shape(
            self.batch,
            self.heads_q,
            self.heads_kv,
            len_q,
            self.length,
            self.dim,
            self.dim,
            ITEMSIZE[dtype_name(self.dtype)],
            None,
            0 if self.causal else None,
            self.length - len_q,
        )

    def __str__(self) -> str:
        sizes = [f"B={self.batch}", f"H={self.heads_q}"] + [f"H_kv={self.heads_kv}"] * (self.heads_kv != self.heads_q)
        sizes += [f"N={self.length}", f"d={self.dim}", dtype_name(self.dtype)] + ["causal"] * self.causal
        return f"{' '.join(sizes)}; tiles of {self.block_q} queries x {self.block_kv} keys"


class Way(NamedTuple):
    """A way of computing: its name, the elements it moves for one head without a mask, who says so, and its cost."""

    name: str
    formula: str
    source: str
    cost: Callable[[Question], Cost]


FORWARD = (
    Way("naive", "4 N^2 + 4 N d", "FA-1, algorithm 0 and theorem 2", lambda q: cost.naive(q.shape)),
    Way(
        "eager: scale, mask, dropout",
        "10 N^2 + 4 N d",
        "the same, each pass over the scores reading and writing them once more",
        lambda q: cost.eager(q.shape),
    ),
    Way(
        "FA-1 loops, keys outside",
        "3 N d (1 + N / block_kv)",
        "FA-1, algorithm 1",
        lambda q: cost.fa1(q.shape, q.block_q, q.block_kv),
    ),
    Way(
        "tiled, nothing cached",
        "2 N d + 2 N^2 d / block_q",
        "FA-2, algorithm 1",
        lambda q: cost.tiled_worst(q.shape, q.block_q, q.block_kv),
    ),
    Way(
        "tiled, reloads cached",
        "4 N d",
        "each operand once, the least there is",
        lambda q: cost.tiled_best(q.shape, q.block_q, q.block_kv),
    ),
)
BACKWARD = (
    Way("naive, p kept", "7 N^2 + 8 N d", "FA-1, appendix B, algorithm 3", lambda q: cost.naive_backward(q.shape)),
    Way(
        "tiled, dq in memory",
        "7 N d + 2 N^2 d / block_kv",
        "FA-2, algorithm 2; beside these, float32 dq, lse and delta",
        lambda q: cost.tiled_backward_worst(q.shape, q.block_q, q.block_kv),
    ),
    Way(
        "tiled, a pass for dq",
        "9 N d + 2 N^2 d (1 / block_kv + 1 / block_q)",
        "the same in two passes; beside these, float32 lse and delta",
        lambda q: cost.tiled_backward_worst(q.shape, q.block_q, q.block_kv, passes=2),
    ),
    Way(
        "tiled, reloads cached",
        "8 N d",
        "each operand once, the least there is",
        lambda q: cost.tiled_backward_best(q.shape, q.block_q, q.block_kv),
    ),
)
DECODING = (
    Way("one query, N keys", "2 N d + 2 d", "Flash-Decoding, without splits", lambda q: cost.decode(q.last_query)),
)
_SOFTMAX = "Milakov and Gimelshein 2018, sections 2 and 3"
SOFTMAX = (
    Way("eager, five kernels", "8 N^2 + 4 N", "Triton's tutorial on fused softmax", lambda q: _softmax(q, "eager")),
    Way("safe, three reads", "4 N^2", _SOFTMAX, lambda q: _softmax(q, "safe")),
    Way("online, two reads", "3 N^2", _SOFTMAX, lambda q: _softmax(q, "online")),
    Way("fused, the row kept near", "2 N^2", "Triton's tutorial on fused softmax", lambda q: _softmax(q, "fused")),
)
SECTIONS = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "decoding": DECODING,
    "row softmax of the scores": SOFTMAX,
}


def _softmax(question: Question, kind: str) -> Cost:
    shape = question.shape
    return cost.softmax(shape.rows, shape.len_kv, kind, shape.itemsize)  # type: ignore[arg-type]  # names of ours


# ---- devices --------------------------------------------------------------------------------------------------------


def devices(
    names: Sequence[str],
    dtype: str,
    *,
    bandwidth: float | None = None,
    onchip_bandwidth: float | None = None,
    flops: float | None = None,
) -> list[Device]:
    """Find the devices to predict for: those named, or all that have a data sheet.

    Args:
        names: names of data sheets; "here" is this machine, its copy and matrix rates measured.
        dtype: what the matrix rate is of.
        bandwidth, onchip_bandwidth, flops: other speeds, in bytes and operations a second: what if?

    Raises:
        ValueError: a name that no sheet has, or a speed that is none.

    >>> devices(["A100"], "float16", flops=1e12)[0].rates["float16"]
    1000000000000.0
    """
    found = [_measured(dtype) if name == HERE else find(name) for name in names] or list(DEVICES)
    given = {"bandwidth": bandwidth, "onchip_bandwidth": onchip_bandwidth, "flops": flops}
    return [device.what_if(**given) for device in found]


def _measured(dtype: str) -> Device:
    name = detect.best_device()
    return detect.measure_rates(name, dtype).on(detect.detect(name))


# ---- tables ---------------------------------------------------------------------------------------------------------


def blocks(question: Question, on: Sequence[Device], *, backward: bool = False) -> Iterator[Table | str]:
    """Yield the whole answer: what moves, what that means, and the least time on each device."""
    yield str(question)
    for title, ways in SECTIONS.items():
        if title != "backward" or backward:
            yield ways_table(title, ways, question)
    yield "\n".join(findings(question))
    for title, ways in list(SECTIONS.items())[: 1 + backward]:
        yield floors_table(f"the least time, {title}", ways, question, on)
    yield from notes(question)


def ways_table(title: str, ways: Sequence[Way], question: Question) -> Table:
    """Set ways of computing side by side."""
    formula = "elements of a head" + (", unmasked" if question.causal else "")
    table = Table(title, ("way", formula, "elements", "MiB", "GFLOP", "FLOP/byte", "extra MiB"), (0, 1))
    for way in ways:
        found = way.cost(question)
        gigaflop = three(found.flops / 1e9)
        sizes = (f"{found.elements:,}", mebibytes(found.bytes), gigaflop, three(found.intensity))
        table.add(way.name, way.formula, *sizes, mebibytes(found.memory))
    return table


def findings(question: Question) -> Iterator[str]:
    """Say what the numbers come to: the score matrix beside the results, FA-1's saving, recomputation."""
    shape = question.shape
    scores, results = shape.size_scores * shape.itemsize, cost.tiled_best(shape).memory
    yield (
        f"The score matrix takes {mebibytes(scores)} MiB, out and lse {mebibytes(results)} MiB: "
        f"{three(scores / results)} times less."
    )
    saved, added = cost.recomputation(shape)
    share = added / cost.naive_backward(shape).flops
    yield (
        f"Recomputing p in the backward pass spares {mebibytes(saved)} MiB between the passes and adds "
        f"{three(added / 1e9)} GFLOP, {share:.0%} of the backward pass."
    )
    seen = visits(shape, question.block_q, question.block_kv)
    there = -(-shape.len_q // question.block_q) * -(-shape.len_kv // question.block_kv)
    yield f"Tiles of a head: {seen.masked + seen.full} of {there} are visited, {seen.masked} of them need a mask."


def floors_table(title: str, ways: Sequence[Way], question: Question, on: Sequence[Device]) -> Table:
    """Say how fast each way can be on each device, and what holds it back there."""
    numbers = [f"({number})" for number in range(1, len(ways) + 1)]  # names would make it wider than a terminal
    names = ", ".join(f"{number} {way.name}" for number, way in zip(numbers, ways, strict=True))
    columns = ("device", "GB/s", "on-chip TB/s", "TFLOP/s", "ridge", *(f"{number} ms" for number in numbers))
    table = Table(f"{title}: {names}", columns, (0,))
    for device in on:
        rate, ridge = device.rates.get(dtype_name(question.dtype)), device.ridge_point(question.dtype)
        table.add(
            device.name,
            "" if device.bandwidth is None else f"{device.bandwidth / 1e9:,.0f}",
            "" if device.onchip_bandwidth is None else three(device.onchip_bandwidth / 1e12),
            "" if rate is None else three(rate / 1e12),
            "" if ridge is None else three(ridge),
            *(_floor(way.cost(question), device, question.dtype) for way in ways),
        )
    return table


_SHORT = {"memory": "mem", "matrix": "matrix", "on-chip": "chip"}


def _floor(found: Cost, device: Device, dtype: str) -> str:
    """Write the least milliseconds, and what takes them."""
    seconds = found.seconds(device, dtype)
    if not seconds:
        return "?"
    slowest = max(seconds, key=lambda part: seconds[part])
    return f"{milliseconds(seconds[slowest])} {_SHORT[slowest]}"


def notes(question: Question) -> Iterator[Table | str]:
    """Say how to read the tables, and where the formulas come from."""
    yield (
        "elements cross between main memory and the chip; MiB adds float32 statistics. Where FLOP/byte is below a "
        "device's ridge, memory holds the way back (mem); above, arithmetic (matrix) or on-chip memory (chip), through "
        "which reloads pass all the same. extra MiB: beyond the inputs, results included."
    )
    a100 = find("A100")
    shared = a100.shared_per_block or 0
    order = cost.fa1_reduction(question.dim, shared // ITEMSIZE[dtype_name(question.dtype)])
    yield (
        f"FA-1's order of the saving, M / d^2 (theorem 2), for the {shared // KIB} KiB that a block has on an "
        f"A100: {three(order)}."
    )
    table = Table("where the formulas come from", ("", "way", "source"), (0, 1, 2))
    for title, ways in SECTIONS.items():
        for number, way in enumerate(ways):
            table.add("" if number else title, way.name, way.source)
    yield table
    yield (
        "FA-1: Dao et al., arXiv:2205.14135. FA-2: Dao, arXiv:2307.08691. Online softmax: Milakov and Gimelshein, "
        "arXiv:1805.02867. Roofline: Williams, Waterman and Patterson 2009. On-chip bandwidth: SMs x 128 bytes x clock."
    )


def record(question: Question, on: Sequence[Device]) -> dict[str, object]:
    """Give all counts and floors as plain data for JSON."""
    counted = {
        title: {
            way.name: {
                "formula": way.formula,
                "source": way.source,
                "elements": (found := way.cost(question)).elements,
                "bytes": found.bytes,
                "bytes_onchip": found.bytes_onchip,
                "flops": found.flops,
                "memory": found.memory,
                "seconds": {device.name: found.seconds(device, question.dtype) for device in on},
            }
            for way in ways
        }
        for title, ways in SECTIONS.items()
    }
    return {"question": str(question), "ways": counted}
