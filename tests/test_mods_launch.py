"""Calls with functions of their own, launched: how often they compile, and what a launch is given."""
# ruff: noqa: ARG005 - every function is given all positions

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton")

import tilewise
from recorder import Recorder, integer
from test_triton_compile import compile_launch, launches
from tilewise import recall
from tilewise.arguments import Asked
from tilewise.backends import compile as compiling
from tilewise.backends import launch, triton_portable
from tilewise.backends.block_lists import Blocks
from tilewise.kernels.share import written
from tilewise.machine.device import Capability, target_name
from tilewise.machine.tiles import shared_memory_limit
from tilewise.problem.problem import Options
from tilewise.testing import Call, Case

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter leaves nothing to compile"),
]

NAME = "triton_portable"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    """Let the front door launch the Triton kernels on a driver that starts nothing."""
    driver = Recorder()
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "kernels"))
    monkeypatch.setattr(launch, "_default", launch.Launcher(driver))
    monkeypatch.setattr(triton_portable, "_interpreting", lambda: True)
    monkeypatch.setattr(triton_portable, "_capability", lambda _: (9, 0))
    triton_portable._forward.cache_clear()
    recall.forget()
    yield driver
    triton_portable._forward.cache_clear()
    recall.forget()


def biased(scale: float, distance: int, table: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A score of two numbers and a tensor in its closure."""

    def score(score: torch.Tensor, batch: int, head: int, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return score + scale * table[head, (q_pos - kv_pos).clamp(-distance, distance) + distance]

    return score


def within(window: int) -> Callable[..., torch.Tensor]:
    """A mask of one number in its closure."""
    return lambda batch, head, q_pos, kv_pos: abs(q_pos - kv_pos) <= window


def train(length: int, scale: float, window: int, table: torch.Tensor) -> None:
    q, k, v = (torch.randn(1, 2, length, 16, dtype=torch.float16, requires_grad=True) for _ in range(3))
    out = tilewise.attention(
        q, k, v, score_mod=biased(scale, window, table), mask_mod=within(window), backend=NAME, causal=True
    )
    out.backward(torch.ones_like(out))


def test_another_length_number_or_tensor_compiles_nothing_anew(driver: Recorder) -> None:
    table = torch.randn(2, 64, requires_grad=True)
    train(64, 0.5, 8, table)
    compiled, launched = len(driver.loaded), len(driver.launches)
    assert compiled == launched == 5  # forward, rows, keys, what the table gets, queries
    for length, scale, window, other in (
        (64, 0.5, 8, table + 1),
        (96, 0.5, 8, table),
        (96, -2.0, 8, table),
        (33, 1.0, 24, table),
        (64, 0.5, 8, torch.randn(2, 999)),
    ):
        train(length, scale, window, other.detach().requires_grad_())
    assert len(driver.loaded) == compiled
    assert len(driver.launches) == 6 * launched


def test_other_lists_of_tiles_compile_nothing_anew(driver: Recorder) -> None:
    q = torch.randn(1, 2, 256, 16, dtype=torch.float16)
    for window in (1, 100, 256):
        blocks = Blocks.of(within(window), len_q=256, len_kv=256)
        tilewise.attention(q, q, q, blocks=blocks, backend=NAME)
    assert len(driver.loaded) == 1
    assert len(driver.launches) == 3


def test_a_like_call_is_given_the_tensors_of_its_own(driver: Recorder) -> None:
    q = torch.randn(1, 2, 64, 16, dtype=torch.float16)
    tables = [torch.randn(2, 64) for _ in range(2)]
    for table in tables:
        tilewise.attention(q, q, q, score_mod=biased(0.5, 8, table), backend=NAME)
    given = [{integer(read) for read in launched[2] if len(read) == 8} for launched in driver.launches]
    for table, addresses in zip(tables, given, strict=True):
        assert table.data_ptr() in addresses
    assert tables[0].data_ptr() not in given[1]


def test_the_text_of_a_function_is_part_of_the_kept_kernels_name() -> None:
    source = "def score_mod(score, batch, head, q_pos, kv_pos, tensors, constants):\n    return score * {}.0\n"
    one, two, again = (written(source.format(number), "score_mod") for number in (1, 2, 1))
    assert one is again
    kernel = compiling.compiled_kernel(__import__("tilewise.kernels.triton.forward", fromlist=["x"]).attention_forward)
    keys = [compiling._key(kernel, {}, {"SCORE_MOD": function}, 90, compiling.Options()) for function in (one, two)]
    assert keys[0] != keys[1]


TARGETS: tuple[Capability, ...] = ((8, 0), (9, 0), (12, 1), "gfx942")


def asked_call(dtype: str) -> Call:
    case = Case("mods", 1, 4, 2, 64, 64, 64, 64, options=Options(return_lse=True))
    call = case.build("cpu", dtype)
    blocks = Blocks.of(within(20), len_q=64, len_kv=64)
    asked = Asked(
        lambda s, b, h, q, kv, t: 20 * torch.tanh(s / 20) + t[h] * (kv - q), (torch.ones(4),), None, (), blocks
    )
    return Call(call.tensors, call.options, call.d_out, call.d_lse, asked)


@pytest.mark.parametrize("capability", TARGETS, ids=[target_name(target) for target in TARGETS])
def test_a_score_and_lists_compile_for_each_target_within_its_shared_memory(
    capability: Capability, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    for name, launched in launches(asked_call("float16"), capability, monkeypatch).items():
        if name == "prepare_rows":
            continue
        found = compiling.resources(compile_launch(launched, capability))
        record_property(name, {"tiles": str(launched.tiles), **found._asdict()})
        assert found.shared <= shared_memory_limit(capability)
