"""What a call costs the host: what is settled once, and what each call does.

Time itself is measured on a GPU. Here the Python functions that a call enters are counted, with a driver that records
launches and starts none; tensors on the CPU stand for those on a device.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch

pytest.importorskip("triton")

import recorder
import tilewise
from recorder import Recorder
from tilewise import recall
from tilewise.backends import launch, triton_portable


@pytest.fixture(autouse=True)
def _kernels_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "kernels"))


NAME = "triton_portable"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Let the front door launch the Triton kernels on a driver that starts nothing."""
    driver = Recorder()
    monkeypatch.setattr(launch, "_default", launch.Launcher(driver))
    monkeypatch.setattr(triton_portable, "_interpreting", lambda: True)
    monkeypatch.setattr(triton_portable, "_capability", lambda _: (9, 0))
    triton_portable._forward.cache_clear()
    recall.forget()
    yield driver
    triton_portable._forward.cache_clear()
    recall.forget()


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float16)


def addresses(driver: Recorder, count: int = 5) -> list[int]:
    """Give the first arguments of the last launch: where q, k, v, out, lse and others lie."""
    return [int.from_bytes(read, "little") for read in driver.launches[-1][2][:count]]


def functions_entered(call: Callable[[], object]) -> list[str]:
    """Name the Python functions that a call enters; C code and the recorder do not count."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename not in (__file__, ctypes.__file__, recorder.__file__):
            entered.append(frame.f_code.co_name)

    gc.collect()  # so that nothing is finalised while we count
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.compile
@pytest.mark.parametrize("name", ["plain", "causal", "layout", "window, softcap and lse", "bias and sink"])
def test_a_call_like_an_earlier_one_enters_few_functions(name: str, driver: Recorder) -> None:
    q, bias, sink = half(1, 4, 64, 64), half(4, 64, 64), torch.randn(4)
    calls: dict[str, Callable[[], object]] = {
        "plain": lambda: tilewise.attention(q, q, q, backend=NAME),
        "causal": lambda: tilewise.attention(q, q, q, causal=True, backend=NAME),
        "layout": lambda: tilewise.attention(q, q, q, layout="bshd", backend=NAME),
        "window, softcap and lse": lambda: tilewise.attention(
            q, q, q, window=(9, 0), softcap=3.0, return_lse=True, backend=NAME
        ),
        "bias and sink": lambda: tilewise.attention(q, q, q, bias=bias, sink=sink, backend=NAME),
    }
    calls[name]()
    entered = functions_entered(calls[name])
    assert entered.count("recall") == 1
    assert len(entered) <= 16, entered
    assert len(driver.launches) == 2
    assert driver.launches[0][2][5:] == driver.launches[1][2][5:]  # numbers, and tensors that stayed


@pytest.mark.compile
def test_each_call_is_given_the_addresses_of_its_own_tensors(driver: Recorder) -> None:
    for layout in ("bhsd", "bshd"):
        for _ in range(3):
            q, k, v = half(2, 48, 48, 64), half(2, 48, 48, 64), half(2, 48, 48, 64)
            out, lse = tilewise.attention(q, k, v, layout=layout, return_lse=True, backend=NAME)
            assert addresses(driver) == [x.data_ptr() for x in (q, k, v, out, lse)]
            assert out.shape == q.shape
            assert out.is_contiguous()


@pytest.mark.compile
def test_each_backward_pass_is_given_the_addresses_of_its_own_tensors(driver: Recorder) -> None:
    # The first call's q, k and v are one tensor: what was settled for it must tell them apart all the same.
    def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[tuple[list[int], list[torch.Tensor]]]:
        out = tilewise.attention(q, k, v, causal=True, backend=NAME)
        leaves, d_out = [q, k, v] if q is not k else [q], torch.randn_like(out)
        start = len(driver.launches)
        grads = torch.autograd.grad(out, leaves, d_out)
        given = [[int.from_bytes(x, "little") for x in read[:11]] for _, _, read in driver.launches[start:]]
        return [(addresses, [*leaves, d_out, *grads]) for addresses in given]

    gradients(*[half(1, 4, 64, 64).requires_grad_()] * 3)
    bindings = launch._default.bindings if launch._default else 0
    over_rows, over_keys, over_queries = gradients(*(half(1, 4, 64, 64).requires_grad_() for _ in range(3)))
    for (addresses, (q, k, v, d_out, dq, dk, dv)), own in (
        (over_rows, []), (over_keys, ["dk", "dv"]), (over_queries, ["dq"]),
    ):  # fmt: skip
        there = {"q": q, "k": k, "v": v, "dq": dq, "dk": dk, "dv": dv}
        expected = [d_out, *([] if own == [] else [q, k, v]), *(there[name] for name in own)]
        assert {x.data_ptr() for x in expected} <= set(addresses)
    assert launch._default is not None
    assert launch._default.bindings == bindings, "nothing is compiled anew"


@pytest.mark.compile
def test_a_backward_pass_like_an_earlier_one_lays_nothing_out(driver: Recorder) -> None:
    q = half(1, 4, 64, 64).requires_grad_()
    out = tilewise.attention(q, q, q, causal=True, backend=NAME)
    d_out = torch.randn_like(out)
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad(out, q, d_out, retain_graph=True)
        entered = functions_entered(lambda: torch.autograd.grad(out, q, d_out, retain_graph=True))
    assert "differentiate" in entered
    assert not {"feature_arguments", "launch_named", "prepare_named"} & set(entered)


@pytest.mark.compile
def test_tensors_that_begin_elsewhere_take_the_other_kernel_and_the_first_again(driver: Recorder) -> None:
    room = half(1, 4, 64, 65).flatten()
    aligned, odd = (room[start : start + 4 * 64 * 64].view(1, 4, 64, 64) for start in (0, 1))
    for q in (aligned, odd, aligned, odd):
        tilewise.attention(q, aligned, aligned, backend=NAME)
        assert addresses(driver)[0] == q.data_ptr()
    first, second, third, fourth = (function for _, function, _ in driver.launches)
    assert first == third != second == fourth


@pytest.mark.compile
def test_what_changes_the_answer_is_never_taken_from_memory(driver: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    q = half(1, 2, 64, 64)
    tilewise.attention(q, q, q, backend=NAME)
    with tilewise.use_backend(NAME):
        tilewise.attention(q, q, q)
    monkeypatch.setenv("TILEWISE_BACKEND", NAME)
    tilewise.attention(q, q, q)
    assert len(driver.launches) == 3
    with tilewise.use_backend("torch_tiled"):
        tilewise.attention(q, q, q)
    monkeypatch.setenv("TILEWISE_BACKEND", "torch_sdpa")
    tilewise.attention(q, q, q)
    tilewise.explain(tilewise.attention, q, q, q, backend=NAME)
    assert len(driver.launches) == 3
    with pytest.raises(ValueError, match="must be one of"):
        tilewise.attention(q, q, q, backend="nobody")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="no bfloat16"):
        tilewise.attention(q, q, q, backend=NAME)
    wants = q.clone().requires_grad_()
    assert tilewise.attention(wants, q, q, backend=NAME).requires_grad
    with torch.no_grad():
        assert not tilewise.attention(wants, q, q, backend=NAME).requires_grad
    with pytest.raises(ValueError, match="alibi_slopes get no gradient"):
        tilewise.attention(q, q, q, alibi_slopes=torch.ones(2, requires_grad=True), backend=NAME)


@pytest.mark.compile
def test_a_seed_is_drawn_anew_in_every_call(driver: Recorder) -> None:
    q = half(1, 2, 64, 64)
    recall.forget()
    for _ in range(2):
        tilewise.attention(q, q, q, dropout=0.1, backend=NAME)
    assert len(driver.launches) == 2
    assert not recall._prepared
    for seed in (torch.tensor([3]), torch.tensor([4])):
        tilewise.attention(q, q, q, dropout=0.1, seed=seed, backend=NAME)
        assert seed.data_ptr() in addresses(driver, 6)


@pytest.mark.compile
def test_contents_on_the_cpu_are_checked_in_every_call(driver: Recorder) -> None:
    q = half(1, 2, 64, 64)
    for start in (torch.tensor([3]), torch.tensor([5])):
        tilewise.attention(q, q, q, kv_start=start, backend=NAME)
    with pytest.raises(ValueError, match="kv_start"):
        tilewise.attention(q, q, q, kv_start=torch.tensor([-1]), backend=NAME)
    assert len(driver.launches) == 2


def test_what_has_no_strides_goes_to_the_checks_and_is_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(TypeError, match="must be an ordinary tensor"):
        tilewise.attention(q.to_sparse(), q, q)
    with pytest.raises(TypeError, match="must be a torch tensor"):
        tilewise.attention(q.numpy(), q, q)  # type: ignore[call-overload]
