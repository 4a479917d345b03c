"""Every wait, arrival, fence and turn of the Hopper kernels is needed: without it, some emulated run goes wrong.

Each such line of a kernel is left out in turn. Where nothing then goes wrong in any of the runs, the line is listed
with the reason: so a line that nobody needs cannot hide, and neither can a mistake that the emulator does not see.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from tilewise.kernels.gluon import compat

if compat.refusal() is not None:
    pytest.skip(str(compat.refusal()), allow_module_level=True)

import test_hopper_backward as backward_tests
import test_hopper_forward as forward_tests
from gluon_emulator import Deadlock, Misuse
from tilewise import testing
from tilewise.backends import hopper_backward, torch_tiled
from tilewise.kernels.gluon import backward, backward_wide, forward
from tilewise.problem.problem import Needs, Options
from tilewise.testing import Call, Case, Results

PROTOCOL = (
    "arrive", "arrive_if", "wait", "wait_if", "named_arrive", "named_sync", "fence_async_shared", "tma_store_wait",
    "mbarrier.arrive", "mbarrier.wait", "mbarrier.expect",
)  # fmt: skip
RUNS = [(seed, late) for seed in range(4) for late in (True, False)]


def lines_of(module: ModuleType) -> Iterator[tuple[str, ast.Expr]]:
    """Give the statements of a kernel's file that do nothing but order things, each with its function and text."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    seen: Counter[str] = Counter()
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        statements = [node for node in ast.walk(function) if isinstance(node, ast.Expr)]
        for node in sorted(statements, key=lambda node: node.lineno):
            if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in PROTOCOL:
                text = f"{function.name}: {ast.unparse(node)}"
                seen[text] += 1
                yield text if seen[text] == 1 else f"{text} #{seen[text]}", node


def without(module: ModuleType, statement: ast.Expr, folder: Path) -> ModuleType:
    """Load a kernel's file with one statement left out."""
    lines = Path(str(module.__file__)).read_text().splitlines()
    first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
    lines[first:last] = [" " * statement.col_offset + "pass"] + [""] * (last - first - 1)
    name = f"{module.__name__.rpartition('.')[2]}_without_{statement.lineno}"
    file = folder / f"{name}.py"
    file.write_text("\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made  # as Triton looks for a function's module there
    try:
        spec.loader.exec_module(made)
    finally:
        del sys.modules[name]
    return made


# ---- runs -----------------------------------------------------------------------------------------------------------


@cache
def call_of(dim: int, length: int, hidden: bool = False) -> Call:
    """Draw a causal call; or one whose second sequence sees nothing, and whose first not the keys at both ends."""
    options = Options(return_lse=True, causal=not hidden)
    ranges = ((70, 190), (0, 0)) if hidden else ()
    case = Case("", 2 if hidden else 1, 1 if hidden else 2, 1, length, length, dim, dim, ranges=ranges, options=options)
    return case.build("cpu", "float16")


def forward_once(mutant: ModuleType, seed: int, late: bool, patch: pytest.MonkeyPatch) -> None:
    """Run one program for all tiles: each number of buffers of q, turns or none, blocks that a consumer passes over."""
    patch.setattr(forward_tests, "attention_forward", mutant.attention_forward)
    chosen = forward_tests.settings_of(64, cut=True)
    alone = chosen._replace(q_buffers=1, ping_pong=False, stages=2)
    three = forward_tests.settings_of(64, cut=True, row=1)._replace(stages=2)
    for settings in (chosen, alone, three, three._replace(ping_pong=False)):
        call = call_of(64, 200)
        testing.check(forward_tests.run(call, settings, late=late, seed=seed, processors=1), call)


def backward_once(call: Call, seed: int, late: bool, patch: pytest.MonkeyPatch) -> None:
    """Run the backward kernels; keys that no query sees hold NaN there."""
    hopper_backward.prepare.cache_clear()  # it remembers the kernels of the run before
    emulator = backward_tests.Emulator()
    emulator.seed, emulator.late = seed, late
    patch.setattr(hopper_backward, "prepare_named", emulator.prepare_named)
    given = call.tensors
    out, lse = torch_tiled.forward(call.problem, given)
    spoilt = given
    if given.kv_start is not None and given.kv_stop is not None:
        kv_pos = torch.arange(given.k.shape[2])
        outside = (kv_pos < given.kv_start[:, None]) | (kv_pos >= given.kv_stop[:, None])
        rows = outside[:, None, :, None]
        spoilt = given._replace(k=given.k.masked_fill(rows, math.nan), v=given.v.masked_fill(rows, math.nan))
    found = hopper_backward.backward(call.problem, spoilt, out, lse, call.d_out, call.d_lse, Needs())
    testing.check(Results(out, lse, *found), call)


def narrow_once(mutant: ModuleType, seed: int, late: bool, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backward, "attention_backward", mutant.attention_backward)
    backward_once(call_of(64, 200), seed, late, patch)
    backward_once(call_of(128, 300, hidden=True), seed, late, patch)


def wide_once(mutant: ModuleType, seed: int, late: bool, patch: pytest.MonkeyPatch) -> None:
    for name in ("wide_key_gradients", "query_gradients"):
        patch.setattr(backward_wide, name, getattr(mutant, name))
    backward_once(call_of(256, 200), seed, late, patch)
    backward_once(call_of(256, 300, hidden=True), seed, late, patch)


Once = Callable[[ModuleType, int, bool, pytest.MonkeyPatch], None]
KERNELS: list[tuple[ModuleType, Once]] = [
    (forward, forward_once),
    (backward, narrow_once),
    (backward_wide, wide_once),
]
SLOW = {forward: (), backward: (pytest.mark.slow,), backward_wide: (pytest.mark.slow,)}  # two minutes in all
LINES = [
    pytest.param(
        module, once, statement, text,
        id=f"{module.__name__.rpartition('.')[2]}-{statement.lineno}",
        marks=SLOW[module],
    )
    for module, once in KERNELS
    for text, statement in lines_of(module)
]  # fmt: skip
# Lines without which the emulator sees nothing go wrong, and why they stand there.
SPARE = {
    "produce: wait(B.tile_empty + slot, handed >> 1 & 1 ^ 1, PLAN.bar_off)": (
        "the last tile's q was loaded into a buffer given back after the place that is overwritten had been read"
    ),
    "differentiate: named_sync(BOTH, 256)": (
        "a consumer multiplies the rows that it has zeroed itself; dQ reads all, but waits for dS of both consumers"
    ),
    "second_operand: mbarrier.wait(p_empty.index(slot), phase ^ 1)": (
        "q of two steps ahead, which makes the next p for this slot, arrives only once dK's consumer has used the last"
    ),
}


def goes_wrong(once: Once, mutant: ModuleType) -> bool:
    for seed, late in RUNS:
        with pytest.MonkeyPatch.context() as patch:
            try:
                once(mutant, seed, late, patch)
            except (Deadlock, Misuse, AssertionError):
                return True
    return False


@pytest.mark.parametrize(("module", "once", "statement", "text"), LINES)
def test_no_line_of_the_protocol_can_be_left_out(
    module: ModuleType, once: Once, statement: ast.Expr, text: str, tmp_path: Path
) -> None:
    assert goes_wrong(once, without(module, statement, tmp_path)) == (text not in SPARE), text


def test_the_spare_lines_are_lines_of_the_kernels() -> None:
    assert SPARE.keys() <= {text for module, _ in KERNELS for text, _ in lines_of(module)}


@pytest.mark.parametrize(("module", "once"), [pytest.param(*each, marks=SLOW[each[0]]) for each in KERNELS])
def test_the_kernels_as_they_are_go_right(module: ModuleType, once: Once) -> None:
    assert not goes_wrong(once, module)
