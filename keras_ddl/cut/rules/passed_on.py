"""What is only passed on, and rows of what is computed entry by entry of operands of which rows can be had."""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.context import Context
from keras_ddl.cut.placements import Made, PlacedTensor, Sharded
from keras_ddl.cut.program import Node
from keras_ddl.cut.registry import rule
from keras_ddl.cut.rows.entrywise import ENTRYWISE


@rule("IdentityN", "Identity", "StopGradient", "PreventGradient", "Snapshot")
def identity(b: Context, node: Node) -> Made | list[PlacedTensor]:
    if not node.after:
        return b.forward(node)
    # Kept apart where it stands for having waited for something.
    outputs = b.make(node, [b.local(each) for each in node.inputs])
    return [(tensor, b.placement(value)) for tensor, value in zip(outputs, node.inputs)]


@rule(*ENTRYWISE, "Identity", of_replicated=True)
def of_whole(b: Context, node: Node) -> list[PlacedTensor]:
    """Of operands of which rows can be made by themselves (a random draw), rows of the result can."""
    placed = b.make_replicated(node)
    if any(b.has_materializer(each) for each in node.inputs) and not node.after and node.outputs[0].dtype != tf.variant:
        b.register_materializer(node.outputs[0], lambda rows: _rows_of(b, node, rows))
    return placed


def _rows_of(b: Context, node: Node, rows: Sharded) -> tf.Tensor | None:
    rank = node.outputs[0].rank
    new = []
    for value in node.inputs:
        dims = b.dims(value)
        if dims is None or rank is None:
            return None
        axis = rows.axis - (rank - len(dims))
        if axis >= 0 and b.can_shard(value, rows.at(axis)):  # also a batch of 1, of which a rank may have none
            new.append(b.sharded(value, rows.at(axis)))
        elif axis < 0 or dims[axis] == 1:
            new.append(b.replicated(value))
        else:
            return None
    return b.make(node, new)[0]
