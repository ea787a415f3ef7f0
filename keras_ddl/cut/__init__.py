"""The step of one process, cut into ranks: docs/cut.md.

program = Program(tf.function(step).get_concrete_function(...).graph)   # traced on the whole batch
outputs = build_step(program, local_inputs, ...)                        # in the rank's own tf.function
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import (  # noqa: F401  (they register)
    extent_rules,
    list_rules,
    number_rules,
    own_statistics,
    ragged_extents,
    rules,
)
from keras_ddl.cut.builder import Builder
from keras_ddl.cut.collectives import Collectives, StepCollectives
from keras_ddl.cut.dims import Dim
from keras_ddl.cut.extents import Extents
from keras_ddl.cut.placements import FLAT_SHARD, PARTIAL, REPLICATED, Batch, Placement, Sharded
from keras_ddl.cut.program import Program, Value
from keras_ddl.cut.report import FEW_ROWS, Report
from keras_ddl.cut.rules.own_statistics import OwnStatistics
from keras_ddl.cut.snapshots import Snapshots
from keras_ddl.cut.without_batch import writes_without_batch
from keras_ddl.cut.writes import Writes, commit

__all__ = [
    "FEW_ROWS",
    "REPLICATED",
    "Batch",
    "Collectives",
    "StepCollectives",
    "Program",
    "Report",
    "Sharded",
    "Snapshots",
    "Placement",
    "build_step",
    "writes_without_batch",
]


def build_step(
    program: Program,
    inputs: Sequence[tf.Tensor],
    placements: Sequence[Placement],
    batch: Batch,
    collectives: Collectives,
    *,
    inputs_are_whole: bool = False,
    report: Report | None = None,
    seed: int = 0,
    batch_statistics: str = "global",
    captured: Callable[[Any], Any] = lambda outer: outer,
    keeps_rows: bool = False,
    parts: Collection[Any] = (),
    shards: Collection[Any] = (),
    tell: Callable[[Extents, Sequence[Value]], Iterable[Value]] = lambda extents, inputs: (),
    snapshots: Snapshots | None = None,
) -> list[tf.Tensor]:
    """Makes, in the graph that is being traced, what one rank has to do of a step.

    Args:
        program: the step traced on the whole batch.
        inputs: what this rank has of each of the step's arguments; `states`: how it is to be held.
        inputs_are_whole: every rank was given whole arguments, out of which it takes its rows.
        batch: the rows of all ranks and of this one.
        collectives: what sums and gathers.
        report: is told what was made.
        seed: equal on all ranks, another for every step that is built. Stateful random operations without seeds of
            their own (tf.random.normal without tf.random.set_seed) are given seeds made from it.
        batch_statistics: of BatchNormalization: "global": of the whole batch; "rank": of each rank's own rows.
        captured: given an outer tensor that the step uses (a variable's handle), returns what this rank uses.
        keeps_rows: return outputs that are held as rows along axis 0 as this rank's rows. They are gathered all the
            same: other ranks may want them whole.
        parts: outer tensors (handles of variables) of which each rank holds a part of a sum, from step to step.
        shards: outer tensors (handles of variables) of which each rank holds a chunk of the entries (shards.py), in the
            variable whose handle `captured` returns.
        snapshots: the step commits, so that no variable is written before all ranks have run all else; takes copies of
            variables for which that cannot be. None: variables are written at once.
        tell: says what is known of the extents of whole arguments that are made of the batch's rows; returns these.
    Returns: the step's outputs in order, whole, equal on all ranks.
    """
    if report is not None:
        report.program = program.digest()
    builder = Builder(program, batch, collectives, report or Report(), seed)
    if batch_statistics == "rank":
        calls, others = own_statistics.find(program)
        builder.override = OwnStatistics(calls)
        builder.report.found_statistics(len(calls), others)
    for value, outer in program.captured:
        is_part, is_shard = (any(outer is each for each in some) for some in (parts, shards))
        builder.place(value, captured(outer), PARTIAL if is_part else FLAT_SHARD if is_shard else REPLICATED)
    for value, tensor, placement in zip(program.inputs, inputs, placements):
        dims = _input_dims(builder, value, placement)
        if inputs_are_whole and isinstance(placement, Sharded):
            builder.place_shard_of(value, tensor, placement, dims)
        else:
            builder.place(value, tensor, placement, dims)
    builder.mark_batch_dependent(tell(builder.extents, program.inputs))
    if snapshots is not None:
        builder.writes = Writes(builder, snapshots)
    builder.build()
    wholes = [builder.replicated(value) for value in program.outputs]
    if snapshots is not None:
        commit(builder.writes, collectives, wholes)
    if not keeps_rows:
        return wholes
    held = [(value, builder.placement(value)) for value in program.outputs]
    return [
        builder.local(value) if placement == Sharded(0) else whole for (value, placement), whole in zip(held, wholes)
    ]


def _input_dims(builder: Builder, value: Any, placement: Placement) -> tuple[Dim, ...] | None:
    if value.rank is None:
        return None
    builder.extents.named[value.key] = value
    found = []
    for axis, extent in enumerate(value.shape.as_list()):
        if isinstance(placement, Sharded) and axis == placement.axis:
            found.append(builder.extent(placement))
        else:
            found.append(Dim(extent) if extent is not None else Dim.unknown("extent", value.key, axis))
    return tuple(found)
