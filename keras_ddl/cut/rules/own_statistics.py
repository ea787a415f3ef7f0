"""BatchNormalization with each rank's own statistics: what own_statistics.py found, made from a rank's rows alone."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import own_statistics as own
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import ONE, Dim, product
from keras_ddl.cut.placements import PARTIAL, Sharded
from keras_ddl.cut.program import Node, Value
from keras_ddl.cut.rows.reductions import axes_of


class OwnStatistics:
    """Makes the operations of calls whose statistics are each rank's own.

    To the rest of the step such a value is a part of a sum over ranks: a sum of the gradients is, and a statistic is
    when it is multiplied by the rank's share of the rows. A rank without rows has mean 0 and variance 1, so that all it
    makes of them is finite and its share of everything 0.
    """

    def __init__(self, calls: list[own.Call]) -> None:
        self._calls = {node: call for call in calls for node in call.parts}
        self._rows: dict[own.Call, Sharded | None] = {}  # how x is cut; None: not along an axis that is normalised over
        self._values: dict[Value, tf.Tensor] = {}  # own values: a rank's

    def before(self, node: Node) -> Node | None:
        """Returns what must be made before `node`: what says whether the call has rows at all."""
        call = self._calls.get(node)
        return None if call is None or node is call.mean else call.mean

    def make(self, b: Context, node: Node) -> Any:
        """Makes an operation of a call; None for others. Raises: Waiting."""
        call = self._calls.get(node)
        if call is None:
            return None
        if node is call.mean:
            self._rows[call] = _rows_of(b, call)
        rows = self._rows[call]
        if rows is None:
            return None
        part = call.parts[node]
        if part in (own.MEAN, own.VARIANCE):
            return [self._own(b, node, _moment(b, node, rows, part))]
        if part == own.UPDATE:
            return b.make_replicated(
                node
            )  # asks for the mean now: a second call of the layer is not to wait for the first
        if part == own.SUM:
            return [(_sum(b, node, rows), PARTIAL)]
        if part == own.SPREAD:
            return [(_spread(b, node, rows), rows)]
        made = b.make(node, [self._operand(b, call, value, rows) for value in node.inputs])[0]
        if part == own.VALUE:
            return [self._own(b, node, made)]
        return [(made, rows if part == own.ROW else PARTIAL)]

    def _operand(self, b: Context, call: own.Call, value: Value, rows: Sharded) -> tf.Tensor:
        kind = call.kind(value)
        if kind == own.OWN:
            return self._values[value]
        if kind == own.SUMS:
            return b.local(value)
        return b.sharded(value, rows) if kind == own.ROWS else b.replicated(value)

    def _own(self, b: Context, node: Node, tensor: tf.Tensor) -> Any:
        self._values[node.outputs[0]] = tensor
        share = _as(tensor, b.batch.local) / _as(tensor, b.batch.total)
        return tensor * share, PARTIAL


def _rows_of(b: Context, call: own.Call) -> Sharded | None:
    placement, axes = b.placement(call.x), axes_of(b, call.mean)
    return placement if isinstance(placement, Sharded) and axes is not None and placement.axis in axes else None


def _moment(b: Context, node: Node, rows: Sharded, part: str) -> tf.Tensor:
    axes = axes_of(b, node)
    tensor = b.sharded(node.inputs[0], rows)
    mine = b.batch.local
    if isinstance(mine, int) and mine > 0:
        return b.make(node, [tensor, b.vector(axes, node.inputs[1].dtype)])[0]
    others = product(ONE if axis == rows.axis else b.dims(node.inputs[0])[axis] for axis in axes)
    count = _as(tensor, b.number(others)) * _as(tensor, b.local_extent(rows))
    found = tf.reduce_sum(tensor, axes, keepdims=True) / tf.maximum(count, 1)
    return found + tf.cast(tf.equal(count, 0), found.dtype) if part == own.VARIANCE else found


def _sum(b: Context, node: Node, rows: Sharded) -> tf.Tensor:
    axes = axes_of(b, node)
    if axes is None or rows.axis not in axes:
        raise AssertionError(f"{node}: a sum of gradients is not over rows")
    return b.make(node, [b.sharded(node.inputs[0], rows), b.vector(axes, node.inputs[1].dtype)])[0]


def _spread(b: Context, node: Node, rows: Sharded) -> tf.Tensor:
    """The sum for each of the rank's rows, larger by as much as the number that it is divided by is too large."""
    total = b.local(node.inputs[0])
    larger = _as(total, b.batch.total) / tf.maximum(_as(total, b.batch.local), 1)
    return tf.broadcast_to(total * larger, b.local_shape(b.dims(node.outputs[0]), rows))


def _as(tensor: tf.Tensor, number: Dim | int | tf.Tensor) -> tf.Tensor:
    return tf.cast(number, tensor.dtype)
