"""Process sets: subsets of ranks, each with a communicator of `keras_ddl.split`."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator.comparison import require_equal
from keras_ddl.communicator.group import Communicator
from keras_ddl.errors import ConfigError
from keras_ddl.horovod.failures import InvalidArgumentError, as_tensorflow_errors


class ProcessSet:
    """A subset of ranks. Pass it to `init` or `add_process_set`, then to collectives as `process_set=`.

    Attributes:
        ranks: ranks of the job, ascending; None after the set was removed.
        process_set_id: 0 for the set of all ranks, None if not registered.
        mpi_comm: None; sets are made from ranks.
    """

    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        """Raises: ConfigError: `ranks_or_comm` are not distinct ranks."""
        try:
            ranks = sorted(operator.index(rank) for rank in ranks_or_comm)
        except TypeError:
            raise ConfigError(
                f"ProcessSet takes a list of ranks. Received: {ranks_or_comm!r}. For an MPI communicator, list its "
                "ranks."
            ) from None
        if len(set(ranks)) != len(ranks) or any(rank < 0 for rank in ranks):
            raise ConfigError(f"ProcessSet: ranks must be 0 or more, each once. Received: {ranks}.")
        self._ranks: list[int] | None = ranks
        self.process_set_id: int | None = None
        self._comm: Communicator | None = None

    @property
    def ranks(self) -> list[int] | None:
        if self.process_set_id == 0:
            return list(range(communicator.size())) if communicator.is_initialized() else []
        return self._ranks

    @property
    def comm(self) -> Communicator:
        """The communicator of the set. Raises: ConfigError: the set is not registered, or lacks this rank."""
        return communicator_of(self)

    def included(self) -> bool:
        """Whether this rank is in the set. Raises: ConfigError: the set is not registered."""
        return communicator.rank() in self._registered()

    def size(self) -> int:
        """Returns the number of its ranks. Raises: ConfigError: the set is not registered."""
        return len(self._registered())

    def rank(self) -> int:
        """Returns this rank's position in the set. Raises: ConfigError: the rank is not in the set, or as `size`."""
        return communicator_of(self).rank

    def _registered(self) -> list[int]:
        if self.process_set_id is None or self.ranks is None:
            raise ConfigError(
                f"A process set must be registered. Received: {self!r}. Call add_process_set(...) on every rank, or "
                "name it in init(process_sets=[...])."
            )
        return self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

_registered: dict[int, ProcessSet] = {0: global_process_set}
_numbers = [0]  # the last assigned id


@as_tensorflow_errors
def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers and returns a process set; a list of ranks becomes one. COLLECTIVE over all ranks, members or not.

    Raises:
        ConfigError: a rank is unknown, there are no ranks, or a registered set has the same ranks.
        tf.errors.FailedPreconditionError: the ranks passed different sets; on every rank.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks, world = process_set._ranks or [], communicator.communicator_of(None)
    rule = "add_process_set: all ranks must add the same set."
    require_equal(
        ranks,
        "add_process_set",
        rule,
        "Call add_process_set with the same ranks on every rank, also on ranks that are not in the set.",
    )
    if not ranks or ranks[-1] >= world.size:
        raise ConfigError(f"add_process_set: the ranks must be from 0 to {world.size - 1}. Received: {ranks}.")
    same = [other for other in _registered.values() if other.ranks == ranks]
    if same:
        raise ConfigError(
            f"add_process_set: a set can be registered only once. Received: {ranks}, which is {same[0]!r}."
        )
    _numbers[0] += 1
    number = _numbers[0]
    process_set._comm = world.split(0 if world.rank in ranks else None, name=f"process_set_{number}")
    process_set.process_set_id = number
    _registered[number] = process_set
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set. COLLECTIVE over all ranks. Returns False for an unregistered or the global set."""
    number = process_set.process_set_id
    if number == 0 or number not in _registered:
        return False
    communicator.barrier(f"remove_process_set_{number}")  # its members have completed their collectives
    del _registered[number]
    if process_set._comm is not None:
        process_set._comm.close()
    _invalidate(process_set)
    return True


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """Returns a registered set. Raises: ConfigError: the id is unknown."""
    if process_set_id not in _registered:
        raise ConfigError(f"There is no process set {process_set_id!r}. Registered: {sorted(_registered)}.")
    return _registered[process_set_id]


def registered(process_set: Any) -> ProcessSet:
    """Returns the set itself. Raises: ConfigError: it is not a process set, or not registered."""
    if not isinstance(process_set, ProcessSet):
        raise ConfigError(f"process_set must be a ProcessSet. Received: {process_set!r}. Leave it out for all ranks.")
    process_set.size()
    return process_set


def communicator_of(process_set: Any) -> Communicator:
    """Returns the communicator of a set. Raises: ConfigError: the set is not registered, or lacks this rank."""
    ranks = registered(process_set)._registered()
    if process_set.process_set_id == 0:
        return communicator.communicator_of(None)
    if process_set._comm is None:
        raise InvalidArgumentError(
            f"Only ranks of a process set may call its collectives, here {ranks}. Received: a call on rank "
            f"{communicator.rank()}. Put `if process_set.included():` around it."
        )
    return process_set._comm


def root_in(process_set: ProcessSet, root_rank: int) -> int:
    """Returns the position in the set of `root_rank`, a rank of the job. Raises: ConfigError: it is not in the set."""
    ranks = communicator_of(process_set).world_ranks
    if isinstance(root_rank, bool) or not hasattr(root_rank, "__index__") or root_rank not in ranks:
        raise ConfigError(
            f"root_rank must be one of the ranks {list(ranks)}. Received: {root_rank!r} on rank {communicator.rank()}."
        )
    return ranks.index(operator.index(root_rank))


def forget_all() -> None:
    """Drops all sets before `shutdown`, which closes their communicators."""
    for number in [number for number in _registered if number != 0]:
        _invalidate(_registered.pop(number))
    _numbers[0] = 0


def _invalidate(process_set: ProcessSet) -> None:
    process_set.process_set_id = process_set._comm = process_set._ranks = None
