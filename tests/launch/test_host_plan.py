"""The changes to a job after its host file changed, or ranks were lost."""

from __future__ import annotations

import pytest

from keras_ddl.launch.hosts import parse_hosts
from keras_ddl.launch.hosts.host_plan import MAX_LOSSES, HostPlan


def plan(hosts: str, ranks: int, spares: int = 0, least: int = 1, most: int | None = None) -> HostPlan:
    return HostPlan(parse_hosts(hosts), ranks, spares, least, most)


@pytest.mark.parametrize(
    ("before", "ranks", "most", "after", "started"),
    [
        ("a:2,b:2", 4, None, "a:2,b:2", []),
        ("a:2,b:2", 4, None, "c:1,b:3,a:2", [("b", [4]), ("c", [5])]),
        ("a:2,b:2", 4, 5, "a:2,b:2,c:4", [("c", [4])]),
        ("a:2,b:2", 4, 4, "a:2,c:4", [("c", [4, 5])]),
        ("a:2,b:2", 3, 3, "a:2,b:2", []),
    ],
)
def test_processes_are_started_on_free_slots(
    before: str, ranks: int, most: int | None, after: str, started: list
) -> None:
    made = plan(before, ranks, most=most)
    made.change(parse_hosts(after))
    assert made.start(ranks) == started
    assert made.start(9) == []


def test_lost_rank_is_replaced_on_its_host_a_few_times() -> None:
    made = plan("a:1,b:1", 2, most=2)
    rank = 1
    for new in range(2, 2 + MAX_LOSSES - 1):
        made.end(rank, is_lost=True, has_reported=True)
        assert made.start(new) == [("b", [new])]
        rank = new
    made.end(rank, is_lost=True, has_reported=True)
    assert made.start(9) == []
    made.change(parse_hosts("a:1"))
    made.change(parse_hosts("a:1,b:1"))
    assert made.start(9) == [("b", [9])]


def test_lost_host_gets_no_process_until_the_file_has_dropped_it() -> None:
    made = plan("a:2,b:2", 4, most=4)
    made.end(2, is_lost=True, has_reported=False)
    assert made.start(4) == [("b", [4])], "its other rank lives"
    for rank in (3, 4):
        made.end(rank, is_lost=True, has_reported=False)
    assert made.start(5) == []
    made.change(parse_hosts("a:2,b:2,c:1"))
    assert made.start(5) == [("c", [5])]
    made.change(parse_hosts("a:2"))
    made.change(parse_hosts("a:2,b:2"))
    assert made.start(6) == [("b", [6, 7])]


def test_rank_that_ended_itself_is_replaced_only_after_the_file_changes() -> None:
    made = plan("a:2", 2)
    made.takes_newcomers = False
    made.end(1, is_lost=False, has_reported=True)
    assert made.start(2) == []
    made.change(parse_hosts("a:2"))
    assert made.start(2) == [("a", [2])]


def test_spare_takes_a_slot_and_only_missing_ranks_are_started() -> None:
    made = plan("a:2,b:2", 3, spares=1, most=3)
    assert made.host_of(3) == "b"
    made.end(0, is_lost=True, has_reported=True)
    made.spares = set()
    assert made.start(4) == []
    made.end(1, is_lost=True, has_reported=True)
    assert made.start(4) == [("a", [4])]


@pytest.mark.parametrize(
    ("hosts", "after", "least", "surplus"),
    [
        ("a:2,b:2", "a:2,b:2", 1, []),
        ("a:2,b:2", "b:2", 1, [0, 1]),
        ("a:2,b:2", "a:1,b:2", 1, [1]),
        ("a:2,b:2", "a:2", 3, [2]),
        ("a:2,b:2", "c:4", 1, [0, 1, 2]),
        ("a:3,b:1", "b:1", 1, [0, 1, 2]),
        ("a:4", "a:2", 1, [2, 3]),
    ],
)
def test_ranks_without_a_slot_in_the_file_leave(hosts: str, after: str, least: int, surplus: list[int]) -> None:
    made = plan(hosts, 4, least=least)
    made.change(parse_hosts(after))
    assert made.surplus(range(4)) == surplus


def test_replacement_gets_the_local_rank_of_its_predecessor() -> None:
    made = plan("a:3", 3)
    made.end(1, is_lost=True, has_reported=True)
    assert made.start(3) == [("a", [3])] and made.local_places([3]) == ([1], 3)


def test_members_get_slots_before_spares() -> None:
    made = plan("a:2,b:1", 2, spares=1)  # rank 2, a spare, is on b
    made.end(0, is_lost=True, has_reported=True)
    assert made.start(3) == [("a", [3])]
    made.change(parse_hosts("a:2"))
    assert made.needless([1, 3]) == [2]


def test_spares_and_newcomers_without_a_slot_in_the_file() -> None:
    made = plan("a:2,b:2", 2, spares=2)
    for hosts, needless in (("a:2,b:1", [3]), ("a:2", [2, 3])):
        made.change(parse_hosts(hosts))
        assert made.needless([0, 1]) == needless and made.surplus([0, 1]) == []
