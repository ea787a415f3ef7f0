"""Traces and cuts a step without running it, to read its report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cut.simulated import OneBucket

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import Batch, Program, Report, Sharded, build_step
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.values.collectives import PLAIN, Reduction

RANKS = 2


class NoRanks(OneBucket):
    """Collectives for a graph that never runs, with the dtypes of keras_ddl.ops and shapes just as open."""

    rank, size = 0, RANKS

    def reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str, how: Reduction = PLAIN) -> list[tf.Tensor]:
        return [tf.identity(each) for each in tensors]

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])


class Moved(Report):
    """Records the values that an operation had gathered or combined."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Value] = []

    def gathered(self, value: Value, reader: Node | None) -> None:
        self.values += [value] if reader is not None else []

    def bucketed(
        self, kind: str, values: Sequence[Value], readers: Sequence[Node | None], compressed: bool = False
    ) -> None:
        self.values += [each for each, reader in zip(values, readers) if reader is not None]


def report_of(step: Callable[..., Any], batch: Any, *, static: bool = True, report: Report | None = None) -> Report:
    """Returns a report of the collectives in `step`.

    Args:
        step: takes a batch like Keras's train_step, a structure of arrays [rows, ...] with an even number of rows.
        static: whether the step sees the number of rows while it is traced.
        report: the report to fill; None: a new one.
    """
    leaves = tf.nest.flatten(batch)
    rows = leaves[0].shape[0]
    specs = [tf.TensorSpec([rows if static else None, *each.shape[1:]], each.dtype) for each in leaves]
    whole = tf.function(lambda *given: step(tf.nest.pack_sequence_as(batch, given)), autograph=False)
    concrete = whole.get_concrete_function(*specs)  # keeps the graph alive
    report = report or Report()

    def rank_step(total: tf.Tensor, mine: tf.Tensor, *local: tf.Tensor) -> None:
        known = Batch(rows, rows // RANKS, 0) if static else Batch(total, mine, tf.zeros([], tf.int64))
        build_step(Program(concrete.graph), local, [Sharded(0)] * len(local), known, NoRanks(), report=report)

    local = [tf.TensorSpec([rows // RANKS if static else None, *each.shape[1:]], each.dtype) for each in leaves]
    number = tf.TensorSpec([], tf.int64)
    tf.function(rank_step, autograph=False).get_concrete_function(number, number, *local)
    return report
