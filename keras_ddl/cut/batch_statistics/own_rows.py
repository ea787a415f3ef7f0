"""Builds BatchNormalization from a rank's rows with the rank's own statistics, as detection.py found it."""

from __future__ import annotations

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import ONE, certain, if_certain, product
from keras_ddl.cut.analysis.placements import PARTIAL, PlacedOutputs, Sharded
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.batch_statistics.detection import Call, Role, ValueKind
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.specs.reductions import axes_of
from keras_ddl.cut.values.local_shapes import Scalar


class OwnStatistics:
    """Builds the operations of calls that use the statistics of a rank's own rows.

    For the rest of the step such a value is a part of a sum over ranks: sums of gradients are parts, and a statistic
    becomes one when it is multiplied by the rank's share of the rows. A rank without rows has mean 0 and variance 1, so
    that everything computed from them is finite, and its share of everything is 0.
    """

    def __init__(self, calls: list[Call]) -> None:
        self._calls = {node: call for call in calls for node in call.roles}
        self._inputs: dict[Call, Sharded | None] = {}  # of x; None: it is built as by any step
        self._own_values: dict[Value, tf.Tensor] = {}

    def before(self, node: Node) -> Node | None:
        """Returns the node that must be built before `node`, because it shows whether the call has rows at all."""
        call = self._calls.get(node)
        return None if call is None or node is call.mean else call.mean

    def make(self, b: Context, node: Node) -> PlacedOutputs | None:
        """Builds an operation of a call; None for others. Raises: Pending."""
        call = self._calls.get(node)
        if call is None:
            return None
        if node is call.mean:
            self._inputs[call] = _input_placement(b, call)
        placement = self._inputs[call]
        if placement is None:
            return None
        role = call.roles[node]
        if role is Role.UPDATE:
            return b.make_replicated(node)  # requests the mean now: a second call of the layer need not wait for it
        if role is Role.MOMENT:
            tensor = _moment(b, node, placement, empty_value=0 if node is call.mean else 1)
        elif role is Role.SUM:
            tensor = _reduced(b, node, placement)
        elif role is Role.SPREAD:
            tensor = _spread(b, node, placement)
        else:
            tensor = b.make(node, [self._operand(b, call, value, placement) for value in node.inputs])[0]
        output = node.outputs[0]
        kind = call.kind(output)
        if kind is ValueKind.OWN:
            self._own_values[output] = tensor
            tensor = tensor * (_as(tensor, b.batch.local) / _as(tensor, b.batch.total))
        return [(tensor, placement if kind is ValueKind.ROWS else PARTIAL)]

    def _operand(self, b: Context, call: Call, value: Value, placement: Sharded) -> tf.Tensor:
        kind = call.kind(value)
        if kind is ValueKind.OWN:
            return self._own_values[value]
        if kind is ValueKind.SUM:
            return b.local(value)
        return b.redistributed(value, placement) if kind is ValueKind.ROWS else b.replicated(value)


def _input_placement(b: Context, call: Call) -> Sharded | None:
    placement, axes = b.placement(call.x), if_certain(axes_of, b, call.mean)
    if not isinstance(placement, Sharded) or not axes or placement.axis not in axes:
        return None
    # With one row, a rank's own statistics are the batch's statistics, and gradients are not summed along the rows.
    sums = (node for node, role in call.roles.items() if role is Role.SUM)
    return placement if all(may_be_along(placement.axis, node) for node in sums) else None


def may_be_along(axis: int, reduction: Node) -> bool:
    """Whether a reduction may be along an axis, as far as tracing shows."""
    axes, rank = reduction.inputs[1].constant(), certain(reduction.inputs[0].rank)
    return axes is None or axis in {int(each) % rank for each in np.ravel(axes)}


def _axes(b: Context, node: Node, placement: Sharded) -> list[int]:
    axes = axes_of(b, node)
    if placement.axis not in axes:
        raise AssertionError(f"{node}: not over rows")
    return axes


def _moment(b: Context, node: Node, placement: Sharded, empty_value: int) -> tf.Tensor:
    """Returns a mean over the rank's rows, or `empty_value` if the rank has no rows."""
    if isinstance(b.batch.local, int) and b.batch.local > 0:
        return _reduced(b, node, placement)
    axes, tensor, dims = _axes(b, node, placement), b.redistributed(node.inputs[0], placement), b.dims(node.inputs[0])
    others = product(ONE if axis == placement.axis else dims[axis] for axis in axes)
    count = _as(tensor, b.number(others)) * _as(tensor, b.local_extent(placement))
    result = tf.reduce_sum(tensor, axes, keepdims=True) / tf.maximum(count, 1)
    return result + empty_value * _as(result, tf.equal(count, 0)) if empty_value else result


def _reduced(b: Context, node: Node, placement: Sharded) -> tf.Tensor:
    axes = b.vector(_axes(b, node, placement), node.inputs[1].dtype)
    return b.make(node, [b.redistributed(node.inputs[0], placement), axes])[0]


def _spread(b: Context, node: Node, placement: Sharded) -> tf.Tensor:
    """Returns the sum, repeated for each of the rank's rows, and scaled up for a later division by too many rows."""
    total = b.local(node.inputs[0])
    larger = _as(total, b.batch.total) / tf.maximum(_as(total, b.batch.local), 1)
    return tf.broadcast_to(total * larger, b.local_shape(b.dims(node.outputs[0]), placement))


def _as(tensor: tf.Tensor, number: Scalar) -> tf.Tensor:
    return tf.cast(number, tensor.dtype)
