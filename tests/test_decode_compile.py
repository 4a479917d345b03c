"""The decoding kernels, compiled for GPUs that need not be there, and the rule by which keys are split."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from tilewise import autograd
from tilewise.backends import compile as compiling
from tilewise.backends import triton_decode
from tilewise.backends.extents import LaunchOptions
from tilewise.backends.launch import POINTERS, SCALARS
from tilewise.bench.decoding import Case
from tilewise.kernels.share import Jitted
from tilewise.machine.device import Capability, target_name
from tilewise.machine.tiles import Splits, decode_splits, shared_memory_limit

TARGETS: tuple[Capability, ...] = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1), "gfx942")
CASES = {
    "whole": Case("whole", heads_q=8, heads_kv=2, dim_qk=64, dim_v=64, capacity=8192),
    "pages": Case("pages", heads_q=8, heads_kv=2, dim_qk=64, dim_v=64, capacity=8192, page_size=16, stored="int8"),
    "append": Case("append", heads_q=8, heads_kv=2, dim_qk=64, dim_v=64, new=1, rotary=64, capacity=8192, sink="h"),
}


class Launch(NamedTuple):
    """What the backend asked to be launched."""

    kernel: Jitted
    programs: int
    named: triton_decode.Arguments
    options: LaunchOptions


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    triton_decode._prepared.cache_clear()
    yield
    triton_decode._prepared.cache_clear()


def launches(case: Case, dtype: str, capability: Capability, monkeypatch: pytest.MonkeyPatch) -> dict[str, Launch]:
    """Run the backend's host side as on a GPU of this capability, and catch what it launches."""
    caught: dict[str, Launch] = {}

    def catch(kernel: Jitted, programs: int, named: triton_decode.Arguments, options: object, _: object) -> object:
        found = Launch(kernel, programs, named, cast("LaunchOptions", options))
        caught[compiling.compiled_kernel(kernel).__name__] = found
        return lambda _: None

    monkeypatch.setattr(triton_decode, "_prepare", catch)
    monkeypatch.setattr(triton_decode, "_capability", lambda _: capability)
    monkeypatch.setattr(triton_decode, "_multiprocessors", lambda _: 132)
    triton_decode._prepared.cache_clear()
    drawn = case.build("cpu", dtype)
    triton_decode.decode(autograd.problem_for(drawn.tensors, case.options), drawn.tensors)
    return caught


def compiled(launch: Launch, capability: Capability) -> compiling.Compiled:
    """Compile what would be launched."""
    types: dict[str, str | None] = {}
    constants: dict[str, compiling.Constant] = {}
    for parameter in compiling.compiled_kernel(launch.kernel).params:
        argument = launch.named[parameter.name]
        if parameter.is_constexpr:
            constants[parameter.name] = cast("compiling.Constant", argument)
        elif argument is None:
            types[parameter.name] = None
        elif isinstance(argument, torch.Tensor):
            types[parameter.name] = POINTERS[argument.dtype]
        elif not parameter.annotation_type:
            types[parameter.name] = SCALARS[type(argument)]
    target = capability[0] * 10 + capability[1] if isinstance(capability, tuple) else str(capability)
    return compiling.compile_for(launch.kernel, types, constants, target, compiling.Options(**launch.options))


def text_of(found: compiling.Compiled) -> str:
    return cast("str", found.asm["ptx"] if "ptx" in found.asm else found.asm["amdgcn"])


compiles = [
    pytest.mark.compile,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter leaves nothing to compile"),
]


def with_marks(test: Callable[..., None]) -> Callable[..., None]:
    for mark in compiles:
        test = mark(test)
    return test


@with_marks
@pytest.mark.parametrize("capability", TARGETS, ids=target_name)
def test_decoding_compiles_for_each_target_within_its_shared_memory(
    capability: Capability, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    case = CASES["append"] if capability == (9, 0) else CASES["whole"]
    for name, launch in launches(case, "float16", capability, monkeypatch).items():
        found = compiled(launch, capability)
        taken = compiling.resources(found)
        record_property(name, taken._asdict())
        assert taken.shared <= shared_memory_limit(capability)
        assert taken.spilled == 0


@with_marks
@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS, ids=target_name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_the_full_grid_of_decoding_compiles(
    name: str, dtype: str, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    if capability == (7, 5) and dtype == "bfloat16":
        pytest.skip("sm_75 has no bfloat16: refused by the backend")
    for launch in launches(CASES[name], dtype, capability, monkeypatch).values():
        assert compiling.resources(compiled(launch, capability)).shared <= shared_memory_limit(capability)


@with_marks
@pytest.mark.parametrize("name", ["whole", "pages"])
def test_keys_are_loaded_16_bytes_at_a_time_and_two_blocks_ahead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launches(CASES[name], "float16", (9, 0), monkeypatch)["attention_decode"]
    found = compiled(launch, (9, 0))
    assert "cp.async.cg.shared.global" in text_of(found)
    block = launch.named["BLOCK_KV"]
    assert isinstance(block, int)
    two = 2 * block * (64 + 64) * (1 if name == "pages" else 2)
    assert two <= compiling.resources(found).shared < 2 * two


@with_marks
def test_splits_are_joined_without_passing_anything_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier between the splits would make each wait for the one before."""
    ptx = text_of(compiled(launches(CASES["whole"], "float16", (9, 0), monkeypatch)["attention_decode"], (9, 0)))
    joined = ptx[ptx.index("ld.global.cg") : ptx.rindex("ld.global.cg")]
    assert joined.count("ld.global.cg") > 8
    assert "bar.sync" not in joined
    assert "shfl" not in joined


# ---- the rule -------------------------------------------------------------------------------------------------------


@given(
    tiles=st.integers(1, 5000), keys=st.integers(1, 10**6), sms=st.integers(1, 200),
    block_kv=st.sampled_from([16, 64, 128]), chosen=st.integers(0, 300), fixed=st.booleans(),
)  # fmt: skip
def test_every_key_is_in_a_split_and_none_is_longer_than_its_share(
    tiles: int, keys: int, sms: int, block_kv: int, chosen: int, fixed: bool
) -> None:
    how = decode_splits(tiles, keys, sms, block_kv, chosen, fixed)
    blocks = -(-keys // block_kv)
    for held in {1, blocks // 2, blocks}:
        share = how.fixed_blocks or max(-(-held // how.count), how.least_blocks)
        assert share * how.count >= held
        assert share <= max(-(-blocks // how.count), how.least_blocks, how.fixed_blocks)
    assert 1 <= how.count <= max(blocks, 1)


@pytest.mark.parametrize(
    ("tiles", "keys", "expected"),
    [
        (8, 8192, Splits(17, 3)),  # one sequence: a program for each of 132 multiprocessors
        (8, 131072, Splits(32, 3)),
        (64, 8192, Splits(3, 21)),  # enough
        (64, 32768, Splits(8, 21)),
        (512, 4096, Splits(1, 64)),  # nothing is split for want of programs, and no short sequence at all
        (512, 131072, Splits(32, 64)),
        (8, 128, Splits(1, 3)),  # as little as this is not split
        (8, 1024, Splits(6, 3)),
        (100_000, 16, Splits(1, 64)),
    ],
)
def test_splits_follow_the_rule(tiles: int, keys: int, expected: Splits) -> None:
    assert decode_splits(tiles, keys, 132, 64) == expected


def test_a_batch_invariant_split_depends_on_nothing_but_the_block() -> None:
    found = {decode_splits(tiles, 8192, sms, 64, 0, True) for tiles in (1, 8, 999) for sms in (1, 132)}
    assert found == {Splits(16, fixed_blocks=8)}


def test_rows_fill_a_tile_as_far_as_it_fits_and_never_where_bits_must_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "_capability", lambda _: (9, 0))

    def rows(**changes: int | bool) -> int:
        case = Case("rows", heads_q=8, heads_kv=2, dim_qk=128, dim_v=128, **changes)  # type: ignore[arg-type]
        drawn = case.build("cpu", "float16")
        return triton_decode.tiles(autograd.problem_for(drawn.tensors, case.options)).block_q

    assert [rows(len_q=n) for n in (1, 4, 5, 16, 500)] == [16, 16, 32, 64, 64]
    assert [rows(len_q=n, batch_invariant=True) for n in (1, 5, 500)] == [16, 16, 16]
