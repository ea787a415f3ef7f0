"""Writes files and directories atomically: writes a hidden one, syncs it and renames it.

`rename` is the only step that readers can see, and POSIX makes it atomic. A killed writer leaves a `.tmp-*` directory,
which readers ignore and `sweep_temporaries` removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp-"
REPLACED = ".replaced"  # suffix of a directory that is being replaced by a newer one of its name
_OTHER_HOST_SECONDS = 24 * 3600.0  # how long another host's temporaries stay: its processes cannot be checked
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY  # O_DIRECTORY, because opening a FIFO would wait for its writer
_PATTERN = re.compile(r"^\.tmp-(?P<host>.*)-(?P<pid>\d+)-[^-]*$")


def explain(error: OSError, what: str, path: Path | str) -> str:
    """Returns the message (rule, received, remedy) for a failed file operation. `what`: 'A checkpoint', ..."""
    number = error.errno
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{what} must be written completely. Received: no space left for {path} ({error.strerror}). Nothing was "
            "published, and earlier files are untouched. Free space, raise the quota, or keep fewer files."
        )
    if number == errno.EROFS:
        return (
            f"{what} needs a writable directory. Received: {path} ({error.strerror}). Earlier files "
            "are untouched. Mount it writable (Linux makes a disk read-only after errors), or give another directory."
        )
    if number in (errno.EACCES, errno.EPERM):
        return (
            f"{what} needs a directory that this process may write to. Received: {path} ({error.strerror}, user id "
            f"{os.geteuid()}). Change its owner or mode, or give another directory."
        )
    if number in (errno.ENOTDIR, errno.EEXIST):
        return f"{what} needs a directory. Received: {path}, where a file is in the way. Give another path."
    return f"{what} at {path} failed: {error.strerror or error}. Check the path and the file system."


def make_directory(path: Path, what: str, error_type: type[Exception]) -> Path:
    """Creates `path` and its parents. Raises: error_type: `path` is a file, or cannot be created or written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise error_type(explain(error, what, path)) from error
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        number = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
        raise error_type(explain(OSError(number, os.strerror(number)), what, path))
    return path


def make_staging(parent: Path) -> Path:
    """Returns a new hidden directory in `parent`.

    Its name contains host and process, so that `sweep_temporaries` can recognize a dead writer.
    """
    path = parent / f"{TEMPORARY}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir()  # not mkdtemp, whose 0700 would hide the result from a server run by another user
    return path


@contextlib.contextmanager
def staging_directory(parent: Path, made: Path | None = None) -> Iterator[Path]:
    """Yields a hidden directory in `parent`, which is removed at the end unless it was renamed.

    `made`: a directory from `make_staging`; None: a new one.
    """
    path = make_staging(parent) if made is None else made
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sync_file(path: Path) -> None:
    """Waits until the file or directory is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory, but commit a rename before they return.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Waits until `path`, and everything under it if it is a directory, is on disk, deepest entries first."""
    if not path.is_dir():
        sync_file(path)
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            sync_file(Path(folder, name))
        sync_file(Path(folder))


def publish(staged: Path, final: Path, *, replace: bool, synced: bool = True) -> None:
    """Renames `staged`, whose contents are complete, to `final` after syncing it; then syncs the parent.

    Without `synced`, the result survives the process, but not the host.

    With `replace`, an existing `final` is first renamed to `final`.replaced, which readers of checkpoints use while
    `final` is missing; `sweep_temporaries` or the next `publish` removes it.
    Raises: FileExistsError: `final` exists and `replace` is false; OSError.
    """
    if synced:
        sync_tree(staged)
    old = final.with_name(final.name + REPLACED)
    if replace and final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        if final.exists():  # rename() would silently replace an empty directory
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
        try:
            staged.rename(final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from error
            raise
    except BaseException:
        if replace and old.exists() and not final.exists():
            old.rename(final)
        raise
    if synced:
        sync_file(final.parent)
    if replace:
        remove(old)


def write_whole(path: str | Path, write: Callable[[str], Any], *, synced: bool = True) -> Any:
    """Calls `write` with a hidden path of the same name, and moves its result to `path`.

    A file appears atomically, and so does a directory, unless an existing one at `path` has other entries: then files
    are moved one by one. Without `synced`, the result survives the process, but not the host.
    Returns: what `write` returns. Raises: what `write` raises; OSError. `path` is then unchanged.
    """
    final = Path(os.path.realpath(path))
    base = next(parent for parent in final.parents if parent.is_dir())  # `write` creates missing parents, or fails
    with staging_directory(base) as folder:
        staged = folder / "new"
        staged.mkdir()
        try:
            result = write(str(staged / final.relative_to(base)))
        except OSError as error:
            if error.filename is not None:
                error.filename = str(error.filename).replace(f"{staged}/", f"{base}/")
            raise
        if synced:
            sync_tree(staged)
        # An index (.json) must appear after the files that it lists.
        for entry in sorted(staged.iterdir(), key=lambda each: (each.suffix == ".json", each.name)):
            _move(entry, base / entry.name, folder)
        if synced:
            sync_file(base)
    return result


def _move(entry: Path, final: Path, folder: Path) -> None:
    if not entry.is_dir() or not final.exists():
        entry.replace(final)
    elif {each.name for each in final.iterdir()} <= {each.name for each in entry.iterdir()}:
        final.replace(folder / "replaced")
        entry.replace(final)
    else:
        for part in sorted(entry.iterdir()):
            _move(part, final / part.name, folder)


def remove(path: Path) -> None:
    """Removes a directory; renames it first, so that no reader sees it partly removed."""
    if not path.exists():
        return
    with staging_directory(path.parent) as bin_:
        path.rename(bin_ / path.name)


@contextlib.contextmanager
def being_read(path: Path) -> Iterator[None]:
    """Protects a directory from `remove_unless_read` in any process of this host, within the block."""
    try:
        descriptor = os.open(path, _DIRECTORY)
    except OSError:  # missing: reading it will fail
        yield
        return
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def remove_unless_read(path: Path) -> bool:
    """Works like `remove`, unless a process of this host reads the directory (`being_read`). Returns whether it did.

    Raises: OSError: `path` is not a directory, or cannot be read or removed.
    """
    try:
        descriptor = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:  # this file system has no locks
        pass
    try:
        remove(path)  # while locked, so that a new reader waits and then finds nothing
    finally:
        os.close(descriptor)
    return True


def sweep_temporaries(parent: Path) -> list[str]:
    """Removes temporaries of killed writers in `parent`, but not of live processes. Returns the removed names.

    A directory that was being replaced when its writer died gets its name back.
    """
    removed = []
    for entry in sorted(parent.iterdir()) if parent.is_dir() else ():
        if entry.name.startswith(TEMPORARY) and not _may_be_alive(entry):
            shutil.rmtree(entry, ignore_errors=True)
            removed.append(entry.name)
        elif entry.name.endswith(REPLACED) and entry.is_dir():
            final = entry.with_name(entry.name.removesuffix(REPLACED))
            if final.exists():
                remove(entry)
                removed.append(entry.name)
            else:
                entry.rename(final)
    return removed


def _may_be_alive(entry: Path) -> bool:
    match = _PATTERN.match(entry.name)
    if match is None:
        return False
    if match["host"] == socket.gethostname():
        try:
            os.kill(int(match["pid"]), 0)
        except ProcessLookupError:
            return False
        except (PermissionError, OverflowError):
            pass
        return True
    try:
        return time.time() - entry.stat().st_mtime < _OTHER_HOST_SECONDS
    except OSError:
        return False
