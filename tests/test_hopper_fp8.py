"""The FP8 forward pass on Hopper: right in the emulator, whatever its copies do meanwhile; and what it compiles to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tilewise.kernels.gluon import compat

if compat.refusal() is not None:
    pytest.skip(str(compat.refusal()), allow_module_level=True)


from gluon_emulator import emulate, tensor_map
from hopper_compile import compile_named, spilled_bytes
from recorder import Recorder
from tilewise.backends import compile as compiling
from tilewise.backends import hopper_fp8, launch
from tilewise.backends.launch import Mapped
from tilewise.fp8 import Quantized, quantize
from tilewise.kernels.gluon import sync
from tilewise.kernels.gluon.forward_fp8 import attention_forward_fp8
from tilewise.problem.fp8 import BLOCK
from tilewise.problem.mask import Align, Band
from tilewise.problem.problem import Options
from tilewise.testing import Case

BOTH = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


@dataclass(frozen=True)
class Call:
    """One call: lengths are those of packed sequences, or of a batch's entries, which are then alike."""

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    dim: int
    causal: bool = False
    align: Align = "bottom_right"
    scale: float | None = None
    lengths_q: tuple[int, ...] = ()
    lengths_kv: tuple[int, ...] = ()
    tail: int = 0  # rows behind the last packed sequence
    steep: float = 1.0
    sizes_of_v: tuple[float, ...] = (1.0,)  # of its blocks, in turn
    dtype: torch.dtype = torch.bfloat16

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw q, k and v; a packed call has rows first."""
        generator = torch.Generator().manual_seed(self.len_kv + self.dim)
        packed = bool(self.lengths_q)
        total_q = sum(self.lengths_q) + self.tail if packed else self.len_q
        total_kv = sum(self.lengths_kv) + self.tail if packed else self.len_kv
        lead = () if packed else (self.batch,)
        q, k, v = (
            torch.randn((*lead, heads, rows, self.dim), generator=generator)
            for heads, rows in ((self.heads_q, total_q), (self.heads_kv, total_kv), (self.heads_kv, total_kv))
        )
        rows = torch.arange(total_kv) // BLOCK % len(self.sizes_of_v)
        v *= torch.tensor(self.sizes_of_v)[rows][:, None]
        q *= self.steep
        return (q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)) if packed else (q, k, v)

    def quantized(self) -> Quantized:
        """Quantise what is drawn."""
        cu_q, cu_k = (
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) if lengths else None
            for lengths in (self.lengths_q, self.lengths_kv)
        )
        made = quantize(*self.tensors(), rotate=False, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        return replace(made, dtype=self.dtype)


class Results(NamedTuple):
    """Out and lse, rows of all heads: (heads, rows, dim) and (heads, rows), a batch's entries one after the other."""

    out: torch.Tensor
    lse: torch.Tensor


CONSTANTS = {param.name for param in compiling.compiled_kernel(attention_forward_fp8).params if param.is_constexpr}


def run(
    call: Call,
    chosen: hopper_fp8.Settings | None = None,
    *,
    late: bool = False,
    seed: int = 0,
    processors: int = 3,
    given: Quantized | None = None,
) -> Results:
    """Emulate the forward pass of a call; results are NaN until they are written."""
    given = given or call.quantized()
    asked = hopper_fp8.asked_of(given, Band.of(call.causal, None, call.align), call.scale, with_lse=True, chosen=chosen)
    out, lse = torch.full(asked.q_shape, torch.nan, dtype=call.dtype), torch.full(asked.lse_shape, torch.nan)
    counter = torch.zeros(1, dtype=torch.int32) if asked.settings.schedule == "dynamic" else None
    tensors = hopper_fp8.tensors_of(given, out, lse, counter)
    programs, named = hopper_fp8.arguments(asked, tensors, processors)
    arguments = {
        name: tensor_map(x.tensor, x.map.shape, x.map.strides, box=x.map.box) if isinstance(x, Mapped) else x
        for name, x in named.items()
    }
    constants = {name: arguments.pop(name) for name in CONSTANTS}
    emulate(attention_forward_fp8, (programs,), arguments, constants, seed=seed, late=late)
    assert counter is None or counter.item() == 0, "the last ticket must leave the counter as it was"
    if call.lengths_q:
        return Results(out.transpose(0, 1), lse)
    return Results(out.flatten(0, 1), lse.flatten(0, 1))


# ---- what is right --------------------------------------------------------------------------------------------------


class Right(NamedTuple):
    """Results in float64 from the quantised numbers, and by what rounding p may change out."""

    out: torch.Tensor
    lse: torch.Tensor
    most: torch.Tensor  # the error of each number of out
    square: torch.Tensor  # and the mean square of it, roundings being independent


def attend(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, v_scale: torch.Tensor) -> Right:
    """Compute attention of one entry or sequence: q, k, v (heads, rows, dim), with v_scale (heads, rows)."""
    group = call.heads_q // call.heads_kv
    k, v, v_scale = (x.repeat_interleave(group, 0) for x in (k, v, v_scale))
    score = q @ k.mT * (call.dim**-0.5 if call.scale is None else call.scale)
    if call.causal:
        offset = k.shape[1] - q.shape[1] if call.align == "bottom_right" else 0
        score = score.masked_fill(torch.ones(score.shape[1:], dtype=torch.bool).triu(offset + 1), -torch.inf)
    lse = torch.logsumexp(score, -1)
    p = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    # A normal e4m3 is off by 2**-4 of itself at most, a subnormal by 2**-10. The largest p of a row, in the units of
    # v's scales, is at least 2**4: lazily, four powers of two below the top.
    largest = (p * v_scale[:, None]).amax(-1, keepdim=True) if p.shape[-1] else p.new_zeros((*p.shape[:2], 1))
    normal, subnormal, v8 = 2.0**-4 * p, 2.0**-14 * largest * (p > 0), v / v_scale[..., None]
    most = normal @ v.abs() + subnormal @ v8.abs()
    return Right(p @ v, lse, most, (normal**2 @ v**2 + subnormal**2 @ v8**2) / 3)


def right_answer(call: Call, given: Quantized) -> Right:
    """Compute a call's attention from its quantised numbers, in float64."""
    q, k, v = (x.double() for x in given.dequantize())
    v_scale = given.v_scale.double().repeat_interleave(BLOCK, -1)
    if not call.lengths_q:
        entries = zip(q, k, v, v_scale[..., : call.len_kv], strict=True)
        return Right(*map(torch.cat, zip(*(attend(call, *each) for each in entries), strict=True)))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    parts = []
    ends = zip(*([0, *accumulate(lengths)] for lengths in (call.lengths_q, call.lengths_kv)), strict=True)
    for s, ((q0, k0), (q1, k1)) in enumerate(pairwise(ends)):
        first = (k0 // BLOCK + s) * BLOCK
        parts.append(attend(call, q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], v_scale[:, first : first + k1 - k0]))
    return Right(*(torch.cat(each, 1) for each in zip(*parts, strict=True)))


def check(got: Results, call: Call, given: Quantized | None = None) -> None:
    """Hold results to what rounding p to e4m3 may do, number by number and on the mean, and out's own rounding."""
    right = right_answer(call, given or call.quantized())
    rows = right.out.shape[1]
    out, lse = got.out.double(), got.lse.double()
    assert not torch.isnan(out).any()
    if call.tail:
        assert (out[:, rows:] == 0).all()
        assert (lse[:, rows:] == -torch.inf).all()
    last = right.out.abs() * (2.0**-8 if call.dtype == torch.bfloat16 else 2.0**-11)
    wrong = (out[:, :rows] - right.out).abs()
    assert (wrong <= right.most + last + 1e-5 * right.out.abs().amax()).all()
    assert (wrong**2).mean() <= (right.square + last**2 / 3).mean() * 1.02
    empty = right.lse == -torch.inf
    assert ((lse[:, :rows] == -torch.inf) == empty).all()
    assert ((lse[:, :rows] - right.lse)[~empty].abs() <= 1e-5 * right.lse[~empty].abs().clamp(min=1.0)).all()


CALLS = {
    "d=64": Call(1, 2, 1, 200, 300, 64),
    "d=64 causal": Call(2, 1, 1, 200, 200, 64, causal=True),
    "d=128": Call(1, 2, 2, 130, 260, 128),
    "d=128 causal, grouped heads": Call(1, 2, 1, 150, 280, 128, causal=True),
    "d=256": Call(1, 1, 1, 130, 260, 256),
    "d=256 causal, float16": Call(1, 1, 1, 140, 140, 256, causal=True, dtype=torch.float16),
    "one row, one key": Call(1, 1, 1, 1, 1, 64),
    "more queries than keys": Call(1, 1, 1, 300, 130, 64, causal=True),
    "top left": Call(1, 1, 1, 140, 300, 64, causal=True, align="top_left"),
    "negative scale": Call(1, 1, 1, 100, 200, 64, scale=-0.3),
    "steep": Call(1, 1, 1, 70, 500, 64, steep=6.0),
    "blocks of v of all sizes": Call(1, 1, 1, 70, 700, 64, sizes_of_v=(1.0, 100.0, 1e-3, 0.0, 3.0)),
    "packed": Call(3, 1, 1, 0, 0, 64, causal=True, lengths_q=(140, 0, 70, 1), lengths_kv=(140, 9, 57, 130), tail=70),
    "packed, d=128": Call(2, 2, 1, 0, 0, 128, lengths_q=(70, 30, 60), lengths_kv=(200, 0, 129)),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", CALLS)
def test_out_is_off_by_the_rounding_of_p_alone(name: str, late: bool) -> None:
    call = CALLS[name]
    check(run(call, late=late, seed=len(name)), call)


# ---- settings -------------------------------------------------------------------------------------------------------

PLAIN = hopper_fp8.settings(64, causal=False, varlen=False)
OTHERS = {
    "a maximum that is never lazy": PLAIN._replace(lazy=False),
    "q in registers": PLAIN._replace(q_registers=True),
    "exponentials all by their unit": PLAIN._replace(soft_exp=0),
    "two consumers, three stages": PLAIN._replace(groups=2, stages=3, consumer_registers=240, producer_registers=24),
    "one tile of q, no turns": PLAIN._replace(q_buffers=1, ping_pong=False),
    "tiles by a counter": PLAIN._replace(schedule="dynamic"),
    "a program for each tile": PLAIN._replace(schedule="each"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_are_right_too(name: str) -> None:
    for call in (Call(1, 1, 1, 200, 260, 64, causal=True), Call(1, 1, 1, 64, 400, 64, steep=6.0)):
        check(run(call, OTHERS[name], late=True, seed=len(name)), call)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_events_gives_the_same_bits(seed: int) -> None:
    call = Call(1, 2, 1, 200, 260, 64, causal=True)
    given = call.quantized()
    first, other = (run(call, given=given, seed=s, late=s % 2 == 1, processors=1 + s % 4) for s in (9, seed))
    assert torch.equal(first.out, other.out)
    assert torch.equal(first.lse, other.lse)


def test_what_a_packed_sequence_holds_is_nothing_to_the_next() -> None:
    call = Call(3, 1, 1, 0, 0, 64, lengths_q=(20, 90, 30), lengths_kv=(70, 40, 90), tail=20)
    given = call.quantized()
    right = run(call, given=given)
    q8, k8, v8 = (x.clone().view(torch.uint8) for x in (given.q8, given.k8, given.v8))
    q8[20:110], k8[70:110] = 0x7F, 0x7F  # NaN
    v8[..., BLOCK : 2 * BLOCK] = 0x7F
    q8, k8, v8 = (x.view(torch.float8_e4m3fn) for x in (q8, k8, v8))
    got = run(call, given=replace(given, q8=q8, k8=k8, v8=v8))
    assert got.out[:, 20:110].isnan().all()
    others = torch.tensor([*range(20), *range(110, 160)])
    assert torch.equal(got.out[:, others], right.out[:, others])


# ---- exponentials by multiplications --------------------------------------------------------------------------------

WORD = np.int64(2**32)
OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "max.f32": np.fmax, "add.rn.f32": np.add, "sub.rn.f32": np.subtract,
    "fma.rn.f32": lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32),
    "shl.b32": lambda x, n: (x.view(np.uint32).astype(np.int64) * 2**n % WORD).astype(np.uint32),
    "add.s32": lambda x, y: ((x.view(np.uint32).astype(np.int64) + y.view(np.uint32)) % WORD).astype(np.uint32),
    "mov.b32": lambda x: x,
}  # fmt: skip


def constant(text: str) -> np.float32 | int:
    """Read a number of PTX: 0f and the bits of a float32, or an integer."""
    return np.frombuffer(bytes.fromhex(text[2:]), ">f4")[0] if text.startswith("0f") else int(text)


def test_an_exponential_by_multiplications_is_off_by_less_than_its_rounding() -> None:
    y = np.concatenate([np.linspace(-130, 9, 400_001, dtype=np.float32), np.array([-np.inf, -1e30, 0, 8], np.float32)])
    registers = {"$1": y}
    done = set()
    for operation, operands in re.findall(r"([\w.]+) ([^;]+);", sync._exp2_asm.fn(1)):
        if operation != ".reg":
            to, *given = operands.split(", ")
            values = [registers[x] if x in registers else constant(x) for x in given]
            registers[to] = OPERATIONS[operation](*values)
            done.add(operation)
    got, right, normal = registers["$0"].view(np.float32), np.exp2(y.astype(np.float64)), y > -125
    assert done == set(OPERATIONS)
    assert np.abs(got[normal] / right[normal] - 1).max() < 1e-4
    assert ((got >= 0) & (got < 2.0**-124))[~normal].all()


# ---- launching ------------------------------------------------------------------------------------------------------


@pytest.mark.compile
def test_a_call_launches_once_compiled_and_gives_lse_where_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = Recorder()
    monkeypatch.setattr(launch, "_default", launch.Launcher(driver))
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    given = Call(1, 2, 1, 100, 90, 64, causal=True).quantized()
    for _ in range(2):
        out, lse = hopper_fp8.forward(given, causal=True, return_lse=True)
        _, _, parameters = driver.launches[-1]
        maps = [int.from_bytes(raw[:8], "little") for raw in parameters if len(raw) == 128]
        assert maps == [given.q8.data_ptr(), given.k8.data_ptr(), given.v8.data_ptr(), out.data_ptr()]
        assert lse is not None
        assert (out.shape, out.dtype, lse.shape) == ((1, 2, 100, 64), torch.bfloat16, (1, 2, 100))
    assert len(driver.loaded) == 1


def test_without_keys_out_is_zero() -> None:
    q, k = torch.randn(1, 1, 5, 64), torch.randn(1, 1, 0, 64)
    out, lse = hopper_fp8.forward(quantize(q, k, k), return_lse=True)
    assert lse is not None
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


# ---- what is refused ------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Case, str]] = {
    "head dims": (Case("", dim_qk=96, dim_v=96), "has head dims (64, 128, 256), one for q, k and v; got 96 and 96"),
    "a window": (Case("", dim_qk=64, dim_v=64, options=Options(window_left=5)), "masks by causal alone"),
    "ranges": (Case("", dim_qk=64, dim_v=64, ranges=((0, 9), (3, 7))), "masks by causal alone"),
    "a softcap": (Case("", dim_qk=64, dim_v=64, options=Options(softcap=2.0)), "no bias, ALiBi, softcap or sink"),
    "a sink": (Case("", dim_qk=64, dim_v=64, sink="h"), "no bias, ALiBi, softcap or sink"),
    "dropout": (Case("", dim_qk=64, dim_v=64, options=Options(dropout=0.5)), "has no dropout"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_with_its_reason(name: str) -> None:
    case, reason = REFUSED[name]
    assert reason in str(hopper_fp8.why_not_asked(case.build("cpu", "bfloat16").problem))


def test_where_it_cannot_run_it_says_so() -> None:
    problem = Case("", dim_qk=64, dim_v=64).build("cpu", "float16").problem
    assert hopper_fp8.why_not_asked(problem) is None
    assert hopper_fp8.why_not(problem) == "runs on NVIDIA GPUs of compute capability 9.0; got cpu"


# ---- what it compiles to --------------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """A kernel to compile, and what it may take: bytes that a thread spills, shared memory of a block."""

    call: Call
    spilled: int
    shared: int


# Recorded with Triton 3.6.0 and its ptxas 12.8.
VARIANTS = {
    "d=64": Variant(Call(1, 2, 2, 256, 256, 64), 0, 115256),
    "d=128 causal": Variant(Call(1, 2, 2, 256, 256, 128, causal=True), 0, 197156),
}
SLOW = {
    "d=64 causal": Variant(Call(1, 2, 2, 256, 256, 64, causal=True), 96, 115272),
    "d=128": Variant(Call(1, 2, 2, 256, 256, 128), 0, 197140),
    "d=256": Variant(Call(1, 2, 2, 256, 256, 256), 48, 229816),
    "d=256 causal": Variant(Call(1, 2, 2, 256, 256, 256, causal=True), 152, 229832),
    "d=128 packed": Variant(Call(2, 2, 2, 0, 0, 128, causal=True, lengths_q=(9, 9), lengths_kv=(9, 9)), 0, 197168),
}


def compiled_call(call: Call) -> compiling.Compiled:
    given = call.quantized()
    asked = hopper_fp8.asked_of(given, Band.of(call.causal, None, call.align), call.scale, with_lse=True)
    out, lse = torch.empty(asked.q_shape, dtype=call.dtype), torch.empty(asked.lse_shape)
    counter = torch.zeros(1, dtype=torch.int32) if asked.settings.schedule == "dynamic" else None
    _, named = hopper_fp8.arguments(asked, hopper_fp8.tensors_of(given, out, lse, counter), 132)
    return compile_named(attention_forward_fp8, named)


def check_variant(variant: Variant, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    compiled = compiled_call(variant.call)
    ptx = str(compiled.asm["ptx"])
    found = Variant(variant.call, spilled_bytes(compiled, tmp_path), compiling.resources(compiled).shared)
    record_property("resources", f"spilled {found.spilled}, shared {found.shared}")
    assert found.shared == variant.shared
    assert found.spilled <= variant.spilled
    assert "prmt" not in ptx, "p is moved about between the products"
    products = [line for line in ptx.splitlines() if "wgmma.mma_async" in line]
    assert products
    assert all(".f32.e4m3.e4m3" in line for line in products)


@pytest.mark.compile
@pytest.mark.parametrize("name", VARIANTS)
def test_a_kernel_takes_what_was_recorded_and_its_products_overlap(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    check_variant(VARIANTS[name], tmp_path, record_property)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("name", SLOW)
def test_other_kernels_take_what_was_recorded_too(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    check_variant(SLOW[name], tmp_path, record_property)
