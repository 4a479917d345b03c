"""Recording what a user's function computes, as a graph of single values, and running such a graph on tensors.

The function runs on single values: fake tensors without axes for the score and the positions, and one more for each
number that its closure holds. What it reads from a tensor becomes an input of its own, a load, whose indices are kept
as further results. The graph that torch's make_fx records of this is elementwise throughout, so it means the same for
tiles; and with loads as inputs, torch's own differentiation gives the derivatives that the gradients of tensors are
sums of.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from tilewise.mods.capture import Function, Number, fits_int32, is_number, rebuild
from tilewise.mods.values import Refusal, operation_name

Index: TypeAlias = "torch.Tensor | int"
Results: TypeAlias = "tuple[object, list[object], list[list[object]]]"
PLACES = {"score": ("score", "batch", "head", "q_pos", "kv_pos"), "mask": ("batch", "head", "q_pos", "kv_pos")}


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """Give the type in which loaded values are used: float32, int32, int64 or bool."""
    if dtype.is_floating_point:
        return torch.float32
    if dtype in (torch.bool, torch.int64):
        return dtype
    if dtype in (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16):
        return torch.int32
    raise Refusal(f"reads a tensor of {dtype}; convert it to float32, int32, int64 or bool")


@dataclass(frozen=True)
class Load:
    """A place in a function where it reads an element of a tensor."""

    tensor: int  # which one
    indices: tuple[Index, ...]


# ---- what a function meets in place of its tensors ----


class Row:
    """A tensor of which the first axes have been indexed: ``table[i]`` in ``table[i][j]``."""

    def __init__(self, loads: Loads, tensor: torch.Tensor, indices: tuple[object, ...]) -> None:
        self._loads, self._tensor, self._indices = loads, tensor, indices

    def __getitem__(self, index: object) -> object:
        size = self._tensor.shape[len(self._indices)]
        if isinstance(index, int) and index >= size:
            self._loads.reads_shapes = True
            raise IndexError(index)  # which ends `start, stop = row`
        return self._loads.element(self._tensor, (*self._indices, *_tuple(index)))

    def __getattr__(self, name: str) -> object:
        raise Refusal(self._complaint())

    @classmethod
    def __torch_function__(
        cls, function: Function, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        raise Refusal("computes with a row of a tensor; index all of its axes, so that a single value remains")

    def _complaint(self) -> str:
        shape = tuple(self._tensor.shape)
        return (
            f"uses {len(self._indices)} of the {len(shape)} indices of a tensor of shape {shape}; index all of its axes"
        )


class Loads(TorchFunctionMode):
    """Turns what a function reads from tensors into loads; every real tensor that it meets is one to read from."""

    def __init__(self, tensors: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.tensors = list(tensors)
        self.sites: list[Load] = []
        self.leaves = list(leaves or ())
        self.reads_shapes = False
        self._made = leaves is None
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def __torch_function__(
        self, function: Function, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if function is torch.Tensor.__getitem__:
            if not is_captured(args[0]):
                raise Refusal("indexes a value that belongs to one pair; only captured tensors have axes")
            return self.element(args[0], _tuple(args[1]))  # type: ignore[arg-type]
        name = getattr(function, "__name__", "")
        if name == "__get__":  # .shape, .dtype, .device
            name = getattr(getattr(function, "__self__", None), "__name__", "shape")
        if name in METADATA:
            self.reads_shapes |= METADATA[name] and is_captured(args[0])
            return function(*args, **kwargs)
        if name in VALUES and is_captured(args[0]):
            raise Refusal(f"reads the values of a tensor on the host, with {name}; index the tensor instead")
        args = tuple(self.single(value) for value in args)
        kwargs = {key: self.single(value) for key, value in kwargs.items()}
        if name in {"clamp", "clip"} and any(
            isinstance(bound, torch.Tensor) for bound in (*args[1:], *kwargs.values())
        ):
            # Torch takes two numbers or two tensors; a captured number is a tensor here, and one in the code is none.
            args = tuple(torch.as_tensor(bound) if is_number(bound) else bound for bound in args)
            kwargs = {key: torch.as_tensor(bound) if is_number(bound) else bound for key, bound in kwargs.items()}
        return function(*args, **kwargs)

    def single(self, value: object) -> object:
        """Load a tensor without axes; other values stay as they are."""
        if not is_captured(value):
            return value
        if value.dim() > 0:  # type: ignore[attr-defined]
            shape = tuple(value.shape)  # type: ignore[attr-defined]
            raise Refusal(f"computes with a whole tensor of shape {shape}; index it by batch, head, q_pos or kv_pos")
        return self.element(value, ())  # type: ignore[arg-type]

    def element(self, tensor: torch.Tensor, indices: tuple[object, ...]) -> object:
        """Load one element, or wait for further indices."""
        if len(indices) < tensor.dim():
            return Row(self, tensor, indices)
        if len(indices) > tensor.dim():
            raise Refusal(f"uses {len(indices)} indices on a tensor of shape {tuple(tensor.shape)}")
        found = tuple(self.index(index) for index in indices)
        place = next((n for n, known in enumerate(self.tensors) if known is tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
        key = (place, *(index if isinstance(index, int) else -id(index) for index in found))
        if key not in self._known:
            if self._made:
                self.leaves.append(torch.empty((), dtype=compute_type(tensor.dtype)))
            self._known[key] = self.leaves[len(self.sites)]
            self.sites.append(Load(place, found))
        return self._known[key]

    def index(self, index: object) -> Index:
        """Give one index as a number or a value of the graph."""
        index = self.single(index)
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            return int(index)
        if not isinstance(index, torch.Tensor) or index.dtype.is_floating_point or index.dtype is torch.bool:
            what = index.dtype if isinstance(index, torch.Tensor) else repr(index)
            raise Refusal(f"indexes a tensor by {what}; an index is one integer for each axis")
        return index


# What may be asked of a whole tensor, and whether the answer depends on its shape.
METADATA = {
    **dict.fromkeys(("shape", "size", "numel", "nelement", "__len__"), True),
    **dict.fromkeys(("dtype", "device", "ndim", "dim", "ndimension", "is_floating_point", "element_size"), False),
}
VALUES = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "__array__"}


def is_captured(value: object) -> bool:
    """Say whether a value is a tensor from outside the trace; inside it, all are fake and without axes."""
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def _tuple(index: object) -> tuple[object, ...]:
    return index if isinstance(index, tuple) else (index,)


# ---- recording ----


@dataclass
class Recorded:
    """A function's graph. It holds none of the tensors that it was recorded with: translations are kept for long.

    Inputs: score and positions, constants, loads, and for a gradient d_score. Results: see `results`.
    """

    graph: fx.GraphModule
    numbers: int  # constants among the inputs
    loads: tuple[int, ...]  # of each load: which tensor it reads
    dtypes: tuple[torch.dtype, ...]  # of the tensors: given, then captured
    ranks: tuple[int, ...]
    reads_shapes: bool

    @property
    def inputs(self) -> list[fx.Node]:
        """The graph's inputs, in order."""
        return [node for node in self.graph.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> Results:
        """The value, its derivatives with respect to the score and the loads, and of each load its indices."""
        (output,) = (node for node in self.graph.graph.nodes if node.op == "output")
        results: Results = output.args[0]
        return results


def record(
    kind: str, function: Function, given: Sequence[torch.Tensor], numbers: Sequence[Number], gradient: bool
) -> tuple[Recorded, tuple[torch.Tensor, ...]]:
    """Record a function, or its gradient, and list the tensors that it reads.

    ``numbers`` are those of its closure, which become inputs; without them they stay in it.
    """
    count = len(PLACES[kind])

    def call(values: Sequence[object], loads: Loads) -> object:
        waiting = iter(values[count:])
        changed = rebuild(function, lambda _: next(waiting)) if numbers else function
        with loads:
            return loads.single(changed(*values[:count], *given))

    with FakeTensorMode():
        first = Loads(given)
        call(samples(kind, numbers), first)

    def traced(*values: torch.Tensor) -> Results:
        own, leaves = list(values[: count + len(numbers)]), list(values[count + len(numbers) : len(values) - gradient])
        if gradient:
            wanted = [own[0].detach().requires_grad_()]
            wanted += [leaf.detach().requires_grad_(leaf.is_floating_point()) for leaf in leaves]
            own[0], *leaves = (leaf.clone() for leaf in wanted)  # which the function may change in place
        loads = Loads(given, leaves)
        value = call(own, loads)
        derivatives = differentiate(value, wanted, values[-1]) if gradient else []
        return value, derivatives, [list(load.indices) for load in loads.sites]

    samples_in = [*samples(kind, numbers), *(torch.empty((), dtype=leaf.dtype) for leaf in first.leaves)]
    if gradient:
        samples_in.append(torch.zeros(()))
    graph = make_fx(traced, tracing_mode="fake", decomposition_table=decompositions())(*samples_in)
    if any(node.op == "call_function" and operation_name(node).endswith("_") for node in graph.graph.nodes):
        graph = make_fx(torch.func.functionalize(graph), tracing_mode="fake")(*samples_in)  # nothing changes in place
    tensors = tuple(first.tensors)
    dtypes, ranks = tuple(tensor.dtype for tensor in tensors), tuple(tensor.dim() for tensor in tensors)
    loads = tuple(load.tensor for load in first.sites)
    return Recorded(graph, len(numbers), loads, dtypes, ranks, first.reads_shapes), tensors


def nobody_watching() -> ExitStack:
    """Hold off what the caller has switched on, such as inference mode or a transform: a translation serves all."""
    stack = ExitStack()
    for state in (
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        stack.enter_context(state)
    return stack


def samples(kind: str, numbers: Sequence[Number]) -> list[torch.Tensor]:
    """Make values of the types that a function meets: a score, positions, and the numbers of its closure."""
    score = [torch.zeros((), dtype=torch.float32)] if kind == "score" else []
    positions = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    return [*score, *positions, *(torch.zeros((), dtype=number_type(number)) for number in numbers)]


def number_type(number: Number) -> torch.dtype:
    """Give the type in which a captured number reaches the kernels."""
    if isinstance(number, float):
        return torch.float32
    return torch.int32 if fits_int32(number) else torch.int64


def differentiate(value: object, inputs: list[torch.Tensor], d_value: torch.Tensor) -> list[object]:
    """Give the derivative with respect to each input, None where there is none."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return [None] * len(inputs)
    wanted = [n for n, leaf in enumerate(inputs) if leaf.requires_grad]
    found = torch.autograd.grad(value.to(d_value.dtype), [inputs[n] for n in wanted], d_value, allow_unused=True)
    by_place = dict(zip(wanted, found, strict=True))
    return [by_place.get(n) for n in range(len(inputs))]


@functools.cache
def decompositions() -> dict[torch._ops.OpOverload, Function]:
    """What torch breaks into simpler operations for us: activations and the backward formulas."""
    aten = torch.ops.aten
    further = (
        aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward, aten.tanh_backward, aten.sigmoid_backward,
        aten.softplus, aten.softplus_backward, aten.elu, aten.elu_backward, aten.leaky_relu, aten.leaky_relu_backward,
        aten.threshold_backward, aten.hardtanh, aten.hardtanh_backward, aten.hardsigmoid, aten.hardswish, aten.mish,
        aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.addcmul, aten.addcdiv, aten.lerp,
    )  # fmt: skip
    table: dict[torch._ops.OpOverload, Function] = {}
    table.update(core_aten_decompositions())
    table.update(get_decompositions(further))  # type: ignore[arg-type]  # the keys are overloads all
    table.pop(aten.detach.default, None)  # into an alias, through which gradients would flow where torch runs the graph
    return table


# ---- running ----


def runnable(kind: str, recorded: Recorded, wide: bool, device: torch.device) -> fx.GraphModule:
    """Make of a graph one that loads for itself: (score and positions, constants, tensors) -> value.

    If ``wide``, what the function made float32 is float64. What it made of numbers comes to the device.
    """
    count = len(PLACES[kind]) + recorded.numbers
    value, _, indices = recorded.results
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in recorded.inputs[:count]}
    tensors = [graph.placeholder(f"tensor_{n}") for n in range(len(recorded.dtypes))]
    leaves = dict(zip(recorded.inputs[count:], zip(recorded.loads, indices, strict=True), strict=True))

    def of(node: fx.Node) -> fx.Node:
        if node not in made:
            if node in leaves:
                tensor, places = leaves[node]
                found = [of(at) if isinstance(at, fx.Node) else at for at in places]
                made[node] = graph.call_function(load_element, (tensors[tensor], found))  # type: ignore[arg-type]
            else:
                made[node] = graph.node_copy(node, of)
        return made[node]

    graph.output(of(value) if isinstance(value, fx.Node) else value)  # type: ignore[arg-type]
    changes: dict[object, object] = {torch.device("cpu"): device}
    if wide:
        changes[torch.float32] = torch.float64

    def changed(argument: fx.node.Argument) -> fx.node.Argument:
        is_name = isinstance(argument, (torch.device, torch.dtype))
        return changes.get(argument, argument) if is_name else argument  # type: ignore[return-value]

    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), changed)
    return fx.GraphModule(recorded.graph, graph)


def load_element(tensor: torch.Tensor, indices: Sequence[Index]) -> torch.Tensor:
    """Read elements as the kernels do: indices count from the end if negative, and are clamped to the tensor."""
    value = tensor
    if indices:
        places = []
        for size, index in zip(tensor.shape, indices, strict=True):
            place = torch.as_tensor(index, device=tensor.device).long()
            places.append(torch.where(place < 0, place + size, place).clamp(0, size - 1))
        value = tensor[tuple(places)]
    used = compute_type(tensor.dtype)
    return value if tensor.dtype is torch.float64 else value.to(used)
