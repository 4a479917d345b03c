"""Data sheets, and what is found out about the machine at hand."""

from __future__ import annotations

import builtins
import json
import math
import os
import pickle
import platform
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from tilewise.machine import detect
from tilewise.machine.device import DEVICES, GIB, KIB, MIB, Device, dtype_name, find, target_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

NAMED = ("H200", "H100", "A100", "L40S", "RTX 4090", "RTX 5090", "GB10", "B200", "MI300X", "M4 Max", "T4")


@pytest.mark.parametrize("name", NAMED)
def test_every_named_device_has_a_sheet_with_its_source(name: str) -> None:
    device = find(name)
    assert device.source
    assert device.bandwidth
    assert device.memory_bytes
    assert device.rates["float32"] > 0
    assert device.ridge_point("float16") is not None
    for field in device.derived:
        assert getattr(device, field) is not None


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: str(device.name))
def test_rates_are_dense_and_in_proportion(device: Device) -> None:
    rates = device.rates
    assert set(rates) <= {"float32", "tfloat32", "float16", "bfloat16", "float8"}
    if "tfloat32" in rates:
        assert rates["tfloat32"] * 2 == pytest.approx(rates["float16"], rel=0.02)
    if "float8" in rates:
        assert rates["float8"] == pytest.approx(2 * rates["float16"], rel=0.03)
    if isinstance(device.capability, tuple) and device.sms and device.clock_hz:
        # 128 lanes an SM (64 on Turing and on the A100), two operations a clock: what vendors call the float32 rate.
        lanes = 64 if device.capability in {(7, 5), (8, 0)} else 128
        assert rates["float32"] == pytest.approx(device.sms * lanes * 2 * device.clock_hz, rel=0.02)


def test_the_on_chip_bandwidth_of_an_a100_is_19_5_tb_a_second() -> None:
    bandwidth = find("A100").onchip_bandwidth
    assert bandwidth is not None
    assert round(bandwidth / 1e12, 1) == 19.5
    for device in DEVICES:
        if device.onchip_bandwidth is not None and device.sms and device.clock_hz:
            assert device.onchip_bandwidth == device.sms * 128 * device.clock_hz


def test_every_alias_finds_its_sheet_and_no_two_share_a_name() -> None:
    names = [name for device in DEVICES for name in (device.name, *device.aliases)]
    assert len(set(map(str.lower, names))) == len(names)
    for device in DEVICES:
        for name in (device.name, *device.aliases, device.name.lower().replace(" ", "-")):
            assert find(name) is device


@pytest.mark.parametrize("name", ["GTX 1080", "NVIDIA H100 PCIe", ""])
def test_an_unknown_device_is_an_error_that_lists_the_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not among the data sheets; choose one of H200, H100 SXM, .*, T4"):
        find(name)


def test_a_name_that_fits_several_devices_is_an_error_that_says_which() -> None:
    with pytest.raises(ValueError, match="device 'RTX' fits RTX 4090 and RTX 5090; choose one of"):
        find("RTX")


def test_what_if_changes_speeds_and_nothing_else() -> None:
    a100 = find("A100")
    other = a100.what_if(bandwidth=1e12, onchip_bandwidth=2e12, flops=3e12)
    assert (other.bandwidth, other.onchip_bandwidth) == (1e12, 2e12)
    assert set(other.rates.values()) == {3e12}
    assert other.ridge_point("fp8") == 3.0
    assert (other.name, other.sms, other.l2_bytes) == (a100.name, a100.sms, a100.l2_bytes)
    assert a100.what_if() == a100


@pytest.mark.parametrize("name", ["bandwidth", "onchip_bandwidth", "flops"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_what_if_refuses_speeds_that_are_none(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0, in bytes or operations a second; got"):
        find("A100").what_if(**{name: value})


def test_a_ridge_point_needs_both_figures() -> None:
    assert find("T4").ridge_point("bf16") is None
    assert Device("no bandwidth", rates={"float32": 1.0}).ridge_point("fp32") is None


def test_devices_can_be_hashed_compared_and_pickled() -> None:
    assert len({*DEVICES, find("T4")}) == len(DEVICES)
    assert pickle.loads(pickle.dumps(find("T4"))) == find("T4")  # noqa: S301


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("fp16", "float16"),
        (torch.bfloat16, "bfloat16"),
        (torch.float8_e5m2, "float8"),
        ("tf32", "tfloat32"),
        (torch.float64, "float64"),
    ],
)
def test_a_dtype_goes_by_one_name(given: object, expected: str) -> None:
    assert dtype_name(given) == expected


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype 'int64' has no matrix rate here; use one of fp64, fp32, tf32, fp16"):
        dtype_name(torch.int64)


def test_targets_are_named_as_compilers_name_them() -> None:
    assert [find(name).target for name in ("H200", "B200", "MI300X")] == ["sm_90", "sm_100", "gfx942"]
    assert target_name("gfx90a:sramecc+") == "gfx90a"


# The machine at hand.


def test_importing_the_package_of_machines_does_not_import_torch() -> None:
    modules = ("device", "detect", "shape", "tiles", "cost")
    code = "import sys\n" + "".join(f"import tilewise.machine.{name}\n" for name in modules)
    done = subprocess.run(
        [sys.executable, "-c", code + "assert not {'torch', 'numpy'} & set(sys.modules)"], check=False
    )
    assert done.returncode == 0


def test_this_machine_can_be_described_and_recorded() -> None:
    device = detect.detect("cpu")
    assert device.name
    assert device.sms is not None
    assert device.sms >= 1
    assert device.target == "cpu"
    record = detect.environment("cpu")
    assert json.loads(json.dumps(record)) == record
    assert record["torch"] == metadata.version("torch")
    assert record["threads"] == torch.get_num_threads()
    assert record["device"] == record["cpu"] == device.name
    free, total = detect.free_memory(), device.memory_bytes
    assert free is None or total is None or 0 < free <= total


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda-1"])
def test_a_device_of_another_kind_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"device must be cpu, cuda, cuda:N or mps; got '{name}'"):
        detect.detect(name)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_device_that_is_not_present_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"device '{name}' is not present on this machine; torch finds 'cpu'"):
        detect.detect(name)
    assert detect.detect().target == "cpu"


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Mapping[str, str]], None]:
    """Put made-up files where /proc and /sys are looked for."""
    monkeypatch.setattr(detect, "_ROOT", tmp_path)

    def write(files: Mapping[str, str]) -> None:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text, encoding="utf-8")

    return write


CPU = "sys/devices/system/cpu/cpu0"
LINUX = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Made-up CPU 9000\ncpu MHz\t\t: 2600.5\n",
    "proc/meminfo": "MemTotal:       2000 kB\nMemAvailable:    1000 kB\n",
    f"{CPU}/cpufreq/cpuinfo_max_freq": "4000000\n",
    f"{CPU}/cache/index0/size": "48K\n",
    f"{CPU}/cache/index0/level": "1\n",
    f"{CPU}/cache/index0/type": "Data\n",
    f"{CPU}/cache/index1/size": "32K\n",
    f"{CPU}/cache/index1/level": "1\n",
    f"{CPU}/cache/index1/type": "Instruction\n",
    f"{CPU}/cache/index2/size": "2M\n",
    f"{CPU}/cache/index2/level": "2\n",
    f"{CPU}/cache/index2/type": "Unified\n",
}


def test_a_linux_cpu_is_read_from_proc_and_sys(tree: Callable[[Mapping[str, str]], None]) -> None:
    tree(LINUX)
    device = detect.detect("cpu")
    assert device.name == "Made-up CPU 9000"
    assert device.clock_hz == 4e9
    assert (device.l1_bytes, device.l2_bytes, device.l3_bytes) == (48 * KIB, 2 * MIB, None)
    assert detect.free_memory() == 1000 * KIB


def test_a_container_limit_bounds_total_and_free_memory(tree: Callable[[Mapping[str, str]], None]) -> None:
    tree({**LINUX, "sys/fs/cgroup/memory.max": "5000", "sys/fs/cgroup/memory.current": "4400"})
    assert detect.detect("cpu").memory_bytes == 5000
    assert detect.free_memory() == 600


def test_a_container_without_a_limit_changes_nothing(tree: Callable[[Mapping[str, str]], None]) -> None:
    tree({**LINUX, "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "4400"})
    assert detect.free_memory() == 1000 * KIB


def test_the_current_clock_stands_in_for_the_boost_clock(tree: Callable[[Mapping[str, str]], None]) -> None:
    tree({"proc/cpuinfo": LINUX["proc/cpuinfo"]})
    assert detect.detect("cpu").clock_hz == 2600.5e6


def test_a_system_that_tells_nothing_gives_none(
    tree: Callable[[Mapping[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree({})
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "sysconf", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "")
    device = detect.detect("cpu")
    assert (device.name, device.sms) == ("CPU", 1)
    assert device.clock_hz is device.l1_bytes is device.l2_bytes is device.memory_bytes is None
    assert detect.free_memory() is None


def test_without_torch_the_cpu_is_described_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_torch(name: str, *rest: object) -> object:
        if name.partition(".")[0] == "torch":
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_torch)
    assert detect.best_device() == "cpu"
    assert detect.detect().target == "cpu"
    assert detect.environment()["threads"] is None


def test_a_mac_is_asked_through_sysctl(
    tree: Callable[[Mapping[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree({})
    answers = {"machdep.cpu.brand_string": "Apple M4 Max", "hw.l1dcachesize": "65536", "hw.l2cachesize": "4194304"}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(detect, "_run", lambda *command: answers.get(command[-1], ""))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    cpu = detect.detect("cpu")
    assert (cpu.name, cpu.l1_bytes, cpu.l2_bytes) == ("Apple M4 Max", 64 * KIB, 4 * MIB)
    gpu = detect.detect()
    assert (gpu.name, gpu.target, gpu.bandwidth) == ("Apple M4 Max", "apple9", 546e9)


H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=140 * GIB,
    shared_memory_per_multiprocessor=228 * KIB,
    shared_memory_per_block_optin=227 * KIB,
    regs_per_multiprocessor=65536,
    L2_cache_size=60 * MIB,
    clock_rate=1980000,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tree: Callable[[Mapping[str, str]], None]) -> Callable[..., None]:
    """Let torch report a GPU with these properties."""
    tree(LINUX)

    def present(hip: str | None = None, **properties: object) -> None:
        told = SimpleNamespace(**{**vars(H200), **properties})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: told)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (7 * GIB, 140 * GIB))
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)

    return present


def test_a_gpu_is_described_by_its_driver_and_its_sheet(gpu: Callable[..., None]) -> None:
    gpu()
    device = detect.detect()
    assert (device.name, device.target, device.sms) == ("NVIDIA H200", "sm_90", 132)
    assert (device.memory_bytes, device.l2_bytes) == (140 * GIB, 60 * MIB)
    assert (device.bandwidth, device.rates["bfloat16"]) == (4.8e12, 989.4e12)
    assert "driver" in device.source
    assert "NVIDIA H200 Tensor Core GPU data sheet" in device.source
    assert detect.free_memory("cuda") == 7 * GIB
    with pytest.raises(ValueError, match="device 'cuda:1' is not present"):
        detect.detect("cuda:1")


def test_a_slice_of_a_gpu_does_not_inherit_the_speeds_of_the_whole(gpu: Callable[..., None]) -> None:
    gpu(multi_processor_count=16, L2_cache_size=None, clock_rate=0)
    device = detect.detect("cuda:0")
    assert device.sms == 16
    assert device.bandwidth is device.l2_bytes is device.clock_hz is None
    assert not device.rates


def test_a_gpu_without_a_sheet_gives_what_its_driver_tells(gpu: Callable[..., None]) -> None:
    gpu(name="NVIDIA Future 9000", major=14)
    device = detect.detect()
    assert (device.name, device.target, device.source) == ("NVIDIA Future 9000", "sm_140", "driver")
    assert (device.shared_per_block, device.clock_hz) == (227 * KIB, 1.98e9)
    assert device.bandwidth is None


def test_an_amd_gpu_goes_by_its_architecture(gpu: Callable[..., None]) -> None:
    gpu(hip="6.4", name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304)
    device = detect.detect()
    assert (device.target, device.bandwidth) == ("gfx942", 5.3e12)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\n", "570.86.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n", "580.159.04"),
    ],
)
def test_the_driver_is_recorded(
    gpu: Callable[..., None], tree: Callable[[Mapping[str, str]], None], kernel: str, expected: str
) -> None:
    gpu()
    tree({"proc/driver/nvidia/version": kernel})
    record = detect.environment()
    assert (record["driver"], record["cudnn"], record["device"]) == (expected, 91002, "NVIDIA H200")


def test_the_driver_is_asked_of_nvidia_smi_or_amdgpu_where_proc_is_silent(
    gpu: Callable[..., None], tree: Callable[[Mapping[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu()
    monkeypatch.setattr(detect, "_run", lambda *command: "555.42\n555.42" if command[0] == "nvidia-smi" else "")
    assert detect.environment()["driver"] == "555.42"
    monkeypatch.setattr(detect, "_run", lambda *_command: "")
    assert detect.environment()["driver"] is None
    tree({"sys/module/amdgpu/version": "6.12.12\n"})
    assert detect.environment()["driver"] == "6.12.12"


def test_a_command_that_is_missing_or_fails_tells_nothing() -> None:
    assert detect._run("no-such-command-anywhere") == ""
    assert detect._run(sys.executable, "-c", "raise SystemExit(3)") == ""
    assert detect._run(sys.executable, "-c", "print('told')") == "told"


def test_rates_are_measured_on_this_cpu() -> None:
    rates = detect.measure_rates("cpu")
    assert rates.dtype == "float32"
    assert 1e8 < rates.bandwidth < 1e14  # any machine that runs this test
    assert 1e8 < rates.matmul < 1e16
    device = rates.on(detect.detect("cpu"))
    assert (device.bandwidth, device.rates["float32"]) == (rates.bandwidth, rates.matmul)
    assert "measured" in device.source
    assert {"bandwidth", "rates"} <= set(device.derived)


@pytest.mark.parametrize("dtype", ["fp8", "tf32"])
def test_a_dtype_that_torch_does_not_multiply_is_not_measured(dtype: str) -> None:
    with pytest.raises(ValueError, match="dtype must be float16, bfloat16, float32 or float64 to be measured"):
        detect.measure_rates("cpu", dtype)


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "size"),
    [("cuda", (9, 0), "bfloat16", 8192), ("cuda:0", (7, 5), "float16", 8192), ("mps", (0, 0), "float16", 4096)],
)
def test_a_gpu_is_measured_in_a_dtype_that_its_matrix_units_have(
    gpu: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    capability: tuple[int, int],
    dtype: str,
    size: int,
) -> None:
    gpu()
    asked: list[tuple[torch.device, str, int, int]] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(detect, "_measure", lambda *arguments: asked.append(arguments))
    detect.measure_rates(device)
    assert [(where.type, name, side) for where, name, _, side in asked] == [(device.partition(":")[0], dtype, size)]
    if device == "cuda":
        assert asked[0][2] == 7 * GIB // 8  # two copies and room to spare


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_a_gpu_is_waited_for_before_the_clock_is_read(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: waits.append("cuda"))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append("mps"))
    works: list[int] = []
    seconds = detect._best_seconds(lambda: works.append(len(waits)), torch.device(kind), budget=0.0)
    assert seconds > 0
    assert set(waits) == {kind}
    assert len(waits) == len(set(works)) == 5  # two batches to warm up, three timed, each waited for once
