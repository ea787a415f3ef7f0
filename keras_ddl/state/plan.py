"""Plans a movement of state: which ranks send which boxes of an array to which, from what they hold to what they want.

    held                              wanted
    rank 0                            all ranks       equal weights when training begins
    shards and mirrors of some ranks  new shards      a rank is lost, or one joins
    slices of a mesh                  other slices    another mesh

A rank receives each missing entry once, and no entry that it already holds, so no plan moves fewer bytes.
"""

from __future__ import annotations

import functools
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from keras_ddl.state.boxes import intersection, size, without_all

if TYPE_CHECKING:
    from keras_ddl.cut.values.layouts import Box

# The boxes of each of one rank's arrays. An array contains the entries of its boxes, one box after the other.
Holding: TypeAlias = "tuple[tuple[Box, ...], ...]"


class Move(NamedTuple):
    """One box of an array, from rank to rank."""

    sender: int
    receiver: int
    box: Box


class MissingBoxError(LookupError):
    """No rank holds a box that a rank wants."""


@functools.lru_cache(maxsize=512)
def plan(held: tuple[Holding, ...], wanted: tuple[Holding, ...], hosts: tuple[int, ...]) -> tuple[Move, ...]:
    """Returns the moves, ordered by receiver; equal on all ranks. Cached, because variables are often alike.

    Ranks on the receiver's host are preferred as senders; among equals, the rank that has sent the least so far.

    Args:
        held, wanted: what each rank holds and wants.
        hosts: the host of each rank, as in Topology.
    Raises: MissingBoxError.
    Cost: ranks x different boxes, in Python.
    """
    holders: dict[Box, list[int]] = {}
    for rank, holding in enumerate(held):
        for box in chain(*holding):
            holders.setdefault(box, []).append(rank)
    sent = [0] * len(held)
    moves: list[Move] = []
    for receiver, holding in enumerate(wanted):
        lacking = without_all(chain(*holding), chain(*held[receiver]))
        here = hosts[receiver]
        for box in sorted(holders, key=lambda each: all(hosts[rank] != here for rank in holders[each])):
            if not lacking:
                break
            found = [common for each in lacking if (common := intersection(each, box)) is not None]
            if found:
                sender = min(holders[box], key=lambda rank: (hosts[rank] != here, sent[rank]))
                sent[sender] += sum(map(size, found))
                moves += [Move(sender, receiver, each) for each in found]
                lacking = without_all(lacking, [box])
        if lacking:
            raise MissingBoxError(f"No rank holds {lacking[0]}, which rank {receiver} wants.")
    return tuple(moves)
