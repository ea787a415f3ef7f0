"""Redistributes tensors: cuts a rank's shard out of a replicated tensor, and gathers shards to a replicated tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.contents import Entries
from keras_ddl.cut.analysis.placements import Sharded, TensorList
from keras_ddl.cut.values.collectives import Collectives
from keras_ddl.cut.values.local_shapes import LocalShapes, Scalar


def shard(shapes: LocalShapes, tensor: tf.Tensor, placement: Sharded) -> tf.Tensor:
    """Returns this rank's shard of a replicated tensor of the graph."""
    axis = placement.axis
    unit, batches = shapes.number(placement.unit), [shapes.batches[each] for each in placement.rows]
    if placement.blocks == 1 and len(batches) == 1:
        first, count = shapes.times(batches[0].offset, unit), shapes.local_extent(placement)
        result = rows(shapes, tensor, axis, first, count)
    else:
        extents = tf.unstack(tf.shape(tensor, out_type=tf.int64))
        front, back = extents[:axis], extents[axis + 1 :]
        blocks = shapes.number(placement.blocks)
        seen = tf.reshape(tensor, shapes.vector([*front, blocks, shapes.rows_of(placement), unit, *back]))
        parts, begin_of_batch = [], list[Scalar]()
        for batch in batches:
            parts.append(rows(shapes, seen, axis + 1, shapes.total([*begin_of_batch, batch.offset]), batch.local))
            begin_of_batch.append(batch.total)
        taken = parts[0] if len(parts) == 1 else tf.concat(parts, axis + 1)
        result = tf.reshape(taken, shapes.vector([*front, shapes.local_extent(placement), *back]))
    result.set_shape(shapes.static_local_shape(tensor.shape, placement))
    return result


def rows(shapes: LocalShapes, tensor: tf.Tensor, axis: int, first: Scalar, count: Scalar) -> tf.Tensor:
    """Returns `count` entries along an axis, from `first` on."""
    behind = tensor.shape.rank - axis - 1
    begin, size = [*[0] * axis, first, *[0] * behind], [*[-1] * axis, count, *[-1] * behind]
    return tf.slice(tensor, shapes.vector(begin, tf.int64), shapes.vector(size, tf.int64))


def all_gather(
    shapes: LocalShapes,
    collectives: Collectives,
    name: str,
    local: tf.Tensor,
    placement: Sharded,
    extent: Callable[[int], Scalar],
) -> tf.Tensor:
    """Returns the replicated tensor. COLLECTIVE. `extent`: gives the extents of the axes that are not sharded."""
    if local.dtype == tf.bool:
        numbers = all_gather(shapes, collectives, name, tf.cast(local, tf.uint8), placement, extent)
        return tf.cast(numbers, tf.bool)
    axis, rank = placement.axis, local.shape.rank
    if axis == 0 and placement.blocks == 1 and len(placement.rows) == 1:
        # Whole rows in sequence; a unit is a part of a row.
        return collectives.gather(local, name)
    # [front, blocks, rows, unit, back], rows come first during the gather.
    front, back = ([extent(each) for each in some] for some in (range(axis), range(axis + 1, rank)))
    blocks, unit = shapes.number(placement.blocks), shapes.number(placement.unit)
    seen = tf.reshape(local, shapes.vector([*front, blocks, shapes.local_rows(placement), unit, *back]))
    if len(placement.rows) > 1:  # several batches in sequence: one gather for each batch
        gathered: list[tf.Tensor] = []
        start: Scalar = 0
        for place, number in enumerate(placement.rows):
            batch, single_placement = shapes.batches[number], replace(placement, rows=(number,))
            own = rows(shapes, seen, axis + 1, start, batch.local)
            own = tf.reshape(own, shapes.vector([*front, shapes.local_extent(single_placement), *back]))
            own.set_shape(shapes.static_local_shape(local.shape, single_placement))
            whole = all_gather(shapes, collectives, f"{name}/{place}", own, single_placement, extent)
            gathered.append(tf.reshape(whole, shapes.vector([*front, blocks, batch.total, unit, *back])))
            start = shapes.total([start, batch.local])
        return tf.reshape(tf.concat(gathered, axis + 1), shapes.vector([*front, shapes.extent(placement), *back]))
    order = [axis + 1, *(i for i in range(rank + 2) if i != axis + 1)]
    by_row = collectives.gather(tf.transpose(seen, order), name)
    back_order = [order.index(i) for i in range(len(order))]
    return tf.reshape(tf.transpose(by_row, back_order), shapes.vector([*front, shapes.extent(placement), *back]))


def partial(tensor: tf.Tensor, rank: int, *, is_cut_again: bool = False) -> tf.Tensor:
    """Returns this rank's part of a sum that equals a replicated tensor: the tensor on the first rank, zeros on others.

    is_cut_again: build the same operations on every rank, because the next cut makes its decisions by them.
    """
    if is_cut_again:
        return tf.where(tf.constant(rank == 0), tensor, tf.zeros_like(tensor))
    return tensor if rank == 0 else tf.zeros_like(tensor)


def all_gather_list(
    shapes: LocalShapes,
    collectives: Collectives,
    name: str,
    local: tf.Tensor,
    placement: TensorList,
    dims: Entries | None,
) -> tf.Tensor:
    """Returns the list of replicated elements. COLLECTIVE. `dims`: extents of the elements; None: unknown."""
    element = placement.element
    shape: int | tf.Tensor = -1
    if dims is not None:
        extents = [shapes.local_extent(element) if axis == element.axis else each for axis, each in enumerate(dims)]
        shape = shapes.vector([-1 if each is None else each for each in extents], tf.int32)
    stacked = tf.raw_ops.TensorListStack(
        input_handle=local, element_shape=shape, element_dtype=tf.as_dtype(placement.dtype), num_elements=-1
    )
    if stacked.shape.rank is None:
        raise AssertionError(f"{name}: a list of tensors whose rank is unknown cannot be gathered")
    sharded = element.at(element.axis + 1)
    gathered = all_gather(shapes, collectives, name, stacked, sharded, _extent_of(stacked))
    return tf.raw_ops.TensorListFromTensor(tensor=gathered, element_shape=tf.shape(gathered)[1:])


def all_gather_optional(
    shapes: LocalShapes,
    collectives: Collectives,
    name: str,
    local: tf.Tensor,
    placement: TensorList,
    dims: Entries | None,
) -> tf.Tensor:
    """Returns the Optional with the replicated tensor. COLLECTIVE. On all ranks it holds a tensor, or on none."""
    if dims is None:
        raise AssertionError(f"{name}: an Optional of a tensor whose rank is unknown cannot be gathered")
    element = placement.element
    shape = [each.number if each is not None and axis != element.axis else None for axis, each in enumerate(dims)]

    def some() -> tf.Tensor:
        types = {"output_types": [tf.as_dtype(placement.dtype)], "output_shapes": [tf.TensorShape(shape)]}
        own = tf.raw_ops.OptionalGetValue(optional=local, **types)[0]
        gathered = all_gather(shapes, collectives, name, own, element, _extent_of(own))
        return tf.raw_ops.OptionalFromValue(components=[gathered])

    return tf.cond(tf.raw_ops.OptionalHasValue(optional=local), some, lambda: tf.raw_ops.OptionalNone())


def _extent_of(tensor: tf.Tensor) -> Callable[[int], tf.Tensor]:
    return lambda axis: tf.shape(tensor, out_type=tf.int64)[axis]
