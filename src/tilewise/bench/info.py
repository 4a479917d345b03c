"""What this machine is, and which backends it can run: the text of `tilewise info`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tilewise import api, dispatch
from tilewise.machine import detect
from tilewise.machine.device import GIB, KIB, MIB, Device


def describe(device: str | None = None, *, measure: bool = False) -> dict[str, list[tuple[str, str]]]:
    """Give titled lists of (what, value).

    Args:
        device: "cpu", "cuda", "cuda:1", "mps"; None = the best here.
        measure: time a copy and a matrix product, in about a second.

    Raises:
        ValueError: there is no such device.
    """
    device = device or detect.best_device()
    found = detect.detect(device)
    dtype = "float32" if device == "cpu" else "float16"
    source = found.source
    if measure:
        found = detect.measure_rates(device, dtype).on(found)
    return {
        f"device {device}": list(_device(found, source)),
        "software": list(_software(device)),
        f"backends ({dtype})": backends(device, dtype),
    }


def _device(found: Device, source: str) -> Iterator[tuple[str, str]]:
    cpu = found.capability is None and found.registers_per_sm is None
    yield "name", found.name
    yield "kind", found.target
    sizes = {
        "cores" if cpu else "SMs": None if found.sms is None else str(found.sms),
        "clock": None if found.clock_hz is None else f"{found.clock_hz / 1e9:.2f} GHz",
        "registers": None if found.registers_per_sm is None else f"{found.registers_per_sm} of 32 bits an SM",
        "shared memory": _size(found.shared_per_sm, " an SM"),
        "shared memory a block": _size(found.shared_per_block),
        "L1 data cache": _size(found.l1_bytes, " a core"),
        "L2 cache": _size(found.l2_bytes, " a core" if cpu else ""),
        "L3 cache": _size(found.l3_bytes),
        "memory": _size(found.memory_bytes),
        "bandwidth": None if found.bandwidth is None else f"{found.bandwidth / 1e9:,.1f} GB/s",
        "on-chip bandwidth": None if found.onchip_bandwidth is None else f"{found.onchip_bandwidth / 1e12:,.1f} TB/s",
    }
    yield from ((name, value) for name, value in sizes.items() if value is not None)
    yield from ((f"matrix rate, {dtype}", f"{rate / 1e12:,.4g} TFLOP/s") for dtype, rate in found.rates.items())
    yield "source", source if found.source == source else found.source
    if found.derived:
        yield "computed or measured", ", ".join(found.derived)


def _software(device: str) -> Iterator[tuple[str, str]]:
    told = detect.environment(device)
    shown = ("tilewise", "python", "system", "numpy", "torch", "triton", "cuda", "hip", "cudnn", "driver", "threads")
    yield from ((name, str(told[name])) for name in shown if told.get(name) is not None)
    free = told.get("memory_free")
    if isinstance(free, int):
        yield "memory free", _size(free) or ""
    yield "CPU", str(told.get("cpu"))


def backends(device: str, dtype: str) -> list[tuple[str, str]]:
    """Say of each backend whether it serves plain attention here, and if not, why."""
    q = torch.empty(1, 1, 128, 64, dtype=getattr(torch, dtype), device=device)
    problem = api.explain(api.attention, q, q, q, backend="torch_tiled").problem
    chosen = dispatch.choose(problem).name
    lines = []
    for name, reason in dispatch.refusals(problem).items():
        text = "runs" if reason is None else "runs when named" if name in dispatch.ON_REQUEST else f"no: {reason}"
        lines.append((name, f"{text}, and is taken for plain attention" if name == chosen else text))
    return lines


def _size(size: int | None, each: str = "") -> str | None:
    if size is None:
        return None
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}{each}"
    return f"{size / KIB:,.0f} KiB{each}"
