"""Runs work on rank 0 alone, and shares its result or its error with all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from keras_ddl import communicator
from keras_ddl.errors import KerasDdlError

T = TypeVar("T")


def is_first_rank() -> bool:
    """Whether this process is rank 0; true in every process before `keras_ddl.init()`."""
    return not communicator.is_initialized() or communicator.rank() == 0


def on_first_rank(work: Callable[[], T], name: str) -> T:
    """Runs `work` on rank 0 and returns its (picklable) result on every rank. COLLECTIVE, under `name`.

    Raises: the KerasDdlError that `work` raised, on every rank, so that none waits for rank 0 in vain.
    """
    result: T | None = None
    error: KerasDdlError | None = None
    if is_first_rank():
        try:
            result = work()
        except KerasDdlError as raised:
            error = raised
    if communicator.is_initialized() and communicator.size() > 1:
        message = (result, (type(error), str(error)) if error is not None else None)
        result, failure = communicator.broadcast_object(message, name=name)
        if failure is not None and not is_first_rank():
            kind, text = failure
            error = kind(f"rank 0: {text}")
    if error is not None:
        raise error
    return cast(T, result)
