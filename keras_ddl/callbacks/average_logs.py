"""AverageLogs: averages the logs of an epoch over all ranks."""

from __future__ import annotations

import numbers
from typing import Any

import keras
import numpy as np

from keras_ddl import communicator
from keras_ddl.communicator.comparison import is_equal
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat.models import rows_counted


class AverageLogs(keras.callbacks.Callback):
    """Replaces every number in the logs of an epoch with its mean over the ranks.

    Under keras_ddl.Strategy, metrics are already global, and exact even where a mean of means is not (AUC, uneven
    batches). This callback is for values that are local to a rank: plain Keras with `keras_ddl.init()`, or keys that a
    custom train_step or another callback adds. Put it before the callbacks that read the logs.

    A key that is NaN on one rank becomes NaN on all, so all ranks react to it equally. Keys that a rank lacks stay
    unchanged, with a warning that names them.

    Args:
        by_rows: weight each rank's values by the number of rows that it trained on in the epoch, and keys that begin
            with "val_" by the number of its validation rows. Use it if ranks have different numbers of batches. Keras
            must count the rows, which a custom `train_step` may not do.

    Cost: at each epoch end, one gather of 32 bytes per rank and one all-reduce of 8 bytes per key.
    """

    def __init__(self, by_rows: bool = False) -> None:
        super().__init__()
        self.by_rows = by_rows
        self._warned = False
        self._rows: dict[bool, float] = {}  # whether they are validation rows -> number on this rank

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._rows = {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.by_rows:  # before Keras resets its count for the validation
            self._rows.setdefault(False, rows_counted(self.model))

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if self.by_rows:
            self._rows[True] = rows_counted(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None or not communicator.is_initialized() or communicator.size() == 1:
            return
        keys = self._agree([key for key, value in sorted(logs.items()) if _is_number(value)])
        if keys:
            mine = np.array([float(logs[key]) for key in keys], np.float64)
            op = "mean"
            if self.by_rows:
                weights, op = self._row_weights(keys), "sum"
                # The values (0, NaN) of a rank without rows do not count.
                mine = np.where(weights == 0, 0.0, mine) * weights
            mean = communicator.all_reduce_array(mine, op=op, name="AverageLogs/values")
            logs.update(zip(keys, mean.tolist()))

    def _row_weights(self, keys: list[str]) -> np.ndarray:
        """Returns this rank's share of the rows for each key. COLLECTIVE."""
        self._rows.setdefault(False, rows_counted(self.model))
        mine = np.array([self._rows[False], self._rows.get(True, 0.0)])
        rows = communicator.all_reduce_array(mine, name="AverageLogs/rows")
        weights = np.divide(mine, rows, out=np.full(2, 1 / communicator.size()), where=rows > 0)
        return np.array([weights[int(key.startswith("val_"))] for key in keys])

    def _agree(self, keys: list[str]) -> list[str]:
        """Returns the keys that every rank has. COLLECTIVE. Names are exchanged only if they differ."""
        if is_equal("\0".join(keys).encode(), "AverageLogs/digest"):
            return keys
        gathered = [set(other) for other in communicator.all_gather_object(keys, name="AverageLogs/keys")]
        common = set.intersection(*gathered)
        if not self._warned:
            self._warned = True
            some = {
                key: [r for r, has in enumerate(gathered) if key not in has] for key in set.union(*gathered) - common
            }
            if communicator.rank() == 0:
                stack_position.warn(
                    "AverageLogs averages only values that all ranks have in their logs. Received: "
                    + "; ".join(f"{key!r} missing on rank(s) {ranks}" for key, ranks in sorted(some.items()))
                    + ". These values are not averaged: each rank keeps its own. Log them on every rank."
                )
        return sorted(common)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real | np.number) and not isinstance(value, bool)
