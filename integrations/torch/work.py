"""The objects with which PyTorch waits for a collective: works and futures."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from keras_ddl.communicator.native.started import Started
from keras_ddl.errors import KerasDdlError
from torch.distributed import DistBackendError, Work
from torch.futures import Future


class Completions:
    """A thread that completes the futures of one group's collectives, which end in the order of their start."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[DdlWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._nested: Completions | None = None

    def add(self, work: DdlWork) -> None:
        """Completes the future of `work` when it ends."""
        if threading.current_thread() is self._thread:
            # A callback may wait for a collective that it has started (PowerSGD's do), which blocks this thread.
            self._nested = self._nested or Completions()
            self._nested.add(work)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="keras_ddl futures", daemon=True)
            self._thread.start()
        self._works.put(work)

    def close(self) -> None:
        """Ends the thread when its futures are complete."""
        self._works.put(None)
        if self._nested is not None:
            self._nested.close()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.complete()


class DdlWork(Work):
    """A collective, running or done.

    Args:
        tensors: the results.
        started: the running collective; None: the work is done from the beginning.
        finish: called once with `started` when the collective has ended, in the first thread that waits. It copies the
            result to the tensors, or raises KerasDdlError.
        completions: the thread that completes the future.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        started: Started | Together | Any | None = None,
        finish: Callable[[Any], None] | None = None,
        completions: Completions | None = None,
    ) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._started = started
        self._finish = finish
        self._completions = completions
        self._lock = threading.RLock()
        self._future: Future | None = None
        self._error: Exception | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until the collective is done.

        Raises: DistBackendError: it failed, or took longer than `timeout` (0: no limit).
        """
        seconds = timeout.total_seconds() or None
        if not self.ends_within(seconds):
            raise DistBackendError(f"The collective has not ended within {seconds} s. It continues.")
        self._end()
        if self._error is not None:
            raise self._error
        return True

    def ends_within(self, seconds: float | None) -> bool:
        """Waits up to `seconds` for the collective to end, and returns whether it has ended."""
        started = self._started
        return started is None or started.wait(seconds)

    def is_completed(self) -> bool:
        """Returns whether the collective has ended; then its results are in the tensors."""
        started = self._started
        if started is not None and not started.is_done():
            return False
        self._end()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future:
        """Returns a future of the results; it completes on a thread of the group."""
        with self._lock:
            if self._future is None:
                devices = {each.device for each in self._tensors if each.is_cuda}
                self._pending = Future(devices=list(devices)) if devices else Future()
                # C++ code, such as DistributedDataParallel's, sees an exception only if a callback raises it.
                self._future = self._pending.then(_value_or_raise)
                if self._completions is None or self.is_completed():
                    self._settle(self._pending)
                else:
                    self._completions.add(self)
            return self._future

    def complete(self) -> None:
        """Waits for the collective, then completes the future."""
        started = self._started
        if started is not None:
            started.wait()
        self._settle(self._pending)

    def _settle(self, future: Future) -> None:
        self._end()
        future.set_result(self._tensors if self._error is None else self._error)

    def _end(self) -> None:
        with self._lock:
            started = self._started
            if started is None:
                return
            try:
                if (error := started.error()) is not None:
                    raise error
                if self._finish is not None:
                    self._finish(started)
                    self._wait_for_copies()
            except (KerasDdlError, DistBackendError) as error:
                self._error = as_torch_error(error)
            # Last, so that an earlier KeyboardInterrupt leads to a retry. Other threads read this without the lock.
            self._started = None

    def _wait_for_copies(self) -> None:
        """Waits until this thread's stream has copied the results, because another stream may read them."""
        for tensor in self._tensors[:1]:
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()


class Together:
    """Combines several started collectives into one."""

    def __init__(self, works: Sequence[DdlWork]) -> None:
        self._works = works

    def is_done(self) -> bool:
        return all(each.is_completed() for each in self._works)

    def wait(self, seconds: float | None = None) -> bool:
        end = None if seconds is None else time.monotonic() + seconds
        return all(each.ends_within(None if end is None else max(0.0, end - time.monotonic())) for each in self._works)

    def error(self) -> Exception | None:
        return next((error for each in self._works if (error := each.exception()) is not None), None)


def as_torch_error(error: Exception) -> DistBackendError:
    """Converts the engine's error to the one that users of torch.distributed catch."""
    if isinstance(error, DistBackendError):
        return error
    converted = DistBackendError(f"{type(error).__name__}: {error}")
    converted.__cause__ = error
    return converted


def _value_or_raise(future: Future) -> Any:
    value = future.value()
    if isinstance(value, Exception):
        raise value
    return value
