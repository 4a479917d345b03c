"""What is measured: one self-attention problem and its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewise.machine.device import ITEMSIZE
from tilewise.machine.shape import Shape, flops, nominal_flops
from tilewise.problem.blocks import is_visible

DTYPES = ("float16", "bfloat16", "float32", "float64")


class Inputs(NamedTuple):
    """The data of a case.

    d_out is what the backward pass starts from. ``made`` keeps dense masks and biases, so that implementations that
    need the same one share it; None: each makes its own.
    """

    q: torch.Tensor  # (batch, heads_q, length, dim)
    k: torch.Tensor  # (batch, heads_kv, length, dim)
    v: torch.Tensor
    d_out: torch.Tensor
    alibi_slopes: torch.Tensor | None = None  # (heads_q,)
    made: dict[str, torch.Tensor | None] | None = None

    def share(self, name: str, make: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """Give what goes by a name here, made on first use."""
        if self.made is None:
            return make()
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]


@dataclass(frozen=True)
class Case:
    """As many queries as keys, one head dim, and at most these restrictions.

    Args:
        length, batch, heads_q, heads_kv, dim: the sizes.
        dtype: "float32" and the like.
        device: "cpu", "cuda", "mps".
        causal: hide keys behind the diagonal.
        window: keys visible to each side of the diagonal; None = all.
        alibi: subtract each head's slope times the distance.
        kv_stop: only keys before this one are visible; None = all.
    """

    length: int
    batch: int
    heads_q: int
    heads_kv: int
    dim: int
    dtype: str
    device: str
    causal: bool = False
    window: int | None = None
    alibi: bool = False
    kv_stop: int | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]

    @property
    def left(self) -> int | None:
        """Keys visible before the diagonal."""
        return self.window

    @property
    def right(self) -> int | None:
        """Keys visible behind the diagonal."""
        return 0 if self.causal else self.window

    @property
    def is_masked(self) -> bool:
        """True where some key is hidden from some query."""
        return self.left is not None or self.right is not None or self.kv_stop is not None

    @property
    def shape(self) -> Shape:
        """The sizes as the counting model takes them."""
        return Shape(
            self.batch,
            self.heads_q,
            self.heads_kv,
            self.length,
            self.length,
            self.dim,
            self.dim,
            self.itemsize,
            self.left,
            self.right,
        )

    def flops(self, *, backward: bool) -> int:
        """Count operations as this field does: 4 b h n^2 d, halved when causal, backward 2.5 times.

        In a window only the visible pairs count.

        >>> Case(1024, 1, 8, 8, 64, "float32", "cpu").flops(backward=False) == 4 * 8 * 1024**2 * 64
        True
        """
        return (nominal_flops if self.window is None else flops)(self.shape, backward=backward)

    @property
    def input_bytes(self) -> int:
        """Bytes of q, k, v and d_out."""
        shape = self.shape
        return (shape.size_q + shape.size_kv + shape.size_out) * self.itemsize

    def inputs(self, seed: int) -> Inputs:
        """Draw the data from normal distributions, in the case's dtype."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def draw(heads: int) -> torch.Tensor:
            shape = (self.batch, heads, self.length, self.dim)
            return torch.randn(shape, generator=generator, device=self.device, dtype=getattr(torch, self.dtype))

        q, k, v, d_out = (draw(heads) for heads in (self.heads_q, self.heads_kv, self.heads_kv, self.heads_q))
        return Inputs(q, k, v, d_out, self.slopes() if self.alibi else None, {})

    def slopes(self) -> torch.Tensor:
        """Give ALiBi's slopes, 2^(-8/heads), 2^(-16/heads), ... (Press et al., arXiv:2108.12409), in float32."""
        head = torch.arange(1, self.heads_q + 1, device=self.device, dtype=torch.float32)
        return torch.exp2(-8 * head / self.heads_q)

    def hidden(self) -> torch.Tensor | None:
        """Make the matrix that says which keys are hidden, (length, length); None where none is."""
        if not self.is_masked:
            return None
        position = torch.arange(self.length, device=self.device)
        stop = self.length if self.kv_stop is None else self.kv_stop
        visible = is_visible(position[:, None], position, 0, stop, self.left, self.right, 0)
        return torch.logical_not(visible).expand(self.length, self.length)

    def distance_bias(self, slopes: torch.Tensor) -> torch.Tensor:
        """Make ALiBi's bias a matrix for each head, (heads_q, length, length), as who does not know slopes needs it."""
        position = torch.arange(self.length, device=self.device, dtype=torch.float32)
        distance = (position[:, None] - position).abs_()
        shape = (self.heads_q, self.length, self.length)
        bias = torch.empty(shape, device=self.device, dtype=getattr(torch, self.dtype))
        for head, slope in zip(bias, slopes, strict=True):
            torch.mul(distance, -slope, out=head) if bias.dtype == torch.float32 else head.copy_(distance * -slope)
        return bias

    def dense_bias(self, slopes: torch.Tensor | None) -> torch.Tensor | None:
        """Make one matrix of everything that is added to the scores or hides them, in the case's dtype."""
        hidden = self.hidden()
        if slopes is None and hidden is None:
            return None
        if slopes is None:
            bias = torch.zeros(self.length, self.length, device=self.device, dtype=getattr(torch, self.dtype))
        else:
            bias = self.distance_bias(slopes)
        return bias if hidden is None else bias.masked_fill_(hidden, -torch.inf)
