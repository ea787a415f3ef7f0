"""Operations that change a shape and no entry: the rows are found again along another axis."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.axes import squeezed_axes
from keras_ddl.cut.dims import Dim, product
from keras_ddl.cut.extents import Dims
from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import WHOLE, Partial, Rows, Whole


@rule("Shape", "ShapeN", "Size", "Rank")
def shape(b: Any, node: Any) -> Any:
    """The shape of the whole tensor, of which the rank's tensor tells all but the extent of the cut axis."""
    dims = [b.dims(each) for each in node.inputs]
    if any(each is None for each in dims):
        return None
    found = []
    for shape, output in zip(dims, node.outputs):
        if node.type == "Rank":
            entries = b.scalars.scalar(len(shape), output.dtype)
        elif node.type == "Size":
            entries = b.scalars.scalar(b.number(product(shape)), output.dtype)
        else:
            entries = b.vector(shape, output.dtype)
        found.append((entries, WHOLE))
    return found


@rule("Reshape")
def reshape(b: Any, node: Any) -> Any:
    value, wanted = node.inputs
    state = b.state(value)
    if not isinstance(b.state(wanted), Whole):
        return None
    if isinstance(state, Partial):
        return [(b.make(node, [b.held(value), b.whole(wanted)])[0], state)]
    before, after = b.dims(value), b.dims(node.outputs[0])
    if before is None or after is None:
        return None
    rows = rows_after(before, after, state, b.rows)
    if rows is None or _is_named_by(rows.unit, node.outputs[0].key):  # of a batch of one row, any extent is a unit
        return None
    shape = _whole_shape(b, before, after, node)
    shape[rows.axis] = b.local_extent(rows)
    return [(tf.reshape(b.held(value), b.as_vector(shape)), rows)]


def _whole_shape(b: Any, before: Dims, after: Dims, node: Any) -> list[Any]:
    """Returns the shape that a Reshape gives the whole tensor: ints, and int64 scalars."""
    key, wanted = node.outputs[0].key, None
    shape: list[Any] = []
    for axis, extent in enumerate(after):
        if _is_named_by(extent, key):  # only the operand tells, perhaps by -1
            wanted = tf.cast(b.whole(node.inputs[1]), tf.int64)
            shape.append(wanted[axis])
        else:
            shape.append(b.number(extent))
    if wanted is not None:
        # A rank without rows could not tell what -1 stands for: it has no entries to divide.
        others = tf.reduce_prod(tf.abs(tf.stack([tf.cast(each, tf.int64) for each in shape])))
        entries = tf.reduce_prod(tf.stack([tf.cast(b.number(each), tf.int64) for each in before]))
        inferred = entries // tf.maximum(others, 1)
        shape = [each if isinstance(each, int) else tf.where(each < 0, inferred, each) for each in shape]
    return shape


def _is_named_by(extent: Dim, key: str) -> bool:
    """Whether an extent is known by nothing but a tensor that is yet to be made."""
    return any(each.operands and each.operands[0] == key for each in extent.leaves())


def rows_after(before: Dims, after: Dims, state: Rows, rows: Dim) -> Rows | None:
    """Returns how rows are found after a Reshape, or None where a rank's entries no longer are a cut of one axis.

    The entries of a tensor of extents `before`, seen as [front, rows, back], keep their order. They are the rows of
    axis k after it if the product of the extents before k, times blocks, is `front`.
    """
    front = product(before[: state.axis]) * state.blocks
    passed = Dim(1)
    for axis, extent in enumerate(after):
        blocks = front.divided_by(passed)
        if blocks is None:
            return None
        unit = extent.divided_by(blocks * rows)
        if unit is not None:
            return Rows(axis, blocks, unit)
        passed = passed * extent
    return None


@rule("ExpandDims")
def expand_dims(b: Any, node: Any) -> Any:
    value, axis = node.inputs[0], b.constants(node.inputs[1])
    dims, state = b.dims(value), b.state(value)
    if axis is None or dims is None or not isinstance(b.state(node.inputs[1]), Whole):
        return None
    at = axis[0] % (len(dims) + 1)
    made = b.make(node, [b.held(value), b.whole(node.inputs[1])])[0]
    return [(made, state.at(state.axis + (at <= state.axis)) if isinstance(state, Rows) else state)]


@rule("Squeeze")
def squeeze(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    dims, state = b.dims(value), b.state(value)
    axes = squeezed_axes(dims, node) if dims is not None else None
    if axes is None:
        return None
    if isinstance(state, Partial):
        return [(tf.squeeze(b.held(value), axes) if axes else tf.identity(b.held(value)), state)]
    if state.axis in axes:
        return None
    made = tf.squeeze(b.held(value), axes) if axes else tf.identity(b.held(value))
    return [(made, state.at(state.axis - sum(axis < state.axis for axis in axes)))]


@rule("Transpose", "ConjugateTranspose")
def transpose(b: Any, node: Any) -> Any:
    value, order = node.inputs[0], b.constants(node.inputs[1])
    state = b.state(value)
    if order is None:
        return None
    order = [axis % len(order) for axis in order]
    made = b.make(node, [b.held(value), b.as_vector(order, node.inputs[1].dtype)])[0]
    return [(made, state.at(order.index(state.axis)) if isinstance(state, Rows) else state)]


@rule("BroadcastTo")
def broadcast_to(b: Any, node: Any) -> Any:
    value, wanted = node.inputs
    state, before, after = b.state(value), b.dims(value), b.dims(node.outputs[0])
    if not isinstance(state, Rows) or before is None or after is None:
        return None
    rows = state.at(state.axis + len(after) - len(before))
    if after[rows.axis] != b.extent(rows):
        return None
    return [(tf.broadcast_to(b.held(value), b.local_shape(after, rows)), rows)]


@rule("Fill", "BroadcastTo", of_whole=True)
def filled(b: Any, node: Any) -> Any:
    """Rows of what is filled with one value need no whole tensor."""
    pieces = b.make_whole(node)
    value, after = node.inputs[1 if node.type == "Fill" else 0], b.dims(node.outputs[0])
    known = b.dims(value)
    if after is None or known is None or node.after:
        return pieces

    def recipe(rows: Rows) -> Any:
        axis = rows.axis - (len(after) - len(known))
        if node.type == "BroadcastTo" and axis >= 0 and known[axis] != 1:
            return None
        return tf.broadcast_to(b.whole(value), b.local_shape(after, rows))

    b.give_recipe(node.outputs[0], recipe)
    return pieces


@rule("EnsureShape")
def ensure_shape(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    state = b.state(value)
    if not isinstance(state, Rows):
        return None
    shape = node.outputs[0].shape.as_list()
    shape[state.axis] = None  # what is said of the whole axis holds by the extents that were traced
    return [(tf.ensure_shape(b.held(value), shape), state)]
