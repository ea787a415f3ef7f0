"""Writes in a thread, one write at a time, and reports failures to the caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from keras_ddl.errors import CheckpointError, KerasDdlError

# Lets the step that starts the work continue first: the thread's Python code would delay it by milliseconds.
_HEAD_START_SECONDS = 0.01
_THREAD = "keras_ddl-checkpoint"


def wait_for_writers() -> None:
    """Waits for the writers of this process, including those of an interrupted fit, for which nothing else waits."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join()


class BackgroundWriter:
    """Runs one function at a time in a separate thread. Call its methods from one thread only."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, urgent: Callable[[], object], work: Callable[[], object]) -> None:
        """Runs `urgent`, then `work`, after waiting for the previous work. Raises: as `wait`.

        `urgent` starts at once, and should not hold Python's lock.
        """
        self.wait()

        def run() -> None:
            try:
                urgent()
                time.sleep(_HEAD_START_SECONDS)
                work()
            except BaseException as error:
                self._error = error

        # Not a daemon thread, so that an ending process completes the write.
        self._thread = threading.Thread(target=run, name=_THREAD)
        self._thread.start()

    def is_busy(self, seconds: float = 0.0) -> bool:
        """Waits up to `seconds`; returns whether work is running. Raises: CheckpointError: it has failed."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return True
        self.wait()
        return False

    def wait(self) -> None:
        """Waits until the work is done. Raises: CheckpointError: it failed (raised only once)."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, KerasDdlError):
            raise error
        if error is not None:
            raise CheckpointError(
                f"Writing a checkpoint in the background must not fail. Received: {type(error).__name__}: {error}. "
                "This checkpoint was not published; earlier ones are untouched."
            ) from error
