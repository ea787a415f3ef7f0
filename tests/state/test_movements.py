"""Movements of state, planned and carried out in simulated memory: random cases, the least bytes, every refusal."""

from __future__ import annotations

import random
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_ddl.cut import MeshLayout, Slices
from keras_ddl.cut.flat_shards import Box, Layout
from keras_ddl.state import boxes, exchange
from keras_ddl.state.placements import NOTHING, Place, holding, replicated
from keras_ddl.state.plan import Holding, MissingBoxError, Move, plan


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + extent) for first, extent in box)


def placements(rng: random.Random, shape: tuple[int, ...], size: int) -> tuple[Holding, ...]:
    """Returns what ranks hold in one of the ways that exist."""
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
    """Returns [ranks, *shape]: which entries each rank has."""
    has = np.zeros((len(holdings), *shape), bool)
    for rank, each in enumerate(holdings):
        for box in chain(*each):
            has[rank, *index(box)] = True
    return has


def case(rng: random.Random) -> tuple[tuple[int, ...], tuple[Holding, ...], tuple[Holding, ...], tuple[int, ...]]:
    """Returns (shape, held, wanted, hosts): some ranks were lost, the others move up, others may join."""
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3)))
    old, new = rng.randint(1, 6), rng.randint(1, 6)
    held = [each for each in placements(rng, shape, old) if rng.random() < 0.8]
    wanted = list(placements(rng, shape, new))
    size = max(len(held), new)
    held += [NOTHING] * (size - len(held))
    wanted += [NOTHING] * (size - new)
    return shape, tuple(held), tuple(wanted), tuple(rng.randrange(3) for _ in range(size))


def test_random_movements_are_right_and_move_the_least_bytes() -> None:
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
            assert has[sender, *index(box)].all(), "sends what it does not have"
            assert not moved[receiver, *index(box)].any(), "sends twice"
            moved[receiver, *index(box)] = True
            between_hosts += boxes.size(box) * (hosts[sender] != hosts[receiver])
        assert np.array_equal(moved, lacks), "moves more, or less, than is lacking"
        on_host = np.stack([has[[other == host for other in hosts]].any(axis=0) for host in hosts])
        assert between_hosts == (lacks & ~on_host).sum(), "takes from another host what its own has"
    assert 200 < refused < 2000


def test_those_who_have_the_same_share_the_work() -> None:
    whole, hosts = replicated((5,)), (0,) * 6
    moves = plan((whole, whole, NOTHING, NOTHING, NOTHING, NOTHING), (whole,) * 6, hosts)
    assert sorted(each.sender for each in moves) == [0, 0, 1, 1]
    moves = plan((whole, whole, NOTHING, NOTHING), (whole,) * 4, (0, 1, 1, 0))
    assert moves == (Move(1, 2, whole[0][0]), Move(0, 3, whole[0][0]))


def test_plans_are_kept() -> None:
    whole = replicated((5, 2))
    arguments = (whole, NOTHING), (whole, whole), (0, 0)
    assert plan(*arguments) is plan(*arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64"])
def test_random_movements_between_ranks(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, kind = random.Random(1), tf.as_dtype(dtype).as_numpy_dtype
    for _ in range(60):
        shape, held, wanted, hosts = case(rng)
        try:
            moves = plan(held, wanted, hosts)
        except MissingBoxError:
            continue
        array = np.random.default_rng(2).integers(0, 100, shape).astype(kind)
        arrays = [
            [np.concatenate([array[:0].ravel(), *(array[index(box)].ravel() for box in each)]) for each in mine]
            if array.ndim
            else [array.reshape(-1) if each else array.reshape(-1)[:0] for each in mine]
            for mine in held
        ]
        rows = carried_out(moves, held, wanted, arrays, np.dtype(kind), monkeypatch)
        for rank, results in enumerate(rows):
            for each, result in zip(wanted[rank], results, strict=True):
                found = arrays[rank][result] if isinstance(result, int) else result
                assert found.dtype == kind
                assert sum(map(boxes.size, each)) == found.size
                assert all(np.array_equal(part, array[index(box)]) for box, part in zip(each, boxes.split(found, each)))


def carried_out(
    moves: Any, held: Any, wanted: Any, arrays: Any, dtype: np.dtype, monkeypatch: pytest.MonkeyPatch
) -> list[list[Any]]:
    """Returns what `exchange` returns on each rank: at first to find out what ranks send, then with what they get."""
    size = len(held)
    sent: dict[int, tuple[np.ndarray, list[int]]] = {}

    class _Sent(Exception):
        pass

    def run(rank: int, all_to_all: Any) -> Any:
        monkeypatch.setattr(exchange, "ops", SimpleNamespace(all_to_all=all_to_all))
        return exchange.exchange(moves, held, wanted, rank, lambda: arrays[rank], dtype, "moved")

    for rank in range(size if moves else 0):

        def send(rows: np.ndarray, splits: list[int], name: str, rank: int = rank) -> Any:
            sent[rank] = rows, splits
            raise _Sent

        with pytest.raises(_Sent):
            run(rank, send)
    results = []
    for rank in range(size):
        parts = [rows[sum(to[:rank]) : sum(to[: rank + 1])] for rows, to in (sent[each] for each in sorted(sent))]
        received = np.concatenate(parts) if parts else None
        results.append(run(rank, lambda *_, received=received, **__: (tf.constant(received, dtype), None)))
    return results


def test_what_a_rank_holds_is_neither_read_nor_sent() -> None:
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


def test_a_place_has_its_part_and_a_mirror() -> None:
    assert Place(0, 3, 1).parts() == [0, 2] and Place(1, 3).parts() == [1]
    assert holding(Layout((6,), 3), Place(0, 3, 1)) == ((((0, 2),),), (((4, 2),),))
    assert holding(Layout((6,), 3), None) == NOTHING
