"""What is known of shapes before the step runs: extents of every tensor, and the values of small integer tensors.

Programs carry shapes about as tensors (`ops.shape(x)[0] * t`, the shape operand of Reshape). Following these values is
what tells that a replicated [rows, d] has the extent of the batch, and where a Reshape leaves the rows. What has no
rule here is an unknown of its own, equal to nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.contents import Content
from keras_ddl.cut.dims import ONE, Dim, dim, product
from keras_ddl.cut.program import Node, Value

Dims = tuple[Dim, ...]
# Integers that shapes are made of, and what they must stay below not to wrap around.
_SHAPES = {tf.int32: 2**31, tf.int64: 2**63}
MOST_VALUES = 32  # longer integer vectors are data, not shapes

_extents: dict[str, Callable[..., Any]] = {}
_values: dict[str, Callable[..., Any]] = {}
_contents: dict[str, Callable[..., Any]] = {}


class Numbers:
    """The entries of an integer tensor of rank 0 or 1, as Dims."""

    __slots__ = ("entries", "is_scalar")

    def __init__(self, entries: Any, is_scalar: bool = False) -> None:
        self.entries: Dims = tuple(map(dim, entries))
        self.is_scalar = is_scalar

    @property
    def numbers(self) -> list[int] | None:
        """The entries, if all are known now."""
        found = [each.number for each in self.entries]
        return None if any(each is None for each in found) else found


class Extents:
    """Extents and integer values of the values of one program. `rows`: the extent of the batch."""

    def __init__(self, rows: Dim) -> None:
        self.rows = rows
        self.named: dict[str, Value] = {}  # by the keys that unknowns are made of
        self._dims: dict[Value, Dims | None] = {}
        self._numbers: dict[Value, Numbers | None] = {}
        self._contents: dict[Value, Content | None] = {}

    def set_dims(self, value: Value, dims: Dims | None) -> None:
        self._dims[value] = dims

    def set_numbers(self, value: Value, numbers: Numbers | None) -> None:
        self._numbers[value] = numbers

    def follow(self, value: Value) -> None:
        """Infers what is known of a value now. Done of all in their order, programs may be as long as they like: what
        is inferred when it is asked for is inferred by recursion.
        """
        self.dims(value)
        self.numbers(value)

    def dims(self, value: Value) -> Dims | None:
        """Returns the extents of the whole tensor, None if its rank is unknown."""
        if value not in self._dims:
            self._infer(value.node)
        return self._dims[value]

    def size(self, value: Value) -> Dim | None:
        """Returns the number of elements of the whole tensor."""
        dims = self.dims(value)
        return None if dims is None else product(dims)

    def _infer(self, node: Node) -> None:
        rule = _extents.get(node.type)
        found = rule(self, node) if rule is not None else None
        for output in node.outputs:
            told = found[output.index] if found is not None else None
            self._dims[output] = merged(output, told)
            self.named[output.key] = output

    def numbers(self, value: Value) -> Numbers | None:
        """Returns the entries of an integer tensor of rank 0 or 1, each at least by name; None for other tensors."""
        if value not in self._numbers:
            self.named[value.key] = value
            self._numbers[value] = self._infer_numbers(value)
        return self._numbers[value]

    def content(self, value: Value) -> Content | None:
        """Returns what is known of the elements of a list; None: nothing."""
        if value not in self._contents:
            rule = _contents.get(value.node.type)
            self._contents[value] = rule(self, value.node) if rule is not None else None
        return self._contents[value]

    def set_content(self, value: Value, content: Content | None) -> None:
        self._contents[value] = content

    def number(self, value: Value) -> Dim | None:
        """Returns the entry of an integer scalar (or of a vector of one entry)."""
        found = self.numbers(value)
        return found.entries[0] if found is not None and len(found.entries) == 1 else None

    def constants(self, value: Value) -> list[int] | None:
        """Returns the entries of an integer tensor of rank 0 or 1 if they are known now, else None."""
        found = self.numbers(value)
        return None if found is None else found.numbers

    def _infer_numbers(self, value: Value) -> Numbers | None:
        if value.dtype not in _SHAPES or value.rank not in (0, 1):
            return None
        constant = value.constant()
        if constant is not None:
            constant = np.asarray(constant)
            return Numbers(constant.ravel().tolist(), constant.ndim == 0) if constant.size <= MOST_VALUES else None
        rule = _values.get(value.node.type)
        found = rule(self, value.node) if rule is not None else None
        if isinstance(found, list):
            found = found[value.index]
        if found is not None and all(abs(each.factor) < _SHAPES[value.dtype] for each in found.entries):
            entries = [
                each if each.is_simple else Dim.unknown("entry", value.key, i) for i, each in enumerate(found.entries)
            ]
            return Numbers(entries, found.is_scalar)
        if value.rank == 0:
            return Numbers([Dim.unknown("entry", value.key, 0)], True)
        length = value.shape[0]
        if length is None or length > MOST_VALUES:
            return None
        return Numbers([Dim.unknown("entry", value.key, i) for i in range(length)])


def merged(output: Value, told: Any) -> Dims | None:
    """Returns what a rule tells, corrected by what tracing knows for certain."""
    if output.rank is None:
        return tuple(map(dim, told)) if told is not None else None
    if told is not None and len(told) != output.rank:
        told = None
    found = []
    for axis, known in enumerate(output.shape.as_list()):
        if known is not None and not _is_misjudged(known, told, axis):
            found.append(Dim(known))
        elif told is not None and told[axis] is not None and dim(told[axis]).is_simple:
            found.append(dim(told[axis]))
        else:
            found.append(Dim.unknown("extent", output.key, axis))
    return tuple(found)


def _is_misjudged(known: int, told: Any, axis: int) -> bool:
    """Whether TensorFlow takes an open extent for 1: of a cross entropy of logits [1, n] and labels [None, n]."""
    return known == 1 and told is not None and told[axis] is not None and dim(told[axis]).number is None


def extents(*types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers what the outputs of operations are extended by: a list of extents (None: unknown) for each output."""

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        _extents.update(dict.fromkeys(types, rule))
        return rule

    return register


def numbers(*types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers how the integers that operations give follow from those they are given."""

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        _values.update(dict.fromkeys(types, rule))
        return rule

    return register


def contents(*types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers what is known of the elements of the list that operations give as their first output."""

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        _contents.update(dict.fromkeys(types, rule))
        return rule

    return register


def broadcast(shapes: list[Dims | None]) -> list[Dim | None] | None:
    """Returns the extents of operands broadcast against each other; None where it cannot be told."""
    if any(shape is None for shape in shapes):
        return None
    rank = max(map(len, shapes))
    padded = [(ONE,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    found: list[Dim | None] = []
    for axis in range(rank):
        here = {shape[axis] for shape in padded if shape[axis] != 1}
        found.append(ONE if not here else here.pop() if len(here) == 1 else certain(here))
    return found


def certain(candidates: set[Dim]) -> Dim | None:
    """Of several extents that may be 1, the one that is certainly not, if there is one."""
    large = [each for each in candidates if each.number is not None]
    return large[0] if len(large) == 1 else None
