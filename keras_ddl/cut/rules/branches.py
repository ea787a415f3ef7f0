"""If and Case: every rank takes the same branch, and every branch is cut in the same way as the step."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.contents import AbstractValue
from keras_ddl.cut.analysis.dims import certain
from keras_ddl.cut.analysis.placements import (
    FLAT_SHARD,
    PARTIAL,
    REPLICATED,
    PlacedOutputs,
    Placement,
    Sharded,
    TensorList,
    has_shards,
)
from keras_ddl.cut.analysis.program import BRANCHES, Node, Value
from keras_ddl.cut.building.subgraph import SubgraphBuilder, operation_behind
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.registry import rule


class _Tried(Exception):
    """Raised when branches were built only to learn the placements of their outputs."""


class _Stale(Exception):
    """Raised when a branch's outputs no longer have the placements of the previous build."""


@rule(*BRANCHES)
def branch(b: Context, node: Node) -> PlacedOutputs | None:
    """Builds an If or Case, whose branches must return values in the same placements."""
    choice, arguments = node.inputs[0], node.inputs[1:]
    if not node.type.endswith("Case") and choice.dtype != tf.bool or choice.rank != 0:
        return None
    graphs = [certain(each) for each in node.branch_graphs()]
    if any(len(each.inputs) != len(arguments) for each in graphs):
        return None
    branches = _Branches(b, node, graphs)
    key = ("branch", node.key, b.knowledge_of(arguments))
    targets = b.decisions.get(key)
    if not isinstance(targets, list):
        tried = branches.make(None)[1]
        targets = b.decisions[key] = [_common(tried, i) for i in range(len(node.outputs))]
        if b.is_trial and all(_stands_for(value, target) for value, target in zip(node.outputs, targets)):
            return _placeholders(b, node, tried, targets)
    try:
        tensors, inners = branches.make(targets)
    except _Stale:
        del b.decisions[key]
        return branch(b, node)
    b.ran(operation_behind(tensors[-1]))
    for inner in inners:
        b.report.add(inner.report)
    _set_known(b, node, inners)
    return list(zip(tensors[: len(node.outputs)], targets))


class _Branches:
    """The branches of an operation, to be built in the graph of a rank.

    The branches are built twice: once to learn the placements of their outputs, and once to return outputs in common
    placements. Results of the first time are remembered (Context.decisions) for inner branches and loops, which are
    built again the second time, so the time of a cut does not double with each nested branch.
    """

    def __init__(self, b: Context, node: Node, graphs: Sequence[tf.Graph]) -> None:
        self.b, self.node, self.graphs = b, node, graphs
        self.chosen = b.replicated(node.inputs[0])
        self.outside = tf.compat.v1.get_default_graph()

    def make(self, targets: Sequence[Placement] | None) -> tuple[list[tf.Tensor], list[SubgraphBuilder]]:
        """Returns the outputs in the placements `targets`, and the builders; without targets, no outputs."""
        inners: list[SubgraphBuilder] = []

        def make(graph: tf.Graph, label: str) -> list[tf.Tensor]:
            is_trial = targets is None
            inner = SubgraphBuilder(self.b, self.node, graph, label, self.outside, is_loop=False, is_trial=is_trial)
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
                result = tf.switch_case(self.chosen, makers)
            else:
                result = tf.cond(self.chosen, *makers)
        except _Tried:
            result = []
        return (list(result) if isinstance(result, (list, tuple)) else [result]), inners


def _outputs(inner: SubgraphBuilder, targets: Sequence[Placement]) -> list[tf.Tensor]:
    """Returns the outputs of a branch in these placements, and one more. Raises: _Stale: it cannot."""
    pairs = list(zip(inner.program.outputs, targets))
    for value, target in pairs:
        placement = inner.placement(value)
        fits = not isinstance(target, Sharded) or inner.can_shard(value, target)
        if target not in (REPLICATED, placement) and not (placement == REPLICATED and fits):
            raise _Stale
    inner.build({value: REPLICATED for value, target in pairs if target == REPLICATED})
    result = [tf.identity(inner.redistributed(value, target)) for value, target in pairs]
    for tensor, (value, target) in zip(result, pairs):
        if not has_shards(target) and value.dtype not in (tf.variant, tf.resource):
            tensor.set_shape(value.shape)
    return [*result, tf.constant(0)]


def _stands_for(value: Value, placement: Placement) -> bool:
    """Whether a placeholder can stand for an output when only placements matter."""
    return bool(value.dtype != tf.resource) and placement != FLAT_SHARD


def _placeholders(
    b: Context, node: Node, inners: Sequence[SubgraphBuilder], targets: Sequence[Placement]
) -> list[tuple[tf.Tensor, Placement]]:
    """Returns placeholders for branches' outputs in a trial graph. The branches are built with the real graph."""
    _set_known(b, node, inners)
    shapes = [b.static_local_shape(value.shape, target) for value, target in zip(node.outputs, targets)]
    tensors = [tf.compat.v1.placeholder(value.dtype, shape) for value, shape in zip(node.outputs, shapes)]
    return list(zip(tensors, targets))


def _set_known(b: Context, node: Node, inners: Sequence[SubgraphBuilder]) -> None:
    """Records the facts about the outputs on which all branches agree."""
    for i, output in enumerate(node.outputs):
        ends = [inner.abstract_outside(inner.program.outputs[i]) for inner in inners]
        b.set_abstract(output, functools.reduce(AbstractValue.joined, ends))


def _common(inners: Sequence[SubgraphBuilder], index: int) -> Placement:
    """Returns the placement in which all branches can return an output."""
    ends = [(inner, inner.program.outputs[index]) for inner in inners]
    others = {inner.placement(value) for inner, value in ends} - {REPLICATED}
    if len(others) != 1:
        return REPLICATED
    result = others.pop()
    replicated = [(inner, value) for inner, value in ends if inner.placement(value) == REPLICATED]
    if not replicated or result == PARTIAL:
        return result
    if isinstance(result, Sharded) and all(inner.can_shard(value, result) for inner, value in replicated):
        return result
    if isinstance(result, TensorList) and all(value.node.type == "OptionalNone" for _, value in replicated):
        return result
    return REPLICATED
