"""What happens to a visible score, in this order: scale, softcap, bias, ALiBi; and the sink beside the row's keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """How the product of a query and a key becomes a score (natural-log units).

    ``score = cap(scale * dot(q, k)) + bias - alibi_slope * |q_pos + offset - kv_pos|``, with
    ``cap(x) = softcap * tanh(x / softcap)``, or x where softcap is 0. A sink is one more score in the row's sum:
    neither scaled nor capped, and with no value attached.
    """

    scale: float
    softcap: float = 0.0
    bias: bool = False
    alibi: bool = False
    sink: bool = False
