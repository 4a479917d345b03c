"""Data sheets: what a device has at each level of memory, and how fast it multiplies.

Numbers are bytes, hertz, bytes a second and floating-point operations a second; matrix rates are dense, with sums in
float32, and never count structured sparsity. ``None`` means that the figure is not known. `find` looks a sheet up by
name, `tilewise.machine.detect` describes the machine at hand, and a `Device` made by hand describes any other:

>>> laptop = Device("my laptop", sms=8, bandwidth=50e9, rates={"float32": 400e9})
>>> laptop.ridge_point("float32")
8.0
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

KIB, MIB, GIB = 2**10, 2**20, 2**30

ITEMSIZE = {"float64": 8, "float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
_SHORT_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "tf32": "tfloat32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
}

Capability = tuple[int, int] | str | None


def dtype_name(dtype: object) -> str:
    """Give the one name used here for a dtype: a short name, or a NumPy or torch dtype.

    >>> dtype_name("bf16"), dtype_name("torch.float16"), dtype_name("float8_e4m3fn")
    ('bfloat16', 'float16', 'float8')
    """
    text = str(dtype).removeprefix("torch.")
    name = "float8" if text.startswith("float8") else _SHORT_DTYPES.get(text, text)
    if name not in ITEMSIZE:
        raise ValueError(f"dtype {text!r} has no matrix rate here; use one of {', '.join(_SHORT_DTYPES)}")
    return name


def target_name(capability: Capability) -> str:
    """Name a compilation target: (9, 0) is "sm_90"; AMD's names lose their feature flags; None is "cpu".

    >>> target_name((12, 1)), target_name("gfx942:sramecc+:xnack-"), target_name(None)
    ('sm_121', 'gfx942', 'cpu')
    """
    if capability is None:
        return "cpu"
    if isinstance(capability, str):
        return capability.partition(":")[0]
    return f"sm_{capability[0]}{capability[1]}"


@dataclass(frozen=True)
class Device:
    """One device, as its data sheet or its driver describes it.

    Args:
        name: what to call it.
        sms: streaming multiprocessors; compute units (AMD), GPU cores (Apple), cores (CPU).
        source: where the figures come from.
        capability: (major, minor) on NVIDIA, "gfx942" and the like on AMD, "apple9" on Apple, None on a CPU.
        clock_hz: boost clock.
        l1_bytes: a CPU core's first-level data cache.
        shared_per_sm, shared_per_block: on-chip memory that a kernel manages itself, of one SM and the most that one
            block may ask for.
        registers_per_sm: 32-bit registers.
        l2_bytes: second-level cache: of the whole GPU, or of one CPU core.
        l3_bytes: the cache behind it, where there is one.
        memory_bytes: main memory; a vendor's "GB" of memory is taken as 2**30 bytes.
        bandwidth: main memory, bytes a second.
        onchip_bandwidth: on-chip memory of all SMs together, bytes a second. On GPUs 128 bytes a clock an SM.
        rates: dense matrix rate by dtype, operations a second; ``"float32"`` is exact float32, ``"tfloat32"`` apart.
        derived: the fields that were computed or measured where the source prints no figure.
        aliases: other names, as drivers report them.
    """

    name: str
    sms: int | None = None
    source: str = "given by hand"
    capability: Capability = None
    clock_hz: float | None = None
    l1_bytes: int | None = None
    shared_per_sm: int | None = None
    shared_per_block: int | None = None
    registers_per_sm: int | None = None
    l2_bytes: int | None = None
    l3_bytes: int | None = None
    memory_bytes: int | None = None
    bandwidth: float | None = None
    onchip_bandwidth: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    derived: tuple[str, ...] = ()
    aliases: tuple[str, ...] = field(default=(), repr=False)

    @property
    def target(self) -> str:
        """The name of what kernels are compiled for: "sm_90", "gfx942", "cpu"."""
        return target_name(self.capability)

    def ridge_point(self, dtype: object) -> float | None:
        """Give the operations a byte of main memory must feed before arithmetic is the limit: rate / bandwidth.

        Source: Williams, Waterman and Patterson 2009, "Roofline". None where a figure is missing.

        >>> round(find("A100").ridge_point("bf16"))
        153
        """
        rate = self.rates.get(dtype_name(dtype))
        if rate is None or self.bandwidth is None:
            return None
        return rate / self.bandwidth

    def what_if(
        self, *, bandwidth: float | None = None, onchip_bandwidth: float | None = None, flops: float | None = None
    ) -> Device:
        """Give the same device with other speeds; ``flops`` replaces the rate of every dtype.

        >>> a100 = find("A100 80GB SXM")
        >>> a100.what_if(bandwidth=a100.onchip_bandwidth).ridge_point("bf16") < 17
        True
        """
        for name, value in (("bandwidth", bandwidth), ("onchip_bandwidth", onchip_bandwidth), ("flops", flops)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, in bytes or operations a second; got {value}")
        return replace(
            self,
            bandwidth=self.bandwidth if bandwidth is None else bandwidth,
            onchip_bandwidth=self.onchip_bandwidth if onchip_bandwidth is None else onchip_bandwidth,
            rates=self.rates if flops is None else dict.fromkeys(ITEMSIZE, flops),
        )


def _onchip(sms: int, clock_hz: float) -> float:
    """Give the bandwidth of all SMs' on-chip memory: 32 banks of 4 bytes, one access a clock."""
    return sms * 128 * clock_hz


_ONCHIP = "onchip_bandwidth"  # no data sheet prints it; every GPU below derives it by _onchip
_HOPPER_RATES = {
    "float16": 989.4e12,
    "bfloat16": 989.4e12,
    "tfloat32": 494.7e12,
    "float8": 1978.9e12,
    "float32": 66.9e12,
}

DEVICES = (
    Device(
        name="H200",
        sms=132,
        source="NVIDIA H200 Tensor Core GPU data sheet; clock and rates: NVIDIA H100 Tensor Core GPU Architecture; "
        "L2 as the driver reports it",
        capability=(9, 0),
        clock_hz=1.98e9,
        shared_per_sm=228 * KIB,
        shared_per_block=227 * KIB,
        registers_per_sm=65536,
        l2_bytes=60 * MIB,
        memory_bytes=141 * GIB,
        bandwidth=4.8e12,
        onchip_bandwidth=_onchip(132, 1.98e9),
        rates=_HOPPER_RATES,
        derived=(_ONCHIP,),
        aliases=("NVIDIA H200",),
    ),
    Device(
        name="H100 SXM",
        sms=132,
        source="NVIDIA H100 Tensor Core GPU data sheet; NVIDIA H100 Tensor Core GPU Architecture",
        capability=(9, 0),
        clock_hz=1.98e9,
        shared_per_sm=228 * KIB,
        shared_per_block=227 * KIB,
        registers_per_sm=65536,
        l2_bytes=50 * MIB,
        memory_bytes=80 * GIB,
        bandwidth=3.35e12,
        onchip_bandwidth=_onchip(132, 1.98e9),
        rates=_HOPPER_RATES,
        derived=(_ONCHIP,),
        aliases=("NVIDIA H100 80GB HBM3",),
    ),
    Device(
        name="A100 80GB SXM",
        sms=108,
        source="NVIDIA A100 80GB Tensor Core GPU data sheet; NVIDIA A100 Tensor Core GPU Architecture",
        capability=(8, 0),
        clock_hz=1.41e9,
        shared_per_sm=164 * KIB,
        shared_per_block=163 * KIB,
        registers_per_sm=65536,
        l2_bytes=40 * MIB,
        memory_bytes=80 * GIB,
        bandwidth=2.039e12,
        onchip_bandwidth=_onchip(108, 1.41e9),
        rates={"float16": 312e12, "bfloat16": 312e12, "tfloat32": 156e12, "float32": 19.5e12},
        derived=(_ONCHIP,),
        aliases=("NVIDIA A100-SXM4-80GB",),
    ),
    Device(
        name="L40S",
        sms=142,
        source="NVIDIA L40S GPU data sheet; clock and L2: NVIDIA Ada GPU Architecture",
        capability=(8, 9),
        clock_hz=2.52e9,
        shared_per_sm=100 * KIB,
        shared_per_block=99 * KIB,
        registers_per_sm=65536,
        l2_bytes=96 * MIB,
        memory_bytes=48 * GIB,
        bandwidth=864e9,
        onchip_bandwidth=_onchip(142, 2.52e9),
        rates={
            "float16": 362.05e12,
            "bfloat16": 362.05e12,
            "tfloat32": 183e12,
            "float8": 733e12,
            "float32": 91.6e12,
        },
        derived=(_ONCHIP,),
        aliases=("NVIDIA L40S",),
    ),
    Device(
        name="RTX 4090",
        sms=128,
        source="NVIDIA Ada GPU Architecture (16-bit rates with float32 sums, half of those with float16 sums)",
        capability=(8, 9),
        clock_hz=2.52e9,
        shared_per_sm=100 * KIB,
        shared_per_block=99 * KIB,
        registers_per_sm=65536,
        l2_bytes=72 * MIB,
        memory_bytes=24 * GIB,
        bandwidth=1.008e12,
        onchip_bandwidth=_onchip(128, 2.52e9),
        rates={
            "float16": 165.2e12,
            "bfloat16": 165.2e12,
            "tfloat32": 82.6e12,
            "float8": 330.3e12,
            "float32": 82.6e12,
        },
        derived=(_ONCHIP,),
        aliases=("NVIDIA GeForce RTX 4090",),
    ),
    Device(
        name="RTX 5090",
        sms=170,
        source="NVIDIA RTX Blackwell GPU Architecture (16-bit rates with float32 sums)",
        capability=(12, 0),
        clock_hz=2.407e9,
        shared_per_sm=100 * KIB,
        shared_per_block=99 * KIB,
        registers_per_sm=65536,
        l2_bytes=96 * MIB,
        memory_bytes=32 * GIB,
        bandwidth=1.792e12,
        onchip_bandwidth=_onchip(170, 2.407e9),
        rates={
            "float16": 209.5e12,
            "bfloat16": 209.5e12,
            "tfloat32": 104.8e12,
            "float8": 419e12,
            "float32": 104.8e12,
        },
        derived=(_ONCHIP,),
        aliases=("NVIDIA GeForce RTX 5090",),
    ),
    Device(
        name="GB10",
        sms=48,
        # Published: 1 PFLOP/s of sparse float4 and about 31 TFLOP/s of float32. With the RTX 5090's operations an SM a
        # clock, both give 2.5 GHz; the other rates follow from that clock.
        source="NVIDIA DGX Spark data sheet; float32 rate: NVIDIA at Hot Chips 2025; L2 as the driver reports it",
        capability=(12, 1),
        clock_hz=31e12 / (48 * 256),
        shared_per_sm=100 * KIB,
        shared_per_block=99 * KIB,
        registers_per_sm=65536,
        l2_bytes=24 * MIB,
        memory_bytes=128 * GIB,
        bandwidth=273e9,
        onchip_bandwidth=_onchip(48, 31e12 / (48 * 256)),
        rates={"float16": 62e12, "bfloat16": 62e12, "tfloat32": 31e12, "float8": 124e12, "float32": 31e12},
        derived=(_ONCHIP, "clock_hz", "rates"),
        aliases=("NVIDIA GB10",),
    ),
    Device(
        name="B200",
        sms=148,
        source="NVIDIA DGX B200 (memory) and HGX B200 (rates) data sheets, one of eight GPUs, sparse rates halved; "
        "clock from the float32 rate; L2 measured by Chips and Cheese, 2025",
        capability=(10, 0),
        clock_hz=75e12 / (148 * 256),
        shared_per_sm=228 * KIB,
        shared_per_block=227 * KIB,
        registers_per_sm=65536,
        l2_bytes=126 * MIB,
        memory_bytes=180 * GIB,
        bandwidth=8e12,
        onchip_bandwidth=_onchip(148, 75e12 / (148 * 256)),
        rates={
            "float16": 2.25e15,
            "bfloat16": 2.25e15,
            "tfloat32": 1.125e15,
            "float8": 4.5e15,
            "float32": 75e12,
        },
        derived=(_ONCHIP, "clock_hz", "l2_bytes"),
        aliases=("NVIDIA B200",),
    ),
    Device(
        name="MI300X",
        sms=304,
        source="AMD Instinct MI300X data sheet; caches and local data share: AMD CDNA 3 Architecture white paper",
        capability="gfx942",
        clock_hz=2.1e9,
        shared_per_sm=64 * KIB,
        shared_per_block=64 * KIB,
        registers_per_sm=131072,
        l2_bytes=8 * 4 * MIB,
        l3_bytes=256 * MIB,
        memory_bytes=192 * GIB,
        bandwidth=5.3e12,
        onchip_bandwidth=_onchip(304, 2.1e9),
        rates={
            "float16": 1307.4e12,
            "bfloat16": 1307.4e12,
            "tfloat32": 653.7e12,
            "float8": 2614.9e12,
            "float32": 163.4e12,
        },
        derived=(_ONCHIP,),
        aliases=("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
    ),
    Device(
        name="M4 Max",
        sms=40,
        # Apple prints no clock and no rate. The clock is the top step of its power meter; a core has 128 lanes.
        source="Apple M4 Max technical specifications, 40-core GPU; clock as powermetrics reports it, 128 lanes a core",
        capability="apple9",
        clock_hz=1.578e9,
        shared_per_block=32 * KIB,
        memory_bytes=128 * GIB,
        bandwidth=546e9,
        rates=dict.fromkeys(("float32", "float16", "bfloat16"), 40 * 128 * 2 * 1.578e9),
        derived=("clock_hz", "rates"),
        aliases=("Apple M4 Max",),
    ),
    Device(
        name="T4",
        sms=40,
        source="NVIDIA T4 Tensor Core GPU data sheet; NVIDIA Turing GPU Architecture",
        capability=(7, 5),
        clock_hz=1.59e9,
        shared_per_sm=64 * KIB,
        shared_per_block=64 * KIB,
        registers_per_sm=65536,
        l2_bytes=4 * MIB,
        memory_bytes=16 * GIB,
        bandwidth=320e9,
        onchip_bandwidth=_onchip(40, 1.59e9),
        rates={"float16": 65e12, "float32": 8.1e12},
        derived=(_ONCHIP,),
        aliases=("Tesla T4", "NVIDIA T4"),
    ),
)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find(name: str) -> Device:
    """Give the data sheet of a device by its name, a part of it that fits only one, or its driver's name for it.

    Case, spaces and hyphens do not matter.

    Raises:
        ValueError: no sheet fits, or several do; the message lists the names.

    >>> find("rtx4090").sms, find("NVIDIA A100-SXM4-80GB").name
    (128, 'A100 80GB SXM')
    """
    wanted = _plain(name)
    exact = [device for device in DEVICES if wanted in map(_plain, (device.name, *device.aliases))]
    partial = [device for device in DEVICES if wanted and wanted in _plain(device.name)]
    fitting = exact or partial
    if len(fitting) != 1:
        found = f"fits {' and '.join(device.name for device in fitting)}" if fitting else "is not among the data sheets"
        raise ValueError(f"device {name!r} {found}; choose one of {', '.join(device.name for device in DEVICES)}")
    return fitting[0]
