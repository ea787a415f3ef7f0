"""The program's end of the connection with its wrapper, which forwards frames to and from the launcher.

The wrapper listens on a UNIX socket in KERAS_DDL_RUN_DIR (launch/rank/program_link.py). A program opens its connection
when it first needs it, and keeps it. The wrapper's first frame, WELCOME, tells it about the job:

    regroups         the job may continue without lost ranks
    takes_newcomers  processes may join the job
    figures          a watcher wants the figures of the training
    clock            how far the clock of this host is ahead of the launcher's, if measured
    has_question, admit_at, hosts_changed   as in the frames BOARD and HOSTS_CHANGED
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keras_ddl import config
from keras_ddl.errors import RankLostError
from keras_ddl.link.channel import Channel
from keras_ddl.link.connections import connect_here
from keras_ddl.link.kinds import Kind
from keras_ddl.link.loop import READ, WRITE

SOCKET = "link"  # in KERAS_DDL_RUN_DIR


class LinkLost(RankLostError):
    """The other end of the connection is gone. A rank's program then ends soon, with its wrapper."""

    def __init__(self) -> None:
        super().__init__("The launcher must run as long as its ranks. Received: no answer from it.")


class ProgramLink:
    """A program's connection with its wrapper. Any thread may call the methods.

    An interrupted call (by Ctrl-C, for example) closes the connection, because part of a frame may be lost. The next
    call opens another one.

    Attributes:
        has_question: a process has asked rank 0 a question. The program resets it.
        admit_at: see board.py.
        hosts_changed: whether a restart of the job would use other hosts.
        ended: the ranks that this rank has waited for and whose programs have ended.
        record: the record that rank 0 has sent to this newcomer. The program takes it and sets None.
    """

    def __init__(self, path: Path) -> None:
        """Raises: LinkLost: no wrapper listens at `path`."""
        self._path = path
        self._reading, self._sending = threading.RLock(), threading.RLock()
        self._channel: Channel | None = None
        self._arrived = select.poll()
        self._is_welcome = False
        self._job: dict[str, Any] = {}
        self._answer: dict[str, Any] | None = None
        self._call: list[bytes] = []
        self.has_question = self.hosts_changed = False
        self.admit_at = 0
        self.ended: set[int] = set()
        self.record: bytes | None = None
        self._opened()

    def job_fact(self, name: str) -> Any:
        """Returns an entry of WELCOME."""
        return self._job[name]

    def look(self) -> None:
        """Handles the frames that have arrived; never waits. Cost: 3 us."""
        if self._reading.acquire(blocking=False):  # else another thread reads
            try:
                if self._channel is None or self._arrived.poll(0):
                    self._take()
            except LinkLost:
                pass  # the wrapper has ended, and this process ends with it
            finally:
                self._reading.release()

    def send(self, kind: Kind, message: bytes | Mapping[str, Any] = b"") -> None:
        """Sends a frame to the launcher. Waits while the wrapper has too much to send. Raises: LinkLost."""
        channel = self._opened()
        with self._sending:
            try:
                channel.send(kind, message)
                while channel.backlog:
                    channel.is_ready(WRITE, None)
                    channel.write()
                if channel.closed:
                    raise LinkLost
            except BaseException:
                self._close()
                raise

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the launcher's answer to a question. Raises: LinkLost."""
        answer = self.ask_until(question, lambda: False)
        assert answer is not None
        return answer

    def ask_until(self, question: Mapping[str, Any], is_over: Callable[[], bool]) -> dict[str, Any] | None:
        """Returns the answer as `ask`; None: `is_over`, which another frame made true, ended the wait."""
        with self._reading:
            self._answer = None
            self.send(Kind.QUESTION, question)
            self._wait(lambda: is_over() or self._answer is not None)  # `is_over` may look, and take the answer
            if self._answer is None:
                self._close()  # so that the wrapper drops a late answer
            return self._answer

    def wait_for_record(self) -> bytes:
        """Waits for the record that rank 0 sends to this newcomer. Raises: LinkLost."""
        with self._reading:
            self._wait(lambda: self.record is not None)
            record, self.record = self.record, None
        assert record is not None
        return record

    def call(self) -> bytes:
        """Returns the pickled call of `keras_ddl.run`. Raises: LinkLost."""
        with self._reading:
            self.send(Kind.CALL)
            self._wait(lambda: bool(self._call) and not self._call[-1])
        return b"".join(self._call)

    def _opened(self) -> Channel:
        """Returns the connection. Raises: LinkLost."""
        channel = self._channel
        if channel is not None:
            return channel
        with self._reading:
            if self._channel is None:
                try:
                    self._channel = Channel(connect_here(self._path), None)
                except OSError as error:
                    raise LinkLost from error
                self._arrived = select.poll()
                self._arrived.register(self._channel, READ)
                self._is_welcome = False
                self._wait(lambda: self._is_welcome)
            assert self._channel is not None
            return self._channel

    def _close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for frames
            channel.close()

    def _wait(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self._opened().is_ready(READ, None)
            self._take()

    def _take(self) -> None:
        """Handles the frames that have arrived. Raises: LinkLost."""
        channel = self._opened()
        try:
            for kind, payload in channel.read():
                self._handle(kind, payload)
            if channel.closed:
                raise LinkLost
        except BaseException:
            self._close()
            raise

    def _handle(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.RECORD:
            self.record = payload
        elif kind is Kind.CALL:
            self._call.append(payload)
        elif kind is Kind.HOSTS_CHANGED:
            self.hosts_changed = True
        elif kind is Kind.ENDED:
            self.ended.update(json.loads(payload)["ranks"])
        elif kind is Kind.ANSWER:
            self._answer = json.loads(payload)
        else:  # WELCOME or BOARD
            message = json.loads(payload)
            self.has_question |= message.get("has_question", False)
            self.admit_at = message.get("admit_at", self.admit_at)
            if kind is Kind.WELCOME:
                self._job, self._is_welcome = message, True
                self.hosts_changed = message["hosts_changed"]


_link: ProgramLink | None = None
_opening = threading.RLock()


def current() -> ProgramLink | None:
    """Returns the connection of this process with its rank's wrapper; None: `keras-ddl run` has not started it."""
    global _link
    with _opening:
        folder = config.get("RUN_DIR")
        if _link is None and folder is not None:
            with contextlib.suppress(LinkLost):
                _link = ProgramLink(Path(folder, SOCKET))
        return _link


def opened() -> ProgramLink:
    """Returns the connection of this process. Raises: LinkLost: there is none."""
    if (link := current()) is None:
        raise LinkLost
    return link


def tell(kind: Kind, message: Mapping[str, Any]) -> None:
    """Tells the launcher something; does nothing without a launcher."""
    with contextlib.suppress(LinkLost):
        opened().send(kind, message)


def _in_forked_child() -> None:
    """A child process has its own connection: the frames of two processes would mix."""
    global _link, _opening
    _link, _opening = None, threading.RLock()


os.register_at_fork(after_in_child=_in_forked_child)
