"""Builds operations unchanged and replicated on every rank, because of an attribute (attributes.py)."""

from __future__ import annotations

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.placements import PlacedTensor
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.building import first_rank
from keras_ddl.cut.operations.context import Context

_READ_ONLY = "_read_only_resource_inputs"


def make(context: Context, node: Node, reason: str) -> list[PlacedTensor]:
    """Builds an operation unchanged. Raises: Pending.

    If it draws random numbers, all ranks run it and continue with rank 0's results: draws compiled by XLA depend on how
    many compiled functions the process has run before, which may differ between ranks.
    """
    draws = context.everyone is not None and draws_numbers(node)
    if draws:
        kind = f"If an operation {reason} draws random numbers, all ranks use rank 0's draws"
        first_rank.check_sendable(context, node, kind, "Leave out the attribute, or draw outside of the operation.")
    made = context.make_replicated(node)
    context.report.keeps(node, reason, any(map(context.depends_on_batch, node.inputs)))
    if not draws:
        return made
    written = _written(node)
    with tf.control_dependencies(context.operations_so_far()):
        for value in written:
            _agree_on(context, context.replicated(value), *tf_compat.variable_kind(value.tensor))
        made = first_rank.broadcast_outputs(context, node, [tensor for tensor, _ in made])
    count = first_rank.messages(node.outputs) + len(written)
    context.report.from_rank_0(node, count, "draws random numbers of the process's own")
    return made


def _agree_on(context: Context, handle: tf.Tensor, shape: tf.TensorShape, dtype: tf.DType) -> None:
    """Gives a variable rank 0's value on all ranks."""
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
    context.ran(tf.raw_ops.AssignVariableOp(resource=handle, value=first_rank.broadcast(context, dtype, shape, value)))


def _written(node: Node) -> list[Value]:
    """Returns the handles of variables that a call may write."""
    attributes = node.definition.attr
    read = set(attributes[_READ_ONLY].list.i) if _READ_ONLY in attributes else set()
    return [each for i, each in enumerate(node.inputs) if each.dtype == tf.resource and i not in read]


def draws_numbers(node: Node) -> bool:
    """Whether an operation, or a function that it calls, draws random numbers without a generator's state."""
    if "seed" in node.definition.attr and tf_compat.is_stateful(node.operation):
        return True
    pending = tf_compat.graphs_of(node.operation)
    seen: set[int] = set()
    while pending:
        graph = pending.pop()
        if id(graph) in seen:
            continue
        seen.add(id(graph))
        for operation in graph.get_operations():
            if tf_compat.is_stateful(operation) and any(each.name == "seed" for each in operation.op_def.attr):
                return True
            pending += tf_compat.graphs_of(operation)
    return False
