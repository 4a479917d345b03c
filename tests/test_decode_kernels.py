"""Decoding by the Triton kernels, run on the CPU by their interpreter: features alone, in pairs, and borders."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

import tilewise
from tilewise import autograd
from tilewise.bench.decoding import Case, Drawn
from tilewise.problem.cache import CacheOptions, CacheTensors
from tilewise.recall import forget

pytest.importorskip("triton")

from tilewise.backends import torch_tiled, triton_decode, triton_portable
from tilewise.machine.tiles import Splits, Tiles

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 before Python starts"
    ),
    # Triton 3.6's interpreter turns arrays of one element into numbers in a way that NumPy has deprecated.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]

NAME = "triton_portable"
SMALL = Tiles(16, 16)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a hundred keys be several blocks, and give no split back that was settled with other tiles."""
    monkeypatch.setattr(triton_decode, "default_tiles", lambda *_: SMALL)
    triton_decode._prepared.cache_clear()
    forget()
    yield
    triton_decode._prepared.cache_clear()
    forget()


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fill what torch allocates without a value with NaN, so that a row left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# ---- features -------------------------------------------------------------------------------------------------------

# What each feature adds to a call; the first of each is what a call has without it.
FEATURES: dict[str, list[dict[str, Any]]] = {
    "pages": [{}, {"page_size": 1}, {"page_size": 3}, {"page_size": 16}, {"page_size": 32}],
    "append": [{}, {"new": 1}, {"new": 3}],
    "rotary": [{}, {"rotary": 16}, {"rotary": 8, "interleaved": False}],
    "leftpad": [{}, {"leftpad": (3, 0, 40)}],
    "index": [{}, {"rows": 2}],
    "stored": [{}, {"stored": "int8"}, {"stored": "float8_e4m3fn"}, {"stored": "float8_e5m2"}],
    "band": [{}, {"causal": False}, {"window": (4, 0)}, {"window": (20, 3), "causal": False}, {"align": "top_left"}],
    "softcap": [{}, {"softcap": 1.5}],
    "alibi": [{}, {"alibi": "h"}, {"alibi": "bh"}],
    "sink": [{}, {"sink": "h"}, {"sink": "bh"}],
    "queries": [{}, {"len_q": 2}, {"len_q": 7, "heads_q": 6}],
    "splits": [{}, {"num_splits": 1}, {"num_splits": 3}, {"num_splits": 100}, {"batch_invariant": True}],
    "dims": [{}, {"dim_qk": 24, "dim_v": 8}, {"dim_qk": 18, "dim_v": 33}],
    "layout": [{}, {"layout": "bhsd"}],
    "scale": [{}, {"scale": -0.3}],
}


def fits(chosen: dict[str, int]) -> bool:
    """Say whether these features go together: rotary turns new keys, and pages have no rows to choose.

    The interpreter rounds 8-bit floats wrongly where the exponent must rise, so those are only read here.
    """
    is_float8 = chosen.get("stored", 0) > 1
    return not (
        (chosen.get("rotary") and "append" in chosen and not chosen["append"])
        or (chosen.get("index") and chosen.get("pages"))
        or (is_float8 and (chosen.get("append") or chosen.get("rotary")))
    )


def covering_calls() -> list[dict[str, int]]:
    """Choose calls so that each two features that go together meet in all their forms; greedily, from a fixed seed."""
    draw = random.Random(0)  # noqa: S311 - nothing secret
    names = list(FEATURES)
    ahead = {
        ((one, a), (two, b))
        for one, two in combinations(names, 2)
        for a in range(len(FEATURES[one]))
        for b in range(len(FEATURES[two]))
        if fits({one: a, two: b})
    }
    calls = []
    while ahead:
        best: tuple[int, dict[str, int]] = (0, {})
        for _ in range(40):
            call = dict(draw.choice(sorted(ahead)))
            for name in draw.sample(names, len(names)):
                if name not in call:
                    options = [n for n in range(len(FEATURES[name])) if fits({**call, name: n})]
                    if name == "append" and call.get("rotary"):
                        options = [n for n in options if n]
                    call[name] = max(options, key=lambda n: (_gain({**call, name: n}, ahead), draw.random()))
            if fits(call) and _gain(call, ahead) > best[0]:
                best = _gain(call, ahead), call
        calls.append(best[1])
        ahead -= set(_pairs(best[1]))
    return calls


def _pairs(call: dict[str, int]) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    yield from combinations([(name, call[name]) for name in FEATURES if name in call], 2)


def _gain(call: dict[str, int], ahead: set[tuple[tuple[str, int], tuple[str, int]]]) -> int:
    return sum(pair in ahead for pair in _pairs(call))


def case_of(call: dict[str, int]) -> Case:
    options: dict[str, Any] = {}
    for name, number in call.items():
        options |= FEATURES[name][number]
    label = ", ".join(f"{name} {number}" for name, number in call.items() if number)
    return Case(label, **options)


ALONE = [
    case_of({"append": 1, name: number} if name == "rotary" else {name: number})
    for name, forms in FEATURES.items()
    for number in range(1, len(forms))
]


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_each_feature_is_within_budget(case: Case) -> None:
    case.build("cpu", "float32").check(NAME)


COVERING = covering_calls()


@pytest.mark.parametrize("number", range(len(COVERING)))
def test_features_in_pairs_are_within_budget(number: int) -> None:
    case_of(COVERING[number]).build("cpu", "float32", number).check(NAME)


def test_the_calls_cover_every_pair_that_goes_together() -> None:
    met = {pair for call in COVERING for pair in _pairs(call)}
    for one, two in combinations(FEATURES, 2):
        for a in range(len(FEATURES[one])):
            for b in range(len(FEATURES[two])):
                assert (((one, a), (two, b)) in met) == fits({one: a, two: b})


@pytest.mark.parametrize(
    "case", [Case("plain"), Case("new", new=2, rotary=16, page_size=16), Case("int8", stored="int8")]
)
def test_half_precision_is_within_budget(case: Case) -> None:
    case.build("cpu", "float16").check(NAME)


# ---- splits ---------------------------------------------------------------------------------------------------------

LONG = Case("long", heads_q=2, heads_kv=1, capacity=200, lengths=(190, 1, 70), num_splits=5)


@pytest.mark.parametrize("capacity", [190, 1000])
@pytest.mark.parametrize("splits", [1, 2, 12])
def test_neither_capacity_nor_splits_change_more_than_roundings(capacity: int, splits: int) -> None:
    case = replace(LONG, capacity=capacity, num_splits=splits)
    drawn = case.build("cpu", "float32")
    same = LONG.build("cpu", "float32").tensors
    k, v = (torch.full_like(x, math.nan) for x in drawn.tensors[1:3])
    k[:, :190], v[:, :190] = same.k_cache[:, :190], same.v_cache[:, :190]
    replace(drawn, tensors=same._replace(k_cache=k, v_cache=v)).check(NAME)


def test_counters_are_zero_again_and_a_second_call_sees_its_own_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    counters: list[torch.Tensor] = []

    def zeros(device: torch.device, count: int) -> torch.Tensor:
        counters.append(torch.zeros(count, dtype=torch.int32, device=device))
        return counters[-1]

    monkeypatch.setattr(triton_decode, "zeros", zeros)
    drawn = LONG.build("cpu", "float32")
    drawn.check(NAME)
    other = replace(drawn, case=replace(LONG, lengths=(10, 0, 69)))
    other = replace(other, tensors=drawn.tensors._replace(cache_seqlens=torch.tensor([10, 0, 69], dtype=torch.int32)))
    other.check(NAME)
    assert counters
    assert not any(bool(x.any()) for x in counters)


def company(page_size: int = 0, window: tuple[int | None, int | None] = (None, None)) -> Drawn:
    """Draw sequences in which a query sees a block less than the next one."""
    case = Case(
        "company",
        heads_q=4,
        heads_kv=1,
        len_q=3,
        capacity=150,
        lengths=(146, 3, 98),
        window=window,
        page_size=page_size,
    )
    return case.build("cpu", "float32")


def differing_rows(drawn: Drawn, **how: Any) -> list[tuple[int, int]]:
    """Name the queries whose bits, alone in a batch and alone in their sequence, are not those they have in company."""

    def rows(**changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        changed = drawn.tensors._replace(**changes)
        return replace(drawn, case=replace(drawn.case, **how), tensors=changed).copy().run(NAME)

    t, differing = drawn.tensors, []
    out, lse = rows()
    for sequence in range(3):
        own = slice(sequence, sequence + 1)
        one: dict[str, Any] = {} if t.block_table is None else {"block_table": t.block_table[own]}
        if t.block_table is None:
            one = {"k_cache": t.k_cache[own], "v_cache": t.v_cache[own]}
        for query in range(3):  # as they were before the later keys came
            held = case_lengths(t)[own] - (2 - query)
            single = rows(q=t.q[own, query : query + 1], cache_seqlens=held, **one)
            same_out = torch.equal(single[0], out[own, query : query + 1])
            if not (same_out and torch.equal(single[1], lse[own, :, query : query + 1])):
                differing.append((sequence, query))
    return differing


@pytest.mark.parametrize("window", [(None, None), (25, 0)])
@pytest.mark.parametrize("page_size", [0, 16])
def test_batch_invariant_bits_do_not_depend_on_the_company_of_a_row(
    page_size: int, window: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewise.machine.tiles.FIXED_SPLIT", 32)
    assert differing_rows(company(page_size, window), batch_invariant=True) == []


def test_without_batch_invariance_bits_do_depend_on_it() -> None:
    assert (0, 0) in differing_rows(company(), num_splits=3)


def case_lengths(tensors: CacheTensors) -> torch.Tensor:
    assert tensors.cache_seqlens is not None
    return tensors.cache_seqlens


def test_the_number_of_splits_asked_for_is_taken_as_far_as_there_are_blocks() -> None:
    problem = autograd.problem_for(LONG.build("cpu", "float32").tensors, LONG.options)
    assert triton_decode.splits(problem, SMALL) == Splits(5)
    many = autograd.problem_for(LONG.build("cpu", "float32").tensors, LONG.options._replace(num_splits=999))
    assert triton_decode.splits(many, SMALL) == Splits(13)


# ---- what only the device knows -------------------------------------------------------------------------------------


def decode(module: Any, tensors: CacheTensors, options: CacheOptions, **wild: torch.Tensor) -> list[torch.Tensor]:
    """Call a backend with contents that the host would refuse on a CPU and cannot read on a device."""
    problem = autograd.problem_for(tensors, options)
    own = tensors._replace(k_cache=tensors.k_cache.clone(), v_cache=tensors.v_cache.clone(), **wild)
    return [*module.decode(problem, own), own.k_cache, own.v_cache]


WILD: dict[str, tuple[Case, dict[str, torch.Tensor]]] = {
    "tokens beyond the capacity": (
        Case("full", new=3, lengths=(33, 0, 57)),
        {"cache_seqlens": torch.tensor([58, 60, 59])},
    ),
    "tokens beyond the pages": (
        Case("full pages", new=3, lengths=(33, 0, 57), page_size=7, capacity=60),
        {"cache_seqlens": torch.tensor([62, 63, 61])},
    ),
    "lengths out of all bounds": (
        Case("lengths", new=2, lengths=(33, 0, 57), rotary=16),
        {"cache_seqlens": torch.tensor([10**12, -1, -(10**12)])},
    ),
    "pages that are not there": (
        Case("pages", page_size=16),
        {"block_table": torch.tensor([[10**6, 1, -5, 2], [3, 4, 5, 6], [7, 8, 9, 10**9]])},
    ),
    "rows and padding that are not there": (
        Case("rows", rows=2, leftpad=(0, 0, 0)),
        {"cache_batch_idx": torch.tensor([99, -1, 2]), "cache_leftpad": torch.tensor([-3, 10**9, 5])},
    ),
}


@pytest.mark.parametrize("name", WILD)
def test_what_the_host_cannot_check_is_held_to_the_cache_as_torch_holds_it(name: str) -> None:
    case, wild = WILD[name]
    drawn = case.build("cpu", "float32")
    clean = drawn.tensors._replace(
        k_cache=drawn.tensors.k_cache.nan_to_num(), v_cache=drawn.tensors.v_cache.nan_to_num()
    )
    got = decode(triton_decode, clean, case.options, **wild)
    want = decode(torch_tiled, clean, case.options, **wild)
    assert torch.equal(got[1].isinf(), want[1].isinf())
    for ours, theirs in zip(got[:2], want[:2], strict=True):
        assert torch.allclose(ours.nan_to_num(), theirs.nan_to_num(), rtol=1e-5, atol=1e-6)
    assert torch.equal(got[2], want[2])
    assert torch.equal(got[3], want[3])


# ---- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 3])
def test_tensors_of_any_strides_are_read_and_written_where_they_lie(number: int) -> None:
    case = Case("strided", new=2, rotary=8, leftpad=(1, 0, 2), sink="bh", alibi="h", page_size=(0, 8)[number > 0])
    drawn = case.build("cpu", "float32", number)
    want = drawn.copy().run("torch_tiled")
    wide = [None if x is None else inside_nan(x) for x in drawn.tensors]
    strided = replace(drawn, tensors=CacheTensors(*wide))  # type: ignore[arg-type]
    got = strided.run(NAME)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    _, right = drawn.written()
    assert torch.equal(strided.tensors.k_cache.nan_to_num(), right.tensors.k_cache.nan_to_num())
    assert torch.equal(strided.tensors.v_cache.nan_to_num(), right.tensors.v_cache.nan_to_num())


def inside_nan(x: torch.Tensor) -> torch.Tensor:
    """View data inside a wider tensor: every second element of the last axis, margins elsewhere."""
    fill = math.nan if x.is_floating_point() else 10**6
    wide = torch.full([*(size + 2 for size in x.shape[:-1]), 2 * x.shape[-1] + 1], fill, dtype=x.dtype)
    view = wide[tuple(slice(1, size + 1) for size in x.shape[:-1])][..., 1::2]
    return view.copy_(x)


def test_one_cache_serves_a_whole_batch_by_a_stride_of_zero() -> None:
    drawn = Case("shared", lengths=(20, 20, 20)).build("cpu", "float32")
    t = drawn.tensors
    one = t._replace(k_cache=t.k_cache[:1].expand_as(t.k_cache), v_cache=t.v_cache[:1].expand_as(t.v_cache))
    replace(drawn, tensors=one).check(NAME)


def test_only_rows_that_load_16_bytes_at_once_take_the_aligned_kernel() -> None:
    def units(**changes: Any) -> tuple[int, int, int]:
        drawn = Case("units", **changes).build("cpu", "float16")
        return triton_decode._units(autograd.problem_for(drawn.tensors, drawn.case.options))

    assert units() == (8, 8, 8)
    assert units(stored="int8") == (8, 16, 16)
    assert units(dim_qk=20) == (1, 1, 1)
    assert units(stored="int8", dim_qk=24) == (1, 1, 1)  # 24 bytes a row


# ---- the front door -------------------------------------------------------------------------------------------------


def test_lse_is_left_out_where_nobody_reads_it() -> None:
    drawn = Case("quiet").build("cpu", "float32")
    quiet = drawn.case.options._replace(return_lse=False)
    problem = autograd.problem_for(drawn.tensors, quiet)
    out, lse = triton_portable.prepare(problem)(drawn.tensors)
    assert lse is None
    assert torch.equal(out, drawn.run(NAME)[0])


@pytest.mark.parametrize("is_view", [False, True])
def test_a_second_call_like_the_first_keeps_the_users_order_of_axes(is_view: bool) -> None:
    t = Case("again", len_q=3).build("cpu", "float32").tensors
    q = t.q.transpose(1, 2) if is_view else t.q.transpose(1, 2).contiguous()
    k, v = (x.nan_to_num().transpose(1, 2) for x in (t.k_cache, t.v_cache))
    first, second = (tilewise.attention_with_kvcache(q, k, v, layout="bhsd", backend=NAME) for _ in range(2))
    want = tilewise.attention_with_kvcache(q, k, v, layout="bhsd", backend="torch_tiled")
    assert first.shape == second.shape == want.shape
    assert torch.equal(first, second)
    assert torch.allclose(first, want, rtol=1e-5, atol=1e-6)


def test_the_plan_of_a_call_names_its_tiles() -> None:
    drawn = Case("plan", len_q=7, heads_q=6).build("cpu", "float32")
    t = drawn.tensors
    plan = tilewise.explain(
        tilewise.attention_with_kvcache, t.q, t.k_cache, t.v_cache, cache_seqlens=t.cache_seqlens, backend=NAME
    )
    assert (plan.backend, plan.tiles) == (NAME, replace(SMALL, block_q=32))  # 3 heads x 7 queries share a key head


def test_what_it_cannot_do_it_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Case("8 bits", stored="float8_e4m3fn").build("cpu", "float16")
    problem = autograd.problem_for(drawn.tensors, drawn.case.options)
    assert triton_portable.why_not(problem) is None
    gpu = replace(problem, device="cuda:0")
    monkeypatch.setattr(triton_portable, "_capability", lambda _: (8, 6))
    monkeypatch.setattr(triton_decode, "_capability", lambda _: (8, 6))
    assert "8.9 or newer; got 8.6" in (triton_portable.why_not(gpu) or "")
    monkeypatch.setattr(triton_decode, "_capability", lambda _: "gfx942")
    assert "other 8-bit floats" in (triton_portable.why_not(gpu) or "")
    wide = Case("wide").build("cpu", "float64")
    wide_problem = autograd.problem_for(wide.tensors, wide.case.options)
    assert triton_portable.why_not(wide_problem) == "has no float64"
