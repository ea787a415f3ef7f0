"""Flat shards: which chunk of a tensor's entries a rank holds, and the collectives that scatter and gather them.

Slots of optimizers are kept like this with Strategy(sharding="optimizer"), which is stage 1 of ZeRO (Rajbhandari et
al., 2020), as in Xu et al., "Automatic Cross-Replica Sharding of Weight Update" (arXiv 2004.13336): gradients arrive by
reduce-scatter and weights leave by all-gather, together as many bytes as an all-reduce of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.values.collectives import Collectives
from keras_ddl.errors import ConfigError

Box: TypeAlias = tuple[tuple[int, int], ...]  # a part of a tensor: (first, extent) along each axis

_Array = TypeVar("_Array", tf.Tensor, np.ndarray)


class Runs(NamedTuple):
    """Entries in the flat order of a tensor: `number` runs of `length` entries, each `stride` after the one before."""

    first: int
    length: int
    stride: int
    number: int


@dataclass(frozen=True)
class Layout:
    """Assigns the entries of a tensor to ranks: `rows` rows of `unit` entries, the first ranks one row more.

    A row is one of the last axis, so no row of a matrix is split between ranks, unless there are fewer rows than ranks.

    Attributes: shape: of the global tensor. size: the number of ranks.
    """

    shape: tuple[int, ...]
    size: int

    @property
    def unit(self) -> int:
        last = self.shape[-1] if len(self.shape) > 1 else 1
        return last if last and math.prod(self.shape) // last >= self.size else 1

    @property
    def rows(self) -> int:
        return math.prod(self.shape) // self.unit

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Returns (first, number of) rows of a rank."""
        base, extra = divmod(self.rows, self.size)
        return base * rank + min(rank, extra), base + (rank < extra)

    def chunk(self, rank: int) -> tuple[int, int]:
        """Returns (first, number of) entries of a rank."""
        first, count = self.rows_of(rank)
        return first * self.unit, count * self.unit

    def boxes(self, rank: int) -> list[Box]:
        """Returns the boxes of the global tensor whose entries, one box after the other, are a rank's chunk.

        A matrix has one box; in general there are fewer boxes than twice the number of axes.
        """
        first, count = self.chunk(rank)
        return _boxes(self.shape, first, first + count)

    def runs(self, rank: int) -> Runs:
        """Returns where a rank's entries lie in the flat order of the global tensor."""
        first, count = self.chunk(rank)
        return Runs(first, count, count, 1)

    def shape_of(self, rank: int) -> tuple[int, ...]:
        return (self.chunk(rank)[1],)

    def cut(self, tensor: _Array, rank: int) -> _Array:
        """Returns a rank's chunk of a global tensor or array, as a vector."""
        first, count = self.chunk(rank)
        flat = tensor.reshape(-1) if isinstance(tensor, np.ndarray) else tf.reshape(tensor, [-1])
        return flat[first : first + count]


def _boxes(shape: Sequence[int], first: int, end: int) -> list[Box]:
    """Returns the boxes of the entries `first` to `end` of a tensor, in their order."""
    if first >= end:
        return []
    if not shape:
        return [()]
    inner = shape[1:]
    unit = math.prod(inner)
    begin, stop = -(-first // unit), end // unit  # of the rows that are complete
    if begin > stop:
        return [((stop, 1), *box) for box in _boxes(inner, first - stop * unit, end - stop * unit)]
    before = [((begin - 1, 1), *box) for box in _boxes(inner, first - (begin - 1) * unit, unit)]
    between: list[Box] = [((begin, stop - begin), *((0, each) for each in inner))] if stop > begin else []
    after = [((stop, 1), *box) for box in _boxes(inner, 0, end - stop * unit)]
    return [*before, *between, *after]


def layout_of(value: Value, size: int) -> Layout:
    """Returns which of `size` ranks holds which entries of a value."""
    return Layout(tuple(value.shape.as_list()), size)


def reduce_scatter(
    collectives: Collectives, parts: Sequence[tf.Tensor], layouts: Sequence[Layout], name: str
) -> list[tf.Tensor]:
    """Returns this rank's chunks of sums; every rank has parts of the sums. COLLECTIVE."""
    rank = collectives.rank
    if len(parts) == 1:
        rows = tf.reshape(parts[0], [layouts[0].rows, layouts[0].unit])
        result = tf.reshape(collectives.reduce_scatter(rows, name), [-1])
        result.set_shape([layouts[0].chunk(rank)[1]])
        return [result]
    # A row for each rank, in which its chunks lie one after the other, filled up to the longest.
    table = tf.concat([_by_rank(part, layout) for part, layout in zip(parts, layouts)], axis=1)
    mine = tf.reshape(collectives.reduce_scatter(table, name), [-1])
    mine.set_shape([sum(_longest(each) for each in layouts)])
    ends = tf.split(mine, [_longest(each) for each in layouts])
    assert table.shape[0] == collectives.size
    return [each[: layout.chunk(rank)[1]] for each, layout in zip(ends, layouts)]


def all_gather(
    collectives: Collectives, chunks: Sequence[tf.Tensor], layouts: Sequence[Layout], name: str
) -> list[tf.Tensor]:
    """Returns global tensors; every rank has chunks of them. COLLECTIVE."""
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
    """Returns [size, longest chunk]: each rank's chunk, filled up with zeros."""
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
