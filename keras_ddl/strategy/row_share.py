"""The share of a step's rows that this rank holds, and what a loss is multiplied with because of it.

A mean over the global batch is the sum over ranks of (mean over the rank's rows) x (rank's rows / all rows). So each
rank scales its loss by its share and gradients are summed: exact however unevenly the rows fall, where the usual
"local mean x 1/size" is not. The share is known only when all ranks have told their row counts; they do that at the
start of the step, in 8 bytes that travel while the forward pass runs.

It is kept in variables rather than in tensors: a tf.function that the step calls may have been traced in an earlier
step and would go on using that step's tensor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from keras_ddl import ops
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy import data

_NAME = "rows"


class RowShare:
    """rows of this rank / rows of all ranks, for the step that runs now."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._thread = threading.local()
        # float64 holds the quotient of two row counts to the last bit that any loss dtype can use.
        with tf.init_scope(), tf.device("CPU:0"):
            self._share = tf.Variable(1.0 / size, dtype=tf.float64, trainable=False, name="keras_ddl_share")
            self._inverse = tf.Variable(float(size), dtype=tf.float64, trainable=False, name="keras_ddl_inverse")

    def begin_step(self, batch: Any) -> None:
        """Tells the other ranks the rows of `batch` and sets the share. COLLECTIVE; asynchronous in a graph.

        Where there are no rows, in a step without a batch, every rank has an equal share.
        """
        with tf.name_scope("keras_ddl_share"):
            rows = data.row_count(batch)
            if rows is None:
                self._share.assign(1.0 / self.size)
                self._inverse.assign(self.size)
                return
            total = ops.all_reduce(rows, op="sum", name=_NAME)
            rows, total = tf.cast(rows, tf.float64), tf.cast(total, tf.float64)
            self._share.assign(tf.math.divide_no_nan(rows, total))
            self._inverse.assign(tf.math.divide_no_nan(total, rows))

    def scale(self, value: tf.Tensor) -> tf.Tensor:
        """Returns `value`, a mean over this rank's rows, times the share; 0 when this rank has no rows (or NaN)."""
        override = getattr(self._thread, "scale", None)
        share = self._share.read_value() if override is None else override
        return tf.math.multiply_no_nan(value, tf.cast(share, value.dtype))

    def unscale(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a scaled loss times the inverse of the share, so that the loss tracker, which weighs it with this
        rank's rows, gets the mean over all rows when the trackers of all ranks are summed; 0 without rows.
        """
        if getattr(self._thread, "unweighted", False):
            return value * tf.cast(self.size, value.dtype)
        return tf.math.multiply_no_nan(value, tf.cast(self._inverse.read_value(), value.dtype))

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

    @contextlib.contextmanager
    def trackers_unweighted(self, unweighted: bool) -> Iterator[None]:
        """Inside, `unscale` serves trackers that Keras updates without a row count: each rank counts as 1."""
        before = getattr(self._thread, "unweighted", False)
        self._thread.unweighted = unweighted
        try:
            yield
        finally:
            self._thread.unweighted = before
