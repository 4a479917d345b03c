"""Compiling a kernel for Hopper as a launch would, without a GPU, and asking ptxas what it takes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
import triton

from tilewise.backends import compile as compiling
from tilewise.backends.launch import POINTERS, SCALARS, Mapped
from tilewise.backends.tensor_map import kind_of
from tilewise.kernels.share import Jitted


def compile_named(kernel: Jitted, named: Mapping[str, object]) -> compiling.Compiled:
    """Compile a kernel for the arguments and constants of a launch, by name."""
    source = compiling.compiled_kernel(kernel)
    types: dict[str, str | None] = {}
    constants: dict[str, compiling.Constant] = {}
    for param in source.params:
        argument = named[param.name]
        if param.is_constexpr:
            constants[param.name] = cast("compiling.Constant", argument)
        elif isinstance(argument, Mapped):
            types[param.name] = kind_of(source.__name__, param.name, argument.tensor.dtype, argument.map)
        elif isinstance(argument, torch.Tensor):
            types[param.name] = POINTERS[argument.dtype]
        elif argument is None:
            types[param.name] = None
        elif not param.annotation_type:
            types[param.name] = SCALARS[type(argument)]
    return compiling.compile_settled(kernel, types, constants, 90, compiling.Options(num_warps=4))


def spilled_bytes(compiled: compiling.Compiled, folder: Path) -> int:
    """Assemble a kernel in a folder; give the bytes that a thread spills. Products must not wait for one another."""
    file = folder / "kernel.ptx"
    file.write_text(str(compiled.asm["ptx"]))
    command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(file), "-o", str(folder / "cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "serialized" not in said
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
