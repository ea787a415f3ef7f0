"""Safely reads directories that others may have filled, such as downloaded checkpoints and shared folders.

A symbolic link there may lead to a private file, and opening a FIFO waits for its writer. So only regular files are
opened, and links inside the directory are not followed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

MOST_JSON_BYTES = 1 << 28
MOST_JSON_LEVELS = 200  # nested lists and objects; keras_ddl's files have 5 levels, plus those of user data
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(folder: Path | str, name: str) -> BufferedReader:
    """Opens `folder`/`name` for reading without following links below `folder`.

    Raises: OSError: the file cannot be opened, is not a regular file, or has a link in its path.
    """
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        raise OSError(errno.EINVAL, "the name leads out of its directory", f"{folder}/{name}")
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = _open(part, _FOLDER, place, Path(folder, name))
            os.close(place)
            place = inner
        descriptor = _open(parts[-1], _FILE, place, Path(folder, name))
    finally:
        os.close(place)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _no_file(mode, Path(folder, name))
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def _open(name: str, flags: int, place: int, path: Path) -> int:
    try:
        return os.open(name, flags, dir_fd=place)
    except OSError as error:
        mode = stat.S_IFREG
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):  # a link, a socket, or not a directory
            mode = os.stat(name, dir_fd=place, follow_symlinks=False).st_mode
        if stat.S_ISREG(mode):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise _no_file(mode, path) from None


def _no_file(mode: int, path: Path) -> OSError:
    return OSError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, not a file", str(path))


def copy(source: Path, names: Iterable[str], target: Path) -> None:
    """Copies files of the directory `source`, and the directories that they need, to `target`. Raises: OSError."""
    for name in names:
        with open_regular(source, name) as file:
            Path(target, name).parent.mkdir(parents=True, exist_ok=True)
            with Path(target, name).open("xb") as copied:
                shutil.copyfileobj(file, copied, 1 << 20)


def strange_entry(folder: Path) -> str | None:
    """Describes the first entry of `folder` that is neither a directory nor a regular file (such as a link), or None.

    Checks `folder` itself, too. Raises: OSError: a directory cannot be read.
    """
    if not stat.S_ISDIR(mode := folder.lstat().st_mode):
        return f"it is {_KINDS.get(stat.S_IFMT(mode), 'a file')}"
    left = [folder]
    while left:
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    left.append(Path(entry))
                elif not stat.S_ISREG(mode):
                    return f"{os.path.relpath(entry, folder)} is {_KINDS.get(stat.S_IFMT(mode), 'no file')}"
    return None


def check_opens(folder: Path) -> None:
    """Checks that all files below `folder` are regular files or links to them, so that opening one never waits.

    Raises: OSError: a file is a FIFO, a device or a socket, or cannot be examined.
    """
    seen, left = set[tuple[int, int]](), [str(folder)]
    while left:
        place = left.pop()
        status = os.stat(place)  # noqa: PTH116
        if stat.S_ISDIR(status.st_mode):
            if (status.st_dev, status.st_ino) not in seen:  # links may form a cycle
                seen.add((status.st_dev, status.st_ino))
                left += [os.path.join(place, name) for name in os.listdir(place)]  # noqa: PTH118, PTH208
        elif not stat.S_ISREG(status.st_mode):
            raise _no_file(status.st_mode, Path(place))


def read_json(folder: Path, name: str) -> Any:
    """Returns the content of the JSON file `folder`/`name`.

    Raises: OSError: as `open_regular`. ValueError: the file is too large, nested too deeply, or not JSON.
    """
    with open_regular(folder, name) as file:
        text = file.read(MOST_JSON_BYTES + 1)
    if len(text) > MOST_JSON_BYTES:
        raise ValueError(f"it has more than {MOST_JSON_BYTES} bytes")
    return parse_json(text)


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text of unknown origin. Raises: ValueError: it is not JSON, or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        value = None
        levels = MOST_JSON_LEVELS + 1
    else:
        levels = _levels(value)
    if levels > MOST_JSON_LEVELS:
        raise ValueError(f"its lists and objects have more than {MOST_JSON_LEVELS} levels")
    return value


def _levels(value: Any) -> int:
    levels, row = 0, [value]
    while row := [each for each in row if isinstance(each, (dict, list))]:
        levels += 1
        row = [part for each in row for part in (each.values() if isinstance(each, dict) else each)]
    return levels
