"""Carries out a plan of movements between ranks, by one all_to_all per array."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from keras_ddl import ops
from keras_ddl.cut.values.layouts import Box, Layout
from keras_ddl.state import boxes
from keras_ddl.state.placements import NOTHING, Place, holding, replicated
from keras_ddl.state.plan import Holding, Move, plan


def exchange(
    moves: Sequence[Move],
    held: Sequence[Holding],
    wanted: Sequence[Holding],
    rank: int,
    values: Callable[[], Sequence[np.ndarray]],
    dtype: np.dtype,
    name: str,
) -> list[np.ndarray | int]:
    """Returns the arrays that this rank wants, as vectors; for an array that it already holds, the index in its `held`.

    COLLECTIVE if there are moves. All ranks pass the same plan.

    Args:
        held, wanted: what each rank holds and wants, as passed to `plan`.
        values: returns the arrays that this rank holds.
        name: name of the collective.
    Cost: memory for the boxes that this rank sends and receives, besides its old and new arrays.
    """
    needed = [each for each in wanted[rank] if each not in held[rank]]
    arrays: dict[Box, np.ndarray] = {}
    if needed or any(each.sender == rank for each in moves):
        for each, of_array in zip(values(), held[rank]):
            arrays.update(zip(of_array, boxes.split(each, of_array)))
    if moves:
        sent = [each for each in moves if each.sender == rank]
        to_each = [[each.box for each in sent if each.receiver == to] for to in range(len(held))]
        rows = boxes.joined([box for each in to_each for box in each], arrays, dtype)
        received, _ = ops.all_to_all(rows, [sum(map(boxes.size, each)) for each in to_each], name=name)
        coming = [each.box for each in sorted(moves, key=lambda each: each.sender) if each.receiver == rank]
        arrays.update(zip(coming, boxes.split(np.asarray(received), coming)))
    return [
        held[rank].index(each) if each in held[rank] else boxes.joined(each, arrays, dtype) for each in wanted[rank]
    ]


def gather(
    held: tuple[Holding, ...],
    shape: tuple[int, ...],
    hosts: tuple[int, ...],
    rank: int,
    values: Callable[[], Sequence[np.ndarray]],
    dtype: np.dtype,
    name: str,
    *,
    on_rank: int | None = None,
) -> np.ndarray | None:
    """Gathers an array whose parts are on different ranks. COLLECTIVE.

    Args:
        held, rank, values, name: as in `exchange`.
        hosts: the host of each rank.
        on_rank: None: all ranks get it.
    Returns: the whole array; None on a rank that does not get it.
    Cost: every host receives its missing boxes once; a rank that gets the array needs memory for two copies of it.
    """
    if on_rank is None and len(set(hosts)) > 1:  # first each rank gets a part of what its host is to have
        on_host = [Place(hosts[:each].count(host), hosts.count(host)) for each, host in enumerate(hosts)]
        parts = tuple(holding(Layout(shape, place.size), place) for place in on_host)
        (part,) = exchange(plan(held, parts, hosts), held, parts, rank, values, dtype, f"{name}/hosts")
        mine = [*values(), values()[part] if isinstance(part, int) else part]
        held, values = tuple((*each, *part) for each, part in zip(held, parts)), lambda: mine
    wanted = tuple(replicated(shape) if on_rank in (None, each) else NOTHING for each in range(len(held)))
    for array in exchange(plan(held, wanted, hosts), held, wanted, rank, values, dtype, name):
        return (values()[array] if isinstance(array, int) else array).reshape(shape)
    return None
