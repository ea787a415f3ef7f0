"""Placements: how the ranks hold a tensor of the step.

They are the placements of DTensor and GSPMD (Xu et al., arXiv 2105.04663) for one mesh dimension. In addition, shards
may be uneven, and an axis may hold several batches one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import ONE, Dim


@dataclass(frozen=True)
class Replicated:
    """Every rank holds all of the tensor, equal in every bit."""


@dataclass(frozen=True)
class Sharded:
    """Every rank holds the entries of its rows of the batch, along one axis.

    Axis `axis` of the global tensor has `blocks * (rows of the batch) * unit` entries, seen as [blocks, rows, unit]; a
    rank holds [blocks, its rows, unit] of them. A batch: blocks 1, unit 1. A batch of n sentences of t words flattened
    to [n * t]: unit t. Two batches one after the other: blocks 2.

    A step may have several batches with different numbers of rows (`LocalShapes.batches`). `rows` lists the
    batches whose rows lie along the axis: one, or several one after another, as in a concatenation of batches of
    different sizes.
    """

    axis: int
    blocks: Dim = ONE
    unit: Dim = ONE
    rows: tuple[int, ...] = (0,)

    def at(self, axis: int) -> Sharded:
        return replace(self, axis=axis)

    @property
    def segments(self) -> tuple[int, ...] | None:
        """The batches whose rows lie along the axis, one after another; None: the number of blocks is not known."""
        count = self.blocks.number
        return None if count is None else self.rows * count

    def of_segments(self, segments: Sequence[int]) -> Sharded:
        """Returns the same placement with the rows of these batches, one after another."""
        count = len(segments)
        period = next(
            n for n in range(1, count + 1) if count % n == 0 and [*segments[:n]] * (count // n) == [*segments]
        )
        return replace(self, blocks=Dim(count // period), rows=tuple(segments[:period]))


@dataclass(frozen=True)
class Partial:
    """Each rank holds a tensor; `op` combines them, entry by entry, into the value. `op` as in ops.all_reduce."""

    op: str = "sum"


@dataclass(frozen=True)
class TensorList:
    """A list of tensors (a TensorList, an Optional) whose elements are sharded alike; its length is equal on all ranks.

    A list of replicated elements is Replicated. `dtype`: name of the elements' type. `optional`: it is an Optional.
    """

    element: Sharded
    dtype: str
    optional: bool = False


@dataclass(frozen=True)
class FlatShard:
    """Every rank holds a chunk of the tensor's entries, as a vector; layouts.py says which. The shape is static."""


@dataclass(frozen=True)
class Joined:
    """No rank holds the tensor. It is a concatenation of other tensors along axis 0, and only single rows of them are
    needed, each on the rank that has that row of a table (shards/joined_rows.py). A value that is needed as a whole
    after all becomes replicated."""


Placement = Replicated | Sharded | Partial | TensorList | FlatShard | Joined
REPLICATED = Replicated()
PARTIAL = Partial()
FLAT_SHARD = FlatShard()
JOINED = Joined()


def has_shards(placement: Placement) -> bool:
    """Whether a rank holds only some of the tensor's entries."""
    return placement == FLAT_SHARD or isinstance(placement, Sharded)


class PlacedTensor(NamedTuple):
    """A rank's part of a value: a tensor of the rank's graph, and its placement."""

    tensor: tf.Tensor
    placement: Placement


PlacedOutputs = Sequence[tuple[tf.Tensor, Placement]]  # the outputs of a node, as a rule returns them


class Batch(NamedTuple):
    """The rows of the step. An attribute is an int if tracing knows it, else an int64 scalar of the step's graph.

    Attributes:
        total: rows of all ranks.
        local: rows of this rank.
        offset: rows of the ranks before this one.
    """

    total: int | tf.Tensor
    local: int | tf.Tensor
    offset: int | tf.Tensor


class Pending(Exception):
    """A node needs the result of a collective that is not in the graph yet: it is built after the next collectives."""
