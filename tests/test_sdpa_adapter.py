"""PyTorch's scaled_dot_product_attention served by tilewise: as a function, beneath PyTorch's own, and explained."""

from __future__ import annotations

import inspect
import math
import re
import runpy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from tilewise import testing
from tilewise.adapters import sdpa as adapter
from tilewise.adapters.sdpa import explain_sdpa, scaled_dot_product_attention

EPS = torch.finfo(torch.float64).eps
draw = partial(torch.randn, dtype=torch.float64)
theirs = torch.nn.functional.scaled_dot_product_attention


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Say whether two float64 results of the same formula differ by rounding alone."""
    return testing.error(got, expected, expected, EPS, terms=30.0).within


# ---- the function ---------------------------------------------------------------------------------------------------


def test_the_signature_is_pytorchs() -> None:
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    assert list(parameters) == names
    assert [parameters[name].default for name in names[3:]] == [None, 0.0, False, None, False]


SHAPES = {
    "a batch": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)),
    "another dim for values": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 3)),
    "one sequence": ((5, 8), (9, 8), (9, 8)),
    "three axes": ((4, 5, 8), (4, 9, 8), (4, 9, 8)),
    "five axes": ((2, 3, 4, 5, 8), (2, 3, 4, 9, 8), (2, 3, 4, 9, 8)),
    "queries without a batch": ((4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)),
    "keys without a batch": ((2, 4, 5, 8), (4, 9, 8), (1, 1, 9, 8)),
    "one head of keys": ((2, 4, 5, 8), (2, 1, 9, 8), (2, 1, 9, 8)),
    "one head of queries": ((2, 1, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)),
    "more queries than keys": ((2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 8)),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes_broadcast_and_the_diagonal_starts_top_left(
    shapes: tuple[tuple[int, ...], ...], is_causal: bool
) -> None:
    q, k, v = (draw(shape).requires_grad_() for shape in shapes)
    out, expected = (f(q, k, v, is_causal=is_causal, scale=0.3) for f in (scaled_dot_product_attention, theirs))
    assert close(out, expected)
    grads, wanted = (torch.autograd.grad(x, (q, k, v), torch.ones_like(x) * 0.5) for x in (out, expected))
    assert all(close(*pair) for pair in zip(grads, wanted, strict=True))


MASKS = {
    "all axes": ((2, 4, 5, 8), (2, 4, 5, 9)),
    "one for all": ((2, 4, 5, 8), (5, 9)),
    "padding": ((2, 4, 5, 8), (2, 1, 1, 9)),
    "three axes": ((4, 5, 8), (4, 5, 9)),
    "five axes": ((2, 3, 4, 5, 8), (3, 1, 5, 9)),
    "five axes, one for all": ((2, 3, 4, 5, 8), (5, 9)),
}


@pytest.mark.parametrize("boolean", [True, False], ids=["bool", "float"])
@pytest.mark.parametrize(("shape", "mask_shape"), MASKS.values(), ids=MASKS)
def test_masks_hide_or_are_added_and_get_their_gradient(
    shape: tuple[int, ...], mask_shape: tuple[int, ...], boolean: bool
) -> None:
    torch.manual_seed(0)
    q, k = draw(shape).requires_grad_(), draw(*shape[:-2], 9, 8)
    mask = draw(mask_shape) > 0 if boolean else draw(mask_shape).requires_grad_()
    if boolean:
        mask[..., 0, :] = mask_shape[-2] == 1  # a row that sees nothing
    out, expected = (f(q, k, k, mask) for f in (scaled_dot_product_attention, theirs))
    assert close(out, expected)
    leaves = [q] if boolean else [q, mask]
    grads, wanted = (torch.autograd.grad(x, leaves, torch.ones_like(x) * 0.5) for x in (out, expected))
    assert all(close(*pair) for pair in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_pytorchs_causal_biases_keep_their_corner(bias: object) -> None:
    q, k = draw(2, 4, 5, 8), draw(2, 4, 9, 8)
    mask = bias(5, 9)  # type: ignore[operator]
    assert close(scaled_dot_product_attention(q, k, k, mask), theirs(q, k, k, mask))


def test_groups_of_heads_share_keys_when_allowed() -> None:
    q, k = draw(2, 6, 5, 8), draw(2, 2, 9, 8)
    assert close(scaled_dot_product_attention(q, k, k, enable_gqa=True), theirs(q, k, k, enable_gqa=True))
    with pytest.raises(ValueError, match=r"the same heads; got 6, 2, 2\. enable_gqa=True"):
        scaled_dot_product_attention(q, k, k)


def test_dropout_drops_by_torchs_generator_and_keeps_the_mean() -> None:
    q, v = torch.zeros(1, 8, 200, 8), torch.ones(1, 8, 200, 8)
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(scaled_dot_product_attention(q, q, v, dropout_p=0.4))
    assert torch.equal(*found)
    # Each element is a mean of 200 draws with variance 0.4 / 0.6.
    assert abs(found[0][..., 0].std().item() / math.sqrt(0.4 / 0.6 / 200) - 1) < 0.1
    assert abs(found[0].mean().item() - 1) < 0.01


def test_what_pytorch_refuses_is_refused_with_a_reason() -> None:
    q = draw(1, 2, 5, 8)
    with pytest.raises(ValueError, match="attn_mask does not go with is_causal"):
        scaled_dot_product_attention(q, q, q, q.new_ones(5, 5), is_causal=True)
    with pytest.raises(ValueError, match=r"axes \(\.\.\., len, dim\); got \(8,\)"):
        scaled_dot_product_attention(q[0, 0, 0], q, q)


def test_every_kind_of_mask_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    q, k = draw(2, 4, 5, 8).requires_grad_(), draw(2, 2, 5, 8)

    def step(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        gqa = partial(scaled_dot_product_attention, q, k, k, enable_gqa=True)
        return gqa(is_causal=True) + gqa(mask) + gqa(mask.double()) + gqa(dropout_p=0.0, scale=0.1)

    mask = draw(5, 5) > 0
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    out, expected = compiled(q, k, mask), step(q, k, mask)
    assert close(out, expected)
    grads, wanted = (torch.autograd.grad(x.square().sum(), q)[0] for x in (out, expected))
    assert close(grads, wanted)


# ---- beneath PyTorch's own function ---------------------------------------------------------------------------------

needs_place = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "activate_flash_attention_impl"),
    reason="this torch cannot exchange its flash kernel",
)
flash = torch.ops.aten._scaled_dot_product_flash_attention


@pytest.fixture
def _on_cpu() -> Iterator[None]:
    """Serve the operators of the flash kernel on the CPU, where PyTorch has another one and leaves them empty."""
    handle = adapter._register("CPU")
    yield
    handle.remove()


@needs_place
def test_activation_is_explicit_and_undone() -> None:
    adapter.deactivate()
    assert adapter.active_implementation() is None
    adapter.activate()
    assert torch.nn.attention.current_flash_attention_impl() == "tilewise"
    assert "tilewise" in torch.nn.attention.list_flash_attention_impls()
    q = torch.randn(1, 2, 8, 16)
    assert close(theirs(q, q, q), scaled_dot_product_attention(q, q, q))  # a CPU stays as it is
    adapter.activate()
    adapter.deactivate()
    assert adapter.active_implementation() is None


def test_releases_of_torch_that_cannot_restore_their_kernel_are_activated_and_undone_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: dict[str, Callable[[], object]] = {}
    active: list[str] = []

    def register(name: str, *, register_fn: Callable[[], object]) -> None:
        known[name] = register_fn

    def activate(name: str) -> None:
        if name not in active:  # and for ever
            known[name]()
            active.append(name)

    monkeypatch.setattr(torch.nn.attention, "register_flash_attention_impl", register, raising=False)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate, raising=False)
    monkeypatch.setattr(
        torch.nn.attention, "current_flash_attention_impl", lambda: active[0] if active else None, raising=False
    )
    monkeypatch.delattr(torch.nn.attention, "restore_flash_attention_impl", raising=False)
    take_place = adapter._register
    monkeypatch.setattr(adapter, "_register", lambda: take_place("CPU"))
    q = torch.randn(1, 2, 8, 16)
    for _ in range(2):
        adapter.activate()
        assert adapter.active_implementation() == "tilewise"
        flash(q, q, q)
        adapter.deactivate()
        assert adapter.active_implementation() is None
        with pytest.raises(NotImplementedError, match="CPU"):
            flash(q, q, q)


def test_a_torch_without_a_place_for_others_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl", raising=False)
    with pytest.raises(RuntimeError, match=r"adapters\.sdpa\.scaled_dot_product_attention"):
        adapter.activate()


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_operators_give_pytorchs_results_gradients_and_strides(is_causal: bool, strided: bool) -> None:
    def leaf(heads: int) -> torch.Tensor:
        x = draw(2, 7, heads, 8).transpose(1, 2) if strided else draw(2, heads, 7, 8)
        return x.requires_grad_()

    q, k, v = leaf(4), leaf(2), leaf(2)
    out, lse, _, _, len_q, len_k, state, unused, debug = flash(q, k, v, 0.0, is_causal, scale=0.3)
    like = torch.empty_like(q)
    assert (len_q, len_k, debug.numel()) == (7, 7, 0)
    assert (state.dtype, state.shape, unused.dtype, unused.shape) == (torch.uint64, (2,), torch.uint64, ())
    assert out.stride() == like.stride()
    expected = theirs(q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=True)
    assert close(out, expected)
    score = q @ k.repeat_interleave(2, 1).mT * 0.3
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1) & is_causal
    assert close(lse, score.masked_fill(hidden, -torch.inf).logsumexp(-1))
    d_out = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    grads, wanted = (torch.autograd.grad(x, (q, k, v), d_out) for x in (out, expected))
    for x, grad, want in zip((q, k, v), grads, wanted, strict=True):
        assert close(grad, want)
        assert grad.stride() == torch.empty_like(x).stride()


@pytest.mark.usefixtures("_on_cpu")
def test_the_operators_drop_the_same_forward_and_backward() -> None:
    torch.manual_seed(0)
    q, k, v = (draw(1, 2, 30, 8).requires_grad_() for _ in range(3))
    out, *_, debug = flash(q, k, v, 0.3, True, True)
    assert debug.shape == (1, 2, 30, 30)
    p = (q @ k.mT * 8**-0.5).masked_fill(torch.ones(30, 30, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    expected = p * (debug >= 0) / 0.7 @ v
    assert close(out, expected)
    grads, wanted = (torch.autograd.grad(x, (q, k, v), torch.ones_like(x) * 0.5) for x in (out, expected))
    assert all(close(*pair) for pair in zip(grads, wanted, strict=True))


@pytest.mark.usefixtures("_on_cpu")
def test_the_operators_compile_into_one_graph() -> None:
    torch._dynamo.reset()

    def step(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash(q, q, q, 0.0, True)[0]
        return out.square().sum()

    q = draw(1, 7, 2, 8).transpose(1, 2).requires_grad_()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert close(torch.autograd.grad(compiled(q), q)[0], torch.autograd.grad(step(q), q)[0])


def test_given_back_the_operators_are_pytorchs_again() -> None:
    q = torch.randn(1, 2, 8, 16)
    handle = adapter._register("CPU")
    flash(q, q, q)
    handle.remove()
    with pytest.raises(NotImplementedError, match="CPU"):
        flash(q, q, q)


# ---- explained ------------------------------------------------------------------------------------------------------


def test_a_call_that_fits_is_explained_beside_what_this_machine_has_not() -> None:
    q = torch.randn(1, 4, 8, 16)
    plan = explain_sdpa(q, q, q, is_causal=True)
    assert plan.backend == "FLASH_ATTENTION"
    assert plan.refusals == {"EFFICIENT_ATTENTION": "there is none for cpu", "CUDNN_ATTENTION": "there is none for cpu"}
    assert str(plan).startswith("FLASH_ATTENTION on cpu\n  EFFICIENT_ATTENTION: there is none")


@pytest.mark.parametrize(
    ("shapes", "axes", "reason"),
    [
        (((1, 4, 8, 16), (1, 4, 8, 16), (1, 4, 8, 8)), None, r"the same last dimension.*Value.size\(-1\): 8"),
        (((1, 4, 16, 8),) * 3, (2, 3), "last dimension of the input to have stride 1"),
        (((4, 8, 16),) * 3, None, "4 dimensional"),
        (((1, 4, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16)), None, "same num_heads"),
    ],
    ids=["head dims", "strides", "axes", "heads"],
)
def test_a_call_that_falls_back_in_silence_is_explained_in_pytorchs_words(
    shapes: tuple[tuple[int, ...], ...], axes: tuple[int, int] | None, reason: str
) -> None:
    q, k, v = (torch.randn(shape) for shape in shapes)
    q, k, v = (x if axes is None else x.transpose(*axes) for x in (q, k, v))
    plan = explain_sdpa(q, k, v)
    assert plan.backend == "MATH"
    assert re.search(reason, plan.refusals["FLASH_ATTENTION"])
    assert "Triggered internally" not in str(plan)


def test_what_is_switched_off_is_named_so_and_the_settings_stay() -> None:
    q = torch.randn(1, 2, 8, 16)
    with sdpa_kernel(SDPBackend.MATH):
        assert explain_sdpa(q, q, q).refusals["FLASH_ATTENTION"] == "is switched off"
        assert not torch.backends.cuda.flash_sdp_enabled()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert explain_sdpa(q, q, q).backend == "ERROR"
    assert explain_sdpa(q, q, q).backend == "FLASH_ATTENTION"


def test_the_code_of_the_page_on_switching_runs_and_prints_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "switch" / "sdpa.md").read_text(encoding="utf-8")
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)), encoding="utf-8")
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        pytest.skip("this torch cannot exchange its flash kernel")
    runpy.run_path(str(script))
    printed = capsys.readouterr().out
    assert printed.startswith("MATH on cpu\n  FLASH_ATTENTION: Both fused")
    assert printed in page


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def noting(served: list[str], function: Callable[..., object]) -> Callable[..., object]:
    """Note each call of a function by its name."""

    def noted(*arguments: object, **options: object) -> object:
        served.append(function.__name__)
        return function(*arguments, **options)

    return noted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")
@needs_place
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_pytorchs_own_function_runs_on_tilewise(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    served: list[str] = []
    for name in ("_flash_forward", "_flash_backward"):
        monkeypatch.setattr(adapter, name, noting(served, getattr(adapter, name)))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 300, h, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for h in (4, 2, 2))
    d_out = torch.randn_like(q)

    def results(dtype: torch.dtype, backend: SDPBackend) -> list[torch.Tensor]:
        leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
        call = torch.compile(theirs, fullgraph=True) if compiled and backend == SDPBackend.FLASH_ATTENTION else theirs
        with sdpa_kernel(backend):
            out = call(leaves[0], leaves[1], leaves[2], is_causal=True, enable_gqa=True)
            return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(dtype))]

    exact, low = results(torch.float64, SDPBackend.MATH), results(torch.bfloat16, SDPBackend.MATH)
    torch._dynamo.reset()
    adapter.activate()
    try:
        got = results(torch.bfloat16, SDPBackend.FLASH_ATTENTION)
    finally:
        adapter.deactivate()
    assert served == ["_flash_forward", "_flash_backward"]
    for each in zip(got, exact, low, strict=True):
        error = testing.error(*each, torch.finfo(torch.bfloat16).eps)
        assert error.within, error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")
@pytest.mark.parametrize(
    ("options", "dtype", "dim", "reason"),
    [
        ({}, torch.float32, 64, r"(?i)dtype|data type|float|half"),
        ({}, torch.bfloat16, 512, r"(?i)head.?dim|last dimension|size"),
        ({"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, torch.bfloat16, 64, r"(?i)mask"),
    ],
    ids=["float32", "head dim", "mask"],
)
def test_on_a_gpu_each_silent_refusal_of_the_flash_kernel_has_its_reason(
    options: dict[str, torch.Tensor], dtype: torch.dtype, dim: int, reason: str
) -> None:
    q = torch.randn(1, 2, 8, dim, device="cuda", dtype=dtype)
    plan = explain_sdpa(q, q, q, **{name: x.cuda() for name, x in options.items()})  # type: ignore[arg-type]
    assert plan.backend != "FLASH_ATTENTION"
    assert re.search(reason, plan.refusals["FLASH_ATTENTION"]), plan
