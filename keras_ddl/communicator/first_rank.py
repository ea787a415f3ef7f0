"""Runs work on rank 0 alone, and shares the result or the error with all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar, cast

from keras_ddl import communicator
from keras_ddl.errors import KerasDdlError, RankError, of_other_rank

T = TypeVar("T")
_Outcome = tuple[object, Exception | None]


def is_first_rank() -> bool:
    """Whether this process is rank 0; true in every process before `keras_ddl.init()`."""
    return not communicator.is_initialized() or communicator.rank() == 0


def on_first_rank(work: Callable[[], T], name: str) -> T:
    """Runs `work` on rank 0 and returns its (picklable) result on every rank. COLLECTIVE, under `name`.

    Raises: the error of `work` on every rank (on other ranks as `portable` converts it), so that no rank waits in vain.
    """
    outcomes: list[_Outcome] = []  # at most one entry: the work runs once even if the exchange is repeated
    return cast(T, communicator.as_one(lambda: _made(work, name, outcomes)))


def portable(error: Exception) -> Exception:
    """Returns an exception of rank 0 in the form that other ranks raise.

    A KerasDdlError keeps its class, and its message begins with "rank 0: ". Any other exception stays as it is if it
    can be pickled, else becomes a RankError that names its class.
    """
    text = f"rank 0: {error}"
    try:
        sent = type(error)(text) if isinstance(error, KerasDdlError) else error
        copy = pickle.loads(pickle.dumps(sent))
    except Exception:
        copy = None
    sent = copy if isinstance(copy, Exception) else RankError(f"rank 0: {type(error).__name__}: {error}")
    return of_other_rank(sent, 0)


def _made(work: Callable[[], object], name: str, outcomes: list[_Outcome]) -> object:
    if is_first_rank() and not outcomes:
        outcomes.append(_outcome_of(work))
    result, problem = outcomes[0] if outcomes else (None, None)
    if communicator.is_initialized() and communicator.size() > 1:
        message = (result, None if problem is None else portable(problem))
        result, failure = communicator.broadcast_object(message, name=name)
        problem = problem or failure  # rank 0 raises its own error, with the traceback
    if problem is not None:
        raise problem
    return result


def _outcome_of(work: Callable[[], object]) -> _Outcome:
    try:
        return work(), None
    except Exception as error:
        return None, error
