"""Decides, in the launcher, which ranks continue the job after some were lost.

The launcher starts every rank and sees it end, so the ranks need no vote. A rank that misses another one asks for the
next membership. The launcher answers when every other member has asked or has ended. A member that does neither in time
is killed, so that no rank is declared dead and then returns.

    epoch 0: ranks 0, 1, 2          rank 1 is killed; ranks 0 and 2 ask
    epoch 1: ranks 0, 2             rank 0 is killed while they meet; rank 2 asks
    epoch 2: rank 2

A newcomer is a process that the launcher has started to replace a lost rank. It becomes a member when all
members ask to admit it, which they do between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable


class MembershipTable:
    """The members of a job.

    Args:
        ranks: the members of the first epoch.
        min_members: the smallest number of members with which the job continues.
        patience: seconds that a member has to ask after the first member has asked.
        epoch: number of the first epoch; -1 if the ranks also ask for the first membership.

    Attributes:
        min_members: see above.
        epoch: number of this membership.
        members: members of this epoch, the oldest first, including those lost since.
    """

    def __init__(self, ranks: Iterable[int], min_members: int, patience: float, epoch: int = 0) -> None:
        self.epoch = epoch
        self.members = tuple(sorted(ranks))
        self.min_members, self._patience = min_members, patience
        self._asking: set[int] = set()
        self._admitting: set[int] = set()  # asking members that accept newcomers
        self._admitted: set[int] = set()  # newcomers that asking members have named
        self._joining: set[int] = set()
        self._leaving: set[int] = set()  # asking members that leave the job
        self._ended: set[int] = set()
        self._ended_well: set[int] = set()
        self._first_asked_at: float | None = None

    def ask(
        self, rank: int, epoch: int, now: float, admits: Iterable[int] | None = None, *, leaves: bool = False
    ) -> None:
        """Records that a rank of membership `epoch` asks for the next one, which a rank that was left out never gets.

        admits: newcomers that the rank names (it also accepts newcomers that others name); None: it accepts none.
        leaves: the rank will not be a member of the next one, unless no other rank is left.
        """
        if epoch == self.epoch and rank in self.members and rank not in self._ended:
            self._asking.add(rank)
            if leaves:
                self._leaving.add(rank)
            if admits is not None:
                self._admitting.add(rank)
                self._admitted.update(set(admits) - set(self.members))
            self._first_asked_at = now if self._first_asked_at is None else self._first_asked_at

    def join(self, rank: int) -> None:
        """Records that a newcomer is ready to become a member."""
        if rank not in self.members and rank not in self._ended:
            self._joining.add(rank)

    def give_up_joining(self, rank: int) -> None:
        """Records that a newcomer is no longer ready, because the members have moved on."""
        self._joining.discard(rank)

    def end(self, rank: int, *, is_lost: bool = True) -> None:
        """Records that the program of a rank has ended, or its host is lost. `is_lost`: it had not finished."""
        self._ended.add(rank)
        if not is_lost:
            self._ended_well.add(rank)
        for some in (self._asking, self._leaving, self._admitting, self._joining):
            some.discard(rank)
        if not self._asking:
            self._first_asked_at = None

    def is_asked(self) -> bool:
        return bool(self._asking)

    def has_ended_well(self, rank: int) -> bool:
        """Whether the program of a rank ended by itself with status 0."""
        return rank in self._ended_well

    def is_awaited(self, rank: int) -> bool:
        """Whether a rank has asked and is still waiting for the answer."""
        return rank in self._asking

    def missing(self) -> list[int]:
        """Returns the members and named newcomers that the asking ranks wait for."""
        if not self._asking:
            return []
        missing = [rank for rank in self.members if rank not in self._asking | self._ended]
        if not missing and self._admitting == self._asking:
            missing = sorted(self._admitted - self._joining - self._ended)
        return missing

    def overdue(self, now: float) -> list[int]:
        """Returns the missing ranks whose time is up. The caller kills them, and then calls `end`."""
        if self._first_asked_at is None or now - self._first_asked_at < self._patience:
            return []
        return self.missing()

    def advance(self) -> tuple[int, ...] | None:
        """Begins the next epoch if no rank is missing; returns its members, who must get an answer.

        None: no rank asks, some are missing, or too few are left (`is_too_small`).
        """
        if not self._asking or self.missing() or self.is_too_small():
            return None
        self.epoch += 1
        admitted = self._joining & self._admitted if self._admitting == self._asking else set()
        staying = self._asking - self._leaving or self._asking
        # The oldest members stay first, because rank 0 must have the state.
        self.members = (*(rank for rank in self.members if rank in staying), *sorted(admitted))
        self._joining -= admitted
        for some in (self._asking, self._leaving, self._admitting, self._admitted):
            some.clear()
        self._first_asked_at = None
        return self.members

    def is_too_small(self) -> bool:
        """Whether too few members are left. Members that had finished when they ended count as present."""
        return sum(rank not in self._ended - self._ended_well for rank in self.members) < self.min_members
