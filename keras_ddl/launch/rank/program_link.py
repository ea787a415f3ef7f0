"""The wrapper's end of the connections with its rank's program (link/program.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from keras_ddl.files.private import is_own_peer
from keras_ddl.link.channel import Channel
from keras_ddl.link.connections import listen_here
from keras_ddl.link.kinds import FROM_PROGRAM, JSON_FROM_PROGRAM, Kind
from keras_ddl.link.loop import READ, Source
from keras_ddl.link.program import SOCKET

Frame = tuple[Kind, "bytes | dict[str, Any]"]
TO_PROGRAM = (Kind.CALL, Kind.HOSTS_CHANGED, Kind.ANSWER, Kind.BOARD, Kind.ENDED, Kind.RECORD)


class WrapperLink:
    """Forwards frames between the program and the launcher. Never blocks, because the owner's loop serves `sources`.

    A program has one connection, and its child processes may have more, for example to report an error.
    """

    def __init__(self, run_dir: Path, of_job: Mapping[str, Any]) -> None:
        """`of_job`: facts about the job, for the program."""
        self._listener = listen_here(run_dir / SOCKET)
        self._welcome = {**of_job, "has_question": False, "admit_at": 0, "hosts_changed": False}
        self._channels: list[Channel] = []
        self._asking: Channel | None = None
        self._unshown: int | None = None  # the `admit_at` that the program has not seen yet

    def sources(self, report: Callable[[Iterable[Frame]], None]) -> Iterator[Source]:
        """Yields the sources for the loop. `report`: sends frames to the launcher."""
        yield self._listener.fileno(), READ, self._accept
        self._channels = [each for each in self._channels if not each.closed]
        for channel in self._channels:
            yield channel.fileno(), channel.events, partial(self._pass_on, channel, report)

    def _pass_on(self, channel: Channel, report: Callable[[Iterable[Frame]], None]) -> None:
        report(self._serve(channel))

    def _serve(self, channel: Channel) -> Iterator[Frame]:
        channel.write()
        for kind, payload in () if channel.closed else channel.read():
            if kind in JSON_FROM_PROGRAM and not _is_object(payload):
                channel.close()
                break
            if kind in (Kind.QUESTION, Kind.CALL, Kind.WAITS):
                self._asking = channel
            yield kind, payload
        yield from self._show()

    def drain(self) -> Iterator[Frame]:
        """Yields the last frames of the ended program."""
        for channel in self._channels:
            while not channel.closed and channel.is_ready(READ, 0):
                yield from self._serve(channel)

    def take(self, kind: Kind, payload: bytes) -> Iterator[Frame]:
        """Forwards a frame to the program; yields the answers."""
        if kind is Kind.HOSTS_CHANGED:
            self._welcome["hosts_changed"] = True
        if kind is Kind.BOARD:
            board = json.loads(payload)
            self._welcome |= board
            self._unshown = board.get("admit_at", self._unshown)
        if kind in (Kind.HOSTS_CHANGED, Kind.BOARD):
            for channel in self._channels:
                channel.send(kind, payload)
        elif self._asking is not None:
            self._asking.send(kind, payload)
        yield from self._show()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if not is_own_peer(connection):
            connection.close()
            return
        channel = Channel(connection, FROM_PROGRAM)
        self._channels.append(channel)
        channel.send(Kind.WELCOME, self._welcome)

    def _show(self) -> Iterator[Frame]:
        """Tells the launcher that the program will see `admit_at` when it next looks."""
        if self._unshown is not None and not any(each.backlog for each in self._channels):
            shown, self._unshown = self._unshown, None
            yield Kind.SHOWN, {"admit_at": shown}


def _is_object(payload: bytes) -> bool:
    try:
        return isinstance(json.loads(payload), dict)
    except (ValueError, RecursionError):
        return False
