"""Layouts, which distribute the entries of a variable over ranks: in flat shards, in slices along an axis, or in both.

`boxes(rank)` returns a rank's part as boxes of the global tensor. All other methods describe the same part in the form
in which a rank holds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import ONE, Dim
from keras_ddl.cut.analysis.placements import Sharded

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

    A row spans the last axis, so no row of a matrix is split between ranks, unless there are fewer rows than ranks.

    Attributes:
        shape: the shape of the global tensor.
        size: the number of ranks.
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

    def bytes(self, dtype: tf.DType) -> int:
        """Returns the bytes of the global tensor."""
        return math.prod(self.shape) * int(dtype.size)

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


@dataclass(frozen=True)
class Slices:
    """Distributes a variable over ranks in slices of equal extent along one of its axes.

    Attributes: shape: of the global tensor, whose extent along `axis` is a multiple of `size`, the number of ranks.
    """

    shape: tuple[int, ...]
    size: int
    axis: int

    @property
    def extent(self) -> int:
        """The extent of a slice."""
        assert self.shape[self.axis] % self.size == 0, f"{self.size} ranks cannot share {self} evenly"
        return self.shape[self.axis] // self.size

    @property
    def shape_of_slice(self) -> tuple[int, ...]:
        return (*self.shape[: self.axis], self.extent, *self.shape[self.axis + 1 :])

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's slice, which is equal for all ranks."""
        return self.shape_of_slice

    @property
    def placement(self) -> Sharded:
        return Sharded(self.axis, ONE, Dim(self.extent))

    def boxes(self, rank: int) -> list[Box]:
        """Returns a rank's part of the global tensor, as one box."""
        own = (rank * self.extent, self.extent)
        return [tuple(own if axis == self.axis else (0, extent) for axis, extent in enumerate(self.shape))]

    def cut(self, tensor: _Array, rank: int) -> _Array:
        """Returns a rank's slice of a global tensor or array."""
        own = slice(rank * self.extent, (rank + 1) * self.extent)
        result: _Array = tensor[tuple(own if axis == self.axis else slice(None) for axis in range(len(self.shape)))]
        return result

    def runs(self, rank: int) -> Runs:
        """Returns where a rank's entries lie in the flat order of the global tensor."""
        back = math.prod(self.shape[self.axis + 1 :])
        count, stride = self.extent * back, self.shape[self.axis] * back
        return Runs(rank * count, count, stride, math.prod(self.shape[: self.axis]))


@dataclass(frozen=True)
class MeshLayout:
    """Distributes a variable over a mesh: slices over model ranks, and each slice in flat shards over data ranks.

    Rank r has the data position r // model.

    Attributes:
        shape: the shape of the global tensor.
        axis: the axis that is cut.
        data, model: the extents of the mesh.
    """

    shape: tuple[int, ...]
    axis: int
    data: int
    model: int

    @property
    def size(self) -> int:
        return self.data * self.model

    @property
    def slices(self) -> Slices:
        return Slices(self.shape, self.model, self.axis)

    @property
    def flat(self) -> Layout:
        """The layout of a slice over the data ranks."""
        return Layout(self.slices.shape_of_slice, self.data)

    def chunk(self, rank: int) -> tuple[int, int]:
        """Returns (first, number of) entries of a rank, within its slice."""
        return self.flat.chunk(rank // self.model)

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Returns the shape in which a rank holds its entries."""
        return self.flat.shape_of(rank // self.model)

    def boxes(self, rank: int) -> list[Box]:
        """Returns the boxes of the global tensor whose entries, one box after the other, a rank has."""
        boxes = self.flat.boxes(rank // self.model)
        begins = [first for first, _ in self.slices.boxes(rank % self.model)[0]]
        return [tuple((begin + first, extent) for begin, (first, extent) in zip(begins, box)) for box in boxes]

    def runs(self, rank: int) -> Runs:
        """Returns where a rank's entries lie in the flat order of its slice."""
        return self.flat.runs(rank // self.model)

    def cut(self, tensor: _Array, rank: int) -> _Array:
        """Returns a rank's entries of a global tensor or array, as a vector."""
        return self.flat.cut(self.slices.cut(tensor, rank % self.model), rank // self.model)


Distribution: TypeAlias = Layout | Slices | MeshLayout
