"""On which rank to keep a copy of what else only one rank has."""

from __future__ import annotations

from collections.abc import Sequence


def mirror_offset(hosts: Sequence[int]) -> int:
    """Returns the distance from each rank to the one with the copy: of rank r, rank (r + distance) % size.

    As many of them as one distance allows are on other hosts; it is the least of those that do. 0: there is one rank.

    Args:
        hosts: of each rank, as in Topology.
    """
    size = len(hosts)
    if len(set(hosts)) <= 1:
        return min(1, size - 1)

    def beside(distance: int) -> int:
        return sum(host == hosts[(rank + distance) % size] for rank, host in enumerate(hosts))

    best, least = 1, size + 1
    for distance in range(1, size):
        count = beside(distance)
        if count < least:
            best, least = distance, count
        if count == 0:
            break
    return best
