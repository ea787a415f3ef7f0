"""The rows of a step: how many each rank holds, and what a loss is multiplied with because of it.

A mean over the global batch is the sum over ranks of (mean over the rank's rows) x (rank's rows / all rows). So each
rank weighs its loss with its share and gradients are summed: exact however unevenly the rows fall, where the usual
"local mean x 1/size" is not. The shares are known only when all ranks have told their row counts; they do that at the
start of the step, in 8 bytes each that travel while the forward pass runs.

The counts are kept in a variable rather than in a tensor: a tf.function that the step calls may have been traced in an
earlier step and would go on using that step's tensor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from keras_ddl import ops
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy import data
from keras_ddl.strategy.data import order

_NAME = "rows"


class RowShare:
    """The rows of this rank and of all ranks, in the step that runs now."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._thread = threading.local()
        with tf.init_scope(), tf.device("CPU:0"):
            self._counts = tf.Variable(tf.ones([size], tf.int64), trainable=False, name="keras_ddl_rows")

    def begin_step(self, batch: Any) -> Any:
        """Tells the other ranks the rows of `batch`, and of batches read lately (data/order.py). COLLECTIVE;
        asynchronous in a graph.

        Where there are no rows, in a step without a batch, every rank counts as one row.
        Returns: `batch`, for use in the step: when it is one whose order is compared, it waits for the others' word.
        """
        with tf.name_scope("keras_ddl_rows"):
            rows = data.row_count(batch)
            if rows is None:
                counts = tf.ones([self.size], tf.int64)
            else:
                counts, batch = order.begin_step(rows, batch, _NAME)
            self._counts.assign(counts)
        self._thread.batch = batch
        self._thread.static_rows = data.static_rows(batch)
        # In the step's own graph the tensor spares every reader a read of the variable.
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._thread.graph, self._thread.in_graph = graph, None if graph is None else self._rows_first_total(counts)
        return batch

    def _rows_first_total(self, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        with tf.device("CPU:0"):
            return counts[self.rank], tf.reduce_sum(counts[: self.rank]), tf.reduce_sum(counts)

    def counts(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns `rows()`, `first()` and `total()`."""
        graph = getattr(self._thread, "graph", None)
        if graph is not None and not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is graph:
            return self._thread.in_graph
        return self._rows_first_total(self._counts.read_value())

    def static_rows(self) -> int | None:
        """Returns the rows of this rank where they are known when the step is traced."""
        return getattr(self._thread, "static_rows", None)

    def batch(self) -> Any:
        """Returns what `begin_step` was given last on this thread."""
        return getattr(self._thread, "batch", None)

    def rows(self) -> tf.Tensor:
        """Returns the rows of this rank (int64 scalar)."""
        return self._counts.read_value()[self.rank]

    def first(self) -> tf.Tensor:
        """Returns the position of this rank's first row in the global batch (int64 scalar)."""
        return tf.reduce_sum(self._counts.read_value()[: self.rank])

    def total(self) -> tf.Tensor:
        """Returns the rows of all ranks (int64 scalar)."""
        return tf.reduce_sum(self._counts.read_value())

    def share(self) -> tf.Tensor:
        """Returns rows of this rank / rows of all ranks.

        float64 holds the quotient of two row counts to the last bit that any loss dtype can use.
        """
        return tf.math.divide_no_nan(tf.cast(self.rows(), tf.float64), tf.cast(self.total(), tf.float64))

    def inverse(self) -> tf.Tensor:
        """Returns rows of all ranks / rows of this rank (float64); 0 without rows."""
        return tf.math.divide_no_nan(tf.cast(self.total(), tf.float64), tf.cast(self.rows(), tf.float64))

    def scale(self, value: tf.Tensor) -> tf.Tensor:
        """Returns `value`, a mean over this rank's rows, times the share; 0 when this rank has no rows (or NaN)."""
        override = getattr(self._thread, "scale", None)
        share = self.share() if override is None else override
        return tf.math.multiply_no_nan(value, tf.cast(share, value.dtype))

    @contextlib.contextmanager
    def scaled_by(self, denominator: tf.Tensor) -> Iterator[None]:
        """Inside, `scale` uses this rank's share of a denominator other than rows (valid positions of a mask, sum of
        sample weights). COLLECTIVE.
        """
        denominator = tf.stop_gradient(tf.cast(denominator, tf.float64))
        total = ops.all_reduce(denominator, op="sum", name="loss_denominator")
        self._thread.scale = tf.stop_gradient(tf.math.divide_no_nan(denominator, total))
        try:
            yield
        finally:
            self._thread.scale = None
