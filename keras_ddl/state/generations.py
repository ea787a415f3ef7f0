"""Redistributes variables whose parts are on different ranks, when ranks are lost or join.

Each rank makes its new parts, the next generation, and keeps the old parts until every rank has made its new parts.
Then all ranks switch. So if another rank is lost in the meantime, the remaining ranks can begin again. If some ranks
have already switched by then, all others have made their new parts and also switch.

A rank that joins holds nothing at first. A rank without a place in the next generation sends its parts and receives
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from keras_ddl import communicator
from keras_ddl.compat.names import plain_name
from keras_ddl.errors import CollectiveError
from keras_ddl.state.exchange import exchange
from keras_ddl.state.placements import NOTHING, MeshPlace
from keras_ddl.state.plan import Holding, MissingBoxError, plan

_NAME = "keras_ddl/share_out"


class Leaf(Protocol):
    """A variable whose parts are on different ranks.

    Attributes:
        number: identifies it on all ranks.
        can_begin_anew: all ranks can make the same first value again.
    """

    number: int
    name: str

    @property
    def can_begin_anew(self) -> bool: ...
    @property
    def full_shape(self) -> tuple[int, ...]: ...
    @property
    def numpy_dtype(self) -> np.dtype[Any]: ...
    def held(self) -> Holding:
        """Returns this rank's holding: its own part first, then maybe the mirror of another rank's part."""

    def held_by_all(self) -> tuple[Holding, ...]:
        """Returns each rank's holdings."""

    def values(self) -> Sequence[np.ndarray]:
        """Returns the arrays of `held`."""

    def restore(self, arrays: Sequence[np.ndarray]) -> None:
        """Stores the arrays of `held`, each as a vector."""

    def wanted(self, place: MeshPlace | None) -> Holding: ...
    def make_next(self, place: MeshPlace, arrays: Sequence[np.ndarray | int], generation: int) -> None:
        """Makes the parts that `take_next` stores. `arrays`: vectors, or indices of arrays that are already held."""

    def take_next(self) -> None: ...
    def forget_assignments(self) -> None:
        """Forgets the record of assignments, because joining ranks have not made them."""


class Arrangement(Protocol):
    """Chooses the place of each rank."""

    def arrange(self, leaves: Sequence[Leaf]) -> Sequence[MeshPlace | None]:
        """Returns each rank's place. All ranks return or raise the same."""

    def take(self) -> None:
        """Puts the places into effect."""


class _Known(NamedTuple):
    """A rank's report before parts are redistributed.

    Attributes:
        generation: the generation that the rank holds; None: it holds nothing.
        made: the generation that it has made and not yet stored; None: none.
        stays: whether it has a place in this generation.
        leaves: number -> `can_begin_anew`.
        is_new: whether it has run no step yet.
    """

    generation: int | None
    made: int | None
    stays: bool
    leaves: dict[int, bool]
    is_new: bool


class _Next(NamedTuple):
    """The next generation, as this rank has made it."""

    generation: int
    stays: bool
    leaves: list[Leaf]
    arrangement: Arrangement


class Generations:
    """The generation of a job's leaves that this rank holds, and the next one while it is being made.

    Args: holds_nothing: this rank is to join the others.
    Attributes: not_on_all: leaves that some ranks lacked when parts were last redistributed.
    """

    def __init__(self, *, holds_nothing: bool = False) -> None:
        self._generation: int | None = None if holds_nothing else 0
        self._next: _Next | None = None
        self.not_on_all: list[Any] = []

    def share_out(
        self,
        leaves: Sequence[Leaf],
        arrangement: Arrangement,
        hosts: Sequence[int],
        rank: int,
        *,
        is_new: bool = False,
    ) -> str | None:
        """Gives each rank its parts of every leaf. COLLECTIVE. All ranks have finished the same steps.

        Args:
            hosts: the host of each rank.
            is_new: this rank has run no step yet.
        Returns: None; or, on every rank, why the job cannot continue; then no part has changed.
        Raises: RankLostError: another rank was lost; call it again with the remaining ranks. CollectiveError, in a rank
            that joins: it lacks leaves that the others have.
        Cost: one all_to_all per leaf that moves, with as few bytes as possible; memory for old and new parts together.
        """
        made, stays = (None, False) if self._next is None else (self._next.generation, self._next.stays)
        mine = _Known(self._generation, made, stays, {each.number: each.can_begin_anew for each in leaves}, is_new)
        everyone: list[_Known] = communicator.all_gather_object(mine, name=f"{_NAME}/generations")
        newest = max(each.generation for each in everyone if each.generation is not None)
        # All remaining ranks have made the next generation. Ranks that may have switched to it are lost. Ranks that
        # have made it met all others, which held nothing, in the second exchange.
        if all(each.made == newest + 1 for each in everyone) and any(each.stays for each in everyone):
            newest += 1
        self._take(newest)
        self._next = None
        others_leaves = [each.leaves for each in everyone if not each.is_new]
        numbers = set.intersection(*map(set, others_leaves))
        if not numbers <= mine.leaves.keys():
            raise CollectiveError(
                "A rank that joins a running job must make the same optimizers as the other ranks. Received: "
                f"optimizers without {len(numbers - mine.leaves.keys())} of the variables that the other ranks keep in "
                "shards. Let fit build the optimizers, or call optimizer.build on all ranks."
            )
        if _is_only_on_some(others_leaves, numbers):
            return (
                "A variable that is spread over the ranks must exist on all of them before a rank is lost. Received: "
                "variables that some ranks created in a step that other ranks had not begun. Build the model before "
                "fit."
            )
        common_leaves = [each for each in leaves if each.number in numbers]
        self.not_on_all = [each for each in leaves if each.number not in numbers]
        if any(each.is_new for each in everyone):
            for leaf in leaves:
                leaf.forget_assignments()
        own = None
        if self._generation == newest:
            own = {each.number: each.held() for each in common_leaves}
        gathered = communicator.all_gather_object(own, name=f"{_NAME}/held")
        places = arrangement.arrange(common_leaves)
        planned = []
        for leaf in common_leaves:
            held = tuple(NOTHING if each is None else each[leaf.number] for each in gathered)
            wanted = tuple(map(leaf.wanted, places))
            try:
                planned.append((leaf, plan(held, wanted, tuple(hosts)), held, wanted))
            except MissingBoxError:
                return (
                    "Each part of a variable that is spread over the ranks is on at least two of them, one of which "
                    "must remain. Received: all ranks that held the same part were lost together, and with them a part "
                    f"of {plain_name(leaf.name)}."
                )
        place = places[rank]
        for leaf, moves, held, wanted in planned:
            name = f"{_NAME}/{leaf.number}"
            arrays = exchange(moves, held, wanted, rank, leaf.values, leaf.numpy_dtype, name)
            if place is not None:
                leaf.make_next(place, arrays, newest + 1)
        self._next = _Next(newest + 1, place is not None, common_leaves, arrangement)
        communicator.barrier(name=f"{_NAME}/made")
        self._take(newest + 1)
        return None

    def _take(self, generation: int) -> None:
        """Stores the parts that were made for a generation, unless this rank has no place in it."""
        if self._next is None or self._next.generation != generation or not self._next.stays:
            return
        self._generation = generation
        self._next.arrangement.take()
        for leaf in self._next.leaves:
            leaf.take_next()
        self._next = None


def _is_only_on_some(leaves_by_rank: Sequence[dict[int, bool]], numbers: set[int]) -> bool:
    """Whether a leaf is lost because not all ranks have it.

    A leaf with a lower number than a leaf that all ranks have belongs to a deleted model, which some ranks have not
    forgotten yet.
    """
    last = max(numbers, default=-1)
    return any(number > last and not begins for each in leaves_by_rank for number, begins in each.items())
