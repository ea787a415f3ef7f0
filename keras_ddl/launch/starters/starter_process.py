"""Runs the process that starts the ranks: host_ranks.py, remote_ranks.py or an mpirun."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from keras_ddl.config import Seconds
from keras_ddl.launch.rank import processes
from keras_ddl.link.channel import Channel

_TEXT_BYTES = 1 << 14


class StarterProcess:
    """A process that the constructor starts in its own session, so that Ctrl-C reaches only the launcher."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], directory: str, *, takes_orders: bool = False
    ) -> None:
        """`takes_orders`: its stdin is a connection with `orders` (remote_ranks.py); otherwise it is empty."""
        self.orders: Channel | None = None
        with contextlib.ExitStack() as stack:
            stdin = subprocess.DEVNULL
            if takes_orders:
                ours, theirs = socket.socketpair()
                self.orders, stdin = Channel(ours, None), stack.enter_context(theirs).fileno()
            self._process = subprocess.Popen(
                processes.dying_with_parent(list(command)),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=directory,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._stream = self._process.stdout
        os.set_blocking(self._stream.fileno(), False)
        self._text = b""
        self.ended_at: float | None = None  # time.monotonic()

    def fileno(self) -> int:
        """The descriptor of its output; -1 at the end of the output."""
        return -1 if self._stream.closed else self._stream.fileno()

    @property
    def silent(self) -> bool:
        return self._stream.closed

    @property
    def text(self) -> str:
        return self._text.decode(errors="replace")

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal, None while it runs. 0 does not mean that the job succeeded."""
        return self._process.returncode

    def read(self) -> bytes:
        """Returns its output since the last call."""
        if self._stream.closed:
            return b""
        try:
            data = os.read(self._stream.fileno(), 1 << 16)
        except BlockingIOError:
            return b""
        if not data:
            self._stream.close()
        self._text = (self._text + data)[-_TEXT_BYTES:]
        return data

    def poll(self) -> int | None:
        """Returns the status; sets `ended_at` when the process has ended."""
        status = self._process.poll()
        if status is not None and self.ended_at is None:
            self.ended_at = time.monotonic()
        return status

    def signal(self, signum: int) -> None:
        if self._process.poll() is None:
            processes.signal_quietly(self._process.pid, signum)

    def wait(self) -> None:
        """Waits for the end of a process that was killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(Seconds.KILLING)
        self.poll()
        if self.orders is not None:
            self.orders.close()

    def end(self, seconds: float, serve: Callable[[], None], is_killed: Callable[[], bool]) -> None:
        """Waits for its end; sends SIGTERM after `seconds`, and SIGKILL if it ignores SIGTERM.

        Args:
            serve: called repeatedly while it waits.
            is_killed: whether to kill the process at once.
        """
        for patience, signum in ((seconds, signal.SIGTERM), (Seconds.GRACE, signal.SIGKILL)):
            deadline = time.monotonic() + patience
            while self.poll() is None and time.monotonic() < deadline and not is_killed():
                serve()
            self.signal(signal.SIGKILL if is_killed() else signum)
        self.wait()
