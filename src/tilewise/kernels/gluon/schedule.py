"""Which tile comes next, which blocks of keys it visits, and how one partition tells the others.

The producer of a program takes tiles of queries, one after the other, from the launch's list of all tiles. `Plan` is
what the kernel is compiled for; `barriers` says where each barrier stands; a *place* is what must be known of a tile:

    (q_start, head, sequence, len_q, len_kv, offset, q_base)

``len_kv`` counts the keys that any query of the sequence sees. They begin at position 0 here, whatever a range or the
band cuts off before them, because the copies start at the first of them and end at the last: what a hidden key holds is
never loaded. ``sequence`` is -1 for tokens behind the last packed sequence.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from typing import NamedTuple

from tilewise.kernels.gluon.compat import gl, gluon
from tilewise.kernels.gluon.sync import get, put
from tilewise.kernels.share import share
from tilewise.kernels.triton.steps import key_range, packed_tile
from tilewise.problem import blocks

block_ranges = share(blocks.block_ranges, gluon.jit)

GROUP_ROWS = gl.constexpr(64)  # queries of one consumer: what a warpgroup multiplies at once
PAIRS = gl.constexpr(4)  # slots of two words that a place takes
WRAP = gl.constexpr(2**30)  # rows of a clipped map; see `coordinates`


class Plan(NamedTuple):
    """What the forward kernel is compiled for; see ``backends/hopper.py`` for what each number means."""

    groups: int
    block_kv: int
    dim_qk: int
    dim_v: int
    stages: int
    q_buffers: int
    dynamic: bool  # tiles by a counter, else each program takes every so many
    longest_first: bool
    ping_pong: bool
    lazy: bool
    pack: bool
    top_left: bool
    negative: bool
    packed: bool  # sequences of their own lengths, one after the other
    clipped: bool  # keys through a map that ends where the sequence's keys end
    right_masked: bool  # more than one block may be cut at the right
    left_masked: bool
    bar_off: int


class Barriers(NamedTuple):
    """The first slot of each kind of barrier, and of the words that hand over a place."""

    q_full: int
    q_empty: int
    k_full: int
    k_empty: int
    v_full: int
    v_empty: int
    tile_full: int
    tile_empty: int
    words: int
    end: int


@gluon.constexpr_function
def barriers(plan):
    """Lay out the barriers: a pair, full and empty, for each buffer."""
    sizes = [plan.groups * plan.q_buffers] * 2 + [plan.stages] * 4 + [2, 2, 2 * PAIRS]
    starts = [gl.constexpr(0)]
    for size in sizes:
        starts.append(starts[-1] + size)
    return Barriers(*starts)


# ---- tiles ----------------------------------------------------------------------------------------------------------


@gluon.jit
def tile_of(ticket, tiles, heads, section, PLAN: gl.constexpr):
    """Turn the number of a tile into (tile of the sequence, head of all heads).

    Longest first: late queries see most keys when causal. But not for all heads at once: ``section`` heads, whose keys
    and values stay in the L2 cache together, are done before the next.
    """
    if PLAN.longest_first and not PLAN.packed:
        whole = section * tiles
        first = ticket // whole * section
        width = gl.minimum(section, heads - first)
        inside = ticket - first * tiles
        late = inside // width
        return tiles - 1 - late, first + inside - late * width
    head = ticket // tiles
    tile = ticket - head * tiles
    return tiles - 1 - tile if PLAN.packed else tile, head


@gluon.jit
def place_of(ticket, work, band, ranges, PLAN: gl.constexpr):
    """Find where a tile lies: its place, and the first rows of its keys and of its values in a clipped map."""
    tiles, batch, heads, _, section, len_q, len_kv, offset, k_batch_rows, v_batch_rows = work
    left, right = band
    kv_start_ptr, kv_stop_ptr, cu_q_ptr, cu_k_ptr = ranges
    BLOCK_Q: gl.constexpr = PLAN.groups * GROUP_ROWS
    entries = 1 if PLAN.packed else batch
    tile, head = tile_of(ticket, tiles, entries * heads, section, PLAN)
    sequence = head // heads
    head = head - sequence * heads
    q_base = 0
    k_base = sequence * k_batch_rows
    v_base = sequence * v_batch_rows
    q_start = tile * BLOCK_Q
    if PLAN.packed:
        sequence, is_tail, q_start, q_base, len_q, k_base, len_kv = packed_tile(
            tile, cu_q_ptr, cu_k_ptr, batch, len_q, len_kv, BLOCK_Q
        )
        v_base = k_base
    if PLAN.clipped:
        offset = 0 if PLAN.top_left else len_kv - len_q
        kv_start, kv_stop = key_range(sequence, kv_start_ptr, kv_stop_ptr, len_kv, left, right)
        seen = block_ranges(0, gl.maximum(len_q, 1), kv_start, kv_stop, left, right, offset, 1)
        k_base += seen[0]
        v_base += seen[0]
        len_kv = seen[3] - seen[0]
        offset -= seen[0]
    if PLAN.packed:
        sequence = gl.where(is_tail, -1, sequence)
    return (q_start, head, sequence, len_q, len_kv, offset, q_base), k_base, v_base


@gluon.jit
def visited(place, band, PLAN: gl.constexpr):
    """Give the blocks of keys that all consumers of a tile visit, [first, stop): one at least, be it all hidden."""
    q_start, _, _, len_q, len_kv, offset, _ = place
    left, right = band
    q_stop = gl.minimum(q_start + PLAN.groups * GROUP_ROWS, len_q)
    edges = block_ranges(q_start, q_stop, 0, len_kv, left, right, offset, PLAN.block_kv)
    return edges[0], gl.maximum(edges[3], edges[0] + 1)


@gluon.jit
def own_steps(start, first, stop, place, band, PLAN: gl.constexpr):
    """Part what a tile visits, [first, stop), for the consumer whose rows begin at ``start``.

    Gives (stop, bare, left, steps): step i works on block ``stop - 1 - i``, from this stop on down, and is masked but
    for [bare, left); step 0 always is. Blocks above it, and below the last step's, are other consumers' alone.
    """
    _, _, _, _, len_kv, offset, _ = place
    left, right = band
    edges = block_ranges(start, start + GROUP_ROWS, 0, len_kv, left, right, offset, PLAN.block_kv)
    if PLAN.right_masked:
        stop = gl.minimum(gl.maximum(edges[3], first + 1), stop)
    if PLAN.left_masked:
        first = gl.maximum(gl.minimum(edges[0], stop - 1), first)
    steps = stop - first
    bare = 1
    left_masked = steps
    if PLAN.right_masked:
        bare = gl.minimum(gl.maximum(stop - edges[2], 1), steps)
    if PLAN.left_masked:
        left_masked = gl.minimum(gl.maximum(stop - edges[1], bare), steps)
    return stop, bare, left_masked, steps


# ---- from the producer to the consumers -----------------------------------------------------------------------------


@gluon.jit
def put_place(slot, place, lane, PLAN: gl.constexpr):
    """Write a place for the consumers, as much of it as changes from tile to tile."""
    q_start, head, sequence, len_q, len_kv, offset, q_base = place
    words = barriers(PLAN).words + PAIRS * slot
    put(words, q_start, head, lane, PLAN.bar_off)
    put(words + 1, sequence, len_kv, lane, PLAN.bar_off)
    if PLAN.clipped:
        put(words + 2, offset, len_q, lane, PLAN.bar_off)
    if PLAN.packed:
        put(words + 3, q_base, 0, lane, PLAN.bar_off)


@gluon.jit
def get_place(slot, len_q, len_kv, offset, PLAN: gl.constexpr):
    """Read a place; q_start is -1 where there is no tile left."""
    words = barriers(PLAN).words + PAIRS * slot
    q_start, head = get(words, PLAN.bar_off)
    sequence, seen = get(words + 1, PLAN.bar_off)
    q_base = 0
    if PLAN.clipped:
        len_kv = seen
        offset, len_q = get(words + 2, PLAN.bar_off)
    if PLAN.packed:
        q_base, _ = get(words + 3, PLAN.bar_off)
    return q_start, head, sequence, len_q, len_kv, offset, q_base


@gluon.jit
def coordinates(batch, head, base, length, row, CLIPPED: gl.constexpr):
    """Name a tile of rows to the copy engine.

    A plain map has the axes (batch, head, row, dim). A clipped one ends a sequence wherever it ends among packed rows:
    the hardware zeroes what is loaded beyond, and drops what is stored. Its axes are (wrap, row, head, row, dim). The
    second row axis has 2**30 rows and is entered so late that row ``length`` of the sequence falls off its end; the
    first one adds ``base + length``; and ``wrap`` takes 2**30 rows off again: 2**30 steps of ``2**34 - row stride``
    elements of two bytes are 2**30 rows short of a multiple of 2**64 bytes. ``backends/hopper.py`` makes the maps.
    """
    return (WRAP, base + length, head, WRAP - length + row, 0) if CLIPPED else (batch, head, row, 0)
