"""Publishes checkpoints during training, by exporting them to versions that a server loads."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from keras_ddl.checkpoint import Checkpoint
from keras_ddl.communicator.first_rank import on_first_rank
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.errors import ExportError
from keras_ddl.files import version_directories
from keras_ddl.files.durable import being_read, make_directory

# Environment variables of the job, hidden from the exporting process because it is not a rank.
_JOB_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "KERAS_DDL_")
_NICENESS = 10  # training has priority
_TURN_SECONDS = 5.0


class Publisher:
    """Exports checkpoints in a separate process, one at a time.

    If several are offered during an export, only the newest is exported next, because a server needs only the newest.
    """

    def __init__(self, checkpoints: Path, versions: Mapping[str | None, Path], keep: int) -> None:
        """
        Args:
            versions: part of the model -> directory of its versions, which are numbered by step; the key None is the
                model itself, or the only part.
            keep: how many versions stay.
        Raises: ExportError: a directory cannot be written.
        """
        for directory in versions.values():
            make_directory(directory, "An export", ExportError)
        self._checkpoints, self._versions, self._keep = checkpoints, versions, keep
        self._lock = threading.Lock()
        self._next: Checkpoint | None = None
        self._warned: set[Path] = set()  # directories with higher versions
        self._thread: threading.Thread | None = None

    def offer(self, checkpoint: Checkpoint) -> None:
        """Publishes a checkpoint after the current one. Returns at once."""
        with self._lock:
            self._next = checkpoint
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="keras_ddl-publish")
                self._thread.start()

    def is_busy(self, seconds: float) -> bool:
        """Waits up to `seconds` for all offered checkpoints; returns whether some are still being published."""
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
            with being_read(checkpoint.path):  # training must not remove it during the export
                for model, directory in self._versions.items():
                    try:
                        self._publish(checkpoint.step, model, directory)
                    except OSError as error:  # e.g. out of memory or processes
                        _warn_of_failure(checkpoint.step, directory, str(error))

    def _publish(self, step: int, model: str | None, directory: Path) -> None:
        """Exports a checkpoint as version `step` in a process of its own, with low priority. Warns if this fails."""
        if os.path.lexists(directory / str(step)):  # a resumed run repeats steps
            return
        found = [version_directories.number_of(entry.name) for entry in directory.iterdir()]
        higher = [number for number in found if number is not None and number > step]
        if higher and directory not in self._warned:
            self._warned.add(directory)
            stack_position.warn(
                "Publish uses the training step as the version, and a server loads the highest version. Received: "
                f"{directory} with version {max(higher)}, which is higher than step {step}: a server would keep "
                f"serving version {max(higher)}. Use another directory for each run, or remove the earlier run's "
                "versions."
            )
        command = [sys.executable, "-m", "keras_ddl.cli", "export", self._checkpoints, directory]
        options = ["--which", step, "--version", "step", "--keep", self._keep]
        options += [] if model is None else ["--model", model]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_JOB_PREFIXES)}
        process = subprocess.Popen(
            list(map(str, [*command, *options])),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**environment, "CUDA_VISIBLE_DEVICES": "-1"},
        )
        with contextlib.suppress(OSError):  # it may have ended already
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
        _, errors = process.communicate()
        if process.returncode != 0:
            last_line = errors.strip().rpartition("\n")[2].rstrip(".")
            _warn_of_failure(step, directory, f"status {process.returncode}: {last_line}")


def wait_for(publisher: Publisher | None) -> None:
    """Waits on all ranks until rank 0 has published everything. COLLECTIVE. publisher: None on ranks other than 0."""
    # One collective per short turn, because an export may outlast the deadline of collectives.
    while on_first_rank(lambda: publisher is not None and publisher.is_busy(_TURN_SECONDS), "Checkpoint/published"):
        pass


def _warn_of_failure(step: int, directory: Path, problem: str) -> None:
    stack_position.warn(
        f"Publish exports each checkpoint to {directory}. Received: step {step} could not be exported: {problem}. "
        "Training continues; earlier versions are untouched."
    )
