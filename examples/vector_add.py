"""Add two vectors with a Triton kernel: the smallest kernel that is written as tilewise writes them.

Runs on a GPU where torch finds one, else in Triton's interpreter. ``docs/kernels/vector-add.md`` explains it.

    python examples/vector_add.py
    python examples/vector_add.py --length 100000000 --dtype float16
"""

from __future__ import annotations

import argparse
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel is defined

import triton
import triton.language as tl

from tilewise.backends.launch import launch
from tilewise.bench.clock import Stopwatch, spread
from tilewise.kernels.share import kernel

BLOCK = 1024  # elements a program adds: 4 warps of 32 threads with 8 elements each, in float16 one load of 16 bytes


@kernel
def add(x_ptr, y_ptr, out_ptr, units: tl.int64, UNIT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add one block of units * UNIT elements; if UNIT is above 1, all tensors begin on 16 bytes."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    x_ptr, y_ptr, out_ptr = x_ptr + start, y_ptr + start, out_ptr + start
    if UNIT > 1:
        x_ptr, y_ptr, out_ptr = tl.multiple_of(x_ptr, 16), tl.multiple_of(y_ptr, 16), tl.multiple_of(out_ptr, 16)
    place = tl.arange(0, BLOCK)
    inside = start + place < units * UNIT
    x = tl.load(x_ptr + place, mask=inside)
    y = tl.load(y_ptr + place, mask=inside)
    tl.store(out_ptr + place, x + y, mask=inside)


def vector_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute ``x + y`` of two contiguous tensors of one shape, dtype and device.

    Raises:
        ValueError: they are not.
    """
    for name, of_x, of_y in (("shape", x.shape, y.shape), ("dtype", x.dtype, y.dtype), ("device", x.device, y.device)):
        if of_x != of_y:
            raise ValueError(f"x and y must have one {name}; got {of_x} and {of_y}")
    if not (x.is_contiguous() and y.is_contiguous()):
        raise ValueError("x and y must be contiguous; call .contiguous() on them")
    tensors = (x, y, torch.empty_like(x))
    unit = 16 // x.element_size()
    if x.numel() % unit or any(tensor.data_ptr() % 16 for tensor in tensors):
        unit = 1
    launch(add, (triton.cdiv(x.numel(), BLOCK),), (*tensors, x.numel() // unit), {"UNIT": unit, "BLOCK": BLOCK})
    return tensors[-1]


def main(arguments: list[str] | None = None) -> int:
    """Add two vectors and compare with torch; the exit code is 0 where every element is the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=100_003)
    parser.add_argument("--dtype", default="float32", choices=["float16", "bfloat16", "float32", "float64"])
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = (torch.randn(options.length, device=device).to(getattr(torch, options.dtype)) for _ in range(2))
    same = torch.equal(vector_add(x, y), x + y)
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU, interpreted"
    print(
        f"{options.length:,} elements in {options.dtype} on {where}: {'the same' if same else 'NOT the same'} as torch"
    )
    if device == "cuda":
        watch = Stopwatch(device)
        for name, run in (("this kernel", lambda: vector_add(x, y)), ("torch", lambda: x + y)):
            seconds = spread(watch.round(run, 0.1)).median
            print(f"  {name:11}  {3 * x.numel() * x.element_size() / seconds / 1e9:,.0f} GB/s")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
