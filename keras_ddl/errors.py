"""The errors of keras_ddl: one hierarchy, so that `except keras_ddl.errors.KerasDdlError` catches all of them.

Each also derives from the built-in exception a caller would expect. A message states the rule, what was received, on
which rank, and what to do.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

_E = TypeVar("_E", bound=Exception)

__all__ = [
    "CheckFailedError",
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "DeadlineError",
    "DependencyError",
    "DriftError",
    "ExportError",
    "KerasDdlError",
    "LaunchError",
    "NotInitializedError",
    "RankError",
    "RankLostError",
    "RankMismatchError",
    "ServingError",
    "StepCancelledError",
]


def __dir__() -> list[str]:
    return sorted(__all__)


class KerasDdlError(Exception):
    """Base of every error raised by keras_ddl."""

    # While it traces a tf.function, TensorFlow's autograph replaces unknown exceptions with a StagingError. This
    # attribute tells it to let them through unchanged (tensorflow/python/autograph/impl/api.py, 2.16 to 2.21).
    ag_pass_through = True
    # The name of the collective that failed; "" if the error did not come from a collective.
    tensor = ""


class ConfigError(KerasDdlError, ValueError):
    """An invalid argument or KERAS_DDL_* variable."""


class NotInitializedError(KerasDdlError, RuntimeError):
    """A function that needs the other ranks was called before `keras_ddl.init()` or after `keras_ddl.shutdown()`."""


class DependencyError(KerasDdlError, ImportError):
    """TensorFlow, MPI, the native library or a part of keras_ddl is missing, or has an incompatible version."""


class RankMismatchError(KerasDdlError, RuntimeError):
    """The ranks disagree about a collective (kind, dtype, shape, op, root). It is raised on every rank."""


class DriftError(RankMismatchError):
    """Ranks that train together no longer hold the same weights. It is raised on every rank."""


class RankLostError(KerasDdlError, RuntimeError):
    """Another rank died, left the job or shut down while this one was waiting for it."""

    # Whether the rank left in an orderly way: its process ended on its own, or called shutdown().
    has_left = False
    # The lost ranks, as far as known.
    ranks: tuple[int, ...] = ()


class DeadlineError(KerasDdlError, TimeoutError):
    """Ranks did not arrive at a collective within KERAS_DDL_DEADLINE_SECONDS."""


class CheckFailedError(KerasDdlError, RuntimeError):
    """`all_reduce_n(check=...)`: the result differs from that of plain MPI_Allreduce by more than the tolerance."""


class CollectiveError(KerasDdlError, RuntimeError):
    """A collective failed for another reason: a bug, or an error of the operating system or of MPI."""


class StepCancelledError(CollectiveError):
    """A collective was cancelled because another rank's step failed; the step's call raises that rank's error."""


class CheckpointError(KerasDdlError, RuntimeError):
    """A checkpoint directory is missing, incomplete or altered, or cannot be written."""


class ExportError(KerasDdlError, RuntimeError):
    """A SavedModel cannot be created, or did not reproduce its stored sample."""


class ServingError(KerasDdlError, RuntimeError):
    """A model server does not respond, or rejects a request."""


class LaunchError(KerasDdlError, RuntimeError):
    """The ranks could not be started, or ended without finishing."""


class RankError(KerasDdlError, RuntimeError):
    """A function failed on one rank; `keras_ddl.run()` raises this in the calling process."""


# Status codes of native/core/include/ddl.h (equal to those of TensorFlow).
_BY_CODE: dict[int, type[KerasDdlError]] = {
    1: StepCancelledError,
    3: ConfigError,
    4: DeadlineError,
    5: NotInitializedError,
    9: RankMismatchError,
    10: RankLostError,
    14: RankLostError,
    15: CheckFailedError,
}
_HAS_LEFT = 14
_MOST_POSITIONS = 4  # the largest number of positions in one message
# The last errors of lost ranks in this process, the newest last.
_lost: collections.deque[RankLostError] = collections.deque(maxlen=8)

# Id of a communicator -> its ranks' numbers in the job; they equal their own in the communicator of all ranks.
_ranks_of: dict[int, Sequence[int]] = {}
# Function that describes the position of a rank on the mesh.
_position_of: Callable[[int], str] | None = None


def number_ranks(communicator: int, ranks: Sequence[int] | None) -> None:
    """Makes errors name the ranks of a communicator by their numbers in the job; None: by its own numbers."""
    if ranks is None:
        _ranks_of.pop(communicator, None)
    else:
        _ranks_of[communicator] = ranks


def name_positions(position_of: Callable[[int], str] | None) -> None:
    """Makes the native library's messages also give the mesh positions of the ranks that they name."""
    global _position_of
    _position_of = position_of


def name_of_rank(rank: int) -> str:
    """Returns the name of a rank in messages, with its position on the mesh if there is one."""
    return f"rank {rank}" if _position_of is None else f"rank {rank} ({_position_of(rank)})"


def of_other_rank(error: _E, rank: int) -> _E:
    """Marks an error that this rank raises because rank `rank` failed, so that the launcher names rank `rank`."""
    error.failed_rank = rank  # type: ignore[attr-defined]
    return error


def from_code(
    code: int,
    message: str,
    *,
    lost: Sequence[int] = (),
    named: Sequence[int] = (),
    tensor: str = "",
    communicator: int = 0,
) -> KerasDdlError:
    """Returns the error for a failure in the native library; see ddl_failure in ddl.h.

    Args:
        code: not 0; an unknown code is a CollectiveError.
        lost: ranks that died, left or show no sign of life.
        named: other ranks that the failure concerns.
        communicator: the id of the communicator that numbers these ranks.
    """
    ranks_of = _ranks_of.get(communicator)
    lost, named = ([rank if ranks_of is None else ranks_of[rank] for rank in ranks] for ranks in (lost, named))
    if _position_of is not None and (concerned := list(dict.fromkeys((*lost, *named)))[:_MOST_POSITIONS]):
        message += f" (On the mesh: {', '.join(map(name_of_rank, concerned))}.)"
    error = _BY_CODE.get(code, CollectiveError)(message)
    error.tensor = tensor
    if isinstance(error, RankLostError):
        error.has_left = code == _HAS_LEFT
        error.ranks = tuple(dict.fromkeys(lost))
        kept = RankLostError(message)  # a copy, because the traceback of the raised one would keep communicators alive
        kept.has_left, kept.ranks = error.has_left, error.ranks
        _lost.append(kept)
    return error


def lost_rank_behind(error: BaseException | None) -> RankLostError | None:
    """Returns the RankLostError that `error` was raised from, or whose message `error` contains, or None.

    Another library may have converted the RankLostError to an error of its own, which keeps only the text.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, RankLostError):
            return error
        text = str(error)
        for lost in reversed(_lost):
            if str(lost) and str(lost) in text:
                return lost
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None


def are_alike(one: str, other: str) -> bool:
    """Whether the messages of two ranks are equal apart from numbers."""
    return re.sub(r"\d+", "0", one) == re.sub(r"\d+", "0", other)
