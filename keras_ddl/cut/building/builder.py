"""Builds one rank's graph of the step of one process. See docs/cut.md for the contract.

The nodes of the program are built again, one by one, in the graph that is being traced. The builder knows the placement
of every value; a rule (rules/) may build an operation from operands in their placements. If there is no rule, or the
rule declines, the operation is built from replicated operands, in the same way on every rank. That is correct for every
operation; rules only make it fast.

Sums over ranks are postponed until nothing else can be built. By then all sums that one backward pass needs are known,
and they are made in buckets.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import if_certain
from keras_ddl.cut.analysis.extents import Dims
from keras_ddl.cut.analysis.placements import (
    FLAT_SHARD,
    PARTIAL,
    REPLICATED,
    Partial,
    Pending,
    PlacedOutputs,
    PlacedTensor,
    Placement,
    Sharded,
)
from keras_ddl.cut.analysis.program import SHAPE_OPS, Node, Value
from keras_ddl.cut.analysis.side_effects import HOST_EFFECTS, HOST_FUNCTIONS
from keras_ddl.cut.batch_statistics.own_rows import OwnStatistics
from keras_ddl.cut.building import model_collectives, unchanged
from keras_ddl.cut.building.both_placements import BothPlacements
from keras_ddl.cut.building.replicated_updates import ReplicatedUpdates
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.factors import spec_of
from keras_ddl.cut.operations.propagation import is_accumulated
from keras_ddl.cut.operations.registry import rule_of
from keras_ddl.cut.shards.sharding import Sharding
from keras_ddl.cut.values.collectives import COMBINED_DTYPES


class Schedule:
    """Nodes that have not been built yet. Cost: O(log n) per node.

    Args:
        nodes: the nodes of one program.
        first: given a node, returns others that must be built before it although it does not read them.
    """

    def __init__(self, nodes: Sequence[Node], first: Callable[[Node], Sequence[Node]]) -> None:
        self._nodes = {node.position: node for node in nodes}
        self._readers: dict[Node, list[Node]] = {}
        self._missing: dict[Node, int] = {}
        known = set(nodes)
        for node in nodes:
            before = {*(value.node for value in node.inputs), *node.after, *first(node)}
            waits_for = [each for each in before if each in known]
            self._missing[node] = len(waits_for)
            for each in waits_for:
                self._readers.setdefault(each, []).append(node)
        self._ready = [node.position for node in nodes if not self._missing[node]]
        heapq.heapify(self._ready)
        self._postponed: list[int] = []

    def __iter__(self) -> Iterator[Node]:
        """Yields nodes that can be built, including nodes that become ready in the meantime.

        Call `done` or `postpone` for every node.
        """
        while self._ready:
            yield self._nodes[heapq.heappop(self._ready)]

    def done(self, node: Node) -> None:
        """Marks a node as built, so that nodes that only waited for it can be built."""
        for reader in self._readers.get(node, ()):
            self._missing[reader] -= 1
            if not self._missing[reader]:
                heapq.heappush(self._ready, reader.position)

    def postpone(self, node: Node) -> None:
        """Marks a node as waiting for a collective; it is tried again after `retry`."""
        self._postponed.append(node.position)

    def postponed(self) -> list[Node]:
        """Returns the nodes that wait for a collective."""
        return [self._nodes[each] for each in self._postponed]

    def retry(self) -> None:
        """Makes postponed nodes available again."""
        self._ready, self._postponed = self._postponed, []
        heapq.heapify(self._ready)

    @property
    def is_waiting(self) -> bool:
        return bool(self._postponed)


@dataclass(kw_only=True, eq=False)
class Builder(Context):
    """Builds one rank's graph of a program: decides in which order nodes are built, and by what.

    Its base classes each add one thing: `LocalShapes` extents as numbers, `PlacedValues` the placement of each value,
    `Context` single operations. Rules get the builder as a `Context`, so they cannot depend on the order. The README
    of this folder shows the whole, with the objects that a builder owns.

    All ranks make the same decisions, because none depends on how many rows a rank has.

    Args: those of `Context`, and statistics: BatchNormalization with each rank's own statistics.
    """

    statistics: OwnStatistics | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sharding = Sharding(self, self._apply_rules, self._record)
        self._both_placements = BothPlacements(self)
        self.updates: ReplicatedUpdates | None = ReplicatedUpdates(self)
        self._operations_by_node: dict[Node, list[tf.Operation]] = {}

    def place(self, value: Value, tensor: tf.Tensor, placement: Placement, dims: Dims | None = None) -> None:
        super().place(value, tensor, placement, dims)
        if placement == FLAT_SHARD and (value.dtype == tf.resource or not self.in_loop):
            self._sharding.hold(value)
        self._operations_by_node[value.node] = []

    def hold_weight(self, handle: Value) -> None:
        """Makes the builder gather a variable in flat shards temporarily, wherever the complete value is needed."""
        self._sharding.hold_weight(handle)
        self.requests.follow_program = False  # a gather may wait for the users of other weights

    def is_weight(self, handle: Value) -> bool:
        return self._sharding.is_weight(handle)

    def build(self, ends: Mapping[Value, Placement] | None = None) -> None:
        """Builds all nodes, and the values `ends` in their placements (default: all outputs, replicated)."""
        nodes = [node for node in self.program.nodes if node not in self._operations_by_node]
        schedule = Schedule(nodes, self._before)
        missing = dict.fromkeys(self.program.outputs, REPLICATED) if ends is None else dict(ends)
        for rounds in itertools.count():
            for node in schedule:
                if self._try_to_build(node):
                    schedule.done(node)
                else:
                    schedule.postpone(node)
            self._after_pass()
            for value, placement in list(missing.items()):
                if self.is_placed(value) and self.request(value, placement):
                    del missing[value]
            if not schedule.is_waiting and not missing and self._sharding.finish():
                return
            self._request_ahead(missing)
            self._request_beside(schedule.postponed())
            if self.waits_outside and not self.requests:
                raise Pending
            self.make_requested(rounds)
            schedule.retry()

    def _before(self, node: Node) -> list[Node]:
        before = self.statistics.before(node) if self.statistics is not None else None
        return [*self._sharding.before(node), *([] if before is None else [before])]

    def _after_pass(self) -> None:
        """Called after each pass over the nodes, when no more nodes can be built."""

    def _request_ahead(self, missing: Mapping[Value, Placement]) -> None:
        """Requests the results that wait for side effects, as all results of a tf.function do.

        They are then sent together with other values.
        """
        for value, placement in missing.items():
            while not self.is_placed(value) and value.node.type == "Identity":
                value = value.node.inputs[0]
            if self.is_placed(value) and isinstance(self.placement(value), Partial) and placement == REPLICATED:
                self.request(value, placement)

    def _request_beside(self, postponed: Iterable[Node]) -> None:
        """Requests the sums of parts that will be added to replicated results of postponed nodes.

        They are then sent together with the sums that the postponed nodes wait for.
        """
        if self.in_loop:
            return
        for node in postponed:
            if not all(map(self._will_be_replicated, node.inputs)):
                continue
            for reader in {each: None for value in node.outputs for each in self.program.readers(value)}:
                if isinstance(reader, Node) and spec_of(reader).linear.adds:
                    self._request_summands(reader)

    def _request_summands(self, addition: Node) -> None:
        parts = [each for each in addition.inputs if self.is_placed(each) and self.placement(each) == PARTIAL]
        if any(is_accumulated(self, each) or self._sharding.is_towards(each) for each in parts):
            return
        self.node = addition
        for each in parts:
            self.request(each, REPLICATED)
        self.node = None

    def _will_be_replicated(self, value: Value) -> bool:
        """Whether a value is replicated or will be, because its sum is requested."""
        if not self.is_placed(value):
            return False
        placement = self.placement(value)
        is_requested = isinstance(placement, Partial) and self.requests.has(placement.op, self.origin(value))
        return is_requested or placement == REPLICATED

    def _try_to_build(self, node: Node) -> bool:
        """Builds a node and places its outputs. Returns False if it must wait for a collective."""
        self.node, self._operations_of_current = node, []
        self.before = before = [each for one in node.after for each in self._operations_by_node[one]]
        if self.writes is not None:
            before += self.writes.before(node)
        try:
            with tf.control_dependencies(before) if before else contextlib.nullcontext():
                made = self._build(node)
        except Pending:
            return False
        finally:
            self.node = None
        for value, (tensor, placement) in zip(node.outputs, made):
            self._record(value, tensor, placement)
            self.extents.follow(value)
        self._operations_by_node[node] = self._operations_of_current or before
        # Operations built between two nodes belong to neither, and nothing waits for them.
        self._operations_of_current = []
        return True

    def _record(self, value: Value, tensor: tf.Tensor, placement: Placement) -> None:
        """Places an output of a node that was just built, and learns what follows about it."""
        self._placed[value] = PlacedTensor(tensor, placement)
        if value.node.type not in SHAPE_OPS and any(map(self.depends_on_batch, value.node.inputs)):
            self._batch_dependent.add(value)
        if isinstance(placement, Sharded):
            dims = self.dims(value)
            if tensor.shape.rank is None:  # Python knew the rank at tracing time, but the operation does not
                shape = tf.TensorShape([each.number for each in dims])
                tensor.set_shape(self.static_local_shape(shape, placement))
            axis = placement.axis
            self.extents.set_dims(value, (*dims[:axis], self.extent(placement), *dims[axis + 1 :]))

    def _build(self, node: Node) -> PlacedOutputs:
        """Builds a node in the first way that applies. Raises: Pending."""
        if node.type == "Const":
            return self.make_replicated(node)
        kind = self.earlier_kind(node)
        if kind is not None:
            return model_collectives.make(self, node, kind)
        reason = node.reason_to_keep
        if reason is not None and node.type not in (*HOST_FUNCTIONS, *HOST_EFFECTS):
            return self._both_placements.also_sharded(node, unchanged.make(self, node, reason))
        made = self.statistics.make(self, node) if self.statistics is not None else None
        if made is None and self._sharding.is_on:
            made = self._sharding.make(node)
        if made is None and self.updates is not None and not self.rows_by_extent:
            made = self.updates.make(node)
        return self._apply_rules(node) if made is None else made

    def _apply_rules(self, node: Node) -> PlacedOutputs:
        """Builds an operation whose operands are not in flat shards."""
        are_replicated = all(self.placement(each) == REPLICATED for each in node.inputs)
        rule = rule_of(node.type, of_replicated=are_replicated)
        made = if_certain(rule, self, node) if rule is not None else None
        if are_replicated:
            return self._both_placements.also_sharded(node, self.make_replicated(node)) if made is None else made
        if made is None or not all(self._can_be(value, placement) for value, (_, placement) in zip(node.outputs, made)):
            replicated = self.make_replicated(node)
            self.report.replicated_op(node, [each for each in node.inputs if isinstance(self.placement(each), Sharded)])
            return self._both_placements.also_sharded(node, replicated)
        if all(isinstance(placement, Sharded) for _, placement in made):
            self._both_placements.recompute_replicated(node)
        return made

    def _can_be(self, value: Value, placement: Placement) -> bool:
        """Whether `value` can become replicated from `placement`: a shard's axis is known, or parts can be combined."""
        if isinstance(placement, Sharded):
            return if_certain(self.dims, value) is not None
        return not isinstance(placement, Partial) or value.dtype in (*COMBINED_DTYPES, tf.resource)
