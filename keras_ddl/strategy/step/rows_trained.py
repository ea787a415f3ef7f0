"""How many rows all ranks have trained on together, from the numbers of rows that they exchange in each step."""

from __future__ import annotations

from keras_ddl.compat.strategies import outside_strategies
from keras_ddl.compat.tensorflow import tf


class RowsTrained:
    """The rows of all training steps of Keras since the process began.

    Cost: some 7 us of a core in a step, where they are counted.
    """

    def __init__(self) -> None:
        # Not in the first step: a tf.function that makes a variable is traced again.
        with tf.init_scope(), tf.device("CPU:0"), outside_strategies():
            self._count = tf.Variable(tf.zeros([], tf.int64), trainable=False, name="keras_ddl_rows_trained")

    def add(self, counts: tf.Tensor) -> None:
        """Counts the rows of a step that is traced, or run, now ([ranks] int64). No rank waits for it."""
        self._count.assign_add(tf.reduce_sum(counts))

    def __int__(self) -> int:
        return int(self._count.numpy())
