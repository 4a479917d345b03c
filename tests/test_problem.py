"""What holds for the description of a call: bad input is refused with a reason, good input is described as it is.

`BAD` lists every bad input there is a check for. A test reads the sources and holds the table to be complete.
"""

from __future__ import annotations

import ast
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import tilewise
from tilewise import api, arguments
from tilewise.problem import cache, checks, problem
from tilewise.problem.problem import Options, Spec, describe

Arguments = dict[str, object]


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", grad: bool = False) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=grad)


def ints(*values: object, dtype: torch.dtype = torch.int32, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype, once
        return torch.nested.nested_tensor([zeros(4, 8, 16), zeros(4, 8, 16)])


def enter_backend(name: str) -> None:
    with tilewise.use_backend(name):
        pass


def with_tangent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
    with forward_ad.dual_level():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch compiles formulas of its own in a deprecated way, once
            dual = forward_ad.make_dual(q, torch.ones_like(q))
        return tilewise.attention(dual, k, v)


def explained(**given: object) -> object:
    return tilewise.explain(tilewise.attention_varlen, **given)


def described(spec: Spec, **specs: Spec) -> object:
    return describe({"q": spec, "k": spec, "v": spec, **specs}, Options())


def dense() -> Arguments:
    return {"q": zeros(2, 4, 8, 16), "k": zeros(2, 2, 9, 16), "v": zeros(2, 2, 9, 24)}


def varlen() -> Arguments:
    kv = {"k": zeros(12, 2, 16), "v": zeros(12, 2, 24)}
    return {"q": zeros(10, 4, 16), **kv, "cu_seqlens_q": ints(0, 3, 10), "cu_seqlens_k": ints(0, 5, 12)}


def paged() -> Arguments:
    pages = {"k": zeros(6, 4, 2, 16), "v": zeros(6, 4, 2, 24), "block_table": ints([0, 1, 2], [3, 4, 5])}
    return {**varlen(), **pages}


def kvcache() -> Arguments:
    return {"q": zeros(2, 1, 4, 16), "k_cache": zeros(2, 8, 2, 16), "v_cache": zeros(2, 8, 2, 24)}


def append() -> Arguments:
    new = {"k": torch.ones(2, 1, 2, 16), "v": torch.ones(2, 1, 2, 24)}
    return {**kvcache(), **new, "cache_seqlens": ints(3, 5)}


def rotary() -> Arguments:
    return {**append(), "rotary_cos": zeros(8, 4), "rotary_sin": zeros(8, 4)}


def pages_of_cache() -> Arguments:
    pages = {"k_cache": zeros(6, 4, 2, 16), "v_cache": zeros(6, 4, 2, 24), "block_table": ints([0, 1], [3, 4])}
    return {**append(), **pages}


def int8_cache() -> Arguments:
    stored = {name: zeros(2, 8, 2, 16, dtype=torch.int8) for name in ("k_cache", "v_cache")}
    return {**kvcache(), **stored, "k_scale": zeros(2), "v_scale": zeros(2)}


# Calls that are right as they stand: the function, and how to make its arguments.
CALLS: dict[str, tuple[Callable[..., object], Callable[[], Arguments]]] = {
    "attention": (tilewise.attention, dense),
    "attention with a tangent": (with_tangent, dense),
    "varlen": (tilewise.attention_varlen, varlen),
    "paged": (tilewise.attention_varlen, paged),
    "explained": (explained, paged),
    "kvcache": (tilewise.attention_with_kvcache, kvcache),
    "append": (tilewise.attention_with_kvcache, append),
    "rotary": (tilewise.attention_with_kvcache, rotary),
    "pages": (tilewise.attention_with_kvcache, pages_of_cache),
    "int8": (tilewise.attention_with_kvcache, int8_cache),
    "merge": (tilewise.merge, lambda: {"outs": [zeros(2, 4, 8, 16)] * 2, "lses": [zeros(2, 4, 8)] * 2}),
    "softmax": (tilewise.softmax, lambda: {"x": zeros(2, 3)}),
    "explain": (tilewise.explain, lambda: {"function": tilewise.attention, **dense()}),
    "use_backend": (enter_backend, lambda: {"name": "torch_tiled"}),
    "describe": (described, lambda: {"spec": Spec((1, 4, 8, 16), (512, 128, 16, 1), "float32", "cpu")}),
}
NEVER_RIGHT = {"attention with a tangent"}

VALUE, TYPE = ValueError, TypeError  # so that most rows are one line
Bad = tuple[str, Arguments, type[Exception], str]
# The call, what is changed in it, the error, and how its text begins: what was wrong and what was got.
BAD: tuple[Bad, ...] = (
    # ---- q, k and v ----
    ("attention", {"q": None}, TYPE, "q must be a torch tensor; got NoneType"),
    ("attention", {"k": np.zeros((2, 2, 9, 16))}, TYPE, "k must be a torch tensor; got ndarray"),
    ("attention", {"v": [1.0]}, TYPE, "v must be a torch tensor; got list"),
    ("attention", {"q": nested}, TYPE, "q must be an ordinary tensor; got a nested tensor"),
    ("attention", {"q": zeros(2, 4, 8, 16).to_sparse()}, TYPE, "q must be an ordinary tensor; got torch.sparse_coo"),
    ("attention", {"q": zeros(4, 8, 16)}, VALUE, "q must have 4 axes (batch, heads, len, dim); got q (4, 8, 16)"),
    ("attention", {"k": zeros(2, 16)}, VALUE, "k must have 4 axes (batch, heads, len, dim); got k (2, 16)"),
    ("attention", {"v": zeros(1, 2, 2, 9, 24)}, VALUE, "v must have 4 axes (batch, heads, len, dim); got v (1, 2, 2"),
    ("attention", {"q": zeros(2, 4, 8, 16, dtype=torch.int64)}, TYPE,
     "q, k and v must be one of float16, bfloat16, float32, float64; got q int64"),
    ("attention", {"q": zeros(2, 4, 8, 16, dtype=torch.complex64)}, TYPE,
     "q, k and v must be one of float16, bfloat16, float32, float64; got q complex64"),
    ("attention", {"q": zeros(2, 4, 8, 16, dtype=torch.float8_e4m3fn)}, TYPE,
     "q, k and v must be one of float16, bfloat16, float32, float64; got q float8_e4m3fn"),
    ("attention", {"k": zeros(2, 2, 9, 16, dtype=torch.float16)}, TYPE,
     "q, k and v must have the same dtype; got q float32, k float16, v float32"),
    ("attention", {"v": zeros(2, 2, 9, 24, dtype=torch.float64)}, TYPE,
     "q, k and v must have the same dtype; got q float32, k float32, v float64"),
    ("attention", {"k": zeros(2, 2, 9, 16, device="meta")}, VALUE, "k must be on q's device cpu; got meta"),
    ("attention", {"bias": zeros(8, 9, device="meta")}, VALUE, "bias must be on q's device cpu; got meta"),
    ("attention", {"v": zeros(2, 2, 8, 24)}, VALUE,
     "k and v must agree in all but the last axis; got k (2, 2, 9, 16), v (2, 2, 8, 24)"),
    ("attention", {"k": zeros(2, 2, 9, 8)}, VALUE,
     "q and k must have the same dim_qk; got q (2, 4, 8, 16), k (2, 2, 9, 8)"),
    ("attention", {"q": zeros(2, 3, 8, 16)}, VALUE,
     "heads_q must be a multiple of heads_kv; got heads_q 3, heads_kv 2"),
    ("attention", {"k": zeros(2, 0, 9, 16), "v": zeros(2, 0, 9, 24)}, VALUE,
     "heads_q must be a multiple of heads_kv; got heads_q 4, heads_kv 0"),
    ("attention", {"q": zeros(1, 4, 8, 16)}, VALUE,
     "q, k and v must have the same batch; got q (1, 4, 8, 16), k (2, 2"),
    ("attention with a tangent", {}, NotImplementedError,
     "attention has no forward-mode derivative (jvp); got a tensor with a tangent"),
    # ---- flags and numbers ----
    ("attention", {"causal": torch.tensor(True)}, TYPE, "causal must be True or False; got Tensor"),
    ("attention", {"causal": 1}, TYPE, "causal must be True or False; got int 1"),
    ("attention", {"causal": None}, TYPE, "causal must be True or False; got NoneType"),
    ("attention", {"deterministic": "yes"}, TYPE, "deterministic must be True or False; got str 'yes'"),
    ("attention", {"return_lse": 0}, TYPE, "return_lse must be True or False; got int 0"),
    ("attention", {"window": 3}, VALUE, "window must be (left, right); got int 3"),
    ("attention", {"window": ints(3, 4)}, VALUE, "window must be (left, right); got Tensor"),
    ("attention", {"window": (1, 2, 3)}, VALUE, "window must be (left, right); got 3 sides"),
    ("attention", {"window": (1.5, 0)}, TYPE, "window's sides must be ints or None; got float 1.5"),
    ("attention", {"window": (0, True)}, TYPE, "window's sides must be ints or None; got bool True"),
    ("attention", {"window": (ints(3), 0)}, TYPE, "window's sides must be ints or None; got Tensor"),
    ("attention", {"window": (-2, 0)}, VALUE, "window's left side counts keys beside the diagonal; got -2"),
    ("attention", {"window": (None, -3)}, VALUE, "window's right side counts keys beside the diagonal; got -3"),
    ("attention", {"window": (0, 2**63)}, VALUE, f"window's sides must fit in 64 bits; got {2**63}"),
    ("attention", {"align": "bottom"}, VALUE, "align must be \"bottom_right\" or \"top_left\"; got 'bottom'"),
    ("attention", {"align": 0}, TYPE, "align must be a name; got int 0"),
    ("attention", {"layout": "sbhd"}, VALUE, "layout must be \"bhsd\" or \"bshd\"; got 'sbhd'"),
    ("attention", {"layout": "bshd", "q": zeros(4, 8, 16)}, VALUE, "q must have 4 axes; got q (4, 8, 16)"),
    ("attention", {"scale": torch.tensor(0.5)}, TYPE, "scale must be a number or None; got Tensor"),
    ("attention", {"scale": ".5"}, TYPE, "scale must be a number or None; got str '.5'"),
    ("attention", {"scale": True}, TYPE, "scale must be a number or None; got bool True"),
    ("attention", {"scale": np.float32(0.5)}, TYPE, "scale must be a number or None; got float32"),
    ("attention", {"scale": float("nan")}, VALUE, "scale must be finite; got nan"),
    ("attention", {"scale": float("inf")}, VALUE, "scale must be finite; got inf"),
    ("attention", {"softcap": -1.0}, VALUE, "softcap must be finite and not negative; got -1.0"),
    ("attention", {"softcap": float("nan")}, VALUE, "softcap must be finite and not negative; got nan"),
    ("attention", {"softcap": "30"}, TYPE, "softcap must be a number; got str '30'"),
    ("attention", {"dropout": 1.0}, VALUE, "dropout must lie in [0, 1); got 1.0"),
    ("attention", {"dropout": -0.1}, VALUE, "dropout must lie in [0, 1); got -0.1"),
    ("attention", {"dropout": float("nan")}, VALUE, "dropout must lie in [0, 1); got nan"),
    ("attention", {"dropout": None}, TYPE, "dropout must be a number; got NoneType"),
    ("attention", {"dropout": torch.tensor(0.1)}, TYPE, "dropout must be a number; got Tensor"),
    ("attention", {"dropout": True}, TYPE, "dropout must be a number; got bool True"),
    ("attention", {"dropout": 0.1, "seed": ints(1, 2, dtype=torch.int64)}, VALUE,
     "seed must be an int or a one-element int64 tensor; got int64 (2,)"),
    ("attention", {"dropout": 0.1, "seed": ints(1)}, VALUE,
     "seed must be an int or a one-element int64 tensor; got int32 (1,)"),
    ("attention", {"seed": 1.5}, TYPE, "seed must be an int or a one-element int64 tensor; got float 1.5"),
    ("attention", {"seed": True}, TYPE, "seed must be an int or a one-element int64 tensor; got bool True"),
    ("attention", {"seed": 2**64}, VALUE, f"seed must fit in 64 bits; got {2**64}"),
    ("attention", {"backend": "flash"}, VALUE, "backend must be one of "),
    ("attention", {"backend": "torch_sdpa", "window": (2, 2)}, VALUE,
     "backend 'torch_sdpa' cannot serve this call: has no window"),
    # ---- tensors beside q, k and v ----
    ("attention", {"alibi_slopes": zeros(4, grad=True)}, VALUE, "alibi_slopes get no gradient; got requires_grad=True"),
    ("attention", {"alibi_slopes": [0.5] * 4}, TYPE, "alibi_slopes must be a torch tensor; got list"),
    ("attention", {"alibi_slopes": ints(1, 2, 3, 4)}, TYPE, "alibi_slopes must be floating point; got int32"),
    ("attention", {"alibi_slopes": zeros(2)}, VALUE,
     "alibi_slopes must have shape (heads_q,) = (4,) or (batch, heads_q) = (2, 4); got (2,)"),
    ("attention", {"sink": zeros(4, 1)}, VALUE,
     "sink must have shape (heads_q,) = (4,) or (batch, heads_q) = (2, 4); got (4, 1)"),
    ("attention", {"sink": zeros(4, dtype=torch.bool)}, TYPE, "sink must be floating point; got bool"),
    ("attention", {"bias": zeros(8, 9, dtype=torch.bool)}, TYPE, "bias must be floating point; got bool"),
    ("attention", {"bias": zeros(9, 8)}, VALUE,
     "bias must broadcast to (batch, heads_q, len_q, len_kv) = (2, 4, 8, 9); got (9, 8)"),
    ("attention", {"bias": zeros(1, 1, 1, 8, 9)}, VALUE,
     "bias must broadcast to (batch, heads_q, len_q, len_kv) = (2, 4, 8, 9); got (1, 1, 1, 8, 9)"),
    ("attention", {"mask": zeros(8, 9)}, TYPE, "mask must be bool, True = visible; got float32"),
    ("attention", {"mask": zeros(2, 9, dtype=torch.bool)}, VALUE,
     "mask must broadcast to (batch, heads_q, len_q, len_kv) = (2, 4, 8, 9); got (2, 9)"),
    ("attention", {"kv_start": ints(False, True, dtype=torch.bool)}, TYPE, "kv_start must be int32 or int64; got bool"),
    ("attention", {"kv_stop": zeros(2)}, TYPE, "kv_stop must be int32 or int64; got float32"),
    ("attention", {"kv_start": ints(0, 0, 0)}, VALUE, "kv_start must have shape (batch,) = (2,); got (3,)"),
    ("attention", {"kv_stop": 5}, TYPE, "kv_stop must be an integer tensor or a list of ints; got int 5"),
    ("attention", {"kv_stop": np.array([5, 5])}, TYPE,
     "kv_stop must be an integer tensor or a list of ints; got ndarray"),
    ("attention", {"kv_stop": [5, True]}, TYPE,
     "kv_stop must be an integer tensor or a list of ints; got list of int 5, bool True"),
    ("attention", {"kv_start": [0, -1]}, VALUE, "kv_start[1] must be the number of a key; got -1"),
    ("attention", {"kv_stop": [2**31, 9]}, VALUE, f"kv_stop[0] must be the number of a key; got {2**31}"),
    ("attention", {"kv_stop": [9, 10]}, VALUE, "kv_stop[1] must lie in [0, len_kv] = [0, 9]; got 10"),
    ("attention", {"kv_start": ints(-1, 0)}, VALUE, "kv_start[0] must lie in [0, len_kv] = [0, 9]; got -1"),
    ("attention", {"kv_start": ints(0, 0, device="meta")}, VALUE, "kv_start must be on q's device cpu; got meta"),
    ("describe", {"alibi_slopes": Spec((4,), (1,), "float32", "cpu", requires_grad=True)}, VALUE,
     "alibi_slopes get no gradient; got requires_grad=True"),
    # ---- packed sequences ----
    ("varlen", {"q": zeros(1, 10, 4, 16)}, VALUE, "q must have 3 axes (total, heads, dim); got q (1, 10, 4, 16)"),
    ("varlen", {"k": zeros(3, 4, 2, 16)}, VALUE, "k must have 3 axes (total, heads, dim); got k (3, 4, 2, 16)"),
    ("varlen", {"cu_seqlens_q": None}, TYPE, "cu_seqlens_q must be a torch tensor; got NoneType"),
    ("varlen", {"cu_seqlens_q": [0, 3, 10]}, TYPE, "cu_seqlens_q must be a torch tensor; got list"),
    ("varlen", {"cu_seqlens_q": zeros(3)}, TYPE, "cu_seqlens_q must be int32 or int64; got float32"),
    ("varlen", {"cu_seqlens_k": zeros(3, dtype=torch.int16)}, TYPE, "cu_seqlens_k must be int32 or int64; got int16"),
    ("varlen", {"cu_seqlens_q": ints([0, 3, 10])}, VALUE, "cu_seqlens_q must have shape (batch + 1,); got (1, 3)"),
    ("varlen", {"cu_seqlens_q": ints()}, VALUE, "cu_seqlens_q must have shape (batch + 1,); got (0,)"),
    ("varlen", {"cu_seqlens_q": torch.tensor(3)}, VALUE, "cu_seqlens_q must have shape (batch + 1,); got ()"),
    ("varlen", {"cu_seqlens_k": ints(0, 0, 0, device="meta")}, VALUE,
     "cu_seqlens_k must be on q's device cpu; got meta"),
    ("varlen", {"cu_seqlens_q": ints(0, 10)}, VALUE,
     "cu_seqlens_q and cu_seqlens_k must describe the same number of sequences; got 1 in cu_seqlens_q, 2 in cu_"),
    ("varlen", {"cu_seqlens_k": None}, VALUE,
     "without cu_seqlens_k, q and k must have the same tokens; got q (10, 4, 16), k (12, 2, 16)"),
    ("varlen", {"cu_seqlens_q": ints(1, 3, 10)}, VALUE, "cu_seqlens_q must start at 0 and never fall; got [1, 3, 10]"),
    ("varlen", {"cu_seqlens_k": ints(0, 5, 4)}, VALUE, "cu_seqlens_k must start at 0 and never fall; got [0, 5, 4]"),
    ("varlen", {"cu_seqlens_q": ints(0, 3, 11)}, VALUE, "cu_seqlens_q must not pass the 10 tokens given; got 11"),
    ("varlen", {"cu_seqlens_k": ints(0, 3, 13)}, VALUE, "cu_seqlens_k must not pass the 12 tokens given; got 13"),
    ("varlen", {"max_seqlen_q": -1}, VALUE, "max_seqlen_q must not be negative; got -1"),
    ("varlen", {"max_seqlen_k": 7.0}, TYPE, "max_seqlen_k must be an int or None; got float 7.0"),
    ("varlen", {"bias": zeros(4, 9, 7)}, VALUE,
     "a varlen bias must have shape (heads_q or 1, total_q, max_seqlen_k) with heads_q = 4, total_q = 10; got (4, 9,"),
    ("varlen", {"bias": zeros(1, 10, 6)}, VALUE,
     "bias must have a column for each key of the longest sequence; got 6 columns, 7 keys"),
    ("varlen", {"sink": zeros(3, 4)}, VALUE,
     "sink must have shape (heads_q,) = (4,) or (batch, heads_q) = (2, 4); got (3, 4)"),
    ("paged", {"k": zeros(12, 2, 16)}, VALUE,
     "k must have 4 axes (pages, page_size, heads_kv, dim); got k (12, 2, 16)"),
    ("paged", {"cu_seqlens_k": None}, VALUE, "block_table needs cu_seqlens_k; got None"),
    ("paged", {"block_table": zeros(2, 3)}, TYPE, "block_table must be int32 or int64; got float32"),
    ("paged", {"block_table": ints(0, 1, 2)}, VALUE,
     "block_table must have shape (batch, max_pages) with batch = 2; got (3,)"),
    ("paged", {"block_table": ints([0, 1, 2])}, VALUE,
     "block_table must have shape (batch, max_pages) with batch = 2; got (1, 3)"),
    ("paged", {"block_table": ints([0, 6, 2], [3, 4, 5])}, VALUE, "block_table must name pages 0 to 5; got 6"),
    ("paged", {"block_table": ints([0, 1, 2], [-1, 4, 5])}, VALUE, "block_table must name pages 0 to 5; got -1"),
    ("paged", {"block_table": ints([0], [3]), "cu_seqlens_k": ints(0, 2, 8)}, VALUE,
     "sequence 1 needs 2 pages of 4 tokens; got 1 in block_table"),
    ("explained", {"k": zeros(6, 4, 2, 16, grad=True)}, VALUE,
     "keys and values in pages get no gradient; got k with requires_grad=True"),
    ("paged", {"v": zeros(6, 4, 2, 24, grad=True)}, VALUE,
     "keys and values in pages get no gradient; got v with requires_grad=True"),
    # ---- decoding ----
    ("kvcache", {"q": zeros(2, 4, 16)}, VALUE, "q must have 4 axes (batch, len_q, heads_q, dim_qk); got q (2, 4, 16)"),
    ("kvcache", {"q": None}, TYPE, "q must be a torch tensor; got NoneType"),
    ("kvcache", {"k_cache": None}, TYPE, "k_cache must be a torch tensor; got NoneType"),
    ("kvcache", {"k_cache": zeros(8, 2, 16)}, VALUE,
     "k_cache must have 4 axes (batch, capacity, heads_kv, dim); got k_cache (8, 2, 16)"),
    ("pages", {"v_cache": zeros(8, 2, 16)}, VALUE,
     "v_cache must have 4 axes (pages, page_size, heads_kv, dim); got v_cache (8, 2, 16)"),
    ("kvcache", {"q": zeros(2, 1, 4, 16, dtype=torch.int8)}, TYPE,
     "q must be one of float16, bfloat16, float32, float64; got int8"),
    ("kvcache", {"v_cache": zeros(2, 8, 2, 24, dtype=torch.float16)}, TYPE,
     "v_cache must have q's dtype float32 or be one of float8_e4m3fn, float8_e5m2, int8; got float16"),
    ("kvcache", {"v_cache": zeros(2, 9, 2, 24)}, VALUE,
     "k_cache and v_cache must agree in all but the last axis; got k_cache (2, 8, 2, 16), v_cache (2, 9, 2, 24)"),
    ("kvcache", {"q": zeros(2, 1, 4, 24)}, VALUE,
     "q and k_cache must have the same dim_qk; got q (2, 1, 4, 24), k_cache (2, 8, 2, 16)"),
    ("kvcache", {"q": zeros(2, 1, 5, 16)}, VALUE, "heads_q must be a multiple of heads_kv; got heads_q 5, heads_kv 2"),
    ("kvcache", {"q": zeros(3, 1, 4, 16)}, VALUE,
     "k_cache must have q's batch; got q (3, 1, 4, 16), k_cache (2, 8, 2, 16)"),
    ("kvcache", {"cache_seqlens": ints(3, 5, device="meta")}, VALUE,
     "cache_seqlens must be on q's device cpu; got meta"),
    ("kvcache", {"q": zeros(2, 1, 4, 16, grad=True)}, TYPE,
     "attention_with_kvcache is for inference; got q with requires_grad=True"),
    ("append", {"v": zeros(2, 1, 2, 24, grad=True)}, TYPE,
     "attention_with_kvcache is for inference; got v with requires_grad=True"),
    ("kvcache", {"layout": "sbhd"}, VALUE, "layout must be \"bhsd\" or \"bshd\"; got 'sbhd'"),
    ("kvcache", {"layout": "bhsd", "k_cache": zeros(8, 2, 16)}, VALUE,
     "k_cache must have 4 axes; got k_cache (8, 2, 16)"),
    ("kvcache", {"causal": None}, TYPE, "causal must be True or False; got NoneType"),
    ("kvcache", {"batch_invariant": 1}, TYPE, "batch_invariant must be True or False; got int 1"),
    ("kvcache", {"num_splits": 2.0}, TYPE, "num_splits must be an int or None; got float 2.0"),
    ("kvcache", {"num_splits": -1}, VALUE, "num_splits must not be negative; got -1"),
    ("kvcache", {"sink": zeros(5)}, VALUE,
     "sink must have shape (heads_q,) = (4,) or (batch, heads_q) = (2, 4); got (5,)"),
    ("kvcache", {"cache_seqlens": zeros(2)}, TYPE, "cache_seqlens must be int32 or int64; got float32"),
    ("kvcache", {"cache_seqlens": ints(3)}, VALUE, "cache_seqlens must have shape (batch,) = (2,); got (1,)"),
    ("kvcache", {"cache_seqlens": ints(3, 9)}, VALUE,
     "sequence 1 must fit the cache's capacity of 8; got 9 cached and 0 new tokens"),
    ("kvcache", {"cache_seqlens": -1}, VALUE, "cache_seqlens must count the tokens held; got -1"),
    ("kvcache", {"cache_seqlens": 2**40}, VALUE, f"cache_seqlens must count the tokens held; got {2**40}"),
    ("kvcache", {"cache_seqlens": 3.5}, TYPE,
     "cache_seqlens must be an integer tensor or a list of ints; got float 3.5"),
    ("kvcache", {"cache_seqlens": True}, TYPE,
     "cache_seqlens must be an integer tensor or a list of ints; got bool True"),
    ("kvcache", {"cache_batch_idx": [0, 1]}, TYPE, "cache_batch_idx must be a torch tensor; got list"),
    ("append", {"layout": "bhsd", "k": zeros(2)}, VALUE, "k must have 4 axes; got k (2,)"),
    ("kvcache", {"cache_batch_idx": ints(0, 2)}, VALUE, "cache_batch_idx must name rows 0 to 1 of the cache; got 2"),
    ("append", {"cache_batch_idx": ints(1, 1)}, VALUE,
     "two sequences must not append to one row of the cache; got cache_batch_idx [1, 1]"),
    ("kvcache", {"cache_leftpad": ints(0, 9)}, VALUE, "cache_leftpad[1] must lie in [0, capacity] = [0, 8]; got 9"),
    ("append", {"v": None}, VALUE, "k and v are appended together; got k"),
    ("append", {"k": None}, VALUE, "k and v are appended together; got v"),
    ("append", {"cache_seqlens": None}, VALUE, "appending k and v needs cache_seqlens; got None"),
    ("append", {"k": zeros(2, 2, 1, 16)}, VALUE,
     "k must have shape (batch, len_new, heads_kv, dim) = (2, len_new, 2, 16); got (2, 2, 1, 16)"),
    ("append", {"v": zeros(2, 2, 24)}, VALUE,
     "v must have shape (batch, len_new, heads_kv, dim) = (2, len_new, 2, 24); got (2, 2, 24)"),
    ("append", {"k": zeros(2, 1, 2, 16, dtype=torch.float64)}, TYPE, "k must have q's dtype float32; got float64"),
    ("append", {"k": zeros(2, 2, 2, 16)}, VALUE,
     "k and v must have the same number of new tokens; got k (2, 2, 2, 16), v (2, 1, 2, 24)"),
    ("append", {"v_cache": zeros(1, 8, 2, 24).expand(2, 8, 2, 24)}, VALUE,
     "v_cache must own every slot that k and v are written to; got (2, 8, 2, 24) with strides (0, 48, 24, 1)"),
    ("append", {"cache_seqlens": ints(3, 8)}, VALUE,
     "sequence 1 must fit the cache's capacity of 8; got 8 cached and 1 new tokens"),
    ("append", {"cache_seqlens": 8}, VALUE,
     "sequence 0 must fit the cache's capacity of 8; got 8 cached and 1 new tokens"),
    ("pages", {"block_table": torch.tensor(3)}, VALUE,
     "block_table must have shape (batch, max_pages) with batch = 2; got ()"),
    ("pages", {"block_table": zeros(2, 2)}, TYPE, "block_table must be int32 or int64; got float32"),
    ("pages", {"cache_batch_idx": ints(0, 1)}, VALUE, "cache_batch_idx does not go with block_table; got both"),
    ("pages", {"block_table": ints([0, 1], [3, 6])}, VALUE, "block_table must name pages 0 to 5; got 6"),
    ("pages", {"block_table": ints([0, 6], [3, 4]), "k": None, "v": None, "cache_seqlens": None}, VALUE,
     "block_table must name pages 0 to 5; got 6"),
    ("pages", {"block_table": ints([0, 2], [2, 4]), "cache_seqlens": ints(5, 3)}, VALUE,
     "two sequences must not append to one page; got page 2 in rows 0 and 1 of block_table"),
    ("int8", {"k_scale": None}, VALUE,
     "k_scale goes with an fp8 or int8 k_cache, and only with one; got k_cache int8, k_scale missing"),
    ("kvcache", {"v_scale": zeros(2)}, VALUE,
     "v_scale goes with an fp8 or int8 v_cache, and only with one; got v_cache float32, v_scale given"),
    ("int8", {"v_scale": zeros(4)}, VALUE,
     "v_scale must be floating point of shape (heads_kv,) = (2,); got float32 (4,)"),
    ("int8", {"k_scale": ints(1, 1)}, VALUE,
     "k_scale must be floating point of shape (heads_kv,) = (2,); got int32 (2,)"),
    ("rotary", {"rotary_sin": None}, VALUE, "rotary_cos and rotary_sin go together; got rotary_cos alone"),
    ("rotary", {"k": None, "v": None}, VALUE,
     "rotary_cos and rotary_sin rotate q together with the k that is appended; got no k"),
    ("rotary", {"rotary_sin": zeros(8, 3)}, VALUE,
     "rotary_cos and rotary_sin must have shape (positions, rotary_dim / 2) with rotary_dim <= dim_qk = 16; got rot"),
    ("rotary", {"rotary_cos": zeros(8, 9), "rotary_sin": zeros(8, 9)}, VALUE,
     "rotary_cos and rotary_sin must have shape (positions, rotary_dim / 2) with rotary_dim <= dim_qk = 16; got rot"),
    ("rotary", {"rotary_cos": zeros(8, 4, dtype=torch.int32)}, TYPE,
     "rotary_cos and rotary_sin must be floating point; got int32, float32"),
    ("rotary", {"rotary_cos": zeros(0, 4), "rotary_sin": zeros(0, 4)}, VALUE,
     "rotary_cos and rotary_sin must have a row for each of the 1 positions in use; got 0 rows"),
    ("rotary", {"rotary_cos": zeros(5, 4), "rotary_sin": zeros(5, 4)}, VALUE,
     "rotary_cos and rotary_sin must have a row for each of the 6 positions in use; got 5 rows"),
    ("rotary", {"q": zeros(2, 3, 4, 16), "rotary_cos": zeros(7, 4), "rotary_sin": zeros(7, 4)}, VALUE,
     "rotary_cos and rotary_sin must have a row for each of the 8 positions in use; got 7 rows"),
    # ---- the others ----
    ("merge", {"outs": [], "lses": []}, VALUE, "merge needs one lse for each out, and at least one; got 0 and 0"),
    ("merge", {"lses": [zeros(2, 4, 8)]}, VALUE, "merge needs one lse for each out, and at least one; got 2 and 1"),
    ("merge", {"outs": 3}, TYPE, "outs must be a list of tensors or a stack of them; got int 3"),
    ("merge", {"lses": torch.tensor(0.0)}, TYPE, "lses must be a list of tensors or a stack of them; got Tensor"),
    ("merge", {"outs": [zeros(2, 4, 8, 16, dtype=torch.int32)] * 2}, TYPE,
     "outs and lses must be floating point; got torch.int32 and torch.float32"),
    ("merge", {"lses": [zeros(2, 4, 8, device="meta")] * 2}, VALUE, "all parts must be on cpu; got cpu and meta"),
    ("merge", {"lses": [np.zeros((2, 4, 8))] * 2}, TYPE, "lse must be a torch tensor; got ndarray"),
    ("merge", {"outs": [zeros(2, 4, 8, 16), zeros(2, 4, 7, 16)]}, VALUE,
     "outs must share one shape, of 3 or 4 axes, and one dtype; got (2, 4, 7, 16) torch.float32 beside (2, 4,"),
    ("merge", {"outs": [zeros(8, 16)], "lses": [zeros(8)]}, VALUE,
     "outs must share one shape, of 3 or 4 axes, and one dtype; got (8, 16) torch.float32"),
    ("merge", {"lses": [zeros(2, 8, 4)] * 2}, VALUE,
     "the lse of an out (2, 4, 8, 16) must be (2, 4, 8); got (2, 8, 4)"),
    ("merge", {"sink": zeros(3)}, VALUE, "sink must be (heads,) = (4,) or (batch, heads); got (3,)"),
    ("softmax", {"x": ints(1, 2)}, TYPE, "softmax needs floating point numbers; got torch.int32"),
    ("softmax", {"x": [1.0]}, TYPE, "x must be a torch tensor; got list"),
    ("softmax", {"dim": 2}, IndexError, "dim must be from -2 to 1 here; got 2"),
    ("explain", {"function": tilewise.softmax}, VALUE,
     "explain takes attention, attention_varlen or attention_with_kvcache; got softmax"),
    ("use_backend", {"name": "flash"}, VALUE, "backend must be one of "),
    ("use_backend", {"name": ""}, VALUE, "backend must be one of "),
)  # fmt: skip


def arguments_of(call: str, changes: Arguments) -> tuple[Callable[..., object], Arguments]:
    function, build = CALLS[call]
    given = {name: value() if value is nested else value for name, value in (build() | changes).items()}
    return function, given


def names_of(rows: tuple[Bad, ...]) -> list[str]:
    return [f"{call}: {text}" for call, _, _, text in rows]


@contextmanager
def left_alone(given: Arguments) -> Iterator[None]:
    """Hold that no tensor among the arguments changes."""
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    plain = {name: x for name, x in tensors.items() if not (x.is_nested or x.is_meta)}
    before = {name: x.detach().clone() for name, x in plain.items()}
    yield
    for name, x in plain.items():
        assert torch.equal(x.to_dense(), before[name].to_dense()), f"{name} was written to"


@pytest.mark.parametrize(("call", "changes", "error", "text"), BAD, ids=names_of(BAD))
def test_bad_input_is_refused_with_what_was_wrong_what_was_got_and_how_to_mend_it(
    call: str, changes: Arguments, error: type[Exception], text: str
) -> None:
    function, given = arguments_of(call, changes)
    with left_alone(given), pytest.raises(error) as raised:
        function(**given)
    assert type(raised.value) is error
    message = str(raised.value)
    assert message.startswith(text)
    assert "; got " in message or "cannot serve this call" in message
    got, _, mend = message.removeprefix(text).rpartition(". ")
    assert "\n" not in got
    assert len(mend.split()) >= 2, f"no word on how to mend it: {message}"
    assert mend[0].isupper()


EXPLAINABLE = tuple(
    row for row in BAD if CALLS[row[0]][0] in (api.attention, api.attention_varlen, api.attention_with_kvcache)
)


@pytest.mark.parametrize(("call", "changes", "error", "text"), EXPLAINABLE, ids=names_of(EXPLAINABLE))
def test_explain_refuses_what_the_call_would_refuse(
    call: str, changes: Arguments, error: type[Exception], text: str
) -> None:
    function, given = arguments_of(call, changes)
    with left_alone(given), pytest.raises(error) as raised:
        tilewise.explain(function, **given)
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize(("call", "changes", "error", "text"), EXPLAINABLE, ids=names_of(EXPLAINABLE))
def test_a_call_that_wants_a_gradient_is_refused_alike(
    call: str, changes: Arguments, error: type[Exception], text: str
) -> None:
    function, given = arguments_of(call, changes)
    if function is not api.attention_with_kvcache:
        q = given["q"]
        given["q"] = q.clone().requires_grad_() if isinstance(q, torch.Tensor) and q.is_floating_point() else q
    with pytest.raises(error) as raised:
        function(**given)
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize("call", sorted(set(CALLS) - NEVER_RIGHT))
def test_the_calls_that_the_table_changes_are_right_as_they_stand(call: str) -> None:
    function, given = arguments_of(call, {})
    function(**given)


NEVER_REACHED = {'raise RuntimeError("the call ended before its plan was made")'}


def raises(path: Path) -> dict[range, str]:
    """List the raise statements of a file: their lines and their text."""
    source = path.read_text()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    return {
        range(node.lineno, (node.end_lineno or 0) + 1): ast.get_source_segment(source, node) or "" for node in found
    }


def test_every_check_has_its_row_in_the_table() -> None:
    reached = set()
    for call, changes, error, _ in BAD:
        function, given = arguments_of(call, changes)
        try:
            function(**given)
        except error as raised:
            last = traceback.extract_tb(raised.__traceback__)[-1]
            reached.add((last.filename, last.lineno))
    missing = []
    for module in (checks, problem, cache, arguments, api):
        path = Path(module.__file__ or "")
        for lines, text in raises(path).items():
            if text not in NEVER_REACHED and not any((str(path), line) in reached for line in lines):
                missing.append(f"{path.name}:{lines.start}: {text}")
    assert missing == []
