"""The row softmax of `kernels/triton`: its results in the interpreter, and what it compiles to for every GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch

pytest.importorskip("triton")

from tilewise.backends import launch, triton_softmax
from tilewise.backends.compile import Compiled, Constant, Options, Target, compile_for, ptx_parameters, resources
from tilewise.backends.launch import Argument
from tilewise.backends.triton_softmax import (
    Axes,
    Facts,
    Tiling,
    choose_tiling,
    facts_of,
    kernel_and_constants,
    merge_axes,
)
from tilewise.kernels.share import Jitted
from tilewise.kernels.triton import softmax as kernels
from tilewise.testing import error

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter makes an index of an array with one element, as NumPy will not have it one day.
    "ignore:Conversion of an array with ndim > 0 to a scalar is deprecated:DeprecationWarning"
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LENGTHS = [1, 2, 17, 128, 1000, 4097]
ONLINE = {  # small blocks, so that rows of a few hundred columns take several
    "online": Tiling(True, 1, 16, 8, 4, 2),
    "online, two rows a tile": Tiling(True, 2, 64, 1, 4, 1),
}
H200 = 132, 32  # multiprocessors, threads of a warp
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


class Launched(NamedTuple):
    kernel: Jitted
    grid: tuple[int, ...]
    arguments: Sequence[Argument]
    constants: Mapping[str, Constant]
    num_warps: int


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """Collect every launch, which takes place all the same."""
    calls: list[Launched] = []
    real = launch.launch

    def recorded(
        kernel: Jitted,
        grid: tuple[int, ...],
        arguments: Sequence[Argument],
        constants: Mapping[str, Constant],
        *,
        num_warps: int,
        num_stages: int,
    ) -> None:
        calls.append(Launched(kernel, grid, arguments, constants, num_warps))
        real(kernel, grid, arguments, constants, num_warps=num_warps, num_stages=num_stages)

    monkeypatch.setattr(triton_softmax, "launch", recorded)
    return calls


@pytest.fixture(autouse=True)
def _memory_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: empty_like(x).fill_(math.nan))


def oracle(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute the softmax in x's dtype, zeros in rows of -inf."""
    hidden = (x == -math.inf).all(dim, keepdim=True)
    return torch.softmax(x.masked_fill(hidden, 0), dim).masked_fill(hidden, 0)


def check(x: torch.Tensor, dim: int, tiling: Tiling | None = None, *, mixed: bool = False) -> None:
    """Hold out and gradient to the formula in float64, within what the formula loses in the dtype itself.

    The gradient is a small difference of large terms where one p is near 1; their rounding, in the dtype of the sums,
    widens its bound. p and dp lie as x does, or, if mixed, dp otherwise.
    """
    eps, sum_eps = torch.finfo(x.dtype).eps, torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    got = triton_softmax.softmax(x, dim, tiling)
    order = math.sqrt(x.shape[dim]) if x.dtype == torch.float64 else 0.0
    found = error(got, oracle(x.double(), dim), oracle(x, dim), eps, order)
    assert found.within, found

    p = torch.empty_like(x).copy_(oracle(x, dim))
    dp = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    dp = dp if mixed else torch.empty_like(x).copy_(dp)

    def terms(p: torch.Tensor, dp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return p * dp, p * (p * dp).sum(dim, keepdim=True)

    first, second = terms(p.double(), dp.double())
    low_first, low_second = terms(p, dp)
    lost = (first.abs() + second.abs()).max() / (first - second).abs().max().clamp_min(1e-300)
    got = triton_softmax.softmax_backward(p, dp, dim, tiling)
    found = error(got, first - second, low_first - low_second, eps, order + lost.item() * sum_eps / eps)
    assert found.within, found


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


# ---- results, in the interpreter ----


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", LENGTHS)
def test_rows_that_fit_are_read_once_and_right(cols: int, dtype: torch.dtype, launched: list[Launched]) -> None:
    check(normal(5, cols, dtype=dtype), -1)
    assert [call.kernel for call in launched] == [kernels.softmax_once, kernels.softmax_once_backward]


@pytest.mark.interpreter
@pytest.mark.parametrize("tiling", ONLINE.values(), ids=list(ONLINE))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [1, 17, 128, 1000])
def test_longer_rows_go_online_and_are_right(
    cols: int, dtype: torch.dtype, tiling: Tiling, launched: list[Launched]
) -> None:
    check(normal(5, cols, dtype=dtype), -1, tiling)
    assert [call.kernel for call in launched] == [kernels.softmax_online, kernels.softmax_online_backward]
    assert launched[0].grid[0] == tiling.programs  # fewer than tiles of rows, so that a program takes several


@pytest.mark.interpreter
@pytest.mark.parametrize("tiling", [None, *ONLINE.values()], ids=["once", *ONLINE])
def test_the_largest_score_may_stand_anywhere_and_scores_may_be_large(tiling: Tiling | None) -> None:
    x = normal(4, 300)
    for row, place in enumerate((0, 127, 128, 299)):
        x[row, place] = 1000.0
        x[row, 150] = 999.5
    check(x, -1, tiling)


@pytest.mark.interpreter
@pytest.mark.parametrize("tiling", [None, *ONLINE.values()], ids=["once", *ONLINE])
def test_a_row_of_minus_infinities_gives_zeros_and_any_part_of_one_is_left_out(tiling: Tiling | None) -> None:
    x = normal(4, 300)
    x[0], x[1, :200], x[2, 17:] = -math.inf, -math.inf, -math.inf
    check(x, -1, tiling)
    out = triton_softmax.softmax(x, -1, tiling)
    assert torch.equal(out == 0, x == -math.inf)
    assert torch.equal(triton_softmax.softmax_backward(out, torch.ones_like(x), -1, tiling)[0], torch.zeros(300))


@pytest.mark.interpreter
@pytest.mark.parametrize("tiling", [None, *ONLINE.values()], ids=["once", *ONLINE])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.filterwarnings(  # inf - inf and a maximum of NaN: the point of the test
    "ignore:invalid value encountered:RuntimeWarning", "ignore:All-NaN slice encountered:RuntimeWarning"
)
def test_what_is_not_a_number_spoils_its_own_row_alone(bad: float, tiling: Tiling | None) -> None:
    x = normal(3, 300)
    x[1, 170] = bad
    out = triton_softmax.softmax(x, -1, tiling)
    assert bool(out[1].isnan().any())
    assert torch.isnan(torch.softmax(x, -1)[1]).any()
    check(x[::2], -1, tiling)


LAYOUTS = {
    "rows apart": lambda: normal(5, 96)[:, 16:80],
    "rows apart, unaligned": lambda: normal(5, 96)[:, 3:70],
    "every second column": lambda: normal(5, 96)[:, ::2],
    "columns first": lambda: normal(48, 24).T,
    "columns first, unaligned": lambda: normal(48, 25)[:, 1:].T,
    "one row for all": lambda: normal(1, 40).expand(3, 40),
    "one column for all": lambda: normal(3, 1).expand(3, 40),
    "batch, heads and a view": lambda: normal(2, 2, 5, 12)[:, :, 1:4],
    "four axes in another order": lambda: normal(3, 2, 4, 5).permute(2, 0, 3, 1),
    "five axes of a view": lambda: normal(2, 3, 2, 4, 5)[:, 1:3, :, 1:3, ::2],
}


@pytest.mark.interpreter
@pytest.mark.parametrize("online", [False, True], ids=["once", "online"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_are_taken_as_they_lie_along_every_axis(layout: str, online: bool) -> None:
    x = LAYOUTS[layout]()
    for dim in range(x.ndim):
        check(x, dim, Tiling(True, 4, 4, 4, 4, 2) if online else None)


@pytest.mark.interpreter
@pytest.mark.parametrize("tiling", [None, *ONLINE.values()], ids=["once", *ONLINE])
def test_gradients_may_lie_otherwise_than_the_result(tiling: Tiling | None) -> None:
    check(normal(24, 48).T, -1, tiling, mixed=True)
    check(normal(3, 4, 5).transpose(0, 1), -1, tiling, mixed=True)


@pytest.mark.interpreter
def test_many_matrices_share_the_programs_that_a_grid_can_have(
    launched: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_softmax, "MAX_OUTERS", 2)
    monkeypatch.setattr(triton_softmax, "plan", triton_softmax.plan.__wrapped__)  # nothing remembered
    for tiling in (None, ONLINE["online"]):
        check(normal(5, 8, 6).transpose(1, 2), -1, tiling)
    assert {call.grid[1] for call in launched} == {2}


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0)])
def test_a_scalar_and_empty_tensors_have_defined_results(shape: tuple[int, ...], launched: list[Launched]) -> None:
    x = torch.zeros(shape)
    assert torch.equal(triton_softmax.softmax(x, 0), torch.ones(shape))
    assert len(launched) == (0 if 0 in shape else 1)


# ---- how tensors are addressed, and which tiles are chosen ----


def test_only_strides_and_starts_of_16_bytes_allow_wide_loads() -> None:
    dense = ((0, 1024, 1), (0, 1024, 1))
    assert facts_of(Axes((1, 6, 1000), dense), 2, aligned=True) == Facts("cols", 8, 1, 8)
    assert facts_of(Axes((1, 6, 1001), dense), 2, aligned=True) == Facts("cols", 8, 1, 1)
    assert facts_of(Axes((1, 6, 1000), dense), 2, aligned=False) == Facts("cols", 1, 1, 1)
    assert facts_of(Axes((1, 6, 1000), (dense[0], (0, 1001, 1))), 2, aligned=True) == Facts("cols", 1, 1, 1)
    assert facts_of(Axes((1, 6, 1000), (dense[0], (0, 1024, 2))), 2, aligned=True) == Facts("", 1, 1, 1)
    assert facts_of(Axes((1, 64, 9), ((0, 1, 64), (0, 1, 128))), 4, aligned=True) == Facts("rows", 4, 4, 1)


def test_axes_merge_where_every_tensors_strides_allow_it() -> None:
    assert merge_axes((2, 3, 4, 5), ((60, 20, 5, 1), (60, 20, 5, 1))).sizes == (1, 24, 5)  # type: ignore[union-attr]
    assert merge_axes((2, 3, 4, 5), ((60, 20, 5, 1), (100, 20, 5, 1))) == Axes((2, 12, 5), ((60, 5, 1), (100, 5, 1)))
    assert merge_axes((5,), ((1,),)) == Axes((1, 1, 5), ((0, 0, 1),))
    assert merge_axes((2, 3, 4, 5), ((20, 40, 5, 1),)) == Axes((1, 24, 5), ((0, 5, 1),))  # rows in any order
    assert merge_axes((2, 3, 4, 5), ((1000, 100, 10, 1),)) == 0


def tiling_of(cols: int, itemsize: int = 2, tensors: int = 2, rows: int = 8192) -> Tiling:
    axes = Axes((1, rows, cols), ((0, cols, 1),) * tensors)
    return choose_tiling(axes, facts_of(axes, itemsize, aligned=True), itemsize, tensors, *H200)


def test_longer_rows_go_online_and_others_are_read_once() -> None:
    assert [tiling_of(cols).online for cols in (1, 256, 16384, 16385, 32768, 65536)] == [False] * 3 + [True] * 3
    assert [tiling_of(cols, tensors=3).online for cols in (16384, 16385)] == [False, True]
    assert [tiling_of(cols, itemsize=8).online for cols in (16384, 16385)] == [False, True]
    assert [tiling_of(cols, itemsize=8, tensors=3).online for cols in (8192, 8193)] == [False, True]


@pytest.mark.skipif(not RESULTS.is_dir(), reason="a source archive carries no results")
@pytest.mark.parametrize("tensors", [2, 3])
@pytest.mark.parametrize("cols", [65536, 262144])
def test_online_tiles_are_those_that_were_fastest_on_a_gpu(cols: int, tensors: int) -> None:
    record = json.loads((RESULTS / "h200-softmax-sweep.json").read_text())["results"]
    rows = {65536: 4096, 262144: 1024}[cols]
    times = {
        name: figures["median us"]
        for name, figures in record[f"{'forward' if tensors == 2 else 'backward'} {rows}x{cols}"].items()
        if name.startswith("online") and figures["within"]
    }
    tiling = tiling_of(cols, tensors=tensors)
    share = tiling.programs // H200[0]
    assert min(times, key=lambda name: times[name]) == (
        f"online {tiling.lanes}x{tiling.span} w{tiling.num_warps} x{share}"
    )


@pytest.mark.parametrize("warp", [32, 64])
def test_no_block_has_more_threads_than_a_gpu_allows(warp: int) -> None:
    for cols in (1, 64, 1000, 16384, 32768, 262144):
        for stride in ((0, cols, 1), (0, 1, 8192), (0, 3 * cols, 3)):
            for itemsize in (2, 4, 8):
                for tensors in (2, 3):
                    axes = Axes((1, 8192, cols), (stride,) * tensors)
                    facts = facts_of(axes, itemsize, aligned=True)
                    assert 1 <= choose_tiling(axes, facts, itemsize, tensors, 132, warp).num_warps * warp <= 1024


# ---- what is compiled ----

# ptxas prefers to spill a few of an online kernel's registers and have twice the blocks on an SM: bytes a thread.
FEW = 32
SHARED_LIMIT = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, 121: 99, "gfx942": 64}  # KiB a block


def compiled_for(cols: int, dtype: str, backward: bool, target: Target, *, dense: str = "cols") -> Compiled:
    """Compile what a call on this many columns would launch."""
    itemsize = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}[dtype]
    tensors = 3 if backward else 2
    stride = (0, cols, 1) if dense == "cols" else (0, 1, 8192)
    axes = Axes((1, 8192, cols), (stride,) * tensors)
    facts = facts_of(axes, itemsize, aligned=True)
    sms, warp = H200
    tiling = choose_tiling(axes, facts, itemsize, tensors, sms, 64 if isinstance(target, str) else warp)
    kernel, constants = kernel_and_constants(facts, tiling, tensors)
    names = ("p_ptr", "dp_ptr", "ds_ptr") if backward else ("x_ptr", "out_ptr")
    return compile_for(kernel, dict.fromkeys(names, f"*{dtype}"), constants, target, Options(tiling.num_warps, 1))


@pytest.mark.compile
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("cols", [4096, 65536])
@pytest.mark.parametrize("target", SHARED_LIMIT)
def test_every_target_compiles_into_its_registers_and_shared_memory(
    target: Target, cols: int, backward: bool, record_property: Callable[[str, object], None]
) -> None:
    taken = resources(compiled_for(cols, "fp16", backward, target))
    record_property("resources", str(taken))
    assert taken.spilled <= FEW
    assert taken.shared <= SHARED_LIMIT[target] << 10
    assert 0 < taken.registers <= 255


@pytest.mark.compile
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("cols", [64, 16384, 32768, 262144])
def test_every_dtype_compiles_for_hopper_into_its_registers(cols: int, dtype: str, backward: bool) -> None:
    assert resources(compiled_for(cols, dtype, backward, 90)).spilled <= (FEW if cols > 16384 else 0)


@pytest.mark.compile
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("cols", "dense"), [(256, "cols"), (16384, "cols"), (262144, "cols"), (128, "rows"), (8192, "rows")]
)
def test_aligned_tensors_are_read_and_written_16_bytes_at_a_time(cols: int, dense: str, backward: bool) -> None:
    ptx = cast("str", compiled_for(cols, "fp16", backward, 90, dense=dense).asm["ptx"])
    loads = [line for line in ptx.splitlines() if "ld.global" in line]
    stores = [line for line in ptx.splitlines() if "st.global" in line]
    assert loads
    assert stores
    assert all(".v4.b32" in line for line in loads + stores)
    assert len(ptx_parameters(ptx)) >= 2 + 6 + 3
