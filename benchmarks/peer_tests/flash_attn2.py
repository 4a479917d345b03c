"""Run flash_attn 2's own tests of its functions against tilewise's adapter, on a GPU.

    PYTHONPATH=src python benchmarks/peer_tests/flash_attn2.py path/to/tests/test_flash_attn.py --json result.json

Three things that the file imports beside the functions are stand-ins of this script: the size of the blocks in which
its debugging output is scaled (here: a whole row at once), a flag of another backend, and its rotary embedding.
"""
# ruff: noqa: INP001 - a script

from __future__ import annotations

import sys
from types import ModuleType

import torch
from runner import parser, run

from tilewise.adapters import flash_attn as adapter

# What tests that package's own internals, or a promise that tilewise does not make.
EXPLAINED = {
    "test_flash_attn_varlen_paged_kv_num_splits": "imports a private function of flash_attn",
    "test_flash_attn_generator_arg_must_be_none": "calls flash_attn's compiled extension",
    "test_flash_attn_kvcache_paged_block_table_bounds": "wants cache_seqlens read from the device before each call",
}


def one_block(*_: object) -> int:
    """Say in how many columns flash_attn's debugging output shares one scale: here, in all."""
    return 2**31


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Rotate pairs of the first axes of x (batch, len, heads, dim) by the angles from each sequence's offset on."""
    half = cos.shape[-1]
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
    rows = (offsets + torch.arange(x.shape[1], device=x.device)).long()  # (batch or 1, len)
    c, s = (table[rows][:, :, None].float() for table in (cos, sin))
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = a * c - b * s, a * s + b * c
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((joined.to(x.dtype), rest), -1)


def install() -> None:
    """Put the adapter and the stand-ins where the tests look for them."""
    if not adapter.install():
        raise SystemExit("the real flash_attn is installed here: run this where it is not")
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface.__dict__.update({name: getattr(adapter, name) for name in adapter.__all__})
    interface.__dict__.update(_get_block_size_n=one_block, USE_TRITON_ROCM=False)
    layers, rotary = ModuleType("flash_attn.layers"), ModuleType("flash_attn.layers.rotary")
    layers.__path__ = []
    rotary.__dict__["apply_rotary_emb"] = apply_rotary_emb
    for module in (interface, layers, rotary):
        sys.modules[module.__name__] = module


def main() -> int:
    """Run the sample."""
    options = parser((__doc__ or "").partition("\n")[0]).parse_args()
    install()
    return run(
        options, lambda item: item.name.partition("[")[0], "cuda" if torch.cuda.is_available() else "cpu", EXPLAINED
    )


if __name__ == "__main__":
    sys.exit(main())
