"""What only a GPU can show of the Triton kernels: the suite on the device, huge offsets, streams, graphs, compiling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise
from tilewise import dispatch
from tilewise.testing import CASES, check, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]
BACKEND = "triton_portable"


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)


def close(got: torch.Tensor, want: torch.Tensor, roundings: float = 4.0) -> bool:
    """Say whether two results of the same formula differ by no more than some roundings of their dtype."""
    eps = torch.finfo(want.dtype).eps
    return bool((got.double() - want.double()).abs().max() <= roundings * eps * want.double().abs().max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_suite_holds_on_the_device(case: Any, dtype: str) -> None:
    call = case.build("cuda", dtype)
    reason = dispatch.load(BACKEND).why_not(call.problem)
    if reason is not None:
        with pytest.raises(ValueError, match="cannot serve this call"):
            run(call, BACKEND)
        return
    check(run(call, BACKEND), call)


@pytest.mark.parametrize("name", ["plain", "causal", "packed causal with a tail", "padding on both sides", "dropout"])
def test_the_torch_engine_holds_on_the_device(name: str) -> None:
    call = CASES[name].build("cuda", "float32")
    check(run(call, "torch_tiled"), call)


def test_the_dropout_mask_is_bit_for_bit_the_torch_engines() -> None:
    q, k = normal(2, 2, 300, 64), normal(2, 2, 128, 64)
    v = torch.eye(128, device="cuda", dtype=torch.bfloat16).expand(2, 2, 128, 128)
    kept = [tilewise.attention(q, k, v, dropout=0.3, seed=5, backend=name) != 0 for name in (BACKEND, "torch_tiled")]
    assert torch.equal(*kept)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_bitwise_equal_over_a_hundred_runs(causal: bool) -> None:
    q, k, v = (normal(2, heads, 333, 128).requires_grad_() for heads in (4, 2, 2))
    bias = normal(1, 4, 1, 333).requires_grad_()
    sink = normal(4).requires_grad_()
    d_out = normal(2, 4, 333, 128, seed=1)

    def gradients() -> tuple[torch.Tensor, ...]:
        out = tilewise.attention(q, k, v, causal=causal, bias=bias, sink=sink, deterministic=True, backend=BACKEND)
        return torch.autograd.grad(out, (q, k, v, bias, sink), d_out)

    first = gradients()
    for _ in range(100):
        assert all(torch.equal(x, y) for x, y in zip(first, gradients(), strict=True))


def test_offsets_beyond_two_to_the_31_elements_are_right_forward_and_backward() -> None:
    length, window = 1_100_000, 100  # 16 heads of 128: 2.25e9 elements a tensor
    q, k, v = (normal(1, 16, length, 128, seed=n).requires_grad_() for n in range(3))
    assert q.numel() > 2**31
    d_out = normal(1, 16, length, 128, seed=3)
    out = tilewise.attention(q, k, v, causal=True, window=(window, 0), backend=BACKEND)
    grads = torch.autograd.grad(out, (q, k, v), d_out)
    tail = [x[:, :, -400:].detach().clone().requires_grad_() for x in (q, k, v)]
    expected = tilewise.attention(*tail, causal=True, window=(window, 0), backend=BACKEND)
    assert close(out[:, :, -200:], expected[:, :, -200:])
    wanted = torch.autograd.grad(expected, tail, d_out[:, :, -400:])
    for got, want in zip(grads, wanted, strict=True):
        assert close(got[:, :, -200:], want[:, :, -200:], 16)
    head = [x[:, -1:, :400].detach().clone() for x in (q, k, v)]
    assert close(out[:, -1:, :400], tilewise.attention(*head, causal=True, window=(window, 0), backend=BACKEND))


def test_packed_gradients_with_a_huge_stride_are_those_of_a_contiguous_one() -> None:
    total = 230_000
    q, k, v = (normal(total, 2, 16, seed=n).requires_grad_() for n in range(3))
    cu = torch.arange(0, total + 1, 1000, device="cuda", dtype=torch.int32)
    wide = normal(total, 9728)
    assert wide.numel() > 2**31
    d_out = wide[:, 32:64].view(total, 2, 16)

    def gradients(d_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = tilewise.attention_varlen(q, k, v, cu, causal=True, backend=BACKEND)
        return torch.autograd.grad(out, (q, k, v), d_out)

    assert all(torch.equal(x, y) for x, y in zip(gradients(d_out), gradients(d_out.contiguous()), strict=True))


def test_more_than_65536_rows_and_sequences() -> None:
    q, k, v = (normal(1, 1, 65_537, 64, seed=n) for n in range(3))
    out = tilewise.attention(q, k, v, causal=True, backend=BACKEND)
    last = tilewise.attention(q[:, :, -8:], k, v, causal=True, backend="torch_tiled")
    assert close(out[:, :, -8:], last)
    many = [normal(65_537, 1, 16, 32, seed=n) for n in range(3)]
    got = tilewise.attention(*many, causal=True, backend=BACKEND)
    assert close(got[-3:], tilewise.attention(*(x[-3:] for x in many), causal=True, backend="torch_tiled"))


def test_a_call_runs_on_the_current_stream_behind_its_producer() -> None:
    stream = torch.cuda.Stream()
    source = normal(1, 8, 2048, 64)
    expected = tilewise.attention(source, source, source, backend=BACKEND)
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(stream):
            late = torch.zeros_like(source)
            torch.cuda._sleep(20_000_000)
            late.copy_(source)
            got = tilewise.attention(late, late, late, backend=BACKEND)
        stream.synchronize()
        assert torch.equal(got, expected)


def test_a_captured_graph_replays_with_new_dropout_and_the_same_without() -> None:
    q = normal(1, 4, 256, 64).requires_grad_()
    keys = normal(1, 4, 256, 64)

    def step(dropout: float) -> tuple[torch.Tensor, torch.Tensor]:
        out = tilewise.attention(q, keys, keys, causal=True, dropout=dropout, backend=BACKEND)
        (grad,) = torch.autograd.grad(out.float().sum(), q)
        return out, grad

    for dropout in (0.0, 0.4):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(dropout)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, grad = step(dropout)
        seen = []
        for _ in range(5):
            graph.replay()
            torch.cuda.synchronize()
            seen.append((out.clone(), grad.clone()))
        alike = [torch.equal(seen[0][0], other[0]) for other in seen[1:]]
        assert all(alike) if dropout == 0 else not any(alike)
        assert all(torch.isfinite(x).all() for pair in seen for x in pair)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (64, 0)}], ids=str)
def test_torch_compile_takes_the_whole_graph(options: dict[str, Any]) -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = tilewise.attention(q * 2, q, q, **options)
        return out.sin()

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True)
    for length in (128, 200, 333):
        q = normal(1, 4, length, 64, dtype=torch.float16)
        assert close(compiled(q), call(q))


def test_inputs_on_another_device_are_used_there() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q = normal(1, 2, 100, 64)
    other = q.to("cuda:1")
    assert torch.equal(
        tilewise.attention(other, other, other, backend=BACKEND).to(q.device),
        tilewise.attention(q, q, q, backend=BACKEND),
    )


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_beyond_any_exponent_choose_their_largest(causal: bool, dim: int) -> None:
    q = torch.full((1, 2, 300, dim), 133120.0, device="cuda", dtype=torch.bfloat16)
    k, v = q.clone(), torch.randn_like(q)
    k[:, :, 5] *= 2
    k[:, :, 200] *= 4
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for scale in (None, 0.11):
        out = tilewise.attention(*leaves, causal=causal, scale=scale, backend=BACKEND)
        assert torch.equal(out[:, :, 200:], v[:, :, 200:201].expand(-1, -1, 100, -1))
        assert torch.equal(out[:, :, 5:199], v[:, :, 5 if causal else 200][:, :, None].expand(-1, -1, 194, -1))
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("large", [(9864, 4932), (9856, 4928)])
def test_scores_whose_p_float16_cannot_hold_choose_their_largest(large: tuple[int, int]) -> None:
    q, k = (torch.full((1, 2, 200, 64), value, device="cuda", dtype=torch.float16) for value in large)
    v = torch.randn_like(q)
    k[:, :, torch.arange(200) != 77] = 0
    out = tilewise.attention(q, k, v, backend=BACKEND)
    assert torch.equal(out, v[:, :, 77:78].expand_as(out))


def test_memory_is_out_and_lse_alone() -> None:
    q, k, v = (normal(1, 32, 32768, 128, seed=n) for n in range(3))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True, backend=BACKEND)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + lse.nbytes + 16 * 2**20


def test_outliers_cost_no_more_precision_than_in_the_plain_formula() -> None:
    def outliers(n: int) -> torch.Tensor:
        spikes = 10 * normal(1, 4, 512, 64, dtype=torch.float32, seed=n + 50)
        rare = torch.rand(1, 4, 512, 64, device="cuda") < 0.001
        return (normal(1, 4, 512, 64, dtype=torch.float32, seed=n) + spikes * rare).bfloat16()

    q, k, v = (outliers(n) for n in range(3))
    exact = tilewise.attention(q.double(), k.double(), v.double(), backend="naive")
    got, plain = (tilewise.attention(q, k, v, backend=name).double() for name in (BACKEND, "naive"))
    assert (got - exact).square().mean() <= (plain - exact).square().mean()


def worst(got: torch.Tensor, ref: torch.Tensor) -> float:
    """Give the largest error."""
    return float((got.double() - ref).abs().max())


@pytest.mark.parametrize("shape", [(3, 17), (64, 1000), (5, 40_000), (70_000, 64), (4, 262_144)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_softmax_is_within_budget(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = normal(*shape, dtype=dtype).requires_grad_()
    p = tilewise.softmax(x)
    exact = torch.softmax(x.detach().double(), -1)
    low = torch.softmax(x.detach(), -1)
    eps = torch.finfo(dtype).eps

    assert worst(p, exact) <= 2 * worst(low, exact) + 2 * eps * float(exact.max())
    d_p = normal(*shape, dtype=dtype, seed=9)
    (got,) = torch.autograd.grad(p, x, d_p)
    wide = d_p.double()
    want = exact * (wide - (exact * wide).sum(-1, keepdim=True))
    assert worst(got, want) <= 4 * eps * float(exact.max()) * float(wide.abs().max()) * math.log2(shape[1])
