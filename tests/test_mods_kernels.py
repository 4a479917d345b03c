"""Scores and masks that users write, in every engine: against the formula in float64, and what they compile to."""

# ruff: noqa: ARG005 - every function is given all positions

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from tilewise.arguments import Asked
from tilewise.backends.block_lists import Blocks
from tilewise.problem.problem import Options
from tilewise.testing import Call, Case, check, run

Function = Callable[..., object]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreter = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 before Python starts"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]
BACKENDS = ["torch_tiled", pytest.param("triton_portable", marks=interpreter)]


@dataclass(frozen=True)
class Mod:
    """One function of scores or of visibility, or both, in a case; shapes of tensors by letters, digits are sizes."""

    name: str
    score: Function | None = None
    score_shapes: tuple[tuple[int, ...], ...] = ()
    mask: Function | None = None
    mask_tensors: tuple[torch.Tensor, ...] = ()
    case: Case = field(default_factory=lambda: Case("mods", options=Options(return_lse=True)))

    def call(self, dtype: str, seed: int = 0) -> Call:
        """Draw the case's data and the tensors of the score."""
        call = self.case.build("cpu", dtype, seed)
        generator = torch.Generator().manual_seed(seed)
        tensors = tuple(torch.randn(shape, generator=generator).to(call.tensors.q.dtype) for shape in self.score_shapes)
        return replace(call, asked=Asked(self.score, tensors, self.mask, self.mask_tensors))


def grouped(**more: object) -> Case:
    options = Options(return_lse=True, **more)  # type: ignore[arg-type]  # by name
    return Case("mods", 1, 2, 1, 20, 36, options=options)


def whole_tiles() -> Case:
    return Case("mods", 1, 2, 1, 32, 48, options=Options(return_lse=True))


LENGTHS = (5, 0, 21, 1)
PACKED = Case("mods", heads_q=2, heads_kv=1, lengths_q=LENGTHS, tail=3, options=Options(causal=True, return_lse=True))
DOCUMENTS = torch.tensor([0] * 9 + [1] * 3 + [2] * 20 + [3] * 4)
MANY = Case(
    "many", 2, 2, 1, 20, 33, bias="1hqk", mask="b1qk", sink="h", alibi="h", ranges=((2, 33), (0, 30)),
    options=Options(causal=True, window_left=20, softcap=3.0, dropout=0.2, layout="bshd", return_lse=True),
)  # fmt: skip

MODS = [
    Mod("distance", lambda s, b, h, q, kv: s - 0.25 * abs(q - kv), case=grouped()),
    Mod("slopes of heads", lambda s, b, h, q, kv, t: s + t[h] * (kv - q), ((2,),), case=grouped(causal=True)),
    Mod("a table of distances", lambda s, b, h, q, kv, t: s + t[h, q - kv + 36], ((2, 60),), case=grouped()),
    # Of so few a tile adds to one after the other; hidden pairs would read others.
    Mod(
        "a table of few distances",
        lambda s, b, h, q, kv, t: torch.where(q >= kv, s + t[(q - kv).clamp(-3, 3), h], -torch.inf),
        ((7, 2),),
        case=grouped(causal=True),
    ),
    Mod("a table of two", lambda s, b, h, q, kv, t: s + t[(q - kv) % 3, h, (q + kv) % 2], ((3, 2, 2),), case=grouped()),
    Mod("a full bias", lambda s, b, h, q, kv, t: s + t[b, h, q, kv], ((1, 2, 20, 36),), case=grouped()),
    Mod("a capped score", lambda s, b, h, q, kv: 2.0 * torch.tanh(s / 2.0), case=grouped(softcap=5.0)),
    Mod("rows and columns", lambda s, b, h, q, kv, t, u: s * t[b, q] + u[kv], ((1, 20), (36,)), case=grouped()),
    Mod("a number for all", lambda s, b, h, q, kv, t: s * t, ((),), case=grouped()),
    Mod("hidden by the score", lambda s, b, h, q, kv: torch.where(q >= kv, s, -torch.inf), case=grouped()),
    # Nothing is hidden from whole tiles, and nobody asks for the score.
    Mod("nothing of the score", lambda s, b, h, q, kv, t: t[h, kv] * 2, ((2, 48),), case=whole_tiles()),
    Mod(
        "flat in its tensor", lambda s, b, h, q, kv, t: s + t[h] * 0.5 + torch.floor(t[h]), ((2,),), case=whole_tiles()
    ),
    Mod("a window", mask=lambda b, h, q, kv: (q - kv).abs() < 5, case=grouped()),
    Mod(
        "documents", mask=lambda b, h, q, kv, d: (d[q] == d[kv]) & (q >= kv), mask_tensors=(DOCUMENTS,), case=grouped()
    ),
    Mod("empty rows", mask=lambda b, h, q, kv: (q > 9) & (kv % 3 == 0) & (h != 1), case=grouped(dropout=0.2)),
    Mod(
        "both, beside all else",
        lambda s, b, h, q, kv, t: s + torch.sin(t[h] * s) / (1 + q),
        ((2,),),
        lambda b, h, q, kv: (kv % 4 != 1) | (h == b),
        case=MANY,
    ),
    Mod("packed", lambda s, b, h, q, kv, t: s * 0.5 + t[b, h] * kv / (q + 1), ((4, 2),), case=PACKED),
    Mod("packed, masked", mask=lambda b, h, q, kv: (kv + b) % 3 != 0, case=replace(PACKED, bias="hqk", sink="bh")),
]
NAMES = [mod.name for mod in MODS]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 20 queries and 36 keys be several tiles, masked and bare ones among them."""
    if INTERPRETED:
        from tilewise.backends import triton_portable
        from tilewise.machine.tiles import Tiles

        monkeypatch.setattr(triton_portable, "default_tiles", lambda *_: Tiles(16, 16))


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what torch allocates without a value with NaN, so that a row left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mod", MODS, ids=NAMES)
def test_every_function_is_within_budget_forward_and_backward(mod: Mod, backend: str) -> None:
    call = mod.call("float32")
    report = check(run(call, backend), call)
    assert {"out", "lse", "dq", "dk", "dv"} <= set(report)
    assert sum(name.startswith("dtensors") for name in report) == len(mod.score_shapes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_of_functions_may_be_of_any_type_and_strides(backend: str) -> None:
    shown = torch.arange(36) % 5 != 2
    bias = torch.randn(36, 2, dtype=torch.bfloat16).t()
    call = grouped().build("cpu", "float32")
    asked = Asked(lambda s, b, h, q, kv, t: s + t[h, kv], (bias,), lambda b, h, q, kv, t: t[kv], (shown,))
    check(run(replace(call, asked=asked), backend), replace(call, asked=asked))


# ---- lists of tiles --------------------------------------------------------------------------------------------------


def listed(
    mask: Callable[..., torch.Tensor],
    tensors: tuple[torch.Tensor, ...],
    case: Case,
    right: int | None = None,
    offset: int = 0,
) -> Asked:
    """Ask for lists of tiles of 32 x 32, in which the small tiles of this file go twice."""
    blocks = Blocks.of(
        mask, tensors, batch=case.batch, heads=case.heads_q, len_q=case.len_q, len_kv=case.len_kv, block_q=32,
        block_kv=32, right=right, offset=offset,
    )  # fmt: skip
    return Asked(lambda s, b, h, q, kv, t: s + t[h] * (q - kv), (torch.ones(case.heads_q) / 8,), None, (), blocks)


LONG = Case("lists", 2, 2, 1, 40, 72, options=Options(return_lse=True))
LISTS: dict[str, tuple[Case, Asked]] = {
    "causal": (LONG, listed(lambda b, h, q, kv: q >= kv, (), LONG)),
    "of each head": (LONG, listed(lambda b, h, q, kv: (q - kv).abs() < 25 * h, (), LONG)),
    "of each sequence": (LONG, listed(lambda b, h, q, kv, t: kv < t[b], (torch.tensor([40, 72]),), LONG)),
    "with a band in them": (
        replace(LONG, options=LONG.options._replace(causal=True)),
        listed(lambda b, h, q, kv: kv % 64 < 50, (), LONG, right=0, offset=32),
    ),
    "with a band beside them": (
        replace(LONG, options=LONG.options._replace(window_left=40), ranges=((0, 60), (5, 72)), mask="b1qk"),
        listed(lambda b, h, q, kv: kv < 64, (), LONG),
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_tiles_change_nothing_but_the_tiles_that_are_visited(name: str, backend: str) -> None:
    case, asked = LISTS[name]
    call = replace(case.build("cpu", "float32"), asked=asked)
    assert {"out", "lse", "dq", "dk", "dv", "dtensors[0]"} <= set(check(run(call, backend), call))
