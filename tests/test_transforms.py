"""torch's own machinery over the operators: opcheck, compile, export, vmap, jvp, checkpointing, autocast, DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import autograd
from tilewise.problem.cache import CacheOptions, CacheTensors
from tilewise.problem.problem import Options
from tilewise.testing import CASES, check, run

OPCHECKED = ("plain", "causal", "many at once", "packed, many at once", "layout bshd", "strided views")


@pytest.mark.parametrize("name", OPCHECKED)
def test_opcheck_passes_for_attention(name: str) -> None:
    call = CASES[name].build("cpu", "float32")
    tensors = [
        x.detach().requires_grad_() if i in autograd.DIFFERENTIABLE and x is not None else x
        for i, x in enumerate(call.tensors)
    ]
    torch.library.opcheck(torch.ops.tilewise.attention.default, (*tensors, *call.options))


@pytest.mark.parametrize("name", OPCHECKED)
def test_opcheck_passes_for_the_backward_operator(name: str) -> None:
    call = CASES[name].build("cpu", "float32")
    out, lse = autograd.run(call.tensors, call.options)
    needs = [x is not None for x in (call.tensors[i] for i in autograd.DIFFERENTIABLE)]
    arguments = (*call.tensors, out, lse, call.d_out, call.d_lse, *call.options, needs)
    torch.library.opcheck(torch.ops.tilewise.attention_backward.default, arguments)


def test_opcheck_passes_for_decoding() -> None:
    q, k, v = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)
    caches = torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8)
    tensors = CacheTensors(q, *caches, k, v, torch.tensor([3, 9]))
    torch.library.opcheck(torch.ops.tilewise.attention_with_kvcache.default, (*tensors, *CacheOptions()))


class Counting:
    """A compiler that counts its graphs and hands them on to AOTAutograd."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(module, inputs)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


LENGTHS = [2, 3, 7, 16, 33, 64, 100, 128, 200, 257]


def qkv(length: int, *, grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, 2, length, 8, generator=generator).requires_grad_(grad) for _ in range(3)]


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (4, 0)}, {"softcap": 2.0, "causal": True}, {"layout": "bshd"}],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_compile_is_one_graph_and_compiles_at_most_twice_over_ten_lengths(options: dict[str, Any], grad: bool) -> None:
    count = Counting()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = tilewise.attention(q * 1.0, k, v, **options)
        return out.sin()

    compiled = torch.compile(call, backend=count, fullgraph=True)
    for length in LENGTHS:
        eager, traced = qkv(length, grad=grad), qkv(length, grad=grad)
        expected, got = call(*eager), compiled(*traced)
        assert torch.equal(expected, got)
        if grad:
            expected.sum().backward()
            got.sum().backward()
            for x, y in zip(eager, traced, strict=True):
                assert x.grad is not None
                assert y.grad is not None
                assert torch.equal(x.grad, y.grad)
    assert count.graphs <= 2


def test_compile_of_packed_sequences_takes_max_seqlen_as_int_or_tensor() -> None:
    def call(q: torch.Tensor, cu: torch.Tensor, longest: torch.Tensor | int) -> torch.Tensor:
        return tilewise.attention_varlen(q, q, q, cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=True)

    count = Counting()

    compiled = torch.compile(call, backend=count, fullgraph=True)
    for step in range(20):
        lengths = [3 + step, 5, 2 * step]
        cu = torch.tensor([0, *lengths]).cumsum(0)
        q = torch.randn(sum(lengths), 2, 8)
        assert torch.equal(call(q, cu, torch.tensor(max(lengths))), compiled(q, cu, torch.tensor(max(lengths))))
    assert count.graphs <= 3
    assert torch.equal(call(q, cu, 40), compiled(q, cu, 40))


def test_compile_of_decoding_writes_the_cache() -> None:
    def call(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, n: torch.Tensor
    ) -> torch.Tensor:
        return tilewise.attention_with_kvcache(q, k_cache, v_cache, k=k, v=k, cache_seqlens=n)

    q, k = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8)
    n = torch.tensor([3, 9])
    eager = torch.randn(2, 2, 16, 2, 8)
    traced = eager.clone()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(call(q, eager[0], eager[1], k, n), compiled(q, traced[0], traced[1], k, n))
    assert torch.equal(eager, traced)


def test_compile_draws_new_dropout_each_call_and_a_given_seed_repeats() -> None:
    q = torch.randn(1, 2, 16, 8)
    compiled = torch.compile(
        lambda q, seed: tilewise.attention(q, q, q, dropout=0.5, seed=seed), backend="aot_eager", fullgraph=True
    )
    assert not torch.equal(compiled(q, None), compiled(q, None))
    assert torch.equal(compiled(q, 3), tilewise.attention(q, q, q, dropout=0.5, seed=3))


def test_merge_and_softmax_compile_in_one_graph() -> None:
    outs, lses = torch.randn(3, 1, 2, 8, 4), torch.randn(3, 1, 2, 8)
    merge = torch.compile(tilewise.merge, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(x, y) for x, y in zip(merge(outs, lses), tilewise.merge(outs, lses), strict=True))
    softmax = torch.compile(tilewise.softmax, backend="aot_eager", fullgraph=True)
    assert torch.equal(softmax(outs), tilewise.softmax(outs))


def test_export_keeps_the_operator_and_dynamic_lengths() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return tilewise.attention(q, k, v, causal=True)

    length = torch.export.Dim("length", min=2, max=4096)
    shapes = tuple({2: length} for _ in range(3))
    exported = torch.export.export(Model(), tuple(qkv(16)), dynamic_shapes=shapes)
    assert "tilewise.attention" in str(exported.graph)
    for n in (2, 50):
        assert torch.equal(exported.module()(*qkv(n)), tilewise.attention(*qkv(n), causal=True))


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}], ids=["sdpa", "tiled"])
def test_vmap_is_a_loop_over_samples(options: dict[str, Any]) -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 3, 2, 9, 8)
    got = torch.vmap(lambda q, v: tilewise.attention(q, k, v, **options), in_dims=(0, 1))(q, v)
    expected = torch.stack([tilewise.attention(q[i], k, v[:, i], **options) for i in range(3)])
    assert torch.equal(got, expected)


def test_vmap_of_grad_gives_a_gradient_a_sample() -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)

    def loss(q: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, k, v, causal=True).square().sum()

    got = torch.vmap(torch.func.grad(loss))(q)
    expected = torch.stack([torch.func.grad(loss)(q[i]) for i in range(3)])
    assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp's own first import
def test_jvp_raises_instead_of_answering_zero() -> None:
    q, k, v = qkv(5)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: tilewise.attention(q, k, v), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match=r"torch\.func\.vjp"):
            tilewise.attention(dual, k, v)
        tilewise.attention(q, k, v)  # no tangent, no complaint


def test_a_hessian_vector_product_comes_from_two_backward_passes() -> None:
    q, k, v = (x.double() for x in qkv(5))
    direction = torch.randn_like(q)

    def loss(q: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, k, v).square().sum()

    def slope(q: torch.Tensor) -> torch.Tensor:
        gradient: torch.Tensor = torch.func.grad(loss)(q)
        return (gradient * direction).sum()

    hvp = torch.func.grad(slope)(q)
    step = 1e-6
    numeric = (torch.func.grad(loss)(q + step * direction) - torch.func.grad(loss)(q - step * direction)) / (2 * step)
    assert (hvp - numeric).abs().max() <= step * numeric.abs().max()


def test_nested_tensors_are_refused_with_the_way_out() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged)
    with pytest.raises(TypeError, match="attention_varlen"):
        tilewise.attention(nested, nested, nested)
    values, offsets = nested.values(), nested.offsets()  # type: ignore[attr-defined]
    assert tilewise.attention_varlen(values, values, values, offsets).shape == (8, 2, 8)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_dropout_repeats_the_mask(reentrant: bool) -> None:
    q = torch.randn(1, 2, 16, 8, requires_grad=True)

    def block(q: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, q, q, dropout=0.5)

    grads = []
    for wrapped in (block, lambda q: checkpoint(block, q, use_reentrant=reentrant)):
        torch.manual_seed(3)
        (grad,) = (
            torch.autograd.grad(wrapped(q).sum(), q) if not reentrant or wrapped is block else (_backward(wrapped, q),)
        )
        grads.append(grad)
    assert torch.equal(*grads)


def _backward(function: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor) -> torch.Tensor:
    q = q.detach().requires_grad_()  # the reentrant kind works with .backward() alone
    function(q).sum().backward()
    assert q.grad is not None
    return q.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_converts_as_torch_does_and_float64_stays(dtype: torch.dtype) -> None:
    q, k, v = qkv(9)
    with torch.autocast("cpu", dtype):
        out = tilewise.attention(q, k, v)
        mixed = tilewise.attention(q.to(dtype), k, v)
        exact = tilewise.attention(q.double(), k.double(), v.double())
    assert out.dtype == mixed.dtype == dtype
    assert exact.dtype == torch.float64
    assert torch.equal(out, tilewise.attention(q.to(dtype), k.to(dtype), v.to(dtype)))
    with pytest.raises(TypeError, match="same dtype"):
        tilewise.attention(q.to(dtype), k, v)


def test_float32_is_exact_by_default() -> None:
    case = CASES["plain"].build("cpu", "float32")
    assert check(run(case, "torch_tiled"), case)["out"].max < 1e-5


def test_ddp_averages_gradients_of_a_model_that_attends(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)
            return tilewise.attention(q, k, v, causal=True)

    torch.distributed.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = Model()
        x = torch.randn(2, 6, 8)
        model(x).square().sum().backward()
        expected = model.project.weight.grad
        assert expected is not None
        model.project.weight.grad = None
        torch.nn.parallel.DistributedDataParallel(model)(x).square().sum().backward()
        (got, _) = (parameter.grad for parameter in model.parameters())
        assert got is not None
        assert torch.equal(got, expected)
    finally:
        torch.distributed.destroy_process_group()


def test_options_keep_their_order_in_the_schema() -> None:
    arguments = torch.ops.tilewise.attention.default._schema.arguments
    from tilewise.problem.problem import Tensors

    assert [argument.name for argument in arguments] == [*Tensors._fields, *Options._fields]
    decoding = torch.ops.tilewise.attention_with_kvcache.default._schema.arguments
    assert [argument.name for argument in decoding] == [*CacheTensors._fields, *CacheOptions._fields]
