"""torch.nn.attention.flex_attention's two calls, with the same arguments.

Switch by changing one import::

    from tilewise.adapters.flex_attention import create_block_mask, flex_attention

Functions of scores and masks stay as they are, with the tensors that they capture. Nothing has to be wrapped in
torch.compile: a call computes in tiles by itself, on every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, overload
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention import flex_attention as theirs

from tilewise.api import attention
from tilewise.backends.block_lists import Blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tilewise.backends.block_lists import MaskMod

__all__ = ["create_block_mask", "flex_attention"]

ScoreMod: TypeAlias = "Callable[..., torch.Tensor]"


@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: theirs.BlockMask | Blocks | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: Mapping[str, object] | None = ...,
    *,
    return_aux: None = ...,
) -> torch.Tensor: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: theirs.BlockMask | Blocks | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_lse: Literal[True],
    kernel_options: Mapping[str, object] | None = ...,
    return_aux: None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: theirs.BlockMask | Blocks | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: Mapping[str, object] | None = ...,
    *,
    return_aux: theirs.AuxRequest,
) -> tuple[torch.Tensor, theirs.AuxOutput]: ...
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: theirs.BlockMask | Blocks | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, object] | None = None,
    *,
    return_aux: theirs.AuxRequest | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, theirs.AuxOutput]:
    """Compute what torch.nn.attention.flex_attention.flex_attention computes, in tiles, forward and backward.

    Args:
        query: (batch, heads_q, len_q, dim_qk).
        key: (batch or 1, heads_kv, len_kv, dim_qk). value: (batch or 1, heads_kv, len_kv, dim_v).
        score_mod: ``score_mod(score, batch, head, q_pos, kv_pos)``, after the scale; tensors that it captures may want
            gradients.
        block_mask: what `create_block_mask` gave, here or in PyTorch; its function is asked within partial tiles.
        scale: None = dim_qk ** -0.5.
        enable_gqa: let groups of query heads share a key head.
        return_lse: give (out, lse).
        kernel_options: has no effect, they steer PyTorch's kernels.
        return_aux: an AuxRequest; gives (out, AuxOutput) with lse.

    Returns:
        (batch, heads_q, len_q, dim_v) in query's dtype. A row that sees no key is 0, with lse -inf.

    Raises:
        ValueError: heads that differ without enable_gqa, a mask made for other lengths, max_scores, or a function that
            cannot be translated or differentiated. The rest as `tilewise.attention`.

    >>> def nearer(score, batch, head, q_pos, kv_pos):
    ...     return score - (q_pos - kv_pos).abs()
    >>> q, k = torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16)
    >>> mask = create_block_mask(lambda batch, head, q_pos, kv_pos: q_pos >= kv_pos, None, None, 300, 300, device="cpu")
    >>> flex_attention(q, k, k, nearer, mask).shape
    torch.Size([1, 2, 300, 16])
    """
    if min(x.ndim for x in (query, key, value)) != 4 or max(x.ndim for x in (query, key, value)) != 4:
        got = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key and value must have axes (batch, heads, len, dim); got {got}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query and key must have the same heads; got {query.shape[1]} and {key.shape[1]}. enable_gqa=True allows "
            "groups"
        )
    if return_lse and return_aux is not None:
        raise ValueError("return_lse does not go with return_aux; got both. return_aux=AuxRequest(lse=True) is enough")
    if return_aux is not None and return_aux.max_scores:
        raise ValueError("max_scores are not kept: tilewise gives lse alone. Leave them out of AuxRequest")
    blocks: Blocks | None = _blocks(block_mask)
    if blocks is not None and (blocks.len_q, blocks.len_kv) != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"block_mask was made for {blocks.len_q} queries and {blocks.len_kv} keys; got {query.shape[2]} and "
            f"{key.shape[2]}. Make one for these lengths"
        )
    if key.shape[0] == value.shape[0] == 1 and blocks is not None and blocks.batch == query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    out, lse = attention(query, key, value, score_mod=score_mod, blocks=blocks, scale=scale, return_lse=True)
    if return_aux is not None:
        return out, theirs.AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if return_lse else out


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> Blocks:
    """Find the empty, partial and full tiles of a mask, as torch.nn.attention.flex_attention.create_block_mask does.

    Unlike there, nothing of Q_LEN x KV_LEN elements is made, and a second call with the same function, lengths and
    captured tensors gives the same lists at once.

    Args:
        mask_mod: ``mask_mod(batch, head, q_pos, kv_pos)``, True = visible.
        B, H: sequences and query heads; None = 1.
        Q_LEN, KV_LEN: queries and keys.
        device: None = the accelerator here, else the CPU.
        BLOCK_SIZE: queries and keys of a tile, multiples of 16; one number for both.
        _compile, separate_full_blocks, compute_dq_write_order, dq_kv_order: have no effect; they are for PyTorch's
            kernels.

    Raises:
        ValueError: as `tilewise.Blocks.of`.

    >>> mask = create_block_mask(lambda batch, head, q_pos, kv_pos: q_pos >= kv_pos, None, None, 256, 256, device="cpu")
    >>> print(mask.draw())
    256 queries x 256 keys in tiles of 128 x 128: 1 full (#), 2 partial (+), 1 empty (.)
    +.
    #+
    """
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    block_q, block_kv = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    return Blocks.of(
        mask_mod,
        len_q=Q_LEN,
        len_kv=KV_LEN,
        batch=1 if B is None else B,
        heads=1 if H is None else H,
        device=device,
        block_q=block_q,
        block_kv=block_kv,
    )


# Lists taken from a BlockMask, beside the function and the versions of the tensors that it had then; and these tensors,
# since while they live no other gets the id of one of them.
_taken: WeakKeyDictionary[theirs.BlockMask, tuple[tuple[object, ...], Blocks, object]] = WeakKeyDictionary()


@torch.compiler.disable(reason="tilewise: it makes lists of tiles, so the graph breaks here")  # type: ignore[untyped-decorator]
def _blocks(block_mask: theirs.BlockMask | Blocks | None) -> Blocks | None:
    """Give what a call's block_mask says, a BlockMask's lists taken once."""
    if block_mask is None or isinstance(block_mask, Blocks):
        return block_mask
    if not isinstance(block_mask, theirs.BlockMask):
        raise TypeError(f"block_mask must be a BlockMask of PyTorch or of create_block_mask here; got {block_mask!r}")
    if block_mask.mask_mod is getattr(theirs, "_sliced_mask_mod_error", None):
        raise ValueError("a sliced BlockMask has lost its mask_mod: set it, as PyTorch's documentation shows")
    lists = (
        block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices,
    )  # fmt: skip
    state = (block_mask.mask_mod, *((id(x), _version(x)) for x in lists))
    known = _taken.get(block_mask)
    if known is None or known[0] != state:
        known = _taken[block_mask] = state, Blocks.from_torch(block_mask), lists
    return known[1]


def _version(x: torch.Tensor | None) -> int | None:
    """Count how often a tensor was written to; None for one of inference mode, which does not know."""
    return None if x is None or x.is_inference() else x._version  # noqa: SLF001 - torch has no public name for it
