"""Redistributes shards and slices over the remaining ranks and those that join (state/generations.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from keras_ddl import communicator
from keras_ddl.resilience import remeshing
from keras_ddl.state.generations import Generations
from keras_ddl.strategy.base import BaseStrategy
from keras_ddl.strategy.shards import undecided
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable, all_slots
from keras_ddl.topology import Topology


def share_out(
    generations: Generations,
    strategies: Sequence[BaseStrategy],
    renew: Callable[[Topology], None],
    *,
    is_new: bool,
    leaving: Mapping[int, str],
) -> str | None:
    """Gives ranks their parts of all distributed variables, lets ranks leave, and forms the next mesh. COLLECTIVE.

    Args:
        renew: lets the Strategies continue with the ranks of a topology. is_new: this rank has run no step yet.
        leaving: ranks that are to leave -> reasons.
    Returns: None, or on every rank a message that says why the job cannot continue.
    Raises: as `Generations.share_out` and `NextMesh.form`. TooFewError, on every rank: the mesh is too small.
    """
    meshes = [each for each in strategies if each.mesh_layout is not None]
    spread = meshes or [each for each in strategies if each.job.shards_from_elements is not None]
    others = [each for each in strategies if each not in meshes and each.job.shards_from_elements is not None]
    if len(meshes) > 1 or (meshes and others):
        return (
            "A job can continue without a lost rank only if at most one Strategy has a layout, and no other Strategy "
            f"has sharding. Received: {len(meshes)} of {len(strategies)} Strategies with a layout."
        )
    topology = communicator.topology()
    mesh = remeshing.NextMesh(meshes[0] if meshes else None, topology, leaving)
    if not spread:
        mesh.arrange([])
    else:
        leaves = _leaves_of(spread)
        if any(each.mesh_layout is not None and each.mesh_layout.is_to_choose for each in meshes):
            undecided.follow_choices(leaves, is_new=is_new)
        if lost := generations.share_out(leaves, mesh, topology.hosts, topology.rank, is_new=is_new):
            return lost
    mesh.form(renew)
    for each in generations.not_on_all:  # the other ranks will make these variables
        if each.initial is not None:
            each.begin_anew(each.initial(), each.job)
    return None


def room_for(waiting: int, leaving: int, strategies: Sequence[BaseStrategy]) -> int:
    """Returns how many of `waiting` ranks can join after `leaving` others have left; only ranks that enlarge a mesh."""
    for each in strategies:
        if each.mesh_layout is not None:
            staying = each.topology.size - leaving
            return max(0, remeshing.size_with(staying + waiting, each.mesh_layout, _leaves_of([each])) - staying)
    return waiting


def _leaves_of(strategies: Sequence[BaseStrategy]) -> list[ShardedVariable]:
    return [each for each in all_slots() if any(each.job is strategy.job for strategy in strategies)]
