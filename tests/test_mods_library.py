"""What holds for the known masks and scores: each is what its paper says, in NumPy, in torch and in a kernel."""
# ruff: noqa: ARG005 - rules have one signature, whether or not they need all of it

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise import mods
from tilewise.mods import masks, scores, tanh
from tilewise.mods.trace import trace_mask, trace_score
from tilewise.testing import error

LENGTH = 24
RNG = np.random.default_rng(0)
DOCUMENT = np.repeat(np.arange(4), (5, 1, 10, 8))
START = np.array([0, 5, 6, 16, 24])
PREFIX_OF = np.array([0, 0, 0, 3])
IMAGE = np.repeat(np.arange(4), 6)
INTERVAL = np.array([[0, 9], [3, 9], [12, 20], [20, 24]])
IS_GLOBAL = RNG.random(LENGTH) < 0.2
PREFIXES = np.array([3, 11])


def near(position: int, size: int, kernel: int) -> range:
    """The positions of one axis that a neighbourhood moved inwards at the border holds."""
    start = min(max(position - kernel // 2, 0), size - kernel)
    return range(start, start + kernel)


def in_neighbourhood(q: int, kv: int) -> bool:
    return kv // 6 in near(q // 6, 4, 3) and kv % 6 in near(q % 6, 6, 5)


def in_tiled_window(q: int, kv: int) -> bool:
    """A picture of 4 x 5 in tiles of 2 x 1, a window of 2 x 3, and text behind its 20 positions up to 22."""
    if kv >= 22:
        return False
    if q >= 20 or kv >= 20:
        return True
    (q_y, q_x), (kv_y, kv_x) = divmod(q // 2, 5), divmod(kv // 2, 5)
    return kv_y in near(q_y, 2, 1) and kv_x in near(q_x, 5, 3)


def in_shared_prefix(q: int, kv: int) -> bool:
    own, other = DOCUMENT[q], DOCUMENT[kv]
    return bool((own == other and kv <= q) or (other == PREFIX_OF[own] and other != own))


# What each mask means, pair by pair, in plain Python.
MASKS: dict[str, tuple[masks.Mask, Callable[[int, int, int], bool]]] = {
    "causal": (masks.causal(), lambda batch, q, kv: kv <= q),
    "sliding window": (masks.sliding_window(5, 2), lambda batch, q, kv: q - 5 <= kv <= q + 2),
    "dilated window": (masks.dilated_window(7, 3), lambda batch, q, kv: kv - q in range(-6, 7, 3)),
    "global window": (
        masks.global_window(2, IS_GLOBAL),
        lambda batch, q, kv: bool(kv in range(q - 2, q + 3) or IS_GLOBAL[q] or IS_GLOBAL[kv]),
    ),
    "prefix": (masks.prefix_lm(9), lambda batch, q, kv: kv < 9 or kv <= q),
    "prefix of each sequence": (masks.prefix_lm(PREFIXES), lambda batch, q, kv: bool(kv < PREFIXES[batch]) or kv <= q),
    "documents": (masks.documents(DOCUMENT), lambda batch, q, kv: bool(DOCUMENT[q] == DOCUMENT[kv]) and kv <= q),
    "documents, both directions": (
        masks.documents(DOCUMENT, is_causal=False),
        lambda batch, q, kv: bool(DOCUMENT[q] == DOCUMENT[kv]),
    ),
    "documents of each sequence": (
        masks.documents(np.stack([DOCUMENT, IMAGE])),
        lambda batch, q, kv: bool((DOCUMENT, IMAGE)[batch][q] == (DOCUMENT, IMAGE)[batch][kv]) and kv <= q,
    ),
    "shared prefix": (
        masks.shared_prefix(DOCUMENT, START, PREFIX_OF),
        lambda batch, q, kv: in_shared_prefix(q, kv),
    ),
    "images across": (
        masks.cross_images(IMAGE, INTERVAL),
        lambda batch, q, kv: q in range(*INTERVAL[IMAGE[kv]].tolist()),
    ),
    "neighbourhood": (masks.neighbourhood(4, 6, 3, 5), lambda batch, q, kv: in_neighbourhood(q, kv)),
    "tiled window": (
        masks.tiled_window((4, 5), (2, 3), (2, 1), text=2),
        lambda batch, q, kv: in_tiled_window(q, kv),
    ),
    "all of": (
        masks.all_of(masks.documents(DOCUMENT), masks.sliding_window(3), masks.global_window(1, IS_GLOBAL)),
        lambda batch, q, kv: bool(
            DOCUMENT[q] == DOCUMENT[kv] and q - 3 <= kv <= q and (q - kv <= 1 or IS_GLOBAL[q] or IS_GLOBAL[kv])
        ),
    ),
    "any of": (
        masks.any_of(masks.sliding_window(1), masks.documents(DOCUMENT)),
        lambda batch, q, kv: (q - 1 <= kv <= q) or (bool(DOCUMENT[q] == DOCUMENT[kv]) and kv <= q),
    ),
}


def as_torch(tensors: tuple[object, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.as_tensor(tensor) for tensor in tensors)


def positions() -> tuple[np.ndarray, ...]:
    """Every batch, head, query and key, in axes that broadcast."""
    batch, head, q_pos, kv_pos = np.ogrid[:2, :3, :LENGTH, :LENGTH]
    return batch, head, q_pos, kv_pos


@pytest.mark.parametrize("name", MASKS)
def test_a_known_mask_is_what_it_says_in_numpy_in_torch_and_translated(name: str) -> None:
    (function, tensors), rule = MASKS[name]
    expected = np.array(
        [[[[rule(b, q, kv) for kv in range(LENGTH)] for q in range(LENGTH)]] for b in range(2)], dtype=bool
    )
    assert 0 < expected.sum() < expected.size
    places = positions()
    shape = (2, 1, LENGTH, LENGTH)
    plain = np.broadcast_to(np.asarray(function(*places, *tensors)), (2, 1, LENGTH, LENGTH))
    np.testing.assert_array_equal(plain, expected)
    torch_places = [torch.as_tensor(place) for place in places]
    eager = function(*torch_places, *as_torch(tensors))
    assert isinstance(eager, torch.Tensor)
    np.testing.assert_array_equal(eager.expand(shape).numpy(), expected)
    traced, lifted = trace_mask(function, as_torch(tensors))
    np.testing.assert_array_equal(traced.run(*torch_places, lifted).expand(shape).numpy(), expected)


def test_other_numbers_are_the_same_mask_to_a_kernel() -> None:
    pairs = (
        (masks.sliding_window(5, 2), masks.sliding_window(100, 1)),
        (masks.dilated_window(7, 3), masks.dilated_window(70, 3)),
        (masks.prefix_lm(9), masks.prefix_lm(0)),
        (masks.neighbourhood(4, 6, 3, 5), masks.neighbourhood(40, 6, 1, 3)),
        (masks.tiled_window((4, 5), (2, 3), (2, 1)), masks.tiled_window((8, 5), (6, 1), (2, 1), text=7)),
    )
    for one, other in pairs:
        first, second = trace_mask(one[0])[0], trace_mask(other[0])[0]
        assert first.key == second.key
        assert first.constants != second.constants


@pytest.mark.parametrize("dilation", [1, 3, 4, 7, 8])
def test_a_divisor_stands_in_the_source_and_is_right_for_each_value(dilation: int) -> None:
    q_pos, kv_pos = torch.arange(40)[:, None], torch.arange(40)[None, :]
    function, _ = masks.dilated_window(20, dilation)
    traced, tensors = trace_mask(function)
    assert " % constants" not in traced.source
    apart = (q_pos - kv_pos).abs()
    expected = (apart <= 20) & (apart % dilation == 0)
    assert torch.equal(traced.run(0, 0, q_pos, kv_pos, tensors), expected)


def test_a_mask_may_begin_with_numbers_that_no_picture_has() -> None:
    with pytest.raises(ValueError, match=r"sides are odd; got \(2, 3\)"):
        masks.neighbourhood(4, 4, 2, 3)
    with pytest.raises(ValueError, match=r"divide the kernel; got kernel \(3, 2\) and tile \(2, 2\)"):
        masks.tiled_window((4, 4), (3, 2), (2, 2))
    with pytest.raises(ValueError, match="no mask"):
        masks.all_of()


def test_a_mask_is_drawn_of_torch_tensors_too() -> None:
    document = torch.tensor([0, 0, 1])
    assert masks.draw(masks.documents(document), 3, 3) == "#..\n##.\n..#"


# ---- scores ----

TABLE = RNG.standard_normal((32, 3))
KIND = RNG.integers(0, 5, (2, LENGTH, LENGTH))
BIAS = RNG.standard_normal((3, 5))


def t5(distance: int, is_bidirectional: bool) -> int:
    """T5's bucket of one distance, with real numbers; the distances of these tests lie at no border."""
    buckets, first = 32, 0
    if is_bidirectional:
        buckets = 16
        first = 16 if distance > 0 else 0
    away = abs(distance) if is_bidirectional else max(-distance, 0)
    half = buckets // 2
    if away < half:
        return first + away
    return first + min(half + int(math.log(away / half) / math.log(20 / half) * (buckets - half)), buckets - 1)


SCORES: dict[str, tuple[scores.Score, Callable[[float, int, int, int, int], float]]] = {
    "ALiBi": (scores.alibi(3), lambda s, b, h, q, kv: s - 2.0 ** (-8 * (h + 1) / 3) * abs(q - kv)),
    "softcap": (scores.softcap(1.5), lambda s, b, h, q, kv: 1.5 * math.tanh(s / 1.5)),
    "T5": (
        scores.relative_bias(TABLE, max_distance=20),
        lambda s, b, h, q, kv: s + float(TABLE[t5(kv - q, True), h]),
    ),
    "T5, decoder": (
        scores.relative_bias(TABLE, max_distance=20, is_bidirectional=False),
        lambda s, b, h, q, kv: s + float(TABLE[t5(kv - q, False), h]),
    ),
    "sandwich": (
        scores.sandwich(3, TABLE, max_distance=LENGTH, dim=16),
        lambda s, b, h, q, kv: s + sum(math.cos((q - kv) * 10000.0 ** (-i / 8)) for i in range(8)) * 3 / (8 * (h + 1)),
    ),
    "sigmoid": (scores.activation(), lambda s, b, h, q, kv: -math.log1p(math.exp(-s))),
    "tanh": (scores.activation(tanh, offset=1.5), lambda s, b, h, q, kv: math.log(math.tanh(s) + 1.5)),
    "kinds of pairs": (scores.pair_bias(BIAS, KIND), lambda s, b, h, q, kv: s + float(BIAS[h, KIND[b, q, kv]])),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_known_score_is_what_it_says_in_numpy_in_torch_and_translated(name: str) -> None:
    (function, tensors), rule = SCORES[name]
    shape = (2, 3, LENGTH, LENGTH)
    score = np.random.default_rng(1).standard_normal(shape) * 2
    expected = torch.tensor(np.array([rule(float(score[place]), *place) for place in np.ndindex(shape)]).reshape(shape))
    places = positions()
    plain = torch.as_tensor(np.asarray(function(score, *places, *tensors)))
    torch_places = [torch.as_tensor(place) for place in places]
    wide = function(torch.as_tensor(score), *torch_places, *as_torch(tensors))
    traced, lifted = trace_score(function, as_torch(tensors))
    run = traced.run(torch.as_tensor(score), *torch_places, lifted)
    assert isinstance(wide, torch.Tensor)
    # The sandwich's table and the functions of float32 inside are what float32 is.
    low = function(torch.as_tensor(score).float(), *torch_places, *as_torch(tensors))
    assert isinstance(low, torch.Tensor)
    for found in (plain, wide, run):
        assert error(found, expected, low, torch.finfo(torch.float32).eps).within
    assert run.dtype == torch.float64


def test_the_gradient_of_t5s_table_comes_back_through_its_spreading() -> None:
    table = torch.tensor(TABLE, requires_grad=True)
    function, (by_distance,) = scores.relative_bias(table, max_distance=20)
    assert isinstance(by_distance, torch.Tensor)
    places = [torch.as_tensor(place) for place in positions()]
    traced, lifted = trace_score(function, (by_distance,))
    traced.run(torch.zeros(2, 3, LENGTH, LENGTH, dtype=torch.float64), *places, lifted).sum().backward()
    counts = np.zeros((32, 3))
    for q in range(LENGTH):
        for kv in range(LENGTH):
            counts[t5(kv - q, True)] += 2
    assert table.grad is not None
    np.testing.assert_array_equal(table.grad.numpy(), counts)


def test_other_numbers_are_the_same_score_to_a_kernel() -> None:
    for one, other in ((scores.alibi(8), scores.alibi(40)), (scores.softcap(50.0), scores.softcap(0.5))):
        first, second = trace_score(one[0])[0], trace_score(other[0])[0]
        assert first.key == second.key
        assert first.constants != second.constants


# ---- in a kernel ----


@pytest.mark.interpreter
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 before Python starts")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")
@pytest.mark.parametrize("name", MASKS)
def test_a_known_mask_is_the_same_in_a_kernel(name: str) -> None:
    pytest.importorskip("triton")
    from mods_tile import described, device_function, one_tile

    (function, tensors), rule = MASKS[name]
    traced, lifted = trace_mask(function, as_torch(tensors))
    seen = torch.full((2, 1, LENGTH, LENGTH), 7, dtype=torch.int8)
    one_tile[(2,)](
        None, None, None, None, seen, None, 1, LENGTH, LENGTH, (), (), (), described(lifted), traced.constants,
        None, None, device_function(traced.source), 32, 32, False,
    )  # fmt: skip
    expected = [[[[rule(b, q, kv) for kv in range(LENGTH)] for q in range(LENGTH)]] for b in range(2)]
    assert torch.equal(seen, torch.tensor(expected, dtype=torch.int8))


def test_what_scores_and_masks_are_written_with_loads_no_torch() -> None:
    code = (
        "import sys, numpy as np, tilewise.mods as mods\n"
        "function, tensors = mods.masks.documents(np.zeros(4, int))\n"
        "function(0, 0, np.arange(4)[:, None], np.arange(4), *tensors)\n"
        "mods.scores.relative_bias(np.zeros((32, 1)))\n"
        "assert mods.maximum(mods.tanh(0.5), 0.25) > 0.25\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment())
    assert done.stdout == "False\n", done.stderr


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(mods.__file__).parents[2])}
