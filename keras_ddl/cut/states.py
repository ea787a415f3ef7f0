"""How a rank holds a tensor of the step: whole, some of its rows, a part of what all ranks' tensors combine to, or a
chunk of its entries (what optimizers keep, and what is computed of it).

These are the "sharding attributes" of GSPMD (Xu et al., arXiv 2105.04663) for one mesh dimension, with a cut that need
not be even, and with the rows of a rank found in several blocks of an axis (two batches one after the other).
"""

from __future__ import annotations

from dataclasses import dataclass

from keras_ddl.cut.dims import ONE, Dim


@dataclass(frozen=True)
class Whole:
    """Every rank holds all of the tensor, equal in every bit."""


@dataclass(frozen=True)
class Rows:
    """Every rank holds its rows.

    Axis `axis` of the whole tensor has `blocks * (rows of the batch) * unit` entries, seen as [blocks, rows, unit]; a
    rank holds [blocks, its rows, unit] of them. A batch: blocks 1, unit 1. A batch of n sentences of t words flattened
    to [n * t]: unit t. Two batches one after the other: blocks 2.
    """

    axis: int
    blocks: Dim = ONE
    unit: Dim = ONE

    def at(self, axis: int) -> Rows:
        """Returns the same cut along another axis."""
        return Rows(axis, self.blocks, self.unit)


@dataclass(frozen=True)
class Partial:
    """The tensors of all ranks, combined by `op` entry by entry, are the tensor. `op` as in ops.all_reduce."""

    op: str = "sum"


@dataclass(frozen=True)
class ListOf:
    """A list of tensors (a TensorList, an Optional) each of which is held as `element` says. Equally many on all ranks.

    `dtype`: name of the elements' type. `optional`: it is an Optional. A list whose elements are whole is Whole.
    """

    element: Rows
    dtype: str
    optional: bool = False


@dataclass(frozen=True)
class Shard:
    """Every rank holds its chunk of the tensor's entries, as a vector: shards.py says which. The shape is static."""


State = Whole | Rows | Partial | ListOf | Shard
WHOLE = Whole()
PARTIAL = Partial()
SHARD = Shard()
