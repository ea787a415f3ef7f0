"""The mesh of a simulated job (simulated_job.py): who has which slices of a variable, as real ranks share them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from simulated_job import Rank, this_rank

from keras_ddl import communicator
from keras_ddl.cut.values.layouts import Box, Slices
from keras_ddl.resilience import remeshing, sharing_out
from keras_ddl.state import generations
from keras_ddl.state.placements import MeshPlace, holding, place_on_mesh
from keras_ddl.state.plan import Holding, Move


class Layout:
    """A mesh/layout.py `VariableLayout`, of which the protocol needs the extents and names of positions."""

    is_to_choose = False

    def __init__(self, data_size: int, model_size: int, wanted_model_size: int) -> None:
        self.data_size, self.model_size, self.wanted_model_size = data_size, model_size, wanted_model_size

    def resized(self, data_size: int, model_size: int, rank: int) -> Layout:
        return Layout(data_size, model_size, self.wanted_model_size)

    def position(self, rank: int) -> str:
        return str(divmod(rank, self.model_size))


def _entries(box: Box) -> set[int]:
    ((first, extent),) = box
    return set(range(first, first + extent))


class SlicedVariable:
    """Stands for a `LaidOutVariable`: it has entries of slices, a set for each."""

    number, axis, name, numpy_dtype, can_begin_anew = 0, 0, "weight", None, False

    def __init__(self, job: Any, place: MeshPlace) -> None:
        self.job = job
        self.shape = [place.model.size**2]  # which one model rank less does not divide: of 2 x 2 ranks three form 1 x 2
        self._place, self._next = place, None
        self._values = [_entries(box) for (box,) in self.held()]

    def held(self) -> Holding:
        return self.wanted(self._place)

    def wanted(self, place: MeshPlace | None) -> Holding:
        return () if place is None else holding(Slices(tuple(self.shape), place.model.size, 0), place.model)

    def values(self) -> list[set[int]]:
        return self._values

    def make_next(self, place: MeshPlace, arrays: Sequence[Any], generation: int) -> None:
        self._next = place, [self._values[each] if isinstance(each, int) else each for each in arrays]

    def take_next(self) -> None:
        if self._next is not None:
            (self._place, self._values), self._next = self._next, None

    def forget_assignments(self) -> None:
        """It has none."""

    def check(self) -> None:
        """Checks that this rank has all entries of its slices."""
        assert self._values == [_entries(box) for (box,) in self.held()]


def _exchange(
    moves: Sequence[Move],
    held: Sequence[Holding],
    wanted: Sequence[Holding],
    rank: int,
    values: Callable[[], list[set[int]]],
    _: Any,
    name: str,
) -> list[Any]:
    """As `exchange`, of sets of entries."""
    mine = set().union(*values()) if held[rank] else set()
    given = communicator.all_gather_object(sorted(mine), name=name) if moves else []
    for each in moves:
        if each.receiver == rank:
            mine |= _entries(each.box) & set(given[each.sender])
    return [
        held[rank].index(each) if each in held[rank] else set().union(*map(_entries, each)) & mine
        for each in wanted[rank]
    ]


def begin(rank: Rank, strategy: Any, model_size: int) -> None:
    """Puts the ranks of a job on a mesh."""
    job, topology = strategy.job, communicator.topology()
    strategy.mesh_layout = Layout(topology.size // model_size, model_size, model_size)
    rank.variable = SlicedVariable(job, place_on_mesh(topology.rank, topology.hosts, model_size))


@contextmanager
def simulated_mesh() -> Iterator[None]:
    """In it, `begin` may be called."""
    patches = [
        mock.patch.object(sharing_out, "all_slots", lambda: [this_rank().variable]),
        mock.patch.object(generations, "exchange", _exchange),
        mock.patch.object(remeshing.ranks, "connect", lambda *_: communicator.barrier(name="mesh")),
        mock.patch.object(remeshing.ranks, "warn_of_hosts", lambda *_: None),
        mock.patch.object(remeshing, "say", lambda *_: None),
    ]
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield
