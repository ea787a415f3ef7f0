"""While: what a loop carries is cut where its rounds keep it cut; nothing moves between ranks in a loop."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import opaque
from keras_ddl.cut.contents import joined, joined_entries
from keras_ddl.cut.context import Context
from keras_ddl.cut.extents import merged
from keras_ddl.cut.placements import PARTIAL, REPLICATED, Replicated, Sharded
from keras_ddl.cut.program import Node
from keras_ddl.cut.registry import rule
from keras_ddl.cut.subgraph import CollectiveInLoop, ShardLists, SubgraphBuilder, operation_behind

MOST_TRIES = 50


class _Changed(Exception):
    """After a round, more is carried in another state, or less is known of it, than was supposed."""


@rule("While", "StatelessWhile")
def while_loop(b: Context, node: Node) -> Any:
    condition, body = (tf_compat.called_graph(node.operation, each) for each in ("cond", "body"))
    count = len(node.inputs)
    if condition is None or body is None or len(condition.inputs) != count or len(body.inputs) != count:
        return None
    key = ("loop", node.key, b.knowledge_of(node.inputs))
    known = b.decisions.get(key)
    if isinstance(known, CollectiveInLoop):
        return _replicate_loop(b, known)
    loop = _Loop(b, node, condition, body, known)
    for _ in range(MOST_TRIES):
        try:
            placed = loop.make()
            b.decisions[key] = loop.assumed
            return placed
        except _Changed:
            continue
        except ShardLists as wish:
            loop.promote(wish)
        except CollectiveInLoop as refused:
            if known is not None:
                known, loop = None, _Loop(b, node, condition, body)
            elif not loop.assume_sharded():
                b.decisions[key] = refused
                return _replicate_loop(b, refused)
    return None


def _replicate_loop(b: Context, refused: CollectiveInLoop) -> None:
    """Has a loop computed whole. Raises: Refused: it is inside of another one, which then is."""
    if b.in_loop:
        raise refused


class _Loop:
    """What is supposed of what the loop carries: states, extents, contents of lists. Tried until a round keeps it.

    `known`: what another cut of the same loop came to (Builder.decisions).
    """

    def __init__(self, b: Context, node: Node, condition: Any, body: Any, known: Any = None) -> None:
        self.b, self.node = b, node
        self.graphs = {"condition": condition, "body": body}
        program = b.program_of(node, body, "body")
        same = [_origin(end) is start for start, end in zip(program.placeholders, program.outputs)]
        self.carried = [i for i, each in enumerate(same) if not each]
        values = node.inputs
        self.placements = {i: b.placement(values[i]) for i in self.carried}
        self.dims = {i: b.dims(values[i]) for i in self.carried}
        self.contents = {i: b.extents.content(values[i]) for i in self.carried}
        self._numbers: dict[Any, int] = {}
        self._assumed_rows = False
        self.shapes = {i: program.placeholders[i].shape for i in self.carried}
        if known is not None:
            self.placements, self.dims, self.contents = map(dict, known)

    @property
    def assumed(self) -> Any:
        return self.placements, self.dims, self.contents

    def make(self) -> Any:
        b, node = self.b, self.node
        self.outside = tf.compat.v1.get_default_graph()
        starts = [self._start(i) for i in self.carried]
        invariants = [self._shape(i) for i in self.carried]
        starts = [_of_shape(start, shape) for start, shape in zip(starts, invariants)]
        inners: dict[str, SubgraphBuilder] = {}

        def condition(*carried: tf.Tensor) -> tf.Tensor:
            inner = inners["condition"] = self._inner("condition", carried)
            wanted = inner.program.outputs[0]
            inner.build({wanted: REPLICATED})
            return tf.identity(inner.replicated(wanted))

        def body(*carried: tf.Tensor) -> list[tf.Tensor]:
            inner = inners["body"] = self._inner("body", carried)
            inner.build({})
            self._compare(inner)
            found = [
                tf.identity(inner.redistributed(inner.program.outputs[i], self.placements[i])) for i in self.carried
            ]
            for tensor, shape in zip(found, invariants):
                tensor.set_shape(shape)
            return found

        # Rounds that overlap would draw in another order on each rank.
        at_once = 1 if opaque.draws_numbers(node) else node.attr("parallel_iterations")
        found = tf.while_loop(condition, body, starts, shape_invariants=invariants, parallel_iterations=at_once)
        found = list(found) if isinstance(found, (list, tuple)) else [found]
        b.ran(operation_behind(found[0]))
        for inner in inners.values():
            b.report.add(inner.report)
        placed = []
        place = {i: at for at, i in enumerate(self.carried)}
        for i, output in enumerate(node.outputs):
            value = node.inputs[i]
            b.extents.named[output.key] = output
            known = self.dims[i] if i in place else b.dims(value)
            b.extents.set_dims(output, merged(output, known))
            b.extents.set_content(output, self.contents[i] if i in place else b.extents.content(value))
            if i in place:
                placed.append((found[place[i]], self.placements[i]))
            else:
                placed.append((b.local(value), b.placement(value)))
        return placed

    def _start(self, i: int) -> Any:
        value, placement = self.node.inputs[i], self.placements[i]
        if isinstance(placement, Sharded):
            if self.b.placement(value) != placement and not self.b.can_shard(value, placement):
                raise CollectiveInLoop(value)
            return self.b.sharded(value, placement)
        if isinstance(placement, Replicated) or placement == PARTIAL:
            return self.b.replicated(value) if isinstance(placement, Replicated) else self.b.partial(value)
        found = self.b.tensor_list(value, placement) if hasattr(placement, "element") else None
        if found is None:
            raise CollectiveInLoop(value)
        return found

    def _shape(self, i: int) -> tf.TensorShape:
        shape, placement = self.shapes[i], self.placements[i]
        if not isinstance(placement, Sharded) or shape.rank is None:
            return shape
        local = self.b.local_extent(placement)
        extents = shape.as_list()
        extents[placement.axis] = local if isinstance(local, int) else None
        return tf.TensorShape(extents)

    def _inner(self, label: str, carried: Any) -> SubgraphBuilder:
        inner = SubgraphBuilder(self.b, self.node, self.graphs[label], label, self.outside, is_loop=True)
        values = inner.program.placeholders
        for i, tensor in zip(self.carried, carried):
            inner.carry(values[i], tensor, self.placements[i], self.dims[i], self.contents[i])
        for i, value in enumerate(values):
            if i not in self.placements:
                inner.lend(value, self.node.inputs[i])
        self._numbers = {value: i for i, value in enumerate(values)}
        return inner

    def assume_sharded(self) -> bool:
        """Supposes, once, that whole tensors of the batch's extent (a layer's first state) are cut. Whether any is."""
        if self._assumed_rows:
            return False
        self._assumed_rows = True
        before = dict(self.placements)
        for i, dims in self.dims.items():
            axis = next((axis for axis, each in enumerate(dims or ()) if each == self.b.rows), None)
            if isinstance(self.placements[i], Replicated) and axis is not None:
                self.placements[i] = Sharded(axis)
        return self.placements != before

    def promote(self, wish: ShardLists) -> None:
        """Has lists cut from the start. Raises: Promote: it is a loop around this one that carries some."""
        others = {value: placement for value, placement in wish.lists.items() if value not in self._numbers}
        if others:
            raise ShardLists(others)
        for value, placement in wish.lists.items():
            self.placements[self._numbers[value]] = placement

    def _compare(self, inner: SubgraphBuilder) -> None:
        """Holds what a round ends with against what was supposed. Raises: _Changed; Refused: they cannot agree."""
        changed = False
        for i in self.carried:
            end = inner.program.outputs[i]
            placement, dims, content = inner.placement(end), inner.dims_outside(end), inner.content_outside(end)
            if isinstance(self.placements[i], Replicated) and not isinstance(placement, Replicated):
                self.placements[i], changed = placement, True
            elif placement != self.placements[i] and not self._becomes(inner, end, self.placements[i]):
                raise CollectiveInLoop(end)
            if isinstance(self.placements[i], Sharded) and dims is not None:
                axis = self.placements[i].axis  # its extent is the batch's, whatever it is called
                dims = (*dims[:axis], inner.extent(self.placements[i]), *dims[axis + 1 :])
            agreed = joined_entries(self.dims[i], dims)
            both = joined(self.contents[i], content)
            if agreed != self.dims[i] or both != self.contents[i]:
                self.dims[i], self.contents[i], changed = agreed, both, True
        if changed:
            raise _Changed

    def _becomes(self, inner: SubgraphBuilder, end: Any, wanted: Any) -> bool:
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


def _origin(value: Any) -> Any:
    while value.node.type == "Identity":
        value = value.node.inputs[0]
    return value
