"""Hugging Face transformers: models loaded with ``attn_implementation="tilewise"`` compute their attention here.

A model asks twice. Once per forward it asks the *mask function* who may see whom, and its code carries the answer to
each layer's call of the *attention function*. Other implementations answer with a matrix, or with the padding alone,
trusting every layer to know the rest. Here the answer is a `KeyRanges`: a band around the diagonal and a range of keys
per sequence, which is the whole mask in linear memory. A mask that is no band becomes the boolean matrix that
transformers builds for PyTorch's attention: the same answer, only larger.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NoReturn, TypedDict, cast

import torch

from tilewise.adapters.transformers_band import MaskFunction, band_of
from tilewise.api import attention, attention_varlen

if TYPE_CHECKING:
    from tilewise.adapters.transformers_band import Band
    from tilewise.problem.mask import Align

__all__ = ["NAME", "DenseMaskWarning", "KeyRanges", "attention_forward", "key_ranges", "register"]

# A name that contains "flash", "sdpa" or "flex_attention" would be taken for one of those by transformers.
NAME = "tilewise"


class DenseMaskWarning(UserWarning):
    """A mask travels as a boolean tensor, because it is no interval of keys per query. Said once for each reason."""


def register() -> None:
    """Make ``attn_implementation="tilewise"`` known to transformers; nothing else changes.

    Both functions are registered, always: a model without a mask function passes no mask at all, and its padding would
    be seen. Later calls change nothing. ``model.set_attn_implementation("tilewise")`` switches a loaded model::

        from transformers import AutoModel
        from tilewise.adapters.transformers import register

        register()
        model = AutoModel.from_pretrained(name, attn_implementation="tilewise")

    Raises:
        ImportError: transformers is not installed, or older than 5.6.
    """
    needed = "tilewise needs transformers 5.6 or newer, {}: pip install 'tilewise[transformers]'"
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__
    except ImportError as missing:
        raise ImportError(needed.format("and there is none")) from missing
    if tuple(int(number) for number in __version__.split(".")[:2]) < (5, 6):
        raise ImportError(needed.format(f"got {__version__}"))
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, key_ranges)


# ---- the answer of the mask function --------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyRanges:
    """Who sees whom, in linear memory: query i sees the keys that all of this leaves.

    Args:
        shape: (batch, 1, len_q, len_kv), of the matrix that this stands for.
        left, right: inclusive counts of keys to each side of the diagonal; None leaves a side open.
        align: where the diagonal lies among the first ``used`` keys, as in `tilewise.attention`.
        used: keys from there on are seen by nobody (the free slots of a static cache).
        kv_start, kv_stop: (batch,) integers, each sequence's range of keys that are no padding; None = all.
        visible: (batch, 1, 1, used) bool, False for padding, where the ranges alone do not say it or may not.
        cu_seqlens: (documents + 1,) int32, for several documents in one row: cumulative lengths over all rows.
        max_seqlen: the longest document, where the host knows it.
    """

    shape: tuple[int, int, int, int]
    left: int | None = None
    right: int | None = None
    align: Align = "bottom_right"
    used: int = 0
    kv_start: torch.Tensor | None = None
    kv_stop: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None

    @property
    def ndim(self) -> int:
        """The number of axes, which transformers asks of any mask."""
        return 4

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyRanges:
        """Move the tensors, as a model spread over several devices asks of each argument."""

        def moved(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(device, non_blocking=non_blocking)

        return replace(
            self,
            kv_start=moved(self.kv_start),
            kv_stop=moved(self.kv_stop),
            visible=moved(self.visible),
            cu_seqlens=moved(self.cu_seqlens),
        )

    def contiguous(self) -> KeyRanges:
        """Stay, as `generate` asks of the masks that it prepares."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse to be taken for a tensor."""
        raise AttributeError(
            f"this model's own code asks its attention mask for {name!r}, and tilewise's mask is a band of keys, no "
            "tensor: load this model with attn_implementation='sdpa'"
        )


# ---- the mask function ----------------------------------------------------------------------------------------------


def key_ranges(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | KeyRanges | None = None,
    *,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    local_size: int | None = None,
    config: object = None,
    device: torch.device | str = "cpu",
    **kwargs: object,
) -> KeyRanges | torch.Tensor:
    """Describe a mask to `attention_forward`; transformers calls this once per forward and kind of layer.

    Query i stands at position ``q_offset + i``, key j at ``kv_offset + j``, and ``mask_function(batch, head, q_pos,
    kv_pos)`` says whether it is seen. Contents of tensors are read on the CPU alone: there, padding that is an interval
    becomes a range of keys, and no padding nothing at all. On other devices the range goes along with the padding mask,
    which is (batch, len_kv), and the result is the same. Two things are read from a device, outside of graphs: the
    length of a static cache that meets more than one query, and where documents begin in a row of several.

    Args:
        batch_size, q_length, kv_length: sizes of the mask.
        q_offset, kv_offset: the first query's and the first key's position; a static cache gives q_offset as a tensor.
        mask_function: None = causal.
        attention_mask: (batch, positions), True or 1 for tokens, False or 0 for padding; positions that it does not
            reach are padding. A `KeyRanges` is given back.
        allow_is_causal_skip, allow_is_bidirectional_skip: both False where the model computes with the mask itself.
        use_vmap: the model's own functions are part of mask_function.
        local_size: the width of a window or chunk, None = none. config: the model's.
        device: where the mask will be used.
        kwargs: what transformers tells other implementations; not needed.

    Raises:
        ValueError: attention_mask has other than 2 axes.

    Returns:
        A `KeyRanges`, or a (batch, 1, q_length, kv_length) bool tensor: where the mask is no band, and for one query
        whose position lies on the device.

    >>> key_ranges(1, 4, 4).right, key_ranges(1, 1, 4, q_offset=3).right  # causal; decoding sees all that is cached
    (0, None)
    >>> padded = key_ranges(2, 3, 3, attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]))
    >>> padded.kv_start.tolist(), padded.kv_stop.tolist(), padded.visible
    ([1, 0], [3, 3], None)
    """
    if isinstance(attention_mask, KeyRanges):
        return attention_mask
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask must be a padding mask (batch, len), got {tuple(attention_mask.shape)}. A whole mask has "
            "4 axes, and models hand it on themselves"
        )
    if isinstance(q_offset, torch.Tensor) and (q_length > 1 or q_offset.device.type == "cpu"):
        q_offset = int(q_offset) if _is_readable(q_offset) else q_offset
    mask_function = mask_function or _causal
    # Skipping is also forbidden where several documents share a row, and for one query against a static cache.
    is_read = not (allow_is_causal_skip or allow_is_bidirectional_skip)
    is_chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    if use_vmap:
        described: KeyRanges | str = "a function of the model's own is part of it"
    elif (is_read or is_chunked) and torch.compiler.is_compiling():
        described = "it may depend on tensors, and a graph is being traced"
    else:
        shape = (batch_size, 1, q_length, kv_length)
        described = _describe(band_of(mask_function), shape, q_offset, kv_offset, attention_mask, is_read)
    if isinstance(described, KeyRanges):
        return described
    if q_length > 1:
        _say(f"this model's mask is no interval of keys per query ({described}) and becomes a boolean matrix")
    return _matrix(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        device=device,
    )


def _causal(_batch: object, _head: object, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
    return kv_pos <= q_pos


def _describe(
    band: Band | None,
    shape: tuple[int, int, int, int],
    q_offset: int | torch.Tensor,
    kv_offset: int,
    attention_mask: torch.Tensor | None,
    is_read: bool,
) -> KeyRanges | str:
    """Describe a mask in linear memory, or say why that cannot be."""
    if band is None:
        return "it is no band around the diagonal"
    if band.documents is not None:
        return _packed(band, band.documents, shape)
    if is_read:
        return "the model's own code may compute with it"
    if isinstance(q_offset, torch.Tensor):
        return "the length of a static cache is not known while a graph is traced"
    ranges = _placed(band, shape, q_offset - kv_offset)
    if ranges is None:
        return "its diagonal ends neither at the first nor at the last key"
    return ranges if attention_mask is None else _padded(ranges, attention_mask[:, kv_offset:])


def _placed(band: Band, shape: tuple[int, int, int, int], offset: int) -> KeyRanges | None:
    """Lay a band with query i beside key i + offset, without what hides nothing; None where `attention` has no word."""
    _, _, len_q, len_kv = shape
    left, right = band.left, band.right
    used = len_kv
    align: Align = "bottom_right"
    if right == 0:
        used = offset + len_q
        if used <= 0 or used > len_kv:
            return None
    elif left is not None or right is not None:
        if offset not in (0, len_kv - len_q):
            return None
        align = "bottom_right" if offset == len_kv - len_q else "top_left"
    left = None if left is not None and left >= offset + len_q - 1 else left
    right = None if right is not None and right >= used - 1 - offset else right
    return KeyRanges(shape, left, right, align, used)


def _padded(ranges: KeyRanges, padding: torch.Tensor) -> KeyRanges:
    """Add a padding mask (batch, positions)."""
    used = ranges.used
    visible = torch.nn.functional.pad(padding.bool(), (0, max(0, used - padding.shape[1])))[:, :used]
    visible = visible.expand(ranges.shape[0], used)
    readable = visible.device.type == "cpu" and _is_readable(visible)
    if used == 0 or (readable and bool(visible.all())):
        return ranges
    flags = visible.int()
    kv_start = flags.argmax(1)
    kv_stop = torch.where(visible.any(1), used - flags.flip(1).argmax(1), 0)
    if readable and torch.equal(flags.sum(1), (kv_stop - kv_start).clamp(min=0)):
        return replace(ranges, kv_start=kv_start, kv_stop=kv_stop)
    if readable:
        _say("this batch has padding between its tokens, which is no interval and travels as a boolean (batch, len_kv)")
    return replace(ranges, kv_start=kv_start, kv_stop=kv_stop, visible=visible[:, None, None, :])


def _packed(band: Band, documents: torch.Tensor, shape: tuple[int, int, int, int]) -> KeyRanges:
    """Describe rows that hold several documents, numbered by ``documents`` (batch, len)."""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = first.flatten().nonzero()[:, 0]
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=documents.numel()).int()
    longest = int(cu_seqlens.diff().max()) if cu_seqlens.device.type == "cpu" else None
    return KeyRanges(shape, band.left, band.right, used=shape[3], cu_seqlens=cu_seqlens, max_seqlen=longest)


def _matrix(**arguments: object) -> torch.Tensor:
    """Build the boolean matrix that transformers gives to PyTorch's attention."""
    from transformers.masking_utils import sdpa_mask

    skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return cast("torch.Tensor", sdpa_mask(**arguments, **skip))  # type: ignore[arg-type]  # types as in key_ranges


def _is_readable(x: torch.Tensor) -> bool:
    """Say whether the host may look into x now: no graph is being traced or captured, and x holds numbers."""
    from transformers.utils.import_utils import is_tracing

    return not (x.is_meta or is_tracing(x))


@cache
def _say_once(text: str) -> None:
    warnings.warn(text, DenseMaskWarning, stacklevel=4)


def _say(text: str) -> None:
    if not torch.compiler.is_compiling():
        _say_once(text)


# ---- the attention function -----------------------------------------------------------------------------------------


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | KeyRanges | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | torch.Tensor | None = None,
    max_length_k: int | torch.Tensor | None = None,
    deterministic: bool | None = None,
    output_attentions: bool = False,
    block_table: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention; transformers calls this with its own conventions.

    The mask alone decides who sees whom, as in transformers' eager attention. Only without any mask do ``is_causal``
    (None = the module's attribute, True where it has none) and ``sliding_window`` count, the diagonal ending at the
    last key.

    Args:
        module: the attention layer.
        query: (batch, heads_q, len_q, dim_qk).
        key: (batch, heads_kv, len_kv, dim_qk), not repeated for grouped queries.
        value: (batch, heads_kv, len_kv, dim_v).
        attention_mask: a `KeyRanges`; bool with 4 axes, True = visible; floating point with 4 axes, added to the
            scores; None.
        dropout: probability of dropping an element of the softmax.
        scaling: None = dim_qk ** -0.5.
        is_causal, sliding_window: see above; a window of W keys includes the query's own.
        softcap, deterministic: as in `tilewise.attention`.
        s_aux: (heads_q,), the attention sink.
        position_bias: broadcasts to (batch, heads_q, len_q, len_kv), added to the scores; differentiable.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: documents packed one after the other, all rows taken
            as one; they count instead of padding, and not beside a tensor mask.
        output_attentions, block_table: refused.
        kwargs: what other implementations need.

    Returns:
        out (batch, len_q, heads_q, dim_v), and None in the place of the probabilities, which never exist.

    Raises:
        ValueError: probabilities or pages are asked for, or the mask does not belong to these queries and keys.

    >>> q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    >>> out, _ = attention_forward(torch.nn.Identity(), q, k, v, None, is_causal=True)
    >>> bool((out[:, 0, :2] - v[:, :1, 0]).abs().max() < 1e-6)  # the first query sees the first key alone
    True
    """
    if output_attentions:
        raise ValueError(
            "output_attentions=True asks for the attention probabilities, and tilewise never holds them. "
            "Load the model with attn_implementation='eager' to look at them"
        )
    if block_table is not None:
        raise ValueError("tilewise does not serve transformers' paged caches; use generate() without them")
    mask, bias = _tensor_mask(attention_mask, position_bias)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    ranges = _ranges(attention_mask, bool(causal), sliding_window, query.shape[2], key.shape[2])
    options: _Options = {
        "window": (ranges.left, ranges.right),
        "align": ranges.align,
        "scale": scaling,
        "softcap": softcap,
        "sink": s_aux,
        "dropout": dropout,
        "deterministic": bool(deterministic),
    }
    batch = max(query.shape[0], key.shape[0])  # learned queries may come without a batch
    q, k, v = (x.expand(batch, -1, -1, -1) if x.shape[0] == 1 else x for x in (query, key, value))
    q, k, v = (
        x.transpose(1, 2) for x in (q, k[:, :, : ranges.used], v[:, :, : ranges.used])
    )  # (batch, len, heads, dim)
    cu_seqlens_q, cu_seqlens_k = ranges.cu_seqlens, None
    max_seqlen_q: int | torch.Tensor | None = ranges.max_seqlen
    max_seqlen_k: int | torch.Tensor | None = ranges.max_seqlen
    if cu_seq_lens_q is not None and not isinstance(attention_mask, torch.Tensor):
        cu_seqlens_q, cu_seqlens_k = cu_seq_lens_q, cu_seq_lens_k
        max_seqlen_q, max_seqlen_k = max_length_q, max_length_k
    if cu_seqlens_q is not None:
        if bias is not None:
            raise ValueError("position_bias does not go with several documents in a row: pass one document a row")
        packed = attention_varlen(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            **options,
        )
        return packed.unflatten(0, q.shape[:2]), None
    out = attention(
        q,
        k,
        v,
        bias=bias if bias is None or bias.shape[-1] == 1 else bias[..., : ranges.used],
        mask=mask if ranges.visible is None else ranges.visible,
        kv_start=ranges.kv_start,
        kv_stop=ranges.kv_stop,
        layout="bshd",
        **options,
    )
    return out, None


class _Options(TypedDict):
    window: tuple[int | None, int | None]
    align: Align
    scale: float | None
    softcap: float | None
    sink: torch.Tensor | None
    dropout: float
    deterministic: bool


def _tensor_mask(
    attention_mask: object, position_bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Sort a dense mask by what it is: who is visible, or what is added."""
    if attention_mask is None or isinstance(attention_mask, KeyRanges):
        return None, position_bias
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 4:
        got = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask must have 4 axes (batch, heads or 1, len_q, len_kv), got {got}. Give a padding mask "
            "(batch, len) to the model, which then asks tilewise's mask function"
        )
    if attention_mask.dtype == torch.bool:
        return attention_mask, position_bias
    return None, attention_mask if position_bias is None else position_bias + attention_mask


def _ranges(attention_mask: object, causal: bool, window: int | None, len_q: int, len_kv: int) -> KeyRanges:
    """Find the band and ranges of a layer; without a mask its diagonal ends at the last key."""
    if isinstance(attention_mask, KeyRanges):
        _check_shape(attention_mask, len_q, len_kv)
        return attention_mask
    if attention_mask is not None:
        return KeyRanges((1, 1, len_q, len_kv), used=len_kv)
    if window is not None and window < 1:
        raise ValueError(f"sliding_window counts the keys seen, the query's own included: at least 1, got {window}")
    side = None if window is None else window - 1
    right = 0 if causal and len_q > 1 else side  # one query sees all that is cached
    return KeyRanges((1, 1, len_q, len_kv), side, right, used=len_kv)


def _check_shape(ranges: KeyRanges, len_q: int, len_kv: int) -> None:
    """Hold a mask to the queries and keys it was made for; without a diagonal it fits any queries."""
    _, _, rows, keys = ranges.shape
    placed = ranges.left is not None or ranges.right is not None or ranges.cu_seqlens is not None
    if keys != len_kv or (placed and rows != len_q):
        raise ValueError(
            f"the mask was made for {rows} queries and {keys} keys, and this layer has {len_q} and {len_kv}: this "
            "model cuts masks in code of its own, load it with attn_implementation='sdpa'"
        )
