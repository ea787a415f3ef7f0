"""Shards and slices are shared out when ranks are lost or join, bit by bit, whoever is lost meanwhile; no ranks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from cut.simulated import Exchange

from harness.threads import results_or_errors
from keras_ddl.callbacks import _last_good
from keras_ddl.errors import CollectiveError, ConfigError, RankLostError
from keras_ddl.resilience import remeshing, sharing_out
from keras_ddl.resilience.survivors import NewMesh, largest_mesh
from keras_ddl.resilience.why_it_ends import TooFewError
from keras_ddl.state import exchange, generations
from keras_ddl.state.generations import Generations
from keras_ddl.state.placements import MeshPlace, Place
from keras_ddl.strategy.job import Job, Settings
from keras_ddl.strategy.shards import sharded_slots, undecided
from keras_ddl.strategy.shards.laid_out import LaidOutVariable
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable
from keras_ddl.topology import make_topology
from keras_ddl.topology.mirrors import mirror_offset

RNG = np.random.default_rng(1)
FLAT = [RNG.normal(size=(7, 3)).astype("float32"), RNG.normal(size=11), RNG.normal(size=(2, 3, 5)).astype("float16")]
CUT = [(RNG.normal(size=(12, 3)).astype("float32"), 0), (RNG.normal(size=(2, 24, 2)), 1), (RNG.integers(0, 99, 12), 0)]


def _nobody(rank: int, name: str) -> bool:
    return False


def fake_job(rank: int, size: int, mesh: Any = None, shards_from: int | None = 1) -> Job:
    job = Job(rank, size, "", "/cpu:0", Settings(), None, shards_from, 0.0, goes_on=True, hosts=(0,) * size)
    job.mesh = mesh
    return job


class Ranks:
    """Threads for ranks, which are numbered as at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hosts: Sequence[int]) -> None:
        self.hosts, self.left = list(hosts), list(range(len(hosts)))
        self.strategies: list[Any] = []
        self.slots: list[list[Any]] = []
        self.generations = [Generations() for _ in hosts]
        self.new: set[int] = set()  # newcomers that have made no step yet
        self.fails: Callable[[int, str], bool] = _nobody
        self.timeout = 20.0
        self.met: list[str] = []
        self.sent = 0  # entries
        self._here = threading.local()
        gather = lambda mine, name: self.meet(name, mine)  # noqa: E731
        here = SimpleNamespace(
            all_gather_object=gather,
            barrier=lambda name: self.meet(name, None),
            topology=self.topology,
            min_ranks=lambda: self.least,
            rank=lambda: 0,
        )
        for each in (generations, sharing_out, remeshing, undecided):
            monkeypatch.setattr(each, "communicator", here)
        monkeypatch.setattr(exchange, "ops", SimpleNamespace(all_to_all=self.all_to_all))
        monkeypatch.setattr(sharing_out, "all_slots", lambda: self.slots[self._here.rank])
        monkeypatch.setattr(remeshing.NextMesh, "form", lambda *_: None)

    def topology(self) -> Any:
        hosts = [f"host{self.hosts[each]}" for each in self.left]
        return make_topology(self.left.index(self._here.rank), hosts, "p")

    def meet(self, name: str, value: Any) -> list[Any]:
        rank = self._here.rank
        try:
            result = self._exchange.meet(name, self.left.index(rank), value)
        except AssertionError as error:  # others do not come
            raise RankLostError(str(error)) from None
        if rank == self.left[0]:
            self.met.append(name.removeprefix("keras_ddl/share_out/"))
        if self.fails(rank, name):
            raise RankLostError("another one")
        return result

    def all_to_all(self, rows: np.ndarray, splits: Sequence[int], name: str) -> tuple[tf.Tensor, Any]:
        mine = self.left.index(self._here.rank)
        given = self.meet(name, (rows, list(splits)))
        assert all(sum(to) == len(each) for each, to in given)
        parts = [each[sum(to[:mine]) : sum(to[: mine + 1])] for each, to in given]
        self.sent += sum(map(len, parts))
        return tf.constant(np.concatenate(parts)), None

    def share_out(self, *left: int, least: int = 1, leaving: Sequence[int] = ()) -> list[Any]:
        """Returns, for each rank that is left, what `share_out` has returned or raised there. leaving: of these ranks,
        which do not stay."""
        self.left, self.least = list(left), least
        self._exchange = Exchange(len(left), 0.5 if self.fails is not _nobody else self.timeout)
        self.renew()

        def run(rank: int) -> Any:
            self._here.rank = rank
            strategies = [self.strategies[rank]]
            why = {self.left.index(each): "no room" for each in leaving}
            return sharing_out.share_out(
                self.generations[rank], strategies, lambda _: None, is_new=rank in self.new, leaving=why
            )

        results = results_or_errors(run, left)
        return [results[rank] for rank in left]

    def renew(self) -> None:
        """As `Strategy.renew`."""


class FlatRanks(Ranks):
    """Ranks with flat shards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hosts: Sequence[int]) -> None:
        super().__init__(monkeypatch, hosts)
        for _ in hosts:
            self._add_job()
        self.renew()
        self.slots = [[self.slot(n, value, each.job) for n, value in enumerate(FLAT)] for each in self.strategies]

    def _add_job(self) -> Any:
        job = fake_job(rank=0, size=2)
        self.strategies.append(SimpleNamespace(job=job, mesh_layout=None))
        return job

    def renew(self) -> None:
        hosts = [self.hosts[each] for each in self.left]
        for rank, number in enumerate(self.left):
            vars(self.strategies[number].job).update(rank=rank, size=len(hosts), hosts=tuple(hosts))

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
        job = self._add_job()
        self.slots.append([self.slot(n, np.zeros_like(value), job) for n, value in enumerate(FLAT)])
        self.generations.append(Generations(holds_nothing=True))
        return rank

    def check(self, values: Sequence[np.ndarray] = FLAT) -> None:
        """Each rank that is left has its chunk and another's mirror, as all of them share it out now."""
        for place, rank in enumerate(self.left):
            for slot, value in zip(self.slots[rank], values, strict=True):
                share, layout = slot.share, slot.layout
                assert (share.rank, layout.size) == (place, len(self.left))
                if layout.size == 1:
                    np.testing.assert_array_equal(slot.numpy(), value)
                    continue
                np.testing.assert_array_equal(share.chunk.numpy(), layout.cut(value, place))
                mirrored = (place - share.offset) % layout.size
                np.testing.assert_array_equal(share.mirror.numpy(), layout.cut(value, mirrored))


class FakeLayout:
    """A mesh/layout.py `VariableLayout`, of which the extents alone are needed."""

    is_to_choose = False

    def __init__(self, data_size: int, model_size: int, wanted_model_size: int = 0) -> None:
        self.data_size, self.model_size = data_size, model_size
        self.wanted_model_size = wanted_model_size or model_size

    def resized(self, data_size: int, model_size: int, rank: int) -> FakeLayout:
        return type(self)(data_size, model_size, self.wanted_model_size)


class MeshRanks(Ranks):
    """Ranks of a mesh, with slices."""

    slots_from: int | None = None  # elements
    layout = FakeLayout

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data_size: int, model_size: int) -> None:
        super().__init__(monkeypatch, [0] * (data_size * model_size))
        self._at_first = data_size, model_size
        for rank in self.left:
            self._add(rank, [value for value, _ in CUT])

    def _add(self, rank: int, values: Sequence[np.ndarray]) -> None:
        data_size, model_size = self._at_first
        size = data_size * model_size
        mesh = SimpleNamespace(model=SimpleNamespace(size=model_size))
        job = fake_job(rank % size, size, mesh, self.slots_from)
        topology = SimpleNamespace(size=data_size * model_size)
        layout = self.layout(data_size, model_size)
        self.strategies.append(SimpleNamespace(job=job, mesh_layout=layout, topology=topology))
        self.slots.append([self.variable(n, v, axis, job) for n, (v, (_, axis)) in enumerate(zip(values, CUT))])

    def join(self) -> int:
        """Returns a newcomer, whose slices have no values."""
        rank = len(self.hosts)
        self.hosts.append(0)
        self.left.append(rank)
        self.new.add(rank)
        self._add(rank, [np.zeros_like(value) for value, _ in CUT])
        self.generations.append(Generations(holds_nothing=True))
        return rank

    @staticmethod
    def variable(number: int, value: np.ndarray, axis: int, job: Any, initial: Any = None) -> LaidOutVariable:
        made = LaidOutVariable(tf.constant(value), "weight", job, axis, is_trained=True, initial=initial)
        made.number = number
        return made

    def mesh(self, rank: int) -> tuple[int, int]:
        layout = self.strategies[rank].mesh_layout
        return layout.data_size, layout.model_size

    def check(self) -> list[int]:
        """Checks that the ranks of the new mesh have their slices and mirrors of all values. Returns these ranks."""
        data_size, model_size = self.mesh(self.left[0])
        staying = self.left[: data_size * model_size]
        for number, rank in enumerate(staying):
            assert self.mesh(rank) == (data_size, model_size)
            for slot, (value, axis) in zip(self.slots[rank], CUT, strict=True):
                share = slot.share
                if model_size == 1:
                    np.testing.assert_array_equal(slot.numpy(), value)
                    continue
                expected = np.split(value, model_size, axis)
                assert (share.rank, share.layout.size) == (number % model_size, model_size)
                np.testing.assert_array_equal(share.chunk.numpy(), expected[share.rank])
                assert (share.mirror is not None) == (data_size == 1)
                if share.mirror is not None:
                    np.testing.assert_array_equal(share.mirror.numpy(), expected[(share.rank - 1) % model_size])
        return staying


class ChoosingLayout(FakeLayout):
    is_to_choose = True


class ChoosingRanks(MeshRanks):
    """Ranks of a mesh, whose layout is chosen in the first step."""

    layout = ChoosingLayout

    @staticmethod
    def variable(number: int, value: np.ndarray, axis: int, job: Any, initial: Any = None) -> LaidOutVariable:
        first = lambda: tf.constant(value)  # noqa: E731
        shape, dtype = value.shape, tf.as_dtype(value.dtype)
        made = undecided.UndecidedVariable(first, shape, dtype, "weight", job, path="weight", is_trained=True)
        made.number = number
        return made

    def choose(self, *ranks: int) -> None:
        for rank in ranks:
            for slot, (_, axis) in zip(self.slots[rank], CUT):
                slot.decide(axis)


# ---- shards


def test_a_chunk_does_not_keep_the_complete_value_in_memory():
    def begins_at(tensor: Any) -> int:
        return np.asarray(memoryview(tensor)).__array_interface__["data"][0]

    job = fake_job(rank=1, size=4)
    value = tf.zeros([4, 1 << 16])
    share = ShardedVariable(value, "slot", job, lambda: value).share
    first = begins_at(value)
    for each in (share.chunk, share.mirror):
        assert not first <= begins_at(each.read_value()) < first + 4 * (4 << 16)


@pytest.mark.parametrize("hosts", [[0] * 5, [0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1]])
def test_a_rank_after_the_other(hosts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = FlatRanks(monkeypatch, hosts)
    ranks.check()
    left = list(range(len(hosts)))
    for lost in (1, 3, 0):
        left.remove(lost)
        assert ranks.share_out(*left) == [None] * len(left)
        ranks.check()


def test_a_lost_rank_costs_less_than_gathering_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = FlatRanks(monkeypatch, [0] * 5)
    ranks.share_out(0, 1, 2, 4)
    assert 0 < ranks.sent < 4 * sum(each.size for each in FLAT) / 2


def test_all_ranks_of_a_host_and_a_rank_with_the_one_that_has_its_mirrors(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = FlatRanks(monkeypatch, [0, 0, 0, 1, 1, 1])
    assert ranks.share_out(3, 4, 5) == [None] * 3
    ranks.check()
    ranks = FlatRanks(monkeypatch, [0] * 4)
    reasons = ranks.share_out(0, 3)
    assert len(set(reasons)) == 1 and "were lost together" in reasons[0]
    ranks.left = [0, 1, 2, 3]
    ranks.renew()
    ranks.check()


def test_a_rank_and_the_one_with_its_mirrors_leave_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = FlatRanks(monkeypatch, [0] * 4)
    assert ranks.share_out(0, 1, 2, 3, leaving=[1, 2]) == [None] * 4
    ranks.left = [0, 3]
    ranks.renew()
    ranks.check()


@pytest.mark.parametrize("passed", [(), (0,), (2, 4), (0, 2, 3, 4)])
def test_another_rank_is_lost_meanwhile(passed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """`passed`: ranks that have come to the end; the others have lost rank 4, or 2, just before.

    Rank 2 had the only mirrors of rank 1, which was lost before; but all others have made their next shares by then.
    """
    for lost in (2, 4):
        ranks = FlatRanks(monkeypatch, [0] * 5)
        ranks.fails = lambda rank, name: name.endswith("made") and rank not in passed
        ranks.share_out(0, 2, 3, 4)
        ranks.fails = _nobody
        assert ranks.share_out(*(each for each in (0, 2, 3, 4) if each != lost)) == [None] * 3
        ranks.check()


@pytest.mark.parametrize(
    ("joins", "first", "then"), [(False, (0, 1, 3, 4), (1, 3, 4)), (True, (0, 1, 2, 3), (1, 2, 3))]
)
def test_a_rank_is_lost_while_a_slot_is_moved(
    joins: bool, first: tuple[int, ...], then: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = FlatRanks(monkeypatch, [0] * (3 if joins else 5))
    if joins:
        ranks.join()
    ranks.fails = lambda rank, name: name.endswith("/1")
    assert all(isinstance(each, RankLostError) for each in ranks.share_out(*first))
    ranks.fails = _nobody
    assert ranks.share_out(*then) == [None] * 3
    ranks.check()


@pytest.mark.parametrize("hosts", [[0] * 3, [0, 0, 1, 1], [0]])
def test_newcomers_get_their_shares(hosts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside one rank, which had all entries."""
    ranks = FlatRanks(monkeypatch, hosts)
    left = list(range(len(hosts)))
    for _ in range(2):
        left.append(ranks.join(host=hosts[-1]))
        for each in itertools.chain(*ranks.slots):
            each.assignments = (3, 7)
        assert ranks.share_out(*left) == [None] * len(left)
        ranks.check()
        assert all(each.assignments == (0, 0) for rank in left for each in ranks.slots[rank])
        ranks.new.clear()
    left = left[2:] if len(hosts) > 3 else left[1:]  # a host
    assert ranks.share_out(*left) == [None] * len(left)
    ranks.check()


def test_a_newcomer_takes_the_place_of_a_rank_lost_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = FlatRanks(monkeypatch, [0] * 3)
    newcomer = ranks.join()
    assert ranks.share_out(0, 2, newcomer) == [None] * 3
    ranks.check()
    ranks = FlatRanks(monkeypatch, [0] * 3)
    newcomer = ranks.join()
    assert all("were lost together" in each for each in ranks.share_out(0, newcomer))


@pytest.mark.parametrize("passed", [(), (0,), (3,), (1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_rank_is_lost_while_a_newcomer_joins(
    passed: tuple[int, ...], lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`passed`: ranks that have come to the end. Rank 3 is the newcomer; next, another one comes."""
    ranks = FlatRanks(monkeypatch, [0] * 3)
    ranks.join()
    ranks.fails = lambda rank, name: name.endswith("made") and rank not in passed
    ranks.share_out(0, 1, 2, 3)
    ranks.fails = _nobody
    left = [each for each in (0, 1, 2, 3) if each != lost]
    if 3 in passed:  # it may be in its first step
        ranks.new.discard(3)
    left.append(ranks.join())
    assert ranks.share_out(*left) == [None] * 4
    ranks.check()


def test_what_was_made_in_an_earlier_attempt_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 misses the second attempt, and still has what it made among other ranks in the first."""
    ranks = FlatRanks(monkeypatch, [0] * 5)
    ranks.fails = lambda rank, name: name.endswith("made")
    ranks.share_out(0, 2, 3, 4)
    newcomer = ranks.join()
    ranks.fails = lambda rank, name: name.endswith("made") or rank == 0 and name.endswith("generations")
    ranks.share_out(0, 2, 3, newcomer)
    ranks.fails = _nobody
    assert ranks.share_out(0, 2, 3, newcomer) == [None] * 4
    ranks.check()


def test_a_newcomer_that_lacks_a_slot_gives_up_and_the_others_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = FlatRanks(monkeypatch, [0] * 2)
    newcomer = ranks.join()
    del ranks.slots[newcomer][1]
    ranks.timeout = 1.0  # the others wait for it
    results = ranks.share_out(0, 1, newcomer)
    assert isinstance(results[2], CollectiveError) and "optimizers without 1 of the variables" in str(results[2])
    ranks.timeout = 20.0
    assert ranks.share_out(0, 1) == [None] * 2
    ranks.check()


def test_a_newcomer_numbers_its_slots_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, mine = (FlatRanks(monkeypatch, [0] * 2).slots[0] for _ in range(2))
    for number, slot in enumerate(theirs):
        slot.number = 10 - number
    of_others = sharded_slots.numbers_in([theirs[0], tf.Variable(1.0), *theirs[1:]])
    assert of_others[0] == [10, None, 9, 8]
    assert not sharded_slots.number_as([*mine[:2], tf.Variable(1.0), mine[2]], of_others)
    assert sharded_slots.number_as([mine[0], tf.Variable(1.0), *mine[1:]], (of_others[0], 20))
    assert [each.number for each in mine] == [10, 9, 8]
    assert FlatRanks(monkeypatch, [0]).slots[0][0].number == 0 and sharded_slots.numbers_in([])[1] == 23


def test_slots_that_only_some_ranks_have_made_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = FlatRanks(monkeypatch, [0] * 3)
    of_1 = ranks.slots[1].pop()
    assert ranks.share_out(0, 1) == [None] * 2
    ranks.slots[1].append(ranks.slot(of_1.number, np.zeros_like(FLAT[2]), ranks.strategies[1].job))
    ranks.check([*FLAT[:2], np.zeros_like(FLAT[2])])


def test_the_last_rank_has_ordinary_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = FlatRanks(monkeypatch, [0] * 2)
    slot = ranks.slots[0][0]
    with pytest.raises(ConfigError):
        slot.read_value()
    assert ranks.share_out(0) == [None]
    for each, value in zip(ranks.slots[0], FLAT):
        np.testing.assert_array_equal(each.numpy(), value)
    slot.assign_add(tf.ones_like(slot))
    np.testing.assert_array_equal(tf.function(lambda: slot * 2)(), 2 * (FLAT[0] + 1))


def test_a_copy_of_shards_is_of_no_use_when_they_were_shared_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """DivergenceGuard has no state to go back to then, until the next good windows."""
    ranks = FlatRanks(monkeypatch, [0] * 3)

    def stored() -> list[Any]:
        return [each for slot in ranks.slots[0] for each in sharded_slots.local_variables(slot)]

    copy = _last_good._Copy(1, [(each, each.numpy()) for each in stored()])
    assert len(copy.values) == 2 * len(FLAT) and not copy.has_old_shards(stored())
    ranks.share_out(0, 2)
    assert copy.has_old_shards(stored())


@pytest.mark.parametrize(
    "hosts, offset",
    [([0], 0), ([0, 0, 0], 1), ([0, 0, 0, 1, 1, 1], 3), ([0, 1, 0, 1], 1), ([0, 0, 1, 1, 2, 2], 2), ([0] * 4 + [1], 1)],
)
def test_mirrors_are_on_other_hosts_where_there_are_some(hosts: list[int], offset: int) -> None:
    assert mirror_offset(hosts) == offset


# ---- slices of a mesh


@pytest.mark.parametrize(
    "size", [(2, 2), (1, 4), *(pytest.param(each, marks=pytest.mark.long) for each in [(1, 2), (3, 2), (2, 3)])]
)
def test_one_rank_after_the_other_of_a_mesh(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for first in range(size[0] * size[1]):
        ranks = MeshRanks(monkeypatch, *size)
        left = list(ranks.left)
        del left[first]
        while left:
            assert ranks.share_out(*left) == [None] * len(left)
            left = ranks.check()
            del left[-1]


@pytest.mark.parametrize(
    ("size", "lost", "then", "newcomers"),
    [((2, 2), 1, (1, 3), 1), ((1, 4), 2, (1, 3), 1), ((1, 2), 1, (1, 1), 1), ((1, 2), 0, (1, 1), 3)],
)
def test_a_mesh_grows_to_what_it_was(
    size: tuple[int, int], lost: int, then: tuple[int, int], newcomers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or becomes larger."""
    ranks = MeshRanks(monkeypatch, *size)
    left = [rank for rank in ranks.left if rank != lost]
    assert ranks.share_out(*left) == [None] * len(left)
    left = ranks.check()
    assert ranks.mesh(left[0]) == then
    left += [ranks.join() for _ in range(newcomers)]
    assert ranks.share_out(*left) == [None] * len(left)
    assert ranks.check() == left and ranks.mesh(left[-1]) == (len(left) // size[1], size[1])


@pytest.mark.parametrize("passed", [(), (0,), (4,), (0, 2, 3, 4)])
@pytest.mark.parametrize("lost", [0, 3, 4])
def test_a_rank_is_lost_while_a_mesh_grows(passed: tuple[int, ...], lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`passed`: ranks that have come to the end. Rank 4 is the newcomer; next, another one comes."""
    ranks = MeshRanks(monkeypatch, 2, 2)
    assert ranks.share_out(0, 2, 3) == [None] * 3
    ranks.join()
    ranks.fails = lambda rank, name: name.endswith("made") and rank not in passed
    ranks.share_out(0, 2, 3, 4)
    ranks.fails = _nobody
    if 4 in passed:  # it may be in its first step
        ranks.new.discard(4)
    left = [each for each in (0, 2, 3, 4) if each != lost] + [ranks.join()]
    assert ranks.share_out(*left) == [None] * 4
    assert ranks.check() == left and ranks.mesh(left[0]) == (2, 2)


@pytest.mark.parametrize(
    ("size", "waiting", "leaving", "room"),
    [((1, 2), 1, 0, 0), ((1, 2), 2, 0, 2), ((1, 2), 3, 0, 2), ((2, 2), 1, 1, 1), ((2, 2), 0, 1, 0), ((1, 3), 1, 0, 0)],
)
def test_newcomers_wait_until_there_is_a_larger_mesh(
    size: tuple[int, int], waiting: int, leaving: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = MeshRanks(monkeypatch, *size)
    leaf = SimpleNamespace(job=ranks.strategies[0].job, shape=[4 if size[1] == 2 else 3], axis=0)
    monkeypatch.setattr(sharing_out, "all_slots", lambda: [leaf])
    assert sharing_out.room_for(waiting, leaving, ranks.strategies[:1]) == room


def test_each_rank_may_miss_any_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ranks have taken what the others have only made: these take it when all meet again, without another."""
    names = ["generations", "held", "1", "made"]
    for size, name, again in itertools.product([(2, 2), (1, 4)], names, [None, 1, 2]):
        ranks = MeshRanks(monkeypatch, *size)
        ranks.fails = lambda rank, met, name=name: rank in (1, 3) and met.endswith(f"/{name}")
        results = ranks.share_out(1, 2, 3)
        assert isinstance(results[0], RankLostError), (name, results)
        ranks.fails = _nobody
        results = ranks.share_out(*(each for each in (1, 2, 3) if each != again))
        assert all(each == results[0] for each in results), (size, name, again, results)
        if isinstance(results[0], str):  # before they have made others, two have what is nowhere else
            assert "were lost together" in results[0] and again is not None and name != "made"
        else:
            ranks.check()


def test_what_stays_is_not_sent_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = MeshRanks(monkeypatch, 3, 2)
    before = [slot.share.chunk for slot in ranks.slots[0]]
    assert ranks.share_out(0, 1, 2, 3, 4) == [None] * 5
    assert ranks.mesh(0) == (2, 2) and ranks.check() == [0, 1, 2, 3]
    assert all(slot.share.chunk is chunk for slot, chunk in zip(ranks.slots[0], before))
    assert ranks.met == ["generations", "held", "made"]


@pytest.mark.parametrize("chosen", [(3,), (0, 2), (0, 2, 3)])
@pytest.mark.parametrize("joins", [False, True])
def test_a_choice_that_any_rank_has_made_stands(
    chosen: tuple[int, ...], joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ChoosingRanks(monkeypatch, 2, 2)
    ranks.choose(*chosen)
    left = [0, 2, 3, *([ranks.join()] if joins else [])]
    assert ranks.share_out(*left) == [None] * len(left)
    assert ranks.check() == left and ranks.mesh(0) == ((2, 2) if joins else (1, 3))
    assert all(slot.is_decided for rank in left for slot in ranks.slots[rank])


def test_a_choice_is_made_anew_if_no_rank_that_is_left_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ChoosingRanks(monkeypatch, 2, 2)
    ranks.choose(1)
    left = [0, 2, 3, ranks.join()]
    assert ranks.share_out(*left) == [None] * 4
    for rank in left:
        for slot, (value, _) in zip(ranks.slots[rank], CUT, strict=True):
            np.testing.assert_array_equal(slot.numpy(), value)
            assert not slot.is_decided
    hosts = [0] * 4
    for place, rank in enumerate(left):
        vars(ranks.strategies[rank].job).update(rank=place, size=4, hosts=tuple(hosts))
    ranks.choose(*left)
    ranks.check()


def test_all_ranks_with_a_slice_leave_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = MeshRanks(monkeypatch, 2, 2)
    assert ranks.share_out(0, 1, 2, 3, leaving=[1, 3]) == [None] * 4
    ranks.left = [0, 2]
    assert ranks.check() == [0, 2] and ranks.mesh(0) == (1, 2)


def test_ranks_that_are_needed_do_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = MeshRanks(monkeypatch, 2, 2)
    assert ranks.share_out(0, 1, 2, 3, leaving=[1, 3], least=3) == [None] * 4
    assert ranks.check() == [0, 1, 2, 3] and ranks.mesh(0) == (2, 2)


def test_all_ranks_with_a_slice_are_lost_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, left in (((2, 2), [0, 2]), ((1, 4), [0, 3])):
        results = MeshRanks(monkeypatch, *size).share_out(*left)
        assert all("were lost together" in each and "part of weight" in each for each in results)


def test_with_too_few_ranks_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = MeshRanks(monkeypatch, 2, 2)
    before = [slot.share for slot in ranks.slots[0]]
    with mock.patch.object(remeshing, "largest_mesh", lambda *_: NewMesh(1, 2, (0, 1))):
        assert all(isinstance(each, TooFewError) for each in ranks.share_out(0, 1, 2, least=3))
    assert [slot.share for slot in ranks.slots[0]] == before


def test_a_rank_without_a_place_has_what_it_had_when_the_others_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = MeshRanks(monkeypatch, 2, 2)
    ranks.fails = lambda rank, name: name.endswith("made")
    with mock.patch.object(remeshing, "largest_mesh", lambda *_: NewMesh(1, 2, (0, 1))):
        ranks.share_out(0, 1, 2)
    ranks.fails = _nobody
    (reason,) = ranks.share_out(2)
    assert "were lost together" in reason


def test_what_not_all_ranks_have_made_begins_anew_or_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    value, axis = np.zeros(12), 0
    for initial, reason in ((lambda: tf.constant(value), None), (None, "must exist on all of them")):
        ranks = MeshRanks(monkeypatch, 1, 4)
        ranks.slots[0].append(ranks.variable(7, value, axis, ranks.strategies[0].job, initial))
        job = ranks.strategies[0].job
        job.mesh.model.size, job.hosts = 3, (0,) * 3  # as `form` will have it
        results = ranks.share_out(0, 1, 2)
        assert all((each is None) if reason is None else (reason in each) for each in results), results
        if reason is None:
            assert ranks.slots[0][-1].chunk.shape == [4]


@pytest.mark.parametrize(
    ("model_size", "hosts", "extents", "expected"),
    [
        (2, [0, 0, 0], [12, 8], (1, 2, (0, 1))),
        (2, [0, 0, 0], [12, 6], (1, 3, (0, 1, 2))),
        (2, [0] * 7, [4], (3, 2, (0, 1, 2, 3, 4, 5))),
        (2, [0, 1, 1], [4], (1, 2, (1, 2))),
        (2, [0, 0, 1, 2, 2], [4], (2, 2, (0, 1, 3, 4))),
        (4, [0] * 3, [8], (1, 2, (0, 1))),
        (4, [0] * 3, [4, 7], (3, 1, (0, 1, 2))),
        (1, [0] * 3, [], (3, 1, (0, 1, 2))),
        (2, [0], [2], (1, 1, (0,))),
    ],
)
def test_the_largest_mesh(model_size: int, hosts: list[int], extents: list[int], expected: tuple[Any, ...]) -> None:
    assert largest_mesh(model_size, hosts, extents) == NewMesh(*expected)


def test_a_rank_without_a_place_gives_what_it_has_and_gets_nothing() -> None:
    mesh = largest_mesh(2, [0, 0, 0], [4])
    assert remeshing.places_in(mesh, [0, 0, 0]) == [
        MeshPlace(Place(0, 1), Place(0, 2, 1)),
        MeshPlace(Place(0, 1), Place(1, 2, 1)),
        None,
    ]
