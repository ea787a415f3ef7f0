"""Keeps processes from outliving a job: parent-death signals, and killing processes that a job left on this host."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TRACKER_SECONDS = 1.0
_MPI_SEGMENT = re.compile(r" (/dev/shm/(?:sm_segment|vader_segment|mpich_)[^\s]*)$", re.MULTILINE)
# Bound once, so that it can be called between fork and exec without importing anything there.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent(signum: int, parent: int | None = None) -> None:
    """Asks the kernel to send `signum` to this process when the thread that started this process ends.

    `parent`: the expected parent; if it died before this call took effect, the signal is raised now.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signum)


def dying_with_parent(command: list[str]) -> list[str]:
    """Returns a command that runs `command` and gets SIGTERM when the calling thread's process ends.

    A small program in between does this instead of a preexec_fn: the caller may be a notebook's kernel with many
    threads, where Python code between fork and exec can deadlock.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def marked(marker: str) -> list[int]:
    """Returns the processes of this host (never this one) whose environment contains the string `marker`."""
    if not marker:
        raise ValueError("The marker must not be empty: all processes of the user would match it.")
    wanted = os.fsencode(marker)
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return pids


def wait_for_marked(marker: str, *, timeout: float) -> None:
    """Waits until no process of this host is marked with `marker`, or `timeout` seconds have passed."""
    deadline = time.monotonic() + timeout
    while marked(marker) and time.monotonic() < deadline:
        time.sleep(0.02)


def kill_marked(marker: str, *, timeout: float = 2.0) -> None:
    """Kills (SIGKILL) every process of this host marked with `marker`, until none is left or `timeout` has passed.

    It finds processes that process groups miss, such as a grandchild with its own session. Resource trackers get a
    moment to finish.
    """
    began = time.monotonic()
    deadline = began + timeout
    segments: set[str] = set()
    while True:
        pids = marked(marker)
        for pid in pids:
            segments |= mpi_segments(pid)
            if not (time.monotonic() - began < _TRACKER_SECONDS and is_resource_tracker(pid)):
                signal_quietly(pid, signal.SIGKILL)
        if not pids or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    remove_files(segments)


def is_resource_tracker(pid: int) -> bool:
    """Whether process `pid` is a resource tracker of multiprocessing or joblib.

    A tracker removes files in /dev/shm when the processes that made them have ended, and then ends itself.
    """
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def mpi_segments(pid: int) -> set[str]:
    """Returns the files in /dev/shm that the MPI library of process `pid` has mapped.

    MPI removes them when a job ends normally, and mpirun when a rank dies. They stay when mpirun is killed.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return set(_MPI_SEGMENT.findall(maps))


def remove_files(paths: Iterable[str]) -> None:
    """Removes files, if they exist."""
    for path in paths:
        try:
            Path(path).unlink(missing_ok=True)
        except OSError:
            pass


def signal_quietly(pid: int, signum: int, *, group: bool = False) -> None:
    """Sends a signal to a process, or to the group it leads, that may have ended already."""
    try:
        (os.killpg if group else os.kill)(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass


def _main(argv: list[str]) -> None:
    die_with_parent(signal.SIGTERM, int(argv[1]))
    os.execvp(argv[2], argv[2:])


if __name__ == "__main__":
    _main(sys.argv)
