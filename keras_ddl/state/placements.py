"""What a rank holds of an array: all of it, or a part and maybe the mirror of another rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from keras_ddl.cut.mirrors import SharedOut
    from keras_ddl.state.plan import Holding

NOTHING: Holding = ()


class Place(NamedTuple):
    """The place of a rank among those that share out arrays: it holds part `number` of `size`.

    offset: of mirrors: part n is also in the mirror of number (n + offset) % size; 0: there are none.
    """

    number: int
    size: int
    offset: int = 0

    def parts(self) -> list[int]:
        """Returns the numbers of the parts that the rank holds, its own first."""
        return [self.number, (self.number - self.offset) % self.size] if self.offset else [self.number]


def holding(layout: SharedOut, place: Place | None) -> Holding:
    """Returns what a rank with this place holds; None: it has no place."""
    return NOTHING if place is None else tuple(tuple(layout.boxes(part)) for part in place.parts())


def replicated(shape: Sequence[int]) -> Holding:
    """Returns what a rank holds that has all of an array."""
    return ((tuple((0, extent) for extent in shape),),)
