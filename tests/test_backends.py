"""The one suite: every backend, every named case, every dtype, judged by the oracle within the error budget."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tilewise import dispatch, testing
from tilewise.problem.problem import Options, Tensors
from tilewise.testing import CASES, Call, check, oracle, run, yardstick

BACKENDS = ("torch_sdpa", "torch_tiled", "naive", "numpy_tiled")
DTYPES = ("float32", "float64", "float16", "bfloat16")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_backend_is_within_budget_or_refuses_with_a_reason(case: testing.Case, dtype: str, backend: str) -> None:
    call = case.build("cpu", dtype)
    reason = dispatch.load(backend).why_not(call.problem)
    if reason is not None:
        with pytest.raises(ValueError, match=f"backend '{backend}' cannot serve this call: "):
            run(call, backend)
        return
    report = check(run(call, backend), call)
    assert {"out", "lse", "dq", "dk", "dv"} <= set(report)


def test_every_backend_serves_some_case_and_the_torch_engine_all() -> None:
    served = {
        name: sum(dispatch.load(name).why_not(case.build("cpu", "float32").problem) is None for case in CASES.values())
        for name in BACKENDS
    }
    assert served["torch_tiled"] == served["naive"] == len(CASES)
    assert all(count >= 5 for count in served.values()), served


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "causal", "three query heads a key head", "layout bshd"])
def test_sdpa_in_low_precision_is_within_budget_where_no_lse_is_asked_for(name: str, dtype: str) -> None:
    call = CASES[name].build("cpu", dtype)
    call = replace(call, options=call.options._replace(return_lse=False))
    reason = dispatch.load("torch_sdpa").why_not(call.problem)
    if reason is not None:  # older releases of torch corrupt memory there
        assert "out of bounds for grouped heads" in reason
        assert tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
        return
    assert dispatch.choose(call.problem).name == "torch_sdpa"
    assert "lse" not in check(run(call, "torch_sdpa"), call)


def fault(call: Call, what: str) -> testing.Results:
    """Run a call with one thing wrong in its description: what a faulty kernel would compute."""
    options = call.options
    wrong = {
        "scale": options._replace(scale=1.02 * call.problem.score.scale),
        "diagonal": options._replace(window_right=1, causal=False),
        "alignment": options._replace(align="top_left"),
        "window": options._replace(window_left=8),
        "cap": options._replace(softcap=1.6),
        "dropout": options._replace(dropout=0.31),
    }[what]
    return run(replace(call, options=wrong), "torch_tiled")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("plain", "scale"),
        ("causal", "diagonal"),
        ("causal, more keys than queries", "alignment"),
        ("window", "window"),
        ("softcap", "cap"),
        ("dropout", "dropout"),
    ],
)
def test_a_fault_exceeds_the_budget(case: str, what: str, dtype: str) -> None:
    call = CASES[case].build("cpu", dtype)
    with pytest.raises(AssertionError, match="exceeds the error budget"):
        check(fault(call, what), call)


def test_lse_may_be_off_by_an_eps_of_what_its_scores_are_sums_of_and_by_twice_that_may_not() -> None:
    q = torch.ones(2, 3, 5, 256)
    k = q[:, :, :1] * torch.tensor([1.0, -1.0]).repeat(128)  # 256 products of 1, which cancel
    call = Call(Tensors(q, k, k), Options(return_lse=True), torch.zeros_like(q), torch.zeros(q.shape[:3]))
    assert torch.equal(testing.spread(call), torch.full(q.shape[:3], 16.0))
    right = run(call, "naive")
    assert not right.lse.any()
    off = 16.0 * torch.finfo(torch.float32).eps
    check(right._replace(lse=right.lse + 0.99 * off), call)
    with pytest.raises(AssertionError, match="lse exceeds the error budget"):
        check(right._replace(lse=right.lse + 2 * off), call)


def test_hidden_keys_and_all_but_products_stay_out_of_the_sums_of_products() -> None:
    call = CASES["many at once"].build("cpu", "float32")  # ranges are 2 to 33 and 0 to 30
    before = testing.spread(call)
    call.tensors.k[0, :, :2], call.tensors.k[1, :, 30:] = torch.nan, 1e30
    assert torch.equal(testing.spread(call), before)
    largest = (call.tensors.q.abs() @ call.tensors.k.abs().repeat_interleave(2, 1).mT).nan_to_num().amax(-1) / 4
    assert (before <= largest + math.log(37)).all()
    packed = CASES["packed causal with a tail"].build("cpu", "float16")
    assert torch.equal(torch.isneginf(testing.spread(packed)), torch.isneginf(oracle(packed, gradients=False).lse))


ONE_HEAD = testing.Case("", 1, 1, 1, 1, 1, 256, 256, sink="h")
SHORT = {  # from the random problems of benchmarks/gpu_hopper.py: few rows, few keys, few heads
    387: replace(
        ONE_HEAD, lengths_q=(0, 251, 1, 2, 1), dim_qk=64, dim_v=64, options=Options(window_left=190, window_right=137)
    ),
    399: replace(ONE_HEAD, sink=""),
    794: replace(ONE_HEAD, options=Options(causal=True, window_left=210, softcap=7.0)),
}


@pytest.mark.parametrize("seed", SHORT)
def test_rows_of_one_key_and_sinks_of_one_head_are_within_budget(seed: int) -> None:
    case = replace(SHORT[seed], options=SHORT[seed].options._replace(return_lse=True))
    call = case.build("cpu", "bfloat16", seed)
    check(run(call, "torch_tiled"), call)


def test_a_delta_from_the_rounded_out_is_within_budget_and_one_four_times_as_wrong_is_not() -> None:
    call = SHORT[794].build("cpu", "bfloat16", 794)
    right, low = oracle(call), yardstick(call)
    wrong = testing.delta_error(low, right, call.d_out)

    def exceeding(factor: float) -> list[str]:
        exact = call.to(torch.float64)
        off = run(replace(exact, d_lse=exact.d_lse + factor * wrong), "naive")
        assert off.dq is not None
        assert off.dk is not None
        assert off.dsink is not None
        spoilt = run(call, "torch_tiled")._replace(
            dq=off.dq.bfloat16(), dk=off.dk.bfloat16(), dsink=off.dsink.bfloat16()
        )
        return [name for name, found in testing.measure(spoilt, call).items() if not found.within]

    assert exceeding(1.0) == exceeding(-1.0) == []
    assert exceeding(4.0) == exceeding(-4.0) == ["dq", "dk", "dsink"]


def test_an_lse_in_base_two_exceeds_the_budget() -> None:
    call = CASES["plain"].build("cpu", "float32")
    got = run(call, "torch_tiled")
    with pytest.raises(AssertionError, match="lse exceeds the error budget"):
        check(got._replace(lse=got.lse * 1.4426950408889634), call)


def test_nan_where_the_oracle_has_none_exceeds_the_budget_and_is_not_averaged_away() -> None:
    call = CASES["causal, more queries than keys: empty rows"].build("cpu", "float32")
    got = run(call, "torch_tiled")
    assert torch.isneginf(got.lse).any()
    for name, place in (("out", (0, 0, 0, 0)), ("lse", (0, 0, 0)), ("dq", (1, 1, 30, 3))):
        spoilt = getattr(got, name).clone()
        spoilt[place] = torch.nan
        with pytest.raises(AssertionError, match=f"{name} exceeds the error budget"):
            check(got._replace(**{name: spoilt}), call)


def test_a_finite_number_where_the_oracle_has_none_exceeds_the_budget() -> None:
    call = CASES["causal, more queries than keys: empty rows"].build("cpu", "float32")
    got = run(call, "torch_tiled")
    filled = got.lse.nan_to_num(neginf=0.0)
    with pytest.raises(AssertionError, match="lse exceeds the error budget"):
        check(got._replace(lse=filled), call)
    flipped = torch.where(torch.isneginf(got.lse), torch.inf, got.lse)
    with pytest.raises(AssertionError, match="lse exceeds the error budget"):
        check(got._replace(lse=flipped), call)


def test_a_missing_or_an_unexpected_tensor_is_an_error() -> None:
    call = CASES["sink"].build("cpu", "float32")
    got = run(call, "torch_tiled")
    with pytest.raises(ValueError, match="dsink: missing"):
        check(got._replace(dsink=None), call)
    with pytest.raises(ValueError, match="dbias: unexpected"):
        check(got._replace(dbias=got.dq), call)


def test_data_too_large_for_the_dtype_fail_the_case_and_not_the_backend() -> None:
    call = CASES["plain"].build("cpu", "float16")
    large = replace(call, tensors=call.tensors._replace(q=call.tensors.q * 300, k=call.tensors.k * 300))
    with pytest.raises(ArithmeticError, match="yardstick is not finite"):
        check(run(large, "torch_tiled"), large)


def test_the_oracle_is_the_plain_loop() -> None:
    call = CASES["causal, more keys than queries"].build("cpu", "float64")
    q, k, v = call.tensors.q, call.tensors.k, call.tensors.v
    right = oracle(call)
    for batch in range(2):
        for head in range(2):
            for row in range(20):
                seen = 37 - 20 + row + 1
                score = (k[batch, head, :seen] @ q[batch, head, row]) * 16**-0.5
                weight = torch.exp(score)
                expected = (weight[:, None] * v[batch, head, :seen]).sum(0) / weight.sum()
                bound = 37 * torch.finfo(torch.float64).eps
                assert (right.out[batch, head, row] - expected).abs().max() <= bound * expected.abs().max()
                assert (right.lse[batch, head, row] - weight.sum().log()).abs() <= bound * 10


@pytest.mark.parametrize("causal", [False, True])
def test_the_oracle_is_torch_sdpa_in_float64(causal: bool) -> None:
    call = CASES["causal" if causal else "plain"].build("cpu", "float64")
    q, k, v = (x.detach().requires_grad_() for x in call.tensors[:3])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    expected = torch.autograd.grad(out, (q, k, v), call.d_out)
    plain = replace(call, d_lse=torch.zeros_like(call.d_lse))
    right = oracle(plain)
    for got, want in zip((right.out, right.dq, right.dk, right.dv), (out, *expected), strict=True):
        assert got is not None
        assert testing.error(want.detach(), got, got, torch.finfo(torch.float64).eps, terms=37).within


@pytest.mark.parametrize(
    "name", ["many at once", "packed, many at once", "bias over heads and queries", "sink per batch"]
)
def test_the_oracles_gradients_are_autograds(name: str) -> None:
    call = CASES[name].build("cpu", "float64")
    tensors = call.tensors
    inputs = {
        field: x.detach().requires_grad_()
        for field in ("q", "k", "v", "bias", "sink")
        if (x := getattr(tensors, field)) is not None
    }
    from tilewise.backends import naive

    with torch.enable_grad():
        pieces = list(naive._pieces(call.problem, tensors._replace(**inputs)))
        total = torch.zeros((), dtype=torch.float64)
        for piece in pieces:
            out, lse = naive.naive(torch, piece.q, piece.k, piece.v, piece.terms)
            d_out, d_lse = call.d_out, call.d_lse
            if call.problem.kind == "varlen":
                d_out, d_lse = d_out[piece.rows].transpose(0, 1)[None], d_lse[None, :, piece.rows]
            visible = torch.isfinite(lse)
            total = total + (out * d_out).sum() + (torch.where(visible, lse, 0) * d_lse).sum()
    expected = torch.autograd.grad(total, list(inputs.values()))
    right = oracle(call)
    for field, want in zip(inputs, expected, strict=True):
        got = getattr(right, f"d{field}")
        assert testing.error(want, got, got, torch.finfo(torch.float64).eps, terms=37).within, field


def test_the_yardstick_loses_more_in_fewer_bits() -> None:
    exact = oracle(CASES["plain"].build("cpu", "float32")).out
    losses = []
    for dtype in ("float32", "float16", "bfloat16"):
        call = CASES["plain"].build("cpu", dtype)
        losses.append((yardstick(call).out.double() - oracle(call).out).abs().mean().item())
        assert exact.shape == oracle(call).out.shape
    assert losses == sorted(losses)
