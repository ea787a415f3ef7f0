"""What a rank holds of an array: all of it, or a part and maybe the mirror of another rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from keras_ddl.cut.values.layouts import Distribution
    from keras_ddl.state.plan import Holding

NOTHING: Holding = ()


class Place(NamedTuple):
    """The place of a rank among those that share arrays: it holds part `number` of `size`.

    offset: the distance to the mirror: place (n + offset) % size also holds part n; 0: there are no mirrors.
    """

    number: int
    size: int
    offset: int = 0

    def parts(self) -> list[int]:
        """Returns the numbers of the parts that the rank holds, its own first."""
        return [self.number, (self.number - self.offset) % self.size] if self.offset else [self.number]


def holding(layout: Distribution, place: Place | None) -> Holding:
    """Returns what a rank with this place holds: nothing if `place` is None."""
    return NOTHING if place is None else tuple(tuple(layout.boxes(part)) for part in place.parts())


def replicated(shape: Sequence[int]) -> Holding:
    """Returns the holding of a rank that has the whole array."""
    return ((tuple((0, extent) for extent in shape),),)
