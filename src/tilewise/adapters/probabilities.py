"""The probabilities that attention never holds, computed after the fact for those who ask to look at them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch

from tilewise.api import attention
from tilewise.problem.philox import is_kept

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tilewise.problem.mask import Align


class Score(TypedDict, total=False):
    """What shapes a score, of `tilewise.attention`'s arguments."""

    causal: bool
    window: tuple[int | None, int | None]
    align: Align
    scale: float | None
    softcap: float
    alibi_slopes: torch.Tensor | None


def signed_probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    dropout: float,
    seed: torch.Tensor,
    sequence: int = 0,
    **score: Unpack[Score],
) -> torch.Tensor:
    """Give each row's softmax before dropout, scaled to have the maximum 1, negative where dropout drops.

    This is flash_attn's debugging output. It has the size of the score matrix, and is computed from the untiled
    formula: ``softmax(score)`` is what attention gives for the identity in place of the values.

    Args:
        q: (batch, heads_q, len_q, dim). k: (batch, heads_kv, len_kv, dim).
        dropout, seed: those of the call whose dropout is shown.
        sequence: the number of the first sequence, which dropout counts too.
        score: of `tilewise.attention`.

    Returns:
        (batch, heads_q, len_q, len_kv) in q's dtype; 0 where nothing is seen.
    """
    batch, heads_q, len_q, _ = q.shape
    heads_kv, len_kv = k.shape[1:3]
    exact = torch.promote_types(q.dtype, torch.float32)
    q_pos, kv_pos, head = (torch.arange(n, device=q.device) for n in (len_q, len_kv, heads_q))
    number = torch.arange(sequence, sequence + batch, device=q.device)
    with torch.no_grad():
        identity = torch.eye(len_kv, dtype=exact, device=q.device).expand(batch, heads_kv, -1, -1)
        p = attention(q.to(exact), k.to(exact), identity, **score, backend="naive")
        top = p.amax(-1, keepdim=True) if len_kv else p.new_ones(())
        scaled = p / torch.where(top > 0, top, 1.0)
        kept = is_kept(seed, dropout, q_pos[:, None], kv_pos, head[:, None, None], number[:, None, None, None])
        return torch.where(kept, scaled, -scaled).to(q.dtype)
