"""Which ranks a job goes on with: every schedule of deaths and questions of three ranks, and longer ones at random."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keras_ddl.launch.membership import Membership

PATIENCE = 10.0


class Job:
    """Ranks as the launcher sees them: each knows a membership, asks for the next one when it likes, and may die."""

    def __init__(self, size: int, min_members: int) -> None:
        self.membership = Membership(range(size), min_members, PATIENCE)
        self.min_members = min_members
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
        epoch, asking = self.membership.epoch, set(self.asking)
        members = self.membership.advance()
        if members is None:
            assert self.membership.epoch == epoch
            everybody_waits = bool(asking) and asking == set(self.known) and len(asking) >= self.min_members
            assert not everybody_waits, "all that live have asked, and nobody is answered"
            return
        assert self.membership.epoch == epoch + 1
        assert set(members) == asking == set(self.known), "an answer names other ranks than those that wait for it"
        assert len(members) >= self.min_members
        for rank in members:
            self.known[rank] = self.membership.epoch
        self.asking.clear()

    def key(self) -> tuple[object, ...]:
        newest = self.membership.epoch
        return tuple(sorted((rank, newest - epoch) for rank, epoch in self.known.items())), frozenset(self.asking)


def replayed(events: tuple[tuple[str, int], ...], size: int, min_members: int) -> Job:
    job = Job(size, min_members)
    for name, rank in events:
        getattr(job, name)(rank)
    return job


def test_every_schedule_of_three_ranks() -> None:
    for min_members in (1, 2, 3):
        seen: set[tuple[object, ...]] = set()
        todo: deque[tuple[tuple[str, int], ...]] = deque([()])
        while todo:
            events = todo.popleft()
            job = replayed(events, 3, min_members)
            if job.key() in seen:
                continue
            seen.add(job.key())
            todo += [(*events, ("die", rank)) for rank in job.known]
            todo += [(*events, ("ask", rank)) for rank in job.known if rank not in job.asking]
        # Each subset that lives, and of each the subsets that wait; more would be states that mean nothing new.
        assert len(seen) >= 8 + 12


def test_ranks_that_have_done_their_part_count_as_left() -> None:
    """Rank 1 is lost in the last collective, after rank 2 has got its result: rank 0 must not wait for ever."""
    membership = Membership(range(3), 2, PATIENCE)
    membership.end(1)
    membership.ask(0, 0, now=0.0)
    assert membership.advance() is None
    membership.end(2, is_lost=False)
    assert membership.advance() == (0,)


def test_a_rank_may_ask_to_be_left_out() -> None:
    membership = Membership(range(3), 1, PATIENCE)
    membership.ask(2, 0, now=0.0, leaves=True)
    membership.ask(0, 0, now=0.0)
    assert membership.advance() is None and membership.missing() == [1]
    membership.ask(1, 0, now=0.0)
    assert membership.advance() == (0, 1)
    membership.ask(0, 1, now=0.0)
    membership.ask(1, 1, now=0.0)
    assert membership.advance() == (0, 1)  # of this one nobody has asked to be left out


def test_a_rank_that_asks_to_be_left_out_stays_when_nobody_else_is_left() -> None:
    membership = Membership(range(3), 1, PATIENCE)
    membership.ask(2, 0, now=0.0, leaves=True)
    membership.end(0)
    membership.end(1)
    assert membership.advance() == (2,)


class Schedules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.job = Job(6, 2)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        idle = sorted(set(self.job.known) - self.job.asking)
        if idle:
            self.job.ask(data.draw(st.sampled_from(idle)))

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if self.job.known:
            self.job.die(data.draw(st.sampled_from(sorted(self.job.known))))

    @rule(data=st.data())
    def ask_late(self, data: st.DataObject) -> None:
        """A question after an epoch that is over, or of a rank that has ended, is none."""
        before = self.job.key()
        self.job.membership.ask(data.draw(st.integers(0, 5)), self.job.membership.epoch - 1, now=0.0)
        assert self.job.membership.advance() is None and self.job.key() == before

    @rule()
    def lose_patience(self) -> None:
        assert self.job.membership.overdue(now=PATIENCE / 2) == []
        for rank in self.job.membership.overdue(now=PATIENCE):
            if rank in self.job.known:  # an answer to the others may have come with the end of another
                assert rank not in self.job.asking
                self.job.die(rank)

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        missing = self.job.membership.missing()
        assert set(missing) <= set(self.job.known) - self.job.asking
        assert missing or not self.job.asking or self.job.membership.is_too_small()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
