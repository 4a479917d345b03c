"""The kernels that tilewise is measured against on a GPU, each called in the layout that it was written for.

FlashAttention-3 and -4 are used where they can be imported: unpack their wheels in one folder and put it on PYTHONPATH.
"""
# ruff: noqa: INP001 - beside the scripts that import it

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import tilewise

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


class Peer(NamedTuple):
    """One implementation: ``attend(q, k, v, causal)`` on tensors of its layout, (batch, heads, len, dim) or "bshd"."""

    attend: Attend
    layout: str = "bhsd"


def pytorch(backend: SDPBackend) -> Peer:
    """Give PyTorch's attention held to one backend."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, is_causal=causal)

    return Peer(attend)


def flex(device: str = "cuda") -> Peer:
    """Give compiled FlexAttention."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # noqa: SLF001  # the backward pass is timed over one kept graph
    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001  # every cell is compiled for itself
    compiled = torch.compile(flex_attention, dynamic=False)
    masks: dict[int, object] = {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        length = q.shape[2]
        if causal and length not in masks:
            masks[length] = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, length, length, device=device)
        return compiled(q, k, v, block_mask=masks[length] if causal else None)  # type: ignore[no-any-return]

    return Peer(attend)


def ours(backend: str, **options: object) -> Peer:
    """Give one of tilewise's backends."""
    return Peer(lambda q, k, v, causal: tilewise.attention(q, k, v, causal=causal, backend=backend, **options))  # type: ignore[call-overload]


def fa3() -> Peer:
    """Give FlashAttention-3's forward pass.

    Raises:
        ImportError: it is not here.
    """
    found = importlib.util.find_spec("fa3_fwd")
    if found is None or not found.submodule_search_locations:
        raise ImportError("fa3_fwd is not installed")
    torch.ops.load_library(str(Path(found.submodule_search_locations[0]) / "_C.abi3.so"))
    function = importlib.import_module("fa3_fwd_interface").flash_attn_func
    return Peer(lambda q, k, v, causal: _first(function(q, k, v, causal=causal)), "bshd")


def fa4() -> Peer:
    """Give FlashAttention-4 (CuTe DSL).

    Raises:
        ImportError: it is not here.
    """
    function = importlib.import_module("flash_attn.cute").flash_attn_func
    return Peer(lambda q, k, v, causal: _first(function(q, k, v, causal=causal)), "bshd")


def _first(result: object) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result  # type: ignore[return-value]


def flash(*, backward: bool) -> dict[str, Peer]:
    """Give FlashAttention-3 (forward alone) and -4, where they are here."""
    found: dict[str, Peer] = {}
    for name, make in (("fa3", fa3), ("fa4", fa4)):
        if name == "fa3" and backward:
            continue
        try:
            found[name] = make()
        except ImportError as absent:
            print(f"{name} is not beside us: {absent}")  # noqa: T201 - a script's table would be short of it
    return found
