"""Who has come to a barrier: each rank says so in the group's store, which needs no collective."""

from __future__ import annotations

from torch.distributed import DistError, Store


class RollCall:
    """One rank's part in it. Ranks count their barriers, so that each has keys of its own."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._number = 0

    def announce(self) -> None:
        """Says that this rank has come to the next barrier."""
        self._number += 1
        self._store.set(self._key(self._number, self._rank), "here")
        if self._number > 2:  # everyone has left that one, and nobody asks for it any more
            self._store.delete_key(self._key(self._number - 2, self._rank))

    def missing(self) -> list[int] | None:
        """Returns the ranks that have not come to it yet; None if the store is gone, with its rank."""
        try:
            return [rank for rank in range(self._size) if not self._store.check([self._key(self._number, rank)])]
        except DistError:
            return None

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"ddl monitored_barrier {number} rank {rank}"
