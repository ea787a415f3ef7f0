"""Which tensors of a graph were computed from certain operations."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from keras_ddl.compat.tensorflow import tf


def comes_from(tensor: Any, sources: Container[str]) -> bool:
    """Whether one of the operations called `sources` is `tensor`'s own, or one that it was computed from."""
    seen: set[str] = set()
    pending = [tensor.op]
    while pending:
        operation = pending.pop()
        if operation.name in sources:
            return True
        if operation.name not in seen:
            seen.add(operation.name)
            pending.extend(each.op for each in operation.inputs)
    return False


def computed_from(sources: Iterable[tf.Operation]) -> set[str]:
    """Returns the names of `sources` and of all operations of their graph that compute with their results."""
    pending = list(sources)
    names = {operation.name for operation in pending}
    while pending:
        for user in (user for result in pending.pop().outputs for user in result.consumers()):
            if user.name not in names:
                names.add(user.name)
                pending.append(user)
    return names
