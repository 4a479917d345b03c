"""The Triton kernels, run on the CPU by their interpreter: the one suite at small tiles, and borders of their own."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewise.problem.mask import Band, Mask
from tilewise.problem.problem import Needs, Options, Problem, Tensors
from tilewise.testing import CASES, Call, Case, Results, check, run

pytest.importorskip("triton")

from tilewise.backends import triton_portable
from tilewise.backends.extents import unit_of
from tilewise.machine.tiles import Tiles

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 before Python starts"
    ),
    # Triton 3.6's interpreter turns arrays of one element into numbers in a way that NumPy has deprecated.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]

NAME = "triton_portable"
SMALL = Tiles(32, 16)
SHORT = Case(
    "short", 1, 2, 1, 35, 20, bias="1hqk", sink="h", options=Options(causal=True, align="top_left", return_lse=True)
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 37 queries and keys be several tiles, masked and bare ones among them."""
    monkeypatch.setattr(triton_portable, "default_tiles", lambda *_: SMALL)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what torch allocates without a value with NaN, so that a row left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# The longest case has thousands of such tiles; the interpreter takes a millisecond for each.
ORDINARY = {name: case for name, case in CASES.items() if case.len_q * case.len_kv < 50_000}
# p of a hidden pair, and of rows behind the last, is computed and then dropped. With an lse of -300 it is infinite, of
# which NumPy alone warns; what is kept is judged all the same.
DROPPED = [
    pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning")
    for what in ("overflow encountered in exp2", "invalid value encountered in")
]
EACH = [pytest.param(case, id=name, marks=DROPPED if case.sink_mean else ()) for name, case in ORDINARY.items()]


@pytest.mark.parametrize("case", EACH)
def test_every_case_is_within_budget_in_float32(case: Case) -> None:
    call = case.build("cpu", "float32")
    assert {"out", "lse", "dq", "dk", "dv"} <= set(check(run(call, NAME), call))


@pytest.mark.parametrize("case", EACH)
def test_every_case_is_within_budget_in_float16(case: Case) -> None:
    call = case.build("cpu", "float16")
    check(run(call, NAME, gradients=False), call)


@pytest.mark.slow
@pytest.mark.parametrize("case", EACH)
def test_every_gradient_is_within_budget_in_float16(case: Case) -> None:
    call = case.build("cpu", "float16")
    check(run(call, NAME), call)


def test_rows_of_many_large_tiles_are_within_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_portable, "default_tiles", lambda *_: Tiles(128, 128))
    call = CASES["longer than a tile"].build("cpu", "float32")
    check(run(call, NAME), call)


# ---- large head dims ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(512, 512), (300, 40)])
def test_large_head_dims_are_within_budget(dims: tuple[int, int]) -> None:
    call = Case("large", 1, 2, 1, 20, 40, *dims, options=Options(causal=True, return_lse=True)).build("cpu", "float32")
    check(run(call, NAME), call)


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [((512, 512), "float32"), ((64, 512), "float32"), ((512, 128), "float16"), ((300, 300), "float16")],
)
def test_head_dims_in_pieces_are_within_budget(
    dims: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_portable, "default_tiles", lambda *_: Tiles(16, 16, max_dim=256))
    call = Case("wide", 1, 2, 1, 20, 30, *dims, options=Options(causal=True, return_lse=True)).build("cpu", dtype)
    assert {"out", "lse", "dq", "dk", "dv"} <= set(check(run(call, NAME), call))


WIDE = {
    case.name: case
    for case in (
        Case(
            "scores", 1, 2, 1, 35, 40, 33, 64, bias="1hqk", sink="h", alibi="h",
            options=Options(causal=True, window_left=9, softcap=3.0, scale=-0.3, dropout=0.1, return_lse=True),
        ),
        Case("mask", 1, 2, 2, 20, 40, 64, 16, mask="11qk", ranges=((3, 37),), strided=True),
        Case("packed", 1, 2, 1, dim_qk=16, dim_v=50, lengths_q=(20, 9), tail=2, bias="hqk", sink="h"),
    )
}  # fmt: skip


@pytest.mark.parametrize("case", WIDE.values(), ids=WIDE)
def test_whatever_is_asked_holds_of_head_dims_in_pieces_too(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_portable, "default_tiles", lambda *_: replace(SMALL, max_dim=32))
    call = case.build("cpu", "float32")
    check(run(call, NAME), call)


# ---- dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dropout", "dropout, causal, grouped heads", "packed, many at once"])
def test_dropout_keeps_the_same_pairs_as_the_torch_engine_in_both_passes(name: str) -> None:
    """With the identity for v and for d_out, out and dv show each pair by itself."""
    call = CASES[name].build("cpu", "float32")
    tensors, dim = call.tensors, 64
    identity = torch.eye(dim)
    if call.problem.kind == "varlen":
        values = torch.cat([identity[:n] for n in CASES[name].lengths_kv])[:, None].expand(-1, tensors.v.shape[1], -1)
        arriving = torch.cat([identity[:n] for n in CASES[name].lengths_q])[:, None].expand(-1, tensors.q.shape[1], -1)
    else:
        values = identity[: tensors.v.shape[2]].expand(*tensors.v.shape[:2], -1, -1)
        arriving = identity[: tensors.q.shape[2]].expand(*tensors.q.shape[:2], -1, -1)
    call = replace(call, tensors=tensors._replace(v=values), d_out=arriving, d_lse=torch.zeros_like(call.d_lse))
    got, want = run(call, NAME), run(call, "torch_tiled")
    assert got.dv is not None
    assert want.dv is not None
    for ours, theirs in ((got.out, want.out), (got.dv, want.dv)):
        assert torch.equal(ours != 0, theirs != 0)
    dropped = run(replace(call, options=call.options._replace(dropout=0.0)), "torch_tiled").out
    assert 0 < int((got.out != 0).sum()) < int((dropped != 0).sum())


# ---- what is hidden, and what only the device knows -----------------------------------------------------------------


def assert_same(got: Results, want: Results) -> None:
    assert (got.dtensors, want.dtensors) == ((), ())
    for name, ours, theirs in zip(Results._fields[:-1], got[:-1], want[:-1], strict=True):
        if ours is not None and theirs is not None:
            assert torch.equal(ours, theirs), name


def hidden_and_clean(call: Call, hidden: torch.Tensor) -> tuple[Call, Call]:
    """Give a call whose hidden keys and values are NaN and inf, and the same call with zeros there."""
    k, v = call.tensors.k, call.tensors.v
    dirty = call.tensors._replace(k=k.masked_fill(hidden, math.nan), v=v.masked_fill(hidden, math.inf))
    clean = call.tensors._replace(k=k.masked_fill(hidden, 0), v=v.masked_fill(hidden, 0))
    return replace(call, tensors=dirty), replace(call, tensors=clean)


@pytest.mark.parametrize("name", ["left padding", "right padding", "padding on both sides"])
def test_keys_outside_the_range_may_hold_anything(name: str) -> None:
    keys = torch.arange(37)
    hidden = torch.stack([(keys < start) | (keys >= stop) for start, stop in CASES[name].ranges])[:, None, :, None]
    dirty, clean = hidden_and_clean(CASES[name].build("cpu", "float32"), hidden)
    got = run(dirty, NAME)
    assert_same(got, run(clean, NAME))
    assert got.dk is not None
    assert not bool(got.dk.masked_select(hidden).any())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("max_dim", [None, 16])
def test_a_hidden_key_leaves_no_trace_in_the_softcaps_slope(
    max_dim: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_portable, "default_tiles", lambda *_: replace(SMALL, max_dim=max_dim))
    options = Options(softcap=2.0, return_lse=True)
    call = Case("hidden", 1, 1, 1, 20, 20, 24, 24, mask="111k", options=options).build("cpu", "float32")
    assert call.tensors.mask is not None
    dirty, clean = hidden_and_clean(call, ~call.tensors.mask.transpose(2, 3))
    assert_same(run(dirty, NAME), run(clean, NAME))


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning"
)  # NumPy sees inf - inf, before it is hidden
def test_keys_that_the_band_or_a_mask_hides_from_all_may_hold_anything() -> None:
    ahead = (torch.arange(37) >= 20)[None, None, :, None]
    dirty, clean = hidden_and_clean(CASES["causal top-left, more keys"].build("cpu", "float32"), ahead)
    assert_same(run(dirty, NAME), run(clean, NAME))
    call = CASES["padding mask"].build("cpu", "float32")
    assert call.tensors.mask is not None
    dirty, clean = hidden_and_clean(call, ~call.tensors.mask.transpose(2, 3))
    assert_same(run(dirty, NAME), run(clean, NAME))


def test_a_band_that_is_empty_everywhere_leaves_zeros_even_beside_nan() -> None:
    call = CASES["plain"].build("cpu", "float32")
    tensors = call.tensors._replace(v=torch.full_like(call.tensors.v, math.nan))
    problem = replace(call.problem, mask=Mask(Band(left=-4, right=3)))
    out, lse = triton_portable.forward(problem, tensors)
    assert not bool(out.any())
    assert bool((lse == -math.inf).all())
    grads = triton_portable.backward(problem, tensors, out, lse, call.d_out, call.d_lse, Needs())
    assert not any(bool(grad.any()) for grad in grads[:3] if grad is not None)


def unchecked(call: Call, **tensors: torch.Tensor) -> tuple[Problem, Tensors]:
    """Change contents that the host would refuse on a CPU and cannot read on a device."""
    return call.problem, call.tensors._replace(**tensors)


def test_lengths_beyond_the_tensors_are_held_to_them() -> None:
    ranges = CASES["padding on both sides"].build("cpu", "float32")
    wild = unchecked(ranges, kv_start=torch.tensor([-7, 11]), kv_stop=torch.tensor([10**12, 12]))
    tame = unchecked(ranges, kv_start=torch.tensor([0, 11]), kv_stop=torch.tensor([37, 12]))
    packed = CASES["packed"].build("cpu", "float32")
    bounds = torch.tensor([-3, 5, 5, 46, 47, 10**12])
    assert packed.tensors.cu_seqlens_q is not None
    for (problem, got), (_, want) in (
        (wild, tame),
        (unchecked(packed, cu_seqlens_q=bounds, cu_seqlens_k=bounds), (packed.problem, packed.tensors)),
    ):
        for ours, theirs in zip(
            triton_portable.forward(problem, got), triton_portable.forward(problem, want), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_tokens_behind_the_last_sequence_get_zeros_whatever_they_hold() -> None:
    call = CASES["packed causal with a tail"].build("cpu", "float32")
    dirty = [x.clone() for x in (call.tensors.q, call.tensors.k, call.tensors.v)]
    for x in dirty:
        x[-3:] = math.nan
    got = run(replace(call, tensors=call.tensors._replace(q=dirty[0], k=dirty[1], v=dirty[2])), NAME)
    assert_same(got, run(call, NAME))
    assert all(x is not None and not bool(x[-3:].any()) for x in (got.out, got.dq, got.dk, got.dv))


# ---- numbers at the edge --------------------------------------------------------------------------------------------


def test_a_window_wider_than_any_integer_of_the_kernel_hides_nothing() -> None:
    call = CASES["plain"].build("cpu", "float32")
    wide = replace(call, options=call.options._replace(window_left=2**40, window_right=2**40))
    check(run(wide, NAME), call)


def test_a_scale_of_zero_gives_the_mean_of_the_visible_values() -> None:
    call = CASES["causal"].build("cpu", "float32")
    call = replace(call, options=call.options._replace(scale=0.0))
    check(run(call, NAME), call)


@pytest.mark.parametrize("scale", [0.125, -0.11])
def test_scores_beyond_any_exponent_choose_their_largest(scale: float) -> None:
    q = torch.full((1, 2, 70, 64), 133120.0 * (-1 if scale < 0 else 1))
    k, v = q.abs(), torch.randn(1, 2, 70, 64)
    q[:, :, 20:24] /= 133120  # rows with near scores, beside far ones
    k[:, :, 5] *= 2
    k[:, :, 60] *= 4
    call = Call(
        Tensors(q, k, v), Options(causal=True, scale=scale, return_lse=True), torch.randn_like(v), torch.randn(1, 2, 70)
    )
    got = run(call, "triton_portable")
    choice = torch.cat([v[:, :, 5:6].expand(-1, -1, 55, -1), v[:, :, 60:61].expand(-1, -1, 10, -1)], 2)
    assert (got.out[:, :, 5:] - choice).abs().max() <= torch.finfo(torch.float32).eps * v.abs().max()
    for x in (got.lse, got.dq, got.dk, got.dv):
        assert x is not None
        assert x.isfinite().all()


def test_scores_as_small_as_the_softcap_allows_keep_their_digits() -> None:
    call = Case("cap", options=Options(softcap=500.0, return_lse=True)).build("cpu", "float32")
    check(run(call, NAME), call)


# ---- layouts --------------------------------------------------------------------------------------------------------


def test_only_tensors_that_load_16_bytes_at_once_take_the_aligned_kernel() -> None:
    x = torch.zeros(2, 2, 8, 16, dtype=torch.float16)
    assert unit_of(x, x) == 8
    assert unit_of(x.float()) == 4
    assert unit_of(x, x[..., 1:9]) == 1  # the pointer
    assert unit_of(x, x[..., :7].contiguous()) == 1  # the row
    assert unit_of(x.transpose(2, 3)) == 1  # the last axis
    assert unit_of(x.transpose(1, 2), x[:, :1].expand(2, 2, 8, 16)) == 8


@pytest.mark.parametrize("layout", ["stride 0", "bshd", "sliced"])
def test_d_out_is_read_by_its_own_strides(layout: str) -> None:
    call = SHORT.build("cpu", "float32")
    shape = call.d_out.shape
    d_out = {
        "stride 0": torch.ones(()).expand(shape),
        "bshd": call.d_out.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": torch.cat((call.d_out, torch.full_like(call.d_out, math.nan)), -1)[..., : shape[-1]],
    }[layout]
    got = run(replace(call, d_out=d_out), NAME)
    assert_same(got, run(replace(call, d_out=d_out.contiguous()), NAME))
    check(got, replace(call, d_out=d_out))


@pytest.mark.parametrize("missing", ["d_out", "d_lse"])
def test_a_gradient_that_does_not_arrive_counts_as_zero(missing: str) -> None:
    call = CASES["sink"].build("cpu", "float32")
    problem, tensors = call.problem, call.tensors
    out, lse = triton_portable.forward(problem, tensors)
    arriving: dict[str, Any] = {"d_out": call.d_out, "d_lse": call.d_lse, "needs": Needs(dsink=True)}
    zeros = triton_portable.backward(problem, tensors, out, lse, **arriving | {missing: arriving[missing] * 0})
    none = triton_portable.backward(problem, tensors, out, lse, **arriving | {missing: None})
    assert all(torch.equal(a, b) for a, b in zip(zeros, none, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("only", ["dq", "dk", "dv", "dbias", "dsink"])
def test_gradients_come_alone_as_they_come_together(only: str) -> None:
    call = SHORT.build("cpu", "float32")
    problem, tensors = call.problem, call.tensors
    out, lse = triton_portable.forward(problem, tensors)
    arriving = out, lse, call.d_out, call.d_lse
    whole = triton_portable.backward(problem, tensors, *arriving, Needs(dbias=True, dsink=True))
    needs = Needs(**{field: field == only for field in Needs._fields})
    alone = triton_portable.backward(problem, tensors, *arriving, needs)
    for field, got, want in zip(Needs._fields, alone, whole, strict=True):
        assert (got is None) == (field != only)
        assert got is None or (want is not None and torch.equal(got, want))


def test_two_runs_give_the_same_bits() -> None:
    call = CASES["packed, bias and sink"].build("cpu", "float32")
    assert_same(run(call, NAME), run(call, NAME))


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_what_it_cannot_do_it_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = CASES["plain"].build("cpu", "float32").problem
    assert triton_portable.why_not(problem) is None
    assert triton_portable.why_not(replace(problem, dtype="float64")) == "has no float64"
    assert triton_portable.why_not(replace(problem, dtype="bfloat16")) == "Triton's interpreter multiplies no bfloat16"
    assert "positions" in (triton_portable.why_not(replace(problem, len_kv=2**31)) or "")
    assert "got mps" in (triton_portable.why_not(replace(problem, device="mps")) or "")
    paged = replace(problem, specs={**problem.specs, "block_table": problem.specs["q"]})
    assert triton_portable.why_not(paged) == "has no paged keys"
    monkeypatch.setattr(triton_portable, "_capability", lambda _: (7, 0))
    assert "7.5 or newer; got 7.0" in (triton_portable.why_not(replace(problem, device="cuda:0")) or "")
    monkeypatch.setattr(triton_portable, "_capability", lambda _: (7, 5))
    turing = replace(problem, device="cuda:0", dtype="bfloat16")
    assert "bfloat16 needs compute capability 8.0" in (triton_portable.why_not(turing) or "")
    assert triton_portable.why_not(replace(turing, dtype="float16")) is None
    monkeypatch.setattr(triton_portable, "_has_triton", lambda: False)
    assert triton_portable.why_not(problem) == "triton is not installed"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert triton_portable.why_not(problem) == "needs a GPU; on a CPU only under TRITON_INTERPRET=1"


def test_named_it_serves_a_call_of_the_front_door() -> None:
    import tilewise

    q = torch.randn(1, 2, 40, 16, requires_grad=True)
    out = tilewise.attention(q, q, q, causal=True, backend=NAME)
    out.sum().backward()
    assert q.grad is not None
    assert bool(torch.isfinite(q.grad).all())
    plan = tilewise.explain(tilewise.attention, q, q, q, causal=True, backend=NAME)
    assert (plan.backend, plan.tiles) == (NAME, SMALL)
