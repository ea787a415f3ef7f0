"""Carries out a planned movement between ranks, by one all_to_all of each array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keras_ddl import ops
from keras_ddl.state import boxes
from keras_ddl.state.plan import Holding, Move

if TYPE_CHECKING:
    from keras_ddl.cut.flat_shards import Box


def exchange(
    moves: Sequence[Move],
    held: Sequence[Holding],
    wanted: Sequence[Holding],
    rank: int,
    values: Callable[[], Sequence[np.ndarray]],
    dtype: np.dtype,
    name: str,
) -> list[np.ndarray | int]:
    """Returns the arrays that this rank wants, as vectors; of one that it holds already its place among those.

    COLLECTIVE, where there are moves. All ranks pass the same plan.

    Args:
        held, wanted: of each rank, as planned. rank: of this process.
        values: returns the arrays that this rank holds. name: of the collective.
    Cost: the boxes that this rank sends and those that it receives, beside its arrays from before and the next ones.
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
