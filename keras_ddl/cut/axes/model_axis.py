"""Cuts a step along the model axis of a mesh: variables start sharded, instead of arguments.

The model axis is a batch with one row per rank. A kernel [d, n] whose n columns are divided among the model ranks is
then Sharded(axis=1, unit=n / ranks): its handle has this placement, reading it
gives such a shard, assigning it takes one, and the specs and rules that cut along the batch do the rest.

A mesh takes one cut for each of its axes, the model axis first. The ranks of the model axis see the whole batch and
hold tensors of equal shapes, so all make the same decisions. The program of one of them, with its collectives, is again
a program on the whole batch, which is cut along the batch next; model_collectives.py handles its collectives. By
induction over the axes, all ranks together compute the results of one process. (PartIR, arXiv 2401.11202, composes one
tactic for each axis in the same way.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import Dim
from keras_ddl.cut.analysis.extents import Dims
from keras_ddl.cut.analysis.placements import REPLICATED, Batch, Placement, Sharded
from keras_ddl.cut.analysis.program import Program, Value
from keras_ddl.cut.analysis.report import Report
from keras_ddl.cut.building.builder import Builder
from keras_ddl.cut.values.collectives import Collectives
from keras_ddl.cut.values.layouts import Slices


class ModelStep(NamedTuple):
    """The step of one rank of the model axis.

    Attributes:
        function: a function of the step's arguments. It never runs, but must stay alive as long as the graph
            that is built from its graph.
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


def argument_dims(program: Program, placements: Sequence[Placement]) -> dict[Value, Dims | None]:
    """Returns the extents of a program's arguments, given `placements` as in `cut_along_model`.

    Open extents get names, and the rows of the batch one common name.
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
        collectives: the collectives of the model axis.
        local_part: given an outer tensor that the step uses (a variable's handle), returns this rank's part.
        placements: placements of the arguments along the batch, which is cut next; all sharded ones have the same
            number of rows.
        input_axes: for each argument, the axis that is also cut, whose extent is a multiple of the ranks, or None.
        report, seed: as for `build_step`.
    """
    known = argument_dims(program, placements)
    traced: dict[str, tf.Operation] = {}

    def step(*arguments: tf.Tensor) -> list[tf.Tensor]:
        batch = Batch(collectives.size, 1, collectives.rank)
        costs = report or Report()
        builder = Builder(program=program, batch=batch, collectives=collectives, everyone=None, report=costs, seed=seed)
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
