"""Facts about values that enter or leave the graph of a branch or a loop, known before the step runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keras_ddl.cut.analysis.dims import Dim
from keras_ddl.cut.analysis.placements import Placement

NONE_YET = "none yet"  # content of an empty list, which agrees with anything
Entries = tuple[Dim | None, ...]


@dataclass(frozen=True)
class Content:
    """Facts that hold for every element of a list (a TensorList, an Optional).

    Attributes:
        declared: the element shape of the list, with -1 for open extents; None: unknown.
        dims: extents of the global elements; None, or None for one extent: unknown.
        numbers: entries of integer elements of rank 0 or 1.
    """

    declared: Entries | None
    dims: Entries | str | None
    numbers: Entries | str | None

    def known_dims(self) -> Entries | None:
        return None if isinstance(self.dims, str) else self.dims

    def known_numbers(self) -> Entries | None:
        return None if isinstance(self.numbers, str) else self.numbers

    def mapped(self, change: Callable[[Dim | None], Dim | None]) -> Content:
        """Returns the content with each entry replaced by `change(entry)` (None: unknown)."""

        def of(entries: Entries | str | None) -> Entries | str | None:
            return entries if entries is None or isinstance(entries, str) else tuple(map(change, entries))

        declared = None if self.declared is None else tuple(map(change, self.declared))
        return Content(declared, of(self.dims), of(self.numbers))


def joined(one: Content | None, other: Content | None) -> Content | None:
    """Returns the facts that hold for the elements of both lists."""
    if one is None or other is None:
        return None
    return Content(
        joined_entries(one.declared, other.declared),
        _joined(one.dims, other.dims),
        _joined(one.numbers, other.numbers),
    )


def _joined(one: Entries | str | None, other: Entries | str | None) -> Entries | str | None:
    if isinstance(one, str) or isinstance(other, str):
        return other if isinstance(one, str) else one
    return joined_entries(one, other)


def joined_entries(one: Entries | None, other: Entries | None) -> Entries | None:
    """Returns the entries that are equal in both, None for the others."""
    if one is None or other is None or len(one) != len(other):
        return None
    return tuple(a if a is not None and a == b else None for a, b in zip(one, other))


@dataclass(frozen=True)
class AbstractValue:
    """Facts about a value, apart from its entries.

    Attributes:
        placement: how the ranks hold it.
        dims: extents of the global tensor; None, or None for one extent: unknown.
        content: content of a list. None: unknown, or the value is not a list.
    """

    placement: Placement
    dims: Entries | None
    content: Content | None

    def joined(self, other: AbstractValue) -> AbstractValue:
        """Returns the facts that hold for both values, in this one's placement."""
        dims, content = joined_entries(self.dims, other.dims), joined(self.content, other.content)
        return AbstractValue(self.placement, dims, content)
