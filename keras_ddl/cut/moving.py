"""From one state to another: rows sliced out of a whole tensor, and a whole tensor gathered from rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.scalars import as_vector, times
from keras_ddl.cut.states import Rows

if TYPE_CHECKING:
    from keras_ddl.cut.builder import Builder
    from keras_ddl.cut.program import Value


def sliced(builder: Builder, whole: tf.Tensor, rows: Rows) -> tf.Tensor:
    """Returns this rank's rows of a whole tensor of the graph."""
    rank = whole.shape.rank
    batch, unit = builder.batch, builder.number(rows.unit)
    if rows.blocks == 1:
        begin: list[Any] = [0] * rank
        size: list[Any] = [-1] * rank
        begin[rows.axis] = times(batch.first, unit)
        size[rows.axis] = times(batch.mine, unit)
        found = tf.slice(whole, as_vector(begin), as_vector(size))
        found.set_shape(_static_shape(builder, whole.shape, rows))
        return found
    blocks = builder.number(rows.blocks)
    shape = tf.unstack(tf.shape(whole, out_type=tf.int64))
    front, back = shape[: rows.axis], shape[rows.axis + 1 :]
    parted = tf.reshape(whole, as_vector([*front, blocks, batch.total, unit, *back]))
    taken = tf.slice(
        parted,
        as_vector([*[0] * (rows.axis + 1), batch.first, *[0] * (rank - rows.axis)]),
        as_vector([*[-1] * (rows.axis + 1), batch.mine, *[-1] * (rank - rows.axis)]),
    )
    found = tf.reshape(taken, as_vector([*front, builder.local_extent(rows), *back]))
    found.set_shape(_static_shape(builder, whole.shape, rows))
    return found


def _static_shape(builder: Builder, whole: tf.TensorShape, rows: Rows) -> list[int | None]:
    shape = whole.as_list()
    local = builder.local_extent(rows)
    shape[rows.axis] = local if isinstance(local, int) else None
    return shape


def gathered(builder: Builder, value: Value, held: tf.Tensor, rows: Rows) -> tf.Tensor:
    """Returns the whole tensor. COLLECTIVE."""
    if held.dtype == tf.bool:
        return tf.cast(gathered(builder, value, tf.cast(held, tf.uint8), rows), tf.bool)
    axis, name = rows.axis, builder.next_name("gather")
    if axis == 0 and rows.blocks == 1:
        # Whole rows lie one after the other; a rank's unit is part of each.
        found = builder.collectives.gather(held, name)
    else:
        # [front, blocks, rows, unit, back], rows first on the way.
        dims = builder.dims(value)
        front = [builder.number(each) for each in dims[:axis]]
        back = [builder.number(each) for each in dims[axis + 1 :]]
        blocks, unit = builder.number(rows.blocks), builder.number(rows.unit)
        parted = tf.reshape(held, as_vector([*front, blocks, builder.batch.mine, unit, *back]))
        order = [axis + 1, *(i for i in range(len(dims) + 2) if i != axis + 1)]
        found = builder.collectives.gather(tf.transpose(parted, order), name)
        back_order = [order.index(i) for i in range(len(order))]
        found = tf.reshape(tf.transpose(found, back_order), as_vector([builder.number(each) for each in dims]))
    found.set_shape([each.number for each in builder.dims(value)])
    return found
