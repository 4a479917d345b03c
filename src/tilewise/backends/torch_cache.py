"""A cache of keys and values on torch: reading tiles from it, appending to it, rotary embedding.

Nothing here reads a device tensor on the host. Out-of-range indices are clamped; tokens that do not fit are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.problem.cache import CacheTensors
from tilewise.problem.problem import Problem


@dataclass(frozen=True)
class Store:
    """Where the engine reads keys or values from, a tile of tokens at a time.

    Without a table, ``data`` is (batch, heads_kv, len, dim). With one, ``data`` is (pages, page_size, heads_kv, dim)
    and row b's token t lies in page ``table[b, t // page_size]``. ``scale`` (heads_kv,) multiplies what is stored.
    """

    data: torch.Tensor
    table: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    def tile(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Read tokens [start, stop) as (batch, heads_kv, stop - start, dim) of dtype."""
        if self.table is None:
            read = self.data[:, :, start:stop]
        else:
            token = torch.arange(start, stop, device=self.data.device)
            page, slot = place(self.table, token[None], self.data)
            stored = self.data.view(torch.uint8) if self.data.itemsize == 1 else self.data
            read = stored[page, slot].view(self.data.dtype).transpose(1, 2)
        read = read.to(dtype)
        return read if self.scale is None else read * self.scale.to(dtype)[:, None, None]


def place(table: torch.Tensor, token: torch.Tensor, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find page and slot of each token: table (batch, max_pages), token (batch or 1, tokens), both (batch, tokens)."""
    pages, page_size = data.shape[:2]
    column = (token // page_size).expand(table.shape[0], -1)
    page = table.long().gather(1, column).clamp(0, pages - 1)
    return page, (token % page_size).expand_as(page)


def page_table(tensors: CacheTensors) -> torch.Tensor:
    """Give the table of pages: a cache in one piece is one page a row, chosen by cache_batch_idx."""
    if tensors.block_table is not None:
        return tensors.block_table
    if tensors.cache_batch_idx is not None:
        return tensors.cache_batch_idx[:, None]
    return torch.arange(tensors.q.shape[0], device=tensors.q.device)[:, None]


def append(problem: Problem, tensors: CacheTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k, write k and v into the caches in place, and give (q, lengths after the append).

    q is (batch, len_q, heads_q, dim_qk); lengths is (batch,), at most the capacity.
    """
    q, cache = tensors.q, problem.cache
    if cache is None:
        raise TypeError("a cache problem carries its cache's description")
    if tensors.cache_seqlens is None:
        return q, torch.full((problem.batch,), cache.capacity, device=q.device)
    before = tensors.cache_seqlens.long()
    if tensors.k is None or tensors.v is None:
        return q, before.clamp(0, cache.capacity)
    k, v = tensors.k, tensors.v
    if tensors.rotary_cos is not None and tensors.rotary_sin is not None:
        # Without a diagonal all queries stand at the same place: behind the cached tokens.
        step = torch.arange(q.shape[1], device=q.device) * (not problem.mask.band.is_open)
        style = tensors.rotary_cos, tensors.rotary_sin, cache.rotary_interleaved
        q = rotary(q, before[:, None] + step, *style)
        k = rotary(k, before[:, None] + torch.arange(k.shape[1], device=q.device), *style)
    for new, data, scale in ((k, tensors.k_cache, tensors.k_scale), (v, tensors.v_cache, tensors.v_scale)):
        _write(
            new if scale is None else _quantise(new, scale, data.dtype),
            data,
            page_table(tensors),
            before,
            cache.capacity,
        )
    return q, (before + cache.appended).clamp(0, cache.capacity)


def _write(new: torch.Tensor, data: torch.Tensor, table: torch.Tensor, before: torch.Tensor, capacity: int) -> None:
    """Write new (batch, len_new, heads_kv, dim) behind the first ``before`` tokens; what does not fit is dropped.

    A dropped token writes the last one that fits once more, or, where none fits, what is there already. So every write
    stays inside, and writes that meet agree.
    """
    if 0 in (new.numel(), data.numel(), capacity):
        return
    before = before.clamp(min=0)[:, None]
    fitting = (capacity - before).clamp(0, new.shape[1])
    index = torch.arange(new.shape[1], device=new.device)[None].minimum((fitting - 1).clamp(min=0))
    page, slot = place(table, (before + index).clamp(max=capacity - 1), data)
    chosen = new.gather(1, index[..., None, None].expand_as(new))
    # Bytes go in and out: not every release of torch indexes 8-bit floats.
    stored, given = (x.view(torch.uint8) if x.itemsize == 1 else x for x in (data, chosen.to(data.dtype)))
    stored[page, slot] = torch.where((fitting > 0)[..., None, None], given, stored[page, slot])


def _quantise(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Divide by the head's scale and round into the stored type's range."""
    x = x.float() / scale.float()[:, None]
    if dtype == torch.int8:
        return x.round().clamp(-128, 127)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit)


def rotary(
    x: torch.Tensor, position: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotate the first rotary_dim features of x (batch, len, heads, dim) by the angle of each token's position.

    Pairs are (0, 1), (2, 3), ... when interleaved, else (0, half), (1, half + 1), ... Positions outside the tables
    are clamped. Source: Su et al., "RoFormer", arXiv:2104.09864, section 3.4.2.
    """
    rotary_dim = 2 * cos.shape[1]
    position = position.clamp(0, cos.shape[0] - 1)
    cos, sin = cos[position].float()[:, :, None], sin[position].float()[:, :, None]  # (batch, len, 1, half)
    turned, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, -1)
    pairs = first * cos - second * sin, first * sin + second * cos
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)
