"""What holds for the description of a call: it says what was asked, needs no torch, and reads no device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise import autograd
from tilewise.problem.cache import Cache, CacheOptions, CacheTensors, check_cache_contents, describe_cache
from tilewise.problem.mask import FAR, Band, Mask
from tilewise.problem.problem import Options, Problem, Spec, Tensors, check_contents, describe
from tilewise.problem.score import Score

ROOT = Path(__file__).parents[1]


def spec(*shape: int, dtype: str = "float16", device: str = "cuda:0") -> Spec:
    strides = tuple(int(torch.Size(shape[axis + 1 :]).numel()) for axis in range(len(shape)))
    return Spec(shape, strides, dtype, device)


def dense(options: Options | None = None, /, **others: Spec) -> Problem:
    specs = {"q": spec(2, 6, 8, 16), "k": spec(2, 3, 9, 16), "v": spec(2, 3, 9, 24)}
    return describe(specs | others, options or Options())


def varlen(options: Options | None = None, /, **others: Spec) -> Problem:
    specs = {"q": spec(10, 6, 16), "k": spec(12, 3, 16), "v": spec(12, 3, 24)}
    bounds = {"cu_seqlens_q": spec(4, dtype="int32"), "cu_seqlens_k": spec(4, dtype="int32")}
    return describe(specs | bounds | others, options or Options())


def decoding(options: CacheOptions | None = None, /, **others: Spec) -> Problem:
    specs = {"q": spec(2, 1, 6, 16), "k_cache": spec(2, 50, 3, 16), "v_cache": spec(2, 50, 3, 24)}
    return describe_cache(specs | others, options or CacheOptions())


# ---- what was asked ----


def test_a_dense_call_is_described_as_it_is() -> None:
    found = dense(Options(causal=True, softcap=2.0, dropout=0.1, deterministic=True, return_lse=True))
    assert (found.kind, found.batch, found.heads_q, found.heads_kv, found.group) == ("dense", 2, 6, 3, 2)
    assert (found.len_q, found.len_kv, found.total_q, found.total_kv) == (8, 9, 8, 9)
    assert (found.dim_qk, found.dim_v, found.out_shape, found.lse_shape) == (16, 24, (2, 6, 8, 24), (2, 6, 8))
    assert (found.dtype, found.device, found.device_type) == ("float16", "cuda:0", "cuda")
    assert found.specs["q"].device_type == "cuda"
    assert (found.mask, found.score) == (Mask(Band(right=0)), Score(scale=0.25, softcap=2.0))
    assert (found.dropout, found.deterministic, found.return_lse, found.layout) == (0.1, True, True, "bhsd")
    assert found.cache is None


def test_a_packed_call_counts_tokens_and_bounds_lengths() -> None:
    found = varlen()
    assert (found.kind, found.batch, found.group, found.total_q, found.total_kv) == ("varlen", 3, 2, 10, 12)
    assert (found.len_q, found.len_kv, found.out_shape, found.lse_shape) == (10, 12, (10, 6, 24), (6, 10))
    shared = {"k": spec(10, 3, 16), "v": spec(10, 3, 24), "cu_seqlens_q": spec(4, dtype="int64")}
    assert describe({"q": spec(10, 6, 16), **shared}, Options()).batch == 3, "cu_seqlens_k may be left out"
    pages = {"k": spec(7, 4, 3, 16), "v": spec(7, 4, 3, 24), "block_table": spec(3, 5, dtype="int32")}
    assert (varlen(**pages).heads_kv, varlen(**pages).len_kv, varlen(**pages).total_kv) == (3, 20, 60)


def test_a_decoding_call_describes_its_cache() -> None:
    found = decoding()
    assert (found.kind, found.len_q, found.len_kv, found.out_shape) == ("cache", 1, 50, (2, 1, 6, 24))
    assert found.lse_shape == (2, 6, 1)
    assert found.mask == Mask(Band(right=0), ranged=True)
    nothing = {"has_lengths": False, "has_batch_idx": False, "has_leftpad": False, "quantised": False}
    assert found.cache == Cache(
        50, 0, 0, **nothing, rotary_dim=0, rotary_interleaved=True, num_splits=None, batch_invariant=False
    )
    lengths, new = spec(2, dtype="int32"), {"k": spec(2, 4, 3, 16), "v": spec(2, 4, 3, 24)}
    tables = {
        "rotary_cos": spec(50, 4),
        "rotary_sin": spec(50, 4),
        "cache_leftpad": lengths,
        "cache_batch_idx": lengths,
    }
    found = decoding(CacheOptions(num_splits=2, causal=False), cache_seqlens=lengths, **new, **tables)
    assert found.cache is not None
    assert (found.cache.appended, found.cache.rotary_dim, found.cache.num_splits) == (4, 8, 2)
    assert found.cache.has_lengths
    assert found.cache.has_batch_idx
    assert found.cache.has_leftpad
    assert found.mask.band.is_open
    pages = {"k_cache": spec(9, 4, 3, 16, dtype="int8"), "v_cache": spec(9, 4, 3, 24, dtype="float8_e5m2")}
    scales = {"k_scale": spec(3), "v_scale": spec(3)}
    found = decoding(**pages, **scales, block_table=spec(2, 5, dtype="int32"))
    assert found.cache is not None
    assert (found.cache.page_size, found.cache.capacity, found.cache.quantised) == (4, 20, True)


def test_flags_say_which_tensors_were_given() -> None:
    integers, per_head = spec(2, dtype="int64"), spec(6, dtype="float32")
    found = dense(bias=spec(8, 9), mask=spec(9, dtype="bool"), sink=per_head, alibi_slopes=spec(2, 6), kv_stop=integers)
    assert found.mask == Mask(Band(), ranged=True, dense=True)
    assert found.score == Score(scale=0.25, bias=True, alibi=True, sink=True)
    assert dense(kv_start=integers).mask.ranged


def test_sizes_follow_the_dtype() -> None:
    found = {}
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        problem = describe({name: spec(1, 1, 1, 1, dtype=dtype) for name in "qkv"}, Options())
        found[dtype] = problem.itemsize, problem.lse_dtype
    single, double = "float32", "float64"
    assert found == {"float16": (2, single), "bfloat16": (2, single), "float32": (4, single), "float64": (8, double)}


def test_a_call_with_nothing_to_add_up_is_empty() -> None:
    assert not dense().is_empty
    nothing = {
        "batch": {"q": spec(0, 6, 8, 16), "k": spec(0, 3, 9, 16), "v": spec(0, 3, 9, 24)},
        "heads": {"q": spec(2, 0, 8, 16), "k": spec(2, 0, 9, 16), "v": spec(2, 0, 9, 24)},
        "queries": {"q": spec(2, 6, 0, 16)},
        "keys": {"k": spec(2, 3, 0, 16), "v": spec(2, 3, 0, 24)},
        "features": {"q": spec(2, 6, 8, 0), "k": spec(2, 3, 9, 0)},
        "values": {"v": spec(2, 3, 9, 0)},
    }
    for axis, specs in nothing.items():
        assert dense(**specs).is_empty, axis
    assert dense(**nothing["heads"]).group == 0
    assert dense(**nothing["features"]).score.scale == 1.0, "0 ** -0.5 is no number"


# ---- the band ----


@pytest.mark.parametrize(
    ("causal", "window", "band"),
    [
        (False, None, Band(None, None)),
        (True, None, Band(None, 0)),
        (False, (3, 5), Band(3, 5)),
        (True, (3, 5), Band(3, 0)),
        (False, (-1, 5), Band(None, 5)),
        (False, (0, -1), Band(0, None)),
        (True, (2, -1), Band(2, 0)),
        (False, (None, 0), Band(None, 0)),
        (False, (FAR, 2**63 - 1), Band(None, None)),
        (False, (FAR - 1, 0), Band(FAR - 1, 0)),
    ],
)
def test_a_window_counts_keys_to_each_side_and_causal_closes_the_right_one(
    causal: bool, window: tuple[int | None, int | None] | None, band: Band
) -> None:
    assert Band.of(causal, window) == band
    assert band.is_open == (band.left is None and band.right is None)


def test_the_diagonal_ends_at_the_last_key_or_starts_at_the_first() -> None:
    for len_q, len_kv in ((3, 10), (10, 3), (4, 4), (0, 5)):
        assert Band().offset(len_q, len_kv) == len_kv - len_q
        assert Band(align="top_left").offset(len_q, len_kv) == 0


def test_a_side_too_wide_for_any_integer_on_a_device_is_open() -> None:
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    everything = tilewise.attention(q, k, v, kv_stop=[6])
    for far in (FAR, 2**31 - 1, 2**63 - 1):
        assert torch.equal(tilewise.attention(q, k, v, kv_stop=[6], window=(far, far)), everything)


# ---- what describing needs ----

WITHOUT_TORCH = """
import sys
from tilewise.problem import blocks, cache, checks, mask, philox, problem, score
from tilewise.problem.problem import Options, Spec, describe
from tilewise.problem.cache import CacheOptions, describe_cache
def spec(*shape, dtype="float32"):
    return Spec(shape, shape, dtype, "cpu")
rows = {name: spec(1, 2, 8, 16) for name in "qkv"}
print(describe(rows, Options(causal=True)).kind)
packed = {name: spec(8, 2, 16) for name in "qkv"}
print(describe({**packed, "cu_seqlens_q": spec(3, dtype="int32")}, Options()).kind)
stored = {"q": spec(1, 1, 2, 16), "k_cache": spec(1, 8, 2, 16), "v_cache": spec(1, 8, 2, 16)}
print(describe_cache(stored, CacheOptions()).kind)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "triton"}))
"""


def test_every_kind_of_call_is_described_without_torch_or_numpy() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}){WITHOUT_TORCH}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["dense", "varlen", "cache", ""]


def far(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Make tensors that hold nothing: reading one raises."""
    integers = ("kv_start", "kv_stop", "cu_seqlens_q", "cu_seqlens_k", "block_table", "cache_seqlens", "cache_leftpad")
    dtypes = {name: torch.int32 if name in integers else torch.float32 for name in shapes}
    return {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}


def test_contents_of_tensors_on_a_device_are_not_read() -> None:
    rows = {"q": (2, 6, 8, 16), "k": (2, 3, 9, 16), "v": (2, 3, 9, 24), "kv_start": (2,), "kv_stop": (2,)}
    assert autograd.problem_for(Tensors(**far(**rows)), Options()).mask.ranged
    pages = {"q": (10, 6, 16), "k": (7, 4, 3, 16), "v": (7, 4, 3, 24), "block_table": (2, 5)}
    packed = far(**pages, cu_seqlens_q=(3,), cu_seqlens_k=(3,))
    assert autograd.problem_for(Tensors(**packed), Options()).total_kv == 40
    stored = {"q": (2, 1, 6, 16), "k_cache": (7, 4, 3, 16), "v_cache": (7, 4, 3, 24), "block_table": (2, 5)}
    new = {"k": (2, 1, 3, 16), "v": (2, 1, 3, 24), "cache_seqlens": (2,), "cache_leftpad": (2,)}
    found = autograd.problem_for(
        CacheTensors(**far(**stored, **new, rotary_cos=(5, 4), rotary_sin=(5, 4))), CacheOptions()
    )
    assert found.cache is not None
    assert found.cache.capacity == 20


def test_a_bad_option_is_named_without_printing_a_tensor() -> None:
    value = torch.tensor(1.0, device="meta")
    for name in ("causal", "scale", "softcap", "max_seqlen_q", "align"):
        with pytest.raises(TypeError, match=rf"^{name} must be .*; got Tensor\. "):
            describe({}, Options()._replace(**{name: value}))  # type: ignore[arg-type]  # wrong on purpose


def test_contents_that_fit_pass() -> None:
    check_contents(dense(), {"kv_start": [0, 9], "kv_stop": [9, 0]})
    check_contents(varlen(), {"cu_seqlens_q": [0, 0, 10, 10], "cu_seqlens_k": [0, 4, 4, 9]})
    check_contents(varlen(bias=spec(1, 10, 5)), {"cu_seqlens_q": [0, 0, 10, 10], "cu_seqlens_k": [0, 4, 4, 9]})
    check_contents(varlen(), {})
    check_cache_contents(decoding(), {})
    check_cache_contents(dense(), {"cache_seqlens": [-1]})  # no cache, nothing to hold it to
    pages = {"k_cache": spec(9, 4, 3, 16), "v_cache": spec(9, 4, 3, 24), "block_table": spec(2, 5, dtype="int32")}
    new = {"k": spec(2, 4, 3, 16), "v": spec(2, 4, 3, 24), "cache_seqlens": spec(2, dtype="int32")}
    shared_prefix = [0, 1, 2, 99, 99, 0, 1, 3, -1, -1]
    check_cache_contents(decoding(**pages, **new), {"cache_seqlens": [8, 8], "block_table": shared_prefix})
    check_cache_contents(decoding(**pages, **new), {"block_table": shared_prefix})  # lengths that the host cannot read
    check_cache_contents(decoding(**pages), {"block_table": [0, 1, 2, 3, 4, 8, 7, 6, 5, 0]})
    nothing = {"k_cache": spec(9, 0, 3, 16), "v_cache": spec(9, 0, 3, 24)}
    check_cache_contents(decoding(**pages | nothing), {"block_table": [0] * 10})
