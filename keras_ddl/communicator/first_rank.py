"""Work that only rank 0 does, and whose failure every rank must learn of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from keras_ddl import communicator
from keras_ddl.errors import KerasDdlError

T = TypeVar("T")


def is_first_rank() -> bool:
    """Whether this process is rank 0; before `keras_ddl.init()` every process is on its own and is."""
    return not communicator.is_initialized() or communicator.rank() == 0


def on_first_rank(work: Callable[[], T], name: str) -> T:
    """Runs `work` on rank 0 and returns its (picklable) result on every rank. COLLECTIVE, under `name`.

    Raises: the KerasDdlError that `work` raised, on every rank: none is left waiting for a rank 0 that stopped.
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
        told = communicator.broadcast_object(message, name=name)
        if not is_first_rank():
            result = told[0]
            error = told[1][0](f"rank 0: {told[1][1]}") if told[1] is not None else None
    if error is not None:
        raise error
    return cast(T, result)  # rank 0 has sent it, or the error
