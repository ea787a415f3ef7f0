"""The ranks of a job as a mesh: the place of this one, and a communicator for each axis."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from keras_ddl import communicator, errors
from keras_ddl.communicator import Communicator
from keras_ddl.communicator.comparison import require_equal_values
from keras_ddl.communicator.newcomers import history
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.strategy.mesh.layout import VariableLayout
from keras_ddl.topology import Topology

_MODEL, _BATCH = "model axis", "batch axis"  # names of communicators


@dataclass(frozen=True, eq=False)
class Mesh:
    """Rank r of the job has the data position r // model_size, and the model position r % model_size.

    Attributes:
        layout: of variables over the mesh.
        data, model: communicators of the ranks that differ from this one only along the batch axis, or only along the
            model axis.
    """

    layout: VariableLayout
    data: Communicator
    model: Communicator

    def row_ranks(self) -> range:
        """Returns the ranks of this rank's model axis, which have the same rows."""
        first = self.data.rank * self.model.size
        return range(first, first + self.model.size)


def make(layout: VariableLayout, topology: Topology) -> Mesh | None:
    """Returns the mesh of a job; None if nothing is cut along a model axis. COLLECTIVE.

    Raises: RankMismatchError: the layouts of the ranks differ.
    """
    if topology.size == 1:
        return None
    mine = layout.describe()
    require_equal_values(
        history.with_own(communicator.all_gather_object(mine, name="keras_ddl/layout"), mine),
        "All ranks must have the same mesh and LayoutMap, with the keys in the same order.",
        "Make them in the same way on every rank.",
        received=_first_difference,
    )
    if topology.rank == 0:
        _warn(layout, topology)
    return history.left_to_join(lambda: _without_peers(layout, topology), lambda: connect(layout, topology))


def _first_difference(first: list[str], second: list[str], other: int) -> str:
    place, (one, another) = next(
        (place, pair)
        for place, pair in enumerate(itertools.zip_longest(first, second, fillvalue="none"))
        if pair[0] != pair[1]
    )
    return f"entry {place} is {one!r} on rank 0 and {another!r} on rank {other}"


def _without_peers(layout: VariableLayout, topology: Topology) -> Mesh | None:
    """Returns a newcomer's mesh before it joins: it has its place, but no ranks to communicate with."""
    if layout.model_size == 1:
        return None
    rank, size = topology.rank, layout.model_size
    first = rank // size * size
    data_ranks, model_ranks = range(rank % size, topology.size, size), range(first, first + size)
    comm = communicator.communicator_of(None)
    return Mesh(layout, comm.without_peers(data_ranks, name=_BATCH), comm.without_peers(model_ranks, name=_MODEL))


def connect(layout: VariableLayout, topology: Topology) -> Mesh | None:
    """Makes the communicators of a mesh that all ranks agree on; returns None as `make` does. COLLECTIVE."""
    errors.name_positions(None)
    if layout.model_size == 1:
        return None
    data_position, model_position = divmod(topology.rank, layout.model_size)
    model = communicator.split(data_position, model_position, name=_MODEL)
    data = communicator.split(model_position, data_position, name=_BATCH)
    assert model is not None and data is not None
    for axis in (model, data):
        axis.native().add_lane()
    errors.name_positions(layout.position)
    return Mesh(layout, data, model)


def _warn(layout: VariableLayout, topology: Topology) -> None:
    """Warns about costs and limits of a mesh that a reader of the layout may not expect."""
    keys = layout.along_batch()
    warn_of_hosts(layout, topology)
    if keys:
        stack_position.warn(
            f"layout: variables are not cut along the batch axis, so every data rank keeps its own copy of {keys}. "
            "The result is the same but takes more memory."
        )


def warn_of_hosts(layout: VariableLayout, topology: Topology) -> None:
    """Warns about a model axis that spans several hosts."""
    size = layout.model_size
    hosts = topology.hosts
    apart = next((r for r in range(0, topology.size, size) if len(set(hosts[r : r + size])) > 1), None)
    if apart is not None:
        stack_position.warn(
            "The ranks of a model axis should be on one host, because they exchange activations several times a step. "
            f"Received: ranks {apart} to {apart + size - 1} on several hosts. Start a multiple of {size} ranks on each "
            "host."
        )
