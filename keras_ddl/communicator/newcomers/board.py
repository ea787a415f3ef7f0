"""Tells ranks between steps about newcomers and leaving ranks, and lets newcomers reach rank 0.

The launcher forwards these messages (launch/regroup/), on one host as on several: newcomers' questions to the present
rank 0, rank 0's answers back to them, and to all ranks the call after which they meet newcomers or let ranks leave.
"""

from __future__ import annotations

from keras_ddl.link import program
from keras_ddl.link.kinds import RANK_BYTES, Kind
from keras_ddl.link.program import ProgramLink


class Board:
    """Shows the launcher's notes for this rank or newcomer between steps. A look takes 3 us."""

    def __init__(self, link: ProgramLink) -> None:
        self._link = link

    @property
    def has_question(self) -> bool:
        """Whether a process has asked rank 0 a question since rank 0 last looked."""
        self._link.look()
        return self._link.has_question

    @has_question.setter
    def has_question(self, value: bool) -> None:
        self._link.has_question = value

    @property
    def admit_at(self) -> int:
        """The number of calls after which all ranks meet newcomers or let ranks leave; it changes for each meeting."""
        self._link.look()
        return self._link.admit_at

    @admit_at.setter
    def admit_at(self, calls: int) -> None:
        """Sets the value on the boards of all ranks, and returns when all boards have it. Only rank 0 calls it."""
        self._link.ask({"admit_at": calls})

    def ask(self, what: str, text: str = "") -> None:
        """In a newcomer: asks rank 0 for the "record", or to "join"."""
        self._link.ask({"ask": what, "text": text})

    def questions(self, what: str) -> dict[str, str]:
        """Returns newcomer -> text of its question, until `forget`; for "leave", leaving rank -> reason."""
        return self._link.ask({"questions": what})

    def answer(self, name: str, record: bytes) -> None:
        """Answers a newcomer, which sees all of the answer or none of it."""
        self._link.send(Kind.RECORD, int(name).to_bytes(RANK_BYTES) + record)

    def forget(self, what: str, name: str | None = None) -> None:
        """Withdraws the question of a newcomer; by default of this newcomer.

        A newcomer withdraws its question when it has the answer. Rank 0 does not: it could be lost between the answer
        and the withdrawal, or withdraw the next question. A repeated answer does no harm.
        """
        self._link.ask({"forget": what, "name": name})

    def has_answer(self) -> bool:
        """Whether rank 0 has answered this newcomer since `take_answer`."""
        self._link.look()
        return self._link.record is not None

    def take_answer(self) -> bytes:
        """Waits for rank 0's answer to this newcomer."""
        return self._link.wait_for_record()


def current() -> Board | None:
    """Returns the board of this rank or newcomer; None: the job takes no newcomers."""
    link = program.current()
    return Board(link) if link is not None and link.job_fact("takes_newcomers") else None
