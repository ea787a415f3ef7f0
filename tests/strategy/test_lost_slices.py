"""Slices of a mesh are shared out when ranks are lost, bit by bit, whoever is lost meanwhile; no ranks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cut.simulated import Exchange

from harness.threads import results_or_errors
from keras_ddl.errors import RankLostError
from keras_ddl.strategy.mesh import lost_slices
from keras_ddl.strategy.mesh.laid_out import LaidOutVariable
from keras_ddl.strategy.mesh.lost_slices import LostSlices, Place
from keras_ddl.strategy.mesh.survivors import NewMesh, largest_mesh
from keras_ddl.topology import make_topology

RNG = np.random.default_rng(1)
VALUES = [(RNG.normal(size=(12, 3)).astype("float32"), 0), (RNG.normal(size=(2, 24, 2)), 1),
          (RNG.integers(0, 99, 12), 0)]  # fmt: skip


def _nobody(rank: int, name: str) -> bool:
    return False


class FakeLayout:
    """A mesh/layout.py `Layout`, of which LostSlices needs the extents alone."""

    def __init__(self, data_size: int, model_size: int) -> None:
        self.data_size, self.model_size = data_size, model_size

    def of_smaller_mesh(self, data_size: int, model_size: int, rank: int) -> FakeLayout:
        return FakeLayout(data_size, model_size)


class Ranks:
    """Threads for ranks, which are numbered as at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data_size: int, model_size: int) -> None:
        self.left = list(range(data_size * model_size))
        self._here = threading.local()
        self.slots, self.jobs, self.slices = [], [], []
        for rank in self.left:
            data, model = divmod(rank, model_size)
            offset = 1 if data_size == 1 else 0
            axes = {"model": SimpleNamespace(size=model_size, rank=model), "data": SimpleNamespace(size=data_size)}
            job = SimpleNamespace(
                rank=rank, device="/cpu:0", goes_on=True, mesh=SimpleNamespace(**axes), slice_mirror_offset=offset
            )
            self.jobs.append(job)
            self.slots.append([self.variable(n, value, axis, job) for n, (value, axis) in enumerate(VALUES)])
            self.slices.append(LostSlices(job, FakeLayout(data_size, model_size)))
        self.fails: Callable[[int, str], bool] = _nobody
        self.met: list[str] = []
        monkeypatch.setattr(lost_slices, "all_slots", lambda: self.slots[self._here.rank])
        monkeypatch.setattr(lost_slices, "ops", SimpleNamespace(all_to_all=self.all_to_all))
        gather = lambda mine, name: self.meet(name, mine)  # noqa: E731
        collectives = SimpleNamespace(all_gather_object=gather, barrier=lambda name: self.meet(name, None))
        monkeypatch.setattr(lost_slices, "communicator", collectives)

    @staticmethod
    def variable(number: int, value: np.ndarray, axis: int, job: Any, first: Any = None) -> LaidOutVariable:
        made = LaidOutVariable(tf.constant(value), "weight", job, axis, is_trained=True, first_value=first)
        made.number = number
        return made

    def meet(self, name: str, value: Any) -> list[Any]:
        rank = self._here.rank
        try:
            result = self._exchange.meet(name, self.left.index(rank), value)
        except AssertionError as error:  # others do not come
            raise RankLostError(str(error)) from None
        if rank == self.left[0]:
            self.met.append(name)
        if self.fails(rank, name):
            raise RankLostError("another one")
        return result

    def all_to_all(self, rows: tf.Tensor, splits: Sequence[int], name: str) -> tuple[tf.Tensor, Any]:
        mine = self.left.index(self._here.rank)
        given = self.meet(name, (rows, list(splits)))
        parts = [each[sum(to[:mine]) : sum(to[: mine + 1])] for each, to in given]
        assert all(sum(to) == len(each) for each, to in given)
        return tf.concat(parts, axis=0), None

    def share_out(self, *left: int, least: int = 1) -> list[Any]:
        """Returns, for each rank that is left, what `share_out` has returned or raised there."""
        self.left = list(left)
        self._exchange = Exchange(len(left), 0.5 if self.fails is not _nobody else 20.0)

        def run(rank: int) -> Any:
            self._here.rank = rank
            place = make_topology(self.left.index(rank), ["host"] * len(self.left), "p")
            return self.slices[rank].share_out(place, least)

        results = results_or_errors(run, left)
        return [results[rank] for rank in left]

    def check(self, mesh: NewMesh) -> list[int]:
        """Checks that the ranks of a mesh have their slices and mirrors of all values. Returns these ranks."""
        staying = [self.left[each] for each in mesh.staying]
        for number, rank in enumerate(staying):
            for slot, (value, axis) in zip(self.slots[rank], VALUES, strict=True):
                share, size = slot.share, mesh.model_size
                if size == 1:
                    np.testing.assert_array_equal(slot.numpy(), value)
                    continue
                expected = np.split(value, size, axis)
                assert (share.rank, share.layout.size) == (number % size, size)
                np.testing.assert_array_equal(share.chunk.numpy(), expected[share.rank])
                assert (share.mirror is not None) == (mesh.data_size == 1)
                if share.mirror is not None:
                    np.testing.assert_array_equal(share.mirror.numpy(), expected[(share.rank - 1) % size])
        return staying


@pytest.mark.parametrize(
    "size", [(2, 2), (1, 4), *(pytest.param(each, marks=pytest.mark.long) for each in [(1, 2), (3, 2), (2, 3)])]
)
def test_one_rank_after_the_other(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for first in range(size[0] * size[1]):
        ranks = Ranks(monkeypatch, *size)
        left = list(ranks.left)
        del left[first]
        while left:
            results = ranks.share_out(*left)
            assert all(each == results[0] for each in results), results
            left = ranks.check(results[0])
            del left[-1]


def test_each_rank_may_miss_any_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ranks have taken what the others have only made: these take it when all meet again, without another."""
    names = ["generations", "places", "1", "made"]
    for size, name, again in itertools.product([(2, 2), (1, 4)], names, [None, 1, 2]):
        ranks = Ranks(monkeypatch, *size)
        ranks.fails = lambda rank, met, name=name: rank in (1, 3) and met.endswith(name)
        results = ranks.share_out(1, 2, 3)
        assert isinstance(results[0], RankLostError), (name, results)
        ranks.fails = _nobody
        results = ranks.share_out(*(each for each in (1, 2, 3) if each != again))
        assert all(each == results[0] for each in results), (size, name, again, results)
        if isinstance(results[0], str):  # before they have made others, two have what is nowhere else
            assert "were lost together" in results[0] and again is not None and name != "made"
        else:
            ranks.check(results[0])


def test_what_stays_is_not_sent_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 3, 2)
    before = [slot.share.chunk for slot in ranks.slots[0]]
    mesh = ranks.share_out(0, 1, 2, 3, 4)[0]
    assert (mesh.data_size, mesh.model_size, mesh.staying) == (2, 2, (0, 1, 2, 3))
    assert all(slot.share.chunk is chunk for slot, chunk in zip(ranks.slots[0], before))
    assert ranks.met == ["keras_ddl/slices/generations", "keras_ddl/slices/places", "keras_ddl/slices/made"]


def test_all_ranks_with_a_slice_are_lost_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, left in (((2, 2), [0, 2]), ((1, 4), [0, 3])):
        results = Ranks(monkeypatch, *size).share_out(*left)
        assert all("were lost together" in each and "part of weight" in each for each in results)


def test_with_too_few_ranks_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2, 2)
    before = [slot.share for slot in ranks.slots[0]]
    assert [each.size for each in ranks.share_out(0, 1, 2, least=4)] == [3] * 3
    assert [slot.share for slot in ranks.slots[0]] == before


def test_what_not_all_ranks_have_made_begins_anew_or_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    value, axis = np.zeros(12), 0
    for first, expected in ((lambda: tf.constant(value), NewMesh), (None, str)):
        ranks = Ranks(monkeypatch, 1, 4)
        ranks.slots[0].append(ranks.variable(7, value, axis, ranks.jobs[0], first))
        results = ranks.share_out(0, 1, 2)
        assert all(isinstance(each, expected) for each in results), results
        if first is not None:
            ranks.jobs[0].mesh.model.size = 3
            ranks.slices[0].begin_others_anew()
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


def test_a_place_has_its_slice_and_a_mirror() -> None:
    assert Place(0, 3, 1).slices() == [0, 2] and Place(1, 3, 0).slices() == [1]
    mesh = largest_mesh(2, [0, 0, 0], [4])
    assert lost_slices.places_in(mesh, [0, 0, 0]) == [Place(0, 2, 1), Place(1, 2, 1), None]
