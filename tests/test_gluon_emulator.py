"""The emulator of Gluon runs a ring of copies and products right, and finds each way to get one wrong."""
# mypy: ignore-errors
# Kernels compute with Triton's values, which have no types that a checker knows.

import pytest
import torch

pytest.importorskip("triton")

from tilewise.kernels.gluon import compat

if compat.refusal() is not None:
    pytest.skip(compat.refusal(), allow_module_level=True)

from gluon_emulator import emulate, tensor_map
from tilewise.kernels.gluon import sync
from tilewise.kernels.gluon.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Barriers of the ring: two full, two empty, then the words of put and their full barrier.
FULL, EMPTY, WORDS_FULL, WORDS = (gl.constexpr(slot) for slot in (0, 2, 4, 5))


@gluon.jit
def fill(a_map, b_map, a_s, b_s, bars, blocks, FAULT: gl.constexpr):
    lane = sync.lane_id()
    sync.put(WORDS, blocks, 7, lane, 0)
    sync.arrive(WORDS_FULL, lane, 0)
    for i in range(blocks):
        stage = i % 2
        if FAULT != "no wait for empty":
            sync.wait(EMPTY + stage, ((i // 2) & 1) ^ 1, 0)
        full = bars.index(FULL + stage)
        mbarrier.expect(full, 2 * 64 * 64 * 2)
        tma_load(a_map, (gl.program_id(0) * 64, i * 64), full, a_s.index(stage))
        tma_load(b_map, (i * 64, 0), full, b_s.index(stage))


@gluon.jit
def use(out_map, sum_map, out_ptr, length, a_s, b_s, out_s, sum_s, bars, FAULT: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    lane = sync.lane_id()
    sync.wait(WORDS_FULL, 0, 0)
    blocks, seven = sync.get(WORDS, 0)
    acc = gl.zeros([64, 64], gl.float32, LAYOUT)
    for i in range(blocks):
        stage = i % 2
        if FAULT != "no wait for full":
            sync.wait(FULL + stage, (i // 2) & 1, 0)
        begun = warpgroup_mma(a_s.index(stage), b_s.index(stage), acc, is_async=True)
        if FAULT == "empty before the product is done":
            sync.arrive(EMPTY + stage, lane, 0)
        acc = warpgroup_mma_wait(0, deps=(begun,))
        if FAULT not in ("empty before the product is done", "no arrival"):
            sync.arrive(EMPTY + stage, lane, 0)
    out_s.store(acc.to(out_map.dtype))
    sum_s.store(acc)
    if FAULT != "no fence":
        fence_async_shared()
    tma_store(out_map, (gl.program_id(0) * 64, 0), out_s)
    tma_add(sum_map, (0, 0), sum_s)
    if FAULT != "no wait for the store":
        tma_store_wait(0)
    row = gl.program_id(0) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    mask = row < length
    if FAULT == "no mask":
        mask = row >= 0
    gl.store(out_ptr + row, gl.sum(acc, 1) + seven, mask=mask)


@gluon.jit
def ring(a_map, b_map, out_map, sum_map, out_ptr, length: gl.int32, blocks: gl.int32, FAULT: gl.constexpr):
    a_s = gl.allocate_shared_memory(a_map.dtype, [2, 64, 64], a_map.layout)
    b_s = gl.allocate_shared_memory(b_map.dtype, [2, 64, 64], b_map.layout)
    out_s = gl.allocate_shared_memory(out_map.dtype, [64, 64], out_map.layout)
    sum_s = gl.allocate_shared_memory(gl.float32, [64, 64], sum_map.layout)
    bars = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(FULL + i), count=1)
        mbarrier.init(bars.index(EMPTY + i), count=5 if FAULT == "too many expected" else 4)
    mbarrier.init(bars.index(WORDS_FULL), count=1)
    fence_async_shared()
    warp_specialize(
        [
            (use, (out_map, sum_map, out_ptr, length, a_s, b_s, out_s, sum_s, bars, FAULT)),
            (fill, (a_map, b_map, a_s, b_s, bars, blocks, FAULT)),
        ],
        [1],
        [24],
    )


LENGTH, INNER = 100, 300  # two blocks of rows, five of the inner axis, both ragged


def run_ring(seed: int = 0, *, late: bool = False, fault: str = "", resident: int = 1) -> list[torch.Tensor]:
    """Give out, the sum over blocks, and the row sums plus 7; then what they should be."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(LENGTH, 304, generator=generator).bfloat16()[:, :INNER]
    b = torch.randn(INNER, 64, generator=generator).bfloat16()
    out = torch.full((LENGTH, 64), float("nan"), dtype=torch.bfloat16)
    total = torch.zeros(64, 64)
    sums = torch.full((LENGTH,), float("nan"))
    maps = {"a_map": a, "b_map": b, "out_map": out, "sum_map": total}
    arguments = {name: tensor_map(whole, box=(64, 64)) for name, whole in maps.items()}
    arguments |= {"out_ptr": sums, "length": LENGTH, "blocks": 5}
    emulate(ring, (2,), arguments, {"FAULT": fault}, seed=seed, late=late, resident=resident)
    exact = a.float() @ b.float()
    exact_total = exact[:64].clone()
    exact_total[: LENGTH - 64] += exact[64:]
    return [out.float(), total, sums, exact, exact_total, exact.sum(1) + 7]


def is_right(results: list[torch.Tensor]) -> bool:
    out, total, sums, exact, exact_total, exact_sums = results
    close = [torch.allclose(out, exact, rtol=2**-8, atol=1e-3)]
    close += [torch.allclose(*pair, rtol=1e-4, atol=1e-3) for pair in ((total, exact_total), (sums, exact_sums))]
    return all(close)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_ring_of_copies_gives_the_product_in_every_order_of_events(seed: int, late: bool) -> None:
    assert is_right(run_ring(seed, late=late))


def test_blocks_that_run_side_by_side_give_the_same() -> None:
    assert all(is_right(run_ring(seed, resident=2)) for seed in range(4))
