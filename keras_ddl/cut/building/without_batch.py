"""Runs the part of a step that does not need its batch, when the data ends.

TensorFlow runs an operation as soon as its inputs are there. If the data ends in the middle of a step (the iterator of
a dataset of unknown length raises OutOfRangeError), one process has by then run everything that does not depend on the
batch: an optimizer has counted an iteration, layers have drawn their seeds. Ranks do the same explicitly, because the
writes of a cut step wait for everything else in it.
"""

from __future__ import annotations

from collections.abc import Callable

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.placements import FLAT_SHARD, REPLICATED, Batch
from keras_ddl.cut.analysis.program import Node, Program
from keras_ddl.cut.analysis.report import Report
from keras_ddl.cut.building.builder import Builder
from keras_ddl.cut.values.collectives import Collectives
from keras_ddl.cut.values.flat_shards import refusal


def writes_without_batch(
    graph: tf.Graph,
    collectives: Collectives,
    *,
    chunk_of: Callable[[tf.Tensor], tf.Tensor | None] = lambda outer: None,
    has_mirror: Callable[[tf.Tensor], bool] = lambda outer: False,
    earlier: Collectives | None = None,
    everyone: Collectives | None = None,
) -> Callable[[], None] | None:
    """Returns a function that makes the writes of a traced step that need no arguments; None: there are none.

    chunk_of: given an outer tensor, returns the handle of this rank's chunk of a variable in flat shards, else None.
    has_mirror: given the handle of a variable, returns whether this rank's part has a mirror, which only the end of a
        step writes.
    earlier, everyone: as in `build_step`, if the step was cut along the model axis.
    Raises: ConfigError: it would write a variable that has a mirror.
    """
    program = Program(graph)
    dependent = {value.node for value in program.inputs}
    for node in program.nodes:
        if any(value.node in dependent for value in node.inputs) or any(each in dependent for each in node.after):
            dependent.add(node)
    writes = [node for node in program.nodes if node not in dependent and _writes(node)]
    if not writes:
        return None
    program.keep_only(writes)
    chunks = {value: chunk_of(outer) for value, outer in program.captured}
    mirrored = {value for value, outer in program.captured if has_mirror(outer)}
    for node in writes:
        if any(each.source() in mirrored for each in node.inputs):
            raise refusal(node, collectives.rank)

    def write() -> None:
        batch = Batch(1, int(collectives.rank == 0), min(collectives.rank, 1))
        builder = Builder(
            program=program,
            batch=batch,
            collectives=collectives,
            earlier=earlier,
            everyone=everyone or collectives,
            report=Report(),
        )
        for value, outer in program.captured:
            chunk = chunks[value]
            builder.place(value, outer if chunk is None else chunk, REPLICATED if chunk is None else FLAT_SHARD)
        builder.build()

    traced: Callable[[], None] = tf.function(write, autograph=False)
    return traced


def _writes(node: Node) -> bool:
    return tf_compat.is_stateful(node.operation) and bool(tf_compat.written_resources(node.operation))
