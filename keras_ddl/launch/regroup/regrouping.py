"""Lets a job continue without lost ranks: tells the others which ranks are left (membership.py), and starts spares."""

from __future__ import annotations

import json
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_ddl.config import Seconds
from keras_ddl.launch.rank_link import RankLink
from keras_ddl.launch.regroup.membership import MembershipTable
from keras_ddl.launch.regroup.questions import Questions
from keras_ddl.link.kinds import RANK_BYTES, Kind

_NO_SIGNAL = 0


class Regrouping:
    """The memberships of one job.

    Args:
        links: the links to the job's ranks, then those to its spares.
        num_ranks: number of ranks at the start.
        min_ranks: the smallest number of ranks with which the job continues.
        patience: seconds to wait for a living rank.
        say: shows a line.
        event: reports an event to the job's watchers (watchers.py).
        several_hosts: the ranks also ask for the first membership, and learn each other's addresses.
    """

    def __init__(
        self,
        links: Sequence[RankLink],
        num_ranks: int,
        min_ranks: int,
        patience: float,
        say: Callable[[str], None],
        *,
        event: Callable[..., None] = lambda *_, **__: None,
        several_hosts: bool = False,
    ) -> None:
        self.membership = MembershipTable(range(num_ranks), min_ranks, patience, epoch=-1 if several_hosts else 0)
        self._secret = secrets.token_hex(32) if several_hosts else None
        self._links, self._patience, self._say, self._event = links, patience, say, event
        self._killed_at: dict[int, float] = {}  # ranks that have not asked in time
        self._last: dict[str, Any] | None = None  # the last answer
        self._is_ending = False  # whether a rank has failed by itself
        self.spares = list(range(num_ranks, len(links)))  # waiting spares, in the order in which they will start
        self._leaving: dict[int, str] = {}  # ranks that leave, and why
        self._asked_to_leave: frozenset[int] = frozenset()
        self._waiting: set[int] = set()  # newcomers that wait for permission to start
        self._questions = Questions(lambda rank, kind, message: links[rank].send(kind, message))

    def take(self, rank: int, kind: Kind, payload: bytes) -> None:
        """Handles a frame from a rank's program: QUESTION, RECORD or SHOWN."""
        if kind is Kind.RECORD:
            to = int.from_bytes(payload[:RANK_BYTES])
            self._questions.pass_record(to, payload[RANK_BYTES:])
        elif kind is Kind.SHOWN:
            self._questions.has_shown(rank, json.loads(payload)["admit_at"])
        else:
            self.ask(rank, json.loads(payload))

    def ask(self, rank: int, question: Mapping[str, Any]) -> None:
        """Handles a question from a rank's program (communicator/transports/membership.py)."""
        if self._questions.take(rank, question, [each for each in self.membership.members if self._is_there(each)]):
            return
        door = question.get("door")  # the address at which other hosts can reach its program
        if door is not None and not self._links[rank].open_door(door):
            return  # its connection has just ended
        if "start" in question:
            self._waiting.add(rank)
        elif "join" in question and question["join"] and rank in self.membership.members and self._last is not None:
            self._links[rank].send(Kind.ANSWER, self._last)  # the rank missed this answer
        elif "join" in question:
            (self.membership.join if question["join"] else self.membership.give_up_joining)(rank)
        else:
            why = question.get("leaves")
            if why is not None:
                self._leaving[rank] = why
            is_leaving = why is not None
            self.membership.ask(
                rank, int(question["epoch"]), time.monotonic(), question.get("admits"), leaves=is_leaving
            )
            if self.membership.is_too_small():
                self._miss_vanished()
        self.answer()

    def ask_to_leave(self, ranks: Sequence[int], why: str) -> None:
        """Asks ranks to leave the job between two steps."""
        if self._asked_to_leave != set(ranks):
            self._asked_to_leave = frozenset(ranks)
            self._questions.ask_to_leave(dict.fromkeys(ranks, why))

    def _is_there(self, rank: int) -> bool:
        return not self._links[rank].over

    def continues_without(self, link: RankLink, *, is_stopping: bool) -> bool:
        """Handles the end of a rank. Returns whether the job continues without it."""
        rank = link.outcome.rank
        is_member = rank in self.membership.members
        self.membership.end(rank, is_lost=link.outcome.is_lost)
        self._questions.end(rank)
        is_last = is_member and all(self._links[each].over for each in self.membership.members)
        if is_last:
            self.end_spares()
        if not is_member:
            self._leave_out(rank, is_stopping)
        elif is_last or is_stopping or not link.outcome.is_lost or self.membership.is_too_small():
            if not (is_last or is_stopping) and self.membership.is_asked():
                self._miss_vanished()
            if not (is_last or is_stopping or self._is_ending or link.outcome.is_lost or link.outcome.done):
                self._say(f"rank {rank} failed on its own; the others would continue only if it had been killed.")
            self._is_ending |= not link.outcome.done
            return False
        elif not link.outcome.gives_up:  # a replacement would fail in the same way
            self._replace(rank)
        self.answer()
        return True

    def _miss_vanished(self) -> None:
        """Marks ranks that ended with status 0 as missed, because others wait for them and too few are left."""
        for link in self._links:
            outcome = link.outcome
            if outcome.has_vanished and outcome.rank in self.membership.members and not outcome.job_continues:
                outcome.is_missed = True

    def _replace(self, rank: int) -> None:
        if self.spares:
            spare = self.spares.pop(0)
            self._say(f"spare rank {spare} takes the place of rank {rank}.")

    def _leave_out(self, rank: int, is_stopping: bool) -> None:
        outcome = self._links[rank].outcome
        if not is_stopping and not outcome.job_continues and rank not in self.spares:
            self._say(f"rank {rank} has not joined the others, which continue ({outcome.describe()}).")
            if outcome.is_lost and not outcome.gives_up:
                self._replace(rank)
        if rank in self.spares:
            self.spares.remove(rank)
        outcome.job_continues = True
        self._links[rank].send(Kind.BYE, {"last": False, "job_continues": True})

    def end_spares(self) -> None:
        """Ends processes that have not become members, after all members have ended."""
        for link in self._links:
            if link.outcome.rank not in self.membership.members and not link.over:
                link.outcome.job_continues = True
                link.stop(signal.SIGKILL, 0.0)
                if link.is_missing:
                    link.lose()

    def answer(self) -> bool:
        """Answers the asking ranks if all living ranks have asked. Returns whether some are still awaited."""
        now = time.monotonic()
        for rank in self.membership.overdue(now):
            link = self._links[rank]
            if rank not in self._killed_at:
                self._killed_at[rank] = now
                self._say(f"rank {rank} has not answered the other ranks for {self._patience:g} s and is killed.")
                link.signal(signal.SIGKILL)
            elif now - self._killed_at[rank] > Seconds.KILLING and link.channel is not None:
                link.channel.close()  # then _serve_rank counts it as lost
        for rank in self._waiting.difference(self.spares):
            self._waiting.discard(rank)
            message = {"epoch": self.membership.epoch, "members": self.membership.members}
            self._links[rank].send(Kind.ANSWER, message)
        before = self.membership.members
        members = None if self._is_ending else self.membership.advance()
        if members is None:
            return bool(self.membership.missing())
        for rank in set(before) - set(members):
            outcome = self._links[rank].outcome
            if self._is_there(rank):
                outcome.job_continues = True
                why = self._leaving[rank]
                self._say(f"rank {rank} leaves ({why}); {_continuing(len(set(members) & set(before)))}.")
                self._event("rank_left", rank=rank, ranks=len(members), reason=why)
                self._links[rank].send(Kind.ANSWER, {"left": True})
                self._links[rank].stop(_NO_SIGNAL, Seconds.LEAVING)
                if rank not in self._asked_to_leave:  # else the mesh has no place for the rank until others join
                    self._replace(rank)
            elif outcome.is_lost:
                outcome.job_continues = True
                how = ", a newcomer, leaves" if outcome.gives_up else " was lost"
                self._say(f"rank {rank}{how} ({outcome.describe()}); {_continuing(len(set(members) & set(before)))}.")
                self._event("rank_lost", rank=rank, ranks=len(members), reason=outcome.describe())
                self._links[rank].send(Kind.BYE, {"last": False, "job_continues": True})
        for rank in set(members) - set(before):
            self._say(f"rank {rank} has joined; {_continuing(len(members))}.")
            self._event("rank_joined", rank=rank, ranks=len(members))
        for number, rank in enumerate(members):
            self._links[rank].output.renumber(number)
        ended = [rank for rank in before if self.membership.has_ended_well(rank)]
        answer: dict[str, Any] = {"epoch": self.membership.epoch, "members": members, "ended": ended}
        answer["min_ranks"] = self.membership.min_members
        if self._secret is not None:
            answer |= {"doors": doors([self._links[rank] for rank in members]), "secret": self._secret}
        self._last = answer
        for rank in members:
            self._links[rank].send(Kind.BOARD, {"admit_at": self._questions.admit_at})
            self._links[rank].send(Kind.ANSWER, answer)
        self._questions.begin_epoch(members)
        return False


def _continuing(number: int) -> str:
    return "1 rank continues" if number == 1 else f"{number} ranks continue"


def doors(links: Sequence[RankLink]) -> dict[int, dict[str, Any]]:
    """Returns rank -> door: where ranks on other hosts can reach it.

    A rank is at the address from which it reached the launcher. Ranks on the launcher's own host reached it through the
    loopback interface; ranks elsewhere know that host by the address at which they reached the launcher.
    """
    reached = [link.reached_at for link in links if not _is_loopback(link.reached_at)]
    own = reached[0] if reached else "127.0.0.1"
    by_rank = {}
    for link in links:
        by_rank[link.outcome.rank] = {**link.door, "address": own} if _is_loopback(link.door["address"]) else link.door
    return by_rank


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
