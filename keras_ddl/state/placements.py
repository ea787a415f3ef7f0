"""Describes what a rank holds of an array: all of it, or a part and perhaps a copy (mirror) of another rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from keras_ddl.topology.mirrors import mirror_offset

if TYPE_CHECKING:
    from keras_ddl.cut.values.layouts import Distribution
    from keras_ddl.state.plan import Holding

NOTHING: Holding = ()


class Place(NamedTuple):
    """The place of a rank among those that share arrays: it holds part `number` of `size`.

    offset: the distance to the mirror of a part: place (n + offset) % size also holds part n. 0: there are no mirrors.
    """

    number: int
    size: int
    offset: int = 0

    def parts(self) -> list[int]:
        """Returns the numbers of the parts that the rank holds, its own first."""
        return [self.number, (self.number - self.offset) % self.size] if self.offset else [self.number]


class MeshPlace(NamedTuple):
    """The place of a rank along both axes of a mesh. Without a mesh, all ranks are along the batch axis.

    A part that only one rank holds has its mirror along the batch axis, or along the model axis if there is only one
    rank along the batch axis.
    """

    batch: Place
    model: Place = Place(0, 1)


def place_on_mesh(rank: int, hosts: Sequence[int], model_size: int = 1) -> MeshPlace:
    """Returns the place of a rank of a job whose parts have mirrors. hosts: of all ranks, as in Topology."""
    (batch, model), batch_size = divmod(rank, model_size), len(hosts) // model_size
    model_mirror = mirror_offset(hosts) if batch_size == 1 else 0
    return MeshPlace(
        Place(batch, batch_size, mirror_offset(hosts[::model_size])), Place(model, model_size, model_mirror)
    )


def holding(layout: Distribution, place: Place) -> Holding:
    """Returns the holding of a rank with this place."""
    return tuple(tuple(layout.boxes(part)) for part in place.parts())


def replicated(shape: Sequence[int]) -> Holding:
    """Returns the holding of a rank that has the whole array."""
    return ((tuple((0, extent) for extent in shape),),)
