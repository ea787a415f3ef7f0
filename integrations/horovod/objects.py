"""Collectives on Python objects, which are pickled. Ranks match calls by name or order; sessions are ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl.horovod.failures import as_tensorflow_errors
from keras_ddl.horovod.process_sets import ProcessSet, communicator_of, global_process_set, root_in


@as_tensorflow_errors
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the object of rank `root_rank`; other ranks' objects are ignored. See `keras_ddl.broadcast_object`."""
    root = root_in(process_set, root_rank)
    return communicator_of(process_set).broadcast_object(obj, root, name)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns a function that calls `broadcast_object` on its argument."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


@as_tensorflow_errors
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks, in the order of the ranks. See `keras_ddl.all_gather_object`."""
    return communicator_of(process_set).all_gather_object(obj, name)
