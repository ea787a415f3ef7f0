"""Finds what a launch leaves behind: processes, by a mark in their environment, and shared memory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

MARK = "RANKS_HARNESS_ID"


def marked(mark: str) -> dict[int, str]:
    """Returns {process id: command line} of live processes that carry `mark` in their environment."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = line.decode(errors="replace")
            except OSError:
                continue  # it has ended, or belongs to another user
    return found


def end_all(mark: str, grace: float) -> dict[int, str]:
    """Waits `grace` seconds for the launch's processes to end, kills the remaining ones, and returns those."""
    deadline = time.monotonic() + grace
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for _ in range(100):
        for pid in marked(mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if not marked(mark):
            break
        time.sleep(0.05)
    return left


OURS = "ddl"
OPEN_MPI = "sm_segment"
_OTHER_JOBS_SECONDS = 20.0


def shared_memory() -> set[Path]:
    return {path for path in Path("/dev/shm").iterdir() if OURS in path.name or OPEN_MPI in path.name}


def leaked_shared_memory(before: set[Path]) -> list[Path]:
    """Returns new segments of keras_ddl that no live process maps; other jobs on this machine may hold their own.

    Removes segments that aborted jobs of Open MPI leave. Waits, because other jobs map a new segment a bit later, and
    because the launcher of killed ranks removes their segments, on a busy machine only seconds later.
    """
    leaked = []
    new = unmapped(shared_memory() - before)
    deadline = time.monotonic() + _OTHER_JOBS_SECONDS
    while new:
        time.sleep(0.2)
        new = unmapped(set(new))
        if time.monotonic() > deadline or all(OPEN_MPI in path.name for path in new):
            break
    for path in new:
        if OPEN_MPI in path.name:
            path.unlink(missing_ok=True)
        else:
            leaked.append(path)
    return leaked


def unmapped(paths: set[Path]) -> list[Path]:
    """Returns the segments that exist and that no live process maps."""
    found = []
    for path in paths:
        mapped = False
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    mapped = mapped or str(path) in (entry / "maps").read_text()
                except OSError:
                    continue
        if not mapped and path.exists():
            found.append(path)
    return found
