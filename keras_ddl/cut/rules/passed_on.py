"""What is only passed on, and rows of what is computed entry by entry of operands of which rows can be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.pieces import Piece
from keras_ddl.cut.program import Node
from keras_ddl.cut.propagation import Made
from keras_ddl.cut.registry import rule
from keras_ddl.cut.rows.entrywise import ENTRYWISE
from keras_ddl.cut.states import Rows

if TYPE_CHECKING:
    from keras_ddl.cut.builder import Builder


@rule("IdentityN", "Identity", "StopGradient", "PreventGradient", "Snapshot")
def identity(b: Builder, node: Node) -> Made | list[Piece]:
    if not node.after:
        return b.pass_on(node)
    # Kept apart where it stands for having waited for something.
    outputs = b.make(node, [b.held(each) for each in node.inputs])
    return [(tensor, b.state(value)) for tensor, value in zip(outputs, node.inputs)]


@rule(*ENTRYWISE, "Identity", of_whole=True)
def of_whole(b: Builder, node: Node) -> list[Piece]:
    """Of operands of which rows can be made by themselves (a random draw), rows of the result can."""
    pieces = b.make_whole(node)
    if any(b.has_recipe(each) for each in node.inputs) and not node.after and node.outputs[0].dtype != tf.variant:
        b.give_recipe(node.outputs[0], lambda rows: _rows_of(b, node, rows))
    return pieces


def _rows_of(b: Builder, node: Node, rows: Rows) -> tf.Tensor | None:
    rank = node.outputs[0].rank
    new = []
    for value in node.inputs:
        dims = b.dims(value)
        if dims is None or rank is None:
            return None
        axis = rows.axis - (rank - len(dims))
        if axis >= 0 and b.fits(value, rows.at(axis)):  # also a batch of 1, of which a rank may have none
            new.append(b.cut(value, rows.at(axis)))
        elif axis < 0 or dims[axis] == 1:
            new.append(b.whole(value))
        else:
            return None
    return b.make(node, new)[0]
