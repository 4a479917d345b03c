"""Break it on purpose: leave one thing out, see what comes of it, and which test would have noticed: `tilewise break`.

Most breaks edit one line of the NumPy engine, compile the result anew and run it beside the untouched engine, on data
where luck hides the fault and on data where it cannot. What is right is judged by the error budget of
`tilewise.testing`, as everywhere. Timing and shared memory are shown on a GPU where there is one, else by what can be
seen without.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from tilewise import api, testing
from tilewise.backends import numpy_tiled
from tilewise.backends.naive import Terms, naive
from tilewise.backends.numpy_tiled import Tiling
from tilewise.bench import warmup
from tilewise.bench.clock import Stopwatch, spread
from tilewise.bench.show import milliseconds, three
from tilewise.lab.step import vector
from tilewise.machine import detect
from tilewise.machine.device import KIB, find
from tilewise.machine.tiles import Tiles, default_tiles, estimate_shared_memory


class Shown(NamedTuple):
    """One thing seen: on which data, what was expected, what came out, and what is said of it."""

    setting: str
    expected: str
    got: str
    verdict: str
    wrong: bool


@dataclass(frozen=True)
class Break:
    """One way to break it.

    Args:
        name: what to type. title: what is broken.
        why: what goes wrong, and why.
        caught_by: the tests that notice, as pytest names them.
        edits: (line, what stands in its place) in the NumPy engine's forward pass.
        show: does it.
    """

    name: str
    title: str
    why: str
    caught_by: tuple[str, ...]
    show: Callable[[], Sequence[Shown]]
    edits: tuple[tuple[str, str], ...] = ()


# ---- an engine with a fault -----------------------------------------------------------------------------------------


def edited(*edits: tuple[str, str]) -> ModuleType:
    """Compile the NumPy engine anew with parts of its forward pass replaced.

    Raises:
        RuntimeError: what is to be replaced does not stand there exactly once.
    """
    source = Path(numpy_tiled.__file__).read_text(encoding="utf-8")
    functions = [inspect.getsource(function) for function in (numpy_tiled.forward_steps, numpy_tiled.Tiling.kv_blocks)]
    for line, faulty in edits:
        if sum(function.count(line) for function in functions) != 1:
            raise RuntimeError(f"{line!r} must stand once in the engine's forward pass: mend the table of breaks")
        before = next(function for function in functions if line in function)
        after = before.replace(line, faulty)
        source = source.replace(before, after)
        functions[functions.index(before)] = after
    fresh = ModuleType(f"{numpy_tiled.__name__}_edited")
    exec(compile(source, fresh.__name__, "exec"), vars(fresh))  # noqa: S102  # the engine itself, but for the edits
    return fresh


class Data(NamedTuple):
    """q (len_q, dim), k (len_kv, dim), v (len_kv, dim_v) in float32."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


LEN_Q, LEN_KV, DIM, BLOCK_Q, BLOCK_KV = 20, 50, 8, 8, 16


KEYS = np.arange(LEN_KV)


def with_scores(levels: np.ndarray | float) -> Data:
    """Draw data such that every query's score with key j is about ``levels[j]``."""
    draw = np.random.default_rng(0).standard_normal
    q, k, v = 0.1 * draw((LEN_Q, DIM)), 0.1 * draw((LEN_KV, DIM)), draw((LEN_KV, DIM))
    q[:, 0] = 1.0
    k[:, 0] = levels
    return Data(*(x.astype(np.float32) for x in (q, k, v)))


def compare(
    setting: str, engine: ModuleType, data: Data, seen: Tiling | None = None, right: Tiling | None = None
) -> Shown:
    """Run an engine, and hold its out to the budget; ``seen`` is what it makes visible, ``right`` what should be."""
    tiling = seen or Tiling(LEN_KV, block_q=BLOCK_Q, block_kv=BLOCK_KV)
    with np.errstate(all="ignore"):  # what a fault makes of the numbers is for the budget to say
        out, _ = engine.tiled(*data, engine.Tiling(*tiling), 1.0)
    exact, low, _ = _formula(data, right or tiling)
    return _judged(setting, "out", out, exact, low)


def _formula(data: Data, tiling: Tiling) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give out by the untiled formula in float64 and in float32, and lse in float64, over the keys that are there."""
    terms: Terms[np.ndarray] = Terms(left=tiling.left, right=tiling.right, offset=tiling.offset, scale=1.0)
    found = []
    for dtype in (np.float64, np.float32):
        q, k, v = (x[None, None].astype(dtype) for x in (data.q, data.k[: tiling.kv_stop], data.v[: tiling.kv_stop]))
        found.append(naive(np, q, k, v, terms))
    (exact, lse), (low, _) = found
    return exact[0, 0], low[0, 0], lse[0, 0]


def _judged(setting: str, tensor: str, got: np.ndarray, exact: np.ndarray, low: np.ndarray) -> Shown:
    got_tensor, exact_tensor, low_tensor = (torch.from_numpy(x) for x in (got, exact, low))
    measured = testing.error(got_tensor, exact_tensor, low_tensor, float(np.finfo(np.float32).eps))
    verdict = "within the budget" if measured.within else "WRONG"
    if np.isfinite(measured.max):
        verdict += f": off by {measured.max:.1e}, {measured.max_budget:.1e} may be"
    return Shown(setting, f"{tensor} {_head(exact)}", f"{tensor} {_head(got)}", verdict, not measured.within)


def _head(x: np.ndarray) -> str:
    """Write the first numbers of the last row."""
    return vector(x[-1, :4] if x.ndim == 2 else x[-4:]) + "  ..."


# ---- breaks in the algorithm ----------------------------------------------------------------------------------------

NO_MAXIMUM = (("row_max_new = np.maximum(row_max, score.max(axis=1))", "row_max_new = np.zeros_like(row_max)"),)
NO_RESCALE = (("acc = acc * rescale[:, None] + p @ v_tile", "acc = acc + p @ v_tile"),)
# As on a GPU: every tile has its full size, and what it loads behind the last key must be masked.
FULL_TILES = (("_segments(ranges, self.block_kv, self.kv_stop)", "_segments(ranges, self.block_kv, 1 << 62)"),)
NO_LOAD_MASK = (("k_tile, v_tile = _only(seen, k_tile), _only(seen, v_tile)", "pass"),)
NO_SCORE_MASK = (("np.copyto(score, -np.inf, where=~visible)", "pass"),)
BASE_TWO = (("(row_max + np.log2(row_sum)) * LN2", "row_max + np.log2(row_sum)"),)


def show_no_maximum() -> list[Shown]:
    """Leave the maximum out of the exponent."""
    engine = edited(*NO_MAXIMUM)
    return [
        compare("small scores", engine, with_scores(0.0)),
        compare("scores of 200", engine, with_scores(200.0)),
    ]


def show_no_rescale() -> list[Shown]:
    """Sum on without rescaling what was summed."""
    engine = edited(*NO_RESCALE)
    return [
        compare("lucky: the maximum in the first block", engine, with_scores(40.0 * (KEYS == 0))),
        compare("the maximum in the last block", engine, with_scores(4.0 * (KEYS // BLOCK_KV))),
    ]


def padded(data: Data, filling: float) -> Data:
    """Fill the last tile of keys up with something: what a GPU's memory happens to hold there."""
    missing = -len(data.k) % BLOCK_KV
    tail = np.full((missing, DIM), filling, np.float32)
    return Data(data.q, np.concatenate([data.k, tail]), np.concatenate([data.v, tail]))


def show_no_load_mask() -> list[Shown]:
    """Load what lies behind the last key, as it is."""
    data, whole, engine = with_scores(0.1 * KEYS), edited(*FULL_TILES), edited(*FULL_TILES, *NO_LOAD_MASK)
    return [
        compare("with the load mask, NaN behind the last key", whole, padded(data, np.nan)),
        compare("without, and zeros there by luck", engine, padded(data, 0.0)),
        compare("without, and NaN there", engine, padded(data, np.nan)),
    ]


def show_no_score_mask() -> list[Shown]:
    """Load zeros behind the last key, and let their score of 0 count."""
    engine = edited(*FULL_TILES, *NO_SCORE_MASK)
    return [
        compare("lucky: all scores far above 0", engine, padded(with_scores(40.0 + 0.1 * KEYS), 0.0)),
        compare("scores about 0", engine, padded(with_scores(0.0), 0.0)),
        compare("scores far below 0", engine, padded(with_scores(-40.0), 0.0)),
    ]


def show_wrong_diagonal() -> list[Shown]:
    """Let each query see one key too many, or start the diagonal at the wrong end."""
    data = with_scores(0.1 * KEYS)
    right = Tiling(LEN_KV, right=0, offset=LEN_KV - LEN_Q, block_q=BLOCK_Q, block_kv=BLOCK_KV)
    square = Data(data.q, data.k[:LEN_Q], data.v[:LEN_Q])
    own = right._replace(kv_stop=LEN_Q, offset=0)
    without_last = Data(data.q[:-1], data.k, data.v)
    return [
        compare(
            "each query sees the next key too",
            numpy_tiled,
            without_last,
            right._replace(right=1),
            right,
        ),
        compare("lucky: as many keys as queries, diagonal from the top left", numpy_tiled, square, own, own),
        compare(
            f"{LEN_Q} new queries behind a cache, {LEN_KV} keys, diagonal from the top left",
            numpy_tiled,
            data,
            right._replace(offset=0),
            right,
        ),
    ]


def show_base_two() -> list[Shown]:
    """Keep lse in base 2: out does not tell, all who use lse do."""
    data, engine = with_scores(0.1 * KEYS), edited(*BASE_TWO)
    tiling = Tiling(LEN_KV, block_q=BLOCK_Q, block_kv=BLOCK_KV)
    out, lse = engine.tiled(*data, tiling, 1.0)
    exact, low, exact_lse = _formula(data, tiling)
    wide = Data(*(x.astype(np.float64) for x in data))
    ones = np.ones_like(exact)
    right_grads = numpy_tiled.tiled_backward(*wide, exact, exact_lse, ones, None, tiling, 1.0)
    grads = numpy_tiled.tiled_backward(*data, out, lse, ones.astype(np.float32), None, tiling, 1.0)
    low_out, low_lse = numpy_tiled.tiled(*data, tiling, 1.0)
    low_grads = numpy_tiled.tiled_backward(*data, low_out, low_lse, ones.astype(np.float32), None, tiling, 1.0)
    return [
        _judged("out itself", "out", out, exact, low),
        _judged("lse", "lse", lse, exact_lse, low_lse),
        _judged("the backward pass, which computes p = exp(score - lse)", "dv", grads[2], right_grads[2], low_grads[2]),
    ]


# ---- breaks around it -----------------------------------------------------------------------------------------------


def show_timing() -> list[Shown]:
    """Time a first call, a call that nobody waits for, and then rightly."""
    device = detect.best_device()
    first = warmup.timings(device)["cold"]
    right = _milliseconds_right(device)
    shown = [
        Shown(
            "one call, cold, in a new process",
            f"{milliseconds(first['second'])} ms, the second call there",
            f"{milliseconds(first['first'])} ms",
            f"{three(first['first'] / first['second'])} times too slow",
            first["first"] > first["second"],
        )
    ]
    if device == "cpu":
        none = "nothing to see: on a CPU a call returns when it is done; on a GPU it returns when it is queued"
        shown.append(Shown("no synchronise", f"{right} ms", "the same", none, wrong=False))
    else:
        shown.append(_unsynchronised(device, right))
    shown.append(Shown("warm, waited for, median of rounds", f"{right} ms", f"{right} ms", "right", wrong=False))
    return shown


def _workload(device: str) -> Callable[[], object]:
    length, dtype = (1024, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    q = torch.randn(1, 8, length, 64, device=device, dtype=dtype)
    return lambda: api.attention(q, q, q, causal=True)


def _milliseconds_right(device: str) -> str:
    return milliseconds(spread(Stopwatch(device).round(_workload(device), 0.2)).median)


def _unsynchronised(device: str, right: str) -> Shown:
    run = _workload(device)
    run()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    queued = milliseconds(time.perf_counter() - start)
    torch.cuda.synchronize(device)
    wrong = float(queued) < float(right)
    return Shown("no synchronise", f"{right} ms", f"{queued} ms", "the time to queue it, not to do it", wrong)


TRIED = (
    Tiles(256, 256, 8, 3),
    Tiles(256, 128, 8, 3),
    Tiles(128, 128, 8, 3),
    Tiles(128, 128, 8, 2),
    Tiles(64, 64, 4, 2),
)


def show_shared_memory() -> list[Shown]:
    """Ask for tiles as large as can be; on a GPU run them, elsewhere set their need beside what there is."""
    if detect.best_device() == "cuda" and torch.version.hip is None:
        return _shared_memory_on_gpu()
    shown = []
    for name in ("H200", "RTX 4090"):
        device = find(name)
        room = device.shared_per_block or 0
        best = default_tiles(device.capability, 128, 128, 2, "forward")
        for tiles in TRIED:
            need = estimate_shared_memory(tiles, 128, 128, 2, "forward")
            verdict = "fits" if need <= room else "TOO MUCH: the launch would fail"
            asked = f"{tiles.block_q} x {tiles.block_kv}, {tiles.num_stages} stages, d=128, 16 bits"
            most = f"at most {room // KIB} KiB"
            shown.append(Shown(f"{name}: {asked}", most, f"{need // KIB} KiB", verdict, need > room))
        used = f"{best.block_q} x {best.block_kv}, {best.num_stages} stages"
        shown.append(Shown(f"{name}: what the library takes", used, used, "fastest measured, or default", wrong=False))
    return shown


def _shared_memory_on_gpu() -> list[Shown]:
    from tilewise.backends import triton_portable

    call = testing.Case("", 1, 8, 8, 4096, 4096, 128, 128).build("cuda", "bfloat16")
    watch, room = Stopwatch("cuda"), detect.detect("cuda").shared_per_block or 0
    times: dict[str, float] = {}
    shown = []
    for tiles in (*TRIED, triton_portable.tiles(call.problem)):
        name = f"{tiles.block_q} x {tiles.block_kv}, {tiles.num_warps} warps, {tiles.num_stages} stages"

        def run(tiles: Tiles = tiles) -> object:
            return triton_portable.forward(call.problem, call.tensors, tiles)

        try:
            times[name] = spread(watch.round(run, 0.1)).median
            shown.append(Shown(name, "runs", f"{milliseconds(times[name])} ms", "compiles and runs", wrong=False))
        except Exception as error:  # noqa: BLE001  # whatever compiler or driver raise is what is to be seen
            text = " ".join(str(error).split())[:120]
            need = f"at most {room // KIB} KiB"
            shown.append(Shown(name, need, f"{type(error).__name__}: {text}", "TOO MUCH", wrong=True))
    largest, fastest = next(iter(times)), min(times, key=lambda name: times[name])
    ratio = f"{three(times[largest] / times[fastest])} times the fastest's time"
    shown.append(Shown("largest that runs, beside the fastest", fastest, largest, ratio, wrong=largest != fastest))
    return shown


# ---- the list -------------------------------------------------------------------------------------------------------

_STEP = "tests/test_mutations.py::test_each_fault_in_the_step_to_read_exceeds_the_budget"

BREAKS = (
    Break(
        "no-max",
        "no maximum is subtracted",
        "exp of 89 is beyond float32: the sum is inf, and inf / inf is NaN. Subtracting the row's maximum changes no "
        "quotient, and no exponent is above 0 then.",
        (
            "tests/test_numpy_tiled.py::test_scores_far_apart_neither_overflow_nor_lose_the_largest",
            "tests/test_bugcases.py::test_large_scores_overflow_nowhere",
        ),
        show_no_maximum,
        NO_MAXIMUM,
    ),
    Break(
        "no-rescale",
        "the rescale is forgotten",
        "What was summed before is relative to the old maximum. While the maximum stands in the first block nothing "
        "moves, and the fault does not show; test with the largest score in the last block.",
        (f"{_STEP}[acc not rescaled]", f"{_STEP}[row_sum not rescaled]"),
        show_no_rescale,
        NO_RESCALE,
    ),
    Break(
        "no-load-mask",
        "the mask of loads is forgotten",
        "The last tile reaches behind the last key, into memory that holds anything. The score mask makes p = 0 there, "
        "but 0 * NaN is NaN in p @ v. With zeros in that memory, as a fresh allocation often has, all looks well.",
        (f"{_STEP}[hidden keys let through]", "tests/test_bugcases.py::test_unused_cache_slots_may_hold_anything"),
        show_no_load_mask,
        NO_LOAD_MASK,
    ),
    Break(
        "no-score-mask",
        "the mask of scores is forgotten",
        "Keys that were filled up with zeros have score 0, not -inf, and exp(0 - row_max) joins the sum. Beside scores "
        "far above 0 that is lost in rounding; beside scores below 0 the padding takes everything.",
        (f"{_STEP}[mask forgotten]", "tests/test_bugcases.py::test_every_length_is_masked_at_its_tail"),
        show_no_score_mask,
        NO_SCORE_MASK,
    ),
    Break(
        "timing",
        "timing lies",
        "A first call compiles, loads and allocates. On a GPU a call returns once it is queued, so a clock that does "
        "not wait measures the queue. Warm up, wait, repeat, take the median.",
        (
            "tests/test_bench_run.py::test_what_is_slow_only_the_first_time_is_timed_all_the_same",
            "tests/test_device.py::test_a_gpu_is_waited_for_before_the_clock_is_read",
        ),
        show_timing,
    ),
    Break(
        "shared-memory",
        "too much shared memory is asked for",
        "Tiles of q, k and v must lie in shared memory at once, times the stages in flight. Beyond what a block may "
        "have, the launch fails; and the largest tiles that fit are seldom the fastest, since one block then fills "
        "the multiprocessor and nothing hides its waiting.",
        (
            "tests/test_tiles.py::test_every_default_fits_its_target_by_estimate",
            "tests/test_triton_compile.py::test_each_kernel_compiles_for_each_target_within_its_shared_memory",
        ),
        show_shared_memory,
    ),
    Break(
        "diagonal",
        "the causal diagonal is wrong",
        "One key too many is the answer, seen before it is predicted. And with fewer queries than keys the diagonal "
        "ends at the last key (bottom right); from the top left new queries would not see their own past. With as many "
        "keys as queries both are the same.",
        (
            "tests/test_bugcases.py::test_causal_means_what_the_alignment_says",
            "tests/test_blocks.py::test_a_pair_is_visible_where_the_dense_mask_says_so_for_ints_numpy_and_torch",
        ),
        show_wrong_diagonal,
    ),
    Break(
        "lse-base",
        "lse is kept in base 2",
        "Inside, exponents are in base 2, and whoever forgets to multiply by ln 2 at the end hands on another number. "
        "out is right all the same; the backward pass, merging and everybody else who takes lse for a natural "
        "logarithm is wrong.",
        (f"{_STEP}[lse in base 2]", "tests/test_backends.py::test_an_lse_in_base_two_exceeds_the_budget"),
        show_base_two,
        BASE_TWO,
    ),
)


def find_break(name: str) -> Break:
    """Give a break by its name.

    Raises:
        ValueError: there is none; the message lists them.
    """
    for each in BREAKS:
        if each.name == name:
            return each
    raise ValueError(f"break must be one of {', '.join(each.name for each in BREAKS)}; got {name!r}")


def lines(each: Break) -> Iterator[str]:
    """Do it, and tell what was expected, what came out, why, and who notices."""
    yield f"{each.name}: {each.title}"
    for line, faulty in each.edits:
        yield f"  line      {line}\n  became    {faulty}"
    for shown in each.show():
        yield f"  - {shown.setting}"
        yield f"      expected  {shown.expected}\n      got       {shown.got}\n      {shown.verdict}"
    yield f"  why       {each.why}"
    yield from (f"  caught by {test}" for test in each.caught_by)
