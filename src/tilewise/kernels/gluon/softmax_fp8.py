"""The online softmax of a tile of scores in FP8: in the units of v's scales, at the height that e4m3 wants, rounded."""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

from tilewise.kernels.gluon.compat import gl, gluon
from tilewise.kernels.gluon.softmax import hide, largest_of_lane, sum_of_lane, to_rows_of
from tilewise.kernels.gluon.sync import exp2_shared, inverse_of_power, log2_of_power, pack_e4m3

TOP = gl.constexpr(8.0)  # the largest p of a row is 2**8, which e4m3 has


@gluon.jit
def softmax_step(score, state, how, MASKED: gl.constexpr, SOFT: gl.constexpr):
    """Take rows (row_max, row_sum) one tile of scores further, as `softmax.softmax_step` does.

    ``how`` is (q_factor, (k_scale, v_scale), NEGATIVE, seen, start). p is in the units of the block's v, and row_max
    the number for which the largest p is 2**8; row_sum takes the units off, so that both give lse as ever.
    """
    q_factor, of_block, NEGATIVE, seen, start = how
    k_scale, v_scale = of_block
    factor = q_factor * k_scale
    unit = log2_of_power(v_scale)
    if NEGATIVE:
        score = -score
    if MASKED:
        score = hide(score, seen, start)
    row_max_new = to_rows_of(gl.max(largest_of_lane(score), 1), score) * factor + (unit - TOP)
    if len(state) > 0:
        row_max_new = gl.maximum(state[0], row_max_new)
    anchor = row_max_new
    if MASKED:
        anchor = gl.where(row_max_new == -float("inf"), 0.0, row_max_new)
    y = score * factor - (anchor - unit)[:, None]
    p = exp2_shared(y, SOFT) if SOFT else gl.exp2(y)
    row_sum = sum_of_lane(p) * inverse_of_power(v_scale)
    if len(state) > 0:
        rescale = gl.exp2(state[0] - anchor)
        row_sum = state[1] * to_rows_of(rescale, row_sum)[:, None] + row_sum
    else:
        rescale = gl.full_like(anchor, 1.0)
    return p, (row_max_new, row_sum), rescale


@gluon.jit
def packed(p):
    """Round p to e4m3, four to an int32, with the keys in the order of v: what is a thread's stays its own."""
    parts = p.reshape([p.shape[0], p.shape[1] // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    even, odd = gl.split(parts.reshape([p.shape[0], p.shape[1] // 4, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return pack_e4m3(a, b, c, d)
