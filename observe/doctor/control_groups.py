"""Reads the limits of this process's control groups, version 1 or 2: its own group and all parents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_HOME = "sys/fs/cgroup"


def cores(root: Path) -> float | None:
    """Returns the CPU limit in cores; None: no limit, or unknown."""
    limits = []
    for group in _groups(root, ""):
        limits.append(_quotient(_text(group / "cpu.max").split()))
    for group in _groups(root, "cpu"):
        limits.append(_quotient([_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]))
    return min((each for each in limits if each is not None), default=None)


def memory(root: Path) -> int | None:
    """Returns the memory limit in bytes; None: no limit, or unknown."""
    texts = [_text(group / "memory.max").strip() for group in _groups(root, "")]
    texts += [_text(group / "memory.limit_in_bytes").strip() for group in _groups(root, "memory")]
    # Version 1 writes "no limit" as a number of the size of the address space.
    numbers = [int(text) for text in texts if text.isdigit() and int(text) < 1 << 60]
    return min(numbers, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the directories of this process's group of a controller ("": version 2), and of its parents."""
    path = PurePosixPath("/")
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, where = rest.partition(":")
        if controller in controllers.split(","):
            path = PurePosixPath(where)
    homes = [_HOME, f"{_HOME}/unified"] if not controller else [f"{_HOME}/{controller}"]
    for home in homes:
        for group in (path, *path.parents):
            # In a container the path may be the host's, which does not exist here: then only the topmost does.
            yield root / home / str(group).lstrip("/")


def _quotient(words: list[str]) -> float | None:
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
