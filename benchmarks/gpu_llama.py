"""Train a small Llama in bfloat16 on a GPU, by tilewise and by PyTorch's attention: the loss, and the speed.

    PYTHONPATH=src python benchmarks/gpu_llama.py --json llama.json

Loss: 200 steps of AdamW under autocast, 1,024 tokens a row, on the source of Python's standard library, a byte a token;
every kind of attention starts from the same weights and sees the same batches. How far two of PyTorch's own kernels
drift apart shows what rounding alone does. Speed: forward and backward over 8,192 tokens, in rounds that take turns in
shuffled order. The kinds: attn_implementation="sdpa" as it comes, the same held to PyTorch's flash kernel, the same
again with tilewise in that kernel's place, and attn_implementation="tilewise".
"""
# ruff: noqa: INP001, T201 - a script, and a script prints

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.adapters import sdpa
from tilewise.adapters.transformers import register
from tilewise.bench.clock import Stopwatch
from tilewise.bench.provenance import provenance

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

ROUNDS, SECONDS = 5, 0.3
VOCABULARY = 256  # bytes

# hidden size, layers, heads, key heads
TRAINED = (512, 6, 8, 4)
TIMED = (2048, 4, 16, 4)


@contextlib.contextmanager
def flash() -> Iterator[None]:
    """Hold PyTorch's attention to its flash kernel."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield


@contextlib.contextmanager
def beneath() -> Iterator[None]:
    """Put tilewise in the place of PyTorch's flash kernel."""
    sdpa.activate()
    try:
        with flash():
            yield
    finally:
        sdpa.deactivate()


# The name of a kind, what the model is told, and what surrounds each step.
KINDS: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "sdpa": ("sdpa", contextlib.nullcontext),
    "sdpa, flash": ("sdpa", flash),
    "sdpa, tilewise beneath": ("sdpa", beneath),
    "tilewise": ("tilewise", contextlib.nullcontext),
}


def build(sizes: tuple[int, int, int, int], length: int, device: str) -> LlamaForCausalLM:
    """Make a model with random weights, the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, heads_kv = sizes
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads_kv,
        max_position_embeddings=length,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(device)


def text() -> torch.Tensor:
    """Give the standard library's source as bytes, in the order of its file names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def losses(kind: str, options: argparse.Namespace) -> list[float]:
    """Train and give the loss of each step."""
    implementation, surround = KINDS[kind]
    model, source = build(TRAINED, options.train_length, options.device), text()
    model.set_attn_implementation(implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    draw, length = torch.Generator().manual_seed(1), options.train_length
    found = []
    with surround():
        for _ in range(options.steps):
            starts = torch.randint(len(source) - length, (options.batch,), generator=draw).tolist()
            rows = torch.stack([source[start : start + length] for start in starts]).long().to(options.device)
            with torch.autocast(options.device.partition(":")[0], torch.bfloat16):
                loss = model(input_ids=rows, labels=rows).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(loss.detach())
    return torch.stack(found).tolist()


def train(kinds: list[str], options: argparse.Namespace) -> dict[str, object]:
    """Set the losses of all kinds beside each other."""
    curves, failed = {}, {}
    for kind in kinds:
        try:
            curves[kind] = losses(kind, options)
        except Exception as error:  # noqa: BLE001 - the other kinds are still wanted
            failed[kind] = f"{type(error).__name__}: {error}"[:500]
            continue
        ends = curves[kind]
        print(f"loss, {kind:<24} first {ends[0]:.4f}, last 20 {statistics.mean(ends[-20:]):.4f}", flush=True)
    apart = {
        kind: max(abs(a - b) for a, b in zip(curve, curves["sdpa"], strict=True))
        for kind, curve in curves.items()
        if "sdpa" in curves and kind != "sdpa"
    }
    print("largest distance from sdpa's loss: " + ", ".join(f"{kind} {value:.1e}" for kind, value in apart.items()))
    return {"losses": curves, "largest_distance_from_sdpa": apart, "failed": failed}


def speed(kinds: list[str], options: argparse.Namespace) -> dict[str, object]:
    """Time forward and backward together; ms a step, the median of rounds that take turns."""
    model = build(TIMED, options.length, options.device).to(torch.bfloat16)
    source, watch = text(), Stopwatch(options.device)
    rows = source[: options.rows * options.length].view(options.rows, -1).long().to(options.device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=rows, labels=rows).loss.backward()

    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    failed: dict[str, str] = {}
    for _ in range(ROUNDS):
        for kind in random.sample(list(times), len(times)):
            implementation, surround = KINDS[kind]
            model.set_attn_implementation(implementation)
            try:
                with surround():
                    step()  # settled, and compiled the first time
                    times[kind] += watch.round(step, SECONDS)
            except Exception as error:  # noqa: BLE001 - a row that says so
                failed[kind] = f"{type(error).__name__}: {error}"[:500]
                times.pop(kind)
    found = {kind: 1e3 * statistics.median(spent) for kind, spent in times.items()}
    for kind, value in found.items():
        print(f"N={options.length}, {kind:<24} {value:.1f} ms a step, {found.get('sdpa', value) / value:.2f} x sdpa")
    return {"ms": found, "tokens": rows.numel(), "length": options.length, "failed": failed}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--sections", nargs="+", default=["speed", "loss"], choices=["speed", "loss"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="rows of a training step (default: %(default)s)")
    parser.add_argument("--train-length", type=int, default=1024)
    parser.add_argument("--length", type=int, default=8192, help="tokens a row, for the speed (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=2, help="rows, for the speed (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    register()
    environment, command = provenance(options.device)
    results: dict[str, object] = {
        "environment": environment,
        "command": command,
        "trained": dict(zip(("hidden", "layers", "heads", "heads_kv"), TRAINED, strict=True)),
        "timed": dict(zip(("hidden", "layers", "heads", "heads_kv"), TIMED, strict=True)),
    }
    for section, measure in (("speed", speed), ("loss", train)):
        if section in options.sections:
            results[section] = measure(options.kinds, options)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
