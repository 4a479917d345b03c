"""Counters on a GPU by which a kernel's programs share out work or find out who is last.

A kernel finds its counters at zero and leaves them so. Launches on one stream follow one another and share theirs.
"""

from __future__ import annotations

import torch

_LEAST = 4096  # counters that are taken at once, so that few calls find too few

_counters: dict[tuple[int, int], torch.Tensor] = {}
_is_capturing = torch.cuda.is_current_stream_capturing


def zeros(device: torch.device, count: int = 1) -> torch.Tensor:
    """Give at least ``count`` int32 counters of a device's current stream, all of them zero; the device has an index.

    A graph has its own, and sets them to zero when it is replayed: graphs that were captured on one stream may run on
    several at a time.
    """
    if device.type != "cuda" or _is_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    place = device.index, torch._C._cuda_getCurrentRawStream(device.index)  # noqa: SLF001  # the handle, without an object around it
    counters = _counters.get(place)
    if counters is None or counters.numel() < count:
        counters = _counters[place] = torch.zeros(max(count, _LEAST), dtype=torch.int32, device=device)
    return counters
