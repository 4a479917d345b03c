"""The emulator of Gluon runs rings of copies and products right, and finds each way to get one wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch

pytest.importorskip("triton")

from tilewise.kernels.gluon import compat

if compat.refusal() is not None:
    pytest.skip(str(compat.refusal()), allow_module_level=True)

import gluon_kernels as kernels
from gluon_emulator import Deadlock, Misuse, emulate, tensor_map
from gluon_values import tensor
from tilewise.kernels.gluon import sync
from tilewise.kernels.gluon.compat import gl

BOTH = pytest.mark.parametrize("late", [False, True])
BOX = (64, 64)
LENGTH, INNER = 100, 300  # two tiles of rows, five of the inner axis, both ragged
TILES = 5  # of the chain, 128 rows each

Run = Callable[..., bool]


@functools.cache
def operands(rows: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a and b in bfloat16; the rows of a are padded, as a copy wants strides of 16 bytes."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(rows, -(-inner // 8) * 8, generator=generator).bfloat16()[:, :inner]
    return a, torch.randn(inner, 64, generator=generator).bfloat16() / 8


def run_ring(seed: int, *, late: bool, fault: str = "", resident: int = 1) -> bool:
    """Say whether the ring's three results are right; whatever it does not write stays NaN."""
    a, b = operands(LENGTH, INNER)
    out, total = torch.full((LENGTH, 64), float("nan"), dtype=torch.bfloat16), torch.zeros(64, 64)
    row_sums = torch.full((LENGTH,), float("nan"))
    maps = {"a_map": a, "b_map": b, "out_map": out, "sum_map": total}
    arguments: dict[str, object] = {name: tensor_map(whole, box=BOX) for name, whole in maps.items()}
    arguments |= {"row_ptr": row_sums, "length": LENGTH, "blocks": 5}
    constants = {"FAULT": fault, "BAR_OFF": 0}
    emulate(kernels.ring, (2,), arguments, constants, seed=seed, late=late, resident=resident)
    exact = a.double() @ b.double()
    exact_total = exact[:64].clone()
    exact_total[: LENGTH - 64] += exact[64:]
    pairs = ((out, exact, 2**-8), (total, exact_total, 1e-5), (row_sums, exact.sum(1) + 7, 1e-5))
    return all(torch.allclose(got.double(), right, rtol=rtol, atol=1e-4) for got, right, rtol in pairs)


def run_chain(seed: int, *, late: bool, fault: str = "", resident: int = 1) -> bool:
    """Say the same of the chain, by two programs that share a counter."""
    a, b = operands(128 * TILES, 64)
    out, counter = torch.full((128 * TILES, 64), float("nan"), dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    maps = {"a_map": a, "b_map": b, "out_map": out}
    arguments: dict[str, object] = {name: tensor_map(whole, box=BOX) for name, whole in maps.items()}
    arguments |= {"counter_ptr": counter, "tiles": TILES}
    constants = {"FAULT": fault, "BAR_OFF": 0}
    emulate(kernels.chain, (2,), arguments, constants, seed=seed, late=late, resident=resident)
    scale = torch.tensor([1.0, 0.5], dtype=torch.float64).repeat(64 * TILES)[:, None]
    between = (a.double() @ b.double() * scale).float().bfloat16()
    return torch.allclose(out.double(), between.double() @ b.double(), rtol=2**-8, atol=1e-3)


@BOTH
@pytest.mark.parametrize("seed", range(20))
def test_a_ring_of_copies_gives_the_product_in_every_order_of_events(seed: int, late: bool) -> None:
    assert run_ring(seed, late=late)


@BOTH
@pytest.mark.parametrize("seed", range(20))
def test_consumers_that_take_turns_give_the_product_in_every_order_of_events(seed: int, late: bool) -> None:
    assert run_chain(seed, late=late, resident=1 + seed % 2)


def test_programs_that_run_side_by_side_give_the_same() -> None:
    assert all(run_ring(seed, late=False, resident=2) for seed in range(4))


def test_a_run_can_be_repeated() -> None:
    def text(seed: int) -> str:
        with pytest.raises(Deadlock) as caught:
            run_ring(seed, late=False, fault="no arrival")
        return str(caught.value)

    assert text(3) == text(3)


# Each mistake, how it shows, and whether it needs products and stores that are late.
FAULTS: list[tuple[Run, str, str, Sequence[bool]]] = [
    (run_ring, "no wait for full", "wrong", [False]),
    (run_ring, "no wait for empty", "Misuse", [False]),
    (run_ring, "empty before the product is done", "wrong", [True]),
    (run_ring, "product used too early", "Misuse", [False, True]),
    (run_ring, "no arrival", "Deadlock", [False, True]),
    (run_ring, "an arrival too few", "Deadlock", [False, True]),
    (run_ring, "no fence", "Misuse", [False, True]),
    (run_ring, "no fence behind init", "Misuse", [False, True]),
    (run_ring, "no wait for the stores", "Misuse", [False, True]),
    (run_ring, "no mask", "IndexError", [False, True]),
    (run_chain, "words overwritten", "Deadlock", [False, True]),
    (run_chain, "operand not among the deps", "Misuse", [False, True]),
    (run_chain, "buffer freed before it is stored", "wrong", [True]),
    (run_chain, "a turn left over", "Misuse", [False, True]),
]


def outcome(run: Run, seed: int, fault: str, late: bool) -> str:
    try:
        return "right" if run(seed, late=late, fault=fault) else "wrong"
    except (Deadlock, Misuse, IndexError) as error:
        return type(error).__name__


@pytest.mark.parametrize(("run", "fault", "shows_as", "lates"), FAULTS, ids=[fault[1] for fault in FAULTS])
def test_a_mistake_in_the_protocol_is_found(run: Run, fault: str, shows_as: str, lates: Sequence[bool]) -> None:
    for late in lates:
        assert shows_as in {outcome(run, seed, fault, late) for seed in range(12)}


def test_a_deadlock_is_told_with_what_everyone_waits_for() -> None:
    with pytest.raises(Deadlock) as caught:
        run_ring(0, late=False, fault="an arrival too few")
    text = str(caught.value)
    assert "no partition can go on" in text
    assert "partition 1 (fill_ring), gluon_kernels.py:" in text
    assert "waits for barrier 2, phase 0" in text
    assert "barrier 2: 0 phases complete, 1 of 5 arrivals and 0 bytes missing" in text


def test_integers_do_what_they_do_on_the_gpu() -> None:
    given, results = torch.tensor([5, 6]), torch.zeros(5, dtype=torch.int64)
    emulate(kernels.integers, (1,), {"in_ptr": given, "out_ptr": results, "a": -7, "b": 2}, {})
    assert results.tolist() == [-3, -1, -4, 2, -7_000_000_000]  # division truncates, shifts floor
    emulate(kernels.integers, (1,), {"in_ptr": given, "out_ptr": results, "a": 7, "b": 2}, {})
    assert results.tolist() == [3, 1, 3, 6, 7_000_000_000]


def test_numbers_are_rounded_and_promoted_as_on_the_gpu() -> None:
    third = tensor(1.0) / 3
    half, brain = third.to(gl.float16), third.to(gl.bfloat16)
    assert (float(half), float(brain)) == (0.333251953125, 0.333984375)
    assert (half * 2.0).dtype == (half + 1).dtype == gl.float16  # a number of Python's takes the tensor's type
    for wide in (half * third, half * brain, tensor(1) + 0.5, tensor(1) / 2):
        assert wide.dtype == gl.float32
    assert (tensor(1) + tensor(1).to(gl.int64)).dtype == gl.int64
    assert (tensor(2) == 2).dtype == gl.int1


def test_what_does_not_fit_its_type_or_its_tensor_is_refused() -> None:
    given, results = torch.tensor([5, 6]), torch.zeros(5, dtype=torch.int32)
    with pytest.raises(OverflowError, match="does not fit int32"):
        emulate(kernels.integers, (1,), {"in_ptr": given, "out_ptr": results, "a": 7, "b": 2}, {})
    with pytest.raises(IndexError, match="in_ptr has 1 elements; the kernel touches 1 to 1"):
        emulate(kernels.integers, (1,), {"in_ptr": given[1:], "out_ptr": results.long(), "a": 7, "b": 2}, {})
    with pytest.raises(TypeError, match=r"integers has no parameters \['c'\]"):
        emulate(kernels.integers, (1,), {"in_ptr": given, "out_ptr": results, "a": 7, "b": 2, "c": 0}, {})


def test_programs_that_wait_for_later_ones_run_only_side_by_side() -> None:
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    emulate(kernels.relay, (3,), {"flag_ptr": flag, "out_ptr": out}, {}, resident=3)
    assert out.tolist() == [0, 1, 3]
    with pytest.raises(Deadlock, match="the kernel does not end"):
        emulate(kernels.relay, (3,), {"flag_ptr": flag.zero_(), "out_ptr": out}, {}, resident=2)


def test_inline_assembly_outside_its_file_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"belongs in kernels/gluon/sync\.py"):
        emulate(compat.gluon.jit(sync.lane_id.fn), (1,), {}, {})


# ---- tensor maps ----


def test_a_copy_is_clipped_to_the_map_on_both_sides() -> None:
    whole = torch.arange(3 * 8, dtype=torch.float32).reshape(3, 8)
    inside = tensor_map(whole, box=(4, 4)).inside((-2, 6))
    assert inside is not None
    memory, place = inside
    assert torch.equal(memory, whole[:2, 6:])
    assert place == (slice(2, 4), slice(0, 2))
    assert tensor_map(whole, box=(4, 4)).inside((3, 0)) is None


def test_strides_that_wrap_end_a_sequence_anywhere() -> None:
    """Rows base to base + length of packed rows, entered from the end of an axis of 2**30 rows."""
    whole = torch.arange(40 * 8, dtype=torch.float32).reshape(40, 8).half()
    rows = 2**30
    wrapping = tensor_map(whole, (2**31 - 1, 2**31 - 1, rows, 8), (2**34 - 8, 8, 8, 1), box=(1, 1, 16, 8))
    base, length = 10, 20
    for row, seen in ((0, 16), (16, 4)):
        inside = wrapping.inside((rows, base + length, rows - length + row, 0))
        assert inside is not None
        memory, place = inside
        assert torch.equal(memory[0, 0], whole[base + row : base + row + seen])
        assert place[2] == slice(0, seen)


def test_a_map_that_the_hardware_would_refuse_is_refused() -> None:
    whole = torch.zeros(8, 12, dtype=torch.float16)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        tensor_map(whole, box=(8, 4))
    with pytest.raises(ValueError, match="up to 256 elements an axis"):
        tensor_map(torch.zeros(512, 8), box=(512, 8))
    with pytest.raises(IndexError, match="leaves the tensor: element 135 of 64"):
        tensor_map(torch.zeros(8, 8), (32, 8), (8, 1), box=(1, 8)).inside((16, 0))
