"""Lists that must be the same on all ranks, and the first place where they are not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from keras_ddl.communicator.group import Communicator


class Difference(NamedTuple):
    """Where rank 0's list and another rank's part; each side says which entry it has there, and of how many."""

    position: int
    of_rank_0: str
    rank: int
    of_rank: str


def first_difference(
    comm: Communicator, keys: Sequence[str], name: str, texts: Sequence[str] | None = None
) -> Difference | None:
    """Compares `keys` over the ranks of `comm`; None when all are equal. COLLECTIVE.

    Args:
        keys: what must be equal, entry by entry.
        texts: how the entries are shown; default: the keys.
    Cost: 32 bytes per rank; the whole lists only when they differ.
    """
    digests = comm.all_gather_object(hashlib.sha256("\n".join(keys).encode()).digest(), name=f"{name}_digest")
    if all(digest == digests[0] for digest in digests):
        return None
    lists = comm.all_gather_object((list(keys), list(keys if texts is None else texts)), name=name)
    (first, first_texts) = lists[0]
    rank = next(rank for rank, (theirs, _) in enumerate(lists) if theirs != first)
    theirs, their_texts = lists[rank]
    position = next(i for i in range(max(len(first), len(theirs))) if first[i : i + 1] != theirs[i : i + 1])
    return Difference(position, _entry(first_texts, position), rank, _entry(their_texts, position))


def _entry(texts: Sequence[str], position: int) -> str:
    return f"{repr(texts[position]) if position < len(texts) else 'none'} (of {len(texts)})"
