"""Finds which ranks have reached a barrier, by keys in the group's store, without a collective."""

from __future__ import annotations

from torch.distributed import DistError, Store


class RollCall:
    """One rank's view. Ranks number their barriers, so that each has its own keys."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._number = 0

    def announce(self) -> None:
        """Announces that this rank has reached the next barrier."""
        self._number += 1
        self._store.set(self._key(self._number, self._rank), "here")
        if self._number > 2:  # all ranks have left that barrier
            self._store.delete_key(self._key(self._number - 2, self._rank))

    def missing(self) -> list[int] | None:
        """Returns the ranks that have not reached the barrier; None if the store is gone, with its rank."""
        try:
            return [rank for rank in range(self._size) if not self._store.check([self._key(self._number, rank)])]
        except DistError:
            return None

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"ddl monitored_barrier {number} rank {rank}"
