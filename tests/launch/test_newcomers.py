"""When a newcomer becomes a member, and a member leaves: every schedule of two members and one newcomer."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from keras_ddl.launch.outcome import RankOutcome
from keras_ddl.launch.regroup.membership import MembershipTable
from keras_ddl.launch.regroup.regrouping import Regrouping

NEWCOMER = 2
Event = tuple[str, int]


class Job:
    """Rank 0 names the newcomer when it admits; rank 1 admits whom others name. Any of the three may die.

    One member may ask to be left out; it stays if it is the only one.
    """

    def __init__(self) -> None:
        self.membership = MembershipTable(range(2), 1, 10.0)
        self.living = {0, 1, NEWCOMER}
        self.known = {0: 0, 1: 0}  # epoch that each member knows
        self.asking: dict[int, tuple[int, ...] | None] = {}
        self.is_joining = self.is_named = False
        self.leaving: set[int] = set()

    def events(self) -> list[Event]:
        idle = [rank for rank in self.living & self.known.keys() if rank not in self.asking]
        waits = NEWCOMER in self.living and NEWCOMER not in self.known
        return [
            *(("die", rank) for rank in self.living),
            *(("miss", rank) for rank in idle),
            *(("admit", rank) for rank in idle),
            *(("leave", rank) for rank in idle if not self.leaving and rank != NEWCOMER),
            *([("stay" if self.is_joining else "join", NEWCOMER)] if waits else []),
        ]

    def do(self, event: str, rank: int) -> None:
        if event == "die":
            self.living.discard(rank)
            self.known.pop(rank, None)
            self.asking.pop(rank, None)
            self.leaving.discard(rank)
            self.is_joining &= rank != NEWCOMER
            self.membership.end(rank)
        elif event == "leave":
            self.leaving, self.asking[rank] = {rank}, None
            self.membership.ask(rank, self.known[rank], 0.0, leaves=True)
        elif event in ("join", "stay"):
            self.is_joining = event == "join"
            (self.membership.join if self.is_joining else self.membership.give_up_joining)(rank)
        else:
            self.asking[rank] = None if event == "miss" else (NEWCOMER,) * (rank == 0)
            self.membership.ask(rank, self.known[rank], 0.0, self.asking[rank])
            self.is_named |= bool(self.asking[rank]) and NEWCOMER not in self.known  # by one that may die then
        self.answer()

    def answer(self) -> None:
        asked, self.before = dict(self.asking), self.membership.members
        all_admit = bool(asked) and None not in asked.values()
        is_named = all_admit and self.is_named and NEWCOMER in self.living
        members = self.membership.advance()
        if members is None:
            everybody = bool(asked) and asked.keys() == self.known.keys()
            assert not everybody or (is_named and not self.is_joining), "nobody is missing, and nobody is answered"
            assert not everybody or self.membership.overdue(10.0) == [NEWCOMER]
            return
        staying = asked.keys() - self.leaving or asked.keys()
        self.leaving = set()
        assert set(members) == {*staying, *([NEWCOMER] if is_named else [])}
        for rank in asked.keys() - staying:
            self.living.discard(rank)
            self.membership.end(rank, is_lost=False)
        assert not is_named or self.is_joining, "it would not come"
        assert is_named <= (members[-1] == NEWCOMER), "newcomers come last"
        self.known = dict.fromkeys(members, self.membership.epoch)
        self.asking.clear()
        self.is_named = False
        self.is_joining &= NEWCOMER not in members

    def key(self) -> tuple[object, ...]:
        newest = self.membership.epoch
        behind = sorted((rank, newest - epoch) for rank, epoch in self.known.items())
        waiting = tuple(sorted(self.asking.items()))
        return tuple(behind), waiting, tuple(self.leaving), self.is_joining, self.is_named, NEWCOMER in self.living


def test_every_schedule_of_two_members_and_a_newcomer() -> None:
    seen: set[tuple[object, ...]] = set()
    todo: deque[tuple[Event, ...]] = deque([()])
    while todo:
        events = todo.popleft()
        job = Job()
        for event in events:
            job.do(*event)
        if job.key() not in seen:
            seen.add(job.key())
            todo += [(*events, event) for event in job.events()]
    joined = [key for key in seen if any(rank == NEWCOMER for rank, _ in key[0])]  # type: ignore[attr-defined]
    assert len(seen) > 40 and len(joined) > 10


def test_who_has_joined_first_is_rank_0() -> None:
    membership = MembershipTable(range(2), 1, 10.0)
    for newcomer in (3, 2):
        epoch, members = membership.epoch, membership.members
        membership.join(newcomer)
        for rank in members:
            membership.ask(rank, epoch, 0.0, [newcomer])
        membership.advance()
    assert membership.members == (0, 1, 3, 2)


def test_a_spare_that_is_lost_before_it_has_joined_is_replaced_by_the_next() -> None:
    said: list[str] = []

    def link(rank: int) -> Any:
        ways = {"send": lambda *_: None, "stop": lambda *_: None, "signal": lambda *_: None}
        return SimpleNamespace(outcome=RankOutcome(rank), over=False, is_missing=False, channel=None, **ways)

    links = [link(rank) for rank in range(5)]
    regrouping = Regrouping(links, 2, 1, 10.0, said.append)
    for rank, status in ((1, -9), (2, -9), (3, 1)):
        links[rank].over, links[rank].outcome.status = True, status
        assert regrouping.continues_without(links[rank], is_stopping=False)
    assert [line for line in said if "spare rank" in line] == [
        "spare rank 2 takes the place of rank 1.",
        "spare rank 3 takes the place of rank 2.",
    ], "what has ended by itself would do so again"
    assert regrouping.spares == [4]
