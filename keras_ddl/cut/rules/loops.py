"""While: what a loop carries is sharded where its rounds keep it so; there is no collective in a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import opaque
from keras_ddl.cut.contents import Content, Entries, joined, joined_entries
from keras_ddl.cut.context import Context
from keras_ddl.cut.extents import merged
from keras_ddl.cut.placements import PARTIAL, REPLICATED, Made, Placement, Replicated, Sharded, TensorList
from keras_ddl.cut.program import Node, Value
from keras_ddl.cut.registry import rule
from keras_ddl.cut.subgraph import CollectiveInLoop, ShardLists, SubgraphBuilder, operation_behind

MOST_TRIES = 50


class _Changed(Exception):
    """After a round, more is carried in another placement, or less is known of it, than was assumed."""


class _Assumed(NamedTuple):
    """What is assumed of what a loop carries, by the position among its operands."""

    placements: dict[int, Placement]
    dims: dict[int, Entries | None]
    contents: dict[int, Content | None]


@rule("While", "StatelessWhile")
def while_loop(b: Context, node: Node) -> Made | None:
    condition, body = (tf_compat.called_graph(node.operation, each) for each in ("cond", "body"))
    count = len(node.inputs)
    if condition is None or body is None or len(condition.inputs) != count or len(body.inputs) != count:
        return None
    key = ("loop", node.key, b.knowledge_of(node.inputs))
    known = b.decisions.get(key)
    if isinstance(known, CollectiveInLoop):
        _replicate(b, known)
        return None
    is_first = known is None
    loop = _Loop(b, node, condition, body, known if isinstance(known, _Assumed) else None)
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
                _replicate(b, refused)
                return None
    return None


def _replicate(b: Context, refused: CollectiveInLoop) -> None:
    """Has a loop replicated. Raises: CollectiveInLoop: it is inside of another one, which then is."""
    if b.in_loop:
        raise refused


class _Loop:
    """A loop that is built until a round keeps what is assumed of what the loop carries.

    known: what another cut of the same loop came to (Context.decisions).
    """

    def __init__(
        self, b: Context, node: Node, condition: tf.Graph, body: tf.Graph, known: _Assumed | None = None
    ) -> None:
        self.b, self.node = b, node
        self.graphs = {"condition": condition, "body": body}
        program = b.program_of(node, body, "body")
        self.starts, self.ends = program.placeholders, program.outputs
        self.carried = [i for i, end in enumerate(self.ends) if end.source() is not self.starts[i]]
        values = {i: node.inputs[i] for i in self.carried}
        self.assumed = _Assumed(
            {i: b.placement(value) for i, value in values.items()},
            {i: b.dims(value) for i, value in values.items()},
            {i: b.extents.content(value) for i, value in values.items()},
        )
        if known is not None:
            self.assumed = _Assumed(known.placements.copy(), known.dims.copy(), known.contents.copy())
        self._positions: dict[Value, int] = {}
        self._has_assumed_sharded = False

    def make(self) -> Made:
        b, node, placements = self.b, self.node, self.assumed.placements
        outside = tf.compat.v1.get_default_graph()
        shapes = [b.static_local_shape(self.starts[i].shape, placements[i]) for i in self.carried]
        starts = [_of_shape(self._start(i), shape) for i, shape in zip(self.carried, shapes)]
        inners: dict[str, SubgraphBuilder] = {}

        def condition(*carried: tf.Tensor) -> tf.Tensor:
            inner = inners["condition"] = self._inner("condition", carried, outside)
            wanted = inner.program.outputs[0]
            inner.build({wanted: REPLICATED})
            return tf.identity(inner.replicated(wanted))

        def body(*carried: tf.Tensor) -> list[tf.Tensor]:
            inner = inners["body"] = self._inner("body", carried, outside)
            inner.build({})
            self._compare(inner)
            ends = [(inner.program.outputs[i], placements[i]) for i in self.carried]
            tensors = [tf.identity(inner.redistributed(value, placement)) for value, placement in ends]
            for tensor, shape in zip(tensors, shapes):
                tensor.set_shape(shape)
            return tensors

        # Rounds that overlap would draw in another order on each rank.
        at_once = 1 if opaque.draws_numbers(node) else node.attr("parallel_iterations", int)
        results = tf.while_loop(condition, body, starts, shape_invariants=shapes, parallel_iterations=at_once)
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        b.ran(operation_behind(results[0]))
        for inner in inners.values():
            b.report.add(inner.report)
        by_position = dict(zip(self.carried, results))
        return [self._output(i, by_position.get(i)) for i in range(len(node.outputs))]

    def _output(self, i: int, result: tf.Tensor | None) -> tuple[tf.Tensor, Placement]:
        b, value, output = self.b, self.node.inputs[i], self.node.outputs[i]
        b.extents.named[output.key] = output
        is_carried = i in self.assumed.placements
        b.extents.set_dims(output, merged(output, self.assumed.dims[i] if is_carried else b.dims(value)))
        b.extents.set_content(output, self.assumed.contents[i] if is_carried else b.extents.content(value))
        return (result, self.assumed.placements[i]) if is_carried else (b.local(value), b.placement(value))

    def _start(self, i: int) -> tf.Tensor:
        b, value, placement = self.b, self.node.inputs[i], self.assumed.placements[i]
        if isinstance(placement, Sharded) and b.placement(value) != placement and not b.can_shard(value, placement):
            raise CollectiveInLoop(value)
        if isinstance(placement, TensorList):
            tensor = b.tensor_list(value, placement)
            if tensor is None:
                raise CollectiveInLoop(value)
            return tensor
        if isinstance(placement, (Replicated, Sharded)) or placement == PARTIAL:
            return b.redistributed(value, placement)
        raise CollectiveInLoop(value)

    def _inner(self, label: str, carried: Sequence[tf.Tensor], outside: tf.Graph) -> SubgraphBuilder:
        inner = SubgraphBuilder(self.b, self.node, self.graphs[label], label, outside, is_loop=True)
        values, assumed = inner.program.placeholders, self.assumed
        for i, tensor in zip(self.carried, carried):
            inner.carry(values[i], tensor, assumed.placements[i], assumed.dims[i], assumed.contents[i])
        for i, value in enumerate(values):
            if i not in assumed.placements:
                inner.lend(value, self.node.inputs[i])
        self._positions = {value: i for i, value in enumerate(values)}
        return inner

    def assume_sharded(self) -> bool:
        """Assumes, once, that replicated tensors of the batch's extent (a layer's first state) are sharded.

        Returns: whether any is.
        """
        if self._has_assumed_sharded:
            return False
        self._has_assumed_sharded = True
        placements = self.assumed.placements
        before = dict(placements)
        for i, dims in self.assumed.dims.items():
            axis = next((axis for axis, each in enumerate(dims or ()) if each == self.b.rows), None)
            if isinstance(placements[i], Replicated) and axis is not None:
                placements[i] = Sharded(axis)
        return placements != before

    def shard_lists(self, request: ShardLists) -> None:
        """Assumes that lists are sharded. Raises: ShardLists: it is a loop around this one that carries some."""
        others = {value: placement for value, placement in request.lists.items() if value not in self._positions}
        if others:
            raise ShardLists(others)
        for value, placement in request.lists.items():
            self.assumed.placements[self._positions[value]] = placement

    def _compare(self, inner: SubgraphBuilder) -> None:
        """Compares the end of a round with what was assumed. Raises: _Changed; CollectiveInLoop: they disagree."""
        changed = False
        placements, all_dims, contents = self.assumed
        for i in self.carried:
            end = inner.program.outputs[i]
            placement, dims, content = inner.placement(end), inner.dims_outside(end), inner.content_outside(end)
            if isinstance(placements[i], Replicated) and not isinstance(placement, Replicated):
                placements[i], changed = placement, True
            elif placement != placements[i] and not self._becomes(inner, end, placements[i]):
                raise CollectiveInLoop(end)
            agreed = placements[i]
            if isinstance(agreed, Sharded) and dims is not None:
                axis = agreed.axis  # its extent is the batch's, whatever it is called
                dims = (*dims[:axis], inner.extent(agreed), *dims[axis + 1 :])
            known, both = joined_entries(all_dims[i], dims), joined(contents[i], content)
            if known != all_dims[i] or both != contents[i]:
                all_dims[i], contents[i], changed = known, both, True
        if changed:
            raise _Changed

    def _becomes(self, inner: SubgraphBuilder, end: Value, wanted: Placement) -> bool:
        if not isinstance(inner.placement(end), Replicated):
            return False
        return wanted == PARTIAL or isinstance(wanted, Sharded) and inner.can_shard(end, wanted)


def _of_shape(start: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Returns `start`, of which nothing more is to be known than the rounds keep.

    TensorFlow's constant folding takes the shape that a loop starts with for that of its result (2.21: a concat in each
    round, whose gradient is taken).
    """
    if start.dtype == tf.variant or shape.rank is None or start.shape.as_list() == shape.as_list():
        return start
    return tf.compat.v1.placeholder_with_default(start, shape)
