"""Redistributes slices when ranks of a mesh are lost.

Every rank of a model position has its slice, one rank for each data rank. If there is only one data rank, another model
rank has a mirror of the slice (cut/mirrors.py). So a lost rank's slices still exist, unless all ranks with a slice are
lost together. Ranks exchange only the slices that they lack, and no rank has more than its share.

If another rank is lost meanwhile, the remaining ranks begin again. So a rank keeps its slices until every rank has made
its next ones, the next generation. If some ranks have already switched to theirs, all others have made theirs and
switch, too. A rank without a place in the new mesh sends what it has and gets nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from keras_ddl import communicator, ops
from keras_ddl.compat.names import plain_name
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import Slices
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.mesh.laid_out import LaidOutVariable, slice_variable
from keras_ddl.strategy.mesh.layout import Layout
from keras_ddl.strategy.mesh.survivors import NewMesh, largest_mesh
from keras_ddl.strategy.shards.sharded_slots import Share, all_slots
from keras_ddl.topology import Topology
from keras_ddl.topology.mirrors import mirror_offset

_NAME = "keras_ddl/slices"


class Place(NamedTuple):
    """What one rank has of each variable: slice `rank` of `size`, and the mirror of another slice if `offset` is not 0.

    The mirror of rank r's slice is on model rank (r + offset) % size.
    """

    rank: int
    size: int
    offset: int

    def slices(self) -> list[int]:
        """Returns the numbers of this rank's slices, its own first."""
        return [self.rank, (self.rank - self.offset) % self.size] if self.offset else [self.rank]


Places: TypeAlias = Sequence[Place | None]  # by rank; None: it has none, or of an earlier generation


class _Known(NamedTuple):
    """What a rank reports before slices are redistributed.

    Attributes:
        generation: of its slices. made: the mesh for which it has made the next slices, or None. stays: whether it is
            in that mesh.
        variables: number -> whether the variable can be made anew if not all ranks have it.
    """

    generation: int
    made: NewMesh | None
    stays: bool
    variables: dict[int, bool]


class _Next(NamedTuple):
    """The mesh that is to be formed. rank, place: of this process in it; None: it has no place."""

    mesh: NewMesh
    rank: int | None
    place: Place | None
    variables: list[LaidOutVariable]


class _Piece(NamedTuple):
    """A part of a slice to be sent: rows `first` to `end` of slice `old`, along the cut axis of the variable."""

    old: int
    first: int
    end: int
    giver: int


class LostSlices:
    """The slices of one job.

    Args: job: whose mesh has just been made. layout: over it.
    Attributes: layout: the layout by which slices are distributed now.
    """

    def __init__(self, job: Job, layout: Layout) -> None:
        self.job, self.layout = job, layout
        self._place: Place = _place_in(layout, job)
        self._generation = 0
        self._next: _Next | None = None
        self._others: list[LaidOutVariable] = []

    def share_out(self, topology: Topology, least: int) -> NewMesh | str:
        """Gives each rank that stays its slices of every variable. COLLECTIVE. All ranks have finished the same steps.

        Args: topology: of the remaining ranks. least: the least number of ranks in the mesh; with fewer, nothing is
            done.
        Returns: the mesh that the ranks are to form; or, on every rank, the reason why they cannot, and nothing has
            changed.
        Raises: RankLostError: another rank was lost; call it again with the remaining ranks.
        Cost: one all_to_all per variable, of the parts that move; memory for old and new slices together, as in a step
            before its commit.
        """
        variables = [each for each in all_slots() if isinstance(each, LaidOutVariable) and each.job is self.job]
        made = None if self._next is None else self._next.mesh
        stays = self._next is not None and self._next.place is not None
        mine = _Known(self._generation, made, stays, {each.number: each.first_value is not None for each in variables})
        everyone: list[_Known] = communicator.all_gather_object(mine, name=f"{_NAME}/generations")
        newest = max(each.generation for each in everyone)
        have_made = made is not None and all((each.generation, each.made) == (newest, made) for each in everyone)
        if have_made and any(each.stays for each in everyone):
            newest += 1  # those that may have taken them are lost
        self._take(newest)
        self._next = None
        numbers = set.intersection(*(set(each.variables) for each in everyone))
        if _is_only_on_some(everyone, numbers):
            return (
                "A variable that a layout cuts must exist on all ranks before a rank is lost. Received: variables that "
                "some ranks created in a step that other ranks had not begun. Build the model before fit."
            )
        of_all = [each for each in variables if each.number in numbers]
        self._others = [each for each in variables if each.number not in numbers]
        size = self.layout.data_size, self.layout.model_size
        own = (self._place, size) if self._generation == newest else None
        gathered = communicator.all_gather_object(own, name=f"{_NAME}/places")
        places = [None if each is None else each[0] for each in gathered]
        _, model_size = next(each[1] for each in gathered if each is not None)
        mesh = largest_mesh(model_size, topology.hosts, {each.shape[each.axis] for each in of_all})
        if mesh.size < least:
            return mesh
        lost = set(range(model_size)).difference(*(each.slices() for each in places if each is not None))
        if of_all and lost:
            return (
                "For each slice, at least one rank that holds it must remain: all ranks at one model position hold the "
                "same slice, or two neighbouring ranks if there is only one data rank. Received: all ranks with slice "
                f"{min(lost)} of {model_size} were lost together, and with them a part of "
                f"{plain_name(of_all[0].name)}."
            )
        next_places = places_in(mesh, topology.hosts)
        for each in of_all:
            each.next_share = self._next_share(each, places, next_places, topology.rank, newest + 1)
        number = mesh.staying.index(topology.rank) if topology.rank in mesh.staying else None
        self._next = _Next(mesh, number, next_places[topology.rank], of_all)
        communicator.barrier(name=f"{_NAME}/made")
        self._take(newest + 1)
        return mesh

    def begin_others_anew(self) -> None:
        """Gives first values to variables that not all ranks had made, after the mesh is formed."""
        for each in self._others:
            if each.first_value is not None:
                each.begin_anew(each.first_value(), self.job)

    def _take(self, generation: int) -> None:
        """Stores the slices that were made for a generation, unless this rank has stored them or has no place in the
        mesh."""
        if generation == self._generation or self._next is None:
            return
        mesh, rank, place, variables = self._next
        if rank is None or place is None:
            return
        self._generation, self._place = generation, place
        self.layout = self.layout.of_smaller_mesh(mesh.data_size, mesh.model_size, rank)
        for each in variables:
            each.take_next_share(generation)

    def _next_share(
        self, slot: LaidOutVariable, places: Places, next_places: Places, rank: int, generation: int
    ) -> Share | None:
        """Returns what this rank, `rank`, is to have of a variable, or None. COLLECTIVE."""
        size = next(each.size for each in next_places if each is not None)
        shape = tuple(slot.shape.as_list())
        slices = Slices(shape, size, slot.axis)
        old_extent = shape[slot.axis] // next(each.size for each in places if each is not None)
        needed = [
            {
                number: _pieces(number, slices.extent, old_extent, places, to)
                for number in _lacking(places, next_places, to)
            }
            for to in range(len(places))
        ]
        received = _exchanged(slot, needed, old_extent, rank) if any(needed) else {}
        place = next_places[rank]
        if place is None or place.size == 1 and not received:
            return None
        with tf.device(self.job.device):
            held = [
                slot.variable_with(number) if number not in received else slice_variable(slot, slices, received[number])
                for number in place.slices()
            ]
        return Share(slices, place.rank, place.offset, held[0], held[1] if place.offset else None, generation)


def _place_in(layout: Layout, job: Job) -> Place:
    return Place(job.rank % layout.model_size, layout.model_size, job.slice_mirror_offset)


def places_in(mesh: NewMesh, hosts: Sequence[int]) -> list[Place | None]:
    """Returns the place of each remaining rank in the mesh that they are to form. hosts: of these ranks."""
    offset = mirror_offset([hosts[each] for each in mesh.staying]) if mesh.data_size == 1 else 0
    places: list[Place | None] = [None] * len(hosts)
    for number, rank in enumerate(mesh.staying):
        places[rank] = Place(number % mesh.model_size, mesh.model_size, offset)
    return places


def _is_only_on_some(everyone: Sequence[_Known], numbers: set[int]) -> bool:
    """Whether a variable is lost because not all ranks have it. A variable with a lower number than one that all ranks
    have belongs to a deleted model that some ranks have not forgotten yet.
    """
    last = max(numbers, default=-1)
    return any(number > last and not is_slot for each in everyone for number, is_slot in each.variables.items())


def _lacking(places: Places, next_places: Places, rank: int) -> list[int]:
    """Returns the slices that a rank is to have but lacks."""
    old, new = places[rank], next_places[rank]
    if new is None:
        return []
    return [each for each in new.slices() if old is None or old.size != new.size or each not in old.slices()]


def _pieces(number: int, extent: int, old_extent: int, places: Places, to: int) -> list[_Piece]:
    """Returns the parts of a slice that rank `to` is to have, in order, and the ranks that send them."""
    first, end = number * extent, (number + 1) * extent
    olds = range(first // old_extent, (end - 1) // old_extent + 1)
    return [
        _Piece(old, max(first, old * old_extent), min(end, (old + 1) * old_extent), _giver(places, old, to))
        for old in olds
    ]


def _giver(places: Places, old: int, to: int) -> int:
    """Returns which rank sends a part of a slice to rank `to`: `to` itself if it has the part, else one of the others
    in turn."""
    having = [rank for rank, each in enumerate(places) if each is not None and old in each.slices()]
    return to if to in having else having[to % len(having)]


def _exchanged(
    slot: LaidOutVariable, needed: Sequence[dict[int, list[_Piece]]], old_extent: int, rank: int
) -> dict[int, tf.Tensor]:
    """Returns, by number, the slices that this rank, `rank`, lacks. COLLECTIVE. needed: by rank, slice -> pieces."""
    order = [slot.axis, *(each for each in range(slot.shape.rank) if each != slot.axis)]
    given = {old for slices in needed for pieces in slices.values() for old, *_, giver in pieces if giver == rank}
    rows_of = {old: tf.transpose(slot.variable_with(old).read_value(), order) for old in given}
    sent, splits = [], []
    for slices in needed:
        mine = [each for pieces in slices.values() for each in pieces if each.giver == rank]
        sent += [
            rows_of[each.old][each.first - each.old * old_extent : each.end - each.old * old_extent] for each in mine
        ]
        splits.append(sum(each.end - each.first for each in mine))
    shape = [slot.shape[axis] for axis in order[1:]]
    rows = tf.concat(sent, axis=0) if sent else tf.zeros([0, *shape], slot.dtype)
    received, _ = ops.all_to_all(rows, splits, name=f"{_NAME}/{slot.number}")
    to_come = sorted(
        (
            (each.giver, place, number, each)
            for number, pieces in needed[rank].items()
            for place, each in enumerate(pieces)
        ),
        key=lambda entry: entry[0],
    )
    parts = tf.split(received, [each.end - each.first for *_, each in to_come]) if to_come else []
    by_slice: dict[int, dict[int, tf.Tensor]] = {}
    for (_, place, number, _), part in zip(to_come, parts):
        by_slice.setdefault(number, {})[place] = part
    back = [order.index(axis) for axis in range(len(order))]
    return {
        number: tf.transpose(tf.concat([pieces[place] for place in sorted(pieces)], axis=0), back)
        for number, pieces in by_slice.items()
    }
