"""The online softmax of a tile of scores in registers, with what makes it cheap beside the products.

`softmax_step` reads like the loop of ``kernels/triton/forward.py``. Scores are (64, block_kv) in the layout of a
product's accumulator: a thread holds block_kv / 4 columns of each of two rows, and four lanes share a row.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

import math

from tilewise.kernels.gluon.compat import gl, gluon
from tilewise.kernels.gluon.sync import one_beyond

LOG2E = gl.constexpr(math.log2(math.e))
LN2 = gl.constexpr(math.log(2.0))


@gluon.jit
def softmax_step(score, state, how, MASKED: gl.constexpr):
    """Take a state one tile of scores further; give p, the new state and what acc must be multiplied by.

    A state is (row_max, anchor, row_sum), or () for rows that have seen nothing: the maximum of the scores; the same
    scaled to base 2, or 0 where all were hidden; and (64, 4) sums, a part for each lane, which meet once in the end.
    ``how`` is (factors, softcap, NEGATIVE, seen, start): see `factor_of`, `finish_score` and `hide`.
    """
    factors, softcap, NEGATIVE, seen, start = how
    score = finish_score(score, softcap, NEGATIVE)
    if MASKED:
        score = hide(score, seen, start)
    largest = largest_of_lane(score)
    row_max_new = to_rows_of(gl.max(largest, 1), score)
    if len(state) > 0:
        row_max_new = gl.maximum(state[0], row_max_new)
    finite = gl.where(row_max_new == -float("inf"), 0.0, row_max_new) if MASKED else row_max_new
    anchor = finite * factors[0]
    p = gl.exp2(scaled(score, finite, factor_of(largest, factors)))
    row_sum = sum_of_lane(p)
    if len(state) > 0:
        # Without a maximum between them the compiler joins product and difference: rows that stayed would not get 1.
        rescale = gl.exp2(state[1] - gl.maximum(state[1], anchor))
        row_sum = state[2] * to_rows_of(rescale, row_sum)[:, None] + row_sum
    else:
        rescale = gl.full_like(anchor, 1.0)
    return p, (row_max_new, anchor, row_sum), rescale


@gluon.jit
def factor_of(largest, factors):
    """Give the factor by which each lane scales its scores of a row: (64, 4), from the largest of them.

    Scores that are far out need a power of two, as ``kernels/triton/forward.py`` says.

    A lane asks its own scores, before it hears of the row's maximum, so that nothing waits for the answer. That is
    enough: where its own are near and the row's maximum is not, or its own are far below, p is 0 by either factor. Two
    far maxima of different blocks that are neighbours in float32 may count alike; rounding would confuse them as well.

    ``factors`` is (factor, far, POWER): from where on a score is far out, and a power of two not below the factor.
    Behind a softcap, which keeps scores near, it is (1.0,).
    """
    factor = gl.full_like(largest, factors[0])
    if len(factors) > 1:
        factor = gl.maximum(factor, one_beyond(largest, factors[1]) * factors[2])
    return factor


@gluon.jit
def scaled(score, row_max, factor):
    """Give the exponents of p, (score - row_max) * factor, by one rounding; ``factor`` is (64, 4), by lane."""
    parts = score.reshape([score.shape[0], score.shape[1] // 8, 4, 2])
    by_lane: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))
    factor = gl.convert_layout(factor, by_lane, assert_trivial=True)
    anchor = to_rows_of(row_max, factor)[:, None] * factor
    parts = parts * factor[:, None, :, None] - anchor[:, None, :, None]
    return gl.convert_layout(parts.reshape([score.shape[0], score.shape[1]]), score.type.layout, assert_trivial=True)


# ---- parts of a step ------------------------------------------------------------------------------------------------


@gluon.jit
def to_rows_of(x, matrix):
    """Give a number for each row in the layout of a matrix with these rows: the registers stay where they are."""
    return gl.convert_layout(x, gl.SliceLayout(1, matrix.type.layout), assert_trivial=True)


@gluon.jit
def finish_score(score, softcap, NEGATIVE: gl.constexpr):
    """Do to a product what exp2's argument cannot: the sign of a negative scale (row_max compares), and the softcap.

    ``softcap`` is () or (scale / softcap, softcap * log2(e)); then the score is in base 2 and its factor 1.
    """
    if NEGATIVE:
        score = -score
    if len(softcap) > 0:
        decay = gl.exp2(gl.abs(score) * (softcap[0] * (-2.0 * LOG2E)))
        size = (1.0 - decay) / (1.0 + decay) * softcap[1]
        score = gl.where(score < 0, -size, size)
    return score


@gluon.jit
def hide(score, seen, start):
    """Put -inf where a row does not see a key. ``seen`` holds the ends of each row's interval of keys, see `rows_see`.

    An interval for each row, so that a score costs one comparison a side; `is_visible` asks the same by four. Of a
    column's number 8 i + 2 lane + j the lane's part goes over to the interval: what is compared with it are constants,
    which take no registers and no instructions. A column for each value took both, over the loop without a mask too.
    """
    parts = score.reshape([score.shape[0], score.shape[1] // 8, 4, 2])
    last: gl.constexpr = gl.SliceLayout(3, parts.type.layout)
    eights: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, last))
    lanes: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, last))
    pairs: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, parts.type.layout)))
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, last))
    kv_pos = 8 * gl.arange(0, parts.shape[1], layout=eights)[None, :, None, None]
    kv_pos += gl.arange(0, 2, layout=pairs)[None, None, None, :]
    origin = start + 2 * gl.arange(0, 4, layout=lanes)[None, None, :, None]
    stop = gl.convert_layout(seen[0], rows, assert_trivial=True)[:, None, None, None] - origin
    visible = kv_pos < stop
    if len(seen) > 1:
        visible = visible & (
            kv_pos >= gl.convert_layout(seen[1], rows, assert_trivial=True)[:, None, None, None] - origin
        )
    shown = gl.where(visible, parts, -float("inf")).reshape([score.shape[0], score.shape[1]])
    return gl.convert_layout(shown, score.type.layout, assert_trivial=True)


@gluon.jit
def rows_see(q_pos, len_kv, offset, band):
    """Give where each query's keys stop and, if the band has a left side, start: `is_visible` by its ends."""
    left, right = band
    stop = q_pos * 0 + len_kv
    if right is not None:
        stop = gl.minimum(q_pos + (offset + right + 1), len_kv)
    return (stop,) if left is None else (stop, q_pos + (offset - left))


@gluon.jit
def largest_of_lane(score):
    """Give the largest that each lane holds of a row, (64, 4), by short chains: a plain reduction is a long one."""
    parts = score.reshape([score.shape[0], 4, score.shape[1] // 32, 4, 2])
    return gl.max(gl.max(gl.max(parts, 2), 3), 1)


@gluon.jit
def sum_of_lane(p):
    """Sum what each lane holds of a row: (64, 4). No shuffles in the loop."""
    parts = p.reshape([p.shape[0], 4, p.shape[1] // 32, 4, 2])
    return gl.sum(gl.sum(gl.sum(parts, 2), 3), 1)


@gluon.jit
def finish_rows(anchor, row_sum, sink):
    """Give what acc must be divided by, as a factor, and lse in natural logarithms. A row that saw nothing: 0 and -inf.

    ``anchor`` is in base 2; ``sink`` is () or (a score in base 2,): one more step with no value.
    """
    total = gl.convert_layout(gl.sum(row_sum, 1), anchor.type.layout, assert_trivial=True)
    anchor = gl.where(total == 0.0, -float("inf"), anchor)  # not 0: the sink may lie far below
    rescale = gl.full_like(total, 1.0)
    if len(sink) > 0:
        anchor_new = gl.maximum(anchor, sink[0])
        finite = gl.where(anchor_new == -float("inf"), 0.0, anchor_new)
        rescale = gl.exp2(anchor - finite)
        total = total * rescale + gl.exp2(sink[0] - finite)
        anchor = anchor_new
    total_or_1 = gl.where(total == 0.0, 1.0, total)
    return rescale / total_or_1, anchor * LN2 + gl.log(total_or_1)
