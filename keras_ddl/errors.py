"""The errors of keras_ddl: one hierarchy, so that `except keras_ddl.errors.KerasDdlError` catches all of them.

Each also derives from the built-in exception a caller would expect. A message states the rule, what was received, on
which rank, and what to do.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
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

    # While it traces a tf.function, TensorFlow's autograph replaces exceptions it does not know by a StagingError. This
    # attribute tells it to let them through as they are (tensorflow/python/autograph/impl/api.py, 2.16 to 2.21).
    ag_pass_through = True


class ConfigError(KerasDdlError, ValueError):
    """An invalid argument or KERAS_DDL_* variable."""


class NotInitializedError(KerasDdlError, RuntimeError):
    """A function that needs the other ranks was called before `keras_ddl.init()` or after `keras_ddl.shutdown()`."""


class DependencyError(KerasDdlError, ImportError):
    """TensorFlow, MPI, the native library or a part of keras_ddl is missing, or its version does not work with
    keras_ddl."""


class RankMismatchError(KerasDdlError, RuntimeError):
    """The ranks disagree about a collective (kind, dtype, shape, op, root). It is raised on every rank."""


class DriftError(RankMismatchError):
    """Ranks that train together no longer hold the same weights. It is raised on every rank."""


class RankLostError(KerasDdlError, RuntimeError):
    """Another rank died, left the job or shut down while this one was waiting for it."""

    # Whether it left in an orderly way: its process ended by itself, or called shutdown().
    has_left = False
    # The ranks that are gone, as far as is known.
    ranks: tuple[int, ...] = ()


class DeadlineError(KerasDdlError, TimeoutError):
    """Ranks did not arrive at a collective within KERAS_DDL_DEADLINE_SECONDS."""


class CheckFailedError(KerasDdlError, RuntimeError):
    """`all_reduce_n(check=...)`: the result differs from that of plain MPI_Allreduce by more than the tolerance."""


class CollectiveError(KerasDdlError, RuntimeError):
    """A collective failed for another reason: a bug, or an error of the operating system or of MPI."""


class StepCancelledError(CollectiveError):
    """A collective was cancelled because another rank's step failed. The call of the step raises that rank's error
    instead."""


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
    9: RankMismatchError,
    10: RankLostError,
    14: RankLostError,
    15: CheckFailedError,
}
_HAS_LEFT = 14
_MOST_POSITIONS = 4  # in one message
# How the native library names the ranks that are gone.
_GONE = re.compile(r"\brank (\d+)(?: on host \S+ \(process \d+\) died| died| has left)")
_SILENT = re.compile(r"no sign of life from rank\(s\) ([\d, ]+\d)")
# The last errors of lost ranks in this process, the newest last.
_lost: collections.deque[RankLostError] = collections.deque(maxlen=8)


_NAMED = re.compile(r"\brank(?:\(s\))? (\d+(?:, \d+)*)")
# Given a message and the number of a rank in it, returns its number among all ranks, and its position in words.
_position_of: Callable[[str, int], tuple[int, str]] | None = None


def name_positions(position_of: Callable[[str, int], tuple[int, str]] | None) -> None:
    """From now on messages of the native library also give the positions on a mesh of the ranks that they name."""
    global _position_of
    _position_of = position_of


def name_of_rank(rank: int) -> str:
    """Returns the name of a rank in messages, with its position on the mesh if there is one."""
    return f"rank {rank}" if _position_of is None else f"rank {rank} ({_position_of('', rank)[1]})"


def of_other_rank(error: _E, rank: int) -> _E:
    """Marks an error that this rank raises because rank `rank` failed, so that the launcher names rank `rank`."""
    error.failed_rank = rank  # type: ignore[attr-defined]
    return error


def from_code(code: int, message: str) -> KerasDdlError:
    """Returns the error for a status of the native library (`code` != 0); an unknown code is a CollectiveError."""
    own_message, position_of = message, _position_of
    if position_of is not None:
        numbers = dict.fromkeys(int(each) for text in _NAMED.findall(message) for each in text.split(","))
        places = [position_of(own_message, each) for each in list(numbers)[:_MOST_POSITIONS]]
        if places:
            message += f" (On the mesh: {', '.join(f'rank {rank} ({position})' for rank, position in places)}.)"
    error = _BY_CODE.get(code, CollectiveError)(message)
    if isinstance(error, RankLostError):
        error.has_left = code == _HAS_LEFT
        silent = _SILENT.findall(message)
        names = [*_GONE.findall(message), *(name for text in silent for name in text.split(","))]
        ranks = tuple(dict.fromkeys(map(int, names)))
        error.ranks = ranks if position_of is None else tuple(position_of(own_message, each)[0] for each in ranks)
        kept = RankLostError(message)  # not the one that is raised: its traceback would keep communicators alive
        kept.has_left, kept.ranks = error.has_left, error.ranks
        _lost.append(kept)
    return error


def lost_rank_behind(error: BaseException | None) -> RankLostError | None:
    """Returns the RankLostError that `error` was raised from, or whose message `error` contains, or None.

    Another library may have turned the RankLostError into an error of its own that keeps only the text.
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
