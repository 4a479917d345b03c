"""The first kernel of the documentation adds, refuses what it cannot, and compiles to what its page says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from tilewise.backends.compile import Options, compile_for

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "vector_add.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """Load the script as this process runs kernels: in the interpreter only if it was told to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
        spec = importlib.util.spec_from_file_location("vector_add", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def draw(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [0, 1, 8, 1000, 1024, 4099])
def test_it_adds_vectors_of_any_length(length: int, dtype: torch.dtype, example: ModuleType) -> None:
    x, y = draw(length, dtype, 0), draw(length, dtype, 1)
    assert torch.equal(example.vector_add(x, y), x + y)


@pytest.mark.interpreter
def test_it_adds_views_that_begin_anywhere_and_touches_nothing_around(example: ModuleType) -> None:
    for start in range(5):
        x, y = draw(2000, torch.float32, 0), draw(2000, torch.float32, 1)
        assert torch.equal(example.vector_add(x[start:1600], y[:-1][: 1600 - start]), x[start:1600] + y[: 1600 - start])


@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        (torch.zeros(3), torch.zeros(4), "x and y must have one shape; got"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float16), "x and y must have one dtype; got torch.float32 and"),
        (torch.zeros(3), torch.zeros(3, device="meta"), "x and y must have one device; got cpu and meta"),
        (torch.zeros(3, 4).T, torch.zeros(4, 3), "x and y must be contiguous; call .contiguous"),
    ],
    ids=["shape", "dtype", "device", "strides"],
)
def test_what_it_cannot_add_is_refused(x: torch.Tensor, y: torch.Tensor, text: str, example: ModuleType) -> None:
    with pytest.raises(ValueError, match=text):
        example.vector_add(x, y)


@pytest.mark.compile
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter leaves nothing to compile")
@pytest.mark.parametrize(("dtype", "unit"), [("fp16", 8), ("fp32", 4)])
def test_units_make_it_load_and_store_16_bytes_at_once(dtype: str, unit: int, example: ModuleType) -> None:
    def wide(unit: int) -> set[bool]:
        types = dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), f"*{dtype}")
        constants = {"UNIT": unit, "BLOCK": example.BLOCK}
        ptx = str(compile_for(example.add, types, constants, 90, Options(4, 1)).asm["ptx"])
        return {".v4.b32" in line for line in ptx.splitlines() if "ld.global" in line or "st.global" in line}

    assert wide(unit) == {True}
    assert wide(1) == {False}


def test_it_runs_as_a_script_on_any_machine() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [sys.executable, str(SCRIPT), "--length", "3001"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3,001 elements in float32 on ")
    assert "the same as torch" in done.stdout
