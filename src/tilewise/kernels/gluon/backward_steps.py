"""The steps that the backward kernels for Hopper are made of: where a tile lies, what it visits, how products begin.

Tiles of scores are transposed in the kernels that own keys, (block_kv, block_q), so that p and ds come out of one
product as the next one's left operand. Queries, keys and their gradients are seen through tensor maps of five axes
(`box_at`), the saved numbers of each row (`SAVED_BLOCK`) through one of a single axis.

Two lines of the arithmetic look different here from the portable kernels, and both save registers. A product starts
from what stands in its accumulator: so S starts from ``-lse / scale`` and dP from ``-delta``, and no loop holds lse or
delta. And what is hidden is -inf before exp2, as everywhere, but on the scale of S: +inf where the scale is negative.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from tilewise.kernels.gluon.compat import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from tilewise.kernels.share import share
from tilewise.kernels.triton import steps
from tilewise.problem import blocks

LOG2E = gl.constexpr(steps.LOG2E.value)
SAVED_BLOCK = gl.constexpr(128)  # rows: each sequence's saved numbers begin at a multiple, padded to whole blocks
CLIP = gl.constexpr(2**30)  # rows of the axis at whose end a packed sequence ends

block_ranges = share(blocks.block_ranges, gluon.jit)
is_visible = share(blocks.is_visible, gluon.jit)
# Scalars of a program: the same source as in plain Triton.
packed_tile, key_range, key_blocks, query_blocks = (
    steps.packed_tile,
    steps.key_range,
    steps.key_blocks,
    steps.query_blocks,
)
tanh = steps.tanh


# ---- where a program works ------------------------------------------------------------------------------------------


@gluon.jit
def tile_of(tiles, entries, section):
    """Find the program's tile and its entry, a head of a sequence.

    Entries are taken in sections, whose data fit the L2 cache together: first the first tile of each entry of the
    section, then the second of each. So the longest tiles, if they come first, start first. Sections of one entry go
    through tile by tile.
    """
    number = gl.program_id(0) // (tiles * section)
    inside = gl.program_id(0) - number * (tiles * section)
    width = gl.minimum(section, entries - number * section)
    tile = inside // width
    return tile, number * section + (inside - tile * width)


@gluon.jit
def seen_keys(len_q, kv_start, kv_stop, offset, left, right, CUT: gl.constexpr):
    """Narrow a range of keys to those that some query sees; without CUT the caller knows that these are all."""
    if CUT:
        edges = block_ranges(0, len_q, kv_start, kv_stop, left, right, offset, 1)
        kv_start, kv_stop = edges[0], edges[3]
    return kv_start, kv_stop


@gluon.jit
def key_tile(bounds, sizes, band, CUT: gl.constexpr, TOP_LEFT: gl.constexpr, BLOCK_KV: gl.constexpr):
    """Place the program's tile of keys.

    Takes bounds (cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr), sizes (batch, heads_q, heads_kv, len_q, len_kv, tiles,
    section) and band (left, right). Gives sequence, key head, first key, where keys and queries of the sequence begin,
    how many keys it has, and place = (len_q, kv_start, kv_stop, offset) with the range of keys that some query sees.
    """
    cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr = bounds
    batch, _, heads_kv, len_q, len_kv, tiles, section = sizes
    left, right = band
    if cu_q_ptr is None:
        tile, entry = tile_of(tiles, batch * heads_kv, section)
        sequence = entry // heads_kv
        head = entry - sequence * heads_kv
        start, kv_base, q_base = tile * BLOCK_KV, 0, 0
    else:
        tile, head = tile_of(tiles, heads_kv, section)
        sequence, _, start, kv_base, len_kv, q_base, len_q = packed_tile(
            tile, cu_k_ptr, cu_q_ptr, batch, len_kv, len_q, BLOCK_KV
        )
    offset = 0 if TOP_LEFT else len_kv - len_q
    kv_start, kv_stop = key_range(sequence, kv_start_ptr, kv_stop_ptr, len_kv, left, right)
    kv_start, kv_stop = seen_keys(len_q, kv_start, kv_stop, offset, left, right, CUT)
    return sequence, head, start, kv_base, q_base, len_kv, (len_q, kv_start, kv_stop, offset)


@gluon.jit
def query_tile(bounds, sizes, band, CUT: gl.constexpr, TOP_LEFT: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Place the program's tile of queries: as `key_tile`, with the query head and the first query.

    Late queries see most keys under a causal band: where there is one, tiles go backwards.
    """
    cu_q_ptr, cu_k_ptr, kv_start_ptr, kv_stop_ptr = bounds
    batch, heads_q, _, len_q, len_kv, tiles, section = sizes
    left, right = band
    entries = batch * heads_q if cu_q_ptr is None else heads_q
    tile, entry = tile_of(tiles, entries, section)
    if right is not None:
        tile = tiles - 1 - tile
    if cu_q_ptr is None:
        sequence = entry // heads_q
        head = entry - sequence * heads_q
        start, kv_base, q_base = tile * BLOCK_Q, 0, 0
    else:
        head = entry
        sequence, _, start, q_base, len_q, kv_base, len_kv = packed_tile(
            tile, cu_q_ptr, cu_k_ptr, batch, len_q, len_kv, BLOCK_Q
        )
    offset = 0 if TOP_LEFT else len_kv - len_q
    kv_start, kv_stop = key_range(sequence, kv_start_ptr, kv_stop_ptr, len_kv, left, right)
    kv_start, kv_stop = seen_keys(len_q, kv_start, kv_stop, offset, left, right, CUT)
    return sequence, head, start, kv_base, q_base, len_kv, (len_q, kv_start, kv_stop, offset)


@gluon.jit
def saved_row(sequence, head, heads_q, q_base, padded_rows, PACKED: gl.constexpr):
    """Give the first of a sequence's and head's saved rows; a head, packed or dense, has ``padded_rows`` of them."""
    if PACKED:
        row = head * padded_rows + (q_base // SAVED_BLOCK + sequence) * SAVED_BLOCK
    else:
        row = (sequence * heads_q + head) * padded_rows
    return row


@gluon.jit
def bare_queries(start, place, band, BLOCK_Q: gl.constexpr, ROWS: gl.constexpr):
    """Give the blocks of queries [first, stop) that see all of the keys start to start + ROWS; others are masked."""
    _, kv_start, kv_stop, _ = place
    left, right = band
    edges, _ = query_blocks(start, place, left, right, BLOCK_Q, ROWS, True)
    whole = (start >= kv_start) & (start + ROWS <= kv_stop)
    return gl.where(whole, edges[1], edges[3]), gl.where(whole, edges[2], edges[3])


@gluon.jit
def box_at(sequence, head, base, length, row, PACKED: gl.constexpr):
    """Give a tile's place in a tensor map of five axes.

    Dense tensors have (1, batch, heads, len, dim). Packed ones are made to end where a sequence does, so that the
    hardware reads zeros behind it and writes nothing there. The row axis has CLIP rows, and the tile is moved up until
    the sequence ends where that axis does. A second axis of rows leads to that end, and a third takes back what was
    moved: CLIP of its steps are CLIP rows less, modulo 2**64.
    """
    return (CLIP, base + length, head, CLIP - length + row, 0) if PACKED else (0, sequence, head, row, 0)


# ---- tiles in shared memory -----------------------------------------------------------------------------------------


@gluon.jit
def zero_outside(rows, start, first, stop):
    """Zero those rows of a tile (rows, dim) in shared memory, standing for ``start`` on, that are not in [first, stop).

    Keys that no query sees may hold NaN, and what is hidden would not hide that: 0 * NaN. The partition, and whoever
    else reads the tile, needs a barrier afterwards.
    """
    ROWS: gl.constexpr = rows.shape[0]
    DIM: gl.constexpr = rows.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    position = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    inside = (position >= first) & (position < stop)
    tile = rows.load(LAYOUT)
    rows.store(gl.where(inside[:, None], tile, gl.zeros_like(tile)))
    fence_async_shared()


@gluon.jit
def to_thread_order(x):
    """See an accumulator (64, n) as (2 n, 32), in which the 4 values of a thread (2 rows, 2 columns) lie side by side.

    No register moves, and a store to shared memory is 16 bytes a thread and free of bank conflicts, which rows of
    float32 as they are would have. `from_thread_order` and `backward_rows.finish_queries` undo it.
    """
    N: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 8, 4, 2])  # warp, row / 8, row, column block, column pair, column
    return x.permute((3, 0, 2, 4, 1, 5)).reshape([2 * N, 32])


@gluon.constexpr_function
def _thread_order(n):
    # (2 n, 32), 16 bytes a thread: the lane's bits 0 to 2 are columns, its bits 3 and 4 and the warp are rows.
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2]] + [[16 << i, 0] for i in range((n // 8).bit_length() - 1)],
        lane_bases=[[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        warp_bases=[[4, 0], [8, 0]],
        block_bases=[],
        shape=[2 * n, 32],
    )


@gluon.jit
def from_thread_order(buffer, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Read what `to_thread_order` left as (64, n): each thread takes what the same one of a partition has written."""
    ORDER: gl.constexpr = _thread_order(N)
    x = buffer.load(ORDER).reshape([N // 8, 4, 8, 4, 2, 2])
    x = x.permute((1, 4, 2, 0, 3, 5)).reshape([64, N])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


# ---- scores ---------------------------------------------------------------------------------------------------------


@gluon.jit
def product(a, b, start):
    """Give ``start + a b`` at once, both in shared memory: what a loop needs before its first step.

    A name that is set before a loop and again in it is carried around it, in registers; an expression is not.
    """
    return warpgroup_mma_wait(0, deps=(warpgroup_mma(a, b, start, is_async=True),))


@gluon.jit
def start_from(saved, slot, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin a transposed product (ROWS, block_q) from the saved numbers of its queries in shared memory."""
    row = saved.index(slot).load(gl.SliceLayout(0, LAYOUT))
    return row[None, :].broadcast_to([ROWS, row.shape[0]])


@gluon.jit
def start_of_scores(saved_lse, slot, softcap, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin S from ``-lse / scale``; from 0 under a softcap, which has to see the product alone."""
    COLUMNS: gl.constexpr = saved_lse.shape[1]
    if softcap is None:
        start = start_from(saved_lse, slot, ROWS, LAYOUT)
    else:
        start = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    return start


@gluon.jit
def hide(score, q_pos, kv_pos, place, band, HIDDEN: gl.constexpr):
    """Put HIDDEN where a query does not see a key."""
    _, kv_start, kv_stop, offset = place
    left, right = band
    return gl.where(is_visible(q_pos, kv_pos, kv_start, kv_stop, left, right, offset), score, HIDDEN)


@gluon.jit
def capped(score, lse, scale, softcap):
    """Give the capped score in base 2, less lse, and the cap's slope there."""
    bent = tanh(score * (scale / softcap), False)
    return bent * (softcap * LOG2E) + lse, 1.0 - bent * bent


@gluon.jit
def probabilities(
    score, saved_lse, slot, masked, q_start, kv_pos, place, band, scaling, NEGATIVE: gl.constexpr, LAYOUT: gl.constexpr
):
    """Give p of a transposed tile of S, and what ds is a product of: p times the softcap's slope.

    Masks go on the scores: the same code on p needs 16 registers more.
    """
    scale_log2, scale, softcap = scaling
    q_pos = (q_start + gl.arange(0, score.shape[1], layout=gl.SliceLayout(0, LAYOUT)))[None, :]
    HIDDEN: gl.constexpr = float("inf") if NEGATIVE and softcap is None else float("-inf")
    if softcap is not None:
        lse = saved_lse.index(slot).load(gl.SliceLayout(0, LAYOUT))
        score, slope = capped(score, lse[None, :], scale, softcap)
    if masked:
        score = hide(score, q_pos, kv_pos[:, None], place, band, HIDDEN)
    if softcap is None:
        p = gl.exp2(score * scale_log2)
        p_bent = p
    else:
        p = gl.exp2(score)
        p_bent = p * slope
    return p, p_bent
