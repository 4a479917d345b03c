"""The functions of flash_attn.bert_padding: padded batches to packed tokens, and back. All are differentiable.

``hidden_states`` is (batch, len, ...) when padded and (tokens, ...) when packed; ``indices`` (tokens,) says where each
token stood among the batch * len places.
"""

from __future__ import annotations

import torch

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:  # noqa: A002  # flash_attn's name
    """Take entries along the first axis."""
    return input.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Lay values (tokens, ...) into zeros (first_axis_dim, ...)."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(
    input: torch.Tensor,  # noqa: A002  # flash_attn's name
    indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take entries along the first axis, and hand on the input beside them."""
    return input.index_select(0, indices), input.view_as(input)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Pack the tokens of a padded batch.

    Args:
        hidden_states: (batch, len, ...).
        attention_mask: (batch, len), bool or integer, True or 1 for tokens.
        unused_mask: the same for places that are packed too, though nothing uses them.

    Returns:
        The packed tokens (tokens, ...), indices (tokens,), cu_seqlens (batch + 1,) int32, the longest sequence (which
        is read from the device), and (batch,) int32: how many tokens of each sequence are used.

    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> packed, indices, cu_seqlens, longest, used = unpad_input(torch.arange(6.0).view(2, 3, 1), mask)
    >>> packed.flatten().tolist(), cu_seqlens.tolist(), longest
    ([0.0, 1.0, 3.0], [0, 2, 3], 2)
    >>> pad_input(packed, indices, 2, 3).flatten().tolist()
    [0.0, 1.0, 0.0, 3.0, 0.0, 0.0]
    """
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = taken.sum(-1, dtype=torch.int32)
    packed, indices, cu_seqlens, longest = _pack(hidden_states, taken, lengths)
    return packed, indices, cu_seqlens, longest, attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Pack a batch whose rows hold several sequences each.

    Args:
        hidden_states: (batch, len, ...).
        attention_mask_in_length: (batch, len) integers: the lengths of a row's sequences, one after the other, then 0.

    Returns:
        As `unpad_input`, without the last.

    >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
    >>> unpad_input_for_concatenated_sequences(torch.zeros(2, 4, 1), lengths)[2].tolist()
    [0, 2, 3, 6]
    """
    tokens = attention_mask_in_length.sum(-1, keepdim=True)
    places = torch.arange(attention_mask_in_length.shape[-1], device=tokens.device)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return _pack(hidden_states, places < tokens, lengths)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Lay packed tokens (tokens, ...) out as (batch, seqlen, ...), zero where there is none."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])


def _pack(
    hidden_states: torch.Tensor, taken: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    indices = taken.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(lengths.max())  # a sync
