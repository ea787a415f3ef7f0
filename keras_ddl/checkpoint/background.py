"""Writing in a thread: one write at a time, and no failure unheard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from keras_ddl.errors import CheckpointError, KerasDdlError

# The step that asks for the work goes on first: a thread that runs Python at once would hold it up for milliseconds.
_HEAD_START_SECONDS = 0.01


class BackgroundWriter:
    """Runs one piece of work at a time in a thread of its own. One thread calls these methods."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, urgent: Callable[[], object], work: Callable[[], object]) -> None:
        """Begins `urgent`, then `work`, after waiting for the work before. Raises: what that raised (see `wait`).

        `urgent` begins at once, and should leave Python's lock alone.
        """
        self.wait()

        def run() -> None:
            try:
                urgent()
                time.sleep(_HEAD_START_SECONDS)
                work()
            except BaseException as error:
                self._error = error

        # No daemon: a process that ends writes what it has begun.
        self._thread = threading.Thread(target=run, name="keras_ddl-checkpoint")
        self._thread.start()

    def is_busy(self) -> bool:
        """Whether work is going on. Raises: CheckpointError: it has failed."""
        if self._thread is not None and self._thread.is_alive():
            return True
        self.wait()
        return False

    def wait(self) -> None:
        """Waits until the work is done. Raises: CheckpointError: it failed (once)."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, KerasDdlError):
            raise error
        if error is not None:
            raise CheckpointError(
                f"A checkpoint is written while training goes on. Received: {type(error).__name__}: {error}. Nothing "
                "was published and earlier ones are untouched."
            ) from error
