"""Checks that values are equal on all ranks; if not, every rank raises the same error with both values."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator.group import Communicator
from keras_ddl.errors import RankMismatchError


def digest(content: bytes) -> bytes:
    """Returns the SHA-256 of `content`, 32 bytes."""
    return hashlib.sha256(content).digest()


def is_equal(content: bytes, name: str, *, comm: Communicator | None = None) -> bool:
    """Whether `content` is equal on all ranks of `comm`. COLLECTIVE. Cost: 32 bytes per rank."""
    return len(set(communicator.all_gather_object(digest(content), name, comm=comm))) == 1


def differing(contents: Sequence[bytes], name: str) -> dict[int, int]:
    """Returns the `contents` that differ between ranks: position -> the first rank that differs from rank 0.

    COLLECTIVE. Cost: 4 bytes per rank and entry.
    """
    checksums = communicator.all_gather_object([zlib.crc32(content) for content in contents], name)
    others = [other_rank([rank_checksums[place] for rank_checksums in checksums]) for place in range(len(contents))]
    return {place: other for place, other in enumerate(others) if other is not None}


def other_rank(values: Sequence[Any]) -> int | None:
    """Returns the first rank whose value differs from rank 0's; None: all are equal."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def _side_by_side(first: Any, second: Any, other: int) -> str:
    return f"{first} on rank 0 and {second} on rank {other}"


def require_equal(
    value: Any,
    name: str,
    rule: str,
    remedy: str,
    *,
    received: Callable[[Any, Any, int], str] = _side_by_side,
    comm: Communicator | None = None,
) -> None:
    """Checks that a picklable `value` is equal on all ranks of `comm`. COLLECTIVE, under `name`.

    Args:
        rule, remedy: sentences for the error.
        received: takes rank 0's value, another value and its rank; returns a phrase that describes the difference.
    Raises: RankMismatchError: on every rank.
    """
    require_equal_values(communicator.all_gather_object(value, name, comm=comm), rule, remedy, received=received)


def require_equal_values(
    values: Sequence[Any], rule: str, remedy: str, *, received: Callable[[Any, Any, int], str] = _side_by_side
) -> None:
    """Like `require_equal`, for values already gathered from all ranks. Not collective."""
    other = other_rank(values)
    if other is not None:
        difference = received(values[0], values[other], other)
        raise RankMismatchError(f"{rule} Received: {difference} (rank {communicator.rank()}). {remedy}")


def require_equal_lists(
    keys: Sequence[str],
    name: str,
    rule: str,
    remedy: str,
    *,
    entry: str,
    texts: Sequence[str] | None = None,
    comm: Communicator | None = None,
) -> None:
    """Checks that `keys` are equal on all ranks of `comm`, entry by entry. COLLECTIVE.

    Args:
        entry: the word for an entry in the error.
        texts: the entries as the error shows them; default: the keys.
    Raises: RankMismatchError: on every rank, with the first entry that differs.
    Cost: 32 bytes per rank; the complete lists only when they differ.
    """
    if is_equal("\n".join(keys).encode(), f"{name}_digest", comm=comm):
        return
    lists = communicator.all_gather_object((list(keys), list(keys if texts is None else texts)), name, comm=comm)
    first = lists[0][0]
    other = next(rank for rank, (theirs, _) in enumerate(lists) if theirs != first)
    theirs = lists[other][0]
    place = next(i for i in range(max(len(first), len(theirs))) if first[i : i + 1] != theirs[i : i + 1])
    shown = _side_by_side(_shown(lists[0][1], place), _shown(lists[other][1], place), other)
    raise RankMismatchError(f"{rule} Received: {entry} {place} is {shown} (rank {communicator.rank()}). {remedy}")


def _shown(texts: Sequence[str], place: int) -> str:
    return f"{repr(texts[place]) if place < len(texts) else 'none'} (of {len(texts)})"
