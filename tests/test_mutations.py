"""What holds for the tests: they notice faults. Every deliberate fault below is caught, or is shown to be none.

The rule of tiles is mutilated systematically, operator by operator and name by name, and judged by the properties of
``test_blocks.py``. The softmax step is mutilated line by line, in the engine to read and in the torch engine, and
judged by the error budget, on data built so that luck cannot hide a fault.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch

import test_blocks as brute_force
from tilewise.backends import numpy_tiled, torch_tiled
from tilewise.machine.tiles import Tiles
from tilewise.problem import blocks
from tilewise.problem.problem import Options
from tilewise.testing import CASES, Call, Case, Results, errors, oracle, spread, yardstick

# ---- the rule of tiles ----

ORDERS: tuple[type[ast.cmpop], ...] = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
INSTEAD: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.FloorDiv: ast.Mod(),
    ast.BitAnd: ast.BitOr(),
}


def faults_of(node: ast.AST, names: list[str]) -> Iterator[ast.expr]:
    """Give all that may stand in the place of one node by one small mistake."""
    if isinstance(node, ast.Compare):
        others: list[ast.cmpop] = [ast.Is()] if isinstance(node.ops[0], ast.IsNot) else [order() for order in ORDERS]
        yield from (ast.Compare(node.left, [other], node.comparators) for other in others)
    elif isinstance(node, ast.BinOp):
        yield ast.BinOp(node.left, INSTEAD[type(node.op)], node.right)
        yield node.left  # a term dropped
        yield node.right
        if isinstance(node.op, ast.FloorDiv):  # rounded up instead of down
            yield ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), node.left), ast.FloorDiv(), node.right))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield ast.Call(ast.Name({"min": "max", "max": "min"}[node.func.id]), node.args, [])
        yield from node.args  # a bound dropped
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)
    elif isinstance(node, ast.Name) and node.id in names:
        yield from (ast.Name(name) for name in names)
    elif isinstance(node, ast.Tuple):  # two results exchanged
        for place in range(len(node.elts) - 1):
            one, other = node.elts[place : place + 2]
            yield ast.Tuple([*node.elts[:place], other, one, *node.elts[place + 2 :]])


class Put(ast.NodeTransformer):
    """Put one node in the place of another."""

    def __init__(self, place: ast.AST, new: ast.AST) -> None:
        self.place, self.new = place, new

    def visit(self, node: ast.AST) -> ast.AST:
        """Replace the node, or look below it."""
        return self.new if node is self.place else self.generic_visit(node)


def plain(function: Callable[..., object]) -> ast.FunctionDef:
    """Parse a function of blocks.py, without its hints and its docstring."""
    name = getattr(function, "__name__", "")
    *_, tree = (
        node
        for node in ast.parse(inspect.getsource(blocks)).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    tree.returns, tree.body = None, tree.body[1:]
    for argument in tree.args.args:
        argument.annotation = None
    return tree


def mutants(function: Callable[..., object]) -> dict[str, FunctionType]:
    """Make every variant of a function that is one small mistake away: {"line -> faulty line": function}."""
    tree, found = plain(function), {}
    original = ast.unparse(tree)
    assigned = {
        target.id: node.lineno
        for node in reversed(list(ast.walk(tree)))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    first_lines = dict.fromkeys((argument.arg for argument in tree.args.args), 0) | assigned
    for place, node in enumerate(ast.walk(tree)):
        if isinstance(getattr(node, "ctx", None), ast.Store):
            continue
        names = [name for name, line in first_lines.items() if line < getattr(node, "lineno", 0)]
        for new in faults_of(node, names):
            variant = copy.deepcopy(tree)
            target = list(ast.walk(variant))[place]
            source = ast.unparse(ast.fix_missing_locations(Put(target, copy.deepcopy(new)).visit(variant)))
            pairs = zip(original.splitlines(), source.splitlines(), strict=True)
            changed = [f"{line.strip()} -> {faulty.strip()}" for line, faulty in pairs if line != faulty]
            if changed:
                space: dict[str, FunctionType] = {}
                exec(source, space)  # noqa: S102  # the mutilated function
                found[changed[0]] = space[getattr(function, "__name__", "")]
    return found


def draw_questions(count: int) -> list[brute_force.Question]:
    """Draw small questions, in which bounds meet and pass each other often."""
    rng = random.Random(20)  # noqa: S311  # no secret

    def side() -> int | None:
        return rng.choice([None, rng.randint(-6, 9), rng.randint(0, 3)])

    questions = []
    for _ in range(count):
        start = rng.choice([0, 0, rng.randint(0, 9)])
        stop = start + rng.choice([1, 1, 2, 4, rng.randint(1, 9)])
        keys = rng.choice([0, 0, rng.randint(-4, 9)]), rng.randint(-4, 20)
        offset, block = rng.choice([0, rng.randint(-12, 12)]), rng.choice([1, 2, 4, rng.randint(1, 9)])
        questions.append(brute_force.Question(start, stop, *keys, side(), side(), offset, block))
    return questions


def test_each_fault_in_the_blocks_to_visit_is_caught_or_changes_nothing_that_matters() -> None:
    questions = draw_questions(3000)
    truths = [brute_force.truth(question) for question in questions]
    on_device = [[None if x is None else brute_force.DeviceInt(x) for x in question] for question in questions]

    def complaint(function: Callable[..., tuple[int, int, int, int]]) -> str:
        for asked in questions, on_device:
            for question, expected in zip(asked, truths, strict=True):
                try:
                    found = brute_force.complaint(function(*question), expected)
                except (TypeError, ZeroDivisionError) as error:  # an open side in a sum, or a block of no keys
                    found = type(error).__name__
                if found:
                    return found
        return ""

    assert complaint(blocks.block_ranges) == ""
    made = mutants(blocks.block_ranges)
    assert len(made) > 450
    survivors = {name: function for name, function in made.items() if not complaint(function)}
    assert set(survivors) == set(HARMLESS) | set(WASTEFUL)
    for name, function in survivors.items():
        same = all(function(*question) == blocks.block_ranges(*question) for question in questions)
        assert same == (name in HARMLESS), name


# What is left standing, each with the reason. HARMLESS: the same answer to every question.
EQUAL = "both names hold the same value there"
HARMLESS = {
    "full_start = kv_start -> full_start = visit_start": EQUAL,
    "visit_start = max(tile_start + offset - left, kv_start) -> "
    "visit_start = max(tile_start + offset - left, visit_start)": EQUAL,
    "visit_start = max(tile_start + offset - left, kv_start) -> "
    "visit_start = max(tile_start + offset - left, full_start)": EQUAL,
    "full_start = max(tile_stop - 1 + offset - left, kv_start) -> "
    "full_start = max(tile_stop - 1 + offset - left, full_start)": EQUAL,
    "full_start = max(tile_stop - 1 + offset - left, kv_start) -> "
    "full_start = max(tile_stop - 1 + offset - left, visit_start)": "visit_start is kv_start, or less than the other",
    "full_end = kv_stop -> full_end = visit_stop": EQUAL,
    "visit_stop = min(tile_stop + offset + right, kv_stop) -> "
    "visit_stop = min(tile_stop + offset + right, visit_stop)": EQUAL,
    "visit_stop = min(tile_stop + offset + right, kv_stop) -> "
    "visit_stop = min(tile_stop + offset + right, full_end)": EQUAL,
    "full_end = min(tile_start + offset + right + 1, kv_stop) -> "
    "full_end = min(tile_start + offset + right + 1, full_end)": EQUAL,
    "full_end = min(tile_start + offset + right + 1, kv_stop) -> "
    "full_end = min(tile_start + offset + right + 1, visit_stop)": "visit_stop is kv_stop, or not less than the other",
    "full_stop = max(max(full_end, 0) // block_kv, full_first) -> "
    "full_stop = max(full_end // block_kv, full_first)": "full_first is 0 or more, so a quotient below 0 never counts",
    "full_stop = max(max(full_end, 0) // block_kv, full_first) -> "
    "full_stop = max(max(full_end, -1) // block_kv, full_first)": "as above",
}
# WASTEFUL: a block visited for nothing, masked, where no pair is visible.
WASTEFUL = {
    "stop = (max(visit_stop, 0) + block_kv - 1) // block_kv -> "
    "stop = (max(visit_stop, 1) + block_kv - 1) // block_kv": "an empty tile visits the first block",
}


def test_each_fault_in_what_is_visible_is_caught() -> None:
    questions = draw_questions(400)
    masks = [brute_force.dense(question, 30) for question in questions]

    def is_right(function: Callable[..., object]) -> bool:
        for question, mask in zip(questions, masks, strict=True):
            rows, keys = np.arange(question.tile_start, question.tile_stop)[:, None], np.arange(30)
            try:
                if not np.array_equal(
                    np.broadcast_to(np.asarray(function(rows, keys, *question[2:7])), mask.shape), mask
                ):
                    return False
            except TypeError:  # an open side in a sum
                return False
        return True

    assert is_right(blocks.is_visible)
    made = mutants(blocks.is_visible)
    assert len(made) > 100
    assert [name for name, function in made.items() if is_right(function)] == []


# ---- the softmax step ----


class Fault(NamedTuple):
    """A fault, as what is written in its place: ``line`` must occur exactly once in the function."""

    what: str
    line: str
    faulty: str


TORCH_FAULTS = (
    Fault(
        "scaled twice",
        "engine.scaled(engine.load_rows(",
        "engine.scaled(engine.problem.score.scale * engine.load_rows(",
    ),
    Fault("not scaled", "engine.scaled(engine.load_rows(", "(LOG2E * engine.load_rows("),
    Fault("the maximum starts at 0", "q.new_full(q.shape[:-1], -math.inf)", "q.new_zeros(q.shape[:-1])"),
    Fault("mask forgotten", "engine.bias(tile), tile, visible)", "engine.bias(tile), tile, None)"),
    Fault("bias forgotten", "engine.bias(tile), tile, visible)", "None, tile, visible)"),
    Fault("hidden keys let through", "engine.load_keys(tile, visible)", "engine.load_keys(tile, None)"),
    Fault("the old maximum forgotten", "torch.maximum(row_max, score.amax(-1))", "score.amax(-1)"),
    Fault("the new maximum forgotten", "torch.maximum(row_max, score.amax(-1))", "row_max"),
    Fault("the smallest score taken", "score.amax(-1)", "score.amin(-1)"),
    Fault(
        "anchor of an empty row missing",
        "anchor = torch.where(row_max_new == -math.inf, 0, row_max_new)\n            p =",
        "anchor = row_max_new\n            p =",
    ),
    Fault("no anchor", "p = score.sub_(anchor", "anchor = torch.zeros_like(anchor)\n            p = score.sub_(anchor"),
    Fault(
        "anchored on the old maximum",
        "p = score.sub_(anchor",
        "p = score.sub_(torch.where(row_max == -math.inf, 0, row_max)",
    ),
    Fault("p in base e", ".exp2_()", ".exp_()"),
    Fault(
        "rescale upside down",
        "rescale = torch.exp2(row_max - anchor)\n            row_sum = row_sum * rescale + p",
        "rescale = torch.exp2(anchor - row_max)\n            row_sum = row_sum * rescale + p",
    ),
    Fault(
        "rescale in base e",
        "rescale = torch.exp2(row_max - anchor)\n            row_sum = row_sum * rescale + p",
        "rescale = torch.exp(row_max - anchor)\n            row_sum = row_sum * rescale + p",
    ),
    Fault("row_sum not rescaled", "row_sum = row_sum * rescale + p.sum(-1)", "row_sum = row_sum + p.sum(-1)"),
    Fault("row_sum begun anew", "row_sum = row_sum * rescale + p.sum(-1)", "row_sum = p.sum(-1)"),
    Fault("row_sum counts what is dropped out", "+ p.sum(-1)", "+ engine.dropout(p, tile).sum(-1)"),
    Fault("acc not rescaled", "acc = acc.mul_(rescale[..., None]).add_", "acc = acc.add_"),
    Fault("acc begun anew", "acc = acc.mul_(rescale[..., None]).add_", "acc = acc.zero_().add_"),
    Fault("dropout forgotten", "product(engine.dropout(p, tile), v)", "product(p, v)"),
    Fault("row_max not updated", "tile), v))\n            row_max = row_max_new", "tile), v))"),
    Fault("sink above the maximum forgotten", "torch.maximum(row_max, sink)", "row_max"),
    Fault(
        "anchor of a row with nothing and no sink missing",
        "anchor = torch.where(row_max_new == -math.inf, 0, row_max_new)\n            rescale =",
        "anchor = row_max_new\n            rescale =",
    ),
    Fault("row_sum not rescaled to the sink", "row_sum * rescale + torch.exp2(sink", "row_sum + torch.exp2(sink"),
    Fault("sink not counted", "row_sum * rescale + torch.exp2(sink - anchor)", "row_sum * rescale"),
    Fault("sink in base e", "torch.exp2(sink - anchor)", "torch.exp(sink - anchor)"),
    Fault("acc not rescaled to the sink", "acc = acc.mul_(rescale[..., None])\n", "\n"),
    Fault(
        "row_max not updated by the sink", "row_max = row_max_new\n        row_sum_or_1", "pass\n        row_sum_or_1"
    ),
    Fault("an empty row divided by 0", "torch.where(row_sum == 0, 1, row_sum)", "row_sum"),
    Fault("not divided", "acc / row_sum_or_1[..., None]", "acc"),
    Fault("lse without its maximum", "row_max * LN2 + row_sum_or_1.log()", "row_sum_or_1.log()"),
    Fault("lse without its sum", "row_max * LN2 + row_sum_or_1.log()", "row_max * LN2"),
    Fault("lse's maximum in base 2", "row_max * LN2 +", "row_max +"),
    Fault("lse's sum in base 2", "row_sum_or_1.log()", "row_sum_or_1.log2()"),
)

NUMPY_FAULTS = (
    Fault("scaled twice", "score *= scale_log2", "score *= scale_log2 * scale"),
    Fault("not scaled", "score *= scale_log2", "score *= LOG2E"),
    Fault("scores in base e", "score *= scale_log2", "score *= scale"),
    Fault("the maximum starts at 0", "np.full(len(q_tile), -np.inf, lse.dtype)", "np.zeros(len(q_tile), lse.dtype)"),
    Fault("mask forgotten", "np.copyto(score, -np.inf, where=~visible)", "pass"),
    Fault("mask inverted", "where=~visible", "where=visible"),
    Fault("hidden keys let through", "k_tile, v_tile = _only(seen, k_tile), _only(seen, v_tile)", "pass"),
    Fault("the old maximum forgotten", "np.maximum(row_max, score.max(axis=1))", "score.max(axis=1)"),
    Fault("the new maximum forgotten", "np.maximum(row_max, score.max(axis=1))", "row_max"),
    Fault("the smallest score taken", "score.max(axis=1)", "score.min(axis=1)"),
    Fault("anchor of an empty row missing", "np.where(row_max_new == -np.inf, 0, row_max_new)", "row_max_new"),
    Fault("no anchor", "np.where(row_max_new == -np.inf, 0, row_max_new)", "np.zeros_like(row_max_new)"),
    Fault(
        "anchored on the old maximum",
        "np.where(row_max_new == -np.inf, 0, row_max_new)",
        "np.where(row_max == -np.inf, 0, row_max)",
    ),
    Fault("p in base e", "p = np.exp2(", "p = np.exp("),
    Fault("rescale upside down", "rescale = np.exp2(row_max - anchor)", "rescale = np.exp2(anchor - row_max)"),
    Fault("rescale in base e", "rescale = np.exp2(", "rescale = np.exp("),
    Fault("row_sum not rescaled", "row_sum = row_sum * rescale + p", "row_sum = row_sum + p"),
    Fault("row_sum begun anew", "row_sum = row_sum * rescale + p", "row_sum = p"),
    Fault("acc not rescaled", "acc = acc * rescale[:, None] + p", "acc = acc + p"),
    Fault("acc begun anew", "acc = acc * rescale[:, None] + p", "acc = p"),
    Fault("row_max not updated", "            row_max = row_max_new\n", ""),
    Fault("an empty row divided by 0", "np.where(row_sum == 0, 1, row_sum)", "row_sum"),
    Fault("not divided", "acc / row_sum[:, None]", "acc"),
    Fault("lse without its maximum", "(row_max + np.log2(row_sum)) * LN2", "np.log2(row_sum) * LN2"),
    Fault("lse without its sum", "(row_max + np.log2(row_sum)) * LN2", "row_max * LN2"),
    Fault("lse in base 2", "(row_max + np.log2(row_sum)) * LN2", "row_max + np.log2(row_sum)"),
    Fault("lse's sum in base e", "np.log2(row_sum)", "np.log(row_sum)"),
)

# No faults after all: the first tile's rescale is exp2(-inf) = 0, whatever the sums start from; and a row without a
# tile has row_max -inf, which decides its lse, while its sum of 0 is replaced by 1 anyway.
HARMLESS_FAULTS = (
    (
        torch_tiled,
        Fault("the sum starts at 1", "row_sum = torch.zeros_like(row_max)", "row_sum = torch.ones_like(row_max)"),
    ),
    (numpy_tiled, Fault("the sum starts at 1", "row_sum = np.zeros(", "row_sum = np.ones(")),
)


def mutilated(engine: ModuleType, fault: Fault | None) -> ModuleType:
    """Compile an engine anew, with one fault in its forward pass, and with tiles so small that a case has several."""
    source = Path(engine.__file__ or "").read_text()
    if fault is not None:
        function = inspect.getsource(engine._forward if engine is torch_tiled else engine.forward_steps)
        assert function.count(fault.line) == 1, "the line must occur once: mend the table of faults"
        source = source.replace(function, function.replace(fault.line, fault.faulty))
    fresh = ModuleType(engine.__name__)
    if engine is numpy_tiled:
        assert source.count("\nBLOCK_Q = 512\nBLOCK_KV = 512\n") == 1
        source = source.replace("\nBLOCK_Q = 512\nBLOCK_KV = 512\n", "\nBLOCK_Q = 8\nBLOCK_KV = 16\n")
    exec(compile(source, engine.__name__, "exec"), vars(fresh))  # noqa: S102  # the mutilated engine
    if engine is torch_tiled:
        vars(fresh)["tiles"] = lambda _: Tiles(8, 16)
    return fresh


def with_scores(level: Callable[[int], float], noise: float = 0.1) -> Call:
    """Build 20 queries against 50 keys such that each query's score with key j is about ``level(j)``."""
    call = Case("", 1, 1, 1, 20, 50, 8, 8, options=Options(return_lse=True)).build("cpu", "float32")
    q, k = call.tensors.q * noise, call.tensors.k * noise
    q[..., 0] = 1
    k[..., 0] = torch.tensor([level(key) * math.sqrt(8) for key in range(50)])
    return replace(call, tensors=call.tensors._replace(q=q, k=k))


def with_hidden_nan() -> Call:
    call = Case("", ranges=((0, 20), (5, 37)), options=Options(return_lse=True)).build("cpu", "float32")
    for x in (call.tensors.k, call.tensors.v):
        x[0, :, 20:] = math.nan
        x[1, :, :5] = math.inf
    return call


def with_far_sinks() -> Call:
    """Give one head a sink above all scores and one below, and some rows no key."""
    call = Case("", len_kv=20, sink="h", options=Options(causal=True, return_lse=True)).build("cpu", "float32")
    return replace(call, tensors=call.tensors._replace(sink=torch.tensor([9.0, -9.0])))


NAMED = (
    "causal",
    "causal, more queries than keys: empty rows",
    "window",
    "padding on both sides",
    "mask",
    "bias",
    "dropout",
    "sink",
    "packed, bias and sink",
    "packed, window",
)


@cache
def judged() -> dict[str, tuple[Call, Results, Results, torch.Tensor]]:
    """Build the calls, each with what is right, what the plain formula loses and what its scores are sums of."""
    calls = {
        "the largest score in the last block": with_scores(lambda key: 4.0 * (key // 16)),
        "the largest score in the first block": with_scores(lambda key: -4.0 * (key // 16)),
        "rising far": with_scores(lambda key: 20.0 * key),
        "falling far": with_scores(lambda key: -20.0 * key),
        "all scores high": with_scores(lambda _: 200.0, noise=0.0),
        "all scores low": with_scores(lambda _: -200.0, noise=0.0),
        "NaN in hidden keys": with_hidden_nan(),
        "sinks above and below": with_far_sinks(),
    }
    calls |= {name: CASES[name].build("cpu", "float32") for name in NAMED}
    return {
        name: (call, oracle(call, gradients=False), yardstick(call, gradients=False), spread(call))
        for name, call in calls.items()
    }


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiles are so small here that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def excess(engine: ModuleType) -> Iterator[tuple[str, float]]:
    """Name each call whose budget an engine exceeds, with the factor between its largest error and the bound."""
    for name, (call, right, low, sums) in judged().items():
        if engine.why_not(call.problem) is not None:
            continue
        with np.errstate(all="ignore"):  # what a fault makes of the numbers is for the budget to say
            got = Results(*engine.forward(call.problem, call.tensors))
        measured = [error for _, error in errors(got, right, low, call.problem.len_kv, sums)]
        if not all(error.within for error in measured):
            yield name, max(math.inf if math.isinf(error.max) else error.max / error.max_budget for error in measured)


def is_caught(engine: ModuleType, fault: Fault) -> bool:
    """Say whether some call exceeds its budget, and not by a hair: a hundredfold."""
    return any(factor > 100 for _, factor in excess(mutilated(engine, fault)))


@pytest.mark.parametrize("engine", [torch_tiled, numpy_tiled], ids=["torch", "numpy"])
def test_without_a_fault_every_case_is_within_budget(engine: ModuleType) -> None:
    assert list(excess(mutilated(engine, None))) == []


@pytest.mark.parametrize("fault", TORCH_FAULTS, ids=lambda fault: fault.what)
def test_each_fault_in_the_torch_engines_step_exceeds_the_budget(fault: Fault) -> None:
    assert is_caught(torch_tiled, fault)


@pytest.mark.parametrize("fault", NUMPY_FAULTS, ids=lambda fault: fault.what)
def test_each_fault_in_the_step_to_read_exceeds_the_budget(fault: Fault) -> None:
    assert is_caught(numpy_tiled, fault)


@pytest.mark.parametrize(("engine", "fault"), HARMLESS_FAULTS, ids=["torch", "numpy"])
def test_a_fault_that_changes_nothing_stays_within_budget(engine: ModuleType, fault: Fault) -> None:
    assert list(excess(mutilated(engine, fault))) == []


def test_a_table_of_faults_that_no_longer_fits_the_source_is_an_error() -> None:
    with pytest.raises(AssertionError, match="must occur once"):
        mutilated(torch_tiled, Fault("gone", "no such line", ""))
    with pytest.raises(AssertionError, match="must occur once"):
        mutilated(numpy_tiled, Fault("twice", "score", ""))
