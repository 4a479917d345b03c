"""Describe and time the machine at hand. torch is imported only inside the functions that need it.

What cannot be found out is None: no function here fails because a file, a tool or a library is missing. Where a data
sheet fits the device, it fills in what no driver tells (bandwidth, rates).
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tilewise.machine.device import KIB, MIB, Capability, Device, dtype_name, find

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_ROOT = Path("/")  # where Linux's /proc and /sys hang; tests put a made-up tree here


def detect(device: str | None = None) -> Device:
    """Describe "cpu", "cuda" ("cuda:1"), "mps", or by default the best of them that works here.

    On AMD's builds of torch, "cuda" is the AMD GPU.

    Raises:
        ValueError: the device is not one of these, or is not present.

    >>> detect("cpu").sms >= 1
    True
    """
    kind, _, index = (device or best_device()).partition(":")
    if kind == "cpu":
        return _cpu()
    if kind not in {"cuda", "mps"} or (index and not index.isdigit()):
        raise ValueError(f"device must be cpu, cuda, cuda:N or mps; got {device!r}")
    if kind == "cuda" and _cuda_count() > int(index or 0):
        return _cuda(int(index or 0))
    if kind == "mps" and best_device() == "mps":
        return _mps()
    raise ValueError(f"device {device!r} is not present on this machine; torch finds {best_device()!r}")


def best_device() -> str:
    """Name the device that torch would compute fastest on: "cuda", "mps" or "cpu" (also where torch is missing)."""
    if _cuda_count():
        return "cuda"
    try:
        import torch
    except ImportError:
        return "cpu"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _cuda_count() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _sheet(name: str) -> Device:
    """Give the data sheet that goes by a driver's name, or an empty one."""
    try:
        return find(name)
    except ValueError:
        return Device(name, source="driver")


def _cuda(index: int) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(index)

    def told(name: str) -> int | None:  # older torch releases lack some of these
        value = getattr(properties, name, None)
        return value if isinstance(value, int) and value > 0 else None

    capability: Capability = (properties.major, properties.minor)
    if torch.version.hip:
        capability = properties.gcnArchName.partition(":")[0]
    sheet = _sheet(properties.name)
    if sheet.sms not in {None, properties.multi_processor_count}:
        # A slice of the GPU, or another model under the same name: its speeds are not the sheet's.
        sheet = Device(sheet.name, source="driver")
    clock_khz = told("clock_rate")
    return replace(
        sheet,
        name=properties.name,
        source=sheet.source if sheet.source == "driver" else f"driver; speeds: {sheet.source}",
        sms=properties.multi_processor_count,
        capability=capability,
        clock_hz=clock_khz * 1e3 if clock_khz else sheet.clock_hz,
        shared_per_sm=told("shared_memory_per_multiprocessor") or sheet.shared_per_sm,
        shared_per_block=told("shared_memory_per_block_optin") or sheet.shared_per_block,
        registers_per_sm=told("regs_per_multiprocessor") or sheet.registers_per_sm,
        l2_bytes=told("L2_cache_size") or sheet.l2_bytes,
        memory_bytes=properties.total_memory,
    )


def _mps() -> Device:
    name = _sysctl("machdep.cpu.brand_string") or "Apple GPU"
    return replace(_sheet(name), name=name, memory_bytes=_total_memory())


def _cpu() -> Device:
    caches = _linux_caches() or {
        level: _whole(_sysctl(key)) for level, key in (("L1", "hw.l1dcachesize"), ("L2", "hw.l2cachesize"))
    }
    return Device(
        name=_cpu_name(),
        sms=_cores(),
        source="operating system",
        clock_hz=_cpu_clock(),
        l1_bytes=caches.get("L1"),
        l2_bytes=caches.get("L2"),
        l3_bytes=caches.get("L3"),
        memory_bytes=_total_memory(),
    )


def _read(path: str) -> str:
    """Read a small system file under the root, or give "" where it is not there."""
    try:
        return (_ROOT / path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _run(*command: str) -> str:
    """Give what a command prints, or "" where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _sysctl(name: str) -> str:
    return _run("sysctl", "-n", name) if sys.platform == "darwin" else ""


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _cpuinfo(field: str) -> str:
    found = re.search(rf"^{re.escape(field)}\s*:\s*(.+)$", _read("proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else ""


def _cpu_name() -> str:
    return (
        _cpuinfo("model name")
        or _sysctl("machdep.cpu.brand_string")
        or platform.processor()
        or platform.machine()
        or "CPU"
    )


def _cores() -> int:
    """Count the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _cpu_clock() -> float | None:
    most_khz = _whole(_read("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"))
    if most_khz:
        return most_khz * 1e3
    now_mhz = _cpuinfo("cpu MHz")
    return float(now_mhz) * 1e6 if re.fullmatch(r"\d+(\.\d+)?", now_mhz) else None


def _linux_caches() -> dict[str, int | None]:
    caches: dict[str, int | None] = {}
    for index in range(8):
        folder = f"sys/devices/system/cpu/cpu0/cache/index{index}"
        size = re.fullmatch(r"(\d+)([KM]?)", _read(f"{folder}/size"))
        if size and _read(f"{folder}/type") != "Instruction":
            caches[f"L{_read(f'{folder}/level')}"] = int(size[1]) * {"": 1, "K": KIB, "M": MIB}[size[2]]
    return caches


def _pages(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf; macOS lacks some of its names
        return None


def _cgroup_room() -> tuple[int | None, int | None]:
    """Give a container's memory limit and what it leaves free, where there is a limit."""
    for limit_file, used_file in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, used = _whole(_read(limit_file)), _whole(_read(used_file))
        if limit is not None and used is not None:
            return limit, max(limit - used, 0)
    return None, None


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _total_memory() -> int | None:
    return _least(_pages("SC_PHYS_PAGES"), _cgroup_room()[0])


def free_memory(device: str = "cpu") -> int | None:
    """Give the bytes of memory free on "cpu", "cuda" or "cuda:1"; None where the system does not say.

    On a CPU that is what the kernel can hand out without swapping, within a container's limit.
    """
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(torch.device(device))[0]
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", _read("proc/meminfo"), re.MULTILINE)
    free = int(available[1]) * KIB if available else _pages("SC_AVPHYS_PAGES")
    return _least(free, _cgroup_room()[1])


def _version(*names: str) -> str | None:
    """Give the installed version of the first of these distributions, without importing it."""
    return next((found.version for name in names for found in metadata.distributions(name=name)), None)


def _driver() -> str | None:
    """Give the version of NVIDIA's or AMD's kernel driver."""
    nvidia = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _read("proc/driver/nvidia/version"))
    if nvidia:
        return nvidia[1]
    told = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return told[0] if told else _read("sys/module/amdgpu/version") or None


def environment(device: str | None = None) -> dict[str, str | int | float | None]:
    """Give what a benchmark's record must say about where it ran; every value fits in JSON.

    Keys: tilewise, python, system, numpy, torch, triton, cuda, hip, cudnn, driver, device, capability, sms, clock_hz,
    memory_bytes, memory_free, cpu, cores, threads.
    """
    from tilewise import __version__

    device = device or best_device()
    described = detect(device)
    record: dict[str, str | int | float | None] = {
        "tilewise": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "triton": _version("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"),
        "cuda": None,
        "hip": None,
        "cudnn": None,
        "driver": _driver() if device.startswith("cuda") else None,
        "device": described.name,
        "capability": described.target,
        "sms": described.sms,
        "clock_hz": described.clock_hz,
        "memory_bytes": described.memory_bytes,
        "memory_free": free_memory(device),
        "cpu": _cpu_name(),
        "cores": _cores(),
        "threads": None,
    }
    try:
        import torch
    except ImportError:
        return record
    record["cuda"], record["hip"] = torch.version.cuda, torch.version.hip
    record["cudnn"] = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    record["threads"] = torch.get_num_threads()
    return record


class Rates(NamedTuple):
    """Speeds measured here: ``bandwidth`` of a copy, in bytes read and written a second; ``matmul`` in operations."""

    dtype: str
    bandwidth: float
    matmul: float

    def on(self, device: Device) -> Device:
        """Give the device with these speeds in place of the sheet's.

        >>> Rates("float32", 2e10, 1e11).on(Device("mine")).ridge_point("fp32")
        5.0
        """
        return replace(
            device,
            source=f"{device.source}; bandwidth and {self.dtype} rate measured",
            bandwidth=self.bandwidth,
            rates={**device.rates, self.dtype: self.matmul},
            derived=tuple(dict.fromkeys((*device.derived, "bandwidth", "rates"))),
        )


def measure_rates(device: str | None = None, dtype: object = None) -> Rates:
    """Time a copy and a square matrix product in torch, in about a second at most.

    Sizes are beyond the caches: 256 MiB and 1024 x 1024 on a CPU, 1 GiB and 8192 x 8192 on CUDA and ROCm, 512 MiB and
    4096 x 4096 on MPS. The best of several runs counts, since everything that disturbs a run makes it slower. float32
    is measured as torch is set, with TF32 where that is allowed.

    Args:
        device: as in `detect`.
        dtype: dtype of the product; by default float32 on a CPU, else bfloat16, or float16 where that is emulated.

    Raises:
        ValueError: torch has no matrix product of this dtype.
    """
    import torch

    device = device or best_device()
    kind = device.partition(":")[0]
    name, copy_bytes, size = {"cuda": ("bfloat16", 1024 * MIB, 8192), "mps": ("float16", 512 * MIB, 4096)}.get(
        kind, ("float32", 256 * MIB, 1024)
    )
    if kind == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        name = "float16"
    if dtype is not None:
        name = dtype_name(dtype)
    if name not in {"float16", "bfloat16", "float32", "float64"}:
        raise ValueError(f"dtype must be float16, bfloat16, float32 or float64 to be measured; got {name}")
    return _measure(torch.device(device), name, min(copy_bytes, (free_memory(device) or 8 * copy_bytes) // 8), size)


def _measure(device: torch.device, dtype: str, copy_bytes: int, size: int) -> Rates:
    import torch

    origin = torch.ones(copy_bytes // 4, dtype=torch.float32, device=device)
    copied = torch.empty_like(origin)
    copy_seconds = _best_seconds(lambda: copied.copy_(origin), device)
    # Values like those of real work: a GPU that multiplies zeros draws less power and keeps a higher clock.
    values: torch.dtype = getattr(torch, dtype)
    left, right = (torch.randn(size, size, device=device).to(values) for _ in range(2))
    result = torch.empty_like(left)
    matmul_seconds = _best_seconds(lambda: torch.matmul(left, right, out=result), device)
    return Rates(dtype, 2 * 4 * origin.numel() / copy_seconds, 2 * size**3 / matmul_seconds)


def _synchronise(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; a CPU's operations are done when they return."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _best_seconds(work: Callable[[], object], device: torch.device, budget: float = 0.2) -> float:
    """Give the shortest time of one run, in batches long enough that waiting for the device costs little of them."""

    def batch(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        _synchronise(device)
        return (time.perf_counter() - start) / repeats

    batch(1)  # allocates, compiles, wakes the clocks
    repeats = max(1, int(0.02 / batch(1)))
    begin = time.perf_counter()
    times = [batch(repeats) for _ in range(3)]
    while time.perf_counter() - begin < budget:
        times.append(batch(repeats))
    return min(times)
