"""Builds one rank's graph of a branch or of a loop's body."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.contents import AbstractValue
from keras_ddl.cut.analysis.dims import Dim, Unknown, if_certain
from keras_ddl.cut.analysis.extents import merged
from keras_ddl.cut.analysis.placements import (
    FLAT_SHARD,
    JOINED,
    REPLICATED,
    Partial,
    Pending,
    Placement,
    Sharded,
    TensorList,
)
from keras_ddl.cut.analysis.program import BRANCHES, LOOPS, Node, Return, Value
from keras_ddl.cut.analysis.report import Report
from keras_ddl.cut.analysis.variable_ops import READ
from keras_ddl.cut.building.builder import Builder
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.values.collectives import Collectives


class CollectiveInLoop(Exception):
    """Raised when a loop's body would need a collective."""


class ShardLists(Exception):
    """Raised when lists that a loop carries must be sharded, because the loop's body puts shards into them.

    Attributes: lists: the lists, with the placements that they should have.
    """

    def __init__(self, lists: Mapping[Value, TensorList]) -> None:
        super().__init__(lists)
        self.lists = lists


class NoCollectives(Collectives):
    """Refuses collectives in a loop, because the collectives of two rounds would share a name."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def _refuse(self, *arguments: Any, **keywords: Any) -> NoReturn:
        raise CollectiveInLoop

    reduce: Any = _refuse
    gather: Any = _refuse
    reduce_scatter: Any = _refuse
    shift: Any = _refuse
    all_to_all: Any = _refuse

    def buckets(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[list[int]]:
        return [list(range(len(sizes)))]


class SubgraphBuilder(Builder):
    """Builds a graph inside the one that `parent` builds.

    Values of the parent that are lent to it can be redistributed outside. Sums always are, so that they are sent
    together with the step's sums; shards are gathered outside of loops but inside of branches, because a branch may not
    run.

    Args:
        node: the operation that contains the graph; `label`: which of its graphs.
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
        collectives, everyone = parent.collectives, parent.everyone
        if is_loop and not parent.in_loop:
            collectives = NoCollectives(collectives.rank, collectives.size)
            everyone = None if everyone is None else NoCollectives(everyone.rank, everyone.size)
        program = parent.program_of(node, graph, label)
        super().__init__(
            program=program,
            batch=parent.batch,
            others=parent.others,
            collectives=collectives,
            earlier=parent.earlier,
            everyone=everyone,
            report=Report(),
            seed=seed,
            scope=scope,
            gathered_bytes=parent.gathered_bytes,
        )
        self.programs, self.decisions = parent.programs, parent.decisions
        self.batches, self.rows_of_batches = parent.batches, parent.rows_of_batches
        self.segments = parent.segments
        self.in_loop = is_loop or parent.in_loop
        self.is_trial = is_trial or parent.is_trial
        self._outside_graph = outside
        self._lent: dict[Value, Value] = {}
        self._carried: dict[Value, Callable[[TensorList], None]] = {}
        self._promoted: dict[Value, TensorList] = {}  # requested by nodes that could not be built without it

    def lend(self, value: Value, outer: Value, *, replicated: bool = False) -> None:
        """Lets a placeholder stand for a value of the parent. `replicated`: in that placement. Raises: Pending."""
        self._lent[value] = outer
        known = self.parent.abstract(outer)
        tensor = self.parent.replicated(outer) if replicated else self.parent.local(outer)
        self._place(value, tensor, replace(known, placement=REPLICATED) if replicated else known)
        if isinstance(self.parent, Builder) and self.parent.is_weight(outer):
            self.hold_weight(value)
        if isinstance(self.parent, Builder) and self.placement(value) == JOINED:
            self._sharding.lend_joined(value, outer, self.parent._sharding, self.lend)
        if self.parent.depends_on_batch(outer):
            self.mark_batch_dependent([value])
        if value.dtype.is_integer:
            self.extents.set_numbers(value, if_certain(self.parent.extents.numbers, outer))

    def carry(self, value: Value, tensor: tf.Tensor, known: AbstractValue, shard: Callable[[TensorList], None]) -> None:
        """Lets a placeholder stand for a value that a loop carries from round to round.

        shard: makes a list start in another placement, as long as nothing in the round reads it.
        """
        self._carried[value] = shard
        self._place(value, tensor, known)

    def _place(self, value: Value, tensor: tf.Tensor, known: AbstractValue) -> None:
        placement = known.placement
        self.set_abstract(value, known)
        dims = merged(value, known.dims)
        if isinstance(placement, Sharded) and dims is not None and value.dtype != tf.resource:
            dims = (*dims[: placement.axis], self.extent(placement), *dims[placement.axis + 1 :])
        self.place(value, tensor, placement, dims)

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

    def _redistribute(self, value: Value, placement: Placement) -> tf.Tensor:
        lender, source = self._lent.get(value), self.placement(value)
        if lender is not None and self._is_built_outside(lender, source, placement):
            with self._outside():
                return self.parent.redistributed(lender, placement)
        if value in self._carried and isinstance(placement, TensorList) and source == REPLICATED:
            self._shard_carried(value, placement)
            return self.local(value)
        return super()._redistribute(value, placement)

    def _shard_carried(self, value: Value, placement: TensorList) -> None:
        """Shards a list that the loop carries. Raises: ShardLists: it was already read as a replicated list."""
        node = self.node
        # Graphs inside an operation record the list's placement themselves.
        is_read = any(each in self._operations_by_node for each in self.program.readers(value))
        if node is None or node.type in (*BRANCHES, *LOOPS) or is_read:
            raise ShardLists({value: placement})
        self._carried[value](placement)
        self._place(value, self.local(value), replace(self.abstract(value), placement=placement))

    def _is_built_outside(self, lender: Value, source: Placement, placement: Placement) -> bool:
        """Whether a value of the parent is redistributed in the parent's graph."""
        if placement == REPLICATED:
            return self.in_loop or isinstance(source, Partial) or self.parent.has_replicated(lender)
        if placement == FLAT_SHARD:
            return isinstance(source, Partial) and lender.dtype != tf.resource
        return isinstance(placement, TensorList) or isinstance(placement, Sharded) and source == REPLICATED

    def read_before_loop(self, handle: Value, node: Node) -> tf.Tensor:
        lender = self._lender(handle)
        if not self.in_loop or lender is None:
            return super().read_before_loop(handle, node)
        if any(each.type != READ and not isinstance(each, Return) for each in self.program.readers(handle)):
            raise self.refusal_of_sharded(node, self.placement(handle))
        with self._outside():
            return self.parent.read_before_loop(lender, node)

    def has_replicated(self, value: Value) -> bool:
        lender = self._lender(value)
        return super().has_replicated(value) if lender is None else self.parent.has_replicated(lender)

    def has_materializer(self, value: Value) -> bool:
        lender = self._lent.get(value)
        return super().has_materializer(value) if lender is None else self.parent.has_materializer(lender)

    def outer_number(self, unknown: Unknown) -> tf.Tensor:
        with self._outside():
            return self.parent.number(Dim(1, [unknown]))

    def _try_to_build(self, node: Node) -> bool:
        try:
            return super()._try_to_build(node)
        except ShardLists as request:  # continue with other nodes: a pass is expensive, and there may be many lists
            self._promoted = {**request.lists, **self._promoted}
            return False

    def _after_pass(self) -> None:
        if self._promoted:
            raise ShardLists(self._promoted)

    # ---- outputs in the surrounding graph

    def abstract_outside(self, value: Value) -> AbstractValue:
        """Returns the facts about a value that hold outside of this graph."""
        known = self.abstract(value)
        dims = None if known.dims is None else tuple(map(self._visible, known.dims))
        content = None if known.content is None else known.content.mapped(self._visible)
        return AbstractValue(known.placement, dims, content)

    def _visible(self, number: Dim | None) -> Dim | None:
        """Returns an integer if it means the same outside of this graph, else None."""
        if number is None or any(each.operands and each.operands[0] in self.extents.named for each in number.leaves()):
            return None
        return number


def operation_behind(tensor: tf.Tensor) -> tf.Operation:
    """Returns the If or Case that gives a tensor of tf.cond or tf.switch_case."""
    operation = tensor.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    return operation
