"""From one state to another: rows sliced out of a whole tensor, and a whole tensor gathered from rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.states import ListOf, Rows

if TYPE_CHECKING:
    from keras_ddl.cut.held import Held
    from keras_ddl.cut.program import Value


def sliced(values: Held, whole: tf.Tensor, rows: Rows) -> tf.Tensor:
    """Returns this rank's rows of a whole tensor of the graph."""
    rank = whole.shape.rank
    batch, unit = values.batch, values.number(rows.unit)
    if rows.blocks == 1:
        begin: list[Any] = [0] * rank
        size: list[Any] = [-1] * rank
        begin[rows.axis] = values.scalars.times(batch.first, unit)
        size[rows.axis] = values.local_extent(rows)
        found = tf.slice(whole, values.as_vector(begin), values.as_vector(size))
        found.set_shape(_static_shape(values, whole.shape, rows))
        return found
    blocks = values.number(rows.blocks)
    shape = tf.unstack(tf.shape(whole, out_type=tf.int64))
    front, back = shape[: rows.axis], shape[rows.axis + 1 :]
    parted = tf.reshape(whole, values.as_vector([*front, blocks, batch.total, unit, *back]))
    taken = tf.slice(
        parted,
        values.as_vector([*[0] * (rows.axis + 1), batch.first, *[0] * (rank - rows.axis)]),
        values.as_vector([*[-1] * (rows.axis + 1), batch.mine, *[-1] * (rank - rows.axis)]),
    )
    found = tf.reshape(taken, values.as_vector([*front, values.local_extent(rows), *back]))
    found.set_shape(_static_shape(values, whole.shape, rows))
    return found


def _static_shape(values: Held, whole: tf.TensorShape, rows: Rows) -> list[int | None]:
    shape = whole.as_list()
    local = values.local_extent(rows)
    shape[rows.axis] = local if isinstance(local, int) else None
    return shape


def gathered(values: Held, value: Value, held: tf.Tensor, rows: Rows) -> tf.Tensor:
    """Returns the whole tensor. COLLECTIVE."""
    dims = values.dims(value)
    found = gathered_rows(values, values.next_name("gather"), held, rows, lambda axis: values.number(dims[axis]))
    found.set_shape([each.number for each in dims])
    return found


def gathered_rows(values: Held, name: str, held: tf.Tensor, rows: Rows, extent: Callable[[int], Any]) -> tf.Tensor:
    """Returns the whole tensor; `extent`: gives the extents of the axes that are not cut. COLLECTIVE."""
    if held.dtype == tf.bool:
        return tf.cast(gathered_rows(values, name, tf.cast(held, tf.uint8), rows, extent), tf.bool)
    axis, rank = rows.axis, held.shape.rank
    if axis == 0 and rows.blocks == 1:
        # Whole rows lie one after the other; a rank's unit is part of each.
        return values.collectives.gather(held, name)
    # [front, blocks, rows, unit, back], rows first on the way.
    front = [extent(each) for each in range(axis)]
    back = [extent(each) for each in range(axis + 1, rank)]
    blocks, unit = values.number(rows.blocks), values.number(rows.unit)
    parted = tf.reshape(held, values.as_vector([*front, blocks, values.batch.mine, unit, *back]))
    order = [axis + 1, *(i for i in range(rank + 2) if i != axis + 1)]
    found = values.collectives.gather(tf.transpose(parted, order), name)
    back_order = [order.index(i) for i in range(len(order))]
    whole = values.number(values.extent(rows))
    return tf.reshape(tf.transpose(found, back_order), values.as_vector([*front, whole, *back]))


def part_of(values: Held, whole: tf.Tensor) -> tf.Tensor:
    """Returns this rank's part of a sum that is `whole`: all of it on the first rank, zeros on the others."""
    return whole if values.collectives.rank == 0 else tf.zeros_like(whole)


def gathered_list(values: Held, value: Value, held: tf.Tensor, state: ListOf) -> tf.Tensor:
    """Returns the list of whole elements. COLLECTIVE."""
    if state.optional:
        return _gathered_optional(values, value, held, state)
    content, rows = values.extents.content(value), state.element
    dims = content.known_dims() if content is not None else None
    shape: Any = -1
    if dims is not None:
        shape = [
            values.local_extent(rows) if axis == rows.axis else _or_any(values, each) for axis, each in enumerate(dims)
        ]
        shape = values.as_vector(shape, tf.int32)
    stacked = tf.raw_ops.TensorListStack(
        input_handle=held, element_shape=shape, element_dtype=tf.as_dtype(state.dtype), num_elements=-1
    )
    if stacked.shape.rank is None:
        raise AssertionError(f"{value}: a list of tensors whose rank is unknown cannot be gathered")
    found = gathered_rows(
        values,
        values.next_name("gather"),
        stacked,
        rows.at(rows.axis + 1),
        lambda axis: tf.shape(stacked, out_type=tf.int64)[axis],
    )
    return tf.raw_ops.TensorListFromTensor(tensor=found, element_shape=tf.shape(found)[1:])


def _gathered_optional(values: Held, value: Value, held: tf.Tensor, state: ListOf) -> tf.Tensor:
    """Returns the Optional of a whole tensor, or of none: all ranks have one, or none has. COLLECTIVE."""
    content, rows = values.extents.content(value), state.element
    dims = content.known_dims() if content is not None else None
    if dims is None:
        raise AssertionError(f"{value}: an Optional of a tensor whose rank is unknown cannot be gathered")
    shape = [each.number if each is not None and axis != rows.axis else None for axis, each in enumerate(dims)]
    name = values.next_name("gather")

    def some() -> tf.Tensor:
        types = {"output_types": [tf.as_dtype(state.dtype)], "output_shapes": [tf.TensorShape(shape)]}
        mine = tf.raw_ops.OptionalGetValue(optional=held, **types)[0]
        extent = lambda axis: tf.shape(mine, out_type=tf.int64)[axis]  # noqa: E731
        return tf.raw_ops.OptionalFromValue(components=[gathered_rows(values, name, mine, rows, extent)])

    return tf.cond(tf.raw_ops.OptionalHasValue(optional=held), some, lambda: tf.raw_ops.OptionalNone())


def _or_any(values: Held, extent: Any) -> Any:
    return -1 if extent is None else values.number(extent)
