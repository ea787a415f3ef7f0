"""Continues with another mesh when ranks are lost or join.

Slices are redistributed, ranks without a place leave, and the others make the communicators of the new axes.

Every rank of a model position has its slice, one rank for each data rank. If there is only one data rank, another model
rank has a mirror of the slice (cut/shards/mirrors.py). Shards of a slice, of optimizer variables, have mirrors on
another data rank. So the state of a lost rank still exists, unless all ranks that hold it are lost together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_ddl import communicator
from keras_ddl.errors import CollectiveError, RankLostError
from keras_ddl.resilience.survivors import NewMesh, largest_mesh
from keras_ddl.resilience.why_it_ends import TooFewError
from keras_ddl.state.placements import MeshPlace, place_on_mesh
from keras_ddl.strategy.base import BaseStrategy
from keras_ddl.strategy.mesh import ranks
from keras_ddl.strategy.mesh.layout import VariableLayout
from keras_ddl.topology import Topology


def layout_of(strategies: Sequence[BaseStrategy]) -> VariableLayout | None:
    """Returns the layout over the mesh that continues, or None."""
    return next((each.mesh_layout for each in strategies if each.mesh_layout is not None), None)


class NextMesh:
    """The mesh that the ranks of a topology are to form. Without a layout all ranks are along its batch axis.

    Args:
        strategy: the Strategy that has a layout, if any. leaving: ranks that are to leave -> reasons. They stay if
            otherwise too few ranks would be left for the job to continue.
    """

    def __init__(self, strategy: BaseStrategy | None, topology: Topology, leaving: Mapping[int, str]) -> None:
        self._strategy, self._topology, self._leaving = strategy, topology, leaving
        self._mesh: NewMesh | None = None

    def arrange(self, leaves: Sequence[Any]) -> list[MeshPlace | None]:
        hosts, size = self._topology.hosts, self._topology.size
        # The launcher's count includes ranks that have no place in a mesh, and ranks that had done their part.
        least = min(communicator.min_ranks(), size)
        mesh = self._largest([rank for rank in range(size) if rank not in self._leaving], leaves)
        if mesh.size < max(least, 1):
            mesh = self._largest(range(size), leaves)
        if mesh.size < least:
            raise TooFewError(
                "fit can continue without a lost rank only if the new mesh has at least MIN ranks (-np MIN:MAX). "
                f"Received: a mesh of {mesh.data_size} x {mesh.model_size}, but at least {least} ranks are needed "
                f"(rank {self._topology.rank}). Restart the job (keras-ddl run --restarts 1), or choose a smaller MIN."
            )
        self._mesh = mesh
        return places_in(mesh, hosts)

    def _largest(self, ranks: Sequence[int], leaves: Sequence[Any]) -> NewMesh:
        if not ranks:
            return NewMesh(0, 0, ())
        hosts = [self._topology.hosts[rank] for rank in ranks]
        layout = None if self._strategy is None else self._strategy.mesh_layout
        mesh = largest_mesh(1 if layout is None else layout.wanted_model_size, hosts, _extents(leaves))
        return mesh._replace(staying=tuple(ranks[each] for each in mesh.staying))

    def take(self) -> None:
        mesh = self._mesh
        assert mesh is not None
        if self._strategy is not None and self._strategy.mesh_layout is not None:
            rank = mesh.staying.index(self._topology.rank)
            self._strategy.mesh_layout = self._strategy.mesh_layout.resized(mesh.data_size, mesh.model_size, rank)

    def form(self, renew: Callable[[Topology], None]) -> None:
        """Forms the mesh, when its slices are already distributed. COLLECTIVE.

        Args: renew: lets the Strategies continue with the ranks of a topology.
        Raises: RankLostError: another rank was lost; call it again when the remaining ranks have met. SystemExit: this
            rank has no place in the new mesh.
        """
        mesh, topology, strategy = self._mesh, self._topology, self._strategy
        assert mesh is not None
        if len(mesh.staying) < topology.size:
            if topology.rank not in mesh.staying:
                no_place = f"a mesh of {mesh.data_size} x {mesh.model_size} has no place for it"
                renew(communicator.leave(self._leaving.get(topology.rank, no_place)))
                raise RankLostError("All ranks that were to continue are lost.")
            topology = communicator.regroup_with()
            renew(topology)
            if topology.size != mesh.size:
                raise RankLostError("Another rank was lost while ranks left.")
        if strategy is None or strategy.mesh_layout is None:
            return
        try:
            strategy.job.mesh = ranks.connect(strategy.mesh_layout, topology)
        except CollectiveError as error:  # the engine does not name the lost ranks
            raise RankLostError(str(error)) from None
        if topology.rank == 0:
            ranks.warn_of_hosts(strategy.mesh_layout, topology)


def size_with(ranks: int, layout: VariableLayout, leaves: Sequence[Any]) -> int:
    """Returns the number of ranks in the largest mesh that `ranks` ranks can form."""
    return largest_mesh(layout.wanted_model_size, [0] * ranks, _extents(leaves)).size


def _extents(leaves: Sequence[Any]) -> set[int]:
    return {each.shape[each.axis] for each in leaves if each.axis is not None}


def places_in(mesh: NewMesh, hosts: Sequence[int]) -> list[MeshPlace | None]:
    """Returns the place of each rank in the mesh that the ranks are to form. hosts: each rank's host."""
    staying = [hosts[each] for each in mesh.staying]
    places: list[MeshPlace | None] = [None] * len(hosts)
    for number, rank in enumerate(mesh.staying):
        places[rank] = place_on_mesh(number, staying, mesh.model_size)
    return places


def say(before: VariableLayout | None, lost: Sequence[int], after: VariableLayout | None) -> None:
    """Prints on rank 0 which mesh continues. lost: ranks of the mesh before; none: others have joined it."""
    if before is None or after is None or communicator.rank() != 0:
        return
    shapes = [f"{each.data_size} x {each.model_size}" for each in (before, after)]
    if lost:
        names = ", ".join(f"rank {rank} ({before.position(rank)})" for rank in lost)
        text = f"the mesh {shapes[0]} has lost {names}; a mesh of {shapes[1]} continues."
    elif shapes[0] != shapes[1]:
        text = f"the mesh {shapes[0]} has become a mesh of {shapes[1]}."
    else:
        return
    print(f"keras_ddl: {text}", file=sys.stderr, flush=True)
