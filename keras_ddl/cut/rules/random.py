"""Random numbers: a rank draws its own rows of one process's draw, or, of what cannot be entered midway, all of it."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import philox
from keras_ddl.cut.dims import ONE, product
from keras_ddl.cut.registry import rule
from keras_ddl.cut.scalars import times
from keras_ddl.cut.states import Rows

_ALGORITHMS = ([philox.ALGORITHM], [3])  # 3 leaves the choice to the device: Philox on CPU and GPU


@rule(
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullIntV2",
    of_whole=True,
)
def by_counter(b: Any, node: Any) -> Any:
    """Rows along axis 0 are stretches of the draw. Not so of truncated normal or gamma numbers, which reject some."""
    value = node.outputs[0]
    dims = b.dims(value)
    if b.constants(node.inputs[3]) not in _ALGORITHMS or node.after or not dims:
        return None
    # As many as the batch has rows: for each of them, so what follows is computed of the rank's rows only.
    rows = Rows(0, ONE, dims[0].divided_by(b.rows) or ONE)
    if dims[0] == b.rows or b.rows.number is None and b.fits(value, rows):
        found = _rows(b, node, rows)
        if found is not None:
            b.give_whole(value, lambda: b.make_whole(node)[0].tensor)
            return [(found, rows)]
    pieces = b.make_whole(node)
    b.give_recipe(value, lambda rows: _rows(b, node, rows))
    return pieces


def _rows(b: Any, node: Any, rows: Rows) -> Any:
    value = node.outputs[0]
    dims, blocks = b.dims(value), rows.blocks.number
    if rows.axis or blocks is None:
        return None
    _, key, counter, *others = [b.whole(each) for each in node.inputs]
    of_a_row = product(dims[1:])
    in_groups = (of_a_row * rows.unit).factor % philox.numbers_of_a_group(value.dtype) == 0
    of_a_row, unit = b.number(of_a_row), b.number(rows.unit)
    shape = b.local_shape(dims, Rows(0, ONE, rows.unit))

    def draw(moved: tf.Tensor, shape: Any) -> tf.Tensor:
        shape = tf.cast(tf.convert_to_tensor(shape), node.inputs[0].dtype)
        return b.make(node, [shape, key, moved, *others])[0]

    parts = []
    for block in range(blocks):
        start = times(times(b.batch.total, block) + b.batch.first, unit)
        skipped = times(start, of_a_row)
        parts.append(philox.stretch(draw, counter, skipped, shape, value.dtype, in_groups=in_groups))
    return parts[0] if blocks == 1 else tf.concat(parts, 0)
