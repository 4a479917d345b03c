"""Check the launcher on an NVIDIA GPU and measure what a call costs the host.

``PYTHONPATH=src python benchmarks/gpu_launch.py [--out FILE]`` prints JSON; it exits with 1 if a check failed.
The first call is measured in processes of their own, cold and warm, with an empty PATH: no C compiler is there.
"""
# ruff: noqa: INP001, T201, S101, S603, BLE001, PERF203, PT017 - a script prints, checks, and records whatever fails

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl

from tilewise.backends import launch, triton_softmax
from tilewise.backends.compile import Options
from tilewise.backends.driver import SHARED_WITHOUT_ASKING
from tilewise.kernels.share import kernel
from tilewise.testing import error

BLOCK = 1024
SOFTMAXES = (((300, 1000), -1), ((300, 1001), -1), ((7, 129, 260), 1), ((65, 70_000), -1), ((3, 40_000, 33), 1))


@kernel
def vector_add(x_ptr, y_ptr, out_ptr, length: tl.int64, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = x + y."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < length)
    y = tl.load(y_ptr + place, mask=place < length)
    tl.store(out_ptr + place, x + y, mask=place < length)


@kernel
def product(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, out_ptr, steps: tl.int32, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr
):
    """out = a @ b for square row-major matrices, pipelined so that it needs much shared memory."""
    rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    cols = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    depth = tl.arange(0, DEPTH)
    a_base = tl.multiple_of(a_ptr + tl.program_id(0) * (BLOCK * SIZE), 16)
    a_place = a_base + tl.arange(0, BLOCK)[:, None] * SIZE + depth[None, :]
    b_base = tl.multiple_of(b_ptr + tl.program_id(1) * BLOCK, 16)
    b_place = b_base + depth[:, None] * SIZE + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in range(steps):
        a = tl.load(a_place + step * DEPTH)
        b = tl.load(b_place + step * (DEPTH * SIZE))
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + rows * SIZE + cols, acc)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add two vectors through the launcher."""
    out = torch.full_like(x, float("nan"))
    launch.launch(vector_add, (triton.cdiv(x.numel(), BLOCK),), (x, y, out, x.numel()), {"BLOCK": BLOCK})
    return out


def vectors(length: int = 100_003, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw two vectors."""
    return torch.randn(length, device="cuda", dtype=dtype), torch.randn(length, device="cuda", dtype=dtype)


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_add() -> None:
    """All dtypes, odd lengths, views that begin anywhere."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for start in (0, 1, 4):
            x, y = (vector[start:] for vector in vectors(dtype=dtype))
            assert torch.equal(add(x, y), x + y)


def check_softmax() -> None:
    """Forward and backward in every dtype and several layouts, once and online."""
    long = triton_softmax.Tiling(True, 1, 64, 8, 4, 64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        eps = torch.finfo(dtype).eps
        for shape, dim in (
            ((300, 1000), -1),
            ((300, 1001), -1),
            ((7, 129, 260), 1),
            ((65, 70_000), -1),
            ((3, 40_000, 33), 1),
        ):
            x = torch.randn(shape, device="cuda", dtype=dtype) * 3
            x.select(0, 1).fill_(-torch.inf)
            for tiling in (None, long):
                got = triton_softmax.softmax(x, dim, tiling)
                ref = torch.softmax(x.double(), dim).nan_to_num()
                low = torch.softmax(x, dim).nan_to_num()
                terms = shape[dim] ** 0.5 if dtype == torch.float64 else 0.0
                found = error(got, ref, low, eps, terms)
                assert found.within, (dtype, shape, tiling, found)
                dp = torch.randn_like(x)
                ds = triton_softmax.softmax_backward(low, dp, dim, tiling)
                p, dpd = low.double(), dp.double()
                want = p * (dpd - (p * dpd).sum(dim, keepdim=True))
                found = error(ds, want, torch.ops.aten._softmax_backward_data(dp, low, dim, dtype), eps, terms)  # noqa: SLF001
                assert found.within, ("backward", dtype, shape, tiling, found)


def check_large() -> None:
    """More than 2^31 elements, and more rows than a grid's second axis has programs."""
    x = torch.randn(70_000, 32_768, device="cuda", dtype=torch.float16)
    got = triton_softmax.softmax(x, -1)
    assert (got[-3:].double() - torch.softmax(x[-3:].double(), -1)).abs().max() < 1e-5
    assert (got[::9999].double() - torch.softmax(x[::9999].double(), -1)).abs().max() < 1e-5
    y = torch.randn(70_000, 5, 4, device="cuda").transpose(1, 2)
    assert torch.allclose(triton_softmax.softmax(y, -1), torch.softmax(y, -1), atol=1e-6)


def check_streams_and_graph() -> None:
    """The current stream is used, and a graph replays a launch on new data."""
    x, y = vectors()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # noqa: SLF001 - some 50 ms
        z = x * 2
        out = add(z, y)
    stream.synchronize()
    assert torch.equal(out, x * 2 + y)
    result = torch.empty_like(x)
    grid, constants = (triton.cdiv(x.numel(), BLOCK),), {"BLOCK": BLOCK}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.launch(vector_add, grid, (x, y, result, x.numel()), constants)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, x + y)


def check_threads() -> None:
    """Threads whose first use of CUDA is a launch, each on its own stream."""
    x, y = vectors()
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(number: int) -> None:
        try:
            for turn in range(100):
                factor = float(number * 100 + turn)
                out = add(x, torch.full_like(x, factor))
                if not torch.equal(out, x + factor):
                    failures.append(f"{number} {turn}")
        except Exception:
            failures.append(traceback.format_exc())

    bare = torch.full_like(x, float("nan"))

    def first() -> None:
        launch.launch(vector_add, (triton.cdiv(x.numel(), BLOCK),), (x, y, bare, x.numel()), {"BLOCK": BLOCK})

    lone = threading.Thread(target=first)
    lone.start()
    lone.join()
    torch.cuda.synchronize()
    assert torch.equal(bare, x + y)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:3]


def check_shared_memory() -> None:
    """A kernel that needs more shared memory than a launch gets without asking."""
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.float16) for _ in range(2))
    out = torch.empty(512, 512, device="cuda")
    constants = {"SIZE": 512, "BLOCK": 128, "DEPTH": 64}
    launch.launch(product, (4, 4), (a, b, out, 512 // 64), constants, num_warps=8, num_stages=4)
    assert torch.allclose(out, a.float() @ b.float(), atol=1e-2, rtol=1e-2)
    variant = launcher().variant(product, constants, Options(8, 4))
    bound = next(iter(next(iter(variant._forms.values())).bound.values()))  # noqa: SLF001
    assert bound.binary.shared > SHARED_WITHOUT_ASKING


def check_refusal() -> None:
    """What the driver refuses is told in words, and the next launch works."""
    x, y = vectors()
    try:
        launch.launch(vector_add, (1, 70_000), (x, y, x, 0), {"BLOCK": BLOCK})
    except RuntimeError as refusal:
        assert "invalid argument" in str(refusal), refusal
    else:
        raise AssertionError("a grid that is too large was launched")
    check_add()


def launcher() -> launch.Launcher:
    """Give the process's launcher."""
    found = launch.default_launcher(vector_add)
    assert found is not None
    return found


CHECKS = (
    check_add, check_softmax, check_large, check_streams_and_graph, check_threads, check_shared_memory, check_refusal,
)  # fmt: skip


# ---- host time ------------------------------------------------------------------------------------------------------


def host_us(call: Callable[[], object], batch: int = 200, rounds: int = 30) -> dict[str, float]:
    """Measure the host's time a call, in microseconds: batches that fit the launch queue, waited for in between."""
    for _ in range(20):
        call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - start) / batch * 1e6)
    torch.cuda.synchronize()
    return {"median": round(statistics.median(times), 2), "least": round(min(times), 2)}


def host_times() -> dict[str, object]:
    """Compare the launcher with Triton's own and with torch's operators, on tiny tensors."""
    x, y = vectors(1024)
    out, matrix = torch.empty_like(x), torch.randn(8, 128, device="cuda")
    arguments = (x, y, out, 1024)
    variant = launcher().variant(vector_add, {"BLOCK": BLOCK}, Options())
    found: dict[str, object] = {
        "launch(), 4 arguments": host_us(lambda: launch.launch(vector_add, (1,), arguments, {"BLOCK": BLOCK})),
        "variant(), 4 arguments": host_us(lambda: variant((1,), arguments)),
        "torch.add(out=)": host_us(lambda: torch.add(x, y, out=out)),
        "triton_softmax.softmax": host_us(lambda: triton_softmax.softmax(matrix, -1)),
        "torch.softmax": host_us(lambda: torch.softmax(matrix, -1)),
        "torch.empty_like": host_us(lambda: torch.empty_like(matrix)),
    }
    q = torch.randn(1, 8, 16, 64, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        sdpa = torch.nn.functional.scaled_dot_product_attention
        found["scaled_dot_product_attention"] = host_us(lambda: sdpa(q, q, q))
    try:
        found["kernel[grid](), Triton's launcher"] = host_us(lambda: vector_add[(1,)](*arguments, BLOCK=BLOCK))
    except Exception as refusal:
        found["kernel[grid](), Triton's launcher"] = f"does not run: {refusal!r}"[:300]
    found["variants bound"] = launcher().bindings
    return found


FIRST_CALL = """
import json, sys, time
start = time.perf_counter()
import torch
torch.zeros(1, device="cuda").add_(1)
torch.cuda.synchronize()
context = time.perf_counter()
sys.path.insert(0, sys.argv[1])
from tilewise.backends import triton_softmax
imported = time.perf_counter()
x = torch.randn(64, 1000, device="cuda", dtype=torch.float16)
out = triton_softmax.softmax(x, -1)
torch.cuda.synchronize()
end = time.perf_counter()
assert torch.allclose(out, torch.softmax(x, -1), atol=1e-3)
from triton.runtime.driver import driver
assert driver._active is None and driver._default is None, "Triton's own driver was built"
print(json.dumps({"torch and context": context - start, "import": imported - context, "call": end - imported}))
"""


def first_calls() -> dict[str, object]:
    """Time a first call in new processes, cold and warm, with no C compiler to be found."""
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name}" for name in ("TRITON_CACHE_DIR", "TILEWISE_CACHE_DIR")}
        environment = {**os.environ, **caches, "PATH": folder}
        for compiler in ("CC", "CXX"):
            environment.pop(compiler, None)
        for state in ("cold", "warm", "warm again"):
            command = [sys.executable, "-c", FIRST_CALL, str(Path(__file__).parents[1] / "src")]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            found[f"{state}, seconds"] = {k: round(v, 3) for k, v in json.loads(done.stdout.splitlines()[-1]).items()}
    return found


def main() -> None:
    """Run everything; print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the report here too")
    options = parser.parse_args()
    report: dict[str, object] = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }
    checks: dict[str, str] = {}
    for check in CHECKS:
        try:
            check()
            torch.cuda.synchronize()
            checks[check.__name__] = "ok"
        except Exception:
            checks[check.__name__] = traceback.format_exc()[-1500:]
    report["checks"] = checks
    measures = {"host, microseconds a call": host_times, "first call without a C compiler": first_calls}
    for name, measure in measures.items():
        try:
            report[name] = measure()
        except Exception:
            report[name] = traceback.format_exc()[-1500:]
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    sys.exit(any(result != "ok" for result in checks.values()))


if __name__ == "__main__":
    main()
