"""Train a small Llama on one long text, tokens spread over one axis of a mesh of GPUs and parameters over the other.

The text is the source of Python's standard library, a byte a token. Every rank holds a zigzag part of each sequence, so
that causal work is even, and the positions that belong to it; attention sends keys and values round. FSDP2 keeps copies
of the parameters along that axis and shards them along the other, where each row of ranks reads a text of its own.
Without torchrun there is one rank. On a CPU the text is short.

    torchrun --nproc-per-node 2 examples/train_long_llama.py
    torchrun --nproc-per-node 8 examples/train_long_llama.py --data-parallel 2 --length 131072

Printed are the loss of each step over the whole text, and before the first one the loss of the same model in one piece.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy

from tilewise import attention
from tilewise.distributed import context_parallel_attention, positions, split
from tilewise.machine.detect import detect

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# What fits the device: tokens, type, and the model's hidden size, layers and heads.
LENGTH = {"cuda": 65536, "cpu": 1024}
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
SIZE = {"cuda": (2048, 4, 16), "cpu": (64, 2, 4)}
NAME = "tilewise_spread"


def main(arguments: list[str] | None = None) -> int:
    """Train; the exit code is 0 where the first loss is that of one process and the last is smaller."""
    options = _parser().parse_args(arguments)
    if importlib.util.find_spec("transformers") is None:
        print("This example needs transformers: pip install 'tilewise[transformers]'", file=sys.stderr)
        return 2
    start(options.device)
    try:
        return train(options)
    finally:
        dist.destroy_process_group()


def start(device: str) -> None:
    """Join the ranks that torchrun started; alone where it did not."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        file = Path(tempfile.mkdtemp()) / "store"
        dist.init_process_group(backend, f"file://{file}", rank=0, world_size=1)


def train(options: argparse.Namespace) -> int:
    """Run some steps and print their losses."""
    from torch.distributed.fsdp import fully_shard

    world, device, rows = dist.get_world_size(), options.device, options.data_parallel
    if world % rows:
        print(f"--data-parallel must divide the {world} ranks; got {rows}", file=sys.stderr)
        return 2
    length = options.length or LENGTH[device]
    mesh = init_device_mesh(device, (world // rows, rows), mesh_dim_names=("cp", "dp"))
    cp = mesh["cp"]
    text = read_codebase(rows, length + 1, mesh.get_local_rank("dp")).to(device)
    attend = Attend()
    model = build(device, length, attend).to(device, DTYPE[device])
    whole = loss_in_one_piece(model, text)
    attend.mesh = cp
    tokens, labels = (split(x, cp, dim=1) for x in (text[:, :-1], text[:, 1:]))
    places = positions(length, cp)[None]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # copies along cp, shards along dp; gradients are averaged over all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    say(f"{rows} x {length} tokens over {world // rows} ranks each, {DTYPE[device]}, on {detect(device).name}")
    losses = []
    for step in range(options.steps):
        begun = time.perf_counter()
        logits = model(input_ids=tokens, position_ids=places).logits
        # Each rank has the sum over its own tokens. Averaged over cp, cp.size() times that is the sum over all.
        share = cross_entropy(logits[0].float(), labels[0], reduction="sum") / length
        (cp.size() * share).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = share.detach().clone()
        dist.all_reduce(loss, group=cp.get_group())
        losses.append(loss)
        say(f"step {step}: loss {loss.item():.4f}, {time.perf_counter() - begun:.2f} s")
    apart = abs(losses[0].item() - whole)
    budget = 2 * torch.finfo(DTYPE[device]).eps * whole  # as the budget of results has it
    say(f"first loss in one piece {whole:.4f}, spread {losses[0].item():.4f}, difference {apart:.1e}")
    return 0 if apart <= budget and losses[-1] < losses[0] else 1


def say(text: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def read_codebase(rows: int, length: int, row: int) -> torch.Tensor:
    """Give one of several texts of the standard library's source as token ids (1, length)."""
    text = b""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= rows * length:
            break
    return torch.frombuffer(bytearray(text[row * length : (row + 1) * length]), dtype=torch.uint8).long()[None]


class Attend:
    """What the model calls for attention: over a mesh, or on this rank alone while there is none."""

    def __init__(self) -> None:
        self.mesh: DeviceMesh | None = None

    def __call__(
        self,
        _module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: object,
        *,
        scaling: float,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Give out (batch, len, heads, dim) of query, key and value (batch, heads, len, dim)."""
        if self.mesh is None:
            out = attention(query, key, value, causal=True, scale=scaling)
        else:
            out = context_parallel_attention(query, key, value, mesh=self.mesh, causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None


def build(device: str, length: int, attend: Attend) -> LlamaForCausalLM:
    """Make a Llama with random weights, the same on every rank."""
    from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # causal by position, and nothing is padded
    torch.manual_seed(0)
    hidden, layers, heads = SIZE[device]
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=length,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(NAME)
    return model


def loss_in_one_piece(model: LlamaForCausalLM, text: torch.Tensor) -> float:
    """Give the loss of the whole text on one rank, before anything is spread."""
    with torch.no_grad():
        logits = model(input_ids=text[:, :-1]).logits[0]
    return cross_entropy(logits.float(), text[0, 1:]).item()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--length", type=int, help="tokens of a text (default: 65536 on GPUs, 1024 on CPUs)")
    parser.add_argument("--steps", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--data-parallel", type=int, default=1, help="texts at a time (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())
