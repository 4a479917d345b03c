"""One sequence over many devices, on torch.distributed: attention, splitting, decoding, and what it costs."""

from __future__ import annotations

from tilewise.distributed.context_parallel import context_parallel_attention, positions, split, unsplit
from tilewise.distributed.cost import explain
from tilewise.distributed.decode import context_parallel_decode

__all__ = ["context_parallel_attention", "context_parallel_decode", "explain", "positions", "split", "unsplit"]
