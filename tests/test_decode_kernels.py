"""Decoding by the Triton kernels, run on the CPU by their interpreter: every feature alone, in pairs, and at borders."""

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

pytest.importorskip("triton")

from tilewise.backends import triton_decode, triton_portable
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
    yield
    triton_decode._prepared.cache_clear()


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
                    call[name] = max(options, key=lambda n: (_gain({**call, name: n}, ahead), draw.random()))  # noqa: B023
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
