"""PyTorch's flex_attention and create_block_mask served by tilewise: beside PyTorch's own, and beside the formula."""
# ruff: noqa: ARG005 - scores and masks take what they are given

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import BlockMask, and_masks, noop_mask, or_masks

from tilewise import testing
from tilewise.adapters import flex_attention as adapter
from tilewise.adapters.flex_attention import create_block_mask, flex_attention
from tilewise.backends.block_lists import Blocks

EPS = torch.finfo(torch.float64).eps
LEN = 150
draw = partial(torch.randn, dtype=torch.float64)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch compute the formula as it stands: it would compile, or warn that it does not."""
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Say whether two float64 results of the same formula differ by rounding alone."""
    return testing.error(got, expected, expected, EPS, terms=math.sqrt(LEN) + 30.0).within


# ---- scores and masks as users of PyTorch write them ----


def alibi(heads: int) -> Callable[..., Any]:
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    return lambda score, b, h, q, kv: score - slopes[h] * (q - kv).abs()


def relative(table: torch.Tensor) -> Callable[..., Any]:
    """Add a number of each head and distance, as T5 does: (heads, 2 * LEN - 1)."""

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + table[h, kv - q + LEN - 1]

    return score_mod


def softcap(cap: float) -> Callable[..., Any]:
    return lambda score, b, h, q, kv: cap * torch.tanh(score / cap)


def halves(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.where(kv % 2 == 0, score * 2, score / (1 + b))


TABLE = draw(4, 2 * LEN - 1)
SCORES = {"none": None, "alibi": alibi(4), "relative": relative(TABLE), "softcap": softcap(5.0), "halves": halves}

DOCUMENTS = torch.tensor([[0] * 40 + [1] * 60 + [2] * 50, [0] * 149 + [1]])


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv).abs() <= 30


def documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return DOCUMENTS[b, q] == DOCUMENTS[b, kv]


def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Hide all keys from the first queries."""
    return (q > 20) & (kv < 10 * (h + 1))


MASKS = {
    "none": None,
    "nothing hidden": noop_mask,
    "causal": causal,
    "documents": documents,
    "and": and_masks(causal, window, documents),
    "or": or_masks(late, and_masks(causal, window)),
    "rows that see nothing": late,
}


def inputs(heads_kv: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return draw(2, 4, LEN, 8), draw(2, heads_kv, LEN, 8), draw(2, heads_kv, LEN, 6)


def pairs(function: Callable[..., Any], *first: torch.Tensor) -> torch.Tensor:
    """Apply a score or mask to each pair alone, as PyTorch means it."""
    positions = [torch.arange(size) for size in (2, 4, LEN, LEN)]
    for dim in (3, 2, 1, 0):
        lead = (0,) * len(first)
        function = torch.vmap(function, (*lead, *(0 if axis == dim else None for axis in range(4))))
    result: torch.Tensor = function(*first, *positions)
    return result


def formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Any, mask_mod: Any, scale: float = 8**-0.5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse with the whole score matrix."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    score = q @ k.mT * scale
    if score_mod is not None:
        score = pairs(score_mod, score)
    if mask_mod is not None:
        score = torch.where(pairs(mask_mod), score, -math.inf)
    lse = score.logsumexp(-1)
    p = torch.exp(score - torch.where(lse == -math.inf, 0, lse)[..., None])
    return p @ v, lse


# ---- the function ----


def test_the_signatures_are_pytorchs() -> None:
    for name, ours in (("flex_attention", flex_attention), ("create_block_mask", create_block_mask)):
        parameters, wanted = (inspect.signature(f).parameters for f in (ours, getattr(theirs, name)))
        assert list(parameters) == list(wanted)
        assert [p.default for p in parameters.values()] == [p.default for p in wanted.values()]
        assert [p.kind for p in parameters.values()] == [p.kind for p in wanted.values()]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_results_are_pytorchs(score: str, mask: str) -> None:
    q, k, v = inputs()
    score_mod, mask_mod = SCORES[score], MASKS[mask]
    blocks = None if mask_mod is None else create_block_mask(mask_mod, 2, 4, LEN, LEN, device="cpu")
    block_mask = None if mask_mod is None else theirs.create_block_mask(mask_mod, 2, 4, LEN, LEN, device="cpu")
    request = theirs.AuxRequest(lse=True)
    expected, aux = theirs.flex_attention(q, k, v, score_mod, block_mask, return_aux=request)
    assert aux.lse is not None
    for given in (blocks, block_mask):
        out, lse = flex_attention(q, k, v, score_mod, given, return_lse=True)
        assert close(out, expected)
        assert close(lse, aux.lse)


@pytest.mark.parametrize("mask", ["none", "and", "rows that see nothing"])
@pytest.mark.parametrize("score", SCORES)
def test_gradients_are_those_of_the_formula_and_reach_captured_tensors(score: str, mask: str) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(heads_kv=2))
    leaves = [q, k, v]
    score_mod, mask_mod = SCORES[score], MASKS[mask]
    if score == "relative":
        leaves.append(TABLE.clone().requires_grad_())
        score_mod = relative(leaves[-1])
    blocks = None if mask_mod is None else create_block_mask(mask_mod, 2, 4, LEN, LEN, device="cpu")
    out, lse = flex_attention(q, k, v, score_mod, blocks, scale=0.4, enable_gqa=True, return_lse=True)
    expected, expected_lse = formula(q, k, v, score_mod, mask_mod, 0.4)
    assert close(out.detach(), expected.detach())
    weights, weights_lse = torch.rand_like(out), torch.rand_like(lse)
    sees = (expected_lse > -math.inf).detach()
    found, wanted = (
        torch.autograd.grad((o * weights).sum() + (torch.where(sees, e, 0) * weights_lse).sum(), leaves)
        for o, e in ((out, lse), (expected, expected_lse))
    )
    assert all(close(*pair) for pair in zip(found, wanted, strict=True))


def test_without_gradients_and_in_low_precision_the_dtypes_are_pytorchs() -> None:
    q, k, v = (x.bfloat16() for x in inputs())
    out, lse = flex_attention(q, k, v, softcap(5.0), return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_options_of_pytorchs_kernels_change_nothing() -> None:
    q, k, v = inputs()
    expected = flex_attention(q, k, v)
    assert torch.equal(flex_attention(q, k, v, kernel_options={"BLOCK_M": 32}), expected)
    out, aux = flex_attention(q, k, v, return_aux=theirs.AuxRequest(lse=False))
    assert torch.equal(out, expected)
    assert aux == theirs.AuxOutput(None, None)


def test_one_sequence_of_keys_serves_all_queries_that_the_mask_tells_apart() -> None:
    q, k, v = inputs()
    blocks = create_block_mask(documents, 2, None, LEN, LEN, device="cpu")
    out = flex_attention(q, k[:1], v[:1], block_mask=blocks)
    assert close(out, formula(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1), None, documents)[0])


def test_a_compiled_function_breaks_its_graph_there_and_gives_the_same() -> None:
    q, k, v = inputs()

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        block_mask = create_block_mask(window, None, None, LEN, LEN, device=q.device)
        return flex_attention(q * 2, k, v, halves, block_mask) + 1

    assert torch.equal(torch.compile(model, backend="eager")(q, k, v), model(q, k, v))


# ---- block masks ----


def test_a_block_mask_of_pytorch_is_taken_once_until_it_changes() -> None:
    block_mask = theirs.create_block_mask(causal, None, None, LEN, LEN, device="cpu")
    first = adapter._blocks(block_mask)
    assert adapter._blocks(block_mask) is first
    block_mask.mask_mod = window
    second = adapter._blocks(block_mask)
    assert second is not first
    assert second is not None
    assert second.mask_mod is window
    block_mask.kv_num_blocks.zero_()
    third = adapter._blocks(block_mask)
    assert third is not second
    assert third is not None
    assert third.by_query.partial.numel() == 0


def test_other_tensors_of_the_same_version_are_another_block_mask() -> None:
    block_mask = theirs.create_block_mask(causal, None, None, LEN, LEN, device="cpu")
    first = adapter._blocks(block_mask)
    assert first is not None
    block_mask.kv_num_blocks = torch.zeros_like(block_mask.kv_num_blocks)
    second = adapter._blocks(block_mask)
    assert second is not None
    assert first.by_query.partial.numel() > second.by_query.partial.numel() == 0


def test_a_block_mask_made_in_inference_mode_serves_there_and_later_with_gradients() -> None:
    q, k, v = inputs()
    with torch.inference_mode():
        block_mask = theirs.create_block_mask(causal, None, None, LEN, LEN, device="cpu")
        assert close(flex_attention(q, k, v, None, block_mask), formula(q, k, v, None, causal)[0])
        assert adapter._blocks(block_mask) is adapter._blocks(block_mask)
    q = q.clone().requires_grad_()
    (got,) = torch.autograd.grad(flex_attention(q, k, v, None, block_mask).sum(), q)
    (want,) = torch.autograd.grad(formula(q, k, v, None, causal)[0].sum(), q)
    assert close(got, want)


def test_lists_made_by_hand_count_whatever_the_function_says() -> None:
    """As in PyTorch's compiled kernels: tiles that are not listed are hidden, full ones are not asked about."""
    number = torch.tensor([[[1, 1, 1, 1, 1]]], dtype=torch.int32)
    indices = torch.zeros(1, 1, 5, 5, dtype=torch.int32)
    diagonal = torch.arange(5, dtype=torch.int32).view(1, 1, 5, 1).expand(1, 1, 5, 5).contiguous()
    block_mask = BlockMask.from_kv_blocks(number, indices, number.clone(), diagonal, 32, causal, (LEN, LEN))
    number[..., 0] = 0  # tile (0, 0) is full alone

    def listed(b: Any, h: Any, q: Any, kv: Any) -> Any:
        full = (q // 32 == kv // 32) & (q < 128)
        first, last = kv < 32, (q >= 128) & (kv >= 128)
        return full | ((first | last) & (q >= kv))

    q, k, v = inputs()
    assert close(flex_attention(q, k, v, None, block_mask), formula(q, k, v, None, listed)[0])


def test_create_block_mask_gives_lists_in_the_tiles_asked_for() -> None:
    blocks = create_block_mask(causal, None, None, 256, 512, device="cpu", BLOCK_SIZE=(64, 128))
    assert isinstance(blocks, Blocks)
    assert (blocks.batch, blocks.heads, blocks.block_q, blocks.block_kv) == (1, 1, 64, 128)
    assert create_block_mask(causal, 3, 5, 256, 512, device="cpu").kinds.shape == (1, 1, 2, 4)


# ---- refused ----


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"must have axes \(batch, heads, len, dim\); got \(4, 150, 8\)"):
        flex_attention(q[0], k, v)
    with pytest.raises(ValueError, match=r"the same heads; got 4 and 2\. enable_gqa=True"):
        flex_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="made for 256 queries and 150 keys; got 150 and 150"):
        flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, 256, LEN, device="cpu"))
    with pytest.raises(ValueError, match="return_lse does not go with return_aux"):
        flex_attention(q, k, v, return_lse=True, return_aux=theirs.AuxRequest(lse=True))  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="max_scores are not kept"):
        flex_attention(q, k, v, return_aux=theirs.AuxRequest(max_scores=True))
    with pytest.raises(TypeError, match="block_mask must be a BlockMask"):
        flex_attention(q, k, v, block_mask=torch.ones(LEN, LEN, dtype=torch.bool))  # type: ignore[call-overload]


def test_a_sliced_block_mask_has_lost_its_function() -> None:
    q, k, v = inputs()
    sliced = theirs.create_block_mask(documents, 2, None, LEN, LEN, device="cpu")[0:1]
    with pytest.raises(ValueError, match="a sliced BlockMask has lost its mask_mod"):
        flex_attention(q[:1], k[:1], v[:1], block_mask=sliced)


def test_a_function_that_decides_in_python_is_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="decides in Python"):
        flex_attention(q, k, v, lambda score, b, h, q, kv: score if q > kv else -score)


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_code_of_the_page_on_scores_and_masks_runs_and_prints_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "mods.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for code, shown in re.findall(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", page, re.MULTILINE | re.DOTALL):
        exec(code, names)  # noqa: S102 - our own page
        assert capsys.readouterr().out.strip() == shown.strip()
