"""Chooses the rank that keeps a copy of data that only one other rank has."""

from __future__ import annotations

from collections.abc import Sequence


def mirror_offset(hosts: Sequence[int]) -> int:
    """Returns the distance from each rank to the rank with its copy: for rank r, rank (r + distance) % size.

    It is the smallest distance that puts as many copies as possible on other hosts; 0 if there is only one rank.

    Args:
        hosts: index of each rank's host, as in Topology.
    """
    size = len(hosts)
    if len(set(hosts)) <= 1:
        return min(1, size - 1)

    def copies_on_same_host(distance: int) -> int:
        return sum(host == hosts[(rank + distance) % size] for rank, host in enumerate(hosts))

    best, least = 1, size + 1
    for distance in range(1, size):
        count = copies_on_same_host(distance)
        if count < least:
            best, least = distance, count
        if count == 0:
            break
    return best
