"""Run PyTorch's own tests of scaled_dot_product_attention that reach its flash path, with tilewise activated, on a GPU.

    PYTHONPATH=src python benchmarks/peer_tests/torch_sdpa.py path/to/test/test_transformers.py --json result.json

The file must be of the release of torch that is installed. Beside the outcomes it counts the calls that tilewise
served, since a test that never comes here says nothing. ``--baseline`` runs the same sample on PyTorch's own kernel:
what fails there too is not tilewise's.
"""
# ruff: noqa: INP001 - a script

from __future__ import annotations

import os
import sys
from functools import wraps
from typing import TYPE_CHECKING

import torch
from runner import parser, run

from tilewise.adapters import sdpa

if TYPE_CHECKING:
    import pytest

# What fails although nothing is wrong: on PyTorch's own kernels too, or by a promise that is kept otherwise.
EXPLAINED = {
    "test_sdpa_zero_sized_tensors": "fails on PyTorch's own kernels too: a gradient of nothing is None",
    "test_fused_backwards_throws_determinism_warning": "the backward pass is deterministic when torch asks: no warning",
}

# Tests of these names call the flash kernel in some of their cases, or compare it with others.
WORDS = ("flash", "fused", "sdp", "scaled_dot_product", "is_causal", "causal_variants")


def group(item: pytest.Item) -> str | None:
    """Name a test that runs on a GPU and may reach the flash kernel, without its parameters; None for all others."""
    name = item.nodeid.lower()
    on_gpu = "cuda" in name and "cpu" not in item.name.lower()
    if not on_gpu or "nested" in name or not any(word in item.name for word in WORDS):
        return None
    return "_".join(item.name.split("_")[:6])  # torch writes parameters into the name, behind these


def counted(calls: dict[str, int]) -> None:
    """Count how often each of the two operators is served."""
    for name in ("_flash_forward", "_flash_backward"):
        served = getattr(sdpa, name)

        def count(*arguments: object, served=served, name=name, **options: object) -> object:  # type: ignore[no-untyped-def]
            calls[name] = calls.get(name, 0) + 1
            return served(*arguments, **options)

        setattr(sdpa, name, wraps(served)(count))


def main() -> int:
    """Run the sample."""
    arguments = parser((__doc__ or "").partition("\n")[0])
    arguments.add_argument("--baseline", action="store_true", help="run on PyTorch's own kernel")
    options = arguments.parse_args()
    os.environ.setdefault("PYTORCH_TESTING_DEVICE_ONLY_FOR", "cuda")
    calls: dict[str, int] = {}
    if not options.baseline:
        counted(calls)
        sdpa.activate()
    return run(options, group, "cuda" if torch.cuda.is_available() else "cpu", EXPLAINED, served=calls)


if __name__ == "__main__":
    sys.exit(main())
