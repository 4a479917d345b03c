"""The functions of flash_attn 2 and its padding functions, held to that package's own conventions."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise import testing
from tilewise.adapters import bert_padding
from tilewise.adapters import flash_attn as adapter

EPS = torch.finfo(torch.float64).eps
draw = partial(torch.randn, dtype=torch.float64)

EIGHT = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
DEFAULTS = (0.0, None, False, (-1, -1), 0.0, None, False, False)
BOUNDS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
CACHE = (
    "k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale causal "
    "window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"
)
CACHE_DEFAULTS = (*[None] * 9, False, (-1, -1), 0.0, True, None, 0, False)
SIGNATURES: dict[str, tuple[str, tuple[object, ...]]] = {
    "flash_attn_func": (f"q k v {EIGHT}", DEFAULTS),
    "flash_attn_kvpacked_func": (f"q kv {EIGHT}", DEFAULTS),
    "flash_attn_qkvpacked_func": (f"qkv {EIGHT}", DEFAULTS),
    "flash_attn_varlen_func": (f"q k v {BOUNDS} {EIGHT} block_table", (*DEFAULTS, None)),
    "flash_attn_varlen_kvpacked_func": (f"q kv {BOUNDS} {EIGHT}", DEFAULTS),
    "flash_attn_varlen_qkvpacked_func": (f"qkv cu_seqlens max_seqlen {EIGHT}", DEFAULTS),
    "flash_attn_with_kvcache": (f"q k_cache v_cache {CACHE}", CACHE_DEFAULTS),
}


def close(got: object, expected: object) -> bool:
    """Say whether two float64 results of the same formula differ by rounding alone."""
    return testing.error(only(got), only(expected), only(expected), EPS, terms=30.0).within


def only(result: object) -> torch.Tensor:
    """Expect out alone."""
    assert isinstance(result, torch.Tensor)
    return result


def textbook(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor | None = None,
    bias: torch.Tensor | float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (batch, len, heads, dim) attention and its lse with PyTorch's softmax."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    score = q @ k.mT * q.shape[-1] ** -0.5 + bias
    if hidden is not None:
        score = score.masked_fill(hidden, -torch.inf)
    lse = score.logsumexp(-1)
    p = (score - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
    return (p @ v).transpose(1, 2), lse


# ---- signatures and layouts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_stand_in_the_order_of_flash_attn_with_its_defaults(name: str) -> None:
    names, defaults = SIGNATURES[name]
    parameters = inspect.signature(getattr(adapter, name)).parameters.values()
    assert [p.name for p in parameters] == names.split()
    assert tuple(p.default for p in parameters if p.default is not p.empty) == defaults
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def band(len_q: int, len_kv: int, left: int, right: int) -> torch.Tensor:
    """Write out which pairs a window hides that is aligned bottom-right."""
    distance = torch.arange(len_kv) - torch.arange(len_q)[:, None] - (len_kv - len_q)
    hidden = torch.zeros(len_q, len_kv, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return hidden


@pytest.mark.parametrize(("len_q", "len_kv"), [(5, 9), (9, 5), (7, 7)])
@pytest.mark.parametrize(
    ("options", "sides"),
    [
        ({}, (-1, -1)),
        ({"causal": True}, (-1, 0)),
        ({"window_size": (2, 1)}, (2, 1)),
        ({"causal": True, "window_size": (2, 1)}, (2, 0)),
        ({"window_size": torch.tensor([1, 3])}, (1, 3)),
        ({"window_size": (-7, 0)}, (-7, 0)),
    ],
)
def test_masks_are_aligned_bottom_right_and_rows_that_see_nothing_have_an_lse_of_plus_infinity(
    options: dict[str, object], sides: tuple[int, int], len_q: int, len_kv: int
) -> None:
    torch.manual_seed(0)
    q, k, v = draw(2, len_q, 4, 8), draw(2, len_kv, 2, 8), draw(2, len_kv, 2, 8)
    out, lse, probabilities = adapter.flash_attn_func(q, k, v, return_attn_probs=True, **options)  # type: ignore[arg-type]
    expected, expected_lse = textbook(q, k, v, band(len_q, len_kv, *sides))
    assert close(out, expected)
    assert close(lse, torch.where(expected_lse == -torch.inf, torch.inf, expected_lse))
    assert lse.shape == (2, 4, len_q)
    assert probabilities.numel() == 0
    assert probabilities.dtype == q.dtype


@pytest.mark.parametrize("per_batch", [False, True])
def test_alibi_counts_from_the_diagonal_and_slopes_that_want_a_gradient_get_none(per_batch: bool) -> None:
    q, k, v = draw(2, 5, 4, 8), draw(2, 9, 4, 8), draw(2, 9, 4, 8)
    slopes = torch.rand((2, 4) if per_batch else (4,), dtype=torch.float32, requires_grad=True)
    distance = (torch.arange(5)[:, None] + 4 - torch.arange(9)).abs()
    out = only(adapter.flash_attn_func(q, k, v, alibi_slopes=slopes))
    bias = -slopes.detach().double().expand(2, 4)[:, :, None, None] * distance
    assert close(out, textbook(q, k, v, bias=bias)[0])
    assert not out.requires_grad


def test_scale_and_softcap_go_by_position() -> None:
    q = draw(1, 6, 2, 8)
    out = adapter.flash_attn_func(q, q, q, 0.0, 0.7, False, (-1, -1), 1.5)
    expected = tilewise.attention(q, q, q, scale=0.7, softcap=1.5, layout="bshd")
    assert torch.equal(only(out), expected)


def gradients(result: object, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = only(result)
    return torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))


def test_packed_tensors_give_what_their_parts_give_and_so_do_the_gradients() -> None:
    qkv = draw(2, 6, 3, 4, 8).requires_grad_()
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
    kv = torch.stack((k, v), 2).detach().requires_grad_()
    expected = adapter.flash_attn_func(q, k, v, causal=True)
    whole, part = (
        adapter.flash_attn_qkvpacked_func(qkv, causal=True),
        adapter.flash_attn_kvpacked_func(q, kv, causal=True),
    )
    for out in (whole, part):
        assert close(out, expected)
    wanted = torch.stack(gradients(expected, q, k, v), 2)
    assert close(gradients(whole, qkv)[0], wanted)
    assert close(gradients(part, kv)[0], wanted[:, :, 1:])


def test_sequences_packed_end_to_end_are_each_for_themselves() -> None:
    lengths_q, lengths_k = (3, 0, 5), (4, 2, 5)
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k))
    q, k, v = draw(8, 4, 8), draw(11, 2, 8), draw(11, 2, 8)
    options: dict[str, object] = {"causal": True, "window_size": (2, 0)}
    where = (cu_q, cu_k, 5, torch.tensor(5))
    out, lse, _ = adapter.flash_attn_varlen_func(q, k, v, *where, return_attn_probs=True, **options)  # type: ignore[arg-type]
    parts = zip(q[None].split(lengths_q, 1), k[None].split(lengths_k, 1), v[None].split(lengths_k, 1), strict=True)
    alone = [textbook(*one, band(one[0].shape[1], one[1].shape[1], 2, 0)) for one in parts]
    assert close(out, torch.cat([one[0][0] for one in alone]))
    assert close(lse, torch.cat([one[1][0] for one in alone], 1))
    packed = adapter.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), *where, **options)  # type: ignore[arg-type]
    assert torch.equal(only(packed), out)
    same = adapter.flash_attn_varlen_qkvpacked_func(torch.stack((q, q, q), 1), cu_q, 5, causal=True)
    assert torch.equal(only(same), tilewise.attention_varlen(q, q, q, cu_q, causal=True))


def test_keys_in_pages_are_read_through_the_table() -> None:
    q, pages = draw(5, 2, 8), draw(4, 4, 2, 8)
    table, cu_q, cu_k = (
        torch.tensor([[3, 1], [0, 2]]).int(),
        torch.tensor([0, 2, 5]).int(),
        torch.tensor([0, 6, 9]).int(),
    )
    out = adapter.flash_attn_varlen_func(q, pages, pages, cu_q, cu_k, 3, 6, causal=True, block_table=table)
    rows = torch.cat([pages[table[0].long()].flatten(0, 1)[:6], pages[table[1].long()].flatten(0, 1)[:3]])
    assert close(out, tilewise.attention_varlen(q, rows, rows, cu_q, cu_k, causal=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            adapter.flash_attn_qkvpacked_func,
            r"qkv must be \(batch, len, 3, heads, dim\); got \(2, 6, 4, 8\)",
        ),
        (
            lambda x: adapter.flash_attn_varlen_kvpacked_func(x[0], x, x, x, 1, 1),
            r"kv must be \(total, 2, heads, dim\)",
        ),
        (lambda x: adapter.flash_attn_func(x, x[..., :3], x), "same dim_qk"),
    ],
)
def test_tensors_of_another_layout_are_refused_with_a_reason(call: Callable[..., object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(draw(2, 6, 4, 8))


# ---- dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_the_debugging_output_shows_the_softmax_and_by_its_sign_what_was_dropped(causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = draw(2, 40, 4, 8), draw(2, 60, 2, 8), draw(2, 60, 2, 8)
    out, lse, shown = adapter.flash_attn_func(q, k, v, 0.3, causal=causal, return_attn_probs=True)
    hidden = band(40, 60, -1, 0 if causal else -1)
    assert shown.shape == (2, 4, 40, 60)
    assert bool((shown.masked_fill(~hidden, 0) == 0).all())
    kept, p = shown >= 0, shown.abs()
    assert abs(kept.masked_select(~hidden).double().mean().item() - 0.7) < 0.01
    keys, values = (x.transpose(1, 2).repeat_interleave(2, 1) for x in (k, v))
    score = (q.transpose(1, 2) @ keys.mT * 8**-0.5).masked_fill(hidden, -torch.inf)
    assert close(p, (score - score.amax(-1, keepdim=True)).exp())
    assert close(out, (p * kept / p.sum(-1, keepdim=True) @ values).transpose(1, 2) / 0.7)
    assert close(lse, score.logsumexp(-1))


def test_the_debugging_output_of_packed_sequences_has_a_matrix_for_each() -> None:
    torch.manual_seed(0)
    q, cu = draw(9, 2, 8), torch.tensor([0, 4, 4, 9]).int()
    slopes = torch.rand(3, 2, dtype=torch.float64)
    out, _, shown = adapter.flash_attn_varlen_func(
        q, q, q, cu, cu, 5, 5, 0.4, causal=True, alibi_slopes=slopes, return_attn_probs=True
    )
    assert shown.shape == (3, 2, 5, 5)
    p = shown.abs() / shown.abs().sum(-1, keepdim=True).clamp(min=1e-300) * (shown >= 0) / 0.6
    for sequence, (start, stop) in enumerate(((0, 4), (4, 4), (4, 9))):
        n = stop - start
        assert close(out[start:stop], (p[sequence, :, :n, :n] @ q[start:stop].transpose(0, 1)).transpose(0, 1))
        assert bool((shown[sequence, :, n:] == 0).all())
    with pytest.raises(ValueError, match="not given for keys in pages"):
        adapter.flash_attn_varlen_func(
            q, q[None], q[None], cu, cu, 5, 5, 0.4, block_table=torch.zeros(3, 1).int(), return_attn_probs=True
        )


def test_the_same_seed_of_torch_drops_the_same_forward_and_backward() -> None:
    q = draw(1, 30, 2, 8).requires_grad_()
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        out = adapter.flash_attn_func(q, q, q, 0.5)
        found.append((only(out), *gradients(out, q)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    other = adapter.flash_attn_func(q, q, q, 0.5)
    assert not torch.equal(only(other), found[0][0])


# ---- decoding -------------------------------------------------------------------------------------------------------


def test_decoding_appends_in_place_and_takes_queries_that_want_a_gradient() -> None:
    k_cache, v_cache = draw(2, 2, 12, 2, 8)
    q, k, v = draw(2, 3, 4, 8).requires_grad_(), draw(2, 3, 2, 8), draw(2, 3, 2, 8)
    held = torch.tensor([4, 9]).int()
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    for row, start in enumerate(held.tolist()):
        expected_k[row, start : start + 3], expected_v[row, start : start + 3] = k[row], v[row]
    result = adapter.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=held, causal=True, window_size=(6, -1), return_softmax_lse=True
    )
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)
    assert isinstance(result, tuple)
    for row, start in enumerate(held.tolist()):
        used = slice(row, row + 1), slice(0, start + 3)
        out, lse = textbook(q[row : row + 1], k_cache[used], v_cache[used], band(3, start + 3, 6, 0))
        assert close(result[0][row], out[0])
        assert close(result[1][row], lse[0])
    assert not result[0].requires_grad


def test_decoding_is_not_causal_unless_asked_and_rotates_in_pairs_by_default() -> None:
    cache = draw(2, 1, 8, 1, 16)
    q, k, v = draw(1, 2, 1, 16), draw(1, 2, 1, 16), draw(1, 2, 1, 16)
    angle = torch.rand(8, 4, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    for causal in (False, True):
        ours, theirs = cache.clone(), cache.clone()
        call = partial(adapter.flash_attn_with_kvcache, q, ours[0], ours[1], k, v, cos, sin, 5)
        out = call(causal=True) if causal else call()
        expected = tilewise.attention_with_kvcache(
            q, theirs[0], theirs[1], k=k, v=v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=5, causal=causal
        )
        assert torch.equal(only(out), expected)
        assert torch.equal(ours, theirs)


def test_a_query_of_an_empty_cache_has_an_lse_of_plus_infinity() -> None:
    cache = draw(1, 8, 1, 16)
    out, lse = adapter.flash_attn_with_kvcache(
        draw(1, 1, 1, 16), cache, cache, cache_seqlens=0, return_softmax_lse=True
    )
    assert out.abs().max() == 0
    assert lse.item() == torch.inf


# ---- padding --------------------------------------------------------------------------------------------------------


def test_padding_goes_and_comes_back_with_gradients() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    hidden = draw(3, 4, 2, 5).requires_grad_()
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(hidden, mask)
    assert indices.tolist() == [0, 1, 4, 5, 6]
    assert cu_seqlens.tolist() == [0, 2, 5, 5]
    assert cu_seqlens.dtype == torch.int32
    assert isinstance(longest, int)
    assert (longest, used.tolist()) == (3, [2, 3, 0])
    padded = bert_padding.pad_input(packed, indices, 3, 4)
    assert torch.equal(padded, hidden * mask[..., None, None])
    assert torch.equal(gradients(padded, hidden)[0] != 0, (mask == 1)[..., None, None].expand_as(hidden))


def test_places_allocated_but_unused_are_packed_and_told_apart() -> None:
    used, unused = torch.tensor([[True, True, False, False]]), torch.tensor([[False, False, True, False]])
    packed, _, cu_seqlens, longest, count = bert_padding.unpad_input(draw(1, 4, 2), used, unused)
    assert (packed.shape[0], cu_seqlens.tolist(), longest, count.tolist()) == (3, [0, 3], 3, [2])


def test_rows_that_hold_several_sequences_are_taken_apart() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    hidden = draw(3, 6, 2)
    packed, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(hidden, lengths)
    assert (cu_seqlens.tolist(), longest) == ([0, 2, 5, 8, 10, 16], 6)
    assert torch.equal(packed, torch.cat([hidden[0, :5], hidden[1, :5], hidden[2]]))
    assert torch.equal(packed, hidden.flatten(0, 1)[indices])


def test_entries_are_taken_and_put_back_by_index() -> None:
    x, indices = draw(6, 3).requires_grad_(), torch.tensor([4, 0, 1])
    taken, residual = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(taken, bert_padding.index_first_axis(x, indices))
    assert torch.equal(residual, x)
    (grad,) = torch.autograd.grad(taken.sum() + residual.sum(), x)
    assert grad[:, 0].tolist() == [2, 2, 1, 1, 2, 1]
    assert torch.equal(bert_padding.index_put_first_axis(taken, indices, 6)[indices], taken)


# ---- the module flash_attn ------------------------------------------------------------------------------------------


@pytest.fixture
def _installed() -> Iterator[None]:
    assert adapter.install()
    yield
    adapter.uninstall()


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="the real flash_attn is installed")
@pytest.mark.usefixtures("_installed")
def test_the_import_gives_these_functions_where_the_package_is_absent() -> None:
    package = importlib.import_module("flash_attn")
    assert package.flash_attn_varlen_func is adapter.flash_attn_varlen_func
    assert importlib.import_module("flash_attn.bert_padding").unpad_input is bert_padding.unpad_input
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    assert [getattr(interface, name) for name in SIGNATURES] == [getattr(package, name) for name in SIGNATURES]
    assert importlib.util.find_spec("flash_attn") is not None
    assert tuple(int(part) for part in package.__version__.split(".")) >= (2, 8)
    assert adapter.install()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.layers")
    adapter.uninstall()
    assert importlib.util.find_spec("flash_attn") is None
    adapter.uninstall()


def test_the_real_package_stays_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", sys.modules["json"])
    assert not adapter.install()
    adapter.uninstall()
    assert sys.modules["flash_attn"] is sys.modules["json"]


def test_importing_the_adapter_installs_nothing() -> None:
    code = "import sys, tilewise.adapters.flash_attn; sys.exit('flash_attn' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- compiling ------------------------------------------------------------------------------------------------------


def test_training_on_packed_sequences_compiles_into_one_graph_with_the_longest_as_a_tensor() -> None:
    torch._dynamo.reset()
    cu, longest = torch.tensor([0, 3, 8]).int(), torch.tensor(5)

    def step(qkv: torch.Tensor, longest: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        out = adapter.flash_attn_varlen_qkvpacked_func(qkv, cu, longest, causal=True, alibi_slopes=slopes)
        return only(out).square().sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    qkv, slopes = draw(8, 3, 2, 8).requires_grad_(), torch.rand(2)
    (got,) = torch.autograd.grad(compiled(qkv, longest, slopes), qkv)
    (expected,) = torch.autograd.grad(step(qkv, longest, slopes), qkv)
    assert close(got, expected)


def test_batches_and_decoding_compile_into_one_graph() -> None:
    torch._dynamo.reset()

    def step(
        q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, held: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dense = adapter.flash_attn_func(q, k, k, causal=True, window_size=(4, 0), return_attn_probs=True)
        decoded = adapter.flash_attn_with_kvcache(q, cache, cache, k, k, cache_seqlens=held, causal=True)
        return dense[0], dense[1], only(decoded)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    q, k, cache, held = draw(1, 3, 4, 8), draw(1, 3, 2, 8), draw(1, 9, 2, 8), torch.tensor([2]).int()
    expected = step(q, k, cache.clone(), held)
    assert all(close(*pair) for pair in zip(compiled(q, k, cache.clone(), held), expected, strict=True))


# ---- the page -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="the real flash_attn is installed")
def test_the_code_of_the_page_on_switching_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "switch" / "flash-attn.md").read_text(encoding="utf-8")
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)), encoding="utf-8")
    assert runpy.run_path(str(script))["longest"] == 300
