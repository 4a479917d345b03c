"""Calls with functions of their own through the front door: gradients, what is refused, what is explained."""
# ruff: noqa: ARG005 - every function is given all positions

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import tilewise
from tilewise import mods, reference
from tilewise.backends.block_lists import Blocks


def inputs(length: int = 20, grad: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 4, length, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    return q.requires_grad_(grad), k.requires_grad_(grad), v.requires_grad_(grad)


def test_gradients_reach_given_and_captured_tensors() -> None:
    q, k, v = inputs()
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
    table = torch.rand(2, 20, dtype=torch.float64, requires_grad=True)

    def attend(*given: torch.Tensor) -> torch.Tensor:
        q, k, v, slopes, table = given
        return tilewise.attention(
            q, k, v, causal=True, score_tensors=(slopes,),
            score_mod=lambda s, b, h, q_pos, kv_pos, t: s - t[h] * (q_pos - kv_pos) + s * table[b, kv_pos],
        )  # fmt: skip

    assert torch.autograd.gradcheck(attend, (q, k, v, slopes, table), fast_mode=True)


def test_a_function_is_the_same_as_the_option_that_it_writes_out() -> None:
    q, k, v = inputs(grad=False)
    slopes = torch.rand(4, dtype=torch.float64)
    got = tilewise.attention(
        q, k, v, mask_mod=lambda b, h, q_pos, kv_pos: (q_pos >= kv_pos) & (q_pos - kv_pos <= 5),
        score_mod=lambda s, b, h, q_pos, kv_pos: s - slopes[h] * abs(q_pos - kv_pos), return_lse=True,
    )  # fmt: skip
    want = tilewise.attention(q, k, v, causal=True, window=(5, None), alibi_slopes=slopes, return_lse=True)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_packed_sequences_are_told_their_number_and_positions_of_their_own() -> None:
    q, k, v = (x[0].transpose(0, 1) for x in inputs(grad=False))
    shift = torch.tensor([1.0, -2.0], dtype=torch.float64)
    got = tilewise.attention_varlen(
        q, k, v, torch.tensor([0, 8, 20]), mask_mod=lambda b, h, q_pos, kv_pos: (q_pos + kv_pos) % 2 == 0,
        score_mod=lambda s, b, h, q_pos, kv_pos, t: s + t[b] * kv_pos, score_tensors=(shift,),
    )  # fmt: skip
    for number, part in enumerate((slice(0, 8), slice(8, 20))):
        pos = torch.arange(part.stop - part.start)
        alone = tilewise.attention(
            *(x[None, part] for x in (q, k, v)), layout="bshd", bias=shift[number] * pos,
            mask=(pos[:, None] + pos) % 2 == 0,
        )  # fmt: skip
        torch.testing.assert_close(got[part], alone[0], rtol=0, atol=1e-13)


def test_lists_bring_their_mask_along() -> None:
    q, k, v = inputs(300, grad=False)
    causal: Callable[..., torch.Tensor] = lambda b, h, q_pos, kv_pos: q_pos >= kv_pos
    got = tilewise.attention(q, k, v, blocks=Blocks.of(causal, len_q=300, len_kv=300))
    torch.testing.assert_close(got, tilewise.attention(q, k, v, causal=True), rtol=0, atol=1e-13)


def test_lists_go_with_a_mask_that_every_step_defines_anew_and_with_an_objects_method() -> None:
    q, k, v = inputs(grad=False)

    class Window:
        def __init__(self) -> None:
            self.width = 5

        def mask(self, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:  # noqa: ARG002
            return abs(q_pos - kv_pos) <= self.width

    for _ in range(2):
        near: Callable[..., torch.Tensor] = lambda b, h, q_pos, kv_pos: abs(q_pos - kv_pos) <= 5
        want = tilewise.attention(q, k, v, window=(5, 5))
        own = Window()
        for mask in (near, own.mask):
            got = tilewise.attention(q, k, v, mask_mod=mask, blocks=Blocks.of(mask, len_q=20, len_kv=20))
            torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    one, other = Window(), Window()
    assert Blocks.of(one.mask, len_q=20, len_kv=20).mask_mod == one.mask
    assert Blocks.of(other.mask, len_q=20, len_kv=20).mask_mod == other.mask


def test_a_compiled_graph_breaks_before_the_call_and_goes_on_behind_it() -> None:
    q, k, v = (x.float() for x in inputs(grad=False))
    table = torch.rand(4)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 2 * tilewise.attention(q + 1, k, v, score_mod=lambda s, b, h, q_pos, kv_pos: s * table[h])

    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(q, k, v), model(q, k, v))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="no operator carries a score_mod or mask_mod"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(q, k, v)


def test_explain_tells_of_functions_and_lists() -> None:
    q, k, v = inputs(300, grad=False)
    scale = 0.5
    blocks = Blocks.of(lambda b, h, q_pos, kv_pos: kv_pos % 3 != 1, len_q=300, len_kv=300)
    plan = tilewise.explain(
        tilewise.attention, q, k, v, score_mod=lambda s, b, h, q_pos, kv_pos: s * scale, blocks=blocks
    )
    assert plan.backend == "torch_tiled"
    assert "score_mod" in plan.refusals["torch_sdpa"]
    assert "score_mod (numbers: 1, tensors: 0); mask_mod (numbers: 0, tensors: 0); lists of 128 x 128" in str(plan)


ADD = lambda s, b, h, q_pos, kv_pos, *t: s + t[0][h]
SEE = lambda b, h, q_pos, kv_pos: q_pos >= kv_pos


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"score_mod": 3}, TypeError, "score_mod must be a function; got int 3"),
        ({"score_mod": ADD, "score_tensors": torch.ones(4)}, TypeError, "score_tensors must be a tuple of tensors"),
        ({"score_mod": ADD, "score_tensors": (1.0,)}, TypeError, r"score_tensors\[0\] must be a torch tensor"),
        ({"mask_tensors": (torch.ones(4),)}, ValueError, "mask_tensors go with a mask_mod"),
        ({"mask_mod": SEE, "backend": "torch_sdpa"}, ValueError, "has no score_mod or mask_mod"),
        ({"blocks": "all"}, TypeError, "blocks must be a tilewise Blocks"),
        ({"blocks": Blocks.of(SEE, len_q=20, len_kv=21)}, ValueError, "blocks must be of"),
        ({"blocks": Blocks.of(SEE, len_q=20, len_kv=20), "mask_mod": ADD}, ValueError, "Leave mask_mod out"),
        (
            {"blocks": Blocks.of(SEE, len_q=20, len_kv=20, left=3), "causal": True},
            ValueError,
            "the call's band .* is .*; got blocks of the band",
        ),
        (
            {"score_mod": ADD, "score_tensors": (torch.ones(4, device="meta"),)},
            ValueError,
            r"score_tensors\[0\] must be on q's device",
        ),
        (
            {"score_mod": ADD, "score_tensors": (torch.ones(4, requires_grad=True),), "deterministic": True},
            ValueError,
            "deterministic=True cannot sum the gradients of a score_mod's tensors",
        ),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        tilewise.attention(*inputs(), **options)  # type: ignore[call-overload]


def test_transforms_and_second_derivatives_are_refused() -> None:
    q, k, v = inputs()

    def attend(q: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, k, v, mask_mod=SEE)

    with pytest.raises(NotImplementedError, match="takes ordinary tensors alone"):
        torch.func.vmap(attend)(torch.stack([q.detach(), q.detach()]))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(attend(q).sum(), q, create_graph=True)


@pytest.mark.parametrize("written", ["mask's tensor", "lists"])
def test_what_a_mask_reads_must_not_be_written_to_before_the_gradients(written: str) -> None:
    q, k, v = inputs()
    document = torch.arange(20) // 7
    same: Callable[..., torch.Tensor] = lambda b, h, q_pos, kv_pos: document[q_pos] == document[kv_pos]
    blocks = Blocks.of(same, len_q=20, len_kv=20)
    out = tilewise.attention(q, k, v, **({"mask_mod": same} if written == "mask's tensor" else {"blocks": blocks}))
    (document if written == "mask's tensor" else blocks.by_key.partial).add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_bias_gets_its_gradient_beside_lists_of_its_mask_alone_and_not_beside_others() -> None:
    q, k, v = inputs()
    bias = torch.zeros(20, 20, dtype=torch.float64, requires_grad=True)
    blocks = Blocks.of(SEE, len_q=20, len_kv=20)
    got = torch.autograd.grad(tilewise.attention(q, k, v, bias=bias, blocks=blocks).square().sum(), bias)
    want = torch.autograd.grad(tilewise.attention(q, k, v, bias=bias, causal=True).square().sum(), bias)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    listed = Blocks.from_torch(create_block_mask(SEE, None, None, 20, 20, device="cpu"))
    with pytest.raises(ValueError, match=r"bias gets no gradient beside lists .* Make them with Blocks\.of"):
        tilewise.attention(q, k, v, bias=bias, blocks=listed)
    alone = tilewise.attention(q, k, v, bias=bias.detach(), blocks=listed)
    torch.testing.assert_close(alone, tilewise.attention(q, k, v, causal=True), rtol=0, atol=1e-13)


@pytest.mark.parametrize("grad", [False, True])
def test_a_captured_tensor_without_elements_is_refused_unless_no_pair_asks_for_it(grad: bool) -> None:
    nothing = torch.zeros(0, 4, dtype=torch.float64)
    add: Callable[..., torch.Tensor] = lambda s, b, h, q_pos, kv_pos: s + nothing[kv_pos, h]
    with pytest.raises(ValueError, match=r"score_tensors\[0\] must have an element to read; got shape \(0, 4\)"):
        tilewise.attention(*inputs(grad=grad), score_mod=add)
    q, k, v = inputs(grad=grad)
    assert tilewise.attention(q, k[:, :, :0], v[:, :, :0], score_mod=add).abs().sum() == 0


def test_what_a_mask_reads_is_freed_with_the_gradients() -> None:
    q, k, v = inputs()

    def attend() -> tuple[torch.Tensor, weakref.ref[torch.Tensor]]:
        document = torch.arange(20) // 7
        mask: Callable[..., torch.Tensor] = lambda b, h, q_pos, kv_pos, t: t[q_pos] == t[kv_pos]
        return tilewise.attention(q, k, v, mask_mod=mask, mask_tensors=(document,)), weakref.ref(document)

    out, alive = attend()
    assert alive() is not None
    out.sum().backward()
    gc.collect()
    assert alive() is None
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_numpy_computes_the_same_functions_tile_by_tile_forward_and_backward() -> None:
    q, k, v, d_out = np.random.default_rng(0).standard_normal((4, 30, 8))

    def score_mod(score: np.ndarray, batch: int, head: int, q_pos: np.ndarray, kv_pos: np.ndarray) -> np.ndarray:
        return mods.where(kv_pos % 2 == 0, score * score, score - 0.125 * abs(q_pos - kv_pos))

    asked: dict[str, Any] = {"score_mod": score_mod, "mask_mod": lambda b, h, q_pos, kv_pos: q_pos - kv_pos >= 3}
    out, lse = reference.tiled_attention(q, k, v, **asked, block_q=7, block_kv=11)
    grads = reference.tiled_attention_backward(q, k, v, out, lse, d_out, **asked, block_q=7, block_kv=11)
    given = [torch.from_numpy(x)[None, None].requires_grad_() for x in (q, k, v)]
    want = tilewise.attention(*given, **asked)
    arriving = torch.from_numpy(d_out)[None, None]
    pairs = [(out, want), *zip(grads, torch.autograd.grad(want, given, arriving), strict=True)]
    for got, right in [*pairs, (reference.naive_attention(q, k, v, **asked), want)]:
        np.testing.assert_allclose(got, right.detach()[0, 0].numpy(), rtol=0, atol=1e-12)
    assert lse[2] == -np.inf
