"""Runs work on rank 0 alone, and shares its result or its error with all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from keras_ddl import communicator
from keras_ddl.errors import KerasDdlError

T = TypeVar("T")
_Outcome = tuple[object, KerasDdlError | None]


def is_first_rank() -> bool:
    """Whether this process is rank 0; true in every process before `keras_ddl.init()`."""
    return not communicator.is_initialized() or communicator.rank() == 0


def on_first_rank(work: Callable[[], T], name: str) -> T:
    """Runs `work` on rank 0 and returns its (picklable) result on every rank. COLLECTIVE, under `name`.

    Raises: the KerasDdlError that `work` raised, on every rank, so that none waits for rank 0 in vain.
    """
    outcomes: list[_Outcome] = []  # of this rank's work, which it does once, also where ranks are lost meanwhile
    return cast(T, communicator.as_one(lambda: _made(work, name, outcomes)))


def _made(work: Callable[[], object], name: str, outcomes: list[_Outcome]) -> object:
    if is_first_rank() and not outcomes:
        outcomes.append(_outcome_of(work))
    result, problem = outcomes[0] if outcomes else (None, None)
    if communicator.is_initialized() and communicator.size() > 1:
        message = (result, (type(problem), str(problem)) if problem is not None else None)
        result, failure = communicator.broadcast_object(message, name=name)
        if failure is not None and not is_first_rank():
            kind, text = failure
            problem = kind(f"rank 0: {text}")
    if problem is not None:
        raise problem
    return result


def _outcome_of(work: Callable[[], object]) -> _Outcome:
    try:
        return work(), None
    except KerasDdlError as error:
        return None, error
