"""Commits: state that a program saves so that it can continue after a restart of its job.

    <directory>/rank-0/commit-12    one commit: a pickled object, its length and its checksum
    <directory>/rank-4/commit-12    the same, of the first rank of another host

One rank of each host writes to the host's own disk, so that a lost host's commits exist on others. A commit is written
under a hidden name and renamed: a writer killed at any moment leaves the previous commit or the new one. Commits are
numbered from 1, equally on all ranks; the newest intact one on any rank is the state of the job. docs/launch.md says
where the directory is.

A commit is a pickle, which can run any code when it is read. So commits are read and written only in directories that
belong to this user and that nobody else may write to.
"""

from __future__ import annotations

import pickle
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from keras_ddl import communicator, config
from keras_ddl.errors import CheckpointError, ConfigError
from keras_ddl.files import durable, private

_WHAT = "A commit"
_NAME = re.compile(r"^commit-(\d+)$")
_END = struct.Struct("!8sIQ")  # mark, CRC-32 and length of the preceding bytes
_MARK = b"kddl-com"
_LEVELS = 3  # of directories that must be this user's: of all commits, of one state, of a rank
_KEPT = 2  # after a power cut the newest may be torn on disk


class TornCommit(Exception):
    """A commit that is truncated or altered."""


@dataclass
class Commits:
    """The commits of one state in a directory.

    Attributes:
        directory: the same path on all hosts, on a shared or a local disk.
        synced: wait until each commit is on disk. Otherwise it survives the processes, but not the host.
    """

    directory: Path
    synced: bool = False

    def write(self, number: int, content: Any) -> None:
        """Writes a commit of this rank, and removes old ones.

        Raises: CheckpointError: the commit cannot be written. ConfigError: others may write to the directory.
        """
        folder = self.directory / f"rank-{communicator.rank()}"
        try:
            private.own_directory(folder, _LEVELS)
            durable.write_whole(folder / f"commit-{number}", lambda part: _write(part, content), synced=self.synced)
            for old, path in _in_folder(folder)[_KEPT:]:
                if old < number:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(durable.explain(error, _WHAT, folder)) from error

    def found(self) -> list[tuple[int, Path]]:
        """Returns (number, file) of all commits that this process can read, newest first, torn ones included."""
        folders = [path for path in self.directory.glob("rank-*") if path.is_dir()]
        return sorted((pair for folder in folders for pair in _in_folder(folder)), reverse=True)

    def sweep(self) -> None:
        for folder in self.directory.glob("rank-*"):
            durable.sweep_temporaries(folder)


def _write(path: str, content: Any) -> None:
    with Path(path).open("wb") as file:
        end = _Checked(file)
        pickle.dump(content, end, protocol=5)
        file.write(_END.pack(_MARK, end.crc, end.length))


class _Checked:
    """A file that computes length and checksum of the data written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.crc, self.length = file, 0, 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.crc, self.length = zlib.crc32(data, self.crc), self.length + size
        self._file.write(data)
        return size


def of_job(name: str) -> Commits | None:
    """Returns the commits of the state `name`: in KERAS_DDL_COMMIT_DIR, else in the job's own directory.

    None: neither is set, so the job is not restarted.
    """
    configured, own = config.get("COMMIT_DIR"), config.get("JOB_DIR")
    if configured is None and own is None:
        return None
    return Commits(Path(configured or own) / "commits" / name, synced=configured is not None)


def read(path: Path) -> Any:
    """Returns the content of a commit.

    Raises: TornCommit: it is truncated or altered. ConfigError: others may have written it. Any error of unpickling.
    """
    data = memoryview(private.read_own(path, _LEVELS))
    if len(data) < _END.size:
        raise TornCommit(f"{path} ends early")
    content, end = data[: -_END.size], data[-_END.size :]
    mark, crc, length = _END.unpack(end)
    if mark != _MARK or length != len(content) or crc != zlib.crc32(content):
        raise TornCommit(f"{path} is truncated or altered")
    return pickle.loads(content)


def newest(commits: Commits) -> tuple[int, int, Any] | None:
    """Returns (number, rank that read it, content on that rank) of the newest intact commit; None: none. COLLECTIVE.

    Raises: ConfigError, on all ranks: others may have written it. Any error of unpickling, on the rank that reads.
    """
    left = commits.found()
    while True:
        numbers = communicator.all_gather_object(left[0][0] if left else 0, name="keras_ddl/commits/found")
        number = max(numbers)
        if number == 0:
            return None
        root = numbers.index(number)
        content, problem, refusal = None, "", ""
        if communicator.rank() == root:
            try:
                content = read(left.pop(0)[1])
            except (TornCommit, OSError) as error:
                problem = str(error)
            except ConfigError as error:
                refusal = str(error)
        problem, refusal = communicator.broadcast_object((problem, refusal), root, name="keras_ddl/commits/read")
        if refusal:
            raise ConfigError(refusal)
        if not problem:
            return number, root, content


def _in_folder(folder: Path) -> list[tuple[int, Path]]:
    pairs = [(_NAME.match(entry.name), entry) for entry in folder.iterdir()]
    return sorted(((int(match[1]), entry) for match, entry in pairs if match), reverse=True)
