"""The wrapper's socket in KERAS_DDL_RUN_DIR at which its program asks for the next membership (membership.py)."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from keras_ddl import config
from keras_ddl.launch.control import short_path

_MESSAGE_BYTES = 1 << 16


class MembershipSocket:
    """One question at a time: {"epoch": n, "door": ...}, answered as Kind.MEMBERS says. Never blocks: the owner polls
    `fds`."""

    def __init__(self, run_dir: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        with short_path(run_dir / config.MEMBERSHIP_SOCKET) as name:
            self._listener.bind(name)
        self._listener.listen(1)
        self._program: socket.socket | None = None

    @property
    def fds(self) -> list[int]:
        """The descriptors to poll for reading."""
        return [self._listener.fileno(), *([] if self._program is None else [self._program.fileno()])]

    def serve(self, fd: int) -> dict[str, Any] | None:
        """Reads from one of `fds`; returns the program's question, if there is one."""
        try:
            if fd == self._listener.fileno():
                self._hang_up()
                self._program, _ = self._listener.accept()
                self._program.setblocking(False)
                return None
            if self._program is not None and (message := self._program.recv(_MESSAGE_BYTES)):
                question = json.loads(message)
                return {"epoch": int(question["epoch"]), "door": question["door"]}
        except BlockingIOError:
            return None
        except (OSError, ValueError, KeyError):
            pass  # whatever it was, it is no question
        self._hang_up()
        return None

    def answer(self, payload: bytes) -> None:
        """Answers the program."""
        if self._program is not None:
            try:
                self._program.send(payload)
            except OSError:
                self._hang_up()  # it has ended, which its parent sees

    def _hang_up(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None
