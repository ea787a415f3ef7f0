"""Makes and checks directories and files that only this user may use, below shared ones such as /tmp.

In a shared directory another user can create any name ahead of time, and guess further names from existing ones. So
keras_ddl makes and opens everything there through this module: sockets, ranks' reports to the launcher, and above all
pickles, which can run code.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from keras_ddl.errors import ConfigError

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREDENTIALS = struct.Struct("@iII")  # process, user, group
_ANY_ACCESS = 0o077  # permissions of others
_WRITE = 0o022


def private_directory(path: Path, *, is_new: bool = False) -> Path:
    """Makes the directory `path` with mode 0700, or takes an existing one that only this user may enter.

    The directories above are checked, too, so that no other user can replace it later.

    Args:
        is_new: whether it must not exist yet.
    Returns: its path without symbolic links.
    Raises:
        ConfigError: it is not a directory, others may use it, or others may rename a directory above it.
        OSError: it cannot be made. FileExistsError: it exists, with `is_new`. FileNotFoundError: it was just removed.
    """
    parent = Path(os.path.realpath(path.parent))
    with contextlib.ExitStack() as stack:
        holder = _enter(stack, None, "/")
        _require_that_nobody_renames(holder, Path("/"))
        for depth, part in enumerate(parent.parts[1:], start=2):
            holder = _enter(stack, holder, part)
            _require_that_nobody_renames(holder, Path(*parent.parts[:depth]))
        _enter_own(stack, holder, parent / path.name, _ANY_ACCESS, may_make=True, is_new=is_new)
    return parent / path.name


def own_directory(path: Path, levels: int) -> None:
    """Makes the last `levels` folders of `path` with mode 0700, or takes existing ones that only this user can write.

    The directories above are the user's choice, such as a disk that several hosts share.

    Raises: ConfigError: one is not a directory, or others may write to it. OSError: one cannot be made.
    """
    path.parents[levels - 1].mkdir(parents=True, exist_ok=True)
    with _own_directory(path, levels, may_make=True):
        pass


def read_own(path: Path, levels: int) -> bytes:
    """Returns the content of a file that only this user may write to, in `levels` such directories.

    Raises: ConfigError: it is not a file, or others may write to it. OSError: the file cannot be read.
    """
    with _own_directory(path.parent, levels, may_make=False) as holder:
        try:
            descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=holder)
        except OSError as error:
            if stat.S_ISREG(os.stat(path.name, dir_fd=holder, follow_symlinks=False).st_mode):
                raise
            raise _refusal(path, "which is not a file") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise _refusal(path, "which is not a file or has several names (hard links)")
        _require_own(status, path, _WRITE)
        return file.read()


def is_own_peer(connection: socket.socket) -> bool:
    """Whether the process at the other end of a UNIX socket is this user's, according to the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


@contextlib.contextmanager
def _own_directory(path: Path, levels: int, *, may_make: bool) -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        root = path.parents[levels - 1]
        holder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, holder)
        for below in [*reversed(path.parents[: levels - 1]), path]:
            holder = _enter_own(stack, holder, below, _WRITE, may_make=may_make)
        yield holder


def _enter(stack: contextlib.ExitStack, holder: int | None, name: str) -> int:
    descriptor = os.open(name, _DIRECTORY, dir_fd=holder)
    stack.callback(os.close, descriptor)
    return descriptor


def _enter_own(
    stack: contextlib.ExitStack, holder: int, path: Path, forbidden: int, *, may_make: bool, is_new: bool = False
) -> int:
    if may_make:
        try:
            os.mkdir(path.name, 0o700, dir_fd=holder)
        except FileExistsError:
            if is_new:
                raise
    try:
        descriptor = _enter(stack, holder, path.name)
    except NotADirectoryError:  # also raised for a symbolic link
        raise _refusal(path, "which is not a directory") from None
    _require_own(os.fstat(descriptor), path, forbidden)
    return descriptor


def _require_own(status: os.stat_result, path: Path, forbidden: int) -> None:
    if status.st_uid != os.geteuid():
        raise _refusal(path, f"which belongs to user {status.st_uid}")
    if status.st_mode & forbidden:
        what = "enter" if forbidden == _ANY_ACCESS else "write to"
        raise _refusal(path, f"which others may {what} (mode {stat.S_IMODE(status.st_mode):04o})")


def _require_that_nobody_renames(descriptor: int, path: Path) -> None:
    """Checks that only this user and root can rename or replace this user's entries in a directory."""
    status = os.fstat(descriptor)
    if status.st_uid not in _trusted_owners():
        raise _refusal(path, f"a directory of user {status.st_uid}, who can rename its entries")
    is_open = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid))
    if is_open and not status.st_mode & stat.S_ISVTX:
        mode = f"mode {stat.S_IMODE(status.st_mode):04o}, without the sticky bit"
        raise _refusal(path, f"where others can rename entries ({mode})")


def _trusted_owners() -> set[int]:
    owners = {0, os.geteuid()}
    with contextlib.suppress(OSError, ValueError):
        # In a container that does not map root's number, root's files have the number of nobody.
        mapped = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if sum(int(count) for _, _, count in mapped) < 2**32 - 1:
            owners.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return owners


def _is_own_group(group: int) -> bool:
    """Whether a group is root's, or contains only this user, like the group with the user's name."""
    if group == 0:
        return True
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def _refusal(path: Path, what: str) -> ConfigError:
    return ConfigError(
        "In a directory that other users can write to, only a job's user may have access to its files. Received: "
        f"{path}, {what} (host {socket.gethostname()}, user id {os.geteuid()}). If the file is yours, remove the "
        "permissions of other users (chmod go-rwx). If it is not, another user may have made it to attack you. For "
        "temporary files you can also set TMPDIR to a directory that only you can write to."
    )
