"""The host side of the backward pass on Hopper: settings, scratch memory, tensor maps, and which kernels run.

`kernels/gluon/backward.py` computes all of dq, dk and dv in one pass for head dims up to 128; `backward_wide.py` has
the way without sums between programs: for head dims up to 256, for calls that must be deterministic, and for dq alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import torch

from tilewise.backends.extents import clip, entries, tile_count, unit_of
from tilewise.backends.launch import Argument, Mapped, TensorMap, prepare_named
from tilewise.kernels.share import Jitted
from tilewise.problem.problem import Grads, Needs, Problem, Tensors

Arguments = dict[str, Argument | str]
Launch = Callable[[Iterable[torch.Tensor]], None]

SAVED_BLOCK = 128  # rows: as in kernels/gluon/backward_steps.py
CLIP, ENDLESS = 2**30, 0x7FFF0000  # rows of an axis that ends where a sequence does; an axis that never ends
_MOST_POSITIONS = 2**30  # positions are int32, and a band adds two of them
_MOST_ROWS = 2**28  # of all heads: the sums of a row take up to four rows of a tensor map, counted in int32


class Settings(NamedTuple):
    """What the kernels are compiled and launched with; a sweep replaces fields, the kernels stay as they are.

    Args:
        dim: head dim in shared memory: 64, 128 or 256; what is less is filled up with zeros.
        block_q, block_kv: the tile of scores of the kernel that owns keys.
        q_stages, d_out_stages: blocks of q and d_out in shared memory (at dim 256 there are two of each).
        dk_from_registers: whether dS goes into dK from registers, or from shared memory.
        block_kv_of_dq: keys in a block of the kernel that owns queries.
        consumer_registers, producer_registers: of a thread.
        section_bytes: what heads that run side by side may read and write: they share the L2 cache.
    """

    dim: int
    block_q: int
    block_kv: int
    q_stages: int
    d_out_stages: int
    dk_from_registers: bool
    block_kv_of_dq: int
    consumer_registers: int = 240
    producer_registers: int = 24
    section_bytes: int = 32 << 20


def settings(problem: Problem, *, fused: bool = True) -> Settings:
    """Give the settings for a problem; ``fused`` says whether dq comes from the kernel that owns keys."""
    widest, plain = max(problem.dim_qk, problem.dim_v), not problem.score.softcap
    if widest > 128:
        return Settings(256, 64, 64, 2, 2, dk_from_registers=True, block_kv_of_dq=64)
    if widest > 64:  # a softcap takes the registers of dS, and those of half a tile of dq
        return Settings(128, 64, 128, 3, 2, dk_from_registers=plain, block_kv_of_dq=128 if plain else 64)
    if fused and plain:
        return Settings(64, 128, 128, 2, 2, dk_from_registers=False, block_kv_of_dq=128)
    # Without dq, 128 queries a block crash ptxas 12.8; beside a softcap, they take too many registers.
    return Settings(64, 64, 128, 3, 2, dk_from_registers=True, block_kv_of_dq=128)


def why_not(problem: Problem) -> str | None:
    """Say why these kernels cannot differentiate a problem, or None; where they run is not asked."""
    score, mask = problem.score, problem.mask
    if problem.kind == "cache":
        return "caches get no gradient"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"gradients are for float16 and bfloat16; got {problem.dtype}"
    if "block_table" in problem.specs:
        return "has no gradient of paged keys"
    for present, what in (
        (mask.dense, "a dense mask"), (score.bias, "a bias"), (score.alibi, "ALiBi"), (problem.dropout > 0, "dropout"),
    ):  # fmt: skip
        if present:
            return f"has no gradient beside {what}"
    if max(problem.dim_qk, problem.dim_v) > 256 or problem.dim_qk % 8 or problem.dim_v % 8:
        return f"gradients need head dims up to 256, multiples of 8; got {problem.dim_qk} and {problem.dim_v}"
    if not score.softcap and (score.scale == 0 or not 1e-30 < abs(score.scale) < 1e30):
        return f"gradients divide by the scale; got {score.scale}"
    if max(problem.total_q, problem.total_kv) > _MOST_POSITIONS:
        return f"gradients count at most {_MOST_POSITIONS} positions"
    if _saved_rows(problem) > _MOST_ROWS:
        return f"gradients count at most {_MOST_ROWS} queries over all heads"
    return None


def backward(
    problem: Problem,
    tensors: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    needs: Needs,
    chosen: Settings | None = None,
) -> Grads:
    """Differentiate attention, recomputing p from lse; d_out or d_lse may be None for zero; a sweep names settings."""
    return prepare(problem, chosen)(tensors, out, lse, d_out, d_lse, needs)


@lru_cache(maxsize=4096)
def prepare(problem: Problem, chosen: Settings | None = None) -> Backward:
    """Settle the backward pass of a problem but for its tensors; the same object every time."""
    return Backward(problem, chosen)


class Given(NamedTuple):
    """The tensors that kernels take, by the names of their arguments without ``_ptr`` or ``_map``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    d_out: torch.Tensor
    d_lse: torch.Tensor | None
    saved: torch.Tensor
    dq_acc: torch.Tensor | None
    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    dsink: torch.Tensor | None
    sink: torch.Tensor | None
    kv_start: torch.Tensor | None
    kv_stop: torch.Tensor | None
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None


class Backward:
    """The backward pass of one problem: a call takes memory, sees where the tensors lie, and launches.

    What is launched is settled in the first call with such strides and such needs. Inputs that the tensor memory
    accelerator cannot read (not on 16 bytes, a stride of 0 or not of 16 bytes, a last axis that is not dense) are
    copied first.
    """

    def __init__(self, problem: Problem, chosen: Settings | None) -> None:
        self._problem = problem
        self._ordered = problem.deterministic or max(problem.dim_qk, problem.dim_v) > 128
        self._settings = {fused: chosen or settings(problem, fused=fused) for fused in (False, True)}
        self._rows = _saved_rows(problem)
        self._sink = (problem.batch, problem.heads_q)
        self._plans: dict[tuple[object, ...], list[tuple[Launch, itemgetter[object]]]] = {}

    def __call__(
        self,
        tensors: Tensors,
        out: torch.Tensor,
        lse: torch.Tensor,
        d_out: torch.Tensor | None,
        d_lse: torch.Tensor | None,
        needs: Needs,
    ) -> Grads:
        """Compute the gradients that are asked for."""
        of_keys = needs.dk or needs.dv
        fused = needs.dq and of_keys and not (self._ordered or torch.are_deterministic_algorithms_enabled())
        how, rows = self._settings[fused], self._rows
        q, k, v, sink = tensors.q, tensors.k, tensors.v, tensors.sink
        if d_out is None:
            d_out = torch.zeros_like(out)
        elif d_out.dtype != out.dtype:
            d_out = d_out.to(out.dtype)
        given = Given(
            q=_readable(q),
            k=_readable(k),
            v=_readable(v),
            out=out,
            lse=lse,
            d_out=_readable(d_out),
            d_lse=d_lse,
            saved=lse.new_empty(2 * rows),
            dq_acc=lse.new_empty(rows * how.dim) if fused else None,
            dq=_empty_like(q) if needs.dq else None,
            dk=_empty_like(k) if of_keys else None,
            dv=_empty_like(v) if of_keys else None,
            dsink=None if sink is None or not needs.dsink else lse.new_empty(self._sink),
            sink=sink,
            kv_start=tensors.kv_start,
            kv_stop=tensors.kv_stop,
            cu_q=tensors.cu_seqlens_q,
            cu_k=tensors.cu_seqlens_q if tensors.cu_seqlens_k is None else tensors.cu_seqlens_k,
        )
        strides = [None if x is None else x.stride() for x in given[:7]]
        key = (*strides, out.data_ptr() % 16 == 0, needs.dq, of_keys, fused, given.dsink is None)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _Plan(self._problem, how, given, fused=fused).launches()
        for launch, of in plan:
            launch(of(given))
        dsink = given.dsink
        if dsink is not None and sink is not None:
            dsink = (dsink.sum(0) if sink.ndim == 1 else dsink).to(sink.dtype)
        return Grads(given.dq, given.dk if needs.dk else None, given.dv if needs.dv else None, None, dsink)


# ---- what is launched -----------------------------------------------------------------------------------------------


class _Plan:
    """The launches for tensors that lie as ``given`` do."""

    def __init__(self, problem: Problem, how: Settings, given: Given, *, fused: bool) -> None:
        self.problem, self.how, self.given, self.fused = problem, how, given, fused
        score, band = problem.score, problem.mask.band
        self.rows, self.entries = _padded_rows(problem), entries(problem)
        cut = problem.mask.ranged or band.left is not None
        # Keys that the band hides from all queries: beyond the last one's reach, unless that is the last key's place.
        cut = cut or (band.right is not None and (band.align == "top_left" or band.right < 0))
        self.common: Arguments = {
            **{f"{name}_ptr": getattr(given, name) for name in ("kv_start", "kv_stop", "cu_q", "cu_k")},
            "batch": problem.batch,
            "heads": problem.heads_q,
            "heads_q": problem.heads_q,
            "heads_kv": problem.heads_kv,
            "len_q": problem.total_q,
            "len_kv": problem.total_kv,
            "left": clip(band.left, problem),
            "right": clip(band.right, problem),
            "scale": score.scale,
            "scale_log2": score.scale * math.log2(math.e),
            "softcap": score.softcap or None,
            "padded_rows": self.rows,
            "saved_rows": _saved_rows(problem),
            "DIM": how.dim,
            "CUT": cut,
            "TOP_LEFT": band.align == "top_left",
            "NEGATIVE": score.scale < 0,
            "CONSUMER_REGISTERS": how.consumer_registers,
            "PRODUCER_REGISTERS": how.producer_registers,
        }

    def launches(self) -> list[tuple[Launch, itemgetter[object]]]:
        """Give each launch with what takes its tensors from a call's."""
        found = [self.prepare_rows()]
        if self.given.dk is not None:
            found.append(self.key_gradients())
        if self.fused:
            found.append(self.finish_queries())
        elif self.given.dq is not None:
            found.append(self.query_gradients())
        if self.given.dsink is not None:
            found.append(self.sink_gradient())
        return found

    def prepare_rows(self) -> tuple[Launch, itemgetter[object]]:
        """Save lse and delta; zero the sums of dq."""
        from tilewise.kernels.gluon.backward_rows import prepare_rows

        given, score, rows = self.given, self.problem.score, 64
        unit = unit_of(given.out, given.d_out)
        arguments: Arguments = {
            "saved_ptr": given.saved,
            "dq_acc_ptr": given.dq_acc,
            **self.rows_of("lse", given.lse),
            **self.rows_of("d_lse", given.d_lse),
            **self.matrix("out", given.out, unit),
            **self.matrix("d_out", given.d_out, unit),
            "lse_factor": -math.log2(math.e) if score.softcap else -1.0 / score.scale,
            "DIM_V": self.problem.dim_v,
            "BLOCK_DIM_V": max(16, 1 << (self.problem.dim_v - 1).bit_length()),
            "ROWS": rows,
            "UNIT": unit,
        }
        return self.settle(prepare_rows, self.rows // rows * self.problem.heads_q * self.entries, arguments)

    def key_gradients(self) -> tuple[Launch, itemgetter[object]]:
        """Compute dk and dv, and the sums of dq if they are fused."""
        how, problem, given = self.how, self.problem, self.given
        block = how.block_kv if how.dim == 256 else how.block_kv // 2  # what a warpgroup stores
        arguments: Arguments = {
            **{f"{name}_map": self.map(name, how.block_q) for name in ("q", "d_out")},
            **{f"{name}_map": self.map(name, how.block_kv) for name in ("k", "v")},
            **{f"{name}_map": self.map(name, block) for name in ("dk", "dv")},
            "saved_map": Mapped(given.saved, TensorMap((2 * _saved_rows(problem),), (1,), (how.block_q,), 0)),
            "dq_acc_map": None,
            "BLOCK_Q": how.block_q,
            "BLOCK_KV": how.block_kv,
            "Q_STAGES": how.q_stages,
            "D_OUT_STAGES": how.d_out_stages,
            "DK_FROM_REGISTERS": how.dk_from_registers,
            "WITH_DQ": self.fused,
        }
        if given.dq_acc is not None:
            part = how.block_q * how.dim // 64  # rows of 32 sums, of a warpgroup
            shape = given.dq_acc.numel() // 32, 32
            arguments["dq_acc_map"] = Mapped(given.dq_acc, TensorMap(shape, (32, 1), (part, 32)))
        read = problem.total_q * how.dim * problem.group * (8 if self.fused else 4)
        work = self.work(problem.total_kv, how.block_kv, problem.heads_kv, read)
        if how.dim == 256:
            from tilewise.kernels.gluon.backward_wide import wide_key_gradients as kernel
        else:
            from tilewise.kernels.gluon.backward import attention_backward as kernel
        return self.settle(kernel, self.programs(work, problem.heads_kv), arguments | work)

    def query_gradients(self) -> tuple[Launch, itemgetter[object]]:
        """Compute dq by itself."""
        from tilewise.kernels.gluon.backward_wide import query_gradients

        how, problem = self.how, self.problem
        arguments: Arguments = {
            **{f"{name}_map": self.map(name, 64) for name in ("q", "d_out", "dq")},
            **{f"{name}_map": self.map(name, how.block_kv_of_dq) for name in ("k", "v")},
            "saved_ptr": self.given.saved,
            "BLOCK_KV": how.block_kv_of_dq,
        }
        work = self.work(problem.total_q, 128, problem.heads_q, problem.total_kv * how.dim * 4)
        return self.settle(query_gradients, self.programs(work, problem.heads_q), arguments | work)

    def finish_queries(self) -> tuple[Launch, itemgetter[object]]:
        """Turn the sums of dq into dq."""
        from tilewise.kernels.gluon.backward_rows import finish_queries

        given, block = self.given, self.how.block_q
        unit = 1 if given.dq is None else unit_of(given.dq)
        arguments: Arguments = {
            "dq_acc_ptr": given.dq_acc,
            **self.matrix("dq", given.dq, unit),
            "DIM_QK": self.problem.dim_qk,
            "BLOCK_Q": block,
            "UNIT": unit,
        }
        return self.settle(finish_queries, self.rows // block * self.problem.heads_q * self.entries, arguments)

    def sink_gradient(self) -> tuple[Launch, itemgetter[object]]:
        """Compute dsink of each sequence and head."""
        from tilewise.kernels.gluon.backward_rows import sink_gradient

        given, problem = self.given, self.problem
        batch, head = (0, 0) if given.sink is None else (0, *given.sink.stride())[-2:]
        arguments: Arguments = {
            "saved_ptr": given.saved,
            "sink_ptr": given.sink,
            "dsink_ptr": given.dsink,
            "sink_batch_stride": batch,
            "sink_head_stride": head,
            **self.rows_of("lse", given.lse),
            "BLOCK": 1024,
        }
        return self.settle(sink_gradient, problem.batch * problem.heads_q, arguments)

    def settle(self, kernel: Jitted, programs: int, own: Arguments) -> tuple[Launch, itemgetter[object]]:
        """Prepare a launch; its tensors come in the kernel's order, those behind maps last."""
        arguments = self.common | own
        taken = [name for name in kernel.arg_names if isinstance(arguments.get(name), (torch.Tensor, Mapped))]
        taken.sort(key=lambda name: isinstance(arguments[name], Mapped))
        launch = prepare_named(kernel, (programs,), arguments, taken)
        if launch is None:
            raise RuntimeError("kernels in Gluon are launched by tilewise itself, on NVIDIA GPUs alone")
        return launch, itemgetter(*(Given._fields.index(name[:-4]) for name in taken))

    def work(self, total: int, block: int, heads: int, read: int) -> Arguments:
        """Give the number of tiles, and how many heads run side by side.

        Only where the band makes tiles unequal, the longest of several heads start together; ``read`` bytes a head.
        """
        tiles, band = tile_count(self.problem, total, block), self.problem.mask.band
        unequal = band.right is not None and band.left is None
        section = max(1, min(heads * self.entries, self.how.section_bytes // read)) if unequal else 1
        return {"tiles": tiles, "section": section}

    def programs(self, work: Arguments, heads: int) -> int:
        """Count the programs over all tiles and heads."""
        tiles = work["tiles"]
        return int(tiles) * heads * self.entries if isinstance(tiles, int) else 0

    def map(self, name: str, rows: int) -> Mapped | None:
        """See a tensor as `backward_steps.box_at` describes, in boxes of some rows."""
        x: torch.Tensor | None = getattr(self.given, name)
        if x is None:
            return None
        unit = 16 // x.element_size()
        sizes, strides = x.shape, [s if n > 1 else unit for n, s in zip(x.shape, x.stride(), strict=True)]
        box = (1, 1, 1, rows, self.how.dim)
        if self.problem.kind == "dense":
            return Mapped(x, TensorMap((1, *sizes), (unit, *strides[:-1], 1), box))
        _, heads, dim = sizes
        row, head = strides[0], strides[1]
        return Mapped(x, TensorMap((ENDLESS, ENDLESS, heads, CLIP, dim), (2**34 - row, row, head, row, 1), box))

    def matrix(self, label: str, x: torch.Tensor | None, unit: int) -> Arguments:
        """Give a tensor's pointer and its strides in units; packed tensors are one entry along the batch axis."""
        strides = (0, 0, 0, 0) if x is None else x.stride()
        if x is not None and self.problem.kind == "varlen":
            strides = 0, strides[1], strides[0], strides[2]
        batch, head, row, dim = strides
        return {
            f"{label}_ptr": x,
            f"{label}_batch_stride": batch // unit,
            f"{label}_head_stride": head // unit,
            f"{label}_row_stride": row // unit,
            f"{label}_dim_stride": dim,
        }

    def rows_of(self, label: str, x: torch.Tensor | None) -> Arguments:
        """Give the pointer and strides of lse and its like: (batch, heads, len), varlen (heads, total)."""
        batch, head, row = (0, 0, 0) if x is None else (0, *x.stride())[-3:]
        return {
            f"{label}_ptr": x,
            f"{label}_batch_stride": batch,
            f"{label}_head_stride": head,
            f"{label}_row_stride": row,
        }


# ---- sizes and memory -----------------------------------------------------------------------------------------------


def _padded_rows(problem: Problem) -> int:
    """Count the saved rows of a head: whole blocks for each sequence."""
    return tile_count(problem, problem.total_q, SAVED_BLOCK) * SAVED_BLOCK


def _saved_rows(problem: Problem) -> int:
    return _padded_rows(problem) * problem.heads_q * entries(problem)


@lru_cache(maxsize=4096)
def _has_map(shape: tuple[int, ...], strides: tuple[int, ...], unit: int) -> bool:
    """Say whether a tensor map can describe a tensor; ``unit`` elements are 16 bytes."""
    outer = [stride for size, stride in zip(shape[:-1], strides, strict=False) if size > 1]
    return strides[-1] == 1 and all(stride > 0 and stride % unit == 0 for stride in outer)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """Give the tensor, or a copy that a tensor map can describe."""
    if not _has_map(x.shape, x.stride(), 16 // x.element_size()):
        return x.clone(memory_format=torch.contiguous_format)
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    """Take memory for a gradient that lies as its tensor does, if a tensor map can describe that."""
    like = torch.empty_like(x)
    if _has_map(like.shape, like.stride(), 16 // x.element_size()):
        return like
    return torch.empty_like(x, memory_format=torch.contiguous_format)
