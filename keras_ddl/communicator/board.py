"""What a rank of a job that may have newcomers is told between its steps, and how newcomers reach rank 0.

The launcher passes everything on (launch/questions.py), on one host as on several: questions of newcomers to the rank
that is rank 0 now, its answers to them, and to the boards of all ranks when they meet newcomers, or let ranks leave.
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
    """This process's memory that the launcher writes, by its wrapper. Looking at it costs less than a microsecond.

    Args:
        directory: KERAS_DDL_RUN_DIR, where the wrapper has made the file, with zeros.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with (directory / config.BOARD_FILE).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @property
    def has_question(self) -> bool:
        """Whether somebody has asked rank 0 something since it has last looked."""
        return self._memory[0] != 0

    @has_question.setter
    def has_question(self, value: bool) -> None:
        self._memory[0] = value

    @property
    def admit_at(self) -> int:
        """After how many calls all ranks meet newcomers, or let ranks leave, before their next step. It changes for
        each time.
        """
        return int(_ADMIT_AT.unpack_from(self._memory, config.BOARD_ADMIT_AT)[0])

    @admit_at.setter
    def admit_at(self, calls: int) -> None:
        """Rank 0 sets it on the boards of all ranks: returns when it is there."""
        membership.tell({"admit_at": calls}, self.directory)

    def ask(self, what: str, text: str = "") -> None:
        """A newcomer asks rank 0: "record" | "join"."""
        membership.tell({"ask": what, "text": text}, self.directory)

    def questions(self, what: str) -> dict[str, str]:
        """Returns name -> text of the newcomers that ask, until `forget`; for "leave", of the ranks that are to leave
        the job.
        """
        return membership.tell({"questions": what}, self.directory)

    def answer(self, name: str, record: bytes) -> None:
        """Answers a newcomer. It sees all of the answer or none of it."""
        (self.directory / config.RECORD_FILE).write_bytes(record)  # the wrapper takes it from there
        membership.tell({"answer": name}, self.directory)

    def forget(self, what: str, name: str | None = None) -> None:
        """The question of a newcomer, of this one by default, needs no answer any more.

        It takes its own back when it has the answer: rank 0 could be lost between the two, or take back the next
        question. Until then it may be answered again, which does no harm.
        """
        membership.tell({"forget": what, "name": name}, self.directory)

    def has_answer(self) -> bool:
        """Whether rank 0 has answered this newcomer since `take_answer`."""
        return self._answer.exists()

    def take_answer(self) -> bytes | None:
        """Returns what rank 0 has answered this newcomer, once."""
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
