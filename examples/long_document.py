"""Read a whole codebase at once: a Llama model over 32,768 tokens, by eager attention and by tilewise.

The text is the source of Python's standard library, a byte a token; the model has Llama's architecture, grouped heads
and rotary positions included, and random weights. Eager attention holds the score matrix of every layer, tilewise none.
Shown are the time and the peak memory of a forward pass, the largest difference between the two sets of logits, and how
far each is from the same model in float64. On a CPU the text is cut to 4,096 tokens and the model is smaller.

    python examples/long_document.py
    python examples/long_document.py --length 8192 --device cpu
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tilewise import testing
from tilewise.adapters.transformers import register
from tilewise.bench.memory import peak
from tilewise.machine.detect import detect

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# What fits the device: tokens, type, and the model's hidden size, layers and heads.
LENGTH = {"cuda": 32768, "cpu": 4096}
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
SIZE = {"cuda": (1024, 4, 8), "cpu": (256, 2, 4)}


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; the exit code is 0 where the logits are within the error budget."""
    options = _parser().parse_args(arguments)
    if importlib.util.find_spec("transformers") is None:
        print("This example needs transformers: pip install 'tilewise[transformers]'", file=sys.stderr)
        return 2
    kind = options.device.partition(":")[0]
    length = options.length or LENGTH[kind]
    tokens = read_codebase(length).to(options.device)
    model = build(kind, length).to(options.device, DTYPE[kind])
    print(f"{length} tokens, {DTYPE[kind]}, on {detect(options.device).name}")

    eager, tiled = (report(name, model, tokens, options.device, options.rounds) for name in ("eager", "tilewise"))
    if eager is None or tiled is None:
        print("Nothing to compare: try a shorter text, such as --length 8192.")
        return 2

    exact = run("tilewise", copy.deepcopy(model).double(), tokens)()
    eps = torch.finfo(DTYPE[kind]).eps
    error = testing.error(tiled, exact, eager, eps)
    lost = (eager.double() - exact).abs().max().item()
    apart = (eager.double() - tiled.double()).abs().max().item()
    print(f"largest logit {exact.abs().max().item():.1f}; largest difference between eager and tilewise {apart:.1e}")
    print(f"largest error against float64: eager {lost:.1e}, tilewise {error.max:.1e}, budget {error.max_budget:.1e}")
    print("They agree within budget." if error.within else "They differ by more than rounding explains.")
    return 0 if error.within else 1


def read_codebase(length: int) -> torch.Tensor:
    """Give the first bytes of the standard library's source as token ids (1, length)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b""
    for file in files:
        text += file.read_bytes()
        if len(text) >= length:
            break
    return torch.frombuffer(bytearray(text[:length]), dtype=torch.uint8).long()[None]


def build(kind: str, length: int) -> LlamaForCausalLM:
    """Make a Llama model with random weights, large enough that its attention is not flat."""
    from transformers import LlamaConfig, LlamaForCausalLM

    register()
    torch.manual_seed(0)
    hidden, layers, heads = SIZE[kind]
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=length,
        initializer_range=0.05,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    return model


def run(name: str, model: LlamaForCausalLM, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Give a function that computes the logits (len, vocabulary) with a kind of attention."""
    model.set_attn_implementation(name)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=tokens).logits[0]
        return logits

    return forward


def report(name: str, model: LlamaForCausalLM, tokens: torch.Tensor, device: str, rounds: int) -> torch.Tensor | None:
    """Measure one kind of attention, print its line and give its logits; None where they do not fit into memory."""
    forward = run(name, model, tokens)
    try:
        forward()  # whatever is compiled or allocated once
        logits, held = peak(forward, device, "torch")
    except torch.OutOfMemoryError:
        print(f"{name:<9} does not fit into the device's memory")
        return None
    seconds = [_time(forward, device) for _ in range(rounds)]
    memory = "unknown" if held is None else f"{held / 2**20:.0f} MiB"
    print(f"{name:<9} {statistics.median(seconds):.3f} s (median of {rounds}), peak {memory} beyond the model")
    return logits


def _time(forward: Callable[[], torch.Tensor], device: str) -> float:
    start = time.perf_counter()
    forward()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--length", type=int, help="tokens (default: 32768 on a GPU, 4096 on a CPU)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is timed (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
