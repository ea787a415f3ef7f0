"""Redistributes shards and slices over the remaining ranks and those that join (state/generations.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keras_ddl import communicator
from keras_ddl.resilience import remeshing
from keras_ddl.state.generations import Generations
from keras_ddl.strategy.base import BaseStrategy
from keras_ddl.strategy.shards.sharded_slots import all_slots
from keras_ddl.topology import Topology


def share_out(
    generations: Generations,
    strategies: Sequence[BaseStrategy],
    renew: Callable[[Topology], None],
    *,
    is_new: bool,
) -> str | None:
    """Gives each rank its parts of everything that Strategies distribute, and forms the next mesh. COLLECTIVE.

    Args:
        renew: lets the Strategies continue with the ranks of a topology. is_new: this rank has run no step yet.
    Returns: None; or, on every rank, a message that says why the job cannot continue.
    Raises: as `Generations.share_out` and `SmallerMesh.form`. TooFewError, on every rank: the mesh is too small.
    """
    meshes = [each for each in strategies if each.mesh_layout is not None]
    spread = meshes or [each for each in strategies if each.job.shards_from_elements is not None]
    if not spread:
        return None
    if len(meshes) > 1 or (meshes and any(each.job.shards_from_elements is not None for each in strategies)):
        return (
            "A job can continue without a lost rank only if at most one Strategy has a layout, and no other has "
            f"sharding. Received: {len(meshes)} of {len(strategies)} Strategies with a layout."
        )
    topology, jobs = communicator.topology(), [each.job for each in spread]
    leaves = [each for each in all_slots() if any(each.job is job for job in jobs)]
    mesh = remeshing.SmallerMesh(meshes[0], topology) if meshes else None
    lost = generations.share_out(leaves, mesh, topology.hosts, topology.rank, is_new=is_new)
    if lost is not None:
        return lost
    if mesh is not None:
        mesh.form(renew)
    for each in generations.not_on_all:  # the others will make them
        if each.initial is not None:
            each.begin_anew(each.initial(), each.job)
    return None
