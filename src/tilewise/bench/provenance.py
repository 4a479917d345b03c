"""Where a measurement was made, by which code, and how it was asked for."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import tilewise
from tilewise.machine import detect

# What changes how fast NumPy or torch compute.
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "KMP_AFFINITY",
    "GOMP_CPU_AFFINITY",
    "CUDA_VISIBLE_DEVICES",
    "TILEWISE_BACKEND",
    "TRITON_INTERPRET",
)
UNSET = "TILEWISE_BENCH_UNSET"  # names the variables that `tilewise bench` unset before it started itself anew


def provenance(device: str) -> tuple[dict[str, object], str]:
    """Give the environment, with commit, clocks and variables, and the command that was typed."""
    import torch

    record: dict[str, object] = dict(detect.environment(device))
    record["commit"] = commit(Path(tilewise.__file__).parent)
    record["clock_now_hz"] = _clock(device)
    record["load"] = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    record["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    record["variables"] = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    record["unset_variables"] = [name for name in os.environ.get(UNSET, "").split(",") if name]
    program = Path(sys.argv[0])
    name = "tilewise" if program.name in {"tilewise", "cli.py"} else program.name
    return record, shlex.join([name, *sys.argv[1:]])


def commit(package: Path) -> str | None:
    """Give the commit of the checkout that a package lies in, "+" behind it where files differ; None elsewhere.

    A package installed below some other project's checkout is not that project's code, so the place must fit too.
    """
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() / "src" / package.name != package.resolve():
        return None
    head = _git(package, "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+" if _git(package, "status", "--porcelain", "--", ".") else "")


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603  # fixed words
            ["git", "-C", str(folder), *words],  # noqa: S607  # wherever git is
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _clock(device: str) -> float | None:
    """Give a GPU's clock at this moment, where nvidia-ml-py is there to tell it."""
    import torch

    if not device.startswith("cuda"):
        return None
    try:
        return torch.cuda.clock_rate(device) * 1e6
    except (ModuleNotFoundError, RuntimeError):
        return None
