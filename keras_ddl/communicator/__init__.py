"""Joins this process to the other ranks (`init`, `shutdown`), and offers the methods of `Communicator` as functions.

It does not need TensorFlow. All collectives take `comm`, a communicator made by `split`; None means all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from keras_ddl.communicator.group import Communicator
from keras_ddl.communicator.newcomers import history
from keras_ddl.communicator.world import (  # noqa: F401 - private names are for other packages
    any_rank_ended,
    communicator_of,
    communicator_with_id,
    epoch,
    init,
    is_initialized,
    join_others,
    leave,
    members,
    min_ranks,
    regroup,
    regroup_with,
    shutdown,
    topology,
    use_gpu,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import ArrayLike

__all__ = [
    "Communicator",
    "all_gather_object",
    "all_reduce_array",
    "all_reduce_init",
    "barrier",
    "broadcast_array",
    "broadcast_object",
    "describe",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "num_hosts",
    "rank",
    "regroup",
    "shutdown",
    "size",
    "split",
    "topology",
]

_T = TypeVar("_T")


def __dir__() -> list[str]:
    return sorted(__all__)


def split(color: int | str | None, key: int = 0, *, name: str | None = None) -> Communicator | None:
    """Splits all ranks into communicators, one for each `color`; see `Communicator.split`. COLLECTIVE.

    Returns this rank's communicator; None for the color None. Because `comm=None` means all ranks, a rank without a
    communicator must skip the collectives of the others: `if comm is not None: ...`.
    """
    return communicator_of(None).split(color, key, name=name)


def rank() -> int:
    """Returns the number of this process, 0 <= rank < size."""
    return topology().rank


def size() -> int:
    """Returns the number of ranks."""
    return topology().size


def local_rank() -> int:
    """Returns the position of this rank among the ranks of its host, which scripts use to choose a device."""
    return topology().local_rank


def local_size() -> int:
    """Returns the number of ranks on this rank's host."""
    return topology().local_size


def num_hosts() -> int:
    """Returns the number of hosts that run a rank."""
    return topology().num_hosts


def describe() -> str:
    """Describes the ranks' topology, the shared memory and the instruction set that collectives use."""
    return communicator_of(None).describe()


def as_one(run: Callable[[], _T], variables: Callable[[], list[Any]] = list) -> _T:
    """Returns `run()`, whose collectives must succeed together. COLLECTIVE.

    If a job continues without a lost rank, the other ranks repeat all of these collectives. `variables`: returns the
    variables that `run` writes.
    """
    return history.recorded("as_one", lambda: history.repeated(lambda _: run(), None, variables))


def as_one_each(run: Callable[[], _T], name: str) -> _T:
    """Does the same as `as_one` for a `run` whose result differs between ranks.

    `name`: the name of a barrier, used only in jobs that can continue without a lost rank. A rank that leaves it knows
    that every rank has its own result.
    """
    results: list[_T] = []

    def make() -> None:
        results[:] = [run()]
        if history.recovers():
            barrier(name)

    as_one(make)
    return results[0]


def count() -> dict[str, int]:
    """Returns this rank's counters since `init`, for tests and benchmarks.

    They count collectives by how they ran ("coordinated", "ran_inline", "planned", "fell_back"; for tensors on GPUs:
    "staged", "by_device", "hierarchical"), and the coordinator's messages ("control_sent", ...).
    """
    return communicator_of(None).native().count()


def prepare_plans() -> None:
    """Creates once the lane for planned collectives, which need no message to rank 0. COLLECTIVE.

    Cost: a communication thread, connections, and shared memory whose pages are allocated on first use.
    """
    communicator_of(None).native().add_lane()


def barrier(name: str | None = None, *, comm: Communicator | None = None) -> None:
    """Returns when every rank of `comm` has called it. COLLECTIVE."""
    communicator_of(comm).barrier(name)


def join(*, comm: Communicator | None = None) -> int:
    """Declares that this rank has no more data, and returns when every rank of `comm` has called it. COLLECTIVE.

    Until then the other ranks' collectives do not wait for this rank. It takes part in them with neutral data: zeros;
    ones in a product; infinity, or the largest or smallest integer, in a min or max; no rows in an all_gather. It
    discards the results. A mean still divides by the number of all ranks. Afterwards everything works as before, and
    ranks may join again.

    There is no deadline: a rank that has joined waits for as long as the others have data. An interrupt (Ctrl-C) ends
    the wait, not the join: call it again, before anything else, to continue waiting.

    Returns: the rank of `comm` that joined last, on every rank.
    Raises:
        RankLostError: a rank died, or left without joining.
        RankMismatchError: on other ranks, from collectives that need a rank which has joined: a broadcast from it,
            all_to_all, op "adasum", collectives on objects, split. On this rank, from collectives of other threads.
    Cost: as much memory as the other ranks' largest collective uses on one rank.
    """
    return communicator_of(comm).join()


def broadcast_object(obj: Any, root: int = 0, name: str | None = None, *, comm: Communicator | None = None) -> Any:
    """Returns the object of rank `root`, which is sent pickled; the argument is ignored on other ranks. COLLECTIVE.

    Raises:
        ConfigError: `root` is not a rank, or (on every rank) rank `root`'s object cannot be pickled.
    """
    return communicator_of(comm).broadcast_object(obj, root, name)


def all_gather_object(obj: Any, name: str | None = None, *, comm: Communicator | None = None) -> list[Any]:
    """Returns the objects of all ranks in rank order; they are sent pickled. COLLECTIVE.

    Raises:
        ConfigError: on every rank, if the object of one rank cannot be pickled.
    """
    return communicator_of(comm).all_gather_object(obj, name)


def all_reduce_array(
    array: ArrayLike,
    op: str = "sum",
    name: str | None = None,
    *,
    out: np.ndarray | None = None,
    comm: Communicator | None = None,
) -> np.ndarray:
    """Returns `array`, reduced elementwise over the ranks. COLLECTIVE.

    Args:
        array: dtype float16, bfloat16, float32, float64, int32, int64, uint8 or int8; dtype and shape equal on all
            ranks.
        op: "sum", "mean", "min", "max" or "product". Integer means are rounded toward zero.
        out: memory for the result: `array` itself, or a C-contiguous array of its dtype and shape that does not
            overlap it. Default: a new array.

    Raises:
        ConfigError: the dtype or op is not supported, or `out` does not fit.
        RankMismatchError: on every rank, if the ranks disagree.
    """
    return communicator_of(comm).all_reduce_array(array, op, name, out=out)


def all_reduce_init(
    array: np.ndarray,
    op: str = "sum",
    name: str | None = None,
    *,
    out: np.ndarray | None = None,
    comm: Communicator | None = None,
) -> Callable[[], np.ndarray]:
    """Returns a function that reduces the content of `array` at each call: a persistent all-reduce (MPI 4.1, 6.13).

    For loops that reduce the same memory many times: this function does the checks and preparations of
    all_reduce_array (about 10 us per call) once. The returned function is COLLECTIVE and returns `out`.

    Args:
        array: as for all_reduce_array, a C-contiguous numpy.ndarray.
        out: as for all_reduce_array; it is overwritten by every call.

    Raises:
        ConfigError: as all_reduce_array. The returned function raises RankMismatchError if the ranks disagree.
    """
    return communicator_of(comm).all_reduce_init(array, op, name, out=out)


def broadcast_array(
    array: ArrayLike, root: int = 0, name: str | None = None, *, comm: Communicator | None = None
) -> np.ndarray:
    """Returns a copy of rank `root`'s array. COLLECTIVE.

    Args:
        array: any dtype but object; dtype and shape equal on all ranks.

    Raises:
        ConfigError: `root` is not a rank, or the dtype is object.
        RankMismatchError: on every rank, if the ranks disagree.
    """
    return communicator_of(comm).broadcast_array(array, root, name)
