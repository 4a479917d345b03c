"""The Triton kernels, compiled for GPUs that need not be there: what they take, what they are made of, how many.

Tiles, shared memory, registers and spills of each go into the report that pytest's --junitxml writes. What cannot be
known without a GPU is how fast any of it is.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature

from tilewise.backends import compile as compiling
from tilewise.backends import triton_backward, triton_launch, triton_portable
from tilewise.backends.launch import POINTERS, SCALARS
from tilewise.kernels.share import Jitted
from tilewise.machine.device import Capability, target_name
from tilewise.machine.tiles import Tiles, shared_memory_limit
from tilewise.problem.problem import Needs, Options
from tilewise.testing import Call, Case

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter leaves nothing to compile"),
]

TARGETS: tuple[Capability, ...] = (
    (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1), "gfx942",
)  # fmt: skip
NAMES = [target_name(target) for target in TARGETS]
KERNELS = ("attention_forward", "prepare_rows", "key_gradients", "query_gradients", "bias_gradient", "sink_gradient")


class Launch(NamedTuple):
    """What the backend asked to be launched."""

    kernel: Jitted
    arguments: Mapping[str, triton_launch.Argument]
    tiles: Tiles


def launches(call: Call, capability: Capability, monkeypatch: pytest.MonkeyPatch) -> dict[str, Launch]:
    """Run the backend's host side as on a GPU of this capability, and catch the launches of both passes.

    Where dk and dv have a pass each, the second is "key_gradients, dv".
    """
    caught: dict[str, Launch] = {}

    def catch(
        kernel: Jitted, _: tuple[int, int], arguments: triton_launch.Arguments, tiles: Tiles, *__: object
    ) -> None:
        name = compiling.compiled_kernel(kernel).__name__
        caught[f"{name}, dv" if name in caught else name] = Launch(
            kernel, {label: arguments[label] for label in kernel.arg_names}, tiles
        )

    for module in (triton_portable, triton_backward):
        monkeypatch.setattr(module, "launch", catch)
        monkeypatch.setattr(module, "prepare_launch", lambda *_: None)
    monkeypatch.setattr(triton_portable, "_capability", lambda _: capability)
    problem, tensors = call.described()
    out, lse = triton_portable.forward(problem, tensors)
    needs = Needs(dbias=tensors.bias is not None, dsink=tensors.sink is not None)
    triton_portable.backward(problem, tensors, out, lse, call.d_out, call.d_lse, needs)
    return caught


def kind_of(argument: object) -> compiling.Kind:
    """Give an argument's type in Triton's words."""
    if isinstance(argument, tuple):
        return tuple(map(kind_of, argument))
    return POINTERS[argument.dtype] if isinstance(argument, torch.Tensor) else SCALARS[type(argument)]


def compile_launch(launch: Launch, capability: Capability) -> compiling.Compiled:
    """Compile what would be launched."""
    types: dict[str, compiling.Kind | None] = {}
    constants: dict[str, compiling.Constant] = {}
    for parameter in compiling.compiled_kernel(launch.kernel).params:
        argument = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            constants[parameter.name] = cast("compiling.Constant", argument)
        elif argument is None:
            types[parameter.name] = None
        elif isinstance(argument, torch.Tensor) or not parameter.annotation_type:
            types[parameter.name] = kind_of(argument)
    target = capability[0] * 10 + capability[1] if isinstance(capability, tuple) else str(capability)
    options = compiling.Options(num_warps=launch.tiles.num_warps, num_stages=launch.tiles.num_stages)
    return compiling.compile_for(launch.kernel, types, constants, target, options)


def attention_case(kernel: str, dim: int) -> Case:
    """Give a call that launches the kernel: causal with grouped heads, or with all that a bias brings along."""
    plain = kernel not in ("bias_gradient", "sink_gradient")
    options = Options(causal=True, return_lse=True)
    return Case(
        kernel, 1, 4, 2, 64, 64, dim, dim, bias="" if plain else "1hqk", sink="" if plain else "h", options=options
    )


def compiled_text(compiled: compiling.Compiled) -> str:
    return str(compiled.asm["amdgcn" if "amdgcn" in compiled.asm else "ptx"])


def check_compiles(
    kernel: str, dim: int, dtype: str, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> tuple[compiling.Compiled, dict[str, object]]:
    """Compile one kernel, hold its shared memory to the target's limit, and tell what it takes."""
    launch = launches(attention_case(kernel, dim).build("cpu", dtype), capability, monkeypatch)[kernel]
    compiled = compile_launch(launch, capability)
    found = compiling.resources(compiled)
    assert found.shared <= shared_memory_limit(capability)
    return compiled, {"tiles": str(launch.tiles), **found._asdict()}


@pytest.mark.parametrize("capability", TARGETS, ids=NAMES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_compiles_for_each_target_within_its_shared_memory(
    kernel: str, capability: Capability, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    dim = 16 if capability == (7, 5) else 64  # without tensor cores a product is unrolled, which takes its time
    compiled, found = check_compiles(kernel, dim, "float16", capability, monkeypatch)
    record_property("resources", found)
    if kernel in ("prepare_rows", "sink_gradient"):
        return
    text = compiled_text(compiled)
    matrix = {"sm_75": "fma.rn.f32", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma_"}
    assert matrix.get(target_name(capability), "mma.sync") in text


@pytest.mark.parametrize(
    ("kernel", "dtype", "capability"),
    [
        ("attention_forward", "float32", "gfx942"),
        ("key_gradients", "float16", (7, 5)),
        ("key_gradients, dv", "float16", "gfx942"),
        ("query_gradients", "float32", (12, 1)),
        ("bias_gradient", "float32", (8, 6)),
    ],
)
def test_head_dim_512_comes_in_pieces_where_shared_memory_is_small(
    kernel: str, dtype: str, capability: Capability, monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    _, found = check_compiles(kernel, 512, dtype, capability, monkeypatch)
    record_property("resources", found)
    assert "max_dim=None" not in str(found["tiles"])


@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS, ids=NAMES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dim", [32, 128, 256, 512])
@pytest.mark.parametrize("kernel", [*KERNELS, "key_gradients, dv"])
def test_the_full_grid_compiles(
    kernel: str, dim: int, dtype: str, capability: Capability, monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    if capability == (7, 5) and dtype == "bfloat16":
        pytest.skip("sm_75 has no bfloat16: refused by the backend")
    call = attention_case(kernel, dim).build("cpu", dtype)
    if kernel == "key_gradients, dv" and kernel not in launches(call, capability, monkeypatch):
        pytest.skip("one pass gives dk and dv")
    record_property("resources", check_compiles(kernel, dim, dtype, capability, monkeypatch)[1])


def test_aligned_tensors_are_loaded_16_bytes_at_a_time_and_others_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(call: Call) -> str:
        return compiled_text(compile_launch(launches(call, (9, 0), monkeypatch)["attention_forward"], (9, 0)))

    case = attention_case("attention_forward", 64)
    aligned = case.build("cpu", "float16")
    wide = torch.zeros(1, 4, 64, 65, dtype=torch.float16)
    odd = aligned.tensors._replace(q=wide[..., 1:])
    assert "cp.async.cg.shared.global" in loads(aligned)
    assert "cp.async.cg.shared.global" not in loads(Call(odd, aligned.options, aligned.d_out, aligned.d_lse))


def varied_call(number: int) -> Call:
    """Draw a call whose sizes and windows differ from all others', among four kinds of masks and layouts."""
    draw = random.Random(number)  # noqa: S311 - nothing secret
    group, heads_kv = draw.randint(1, 4), draw.randint(1, 3)
    causal, window = draw.random() < 0.5, draw.random() < 0.5
    options = Options(
        causal=causal, window_left=draw.randint(0, 99) if window else None, layout=draw.choice(["bhsd", "bshd"])
    )
    case = Case(
        "varied", draw.choice([1, 2, 16]), heads_kv * group, heads_kv, draw.randint(1, 300), draw.randint(1, 300),
        64, 64, options=options._replace(scale=draw.uniform(-1, 1)),
    )  # fmt: skip
    return case.build("cpu", "float16", seed=number)


def keys_of(call: Call, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Give what Triton would look its compiled kernels up by."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    keys = set()
    for name, (kernel, arguments, tiles) in launches(call, (9, 0), monkeypatch).items():
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)  # type: ignore[attr-defined]
        _, specialization, options = bind(**arguments, num_warps=tiles.num_warps, num_stages=tiles.num_stages)
        keys.add((name, compute_cache_key({}, specialization, options)))
    return keys


def test_fifty_calls_of_other_sizes_need_no_more_kernels_than_there_are_kinds_of_bands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = set().union(*(keys_of(varied_call(number), monkeypatch) for number in range(50)))
    counts = {name: sum(key[0] == name for key in keys) for name in KERNELS}
    assert counts == {
        "attention_forward": 8,  # with and without a left and a right side, and for either sign of the scale
        "prepare_rows": 1,
        "key_gradients": 4,
        "query_gradients": 4,
        "bias_gradient": 0,
        "sink_gradient": 0,
    }
