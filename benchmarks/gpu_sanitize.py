"""Three small calls, forward and backward, for compute-sanitizer to watch.

    PYTHONPATH=src compute-sanitizer --tool memcheck python benchmarks/gpu_sanitize.py

It exits 1 where a result is over the error budget; what compute-sanitizer finds, it prints itself. torch's allocator
is told to hand out memory exactly as asked, so that a step beyond the end of a tensor is seen.
"""
# ruff: noqa: INP001, T201 - a script, and a script prints

from __future__ import annotations

import argparse
import os

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

from tilewise.problem.problem import Options
from tilewise.testing import CASES, Case, check, run


def main() -> None:
    """Run the calls and hold each to the budget."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="triton_portable")
    backend = parser.parse_args().backend
    causal = Options(causal=True, return_lse=True)
    for case in (
        Case("ragged and grouped", 1, 4, 2, 130, 197, 64, 64, options=causal),
        Case("packed", 1, 2, 2, dim_qk=64, dim_v=64, lengths_q=(1, 70, 0, 33), tail=3, options=causal),
        CASES["many at once"] if backend == "triton_portable" else CASES["padding on both sides"],
    ):
        check(run(case.build("cuda", "bfloat16"), backend), case.build("cuda", "bfloat16"))
        print(f"{case.name}: within budget", flush=True)


if __name__ == "__main__":
    main()
