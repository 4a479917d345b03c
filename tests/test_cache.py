"""Decoding against a cache: judged by the oracle on the keys and values that the cache should hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tilewise.backends.torch_cache import rotary
from tilewise.problem.problem import Options, Tensors
from tilewise.testing import Call, Results, errors, oracle, spread, yardstick

CAPACITY, HEADS_Q, HEADS_KV, DIM = 24, 4, 2, 16
LENGTHS = torch.tensor([5, 0, 17])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def tokens(batch: int, length: int, heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(batch, length, heads, DIM).to(dtype)


def judge(
    q: torch.Tensor, k: list[torch.Tensor], v: list[torch.Tensor], out: torch.Tensor, lse: torch.Tensor, **more: Any
) -> None:
    """Hold out (batch, len_q, heads, dim) and lse to the oracle, where sequence b should see k[b] (len, heads, dim)."""
    tensors = {name: value for name, value in more.items() if name in Tensors._fields}
    options = Options(return_lse=True)._replace(**{key: x for key, x in more.items() if key not in tensors})
    for row, (keys, values) in enumerate(zip(k, v, strict=True)):
        qkv = (x.transpose(0, 1)[None] for x in (q[row], keys.to(q.dtype), values.to(q.dtype)))
        own = {name: x[row : row + 1] if x.ndim == 2 else x for name, x in tensors.items()}
        call = Call(Tensors(*qkv, **own), options, torch.empty(0), torch.empty(0))
        got = Results(out[row].transpose(0, 1)[None], lse[row][None])
        right, low = oracle(call, gradients=False), yardstick(call, gradients=False)
        for name, found in errors(got, right, low, len(keys), spread(call)):
            assert found.within, (row, name, found)


def seen(cache: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    return [cache[row, :length] for row, length in enumerate(lengths.tolist())]


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "not causal": {"causal": False},
    "window": {"causal": True, "window": (4, 0)},
    "softcap": {"causal": True, "softcap": 1.5},
    "ALiBi": {"causal": True, "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    "sink": {"causal": True, "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "sink per sequence": {"causal": True, "sink": torch.arange(12.0).view(3, 4) / 6},
    "top-left": {"causal": True, "align": "top_left"},
}


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Say a call's options as the oracle takes them."""
    said = dict(options)
    left, right = said.pop("window", (None, None))
    return said | {"window_left": left, "window_right": right}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("len_q", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_query_sees_what_its_sequence_holds(name: str, len_q: int, dtype: torch.dtype) -> None:
    options = OPTIONS[name]
    q = tokens(3, len_q, HEADS_Q, dtype)
    k_cache, v_cache = tokens(3, CAPACITY, HEADS_KV, dtype), tokens(3, CAPACITY, HEADS_KV, dtype)
    out, lse = tilewise.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=LENGTHS, return_lse=True, **options)
    judge(q, seen(k_cache, LENGTHS), seen(v_cache, LENGTHS), out, lse, **plain(options))


@pytest.mark.parametrize("len_q", [1, 2, 5])
def test_new_tokens_are_written_behind_the_cached_ones_and_seen(len_q: int) -> None:
    q, k, v = tokens(3, len_q, HEADS_Q), tokens(3, len_q, HEADS_KV), tokens(3, len_q, HEADS_KV)
    k_cache, v_cache = tokens(3, CAPACITY, HEADS_KV), tokens(3, CAPACITY, HEADS_KV)
    want_k, want_v = k_cache.clone(), v_cache.clone()
    for row, length in enumerate(LENGTHS.tolist()):
        want_k[row, length : length + len_q] = k[row]
        want_v[row, length : length + len_q] = v[row]
    out, lse = tilewise.attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=LENGTHS, return_lse=True)
    assert torch.equal(k_cache, want_k)
    assert torch.equal(v_cache, want_v)
    judge(q, seen(want_k, LENGTHS + len_q), seen(want_v, LENGTHS + len_q), out, lse, causal=True)


def paged(cache: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a cache into pages in random order, with spare pages between."""
    batch, capacity = cache.shape[:2]
    per_row = -(-capacity // page_size)
    order = torch.randperm(batch * per_row + 3)[: batch * per_row].view(batch, per_row)
    pages = torch.full((batch * per_row + 3, page_size, *cache.shape[2:]), torch.nan, dtype=cache.dtype)
    for row in range(batch):
        for number in range(per_row):
            part = cache[row, number * page_size : (number + 1) * page_size]
            pages[order[row, number], : len(part)] = part
    return pages, order.int()


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 100])
def test_pages_of_any_size_in_any_order_give_the_same_as_a_cache_in_one_piece(page_size: int) -> None:
    q, k, v = tokens(3, 2, HEADS_Q), tokens(3, 2, HEADS_KV), tokens(3, 2, HEADS_KV)
    k_cache, v_cache = tokens(3, CAPACITY, HEADS_KV), tokens(3, CAPACITY, HEADS_KV)
    k_pages, table = paged(k_cache, page_size)
    v_pages = torch.full_like(k_pages, torch.nan)
    for row in range(3):
        for number, page in enumerate(table[row].tolist()):
            part = v_cache[row, number * page_size : (number + 1) * page_size]
            v_pages[page, : len(part)] = part
    whole = tilewise.attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=LENGTHS, return_lse=True)
    cut = tilewise.attention_with_kvcache(
        q, k_pages, v_pages, k=k, v=v, cache_seqlens=LENGTHS, block_table=table, return_lse=True
    )
    total = LENGTHS + 2
    judge(q, seen(k_cache, total), seen(v_cache, total), *cut, causal=True)
    assert torch.equal(cut[1].isinf(), whole[1].isinf())
    for row, length in enumerate(total.tolist()):
        at = torch.arange(length)
        pages, slots = table[row].long()[at // page_size], at % page_size
        assert torch.equal(k_pages[pages, slots], k_cache[row, :length])
        assert torch.equal(v_pages[pages, slots], v_cache[row, :length])


def test_a_row_of_a_larger_cache_is_chosen_by_index() -> None:
    q, k, v = tokens(3, 1, HEADS_Q), tokens(3, 1, HEADS_KV), tokens(3, 1, HEADS_KV)
    k_cache, v_cache = tokens(7, CAPACITY, HEADS_KV), tokens(7, CAPACITY, HEADS_KV)
    untouched = k_cache.clone()
    index = torch.tensor([6, 0, 3])
    out, lse = tilewise.attention_with_kvcache(
        q, k_cache, v_cache, k=k, v=v, cache_seqlens=LENGTHS, cache_batch_idx=index, return_lse=True
    )
    judge(q, seen(k_cache[index], LENGTHS + 1), seen(v_cache[index], LENGTHS + 1), out, lse, causal=True)
    others = [1, 2, 4, 5]
    assert torch.equal(k_cache[others], untouched[others])
    assert torch.equal(k_cache[index, LENGTHS], k[:, 0])


def test_left_padding_is_not_seen() -> None:
    q = tokens(3, 2, HEADS_Q)
    k_cache, v_cache = tokens(3, CAPACITY, HEADS_KV), tokens(3, CAPACITY, HEADS_KV)
    pad = torch.tensor([2, 0, 16])
    k_cache[0, :2] = v_cache[0, :2] = torch.nan
    k_cache[2, :16] = v_cache[2, :16] = torch.nan
    out, lse = tilewise.attention_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=LENGTHS, cache_leftpad=pad, return_lse=True
    )
    k, v = ([x[p:] for x, p in zip(seen(cache, LENGTHS), pad.tolist(), strict=True)] for cache in (k_cache, v_cache))
    judge(q, k, v, out, lse, causal=True)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_pairs_by_the_angle_of_their_position(interleaved: bool) -> None:
    x = torch.randn(2, 3, 1, 8, dtype=torch.float64)
    angle = torch.rand(10, 2, dtype=torch.float64)
    position = torch.tensor([[0, 1, 2], [7, 8, 9]])
    got = rotary(x, position, angle.cos(), angle.sin(), interleaved)
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    for row in range(2):
        for column in range(3):
            for number, (first, second) in enumerate(pairs):
                turn = torch.polar(torch.ones((), dtype=torch.float64), angle[position[row, column], number])
                want = torch.complex(x[row, column, 0, first], x[row, column, 0, second]) * turn
                # cos and sin are applied in float32
                assert abs(got[row, column, 0, first] - want.real) < 1e-6
                assert abs(got[row, column, 0, second] - want.imag) < 1e-6
    assert torch.equal(got[..., 4:], x[..., 4:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_are_rotated_at_their_slots_when_there_is_a_diagonal_else_all_alike(
    causal: bool, interleaved: bool
) -> None:
    q, k, v = tokens(3, 2, HEADS_Q), tokens(3, 2, HEADS_KV), tokens(3, 2, HEADS_KV)
    k_cache, v_cache = tokens(3, CAPACITY, HEADS_KV), tokens(3, CAPACITY, HEADS_KV)
    angle = torch.rand(CAPACITY, 4)
    step = torch.arange(2) * int(causal)
    turned_q = rotary(q, LENGTHS[:, None] + step, angle.cos(), angle.sin(), interleaved)
    turned_k = rotary(k, LENGTHS[:, None] + torch.arange(2), angle.cos(), angle.sin(), interleaved)
    out, lse = tilewise.attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=k,
        v=v,
        cache_seqlens=LENGTHS,
        rotary_cos=angle.cos(),
        rotary_sin=angle.sin(),
        rotary_interleaved=interleaved,
        causal=causal,
        return_lse=True,
    )
    assert torch.equal(k_cache[torch.arange(3), LENGTHS], turned_k[:, 0])
    judge(turned_q, seen(k_cache, LENGTHS + 2), seen(v_cache, LENGTHS + 2), out, lse, causal=causal)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_quantised_cache_is_read_and_written_by_its_scales(stored: torch.dtype) -> None:
    q, k, v = tokens(3, 1, HEADS_Q), tokens(3, 1, HEADS_KV), tokens(3, 1, HEADS_KV)
    k_scale, v_scale = torch.tensor([0.05, 0.04]), torch.tensor([0.03, 0.06])
    k_cache, v_cache = ((20 * tokens(3, CAPACITY, HEADS_KV)).to(stored) for _ in range(2))
    out, lse = tilewise.attention_with_kvcache(
        q, k_cache, v_cache, k=k, v=v, cache_seqlens=LENGTHS, k_scale=k_scale, v_scale=v_scale, return_lse=True
    )
    k_read, v_read = (x.float() * scale[:, None] for x, scale in ((k_cache, k_scale), (v_cache, v_scale)))
    judge(q, seen(k_read, LENGTHS + 1), seen(v_read, LENGTHS + 1), out, lse, causal=True)
    written = k_read[torch.arange(3), LENGTHS]
    step = 0.5 * k_scale if stored == torch.int8 else k[:, 0].abs().amax(-1) * torch.finfo(stored).eps
    limit = 127.5 * k_scale if stored == torch.int8 else torch.finfo(stored).max * k_scale
    clipped = k[:, 0].clamp(-limit[:, None], limit[:, None])
    assert ((written - clipped).abs() <= step[..., None] + 1e-6).all()


def test_both_layouts_give_the_same() -> None:
    q, k, v = tokens(3, 2, HEADS_Q), tokens(3, 2, HEADS_KV), tokens(3, 2, HEADS_KV)
    caches = tokens(3, CAPACITY, HEADS_KV), tokens(3, CAPACITY, HEADS_KV)
    turned = [x.transpose(1, 2).contiguous() for x in (q, *caches, k, v)]
    expected = tilewise.attention_with_kvcache(q, *caches, k=k, v=v, cache_seqlens=LENGTHS)
    got = tilewise.attention_with_kvcache(
        turned[0], turned[1], turned[2], k=turned[3], v=turned[4], cache_seqlens=LENGTHS, layout="bhsd"
    )
    assert torch.equal(got.transpose(1, 2), expected)
    assert torch.equal(turned[1].transpose(1, 2), caches[0])


def test_one_int_is_the_length_of_every_sequence() -> None:
    q = tokens(3, 1, HEADS_Q)
    caches = tokens(3, CAPACITY, HEADS_KV), tokens(3, CAPACITY, HEADS_KV)
    by_tensor = tilewise.attention_with_kvcache(q, *caches, cache_seqlens=torch.full((3,), 7))
    assert torch.equal(tilewise.attention_with_kvcache(q, *caches, cache_seqlens=7), by_tensor)


def test_without_lengths_the_whole_cache_is_seen() -> None:
    q = tokens(3, 1, HEADS_Q)
    caches = tokens(3, CAPACITY, HEADS_KV), tokens(3, CAPACITY, HEADS_KV)
    full = tilewise.attention_with_kvcache(q, *caches, cache_seqlens=CAPACITY)
    assert torch.equal(tilewise.attention_with_kvcache(q, *caches), full)


@pytest.mark.parametrize("capacity", [24, 25, 64, 500])
def test_the_result_does_not_depend_on_the_capacity(capacity: int) -> None:
    q = tokens(3, 1, HEADS_Q)
    cache = tokens(3, CAPACITY, HEADS_KV)
    wide = torch.full((3, capacity, HEADS_KV, DIM), torch.nan)
    wide[:, :CAPACITY] = cache
    out, lse = tilewise.attention_with_kvcache(q, wide, wide, cache_seqlens=LENGTHS, return_lse=True)
    judge(q, seen(cache, LENGTHS), seen(cache, LENGTHS), out, lse, causal=True)


@pytest.mark.parametrize("as_int", [False, True])
def test_appending_to_a_full_cache_is_an_error_and_changes_nothing(as_int: bool) -> None:
    q, k = tokens(3, 1, HEADS_Q), tokens(3, 3, HEADS_KV)
    caches = tokens(3, CAPACITY, HEADS_KV), tokens(3, CAPACITY, HEADS_KV)
    before = caches[0].clone(), caches[1].clone()
    lengths = 22 if as_int else torch.tensor([5, 22, 0])
    with pytest.raises(ValueError, match="must fit the cache's capacity of 24; got 22 cached and 3 new tokens"):
        tilewise.attention_with_kvcache(q, *caches, k=k, v=k, cache_seqlens=lengths)
    assert torch.equal(caches[0], before[0])
    assert torch.equal(caches[1], before[1])


@pytest.mark.parametrize("page_size", [0, 8])
def test_tokens_that_do_not_fit_are_dropped_where_the_host_cannot_know(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewise.autograd.check_cache_contents", lambda *_: None)  # as if on a device
    q, k, v = tokens(3, 1, HEADS_Q), tokens(3, 4, HEADS_KV), tokens(3, 4, HEADS_KV)
    wide = torch.randn(2, 3, CAPACITY + 8, HEADS_KV, DIM)
    lengths = torch.tensor([22, 24, 3])
    if page_size:
        pages = wide[:, :, :CAPACITY].reshape(2, 9, 8, HEADS_KV, DIM).clone()
        table = torch.arange(9).view(3, 3)
        out = tilewise.attention_with_kvcache(q, pages[0], pages[1], k=k, v=v, cache_seqlens=lengths, block_table=table)
        got = pages.view(2, 3, CAPACITY, HEADS_KV, DIM)
    else:
        caches = wide.clone()
        inside = caches[0][:, :CAPACITY], caches[1][:, :CAPACITY]
        out = tilewise.attention_with_kvcache(q, *inside, k=k, v=v, cache_seqlens=lengths)
        assert torch.equal(caches[:, :, CAPACITY:], wide[:, :, CAPACITY:])
        got = caches[:, :, :CAPACITY]
    want = wide[:, :, :CAPACITY].clone()
    for number, new in enumerate((k, v)):
        want[number, 0, 22:24] = new[0, :2]
        want[number, 2, 3:7] = new[2]
    assert torch.equal(got, want)
    assert torch.isfinite(out).all()


def test_splits_and_batch_invariance_are_accepted() -> None:
    q = tokens(3, 1, HEADS_Q)
    caches = tokens(3, CAPACITY, HEADS_KV), tokens(3, CAPACITY, HEADS_KV)
    expected = tilewise.attention_with_kvcache(q, *caches, cache_seqlens=LENGTHS)
    options: list[dict[str, Any]] = [{"num_splits": 4}, {"batch_invariant": True}]
    for more in options:
        assert torch.equal(tilewise.attention_with_kvcache(q, *caches, cache_seqlens=LENGTHS, **more), expected)


def test_values_may_have_another_head_dim_in_a_cache_too() -> None:
    q, k_cache = tokens(3, 1, HEADS_Q), tokens(3, CAPACITY, HEADS_KV)
    v_cache = torch.randn(3, CAPACITY, HEADS_KV, 5)
    out, lse = tilewise.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=LENGTHS, return_lse=True)
    judge(q, seen(k_cache, LENGTHS), seen(v_cache, LENGTHS), out, lse, causal=True)


def test_packed_queries_read_pages_of_keys() -> None:
    cache = tokens(3, CAPACITY, HEADS_KV)
    pages, table = paged(cache, 8)
    lengths_q, lengths_k = torch.tensor([2, 1, 4]), torch.tensor([9, 1, 20])
    q = torch.randn(7, HEADS_Q, DIM)
    cu_q, cu_k = (torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in (lengths_q, lengths_k))
    got = tilewise.attention_varlen(q, pages, pages, cu_q, cu_k, block_table=table, causal=True, return_lse=True)
    keys = torch.cat(seen(cache, lengths_k))
    want = tilewise.attention_varlen(q, keys, keys, cu_q, cu_k, causal=True, return_lse=True)
    for x, y in zip(got, want, strict=True):
        assert (x - y).abs().max() <= 8 * torch.finfo(torch.float32).eps * y.abs().max()
