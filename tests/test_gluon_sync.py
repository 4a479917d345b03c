"""What stands below the Hopper kernels: Triton's names in one place, and tricks that compile to what they say."""

from __future__ import annotations

import functools
import os
import re
from typing import cast

import pytest

pytest.importorskip("triton")

from tilewise.kernels.gluon import compat

if compat.refusal() is not None:
    pytest.skip(str(compat.refusal()), allow_module_level=True)

import gluon_kernels
from tilewise.backends.compile import Compiled, Constant, Options, compile_for, compile_settled, resources
from tilewise.kernels.gluon import sync
from tilewise.kernels.gluon.compat import gl


def map_of(dtype: object, shape: list[int]) -> str:
    """Spell a tensor map's type as Triton's signatures do."""
    return f"tensordesc<{dtype}{shape},{gl.NVMMASharedLayout.get_default_for(shape, dtype)!r}>"


NARROW, WIDE = map_of(gl.bfloat16, [64, 64]), map_of(gl.float32, [64, 64])
TYPES = {
    "ring": {"a_map": NARROW, "b_map": NARROW, "out_map": NARROW, "sum_map": WIDE, "row_ptr": "*fp32"},
    "chain": {"a_map": NARROW, "b_map": NARROW, "out_map": NARROW, "counter_ptr": "*i32"},
}
CONSTANTS: dict[str, Constant] = {"FAULT": "", "BAR_OFF": 0}


@functools.cache
def compiled(name: str, settled: bool = True) -> Compiled:
    make = compile_settled if settled else compile_for
    return make(getattr(gluon_kernels, name), TYPES[name], CONSTANTS, 90, Options(num_warps=4))


def ptx_of(name: str, settled: bool = True) -> str:
    return cast("str", compiled(name, settled).asm["ptx"])


@pytest.mark.compile
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter leaves nothing to compile")
class TestCompiledForHopper:
    def test_assembly_finds_the_barriers_where_the_compiler_put_them(self) -> None:
        start = sync.bar_offset(ptx_of("ring"))
        constant = rf"mov\.b32 \t%r\d+, {start + 8 * gluon_kernels.WORDS_FULL.value};"  # of a slot that does not vary
        assert start > 0
        assert re.search(constant, ptx_of("ring"))
        assert not re.search(constant, ptx_of("ring", settled=False))
        assert sync.bar_offset(ptx_of("ring", settled=False)) == start

    @pytest.mark.parametrize("name", TYPES)
    def test_nothing_is_spilled(self, name: str) -> None:
        assert resources(compiled(name)).spilled == 0

    def test_no_barrier_of_the_partition_stands_between_a_wait_a_product_and_its_release(self) -> None:
        step = r"mbarrier\.try_wait\.parity((?!try_wait).)*?wgmma\.mma_async.*?@first mbarrier\.arrive"
        found = re.search(step, ptx_of("ring"), flags=re.DOTALL)
        assert found is not None
        assert "bar.sync" not in found[0]
        assert "bar.sync" in ptx_of("ring")  # as it would be spelt

    @pytest.mark.parametrize(
        "instruction",
        [
            r"bar\.sync 8, 256;",
            r"bar\.sync 9, 256;",
            r"bar\.arrive 9, 256;",
            r"cvt\.rn\.bf16x2\.f32",
            r"vote\.sync\.any\.pred",
            r"@!asked bra\.uni ON;",
            r"@first atom\.global\.add\.u32",
            r"@first st\.shared\.v2\.u32",
            r"@first mbarrier\.arrive\.shared::cta\.b64",
        ],
    )
    def test_a_trick_is_the_instruction_that_it_names(self, instruction: str) -> None:
        assert re.search(instruction, ptx_of("chain"))

    def test_tma_adds_in_every_triton(self) -> None:
        assert "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add" in ptx_of("ring")


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.8.0+fb"])
def test_a_triton_that_was_checked_is_accepted(version: str) -> None:
    assert compat._refusal_of(version) is None


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_another_triton_is_refused_with_its_version(version: str) -> None:
    assert version in str(compat._refusal_of(version))


@pytest.mark.parametrize(
    ("ptx", "text"),
    [
        ("mov.b32 %r1, global_smem;", "initialises no barrier"),
        ("ld.param.b32 %r1, [p]; mbarrier.init.shared::cta.b64 [%r1], 1;", "cannot be followed"),
        (
            "mbarrier.init.shared::cta.b64 [global_smem+8], 1; mbarrier.init.shared::cta.b64 [global_smem+24], 1;",
            r"barriers lie at \[8, 24\]; allocate one array",
        ),
    ],
)
def test_a_place_of_barriers_that_cannot_be_read_is_refused(ptx: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        sync.bar_offset(ptx)


def test_barriers_are_found_through_registers_set_from_one_another() -> None:
    ptx = """
    mov.b32 \t%r1, global_smem;
    add.s32 \t%r2, %r1, 4096;
    add.s32 \t%r3, %r2, 8;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 4;
    mbarrier.init.shared::cta.b64 [global_smem+4112], 4;
    """
    assert sync.bar_offset(ptx) == 4096
