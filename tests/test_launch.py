"""The launcher, without a GPU: what is compiled, kept, laid out in memory and handed to the driver."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from recorder import SM90, Recorder, integer
from tilewise.backends import compile as compiling
from tilewise.backends import launch
from tilewise.backends.bound import Bound
from tilewise.backends.compile import Binary, Options, binary_for, ptx_parameters
from tilewise.backends.driver import INVALID_CONTEXT, CudaDriver
from tilewise.kernels.share import kernel

ROOT = Path(__file__).parents[1]


@kernel
def everything(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, out_ptr, stride: tl.int64, length: tl.int32, left, scale: tl.float32, exact: tl.float64,
    flag: tl.int1, softcap, BLOCK: tl.constexpr, DOUBLE: tl.constexpr = False,
):  # fmt: skip
    """Use an argument of every kind; y_ptr, left and softcap may be None."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < length
    value = tl.load(x_ptr + place * stride, mask=inside, other=0.0).to(tl.float32) * scale
    if y_ptr is not None:
        value += tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if left is not None:
        value += left
    if softcap is not None:
        value *= softcap
    if flag:
        value += exact.to(tl.float32)
    if DOUBLE:
        value *= 2
    tl.store(out_ptr + place, value, mask=inside)


@kernel
def scaled(x_ptr, length: tl.int32, factor: tl.float32, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply in place."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + place, mask=place < length)
    tl.store(x_ptr + place, value * factor, mask=place < length)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "kernels"))


def numbers(read: list[bytes], *kinds: Callable[[bytes], object]) -> list[object]:
    return [kind(value) for kind, value in zip(kinds, read, strict=True)]


def real(raw: bytes) -> float:
    return (ctypes.c_float if len(raw) == 4 else ctypes.c_double).from_buffer_copy(raw).value


def run(
    launcher: launch.Launcher, arguments: tuple[launch.Argument, ...], grid: tuple[int, ...] = (3,), **constants: int
) -> None:
    launcher.variant(everything, {"BLOCK": 128, **constants}, Options())(grid, arguments)


# ---- what the driver gets ----


@pytest.mark.compile
def test_every_argument_arrives_in_its_own_type_at_the_place_the_kernel_reads() -> None:
    driver = Recorder()
    x, y, out = (torch.empty(4, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))
    run(launch.Launcher(driver), (x, y, out, -(2**40), 300, -5, 0.5, 0.1, True, 30.0), grid=(3, 2))
    (config, _, read), binary = driver.launches[0], driver.loaded[0]
    kinds = [integer, integer, integer, integer, integer, integer, real, real, integer, real, integer, integer]
    assert numbers(read, *kinds) == [
        x.data_ptr(), y.data_ptr(), out.data_ptr(), -(2**40), 300, -5, 0.5, 0.1, 1, 30.0, 0, 0,
    ]  # fmt: skip
    assert binary.parameters == (8, 8, 8, 8, 4, 4, 4, 8, 1, 4, 8, 8)
    assert list(config.grid) == [3, 2, 1]
    assert list(config.block) == [128, 1, 1] == [binary.threads, 1, 1]
    assert (config.stream, config.shared, config.attribute_count) == (0x5EA, binary.shared, 0)


@pytest.mark.compile
def test_an_argument_that_is_none_is_no_parameter_of_the_kernel() -> None:
    driver = Recorder()
    x, out = torch.empty(4), torch.empty(4)
    run(launch.Launcher(driver), (x, None, out, 1, 4, None, 2.0, 3.0, False, None))
    assert driver.loaded[0].parameters == (8, 8, 8, 4, 4, 8, 1, 8, 8)
    kinds = [integer, integer, integer, integer, real, real, integer, integer, integer]
    assert numbers(driver.launches[0][2], *kinds) == [x.data_ptr(), out.data_ptr(), 1, 4, 2.0, 3.0, 0, 0, 0]


@pytest.mark.compile
def test_a_program_dependent_launch_is_described_as_the_driver_wants_it() -> None:
    driver = Recorder()
    x = torch.empty(4)
    options = Options(launch_pdl=True, launch_cooperative_grid=True)
    launcher = launch.Launcher(driver)  # holds the memory that is read below
    launcher.variant(scaled, {"BLOCK": 16}, options)((1,), (x, 4, 2.0))
    config = driver.launches[0][0]
    attributes = (ctypes.c_uint * (2 * 18)).from_address(config.attributes or 0)
    assert config.attribute_count == 2
    assert [(attributes[18 * n], attributes[18 * n + 2]) for n in range(2)] == [(2, 1), (6, 1)]


@pytest.mark.compile
def test_values_lengths_and_strides_never_choose_another_kernel_but_dtypes_and_constants_do() -> None:
    driver = Recorder()
    launcher = launch.Launcher(driver)
    tensors = torch.empty(64), torch.empty(64), torch.empty(64)
    for number in range(50):
        x, y, out = (tensor[number % 3 :] for tensor in tensors)
        run(
            launcher,
            (x, y, out, number, 16 * number, number % 2, 0.1 * number, 0.0, number % 5 == 0, 1.0),
            (number + 1,),
        )
    assert len(driver.launches) == 50
    assert launcher.bindings == len(driver.loaded) == 1
    run(launcher, (tensors[0].half(), tensors[1], tensors[2], 1, 1, 1, 1.0, 0.0, True, 1.0))
    run(launcher, (*tensors, 1, 1, 1, 1.0, 0.0, True, 1.0), DOUBLE=1)
    assert launcher.bindings == len(driver.loaded) == 3


@pytest.mark.compile
def test_threads_that_call_together_compile_once_and_do_not_mix_their_arguments() -> None:
    driver = Recorder()
    launcher = launch.Launcher(driver)
    buffers = [torch.empty(1) for _ in range(8)]
    barrier = threading.Barrier(len(buffers))

    def work(number: int) -> None:
        barrier.wait()
        for turn in range(200):
            variant = launcher.variant(scaled, {"BLOCK": 16}, Options())
            variant((number + 1,), (buffers[number], 1000 * number + turn, float(number)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(buffers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.loaded) == 1
    seen = set()
    for config, _, read in driver.launches:
        number = config.grid[0] - 1
        assert numbers(read[:3], integer, integer, real)[::2] == [buffers[number].data_ptr(), float(number)]
        seen.add(integer(read[1]))
    assert seen == {1000 * number + turn for number in range(len(buffers)) for turn in range(200)}


@pytest.mark.compile
def test_a_thread_without_a_context_is_given_one_and_launches_again() -> None:
    driver = Recorder()
    driver.codes = [INVALID_CONTEXT]
    launch.Launcher(driver).variant(scaled, {"BLOCK": 16}, Options())((1,), (torch.empty(4), 4, 1.0))
    assert driver.entered == [-1]
    assert len(driver.launches) == 1


@pytest.mark.compile
def test_a_refused_launch_says_what_was_asked_for_and_why_it_failed() -> None:
    driver = Recorder()
    driver.codes = [1]
    variant = launch.Launcher(driver).variant(scaled, {"BLOCK": 16}, Options())
    with pytest.raises(RuntimeError, match=r"scaled.*\(7, 1, 1\) programs of 128 threads.*error 1"):
        variant((7,), (torch.empty(4), 4, 1.0))


def test_scratch_memory_that_the_compiler_asks_for_is_given_for_every_program() -> None:
    driver = Recorder()
    binary = Binary("name", b"", 128, 0, parameters=(8, 4, 8, 8), hidden=2, scratch=256)
    Bound(driver, -1, binary, ["*fp32", "i32"])((2, 3), [64, None, 5])
    assert driver.taken[0].numel() == 2 * 3 * 256
    read = driver.launches[0][2]
    assert numbers(read, integer, integer, integer, integer) == [64, 5, driver.taken[0].data_ptr(), 0]


# ---- launches in which all but the addresses is settled ----


def prepared(launcher: launch.Launcher, monkeypatch: pytest.MonkeyPatch, *order: str) -> launch.Prepared:
    monkeypatch.setattr(launch, "_default", launcher)
    x, y, out = (torch.empty(4, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))
    named: dict[str, launch.Argument] = {"x_ptr": x, "y_ptr": y, "out_ptr": out, "stride": -(2**40), "length": 300}
    named |= {"left": -5, "scale": 0.5, "exact": 0.1, "flag": True, "softcap": None, "BLOCK": 128, "DOUBLE": False}
    found = launch.prepare_named(everything, (3, 2), named, order)
    assert found is not None
    return found


@pytest.mark.compile
def test_a_prepared_launch_takes_addresses_in_the_callers_order(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Recorder()
    call = prepared(launch.Launcher(driver), monkeypatch, "out_ptr", "x_ptr", "y_ptr")
    for _ in range(2):
        out, x, y = (torch.empty(4) for _ in range(3))
        call((out, x, y))
        config, _, read = driver.launches[-1]
        kinds = [integer, integer, integer, integer, integer, integer, real, real, integer, integer, integer]
        assert numbers(read, *kinds) == [
            x.data_ptr(), y.data_ptr(), out.data_ptr(), -(2**40), 300, -5, 0.5, 0.1, 1, 0, 0,
        ]  # fmt: skip
        assert (list(config.grid), list(config.block), config.stream) == ([3, 2, 1], [128, 1, 1], 0x5EA)
    assert len(driver.loaded) == 1


@pytest.mark.compile
def test_a_prepared_launch_knows_every_tensor_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs the addresses of x_ptr, y_ptr, out_ptr; got those of x_ptr, y_ptr"):
        prepared(launch.Launcher(Recorder()), monkeypatch, "x_ptr", "y_ptr")


@pytest.mark.compile
def test_prepared_launches_of_one_kernel_and_of_many_threads_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Recorder()
    monkeypatch.setattr(launch, "_default", launch.Launcher(driver))
    tensors = [torch.empty(1) for _ in range(8)]
    calls = []
    for number in range(2):
        named: dict[str, launch.Argument] = {"x_ptr": tensors[0], "length": number, "factor": 1.0, "BLOCK": 16}
        calls.append(launch.prepare_named(scaled, (number + 1,), named, ["x_ptr"]))

    def work(tensor: torch.Tensor) -> None:
        for turn in range(200):
            call = calls[turn % 2]
            assert call is not None
            call([tensor])

    threads = [threading.Thread(target=work, args=(tensor,)) for tensor in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.loaded) == 1
    seen = [(integer(read[0]), integer(read[1]), config.grid[0] - 1) for config, _, read in driver.launches]
    want = [(tensor.data_ptr(), number, number) for tensor in tensors for number in range(2)]
    assert sorted(seen) == sorted(want * 100)


def test_a_prepared_launch_takes_scratch_memory_anew_in_every_call() -> None:
    driver = Recorder()
    binary = Binary("name", b"", 128, 0, parameters=(8, 4, 8, 8), hidden=2, scratch=256)
    call = Bound(driver, -1, binary, ["*fp32", "i32"]).prepare((2, 3), [5], [0])
    x = torch.empty(4)
    call([x])
    call([x])
    assert [memory.numel() for memory in driver.taken] == [2 * 3 * 256] * 2
    for (_, _, read), memory in zip(driver.launches, driver.taken, strict=True):
        assert numbers(read, integer, integer, integer, integer) == [x.data_ptr(), 5, memory.data_ptr(), 0]


@pytest.mark.compile
def test_a_prepared_launch_that_is_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Recorder()
    call = prepared(launch.Launcher(driver), monkeypatch, "x_ptr", "y_ptr", "out_ptr")
    driver.codes = [INVALID_CONTEXT]
    call([torch.empty(4)] * 3)
    assert (driver.entered, len(driver.launches)) == ([-1], 1)
    driver.codes = [1]
    with pytest.raises(RuntimeError, match=r"everything.*\(3, 2, 1\) programs of 128 threads.*error 1"):
        call([torch.empty(4)] * 3)


# ---- what is refused ----


@pytest.mark.compile
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2**31, 1.0), "'i' format requires"),
        ((4,), "takes x_ptr, length, factor; got 2 arguments"),
        ((0.5, 1.0), "integer"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_in_words(arguments: tuple[float, ...], words: str) -> None:
    variant = launch.Launcher(Recorder()).variant(scaled, {"BLOCK": 16}, Options())
    with pytest.raises(ValueError, match=words):
        variant((1,), (torch.empty(4), *arguments))


@pytest.mark.compile
def test_dtypes_and_objects_that_kernels_do_not_know_are_refused_in_words() -> None:
    variant = launch.Launcher(Recorder()).variant(scaled, {"BLOCK": 16}, Options())
    with pytest.raises(ValueError, match=r"cannot take x_ptr in torch.complex64; kernels know float16, .*int64"):
        variant((1,), (torch.empty(4, dtype=torch.complex64), 4, 1.0))
    with pytest.raises(TypeError, match="must be a tensor; got None"):
        variant((1,), (None, 4, 1.0))
    out = torch.empty(4)
    with pytest.raises(TypeError, match="cannot take left = 'three'"):
        run(launch.Launcher(Recorder()), (out, out, out, 1, 4, "three", 1.0, 1.0, True, None))  # type: ignore[arg-type]


@pytest.mark.compile
def test_a_missing_or_unknown_constant_is_named() -> None:
    types: dict[str, str | None] = {"x_ptr": "*fp32"}
    with pytest.raises(ValueError, match="scaled needs the constant BLOCK; got"):
        binary_for(scaled, types, {}, SM90, Options())
    with pytest.raises(ValueError, match=r"has no constants \['WIDTH'\]; it has \['BLOCK'\]"):
        binary_for(scaled, types, {"BLOCK": 16, "WIDTH": 1}, SM90, Options())


def test_parameters_that_are_laid_out_otherwise_stop_the_launch() -> None:
    ptx = (
        ".visible .entry scaled(.param .u64 .ptr .global .align 1 p_0, .param .u64 p_1, .param .f32 p_2)\n.reqntid 128"
    )

    class Stage:
        def __init__(self) -> None:
            self.asm = {"ptx": ptx, "cubin": b""}
            self.metadata = None

    class Source:
        __name__ = "scaled"

    kinds = {"x_ptr": "*fp32", "length": "i32", "factor": "fp32"}
    with pytest.raises(RuntimeError, match=r"parameters of \[8, 8, 4\] bytes where \[8, 4, 4\]"):
        compiling.binary_of(Source(), kinds, Stage())  # type: ignore[arg-type]


def test_parameters_of_every_spelling_are_measured() -> None:
    ptx = """.visible .entry k(
        .param .u64 .ptr .global .align 1 k_param_0,
        .param .align 64 .b8 k_param_1[128],
        .param .u8 k_param_2,
        .param .b16 k_param_3,
        .param .f64 k_param_4
    )
    .reqntid 384
    """
    assert ptx_parameters(ptx) == [8, 128, 1, 2, 8]
    assert compiling.threads_of(ptx) == 384


# ---- what is kept ----


@pytest.mark.compile
def test_a_kernel_is_compiled_once_and_then_read_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(4)
    first, second = Recorder(), Recorder()
    launch.Launcher(first).variant(scaled, {"BLOCK": 16}, Options())((1,), (x, 4, 1.0))
    monkeypatch.setattr(compiling, "compile_for", None)  # whoever compiles now fails
    launch.Launcher(second).variant(scaled, {"BLOCK": 16}, Options())((1,), (x, 4, 1.0))
    assert first.loaded == second.loaded
    assert first.loaded[0].code.startswith(b"\x7fELF")
    with pytest.raises(TypeError):
        launch.Launcher(second).variant(scaled, {"BLOCK": 32}, Options())((1,), (x, 4, 1.0))
    with pytest.raises(TypeError):
        launch.Launcher(Recorder(80)).variant(scaled, {"BLOCK": 16}, Options())((1,), (x, 4, 1.0))
    with pytest.raises(TypeError):
        launch.Launcher(second).variant(scaled, {"BLOCK": 16}, Options(num_warps=8))((1,), (x, 4, 1.0))


# ---- without a C compiler, and without a GPU ----


@pytest.mark.compile
def test_a_first_call_needs_no_c_compiler_and_no_gpu(tmp_path: Path) -> None:
    program = """
import json, sys
import torch
sys.path[:0] = [{tests!r}]
from test_launch import Recorder, launch, scaled, Options
driver = Recorder()
launch.Launcher(driver).variant(scaled, {{"BLOCK": 16}}, Options())((1,), (torch.empty(4), 4, 1.0))
from triton.runtime.driver import driver as tritons
print(json.dumps([len(driver.launches), tritons._active is None, tritons._default is None]))
"""
    code = program.format(tests=str(ROOT / "tests"))
    caches = {name: str(tmp_path / name) for name in ("TRITON_CACHE_DIR", "TILEWISE_CACHE_DIR")}
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "src"), **caches}
    python = shutil.which(sys.executable)
    assert python is not None
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, True, True]


@pytest.mark.compile
def test_arguments_by_name_arrive_in_the_kernels_order(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Recorder()
    monkeypatch.setattr(launch, "_default", launch.Launcher(driver))
    x = torch.empty(4)
    named: dict[str, launch.Argument | str] = {"BLOCK": 16, "factor": 2.0, "unused": None, "x_ptr": x, "length": 4}
    launch.launch_named(scaled, (3,), named)
    launch.launch(scaled, (3,), (x, 4, 2.0), {"BLOCK": 16})
    assert [read for _, _, read in driver.launches] == [driver.launches[0][2]] * 2
    assert len(driver.loaded) == 1
    with pytest.raises(KeyError, match="length"):
        launch.launch_named(scaled, (3,), {"BLOCK": 16, "factor": 2.0, "x_ptr": x})


def test_a_machine_without_a_driver_is_told_apart_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match=r"kernels need an NVIDIA GPU and its driver, .*cannot open"):
        CudaDriver()


@pytest.mark.interpreter
def test_an_interpreted_kernel_runs_through_the_same_call() -> None:
    x = torch.arange(10, dtype=torch.float32)
    launch.launch(scaled, (3,), (x, 9, 2.0), {"BLOCK": 4}, num_warps=1)
    assert x.tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16, 9]
    launch.launch_named(scaled, (3,), {"BLOCK": 4, "x_ptr": x, "factor": 0.5, "length": 9, "unused": 1})
    assert x.tolist() == list(range(10))


def test_a_grid_without_programs_launches_nothing() -> None:
    launch.launch(scaled, (4, 0), (torch.empty(4), 4, 1.0), {})
