"""Costs in closed form: the textbook's exercises, the row softmax, and the least time on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from tilewise.machine import cost
from tilewise.machine.device import Device, find
from tilewise.machine.shape import Shape, flops

N, D = 16384, 128  # the exercises: 16,384 tokens, head dim 128, one head, float16


def test_decoding_refuses_no_splits() -> None:
    with pytest.raises(ValueError, match="splits must be 1 or more, got 0"):
        cost.decode(Shape.square(16, 4), 0)


class CountedRow:
    """A row of numbers that counts how often it is read and written."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values, self.read, self.written = list(values), 0, 0

    def __iter__(self) -> Iterator[float]:
        for value in self.values:
            self.read += 1
            yield value

    def fill(self, values: Iterable[float]) -> None:
        self.values = list(values)
        self.written += len(self.values)


def naive_softmax(x: CountedRow, y: CountedRow) -> None:
    total = sum(math.exp(value) for value in x)
    y.fill(math.exp(value) / total for value in x)


def safe_softmax(x: CountedRow, y: CountedRow) -> None:
    largest = max(x)
    total = sum(math.exp(value - largest) for value in x)
    y.fill(math.exp(value - largest) / total for value in x)


def online_softmax(x: CountedRow, y: CountedRow) -> None:
    largest, total = -math.inf, 0.0
    for value in x:
        larger = max(largest, value)
        total = total * math.exp(largest - larger) + math.exp(value - larger)
        largest = larger
    y.fill(math.exp(value - largest) / total for value in x)


def fused_softmax(x: CountedRow, y: CountedRow) -> None:
    row = list(x)
    largest = max(row)
    exponentials = [math.exp(value - largest) for value in row]
    y.fill(value / sum(exponentials) for value in exponentials)


@pytest.mark.parametrize(
    ("kind", "algorithm", "reads"),
    [
        ("naive", naive_softmax, 2),
        ("safe", safe_softmax, 3),
        ("online", online_softmax, 2),
        ("fused", fused_softmax, 1),
    ],
)
def test_a_row_softmax_reads_and_writes_as_often_as_its_loops(
    kind: str, algorithm: Callable[[CountedRow, CountedRow], None], reads: int
) -> None:
    x, y = CountedRow([3, 1, 6, 2, -4]), CountedRow([])
    algorithm(x, y)
    weights = np.exp(np.array(x.values) - 6)
    assert np.allclose(y.values, weights / weights.sum(), rtol=1e-14, atol=0)
    counted = cost.softmax(1, 5, kind, itemsize=4)  # type: ignore[arg-type]
    assert (counted.bytes_read, counted.bytes_written) == (4 * x.read, 4 * y.written) == (4 * 5 * reads, 4 * 5)
    assert cost.softmax(7, 5, kind, itemsize=4).elements == 7 * (x.read + y.written)  # type: ignore[arg-type]


def test_an_eager_softmax_moves_what_its_five_kernels_load_and_store() -> None:
    rows, columns, size = 7, 11, 7 * 11
    kernels = {  # read, written
        "maximum": (size, rows),
        "difference": (size + rows, size),
        "exponential": (size, size),
        "sum": (size, rows),
        "quotient": (size + rows, size),
    }
    counted = cost.softmax(rows, columns, "eager", itemsize=2)
    assert counted.bytes_read == 2 * sum(read for read, _ in kernels.values())
    assert counted.bytes_written == 2 * sum(written for _, written in kernels.values())


def test_a_row_softmax_takes_the_memory_of_its_result_and_an_eager_one_of_two() -> None:
    fused, eager = cost.softmax(7, 11, "fused", itemsize=2), cost.softmax(7, 11, "eager", itemsize=2)
    assert fused.memory == 2 * 7 * 11
    assert eager.memory == 2 * (2 * 7 * 11 + 7)
    assert fused.flops == eager.flops == 5 * 7 * 11
    assert fused.bytes_onchip == fused.bytes


def test_a_softmax_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind must be one of eager, naive, safe, online, fused; got 'fast'"):
        cost.softmax(1, 1, "fast")  # type: ignore[arg-type]


def test_costs_of_parts_add_up() -> None:
    whole = cost.tiled_worst(Shape.square(64, 8, batch=3), 16, 16)
    part = cost.tiled_worst(Shape.square(64, 8), 16, 16)
    assert part + part + part == whole


# The exercises: 16,384 tokens, head dim 128, one head, float16.


def test_the_score_matrix_takes_126_times_the_memory_of_out_and_lse() -> None:
    shape = Shape.square(N, D)
    scores, results = shape.size_scores * 2, cost.tiled_best(shape).memory
    assert scores == 512 * 2**20
    assert results == 4 * 2**20 + 64 * 2**10
    assert round(scores / results) == 126


def test_moving_elements_follows_the_textbook_formulas() -> None:
    shape = Shape.square(N, D)
    assert cost.naive(shape).elements == 4 * N**2 + 4 * N * D
    assert cost.eager(shape).elements == 10 * N**2 + 4 * N * D
    assert cost.tiled_worst(shape, 128, 64).elements == 2 * N * D + 2 * N**2 * D // 128
    assert cost.tiled_best(shape).elements == 4 * N * D
    assert cost.naive_backward(shape).elements == 7 * N**2 + 8 * N * D
    assert cost.tiled_backward_best(shape).elements == 8 * N * D


def test_on_chip_memory_over_the_square_of_the_head_dim_is_the_order_of_the_saving() -> None:
    onchip = 163 * 1024 // 2
    shape, (block_q, block_kv) = Shape.square(N, D), cost.fa1_blocks(D, onchip)
    assert (block_q, block_kv) == (128, 163)
    saving = cost.naive(shape).elements / cost.fa1(shape, block_q, block_kv).elements
    order = cost.fa1_reduction(D, onchip)
    assert round(order, 2) == 5.09
    assert 1 / 4 < saving / order < 4  # an order has no constant: Algorithm 1 moves out twice as well as q
    twice = cost.fa1(shape, *cost.fa1_blocks(D, 2 * onchip))
    assert cost.naive(shape).elements / twice.elements == pytest.approx(2 * saving, rel=0.02)


def test_recomputation_saves_the_probabilities_for_a_quarter_more_of_the_backward_pass() -> None:
    shape = Shape.square(N, D)
    saved, added = cost.recomputation(shape)
    assert saved == 2 * N**2 - 4 * N
    assert added == 2 * N**2 * D
    assert flops(shape, backward=True) == cost.naive_backward(shape).flops + added
    assert (flops(shape) + flops(shape, backward=True)) * 6 == (flops(shape) + cost.naive_backward(shape).flops) * 7


def test_decoding_does_one_operation_a_byte_for_each_query_head_that_shares_the_keys() -> None:
    for group in (1, 4, 8):
        shape = Shape(1, 8 * group, 8, 1, N, D, D)
        assert cost.decode(shape).intensity == pytest.approx(group, rel=0.01)


def test_a_time_floor_is_the_slowest_part_and_follows_overrides() -> None:
    shape, a100 = Shape.square(N, D), find("A100")
    naive, tiled = cost.naive(shape), cost.tiled_best(shape)
    assert naive.time_floor(a100, "float16") == naive.bytes / 2.039e12  # memory holds naive back
    assert tiled.time_floor(a100, "float16") == tiled.flops / 312e12  # arithmetic holds tiles back
    same = a100.what_if(bandwidth=a100.onchip_bandwidth)  # what if main memory were as fast as on-chip memory?
    assert naive.time_floor(same, "fp16") == naive.flops / 312e12
    slow = a100.what_if(onchip_bandwidth=1e12)
    assert tiled.time_floor(slow, "fp16") == tiled.bytes_onchip / 1e12
    assert tiled.seconds(a100.what_if(flops=1e12), "fp16")["matrix"] == tiled.flops / 1e12


def test_a_time_floor_leaves_out_what_is_not_known_and_fails_where_nothing_is() -> None:
    naive = cost.naive(Shape.square(64, 8))
    assert naive.seconds(Device("memory alone", bandwidth=2.0), "fp32") == {"memory": naive.bytes / 2}
    with pytest.raises(ValueError, match=r"'unknown' has no bandwidth and no rate for fp32; measure them"):
        naive.time_floor(Device("unknown"), "fp32")


def test_the_intensity_of_nothing_is_zero() -> None:
    assert cost.tiled_best(Shape.square(0, 8)).intensity == 0.0
