"""The program of one rank: a process group with two output streams and one input stream."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_ddl.launch.rank import processes, terminal
from keras_ddl.link.kinds import Kind

_OUTPUT_BYTES = 1 << 16


class RankProgram:
    """A started program. Never blocks: the owner polls `sources` for reading and, if `wants_stdin`, `stdin`."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        *,
        screen: Mapping[str, Any],
        reads_stdin: bool,
    ) -> None:
        """`screen`: which of "stdout" and "stderr" should be terminals, and their "rows" and "columns".

        Raises: OSError: the program cannot be executed.
        """
        self.sources: dict[int, Kind] = {}
        self._terminals: list[int] = []
        self._segments: set[str] = set()
        self._stdin_backlog = bytearray()
        self._stdin_ended = False
        ends = [self._open(kind, name, screen) for kind, name in ((Kind.OUT, "stdout"), (Kind.ERR, "stderr"))]
        try:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                env=environment,
                stdin=subprocess.PIPE if reads_stdin else subprocess.DEVNULL,
                stdout=ends[0],
                stderr=ends[1],
                # So that all its processes can be signalled. Not a session: see rank_process.main.
                process_group=0,
                close_fds=False,  # MPICH hands the rank a file descriptor (PMI_FD)
                preexec_fn=_between_fork_and_exec,
            )
        finally:
            for fd in ends:
                os.close(fd)
        self.stdin: int | None = None
        if self._process.stdin is not None:
            self.stdin = self._process.stdin.fileno()
            os.set_blocking(self.stdin, False)

    def _open(self, kind: Kind, name: str, screen: Mapping[str, Any]) -> int:
        """Opens one stream; returns the program's end."""
        if screen.get(name):
            ours, theirs = terminal.open_pair(screen["rows"], screen["columns"])
            self._terminals.append(ours)
        else:
            ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self.sources[ours] = kind
        return theirs

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Returns the exit status (negative for a signal), None while it runs."""
        return self._process.poll()

    def signal(self, signum: int) -> None:
        """Sends a signal to the program's group, unless it has ended; SIGKILL to the program alone: see kill_rest."""
        if self._process.returncode is None:
            self._segments |= processes.mpi_segments(self._process.pid)
            processes.signal_quietly(self._process.pid, signum, group=signum != signal.SIGKILL)

    def kill_rest(self, mark: str) -> None:
        """Kills processes that the ended program left behind: its group, and those marked with `mark`."""
        processes.kill_marked(mark)  # before the group, which contains resource trackers
        processes.signal_quietly(self._process.pid, signal.SIGKILL, group=True)
        processes.remove_files(self._segments)

    def read(self, fd: int) -> bytes:
        """Returns the bytes that can be read from the source `fd`; closes and forgets it at its end."""
        try:
            data = os.read(fd, _OUTPUT_BYTES)
        except BlockingIOError:
            return b""
        except OSError:  # a pseudo-terminal whose other end is closed
            data = b""
        if not data:
            del self.sources[fd]
            if fd in self._terminals:
                self._terminals.remove(fd)
            os.close(fd)
        return data

    def set_terminal_size(self, rows: int, columns: int) -> None:
        for fd in self._terminals:
            terminal.set_size(fd, rows, columns)

    @property
    def wants_stdin(self) -> bool:
        return self.stdin is not None and (bool(self._stdin_backlog) or self._stdin_ended)

    def queue_stdin(self, data: bytes) -> int:
        """Queues input; b"" ends it. Returns the number of bytes dropped because the program reads no input."""
        if self.stdin is None:
            return len(data)
        self._stdin_backlog += data
        self._stdin_ended = self._stdin_ended or not data
        return 0

    def feed(self) -> int:
        """Writes queued input. Returns the number of bytes taken."""
        assert self.stdin is not None and self._process.stdin is not None
        taken = len(self._stdin_backlog)
        try:
            if self._stdin_backlog:
                taken = os.write(self.stdin, self._stdin_backlog)
            finished = self._stdin_ended and taken == len(self._stdin_backlog)
        except BlockingIOError:
            return 0
        except OSError:  # the program has closed its stdin: drop input
            finished = True
        del self._stdin_backlog[:taken]
        if finished:
            self.stdin = None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        return taken


def _between_fork_and_exec() -> None:
    # SIGKILL, because after the death of the wrapper nobody could follow up on a SIGTERM.
    processes.die_with_parent(signal.SIGKILL)
    # A shell that starts jobs in the background ignores SIGINT, and Python would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def require_directory(wanted: str, host: str) -> str:
    """Returns `wanted`. Raises: NotADirectoryError: it does not exist on this host."""
    if not Path(wanted).is_dir():
        raise NotADirectoryError(
            f"The working directory must exist on every host. Received: {wanted!r}, which does not exist on host "
            f"{host}. Start the job from a directory that the hosts share."
        )
    return wanted
