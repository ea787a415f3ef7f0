"""Publishing while training goes on: checkpoints become versions that a server loads."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path

from keras_ddl.checkpoint.durable import make_directory
from keras_ddl.errors import ExportError

# Of the job: the exporting process is no rank.
_OF_JOB = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "KERAS_DDL_")
_NICENESS = 10  # training goes first


class Publisher:
    """Exports checkpoints in a process of its own, one at a time.

    Those that come meanwhile wait as one, the newest: a server wants the newest, and none of those between.
    """

    def __init__(self, checkpoints: Path, versions: Mapping[str | None, Path], keep: int) -> None:
        """
        Args:
            versions: where versions appear, numbered by the checkpoints' steps, of each part of the model, by its name;
                of None: of the model, or of the only part.
            keep: how many of them stay.
        Raises: ExportError: one of `versions` cannot be written.
        """
        for directory in versions.values():
            make_directory(directory, "An export", ExportError)
        self._checkpoints, self._versions, self._keep = checkpoints, versions, keep
        self._lock = threading.Lock()
        self._next: int | None = None
        self._thread: threading.Thread | None = None

    def offer(self, step: int) -> None:
        """Publishes the checkpoint of that step as soon as the one under way is done. Returns at once."""
        with self._lock:
            self._next = step
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="keras_ddl-publish")
                self._thread.start()

    def wait(self) -> None:
        """Waits until the newest checkpoint that was offered is published, or has failed to be."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                step, self._next = self._next, None
                if step is None:
                    self._thread = None
                    return
            for model, directory in self._versions.items():
                self._publish(step, model, directory)

    def _publish(self, step: int, model: str | None, directory: Path) -> None:
        if (directory / str(step)).exists():  # a resumed run comes to steps again
            return
        command = [sys.executable, "-m", "keras_ddl.cli", "export", self._checkpoints, directory]
        options = ["--which", step, "--version", "step", "--keep", self._keep]
        options += [] if model is None else ["--model", model]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_JOB)}
        process = subprocess.Popen(
            list(map(str, [*command, *options])),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**environment, "CUDA_VISIBLE_DEVICES": "-1"},
        )
        with contextlib.suppress(OSError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
        _, errors = process.communicate()
        if process.returncode != 0:
            said = errors.strip().rpartition("\n")[2]
            warnings.warn(
                f"Checkpoint publishes each checkpoint to {directory}. Received: step {step} could not be "
                f"exported (status {process.returncode}): {said}. Training goes on; earlier versions are untouched.",
                stacklevel=2,
            )
