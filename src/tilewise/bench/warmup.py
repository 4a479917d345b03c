"""Compile kernels before they are needed, for this machine's GPU or for one that is not here; and time a first call.

A warm-up makes ordinary calls, by the host's side of the backends that would serve them, on a device that only looks
like the target: everything is chosen, compiled and kept on disk, and nothing is launched. So what is kept is what a
call will look for, whichever kernels it takes. Processes share the work; those that need the same kernel wait for one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch

from tilewise import autograd, dispatch
from tilewise.machine import detect
from tilewise.machine.device import DEVICES
from tilewise.problem.cache import CacheOptions, CacheTensors
from tilewise.problem.problem import Needs, Options, Problem, Tensors

if TYPE_CHECKING:
    from tilewise.backends.driver import Driver

KINDS = ("forward", "backward", "decode")
DIMS, DTYPES = (64, 128), ("bfloat16", "float16")
GROUPS = (1, 4, 8)  # query heads that share a key head: decoding has a kernel for each power of two
PAGES = (0, 16, 256)
_LENGTH = 4096  # of caches: long enough to be split
Tell = Callable[[str, float], None]


class Job(NamedTuple):
    """One call to make."""

    kind: str
    dim: int
    dtype: str
    causal: bool = True
    group: int = 1
    page_size: int = 0
    appends: bool = False

    def __str__(self) -> str:
        parts = [f"{self.kind} d={self.dim} {self.dtype}", *["causal"] * (self.causal and self.kind != "decode")]
        if self.kind == "decode":
            parts += [f"group {self.group}", f"pages of {self.page_size}" * (self.page_size > 0)]
            parts += ["append, rotary"] * self.appends
        return ", ".join(part for part in parts if part)


class Done(NamedTuple):
    """What a job came to: how many kernels it compiled, in how many seconds, or why nothing."""

    job: Job
    compiled: int
    seconds: float
    refusal: str = ""


def jobs(dims: tuple[int, ...] = DIMS, dtypes: tuple[str, ...] = DTYPES, kinds: tuple[str, ...] = KINDS) -> list[Job]:
    """List the calls that a warm-up makes.

    Raises:
        ValueError: something that there is not.

    >>> [str(job) for job in jobs((64,), ("float16",), ("backward",))]
    ['backward d=64 float16, causal', 'backward d=64 float16']
    """
    for what, given, known in (("kinds", kinds, KINDS), ("dtypes", dtypes, ("float16", "bfloat16", "float32"))):
        if not given or set(given) - set(known):
            raise ValueError(f"{what} must be among {', '.join(known)}; got {', '.join(given) or 'none'}")
    if not dims or min(dims) < 1:
        raise ValueError(f"head dims must be 1 or more; got {', '.join(map(str, dims)) or 'none'}")
    found = []
    for dtype in dtypes:
        for dim in dims:
            found += [Job(kind, dim, dtype, causal) for kind in kinds if kind != "decode" for causal in (True, False)]
            if "decode" in kinds:
                found += [
                    Job("decode", dim, dtype, True, group, pages, appends)
                    for group in GROUPS
                    for pages in PAGES
                    for appends in (False, True)
                ]
    return found


def target_of(name: str | None) -> int:
    """Give the capability that a target's name stands for: 90 for "sm_90"; None = this machine's GPU.

    Raises:
        ValueError: no NVIDIA GPU is here, or none is named so.

    >>> target_of("sm_90")
    90
    """
    if name is None:
        found = detect.detect().capability
        if not isinstance(found, tuple):
            raise ValueError(
                "no NVIDIA GPU is here whose kernels are kept; name a target to compile for, such as sm_90"
            )
        return found[0] * 10 + found[1]
    digits = name.removeprefix("sm_").replace(".", "")
    if not digits.isdigit() or int(digits) < 75:
        raise ValueError(f"target must be an NVIDIA architecture from sm_75 on, such as sm_90; got {name!r}")
    return int(digits)


# ---- a device that only looks like one ------------------------------------------------------------------------------


class _Backend(Protocol):
    """What of a backend is called here, and what stands in for the device."""

    _capability: Callable[[str], tuple[int, int]]

    def why_not(self, problem: Problem) -> str | None: ...
    def prepare(self, problem: Problem) -> dispatch.Prepared: ...


_counted = 0  # kernels that this process compiled


def look_like(capability: int) -> None:
    """Make this process compile for a target and launch nothing, from now on; for processes of their own."""
    from tilewise.backends import compile as compiling
    from tilewise.backends import launch, triton_decode
    from tilewise.backends.driver import MAP_BYTES

    sms = next((d.sms for d in DEVICES if d.capability == divmod(capability, 10) and d.sms), 132)
    modules: list[object] = [triton_decode, *(dispatch.load(name) for name in dispatch.BACKENDS)]
    for module in modules:
        if hasattr(module, "_capability"):
            module._capability = lambda _: divmod(capability, 10)  # noqa: SLF001 - it is to believe in another GPU
    triton_decode._multiprocessors = lambda _: sms  # type: ignore[assignment]  # noqa: SLF001

    def tensor_map(address: int) -> bytes:  # of a real one, no more is looked at than where the address stands
        return address.to_bytes(8, "little") + bytes(MAP_BYTES - 8)

    # Tensors lie on the CPU, which is device -1 to torch.
    nowhere = SimpleNamespace(
        capability=lambda _: capability, stream=lambda _: 0, current_device=lambda: -1, load=lambda *_: 0,
        memory=lambda size, _: torch.empty(size, dtype=torch.uint8), start=lambda *_: 0, enter=lambda _: None,
        encode_map=lambda _, address, *__: tensor_map(address), move_map=lambda _, address: tensor_map(address),
        explain=str,
    )  # fmt: skip
    launch._default = launch.Launcher(cast("Driver", nowhere))  # noqa: SLF001
    compile_for = compiling.compile_for

    def counting(*arguments: object) -> object:
        global _counted  # noqa: PLW0603 - it is this process's own
        _counted += 1
        return compile_for(*arguments)  # type: ignore[arg-type]  # handed on as they came

    compiling.compile_for = counting  # type: ignore[assignment]


def make(job: Job) -> Done:
    """Make one call, in a process that looks like the target."""
    start, before = time.perf_counter(), _counted
    refusal = (_decode if job.kind == "decode" else _attend)(job)
    return Done(job, _counted - before, time.perf_counter() - start, refusal)


def _serving(problem: Problem, gradients: bool = False) -> tuple[_Backend | None, str]:
    """Give the backend that would serve the problem on the target's device, or why none of ours would."""
    there, reasons = replace(problem, device="cuda:0"), []
    for name in dispatch.BACKENDS:
        backend = dispatch.load(name)
        leaves = getattr(backend, "why_not_backward", None) if gradients else None
        reason = backend.why_not(there) or (None if leaves is None else leaves(there))
        if reason is None:
            return (cast("_Backend", backend), "") if hasattr(backend, "prepare") else (None, f"{name} serves it")
        reasons.append(f"{name}: {reason}")
    return None, "; ".join(reasons)


def _attend(job: Job) -> str:
    """Run a forward pass as inference does, or with its gradients as training does."""
    training = job.kind == "backward"
    q, k, v = (torch.empty(1, 2, 512, job.dim, dtype=getattr(torch, job.dtype)) for _ in range(3))
    tensors = Tensors(q, k, v)
    problem = autograd.problem_for(tensors, Options(causal=job.causal, return_lse=training))
    backend, refusal = _serving(problem)
    if backend is None:
        return refusal
    out, lse = backend.prepare(problem)(tensors)
    if training and lse is not None:
        differentiating, refusal = _serving(problem, gradients=True)
        if differentiating is None:
            return refusal
        cast("dispatch.Backend", differentiating).backward(
            problem, tensors, out, lse, torch.empty_like(out), None, Needs()
        )
    return ""


def _decode(job: Job) -> str:
    """Run a step of decoding, with lengths on the device."""
    heads_kv, dtype = 2, getattr(torch, job.dtype)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    rows = (_LENGTH // job.page_size, job.page_size) if job.page_size else (1, _LENGTH)
    tensors = CacheTensors(
        empty(1, 1, heads_kv * job.group, job.dim),
        empty(*rows, heads_kv, job.dim),
        empty(*rows, heads_kv, job.dim),
        cache_seqlens=torch.zeros(1, dtype=torch.int32),
        block_table=torch.zeros(1, rows[0], dtype=torch.int32) if job.page_size else None,
    )
    if job.appends:
        new, angle = empty(1, 1, heads_kv, job.dim), torch.zeros(_LENGTH, job.dim // 2, dtype=dtype)
        tensors = tensors._replace(k=new, v=new, rotary_cos=angle, rotary_sin=angle)
    problem = autograd.problem_for(tensors, CacheOptions(rotary_interleaved=False))
    backend, refusal = _serving(problem)
    if backend is not None:
        backend.prepare(problem)(tensors)
    return refusal


def warm_up(wanted: list[Job], capability: int, workers: int, tell: Tell = lambda *_: None) -> Iterator[Done]:
    """Make calls in processes of their own; give each as it is done.

    Raises:
        ValueError: TRITON_INTERPRET is set, so that there is nothing to compile.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("under TRITON_INTERPRET=1 kernels are interpreted; unset it to compile them")
    workers = max(1, min(workers, len(wanted)))
    with ProcessPoolExecutor(workers, get_context("spawn"), look_like, (capability,)) as pool:
        futures = [pool.submit(make, job) for job in wanted]
        for number, future in enumerate(as_completed(futures), 1):
            done = future.result()
            tell(str(done.job), number / len(wanted))
            yield done


# ---- the first call -------------------------------------------------------------------------------------------------

FIRST_CALL = """
import json, sys, time
start = time.perf_counter()
import torch
device, dim, dtype = sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3])
loaded = time.perf_counter()
q = torch.ones(1, 4, 512, dim, device=device, dtype=dtype)
wait = torch.cuda.synchronize if q.is_cuda else lambda: None
(q @ q.mT).sum().item()
ready = time.perf_counter()
import tilewise
imported = time.perf_counter()
times = []
for _ in range(2):
    before = time.perf_counter()
    tilewise.attention(q, q, q, causal=True)
    wait()
    times.append(time.perf_counter() - before)
print(json.dumps({"torch": loaded - start, "context": ready - loaded, "import": imported - ready, "first": times[0],
                  "second": times[1]}))
"""


def timings(device: str, dim: int = 128, dtype: str | None = None) -> dict[str, dict[str, float]]:
    """Time a first call in two fresh processes: one that finds no compiled kernels, and one that finds those.

    Returns:
        "cold" and "warm": seconds to import torch, to have the device ready, to import tilewise, for the first call and
        for the second.
    """
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        kept = {"TILEWISE_CACHE_DIR": str(Path(folder) / "tilewise"), "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
        return {name: _first_call(device, dim, dtype, kept) for name in ("cold", "warm")}


def _first_call(device: str, dim: int, dtype: str, variables: Mapping[str, str]) -> dict[str, float]:
    command = [sys.executable, "-c", FIRST_CALL, device, str(dim), dtype]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join((root, *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, **variables, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise ValueError(f"the first call on {device} failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def timing_lines(found: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str]]:
    """Put the times of a first call into words."""
    cold, warm = found["cold"], found["warm"]
    return [
        ("torch and the device", f"{cold['torch'] + cold['context']:.2f} s"),
        ("import tilewise", f"{cold['import']:.2f} s"),
        ("first call, cold", f"{cold['first']:.2f} s, compiling"),
        ("first call, warm", f"{warm['first']:.2f} s, in a new process that finds the kernels"),
        ("second call", f"{warm['second'] * 1e3:.2f} ms"),
    ]
