"""Continues with a smaller mesh when ranks are lost: slices are redistributed, ranks without a place leave, and the
others make the communicators of the new axes.

Every rank of a model position has its slice, one rank for each data rank. If there is only one data rank, another model
rank has a mirror of the slice (cut/shards/mirrors.py). So a lost rank's slices still exist, unless all ranks with a
slice are lost together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from keras_ddl import communicator
from keras_ddl.errors import CollectiveError, RankLostError
from keras_ddl.resilience.survivors import NewMesh, largest_mesh
from keras_ddl.resilience.why_it_ends import TooFewError
from keras_ddl.state.placements import Place
from keras_ddl.strategy.mesh import ranks
from keras_ddl.topology.mirrors import mirror_offset

if TYPE_CHECKING:
    from keras_ddl.strategy.base import BaseStrategy
    from keras_ddl.strategy.mesh.layout import Layout
    from keras_ddl.topology import Topology


def layout_of(strategies: Sequence[BaseStrategy]) -> Layout | None:
    """Returns the layout over the mesh that continues, or None."""
    return next((each.mesh_layout for each in strategies if each.mesh_layout is not None), None)


class SmallerMesh:
    """The mesh that the ranks of a topology, the remaining ones, are to form."""

    def __init__(self, strategy: BaseStrategy, topology: Topology) -> None:
        self._strategy, self._topology = strategy, topology
        self._mesh: NewMesh | None = None

    def describe(self) -> int:
        """Returns the number of model ranks of the mesh that this rank has its slices for."""
        assert self._strategy.mesh_layout is not None
        return self._strategy.mesh_layout.model_size

    def arrange(self, described: int, leaves: Sequence[Any]) -> list[Place | None]:
        topology = self._topology
        mesh = self._mesh = largest_mesh(described, topology.hosts, {each.shape[each.axis] for each in leaves})
        # The launcher has counted those that have no place in a mesh, too, and those that had done their part.
        least = min(communicator.min_ranks(), topology.size)
        if mesh.size < least:
            raise TooFewError(
                "fit can continue without a lost rank only if the new mesh has at least MIN ranks (-np MIN:MAX). "
                f"Received: a mesh of {mesh.data_size} x {mesh.model_size}, but at least {least} ranks are needed "
                f"(rank {topology.rank}). Restart the job (keras-ddl run --restarts 1), or choose a smaller MIN."
            )
        return places_in(mesh, topology.hosts)

    def take(self) -> None:
        mesh, layout = self._mesh, self._strategy.mesh_layout
        assert mesh is not None and layout is not None
        rank = mesh.staying.index(self._topology.rank)
        self._strategy.mesh_layout = layout.of_smaller_mesh(mesh.data_size, mesh.model_size, rank)

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
                renew(communicator.leave(f"a mesh of {mesh.data_size} x {mesh.model_size} has no place for it"))
                raise RankLostError("All ranks that were to form the mesh are lost.")
            topology = communicator.regroup_with()
            renew(topology)
            if topology.size != mesh.size:
                raise RankLostError("Another rank was lost while ranks formed a mesh.")
        assert strategy.mesh_layout is not None
        try:
            strategy.job.mesh = ranks.connect(strategy.mesh_layout, topology)
        except CollectiveError as error:  # the engine does not say who is gone
            raise RankLostError(str(error)) from None
        if topology.rank == 0:
            ranks.warn_of_hosts(strategy.mesh_layout, topology)


def places_in(mesh: NewMesh, hosts: Sequence[int]) -> list[Place | None]:
    """Returns the place of each remaining rank in the mesh that they are to form. hosts: of these ranks."""
    offset = mirror_offset([hosts[each] for each in mesh.staying]) if mesh.data_size == 1 else 0
    places: list[Place | None] = [None] * len(hosts)
    for number, rank in enumerate(mesh.staying):
        places[rank] = Place(number % mesh.model_size, mesh.model_size, offset)
    return places


def say(before: Layout | None, lost: Sequence[int], after: Layout | None) -> None:
    """Prints on rank 0 which mesh continues. lost: ranks of the mesh before."""
    if before is not None and after is not None and communicator.rank() == 0:
        names = ", ".join(f"rank {rank} ({before.position(rank)})" for rank in lost)
        print(
            f"keras_ddl: the mesh {before.data_size} x {before.model_size} has lost {names}; a mesh of "
            f"{after.data_size} x {after.model_size} continues.",
            file=sys.stderr,
            flush=True,
        )
