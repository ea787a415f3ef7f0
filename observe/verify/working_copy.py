"""Makes a copy of the working directory, in which a program can read its own files but not change them.

The whole working directory is copied; a directory that is too large is refused before a byte is copied. Its parents and
siblings are linked, so that paths such as ../data still work. So are directories elsewhere that links in the working
directory lead to. Writes to linked directories change the originals.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from keras_ddl.errors import ConfigError

_MOST_BYTES = 8 << 30
_MOST_ENTRIES = 200_000
_LEVELS = 3  # parents that are rebuilt above the working directory
_LEFT_OUT = ("__pycache__", "node_modules")
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")  # entries that mark a Python environment
_REMEDY = (
    "Run it in a directory that has only the files that the program needs. Put data that the program only reads into "
    "another directory and link to it: linked directories are not copied."
)


@dataclass(frozen=True)
class WorkingCopy:
    """A finished copy.

    Attributes:
        directory: the directory to run in.
        linked: the links in it that lead to directories outside, which are not copied.
    """

    directory: Path
    linked: tuple[str, ...]


def make(source: Path, under: Path, left_out: tuple[Path, ...] = ()) -> WorkingCopy:
    """Copies the directory `source` to below `under`, without `left_out` and files written later.

    Files share their blocks with the originals if the file system supports it.

    Raises: ConfigError: `source` is too large, or the file system of `under` has no room, and nothing was copied; or a
        file could not be copied.
    """
    source = source.resolve()
    target = under.joinpath(*source.parts[1:])
    target.mkdir(parents=True)
    contents = _Contents(source, {under.resolve(), *(each.resolve() for each in left_out)})
    _check_room(source, contents.sizes, target)
    level, copied = source, target
    for _ in range(_LEVELS):
        parent, copied_parent = level.parent, copied.parent
        if parent == level or parent == Path("/"):
            break
        for each in _entries(parent):
            if each.name != level.name:
                (copied_parent / each.name).symlink_to(each)
        level, copied = parent, copied_parent
    for relative in contents.directories:
        (target / relative).mkdir()
    for relative, of in contents.links.items():
        (target / relative).symlink_to(target / of.relative_to(source) if of.is_relative_to(source) else of)
    for relative, file in contents.files.items():
        try:
            _copy(file, target / relative)
        except FileNotFoundError:  # it was removed meanwhile
            continue
        except OSError as error:
            raise ConfigError(
                "keras-ddl verify runs a program in a copy of the working directory. Received: "
                f"{file}, which could not be copied to {under}: {error.strerror}. {_REMEDY}"
            ) from None
    outside = [str(relative) for relative, of in contents.links.items() if not of.is_relative_to(source)]
    return WorkingCopy(target, tuple(outside))


class _Contents:
    """The entries of a directory to copy, by paths relative to it.

    Attributes:
        sizes: top-level entry of the directory -> bytes in it.
        links: link -> its target.

    Raises: ConfigError: it has too many entries.
    """

    def __init__(self, source: Path, left_out: set[Path]) -> None:
        self.directories: list[Path] = []
        self.files: dict[Path, Path] = {}
        self.links: dict[Path, Path] = {}
        self.sizes: Counter[str] = Counter()
        count, pending = 0, [source]
        while pending:
            for each in _entries(pending.pop()):
                count += 1
                if count > _MOST_ENTRIES:
                    raise ConfigError(
                        "keras-ddl verify runs a program in a copy of the working directory. Received: "
                        f"{source}, which has more than {_MOST_ENTRIES} files and directories. {_REMEDY}"
                    )
                if each in left_out or each.name in _LEFT_OUT or any((each / name).exists() for name in _ENVIRONMENTS):
                    continue
                relative = each.relative_to(source)
                of = _leads_to(each) if each.is_symlink() else None
                if of is not None and (of.is_dir() or of.is_relative_to(source)):
                    self.links[relative] = of
                elif each.is_dir():
                    self.directories.append(relative)
                    pending.append(each)
                elif each.is_file() and os.access(each, os.R_OK):
                    self.files[relative] = each
                    self.sizes[relative.parts[0]] += each.stat().st_size


def _check_room(source: Path, sizes: Counter[str], target: Path) -> None:
    size, free = sizes.total(), shutil.disk_usage(target).free
    if size <= min(_MOST_BYTES, free // 2):
        return
    (name, most), *_ = sizes.most_common(1)
    received = f"Received: {source} with {_gib(size)}, of which {name} has {_gib(most)}"
    if size > _MOST_BYTES:
        raise ConfigError(
            f"keras-ddl verify runs a program in a copy of the working directory, of at most {_gib(_MOST_BYTES)}. "
            f"{received}. {_REMEDY}"
        )
    raise ConfigError(
        "keras-ddl verify runs a program in a copy of the working directory, which may take half of the free "
        f"space. {received}, and {_gib(free)} free at {target}. Name a directory with more room with --keep DIR, or "
        f"free some. Or: {_REMEDY}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _leads_to(link: Path) -> Path | None:
    try:
        return link.resolve()
    except (OSError, RuntimeError):  # a loop
        return None


def _copy(source: Path, target: Path) -> None:
    """Copies a file with its mode and times; shares the bytes if the file system supports it."""
    with source.open("rb") as read, target.open("wb") as written:
        try:
            while os.copy_file_range(read.fileno(), written.fileno(), 1 << 30):
                pass
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                raise
        shutil.copyfileobj(read, written, 1 << 20)  # the rest: all of it, or nothing
    shutil.copystat(source, target)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
