"""Decoding against a cache that is spread over ranks: each attends to its part, and the parts are merged by lse.

A rank sends its (out, lse) of the new queries, batch x len_q x heads_q x (dim_v + 1) float32, to every other; the keys
stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tilewise.api import attention_with_kvcache, merge
from tilewise.arguments import check_tensors
from tilewise.backends.outputs import sum_dtype
from tilewise.distributed.agree import Description, agree, join, outside_graphs
from tilewise.distributed.context_parallel import gather
from tilewise.problem.problem import fail

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tilewise.problem.problem import Layout


@outside_graphs
def context_parallel_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    mesh: DeviceMesh,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    writer: int = 0,
    cache_seqlens: int | torch.Tensor | Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from a few new queries to a cache whose tokens are spread over the ranks of a mesh, in any way.

    The new queries follow every token that is cached. All ranks give the same q, and the same k and v where new tokens
    are to be kept: the rank ``writer`` appends them to its cache, and among them the mask is causal. Let ranks take
    turns at it, and the parts grow alike.

    Args:
        q: (batch, len_q, heads_q, dim_qk), the same on every rank.
        k_cache, v_cache: this rank's part, (batch, capacity, heads_kv, dim), or pages with a block_table.
        mesh: 1-D or 2-D; only its ranks count.
        k, v: (batch, len_q, heads_kv, dim), the same on every rank. writer: the place in the mesh of who appends them.
        cache_seqlens: the tokens of each sequence that this rank holds before the call; None = the whole capacity.
        block_table, k_scale, v_scale, scale, softcap, layout, backend: as in `tilewise.attention_with_kvcache`.
        sink: (heads_q,) or (batch, heads_q), added once.
        return_lse: also return lse.

    Returns:
        On every rank out (batch, len_q, heads_q, dim_v); with return_lse also lse (batch, heads_q, len_q).

    Raises:
        TypeError, ValueError: bad input, alike on every rank. RuntimeError: a rank died or did not come.

    Example::

        out = context_parallel_decode(q, k_cache, v_cache, mesh=mesh, k=k, v=v, writer=step % 8, cache_seqlens=held)
    """
    member = join(mesh)
    try:
        check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
        if not 0 <= writer < len(member.ranks):
            raise fail(f"writer must be from 0 to {len(member.ranks) - 1}", writer, "Count ranks in the mesh")
        if (k is None) != (v is None):
            raise fail("k and v go together", "one of them", "Pass both or neither")
        common = {
            "q": (tuple(q.shape), q.dtype),
            "k and v": None if k is None or v is None else (tuple(k.shape), tuple(v.shape)),
            "heads and head dim of the caches": (k_cache.shape[2:], v_cache.shape[2:]) if layout == "bshd" else None,
            "options": (writer, scale, softcap, None if sink is None else tuple(sink.shape), layout),
        }
        mine = Description(tuple((name, f"{value}") for name, value in common.items()))
    except (TypeError, ValueError) as error:
        mine = Description(failure=f"{error}")
    agree(member, mine)
    appends = k is not None and member.index == writer
    found = attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=k if appends else None,
        v=v if appends else None,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        k_scale=k_scale,
        v_scale=v_scale,
        causal=appends,
        scale=scale,
        softcap=softcap,
        return_lse=True,
        layout=layout,
        backend=backend,
    )
    out, lse = found[0] if layout == "bhsd" else found[0].transpose(1, 2), found[1]
    exact = sum_dtype(out.dtype)
    parts = gather(torch.cat([out.to(exact), lse.to(exact)[..., None]], dim=-1), member)
    whole, lse = merge([part[..., :-1] for part in parts], [part[..., -1] for part in parts], sink=sink)
    whole = whole.to(out.dtype) if layout == "bhsd" else whole.to(out.dtype).transpose(1, 2)
    return (whole, lse) if return_lse else whole
