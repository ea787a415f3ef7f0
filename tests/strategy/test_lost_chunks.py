"""Slots in shards are shared out when ranks are lost or join, bit by bit, whoever is lost meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cut.simulated import Exchange

from harness.threads import results_or_errors
from keras_ddl.callbacks import _last_good
from keras_ddl.errors import CollectiveError, ConfigError, RankLostError
from keras_ddl.strategy.shards import lost_chunks, sharded_slots
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable
from keras_ddl.topology.mirrors import mirror_offset

VALUES = [np.random.default_rng(1).normal(size=shape).astype(kind) for shape, kind in
          (((7, 3), np.float32), ((11,), np.float64), ((2, 3, 5), np.float16))]  # fmt: skip


class Ranks:
    """Threads for ranks, each with slots of its own. `hosts`: of the ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hosts: Sequence[int]) -> None:
        self.hosts, self.left = list(hosts), list(range(len(hosts)))  # by their ranks at first
        self.jobs = [self.job(rank) for rank in self.left]
        self.slots = [[self.slot(n, value, job) for n, value in enumerate(VALUES)] for job in self.jobs]
        self.fails: Callable[[int, str], bool] = lambda rank, name: False
        self.new: set[int] = set()  # newcomers that have made no step yet
        self.timeout = 20.0
        self._here = threading.local()
        monkeypatch.setattr(lost_chunks, "all_slots", lambda: self.slots[self._here.rank])
        gather = lambda mine, name: self.meet(name, mine)  # noqa: E731
        monkeypatch.setattr(
            lost_chunks, "ops", SimpleNamespace(all_gather=lambda x, name: tf.concat(gather(x, name), 0))
        )
        collectives = SimpleNamespace(all_gather_object=gather, barrier=lambda name: self.meet(name, None))
        monkeypatch.setattr(lost_chunks, "communicator", collectives)

    def job(self, rank: int) -> Any:
        hosts = [self.hosts[each] for each in self.left]
        places = {"rank": self.left.index(rank), "size": len(hosts), "mirror_offset": mirror_offset(hosts)}
        return SimpleNamespace(**places, device="/cpu:0", shards_from_elements=1)

    @staticmethod
    def slot(number: int, value: np.ndarray, job: Any) -> ShardedVariable:
        made = ShardedVariable(tf.constant(value), "slot", job, lambda: tf.zeros_like(value))
        made.number = number
        return made

    def join(self, host: int = 0) -> int:
        """Returns a newcomer, whose slots have no values."""
        rank = len(self.hosts)
        self.hosts.append(host)
        self.left.append(rank)
        self.new.add(rank)
        place = SimpleNamespace(rank=0, size=2, mirror_offset=1, device="/cpu:0", shards_from_elements=1)
        self.slots.append([self.slot(n, np.zeros_like(value), place) for n, value in enumerate(VALUES)])
        for each in self.slots[rank]:
            each.share = replace(each.share, generation=sharded_slots.OF_NEWCOMER)
        return rank

    def meet(self, name: str, value: Any) -> list[Any]:
        rank = self._here.rank
        result = self._exchange.meet(name, self.left.index(rank), value)
        if self.fails(rank, name):
            raise RankLostError("another one")
        return result

    def share_out(self, *left: int) -> list[Any]:
        """Returns, for each rank that is left, what `share_out` has returned or raised there."""
        self.left = list(left)
        self._exchange = Exchange(len(left), self.timeout)

        def run(rank: int) -> Any:
            self._here.rank = rank
            return lost_chunks.share_out(self.job(rank), is_new=rank in self.new)

        results = results_or_errors(run, left)
        return [results[rank] for rank in left]

    def check(self, values: Sequence[np.ndarray] = VALUES) -> None:
        """Each rank that is left has its chunk and another's mirror, as all of them share it out now."""
        for place, rank in enumerate(self.left):
            for slot, value in zip(self.slots[rank], values, strict=True):
                share, layout = slot.share, slot.layout
                assert (share.rank, layout.size) == (place, len(self.left))
                if layout.size == 1:
                    np.testing.assert_array_equal(slot.numpy(), value)
                    continue
                np.testing.assert_array_equal(share.chunk.numpy(), layout.cut(value, place))
                mirrored = (place - self.job(rank).mirror_offset) % layout.size
                np.testing.assert_array_equal(share.mirror.numpy(), layout.cut(value, mirrored))


def test_a_chunk_does_not_keep_the_complete_value_in_memory():
    def begins_at(tensor: Any) -> int:
        return np.asarray(memoryview(tensor)).__array_interface__["data"][0]

    job = SimpleNamespace(rank=1, size=4, mirror_offset=1, device="/cpu:0", shards_from_elements=1)
    value = tf.zeros([4, 1 << 16])
    share = ShardedVariable(value, "slot", job, lambda: value).share
    first = begins_at(value)
    for each in (share.chunk, share.mirror):
        assert not first <= begins_at(each.read_value()) < first + 4 * (4 << 16)


@pytest.mark.parametrize("hosts", [[0] * 5, [0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1]])
def test_a_rank_after_the_other(hosts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, hosts)
    ranks.check()
    left = list(range(len(hosts)))
    for lost in (1, 3, 0):
        left.remove(lost)
        assert ranks.share_out(*left) == [None] * len(left)
        ranks.check()


def test_all_ranks_of_a_host_and_a_rank_with_the_one_that_has_its_mirrors(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, [0, 0, 0, 1, 1, 1])
    assert ranks.share_out(3, 4, 5) == [None] * 3
    ranks.check()
    ranks = Ranks(monkeypatch, [0] * 4)
    reasons = ranks.share_out(0, 3)
    assert len(set(reasons)) == 1 and "were lost together" in reasons[0]
    ranks.left = [0, 1, 2, 3]
    ranks.check()


@pytest.mark.parametrize("passed", [(), (0,), (2, 4), (0, 2, 3, 4)])
def test_another_rank_is_lost_meanwhile(passed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """`passed`: ranks that have come to the end; the others have lost rank 4, or 2, just before."""
    for lost in (2, 4):
        ranks = Ranks(monkeypatch, [0] * 5)
        ranks.fails = lambda rank, name: name.endswith("made") and rank not in passed
        ranks.share_out(0, 2, 3, 4)
        ranks.fails = lambda rank, name: False
        left = [each for each in (0, 2, 3, 4) if each != lost]
        results = ranks.share_out(*left)
        if lost == 2 and not set(passed) & set(left):  # it had the mirrors of rank 1, and nobody has anything newer
            assert all("were lost together" in each for each in results)
        else:
            assert results == [None] * 3
            ranks.check()


@pytest.mark.parametrize(
    ("joins", "first", "then"), [(False, (0, 1, 3, 4), (1, 3, 4)), (True, (0, 1, 2, 3), (1, 2, 3))]
)
def test_a_rank_is_lost_while_a_slot_is_gathered(
    joins: bool, first: tuple[int, ...], then: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, [0] * (3 if joins else 5))
    if joins:
        ranks.join()
    ranks.fails = lambda rank, name: name.endswith("/1")
    assert all(isinstance(each, RankLostError) for each in ranks.share_out(*first))
    ranks.fails = lambda rank, name: False
    assert ranks.share_out(*then) == [None] * 3
    ranks.check()


@pytest.mark.parametrize("hosts", [[0] * 3, [0, 0, 1, 1], [0]])
def test_newcomers_get_their_shares(hosts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside one rank, which had all entries."""
    ranks = Ranks(monkeypatch, hosts)
    left = list(range(len(hosts)))
    for _ in range(2):
        left.append(ranks.join(host=hosts[-1]))
        assert ranks.share_out(*left) == [None] * len(left)
        ranks.check()
        ranks.new.clear()
    left = left[2:] if len(hosts) > 3 else left[1:]  # a host
    assert ranks.share_out(*left) == [None] * len(left)
    ranks.check()


def test_a_newcomer_takes_the_place_of_a_rank_lost_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, [0] * 3)
    newcomer = ranks.join()
    assert ranks.share_out(0, 2, newcomer) == [None] * 3
    ranks.check()
    ranks = Ranks(monkeypatch, [0] * 3)
    newcomer = ranks.join()
    assert all("were lost together" in each for each in ranks.share_out(0, newcomer))


@pytest.mark.parametrize("passed", [(), (0,), (3,), (1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_rank_is_lost_while_a_newcomer_joins(
    passed: tuple[int, ...], lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`passed`: ranks that have come to the end. Rank 3 is the newcomer; next, another one comes."""
    ranks = Ranks(monkeypatch, [0] * 3)
    ranks.join()
    ranks.fails = lambda rank, name: name.endswith("made") and rank not in passed
    ranks.share_out(0, 1, 2, 3)
    ranks.fails = lambda rank, name: False
    left = [each for each in (0, 1, 2, 3) if each != lost]
    if 3 in passed:  # it may be in its first step
        ranks.new.discard(3)
    left.append(ranks.join())
    assert ranks.share_out(*left) == [None] * 4
    ranks.check()


def test_a_newcomer_that_lacks_a_slot_gives_up_and_the_others_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, [0] * 2)
    newcomer = ranks.join()
    del ranks.slots[newcomer][1]
    ranks.timeout = 1.0  # the others wait for it
    results = ranks.share_out(0, 1, newcomer)
    assert isinstance(results[2], CollectiveError) and "optimizers without 1 of the variables" in str(results[2])
    ranks.timeout = 20.0
    assert ranks.share_out(0, 1) == [None] * 2
    ranks.check()


def test_a_newcomer_numbers_its_slots_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, mine = (Ranks(monkeypatch, [0] * 2).slots[0] for _ in range(2))
    for number, slot in enumerate(theirs):
        slot.number = 10 - number
    of_others = sharded_slots.numbers_in([theirs[0], tf.Variable(1.0), *theirs[1:]])
    assert of_others[0] == [10, None, 9, 8]
    assert not sharded_slots.number_as([*mine[:2], tf.Variable(1.0), mine[2]], of_others)
    assert sharded_slots.number_as([mine[0], tf.Variable(1.0), *mine[1:]], (of_others[0], 20))
    assert [each.number for each in mine] == [10, 9, 8]
    assert Ranks(monkeypatch, [0]).slots[0][0].number == 0 and sharded_slots.numbers_in([])[1] == 23


def test_slots_that_only_some_ranks_have_made_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, [0] * 3)
    of_1 = ranks.slots[1].pop()
    assert ranks.share_out(0, 1) == [None] * 2
    ranks.slots[1].append(ranks.slot(of_1.number, np.zeros_like(VALUES[2]), ranks.job(1)))
    ranks.check([*VALUES[:2], np.zeros_like(VALUES[2])])


def test_the_last_rank_has_ordinary_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, [0] * 2)
    slot = ranks.slots[0][0]
    with pytest.raises(ConfigError):
        slot.read_value()
    assert ranks.share_out(0) == [None]
    for each, value in zip(ranks.slots[0], VALUES):
        np.testing.assert_array_equal(each.numpy(), value)
    slot.assign_add(tf.ones_like(slot))
    np.testing.assert_array_equal(tf.function(lambda: slot * 2)(), 2 * (VALUES[0] + 1))


def test_a_copy_of_shards_is_of_no_use_when_they_were_shared_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """DivergenceGuard has no state to go back to then, until the next good windows."""
    ranks = Ranks(monkeypatch, [0] * 3)

    def stored() -> list[Any]:
        return [each for slot in ranks.slots[0] for each in sharded_slots.local_variables(slot)]

    copy = _last_good._Copy(1, [(each, each.numpy()) for each in stored()])
    assert len(copy.values) == 2 * len(VALUES) and not copy.has_shards_of_before(stored())
    ranks.share_out(0, 2)
    assert copy.has_shards_of_before(stored())


@pytest.mark.parametrize(
    "hosts, offset",
    [([0], 0), ([0, 0, 0], 1), ([0, 0, 0, 1, 1, 1], 3), ([0, 1, 0, 1], 1), ([0, 0, 1, 1, 2, 2], 2), ([0] * 4 + [1], 1)],
)
def test_mirrors_are_on_other_hosts_where_there_are_some(hosts: list[int], offset: int) -> None:
    assert mirror_offset(hosts) == offset
