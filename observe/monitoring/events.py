"""Writes the event log of a job (`keras-ddl run --events FILE`): a line of JSON for each event.

observe/monitoring/docs/monitoring.md describes the fields, event_schema.json is their schema.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keras_ddl.errors import ConfigError


class EventLog:
    """Appends each line to a file in one unbuffered write, so that readers see it at once and whole.

    Several jobs may append to one file; `job` identifies their lines. The launcher waits neither for readers nor for
    the disk.

    Args:
        warn: shows a message when no more lines can be written.
    Raises: ConfigError: the file cannot be appended to, or is not a regular file: a pipe could block the launcher.
    """

    def __init__(self, path: str | os.PathLike[str], warn: Callable[[str], None]) -> None:
        self._path, self._warn = Path(path), warn
        self._job = secrets.token_hex(8)
        try:
            # O_NONBLOCK: does not wait for the reader of a FIFO.
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._descriptor: int | None = os.open(path, flags, 0o666)
        except OSError as error:
            raise ConfigError(
                f"--events must be a file that can be written to. Received: {str(path)!r} ({error.strerror}). Name a "
                "file in a directory that exists and is yours."
            ) from None
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise ConfigError(
                f"--events must be a regular file. Received: {str(path)!r}, whose reader could block the job. Name a "
                "file, and read it with `tail -F`."
            )
        # A crash of the machine may have left half a line.
        if status.st_size and os.pread(self._descriptor, 1, status.st_size - 1) != b"\n":
            self._write(b"\n")

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Appends a line. If that fails, as on a full disk, warns and writes nothing more."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"time": now, "event": name, "job": self._job, **fields})
        self._write(line.encode() + b"\n")

    def figures(self, rank: int, figures: Mapping[str, Any]) -> None:
        """Does nothing: figures are not events."""

    def _write(self, data: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            written = os.write(self._descriptor, data)
            problem = "no space left"
        except OSError as error:
            written, problem = 0, error.strerror or str(error)
        if written == len(data):
            return
        with contextlib.suppress(OSError):  # the disk may have failed
            if written:  # removes the half line, unless another job has appended to it
                end = os.fstat(self._descriptor).st_size
                if os.pread(self._descriptor, written, end - written) == data[:written]:
                    os.truncate(self._descriptor, end - written)
        self.close()
        self._warn(f"the event log {self._path} ends here: {problem}. The job continues.")

    def close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # some file systems report a full disk only now
                os.close(self._descriptor)
            self._descriptor = None
