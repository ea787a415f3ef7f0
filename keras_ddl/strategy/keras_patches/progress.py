"""Rank 0's progress bar, which adds the rows per second of all ranks to Keras's logs."""

from __future__ import annotations

import time
from typing import Any

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import replacing
from keras_ddl.compat.keras import keras
from keras_ddl.state.callback_state import JobCallback
from keras_ddl.strategy.base import BaseStrategy
from keras_ddl.strategy.keras_patches import first_job

_LOOK_SECONDS = 0.05  # Keras does not redraw more often
_said: set[str] = set()  # lines that this process has printed above a bar


class _Rows(float):
    """Rows per second in a short format, because Keras's bar prints four decimals of any number."""

    def __truediv__(self, other: Any) -> _Rows:
        return _Rows(float(self) / other)

    def __format__(self, _: str) -> str:
        return f"{float(self):,.0f}" if self >= 10 else f"{float(self):.2g}"


class JobBar(JobCallback, keras.callbacks.ProgbarLogger):
    """Keras's progress bar, which shows "rows/s" before the logs of training.

    The first step does not count, as it does not count in Keras's time per step.
    """

    of_this_process = ("verbose", "_fit_began", "_first_step")
    # Class attributes, because `adopt` turns existing Keras bars into this class.
    _begin: tuple[float, int] = (0.0, 0)  # when counting began, and the rows trained before
    _looked = 0.0
    _speed = _Rows(0)
    _steps = 0
    _fit_began: tuple[float, float] | None = None  # process's age and time when fit began; None after step 1
    _first_step: tuple[float, float, float] | None = None  # seconds until fit, seconds until its end, time of its end
    _all_steps = 0
    target: int | None

    def on_train_begin(self, logs: Any = None) -> None:
        """Prints how many ranks train, once and after each change; otherwise the output looks like one process's."""
        super().on_train_begin(logs)
        strategy: BaseStrategy = keras_compat.strategy_of(self.model)
        words = _ranks_line(strategy)
        if strategy.rank == 0 and strategy.size > 1 and words not in _said:
            _said.add(words)
            print(words, flush=True)
            self._fit_began = first_job.seconds_since_start(), time.monotonic()

    def on_train_end(self, logs: Any = None) -> None:
        super().on_train_end(logs)
        if self._first_step is not None:
            until_fit, until_step, ended = self._first_step
            first_job.say(until_fit, until_step, time.monotonic() - ended, self._all_steps - 1)
            self._first_step = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._steps, self._begin = 0, self._now()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        self._all_steps += 1
        if self._fit_began is not None:
            (age, began), now, self._fit_began = self._fit_began, time.monotonic(), None
            self._first_step = age, now - began, now
        is_last = self.target is not None and batch + 1 >= self.target
        if self._steps <= 2 or is_last or time.monotonic() - self._looked > _LOOK_SECONDS:
            self._look()
        super().on_train_batch_end(batch, self._with_speed(logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, self._with_speed(logs))

    def show(self, params: Any) -> None:
        """Makes a silent bar visible from now on, and starts counting rows."""
        length: int | None = self.target  # may become known in the second epoch
        if params:
            self.set_params(params)
        if self.target is None:
            self.target = length
        if self.progbar is not None:
            self.progbar.verbose = self.verbose
        self._begin = self._now()

    def _look(self) -> None:
        now = self._now()
        self._looked = now[0]
        self._speed = _Rows((now[1] - self._begin[1]) / max(now[0] - self._begin[0], 1e-9))
        if self._steps == 1:
            self._begin = now

    def _now(self) -> tuple[float, int]:
        return time.monotonic(), int(keras_compat.strategy_of(self.model).keras_steps.rows_trained)

    def _with_speed(self, logs: Any) -> dict[str, Any]:
        return {"rows/s": self._speed, **(logs or {})} if self._speed else dict(logs or {})


def _ranks_line(strategy: BaseStrategy) -> str:
    hosts, mesh = strategy.topology.num_hosts, strategy.job.mesh
    how = "each on its part of every batch" if mesh is None else f"a mesh of {mesh.data.size} x {mesh.model.size}"
    where = f"{hosts} host{'' if hosts == 1 else 's'}"
    return f"keras_ddl: {strategy.size} ranks on {where} train together, {how}."


def adopt(callback: Any) -> None:
    """Turns one of Keras's bars into the bar of the job."""
    if type(callback) is keras.callbacks.ProgbarLogger:
        replacing.exchange_class(callback, JobBar)
