"""Times the steps of a fit."""

from __future__ import annotations

import time
from typing import Any

import keras_ddl
from keras_ddl.state.callback_state import JobCallback


class StepTimes(JobCallback):
    """Records the seconds of each step and of the epoch, as the script sees them.

    meet: count a step as ended when all ranks have ended it.
    """

    def __init__(self, meet: bool = False) -> None:
        super().__init__()
        self.meet = meet

    def on_train_begin(self, logs: Any = None) -> None:
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch_start = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.meet:
            keras_ddl.barrier()
        self.seconds.append(time.perf_counter() - self.start)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epoch = time.perf_counter() - self.epoch_start
