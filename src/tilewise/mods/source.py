"""From a traced graph of elementwise operations to the source text of a function for Triton.

Each operation of the graph becomes one line. Positions come with an axis of size 1 each, so that what depends on the
query alone stays a column, what depends on the key alone a row, and only what needs both is computed for each pair.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import operator
from dataclasses import dataclass, field
from types import FunctionType
from typing import NamedTuple

import torch
from torch import fx

from tilewise.mods.graph import compute_type
from tilewise.mods.operations import OPERATIONS
from tilewise.mods.values import Refusal, Value, cast, literal, operation_name

FEW = 16  # elements of a tensor that a tile adds to one by one, rather than each pair for itself
WHERE_FROM = {"score": {"q", "kv", "score"}, "q_pos": {"q"}, "kv_pos": {"kv"}}


class Term(NamedTuple):
    """One index of a load: its text, the stride that it is multiplied by, and what it varies with."""

    place: str
    stride: str
    depends: frozenset[str]


@dataclass
class Writer:
    """Writes the lines that the outputs of one graph need, in the order in which they need each other."""

    loads: tuple[int, ...]  # of each load: which tensor
    dtypes: tuple[torch.dtype, ...]  # of the tensors
    values: dict[fx.Node, Value]  # what stands for each input of the graph
    leaves: dict[fx.Node, int]  # the inputs that are loads
    indices: list[list[object]]  # of each load, as outputs of the graph
    lift: list[int | float] | None = None  # collects numbers of the graph that become runtime constants
    lines: list[str] = field(default_factory=list)
    pointers: dict[int, tuple[str, frozenset[str]]] = field(default_factory=dict)

    def value(self, node: object) -> Value:
        """Give what stands for a node or a number, after writing what it needs."""
        if not isinstance(node, fx.Node):
            return self.number(node)
        if node not in self.values:
            self.values[node] = self.load(self.leaves[node]) if node in self.leaves else self.operation(node)
        return self.values[node]

    def number(self, number: object) -> Value:
        """Give a number of the graph: as it stands, or as a runtime constant."""
        if not isinstance(number, (bool, int, float)):
            raise Refusal(f"uses {number!r} as a value")
        if self.lift is None or isinstance(number, bool):
            return literal(number)
        self.lift.append(number)
        text = f"constants[{len(self.lift) - 1}]"
        return Value(text, literal(number).dtype, frozenset(), number >= 0, None, lambda: number)

    def assign(self, name: str, value: Value) -> Value:
        """Write a line that names a value."""
        self.lines.append(f"{name} = {value.text}")
        return Value(name, value.dtype, value.depends, value.natural, value.number)

    def operation(self, node: fx.Node) -> Value:
        """Write an operation."""
        if node.op == "get_attr":
            return self.attribute(node)
        name = operation_name(node)
        write = OPERATIONS.get(name)
        if write is None:
            raise Refusal(f"uses {name}, which has no translation for the kernels")
        meaning = node.meta["val"]
        if meaning.dim() != 0:
            raise Refusal(
                f"makes a tensor of shape {tuple(meaning.shape)} with {name}, where every value belongs to one pair of "
                "query and key"
            )
        made = write(self.value, node)
        if made.number is not None or made.text.isidentifier():
            return made
        return self.assign(f"x{len(self.lines)}", made)

    def attribute(self, node: fx.Node) -> Value:
        """Give the number of a tensor that the function made of it, such as torch.tensor(0.5)."""
        held = operator.attrgetter(str(node.target))(node.graph.owning_module)
        held = getattr(held, "constant", None) if hasattr(held, "fake_mode") else held
        if held is None or held.dim() != 0:
            raise Refusal("makes a tensor of more than one number")
        return self.number(held.item())

    def load(self, site: int) -> Value:
        """Write a load."""
        stored = self.dtypes[self.loads[site]]
        used = compute_type(stored)
        pointer, depends = self.pointer(site)
        text = f"tl.load({pointer})"
        if used is torch.bool:
            text = f"{text} != 0"
        elif used is not stored:
            text = f"tl.cast({text}, tl.{str(used).removeprefix('torch.')})"
        return self.assign(f"load_{site}", Value(text, used, depends, not stored.is_signed, None))

    def pointer(self, site: int) -> tuple[str, frozenset[str]]:
        """Point at the element that a load reads."""
        if site not in self.pointers:
            tensor = self.loads[site]
            offset, depends = self.offset(site, tensor)
            self.lines.append(f"pointer_{site} = tensors[{tensor}][0]{offset}")
            self.pointers[site] = (f"pointer_{site}", depends)
        return self.pointers[site]

    def offset(self, site: int, tensor: int, tuples: str = "tensors") -> tuple[str, frozenset[str]]:
        """Give the text of a load's offset.

        Strides are 64-bit numbers where an offset may need it, and so is their product with an index then.
        """
        terms = self.terms(site, tensor, tuples)
        depends = frozenset().union(*(term.depends for term in terms))
        return "".join(f" + {term.place} * {term.stride}" for term in terms), depends

    def terms(self, site: int, tensor: int, tuples: str = "tensors") -> list[Term]:
        """Give a load's indices and strides. Negative indices count from the end; all are clamped."""
        rank = len(self.indices[site])
        terms = []
        for axis, node in enumerate(self.indices[site]):
            index = self.value(node)
            size = f"{tuples}[{tensor}][{1 + rank + axis}]"
            text = index.text
            if not index.natural:
                text = f"tl.maximum(tl.where({text} < 0, {text} + {size}, {text}), 0)"
            stride = f"{tuples}[{tensor}][{1 + axis}]"
            terms.append(Term(f"tl.minimum({text}, {size} - 1)", stride, index.depends))
        # What is the same for all pairs first: the tile grows as late as it can.
        return sorted(terms, key=lambda term: len(term.depends))


def function(name: str, arguments: str, lines: list[str]) -> str:
    """Put a function together."""
    return "\n    ".join([f"def {name}({arguments}):", *lines]) + "\n"


ARGUMENTS = {
    "score": "score, batch, head, q_pos, kv_pos, tensors, constants",
    "mask": "batch, head, q_pos, kv_pos, tensors, constants",
}


def forward_source(kind: str, writer: Writer, result: object) -> str:
    """Write ``score_mod`` or ``mask_mod``."""
    value = writer.value(result)
    if kind == "mask":
        last = value.text if value.dtype is torch.bool else f"{value.text} != 0"
    else:
        last = full_tile(cast(value, torch.float32))
    return function(f"{kind}_mod", ARGUMENTS[kind], [*writer.lines, f"return {last}"])


def full_tile(value: Value) -> str:
    """A score that does not depend on the pair is still a tile."""
    return value.text if {"q", "kv"} <= value.depends else f"tl.zeros_like(score) + {value.text}"


def gradient_source(writer: Writer, d_score: object, d_loads: list[object]) -> str:
    """Write ``score_mod_gradient``: hidden pairs give nothing, whatever their derivative would be."""
    # A score that is not asked for gets a tile of zeros all the same: what is visible may be known without one.
    value = None if d_score is None else cast(writer.value(d_score), torch.float32)
    for site, d_load in enumerate(d_loads):
        if d_load is not None:
            scatter(writer, site, cast(writer.value(d_load), torch.float32))
    last = "return tl.zeros_like(score)" if value is None else f"return tl.where(visible, {full_tile(value)}, 0.0)"
    return function("score_mod_gradient", f"{ARGUMENTS['score']}, d_score, d_tensors, visible", [*writer.lines, last])


def scatter(writer: Writer, site: int, value: Value) -> None:
    """Add the gradient of a load to its tensor's buffer, where there is one.

    Pairs that read the same element are summed first, as far as the tile's shape tells: all of them, a row or a column.
    """
    tensor = writer.loads[site]
    offset, depends = writer.offset(site, tensor, "d_tensors")
    lines = [f"d_load = tl.where(visible, {full_tile(value)}, 0.0)"]
    if not depends:
        lines.append("d_load = tl.sum(d_load)")
        lines.append(f'tl.atomic_add(d_tensors[{tensor}][0]{offset}, d_load, sem="relaxed")')
    elif {"q", "kv"} <= depends:
        *same, last = writer.terms(site, tensor, "d_tensors")
        if any(term.depends for term in same):  # several vary: their sum is as good an index
            same, last = [], Term(offset.removeprefix(" + "), "1", depends)
        # A table of distances, say: thousands would wait for each other at a few elements. An element at a time, then,
        # those between the least and the last that a visible pair reads, as long as they are few.
        base = "".join(f" + {term.place} * {term.stride}" for term in same)
        lines.append(f"d_base = d_tensors[{tensor}][0]{base}")
        lines.append(f"d_index = {last.place}")
        lines.append("first = tl.min(tl.where(visible, d_index, 2**31 - 1))")
        lines.append("last = tl.max(tl.where(visible, d_index, -(2**31)))")
        lines.append(f"if last - first < {FEW}:")
        lines.append("    for at in range(first, last + 1):")
        lines.append("        d_element = tl.sum(tl.where(d_index == at, d_load, 0.0))")
        lines.append(f'        tl.atomic_add(d_base + at * {last.stride}, d_element, sem="relaxed")')
        lines.append("else:")
        lines.append(f'    tl.atomic_add(d_base + d_index * {last.stride}, d_load, mask=visible, sem="relaxed")')
    else:
        lines.append(f"d_pointer = d_tensors[{tensor}][0]{offset}")
        lines.append("if d_pointer.shape[0] == 1:")
        lines.append("    d_load = tl.sum(d_load, 0, keep_dims=True)")
        lines.append("else:")
        lines.append("    d_load = tl.sum(d_load, 1, keep_dims=True)")
        lines.append('tl.atomic_add(d_pointer, d_load, sem="relaxed")')
    writer.lines.append(f"if len(d_tensors[{tensor}]) > 0:")
    writer.lines += ["    " + line for line in lines]


@functools.lru_cache(maxsize=512)
def function_from(source: str) -> FunctionType:
    """Make a source a Python function, for ``kernels/share.py`` to compile; equal sources are one function.

    Triton asks `inspect` for a function's source, and that asks `linecache`: so the text is left there, too.
    """
    file = f"<tilewise.mods {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, object] = {"__name__": "tilewise.mods.generated"}
    exec(compile(source, file, "exec"), space)  # noqa: S102 - the text is `function`'s, made of names and numbers
    made = space[source.removeprefix("def ").partition("(")[0]]
    if not isinstance(made, FunctionType):
        raise TypeError(f"the source is a function's; got {source!r}")
    return made
