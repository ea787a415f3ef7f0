"""Publishing while training goes on: checkpoints become versions that a server loads."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from keras_ddl.checkpoint import Checkpoint
from keras_ddl.communicator import stack_position
from keras_ddl.communicator.first_rank import on_first_rank
from keras_ddl.errors import ExportError
from keras_ddl.files.durable import being_read, make_directory

# Of the job: the exporting process is no rank.
_OF_JOB = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "KERAS_DDL_")
_NICENESS = 10  # training goes first
_TURN_SECONDS = 5.0


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
        self._next: Checkpoint | None = None
        self._told: set[Path] = set()  # of which directories it was said that a server sees nothing new in them
        self._thread: threading.Thread | None = None

    def offer(self, checkpoint: Checkpoint) -> None:
        """Publishes a checkpoint as soon as the one under way is done. Returns at once."""
        with self._lock:
            self._next = checkpoint
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="keras_ddl-publish")
                self._thread.start()

    def is_busy(self, seconds: float) -> bool:
        """Waits so long until the newest checkpoint that was offered is published, or has failed to be."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is not None and thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                checkpoint, self._next = self._next, None
                if checkpoint is None:
                    self._thread = None
                    return
            with being_read(checkpoint.path):  # training may be done with it before the export is
                for model, directory in self._versions.items():
                    try:
                        self._publish(checkpoint.step, model, directory)
                    except OSError as error:  # no memory, or no processes, left
                        _warn_of_failure(checkpoint.step, directory, str(error))

    def _publish(self, step: int, model: str | None, directory: Path) -> None:
        if (directory / str(step)).exists():  # a resumed run comes to steps again
            return
        higher = [int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal() and int(entry.name) > step]
        if higher and directory not in self._told:
            self._told.add(directory)
            stack_position.warn(
                f"A server loads the highest version, and Checkpoint numbers versions by steps. Received: {directory} "
                f"with version {max(higher)}, higher than step {step}: a server keeps serving that. Give publish_to a "
                "directory of its own for each run, or remove the earlier run's versions."
            )
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
            said = errors.strip().rpartition("\n")[2].rstrip(".")
            _warn_of_failure(step, directory, f"status {process.returncode}: {said}")


def wait_for(publisher: Publisher | None) -> None:
    """Waits on all ranks for what rank 0 publishes. COLLECTIVE; `publisher` is that of rank 0."""
    # In short turns, each a collective: an export may take longer than ranks wait for one that does not come.
    while on_first_rank(lambda: publisher is not None and publisher.is_busy(_TURN_SECONDS), "Checkpoint/published"):
        pass


def _warn_of_failure(step: int, directory: Path, said: str) -> None:
    stack_position.warn(
        f"Checkpoint publishes each checkpoint to {directory}. Received: step {step} could not be exported: {said}. "
        "Training continues; earlier versions are untouched."
    )
