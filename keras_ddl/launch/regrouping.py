"""Lets a job go on without lost ranks: answers those that ask who is left (membership.py)."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl.launch import control
from keras_ddl.launch.membership import Membership
from keras_ddl.launch.rank_link import RankLink

_KILLING_SECONDS = 5.0  # a rank that cannot be killed is given up


class Regrouping:
    """The memberships of one job.

    Args:
        patience: seconds for which a rank that lives is waited for. say: shows a line. several_hosts: the ranks ask for
            the first membership, too, and are told one another's doors.
    """

    def __init__(
        self,
        links: Sequence[RankLink],
        min_ranks: int,
        patience: float,
        say: Callable[[str], None],
        *,
        several_hosts: bool = False,
    ) -> None:
        self.membership = Membership(range(len(links)), min_ranks, patience, epoch=-1 if several_hosts else 0)
        self._secret = secrets.token_hex(32) if several_hosts else None
        self._links, self._patience, self._say = links, patience, say
        self._killed_at: dict[int, float] = {}  # ranks that have not asked in time

    def ask(self, rank: int, epoch: int, door: dict[str, Any] | None = None) -> None:
        """A rank asks for the membership after `epoch`. `door`: where its program can be reached by other hosts."""
        if door is not None and not self._links[rank].open_door(door):
            return  # its connection has just ended
        self.membership.ask(rank, epoch, time.monotonic())
        self.answer()

    def goes_on_without(self, link: RankLink, *, is_stopping: bool) -> bool:
        """A rank has ended. Returns whether the job goes on for all that."""
        self.membership.end(link.outcome.rank)
        if is_stopping or not link.outcome.is_lost or self.membership.is_too_small():
            return False
        self.answer()
        return True

    def answer(self) -> bool:
        """Answers those that ask who is left, if all that live have asked. Returns whether some are still awaited."""
        now = time.monotonic()
        for rank in self.membership.overdue(now):
            link = self._links[rank]
            if rank not in self._killed_at:
                self._killed_at[rank] = now
                self._say(f"rank {rank} has not come to the others for {self._patience:g} s, and is killed.")
                link.signal(signal.SIGKILL)
            elif now - self._killed_at[rank] > _KILLING_SECONDS and link.channel is not None:
                link.channel.close()  # then _serve_rank counts it as lost
        before = self.membership.members
        members = self.membership.advance()
        if members is None:
            return bool(self.membership.missing())
        for rank in set(before) - set(members):
            outcome = self._links[rank].outcome
            if outcome.is_lost:
                outcome.survived = True
                self._say(f"rank {rank} was lost ({outcome.describe()}); {len(members)} go on.")
                self._links[rank].send(control.Kind.BYE, {"last": False, "survived": True})
        answer: dict[str, Any] = {"epoch": self.membership.epoch, "members": members}
        if self._secret is not None:
            answer |= {"doors": doors([self._links[rank] for rank in members]), "secret": self._secret}
        for rank in members:
            self._links[rank].send(control.Kind.MEMBERS, answer)
        return False


def doors(links: Sequence[RankLink]) -> dict[int, dict[str, Any]]:
    """Returns by rank the addresses of the ranks' doors: those from which they have reached the launcher.

    Ranks of the launcher's own host have come by its loopback interface. Others know that host by the address at which
    they have reached the launcher.
    """
    reached = [link.reached_at for link in links if not _is_loopback(link.reached_at)]
    own = reached[0] if reached else "127.0.0.1"
    by_rank = {}
    for link in links:
        by_rank[link.outcome.rank] = {**link.door, "address": own} if _is_loopback(link.door["address"]) else link.door
    return by_rank


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
