"""The two functions that tilewise registers with transformers, each in transformers' own terms."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tilewise import testing
from tilewise.adapters import transformers as adapter
from tilewise.adapters.transformers import DenseMaskWarning, KeyRanges, attention_forward, key_ranges
from tilewise.adapters.transformers_band import MaskFunction, band_of

pytest.importorskip("transformers", reason="needs transformers: pip install 'tilewise[transformers]'")
from transformers import masking_utils

EPS = torch.finfo(torch.float64).eps


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    adapter._say_once.cache_clear()


def ranges_of(*arguments: object, **options: object) -> KeyRanges:
    """Ask the mask function and expect linear memory."""
    ranges = key_ranges(*arguments, **options)  # type: ignore[arg-type]  # each test names what it passes
    assert isinstance(ranges, KeyRanges)
    return ranges


def matrix_of(*arguments: object, **options: object) -> torch.Tensor:
    """Ask transformers for the whole matrix."""
    options["allow_is_causal_skip"] = False
    return cast("torch.Tensor", masking_utils.sdpa_mask(*arguments, **options))  # type: ignore[arg-type]


def numbers(x: torch.Tensor | None) -> list[object]:
    assert x is not None
    return cast("list[object]", x.tolist())


# ---- the mask function ----------------------------------------------------------------------------------------------


def expand(ranges: KeyRanges | torch.Tensor) -> torch.Tensor:
    """Write out who sees whom: (batch, 1, len_q, len_kv)."""
    if isinstance(ranges, torch.Tensor):
        return ranges
    count, _, len_q, len_kv = ranges.shape
    query, key = torch.arange(len_q)[:, None], torch.arange(len_kv)[None]
    distance = key - query - (ranges.used - len_q if ranges.align == "bottom_right" else 0)
    seen = (key < ranges.used).expand(count, 1, len_q, len_kv)
    if ranges.left is not None:
        seen = seen & (distance >= -ranges.left)
    if ranges.right is not None:
        seen = seen & (distance <= ranges.right)
    if ranges.kv_start is not None and ranges.kv_stop is not None:
        start, stop = (x[:, None, None, None] for x in (ranges.kv_start, ranges.kv_stop))
        seen = seen & (key >= start) & (key < stop)
    if ranges.visible is not None:
        seen = seen & torch.nn.functional.pad(ranges.visible, (0, len_kv - ranges.used))
    if ranges.cu_seqlens is not None:
        document = torch.bucketize(torch.arange(count * len_q), ranges.cu_seqlens, right=True).view(count, 1, -1)
        seen = seen & (document[..., :, None] == document[..., None, :])
    return seen


def pattern(name: str, width: int) -> MaskFunction:
    makers: dict[str, Callable[[int], MaskFunction]] = {
        "causal": lambda _: masking_utils.causal_mask_function,
        "all": lambda _: masking_utils.bidirectional_mask_function,
        "window": masking_utils.sliding_window_causal_mask_function,
        "both sides": masking_utils.sliding_window_bidirectional_mask_function,
    }
    return makers[name](width)


# Where a row's tokens begin and how many there are, and which position is turned into its opposite, if any.
PADDING = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20), st.none() | st.integers(0, 20)), min_size=2, max_size=2
)


@pytest.mark.parametrize("readable", [True, False], ids=["contents read", "contents not read"])
@given(
    name=st.sampled_from(["causal", "all", "window", "both sides"]),
    width=st.integers(1, 12),
    len_q=st.integers(1, 9),
    past=st.integers(0, 9),
    dropped=st.integers(0, 4),
    free=st.sampled_from([0, 3]),
    padding=st.none() | PADDING,
)
@settings(max_examples=300, deadline=None)
def test_ranges_stand_for_the_matrix_that_transformers_builds(
    readable: bool,
    name: str,
    width: int,
    len_q: int,
    past: int,
    dropped: int,
    free: int,
    padding: list[tuple[int, int, int | None]] | None,
) -> None:
    """A cache holds ``past`` keys and has dropped some before and has free slots behind."""
    offset, len_kv, mask = past + dropped, past + len_q + free, None
    if padding is not None:
        mask = torch.zeros(2, offset + len_q, dtype=torch.bool)
        for row, (start, length, turned) in zip(mask, padding, strict=True):
            row[start : start + length] = True
            if turned is not None:
                row[turned % len(row)] ^= True
    arguments = (2, len_q, len_kv, offset, dropped, pattern(name, width), mask)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DenseMaskWarning)
        if not readable:
            patch.setattr(adapter, "_is_readable", lambda _: False)
        ranges = key_ranges(*arguments)
    assert torch.equal(expand(ranges), matrix_of(*arguments))
    assert isinstance(ranges, KeyRanges) or (name == "both sides" and past > 0 and free > 0)


def test_what_hides_nothing_is_dropped() -> None:
    assert ranges_of(2, 5, 5, mask_function=pattern("window", 5)).left is None
    assert ranges_of(2, 5, 5, mask_function=pattern("window", 4)).left == 3
    assert ranges_of(2, 1, 9, q_offset=8).right is None
    assert ranges_of(2, 5, 5, attention_mask=torch.ones(2, 5, dtype=torch.bool)).kv_start is None


def at_positions(function: MaskFunction, positions: torch.Tensor) -> MaskFunction:
    """Let a mask function compare positions that are told, (batch, len), in the place of indices."""
    return lambda b, h, q, k: function(b, h, positions[b, q], positions[b, k])


def test_documents_are_found_by_their_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    documents = cast("torch.Tensor", masking_utils.find_packed_sequence_indices(positions))
    inner = masking_utils.sliding_window_causal_mask_function(2)
    function = masking_utils.and_masks(
        at_positions(inner, positions),
        masking_utils.packed_sequence_mask_function(documents),
    )
    ranges = ranges_of(2, 5, 5, mask_function=function, allow_is_causal_skip=False)
    assert numbers(ranges.cu_seqlens) == [0, 3, 5, 6, 10]
    assert ranges.max_seqlen == 4
    assert torch.equal(expand(ranges), matrix_of(2, 5, 5, mask_function=function))


BLOCKS = torch.tensor([[0, 0, -1, 1, 1, 1]] * 2)
NO_BANDS: dict[str, Callable[[], MaskFunction]] = {
    "chunks": lambda: masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)),
    "blocks": lambda: masking_utils.or_masks(
        masking_utils.causal_mask_function, lambda b, _h, q, k: (BLOCKS[b, q] == BLOCKS[b, k]) & (BLOCKS[b, q] >= 0)
    ),
    "a prefix": lambda: masking_utils.or_masks(masking_utils.causal_mask_function, lambda _b, _h, _q, k: k < 3),
    "stripes": lambda: lambda _b, _h, q, k: (q - k) % 2 == 0,
    "backwards": lambda: lambda _b, _h, q, k: q <= k,
    "an empty window": lambda: masking_utils.sliding_window_causal_mask_function(0),
    "positions of one's own": lambda: at_positions(
        masking_utils.causal_mask_function, torch.tensor([[5, 3, 1, 0, 2, 4]] * 2)
    ),
}


@pytest.mark.parametrize("make", NO_BANDS.values(), ids=NO_BANDS)
def test_a_mask_that_is_no_band_becomes_the_matrix_and_says_so_once(make: Callable[[], MaskFunction]) -> None:
    function = make()
    assert band_of(function) is None
    with pytest.warns(DenseMaskWarning, match="no interval"):
        mask = key_ranges(2, 6, 6, mask_function=function)
    assert torch.equal(expand(mask), matrix_of(2, 6, 6, mask_function=function))
    key_ranges(2, 6, 6, mask_function=function)  # a second warning would be an error


def test_a_model_that_computes_with_its_mask_gets_a_matrix() -> None:
    with pytest.warns(DenseMaskWarning, match="compute with it"):
        mask = key_ranges(1, 3, 3, allow_is_causal_skip=False)
    assert isinstance(mask, torch.Tensor)
    assert torch.equal(mask[0, 0], torch.ones(3, 3, dtype=torch.bool).tril())


def test_padding_between_tokens_says_so_once() -> None:
    padding = torch.tensor([[True, False, True]])
    with pytest.warns(DenseMaskWarning, match="between its tokens"):
        ranges = ranges_of(1, 3, 3, attention_mask=padding)
    assert numbers(ranges.visible) == [[[[True, False, True]]]]
    key_ranges(1, 3, 3, attention_mask=padding)


def test_ranges_move_between_devices_and_are_no_tensor() -> None:
    ranges = ranges_of(1, 3, 3, attention_mask=torch.tensor([[False, True, True]]))
    moved = ranges.to("meta")
    assert moved.kv_start is not None
    assert moved.kv_start.is_meta
    assert moved.shape == ranges.shape
    assert key_ranges(1, 3, 3, attention_mask=ranges) is ranges
    with pytest.raises(AttributeError, match=r"asks its attention mask for 'dtype'.*attn_implementation='sdpa'"):
        _ = ranges.dtype


# ---- the attention function -----------------------------------------------------------------------------------------


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Compute attention in three lines; ``scores`` turns scaled products into what the softmax sees."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    p = scores(q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)[..., : k.shape[2]]
    return (p @ v).transpose(1, 2)


def lower(scores: torch.Tensor, left: int | None = None) -> torch.Tensor:
    """Hide what lies above the diagonal through the last corner, and more than ``left`` below it."""
    len_q, len_kv = scores.shape[-2:]
    ones = torch.ones(len_q, len_kv, dtype=torch.bool).tril(len_kv - len_q)
    seen = ones if left is None else ones & ~torch.ones_like(ones).tril(len_kv - len_q - left - 1)
    return scores.masked_fill(~seen, -torch.inf)


SINK = torch.linspace(-1, 2, 4, dtype=torch.float64)
BIAS = torch.randn(1, 4, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
SEEN = BIAS[:, :1] > -1
FORWARD: dict[str, tuple[dict[str, object], Callable[[torch.Tensor], torch.Tensor]]] = {
    "a module is causal unless it says otherwise": ({}, lower),
    "causality told in the call": ({"is_causal": False}, lambda s: s),
    "a window of 3 keys": ({"sliding_window": 3}, lambda s: lower(s, 2)),
    "softcap": ({"softcap": 0.7, "is_causal": False}, lambda s: 0.7 * (s / 0.7).tanh()),
    "sinks": ({"s_aux": SINK}, lambda s: torch.cat([lower(s), SINK[:, None, None].expand(2, -1, 5, 1)], -1)),
    "a bias": ({"position_bias": BIAS}, lambda s: lower(s + BIAS)),
    "a boolean mask is the whole mask": ({"attention_mask": SEEN}, lambda s: s.masked_fill(~SEEN, -torch.inf)),
    "a mask to add is the whole mask": ({"attention_mask": BIAS[:, :1]}, lambda s: s + BIAS[:, :1]),
    "a mask to add and a bias": (
        {"attention_mask": BIAS[:, :1], "position_bias": BIAS},
        lambda s: s + BIAS + BIAS[:, :1],
    ),
    "a bias over a cache with free slots": (
        {"attention_mask": KeyRanges((2, 1, 5, 9), right=0, used=7), "position_bias": BIAS},
        lambda s: torch.nn.functional.pad(lower((s + BIAS)[..., :7]), (0, 2), value=-torch.inf),
    ),
}


@pytest.mark.parametrize(("options", "scores"), FORWARD.values(), ids=FORWARD)
def test_each_argument_of_the_attention_function_means_what_transformers_means(
    options: dict[str, object], scores: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, h, n, d, dtype=torch.float64, generator=draw) for h, n, d in ((4, 5, 8), (2, 9, 8), (2, 9, 6))
    )
    out, probabilities = attention_forward(torch.nn.Identity(), q, k, v, **({"attention_mask": None} | options))  # type: ignore[arg-type]
    expected = plain(q, k, v, scores)
    error = testing.error(out, expected, expected, EPS, terms=k.shape[2] ** 0.5)
    assert error.within, error
    assert probabilities is None
    assert out.is_contiguous()


def test_a_layer_of_a_real_model_comes_out_as_exact_as_with_eager_attention() -> None:
    from transformers.models.bert.modeling_bert import eager_attention_forward

    file = Path(tilewise.__file__).parent / "data" / "minilm_layer.npz"
    with np.load(file) as layer:
        q, k, v = (torch.from_numpy(layer[name]).float()[None] for name in "qkv")
    padding = torch.arange(512)[None] < 400
    mask = torch.zeros(1, 1, 1, 512).masked_fill(~padding[:, None, None], -torch.inf)
    module, options = torch.nn.Identity(), {"scaling": 32**-0.5, "dropout": 0.0}
    exact = eager_attention_forward(module, q.double(), k.double(), v.double(), mask.double(), **options)[0]
    low = eager_attention_forward(module, q, k, v, mask, **options)[0]
    ranges = ranges_of(1, 512, 512, mask_function=pattern("all", 0), attention_mask=padding)
    out, _ = attention_forward(module, q, k, v, ranges, **options)
    error = testing.error(out, exact, low, torch.finfo(torch.float32).eps)
    assert error.within, error


def test_one_query_sees_all_that_is_cached() -> None:
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (1, 9, 9))
    out, _ = attention_forward(torch.nn.Identity(), q, k, v, None, is_causal=True)
    expected = plain(q, k, v, lambda s: s)
    assert testing.error(out, expected, expected, EPS, terms=3).within


def test_queries_without_a_batch_are_shared() -> None:
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    out, _ = attention_forward(torch.nn.Identity(), q, k, v, None, is_causal=False)
    assert torch.equal(
        out, attention_forward(torch.nn.Identity(), q.expand(2, -1, -1, -1), k, v, None, is_causal=False)[0]
    )


def test_dropout_drops() -> None:
    q, k = torch.randn(1, 1, 64, 8), torch.randn(1, 1, 64, 8)
    out, _ = attention_forward(torch.nn.Identity(), q, k, torch.ones(1, 1, 64, 8), None, dropout=0.5)
    assert out.std() > 0.01  # without dropout every element would be 1


REFUSALS: dict[str, tuple[dict[str, object], str]] = {
    "probabilities": ({"output_attentions": True}, "output_attentions=True.*attn_implementation='eager'"),
    "pages": ({"block_table": torch.zeros(1, 1)}, "paged caches"),
    "padding": ({"attention_mask": torch.ones(1, 5, dtype=torch.bool)}, r"4 axes.*got \(1, 5\)"),
    "an empty window": ({"sliding_window": 0}, "at least 1, got 0"),
    "another length": (
        {"attention_mask": KeyRanges((1, 1, 5, 6), used=6)},
        "5 queries and 6 keys, and this layer has 5 and 5",
    ),
    "other queries": ({"attention_mask": KeyRanges((1, 1, 4, 5), right=0, used=5)}, "4 queries and 5 keys"),
    "a bias across documents": (
        {"position_bias": torch.zeros(1, 1, 5, 5), "cu_seq_lens_q": torch.tensor([0, 5])},
        "position_bias does not go with several documents",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_served_is_refused_with_a_reason(options: dict[str, object], message: str) -> None:
    x = torch.randn(1, 1, 5, 8)
    with pytest.raises(ValueError, match=message):
        attention_forward(torch.nn.Identity(), x, x, x, **({"attention_mask": None} | options))  # type: ignore[arg-type]


def test_documents_told_in_the_call_count_instead_of_padding() -> None:
    x, bounds = torch.randn(1, 2, 5, 8, dtype=torch.float64), torch.tensor([0, 3, 5])
    padded = ranges_of(1, 5, 5, attention_mask=torch.tensor([[False, True, True, True, True]]))
    told = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    out, _ = attention_forward(torch.nn.Identity(), x, x, x, padded, **told)  # type: ignore[arg-type]
    parts = [attention_forward(torch.nn.Identity(), y, y, y, None, is_causal=True)[0] for y in x.split([3, 2], 2)]
    expected = torch.cat(parts, 1)
    assert testing.error(out, expected, expected, EPS, terms=5**0.5).within


def test_a_mask_of_three_axes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"padding mask \(batch, len\), got \(1, 5, 5\)"):
        key_ranges(1, 5, 5, attention_mask=torch.ones(1, 5, 5, dtype=torch.bool))


def test_releases_of_transformers_that_describe_masks_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.4.1")
    with pytest.raises(ImportError, match=r"transformers 5.6 or newer, got 5.4.1"):
        adapter.register()


def test_importing_the_adapter_registers_nothing() -> None:
    code = "import sys, tilewise.adapters.transformers; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_documents_whose_longest_is_a_tensor_compile_into_one_graph() -> None:
    torch._dynamo.reset()

    def layer(x: torch.Tensor, bounds: torch.Tensor, longest: torch.Tensor) -> torch.Tensor:
        told = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        out, _ = attention_forward(torch.nn.Identity(), x, x, x, None, is_causal=True, **told)  # type: ignore[arg-type]
        return out

    x, told = torch.randn(1, 2, 5, 8, dtype=torch.float64), (torch.tensor([0, 3, 5]), torch.tensor(3))
    out, expected = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, *told), layer(x, *told)
    assert testing.error(out, expected, expected, EPS).within
