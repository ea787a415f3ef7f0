"""Stores commits: state that a program saves so that it can continue after a restart of its job.

    <directory>/rank-0/ckpt-00000012    one commit: a checkpoint (keras_ddl/checkpoint) of one pickled object
    <directory>/rank-4/ckpt-00000012    the same commit, by the first rank of another host

One rank of each host writes to the host's own disk, so that a lost host's commits exist on others. Commits are numbered
from 1, equally on all ranks. The newest intact commit on any rank is the job's state. docs/launch.md says where the
directory is.

A commit is a pickle, which can run any code when it is read. So commits are read and written only in directories that
belong to this user and that nobody else may write to.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl import checkpoint as ckpt
from keras_ddl import communicator, config
from keras_ddl.checkpoint import verifying
from keras_ddl.errors import CheckpointError, ConfigError
from keras_ddl.files import durable, private

_CONTENT = "content.pickle"
_LEVELS = 3  # nested directories that must be this user's: of all commits, of one state, of a rank
_KEPT = 2  # because a power cut may truncate the newest on disk


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

        def fill(staged: Path) -> dict[str, Any]:
            staged.chmod(0o700)
            with (staged / _CONTENT).open("wb") as file:
                (staged / _CONTENT).chmod(0o600)
                pickle.dump(content, file, protocol=5)
            return {}

        try:
            private.own_directory(folder, _LEVELS)
        except OSError as error:
            raise CheckpointError(durable.explain(error, "A commit", folder)) from error
        ckpt.write(folder, number, fill, synced=self.synced)
        ckpt.prune(folder, _KEPT)

    def found(self) -> list[ckpt.Checkpoint]:
        """Returns all commits that this process can read, newest first, including truncated ones."""
        folders = [path for path in self.directory.glob("rank-*") if path.is_dir()]
        everything = (each for folder in folders for each in ckpt.list_checkpoints(folder))
        return sorted(everything, key=lambda each: (each.step, each.path), reverse=True)

    def sweep(self) -> None:
        for folder in self.directory.glob("rank-*"):
            ckpt.sweep_temporaries(folder)


def of_job(name: str) -> Commits | None:
    """Returns the commits of the state `name`: in KERAS_DDL_COMMIT_DIR, else in the job's own directory.

    None: neither is set, so the job is not restarted.
    """
    configured, own = config.get("COMMIT_DIR"), config.get("JOB_DIR")
    if configured is None and own is None:
        return None
    return Commits(Path(configured or own) / "commits" / name, synced=configured is not None)


def read(commit: ckpt.Checkpoint) -> Any:
    """Returns the content of a commit.

    Raises: CheckpointError, OSError: it is truncated or altered. ConfigError: others may have written it. Any error of
        unpickling.
    """
    content = private.read_own(commit.path / _CONTENT, _LEVELS + 1)
    verifying.validate_files(commit)
    return pickle.loads(content)


def newest(commits: Commits) -> tuple[int, int, Any] | None:
    """Returns (number, rank that read it, content on that rank) of the newest intact commit, or None. COLLECTIVE.

    Raises: ConfigError, on all ranks: others may have written it. Any error of unpickling, on the rank that reads.
    """
    left = commits.found()
    while True:
        numbers = communicator.all_gather_object(left[0].step if left else 0, name="keras_ddl/commits/found")
        number = max(numbers)
        if number == 0:
            return None
        root = numbers.index(number)
        content, problem, refusal = None, "", ""
        if communicator.rank() == root:
            try:
                content = read(left.pop(0))
            except (CheckpointError, OSError) as error:
                problem = str(error)
            except ConfigError as error:
                refusal = str(error)
        problem, refusal = communicator.broadcast_object((problem, refusal), root, name="keras_ddl/commits/read")
        if refusal:
            raise ConfigError(refusal)
        if not problem:
            return number, root, content
