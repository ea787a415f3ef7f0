"""Rules for random numbers. A rank draws only its rows of one process's draw, or all rows if it cannot skip numbers."""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import ONE, Uncertain, certain, if_certain, product
from keras_ddl.cut.analysis.extents import Extents, ResultExtents, extents
from keras_ddl.cut.analysis.placements import PlacedOutputs, Sharded
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.operations import philox
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.propagation import sharded_only
from keras_ddl.cut.operations.registry import rule
from keras_ddl.cut.values.local_shapes import Vector

_ALGORITHMS = [[each] for each in philox.ALGORITHMS]
# Truncated normal and gamma draws are absent, because they reject some numbers.
_BY_COUNTER = (
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullIntV2",
)
_OTHERS = (
    "RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal StatelessTruncatedNormalV2 "
    "StatelessRandomUniform StatelessRandomNormal StatelessTruncatedNormal StatelessRandomUniformInt Empty"
)


@rule(*_BY_COUNTER, of_replicated=True)
def by_counter(b: Context, node: Node) -> PlacedOutputs | None:
    """Builds a draw whose shards along axis 0 are stretches of one process's draw."""
    value = node.outputs[0]
    dims = b.dims(value)
    if b.extents.constants(node.inputs[3]) not in _ALGORITHMS or node.after or not dims:
        return None
    # If there is a draw for each row of the batch, a rank draws for its own rows only, and computes only with these.
    placement = Sharded(0, ONE, dims[0].divided_by(b.rows) or ONE)
    is_of_rows = dims[0] == b.rows or b.rows.number is None and b.can_shard(value, placement)
    if b.rows_by_extent and is_of_rows:
        shard = if_certain(_shard, b, node, placement)
        if shard is not None:
            b.register_replicator(value, lambda: b.make_replicated(node)[0].tensor)
            return [(shard, placement)]
    made = b.make_replicated(node)
    b.register_materializer(value, sharded_only(lambda placement: _shard(b, node, placement)))
    return made


def _shard(b: Context, node: Node, placement: Sharded) -> tf.Tensor:
    value = node.outputs[0]
    dims, blocks = b.dims(value), certain(placement.blocks.number)
    if placement.axis or placement.rows != (0,):
        raise Uncertain
    _, key, counter, *others = [b.replicated(each) for each in node.inputs]
    row_size = product(dims[1:])
    in_groups = (row_size * placement.unit).factor % philox.numbers_per_group(value.dtype) == 0
    numbers_of_a_row, unit = b.number(row_size), b.number(placement.unit)
    shape = b.local_shape(dims, Sharded(0, ONE, placement.unit))

    def draw(moved: tf.Tensor, shape: Vector) -> tf.Tensor:
        shape = tf.cast(tf.convert_to_tensor(shape), node.inputs[0].dtype)
        return b.make(node, [shape, key, moved, *others])[0]

    parts = []
    for block in range(blocks):
        start = b.times(b.times(b.batch.total, block) + b.batch.offset, unit)
        skipped = b.times(start, numbers_of_a_row)
        parts.append(philox.stretch(draw, counter, skipped, shape, value.dtype, in_groups=in_groups))
    return parts[0] if blocks == 1 else tf.concat(parts, 0)


@extents(*_BY_COUNTER, *_OTHERS.split())
def _drawn(known: Extents, node: Node) -> ResultExtents:
    return [known.numbers(node.inputs[0])]
