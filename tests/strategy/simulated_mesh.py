"""The mesh of a simulated job (simulated_job.py): who has which slices of a variable, as real ranks share them out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from keras_ddl import communicator
from keras_ddl.strategy.mesh import lost_slices, remeshing
from keras_ddl.strategy.mesh.lost_slices import LostSlices, Place
from strategy.simulated_job import Rank, this_rank


class Layout:
    """A mesh/layout.py `Layout`, of which the protocol needs the extents and names of positions."""

    def __init__(self, data_size: int, model_size: int) -> None:
        self.data_size, self.model_size = data_size, model_size

    def of_smaller_mesh(self, data_size: int, model_size: int, rank: int) -> Layout:
        return Layout(data_size, model_size)

    def position(self, rank: int) -> str:
        return str(divmod(rank, self.model_size))


class Share:
    """Entries of the slices that a rank has, by their numbers."""

    def __init__(self, place: Place, entries: dict[int, tuple[int, ...]], generation: int) -> None:
        self.place, self.entries, self.generation = place, entries, generation


def entries_of(place: Place, extent: int) -> dict[int, tuple[int, ...]]:
    """Returns what a rank with this place must have of a variable."""
    extent //= place.size
    return {each: tuple(range(each * extent, (each + 1) * extent)) for each in place.slices()}


class SlicedVariable:
    """Stands for a `LaidOutVariable`."""

    number, axis, name, first_value = 0, 0, "weight", None

    def __init__(self, job: Any, place: Place) -> None:
        self.job, self.next_share = job, None
        self.shape = [place.size**2]  # which one model rank less does not divide: of 2 x 2 ranks three form 1 x 2
        self.share = Share(place, entries_of(place, *self.shape), 0)

    def take_next_share(self, generation: int) -> None:
        if self.next_share is not None and self.next_share.generation == generation:
            self.share, self.next_share = self.next_share, None

    def check(self) -> None:
        """Checks that this rank has all entries of its slices."""
        assert self.share.entries == entries_of(self.share.place, *self.shape)


def begin(rank: Rank, strategy: Any, model_size: int) -> None:
    """Puts the ranks of a job on a mesh."""
    job, topology = strategy.job, communicator.topology()
    job.rank, job.slice_mirror_offset = topology.rank, int(topology.size == model_size)
    strategy.lost_slices = LostSlices(job, Layout(topology.size // model_size, model_size))  # type: ignore[arg-type]
    rank.variable = SlicedVariable(job, Place(topology.rank % model_size, model_size, job.slice_mirror_offset))


def _next_share(_: Any, slot: SlicedVariable, places: Any, next_places: Any, rank: int, generation: int) -> Any:
    """As `LostSlices._next_share`, for what is simulated."""
    given = communicator.all_gather_object(slot.share.entries if places[rank] is not None else {}, name="slices")
    known = {each for entries in given for slice_ in entries.values() for each in slice_}
    place = next_places[rank]
    if place is None:
        return None
    entries = entries_of(place, *slot.shape).items()
    return Share(
        place, {number: tuple(each for each in needed if each in known) for number, needed in entries}, generation
    )


@contextmanager
def simulated_mesh() -> Iterator[None]:
    """In it, `begin` may be called."""
    patches = [
        mock.patch.object(lost_slices, "LaidOutVariable", SlicedVariable),
        mock.patch.object(lost_slices, "all_slots", lambda: [this_rank().variable]),
        mock.patch.object(LostSlices, "_next_share", _next_share),
        mock.patch.object(remeshing.ranks, "connect", lambda *_: communicator.barrier(name="mesh")),
        mock.patch.object(remeshing.ranks, "warn_of_hosts", lambda *_: None),
        mock.patch.object(remeshing, "say", lambda *_: None),
    ]
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield
