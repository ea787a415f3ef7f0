"""Exchanges how many rows each rank has, at the start of a step of `strategy.run`.

The counts are sent when the step begins, together with the digests of batches that are compared (data/order.py). They
are kept in a variable rather than in a tensor: a tf.function that the step calls may have been traced in an earlier
step and would keep using that step's tensor.
"""

from __future__ import annotations

from typing import Any

from keras_ddl.communicator.step_names import ROWS
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import order, row_count


class RowShare:
    """The rows of this rank and of all ranks in the current step."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        with tf.init_scope(), tf.device("CPU:0"):
            self._counts = tf.Variable(tf.ones([size], tf.int64), trainable=False, name="keras_ddl_rows")

    def begin_step(self, batch: Any) -> Any:
        """Sends the rows of `batch` and digests of recent batches (data/order.py). COLLECTIVE; asynchronous in a graph.

        In a step without a batch, every rank counts as one row.
        Returns: `batch`, for use in the step; if the batch is compared, it waits for the result.
        """
        with tf.name_scope("keras_ddl_rows"):
            rows = row_count(batch)
            if rows is None:
                counts = tf.ones([self.size], tf.int64)
            else:
                counts, batch, _ = order.exchange_step_header(rows, batch, ROWS)
            self._counts.assign(counts)
        return batch

    def first(self) -> tf.Tensor:
        """Returns the position of this rank's first row in the global batch (int64 scalar)."""
        return tf.reduce_sum(self._counts.read_value()[: self.rank])
