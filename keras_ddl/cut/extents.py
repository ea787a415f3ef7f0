"""Symbolic shapes: the extents of every global tensor, and the entries of small integer tensors, before the step runs.

Programs compute shapes as tensors (`ops.shape(x)[0] * t`, the shape operand of Reshape). Following these values shows
that a replicated [rows, d] has the extent of the batch, and along which axis rows are found after a Reshape. What no
function that is registered here knows is an unknown of its own, equal to nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.contents import Content
from keras_ddl.cut.dims import ONE, Dim, complete, dim, product
from keras_ddl.cut.program import Node, Value

Dims = tuple[Dim, ...]
# Dtypes of shapes, and what their integers must stay below not to wrap around.
_SHAPES = {tf.int32: 2**31, tf.int64: 2**63}
MOST_VALUES = 32  # longer integer vectors are data, not shapes


class Numbers:
    """The entries of an integer tensor of rank 0 or 1, as Dims."""

    __slots__ = ("entries", "is_scalar")

    def __init__(self, entries: Iterable[Dim | int], is_scalar: bool = False) -> None:
        self.entries: Dims = tuple(map(dim, entries))
        self.is_scalar = is_scalar

    @property
    def numbers(self) -> list[int] | None:
        """The entries, if all are known now."""
        return complete(each.number for each in self.entries)


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
        """Infers what is known of a value. Called in program order, it keeps the recursion of later queries shallow."""
        self.dims(value)
        self.numbers(value)

    def dims(self, value: Value) -> Dims | None:
        """Returns the extents of the global tensor, None if its rank is unknown."""
        if value not in self._dims:
            self._infer(value.node)
        return self._dims[value]

    def size(self, value: Value) -> Dim | None:
        """Returns the number of elements of the global tensor."""
        dims = self.dims(value)
        return None if dims is None else product(dims)

    def _infer(self, node: Node) -> None:
        rule = _extents.get(node.type)
        result = rule(self, node) if rule is not None else None
        for output in node.outputs:
            self._dims[output] = merged(output, result[output.index] if result is not None else None)
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
        result = self.numbers(value)
        return result.entries[0] if result is not None and len(result.entries) == 1 else None

    def constants(self, value: Value) -> list[int] | None:
        """Returns the entries of an integer tensor of rank 0 or 1 if they are known now, else None."""
        result = self.numbers(value)
        return None if result is None else result.numbers

    def _infer_numbers(self, value: Value) -> Numbers | None:
        if value.dtype not in _SHAPES or value.rank not in (0, 1):
            return None
        constant = value.constant()
        if constant is not None:
            constant = np.asarray(constant)
            return Numbers(constant.ravel().tolist(), constant.ndim == 0) if constant.size <= MOST_VALUES else None
        rule = _numbers.get(value.node.type)
        inferred = rule(self, value.node) if rule is not None else None
        result = inferred[value.index] if isinstance(inferred, list) else inferred
        if result is not None and all(abs(each.factor) < _SHAPES[value.dtype] for each in result.entries):
            entries = [
                each if each.is_simple else Dim.unknown("entry", value.key, i) for i, each in enumerate(result.entries)
            ]
            return Numbers(entries, result.is_scalar)
        if value.rank == 0:
            return Numbers([Dim.unknown("entry", value.key, 0)], True)
        length = value.shape[0]
        if length is None or length > MOST_VALUES:
            return None
        return Numbers([Dim.unknown("entry", value.key, i) for i in range(length)])


ResultExtents = Sequence[Sequence[Dim | None] | None]  # of each output an extent per axis; None: nothing is certain
ExtentsRule = Callable[[Extents, Node], ResultExtents]
NumbersRule = Callable[[Extents, Node], Numbers | None | list[Numbers | None]]
ContentsRule = Callable[[Extents, Node], Content | None]
_extents: dict[str, ExtentsRule] = {}
_numbers: dict[str, NumbersRule] = {}
_contents: dict[str, ContentsRule] = {}
_Rule = TypeVar("_Rule", ExtentsRule, NumbersRule, ContentsRule)


def merged(output: Value, inferred: Sequence[Dim | None] | None) -> Dims | None:
    """Returns what a function tells of an output's extents, corrected by what tracing knows for certain."""
    if output.rank is None:
        known = None if inferred is None else complete(inferred)
        return None if known is None else tuple(known)
    if inferred is None or len(inferred) != output.rank:
        inferred = [None] * output.rank
    result = []
    for axis, (static, extent) in enumerate(zip(output.shape.as_list(), inferred)):
        # TensorFlow takes an open extent for 1 in a cross entropy of logits [1, n] and labels [None, n].
        is_misjudged = static == 1 and extent is not None and extent.number is None
        if static is not None and not is_misjudged:
            result.append(Dim(static))
        elif extent is not None and extent.is_simple:
            result.append(extent)
        else:
            result.append(Dim.unknown("extent", output.key, axis))
    return tuple(result)


def extents(*types: str) -> Callable[[ExtentsRule], ExtentsRule]:
    """Registers what gives the extents of the outputs of operations."""
    return _registered(_extents, types)


def numbers(*types: str) -> Callable[[NumbersRule], NumbersRule]:
    """Registers what gives the entries of the integer outputs of operations; a list where there are several outputs."""
    return _registered(_numbers, types)


def contents(*types: str) -> Callable[[ContentsRule], ContentsRule]:
    """Registers what gives the content of the list that is the first output of operations."""
    return _registered(_contents, types)


def _registered(table: dict[str, _Rule], types: Sequence[str]) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        for each in types:
            assert each not in table, f"two functions for {each}"
            table[each] = rule
        return rule

    return register


def broadcast(shapes: Sequence[Dims | None]) -> list[Dim | None] | None:
    """Returns the extents of operands broadcast against each other; None where it is not certain."""
    known = complete(shapes)
    if known is None:
        return None
    rank = max(map(len, known))
    padded = [(ONE,) * (rank - len(shape)) + shape for shape in known]
    result: list[Dim | None] = []
    for axis in range(rank):
        here = {shape[axis] for shape in padded if shape[axis] != 1}
        result.append(ONE if not here else here.pop() if len(here) == 1 else certain(here))
    return result


def certain(candidates: set[Dim]) -> Dim | None:
    """Returns the one of these extents that is a known number, if there is exactly one: the others may be 1."""
    large = [each for each in candidates if each.number is not None]
    return large[0] if len(large) == 1 else None


def reshaped(known: Extents, node: Node) -> Numbers | None:
    """Returns the integers of an operation that changes the shape of its first operand and no entry."""
    operand, rank = known.numbers(node.inputs[0]), node.outputs[0].rank
    return None if operand is None or rank not in (0, 1) else Numbers(operand.entries, rank == 0)
