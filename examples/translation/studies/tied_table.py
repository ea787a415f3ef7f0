"""Runs one rank of table_bytes.py: trains a small Transformer, and records the bytes of the table's gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import ops

import keras_ddl
from translation.batches import Batches
from translation.losses import TokenCrossentropy
from translation.settings import Settings
from translation.training import make_batches, make_subwords
from translation.transformer import Transformer

Tensor = Any


@tf.custom_gradient
def assumed_sparse(table: Tensor) -> tuple[Tensor, Any]:
    """Returns the table, and makes its gradient slices of all rows, which TensorFlow 1 added to those of lookups."""
    rows = table.shape[0]
    shape = tf.constant(list(table.shape))
    return tf.identity(table), lambda gradient: tf.IndexedSlices(gradient, tf.range(rows), shape)


class Watched(Transformer):
    """Logs, for each step, the bytes on a rank of the table's gradient over all ranks.

    Args:
        gather: reduce gradients in Horovod's manner: gather slices, and make slices of the projection's gradient, too.
            False: the tape returns gradients that the Strategy has reduced.
    """

    def __init__(self, vocabulary: int, *, gather: bool, **sizes: Any) -> None:
        super().__init__(vocabulary, **sizes)
        self.gather = gather

    def _logits(self, x: Tensor) -> Tensor:
        table = ops.convert_to_tensor(self.table)
        return ops.matmul(self._end(1, x), ops.transpose(assumed_sparse(table) if self.gather else table))

    def train_step(self, data: Any) -> dict[str, Tensor]:
        inputs, labels, *_ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(inputs, labels, self(inputs, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.gather:
            names = [f"gradients/{number}" for number in range(len(gradients))]
            gradients = [keras_ddl.all_reduce(each, op="mean", name=name) for each, name in zip(gradients, names)]
        held = next(g for g, variable in zip(gradients, self.trainable_variables) if variable is self.table)
        parts = [held.values, held.indices] if isinstance(held, tf.IndexedSlices) else [held]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"bytes": tf.add_n([tf.size(part, tf.int64) * part.dtype.size for part in parts])}


def both_ways(paths: Sequence[Path], rows: int, width: int, tokens: int, count: int) -> list[dict[str, int]]:
    """Trains for some steps in both ways, on the ranks that call it. COLLECTIVE.

    Args:
        paths: files of source and target.
        rows, width: sizes of the table.
        tokens: tokens in a batch per rank.
        count: number of steps.
    Returns: for each step, the bytes of the table's gradient on this rank, `gathered` and as one `table`, and the
        `lookups` of all ranks.
    """
    keras_ddl.init()
    settings = Settings(tokens=tokens * keras_ddl.size(), buckets=4)
    subwords = make_subwords(paths, settings.vocabulary)
    batches = make_batches(paths, subwords, settings)
    sizes = {"vocabulary": rows, "width": width, "layers": 1, "heads": 2, "inner": width}
    gathered = _steps(Watched(gather=True, **sizes), batches, count)
    strategy = keras_ddl.Strategy()
    with strategy.scope():
        table = _steps(Watched(gather=False, **sizes), batches, count)
    return [
        {"gathered": one, "table": other, "lookups": batches.tokens(step)[1]}
        for step, (one, other) in enumerate(zip(gathered, table))
    ]


def _steps(model: keras.Model, batches: Batches, count: int) -> list[int]:
    model.compile(keras.optimizers.Adam(), TokenCrossentropy(), jit_compile=False)
    batches = itertools.islice(batches.remaining(), count)
    logs = [model.train_on_batch(inputs, labels, return_dict=True) for (inputs, labels), _ in batches]
    return [int(each["bytes"]) for each in logs]
