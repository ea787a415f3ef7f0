"""-dump_iter: measures how long reductions take, and which rank the others wait for.

Each rank times a reduction from its last gradient to its last result. Communication before that overlaps the backward
pass and costs nothing. The last rank to arrive barely waits, so its time is communication. The extra time of another
rank is the time by which it was earlier. So no clocks of different hosts are compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_ddl import communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.ddl import job


def summary(seconds: np.ndarray, first: int) -> str:
    """Returns one line about reductions from number `first` on.

    Args:
        seconds: times measured on each rank, shape [iterations, ranks].
    """
    reduce_ms = seconds.min(axis=1) * 1e3
    late_ms = (seconds.max(axis=1, keepdims=True) - seconds) * 1e3
    last = int(late_ms.mean(axis=0).argmax())
    return (
        f"reductions {first} to {first + len(seconds) - 1}: {reduce_ms.mean():.3f} ms on average, "
        f"{reduce_ms.min():.3f} to {reduce_ms.max():.3f}; largest jitter: rank {last}, ready "
        f"{late_ms[:, last].mean():.3f} ms after the first rank on average, {late_ms[:, last].max():.3f} at most"
    )


class _Times:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: list[float] = []
        self._printed = 0

    def add(self, begin: Any, end: Any) -> np.int32:
        with self._lock:
            self._seconds.append(max(0.0, float(end) - float(begin)))
            if len(self._seconds) >= job.options().dump_iter:
                # Every rank reaches this point after the same reduction.
                seconds_by_rank = communicator.all_gather_object(self._seconds, name="ddl/dump_iter")
                if communicator.rank() == 0:
                    job.say(summary(np.array(seconds_by_rank).T, self._printed + 1))
                self._printed += len(self._seconds)
                self._seconds = []
        return np.int32(0)


_times = _Times()


def timed(reduce: Callable[[Sequence[Any]], list[Any]], gradients: Sequence[Any]) -> list[Any]:
    """Returns `reduce(gradients)` and times it; after every -dump_iter calls rank 0 prints a line."""
    flat = tf.nest.flatten(list(gradients), expand_composites=True)
    with tf.control_dependencies(flat):
        begin = tf.timestamp()
    reduced = reduce(gradients)
    with tf.control_dependencies([*tf.nest.flatten(reduced, expand_composites=True), begin]):
        end = tf.timestamp()
    noted = tf.numpy_function(_times.add, [begin, end], tf.int32)
    with tf.control_dependencies([noted]):
        return [tf.nest.map_structure(tf.identity, each, expand_composites=True) for each in reduced]
