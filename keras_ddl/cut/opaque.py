"""Operations that are made as they are (attributes.py says which): of whole inputs, alike on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import first_rank
from keras_ddl.cut.pieces import Piece
from keras_ddl.cut.program import Node
from keras_ddl.cut.states import WHOLE

if TYPE_CHECKING:
    from keras_ddl.cut.builder import Builder

_READ_ONLY = "_read_only_resource_inputs"


def make(b: Builder, node: Node, reason: str) -> list[Piece]:
    """Makes an operation as it is. Raises: Waiting.

    Where it draws random numbers all ranks make it, and go on with rank 0's results: compiled by XLA, draws follow from
    the number of compiled functions that a process has run before, which need not be the same on all ranks.
    """
    draws = draws_numbers(node)
    if draws:
        kind = f"An operation {reason} that draws random numbers draws those of rank 0"
        first_rank.check_sendable(b, node, kind, "Leave out what it asks for, or draw outside of it.")
    pieces = b.make_whole(node)
    b.report.keeps(node, reason, any(map(b.is_of_batch, node.inputs)))
    if not draws:
        return pieces
    written = _written(node)
    with tf.control_dependencies(b.made_now()):
        for value in written:
            _agree_on(b, b.whole(value), *tf_compat.variable_kind(value.tensor))
        pieces = [
            Piece(first_rank.sent(b, value.dtype, value.shape, piece.tensor), WHOLE)
            for value, piece in zip(node.outputs, pieces)
        ]
    count = first_rank.messages(node.outputs) + len(written)
    b.report.from_rank_0(node, count, "draws random numbers of the process's own")
    return pieces


def _agree_on(b: Builder, handle: tf.Tensor, shape: tf.TensorShape, dtype: tf.DType) -> None:
    """Gives a variable rank 0's value."""
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
    b.ran(tf.raw_ops.AssignVariableOp(resource=handle, value=first_rank.sent(b, dtype, shape, value)))


def _written(node: Node) -> list[Any]:
    """Returns the handles of variables that a call may write."""
    attributes = node.definition.attr
    read = set(attributes[_READ_ONLY].list.i) if _READ_ONLY in attributes else set()
    return [each for i, each in enumerate(node.inputs) if each.dtype == tf.resource and i not in read]


def draws_numbers(node: Node) -> bool:
    """Whether an operation draws random numbers without a generator's state, itself or in what it calls."""
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
