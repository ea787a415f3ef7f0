"""The graph of a branch or of a loop's body, made for one rank as the step's is."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.builder import Builder
from keras_ddl.cut.contents import Content
from keras_ddl.cut.dims import Dim, Unknown
from keras_ddl.cut.extents import merged
from keras_ddl.cut.pieces import Waiting
from keras_ddl.cut.program import Node, Value
from keras_ddl.cut.report import Report
from keras_ddl.cut.states import ListOf, Partial, Rows, State, Whole


class Refused(Exception):
    """Something would have to move between ranks in a loop."""


class Promote(Exception):
    """Lists that a loop carries have to be cut, as the loop's body puts rows into them.

    Attributes: lists: each with the state that it should have.
    """

    def __init__(self, lists: Mapping[Value, ListOf]) -> None:
        super().__init__(lists)
        self.lists = lists


class Refusing:
    """Collectives of a loop: there are none, as its rounds are not told apart by name."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str, *, compressed: bool = False) -> list[tf.Tensor]:
        raise Refused(name)

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        raise Refused(name)

    def compresses(self, value: Value, op: str) -> bool:
        return False

    def reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        raise Refused(name)

    def buckets(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[list[int]]:
        return [list(range(len(sizes)))]


class Inner(Builder):
    """Builder of a graph inside the one that `parent` makes.

    Values of the parent that are lent to it can be brought into another state outside: sums always are, so that they
    travel with the step's; rows are gathered outside of loops, and inside of branches, which may not run.

    Args:
        node: the operation that has the graph; `label`: which of its graphs.
        outside: TensorFlow's graph that the parent makes.
        is_loop: whether it runs more than once, so that nothing can move between ranks in it.
        is_tried: whether it is made only to see in which states its values are.
    """

    def __init__(
        self,
        parent: Builder,
        node: Node,
        graph: Any,
        label: str,
        outside: Any,
        *,
        is_loop: bool,
        is_tried: bool = False,
    ) -> None:
        scope = parent.scope_of(node, label)
        seed = zlib.crc32(f"{parent.seed}/{scope}".encode())
        self.parent = parent
        collectives = parent.collectives
        if is_loop and not parent.in_loop:
            collectives = Refusing(collectives.rank, collectives.size)
        program = parent.program_of(node, graph, label)
        super().__init__(program, parent.batch, collectives, Report(), seed, scope)
        self.programs, self.decisions = parent.programs, parent.decisions
        self.in_loop = is_loop or parent.in_loop
        self.is_tried = is_tried or parent.is_tried
        self._outside_graph = outside
        self._lent: dict[Value, Value] = {}
        self._carried: set[Value] = set()
        self._promoted: dict[Value, ListOf] = {}  # by nodes that could not be made without it

    def lend(self, value: Value, outer: Value) -> None:
        """Says that a placeholder stands for a value of the parent."""
        self._lent[value] = outer
        known = self.parent.extents
        self.give_known(value, self.parent.held(outer), self.parent.state(outer), known.dims(outer))
        if self.parent.is_of_batch(outer):
            self.add_of_batch([value])
        if value.dtype.is_integer:
            self.extents.set_numbers(value, known.numbers(outer))
        if value.dtype == tf.variant:
            self.extents.set_content(value, known.content(outer))

    def carry(self, value: Value, tensor: tf.Tensor, state: State, dims: Any, content: Content | None) -> None:
        """Says that a placeholder stands for what a loop carries from round to round."""
        self._carried.add(value)
        self.give_known(value, tensor, state, dims)
        self.extents.set_content(value, content)

    def give_known(self, value: Value, tensor: tf.Tensor, state: State, dims: Any) -> None:
        self.extents.named[value.key] = value
        found = merged(value, dims)
        if isinstance(state, Rows) and found is not None:
            found = (*found[: state.axis], self.extent(state), *found[state.axis + 1 :])
        self.give(value, tensor, state, found)

    @contextmanager
    def _outside(self) -> Iterator[None]:
        try:
            with self._outside_graph.as_default():
                yield
        except Waiting:
            self.waits_outside = True
            raise

    def _origin(self, value: Value) -> Value | None:
        return self._lent.get(self._same.get(value, value))

    def whole(self, value: Value) -> tf.Tensor:
        origin, state = self._origin(value), self.state(value)
        moves = self.in_loop or isinstance(state, Partial)
        if origin is not None and not isinstance(state, Whole) and (moves or self.parent.has_whole(origin)):
            with self._outside():
                return self.parent.whole(origin)
        return super().whole(value)

    def shard(self, value: Value) -> tf.Tensor:
        origin, state = self._origin(value), self.state(value)
        if origin is not None and isinstance(state, Partial) and value.dtype != tf.resource:
            with self._outside():
                return self.parent.shard(origin)
        return super().shard(value)

    def cut(self, value: Value, rows: Rows) -> tf.Tensor:
        origin = self._origin(value)
        if origin is not None and isinstance(self.state(value), Whole):
            with self._outside():
                return self.parent.cut(origin, rows)
        return super().cut(value, rows)

    def _try(self, node: Node) -> bool:
        try:
            return super()._try(node)
        except Promote as wish:  # goes on with other nodes: a backward pass has many lists, and a round is dear
            self._promoted = {**wish.lists, **self._promoted}
            return False

    def _end_pass(self) -> None:
        if self._promoted:
            raise Promote(self._promoted)

    def list_of(self, value: Value, state: ListOf) -> tf.Tensor | None:
        origin = self._origin(value)
        if self.state(value) == state:
            return self.held(value)
        if origin is not None:
            with self._outside():
                return self.parent.list_of(origin, state)
        value = self._same.get(value, value)
        if value in self._carried and isinstance(self.state(value), Whole):
            raise Promote({value: state})
        return super().list_of(value, state)

    def has_whole(self, value: Value) -> bool:
        origin = self._origin(value)
        return super().has_whole(value) if origin is None else self.parent.has_whole(origin)

    def has_recipe(self, value: Value) -> bool:
        origin = self._lent.get(value)
        return super().has_recipe(value) if origin is None else self.parent.has_recipe(origin)

    def number_outside(self, unknown: Unknown) -> Any:
        with self._outside():
            return self.parent.scalars.of(Dim(1, [unknown]))

    def knows_outside(self, number: Dim) -> bool:
        """Whether an integer means the same outside of this graph."""
        return not any(each.operands and each.operands[0] in self.extents.named for each in number.leaves())

    def dims_outside(self, value: Value) -> Any:
        """Returns the extents of a value as far as they are known outside of this graph."""
        dims = self.dims(value)
        return None if dims is None else tuple(each if self.knows_outside(each) else None for each in dims)

    def content_outside(self, value: Value) -> Content | None:
        """Returns what is known of a list's elements outside of this graph."""
        content = self.extents.content(value) if value.dtype == tf.variant else None
        return None if content is None else content.mapped(self._visible)

    def _visible(self, number: Dim | None) -> Dim | None:
        return number if number is not None and self.knows_outside(number) else None


def operation_behind(tensor: tf.Tensor) -> tf.Operation:
    """Returns the If, Case or While that gives a tensor of tf.cond, tf.switch_case or tf.while_loop."""
    operation = tensor.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    return operation
