"""Values that a rank has in two states, so that what needs the other one need not move anything.

What had to be computed whole goes on as rows, and stays at hand whole. What is held as rows and is cheap, counts and
comparisons on the way to indices, can be computed again whole where its operands are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import moving
from keras_ddl.cut.extents import Dims
from keras_ddl.cut.pieces import Piece
from keras_ddl.cut.program import Node, Value
from keras_ddl.cut.states import Rows, Whole

if TYPE_CHECKING:
    from keras_ddl.cut.builder import Builder

_DEEPEST = 64  # operations that are made again rather than gathering what they give


class TwoStates:
    """Knows which values of a builder are had both ways."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._depths: dict[Value, int] = {}

    def keep_whole(self, node: Node) -> None:
        """What is counted and compared on the way to indices is computed again of wholes at hand, not gathered."""
        b = self._builder
        if node.after or tf_compat.is_stateful(node.operation) or any(map(_is_number, node.outputs)):
            return
        depth = 1 + max(map(self._depth, node.inputs), default=0)
        if depth <= _DEEPEST:
            for value in node.outputs:
                self._depths[value] = depth
                b.give_whole(value, lambda value=value: b.make_whole(node)[value.index].tensor)

    def _depth(self, value: Value) -> int:
        """Operations from what is whole at hand to a value; _DEEPEST or more if it is not known how to."""
        b = self._builder
        if isinstance(b.state(value), Whole):
            return 0
        return self._depths.get(b.origin(value), 0) if b.has_whole(value) else _DEEPEST

    def as_rows(self, node: Node, pieces: list[Piece]) -> list[Piece]:
        """Holds what was computed whole, with a row for each of the batch's, as rows: a rank goes on with its own.

        What needs all of it takes it whole as it is. Only of the batch's entries, and only where rows come about: of a
        whole input that has the extent, too, nothing has made rows until now, so it may have it by chance, as a square
        matrix of weights. Not vectors, of which all is soon computed, while what follows of rows of them may have to
        travel. Not in loops, where nothing can.
        """
        b = self._builder
        if b.in_loop or not any(map(b.is_of_batch, node.inputs)):
            return pieces
        dims = [b.dims(each) for each in node.inputs]
        had_rows = any(isinstance(b.state(each), Rows) for each in node.inputs)
        if not had_rows and any(_is_matrix(each) and b.rows in each for each in dims):
            return pieces
        return [self._piece_as_rows(value, piece) for value, piece in zip(node.outputs, pieces)]

    def _piece_as_rows(self, value: Value, piece: Piece) -> Piece:
        b, rows = self._builder, Rows(0)
        if value.dtype in (tf.variant, tf.resource) or not _is_matrix(b.dims(value)) or not b.fits(value, rows):
            return piece
        with tf.control_dependencies(None):
            held = moving.sliced(b, piece.tensor, rows)
        b.keep_as_whole(value, piece.tensor)
        return Piece(held, rows)


def _is_number(value: Value) -> bool:
    return not (value.dtype.is_integer or value.dtype in (tf.bool, tf.string))


def _is_matrix(dims: Dims | None) -> bool:
    return dims is not None and sum(each != 1 for each in dims) > 1
