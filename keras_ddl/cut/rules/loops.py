"""While: loop values are sharded if every round keeps them sharded; there is no collective in a loop."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.loops import LoopGraph, copy_element_kind, while_op
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.contents import AbstractValue
from keras_ddl.cut.analysis.dims import Uncertain
from keras_ddl.cut.analysis.placements import (
    PARTIAL,
    REPLICATED,
    PlacedOutputs,
    Placement,
    Sharded,
    TensorList,
    has_shards,
)
from keras_ddl.cut.analysis.program import LOOPS, Node, Value
from keras_ddl.cut.building import unchanged
from keras_ddl.cut.building.subgraph import CollectiveInLoop, ShardLists, SubgraphBuilder
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.registry import rule

MOST_TRIES = 50


Assumed = dict[int, AbstractValue]


class _Changed(Exception):
    """Raised when, after a round, a loop value's placement differs from the assumption, or less is known about it."""


@rule(*LOOPS)
def while_loop(b: Context, node: Node) -> PlacedOutputs | None:
    """Builds a loop, again and again until the placements of its values after a round equal those before it.

    If its body needs a collective, the loop is built replicated.
    """
    condition, body = (tf_compat.called_graph(node.operation, each) for each in ("cond", "body"))
    count = len(node.inputs)
    if condition is None or body is None or len(condition.inputs) != count or len(body.inputs) != count:
        return None
    key = ("loop", node.key, b.knowledge_of(node.inputs))
    known = b.decisions.get(key)
    if isinstance(known, CollectiveInLoop):
        return _replicated(b, node, condition, body, known)
    is_first = known is None
    loop = _Loop(b, node, condition, body, known if isinstance(known, dict) else None)
    for _ in range(MOST_TRIES):
        try:
            made = loop.make()
            b.decisions[key] = loop.assumed
            return made
        except _Changed:
            continue
        except ShardLists as request:
            loop.shard_lists(request)
        except CollectiveInLoop as refused:
            if not is_first:
                is_first, loop = True, _Loop(b, node, condition, body)
            elif not loop.assume_sharded():
                b.decisions[key] = refused
                return _replicated(b, node, condition, body, refused)
    return None


def _replicated(
    b: Context, node: Node, condition: tf.Graph, body: tf.Graph, refused: CollectiveInLoop
) -> PlacedOutputs | None:
    """Replicates a loop: through the builder (returns None), or here if it reads variables that are held sharded.

    Raises: CollectiveInLoop: the loop is inside another loop, which is then replicated.
    """
    if b.in_loop:
        raise refused
    handles = [each for each in node.inputs if each.dtype == tf.resource]
    if not any(has_shards(b.placement(each)) for each in handles):
        return None
    values = [each for each in node.inputs if each.dtype != tf.resource]
    b.all_replicated(values)
    b.report.replicated_op(node, [each for each in values if isinstance(b.placement(each), Sharded)])
    loop = _Loop(b, node, condition, body, is_replicated=True)
    for _ in range(MOST_TRIES):
        try:
            return loop.make()
        except _Changed:
            continue
    return None


class _Loop:
    """A loop that is rebuilt until a round keeps the assumptions about its values.

    known: the result of another cut of the same loop (Context.decisions).
    is_replicated: everything that enters the loop is replicated, except handles of variables.
    Attributes: assumed: assumptions about the loop's values, by position among its operands.
    """

    def __init__(
        self,
        b: Context,
        node: Node,
        condition: tf.Graph,
        body: tf.Graph,
        known: Assumed | None = None,
        *,
        is_replicated: bool = False,
    ) -> None:
        self.b, self.node, self._is_replicated = b, node, is_replicated
        self.graphs = {"condition": condition, "body": body}
        program = b.program_of(node, body, "body")
        self.starts, self.ends = program.placeholders, program.outputs
        self.carried = [i for i, end in enumerate(self.ends) if end.source() is not self.starts[i]]
        self.assumed = dict(known or {i: b.abstract(node.inputs[i]) for i in self.carried})
        if is_replicated:
            self.assumed = {i: replace(each, placement=REPLICATED) for i, each in self.assumed.items()}
        self._positions: dict[Value, int] = {}
        self._has_assumed_sharded = False

    def make(self) -> PlacedOutputs:
        """Builds the loop if a round keeps the assumptions. Raises: _Changed; ShardLists; CollectiveInLoop; Pending."""
        b, node = self.b, self.node
        body = self._graph("body", [self._start(i) for i in self.carried])
        with body.building():
            inners = [self._inner("body", body)]
            inners[0].build({})
            self._compare(inners[0])
            placements = {i: each.placement for i, each in self.assumed.items()}
            ends = [inners[0].redistributed(inners[0].program.outputs[i], placements[i]) for i in self.carried]
            body.end(ends)
        shapes = self._shapes()
        for tensor, shape in zip(body.graph.outputs, shapes):
            tensor.set_shape(shape)
        starts = [self._start(i) for i in self.carried]
        condition = self._graph("condition", starts)
        condition.share_captures(body)
        with condition.building():
            inners.append(self._inner("condition", condition))
            predicate = inners[1].program.outputs[0]
            inners[1].build({predicate: REPLICATED})
            condition.end([inners[1].replicated(predicate)])
        # Overlapping rounds would draw in a different order on each rank.
        at_once = 1 if unchanged.draws_numbers(node) else node.attr("parallel_iterations", int)
        starts = [_with_kept_shape(start, shape) for start, shape in zip(starts, shapes)]
        loop = while_op(condition, body, starts, shapes, at_once)
        b.ran(loop)
        for inner in inners:
            b.report.add(inner.report)
        by_position = dict(zip(self.carried, loop.outputs))
        return [self._output(i, by_position.get(i)) for i in range(len(node.outputs))]

    def _graph(self, label: str, starts: Sequence[tf.Tensor]) -> LoopGraph:
        has_effects = any(map(tf_compat.is_stateful, self.graphs[label].get_operations()))
        result = LoopGraph(label, has_effects=has_effects)
        with result.graph.as_default():
            result.carry(starts, self._shapes())
        return result

    def _shapes(self) -> list[tf.TensorShape]:
        """Returns the known shapes of this rank's loop values."""
        return [self.b.static_local_shape(self.starts[i].shape, self.assumed[i].placement) for i in self.carried]

    def _output(self, i: int, result: tf.Tensor | None) -> tuple[tf.Tensor, Placement]:
        b, value = self.b, self.node.inputs[i]
        known = self.assumed.get(i) or b.abstract(value)
        b.set_abstract(self.node.outputs[i], known)
        return b.local(value) if result is None else result, known.placement

    def _start(self, i: int) -> tf.Tensor:
        b, value, placement = self.b, self.node.inputs[i], self.assumed[i].placement
        if isinstance(placement, Sharded) and not b.can_shard(value, placement):
            raise CollectiveInLoop(value)
        if placement not in (REPLICATED, PARTIAL) and not isinstance(placement, (Sharded, TensorList)):
            raise CollectiveInLoop(value)
        try:
            return b.redistributed(value, placement)
        except Uncertain:
            raise CollectiveInLoop(value) from None

    def _inner(self, label: str, graph: LoopGraph) -> SubgraphBuilder:
        inner = SubgraphBuilder(self.b, self.node, self.graphs[label], label, graph.graph.outer_graph, is_loop=True)
        values = inner.program.placeholders
        for i, tensor in zip(self.carried, graph.carried):
            inner.carry(values[i], tensor, self.assumed[i], functools.partial(self._shard, i, graph, tensor))
        for i, value in enumerate(values):
            if i not in self.assumed:
                is_handle = value.dtype == tf.resource
                inner.lend(value, self.node.inputs[i], replicated=self._is_replicated and not is_handle)
        self._positions = {value: i for i, value in enumerate(values)}
        return inner

    def _shard(self, i: int, graph: LoopGraph, tensor: tf.Tensor, placement: TensorList) -> None:
        """Assumes that a list is sharded; `tensor`: its placeholder, which nothing reads yet."""
        self.assumed[i] = replace(self.assumed[i], placement=placement)
        with graph.graph.outer_graph.as_default():
            copy_element_kind(self._start(i), tensor)

    def assume_sharded(self) -> bool:
        """Assumes, once, that replicated tensors of the batch's extent (a layer's first state) are sharded.

        Returns: whether there are any.
        """
        if self._has_assumed_sharded or not self.b.rows_by_extent:
            return False
        self._has_assumed_sharded = True
        before = dict(self.assumed)
        for i, known in before.items():
            rows = self.b.rows_of_batches
            extents = enumerate(known.dims or ())
            placement = next((Sharded(axis, rows=(rows.index(each),)) for axis, each in extents if each in rows), None)
            if known.placement == REPLICATED and placement is not None:
                self.assumed[i] = replace(known, placement=placement)
        return self.assumed != before

    def shard_lists(self, request: ShardLists) -> None:
        """Assumes that lists are sharded. Raises: ShardLists: an outer loop carries some of them."""
        others = {value: placement for value, placement in request.lists.items() if value not in self._positions}
        if others:
            raise ShardLists(others)
        for value, placement in request.lists.items():
            i = self._positions[value]
            self.assumed[i] = replace(self.assumed[i], placement=placement)

    def _compare(self, inner: SubgraphBuilder) -> None:
        """Compares the end of a round with the assumptions. Raises: _Changed; CollectiveInLoop: they disagree."""
        before = dict(self.assumed)
        for i, assumed in before.items():
            value = inner.program.outputs[i]
            end = inner.abstract_outside(value)
            if assumed.placement == REPLICATED:
                assumed = replace(assumed, placement=end.placement)
            elif end.placement != assumed.placement and not self._becomes(inner, value, assumed.placement):
                raise CollectiveInLoop(value)
            placement = assumed.placement
            if isinstance(placement, Sharded) and end.dims is not None:
                axis = placement.axis  # its extent is the batch's, even if it has another name
                end = replace(end, dims=(*end.dims[:axis], inner.extent(placement), *end.dims[axis + 1 :]))
            self.assumed[i] = assumed.joined(end)
        if self.assumed != before:
            raise _Changed

    def _becomes(self, inner: SubgraphBuilder, end: Value, placement: Placement) -> bool:
        if inner.placement(end) != REPLICATED:
            return False
        return placement == PARTIAL or isinstance(placement, Sharded) and inner.can_shard(end, placement)


def _with_kept_shape(start: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Returns `start` with only the part of its shape that the rounds keep.

    TensorFlow's constant folding mistakes the initial shape of a loop value for its final shape (2.21: a concat in
    each round whose gradient is taken).
    """
    if start.dtype == tf.variant or shape.rank is None or start.shape.as_list() == shape.as_list():
        return start
    return tf.compat.v1.placeholder_with_default(start, shape)
