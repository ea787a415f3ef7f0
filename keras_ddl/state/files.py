"""Files as holders of state: which boxes of a variable each rank writes to a checkpoint, and which it reads from one.

Ranks that hold the same box write it once; a rank reads all that it holds. Rank 0 writes and reads for ranks that
cannot reach the files, and writes variables that files can hold in one piece only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from keras_ddl import communicator
from keras_ddl.communicator.first_rank import is_first_rank, on_first_rank
from keras_ddl.errors import CheckpointError, of_other_rank
from keras_ddl.files import durable
from keras_ddl.state import boxes
from keras_ddl.state.exchange import exchange
from keras_ddl.state.generations import Leaf
from keras_ddl.state.placements import NOTHING, replicated
from keras_ddl.state.plan import Holding, plan

if TYPE_CHECKING:
    from keras_ddl.cut.values.layouts import Box

_NAME = "keras_ddl/files"


def reaching(directory: Path) -> tuple[bool, ...]:
    """Returns whether each rank can write into a folder that rank 0 makes in `directory`. COLLECTIVE."""

    def make() -> str:
        try:
            return durable.make_staging(directory).name
        except OSError as error:
            raise CheckpointError(durable.explain(error, "A checkpoint", directory)) from error

    folder = directory / on_first_rank(make, "Checkpoint/reach")
    reached = communicator.all_gather_object(os.access(folder, os.W_OK | os.X_OK), name="Checkpoint/reached")
    if is_first_rank():
        with contextlib.suppress(OSError):
            folder.rmdir()
    return (True, *reached[1:])


def at_files(
    holdings: tuple[Holding, ...], shape: tuple[int, ...], reached: Sequence[bool], *, in_boxes: bool = True
) -> tuple[Holding, ...]:
    """Returns which arrays each rank writes or reads, so that together they have the complete variable.

    Args:
        holdings: what each rank holds.
        reached: which ranks reach the files; rank 0 does.
        in_boxes: whether files can hold boxes of the variable.
    """
    if not in_boxes:
        return (replicated(shape), *[NOTHING] * (len(holdings) - 1))
    near = [each if is_near else NOTHING for each, is_near in zip(holdings, reached, strict=True)]
    if not all(reached) and (lacking := boxes.without_all(replicated(shape)[0], chain(*chain(*near)))):
        near[0] = (*near[0], tuple(lacking))
    return tuple(near)


def boxes_to_write(writers: tuple[Holding, ...], shape: tuple[int, ...]) -> list[tuple[Box, ...]]:
    """Returns the boxes that each rank writes, given the arrays that it can write: each entry is written once."""
    file = len(writers)
    moves = plan((*writers, NOTHING), (*[NOTHING] * file, replicated(shape)), (0,) * (file + 1))
    return [tuple(each.box for each in moves if each.sender == rank) for rank in range(file)]


def write(leaf: Leaf, reached: Sequence[bool], *, in_boxes: bool) -> tuple[tuple[Box, ...], np.ndarray | int]:
    """Returns this rank's boxes of a variable, and their entries, one box after the other.

    If one of the arrays that the rank holds has these entries, returns its index instead of the entries. COLLECTIVE if
    rank 0 writes for other ranks.
    """
    place, shape, held = communicator.topology(), leaf.full_shape, leaf.held_by_all()
    own = tuple(each[:1] for each in held)  # not mirrors
    writers = at_files(own, shape, reached, in_boxes=in_boxes)
    mine = boxes_to_write(writers, shape)[place.rank]
    name = f"{_NAME}/{leaf.number}/written"
    arrays = exchange(plan(held, writers, place.hosts), held, writers, place.rank, leaf.values, leaf.numpy_dtype, name)
    if mine in writers[place.rank]:
        return mine, arrays[writers[place.rank].index(mine)]
    known: dict[Box, np.ndarray] = {}
    for of_array, array in zip(writers[place.rank], arrays):
        known.update(zip(of_array, boxes.split(leaf.values()[array] if isinstance(array, int) else array, of_array)))
    return mine, boxes.joined(mine, known, leaf.numpy_dtype)


def read(
    leaves: Sequence[Leaf],
    read_boxes: Callable[[int, Sequence[Box]], np.ndarray],
    reached: Sequence[bool],
) -> None:
    """Restores each rank's parts of variables from files. COLLECTIVE.

    Args: read_boxes: returns, of the variable at a place in `leaves`, the entries of boxes, one box after the other.
    Raises: CheckpointError, on every rank: a rank could not read.
    Cost: if some rank does not reach the files, rank 0 reads what these ranks hold of one variable at a time.
    """
    problem: str | None = None
    for number, leaf in enumerate(leaves):
        place, held = communicator.topology(), leaf.held_by_all()
        readers = at_files(held, leaf.full_shape, reached)
        moves = plan(readers, held, place.hosts)
        arrays: list[np.ndarray] = []
        try:
            if problem is None:
                arrays = [read_boxes(number, each) for each in readers[place.rank]]
        except CheckpointError as error:  # the others wait for what this rank sends
            problem = str(error)
        if moves:
            _raise_on_all(problem)
        if problem is None:
            name = f"{_NAME}/{leaf.number}/read"
            received = exchange(moves, readers, held, place.rank, arrays.copy, leaf.numpy_dtype, name)
            leaf.restore([arrays[each] if isinstance(each, int) else each for each in received])
    _raise_on_all(problem)


def _raise_on_all(problem: str | None) -> None:
    problems = communicator.all_gather_object(problem, name=f"{_NAME}/problems")
    failed = next((rank for rank, each in enumerate(problems) if each is not None), None)
    if failed is not None:
        error = CheckpointError(f"rank {failed}: {problems[failed]}")
        raise error if failed == communicator.rank() else of_other_rank(error, failed)
