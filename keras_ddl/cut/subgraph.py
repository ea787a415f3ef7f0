"""The graph of a branch or of a loop's body, built for one rank as the step's is."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.builder import Builder
from keras_ddl.cut.collectives import Collectives
from keras_ddl.cut.contents import Content, Entries
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import Dim, Unknown
from keras_ddl.cut.extents import merged
from keras_ddl.cut.placements import Partial, Pending, Placement, Replicated, Sharded, TensorList
from keras_ddl.cut.program import Node, Value
from keras_ddl.cut.report import Report


class CollectiveInLoop(Exception):
    """A loop's body would need a collective."""


class ShardLists(Exception):
    """Lists that a loop carries have to be sharded, because the loop's body puts shards into them.

    Attributes: lists: each with the placement that it should have.
    """

    def __init__(self, lists: Mapping[Value, TensorList]) -> None:
        super().__init__(lists)
        self.lists = lists


class NoCollectives:
    """Collectives of a loop: there are none, as those of two rounds would have one name."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str, *, compressed: bool = False) -> list[tf.Tensor]:
        raise CollectiveInLoop(name)

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        raise CollectiveInLoop(name)

    def compresses(self, value: Value, op: str) -> bool:
        return False

    def reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        raise CollectiveInLoop(name)

    def buckets(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[list[int]]:
        return [list(range(len(sizes)))]


class SubgraphBuilder(Builder):
    """Builds a graph inside the one that `parent` builds.

    Values of the parent that are lent to it can be redistributed outside: sums always are, so that they travel with the
    step's; shards are gathered outside of loops, and inside of branches, which may not run.

    Args:
        node: the operation that has the graph; `label`: which of its graphs.
        outside: TensorFlow's graph that the parent builds.
        is_loop: whether it runs more than once, so that it can contain no collective.
        is_trial: whether it is built only to learn the placements of its outputs.
    """

    def __init__(
        self,
        parent: Context,
        node: Node,
        graph: tf.Graph,
        label: str,
        outside: tf.Graph,
        *,
        is_loop: bool,
        is_trial: bool = False,
    ) -> None:
        scope = parent.scope_of(node, label)
        seed = zlib.crc32(f"{parent.seed}/{scope}".encode())
        self.parent = parent
        collectives: Collectives = parent.collectives
        if is_loop and not parent.in_loop:
            collectives = NoCollectives(collectives.rank, collectives.size)
        program = parent.program_of(node, graph, label)
        super().__init__(program, parent.batch, collectives, Report(), seed, scope)
        self.programs, self.decisions = parent.programs, parent.decisions
        self.in_loop = is_loop or parent.in_loop
        self.is_trial = is_trial or parent.is_trial
        self._outside_graph = outside
        self._lent: dict[Value, Value] = {}
        self._carried: set[Value] = set()
        self._promoted: dict[Value, TensorList] = {}  # requested by nodes that could not be built without it

    def lend(self, value: Value, outer: Value) -> None:
        """Lets a placeholder stand for a value of the parent."""
        self._lent[value] = outer
        known = self.parent.extents
        self._place(value, self.parent.local(outer), self.parent.placement(outer), known.dims(outer))
        if self.parent.depends_on_batch(outer):
            self.mark_batch_dependent([value])
        if value.dtype.is_integer:
            self.extents.set_numbers(value, known.numbers(outer))
        if value.dtype == tf.variant:
            self.extents.set_content(value, known.content(outer))

    def carry(
        self, value: Value, tensor: tf.Tensor, placement: Placement, dims: Entries | None, content: Content | None
    ) -> None:
        """Lets a placeholder stand for what a loop carries from round to round."""
        self._carried.add(value)
        self._place(value, tensor, placement, dims)
        self.extents.set_content(value, content)

    def _place(self, value: Value, tensor: tf.Tensor, placement: Placement, dims: Entries | None) -> None:
        self.extents.named[value.key] = value
        known = merged(value, dims)
        if isinstance(placement, Sharded) and known is not None:
            known = (*known[: placement.axis], self.extent(placement), *known[placement.axis + 1 :])
        self.place(value, tensor, placement, known)

    @contextmanager
    def _outside(self) -> Iterator[None]:
        try:
            with self._outside_graph.as_default():
                yield
        except Pending:
            self.waits_outside = True
            raise

    def _lender(self, value: Value) -> Value | None:
        return self._lent.get(self.origin(value))

    def replicated(self, value: Value) -> tf.Tensor:
        lender, placement = self._lender(value), self.placement(value)
        if lender is None or isinstance(placement, Replicated):
            return super().replicated(value)
        if self.in_loop or isinstance(placement, Partial) or self.parent.has_replicated(lender):
            with self._outside():
                return self.parent.replicated(lender)
        return super().replicated(value)

    def flat_shard(self, value: Value) -> tf.Tensor:
        lender = self._lender(value)
        if lender is not None and isinstance(self.placement(value), Partial) and value.dtype != tf.resource:
            with self._outside():
                return self.parent.flat_shard(lender)
        return super().flat_shard(value)

    def sharded(self, value: Value, placement: Sharded) -> tf.Tensor:
        lender = self._lender(value)
        if lender is not None and isinstance(self.placement(value), Replicated):
            with self._outside():
                return self.parent.sharded(lender, placement)
        return super().sharded(value, placement)

    def tensor_list(self, value: Value, placement: TensorList) -> tf.Tensor | None:
        if self.placement(value) == placement:
            return self.local(value)
        lender = self._lender(value)
        if lender is not None:
            with self._outside():
                return self.parent.tensor_list(lender, placement)
        value = self.origin(value)
        if value in self._carried and isinstance(self.placement(value), Replicated):
            raise ShardLists({value: placement})
        return super().tensor_list(value, placement)

    def has_replicated(self, value: Value) -> bool:
        lender = self._lender(value)
        return super().has_replicated(value) if lender is None else self.parent.has_replicated(lender)

    def has_materializer(self, value: Value) -> bool:
        lender = self._lent.get(value)
        return super().has_materializer(value) if lender is None else self.parent.has_materializer(lender)

    def outer_number(self, unknown: Unknown) -> tf.Tensor:
        with self._outside():
            return self.parent.number(Dim(1, [unknown]))

    def _try(self, node: Node) -> bool:
        try:
            return super()._try(node)
        except ShardLists as request:  # go on with other nodes: a backward pass has many lists, and a pass is expensive
            self._promoted = {**request.lists, **self._promoted}
            return False

    def _end_pass(self) -> None:
        if self._promoted:
            raise ShardLists(self._promoted)

    # ---- what is known of its outputs in the graph around it

    def dims_outside(self, value: Value) -> Entries | None:
        """Returns the extents of a value as far as they are known outside of this graph."""
        dims = self.dims(value)
        return None if dims is None else tuple(map(self._visible, dims))

    def content_outside(self, value: Value) -> Content | None:
        """Returns what is known of a list's elements outside of this graph."""
        content = self.extents.content(value) if value.dtype == tf.variant else None
        return None if content is None else content.mapped(self._visible)

    def _visible(self, number: Dim | None) -> Dim | None:
        """Returns an integer if it means the same outside of this graph, else None."""
        if number is None or any(each.operands and each.operands[0] in self.extents.named for each in number.leaves()):
            return None
        return number


def operation_behind(tensor: tf.Tensor) -> tf.Operation:
    """Returns the If, Case or While that gives a tensor of tf.cond, tf.switch_case or tf.while_loop."""
    operation = tensor.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    return operation
