"""First and second derivatives against finite differences, and what is kept for them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

import tilewise

BATCH, HEADS, LEN_Q, LEN_KV, DIM = 2, 2, 4, 5, 3

Kwargs = dict[str, Any]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# Each feature changes the call's arguments; "q", "k", "v", "bias" and "sink" are what is differentiated.
FEATURES: dict[str, Callable[[Kwargs], None]] = {
    "causal": lambda call: call.update(causal=True),
    "top_left": lambda call: call.update(causal=True, align="top_left"),
    "window": lambda call: call.update(window=(2, 1)),
    "softcap": lambda call: call.update(softcap=1.3),
    "scale": lambda call: call.update(scale=-0.7),
    "alibi": lambda call: call.update(alibi_slopes=draw(HEADS).abs()),
    "bias": lambda call: call.update(bias=draw(BATCH, HEADS, LEN_Q, LEN_KV)),
    "broadcast bias": lambda call: call.update(bias=draw(1, HEADS, 1, LEN_KV)),
    "mask": lambda call: call.update(mask=draw(BATCH, 1, LEN_Q, LEN_KV) > -0.8),
    "sink": lambda call: call.update(sink=draw(HEADS)),
    "sink per batch": lambda call: call.update(sink=draw(BATCH, HEADS)),
    "ranges": lambda call: call.update(kv_start=[0, 2], kv_stop=[4, 2]),
    "dropout": lambda call: call.update(dropout=0.3, seed=7),
    "group": lambda call: call.update(k=draw(BATCH, 1, LEN_KV, DIM), v=draw(BATCH, 1, LEN_KV, DIM)),
    "dim_v": lambda call: call.update(v=draw(*_heads(call), LEN_KV, 2, seed=2)),
    "bshd": lambda call: call.update(layout="bshd"),
}
# Pairs that say the same thing twice.
SAME = {frozenset(pair) for pair in (("causal", "top_left"), ("bias", "broadcast bias"), ("sink", "sink per batch"))}

PACKED: dict[str, Callable[[Kwargs], None]] = {
    "causal": lambda call: call.update(causal=True),
    "window": lambda call: call.update(window=(1, 1)),
    "softcap": lambda call: call.update(softcap=1.3),
    "alibi": lambda call: call.update(alibi_slopes=draw(3, HEADS).abs()),
    "bias": lambda call: call.update(bias=draw(1, 7, 4)),
    "sink": lambda call: call.update(sink=draw(HEADS)),
    "sink per sequence": lambda call: call.update(sink=draw(3, HEADS)),
    "dropout": lambda call: call.update(dropout=0.3, seed=7),
    "group": lambda call: call.update(k=draw(6, 1, DIM), v=draw(6, 1, DIM)),
}
PACKED_SAME = {frozenset(("sink", "sink per sequence"))}


def _heads(call: Kwargs) -> tuple[int, int]:
    return call["k"].shape[0], call["k"].shape[1]


def dense(*features: str) -> Kwargs:
    call: Kwargs = {"q": draw(BATCH, HEADS, LEN_Q, DIM), "k": draw(BATCH, HEADS, LEN_KV, DIM)}
    call["v"] = draw(BATCH, HEADS, LEN_KV, DIM, seed=1)
    for feature in sorted(features, key=list(FEATURES).index):
        FEATURES[feature](call)
    if call.get("layout") == "bshd":
        call.update({name: call[name].transpose(1, 2).contiguous() for name in "qkv"})
    return call


def packed(*features: str) -> Kwargs:
    """Three sequences of 3, 0 and 2 queries over 2, 1 and 3 keys, and two tokens of tail in q."""
    call: Kwargs = {"q": draw(7, HEADS, DIM), "k": draw(6, HEADS, DIM), "v": draw(6, HEADS, DIM, seed=1)}
    call["cu_seqlens_q"] = torch.tensor([0, 3, 3, 5])
    call["cu_seqlens_k"] = torch.tensor([0, 2, 3, 6])
    for feature in features:
        PACKED[feature](call)
    return call


def checks(function: Callable[..., Any], call: Kwargs, *, fast: bool) -> None:
    names = [name for name in ("q", "k", "v", "bias", "sink") if name in call]
    inputs = [call[name].detach().requires_grad_() for name in names]

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = dict(zip(names, tensors, strict=True))
        out, lse = function(**(call | given), return_lse=True)
        return out, torch.where(torch.isneginf(lse), 0, lse)  # finite differences cannot pass through -inf

    assert torch.autograd.gradcheck(run, inputs, fast_mode=fast)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=fast)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_has_both_derivatives(feature: str) -> None:
    checks(tilewise.attention, dense(feature), fast=False)


@pytest.mark.parametrize("pair", [p for p in combinations(FEATURES, 2) if frozenset(p) not in SAME], ids=" and ".join)
def test_every_pair_of_features_has_both_derivatives(pair: tuple[str, str]) -> None:
    checks(tilewise.attention, dense(*pair), fast=True)


@pytest.mark.parametrize("feature", PACKED)
def test_every_packed_feature_has_both_derivatives(feature: str) -> None:
    checks(tilewise.attention_varlen, packed(feature), fast=False)


@pytest.mark.parametrize(
    "pair", [p for p in combinations(PACKED, 2) if frozenset(p) not in PACKED_SAME], ids=" and ".join
)
def test_every_pair_of_packed_features_has_both_derivatives(pair: tuple[str, str]) -> None:
    checks(tilewise.attention_varlen, packed(*pair), fast=True)


@pytest.mark.parametrize("backend", ["torch_sdpa", "torch_tiled", "naive"])
def test_both_derivatives_hold_after_every_backend(backend: str) -> None:
    with tilewise.use_backend(backend):
        checks(tilewise.attention, dense(), fast=False)


def test_several_tiles_have_both_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.backends import torch_double_backward, torch_tiled
    from tilewise.machine.tiles import Tiles

    for module in (torch_tiled, torch_double_backward):
        monkeypatch.setattr(module, "tiles", lambda _: Tiles(2, 2))
    checks(tilewise.attention, dense("causal", "bias", "sink", "softcap"), fast=True)
    checks(tilewise.attention_varlen, packed("causal", "bias", "sink per sequence"), fast=True)


def test_a_third_derivative_is_refused() -> None:
    q, k, v = (x.requires_grad_() for x in (draw(1, 1, 3, 2), draw(1, 1, 3, 2), draw(1, 1, 3, 2)))
    (first,) = torch.autograd.grad(tilewise.attention(q, k, v).square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), k, create_graph=True)
    with pytest.raises(NotImplementedError, match="no third derivative"):
        torch.autograd.grad(second.sum(), v)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sink"])
@pytest.mark.parametrize("function", [tilewise.attention, tilewise.attention_varlen], ids=["dense", "packed"])
def test_a_gradient_for_one_input_alone_is_the_same(wanted: str, function: Callable[..., torch.Tensor]) -> None:
    make = dense if function is tilewise.attention else packed
    call = make("causal", "bias", "sink")
    names = ("q", "k", "v", "bias", "sink")
    every = {name: call[name].clone().requires_grad_() for name in names}
    expected = torch.autograd.grad(function(**{**call, **every}).sum(), every[wanted])
    alone = call[wanted].clone().requires_grad_()
    got = torch.autograd.grad(function(**{**call, wanted: alone}).sum(), alone)
    assert torch.equal(got[0], expected[0])


def test_no_work_is_done_for_gradients_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.backends import torch_tiled

    products = 0
    real = torch_tiled.product_over_rows

    def counted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        nonlocal products
        products += 1
        return real(left, right)

    monkeypatch.setattr(torch_tiled, "product_over_rows", counted)
    q, k, v = draw(1, 1, 3, 2).requires_grad_(), draw(1, 1, 3, 2), draw(1, 1, 3, 2)
    tilewise.attention(q, k, v, backend="torch_tiled").sum().backward()
    assert not products  # dk and dv are the products over rows
    assert k.grad is None
    assert v.grad is None


def test_lse_alone_has_gradients() -> None:
    call = dense("sink")
    q, sink = call["q"].requires_grad_(), call["sink"].requires_grad_()

    def lse(q: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, call["k"], call["v"], sink=sink, return_lse=True)[1]

    assert torch.autograd.gradcheck(lse, (q, sink))
    with tilewise.use_backend("torch_sdpa"):
        k, v = call["k"], call["v"]
        assert torch.autograd.gradcheck(lambda q: tilewise.attention(q, k, v, return_lse=True)[1], (q,))


def saved_sizes(**options: Any) -> list[int]:
    """Run a long call and list the sizes of what autograd keeps."""
    sizes: list[int] = []
    q, k, v = (torch.randn(1, 1, 700, 8, requires_grad=True) for _ in range(3))

    def pack(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = tilewise.attention(q, k, v, **options)
    out.sum().backward()
    return sizes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (64, 0)},
        {"softcap": 2.0},
        {"dropout": 0.2},
        {"sink": torch.zeros(1)},
        {"alibi_slopes": torch.ones(1)},
        {"bias": torch.zeros(1, 1, 1, 700)},
        {"kv_stop": [300]},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_nothing_of_the_score_matrix_is_kept_for_backward(options: dict[str, Any]) -> None:
    sizes = saved_sizes(**options)
    assert sizes
    assert max(sizes) <= 700 * 8


def test_gradients_of_expanded_inputs_are_summed() -> None:
    k, v = draw(1, 1, 5, 3), draw(1, 1, 5, 3, seed=1)
    q = draw(2, 4, 4, 3)

    def run(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, k.expand(2, 4, 5, 3), v.expand(2, 4, 5, 3))

    assert torch.autograd.gradcheck(run, (k.requires_grad_(), v.requires_grad_()))


def test_no_graph_is_made_under_no_grad() -> None:
    q = draw(1, 1, 3, 2).requires_grad_()
    with torch.no_grad():
        assert not tilewise.attention(q, q, q).requires_grad
