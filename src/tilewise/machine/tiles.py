"""How large a tile each kernel works on.

`torch_tiles` serves the portable torch engine, whose tiles live in main memory or a CPU's caches. `default_tiles`
serves compiled kernels: a row of a tuned table where one fits, else the largest tiles whose estimated shared memory
fits the target. Tables are JSON files named after their target, ``data/tiles/sm_90.json``, written by tuning and never
by a first call; every row says where it was measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Literal, get_args

from tilewise.machine.device import KIB, MIB, Capability, target_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Kind = Literal["forward", "backward_kv", "backward_q", "decode"]

# The most shared memory that one block may ask for, in bytes (CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability"; AMD CDNA 3 ISA). A target that is not listed gets what every GPU has.
SHARED_MEMORY = {
    "sm_75": 64 * KIB,
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_89": 99 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_120": 99 * KIB,
    "sm_121": 99 * KIB,
    "gfx942": 64 * KIB,
}
_LEAST_SHARED_MEMORY = 64 * KIB

_LEAST_BLOCK = 16  # tensor cores multiply nothing smaller
_MOST_IN_PIECES = 512  # each piece is code of its own
_ROW_KEYS = {"kind", "dim_qk", "dim_v", "itemsize", "block_q", "block_kv", "num_warps", "num_stages", "provenance"}
_OPTIONAL_KEYS = {"max_registers", "max_dim"}
_PROVENANCE_KEYS = {"device", "date", "triton", "command"}


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and launch settings of one kernel.

    Args:
        block_q, block_kv: queries and keys in a tile.
        num_warps: warps of 32 threads (64 on AMD) that work on one tile.
        num_stages: tiles of the inner loop held in shared memory at once.
        max_registers: the most registers a thread may use, so that more programs share an SM; None: no limit.
        max_dim: the most columns of a matrix that are held at once, a power of two: wider head dims come in pieces of
            so many, each result's piece from a program of its own; None: no limit.
    """

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 1
    max_registers: int | None = None
    max_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv", "num_warps", "num_stages"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of 1 or more, got {value!r}")
        most = self.max_registers
        if most is not None and (type(most) is not int or not 16 <= most <= 255):
            raise ValueError(f"max_registers must be None or a whole number from 16 to 255, got {most!r}")
        dim = self.max_dim
        if dim is not None and (type(dim) is not int or dim != padded_dim(dim)):
            raise ValueError(f"max_dim must be None or a power of two from {_LEAST_BLOCK}, got {dim!r}")

    def piece(self, dim: int) -> int:
        """Give the columns of a head dim that are held at once.

        >>> Tiles(16, 16, max_dim=256).piece(300), Tiles(16, 16, max_dim=256).piece(100), Tiles(16, 16).piece(300)
        (256, 128, 512)
        """
        return min(padded_dim(dim), self.max_dim or padded_dim(dim))

    def pieces(self, dim: int) -> int:
        """Count the pieces that a head dim comes in, at least one."""
        return max(-(-dim // self.piece(dim)), 1)


def torch_tiles(batch_heads: int, itemsize: int, budget: int = 16 * MIB) -> Tiles:
    """Choose the torch engine's tiles so that a score tile of all heads stays within ``budget`` bytes.

    A score tile has batch_heads x block_q x block_kv elements of ``itemsize`` bytes, so that peak extra memory does not
    grow with the length. Blocks are powers of two: at most 512 queries and 1024 keys, fast enough to hide what each
    torch call costs, and at least 16 of each, even where the budget is too small for that.

    >>> torch_tiles(8, 4)
    Tiles(block_q=512, block_kv=1024, num_warps=4, num_stages=1, max_registers=None, max_dim=None)
    >>> torch_tiles(256, 4).block_q, torch_tiles(256, 4).block_kv
    (128, 128)
    """
    block_q, block_kv = 512, 1024
    while batch_heads * block_q * block_kv * itemsize > budget and max(block_q, block_kv) > _LEAST_BLOCK:
        if block_kv > block_q:
            block_kv //= 2
        else:
            block_q //= 2
    return Tiles(block_q, block_kv)


def shared_memory_limit(capability: Capability) -> int:
    """Give the most shared memory in bytes that one block may ask for; 64 KiB on a target that is not known.

    >>> shared_memory_limit((9, 0)) // 1024
    227
    """
    return SHARED_MEMORY.get(target_name(capability), _LEAST_SHARED_MEMORY)


def padded_dim(dim: int) -> int:
    """Give the head dim as a kernel holds it: the next power of two, at least 16.

    >>> padded_dim(80), padded_dim(128)
    (128, 128)
    """
    return max(_LEAST_BLOCK, 1 << (dim - 1).bit_length())


def estimate_shared_memory(tiles: Tiles, dim_qk: int, dim_v: int, itemsize: int, kind: Kind) -> int:
    """Estimate in bytes the shared memory that a kernel asks for: every operand tile that a dot may read from it.

    With d = dim_qk + dim_v, both padded, and elements of ``itemsize`` bytes:

    forward, decode: ``block_q dim_qk + num_stages block_kv d + block_q block_kv`` (q; k and v of each stage; p)

    backward_kv: ``block_kv d + num_stages block_q d`` (k and v rest, q and d_out stream) ``+ 2 block_q block_kv`` (p
    and ds), and 16 num_stages block_q bytes (lse and delta in float32, each twice); backward_q: the same with the
    blocks exchanged.

    Of a head dim in pieces (``max_dim``), d counts one, and ``(block_q + block_kv) piece`` is added: the pieces after
    the first are loaded two at a time, where they are multiplied.

    The compiler reuses space and keeps some operands in registers, so this is meant to be an upper estimate.

    >>> estimate_shared_memory(Tiles(128, 64, 8, 2), 128, 128, 2, "forward") // 1024
    112
    """
    block_q, block_kv, stages = tiles.block_q, tiles.block_kv, tiles.num_stages
    wide = tiles.pieces(dim_qk) + tiles.pieces(dim_v) > 2
    dim_qk, dim_v = tiles.piece(dim_qk), tiles.piece(dim_v)
    both = dim_qk + dim_v
    if kind in ("backward_kv", "backward_q"):
        resting, streaming = (block_kv, block_q) if kind == "backward_kv" else (block_q, block_kv)
        rows = (resting + stages * streaming) * both
        others = (block_q + block_kv) * max(dim_qk, dim_v) if wide else 0
        return (rows + others + 2 * block_q * block_kv) * itemsize + 16 * stages * streaming
    others = (block_q + block_kv) * dim_qk if wide else 0
    return (block_q * dim_qk + stages * block_kv * both + others + block_q * block_kv) * itemsize


def _estimate_registers(tiles: Tiles, dim_qk: int, dim_v: int, kind: Kind) -> int:
    """Estimate the float32 numbers a block keeps in registers: running sums and score tiles."""
    dim_qk, dim_v = tiles.piece(dim_qk), tiles.piece(dim_v)
    if kind == "backward_kv":
        return tiles.block_kv * (dim_qk + dim_v) + 2 * tiles.block_q * tiles.block_kv
    if kind == "backward_q":
        return tiles.block_q * dim_qk + 2 * tiles.block_q * tiles.block_kv
    return tiles.block_q * (dim_v + tiles.block_kv)


def _candidates(kind: Kind) -> Iterator[Tiles]:
    """List the tiles to try, most wanted first: two stages hide loads, then large tiles, square ones, and in pieces."""
    if kind == "decode":  # 16 rows hold the query heads of one key head; two tiles of keys are in flight
        for block_kv, stages in ((64, 3), (32, 3), (32, 2), (16, 3), (16, 2), (16, 1)):
            yield Tiles(16, block_kv, 4, stages)
        return
    pairs = [(block_q, block_kv) for block_q in (128, 64, 32, 16) for block_kv in (128, 64, 32, 16)]
    pairs.sort(key=lambda pair: (-pair[0] * pair[1], -min(pair), -pair[0]))
    for stages, least in ((2, 32), (1, 32), (2, 16), (1, 16)):
        for block_q, block_kv in pairs:
            if min(block_q, block_kv) >= least:
                yield Tiles(block_q, block_kv, 8 if block_q * block_kv >= 128 * 64 else 4, stages)
    for max_dim in (256, 128):  # the more pieces, the more often the scores are computed
        for block_q, block_kv in ((32, 32), (32, 16), (16, 16)):
            yield Tiles(block_q, block_kv, max_dim=max_dim)


def default_tiles(
    capability: Capability, dim_qk: int, dim_v: int, itemsize: int, kind: Kind, folder: Path | None = None
) -> Tiles:
    """Give the tiles of a compiled kernel: the tuned row for this target, dims, item size and kind, else a default.

    The default is the largest block_q x block_kv, at most 128 x 128, whose shared memory fits by
    `estimate_shared_memory` and whose running sums and scores take at most half of an SM's 65,536 registers. Two
    stages of at least 32 x 32 go before larger tiles of one stage. Where not even 16 x 16 fits, head dims up to 512
    come in pieces of 256 columns, or else of 128. Decode takes 16 query rows and up to 64 keys in three stages, where
    two programs fit into the shared memory that one may ask for; its head dims come whole.

    Args:
        capability: (9, 0), "gfx942"; see `Device.capability`.
        dim_qk, dim_v: head dims, unpadded.
        itemsize: bytes of an element of q, k and v.
        kind: "forward", "backward_kv" (the pass that owns keys, for dk and dv), "backward_q" (for dq) or "decode".
        folder: where to look for tables instead of the package's own.

    Raises:
        ValueError: nothing fits, or a table is malformed.

    >>> default_tiles((8, 0), 128, 128, 2, "forward")
    Tiles(block_q=128, block_kv=64, num_warps=8, num_stages=2, max_registers=None, max_dim=None)
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}; got {kind!r}")
    if dim_qk < 1 or dim_v < 1 or itemsize < 1:
        raise ValueError(f"dim_qk, dim_v and itemsize must be 1 or more; got {dim_qk}, {dim_v} and {itemsize}")
    target = target_name(capability)
    tuned = load_table(target, folder).get((kind, padded_dim(dim_qk), padded_dim(dim_v), itemsize))
    if tuned is not None:
        return tuned
    limit = shared_memory_limit(capability)
    for most in (limit // 2, limit) if kind == "decode" else (limit,):
        for tiles in _candidates(kind):
            if tiles.max_dim and max(dim_qk, dim_v) > _MOST_IN_PIECES:
                continue
            fits = estimate_shared_memory(tiles, dim_qk, dim_v, itemsize, kind) <= most
            if fits and _estimate_registers(tiles, dim_qk, dim_v, kind) <= 32768:
                return tiles
    raise ValueError(
        f"no {kind} tiles with head dims {dim_qk} and {dim_v} of {itemsize} bytes fit the {limit // KIB} KiB of shared "
        f"memory of {target}; split the head dim or use a narrower dtype"
    )


@dataclass(frozen=True)
class Splits:
    """How the keys of a decoding call are shared out over programs.

    Args:
        count: programs for each tile of rows; those for which a sequence has no keys left do nothing.
        least_blocks: the fewest blocks of keys that a program is given.
        fixed_blocks: blocks in every split, counted from key 0; 0 = equal parts of what each sequence holds.
    """

    count: int
    least_blocks: int = 1
    fixed_blocks: int = 0


PROGRAMS_PER_SM = 1  # that one sequence alone is split for: more join longer than they load faster
EVEN_SPLIT, MOST_EVEN = 4096, 32  # keys in a split where there is enough to do: long sequences are not to finish alone
LEAST_SPLIT = 128  # keys, since to start and to join a split costs about as much as to load so many
FIXED_SPLIT = 512  # keys in every split of a batch-invariant call


def decode_splits(
    tiles: int, keys: int, sms: int, block_kv: int, chosen: int = 0, batch_invariant: bool = False
) -> Splits:
    """Choose into how many parts the keys are split.

    Where tiles are few, into enough parts for `PROGRAMS_PER_SM` programs on each multiprocessor; where they are many,
    into parts of about `EVEN_SPLIT` keys, up to `MOST_EVEN`, so that sequences of uneven length end together. A program
    is given at least `LEAST_SPLIT` keys, and the more the fewer parts are needed to keep the device busy. A number that
    was asked for is taken as far as there are blocks. A batch-invariant call has splits of `FIXED_SPLIT` keys, whatever
    else there is to do.

    Args:
        tiles: tiles of rows, over all sequences and key heads.
        keys: the most that a tile may see.
        sms: multiprocessors.
        block_kv: keys in a block; a power of two.
        chosen: what the user asked for, or 0.

    >>> decode_splits(tiles=8, keys=8192, sms=132, block_kv=64)  # one sequence: 17 programs for each of 8 key heads
    Splits(count=17, least_blocks=3, fixed_blocks=0)
    >>> decode_splits(tiles=1024, keys=8192, sms=132, block_kv=64)
    Splits(count=2, least_blocks=64, fixed_blocks=0)
    """
    blocks = max(-(-keys // block_kv), 1)
    if batch_invariant:
        fixed = max(FIXED_SPLIT // block_kv, 1)
        return Splits(-(-blocks // fixed), fixed_blocks=fixed)
    if chosen:
        return Splits(min(chosen, blocks))
    enough = -(-PROGRAMS_PER_SM * sms // max(tiles, 1))
    even = min(-(-keys // EVEN_SPLIT), MOST_EVEN)
    least = max(max(EVEN_SPLIT // enough, LEAST_SPLIT) // block_kv, 1)
    return Splits(max(min(max(enough, even), -(-blocks // least)), 1), least)


@lru_cache
def load_table(target: str, folder: Path | None = None) -> Mapping[tuple[str, int, int, int], Tiles]:
    """Read a target's tuned rows, by (kind, padded dim_qk, padded dim_v, itemsize); empty where there is no file.

    A file holds ``{"target": "sm_90", "rows": [...]}``. A row holds kind, dim_qk, dim_v (padded), itemsize, the
    fields of `Tiles` (max_registers and max_dim may be left out), and ``"provenance": {"device", "date", "triton",
    "command"}``, all of it text.

    Raises:
        ValueError: the file is malformed; the message names it and the row.
    """
    path = (resources.files("tilewise") / "data" / "tiles" if folder is None else folder) / f"{target}.json"
    if not path.is_file():
        return {}
    document: object = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("target") != target or not isinstance(document.get("rows"), list):
        raise ValueError(f'{path} must hold {{"target": "{target}", "rows": [...]}}')
    table: dict[tuple[str, int, int, int], Tiles] = {}
    for index, row in enumerate(document["rows"]):
        try:
            key, tiles = _read_row(row)
        except ValueError as error:
            raise ValueError(f"{path}, row {index}: {error}") from error
        if key in table:
            raise ValueError(f"{path}, row {index}: a second row for {key}; keep the faster one")
        table[key] = tiles
    return table


def _read_row(row: object) -> tuple[tuple[str, int, int, int], Tiles]:
    """Check one row of a table and give its key and tiles."""
    if not isinstance(row, dict) or set(row) | _OPTIONAL_KEYS != _ROW_KEYS | _OPTIONAL_KEYS:
        raise ValueError(f"must have exactly the keys {', '.join(sorted(_ROW_KEYS))}; got {row!r}")
    provenance = row["provenance"]
    if not isinstance(provenance, dict) or set(provenance) != _PROVENANCE_KEYS:
        raise ValueError(
            f"provenance must have exactly the keys {', '.join(sorted(_PROVENANCE_KEYS))}; got {provenance!r}"
        )
    if not all(isinstance(value, str) and value for value in provenance.values()):
        raise ValueError(f"provenance must say where each figure was measured, in text; got {provenance!r}")
    kind, dim_qk, dim_v, itemsize = (row[name] for name in ("kind", "dim_qk", "dim_v", "itemsize"))
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}; got {kind!r}")
    if any(type(dim) is not int or dim < 1 or dim != padded_dim(dim) for dim in (dim_qk, dim_v)):
        raise ValueError(f"dim_qk and dim_v must be powers of two from {_LEAST_BLOCK}; got {dim_qk!r} and {dim_v!r}")
    if itemsize not in (1, 2, 4, 8):
        raise ValueError(f"itemsize must be 1, 2, 4 or 8 bytes; got {itemsize!r}")
    block_q, block_kv, warps, stages = (row[name] for name in ("block_q", "block_kv", "num_warps", "num_stages"))
    tiles = Tiles(block_q, block_kv, warps, stages, row.get("max_registers"), row.get("max_dim"))
    if min(tiles.block_q, tiles.block_kv) < _LEAST_BLOCK:
        raise ValueError(f"blocks must be {_LEAST_BLOCK} or more; got {tiles.block_q} and {tiles.block_kv}")
    if any(n & (n - 1) for n in (tiles.block_q, tiles.block_kv, tiles.num_warps)):
        raise ValueError(f"blocks and num_warps must be powers of two; got {tiles}")
    return (kind, dim_qk, dim_v, itemsize), tiles
