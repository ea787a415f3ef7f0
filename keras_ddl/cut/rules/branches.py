"""If and Case: every rank takes the same branch, and each branch is cut as the step is."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.contents import joined, joined_entries
from keras_ddl.cut.context import Context
from keras_ddl.cut.extents import merged
from keras_ddl.cut.placements import PARTIAL, REPLICATED, FlatShard, Replicated, Sharded, TensorList
from keras_ddl.cut.program import Node
from keras_ddl.cut.registry import rule
from keras_ddl.cut.subgraph import SubgraphBuilder, operation_behind


class _Tried(Exception):
    """The branches were made to see in which states they end."""


class _Stale(Exception):
    """A branch does not end in the states in which it ended the last time."""


@rule("If", "StatelessIf", "Case", "StatelessCase")
def branch(b: Context, node: Node) -> Any:
    choice, arguments = node.inputs[0], node.inputs[1:]
    is_case = node.type.endswith("Case")
    if not is_case and choice.dtype != tf.bool or choice.rank != 0:
        return None
    operation = node.operation
    graphs = (
        tf_compat.called_graphs(operation)
        if is_case
        else [tf_compat.called_graph(operation, f"{each}_branch") for each in ("then", "else")]
    )
    if any(each is None or len(each.inputs) != len(arguments) for each in graphs):
        return None
    branches = _Branches(b, node, graphs)
    key = ("branch", node.key, b.knowledge_of(arguments))
    targets = b.decisions.get(key)
    if targets is None:
        tried = branches.make(None)[1]
        targets = b.decisions[key] = [_common(b, tried, i) for i in range(len(node.outputs))]
        if b.is_trial and all(_stands_for(value, placement) for value, placement in zip(node.outputs, targets)):
            return _placeholders(b, node, tried, targets)
    try:
        tensors, inners = branches.make(targets)
    except _Stale:
        del b.decisions[key]
        return branch(b, node)
    b.ran(operation_behind(tensors[-1]))
    for inner in inners:
        b.report.add(inner.report)
    _set_all_known(b, node, inners)
    return list(zip(tensors[: len(node.outputs)], targets))


class _Branches:
    """The branches of an operation, to be made in the graph of a rank.

    They are made twice: once to see in which states they end, and once to end in a state that is common to all. What
    the first time showed is remembered (Builder.decisions), for branches and loops inside, which the second time makes
    again: so the time of a cut does not double with each branch inside of another.
    """

    def __init__(self, b: Context, node: Node, graphs: list[Any]) -> None:
        self.b, self.node, self.graphs = b, node, graphs
        self.chosen = b.replicated(node.inputs[0])
        self.outside = tf.compat.v1.get_default_graph()

    def make(self, targets: list[Any] | None) -> tuple[list[Any], list[SubgraphBuilder]]:
        """Returns the outputs, in the states `targets`, with the branches that were made; without targets, none."""
        inners: list[SubgraphBuilder] = []

        def make(graph: Any, label: str) -> list[tf.Tensor]:
            inner = SubgraphBuilder(
                self.b, self.node, graph, label, self.outside, is_loop=False, is_trial=targets is None
            )
            inners.append(inner)
            for value, outer in zip(inner.program.placeholders, self.node.inputs[1:]):
                inner.lend(value, outer)
            inner.build({})
            if targets is not None:
                return _outputs(inner, targets)
            if len(inners) == len(self.graphs):
                raise _Tried
            return [tf.constant(0)]

        makers = [lambda graph=graph, i=i: make(graph, f"branch_{i}") for i, graph in enumerate(self.graphs)]
        try:
            if self.node.type.endswith("Case"):
                found = tf.switch_case(self.chosen, makers)
            else:
                found = tf.cond(self.chosen, *makers)
        except _Tried:
            found = []
        return (found if isinstance(found, (list, tuple)) else [found]), inners


def _outputs(inner: SubgraphBuilder, targets: list[Any]) -> list[tf.Tensor]:
    """Returns the outputs of a branch in these states, and one more. Raises: _Stale: it cannot give them so."""
    pairs = list(zip(inner.program.outputs, targets))
    for value, target in pairs:
        placement = inner.placement(value)
        fits = not isinstance(target, Sharded) or inner.can_shard(value, target)
        if target not in (REPLICATED, placement) and not (isinstance(placement, Replicated) and fits):
            raise _Stale
    inner.build({value: REPLICATED for value, placement in pairs if isinstance(placement, Replicated)})
    found = [tf.identity(inner.redistributed(value, placement)) for value, placement in pairs]
    for tensor, (value, placement) in zip(found, pairs):
        if not isinstance(placement, (Sharded, FlatShard)) and value.dtype not in (tf.variant, tf.resource):
            tensor.set_shape(value.shape)
    return [*found, tf.constant(0)]


def _stands_for(value: Any, placement: Any) -> bool:
    """Whether a placeholder can stand for an output where nothing but states is looked at."""
    return value.dtype != tf.resource and not isinstance(placement, FlatShard)


def _placeholders(b: Context, node: Node, inners: list[SubgraphBuilder], targets: list[Any]) -> list[Any]:
    """Returns outputs of branches inside of one that is only tried: the branches are made when that one is."""
    _set_all_known(b, node, inners)
    found = []
    for value, placement in zip(node.outputs, targets):
        shape = value.shape
        if isinstance(placement, Sharded) and shape.rank is not None:
            local = b.local_extent(placement)
            extents = shape.as_list()
            extents[placement.axis] = local if isinstance(local, int) else None
            shape = tf.TensorShape(extents)
        found.append((tf.compat.v1.placeholder(value.dtype, shape), placement))
    return found


def _set_all_known(b: Context, node: Node, inners: list[SubgraphBuilder]) -> None:
    for i, output in enumerate(node.outputs):
        _set_known(b, output, [(inner, inner.program.outputs[i]) for inner in inners])


def _set_known(b: Context, output: Any, ends: Any) -> None:
    """What all branches agree in is known of the output."""
    b.extents.named[output.key] = output
    dims = [inner.dims_outside(value) for inner, value in ends]
    common = dims[0]
    contents = [inner.content_outside(value) for inner, value in ends]
    content = contents[0]
    for other, more in zip(dims[1:], contents[1:]):
        common, content = joined_entries(common, other), joined(content, more)
    b.extents.set_dims(output, merged(output, common))
    b.extents.set_content(output, content)


def _common(b: Context, inners: list[SubgraphBuilder], index: int) -> Any:
    """Returns the state in which all branches can give an output."""
    ends = [(inner, inner.program.outputs[index]) for inner in inners]
    placements = [inner.placement(value) for inner, value in ends]
    others = {each for each in placements if not isinstance(each, Replicated)}
    if len(others) != 1:
        return REPLICATED
    placement = others.pop()
    if all(each == placement for each in placements):
        return placement
    whole = [(inner, value) for (inner, value), each in zip(ends, placements) if isinstance(each, Replicated)]
    if isinstance(placement, Sharded):
        return placement if all(inner.can_shard(value, placement) for inner, value in whole) else REPLICATED
    if isinstance(placement, TensorList):
        return placement if all(value.node.type == "OptionalNone" for _, value in whole) else REPLICATED
    return placement if placement == PARTIAL else REPLICATED
