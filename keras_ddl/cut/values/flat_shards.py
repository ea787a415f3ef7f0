"""Flat shards (layouts.py: `Layout`): the collectives that scatter and gather them.

Slots of optimizers are kept like this with Strategy(sharding="optimizer"), which is stage 1 of ZeRO (Rajbhandari et
al., 2020), as in Xu et al., "Automatic Cross-Replica Sharding of Weight Update" (arXiv 2004.13336): gradients arrive by
reduce-scatter and weights leave by all-gather, together as many bytes as an all-reduce of the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.values.collectives import Collectives
from keras_ddl.cut.values.layouts import Layout
from keras_ddl.errors import ConfigError


def layout_of(value: Value, size: int) -> Layout:
    """Returns the layout of a value's entries over `size` ranks."""
    return Layout(tuple(value.shape.as_list()), size)


def reduce_scatter(
    collectives: Collectives, parts: Sequence[tf.Tensor], layouts: Sequence[Layout], name: str
) -> list[tf.Tensor]:
    """Sums the ranks' parts and returns this rank's chunks of the sums. COLLECTIVE."""
    rank = collectives.rank
    if len(parts) == 1:
        rows = tf.reshape(parts[0], [layouts[0].rows, layouts[0].unit])
        result = tf.reshape(collectives.reduce_scatter(rows, name), [-1])
        result.set_shape([layouts[0].chunk(rank)[1]])
        return [result]
    # One row per rank: its chunks in sequence, padded to the longest.
    table = tf.concat([_by_rank(part, layout) for part, layout in zip(parts, layouts)], axis=1)
    mine = tf.reshape(collectives.reduce_scatter(table, name), [-1])
    mine.set_shape([sum(_longest(each) for each in layouts)])
    ends = tf.split(mine, [_longest(each) for each in layouts])
    assert table.shape[0] == collectives.size
    return [each[: layout.chunk(rank)[1]] for each, layout in zip(ends, layouts)]


def all_gather(
    collectives: Collectives, chunks: Sequence[tf.Tensor], layouts: Sequence[Layout], name: str
) -> list[tf.Tensor]:
    """Returns global tensors, given each rank's chunks. COLLECTIVE."""
    if len(chunks) == 1:
        layout = layouts[0]
        rows = tf.reshape(chunks[0], [layout.rows_of(collectives.rank)[1], layout.unit])
        return [tf.reshape(collectives.gather(rows, name), layout.shape)]
    lengths = [layout.chunk(rank)[1] for rank in range(collectives.size) for layout in layouts]
    result = collectives.gather(tf.concat(chunks, axis=0), name)
    result.set_shape([sum(lengths)])
    placed = tf.split(result, lengths)
    count = len(layouts)
    return [tf.reshape(tf.concat(placed[i::count], axis=0), layout.shape) for i, layout in enumerate(layouts)]


def _longest(layout: Layout) -> int:
    return layout.chunk(0)[1]


def _by_rank(part: tf.Tensor, layout: Layout) -> tf.Tensor:
    """Returns [size, longest chunk]: the ranks' chunks, padded with zeros."""
    base, extra = divmod(layout.rows, layout.size)
    flat, unit = tf.reshape(part, [-1]), layout.unit
    if not extra:
        return tf.reshape(flat, [layout.size, base * unit])
    longer = extra * (base + 1) * unit
    front = tf.reshape(flat[:longer], [extra, (base + 1) * unit])
    back = tf.reshape(flat[longer:], [layout.size - extra, base * unit])
    return tf.concat([front, tf.pad(back, [[0, 0], [0, unit]])], axis=0)


def partial(chunk: tf.Tensor, layout: Layout, rank: int) -> tf.Tensor:
    """Returns this rank's part of a sum that equals the global tensor: its own entries, and zeros elsewhere."""
    first, count = layout.chunk(rank)
    after = layout.rows * layout.unit - first - count
    return tf.reshape(tf.pad(chunk, [[first, after]]), layout.shape)


def refusal(node: Node | None, rank: int) -> ConfigError:
    """Returns the error for an operation that cannot use a variable in shards."""
    return ConfigError(
        "A variable that a Strategy keeps in shards supports only reading, assignment, addition and, for a weight, "
        f"lookups; in loops only reading. Received: {node} (rank {rank}). Use another operation, or make the Strategy "
        "without sharding."
    )
