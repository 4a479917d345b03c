"""What a kernel in Gluon computes with, on NumPy: tensors with a dtype, pointers, and the functions on them.

float16, bfloat16 and float8 (e4m3) are kept as float32 that has been rounded. Integers keep to their width: what does
not fit raises instead of wrapping, and ``//`` and ``%`` truncate as on the GPU. Layouts are carried, never interpreted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl

DType = Any  # Triton's dtype: the package ships no types
Array = np.ndarray

INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8)
STORED = {
    "int1": np.bool_, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64, "uint8": np.uint8,
    "fp8e4nv": np.float32, "fp16": np.float32, "bf16": np.float32, "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip
LIMITS = {name: (int(np.iinfo(kind).min), int(np.iinfo(kind).max)) for name, kind in STORED.items() if kind in INTEGERS}
OF_TORCH = {
    torch.bool: gl.int1, torch.int8: gl.int8, torch.int32: gl.int32, torch.int64: gl.int64, torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16, torch.float32: gl.float32, torch.float64: gl.float64,
    torch.float8_e4m3fn: gl.float8e4nv,
}  # fmt: skip
TO_TORCH = {dtype.name: of for of, dtype in OF_TORCH.items()}


def rounded(data: Array, dtype: DType) -> Array:
    """Bring numbers to a dtype: floats are rounded to it, integers must fit."""
    kind = STORED[dtype.name]
    if dtype.name in ("fp8e4nv", "fp16", "bf16"):
        exact = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
        return np.asarray(exact.to(TO_TORCH[dtype.name]).float().numpy()).reshape(data.shape)
    if data.dtype == kind:
        return data
    if data.dtype.kind == "i" and dtype.name in LIMITS and data.size:
        least, most = LIMITS[dtype.name]
        if data.min() < least or data.max() > most:
            raise OverflowError(f"{data} does not fit {dtype.name}: widen the operands with .to(gl.int64) first")
    return data.astype(kind)


def promoted(a: Tensor, b: Tensor, a_weak: bool, b_weak: bool) -> DType:
    """Find the dtype of ``a + b``; a weak operand, a number of Python's, takes the other's if that is of its kind."""
    if a_weak != b_weak:
        strong, weak = (b, a) if a_weak else (a, b)
        if weak.rank <= strong.rank:
            return strong.dtype
    if a.rank != b.rank:
        return a.dtype if a.rank > b.rank else b.dtype
    if {a.dtype.name, b.dtype.name} == {"fp16", "bf16"}:
        return gl.float32
    return a.dtype if a.dtype.primitive_bitwidth >= b.dtype.primitive_bitwidth else b.dtype


def truncated(a: Array, b: Array) -> Array:
    if np.any(b == 0):
        raise ZeroDivisionError("an integer of the kernel is divided by 0")
    quotient = np.floor_divide(a, b)
    return np.asarray(quotient + ((quotient < 0) & (quotient * b != a)))


Operator = Callable[[Any, Any], Any]


def both_ways(function: Callable[[Array, Array], Array]) -> tuple[Operator, Operator]:
    """Make an operator, and its reflection, of what it does to arrays of one dtype."""

    def apply(x: Any, y: Any) -> Any:
        if isinstance(x, Pointer) or isinstance(y, Pointer):
            return NotImplemented
        a, b, dtype, layout = operands(x, y)
        if function is np.divide and not dtype.is_floating():
            a, b, dtype = a.astype(np.float32), b.astype(np.float32), gl.float32
        elif dtype.is_int() and dtype.name != "int1":
            a, b = a.astype(np.int64), b.astype(np.int64)
        return Tensor(function(a, b), dtype, layout)

    return apply, lambda x, y: apply(y, x)


def compared(function: Callable[[Array, Array], Array]) -> Operator:
    """Make a comparison of what it does to arrays of one dtype."""

    def apply(x: Any, y: Any) -> Any:
        if y is None:
            return NotImplemented
        a, b, _, layout = operands(x, y)
        return Tensor(function(a, b), gl.int1, layout)

    return apply


class Tensor:
    """A tensor of the kernel, or a scalar, which is one without axes. Nothing ever changes it."""

    def __init__(self, data: Array, dtype: DType, layout: object = None) -> None:
        self.data = rounded(np.asarray(data), dtype)
        self.dtype, self.layout = dtype, layout

    @property
    def type(self) -> Tensor:
        return self  # x.type.layout, x.type.shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def numel(self) -> int:
        return int(self.data.size)

    @property
    def rank(self) -> int:
        """Order kinds: bool, integer, float."""
        return 2 if self.dtype.is_floating() else int(self.dtype.name != "int1")

    def like(self, data: Array, layout: object = None) -> Tensor:
        return Tensor(data, self.dtype, layout)

    def to(self, dtype: DType, bitcast: bool = False, **_: object) -> Tensor:
        data = self.data
        if bitcast:  # between float32 and int32 alone
            here, there = (np.float32, np.int32) if self.dtype.is_floating() else (np.int32, np.float32)
            data = data.astype(here).view(there)
        elif dtype.is_int() and self.rank == 2:
            data = np.trunc(data).astype(np.int64)
        if dtype.name == "int1":
            data = data != 0
        return Tensor(data, dtype, self.layout)

    def __getitem__(self, index: object) -> Tensor:
        places = index if isinstance(index, tuple) else (index,)
        if any(place is not None and place != slice(None) for place in places):
            raise TypeError(f"a tensor is indexed with None and : alone; got {index}")
        layout = None
        if isinstance(self.layout, gl.SliceLayout) and [i for i, x in enumerate(places) if x is None] == [
            self.layout.dim
        ]:
            layout = self.layout.parent
        return self.like(self.data[places], layout)

    def reshape(self, *shape: Any) -> Tensor:
        return self.like(self.data.reshape(_sizes(shape)))

    def permute(self, *order: Any) -> Tensor:
        return self.like(self.data.transpose(_sizes(order)))

    def trans(self, *order: Any) -> Tensor:
        return self.like(self.data.transpose(_sizes(order) if order else (1, 0)))

    def broadcast_to(self, *shape: Any) -> Tensor:
        return self.like(np.broadcast_to(self.data, _sizes(shape)), self.layout)

    def __bool__(self) -> bool:
        if self.data.ndim:
            raise TypeError(f"a tensor of shape {self.shape} is neither true nor false; only scalars are")
        return bool(self.data)

    def __index__(self) -> int:
        if self.data.ndim or self.rank == 2:
            raise TypeError(f"a tensor of shape {self.shape} and type {self.dtype} is no integer")
        return int(self.data)

    def __float__(self) -> float:
        return float(self.data)

    def __neg__(self) -> Tensor:
        return self.like(-self.data, self.layout)

    def __invert__(self) -> Tensor:
        return self.like(~self.data, self.layout)

    __add__, __radd__ = both_ways(np.add)
    __sub__, __rsub__ = both_ways(np.subtract)
    __mul__, __rmul__ = both_ways(np.multiply)
    __truediv__, __rtruediv__ = both_ways(np.divide)
    __floordiv__, __rfloordiv__ = both_ways(truncated)
    __mod__, __rmod__ = both_ways(lambda a, b: a - truncated(a, b) * b)
    __lshift__, __rlshift__ = both_ways(np.left_shift)
    __rshift__, __rrshift__ = both_ways(np.right_shift)
    __and__, __rand__ = both_ways(np.bitwise_and)
    __or__, __ror__ = both_ways(np.bitwise_or)
    __xor__, __rxor__ = both_ways(np.bitwise_xor)
    __lt__, __le__, __gt__, __ge__ = map(compared, (np.less, np.less_equal, np.greater, np.greater_equal))
    __eq__ = compared(np.equal)  # element by element
    __ne__ = compared(np.not_equal)
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.data} ({self.dtype})" if self.data.ndim == 0 else f"<{self.dtype} {list(self.shape)}>"


def _sizes(shape: Sequence[Any]) -> tuple[int, ...]:
    listed = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
    return tuple(int(size) for size in listed)


def tensor(value: Any) -> Tensor:
    """Take a number of Python's as Triton does: int32 if it fits, else int64; float32."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | np.bool_):
        return Tensor(np.asarray(value), gl.int1)
    if isinstance(value, int | np.integer):
        return Tensor(np.asarray(value), gl.int32 if -(2**31) <= value < 2**31 else gl.int64)
    if isinstance(value, float):
        return Tensor(np.asarray(value, dtype=np.float32), gl.float32)
    raise TypeError(f"a kernel has tensors, numbers and pointers; got {value!r}")


def operands(x: Any, y: Any) -> tuple[Array, Array, DType, object]:
    """Bring two operands to one dtype; gives that and the layout of the result too."""
    a, b = tensor(x), tensor(y)
    dtype = promoted(a, b, not isinstance(x, Tensor), not isinstance(y, Tensor))
    layout = a.layout if a.layout is not None else b.layout
    return rounded(a.data, dtype), rounded(b.data, dtype), dtype, layout


class Pointer:
    """Addresses in one torch tensor's memory, counted in its elements from its first; nothing else may be touched."""

    def __init__(self, memory: torch.Tensor, offset: Array, name: str) -> None:
        self.memory, self.offset, self.name = memory, offset, name

    @classmethod
    def to(cls, whole: torch.Tensor, name: str) -> Pointer:
        return cls(memory_of(whole), np.asarray(0, dtype=np.int64), name)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=OF_TORCH[self.memory.dtype])

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + tensor(other).data.astype(np.int64), self.name)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset - tensor(other).data.astype(np.int64), self.name)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.offset[index], self.name)

    def reached(self, mask: Any, more: Array) -> tuple[Array, Array]:
        """Give the mask and the offsets, broadcast against each other; no offset under the mask may lie outside."""
        enabled = np.asarray(True) if mask is None else tensor(mask).data
        enabled, offset, _ = np.broadcast_arrays(enabled, self.offset, more)
        used = offset[enabled]
        if used.size and (used.min() < 0 or used.max() >= self.memory.numel()):
            raise IndexError(
                f"{self.name} has {self.memory.numel()} elements; the kernel touches {used.min()} to {used.max()}"
            )
        return enabled, offset


def memory_of(whole: torch.Tensor) -> torch.Tensor:
    """See the memory that a tensor spans, from its first element to its last, on one axis."""
    span = 0 if whole.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(whole.shape, whole.stride(), strict=True))
    return whole.as_strided((span,), (1,))


def to_numpy(values: torch.Tensor) -> Array:
    narrow = values.dtype in (torch.float8_e4m3fn, torch.float16, torch.bfloat16)
    return np.asarray((values.float() if narrow else values).numpy())


# ---- the functions of the language ----------------------------------------------------------------------------------


def load(pointer: Pointer, mask: Any = None, other: Any = None, **_: object) -> Tensor:
    """Read; where the mask is off and ``other`` not given, nothing is known: NaN, or an odd integer."""
    enabled, offset = pointer.reached(mask, np.asarray(0) if other is None else tensor(other).data)
    dtype = pointer.dtype.element_ty
    data = poison(offset.shape, dtype) if other is None else np.broadcast_to(tensor(other).data, offset.shape).copy()
    data = np.asarray(data).astype(STORED[dtype.name])
    data[enabled] = to_numpy(pointer.memory[torch.from_numpy(offset[enabled].reshape(-1))]).reshape(-1)
    return Tensor(data, dtype)


def store(pointer: Pointer, value: Any, mask: Any = None, **_: object) -> None:
    """Write where the mask is on."""
    whole = tensor(value).to(pointer.dtype.element_ty).data
    enabled, offset = pointer.reached(mask, whole)
    values = np.broadcast_to(whole, offset.shape)[enabled].reshape(-1)
    places = torch.from_numpy(offset[enabled].reshape(-1))
    pointer.memory[places] = torch.from_numpy(values.copy()).to(pointer.memory.dtype)


def poison(shape: Sequence[int], dtype: DType) -> Array:
    """Give what memory holds before anything is written to it."""
    return np.full(shape, np.nan if dtype.is_floating() else 85, dtype=STORED[dtype.name])


def where(condition: Any, x: Any, y: Any) -> Tensor:
    a, b, dtype, layout = operands(x, y)
    chosen = tensor(condition)
    return Tensor(np.where(chosen.data, a, b), dtype, chosen.layout if layout is None else layout)


def elementwise(function: Callable[..., Array]) -> Callable[..., Tensor]:
    def apply(x: Any, **_: object) -> Tensor:
        x = tensor(x)
        return Tensor(function(x.data), x.dtype if x.rank == 2 or function is np.abs else gl.float32, x.layout)

    return apply


def paired(function: Callable[[Array, Array], Array]) -> Callable[..., Tensor]:
    def apply(x: Any, y: Any, **_: object) -> Tensor:
        a, b, dtype, layout = operands(x, y)
        return Tensor(function(a, b), dtype, layout)

    return apply


def reduction(function: Callable[..., Array]) -> Callable[..., Tensor]:
    def apply(x: Tensor, axis: int | None = None, keep_dims: bool = False) -> Tensor:
        data = function(x.data, axis=axis, keepdims=keep_dims)
        layout = None if axis is None or keep_dims else gl.SliceLayout(axis, x.layout)
        return Tensor(data, gl.int32 if x.dtype.name == "int1" else x.dtype, layout)

    return apply


def full(shape: Sequence[int], value: Any, dtype: DType, layout: object = None) -> Tensor:
    return Tensor(np.full(_sizes((list(shape),)), tensor(value).data), dtype, layout)


def loop(*bounds: Any) -> Iterator[Tensor]:
    """Count as ``range`` in a kernel does: by scalars of int32."""
    return (tensor(value) for value in range(*(int(tensor(bound)) for bound in bounds)))


def same_shape(x: Tensor, layout: object, assert_trivial: bool = False) -> Tensor:
    """convert_layout: which thread holds what is nothing to NumPy."""
    return Tensor(x.data, x.dtype, layout)


def join(x: Tensor, y: Tensor) -> Tensor:
    return x.like(np.stack([x.data, y.data], axis=-1))


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[-1] != 2:
        raise ValueError(f"split parts an axis of 2; got {x!r}")
    return x.like(x.data[..., 0]), x.like(x.data[..., 1])


def refuse(*_: object, **__: object) -> None:
    raise NotImplementedError("inline assembly belongs in kernels/gluon/sync.py, whose functions are emulated by name")


def static_assert(condition: object, message: str = "") -> None:
    if not condition:
        raise ValueError(f"static_assert: {message}")


FUNCTIONS: dict[str, Any] = {
    "load": load, "store": store, "where": where, "full": full, "convert_layout": same_shape, "to_tensor": tensor,
    "exp2": elementwise(np.exp2), "log2": elementwise(np.log2), "exp": elementwise(np.exp), "log": elementwise(np.log),
    "sqrt": elementwise(np.sqrt), "rsqrt": elementwise(lambda x: 1 / np.sqrt(x)), "abs": elementwise(np.abs),
    "floor": elementwise(np.floor),
    "maximum": paired(np.fmax), "minimum": paired(np.fmin), "fma": lambda x, y, z: x * y + z,
    "max": reduction(np.fmax.reduce), "min": reduction(np.fmin.reduce), "sum": reduction(np.sum),
    "cdiv": lambda x, y: (x + (y - 1)) // y,
    "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype, layout),
    "zeros_like": lambda x: full(x.shape, 0, x.dtype, x.layout),
    "full_like": lambda x, value: full(x.shape, value, x.dtype, x.layout),
    "arange": lambda start, stop, layout=None: Tensor(np.arange(int(start), int(stop)), gl.int32, layout),
    "expand_dims": lambda x, axis: x.like(np.expand_dims(x.data, axis)),
    "reshape": lambda x, shape: x.reshape(shape), "permute": lambda x, order: x.permute(order),
    "broadcast_to": lambda x, shape: x.broadcast_to(shape), "cast": lambda x, dtype: x.to(dtype),
    "join": join, "split": split,
    "static_range": range, "static_assert": static_assert, "multiple_of": lambda x, _: x, "assume": lambda _: None,
    "constexpr": lambda value: value, "inline_asm_elementwise": refuse, "inf": math.inf,
}  # fmt: skip
