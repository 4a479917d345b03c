"""The ways of computing attention that are set side by side, each behind the same few methods.

Whatever an implementation needs and a model would make once, such as SDPA's dense mask of a window, is made in
`Implementation.prepare`, outside the time and inside the memory that is reported.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilewise import api, dispatch, reference
from tilewise.backends.extents import contiguous
from tilewise.backends.naive import Terms, naive_backward
from tilewise.bench.cases import Case, Inputs
from tilewise.dispatch import Plan
from tilewise.machine import cost
from tilewise.machine.cost import Cost
from tilewise.machine.device import MIB

Pass = Literal["forward", "backward"]


class Outcome(NamedTuple):
    """What one run gives; None for what it has not."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None


class Run(Protocol):
    """One implementation, ready on one set of data."""

    prepared_bytes: int  # memory that `prepare` took

    def active(self) -> AbstractContextManager[object]:
        """Give what must be in force around all other methods; entering it is not timed."""

    def forward(self) -> object:
        """Compute out alone, as in inference."""

    def open_backward(self) -> None:
        """Run what the backward pass starts from."""

    def backward(self) -> object:
        """Compute dq, dk and dv, any number of times."""

    def close_backward(self) -> None:
        """Let go of what `open_backward` keeps."""

    def outcome(self, d_out: torch.Tensor | None) -> Outcome:
        """Compute everything there is once; with gradients where d_out is given."""


@dataclass(frozen=True)
class Implementation:
    """A named way of computing attention.

    Args:
        name: "family/variant".
        absent: says why it cannot serve a case, or None.
        prepare: makes it ready on a case's data.
        predict: its cost by the counting model.
        need: bytes it takes beyond the inputs, an upper estimate, made before anything is allocated.
        dense: bytes of the dense mask or bias that it needs too, as little as all who need it share.
        meter: who can tell the memory it took: torch's allocator or Python's.
        slowness: how many times the counting model's least time to expect before anything was measured.
    """

    name: str
    absent: Callable[[Case, Pass], str | None]
    prepare: Callable[[Case, Inputs], Run]
    predict: Callable[[Case, Pass], Cost]
    need: Callable[[Case, Pass], int]
    dense: Callable[[Case], int]
    meter: Literal["torch", "numpy"] = "torch"
    slowness: float = 6.0

    @property
    def family(self) -> str:
        """The name up to its slash."""
        return self.name.partition("/")[0]


# ---- torch ----------------------------------------------------------------------------------------------------------

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, "torch.Tensor | None"]]


@dataclass
class TorchRun:
    """A torch function of (q, k, v, whether lse is wanted), giving (out, lse or None)."""

    function: Function
    inputs: Inputs
    prepared_bytes: int = 0
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    _leaves: tuple[torch.Tensor, ...] = ()
    _out: torch.Tensor | None = field(default=None, repr=False)

    def active(self) -> AbstractContextManager[object]:
        """Give the implementation's own context."""
        return self.context()

    def forward(self) -> object:
        """Compute out without a graph."""
        with torch.no_grad():
            return self.function(*self.inputs[:3], False)[0]

    def open_backward(self) -> None:
        """Build the graph."""
        if self.inputs.q.device.type == "cuda":  # autograd's thread has no context yet, of which cuBLAS would warn
            torch.ones((), device=self.inputs.q.device, requires_grad=True).exp().backward()
        self._leaves = tuple(x.detach().requires_grad_() for x in self.inputs[:3])
        q, k, v = self._leaves
        self._out = self.function(q, k, v, False)[0]

    def backward(self) -> object:
        """Walk the graph back and keep it."""
        if self._out is None:
            raise RuntimeError("open_backward comes first")
        return torch.autograd.grad(self._out, self._leaves, self.inputs.d_out, retain_graph=True)

    def close_backward(self) -> None:
        """Drop the graph."""
        self._leaves, self._out = (), None

    def outcome(self, d_out: torch.Tensor | None) -> Outcome:
        """Run once, forward and back."""
        q, k, v = self.inputs[:3]
        if d_out is None:
            with torch.no_grad():
                return Outcome(*self.function(q, k, v, True))
        leaves = q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()
        out, lse = self.function(*leaves, True)
        grads = torch.autograd.grad(out, leaves, d_out)
        return Outcome(out.detach(), None if lse is None else lse.detach(), *grads)


def _naive_prepare(case: Case, inputs: Inputs) -> TorchRun:
    """The textbook's three lines, the whole score matrix in memory."""
    bias = hidden = None
    if inputs.alibi_slopes is None:
        hidden = inputs.share("hidden", case.hidden)
    else:
        bias = inputs.share("dense", lambda: case.dense_bias(inputs.alibi_slopes))
    group = case.heads_q // case.heads_kv

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: bool) -> tuple[torch.Tensor, None]:
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        score = (q * case.dim**-0.5) @ k.transpose(-1, -2)
        if bias is not None:
            score = score + bias
        if hidden is not None:
            score = score.masked_fill(hidden, -math.inf)
        return torch.softmax(score, -1) @ v, None

    return TorchRun(attend, inputs, _bytes(hidden) + _bytes(bias))


def _sdpa_prepare(backend: SDPBackend, case: Case, inputs: Inputs) -> TorchRun:
    """PyTorch's own attention, held to one of its kernels; a window, a bias or padding become a dense mask."""
    causal_alone = case.causal and case.window is None and case.kv_stop is None and inputs.alibi_slopes is None
    bias = None if causal_alone else inputs.share("dense", lambda: case.dense_bias(inputs.alibi_slopes))
    grouped = case.heads_q != case.heads_kv

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: bool) -> tuple[torch.Tensor, None]:
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal_alone, enable_gqa=grouped)
        return out, None

    return TorchRun(attend, inputs, _bytes(bias), lambda: sdpa_kernel(backend))


def _tilewise_prepare(backend: str, case: Case, inputs: Inputs) -> TorchRun:
    call: Callable[..., object] = api.attention
    options = _options(case, inputs)
    gives_lse = dispatch.load(backend).why_not(plan(case, "forward", "torch_tiled", return_lse=True).problem) is None

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        result = call(q, k, v, **options, return_lse=lse and gives_lse, backend=backend)
        if lse and gives_lse:
            return cast("tuple[torch.Tensor, torch.Tensor]", result)
        return cast("torch.Tensor", result), None

    return TorchRun(attend, inputs)


def _options(case: Case, inputs: Inputs) -> dict[str, object]:
    """Give a case's options as `tilewise.attention` takes them."""
    return {
        "causal": case.causal,
        "window": None if case.window is None else (case.window, case.window),
        "alibi_slopes": inputs.alibi_slopes,
        "kv_stop": None if case.kv_stop is None else [case.kv_stop] * case.batch,
    }


def _bytes(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.untyped_storage().nbytes()


# ---- NumPy ----------------------------------------------------------------------------------------------------------


@dataclass
class NumpyRun:
    """The reference, which knows one head, over all heads in turn."""

    case: Case
    inputs: Inputs
    tiled: bool
    prepared_bytes: int = 0
    _kept: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._arrays = [x.detach().cpu().numpy() for x in self.inputs[:4]]

    def active(self) -> AbstractContextManager[object]:
        """Nothing need be in force."""
        return nullcontext()

    def _heads(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Yield each query head's place, and that of the key head it reads."""
        group = self.case.heads_q // self.case.heads_kv
        for batch in range(self.case.batch):
            for head in range(self.case.heads_q):
                yield (batch, head), (batch, head // group)

    @property
    def _window(self) -> tuple[int, int] | None:
        return None if self.case.window is None else (self.case.window, self.case.window)

    def forward(self) -> object:
        """Compute out (batch, heads_q, length, dim), head by head."""
        q, k, v, _ = self._arrays
        out = np.empty_like(q)
        for at, shared in self._heads():
            out[at] = self._head(q[at], k[shared], v[shared])[0]
        return out

    def _head(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        options: dict[str, object] = {"causal": self.case.causal, "window": self._window}
        if self.tiled:
            return reference.tiled_attention(q, k, v, **options)  # type: ignore[arg-type]  # bool and window
        return reference.naive_attention(q, k, v, **options), None  # type: ignore[arg-type]

    def open_backward(self) -> None:
        """Keep what the tiled backward pass reads: out and lse."""
        q, k, v, _ = self._arrays
        self._kept = []
        if self.tiled:
            for at, shared in self._heads():
                out, lse = self._head(q[at], k[shared], v[shared])
                self._kept.append((out, np.asarray(lse)))

    def backward(self) -> object:
        """Compute dq, dk and dv, head by head; the naive form computes the probabilities anew."""
        return self._gradients(self._arrays[3])

    def _gradients(self, d_out: np.ndarray) -> tuple[np.ndarray, ...]:
        q, k, v, _ = self._arrays
        dq, dk, dv = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
        terms: Terms[np.ndarray] = Terms(left=self.case.left, right=self.case.right)
        for index, (at, shared) in enumerate(self._heads()):
            if self.tiled:
                out, lse = self._kept[index]
                grads = reference.tiled_attention_backward(
                    q[at], k[shared], v[shared], out, lse, d_out[at], causal=self.case.causal, window=self._window
                )
            else:
                wide = np.promote_types(q.dtype, np.float32)
                one = [x[None, None].astype(wide, copy=False) for x in (q[at], k[shared], v[shared], d_out[at])]
                found = naive_backward(np, one[0], one[1], one[2], one[3], terms=terms)
                grads = found.dq[0, 0], found.dk[0, 0], found.dv[0, 0]
            dq[at] = grads[0]
            dk[shared] += grads[1]
            dv[shared] += grads[2]
        return dq, dk, dv

    def close_backward(self) -> None:
        """Drop out and lse."""
        self._kept = []

    def outcome(self, d_out: torch.Tensor | None) -> Outcome:
        """Run once, forward and back; the tiled forward pass is not run twice."""
        if d_out is None:
            return Outcome(torch.from_numpy(np.asarray(self.forward())))
        self.open_backward()
        if self.tiled:
            out = np.stack([out for out, _ in self._kept]).reshape(self._arrays[0].shape)
        else:
            out = np.asarray(self.forward())
        grads = self._gradients(d_out.cpu().numpy())
        self.close_backward()
        return Outcome(torch.from_numpy(out), None, *(torch.from_numpy(x) for x in grads))


def _numpy_absent(case: Case, which: Pass) -> str | None:
    if case.dtype == "bfloat16":
        return "NumPy has no bfloat16"
    if case.alibi:
        return "has no ALiBi"
    if case.kv_stop is not None:
        return "has no key range"
    return None


# ---- what each costs, as far as it can be said beforehand -----------------------------------------------------------

# Score matrices that an untiled form holds at its peak, all heads' in torch, one head's in NumPy: (forward, backward).
_MATRICES = {"naive": (2, 3), "sdpa/math": (2.5, 4), "numpy/naive": (6, 8)}
_SLACK = 128 * MIB  # working space of kernels and tiles that does not grow with the length


def _untiled(case: Case, which: Pass) -> Cost:
    return cost.naive_backward(case.shape) if which == "backward" else cost.naive(case.shape)


def _eager(case: Case, which: Pass) -> Cost:
    masked = case.is_masked or case.alibi
    if which == "backward":
        return cost.naive_backward(case.shape)
    return cost.eager(case.shape, scale=True, mask=masked, dropout=False)


def _tiled(case: Case, which: Pass) -> Cost:
    return cost.tiled_backward_best(case.shape) if which == "backward" else cost.tiled_best(case.shape)


def _tilewise_cost(backend: str, case: Case, which: Pass) -> Cost:
    tiles = plan(case, which, backend).tiles
    if tiles is None:
        return _tiled(case, which)
    count = cost.tiled_backward_best if which == "backward" else cost.tiled_best
    return count(case.shape, tiles.block_q, tiles.block_kv)


def _linear_need(case: Case, which: Pass) -> int:
    """Results, gradients, and sums of either in a wider type."""
    return (2 if which == "forward" else 4) * case.input_bytes + _SLACK


def _untiled_need(name: str, case: Case, which: Pass) -> int:
    matrix = case.length**2 * max(case.itemsize, 4 if name != "naive" else 0)
    heads = 1 if name == "numpy/naive" else case.batch * case.heads_q
    held = _MATRICES[name][which == "backward"] * heads
    return math.ceil(held * matrix) + case.length**2 * case.is_masked + _linear_need(case, which)


def _no_dense(case: Case) -> int:
    """Need no dense matrix."""
    return 0


def _naive_dense(case: Case) -> int:
    return _sdpa_dense(case) if case.alibi else case.length**2 * case.is_masked


def _sdpa_dense(case: Case) -> int:
    """Give the bytes of the dense matrix that SDPA needs in place of a band, a bias or padding, as it is made."""
    if case.window is None and not case.alibi and case.kv_stop is None:
        return 0
    return case.length**2 * ((case.heads_q if case.alibi else 1) * case.itemsize + 1 + (8 if case.alibi else 0))


# ---- the list -------------------------------------------------------------------------------------------------------


def plan(case: Case, which: Pass, backend: str | None = None, *, return_lse: bool = False) -> Plan:
    """Plan a case's call without its data: the tensors made here are one row, repeated without being copied."""
    row = torch.empty(case.dim, dtype=getattr(torch, case.dtype), device=case.device)
    q = row.expand(case.batch, case.heads_q, case.length, case.dim)
    k = row.expand(case.batch, case.heads_kv, case.length, case.dim)
    if which == "backward":
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    inputs = Inputs(q, k, k, q, case.slopes() if case.alibi else None)
    told = api.explain(api.attention, q, k, k, **_options(case, inputs), return_lse=return_lse, backend="torch_tiled")
    # The data will lie in order, which some backends ask for.
    specs = {
        name: spec._replace(strides=contiguous(spec.shape)[1]) if name in ("q", "k", "v") else spec
        for name, spec in told.problem.specs.items()
    }
    return dispatch.plan(replace(told.problem, specs=specs), backend)


def _sdpa_absent(backend: SDPBackend, case: Case, which: Pass) -> str | None:
    """Try the call at a small length, since PyTorch tells by no other way what it would refuse."""
    if case.window is not None or case.alibi or case.kv_stop is not None:
        small = replace(case, length=16, kv_stop=None if case.kv_stop is None else 16)
    else:
        small = replace(case, length=16)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            inputs = small.inputs(0)
            run = _sdpa_prepare(backend, small, inputs)
            with run.active():
                run.outcome(inputs.d_out if which == "backward" else None)
        except (RuntimeError, NotImplementedError) as error:
            reasons = [str(warning.message).partition(" (Triggered")[0] for warning in told]
            # PyTorch names each kernel, and those that were switched off here, before it comes to the reason.
            reason = next((text for text in reasons if "not used because" not in text and "disabled" not in text), None)
            return " ".join((reason or str(error)).split()).partition(". ")[0]
    return None


def _tilewise_absent(backend: str, case: Case, which: Pass) -> str | None:
    return dispatch.load(backend).why_not(plan(case, which, "torch_tiled").problem)


def implementations() -> tuple[Implementation, ...]:
    """List every implementation known, in the order in which tables show them."""
    sdpa = (
        ("sdpa/flash", SDPBackend.FLASH_ATTENTION),
        ("sdpa/efficient", SDPBackend.EFFICIENT_ATTENTION),
        ("sdpa/cudnn", SDPBackend.CUDNN_ATTENTION),
        ("sdpa/math", SDPBackend.MATH),
    )
    naive_need = partial(_untiled_need, "naive")
    listed = [Implementation("naive", _never_absent, _naive_prepare, _untiled, naive_need, _naive_dense)]
    for name, kernel in sdpa:
        listed.append(
            Implementation(
                name,
                partial(_sdpa_absent, kernel),
                partial(_sdpa_prepare, kernel),
                _eager if kernel == SDPBackend.MATH else _tiled,
                partial(_untiled_need, name) if kernel == SDPBackend.MATH else _linear_need,
                _sdpa_dense,
            )
        )
    listed += [
        Implementation(
            f"tilewise/{name}",
            partial(_tilewise_absent, name),
            partial(_tilewise_prepare, name),
            partial(_tilewise_cost, name),
            _linear_need,
            _no_dense,
        )
        for name in dispatch.BACKENDS
    ]
    for name, tiled in (("numpy/naive", False), ("numpy/tiled", True)):
        listed.append(
            Implementation(
                name,
                _numpy_absent,
                partial(_numpy_prepare, tiled),
                _tiled if tiled else _untiled,
                _linear_need if tiled else partial(_untiled_need, name),
                _no_dense,
                meter="numpy",
                slowness=12.0,
            )
        )
    return tuple(listed)


def _never_absent(case: Case, which: Pass) -> None:
    """Serve everything."""


def _numpy_prepare(tiled: bool, case: Case, inputs: Inputs) -> NumpyRun:
    return NumpyRun(case, inputs, tiled)
