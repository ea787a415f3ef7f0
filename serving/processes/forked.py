"""The server's side of the fork server (fork_server.py): asks it to start and kill processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from keras_ddl.serving.processes.fork_server import MOST_BYTES

_IMPORT_SECONDS = 600.0


class ForkServer:
    """Starts the fork server when it is first needed, and again if it has died. Thread-safe."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        """`modules`: modules that the fork server imports, because they register operations."""
        self._modules, self._lock = modules, threading.Lock()
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None

    def fork(self, connection: socket.socket, arguments: Mapping[str, Any]) -> Forked:
        """Returns a new process. Blocks.

        Args:
            connection: the process's end of its connection to the server.
            arguments: JSON values, the arguments of `main` in prediction/main.py.
        Raises: OSError: the process cannot be started.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None
            socket.send_fds(self._control, [json.dumps(arguments).encode()], [connection.fileno()])
            pid = self._control.recv(MOST_BYTES)
            if not pid:
                raise ConnectionResetError("the fork server has ended")
            return Forked(int(pid), self._control)

    def _start(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_IMPORT_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                # -P, because the current folder may contain any module.
                [sys.executable, "-P", "-m", f"{__package__}.fork_server", str(theirs.fileno()), *self._modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def close(self) -> None:
        """Ends the fork server and all processes that it has started."""
        with self._lock:
            if self._control is not None and self._process is not None:
                self._control.close()
                self._process.kill()
                self._process.wait()


@dataclasses.dataclass(frozen=True)
class Forked:
    """A process that the fork server has started."""

    pid: int
    _control: socket.socket

    def kill(self) -> None:
        """Kills the process if the fork server still runs. Does not block."""
        with contextlib.suppress(OSError):  # it has ended with the fork server
            os.write(self._control.fileno(), json.dumps({"kill": self.pid}).encode())
