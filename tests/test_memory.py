"""Memory beyond the inputs grows with the length, not with its square, whatever the feature."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tilewise.backends import torch_tiled
from tilewise.bench.memory import peak
from tilewise.machine.tiles import Tiles

HEADS, DIM = 2, 16
FEATURES: dict[str, Any] = {
    "plain": lambda _: {"backend": "torch_tiled"},
    "sdpa": lambda _: {"backend": "torch_sdpa"},
    "causal": lambda _: {"causal": True, "backend": "torch_tiled"},
    "window": lambda _: {"window": (64, 0)},
    "bias of keys": lambda n: {"bias": torch.randn(1, HEADS, 1, n)},
    "ALiBi": lambda _: {"alibi_slopes": torch.tensor([0.1, 0.2])},
    "softcap": lambda _: {"softcap": 3.0, "causal": True},
    "sink": lambda _: {"sink": torch.zeros(HEADS)},
    "padding": lambda n: {"kv_stop": [n // 2]},
    "padding mask": lambda n: {"mask": torch.ones(1, 1, 1, n, dtype=torch.bool)},
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile is far smaller than the score matrix, as it is at lengths that would take too long here."""
    monkeypatch.setattr(torch_tiled, "tiles", lambda _: Tiles(128, 256))


def extra(feature: str, length: int, *, backward: bool) -> int:
    """Give the peak of a call's memory beyond its inputs, in bytes."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, HEADS, length, DIM, generator=generator).requires_grad_(backward) for _ in range(3))
    options = FEATURES[feature](length)

    def call() -> torch.Tensor:
        out: torch.Tensor = tilewise.attention(q, k, v, **options)
        if backward:
            out.sum().backward()
        return out

    held = peak(call, "cpu", "torch")[1]
    assert held is not None
    return held


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("feature", FEATURES)
def test_extra_memory_is_linear_in_the_length(feature: str, backward: bool) -> None:
    short, long = (extra(feature, length, backward=backward) for length in (1024, 2048))
    linear = 2048 * HEADS * DIM * 4  # bytes of one tensor like q
    grown = long - short  # the tiles' own memory does not grow, and drops out
    assert grown <= (10 if backward else 4) * linear / 2
    assert long < 2048 * 2048 * HEADS * 4 / 8  # an eighth of one score matrix


def test_sdpa_with_a_dense_mask_is_quadratic_where_a_window_here_is_linear() -> None:
    """The meter sees a score matrix where there is one: else the test above could not fail."""
    length = 2048
    q = torch.randn(1, HEADS, length, DIM)
    position = torch.arange(length)
    band = (position[:, None] - position).abs() <= 64

    def dense() -> torch.Tensor:
        mask = torch.zeros(length, length).masked_fill(~band, -torch.inf)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    got, held = peak(dense, "cpu", "torch")
    assert held is not None
    assert held > HEADS * length * length * 4
    ours = tilewise.attention(q, q, q, window=(64, 64))
    assert (ours - got).abs().max() <= 64 * torch.finfo(torch.float32).eps * got.abs().max()
