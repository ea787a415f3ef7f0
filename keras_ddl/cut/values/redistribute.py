"""Redistribution: a rank's shard of a replicated tensor, and replicated tensors gathered from the ranks' shards."""

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
    axis, rank = placement.axis, tensor.shape.rank
    unit, batches = shapes.number(placement.unit), [shapes.batches[each] for each in placement.rows]
    if placement.blocks == 1 and len(batches) == 1:
        batch = batches[0]
        begin: list[Scalar] = [0] * rank
        size: list[Scalar] = [-1] * rank
        begin[axis] = shapes.times(batch.offset, unit)
        size[axis] = shapes.local_extent(placement)
        result = tf.slice(tensor, shapes.vector(begin), shapes.vector(size))
    else:
        extents = tf.unstack(tf.shape(tensor, out_type=tf.int64))
        front, back = extents[:axis], extents[axis + 1 :]
        blocks = shapes.number(placement.blocks)
        seen = tf.reshape(tensor, shapes.vector([*front, blocks, shapes.rows_of(placement), unit, *back]))
        parts = []
        for place, batch in enumerate(batches):
            start = shapes.total([*(each.total for each in batches[:place]), batch.offset])
            begin = [*[0] * (axis + 1), start, *[0] * (rank - axis)]
            size = [*[-1] * (axis + 1), batch.local, *[-1] * (rank - axis)]
            parts.append(tf.slice(seen, shapes.vector(begin, tf.int64), shapes.vector(size, tf.int64)))
        taken = parts[0] if len(parts) == 1 else tf.concat(parts, axis + 1)
        result = tf.reshape(taken, shapes.vector([*front, shapes.local_extent(placement), *back]))
    result.set_shape(shapes.static_local_shape(tensor.shape, placement))
    return result


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
        gathered = all_gather(shapes, collectives, name, tf.cast(local, tf.uint8), placement, extent)
        return tf.cast(gathered, tf.bool)
    axis, rank = placement.axis, local.shape.rank
    if len(placement.rows) > 1:
        return _gathered_batch_by_batch(shapes, collectives, name, local, placement, extent)
    if axis == 0 and placement.blocks == 1:
        # Whole rows lie one after the other; a rank's unit is part of each.
        return collectives.gather(local, name)
    # [front, blocks, rows, unit, back], rows first on the way.
    front = [extent(each) for each in range(axis)]
    back = [extent(each) for each in range(axis + 1, rank)]
    blocks, unit = shapes.number(placement.blocks), shapes.number(placement.unit)
    seen = tf.reshape(local, shapes.vector([*front, blocks, shapes.local_rows(placement), unit, *back]))
    order = [axis + 1, *(i for i in range(rank + 2) if i != axis + 1)]
    gathered = collectives.gather(tf.transpose(seen, order), name)
    back_order = [order.index(i) for i in range(len(order))]
    return tf.reshape(tf.transpose(gathered, back_order), shapes.vector([*front, shapes.extent(placement), *back]))


def _gathered_batch_by_batch(
    shapes: LocalShapes,
    collectives: Collectives,
    name: str,
    local: tf.Tensor,
    placement: Sharded,
    extent: Callable[[int], Scalar],
) -> tf.Tensor:
    """As `all_gather`, of the rows of several batches one after another: each is gathered for itself."""
    axis, rank = placement.axis, local.shape.rank
    front, back = ([extent(each) for each in some] for some in (range(axis), range(axis + 1, rank)))
    blocks, unit = shapes.number(placement.blocks), shapes.number(placement.unit)
    seen = tf.reshape(local, shapes.vector([*front, blocks, shapes.local_rows(placement), unit, *back]))
    gathered: list[tf.Tensor] = []
    start: Scalar = 0
    for place, number in enumerate(placement.rows):
        batch, of_one = shapes.batches[number], replace(placement, rows=(number,))
        begin = [*[0] * (axis + 1), start, *[0] * (rank - axis)]
        size = [*[-1] * (axis + 1), batch.local, *[-1] * (rank - axis)]
        own = tf.slice(seen, shapes.vector(begin, tf.int64), shapes.vector(size, tf.int64))
        own = tf.reshape(own, shapes.vector([*front, shapes.local_extent(of_one), *back]))
        own.set_shape(shapes.static_local_shape(local.shape, of_one))
        rows = all_gather(shapes, collectives, f"{name}/{place}", own, of_one, extent)
        gathered.append(tf.reshape(rows, shapes.vector([*front, blocks, batch.total, unit, *back])))
        start = shapes.total([start, batch.local])
    return tf.reshape(tf.concat(gathered, axis + 1), shapes.vector([*front, shapes.extent(placement), *back]))


def partial(tensor: tf.Tensor, rank: int, *, is_cut_again: bool = False) -> tf.Tensor:
    """Returns this rank's part of a sum that equals a replicated tensor: the tensor on the first rank, zeros on others.

    is_cut_again: every rank builds the same operations, because the next cut decides by them.
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
    """Returns the Optional of a replicated tensor, or of none: all ranks have one, or none has. COLLECTIVE."""
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
