"""Choose who answers: backends in order, every refusal kept with its reason."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

from tilewise.machine import cost, detect
from tilewise.machine.device import Device
from tilewise.machine.shape import Shape
from tilewise.machine.tiles import Tiles

if TYPE_CHECKING:
    import torch

    from tilewise.problem.cache import CacheTensors
    from tilewise.problem.problem import Grads, Needs, Problem, Tensors

BACKENDS = ("hopper", "triton_portable", "torch_sdpa", "torch_tiled")  # in the order of preference
ON_REQUEST = ("naive", "numpy_tiled")  # only when named: to compare with and to read
ENVIRONMENT = "TILEWISE_BACKEND"

_chosen: ContextVar[str | None] = ContextVar("tilewise_backend", default=None)


class Backend(Protocol):
    """What a backend module offers."""

    name: str

    def why_not(self, problem: Problem) -> str | None:
        """Say why this backend cannot serve the problem, or None."""

    def tiles(self, problem: Problem) -> Tiles | None:
        """Give the tile sizes, or None where they are not ours to know."""

    def forward(self, problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute (out, lse)."""

    def backward(
        self,
        problem: Problem,
        tensors: Tensors,
        out: torch.Tensor,
        lse: torch.Tensor,
        d_out: torch.Tensor | None,
        d_lse: torch.Tensor | None,
        needs: Needs,
    ) -> Grads:
        """Compute the gradients that are asked for."""


class PartialBackend(Backend, Protocol):
    """A backend that serves some problems forward whose gradients it leaves to others."""

    def why_not_backward(self, problem: Problem) -> str | None:
        """Say why this backend cannot differentiate a problem that it serves, or None."""


class CacheBackend(Backend, Protocol):
    """A backend that also decodes against a cache."""

    def decode(self, problem: Problem, tensors: CacheTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to the cache, attend to it, give (out, lse)."""


def load(name: str) -> Backend:
    """Import a backend by name.

    Raises:
        ValueError: there is no such backend.
    """
    if name not in (*BACKENDS, *ON_REQUEST):
        known = ", ".join((*BACKENDS, *ON_REQUEST))
        raise ValueError(f"backend must be one of {known}; got {name!r}. Leave it None to have one chosen")
    return cast("Backend", importlib.import_module(f"tilewise.backends.{name}"))


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose the backend for every call inside, also those made by somebody's model.

    A call's own ``backend=`` goes before it, the environment variable TILEWISE_BACKEND comes after it. The named
    backend never falls back: a call that it cannot serve raises with its reason.

    Raises:
        ValueError: there is no such backend.

    >>> import torch, tilewise
    >>> q = torch.randn(1, 2, 8, 16)
    >>> with tilewise.use_backend("torch_tiled"):
    ...     tilewise.explain(tilewise.attention, q, q, q).backend
    'torch_tiled'
    """
    load(name)
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def requested() -> str | None:
    """Give the backend that `use_backend` or TILEWISE_BACKEND asks for, or None."""
    return _chosen.get() or _from_environment() or None


def _from_environment() -> str | None:
    """Read TILEWISE_BACKEND. os.environ encodes the name anew for every question; its own table answers at once."""
    if _environment is None:
        return os.environ.get(ENVIRONMENT)
    found = _environment.get(_ENCODED)
    return None if found is None else os.fsdecode(found)


_environment: dict[bytes, bytes] | None = getattr(os.environ, "_data", None) if os.name == "posix" else None
_ENCODED = os.fsencode(ENVIRONMENT)


def refusals(problem: Problem) -> dict[str, str | None]:
    """Ask every backend, in order; None means it would serve the problem."""
    reasons: dict[str, str | None] = {name: load(name).why_not(problem) for name in BACKENDS}
    return reasons | {name: load(name).why_not(problem) or "only when named" for name in ON_REQUEST}


def choose(problem: Problem, name: str | None = None) -> Backend:
    """Give the named backend, or the first that serves the problem.

    Raises:
        ValueError: the named backend cannot serve it, with its reason.
    """
    name = name or requested()
    if name is not None:
        backend = load(name)
        reason = backend.why_not(problem)
        if reason is not None:
            raise ValueError(
                f"backend {name!r} cannot serve this call: {reason}. Leave backend None to have one chosen"
            )
        return backend
    for candidate in BACKENDS:
        backend = load(candidate)
        if backend.why_not(problem) is None:
            return backend
    raise ValueError("no backend serves this call: " + "; ".join(f"{k}: {v}" for k, v in refusals(problem).items()))


class Prepared(Protocol):
    """A forward pass in which everything is settled but its tensors."""

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute (out, lse) of tensors in the order of `Tensors`, q, k, v and out in the user's order of axes.

        lse is None where the call did not ask for it.
        """


def prepared(problem: Problem, name: str | None) -> Prepared | None:
    """Give the chosen backend's prepared forward pass, where it has such a thing."""
    prepare: Callable[[Problem], Prepared] | None = getattr(_serving(problem, name), "prepare", None)
    return None if prepare is None else prepare(problem)


def forward(problem: Problem, tensors: Tensors, name: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the forward pass on the chosen backend."""
    return _serving(problem, name).forward(problem, tensors)


def backward(
    problem: Problem,
    tensors: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    needs: Needs,
    name: str | None,
) -> Grads:
    """Run the backward pass on the chosen backend, or on the next one where that leaves gradients to others."""
    return _differentiating(problem, name).backward(problem, tensors, out, lse, d_out, d_lse, needs)


def decode(problem: Problem, tensors: CacheTensors, name: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Append to the cache and attend to it on the chosen backend."""
    return cast("CacheBackend", _serving(problem, name)).decode(problem, tensors)


def _serving(problem: Problem, name: str | None) -> Backend:
    """Choose; a problem with nothing to compute goes to the torch engine, so that no kernel needs a case for it."""
    backend = choose(problem, name)
    return load("torch_tiled") if problem.is_empty else backend


def _differentiating(problem: Problem, name: str | None) -> Backend:
    """Choose for the backward pass: out and lse are the same whoever made them.

    Raises:
        ValueError: the named backend does not differentiate such a problem, with its reason.
    """
    backend = _serving(problem, name)
    reason = why_not_backward(backend, problem)
    if reason is None:
        return backend
    if name or requested():
        raise ValueError(
            f"backend {backend.name!r} cannot differentiate this call: {reason}. Leave backend None to have one chosen"
        )
    for candidate in map(load, BACKENDS[BACKENDS.index(backend.name) + 1 :]):
        if candidate.why_not(problem) is None and why_not_backward(candidate, problem) is None:
            return candidate
    raise ValueError(f"no backend differentiates this call; {backend.name}: {reason}")


def why_not_backward(backend: Backend, problem: Problem) -> str | None:
    """Ask a backend for the reason not to differentiate what it serves; most serve both passes."""
    return cast("PartialBackend", backend).why_not_backward(problem) if hasattr(backend, "why_not_backward") else None


# ---- softmax --------------------------------------------------------------------------------------------------------


class SoftmaxBackend(Protocol):
    """What computes a softmax and its gradient."""

    def softmax(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Compute p along dim; rows of -inf give zeros."""

    def softmax_backward(self, p: torch.Tensor, dp: torch.Tensor, dim: int) -> torch.Tensor:
        """Compute ``ds = p * (dp - sum(p * dp))``."""


class SoftmaxKernels(SoftmaxBackend, Protocol):
    """One that may refuse."""

    def why_not(self, x: torch.Tensor) -> str | None:
        """Say why it cannot serve a tensor, or None."""


def softmax_kernels(x: torch.Tensor) -> SoftmaxKernels | None:
    """Give the kernels that serve a softmax of x; None where PyTorch's own operators must, or another is asked for."""
    if requested() not in (None, "triton_portable"):
        return None
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":  # not worth importing triton to be told so
        return None
    kernels = _triton_softmax()
    return kernels if kernels is not None and kernels.why_not(x) is None else None


@cache
def _triton_softmax() -> SoftmaxKernels | None:
    try:
        return cast("SoftmaxKernels", importlib.import_module("tilewise.backends.triton_softmax"))
    except ModuleNotFoundError as absent:
        if (absent.name or "").partition(".")[0] != "triton":
            raise
        return None


def _softmax_backend(x: torch.Tensor) -> SoftmaxBackend:
    return softmax_kernels(x) or cast("SoftmaxBackend", importlib.import_module("tilewise.backends.torch_ops"))


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute a softmax by the kernels where they serve x, else by PyTorch's operators."""
    return _softmax_backend(x).softmax(x, dim)


def softmax_backward(p: torch.Tensor, dp: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute a softmax's gradient likewise."""
    return _softmax_backend(p).softmax_backward(p, dp, dim)


# ---- explain --------------------------------------------------------------------------------------------------------

explaining: ContextVar[bool] = ContextVar("tilewise_explaining", default=False)


class Explained(Exception):  # noqa: N818  # no error: it ends a call at the point where it would run
    """Carries the plan of a call out of the function that would have made it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("explained")
        self.plan = plan


@dataclass(frozen=True)
class Plan:
    """What a call would do.

    ``flops`` counts the visible pairs' products, ``bytes`` is main-memory traffic with every tensor crossing once
    (``bytes_worst``: keys and values loaded anew for every query tile), ``memory`` is what is taken beyond the inputs.
    ``backward`` names who would differentiate it, or says why nobody does.
    A varlen call is counted as one sequence, an upper bound: only the device knows the lengths.
    """

    problem: Problem
    backend: str
    backward: str
    tiles: Tiles | None
    refusals: dict[str, str]
    flops: int
    bytes: int
    bytes_worst: int | None
    memory: int
    cost: cost.Cost = field(repr=False)

    @property
    def seconds(self) -> float:
        """The roofline estimate: no call on this device is faster. Speeds no data sheet gives are measured, once."""
        return self.cost.time_floor(_device_with_rates(self.problem.device, self.problem.dtype), self.problem.dtype)

    def __str__(self) -> str:
        problem, score, mask = self.problem, self.problem.score, self.problem.mask
        band = mask.band
        features = [] if band.is_open else [f"left {_side(band.left)}, right {_side(band.right)}, {band.align}"]
        features += ["key ranges"] * mask.ranged + ["dense mask"] * mask.dense + ["bias"] * score.bias
        features += ["ALiBi"] * score.alibi + ["sink"] * score.sink + [f"softcap {score.softcap}"] * bool(score.softcap)
        features += [f"dropout {problem.dropout}"] * bool(problem.dropout)
        features += [] if problem.mods is None else problem.mods.words()
        heads = f"{problem.heads_q} heads" + f" over {problem.heads_kv}" * (problem.group > 1)
        dims = f"d={problem.dim_qk}" + f"/{problem.dim_v}" * (problem.dim_v != problem.dim_qk)
        size = f"B={problem.batch} N={problem.len_q}x{problem.len_kv} {dims} {heads}"
        lines = [
            f"{problem.kind} attention, {size}, {problem.dtype} on {problem.device}",
            f"  score    {'; '.join(features) or 'plain'}",
            f"  backend  {self.backend}" + f"; gradients: {self.backward}" * (self.backward != self.backend),
            f"  tiles    {f'{self.tiles.block_q} queries x {self.tiles.block_kv} keys' if self.tiles else 'its own'}",
            *(f"  not      {name}: {reason}" for name, reason in self.refusals.items()),
            f"  flops    {self.flops / 1e9:,.3f} GFLOP",
            f"  bytes    {self.bytes / 2**20:,.2f} MiB at best"
            + (f", {self.bytes_worst / 2**20:,.2f} MiB at worst" if self.bytes_worst else ""),
            f"  memory   {self.memory / 2**20:,.2f} MiB beyond the inputs",
            f"  time     {self.seconds * 1e3:,.3f} ms at the least (roofline)",
        ]
        return "\n".join(lines)


def _side(side: int | None) -> str:
    return "open" if side is None else str(side)


def plan(problem: Problem, name: str | None) -> Plan:
    """Plan one call: see `tilewise.explain`."""
    backend = _serving(problem, name)
    tiles, shape = backend.tiles(problem), Shape.of(problem)
    worst = None
    if backend.name == "naive":
        best = cost.naive(shape)
    elif problem.kind == "cache":
        best = cost.decode(shape)
    elif tiles is None:
        best = cost.tiled_best(shape)
    else:
        best = cost.tiled_best(shape, tiles.block_q, tiles.block_kv)
        worst = cost.tiled_worst(shape, tiles.block_q, tiles.block_kv)
    reasons = refusals(problem)
    return Plan(
        problem=problem,
        backend=backend.name,
        backward=_backward_words(problem, name, backend),
        tiles=tiles,
        refusals={k: reason for k, reason in reasons.items() if reason is not None and k != backend.name},
        flops=2 * shape.pairs * (shape.dim_qk + shape.dim_v),
        bytes=best.bytes,
        bytes_worst=worst.bytes if worst else None,
        memory=best.memory,
        cost=best,
    )


def _backward_words(problem: Problem, name: str | None, backend: Backend) -> str:
    if problem.kind == "cache":
        return backend.name
    try:
        other = _differentiating(problem, name).name
    except ValueError as refusal:
        return str(refusal)
    return other if other == backend.name else f"{other}, since {backend.name} {why_not_backward(backend, problem)}"


@cache
def _device_with_rates(device: str, dtype: str) -> Device:
    found = detect.detect(device)
    if found.bandwidth is None or found.rates.get(dtype) is None:
        found = detect.measure_rates(device, dtype).on(found)
    return found
