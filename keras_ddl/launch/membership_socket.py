"""The socket in KERAS_DDL_RUN_DIR at which a rank's program asks the launcher about the other ranks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from keras_ddl import config
from keras_ddl.files.private import is_own_peer
from keras_ddl.launch.control import RECORD_HEADER_BYTES, Kind, short_path

_MESSAGE_BYTES = 1 << 16


class MembershipSocket:
    """Takes one question at a time, answered as Kind.ANSWER says. Never blocks: the owner polls `fds`.

    {"epoch": n, "admits": [3], "door": ...}   which membership follows epoch n? admits: newcomers that it may have, or
                                               null. door: where other hosts reach the program. "leaves": "reason": the
                                               next membership should do without this rank
    {"start": true}                            of a newcomer: may the program start?
    {"join": true, "door": ...}                of a newcomer: which membership does it join? false: it no longer waits
    others                                     communicator/board.py
    """

    def __init__(self, run_dir: Path, *, has_board: bool) -> None:
        self._run_dir = run_dir
        self._board: BinaryIO | None = None
        if has_board:
            self._board = (run_dir / config.BOARD_FILE).open("wb", buffering=0)
            self._board.write(bytes(config.BOARD_BYTES))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        with short_path(run_dir / config.MEMBERSHIP_SOCKET) as name:
            self._listener.bind(name)
        self._listener.listen(1)
        self._program: socket.socket | None = None

    @property
    def fds(self) -> list[int]:
        return [self._listener.fileno(), *([] if self._program is None else [self._program.fileno()])]

    def serve(self, fd: int) -> Iterator[tuple[Kind, bytes | dict[str, Any]]]:
        """Reads from one of `fds`; yields the frames for the launcher that carry the program's question."""
        question = self._read(fd)
        if question is None:
            return
        if "answer" in question:
            with contextlib.suppress(OSError, ValueError):
                record = (self._run_dir / config.RECORD_FILE).read_bytes()
                yield Kind.RECORD, int(question["answer"]).to_bytes(RECORD_HEADER_BYTES) + record
        yield Kind.QUESTION, question

    def take(self, kind: Kind, payload: bytes) -> Iterator[tuple[Kind, bytes | dict[str, Any]]]:
        """Takes an ANSWER, BOARD or RECORD frame; yields those that answer it."""
        if kind is Kind.RECORD:
            part = self._run_dir / f"{config.ANSWER_FILE}.part"
            part.write_bytes(payload)
            part.rename(self._run_dir / config.ANSWER_FILE)
            return
        message = json.loads(payload)
        admit_at = message.get("admit_at")
        if self._board is not None:
            if admit_at is not None:
                os.pwrite(self._board.fileno(), admit_at.to_bytes(8, sys.byteorder), config.BOARD_ADMIT_AT)
            if message.get("has_question"):
                os.pwrite(self._board.fileno(), b"\1", 0)
        if kind is Kind.ANSWER:
            self._answer(payload)
        elif admit_at is not None:
            yield Kind.SHOWN, {"admit_at": admit_at}

    def _read(self, fd: int) -> dict[str, Any] | None:
        try:
            if fd == self._listener.fileno():
                arrived, _ = self._listener.accept()
                if not is_own_peer(arrived):
                    arrived.close()
                    return None
                self._hang_up()
                self._program = arrived
                self._program.setblocking(False)
                return None
            if self._program is not None and (message := self._program.recv(_MESSAGE_BYTES)):
                question = json.loads(message)
                if isinstance(question, dict):
                    return question
        except BlockingIOError:
            return None
        except (OSError, ValueError):
            pass  # whatever it was, it is no question
        self._hang_up()
        return None

    def _answer(self, payload: bytes) -> None:
        if self._program is not None:
            try:
                self._program.send(payload)
            except OSError:
                self._hang_up()  # it has ended, which its parent sees

    def _hang_up(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None
