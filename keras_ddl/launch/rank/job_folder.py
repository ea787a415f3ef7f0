"""The directories of a job on one host. The host's last rank to end removes them.

A rank's wrapper locks the rank's directory. If the wrapper is killed, the lock is freed, and another rank removes the
directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from keras_ddl.errors import LaunchError
from keras_ddl.files.private import private_directory

_TRIES = 20  # a rank that ends may remove a directory while it is still empty
PREFIX = "keras_ddl-"
SOCKETS = f"{PREFIX}sockets"  # in the job's directory, for all of its ranks on the host
_RANK = "rank-"


def on_this_host(secret: str) -> Path:
    """Returns the path of a job's directory, which files.private makes.

    Each host has a different name for it: somebody who lists the directory for temporary files on one host, or sees
    command lines and sockets there, cannot guess the name on another.

    Args:
        secret: JobSpec.id or JobSpec.kept, which processes of the job get only over the launcher's connections.
    """
    name = hashlib.blake2b(socket.gethostname().encode(), key=secret.encode(), digest_size=16).hexdigest()
    return Path(tempfile.gettempdir()) / f"{PREFIX}{name}"


def make(*folders: Path, is_new: bool = False) -> Path:
    """Makes or reuses directories, each in a shared directory or its predecessor; returns the last path.

    Args:
        is_new: whether the last directory must not exist yet.
    Raises: ConfigError: others can use a directory. LaunchError: a directory cannot be made.
    """
    made = folders[-1]
    for tries in range(1, _TRIES + 1):
        try:
            for folder in folders:
                made = private_directory(folder, is_new=is_new and folder == folders[-1])
            break
        except FileNotFoundError as error:
            if tries == _TRIES:
                raise _cannot_be_made(folders[-1], error) from None
        except OSError as error:
            raise _cannot_be_made(folders[-1], error) from None
    return made


def make_for_rank(folder: Path, rank: int) -> Path:
    """Makes the directory of a rank in the job's directory `folder`, and locks it until this process ends.

    Raises: as `make`.
    """
    path = folder / f"{_RANK}{rank}"
    for _ in range(_TRIES):
        make(folder, path, is_new=True)
        descriptor = _locked(path, fcntl.LOCK_EX)
        if descriptor is not None:
            return path
    raise _cannot_be_made(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))


def _locked(path: Path, how: int) -> int | None:
    """Returns a descriptor that locks the directory at `path`; None: it is gone, or (with LOCK_NB) already locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, how)
        if os.path.samestat(os.fstat(descriptor), path.stat()):  # else it was removed before it was locked
            return descriptor
    except (FileNotFoundError, BlockingIOError):
        pass
    os.close(descriptor)
    return None


def _remove_if_its_wrapper_ended(path: Path) -> bool:
    """Removes a rank's directory if nobody locks it. Returns whether it is gone."""
    descriptor = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if descriptor is None:
        return not path.exists()
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)
    return True


def _cannot_be_made(folder: Path, error: OSError) -> LaunchError:
    return LaunchError(
        f"A job needs a directory for its temporary files on each host. Received: {folder}, host "
        f"{socket.gethostname()}: {error.strerror}. Set TMPDIR to a directory on a local disk that you can write to."
    )


def remove_job_folder(folder: Path, patience: float) -> None:
    """Removes the job's directory and the ranks' shared files, if this is the last rank on this host.

    Args:
        patience: seconds after which it is removed even if other ranks still have files in it; 0: keep it then.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            names = [each.name for each in folder.iterdir()]
        except FileNotFoundError:  # another rank, or the launcher, was faster
            return
        if not all(_remove_if_its_wrapper_ended(folder / name) for name in names if name.startswith(_RANK)):
            return
        for name in names:
            if name.startswith(PREFIX):  # other files belong to mpirun, which still runs
                shutil.rmtree(folder / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
        if time.monotonic() >= deadline:
            if patience:
                shutil.rmtree(folder, ignore_errors=True)
            return
        time.sleep(0.05)
