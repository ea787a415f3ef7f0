"""Which ranks a job goes on with: every schedule of deaths and questions of three and four ranks."""

from __future__ import annotations

from collections import deque

import pytest

from keras_ddl.launch.regroup.membership import MembershipTable

PATIENCE = 10.0


class Job:
    """Ranks as the launcher sees them: each knows a membership, asks for the next one when it likes, and may die."""

    def __init__(self, size: int, min_members: int) -> None:
        self.membership = MembershipTable(range(size), min_members, PATIENCE)
        self.size, self.min_members = size, min_members
        self.known = dict.fromkeys(range(size), 0)  # epoch that each living rank knows
        self.asking: set[int] = set()

    def ask(self, rank: int) -> None:
        self.asking.add(rank)
        self.membership.ask(rank, self.known[rank], now=0.0)
        self.answer()

    def die(self, rank: int) -> None:
        del self.known[rank]
        self.asking.discard(rank)
        self.membership.end(rank)
        self.answer()

    def answer(self) -> None:
        epoch = self.membership.epoch
        members = self.membership.advance()
        if members is None:
            everybody_waits = bool(self.asking) and self.asking == set(self.known)
            assert not everybody_waits or len(self.asking) < self.min_members, "nobody is missing, and none is answered"
        else:
            assert self.membership.epoch == epoch + 1
            assert set(members) == self.asking == set(self.known), "an answer names others than those that wait for it"
            assert len(members) >= self.min_members
            self.known = dict.fromkeys(members, self.membership.epoch)
            self.asking.clear()
        self.check()

    def check(self) -> None:
        missing = self.membership.missing()
        assert set(missing) <= set(self.known) - self.asking
        assert missing or not self.asking or self.membership.is_too_small(), "some wait for nobody"
        assert self.membership.overdue(now=PATIENCE / 2) == [] and self.membership.overdue(now=PATIENCE) == missing
        for rank in range(self.size):  # questions after an epoch that is over, or of a rank that has ended
            self.membership.ask(rank, self.membership.epoch - (rank in self.known), now=0.0)
        assert self.membership.advance() is None and self.membership.missing() == missing

    def key(self) -> tuple[object, ...]:
        newest = self.membership.epoch
        return tuple(sorted((rank, newest - epoch) for rank, epoch in self.known.items())), frozenset(self.asking)


@pytest.mark.parametrize(("size", "min_members"), [(3, 1), (3, 2), (3, 3), (4, 2)])
def test_every_schedule(size: int, min_members: int) -> None:
    seen: set[tuple[object, ...]] = set()
    todo: deque[tuple[tuple[str, int], ...]] = deque([()])
    while todo:
        events = todo.popleft()
        job = Job(size, min_members)
        for name, rank in events:
            getattr(job, name)(rank)
        if job.key() not in seen:
            seen.add(job.key())
            todo += [(*events, ("die", rank)) for rank in job.known]
            todo += [(*events, ("ask", rank)) for rank in job.known if rank not in job.asking]
    # Each subset that lives, and of each the subsets that wait; more would be states that mean nothing new.
    assert len(seen) >= 8 + 12


def test_ranks_that_have_done_their_part_count_as_left() -> None:
    """Rank 1 is lost in the last collective, after rank 2 has got its result: rank 0 must not wait for ever."""
    membership = MembershipTable(range(3), 2, PATIENCE)
    membership.end(1)
    membership.ask(0, 0, now=0.0)
    assert membership.advance() is None
    membership.end(2, is_lost=False)
    assert membership.advance() == (0,)


def test_a_rank_may_ask_to_be_left_out() -> None:
    membership = MembershipTable(range(3), 1, PATIENCE)
    membership.ask(2, 0, now=0.0, leaves=True)
    membership.ask(0, 0, now=0.0)
    assert membership.advance() is None and membership.missing() == [1]
    membership.ask(1, 0, now=0.0)
    assert membership.advance() == (0, 1)
    membership.ask(0, 1, now=0.0)
    membership.ask(1, 1, now=0.0)
    assert membership.advance() == (0, 1)  # of this one nobody has asked to be left out


def test_a_rank_that_asks_to_be_left_out_stays_when_nobody_else_is_left() -> None:
    membership = MembershipTable(range(3), 1, PATIENCE)
    membership.ask(2, 0, now=0.0, leaves=True)
    membership.end(0)
    membership.end(1)
    assert membership.advance() == (2,)
