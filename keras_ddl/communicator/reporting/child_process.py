"""Keeps child processes of a rank from acting as ranks.

A process that multiprocessing spawns imports the script again. If the script calls init() at its top, the child would
call MPI as its parent's rank, and a pool replaces each child that ends. So `init` raises in the child, and ends the
parent's rank unless the script catches the error.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from keras_ddl import config
from keras_ddl.communicator.reporting import error_report, stack_position
from keras_ddl.errors import NotInitializedError
from keras_ddl.topology.launcher import find_launcher

# The function of multiprocessing.spawn that raises when a process is started while the script is being imported.
_IMPORT_GUARD = "_check_not_importing_main"

_TERMINATION_SECONDS = 2.0
_LOOK_SECONDS = 0.02


def mark_rank() -> None:
    """Marks this process as the rank in the environment, which child processes inherit."""
    os.environ[config.VARIABLES["RANK_PROCESS"].environment_name] = str(os.getpid())


def refuse(rank: int | None) -> None:
    """Raises NotInitializedError in a child process of a rank; an uncaught exception there then ends the rank.

    `rank`: by the launcher's variables, which children inherit.
    """
    marked = config.get("RANK_PROCESS")
    # The server of multiprocessing's "forkserver" may have started before mark_rank.
    imports_for_parent = getattr(multiprocessing.current_process(), "_inheriting", False)
    if marked == os.getpid() or not (marked or imports_for_parent):
        return
    parent = marked or os.getppid()
    error_report.install(rank or 0, lambda status: _end(parent))
    raise NotInitializedError(
        "keras_ddl.init() (Strategy() calls it) is for a rank's own process, not for child processes that import the "
        f"script again. Received: a call in process {os.getpid()}, a child of process "
        f"{parent}{'' if rank is None else f' (rank {rank})'}. Move the work of the script under `if __name__ == "
        '"__main__":`, and keep only what the child processes need above it.'
    )


def watch_import() -> None:
    """Called in a child that imports a rank's script: ends the rank if the script starts processes without a guard.

    Python raises an error about the missing guard in the child only, and a pool would replace the children forever.
    """
    launcher = find_launcher()
    if launcher is None or launcher.size == 1:
        return
    hook, parent = sys.excepthook, os.getppid()
    if b"multiprocessing.forkserver" in Path(f"/proc/{parent}/cmdline").read_bytes():
        parent = _parent_of(parent)  # not the server, which the pool would restart

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook(kind, error, trace)
        frames = traceback.extract_tb(trace)
        if not frames or frames[-1].name != _IMPORT_GUARD:
            return
        line = stack_position.user_line(frames)
        text = (
            'A script must start processes only under `if __name__ == "__main__":`, because the child processes import '
            f"the script again. Received: {line or 'a process'} in process {os.getpid()}, a child of process {parent}."
        )
        error_report.write(launcher.rank or 0, RuntimeError(text))
        _end(parent)

    sys.excepthook = end


def _end(pid: int) -> None:
    """Ends the process `pid`, if it still is an ancestor of this one."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if not _is_ancestor(pid):
            return
        os.kill(pid, signum)
        end = time.monotonic() + _TERMINATION_SECONDS
        while time.monotonic() < end and _is_ancestor(pid):
            time.sleep(_LOOK_SECONDS)


def _is_ancestor(pid: int) -> bool:
    other = os.getppid()
    try:
        while other not in (0, pid):
            other = _parent_of(other)
    except OSError:  # already ended
        return False
    return other == pid


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
