"""Symbolic shapes: the extents of every global tensor, and the entries of small integer tensors, before the step runs.

Programs compute shapes as tensors (`ops.shape(x)[0] * t`, the shape operand of Reshape). Following these values shows
that a replicated [rows, d] has the extent of the batch, and which axis has the rows after a Reshape. A value that no
registered function knows becomes a new unknown, equal to nothing else. The registered functions ask `Extents` about
operands and let its dims.Uncertain pass if an answer is not certain.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.contents import Content
from keras_ddl.cut.analysis.dims import ONE, Dim, Uncertain, Unknown, certain, dim, if_certain, product
from keras_ddl.cut.analysis.program import Node, Value

Dims = tuple[Dim, ...]
# Dtypes of shapes, and the bound below which their integers do not wrap around.
_SHAPES = {tf.int32: 2**31, tf.int64: 2**63}
_SMALL = 1024  # bytes of constants that are compared
MOST_VALUES = 32  # longer integer vectors are data, not shapes


class Extents:
    """Extents of the values of one program, and entries of integer values. `rows`: the extent of the batch."""

    def __init__(self, rows: Dim) -> None:
        self.rows = rows
        self.named: dict[str, Value] = {}  # by key, for the unknowns that name a value
        self._dims: dict[Value, Dims | None] = {}
        self._numbers: dict[Value, Dims | None] = {}
        self._contents: dict[Value, Content | None] = {}
        self._equal: dict[Unknown, Dim] = {}
        self._first: dict[Node, Node] = {}  # the first of the operations that give the same
        self._firsts: dict[Hashable, Node] = {}
        self._inferred: dict[Node, list[Dims | None]] = {}  # extents of the outputs of these operations
        self.alike: dict[str, list[Value]] = {}  # values whose extents are those of the one with this key
        self._named_by: dict[Hashable, str] = {}

    def equate(self, one: Dim, other: Dim) -> None:
        """Notes that an unknown extent equals another one, because the step fails if it does not."""
        if one != other:
            (unknown,) = one.unknowns
            self._equal[unknown] = other

    def _with_equal(self, dims: Dims) -> Dims:
        if not self._equal:
            return dims
        return tuple(each if self._equal.keys().isdisjoint(each.unknowns) else self._replaced(each) for each in dims)

    def _replaced(self, extent: Dim) -> Dim:
        return product([extent.factor, *(self._equal.get(each, Dim(1, [each])) for each in extent.unknowns)])

    def set_dims(self, value: Value, dims: Dims | None) -> None:
        self._dims[value] = dims

    def set_numbers(self, value: Value, numbers: Dims | None) -> None:
        self._numbers[value] = numbers

    def follow(self, value: Value) -> None:
        """Infers extents and entries of a value. Calls in program order keep the recursion of later queries shallow."""
        if_certain(self.dims, value)
        if value.dtype in _SHAPES:
            if_certain(self.numbers, value)

    def dims(self, value: Value) -> Dims:
        """Returns the extents of the global tensor. Raises: Uncertain: its rank is unknown."""
        if value not in self._dims:
            self._infer(value.node)
        return self._with_equal(certain(self._dims[value]))

    def size(self, value: Value) -> Dim:
        """Returns the number of elements of the global tensor. Raises: Uncertain: its rank is unknown."""
        return product(self.dims(value))

    def _infer(self, node: Node) -> None:
        first = self._first_like(node)
        if first not in self._inferred:
            rule = _extents.get(node.type)
            result = if_certain(rule, self, node) if rule is not None else None
            self._inferred[first] = [merged(e, result[e.index] if result is not None else None) for e in node.outputs]
        for one, output, dims in zip(first.outputs, node.outputs, self._inferred[first]):
            self._dims[output] = dims
            self.named[output.key] = output
            if first is not node:
                self.alike.setdefault(one.key, []).append(output)

    def _first_like(self, node: Node) -> Node:
        """Returns an earlier operation that certainly gives the same results, else `node`."""
        if not node.is_pure or not node.outputs:
            return node
        if node.type == "Const":
            content = node.operation.node_def.attr["value"].tensor
            key: Hashable = content.SerializeToString(deterministic=True) if content.ByteSize() <= _SMALL else node
        elif not node.inputs:
            return node
        else:
            for each in node.inputs:
                if each not in self._dims:
                    self._infer(each.node)
            key = node.attributes_key, *map(self._like, node.inputs)
        first = self._first[node] = self._firsts.setdefault(key, node)
        return first

    def _like(self, value: Value) -> tuple[Node, int]:
        return self._first.get(value.node, value.node), value.index

    def name_of(self, value: Value) -> str:
        """Returns the key by which unknown extents of a value are named: that of the first value like it."""
        node, index = self._like(value)
        return node.outputs[index].key

    def values_named(self, key: str) -> list[Value]:
        """Returns the values any of which tells an unknown that has this key."""
        return [*([self.named[key]] if key in self.named else []), *self.alike.get(key, ())]

    def extent_by(self, output: Value, axis: int, operands: Sequence[Value]) -> Dim:
        """Returns an unknown extent that follows from these operands alone, so that it is equal for equal ones."""
        key = output.node.type, output.index, axis, *map(self._like, operands)
        key_of_first = self._named_by.setdefault(key, output.key)
        self.alike.setdefault(key_of_first, []).append(output)
        return Dim.unknown("extent", key_of_first, axis)

    def numbers(self, value: Value) -> Dims:
        """Returns the entries of an integer tensor of rank 0 or 1; unknown entries as named unknowns.

        Raises: Uncertain: it is another kind of tensor, or a long vector.
        """
        if value not in self._numbers:
            self.named[value.key] = value
            self._numbers[value] = self._infer_numbers(value)
        return self._with_equal(certain(self._numbers[value]))

    def content(self, value: Value) -> Content:
        """Returns the known facts about the elements of a list. Raises: Uncertain: nothing is known."""
        if value not in self._contents:
            rule = _contents.get(value.node.type)
            self._contents[value] = if_certain(rule, self, value.node) if rule is not None else None
        return certain(self._contents[value])

    def set_content(self, value: Value, content: Content | None) -> None:
        self._contents[value] = content

    def vector(self, value: Value) -> Dims:
        """Returns the entries of an integer vector. Raises: Uncertain: as `numbers`, and for a scalar."""
        if value.rank != 1:
            raise Uncertain
        return self.numbers(value)

    def number(self, value: Value) -> Dim:
        """Returns the entry of an integer scalar (or of a one-entry vector). Raises: Uncertain."""
        numbers = self.numbers(value)
        if len(numbers) != 1:
            raise Uncertain
        return numbers[0]

    def constants(self, value: Value) -> list[int]:
        """Returns the entries of an integer tensor of rank 0 or 1 as numbers. Raises: Uncertain: they are unknown."""
        return [certain(each.number) for each in self.numbers(value)]

    def _infer_numbers(self, value: Value) -> Dims | None:
        if value.dtype not in _SHAPES or value.rank not in (0, 1):
            return None
        constant = value.constant()
        if constant is not None:
            return tuple(map(dim, np.ravel(constant).tolist())) if np.size(constant) <= MOST_VALUES else None
        rule = _numbers.get(value.node.type)
        results = if_certain(rule, self, value.node) if rule is not None else None
        inferred = results[value.index] if results is not None else None
        if inferred is not None and all(abs(dim(each).factor) < _SHAPES[value.dtype] for each in inferred):
            known = [dim(each) for each in inferred]
            return tuple(e if e.is_simple else Dim.unknown("entry", value.key, i) for i, e in enumerate(known))
        length = 1 if value.rank == 0 else value.shape[0]
        if length is None or length > MOST_VALUES:
            return None
        return tuple(Dim.unknown("entry", value.key, i) for i in range(length))


# The certain facts about each output. Rules raise Uncertain if there are none.
ResultExtents = Sequence[Sequence[Dim | None] | None]  # an extent per axis
ResultNumbers = Sequence[Sequence[Dim | int] | None]  # the entries
ExtentsRule = Callable[[Extents, Node], ResultExtents]
NumbersRule = Callable[[Extents, Node], ResultNumbers]
ContentsRule = Callable[[Extents, Node], Content]
_extents: dict[str, ExtentsRule] = {}
_numbers: dict[str, NumbersRule] = {}
_contents: dict[str, ContentsRule] = {}
_Rule = TypeVar("_Rule", ExtentsRule, NumbersRule, ContentsRule)


def merged(output: Value, inferred: Sequence[Dim | None] | None) -> Dims | None:
    """Returns inferred extents of an output, corrected by the certain facts from tracing."""
    if output.rank is None:
        return None if inferred is None or None in inferred else tuple(each for each in inferred if each is not None)
    if inferred is None or len(inferred) != output.rank:
        inferred = [None] * output.rank
    result = []
    for axis, (static, extent) in enumerate(zip(output.shape.as_list(), inferred)):
        # TensorFlow mistakes an open extent for 1 in a cross entropy of logits [1, n] and labels [None, n].
        is_misjudged = static == 1 and extent is not None and extent.number is None
        if static is not None and not is_misjudged:
            result.append(Dim(static))
        elif extent is not None and extent.is_simple:
            result.append(extent)
        else:
            result.append(Dim.unknown("extent", output.key, axis))
    return tuple(result)


def extents(*types: str) -> Callable[[ExtentsRule], ExtentsRule]:
    """Registers a function that returns the extents of the outputs of operations."""
    return _registered(_extents, types)


def numbers(*types: str) -> Callable[[NumbersRule], NumbersRule]:
    """Registers a function that returns the entries of integer outputs of operations, of rank 0 or 1."""
    return _registered(_numbers, types)


def contents(*types: str) -> Callable[[ContentsRule], ContentsRule]:
    """Registers a function that returns the content of the list that is the first output of operations."""
    return _registered(_contents, types)


def _registered(table: dict[str, _Rule], types: Sequence[str]) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        for each in types:
            assert each not in table, f"two functions for {each}"
            table[each] = rule
        return rule

    return register


def broadcast_extent(extents: Iterable[Dim]) -> Dim | None:
    """Returns the extent to which operands with these extents are broadcast; None: not certain."""
    others = {each for each in extents if each != 1}
    if len(others) > 1:  # a known number, if there is one: the others may be 1
        others = {each for each in others if each.number is not None}
        return others.pop() if len(others) == 1 else None
    return others.pop() if others else ONE


def reshaped(known: Extents, node: Node) -> ResultNumbers:
    """Returns the integer entries of an operation that changes only the shape of its first operand."""
    return [known.numbers(node.inputs[0])]
