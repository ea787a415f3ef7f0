"""The engine of a simulated rank (simulated_job.py), whose collectives wait for the job's choices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from keras_ddl.errors import CollectiveError, DeadlineError, RankLostError

if TYPE_CHECKING:
    from simulated_job import Rank


class Killed(BaseException):
    """Ends the thread of a rank."""


class World:
    """The ranks of one membership, as their engines see them. Collectives are matched by name and number."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.entered: dict[tuple[str, int], dict[int, Any]] = {}
        self.gone: dict[int, str] = {}  # rank -> "died", "failed" or "left"
        self.is_late = False  # a deadline has passed


class Engine:
    """Replaces `binding.NativeCommunicator`, the engine of one rank."""

    def __init__(self, rank: Rank, world: World) -> None:
        self._rank, self._world = rank, world
        self._calls: dict[str, int] = {}

    def all_gather_bytes(self, mine: Any, match: str, **_: Any) -> list[Any]:
        self._calls[match] = self._calls.get(match, 0) + 1
        key = match, self._calls[match]
        self._rank.calls += 1
        assert self._rank.calls < 1000, f"rank {self._rank.number} does not end"
        if len(self._world.members) == 1:
            if self._rank.job.board is not None:
                self._rank.pause(("board",))  # lets newcomers act
            return [mine]
        self._rank.pause(("enter", self._world, key, mine))
        return self._rank.pause(("wait", self._world, key))

    def add_lane(self) -> None:
        try:
            self.all_gather_bytes(b"", "lane")
        except (RankLostError, DeadlineError) as error:
            raise CollectiveError(str(error)) from None  # the engine does not say which rank was lost

    def barrier(self, match: str) -> None:
        self.all_gather_bytes(b"", match)

    def close(self) -> None:
        has_failed = self._rank.has_failed
        self._world.gone.setdefault(self._rank.number, "failed" if has_failed else "left")


class Variable:
    """A variable of a model, with an integer value."""

    dtype = "int64"

    def __init__(self, value: int) -> None:
        self.value = value

    def assign(self, value: Any) -> None:
        self.value = int(value)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return np.asarray(self.value)
