"""FP8: what quantising keeps, that a rotation changes no product, how far results are from right, what is refused."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

import tilewise
from tilewise import fp8, testing_fp8
from tilewise.backends import quantize as host
from tilewise.problem.fp8 import BLOCK, DIMS, LARGEST, SMALLEST, block_count, key_of_slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewise.backends.compile import Target

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
E4M3 = torch.float8_e4m3fn
LENGTHS_Q, LENGTHS_K = [130, 0, 1, 300, 128], [130, 257, 0, 129, 1]


def draw(*shape: int, outliers: bool = False, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Draw normal numbers; with outliers, one in a thousand has a hundred times the variance on top."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if outliers:
        x += (torch.rand(shape, generator=generator) < 1e-3) * torch.randn(shape, generator=generator) * 10
    return x.to(dtype)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed_qkv(dim: int = 64, tail: int = 5) -> tuple[torch.Tensor, ...]:
    """Give q, k, v and the cumulative lengths of sequences, some of them empty, with a tail that belongs to none."""
    q = draw(sum(LENGTHS_Q) + tail, 4, dim, seed=1)
    k, v = (draw(sum(LENGTHS_K) + tail, 2, dim, seed=seed) for seed in (2, 3))
    return q, k, v, cumulative(LENGTHS_Q), cumulative(LENGTHS_K)


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


# ---- the layout -----------------------------------------------------------------------------------------------------


def test_slots_of_v_follow_the_registers_in_which_a_thread_holds_p() -> None:
    for thread in range(4):  # of the four that share a row; 32 keys are one product
        held = [8 * tile + 2 * thread + side for tile in range(4) for side in range(2)]  # accumulators, in order
        taken = [16 * half + 4 * thread + place for half in range(2) for place in range(4)]  # of an 8-bit matrix A
        assert [key_of_slot(slot) for slot in taken] == held
    assert sorted(key_of_slot(torch.arange(BLOCK)).tolist()) == list(range(BLOCK))


@pytest.mark.parametrize("lengths", [[0], [128], [127, 129, 0, 1], [1] * 9, [256, 255, 1]])
def test_packed_sequences_never_share_a_block(lengths: list[int]) -> None:
    cu = cumulative(lengths)
    rows, inside = host.rows_of_blocks(sum(lengths) + 3, cu, torch.device("cpu"))
    assert rows.shape == (block_count(sum(lengths) + 3, len(lengths)), BLOCK)
    assert sorted(rows[inside].tolist()) == list(range(sum(lengths)))  # each row once, the tail's never
    for block, held in zip(rows, inside, strict=True):
        owners = torch.searchsorted(cu, block[held], right=True)
        assert len(set(owners.tolist())) <= 1


# ---- quantising -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("outliers", [False, True])
def test_a_quantised_number_is_off_by_half_a_step_of_e4m3_at_most(dtype: torch.dtype, outliers: bool) -> None:
    q, k, v = (draw(2, heads, 300, 64, outliers=outliers, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    quantized = fp8.quantize(q, k, v, rotate=False)
    scales = (quantized.q_scale, quantized.k_scale, quantized.v_scale)
    for x, got, scale in zip((q, k, v), quantized.dequantize(), scales, strict=True):
        assert got.shape == x.shape
        assert torch.equal(got, got.bfloat16().float())
        by_row = host.per_row(scale, 300, None)[..., None]
        assert ((got - x.float()).abs() <= torch.maximum(x.float().abs() * 2**-4, by_row * 2**-10)).all()
        assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))  # powers of two
        blocks = [x[:, :, start : start + BLOCK].float().abs().amax((2, 3)) for start in range(0, 300, BLOCK)]
        share = torch.stack(blocks, -1) / scale
        assert ((share > LARGEST / 2) & (share <= LARGEST)).all()


def test_packed_sequences_are_quantised_as_each_would_be_alone() -> None:
    q, k, v, cu_q, cu_k = packed_qkv()
    got = fp8.quantize(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k).dequantize()
    for sequence in range(len(LENGTHS_Q)):
        rows = slice(int(cu_q[sequence]), int(cu_q[sequence + 1]))
        keys = slice(int(cu_k[sequence]), int(cu_k[sequence + 1]))
        alone = fp8.quantize(*(x[None].transpose(1, 2) for x in (q[rows], k[keys], v[keys])))
        for packed, part, where in zip(got, alone.dequantize(), (rows, keys, keys), strict=True):
            assert torch.equal(packed[where], part[0].transpose(0, 1))


def test_strides_change_nothing() -> None:
    wide = draw(2, 200, 3, 4, 70)
    q, k, v = (wide[:, :, i, :, 3:67].transpose(1, 2) for i in range(3))
    one, other = fp8.quantize(q, k, v), fp8.quantize(*(x.contiguous() for x in (q, k, v)))
    for name in ("q8", "k8", "v8", "q_scale", "k_scale", "v_scale"):
        assert torch.equal(getattr(one, name).view(torch.uint8), getattr(other, name).view(torch.uint8))


def test_blocks_of_zeros_and_places_without_a_key_are_zero_and_have_a_scale() -> None:
    q, k, v, cu_q, cu_k = packed_qkv()
    v[130:300] = 0.0
    quantized = fp8.quantize(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    _, inside = host.rows_of_blocks(len(v), cu_k, v.device)
    slots = inside[:, key_of_slot(torch.arange(BLOCK))].flatten()
    assert not quantized.v8.float()[..., ~slots].any()
    for scale in (quantized.q_scale, quantized.k_scale, quantized.v_scale):
        assert ((scale >= SMALLEST / LARGEST / 64) & torch.isfinite(scale)).all()


def test_numbers_that_are_not_finite_stay_in_their_block() -> None:
    q = draw(1, 1, 300, 64)
    q[0, 0, 5, 3], q[0, 0, 150, 7] = math.nan, math.inf
    got = fp8.quantize(q, q, q, rotate=False).dequantize()[0][0, 0]
    assert torch.isnan(got[5, 3])
    assert torch.isnan(got).sum() == 1
    assert torch.equal(got[256:], fp8.quantize(*[q[:, :, 256:]] * 3, rotate=False).dequantize()[0][0, 0])


@pytest.mark.parametrize("dim", DIMS)
def test_the_rotation_is_orthogonal_and_keeps_products(dim: int) -> None:
    matrix = host.rotation(dim, 7, torch.device("cpu"), torch.float64)
    assert torch.equal(matrix @ matrix.T, dim * torch.eye(dim, dtype=torch.float64))
    assert not torch.equal(matrix, host.rotation(dim, 8, torch.device("cpu"), torch.float64))
    q, k = draw(1, 1, 200, dim, seed=1), draw(1, 1, 200, dim, seed=2)
    score = q.double() @ k.double().mT
    assert torch.allclose((q.double() @ matrix) @ (k.double() @ matrix).mT / dim, score, rtol=1e-12, atol=1e-12)
    rotated, _, _ = fp8.quantize(q, k, k, seed=7).dequantize()
    lost = rotated.double() - (q.double() @ matrix) / dim
    assert rms(lost) < 2**-4 / math.sqrt(3) * rms(q.double() @ matrix) / dim


def test_a_rotation_spreads_what_stands_in_one_element() -> None:
    q = torch.zeros(1, 1, 128, 128)
    q[..., 9] = 100.0
    rotated, _, _ = fp8.quantize(q, q, q).dequantize()
    assert torch.equal(rotated.abs(), torch.full_like(rotated, rotated.abs().max().item()))


# ---- the kernel that quantises --------------------------------------------------------------------------------------


def forms(device: str, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]:
    """Give tensors to quantise: dense and packed, plain, strided and rotated, with the lengths and the rotation."""
    packed, _, _, cu, _ = (x.to(device) for x in packed_qkv())
    packed, dense = packed.to(dtype), draw(2, 3, 300, 64, outliers=True, dtype=dtype).to(device)
    dense[0, 0, :140] *= 1e-3  # below e4m3's normal numbers beside the others of their block
    dense[1, 1, 128:256] = 0.0
    wide, matrix = draw(2, 150, 2, 128, seed=4, dtype=dtype).to(device), host.rotation(64, 0, packed.device, dtype)
    return {
        "dense": (dense, None, None),
        "dense, rotated": (dense, None, matrix),
        "packed": (packed, cu, None),
        "packed, rotated": (packed, cu, matrix),
        "strided": (wide.transpose(1, 2)[..., 1::2], None, None),
    }


def check_against_operators(device: str, dtype: torch.dtype, form: str, transposed: bool) -> None:
    """Set the kernel beside the operators: equal bytes, but that sums of a rotation may end in another last place."""
    x, cu, matrix = forms(device, dtype)[form]
    kernels = host._kernels_for(x)
    assert kernels is not None
    right = host._by_operators(x, cu, matrix, 0.5, transposed=transposed)
    got = host._by_kernel(kernels, x, cu, matrix, 0.5, transposed=transposed)
    used = slice(None) if transposed or cu is None else slice(0, int(cu[-1]))
    assert got.x8.shape == right.x8.shape
    differing = (got.x8.view(torch.uint8)[used] != right.x8.view(torch.uint8)[used]).double().mean().item()
    assert differing <= (0.0 if matrix is None else 1e-3)
    if matrix is None:
        assert torch.equal(got.scale, right.scale)
    assert (torch.log2(got.scale) - torch.log2(right.scale)).abs().max() <= 1


FORMS = ("dense", "dense, rotated", "packed", "packed, rotated", "strided")


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 before Python starts")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_kernel_gives_the_bytes_of_the_operators(form: str, transposed: bool) -> None:
    check_against_operators("cpu", torch.float16, form, transposed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu_the_kernel_gives_the_bytes_of_the_operators(form: str, transposed: bool, dtype: torch.dtype) -> None:
    check_against_operators("cuda", dtype, form, transposed)


@pytest.mark.compile
@pytest.mark.skipif(INTERPRETED, reason="the interpreter leaves nothing to compile")
@pytest.mark.parametrize("target", [80, 90, 100, 120, 121])
@pytest.mark.parametrize("form", ["rotated", "transposed"])
def test_the_kernel_loads_and_stores_16_bytes_at_once_without_spilling(form: str, target: Target) -> None:
    pytest.importorskip("triton")
    from tilewise.backends.compile import Options, compile_for, resources
    from tilewise.kernels.triton.quantize import quantize_blocks

    rotation, by_hand = "*bf16" if form == "rotated" else None, target == 80
    types: dict[str, str | None] = {"x_ptr": "*bf16", "x8_ptr": "*u8" if by_hand else "*fp8e4nv", "scale_ptr": "*fp32"}
    types |= {"rotation_ptr": rotation, "cu_ptr": "*i32"}
    constants = {"DIM": 256, "TRANSPOSED": form == "transposed", "UNIT": 8, "BY_HAND": by_hand}
    compiled = compile_for(quantize_blocks, types, constants, target, Options(num_warps=8))
    found, ptx = resources(compiled), str(compiled.asm["ptx"])
    assert found.spilled == 0
    assert found.shared <= 99 * 1024  # of an RTX 50 or a GB10
    assert "st.global.v4.b32" in ptx
    assert "st.global.b8" not in ptx
    assert ("cp.async.cg" in ptx) if form == "rotated" else ("ld.global.v4.b32" in ptx)
    assert by_hand or "e4m3x2" in ptx


# ---- attending ------------------------------------------------------------------------------------------------------


def attend_with_rounded_p(
    q: torch.Tensor,
    k: torch.Tensor,
    v8: torch.Tensor,
    v_scale: torch.Tensor,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda p: p.to(E4M3),
) -> torch.Tensor:
    """Attend as the kernel does, untiled: p in units of v's scales, its largest at 2**8, rounded before it meets v8.

    q, k, v8 (..., len, dim) and v_scale (..., len_kv), float32.
    """
    score = q @ k.mT * (q.shape[-1] ** -0.5 * math.log2(math.e))
    height = score + v_scale.log2()[..., None, :]
    p = torch.exp2(height - height.amax(-1, keepdim=True) + 8)
    row_sum = (p / v_scale[..., None, :]).sum(-1, keepdim=True)
    return ((rounded(p).float() @ v8) / row_sum).bfloat16()


def attend_as_the_kernel(
    quantized: fp8.Quantized, rounded: Callable[[torch.Tensor], torch.Tensor] = lambda p: p.to(E4M3)
) -> torch.Tensor:
    q, k, v = quantized.dequantize()
    scale = host.per_row(quantized.v_scale, v.shape[-2], None)
    return attend_with_rounded_p(q, k, v / scale[..., None], scale, rounded)


def attend_with_one_scale_a_tensor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scales = [x.float().abs().amax() / LARGEST for x in (q, k, v)]
    q8, k8, v8 = ((x.float() / scale).to(E4M3).float() for x, scale in zip((q, k, v), scales, strict=True))
    out = attend_with_rounded_p(q8 * scales[0], k8 * scales[1], v8, torch.ones(()).expand(v.shape[:-1]))
    return out * scales[2]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q.double() @ k.double().mT * q.shape[-1] ** -0.5, -1) @ v.double()


CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal, top left": {"causal": True, "align": "top_left"},
    "negative scale": {"scale": -0.2},
}


@pytest.mark.parametrize(
    ("dim", "case", "outliers"),
    [*((dim, "plain", True) for dim in DIMS), *((64, case, False) for case in CASES), (128, "causal", True)],
)
def test_the_partner_attends_to_the_quantised_numbers(dim: int, case: str, outliers: bool) -> None:
    options = CASES[case]
    q = draw(2, 4, 150, dim, outliers=outliers, seed=1)
    k, v = (draw(2, 2, 290, dim, outliers=outliers, seed=seed) for seed in (2, 3))
    quantized = fp8.quantize(q, k, v)
    out, lse = fp8.attention(quantized, return_lse=True, backend="torch_tiled", **options)  # type: ignore[call-overload]
    found = testing_fp8.measure(out, lse, quantized, **options)  # type: ignore[arg-type]
    assert all(error.within for error in found.values()), found
    assert found["out"].max < 0.2  # it rounds no p
    assert out.dtype == torch.bfloat16
    assert out.shape == q.shape
    assert lse.shape == q.shape[:-1]


@pytest.mark.parametrize("causal", [False, True])
def test_the_partner_attends_within_packed_sequences(causal: bool) -> None:
    q, k, v, cu_q, cu_k = packed_qkv()
    quantized = fp8.quantize(q.half(), k.half(), v.half(), cu_seqlens_q=cu_q.long(), cu_seqlens_k=cu_k.long())
    out, lse = fp8.attention(quantized, causal=causal, return_lse=True, backend="torch_tiled")
    found = testing_fp8.measure(out, lse, quantized, causal=causal)
    assert all(error.within for error in found.values()), found
    assert out.dtype == torch.float16
    assert not out[sum(LENGTHS_Q) :].any()


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_the_budget_allows_for_the_rounding_of_p_to_e4m3(dim: int, outliers: bool) -> None:
    q, k, v = (draw(1, 2, length, dim, outliers=outliers, seed=length) for length in (300, 700, 701))
    quantized = fp8.quantize(q, k, v[:, :, :700])
    found = testing_fp8.measure(attend_as_the_kernel(quantized), None, quantized)["out"]
    assert found.within, found
    assert (
        outliers or found.mean > found.mean_budget / 2
    )  # the largest p of a row is exact, and with outliers it is most


@pytest.mark.parametrize("dim", DIMS)
def test_the_budget_allows_for_nothing_else(dim: int) -> None:
    q, k, v = (draw(1, 2, length, dim, seed=length) for length in (300, 700, 701))
    quantized = fp8.quantize(q, k, v[:, :, :700])

    def is_within(out: torch.Tensor) -> bool:
        return testing_fp8.measure(out, None, quantized)["out"].within

    assert not is_within(attend_as_the_kernel(quantized, lambda p: p.to(torch.float8_e5m2)))
    assert not is_within(attend_as_the_kernel(replace(quantized, v_scale=quantized.v_scale * 2)))
    without_a_key = quantized.v8.float()
    without_a_key[..., 40] = 0
    assert not is_within(attend_as_the_kernel(replace(quantized, v8=without_a_key.to(E4M3))))
    exchanged = quantized.v8[..., torch.arange(quantized.v8.shape[-1]) ^ 2].contiguous()
    assert not is_within(attend_as_the_kernel(replace(quantized, v8=exchanged)))


@pytest.mark.parametrize("dim", DIMS)
def test_on_outliers_errors_are_less_than_half_of_those_with_one_scale_a_tensor(dim: int) -> None:
    # An error is large where outliers of a query and of a key meet in one element: the more keys, the more do.
    ours, one_scale = [], []
    for seed in range(3):
        q, k, v = (
            draw(1, 1, length, dim, outliers=True, seed=100 * i + seed) for i, length in enumerate((768, 8192, 8192))
        )
        right = exact(q, k, v)
        ours.append(attend_as_the_kernel(fp8.quantize(q, k, v)) - right)
        one_scale.append(attend_with_one_scale_a_tensor(q, k, v) - right)
    assert rms(torch.stack(ours)) < rms(torch.stack(one_scale)) / 2


@pytest.mark.parametrize("dim", DIMS)
def test_on_normal_inputs_errors_are_those_of_e4m3(dim: int) -> None:
    q, k, v = (draw(1, 2, 1024, dim, seed=dim + i) for i in range(3))
    right, quantized = exact(q, k, v), fp8.quantize(q, k, v)
    ours = rms(attend_as_the_kernel(quantized) - right)
    assert ours < 0.08 * rms(right)
    assert ours < 1.05 * rms(attend_with_one_scale_a_tensor(q, k, v) - right)


# ---- the front door -------------------------------------------------------------------------------------------------


def test_fp8_quantises_and_attends() -> None:
    q, k, v = draw(2, 4, 150, 64, seed=1), draw(2, 2, 290, 64, seed=2), draw(2, 2, 290, 64, seed=3)
    options = {"causal": True, "return_lse": True, "backend": "torch_tiled"}
    out, lse = tilewise.attention(q, k, v, fp8=True, **options)  # type: ignore[call-overload]
    right, right_lse = fp8.attention(fp8.quantize(q, k, v), **options)  # type: ignore[call-overload]
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    bshd = tilewise.attention(*turned, causal=True, fp8=True, layout="bshd", backend="torch_tiled")
    assert torch.equal(bshd.transpose(1, 2), right)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tilewise.attention(q.float(), k, v, fp8=True, **options)[0], right)  # type: ignore[call-overload]
    with tilewise.use_backend("torch_tiled"):
        assert torch.equal(tilewise.attention(q, k, v, causal=True, fp8=True), right)


def test_fp8_attends_within_packed_sequences() -> None:
    q, k, v, cu_q, cu_k = packed_qkv()
    out = tilewise.attention_varlen(q, k, v, cu_q, cu_k, fp8=True, backend="torch_tiled")
    right = fp8.attention(fp8.quantize(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), backend="torch_tiled")
    assert torch.equal(out, right)


@pytest.mark.parametrize(
    ("shape", "lengths"), [((0, 2, 5, 64), None), ((1, 2, 0, 64), None), ((0, 2, 64), [0, 0]), ((5, 2, 64), [])]
)
def test_nothing_to_attend_to_is_served(shape: tuple[int, ...], lengths: list[int] | None) -> None:
    x = draw(*shape)
    cu = None if lengths is None else cumulative(lengths)
    out, lse = fp8.attention(fp8.quantize(x, x, x, cu_seqlens_q=cu), return_lse=True, backend="torch_tiled")
    assert out.shape == x.shape
    assert not out.any()
    assert (lse == -math.inf).all()


X = torch.zeros(1, 2, 8, 64)
REFUSED: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "no Hopper": ({}, ValueError, "'hopper_fp8' cannot serve this call: runs on NVIDIA GPUs .* got cpu.* any device"),
    "another backend": ({"backend": "naive"}, ValueError, 'computed by "hopper_fp8" or "torch_tiled"; got \'naive\''),
    "a window": ({"window": (3, 0)}, ValueError, r"has causal, align, scale and return_lse, no window; got \(3, 0\)"),
    "a softcap": ({"softcap": 2.0}, ValueError, "no softcap; got 2.0"),
    "a bias": ({"bias": torch.zeros(8, 8)}, ValueError, "no bias; got Tensor"),
    "a mask": ({"mask": torch.ones(8, 8, dtype=torch.bool)}, ValueError, "no mask; got Tensor"),
    "a sink": ({"sink": torch.zeros(2)}, ValueError, "no sink; got Tensor"),
    "dropout": ({"dropout": 0.1}, ValueError, "no dropout; got 0.1"),
    "a head dim of 80": (dict.fromkeys("qkv", torch.zeros(1, 2, 8, 80)), ValueError, "head dims 64, 128 and .* 80"),
    "another head dim for v": ({"v": torch.zeros(1, 2, 8, 128)}, ValueError, "the same for q, k and v; got 64 .* 128"),
    "float64": (dict.fromkeys("qkv", X.double()), TypeError, "FP8 quantises float16, bfloat16, float32; got float64"),
    "a gradient": ({"q": X.clone().requires_grad_()}, ValueError, r"has no gradient; got .* torch\.no_grad\(\)"),
    "a wrong shape": ({"k": X[0]}, ValueError, "axes"),
    "a wrong align": ({"align": "middle"}, ValueError, "align must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_the_reason(case: str) -> None:
    given, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        tilewise.attention(**{"q": X, "k": X, "v": X, "fp8": True, **given})  # type: ignore[call-overload]


def test_packed_calls_refuse_what_fp8_does_not_have() -> None:
    q, k, v, cu_q, cu_k = packed_qkv()
    with pytest.raises(ValueError, match="no alibi_slopes; got Tensor"):
        tilewise.attention_varlen(q, k, v, cu_q, cu_k, fp8=True, alibi_slopes=torch.zeros(4))
    with pytest.raises(ValueError, match="no block_table; got Tensor"):
        tilewise.attention_varlen(q, k, v, cu_q, cu_k, fp8=True, block_table=torch.zeros(5, 1).int())
    with pytest.raises(ValueError, match="cu_seqlens_k goes with cu_seqlens_q"):
        fp8.quantize(q, k, v, cu_seqlens_k=cu_k)


def test_quantised_tensors_that_do_not_go_together_are_refused() -> None:
    quantized = fp8.quantize(X, X, X)
    with pytest.raises(ValueError, match=r"q_scale must be contiguous, \(1, 2, 1\); got \(1, 1, 1\)"):
        replace(quantized, q_scale=quantized.q_scale[:, :1])
    with pytest.raises(ValueError, match=r"v8 must be contiguous, \(1, 2, 64, 128\); got \(1, 2, 8, 64\)"):
        replace(quantized, v8=quantized.k8)
    with pytest.raises(TypeError, match=r"k8 must be torch\.float8_e4m3fn; got torch\.uint8"):
        replace(quantized, k8=quantized.k8.view(torch.uint8))
    with pytest.raises(ValueError, match="go together"):
        replace(quantized, cu_seqlens_q=torch.tensor([0, 8]).int())
    with pytest.raises(TypeError, match="takes a Quantized; got Tensor"):
        fp8.attention(X)  # type: ignore[call-overload]


def test_explain_says_who_computes_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tilewise.explain(tilewise.attention, X, X, X, fp8=True, backend="torch_tiled")
    assert plan.backend == "torch_tiled"
    assert "got cpu" in plan.refusals["hopper_fp8"]
    assert plan.backward == "nobody: FP8 is for inference"
    with pytest.raises(ValueError, match="got cpu"):
        tilewise.explain(tilewise.attention, X, X, X, fp8=True)
    monkeypatch.setattr(fp8, "_why_not", lambda _: None)
    plan = tilewise.explain(tilewise.attention, X, X, X, fp8=True)
    assert plan.backend == "hopper_fp8, after q, k and v were quantised to e4m3 by blocks of 128 rows"
    assert plan.problem.dtype == "bfloat16"  # a CPU has no rate for products of 8-bit numbers
