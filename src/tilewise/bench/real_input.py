"""Queries, keys and values of a real model on a real text: everybody must agree on them.

They were captured from one layer of all-MiniLM-L6-v2 by a script under ``examples/``. Real scores are not like random
ones: a few keys take most of a row, and whole heads look at one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import numpy as np
import torch

from tilewise.bench.cases import Case, Inputs
from tilewise.bench.implementations import Implementation
from tilewise.bench.judge import Judge
from tilewise.bench.report import Agreement, TensorError

FAMILIES = ("naive", "sdpa", "tilewise")
CAPTURE = "minilm_layer.npz"
TENSORS = ("q", "k", "v", "kv_stop")  # (heads, length, dim) each; the number of keys before the padding may be missing
_FAILURES = (RuntimeError, ValueError, TypeError, ArithmeticError, MemoryError)


def load(device: str, dtype: str, name: str = CAPTURE) -> tuple[Case, Inputs]:
    """Read the capture as a case.

    Raises:
        FileNotFoundError: this installation has none.
    """
    with (resources.files("tilewise") / "data" / name).open("rb") as file, np.load(file) as arrays:
        held = {key: torch.from_numpy(arrays[key]) for key in TENSORS if key in arrays.files}
    q, k, v = (held[key].to(device, getattr(torch, dtype))[None] for key in ("q", "k", "v"))
    stop = int(held["kv_stop"].item()) if "kv_stop" in held else None
    _, heads, length, dim = q.shape
    case = Case(length, 1, heads, k.shape[1], dim, dtype, device, kv_stop=None if stop == length else stop)
    generator = torch.Generator(device).manual_seed(0)
    d_out = torch.randn(q.shape, generator=generator, device=device, dtype=q.dtype)
    return case, Inputs(q, k, v, d_out)


def agreement(device: str, dtype: str, known: Sequence[Implementation]) -> tuple[tuple[Agreement, ...], str]:
    """Hold naive, SDPA and tilewise, forward and backward, to the budget; give the results and what they are about."""
    try:
        case, inputs = load(device, dtype)
    except FileNotFoundError:
        return (Agreement(CAPTURE, False, note="this installation lacks the file"),), "no real input"
    judge = Judge(case, inputs, gradients=True, scores=case.heads_q * case.length**2)
    here = [each for each in known if each.family in FAMILIES and each.absent(case, "backward") is None]
    found = tuple(_agreement(each, case, inputs, judge) for each in here)
    padding = f", keys from {case.kv_stop} on hidden" if case.kv_stop is not None else ""
    note = f"one layer of all-MiniLM-L6-v2 on a text: {case.heads_q} heads, {case.length} tokens, d={case.dim}{padding}"
    return found, f"{note}; {dtype}, forward and backward"


def _agreement(each: Implementation, case: Case, inputs: Inputs, judge: Judge) -> Agreement:
    try:
        run = each.prepare(case, inputs)
        with run.active():
            measured = judge.measure(run.outcome(judge.d_out))
    except _FAILURES as error:
        return Agreement(each.name, False, note=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    errors = tuple(TensorError(name, e.max, e.max_budget, e.mean, e.mean_budget) for name, e in measured.items())
    return Agreement(each.name, all(error.within for error in errors), errors)
