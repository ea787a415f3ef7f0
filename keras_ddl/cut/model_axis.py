"""Cuts a step along the model axis of a mesh: what starts sharded is not an argument but a variable.

The model axis is a batch of as many rows as it has ranks, of which every rank has one. A kernel [d, n] whose n columns
are shared out among model ranks is then Sharded(axis=1, unit=n / ranks): its handle has this placement, reading it
gives such a shard, assigning it takes one, and the specs and rules that cut along the batch do the rest.

A mesh takes one cut for each of its axes, the model axis first. The ranks of the model axis see the whole batch and
hold tensors of equal shapes, so they decide alike. The program of one of them, collectives included, is again a program
on the whole batch, which is cut along the batch next; earlier_axis.py says what happens to its collectives. By
induction over the axes, all ranks together compute what one process does. (PartIR, arXiv 2401.11202, composes one
tactic for each axis in the same way.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.builder import Builder
from keras_ddl.cut.collectives import Collectives
from keras_ddl.cut.dims import ONE, Dim
from keras_ddl.cut.extents import Dims
from keras_ddl.cut.flat_shards import Box, Layout, Runs
from keras_ddl.cut.placements import REPLICATED, Batch, Placement, Sharded
from keras_ddl.cut.program import Program, Value
from keras_ddl.cut.report import Report

_Array = TypeVar("_Array", tf.Tensor, np.ndarray)


class ModelStep(NamedTuple):
    """What one rank of the model axis does in a step.

    Attributes:
        function: a function of the step's arguments. It never runs, but must stay alive as long as what is built from
            its graph.
        traced: operations of the step, by the names of the operations in that graph.
    """

    function: tf.types.experimental.ConcreteFunction
    traced: dict[str, tf.Operation]

    def program(self) -> Program:
        """Returns this step as a program on the whole batch, to be cut along the batch."""
        return Program(self.function.graph, traced=self.traced)


class LocalPart(NamedTuple):
    """A rank's part of a captured tensor: a tensor (a variable's handle) and its placement along the axis."""

    tensor: tf.Tensor
    placement: Placement = REPLICATED


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
    """Distributes a variable over all ranks of a mesh: slices over model ranks, and each slice in flat shards over data
    ranks. Rank r has the data position r // model.

    Attributes: shape: of the global tensor. axis: the axis that is cut. data, model: the extents of the mesh.
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


def argument_dims(program: Program, placements: Sequence[Placement]) -> dict[Value, Dims | None]:
    """Returns the extents of a program's arguments, given `placements` as in `cut_along_model`. Open extents get names,
    and the rows of the batch one common name.
    """
    result: dict[Value, Dims | None] = {}
    rows: Dim | None = None
    for value, placement in zip(program.inputs, itertools.chain(placements, itertools.repeat(REPLICATED))):
        extents = value.shape.as_list() if value.rank is not None else None
        dims = [Dim.unknown("extent", value.key, i) if e is None else Dim(e) for i, e in enumerate(extents or ())]
        if isinstance(placement, Sharded) and extents is not None and extents[placement.axis] is None:
            rows = rows or dims[placement.axis]
            dims[placement.axis] = rows
        result[value] = None if extents is None else tuple(dims)
    return result


def cut_along_model(
    program: Program,
    collectives: Collectives,
    local_part: Callable[[tf.Tensor], LocalPart],
    *,
    placements: Sequence[Placement] = (),
    input_axes: Sequence[int | None] = (),
    report: Report | None = None,
    seed: int = 0,
) -> ModelStep:
    """Returns the step of this rank of the model axis, which `build_step` cuts next, with `earlier=collectives`.

    Args:
        program: the step traced on the global batch.
        collectives: of the model axis.
        local_part: given an outer tensor that the step uses (a variable's handle), returns this rank's part.
        placements: placements of the arguments along the batch, which is cut next; all sharded ones have the same
            number of rows.
        input_axes: for each argument, the axis that is also cut, whose extent is a multiple of the ranks, or None.
        report, seed: as of `build_step`.
    """
    known = argument_dims(program, placements)
    traced: dict[str, tf.Operation] = {}

    def step(*arguments: tf.Tensor) -> list[tf.Tensor]:
        batch = Batch(collectives.size, 1, collectives.rank)
        builder = Builder(program=program, batch=batch, collectives=collectives, report=report or Report(), seed=seed)
        builder.everyone, builder.rows_by_extent = None, False
        for value, outer in program.captured:
            builder.place(value, *local_part(outer))
        for value, tensor, axis in zip_longest(program.inputs, arguments, input_axes):
            builder.extents.named[value.key] = value
            if axis is None:
                builder.place(value, tensor, REPLICATED, known[value])
            else:
                slices = Slices(tuple(value.shape), collectives.size, axis)
                builder.place(value, slices.cut(tensor, collectives.rank), slices.placement, known[value])
        builder.build()
        traced.update(builder.built_from)
        return [builder.replicated(value) for value in program.outputs]

    specs = [tf.TensorSpec(value.shape, value.dtype) for value in program.inputs]
    return ModelStep(tf.function(step, autograph=False).get_concrete_function(*specs), traced)
