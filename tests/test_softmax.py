"""The public softmax: on PyTorch's operators where no kernel serves, on the kernels under Triton's interpreter."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator

import pytest
import torch

import tilewise
from tilewise import autograd_softmax, dispatch
from tilewise.backends import torch_ops
from tilewise.testing import error

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES: list[tuple[tuple[int, ...], int]] = [
    ((), 0), ((7,), -1), ((3, 17), 0), ((3, 17), 1), ((2, 5, 4, 3), 2), ((2, 0, 3), 2), ((2, 0, 3), 1),
]  # fmt: skip

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3).to(dtype)


def formula(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute the softmax term by term, zeros in rows of -inf."""
    if x.numel() == 0:
        return torch.empty_like(x)
    row_max = x.amax(dim, keepdim=True)
    p = torch.exp(x - torch.where(row_max == -math.inf, 0, row_max))
    row_sum = p.sum(dim, keepdim=True)
    return p / torch.where(row_sum == 0, 1, row_sum)


def check(x: torch.Tensor, dim: int) -> None:
    """Hold a softmax to its formula in float64, within what PyTorch's loses in the dtype itself."""
    got = tilewise.softmax(x, dim)
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    if x.numel() == 0:
        return
    terms = math.sqrt(x.shape[dim] if x.ndim else 1) if x.dtype == torch.float64 else 0.0
    low = torch_ops.softmax(x, dim)
    found = error(got, formula(x.double(), dim), low, torch.finfo(x.dtype).eps, terms)
    assert found.within, found


@pytest.fixture(params=["operators", pytest.param("kernels", marks=[pytest.mark.interpreter, interpreted])])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Compute by PyTorch's operators, or by the kernels; collect what was called, and hold that it was that."""
    calls: list[str] = []
    if request.param == "operators":
        monkeypatch.setattr(dispatch, "softmax_kernels", lambda _: None)
        yield calls
        return
    pytest.importorskip("triton")
    from tilewise.backends import triton_softmax

    def recorded(name: str) -> Callable[..., torch.Tensor]:
        real: Callable[..., torch.Tensor] = getattr(triton_softmax, name)

        def call(*arguments: object) -> torch.Tensor:
            calls.append(name)
            return real(*arguments)

        return call

    for name in ("softmax", "softmax_backward"):
        monkeypatch.setattr(triton_softmax, name, recorded(name))
    yield calls
    assert "softmax" in calls


# ---- values ----


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_axis_of_every_shape_is_right(dtype: torch.dtype) -> None:
    for shape, dim in SHAPES:
        check(normal(*shape, dtype=dtype), dim)


@pytest.mark.usefixtures("served")
def test_views_are_right() -> None:
    check(normal(6, 8).T, 1)
    check(normal(6, 8)[:, ::2], 1)
    check(normal(1, 8).expand(5, 8), 0)
    twisted = torch.complex(normal(3, 5), normal(3, 5, seed=1)).conj().imag  # negated when it is read
    assert twisted.is_neg()
    check(twisted, -1)


@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar is deprecated:DeprecationWarning")
def test_rows_of_minus_infinity_give_zeros_and_zero_gradients() -> None:
    x = normal(4, 9)
    x[0], x[1, :5] = -math.inf, -math.inf
    check(x, 1)
    x.requires_grad_()
    (d_x,) = torch.autograd.grad(tilewise.softmax(x, 1).square().sum(), x)
    assert torch.equal(d_x[0], torch.zeros(9, dtype=torch.float64))
    assert torch.equal(d_x[1] == 0, x[1] == -math.inf)


@pytest.mark.usefixtures("served")
def test_under_autocast_too_the_result_is_like_the_argument() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check(normal(3, 5, dtype=torch.float32), 1)
        check(normal(3, 5, dtype=torch.bfloat16), 1)


@pytest.mark.parametrize(("shape", "dim"), [((3, 4), 2), ((3, 4), -3), ((), 1)])
def test_an_axis_that_is_not_there_is_refused(shape: tuple[int, ...], dim: int) -> None:
    with pytest.raises(IndexError, match=rf"dim must be from -\d to \d here; got {dim}\. Count the axes of "):
        tilewise.softmax(torch.zeros(shape), dim)


# ---- derivatives ----


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_first_and_second_derivatives_are_those_of_finite_differences(dim: int, served: list[str]) -> None:
    x = normal(2, 3, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: tilewise.softmax(x, dim), (x,))
    assert torch.autograd.gradgradcheck(lambda x: tilewise.softmax(x, dim), (x,))
    assert "softmax_backward" in served or not served


@pytest.mark.usefixtures("served")
def test_a_third_derivative_is_that_of_pytorchs_operators() -> None:
    def third(softmax: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        x = normal(3, 5).requires_grad_()
        weight = normal(3, 5, seed=1)
        (first,) = torch.autograd.grad((softmax(x, 1) * weight).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * weight.square()).sum(), x, create_graph=True)
        return torch.autograd.grad((second * weight.cos()).sum(), x)[0]

    ref = third(torch.softmax)
    found = error(third(tilewise.softmax), ref, ref, torch.finfo(ref.dtype).eps, 5**0.5 * 3**2)  # sums, and large x
    assert found.within, found


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_second_derivatives_in_half_precision_are_as_exact_as_pytorchs(dtype: torch.dtype) -> None:
    def second(softmax: Callable[[torch.Tensor, int], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        x = normal(6, 40, dtype=half).to(dtype).requires_grad_()
        dp, d_ds = (normal(6, 40, dtype=half, seed=seed).to(dtype) for seed in (1, 2))
        (ds,) = torch.autograd.grad(softmax(x, 1), x, dp, create_graph=True)
        return torch.autograd.grad(ds, x, d_ds)[0]

    half = dtype
    ref, low = second(formula, torch.float64), second(formula, dtype)
    found = error(second(tilewise.softmax, dtype), ref, low, torch.finfo(dtype).eps)
    assert found.within, found


# ---- torch's machinery ----


def test_opcheck_passes_for_the_operators() -> None:
    for x in (normal(3, 5), normal(5, 3).T, normal(5, 8)[:, ::2]):
        x = x.detach().requires_grad_()
        p = torch.softmax(x.detach(), 1).requires_grad_()
        torch.library.opcheck(torch.ops.tilewise.softmax.default, (x, 1))
        torch.library.opcheck(torch.ops.tilewise.softmax_backward.default, (p, normal(*x.shape), 1))


@pytest.mark.parametrize("forced", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_it_compiles_in_one_graph_with_its_gradient(forced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if forced:
        monkeypatch.setattr(autograd_softmax, "_is_compiled_as_ours", lambda _: not autograd_softmax._in_transform())

    def step(x: torch.Tensor) -> torch.Tensor:
        return (tilewise.softmax(x, 1) * torch.arange(5)).sum()

    x = normal(3, 5).requires_grad_()
    graphs: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(module)
        return aot_eager(module, inputs)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    (got,), (ref,) = torch.autograd.grad(compiled(x), x), torch.autograd.grad(step(x), x)
    assert torch.equal(got, ref)
    assert any(node.target == torch.ops.tilewise.softmax for node in graphs[0].graph.nodes) == forced
    transformed = torch.compile(torch.func.grad(step), backend="aot_eager", fullgraph=True)
    assert torch.equal(transformed(x.detach()), ref)


@pytest.mark.interpreter
@interpreted
@pytest.mark.filterwarnings(  # torch's own rule for tangents is a script
    "ignore:`torch.jit.script:DeprecationWarning"
)
def test_torch_func_and_tangents_get_pytorchs_operators() -> None:
    x, tangent = normal(3, 4, 5), normal(3, 4, 5, seed=1)
    exact = torch.finfo(x.dtype).eps
    pairs = [
        (torch.func.vmap(lambda x: tilewise.softmax(x, 0))(x), torch.softmax(x, 1)),
        (torch.func.jvp(tilewise.softmax, (x,), (tangent,))[1], torch.func.jvp(torch_softmax, (x,), (tangent,))[1]),
        (torch.func.grad(lambda x: tilewise.softmax(x)[0].square().sum())(x),
         torch.func.grad(lambda x: torch_softmax(x)[0].square().sum())(x)),
    ]  # fmt: skip
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        pairs.append((torch.autograd.forward_ad.unpack_dual(tilewise.softmax(dual)).tangent, pairs[1][1]))
    for got, ref in pairs:
        assert error(got, ref, ref, exact).within


def torch_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


@pytest.mark.interpreter
@interpreted
def test_who_asks_for_another_backend_gets_no_kernel() -> None:
    x = normal(3, 5)
    assert dispatch.softmax_kernels(x) is not None
    with tilewise.use_backend("torch_tiled"):
        assert dispatch.softmax_kernels(x) is None
    with tilewise.use_backend("triton_portable"):
        assert dispatch.softmax_kernels(x) is not None


@pytest.mark.interpreter
@interpreted
def test_what_no_kernel_serves_goes_to_pytorch() -> None:
    assert dispatch.softmax_kernels(normal(3, 5).to("meta")) is None
    assert dispatch.softmax_kernels(torch.zeros(3, dtype=torch.float8_e5m2)) is None


def test_without_triton_pytorch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "_triton_softmax", dispatch._triton_softmax.__wrapped__)
    monkeypatch.setattr(importlib, "import_module", absent)
    assert dispatch.softmax_kernels(normal(3, 5)) is None
