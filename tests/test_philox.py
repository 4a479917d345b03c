"""What holds for dropout's generator: published bits, the same in NumPy, torch and Triton, and a rate that is kept."""

from __future__ import annotations

import math
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.problem.philox import INT31_TO_UNIT, is_kept, philox

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Random123's known answers for Philox4x32: (rounds, counter, key, first output word). The last rows' counter and key
# are the first digits of pi.
ONES = 0xFFFFFFFF
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
KNOWN = (
    (10, (0, 0, 0, 0), (0, 0), 0x6627E8D5),
    (10, (ONES, ONES, ONES, ONES), (ONES, ONES), 0x408F276D),
    (10, *PI, 0xD16CFE09),
    (7, (0, 0, 0, 0), (0, 0), 0x5F6FB709),
    (7, (ONES, ONES, ONES, ONES), (ONES, ONES), 0x5207DDC2),
    (7, *PI, 0x4DFCCABA),
)


def signed(word: int) -> int:
    """Read 64 bits as int64 holds them."""
    return (word + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize(("rounds", "counter", "key", "word"), KNOWN)
def test_the_words_are_random123s(rounds: int, counter: tuple[int, ...], key: tuple[int, int], word: int) -> None:
    seed = signed(key[1] << 32 | key[0])
    c0, c1, c2, c3 = (np.array([value]) for value in counter)
    assert philox(np.array([seed]), (c0, c1, c2, c3), rounds).tolist() == [word]
    t0, t1, t2, t3 = (torch.tensor([value]) for value in counter)
    assert philox(torch.tensor([seed]), (t0, t1, t2, t3), rounds).tolist() == [word]


def draw_counters(seed: int, count: int) -> list[np.ndarray]:
    """Draw a seed (1,) over all of int64 and four counters (count,) over all of 32 bits."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-(2**63), 2**63, 1), *rng.integers(0, 2**32, (4, count))]


def test_numpy_and_torch_give_the_same_words() -> None:
    for number in range(20):
        seed, c0, c1, c2, c3 = draw_counters(number, 1000)
        words = philox(seed, (c0, c1, c2, c3))
        assert words.dtype == np.int64
        assert words.min() >= 0
        assert words.max() < 2**32
        s, t0, t1, t2, t3 = (torch.from_numpy(x) for x in (seed, c0, c1, c2, c3))
        assert np.array_equal(philox(s, (t0, t1, t2, t3)).numpy(), words)


def test_only_the_low_32_bits_of_a_position_count() -> None:
    seed, c0, c1, c2, c3 = draw_counters(0, 100)
    beyond = philox(seed, (c0 + 2**32, c1 - 2**32, c2 + 2**40, c3))
    assert np.array_equal(beyond, philox(seed, (c0, c1, c2, c3)))


def test_every_bit_of_the_seed_and_each_of_the_four_positions_counts() -> None:
    seed, c0, c1, c2, c3 = draw_counters(1, 1000)
    words = philox(seed, (c0, c1, c2, c3))
    others = [philox(seed ^ np.int64(signed(1 << bit)), (c0, c1, c2, c3)) for bit in range(64)]
    others += [philox(seed, (c0 ^ 1, c1, c2, c3)), philox(seed, (c0, c1 ^ 1, c2, c3))]
    others += [philox(seed, (c0, c1, c2 ^ 1, c3)), philox(seed, (c0, c1, c2, c3 ^ 1))]
    for other in others:
        flipped = int(np.bitwise_count(words ^ other).sum())
        assert abs(flipped - 16_000) < 5 * math.sqrt(32_000 / 4)  # each of 32 bits flips with probability 1/2


# ---- from words to what is kept ----


def kept(
    seed: int, dropout: float, batch: int = 2, heads: int = 3, len_q: int = 100, len_kv: int = 100
) -> torch.Tensor:
    """Draw a whole mask: (batch, heads, len_q, len_kv)."""
    sizes = (batch, heads, len_q, len_kv)
    b, h, q, kv = (
        torch.arange(size).view([-1 if axis == place else 1 for axis in range(4)]) for place, size in enumerate(sizes)
    )
    return is_kept(torch.tensor([seed]), dropout, q, kv, h, b)


def uniform_by_formula(word: int) -> np.float32:
    """Turn a word into [0, 1) as Triton's uint_to_uniform_float does, one number at a time."""
    as_int32 = word - 2**32 if word >= 2**31 else word
    positive = -as_int32 - 1 if as_int32 < 0 else as_int32
    return np.float32(positive) * np.float32(4.6566127342e-10)


def test_an_element_is_kept_where_its_uniform_number_reaches_the_rate() -> None:
    q, kv = np.arange(30)[:, None], np.arange(40)[None, :]
    words = philox(np.array([11]), (kv, q, np.array(2), np.array(5)))
    uniform = np.array([[uniform_by_formula(int(word)) for word in row] for row in words])
    for dropout in (0.1, 0.3, 0.7, 0.999, float(uniform[3, 7])):
        got = is_kept(torch.tensor([11]), dropout, torch.tensor(q), torch.tensor(kv), torch.tensor(2), torch.tensor(5))
        assert np.array_equal(got.numpy(), uniform >= np.float32(dropout))


def test_the_uniform_numbers_lie_in_zero_to_one_without_one() -> None:
    assert uniform_by_formula(0) == 0
    assert uniform_by_formula(2**32 - 1) == 0  # -1 as int32
    assert uniform_by_formula(2**31 - 1) < 1
    assert uniform_by_formula(2**31) < 1
    larger = np.nextafter(np.float32(INT31_TO_UNIT), np.float32(1))
    assert larger * np.float32(2**31 - 1) >= 1, "the factor is the largest that stays below 1"


@pytest.mark.parametrize("dropout", [0.01, 0.1, 0.5, 0.9, 0.99])
def test_the_share_that_is_kept_is_the_rate_within_five_sigma(dropout: float) -> None:
    mask = kept(2024, dropout)
    sigma = math.sqrt(mask.numel() * dropout * (1 - dropout))
    assert abs(int(mask.sum()) - mask.numel() * (1 - dropout)) < 5 * sigma


def test_rows_columns_heads_and_batches_are_drawn_apart() -> None:
    mask = kept(7, 0.5)
    for axis in range(4):
        parts = mask.movedim(axis, 0).flatten(1)
        for one, other in pairwise(parts):
            agree = int((one == other).sum())
            assert abs(agree - len(one) / 2) < 5 * math.sqrt(len(one) / 4)


def test_seeds_differ_and_a_seed_repeats() -> None:
    masks = [kept(seed, 0.5) for seed in (0, 1, 2**32, 2**33, -1, 2**63 - 1)]
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            assert abs(int((mask == other).sum()) - mask.numel() / 2) < 5 * math.sqrt(mask.numel() / 4)
    assert torch.equal(kept(1, 0.5), masks[1])


def test_a_tile_of_the_mask_is_the_same_however_it_was_cut() -> None:
    whole = kept(5, 0.3, batch=1, heads=1)[0, 0]
    tile = is_kept(
        torch.tensor([5]), 0.3, torch.arange(13, 40)[:, None], torch.arange(50, 77), torch.tensor(0), torch.tensor(0)
    )
    assert torch.equal(tile, whole[13:40, 50:77])


def test_a_rate_of_zero_keeps_all_and_a_rate_just_below_one_almost_nothing() -> None:
    assert kept(3, 0.0).all()
    assert not kept(3, math.nextafter(1.0, 0.0)).any()  # as float32 it is 1, which no uniform number reaches
    assert int(kept(3, 1 - 2**-16).sum()) <= 5  # 60,000 elements: one is expected, and six come once in 2,000 seeds


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_what_a_higher_rate_keeps_a_lower_one_keeps_too(one: float, other: float) -> None:
    lower, higher = kept(9, min(one, other), 1, 1), kept(9, max(one, other), 1, 1)
    assert not (higher & ~lower).any()


# ---- against the kernels' generator ----


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="runs Triton's own generator on the CPU: start with TRITON_INTERPRET=1")
def test_the_words_and_the_uniform_numbers_are_tritons() -> None:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def draw(words, uniform, seed, counters, count: tl.constexpr):  # type: ignore[no-untyped-def]
        index = tl.arange(0, count)
        c0 = tl.load(counters + index)
        c1 = tl.load(counters + count + index)
        c2 = tl.load(counters + 2 * count + index)
        c3 = tl.load(counters + 3 * count + index)
        word, _, _, _ = tl.philox(tl.load(seed), c0, c1, c2, c3)
        tl.store(words + index, word.to(tl.int64))
        tl.store(uniform + index, tl.random.uint_to_uniform_float(word))

    for number in range(3):
        seed, *counters = (torch.from_numpy(x) for x in draw_counters(number, 256))
        words, uniform = torch.empty(256, dtype=torch.int64), torch.empty(256)
        draw[(1,)](words, uniform, seed, torch.stack(counters).to(torch.uint32), 256)
        c0, c1, c2, c3 = counters
        assert torch.equal(words & ONES, philox(seed, (c0, c1, c2, c3)))
        assert uniform.tolist() == [float(uniform_by_formula(int(word))) for word in words & ONES]
