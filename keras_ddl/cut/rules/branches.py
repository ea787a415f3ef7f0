"""If and Case: every rank takes the same branch, and each branch is cut as the step is."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.contents import joined, joined_entries
from keras_ddl.cut.extents import merged
from keras_ddl.cut.inner import Inner, operation_behind
from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import PARTIAL, WHOLE, ListOf, Rows, Shard, Whole


class _Tried(Exception):
    """The branches were made to see in which states they end."""


@rule("If", "StatelessIf", "Case", "StatelessCase")
def branch(b: Any, node: Any) -> Any:
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
    chosen = b.whole(choice)
    outside = tf.compat.v1.get_default_graph()

    def run(targets: list[Any] | None) -> tuple[list[Any], list[Inner]]:
        inners: list[Inner] = []

        def make(graph: Any, label: str) -> list[tf.Tensor]:
            inner = Inner(b, node, graph, label, outside, is_loop=False)
            for value, outer in zip(inner.program.placeholders, arguments):
                inner.lend(value, outer)
            inner.build({})
            inners.append(inner)
            outputs = inner.program.outputs
            if targets is None:
                if len(inners) == len(graphs):
                    raise _Tried
                return [tf.constant(0)]
            pairs = list(zip(outputs, targets))
            inner.build({value: WHOLE for value, state in pairs if isinstance(state, Whole)})
            found = [tf.identity(inner.result(value, state)) for value, state in pairs]
            for tensor, value, state in zip(found, outputs, targets):
                if not isinstance(state, (Rows, Shard)) and value.dtype not in (tf.variant, tf.resource):
                    tensor.set_shape(value.shape)
            return [*found, tf.constant(0)]

        makers = [lambda graph=graph, i=i: make(graph, f"branch_{i}") for i, graph in enumerate(graphs)]
        try:
            if is_case:
                found = tf.switch_case(chosen, makers)
            else:
                found = tf.cond(chosen, *makers)
        except _Tried:
            found = []
        return (found if isinstance(found, (list, tuple)) else [found]), inners

    _, tried = run(None)
    count = len(node.outputs)
    targets = [_common(b, tried, i) for i in range(count)]
    tensors, inners = run(targets)
    b.ran(operation_behind(tensors[-1]))
    for inner in inners:
        b.report.add(inner.report)
    for i, output in enumerate(node.outputs):
        ends = [(inner, inner.program.outputs[i]) for inner in inners]
        _set_known(b, output, ends)
    return list(zip(tensors[:count], targets))


def _set_known(b: Any, output: Any, ends: Any) -> None:
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


def _common(b: Any, inners: list[Inner], index: int) -> Any:
    """Returns the state in which all branches can give an output."""
    ends = [(inner, inner.program.outputs[index]) for inner in inners]
    states = [inner.state(value) for inner, value in ends]
    others = {each for each in states if not isinstance(each, Whole)}
    if len(others) != 1:
        return WHOLE
    state = others.pop()
    if all(each == state for each in states):
        return state
    whole = [(inner, value) for (inner, value), each in zip(ends, states) if isinstance(each, Whole)]
    if isinstance(state, Rows):
        return state if all(inner.fits(value, state) for inner, value in whole) else WHOLE
    if isinstance(state, ListOf):
        return state if all(value.node.type == "OptionalNone" for _, value in whole) else WHOLE
    return state if state == PARTIAL else WHOLE
