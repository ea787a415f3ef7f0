"""Movements of state between ranks and files, in simulated memory: random cases, minimal bytes, and refusals."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cut.simulated import Exchange

from harness.threads import results_of
from keras_ddl.cut import MeshLayout, Slices
from keras_ddl.cut.values.layouts import Box, Layout
from keras_ddl.errors import CheckpointError
from keras_ddl.state import boxes, exchange, files
from keras_ddl.state.placements import NOTHING, MeshPlace, Place, holding, place_on_mesh, replicated
from keras_ddl.state.plan import Holding, MissingBoxError, Move, plan


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + extent) for first, extent in box)


def placements(rng: random.Random, shape: tuple[int, ...], size: int) -> tuple[Holding, ...]:
    """Returns the holdings of ranks for a random layout."""
    kinds: list[Any] = [None, 0, Layout(shape, size)]
    kinds += [Slices(shape, size, axis) for axis, extent in enumerate(shape) if extent % size == 0]
    for model in (2, 3):
        axes = [axis for axis, extent in enumerate(shape) if extent % model == 0]
        kinds += [MeshLayout(shape, axis, size // model, model) for axis in axes if size % model == 0]
    kind = rng.choice(kinds)
    if kind is None:
        return (replicated(shape),) * size
    if kind == 0:
        return (replicated(shape), *[NOTHING] * (size - 1))
    offset = rng.randrange(size)
    return tuple(holding(kind, Place(rank, size, offset)) for rank in range(size))


def entries_of(holdings: tuple[Holding, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Returns [ranks, *shape]: whether a rank has an entry."""
    has = np.zeros((len(holdings), *shape), bool)
    for rank, each in enumerate(holdings):
        for box in chain(*each):
            has[rank, *index(box)] = True
    return has


def case(rng: random.Random) -> tuple[tuple[int, ...], tuple[Holding, ...], tuple[Holding, ...], tuple[int, ...]]:
    """Returns (shape, held, wanted, hosts): some ranks were lost, the others moved up, and others may have joined."""
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3)))
    old, new = rng.randint(1, 6), rng.randint(1, 6)
    held = [each for each in placements(rng, shape, old) if rng.random() < 0.8]
    wanted = list(placements(rng, shape, new))
    size = max(len(held), new)
    held += [NOTHING] * (size - len(held))
    wanted += [NOTHING] * (size - new)
    return shape, tuple(held), tuple(wanted), tuple(rng.randrange(3) for _ in range(size))


def test_random_movements_are_right_and_minimal() -> None:
    rng, refused = random.Random(0), 0
    for _ in range(4000):
        shape, held, wanted, hosts = case(rng)
        has, needs = entries_of(held, shape), entries_of(wanted, shape)
        lacks, is_held = needs & ~has, has.any(axis=0)
        if (lacks & ~is_held).any():
            refused += 1
            with pytest.raises(MissingBoxError, match="which rank"):
                plan(held, wanted, hosts)
            continue
        moved = np.zeros_like(lacks)
        between_hosts = 0
        for sender, receiver, box in plan(held, wanted, hosts):
            assert has[sender, *index(box)].all(), "sends entries it does not have"
            assert not moved[receiver, *index(box)].any(), "sends twice"
            moved[receiver, *index(box)] = True
            between_hosts += boxes.size(box) * (hosts[sender] != hosts[receiver])
        assert np.array_equal(moved, lacks), "does not move exactly the missing entries"
        on_host = np.stack([has[[other == host for other in hosts]].any(axis=0) for host in hosts])
        assert between_hosts == (lacks & ~on_host).sum(), "takes entries from another host that its own has"
    assert 200 < refused < 2000


def test_ranks_with_equal_data_share_the_work() -> None:
    whole, hosts = replicated((5,)), (0,) * 6
    moves = plan((whole, whole, NOTHING, NOTHING, NOTHING, NOTHING), (whole,) * 6, hosts)
    assert sorted(each.sender for each in moves) == [0, 0, 1, 1]
    moves = plan((whole, whole, NOTHING, NOTHING), (whole,) * 4, (0, 1, 1, 0))
    assert moves == (Move(1, 2, whole[0][0]), Move(0, 3, whole[0][0]))


def test_plans_are_cached() -> None:
    whole = replicated((5, 2))
    arguments = (whole, NOTHING), (whole, whole), (0, 0)
    assert plan(*arguments) is plan(*arguments)


class Ranks:
    """Threads as ranks; `exchange` sends through them."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._exchange, self._here = Exchange(size), threading.local()
        self.sent: list[np.ndarray] = []  # per collective: [ranks, ranks] numbers of entries
        self.size = size
        monkeypatch.setattr(exchange, "ops", SimpleNamespace(all_to_all=self._all_to_all))
        place = SimpleNamespace(
            topology=lambda: SimpleNamespace(rank=self._here.rank, hosts=(0,) * size),
            rank=lambda: self._here.rank,
            all_gather_object=lambda value, name: self._exchange.meet(name, self._here.rank, value),
        )
        monkeypatch.setattr(files, "communicator", place)

    def _all_to_all(self, rows: np.ndarray, splits: list[int], name: str) -> tuple[tf.Tensor, None]:
        rank = self._here.rank
        given = self._exchange.meet(name, rank, (rows, splits))
        if rank == 0:
            self.sent.append(np.array([to for _, to in given]))
        return tf.constant(np.concatenate([each[sum(to[:rank]) : sum(to[: rank + 1])] for each, to in given])), None

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        def run_rank(rank: int) -> Any:
            self._here.rank = rank
            return function(rank)

        results = results_of(run_rank, range(self.size))
        return [results[rank] for rank in range(self.size)]


def stored(array: np.ndarray, holdings: tuple[Holding, ...]) -> list[list[np.ndarray]]:
    """Returns the arrays of each rank."""
    return [[boxes.joined(each, {whole_box(array): array}, array.dtype) for each in mine] for mine in holdings]


def whole_box(array: np.ndarray) -> Box:
    return replicated(array.shape)[0][0]


def some_array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = np.random.default_rng(2).integers(0, 100, shape)
    return np.asarray(values).astype(tf.as_dtype(dtype).as_numpy_dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64"])
def test_random_movements_between_ranks(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    for _ in range(40):
        shape, held, wanted, hosts = case(rng)
        try:
            moves = plan(held, wanted, hosts)
        except MissingBoxError:
            continue
        array = some_array(shape, dtype)
        before, after = stored(array, held), stored(array, wanted)
        results = Ranks(len(held), monkeypatch).run(
            lambda rank: exchange.exchange(moves, held, wanted, rank, lambda: before[rank], array.dtype, "moved")  # noqa: B023
        )
        for mine, found, expected in zip(before, results, after, strict=True):
            got = [mine[each] if isinstance(each, int) else each for each in found]
            assert all(each.dtype == array.dtype for each in got)
            assert [each.tolist() for each in got] == [each.tolist() for each in expected]


def test_array_is_gathered_on_every_rank_or_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    array, offset = some_array((6, 8), "float32"), 1
    layouts = [
        (Layout((6, 8), 4), [0, 1, 2, 3]),
        (Slices((6, 8), 2, 1), [0, 1, 0, 1]),
        (MeshLayout((6, 8), 1, 2, 2), [0, 1, 2, 3]),
    ]
    for layout, parts in layouts:
        for mirrors in (0, offset):
            held = tuple(holding(layout, Place(part, layout.size, mirrors)) for part in parts)
            before = stored(array, held)
            for hosts, on_rank in itertools.product([(0, 0, 0, 0), (0, 0, 1, 1)], [None, 0, 3]):
                ranks = Ranks(4, monkeypatch)

                def gather(rank: int, held=held, before=before, hosts=hosts, on_rank=on_rank) -> Any:
                    values = lambda: before[rank]  # noqa: E731
                    return exchange.gather(held, (6, 8), hosts, rank, values, array.dtype, "all", on_rank=on_rank)

                for rank, result in enumerate(ranks.run(gather)):
                    if on_rank in (None, rank):
                        np.testing.assert_array_equal(result, array)
                    else:
                        assert result is None
                on_host = np.array(hosts)[:, None] == np.array(hosts)
                between = sum(each[~on_host].sum() for each in ranks.sent)
                lacking = [
                    array.size - entries_of(held, (6, 8))[[each == host for each in hosts]].any(axis=0).sum()
                    for host in (0, 1)
                ]
                if hosts[-1]:  # each host receives missing entries once
                    assert between == (sum(lacking) if on_rank is None else lacking[hosts[on_rank]])


class Leaf:
    """One simulated rank's view of a distributed variable."""

    number = 5

    def __init__(self, array: np.ndarray, holdings: tuple[Holding, ...], rank: int) -> None:
        self.full_shape, self.numpy_dtype, self._holdings = array.shape, array.dtype, holdings
        self.arrays = stored(array, holdings)[rank]
        self.restored: list[np.ndarray] | None = None

    def held_by_all(self) -> tuple[Holding, ...]:
        return self._holdings

    def values(self) -> list[np.ndarray]:
        return self.arrays

    def restore(self, arrays: list[np.ndarray]) -> None:
        self.restored = arrays


def test_ranks_write_each_entry_once_and_read_their_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    for _ in range(200):
        shape, size = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3))), rng.randint(1, 6)
        holdings, in_boxes = placements(rng, shape, size), rng.random() < 0.8
        reached = [rank == 0 or rng.random() < 0.7 for rank in range(size)]
        array = some_array(shape, "float32")
        ranks, leaves = Ranks(size, monkeypatch), [Leaf(array, holdings, rank) for rank in range(size)]
        times, file = np.zeros(shape, int), np.full(shape, -1.0)
        for rank, (wrote, values) in enumerate(
            ranks.run(lambda rank: files.write(leaves[rank], reached, in_boxes=in_boxes))  # noqa: B023
        ):
            assert not wrote or (reached[rank] if in_boxes else rank == 0 and len(wrote) == 1)
            values = leaves[rank].arrays[values] if isinstance(values, int) else values
            for box, part in zip(wrote, boxes.split(values, wrote), strict=True):
                times[index(box)] += 1
                file[index(box)] = part
        assert (times == 1).all() and np.array_equal(file, array)
        if all(reached) and in_boxes:
            assert ranks.sent == []

        def read(rank: int) -> None:
            def read_boxes(number: int, wanted: tuple[Box, ...]) -> np.ndarray:
                assert number == 0 and reached[rank]  # noqa: B023
                return boxes.joined(wanted, {whole_box(file): file.astype("float32")}, np.float32)  # noqa: B023

            files.read([leaves[rank]], read_boxes, reached)  # noqa: B023

        ranks.run(read)
        for each in leaves:
            assert [one.tolist() for one in each.restored] == [one.tolist() for one in each.arrays]


@pytest.mark.parametrize("reached", [[True, True, True], [True, True, False]])
def test_rank_that_cannot_read_is_named_on_all_ranks(reached: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    holdings = tuple(holding(Layout((6,), 3), Place(rank, 3)) for rank in range(3))

    def read(rank: int) -> str:
        def read_boxes(number: int, wanted: tuple[Box, ...]) -> np.ndarray:
            if rank == 1 and number == 0:
                raise CheckpointError("no file")
            return np.zeros(sum(map(boxes.size, wanted)))

        leaves = [Leaf(some_array((6,), "float32"), holdings, rank) for _ in range(2)]
        with pytest.raises(CheckpointError) as caught:
            files.read(leaves, read_boxes, reached)
        return str(caught.value)

    assert Ranks(3, monkeypatch).run(read) == ["rank 1: no file"] * 3


def test_entries_a_rank_holds_are_neither_read_nor_sent() -> None:
    held = (((((0, 2),),),) * 2)[:1] + (((((2, 2),),)),)
    assert exchange.exchange((), held, held, 0, lambda: 1 / 0, np.dtype("float32"), "none") == [0]


def test_boxes() -> None:
    assert boxes.intersection(((0, 3), (2, 2)), ((1, 4), (0, 3))) == ((1, 2), (2, 1))
    assert boxes.intersection(((0, 3),), ((3, 2),)) is None
    assert boxes.intersection((), ()) == () and boxes.without((), ()) == []
    assert boxes.without(((0, 4), (0, 4)), ((1, 2), (1, 2))) == [
        ((0, 1), (0, 4)), ((3, 1), (0, 4)), ((1, 2), (0, 1)), ((1, 2), (3, 1))
    ]  # fmt: skip
    assert boxes.without_all([((0, 0),)], []) == []
    assert boxes.without_all([((0, 4),), ((2, 4),)], [((1, 1),)]) == [((0, 1),), ((2, 2),), ((4, 2),)]


def test_place_has_its_part_and_a_mirror() -> None:
    assert Place(0, 3, 1).parts() == [0, 2] and Place(1, 3).parts() == [1]
    assert holding(Layout((6,), 3), Place(0, 3, 1)) == ((((0, 2),),), (((4, 2),),))


def test_place_on_a_mesh_has_mirrors_along_one_axis() -> None:
    assert place_on_mesh(3, [0, 0, 0, 0], 2) == MeshPlace(Place(1, 2, 1), Place(1, 2))
    assert place_on_mesh(1, [0, 0], 2) == MeshPlace(Place(0, 1), Place(1, 2, 1))
    assert place_on_mesh(2, [0, 0, 1, 1]) == MeshPlace(Place(2, 4, 2), Place(0, 1))
