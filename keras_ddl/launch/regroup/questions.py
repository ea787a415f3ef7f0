"""Passes newcomers' questions to rank 0, and rank 0's answers to all (communicator/newcomers/board.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keras_ddl.link.kinds import Kind

Send = Callable[[int, Kind, "bytes | dict[str, Any]"], None]


class Questions:
    """The questions and answers of one job.

    Args:
        send: sends a frame to the wrapper of a rank.

    Attributes:
        admit_at: the value that all boards should show.
    """

    def __init__(self, send: Send) -> None:
        self.admit_at = 0
        self._send = send
        self._asked: dict[str, dict[int, str]] = {"record": {}, "join": {}, "leave": {}}
        self._first = 0  # the rank that is now rank 0
        self._not_shown: set[int] = set()  # ranks whose boards do not show `admit_at` yet

    def take(self, rank: int, question: Mapping[str, Any], members: Iterable[int]) -> bool:
        """Takes and answers a question of a rank's program. Returns False if it is another kind of question."""
        answer: dict[str, Any] = {}
        if "ask" in question:
            self._asked[question["ask"]][rank] = question["text"]
            self._ring()
        elif "questions" in question:
            answer = {str(each): text for each, text in self._asked[question["questions"]].items()}
        elif "forget" in question:
            name = question["name"]
            self._asked[question["forget"]].pop(rank if name is None else int(name), None)
        elif "admit_at" in question:
            self.admit_at, self._not_shown = question["admit_at"], set(members)
            for each in members:
                self._send(each, Kind.BOARD, {"admit_at": self.admit_at})
            return True  # answered by `has_shown`
        else:
            return False
        self._send(rank, Kind.ANSWER, answer)
        return True

    def pass_record(self, rank: int, record: bytes) -> None:
        """Passes the record from rank 0 to the newcomer that asked for it."""
        self._asked["record"].pop(rank, None)
        self._send(rank, Kind.RECORD, record)

    def ask_to_leave(self, reasons: dict[int, str]) -> None:
        """Asks ranks to leave the job between two steps. reasons: rank -> why it should leave."""
        self._asked["leave"] = reasons
        if self._asked["leave"]:
            self._ring()

    def has_shown(self, rank: int, admit_at: int | None) -> None:
        """Records the `admit_at` that a rank's board shows. None: its program has ended."""
        if admit_at not in (None, self.admit_at) or rank not in self._not_shown:
            return
        self._not_shown.discard(rank)
        if not self._not_shown:
            self._send(self._first, Kind.ANSWER, {})

    def end(self, rank: int) -> None:
        """Records that the program of a rank or newcomer has ended."""
        for asked in self._asked.values():
            asked.pop(rank, None)
        self.has_shown(rank, None)

    def begin_epoch(self, members: tuple[int, ...]) -> None:
        """Records the new members; the first is rank 0. Newcomers among them stop asking."""
        for what in ("record", "join"):
            for rank in members:
                self._asked[what].pop(rank, None)
        self._first = members[0]
        self._not_shown.clear()
        self._ring()

    def _ring(self) -> None:
        if any(self._asked.values()):
            self._send(self._first, Kind.BOARD, {"has_question": True})
