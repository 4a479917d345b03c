"""What only a Hopper GPU can show of the kernels in Gluon: the suite, streams, graphs, large offsets, equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tilewise import dispatch
from tilewise.testing import CASES, Case, check, run

BACKEND = "hopper"

pytestmark = [
    pytest.mark.hopper,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an NVIDIA GPU of compute capability 9.0",
    ),
]


def bfloat(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Say whether two bfloat16 results differ by rounding alone."""
    return bool((got.double() - expected.double()).norm() < 1e-2 * expected.double().norm())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_suite_holds_on_the_device(case: Case, dtype: str) -> None:
    call = case.build("cuda", dtype)
    reason = dispatch.load(BACKEND).why_not(call.problem)
    if reason is not None:
        with pytest.raises(ValueError, match="cannot serve this call"):
            run(call, BACKEND)
        return
    check(run(call, BACKEND), call)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_deterministic_gradients_are_bitwise_equal_over_runs(dim: int) -> None:
    leaves = [bfloat(2, 4, 1000, dim).requires_grad_() for _ in range(3)]
    d_out = bfloat(2, 4, 1000, dim)
    out = tilewise.attention(*leaves, causal=True, deterministic=True, backend=BACKEND)
    first = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    for _ in range(50):
        again = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        assert all(map(torch.equal, first, again))


def test_launches_that_overlap_on_two_streams_share_no_counter() -> None:
    q = bfloat(2, 16, 2048, 128)
    expected = tilewise.attention(q, q, q, causal=True, backend=BACKEND)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for stream, outs in zip(streams, found, strict=True):
            with torch.cuda.stream(stream):
                outs.append(tilewise.attention(q, q, q, causal=True, backend=BACKEND))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for outs in found for out in outs)


def test_graphs_replay_on_new_data_and_at_the_same_time() -> None:
    q = [bfloat(1, 16, 2048, 128) for _ in range(2)]
    for x in q:
        tilewise.attention(x, x, x, causal=True, backend=BACKEND)
    graphs, outs = [torch.cuda.CUDAGraph() for _ in q], []
    for graph, x in zip(graphs, q, strict=True):
        with torch.cuda.graph(graph):
            outs.append(tilewise.attention(x, x, x, causal=True, backend=BACKEND))
    for x in q:
        x.copy_(torch.randn_like(x))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in q]
    for _ in range(10):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for x, out in zip(q, outs, strict=True):
        assert torch.equal(out, tilewise.attention(x, x, x, causal=True, backend=BACKEND))


def test_offsets_beyond_two_to_the_31_elements_are_right() -> None:
    length, heads, dim = 140_000, 128, 128
    q = bfloat(1, heads, length, dim)
    assert q.numel() > 2**31
    out = tilewise.attention(q, q, q, window=(256, 0), backend=BACKEND)
    tail = q[:, -1:, -512:].contiguous()
    assert close(
        out[:, -1:, -200:], tilewise.attention(tail, tail, tail, window=(256, 0), backend="naive")[:, :, -200:]
    )


def test_tensors_that_begin_off_16_bytes_are_served() -> None:
    room = bfloat(3 * 2 * 300 * 64 + 8)
    q, k, v = (room[1 + n * 2 * 300 * 64 :][: 2 * 300 * 64].view(1, 2, 300, 64) for n in range(3))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = tilewise.attention(*leaves, causal=True, backend=BACKEND)
    expected = tilewise.attention(*leaves, causal=True, backend="naive")
    assert close(out, expected)
    d_out = torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(out)
    for got, right in zip(
        torch.autograd.grad(out, leaves, d_out), torch.autograd.grad(expected, leaves, d_out), strict=True
    ):
        assert close(got, right)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (64, 0)}], ids=str)
def test_torch_compile_takes_the_whole_graph(options: dict[str, Any]) -> None:
    q = bfloat(1, 4, 500, 128).requires_grad_()

    def loss(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = tilewise.attention(q, q, q, **options, backend=BACKEND)
        return out.float().square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    assert close(compiled(q), loss(q))
    assert close(torch.autograd.grad(compiled(q), q)[0], torch.autograd.grad(loss(q), q)[0])


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
    q = bfloat(1, 32, 32768, 128)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = tilewise.attention(q, q, q, causal=True, return_lse=True, backend=BACKEND)
    torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - before - out.nbytes - lse.nbytes
    assert beyond < 16 << 20
