"""Chooses the mesh that ranks form after ranks were lost or have joined, and the ranks that have no place in it.

A mesh that began as D x M becomes D' x M'. No rank may need more memory than at first, so M' is at least M. The model
axis has many sums that nothing hides, so M' is less than 2 M. The largest of these meshes is chosen, and among equally
large meshes the one with the fewest model ranks. So the mesh depends only on the number of ranks, and can grow back to
its first size:

    2 x 2 loses a rank: 1 x 3 if 3 divides all extents that are cut; else 1 x 2, and one rank leaves
    4 x 2 loses a rank: 3 x 2, and one rank leaves
    8 x 2 loses a rank: 5 x 3 if 3 divides them; else 7 x 2, and one rank leaves
    1 x 3, and one rank joins: 2 x 2
    1 x 2, and one rank wants to join: if 3 does not divide them, it waits until another rank wants to join

If fewer than M ranks are left, M' is smaller, but as large as the layout allows, and each rank has larger slices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple


class NewMesh(NamedTuple):
    """The mesh with which a job continues.

    Attributes:
        data_size, model_size: extents of its axes.
        staying: the ranks that have a place, in order.
    """

    data_size: int
    model_size: int
    staying: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.data_size * self.model_size


def largest_mesh(model_size: int, hosts: Sequence[int], extents: Collection[int]) -> NewMesh:
    """Returns the largest mesh that ranks can form.

    Args:
        model_size: number of model ranks of the first mesh.
        hosts: the host of each rank, as in Topology.
        extents: the extents of all axes that are cut; the new number of model ranks must divide them.
    """
    left = len(hosts)
    if left >= model_size:
        sizes = range(model_size, min(left, 2 * model_size - 1) + 1)
        fitting = [each for each in sizes if _divides(each, extents)] or [model_size]
        chosen = max(fitting, key=lambda each: (left // each * each, -each))
    else:
        chosen = max(each for each in range(1, left + 1) if _divides(each, extents))
    return NewMesh(left // chosen, chosen, _staying(hosts, chosen, left % chosen))


def _divides(size: int, extents: Collection[int]) -> bool:
    return all(extent % size == 0 for extent in extents)


def _staying(hosts: Sequence[int], model_size: int, leaving: int) -> tuple[int, ...]:
    """Returns the ranks that stay if `leaving` ranks leave; first those that do not fill a model axis on their host."""
    gone: set[int] = set()
    counts = Counter(hosts)
    for host in sorted(counts, key=lambda each: (counts[each] % model_size, -each)):
        ranks = [rank for rank, on in enumerate(hosts) if on == host]
        beyond = min(counts[host] % model_size, leaving - len(gone))
        gone.update(ranks[len(ranks) - beyond :])
    others = [rank for rank in reversed(range(len(hosts))) if rank not in gone]
    gone.update(others[: leaving - len(gone)])
    return tuple(rank for rank in range(len(hosts)) if rank not in gone)
