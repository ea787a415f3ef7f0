"""A directory to run a program in, where it finds the files of its own and writes without harm.

Directories are made anew, small files copied, and large ones linked. What lies above and beside the working directory
is linked, so that paths such as ../data lead where they did.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_LINK_BYTES = 1 << 20  # larger files are linked
_COPIED_BYTES = 64 << 20  # in all; what comes after is linked
_ENTRIES = 5000
_LEVELS = 3  # above the working directory
_SKIPPED = (".git", "__pycache__", ".venv", "venv", "node_modules")


def make(source: Path, under: Path) -> Path:
    """Returns a copy of the directory `source` below `under`. Not copied: what is written in it later."""
    source = source.resolve()
    target = under.joinpath(*source.parts[1:])
    target.mkdir(parents=True)
    level, copied = source, target
    for _ in range(_LEVELS):
        parent, copied_parent = level.parent, copied.parent
        if parent == level or parent == Path("/"):
            break
        for each in _entries(parent):
            if each.name != level.name:
                (copied_parent / each.name).symlink_to(each)
        level, copied = parent, copied_parent
    left, room = _ENTRIES, _COPIED_BYTES
    pending = [(source, target)]
    while pending:
        folder, copy = pending.pop(0)
        for each in _entries(folder):
            left -= 1
            at = copy / each.name
            if each.is_symlink() or left < 0 or each.name in _SKIPPED or under.is_relative_to(each):
                at.symlink_to(each.resolve())
            elif each.is_dir():
                at.mkdir()
                pending.append((each, at))
            elif (
                each.is_file() and (size := each.stat().st_size) <= min(_LINK_BYTES, room) and os.access(each, os.R_OK)
            ):
                shutil.copy2(each, at)
                room -= size
            else:
                at.symlink_to(each)
    return target


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
