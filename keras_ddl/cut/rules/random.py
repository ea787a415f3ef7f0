"""Random numbers: a rank draws its own rows of one process's draw, or, of what cannot be entered midway, all of it."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import philox
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import ONE, product
from keras_ddl.cut.placements import Sharded
from keras_ddl.cut.program import Node
from keras_ddl.cut.registry import rule

_ALGORITHMS = ([philox.ALGORITHM], [3])  # 3 leaves the choice to the device: Philox on CPU and GPU


@rule(
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullIntV2",
    of_replicated=True,
)
def by_counter(b: Context, node: Node) -> Any:
    """Rows along axis 0 are stretches of the draw. Not so of truncated normal or gamma numbers, which reject some."""
    value = node.outputs[0]
    dims = b.dims(value)
    if b.constants(node.inputs[3]) not in _ALGORITHMS or node.after or not dims:
        return None
    # As many as the batch has rows: for each of them, so what follows is computed of the rank's rows only.
    rows = Sharded(0, ONE, dims[0].divided_by(b.rows) or ONE)
    if dims[0] == b.rows or b.rows.number is None and b.can_shard(value, rows):
        found = _rows(b, node, rows)
        if found is not None:
            b.register_replicator(value, lambda: b.make_replicated(node)[0].tensor)
            return [(found, rows)]
    placed = b.make_replicated(node)
    b.register_materializer(value, lambda rows: _rows(b, node, rows))
    return placed


def _rows(b: Context, node: Node, rows: Sharded) -> Any:
    value = node.outputs[0]
    dims, blocks = b.dims(value), rows.blocks.number
    if rows.axis or blocks is None:
        return None
    _, key, counter, *others = [b.replicated(each) for each in node.inputs]
    of_a_row = product(dims[1:])
    in_groups = (of_a_row * rows.unit).factor % philox.numbers_of_a_group(value.dtype) == 0
    of_a_row, unit = b.number(of_a_row), b.number(rows.unit)
    shape = b.local_shape(dims, Sharded(0, ONE, rows.unit))

    def draw(moved: tf.Tensor, shape: Any) -> tf.Tensor:
        shape = tf.cast(tf.convert_to_tensor(shape), node.inputs[0].dtype)
        return b.make(node, [shape, key, moved, *others])[0]

    parts = []
    for block in range(blocks):
        start = b.times(b.times(b.batch.total, block) + b.batch.offset, unit)
        skipped = b.times(start, of_a_row)
        parts.append(philox.stretch(draw, counter, skipped, shape, value.dtype, in_groups=in_groups))
    return parts[0] if blocks == 1 else tf.concat(parts, 0)
