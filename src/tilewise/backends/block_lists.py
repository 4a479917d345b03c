"""Which tiles a mask of the user's own leaves empty, shows in part or shows whole: lists that kernels walk.

A mask_mod says of one pair whether it is visible; a kernel wants to know it of tiles of 128 x 128 pairs. So the mask is
evaluated over all pairs, tile by tile on the device, and what remains are lists of tile numbers: of pairs nothing is
kept. The lists serve every later call with the same mask, lengths and tensors.

>>> import torch
>>> blocks = Blocks.of(lambda batch, head, q_pos, kv_pos: q_pos >= kv_pos, len_q=512, len_kv=512)
>>> print(blocks.draw())
512 queries x 512 keys in tiles of 128 x 128: 6 full (#), 4 partial (+), 6 empty (.)
+...
#+..
##+.
###+
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch.nn.functional import pad

from tilewise.mods.trace import Traced, trace_mask
from tilewise.problem.blocks import is_visible

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["EMPTY", "FULL", "PARTIAL", "Blocks", "MaskMod", "TileLists"]

MaskMod: TypeAlias = Callable[..., torch.Tensor | bool]

EMPTY, PARTIAL, FULL = 0, 1, 2
SIGNS = ".+#"  # how they are drawn
BLOCK = 128  # queries and keys of a tile, a multiple of every kernel's tiles
PIECE_Q, PIECE_KV = 128, 32  # pairs that a program of the kernel looks at together, at the most
MOST_KEPT = 32  # lists of so many masks are kept; each keeps its mask's tensors alive
MOST_DRAWN = 64  # rows and columns of a picture; larger ones are drawn in groups of tiles


class TileLists(NamedTuple):
    """The partial and the full tiles of every row of tiles, one row behind the other; int32, on the device.

    Row ``(batch_index * heads + head_index) * tiles + tile`` has the partial tiles
    ``partial[partial_start[row] : partial_start[row + 1]]``, in rising order, and the full ones alike.
    """

    partial_start: torch.Tensor
    partial: torch.Tensor
    full_start: torch.Tensor
    full: torch.Tensor


@dataclass(frozen=True, eq=False)
class Blocks:
    """The tiles of one mask. `Blocks.of` computes them, `Blocks.from_torch` takes them from a BlockMask.

    Args:
        batch, heads: sequences and query heads that have lists of their own; 1 = all share them.
        len_q, len_kv: queries and keys of a sequence.
        block_q, block_kv: queries and keys of a tile.
        by_query: rows are tiles of queries, entries tiles of keys: what the forward pass and dq walk.
        by_key: rows are tiles of keys, entries tiles of queries: what dk and dv walk.
        mask_mod, mask_tensors: what is asked within a partial tile; None = it is visible, as far as it lies inside the
            lengths and the band.
        left, right, offset: the band that the lists contain; see `tilewise.problem.blocks`.
        of_mask: mask_mod alone made the lists; else they may say more than it.

    A tile that reaches beyond the lengths or the band is partial at most. Two Blocks are equal if they are the same.
    """

    batch: int
    heads: int
    len_q: int
    len_kv: int
    block_q: int
    block_kv: int
    by_query: TileLists
    by_key: TileLists
    mask_mod: MaskMod | None = None
    mask_tensors: tuple[torch.Tensor, ...] = ()
    left: int | None = None
    right: int | None = None
    offset: int = 0
    of_mask: bool = False

    @staticmethod
    def of(
        mask_mod: MaskMod | None,
        mask_tensors: Sequence[torch.Tensor] = (),
        *,
        len_q: int,
        len_kv: int,
        batch: int = 1,
        heads: int = 1,
        device: torch.device | str = "cpu",
        left: int | None = None,
        right: int | None = None,
        offset: int = 0,
        block_q: int = BLOCK,
        block_kv: int = BLOCK,
    ) -> Blocks:
        """Compute the lists of a mask, or give those of an earlier call.

        The mask is evaluated twice over all pairs in the band, and memory grows with the tiles that are not empty. An
        earlier call's lists serve as long as the function, the numbers that it captures, its tensors and their versions
        are the same: who writes to a tensor behind torch's back, through ``.data`` or a kernel, must pass another one.
        That the device tells how many tiles there are is waited for once.

        Args:
            mask_mod: ``mask_mod(batch, head, q_pos, kv_pos, *mask_tensors)``, True = visible; None = all.
            mask_tensors: tensors on the device.
            len_q, len_kv: queries and keys.
            batch, heads: sequences and query heads; those that the mask does not tell apart share their lists.
            device: where q, k and v are.
            left, right, offset: the band that holds besides; None = open.
            block_q, block_kv: queries and keys of a tile, multiples of 16.

        Raises:
            TypeError: mask_mod is no function.
            ValueError: sizes below zero, blocks that are no multiples of 16, tensors on another device, or a mask that
                cannot be translated.

        >>> window = Blocks.of(lambda batch, head, q, kv: (q - kv).abs() < 100, len_q=640, len_kv=640)
        >>> print(window.draw())
        640 queries x 640 keys in tiles of 128 x 128: 0 full (#), 13 partial (+), 12 empty (.)
        ++...
        +++..
        .+++.
        ..+++
        ...++
        """
        asked = _Asked(mask_mod, tuple(mask_tensors), len_q, len_kv, left, right, offset, block_q, block_kv)
        asked.check(batch, heads)
        found: Blocks = _answered(asked, batch, heads, torch.device(device))
        return found

    @staticmethod
    def from_torch(block_mask: BlockMask) -> Blocks:
        """Take the lists of a torch.nn.attention.flex_attention.BlockMask, and its mask_mod.

        The lists count: a tile in neither list is hidden, one in the full list visible, whatever mask_mod says of them.
        (PyTorch's compiled kernels do so too; uncompiled, it asks mask_mod alone.) Tiles that reach beyond the lengths
        become partial. A bias beside these lists gets no gradient: a call that would need it is refused.

        Raises:
            ValueError: a block size that is no multiple of 16, or lists whose tiles do not cover the lengths.

        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 512, 512, device="cpu")
        >>> Blocks.from_torch(mask).density()
        0.625
        """
        number, indices = block_mask.kv_num_blocks, block_mask.kv_indices
        (block_q, block_kv), (len_q, len_kv) = block_mask.BLOCK_SIZE, block_mask.seq_lengths
        lead = (1,) * (4 - indices.ndim)
        batch, heads, tiles_q, most = *lead, *indices.shape
        wanted = (_tiles(len_q, block_q), _tiles(len_kv, block_kv))
        asked = _Asked(_mask_of(block_mask), (), len_q, len_kv, None, None, 0, block_q, block_kv)
        asked.check(batch, heads)
        if (tiles_q, most) != wanted:
            raise ValueError(
                f"{len_q} queries and {len_kv} keys are {wanted} tiles of {block_q} x {block_kv}, but the BlockMask "
                f"lists {(tiles_q, most)}. Make one for these lengths, or let create_block_mask make it"
            )
        kinds = torch.zeros(batch, heads, *wanted, dtype=torch.uint8, device=indices.device)
        _mark(kinds, number, indices, PARTIAL)
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            _mark(kinds, block_mask.full_kv_num_blocks, block_mask.full_kv_indices, FULL)
        if len_q % block_q:
            kinds[:, :, -1] = kinds[:, :, -1].clamp(max=PARTIAL)
        if len_kv % block_kv:
            kinds[:, :, :, -1] = kinds[:, :, :, -1].clamp(max=PARTIAL)
        with torch.inference_mode(False), torch.no_grad():  # a later call may save them for its gradients
            return replace(asked.blocks(batch, heads, _compressed(kinds)), of_mask=False)

    # ---- looked at ----

    @property
    def tiles_q(self) -> int:
        """Count the rows of tiles."""
        return _tiles(self.len_q, self.block_q)

    @property
    def tiles_kv(self) -> int:
        """Count the columns of tiles."""
        return _tiles(self.len_kv, self.block_kv)

    @property
    def device(self) -> torch.device:
        """Where the lists are."""
        return self.by_query.partial.device

    @cached_property
    def kinds(self) -> torch.Tensor:
        """Each tile's kind, EMPTY, PARTIAL or FULL: (batch, heads, tiles_q, tiles_kv) uint8, made when asked for."""
        lists = self.by_query
        rows = lists.partial_start.numel() - 1
        flat = torch.zeros(rows * self.tiles_kv, dtype=torch.uint8, device=self.device)
        flat[_rows_of(lists.partial_start, lists.partial) * self.tiles_kv + lists.partial] = PARTIAL
        flat[_rows_of(lists.full_start, lists.full) * self.tiles_kv + lists.full] = FULL
        return flat.view(self.batch, self.heads, self.tiles_q, self.tiles_kv)

    def visible(self, q_pos: torch.Tensor, kv_pos: torch.Tensor, mask: torch.Tensor | bool = True) -> torch.Tensor:
        """Say which pairs are visible: those in full tiles, and where ``mask`` is True those in partial ones.

        Args:
            q_pos, kv_pos: positions inside the lengths, which broadcast: (rows, 1) and (1, cols), say.
            mask: what mask_mod gives for them; broadcasts to the result.

        Returns:
            (batch, heads, rows, cols) bool.
        """
        kind = self.kinds[:, :, q_pos // self.block_q, kv_pos // self.block_kv]
        return (kind == FULL) | ((kind == PARTIAL) & mask)

    def counts(self) -> tuple[int, int, int]:
        """Count the empty, partial and full tiles, over all lists."""
        partial, full = self.by_query.partial.numel(), self.by_query.full.numel()
        return self.batch * self.heads * self.tiles_q * self.tiles_kv - partial - full, partial, full

    def density(self) -> float:
        """Give the share of tiles that are visited: partial and full ones among all."""
        empty, partial, full = self.counts()
        return (partial + full) / max(empty + partial + full, 1)

    def draw(self, batch_index: int = 0, head_index: int = 0) -> str:
        """Draw one sequence's and head's tiles as text: ``#`` full, ``+`` partial, ``.`` empty.

        Beyond 64 rows or columns a sign stands for a group of tiles, partial unless all of them are empty or full.

        >>> blocks = Blocks.of(lambda batch, head, q_pos, kv_pos: kv_pos < 8192, len_q=16384, len_kv=16384)
        >>> print(blocks.draw()[:160])
        16384 queries x 16384 keys in tiles of 128 x 128: 8192 full (#), 0 partial (+), 8192 empty (.)
        each sign is 2 x 2 tiles
        ################################......
        """
        kinds = self.kinds[batch_index if self.batch > 1 else 0, head_index if self.heads > 1 else 0].cpu()
        counts = [int((kinds == kind).sum()) for kind in (FULL, PARTIAL, EMPTY)]
        heading = (
            f"{self.len_q} queries x {self.len_kv} keys in tiles of {self.block_q} x {self.block_kv}: "
            f"{counts[0]} full (#), {counts[1]} partial (+), {counts[2]} empty (.)"
        )
        group = max(-(-max(kinds.shape) // MOST_DRAWN), 1)
        lines = [heading] + ([f"each sign is {group} x {group} tiles"] if group > 1 else [])
        for row in kinds.split(group):
            cells = [cell.unique().tolist() for cell in row.split(group, dim=1)]
            lines.append("".join(SIGNS[cell[0] if len(cell) == 1 else PARTIAL] for cell in cells))
        return "\n".join(lines)


# ---- computed -------------------------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """What `Blocks.of` is asked for, but for batch, heads and device."""

    mask_mod: MaskMod | None
    mask_tensors: tuple[torch.Tensor, ...]
    len_q: int
    len_kv: int
    left: int | None
    right: int | None
    offset: int
    block_q: int
    block_kv: int

    def check(self, batch: int, heads: int) -> None:
        """Refuse sizes that no mask has."""
        if self.mask_mod is not None and not callable(self.mask_mod):
            raise TypeError(f"mask_mod must be a function of positions; got {self.mask_mod!r}")
        sizes = {"len_q": self.len_q, "len_kv": self.len_kv, "batch": batch, "heads": heads}
        for name, size in sizes.items():
            if size < 0:
                raise ValueError(f"{name} must not be negative, got {size}")
        for name, block in (("block_q", self.block_q), ("block_kv", self.block_kv)):
            if block <= 0 or block % 16:
                raise ValueError(
                    f"{name} must be a multiple of 16, got {block}: kernels compute in tiles of 16 and more"
                )

    def traced(self, device: torch.device) -> tuple[Traced | None, tuple[torch.Tensor, ...]]:
        """Give the mask as it was traced, and its tensors with those that it captures, single numbers on the device."""
        if self.mask_mod is None:
            return None, ()
        traced, tensors = trace_mask(self.mask_mod, self.mask_tensors)
        for tensor in tensors:
            if tensor.ndim > 0 and tensor.device != device:
                raise ValueError(
                    f"the mask's tensors must be on {device}; got one of shape {tuple(tensor.shape)} on "
                    f"{tensor.device}. Move it, or pass device="
                )
        return traced, tensors

    def key(
        self, batch: int, heads: int, device: torch.device, traced: Traced | None, tensors: tuple[torch.Tensor, ...]
    ) -> tuple[object, ...] | None:
        """Give what two equal questions have in common; None where a tensor does not tell when it is written to."""
        if any(tensor.is_inference() for tensor in tensors):
            return None
        versions = tuple((id(tensor), tensor._version) for tensor in tensors)  # noqa: SLF001 - torch has no public name
        function = None if traced is None else (traced.key, traced.constants)
        return (function, versions, batch, heads, device, *self[2:])

    def answer(self, batch: int, heads: int, device: torch.device) -> Blocks:
        """Compute the lists."""
        batch, heads = self.told_apart(batch, heads, device)
        if device.type == "cuda":
            return self.blocks(batch, heads, self.listed(batch, heads, device))
        return self.blocks(batch, heads, _compressed(self.kinds(batch, heads, device)))

    def blocks(self, batch: int, heads: int, by_query: TileLists) -> Blocks:
        """Put lists and what they were made from together."""
        tiles = (_tiles(self.len_q, self.block_q), _tiles(self.len_kv, self.block_kv))
        return Blocks(
            batch, heads, self.len_q, self.len_kv, self.block_q, self.block_kv,
            by_query, _transposed(by_query, *tiles),
            self.mask_mod, self.mask_tensors, self.left, self.right, self.offset, of_mask=True,
        )  # fmt: skip

    def told_apart(self, batch: int, heads: int, device: torch.device) -> tuple[int, int]:
        """Find out whether the mask asks for the sequence and the head: by the shape of its answer for one pair."""
        if self.mask_mod is None or batch * heads * self.len_q * self.len_kv == 0:
            return min(batch, 1), min(heads, 1)
        zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        mask = self.mask(torch.arange(batch, device=device), torch.arange(heads, device=device), zero, zero)
        shape = (1, 1, 1, 1, *mask.shape)[-4:]
        return shape[0], shape[1]

    def mask(self, batch: torch.Tensor, head: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        """Ask the mask for positions (rows, 1) and (1, cols): what broadcasts to (batch, heads, rows, cols)."""
        traced, tensors = self.traced(q_pos.device)
        assert traced is not None  # noqa: S101 - callers ask for a mask
        answer = traced.run(batch.view(-1, 1, 1, 1), head.view(1, -1, 1, 1), q_pos, kv_pos, tensors)
        return torch.as_tensor(answer, dtype=torch.bool, device=q_pos.device)

    def kinds(self, batch: int, heads: int, device: torch.device) -> torch.Tensor:
        """Evaluate the mask with torch, a row of tiles at a time: (batch, heads, tiles_q, tiles_kv)."""
        tiles_q, tiles_kv = _tiles(self.len_q, self.block_q), _tiles(self.len_kv, self.block_kv)
        kinds = torch.zeros(batch, heads, tiles_q, tiles_kv, dtype=torch.uint8, device=device)
        head = torch.arange(heads, device=device)
        kv_pos = torch.arange(self.len_kv, device=device)[None, :]
        for index in range(batch):
            for tile in range(tiles_q if tiles_kv else 0):
                start = tile * self.block_q
                q_pos = torch.arange(start, min(start + self.block_q, self.len_q), device=device)[:, None]
                seen = is_visible(q_pos, kv_pos, 0, self.len_kv, self.left, self.right, self.offset)
                if self.mask_mod is not None:
                    seen = seen & self.mask(torch.full((1,), index, device=device), head, q_pos, kv_pos)
                seen = seen.expand(1, heads, len(q_pos), self.len_kv)[0]
                seen = pad(seen, (0, tiles_kv * self.block_kv - self.len_kv)).unflatten(-1, (tiles_kv, -1))
                count = seen.sum((1, 3))
                kinds[index, :, tile] = (count > 0).byte() + (count == self.block_q * self.block_kv).byte()
        return kinds

    def listed(self, batch: int, heads: int, device: torch.device) -> TileLists:
        """Evaluate the mask with a kernel: once to count each row's tiles, and once to write them down."""
        rows = batch * heads * _tiles(self.len_q, self.block_q)
        counts = torch.zeros(2, rows, dtype=torch.int32, device=device)
        nothing = counts.new_empty(0)
        self.launch(rows, heads, (counts[0], counts[1], nothing, nothing), fill=False)
        starts = pad(counts.cumsum(1, dtype=torch.int32), (1, 0))
        partial, full = (counts.new_empty(total) for total in starts[:, -1].tolist())
        self.launch(rows, heads, (starts[0], starts[1], partial, full), fill=True)
        return TileLists(starts[0], partial, starts[1], full)

    def launch(self, rows: int, heads: int, results: tuple[torch.Tensor, ...], *, fill: bool) -> None:
        """Run the kernel over all rows of tiles."""
        from tilewise.backends.launch import Parts, launch_named
        from tilewise.backends.triton_mods import tensor_parts
        from tilewise.kernels.share import written
        from tilewise.kernels.triton.block_lists import list_tiles

        device = results[0].device
        traced, tensors = self.traced(device)
        parts: Parts = (
            tuple(tensor_parts(x.to(device)) for x in tensors),
            () if traced is None else traced.constants,
        )
        names = ("partial_place_ptr", "full_place_ptr", "partial_ptr", "full_ptr")
        named = {
            **dict(zip(names, results, strict=True)),
            "heads": heads,
            "tiles_q": _tiles(self.len_q, self.block_q),
            "len_q": self.len_q,
            "len_kv": self.len_kv,
            "left": self.left,
            "right": self.right,
            "offset": self.offset,
            "mods": parts,
            "MASK_MOD": None if traced is None else written(traced.source, "mask_mod"),
            "BLOCK_Q": self.block_q,
            "BLOCK_KV": self.block_kv,
            "PIECE_Q": math.gcd(self.block_q, PIECE_Q),
            "PIECE_KV": math.gcd(self.block_kv, PIECE_KV),
            "FILL": fill,
        }
        launch_named(list_tiles, (rows, 1, 1), named, num_warps=4)


def _tiles(length: int, block: int) -> int:
    return -(-length // block)


def _compressed(kinds: torch.Tensor) -> TileLists:
    """Write each row's tiles down: from (batch, heads, tiles, tiles across)."""
    rows = kinds.flatten(0, 2)
    found: list[torch.Tensor] = []
    for kind in (PARTIAL, FULL):
        chosen = rows == kind
        found.append(pad(chosen.sum(1).cumsum(0), (1, 0)).int())
        found.append(chosen.nonzero()[:, 1].int())
    return TileLists(*found)


def _transposed(lists: TileLists, tiles: int, across: int) -> TileLists:
    """Give the same tiles with rows and entries exchanged: ``tiles`` rows for each head become ``across`` ones."""
    slots = (lists.partial_start.numel() - 1) // max(tiles, 1)
    found: list[torch.Tensor] = []
    for start, entries in ((lists.partial_start, lists.partial), (lists.full_start, lists.full)):
        rows = _rows_of(start, entries)
        owners, order = (rows // max(tiles, 1) * across + entries).sort(stable=True)  # so that entries rise again
        edges = torch.arange(slots * across + 1, device=entries.device)
        found.append(torch.searchsorted(owners, edges, out_int32=True))
        found.append((rows % max(tiles, 1))[order].int())
    return TileLists(*found)


def _rows_of(start: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Give the row of each entry, int64."""
    places = torch.arange(entries.numel(), dtype=start.dtype, device=start.device)
    return torch.searchsorted(start[1:].contiguous(), places, right=True)


def _mark(kinds: torch.Tensor, number: torch.Tensor, indices: torch.Tensor, kind: int) -> None:
    """Write a kind at the first ``number`` of each row's indices, as a BlockMask has them."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < number[..., None]
    rows, places = listed.flatten(0, -2).nonzero().unbind(1)
    kinds.flatten(0, 2)[rows, indices.flatten(0, -2)[rows, places].long()] = kind


def _mask_of(block_mask: BlockMask) -> MaskMod | None:
    """Give a BlockMask's function; the one that it has where none was given hides nothing."""
    from torch.nn.attention.flex_attention import noop_mask

    return None if block_mask.mask_mod is noop_mask else block_mask.mask_mod


# ---- kept -----------------------------------------------------------------------------------------------------------

# Each with the mask's tensors, captured ones too: while these live, no other tensor gets the id of one of them.
_lists: OrderedDict[tuple[object, ...], tuple[Blocks, tuple[torch.Tensor, ...]]] = OrderedDict()
_lock = threading.Lock()


def _kept(key: tuple[object, ...] | None) -> Blocks | None:
    if key is None:
        return None
    with _lock:
        if key not in _lists:
            return None
        _lists.move_to_end(key)
        return _lists[key][0]


@torch.compiler.disable(reason="tilewise: it traces a mask by itself, so the graph breaks here")  # type: ignore[untyped-decorator]
def _answered(asked: _Asked, batch: int, heads: int, device: torch.device) -> Blocks:
    """Answer from what is kept, or anew."""
    device = torch.empty(0, device=device).device  # with its number
    traced, tensors = asked.traced(device)
    key = asked.key(batch, heads, device, traced, tensors)
    found = _kept(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():  # a later call may save them for its gradients
            found = asked.answer(batch, heads, device)
        _keep(key, found, tensors)
    if found.mask_mod is asked.mask_mod and list(map(id, found.mask_tensors)) == list(map(id, asked.mask_tensors)):
        return found
    return replace(found, mask_mod=asked.mask_mod, mask_tensors=asked.mask_tensors)  # of the same lists


def _keep(key: tuple[object, ...] | None, blocks: Blocks, tensors: tuple[torch.Tensor, ...]) -> None:
    if key is None:
        return
    with _lock:
        _lists[key] = blocks, tensors
        while len(_lists) > MOST_KEPT:
            _lists.popitem(last=False)
