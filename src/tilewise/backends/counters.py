"""Memory that the launches of a stream share, since they follow one another: counters, and room for parts of results.

Programs of a kernel share out work by a counter, or find out who is last. They find it at zero and leave it so.
"""

from __future__ import annotations

import torch

_LEAST = 4096  # counters that are taken at once, so that few calls find too few

_MOST = 16 << 20  # numbers of scratch memory that are kept; a call that needs more takes its own

_counters: dict[tuple[int, int], torch.Tensor] = {}
_rooms: dict[tuple[int, int], torch.Tensor] = {}
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


def scratch(device: torch.device, count: int) -> torch.Tensor:
    """Give room for at least ``count`` float32 numbers, which hold anything, until the stream's next launch.

    A graph has its own, for the same reason as in `zeros`.
    """
    if device.type != "cuda" or count > _MOST or _is_capturing():
        return torch.empty(count, dtype=torch.float32, device=device)
    place = device.index, torch._C._cuda_getCurrentRawStream(device.index)  # noqa: SLF001
    room = _rooms.get(place)
    if room is None or room.numel() < count:
        room = _rooms[place] = torch.empty(count, dtype=torch.float32, device=device)
    return room
