"""Writes a file that all ranks save once and completely; on every rank the file exists when the call returns.

Nothing here is collective, so a script may save on one rank (`if keras_ddl.rank() == 0:`), on all ranks, or on each
rank to its own path. Instead the ranks of a host use a lock: the first rank writes, and a rank that later makes the
same call finds in the job's record that the call is done. Hosts that share a file system write once each. This is
harmless, because they write the same content, and one rename makes the file visible.

A lock ends with the process that holds it, so no rank waits for a dead one. Nobody locks the record of a killed job, so
the next job removes it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import math
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from keras_ddl import config
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import DeadlineError
from keras_ddl.files.durable import remove_unless_read
from keras_ddl.files.private import private_directory

_POLL_SECONDS = 0.01
_PREFIX = "keras_ddl-saves-"


@dataclass(frozen=True)
class Call:
    """A call that writes. Ranks compare calls to find out whether another rank has already made the same call.

    Attributes:
        name: the function's name and whatever distinguishes its calls; no spaces.
        content: a digest of the rest.
        weights: digest of the model's weights, if the call writes a model.
        agreed: digest of the weights when all ranks last had the same.
        times: how often the ranks had compared the weights by then; 0: never.
    """

    name: str
    content: int
    weights: int = 0
    agreed: int = -1
    times: int = 0


@dataclass(frozen=True)
class _Entry:
    name: str
    content: int
    weights: int
    times: int
    rank: int

    @classmethod
    def of(cls, call: Call, rank: int) -> _Entry:
        return cls(call.name, call.content, call.weights, call.times, rank)

    @classmethod
    def read(cls, line: str) -> _Entry:
        name, *numbers = line.split()
        return cls(name, *map(int, numbers))

    def line(self) -> str:
        return f"{self.name} {self.content} {self.weights} {self.times} {self.rank}\n"


class SaveRecords:
    """Records which files this job's ranks have written on this host. `job`: a string that only its ranks share."""

    def __init__(self, job: str, rank: int) -> None:
        self.rank = rank
        # The launcher removes everything in its ranks' directory, no matter how they ended.
        base = Path(config.get("RUN_DIR")).parent if config.is_set("RUN_DIR") else Path(tempfile.gettempdir())
        self.folder = base / f"{_PREFIX}{job}"
        self._held: int | None = None
        self._seen: dict[str, int] = {}  # by path: number of the record's entries that this rank's calls have matched
        for abandoned in base.glob(f"{_PREFIX}*"):
            # In a shared directory any user can make a file of this name.
            with contextlib.suppress(OSError):  # already removed
                if _is_own_directory(abandoned.lstat()):
                    remove_unless_read(abandoned)
        atexit.register(self._leave, os.getpid())

    @contextlib.contextmanager
    def claim(self, path: str, call: Call, appears_as: str | None = None) -> Iterator[bool]:
        """Yields whether this rank should carry out `call`, which writes `path`; waits while another rank does.

        A lower rank that has since changed its weights may already have written the file. A rank that still has the
        weights that all ranks last shared does not replace it, because one process would have written the changed
        weights.

        Args:
            call: equal on all ranks that write the same.
            appears_as: the file whose existence shows that the call is done.
        Raises: DeadlineError: another rank has been writing for KERAS_DDL_DEADLINE_SECONDS.
        """
        path = _name_of(path)
        with self._locked(path) as file:
            record = [_Entry.read(line) for line in file.read().splitlines()]
            seen = self._seen.get(path, 0)
            if not tf.io.gfile.exists(path if appears_as is None else appears_as):
                seen = len(record)
            alike = [(entry.name, entry.content) == (call.name, call.content) for entry in record]
            place = next((number for number in range(seen, len(record)) if alike[number]), None)
            if place is not None:
                self._seen[path] = place + 1
                yield False
                return
            if call.times and call.weights == call.agreed:
                for place in range(seen, len(record)):
                    theirs = record[place]
                    is_same_moment = (theirs.name, theirs.times) == (call.name, call.times)
                    if is_same_moment and theirs.rank < self.rank and theirs.weights != call.weights:
                        self._seen[path] = place + 1
                        stack_position.warn(
                            f"All ranks must hold the same weights when they save one file. Received: {path} with the "
                            f"weights of rank {theirs.rank}, which differ from those of rank {self.rank}. The file "
                            f"keeps the weights of rank {theirs.rank}. To avoid this warning, run the code that sets "
                            "weights on all ranks."
                        )
                        yield False
                        return
            yield True  # if the caller raises, nothing is recorded, and the next rank tries
            file.write(_Entry.of(call, self.rank).line())
            self._seen[path] = len(record) + 1

    @contextlib.contextmanager
    def in_turn(self, name: str) -> Iterator[None]:
        """Admits one rank of a host at a time to the block, without a time limit."""
        with self._locked(name, math.inf):
            yield

    def is_written(self, path: str) -> bool:
        """Whether another rank has written `path` in a call that this rank has not made yet."""
        path = _name_of(path)
        if not self._file_of(path).exists():
            return False
        with self._locked(path) as file:
            return len(file.read().splitlines()) > self._seen.get(path, 0)

    def _file_of(self, path: str) -> Path:
        return self.folder / hashlib.sha256(path.encode()).hexdigest()[:32]

    @contextlib.contextmanager
    def _locked(self, path: str, limit: float | None = None) -> Iterator[IO[str]]:
        self._hold()
        limit, begin = config.get("DEADLINE_SECONDS") if limit is None else limit, time.monotonic()
        with self._file_of(path).open("a+") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    pass
                if limit and time.monotonic() - begin > limit:
                    raise DeadlineError(
                        f"One rank writes a file while the other ranks on its host wait. Received: {path} has been "
                        f"written for {limit:g} s by another rank (rank {self.rank} waits). Look at that process and "
                        "the file system, or raise KERAS_DDL_DEADLINE_SECONDS."
                    )
                time.sleep(_POLL_SECONDS)
            file.seek(0)
            yield file

    def _hold(self) -> None:
        """Makes the folder of records, and holds its lock until this process ends."""
        while self._held is None:
            with contextlib.suppress(FileNotFoundError):  # another job removed it as abandoned
                private_directory(self.folder)
                descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if self.folder.exists() and os.path.samestat(os.fstat(descriptor), self.folder.stat()):
                    self._held = descriptor
                else:
                    os.close(descriptor)

    def _leave(self, process: int) -> None:
        if self._held is not None and os.getpid() == process:  # a forked child shares the lock
            os.close(self._held)
            self._held = None
            with contextlib.suppress(OSError):
                remove_unless_read(self.folder)


def _is_own_directory(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _name_of(path: str) -> str:
    """Returns one canonical name of a file; a URL, such as gs://bucket/model.keras, is returned unchanged."""
    return path if "://" in path else os.path.realpath(path)
