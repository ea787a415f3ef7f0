"""Operations that change a shape and no entry: the rows are found again along another axis."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import Dim, product
from keras_ddl.cut.extents import Dims
from keras_ddl.cut.placements import REPLICATED, Partial, Replicated, Sharded
from keras_ddl.cut.program import Node
from keras_ddl.cut.registry import rule


@rule("Shape", "ShapeN", "Size", "Rank")
def shape(b: Context, node: Node) -> Any:
    """The shape of the whole tensor, of which the rank's tensor tells all but the extent of the cut axis."""
    dims = [b.dims(each) for each in node.inputs]
    if any(each is None for each in dims):
        return None
    found = []
    for shape, output in zip(dims, node.outputs):
        if node.type == "Rank":
            entries = b.scalar(len(shape), output.dtype)
        elif node.type == "Size":
            entries = b.scalar(b.number(product(shape)), output.dtype)
        else:
            entries = b.vector(shape, output.dtype)
        found.append((entries, REPLICATED))
    return found


@rule("Reshape")
def reshape(b: Context, node: Node) -> Any:
    value, wanted = node.inputs
    placement = b.placement(value)
    if not isinstance(b.placement(wanted), Replicated):
        return None
    if isinstance(placement, Partial):
        return [(b.make(node, [b.local(value), b.replicated(wanted)])[0], placement)]
    before, after = b.dims(value), b.dims(node.outputs[0])
    if before is None or after is None:
        return None
    rows = rows_after(before, after, placement, b.rows)
    if rows is None or _is_named_by(rows.unit, node.outputs[0].key):  # of a batch of one row, any extent is a unit
        return None
    shape = _whole_shape(b, before, after, node)
    shape[rows.axis] = b.local_extent(rows)
    return [(tf.reshape(b.local(value), b.vector(shape)), rows)]


def _whole_shape(b: Context, before: Dims, after: Dims, node: Node) -> list[Any]:
    """Returns the shape that a Reshape gives the whole tensor: ints, and int64 scalars."""
    key, wanted = node.outputs[0].key, None
    shape: list[Any] = []
    for axis, extent in enumerate(after):
        if _is_named_by(extent, key):  # only the operand tells, perhaps by -1
            wanted = tf.cast(b.replicated(node.inputs[1]), tf.int64)
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


def rows_after(before: Dims, after: Dims, placement: Sharded, rows: Dim) -> Sharded | None:
    """Returns how rows are found after a Reshape, or None where a rank's entries no longer are a cut of one axis.

    The entries of a tensor of extents `before`, seen as [front, rows, back], keep their order. They are the rows of
    axis k after it if the product of the extents before k, times blocks, is `front`.
    """
    front = product(before[: placement.axis]) * placement.blocks
    passed = Dim(1)
    for axis, extent in enumerate(after):
        blocks = front.divided_by(passed)
        if blocks is None:
            return None
        unit = extent.divided_by(blocks * rows)
        if unit is not None:
            return Sharded(axis, blocks, unit)
        passed = passed * extent
    return None


@rule("Fill", "BroadcastTo", of_replicated=True)
def filled(b: Context, node: Node) -> Any:
    """Rows of what is filled with one value need no whole tensor."""
    placed = b.make_replicated(node)
    value, after = node.inputs[1 if node.type == "Fill" else 0], b.dims(node.outputs[0])
    known = b.dims(value)
    if after is None or known is None or node.after:
        return placed

    def recipe(rows: Sharded) -> Any:
        axis = rows.axis - (len(after) - len(known))
        if node.type == "BroadcastTo" and axis >= 0 and known[axis] != 1:
            return None
        return tf.broadcast_to(b.replicated(value), b.local_shape(after, rows))

    b.register_materializer(node.outputs[0], recipe)
    return placed
