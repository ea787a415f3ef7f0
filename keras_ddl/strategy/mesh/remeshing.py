"""Goes on with a smaller mesh when ranks are lost: slices are shared out, ranks without a place in it leave, and the
others make the communicators of its axes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from keras_ddl import communicator
from keras_ddl.errors import CollectiveError, RankLostError
from keras_ddl.strategy.mesh import ranks

if TYPE_CHECKING:
    from keras_ddl.strategy.interface import StrategyInterface
    from keras_ddl.strategy.mesh.layout import Layout
    from keras_ddl.strategy.mesh.survivors import NewMesh
    from keras_ddl.topology import Topology


def of_layout(strategies: Sequence[StrategyInterface]) -> StrategyInterface | None:
    """Returns the Strategy with a layout_map; None: none has one."""
    return next((each for each in strategies if each.job.slices is not None), None)


def why_not(strategies: Sequence[StrategyInterface]) -> str | None:
    """Returns why a job with these Strategies does not go on; None: it may. The same on all ranks."""
    count = sum(each.job.slices is not None for each in strategies)
    if count == 0 or count == 1 and all(each.job.shards_from_elements is None for each in strategies):
        return None
    return (
        "One Strategy with a layout_map goes on, beside others without shard_optimizer. Received: "
        f"{count} with a layout_map, of {len(strategies)}."
    )


def form(strategy: StrategyInterface, mesh: NewMesh, renew: Callable[[Topology], None]) -> None:
    """Forms a mesh of which the slices are shared out. COLLECTIVE.

    Args: renew: has all Strategies go on with the ranks of a topology.
    Raises: RankLostError: another rank was lost, and nothing is formed. SystemExit: this rank has no place in it.
    """
    job = strategy.job
    assert job.slices is not None
    topology = communicator.topology()
    if len(mesh.staying) < topology.size:
        if topology.rank not in mesh.staying:
            renew(communicator.leave(f"a mesh of {mesh.data_size} x {mesh.model_size} has no place for it"))
            raise RankLostError("All ranks that were to form the mesh are lost.")
        topology = communicator.regroup_with()
        renew(topology)
        if topology.size != mesh.size:
            raise RankLostError("Another rank was lost while ranks formed a mesh.")
    layout = job.slices.layout
    try:
        job.mesh = ranks.connect(layout, topology)
    except CollectiveError as error:  # the engine does not say who is gone
        raise RankLostError(str(error)) from None
    job.slices.begin_others_anew()
    if topology.rank == 0:
        ranks.warn_of_hosts(layout, topology)


def say(before: Layout, lost: Sequence[int], after: Layout) -> None:
    """Says on rank 0 which mesh goes on. lost: ranks of the one before."""
    if communicator.rank() == 0:
        names = ", ".join(f"rank {rank} ({before.position(rank)})" for rank in lost)
        print(
            f"keras_ddl: of the mesh {before.data_size} x {before.model_size}, {names} was lost; "
            f"{after.data_size} x {after.model_size} go on.",
            file=sys.stderr,
            flush=True,
        )
