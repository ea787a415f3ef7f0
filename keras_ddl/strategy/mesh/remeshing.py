"""Continues with a smaller mesh when ranks are lost: redistributes slices, lets ranks without a place leave, and makes
the communicators of the new axes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from keras_ddl import communicator
from keras_ddl.errors import CollectiveError, RankLostError
from keras_ddl.strategy.mesh import ranks
from keras_ddl.strategy.why_it_ends import TooFewError

if TYPE_CHECKING:
    from keras_ddl.strategy.interface import StrategyInterface
    from keras_ddl.strategy.mesh.layout import Layout
    from keras_ddl.strategy.mesh.lost_slices import LostSlices
    from keras_ddl.strategy.mesh.survivors import NewMesh
    from keras_ddl.topology import Topology


def layout_of(strategies: Sequence[StrategyInterface]) -> Layout | None:
    """Returns the layout over the mesh that continues, or None."""
    return next((each.lost_slices.layout for each in strategies if each.lost_slices is not None), None)


def why_not(strategies: Sequence[StrategyInterface]) -> str | None:
    """Returns why a job with these Strategies cannot continue; None: it can. Equal on all ranks."""
    count = sum(each.lost_slices is not None for each in strategies)
    if count == 0 or count == 1 and all(each.job.shards_from_elements is None for each in strategies):
        return None
    return (
        "A job can continue without a lost rank only if at most one Strategy has a layout, and no other has sharding. "
        f"Received: {count} of {len(strategies)} Strategies with a layout."
    )


def share_out(strategies: Sequence[StrategyInterface], renew: Callable[[Topology], None]) -> str | None:
    """Redistributes the slices of a mesh, if there is one, and forms the next mesh. COLLECTIVE over the remaining
    ranks.

    Args: renew: lets the Strategies continue with the ranks of a topology.
    Returns: None, or a message that says what is lost.
    Raises: RankLostError: another rank was lost; call it again when the remaining ranks have met. TooFewError.
        SystemExit: this rank has no place in the new mesh.
    """
    slices = next((each.lost_slices for each in strategies if each.lost_slices is not None), None)
    if slices is None:
        return None
    topology = communicator.topology()
    # The launcher has counted those that have no place in a mesh, too, and those that had done their part.
    least = min(communicator.min_ranks(), topology.size)
    mesh = slices.share_out(topology, least)
    if isinstance(mesh, str):
        return mesh
    if mesh.size < least:
        raise TooFewError(
            "fit can continue without a lost rank only if the new mesh has at least MIN ranks (-np MIN:MAX). Received: "
            f"a mesh of {mesh.data_size} x {mesh.model_size}, but at least {least} ranks are needed (rank "
            f"{topology.rank}). Restart the job (keras-ddl run --restarts 1), or choose a smaller MIN."
        )
    _form(slices, mesh, topology, renew)
    return None


def _form(slices: LostSlices, mesh: NewMesh, topology: Topology, renew: Callable[[Topology], None]) -> None:
    """Forms a mesh whose slices are already distributed. COLLECTIVE."""
    if len(mesh.staying) < topology.size:
        if topology.rank not in mesh.staying:
            renew(communicator.leave(f"a mesh of {mesh.data_size} x {mesh.model_size} has no place for it"))
            raise RankLostError("All ranks that were to form the mesh are lost.")
        topology = communicator.regroup_with()
        renew(topology)
        if topology.size != mesh.size:
            raise RankLostError("Another rank was lost while ranks formed a mesh.")
    layout = slices.layout
    try:
        slices.job.mesh = ranks.connect(layout, topology)
    except CollectiveError as error:  # the engine does not say who is gone
        raise RankLostError(str(error)) from None
    slices.begin_others_anew()
    if topology.rank == 0:
        ranks.warn_of_hosts(layout, topology)


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
