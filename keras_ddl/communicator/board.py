"""Tells ranks between steps about newcomers and leaving ranks, and lets newcomers reach rank 0.

The launcher passes on all of this (launch/questions.py), on one host as on several: it sends newcomers' questions to
the present rank 0, sends rank 0's answers back, and writes on all boards when the ranks meet newcomers or let ranks
leave.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from pathlib import Path

from keras_ddl import config
from keras_ddl.communicator import membership

_ADMIT_AT = struct.Struct("@Q")


class Board:
    """Memory of this process that the launcher writes through the wrapper. Reading it takes less than a microsecond.

    Args:
        directory: KERAS_DDL_RUN_DIR, where the wrapper has made the file, filled with zeros.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with (directory / config.BOARD_FILE).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @property
    def has_question(self) -> bool:
        """Whether a process has asked rank 0 a question since rank 0 last looked."""
        return self._memory[0] != 0

    @has_question.setter
    def has_question(self, value: bool) -> None:
        self._memory[0] = value

    @property
    def admit_at(self) -> int:
        """The number of calls after which all ranks, before their next step, meet newcomers or let ranks leave. It is
        different each time.
        """
        return int(_ADMIT_AT.unpack_from(self._memory, config.BOARD_ADMIT_AT)[0])

    @admit_at.setter
    def admit_at(self, calls: int) -> None:
        """Called by rank 0: sets the value on the boards of all ranks, and returns when it is there."""
        membership.tell({"admit_at": calls}, self.directory)

    def ask(self, what: str, text: str = "") -> None:
        """A newcomer asks rank 0: "record" | "join"."""
        membership.tell({"ask": what, "text": text}, self.directory)

    def questions(self, what: str) -> dict[str, str]:
        """Returns name -> text of the newcomers that ask, until `forget`; for "leave", of the ranks that should leave
        the job, with the reason.
        """
        return membership.tell({"questions": what}, self.directory)

    def answer(self, name: str, record: bytes) -> None:
        """Answers a newcomer, which sees all of the answer or none of it."""
        (self.directory / config.RECORD_FILE).write_bytes(record)  # the wrapper takes it from there
        membership.tell({"answer": name}, self.directory)

    def forget(self, what: str, name: str | None = None) -> None:
        """Withdraws the question of a newcomer; by default of this newcomer.

        A newcomer withdraws its question when it has the answer. Rank 0 does not: it could be lost between the answer
        and the withdrawal, or withdraw the next question. A repeated answer does no harm.
        """
        membership.tell({"forget": what, "name": name}, self.directory)

    def has_answer(self) -> bool:
        """Whether rank 0 has answered this newcomer since `take_answer`."""
        return self._answer.exists()

    def take_answer(self) -> bytes | None:
        """Returns rank 0's answer to this newcomer, once."""
        with contextlib.suppress(FileNotFoundError):
            record = self._answer.read_bytes()
            self._answer.unlink()
            return record
        return None

    @property
    def _answer(self) -> Path:
        return self.directory / config.ANSWER_FILE


def of_process() -> Board | None:
    """Returns the board of this rank or newcomer; None: the job takes no newcomers."""
    directory = config.get("RUN_DIR")
    if directory is None or not Path(directory, config.BOARD_FILE).exists():
        return None
    return Board(Path(directory))
