"""Splits the step of one process between the ranks (docs/cut.md).

program = Program(tf.function(step).get_concrete_function(...).graph)   # traced on the global batch
outputs = build_step(program, local_inputs, ...)                        # in the rank's own tf.function
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import rules  # noqa: F401  (rules registers)
from keras_ddl.cut.analysis.captured import uses
from keras_ddl.cut.analysis.extents import Extents
from keras_ddl.cut.analysis.placements import FLAT_SHARD, PARTIAL, REPLICATED, Batch, Placement, Sharded
from keras_ddl.cut.analysis.program import Program, Value
from keras_ddl.cut.analysis.report import Report, line_of
from keras_ddl.cut.analysis.same_trace import Part, has_no_result, trace_digest, trace_parts
from keras_ddl.cut.analysis.side_effects import RESOURCE_OPERATIONS, draws_in_kernels, not_repeatable
from keras_ddl.cut.analysis.work import FEW_ROWS, work_of
from keras_ddl.cut.axes.model_axis import LocalPart, cut_along_model
from keras_ddl.cut.batch_statistics import detection
from keras_ddl.cut.batch_statistics.own_rows import OwnStatistics
from keras_ddl.cut.building.builder import Builder
from keras_ddl.cut.building.without_batch import writes_without_batch
from keras_ddl.cut.commit.after_commit import AfterCommit
from keras_ddl.cut.commit.snapshots import Snapshots
from keras_ddl.cut.commit.writes import Writes, commit, everything_before
from keras_ddl.cut.shards.mirrors import Mirror, Mirrors
from keras_ddl.cut.values.collectives import Collectives, StepCollectives
from keras_ddl.cut.values.layouts import MeshLayout, Slices

__all__ = [
    "FEW_ROWS",
    "REPLICATED",
    "RESOURCE_OPERATIONS",
    "Batch",
    "Collectives",
    "LocalPart",
    "MeshLayout",
    "Mirror",
    "Mirrors",
    "Part",
    "Placement",
    "Program",
    "Report",
    "Sharded",
    "Slices",
    "Snapshots",
    "StepCollectives",
    "Value",
    "build_step",
    "cut_along_model",
    "draws_in_kernels",
    "has_no_result",
    "line_of",
    "not_repeatable",
    "trace_digest",
    "trace_parts",
    "uses",
    "work_of",
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
    captured: Callable[[tf.Tensor], tf.Tensor] = lambda outer: outer,
    keeps_rows: bool = False,
    parts: Collection[tf.Tensor] = (),
    shards: Collection[tf.Tensor] = (),
    weights: Collection[tf.Tensor] = (),
    gathered_bytes: int = 0,
    mirrors: Mirrors | None = None,
    declare_rows: Callable[[Extents, Sequence[Value]], Iterable[Value]] = lambda extents, inputs: (),
    snapshots: Snapshots | None = None,
    earlier: Collectives | None = None,
    everyone: Collectives | None = None,
    further: Sequence[Batch] = (),
) -> list[tf.Tensor]:
    """Builds, in the graph that is being traced, one rank's part of a step.

    Args:
        program: the step traced on the global batch.
        inputs: this rank's part of each of the step's arguments.
        placements: how the ranks hold these arguments.
        inputs_are_whole: every rank has the global arguments, from which it takes its shards.
        batch: the rows of all ranks and of this one.
        collectives: sums and gathers.
        report: records the collectives and the replicated operations.
        seed: equal on all ranks, different for every step that is built. It seeds stateful random operations that have
            no seed of their own (tf.random.normal without tf.random.set_seed).
        batch_statistics: BatchNormalization uses the statistics of the global batch ("global") or of each rank's own
            rows ("rank").
        captured: returns this rank's replacement for an outer tensor of the step (a variable's handle).
        keeps_rows: return outputs that are sharded along axis 0 as this rank's shards. They are still gathered, because
            other ranks may want them replicated.
        parts: outer tensors (handles of variables) whose value is the sum over all ranks, even between steps.
        shards: outer tensors (handles of variables) kept in flat shards. A rank's shard is in the variable whose handle
            `captured` returns.
        mirrors: mirrors of these shards, or of slices of the earlier axis, on other ranks, if there are any; only in a
            step that commits.
        weights: a subset of `shards`, which are gathered wherever the step needs a complete weight. At most
            `gathered_bytes` of gathered weights exist at a time, unless one operation needs more.
        snapshots: the step commits: no variable is written before all ranks have run everything else. Variables that
            cannot wait are copied here first. None: variables are written at once.
        declare_rows: declares the extents of replicated arguments that consist of the batch's rows, and returns these
            arguments.
        earlier: collectives of the axis along which the program was already cut (model_axis.py).
        everyone: collectives of all ranks of the mesh, which commit together; None: `collectives` covers all ranks.
        further: batches of other sizes; an argument `Sharded(0, rows=(n,))` has the rows of batch n.
    Returns: the step's outputs in order, replicated.
    """
    report = report or Report()
    statistics = None
    if batch_statistics == "rank":
        calls, report.global_statistics = detection.find(program)
        statistics, report.own_statistics = OwnStatistics(calls), len(calls)
    builder = Builder(
        program=program,
        batch=batch,
        others=tuple(further),
        collectives=collectives,
        earlier=earlier,
        everyone=everyone or collectives,
        report=report,
        seed=seed,
        gathered_bytes=gathered_bytes,
        statistics=statistics,
    )
    for value, outer in program.captured:
        is_part, is_shard = (any(outer is each for each in some) for some in (parts, shards))
        builder.place(value, captured(outer), PARTIAL if is_part else FLAT_SHARD if is_shard else REPLICATED)
        if any(outer is each for each in weights):
            builder.hold_weight(value)
    for value, tensor, placement in zip(program.inputs, inputs, placements):
        dims = builder.input_dims(value, placement)
        if inputs_are_whole and isinstance(placement, Sharded):
            builder.place_shard_of(value, tensor, placement, dims)
        else:
            builder.place(value, tensor, placement, dims)
    builder.mark_batch_dependent(declare_rows(builder.extents, program.inputs))
    writes = Writes(builder, snapshots, () if mirrors is None else mirrors.shards) if snapshots is not None else None
    builder.writes = writes
    builder.build()
    outputs = [builder.replicated(value) for value in program.outputs]
    if writes is not None:
        if mirrors is not None:
            mirrors.update(writes, earlier or collectives, lambda: everything_before(writes.needed(), outputs))
        # On a mesh and with weights in shards memory is scarce. Otherwise updates overlap with sums of other gradients.
        last = [*outputs, *writes.scattered()]
        after = None
        if earlier is not None or weights:
            after = AfterCommit(writes.values(), last, gathers=bool(shards) and mirrors is None)
        commit(writes, everyone or collectives, outputs, after)
    if not keeps_rows:
        return outputs
    local = [builder.local(value) if builder.placement(value) == Sharded(0) else None for value in program.outputs]
    return [replicated if shard is None else shard for shard, replicated in zip(local, outputs)]
