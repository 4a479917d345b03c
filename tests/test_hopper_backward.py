"""The backward pass for Hopper without one: its kernels run by the emulator, and compiled for sm_90a.

How fast they are only a GPU can say. What is held here is what they compute, in which order products, copies and
barriers may meet, that nothing outside a sequence reaches a gradient, and what the compiler makes of them.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tilewise.kernels.gluon import compat

if compat.refusal() is not None:
    pytest.skip(compat.refusal() or "", allow_module_level=True)

from gluon_emulator import emulate, tensor_map
from tilewise.backends import compile as compiling
from tilewise.backends import hopper_backward, torch_tiled
from tilewise.backends.launch import Mapped
from tilewise.backends.tensor_map import kind_of
from tilewise.problem.problem import Needs, Options
from tilewise.testing import CASES, Call, Case, Results, check

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter replaces functions that Gluon compiles"
)

# ---- running --------------------------------------------------------------------------------------------------------


class Emulator:
    """Stands for the launcher: runs what is prepared, and remembers the kernels."""

    def __init__(self) -> None:
        self.late, self.seed = False, 0
        self.ran: list[str] = []

    def prepare_named(
        self, kernel: Any, grid: tuple[int, ...], named: Mapping[str, Any], pointers: Iterable[str], **_: object
    ) -> Callable[[Iterable[torch.Tensor]], None]:
        order = tuple(pointers)

        def launch(tensors: Iterable[torch.Tensor]) -> None:
            given = dict(named)
            for name, x in zip(order, tensors, strict=True):
                how = named[name]
                given[name] = tensor_map(x, *how.map[:2], box=how.map.box) if isinstance(how, Mapped) else x
            fixed = {param.name: given[param.name] for param in kernel.params if param.is_constexpr}
            passed = {param.name: given[param.name] for param in kernel.params if not param.is_constexpr}
            self.ran.append(kernel.fn.__name__)
            emulate(kernel, grid, passed, fixed, seed=self.seed, late=self.late)

        return launch


@pytest.fixture(autouse=True)
def nothing_settled() -> Iterator[None]:
    """Keep no launch of another test."""
    hopper_backward.prepare.cache_clear()
    yield
    hopper_backward.prepare.cache_clear()


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    made = Emulator()
    monkeypatch.setattr(hopper_backward, "prepare_named", made.prepare_named)
    return made


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what is taken without a value with NaN, so that a row left unwritten shows."""
    real, like = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: real(*a, **k).fill_(math.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: like(*a, **k).fill_(math.nan))


def run(
    call: Call,
    needs: Needs | None = None,
    settings: hopper_backward.Settings | None = None,
    forward: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Results:
    """Run another engine's forward pass, or take its result, and this backward pass."""
    problem, tensors = call.problem, call.tensors
    out, lse = forward or torch_tiled.forward(problem, tensors)
    needs = needs or Needs(dsink=tensors.sink is not None)
    found = hopper_backward.backward(problem, tensors, out, lse, call.d_out, call.d_lse, needs, settings)
    return Results(out, lse, *found)


def deterministic(call: Call) -> Call:
    return replace(call, options=call.options._replace(deterministic=True))


SERVED = {
    name: case
    for name, case in CASES.items()
    if case.len_q * case.len_kv < 50_000 and hopper_backward.why_not(case.build("cpu", "float16").problem) is None
}


@pytest.mark.parametrize(("number", "name"), list(enumerate(SERVED)), ids=list(SERVED))
def test_every_served_case_is_within_budget(emulator: Emulator, number: int, name: str) -> None:
    """Ways to compute and to delay take turns; all combinations are for `make test-all`."""
    emulator.late, emulator.seed = number % 2 == 0, number
    call = SERVED[name].build("cpu", "float16")
    check(run(call if number % 4 < 2 else deterministic(call)), call)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_every_served_case_is_within_budget_in_every_way(
    emulator: Emulator, name: str, ordered: bool, late: bool
) -> None:
    emulator.late = late
    call = SERVED[name].build("cpu", "bfloat16")
    check(run(deterministic(call) if ordered else call), call)


_options = Options(return_lse=True)
_causal = _options._replace(causal=True)
LONG = {
    "d=64 full": Case("64", 1, 1, 1, 300, 150, 64, 64, options=_options),
    "d=64 causal": Case("64c", 1, 2, 1, 150, 260, 64, 64, options=_causal),
    "d=128 full": Case("128", 1, 1, 1, 250, 150, 128, 128, options=_options),
    "d=128 causal": Case("128c", 1, 1, 1, 200, 140, 128, 128, sink="h", options=_causal),
    "d=128 window": Case("128w", 1, 1, 1, 260, 260, 128, 128, options=_causal._replace(window_left=70)),
    "d=128 softcap": Case("128s", 1, 1, 1, 150, 150, 128, 128, options=_causal._replace(softcap=2.0)),
    "d=192 and 128 packed": Case("192", 1, 1, 1, 0, 0, 192, 128, lengths_q=(110, 1, 70), options=_causal),
    "d=256 full": Case("256", 1, 1, 1, 130, 150, 256, 256, options=_options),
    "d=256 causal": Case("256c", 1, 2, 1, 150, 110, 256, 256, options=_causal),
    "d=256 ranges": Case("256r", 2, 1, 1, 100, 150, 256, 256, ranges=((30, 140), (0, 70)), options=_options),
}


@pytest.mark.parametrize(("number", "name"), list(enumerate(LONG)), ids=list(LONG))
def test_rows_of_many_tiles_are_within_budget(emulator: Emulator, number: int, name: str) -> None:
    emulator.late = number % 2 == 0
    call = LONG[name].build("cpu", "bfloat16" if emulator.late else "float16")
    check(run(call), call)


def test_a_deterministic_call_adds_nothing_up_in_memory(emulator: Emulator) -> None:
    call = deterministic(LONG["d=128 causal"].build("cpu", "float16"))
    check(run(call), call)
    assert emulator.ran == ["prepare_rows", "attention_backward", "query_gradients", "sink_gradient"]


def test_torch_may_ask_all_calls_to_be_deterministic(emulator: Emulator) -> None:
    call = CASES["one query"].build("cpu", "float16")
    torch.use_deterministic_algorithms(True)
    try:
        run(call)
    finally:
        torch.use_deterministic_algorithms(False)
    assert emulator.ran == ["prepare_rows", "attention_backward", "query_gradients"]


# ---- what is asked for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [x for x in itertools.product([True, False], repeat=3) if any(x)])
def test_only_the_gradients_that_are_asked_for_come_back(emulator: Emulator, asked: tuple[bool, ...]) -> None:
    call = CASES["one query"].build("cpu", "float16")
    found, whole = run(call, Needs(*asked)), run(call)
    for name, need in zip(("dq", "dk", "dv"), asked, strict=True):
        got, want = getattr(found, name), getattr(whole, name)
        assert (got is not None) == need
        assert got is None or torch.allclose(got, want, rtol=1e-2, atol=1e-2)  # dq's sums may round otherwise
    if asked == (True, False, False):
        assert "attention_backward" not in emulator.ran[:2]


def test_no_d_out_means_zero_and_no_d_lse_too(emulator: Emulator) -> None:
    call = CASES["sink"].build("cpu", "float16")
    problem, tensors = call.problem, call.tensors
    out, lse = torch_tiled.forward(problem, tensors)
    for d_out, d_lse in ((None, call.d_lse), (call.d_out, None)):
        found = hopper_backward.backward(problem, tensors, out, lse, d_out, d_lse, Needs(dsink=True))
        full = replace(
            call,
            d_out=torch.zeros_like(call.d_out) if d_out is None else d_out,
            d_lse=torch.zeros_like(call.d_lse) if d_lse is None else d_lse,
        )
        check(Results(out, lse, *found), full)


def test_inputs_that_no_tensor_map_describes_are_copied(emulator: Emulator) -> None:
    call = CASES["plain"].build("cpu", "float16")
    wide = torch.full((2, 2, 37, 19), math.nan, dtype=torch.float16)
    odd = wide[..., 3:].copy_(call.tensors.k)  # 6 bytes off, rows of 38 bytes
    expanded = call.d_out[:1, :1, :1].expand_as(call.d_out)
    lies = replace(call, tensors=call.tensors._replace(k=odd), d_out=expanded)
    found = run(lies)
    check(found, lies)
    assert found.dq is not None
    assert found.dq.stride() == call.tensors.q.stride()


def test_gradients_lie_as_their_tensors_do(emulator: Emulator) -> None:
    call = CASES["layout bshd"].build("cpu", "float16")
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in call.tensors[:3]]
    call = replace(call, tensors=call.tensors._replace(q=turned[0], k=turned[1], v=turned[2]))
    found = run(call)
    check(found, call)
    for got, want in zip((found.dq, found.dk, found.dv), turned, strict=True):
        assert got is not None
        assert got.stride() == want.stride()


def test_other_settings_give_the_same_answer(emulator: Emulator) -> None:
    call = LONG["d=128 causal"].build("cpu", "float16")
    usual = hopper_backward.settings(call.problem)
    check(run(call, settings=usual._replace(dk_from_registers=False, q_stages=2, section_bytes=1)), call)


# ---- what is hidden -------------------------------------------------------------------------------------------------


def spoilt(call: Call, name: str, rows: torch.Tensor) -> Call:
    """Put NaN into rows of a tensor."""
    x = getattr(call.tensors, name)
    return replace(call, tensors=call.tensors._replace(**{name: x.masked_fill(rows, math.nan)}))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_that_no_query_sees_may_hold_anything(emulator: Emulator, dim: int, ordered: bool) -> None:
    """Outside of ranges, and in the band's shadow: the first keys are out of the window's reach."""
    case = Case("hidden", 2, 1, 1, 70, 150, dim, dim, ranges=((20, 140), (0, 100)),
                options=_options._replace(window_left=60, window_right=10, deterministic=ordered))  # fmt: skip
    call = case.build("cpu", "float16")
    keys = torch.arange(150)
    bounds = [(max(start, 80 - 60), min(stop, 150)) for start, stop in case.ranges]
    hidden = torch.stack([(keys < start) | (keys >= stop) for start, stop in bounds])[:, None, :, None]
    clean = run(call)
    dirty = run(spoilt(spoilt(call, "k", hidden), "v", hidden))
    for ours, theirs in zip(dirty[2:5], clean[2:5], strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs) if ordered or dim == 256 else torch.allclose(ours, theirs, atol=1e-2)
    assert dirty.dk is not None
    assert not bool(dirty.dk.masked_select(hidden).any())


@pytest.mark.parametrize("ordered", [False, True])
def test_a_packed_neighbour_full_of_nan_changes_nothing(emulator: Emulator, ordered: bool) -> None:
    case = Case("packed", 1, 2, 1, 0, 0, 64, 64, lengths_q=(70, 40, 90), tail=3,
                options=_causal._replace(deterministic=ordered))  # fmt: skip
    call = case.build("cpu", "float16")
    rows = torch.arange(203)
    neighbour = ((rows >= 70) & (rows < 110))[:, None, None]
    dirty = call
    for name in ("q", "k", "v"):
        dirty = spoilt(dirty, name, neighbour)
    dirty = replace(dirty, d_out=dirty.d_out.masked_fill(neighbour, math.nan))
    clean = run(call)
    found = run(dirty, forward=clean[:2])
    kept = ~neighbour[:, 0, 0]
    for ours, theirs in zip(found[2:5], clean[2:5], strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours[kept], theirs[kept])
        assert not bool(ours[200:].any())  # tokens of no sequence


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [("bias", "a bias"), ("mask", "a dense mask"), ("ALiBi", "ALiBi"), ("dropout", "dropout"),
     ("odd head dims", "multiples of 8")],
)  # fmt: skip
def test_what_is_not_served_is_refused_with_its_reason(name: str, reason: str) -> None:
    assert reason in (hopper_backward.why_not(CASES[name].build("cpu", "float16").problem) or "")


def test_float32_and_a_scale_of_zero_are_refused() -> None:
    assert "float16 and bfloat16" in (hopper_backward.why_not(CASES["plain"].build("cpu", "float32").problem) or "")
    none = replace(CASES["plain"], options=_options._replace(scale=0.0)).build("cpu", "float16")
    assert "scale" in (hopper_backward.why_not(none.problem) or "")


# ---- what the compiler makes of it ----------------------------------------------------------------------------------

# Kernel, head dim, features: registers of a thread at entry, bytes spilled, bytes of shared memory.
TAKES = {
    ("attention_backward", 64, "full"): (168, 0, 199176),
    ("attention_backward", 64, "causal"): (168, 8, 199176),
    ("attention_backward", 128, "full"): (168, 0, 214824),
    ("attention_backward", 128, "causal"): (168, 16, 214824),
    ("attention_backward", 128, "causal packed window"): (168, 8, 214840),
    ("attention_backward", 128, "full without dq"): (168, 0, 149208),
    ("wide_key_gradients", 256, "causal"): (168, 0, 230920),
    ("query_gradients", 256, "causal"): (168, 0, 229792),
    ("query_gradients", 128, "causal packed window"): (168, 0, 164288),
}


class Compiler:
    """Stands for the launcher: compiles one of the kernels that are prepared."""

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted
        self.compiled: compiling.Compiled | None = None

    def prepare_named(
        self, kernel: Any, _: tuple[int, ...], named: Mapping[str, Any], __: Iterable[str]
    ) -> Callable[[Iterable[torch.Tensor]], None]:
        if kernel.fn.__name__ == self.wanted:
            types: dict[str, str | None] = {}
            for param in kernel.params:
                if not param.is_constexpr:
                    types[param.name] = type_of(param.name, named[param.name])
            fixed = {param.name: named[param.name] for param in kernel.params if param.is_constexpr}
            self.compiled = compiling.compile_settled(kernel, types, fixed, 90, compiling.Options(num_warps=4))
        return lambda _: None


def type_of(name: str, value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, Mapped):
        return kind_of("kernel", name, value.tensor.dtype, value.map)
    if isinstance(value, torch.Tensor):
        return {torch.float32: "*fp32", torch.int32: "*i32"}[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compiled_row(row: tuple[str, int, str], patch: pytest.MonkeyPatch) -> compiling.Compiled:
    """Compile the kernel of one row of the table."""
    kernel, dim, features = row
    options = _options._replace(causal="causal" in features, window_left=50 if "window" in features else None)
    lengths = (20, 30) if "packed" in features else ()
    case = Case("compiled", 1, 2, 1, 64, 64, dim, dim, lengths_q=lengths, options=options)
    compiler = Compiler(kernel)
    patch.setattr(hopper_backward, "prepare_named", compiler.prepare_named)
    alone = kernel == "query_gradients"
    run(case.build("cpu", "bfloat16"), Needs(dq="without dq" not in features, dk=not alone, dv=not alone))
    assert compiler.compiled is not None
    return compiler.compiled


@pytest.mark.compile
@pytest.mark.parametrize("row", TAKES, ids=[" ".join(map(str, row)) for row in TAKES])
def test_each_kernel_takes_what_is_recorded(
    row: tuple[str, int, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    compiled = compiled_row(row, monkeypatch)
    found = compiling.resources(compiled)
    record_property("resources", found._asdict())
    registers, spilled, shared = TAKES[row]
    assert (found.registers, found.shared) == (registers, shared)
    assert found.spilled <= spilled
    assert not warnings_of_ptxas(str(compiled.asm["ptx"]), tmp_path)


def warnings_of_ptxas(ptx: str, folder: Path) -> list[str]:
    """Assemble once more and give what the assembler says of products that it had to put in a row (C7510 to C7515)."""
    from triton.backends import nvidia

    source = folder / "kernel.ptx"
    source.write_text(ptx)
    tool = Path(str(nvidia.__file__)).parent / "bin" / "ptxas"
    command = [str(tool), "-v", "--gpu-name=sm_90a", str(source), "-o", str(folder / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in (done.stdout + done.stderr).splitlines() if "wgmma" in line or "warning" in line.lower()]
