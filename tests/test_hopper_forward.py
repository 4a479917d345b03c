"""The forward pass on Hopper: right in the emulator, whatever its copies do meanwhile; and what it compiles to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tilewise.kernels.gluon import compat

if compat.refusal() is not None:
    pytest.skip(str(compat.refusal()), allow_module_level=True)


from gluon_emulator import emulate, rebound, tensor_map
from gluon_values import Tensor, tensor
from hopper_compile import compile_named, spilled_bytes
from recorder import Recorder
from tilewise import testing
from tilewise.backends import compile as compiling
from tilewise.backends import hopper, launch
from tilewise.backends.launch import Mapped
from tilewise.kernels.gluon.compat import gl
from tilewise.kernels.gluon.forward import attention_forward
from tilewise.kernels.gluon.schedule import own_steps, visited
from tilewise.kernels.gluon.softmax import rows_see
from tilewise.problem.blocks import block_ranges, is_visible
from tilewise.problem.problem import Options, Problem, Tensors
from tilewise.testing import CASES, Call, Case, Results

BOTH = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


class Launch(NamedTuple):
    """What the backend would launch, and where its results go."""

    programs: int
    named: dict[str, object]
    out: torch.Tensor
    lse: torch.Tensor
    counter: torch.Tensor


def launch_of(call: Call, chosen: hopper.Settings, processors: int, with_lse: bool = True) -> Launch:
    """Lay out a call as the backend does, on the CPU; results are NaN until they are written."""
    problem, given = call.problem, call.tensors
    shape = problem.out_shape
    bshd = problem.kind == "dense" and problem.layout == "bshd"
    out = torch.full((shape[0], shape[2], shape[1], shape[3]) if bshd else shape, torch.nan, dtype=given.q.dtype)
    out = out.transpose(1, 2) if bshd else out
    lse, counter = torch.full(problem.lse_shape, torch.nan), torch.zeros(1, dtype=torch.int32)
    pointers = {
        "lse_ptr": lse if with_lse else None,
        "counter_ptr": counter if chosen.schedule == "dynamic" else None,
        "sink_ptr": given.sink,
        "kv_start_ptr": given.kv_start,
        "kv_stop_ptr": given.kv_stop,
        "cu_q_ptr": given.cu_seqlens_q,
        "cu_k_ptr": given.cu_seqlens_q if given.cu_seqlens_k is None else given.cu_seqlens_k,
    }
    tensors = {name: x for name, x in pointers.items() if x is not None}
    tensors |= {"q_map": given.q, "k_map": given.k, "v_map": given.v, "out_map": out}
    programs, named = hopper.arguments(problem, chosen, tensors, processors)
    return Launch(programs, dict(named), out, lse, counter)


CONSTANTS = {param.name for param in compiling.compiled_kernel(attention_forward).params if param.is_constexpr}


def run(
    call: Call,
    chosen: hopper.Settings | None = None,
    *,
    late: bool = False,
    seed: int = 0,
    processors: int = 3,
    with_lse: bool = True,
) -> Results:
    """Emulate the forward pass of a call."""
    assert refusal(call.problem) is None
    laid = launch_of(call, chosen or hopper.settings(call.problem), processors, with_lse)
    given = {
        name: tensor_map(x.tensor, x.map.shape, x.map.strides, box=x.map.box) if isinstance(x, Mapped) else x
        for name, x in laid.named.items()
    }
    constants = {name: given.pop(name) for name in CONSTANTS}
    emulate(attention_forward, (laid.programs,), given, constants, seed=seed, late=late)
    assert laid.counter.item() == 0, "the last ticket must leave the counter as it was"
    return Results(laid.out, laid.lse)


def refusal(problem: Problem) -> str | None:
    """Say why the kernels do not serve a problem, wherever it would run."""
    return hopper._why_not_features(problem) or hopper._why_not_shape(problem)


def settings_of(dim: int, cut: bool, row: int = 0) -> hopper.Settings:
    return hopper.TABLE[dim, cut][row][1]


# ---- results --------------------------------------------------------------------------------------------------------

SERVED = [name for name, case in CASES.items() if refusal(case.build("cpu", "bfloat16").problem) is None]


def test_the_named_cases_that_are_served_are_most() -> None:
    assert len(SERVED) >= 30
    assert {"plain", "causal window", "softcap", "sink per batch", "packed, other keys", "left padding"} <= set(SERVED)


@BOTH
@pytest.mark.parametrize("name", SERVED)
def test_a_named_case_is_within_budget(name: str, late: bool) -> None:
    call = CASES[name].build("cpu", "bfloat16" if late else "float16")
    testing.check(run(call, late=late), call)


def options(**more: object) -> Options:
    return Options(return_lse=True)._replace(**more)  # type: ignore[arg-type]  # names are checked by the tuple


# Several tiles and blocks, ragged, with each row of the table of settings.
LONG = {
    "d=64 whole, two consumers": (Case("", 1, 2, 1, 300, 450, 64, 64, options=options()), (64, False, 0)),
    "d=64 whole, three consumers": (Case("", 1, 1, 1, 500, 330, 64, 64, options=options()), (64, False, 1)),
    "d=64 causal, two": (Case("", 2, 2, 1, 300, 300, 64, 64, options=options(causal=True)), (64, True, 0)),
    "d=64 causal, three": (Case("", 1, 2, 2, 700, 700, 64, 64, options=options(causal=True)), (64, True, 1)),
    "d=128 whole": (Case("", 1, 2, 1, 300, 300, 128, 128, options=options()), (128, False, 0)),
    "d=128 causal": (Case("", 1, 4, 2, 400, 520, 128, 128, options=options(causal=True)), (128, True, 1)),
    "d=256 whole": (Case("", 1, 1, 1, 200, 300, 256, 256, options=options()), (256, False, 0)),
    "d=256 causal": (Case("", 1, 2, 1, 300, 300, 256, 256, options=options(causal=True)), (256, True, 0)),
    "d=256 causal, a program a tile": (
        Case("", 1, 1, 1, 300, 260, 256, 256, options=options(causal=True)), (256, True, 1),
    ),
    "window to both sides": (
        Case("", 1, 1, 1, 600, 600, 64, 64, options=options(window_left=150, window_right=40)), (64, True, 0),
    ),
    "window and sink, softcap, negative scale": (
        Case("", 1, 2, 1, 400, 470, 64, 64, sink="bh",
             options=options(causal=True, window_left=200, softcap=3.0, scale=-0.2)),
        (64, True, 1),
    ),
    "ranges": (
        Case("", 2, 2, 1, 260, 410, 128, 128, ranges=((33, 400), (190, 200)), options=options(causal=True)),
        (128, True, 0),
    ),
    "packed": (
        Case("", heads_q=2, heads_kv=1, dim_qk=128, dim_v=128, lengths_q=(140, 0, 300, 1),
             lengths_kv=(140, 9, 257, 130), tail=70, sink="h", options=options(causal=True)),
        (128, True, 0),
    ),
    "v wider than k": (Case("", 1, 2, 1, 200, 300, 64, 128, options=options(causal=True)), (128, True, 0)),
    "k wider than v": (Case("", 1, 2, 1, 200, 200, 192, 128, options=options()), (256, False, 0)),
    "padded dims": (Case("", 1, 2, 1, 200, 300, 96, 96, options=options(causal=True)), (128, True, 0)),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", LONG)
def test_many_tiles_and_blocks_are_within_budget(name: str, late: bool) -> None:
    case, row = LONG[name]
    call = case.build("cpu", "float16" if late else "bfloat16", seed=3)
    testing.check(run(call, settings_of(*row), late=late, seed=len(name)), call)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_events_gives_the_same_bits(seed: int) -> None:
    call = Case("", 1, 3, 1, 300, 300, 64, 64, options=options(causal=True)).build("cpu", "bfloat16")
    chosen = settings_of(64, cut=True)
    first = run(call, chosen)
    other = run(call, chosen, seed=seed, late=seed % 2 == 1, processors=1 + seed % 4)
    assert torch.equal(first.out, other.out)
    assert torch.equal(first.lse, other.lse)


def test_steep_scores_move_the_maximum_often_and_stay_within_budget() -> None:
    call = Case("", 1, 1, 1, 130, 700, 64, 64, options=options(scale=1.5)).build("cpu", "float16")
    testing.check(run(call, settings_of(64, cut=True)), call)


@pytest.mark.parametrize("dim", [64, 128, 256])  # acc is rescaled lazily, at once, lazily
@pytest.mark.parametrize("scale", [0.11, -0.11, 3.0])
def test_scores_beyond_any_exponent_choose_their_largest(dim: int, scale: float) -> None:
    q = torch.full((1, 1, 130, dim), 133120.0, dtype=torch.bfloat16)
    k, v = q.clone(), torch.randn(1, 1, 130, dim).bfloat16()
    q[:, :, 40:50] /= 133120  # rows with near scores, beside far ones in a warp
    q[:, :, 60:70] *= -1  # rows whose scores are all far below
    k[:, :, 5] *= 2
    k[:, :, 100] *= 4
    k[:, :, 30] /= 133120  # a key with near scores, which rows of far ones below choose
    call = Call(Tensors(q, k, v), options(scale=scale), torch.randn_like(q), torch.randn(1, 1, 130))
    got = run(call, settings_of(dim, cut=False))
    scores = q.double() @ k.double().mT * scale
    right, choice = scores.max(-1)
    assert torch.equal(got.out, v[0, 0][choice])
    assert ((got.lse.double() - right).abs() <= 4 * torch.finfo(torch.float32).eps * right.abs()).all()


@pytest.mark.parametrize("sink", [-200.0, -1e4, 0.0, -np.inf])
def test_a_row_that_sees_nothing_has_its_sink_for_an_lse(sink: float) -> None:
    q, k, v = (torch.randn(1, 2, length, 64).bfloat16() for length in (70, 40, 40))
    tensors = Tensors(q, k, v)._replace(sink=torch.full((2,), sink))
    call = Call(tensors, options(causal=True), torch.randn_like(q), torch.randn(1, 2, 70))
    testing.check(run(call), call)


def test_without_an_lse_out_is_the_same() -> None:
    call = CASES["causal"].build("cpu", "bfloat16")
    assert torch.equal(run(call, with_lse=False).out, run(call).out)


HIDDEN = {
    "behind a range": Case("", 1, 1, 1, 70, 200, 64, 64, ranges=((30, 110),), options=options(causal=True)),
    "beyond the first diagonal": Case("", 1, 1, 1, 70, 200, 64, 64, options=options(causal=True, align="top_left")),
    "left of every window": Case("", 1, 1, 1, 20, 300, 64, 64, options=options(causal=True, window_left=40)),
    "of an empty range": Case("", 1, 1, 1, 20, 40, 64, 64, ranges=((15, 15),), options=options()),
    "of another packed sequence": Case(
        "", heads_q=1, heads_kv=1, dim_qk=64, dim_v=64, lengths_q=(20, 30), lengths_kv=(70, 90), tail=20,
        options=options(),
    ),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", HIDDEN)
def test_a_key_that_no_query_sees_may_hold_anything(name: str, late: bool) -> None:
    call = HIDDEN[name].build("cpu", "bfloat16")
    right = run(call, late=late)
    testing.check(right, call)
    k, v = call.tensors.k.clone(), call.tensors.v.clone()
    if call.problem.kind == "varlen":  # the other sequence sees them, and the tail is seen by none
        rows = right.out[:20]
        k[70:], v[70:] = torch.nan, torch.nan
    else:
        rows = right.out
        seen = block_ranges(*_all_queries(call), 1)
        k[:, :, : seen[0]], k[:, :, seen[3] :] = torch.nan, torch.nan
        v[:, :, : seen[0]], v[:, :, seen[3] :] = torch.inf, torch.nan
    assert not torch.isfinite(v).all()
    got = run(Call(call.tensors._replace(k=k, v=v), call.options, call.d_out, call.d_lse), late=late)
    assert torch.equal(got.out[: len(rows)], rows)


def _all_queries(call: Call) -> tuple[int, int, int, int, int | None, int | None, int]:
    problem, tensors = call.problem, call.tensors
    band = problem.mask.band
    start, stop = 0, problem.len_kv
    if tensors.kv_start is not None and tensors.kv_stop is not None:
        start, stop = int(tensors.kv_start[0]), int(tensors.kv_stop[0])
    return 0, problem.len_q, start, stop, band.left, band.right, band.offset(problem.len_q, problem.len_kv)


def test_tensors_of_any_strides_of_16_bytes_are_read_in_place() -> None:
    whole = torch.randn(2, 90, 3, 4, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    q, k, v = (whole[:, :, part].transpose(1, 2) for part in range(3))  # as one product for q, k and v leaves them
    call = Case("", 2, 4, 4, 90, 90, 64, 64, options=options(causal=True)).build("cpu", "bfloat16")
    call = Call(call.tensors._replace(q=q, k=k, v=v), call.options, call.d_out, call.d_lse)
    assert not q.is_contiguous()
    testing.check(run(call), call)


# ---- order and geometry ---------------------------------------------------------------------------------------------


def test_rows_see_what_the_one_rule_says() -> None:
    generator = np.random.default_rng(2)
    for _ in range(200):
        left, right = (None if x < -6 else int(x) for x in generator.integers(-9, 9, 2))
        len_kv, offset = int(generator.integers(0, 20)), int(generator.integers(-9, 9))
        q_pos, kv_pos = np.arange(12)[:, None], np.arange(24)[None]
        seen = rebound(rows_see)(Tensor(q_pos[:, 0], gl.int32), tensor(len_kv), tensor(offset), (left, right))
        got = kv_pos < seen[0].data[:, None]
        if len(seen) > 1:
            got = got & (kv_pos >= seen[1].data[:, None])
        right_answer = is_visible(q_pos, kv_pos, 0, len_kv, left, right, offset)
        assert np.array_equal(got, np.broadcast_to(right_answer, got.shape))


def test_a_consumer_works_on_the_blocks_that_its_rows_see_and_masks_those_that_are_cut() -> None:
    generator = np.random.default_rng(3)
    for _ in range(300):
        left, right = (None if x < -60 else int(x) for x in generator.integers(-90, 400, 2))
        len_q, len_kv, offset = (int(x) for x in generator.integers((1, 1, -300), (500, 900, 300)))
        plan = SimpleNamespace(groups=3, block_kv=64, right_masked=right is not None, left_masked=left is not None)
        start = 192 * int(generator.integers(0, -(-len_q // 192)))
        place, band = (tensor(start), 0, 0, tensor(len_q), tensor(len_kv), tensor(offset), 0), (left, right)
        first, last = (int(x) for x in rebound(visited)(place, band, plan))
        for group in range(3):
            own = tensor(start + 64 * group)
            stop, bare, masked, steps = map(
                int, rebound(own_steps)(own, tensor(first), tensor(last), place, band, plan)
            )
            rows, keys = np.arange(64)[:, None] + int(own), np.arange(first * 64, last * 64)[None]
            seen = np.broadcast_to(is_visible(rows, keys, 0, len_kv, left, right, offset), (64, keys.size))
            tiles = seen.reshape(64, -1, 64)
            works = {stop - 1 - i - first for i in range(steps)}
            asked = set(np.flatnonzero(tiles.any((0, 2))))
            assert works == asked if asked else works  # one step at least, be it all hidden
            assert all(tiles[:, stop - 1 - i - first].all() for i in range(bare, masked))


# ---- launching ------------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    """Launch through a driver that starts nothing, kernels that were never compiled."""
    recorder = Recorder()
    monkeypatch.setattr(launch, "_default", launch.Launcher(recorder))
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    return recorder


@pytest.mark.compile
def test_a_prepared_call_moves_its_maps_and_copies_what_does_not_lie_on_16_bytes(driver: Recorder) -> None:
    call = Case("", 1, 2, 1, 100, 90, 64, 64, options=options(layout="bshd")).build("cpu", "bfloat16")
    prepared = hopper.prepare(call.problem)
    whole = torch.randn(1 + call.tensors.k.numel()).bfloat16()
    k = whole[1:].view(call.tensors.k.shape)
    assert k.data_ptr() % 16
    tensors = (call.tensors.q, k, call.tensors.v, *call.tensors[3:])
    for given in (call.tensors, tensors):
        out, lse = prepared(given)
        _, _, parameters = driver.launches[-1]
        q_map, k_map, v_map, out_map = (raw for raw in parameters if len(raw) == 128)
        addresses = [int.from_bytes(raw[:8], "little") for raw in (q_map, k_map, v_map, out_map)]
        assert addresses[0] == given[0].data_ptr()
        assert (addresses[1] == given[1].data_ptr()) == (given is call.tensors)
        assert addresses[1] % 16 == 0
        assert addresses[2:] == [given[2].data_ptr(), out.data_ptr()]
        assert lse is not None
        assert out.shape == (1, 100, 2, 64)
    assert len(driver.loaded) == 1


# ---- what is refused ------------------------------------------------------------------------------------------------

Change = Callable[[torch.Tensor], torch.Tensor]
REFUSED: dict[str, tuple[Case, str, Change | None, str]] = {
    "float32": (Case(""), "float32", None, "float16 and bfloat16; got float32"),
    "a bias": (Case("", bias="qk"), "float16", None, "dense mask, bias or ALiBi"),
    "ALiBi": (Case("", alibi="h"), "float16", None, "dense mask, bias or ALiBi"),
    "a dense mask": (Case("", mask="qk"), "float16", None, "dense mask, bias or ALiBi"),
    "dropout": (Case("", options=options(dropout=0.5)), "float16", None, "has no dropout"),
    "wide heads": (Case("", dim_qk=264, dim_v=264), "float16", None, "head dims up to 256"),
    "narrow heads of v": (Case("", dim_v=12), "float16", None, "units of 16 bytes; got a head dim of 12"),
    "rows off 16 bytes": (Case("", strided=True), "float16", None, "rows in units of 16 bytes; got q"),
    "heads that share memory": (
        Case("", dim_qk=64, dim_v=64), "float16", lambda k: k[:, :1].expand(-1, 2, -1, -1), "of 16 bytes; got k",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_with_its_reason(name: str) -> None:
    case, dtype, change, reason = REFUSED[name]
    call = case.build("cpu", dtype)
    if change is not None:
        k = change(call.tensors.k)
        call = Call(call.tensors._replace(k=k), call.options, call.d_out, call.d_lse)
    assert reason in str(refusal(call.problem))


def test_settings_leave_room_for_what_a_call_brings_along() -> None:
    long = Case("", 1, 1, 1, 4096, 4096, 64, 64)
    capped, packed = replace(long, options=Options(softcap=2.0)), replace(long, lengths_q=(4096,))
    chosen = [hopper.settings(case.build("cpu", "float16").problem) for case in (long, capped, packed)]
    assert [(each.groups, each.schedule) for each in chosen] == [(3, "static"), (2, "static"), (3, "dynamic")]


def test_where_it_cannot_run_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = CASES["plain"].build("cpu", "float16").problem
    assert hopper.why_not(problem) == "runs on NVIDIA GPUs of compute capability 9.0; got cpu"


# ---- what it compiles to --------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """What a kernel takes: bytes that a thread spills, shared memory of a block."""

    spilled: int
    shared: int


class Variant(NamedTuple):
    """One kernel to compile: a case that asks for it, with a row of the table."""

    case: Case
    row: tuple[int, bool, int]
    taken: Taken


def case_of(dim: int, dim_v: int = 0, **more: object) -> Case:
    return Case("", 1, 2, 2, 256, 256, dim, dim_v or dim, options=options(**more))


# Recorded with Triton 3.6.0 and its ptxas 12.8, in bfloat16.
VARIANTS = {
    "d=64": Variant(case_of(64), (64, False, 1), Taken(0, 115136)),
    "d=64 causal": Variant(case_of(64, causal=True), (64, True, 1), Taken(0, 180756)),
    "d=128": Variant(case_of(128), (128, False, 0), Taken(0, 197020)),
    "d=128 causal": Variant(case_of(128, causal=True), (128, True, 1), Taken(0, 197040)),
}
SLOW = {
    "d=64 packed, window": Variant(
        replace(case_of(64, window_left=99, window_right=9), lengths_q=(128, 100)),
        (64, True, 0),
        Taken(20, 164360),
    ),
    "d=256 causal": Variant(case_of(256, causal=True), (256, True, 0), Taken(20, 197016)),
    "d=64 short": Variant(case_of(64), (64, False, 0), Taken(0, 164316)),
    "d=64 causal, short": Variant(case_of(64, causal=True), (64, True, 0), Taken(0, 164336)),
    "d=128 causal, short": Variant(case_of(128, causal=True), (128, True, 0), Taken(0, 197104)),
    "d=256": Variant(case_of(256), (256, False, 0), Taken(0, 196988)),
    "d=192/128": Variant(case_of(192, 128, causal=True), (256, True, 0), Taken(0, 197048)),
}


def compiled_variant(variant: Variant) -> compiling.Compiled:
    call = variant.case.build("cpu", "bfloat16")
    chosen = settings_of(*variant.row)
    return compile_named(attention_forward, launch_of(call, chosen, 132).named)


def check_variant(variant: Variant, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    compiled = compiled_variant(variant)
    found = Taken(spilled_bytes(compiled, tmp_path), compiling.resources(compiled).shared)
    record_property("resources", found._asdict())
    assert found.shared == variant.taken.shared
    assert found.spilled <= variant.taken.spilled


@pytest.mark.compile
@pytest.mark.parametrize("name", VARIANTS)
def test_a_kernel_takes_what_was_recorded_and_its_products_overlap(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    check_variant(VARIANTS[name], tmp_path, record_property)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("name", SLOW)
def test_other_kernels_take_what_was_recorded_too(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    check_variant(SLOW[name], tmp_path, record_property)
