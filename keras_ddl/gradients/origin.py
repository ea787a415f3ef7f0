"""Whether a tensor of a graph was computed from certain operations."""

from __future__ import annotations

from collections.abc import Container
from typing import Any


def comes_from(tensor: Any, sources: Container[str], clean: set[str] | None = None) -> bool:
    """Whether one of the operations called `sources` is `tensor`'s own, or one that it was computed from.

    Args:
        clean: names of operations that are known not to come from them; it grows, for the next tensor.
    """
    seen: set[str] = set()
    known = set() if clean is None else clean
    pending = [tensor.op]
    while pending:
        operation = pending.pop()
        if operation.name in sources:
            return True
        if operation.name not in seen and operation.name not in known:
            seen.add(operation.name)
            pending.extend(each.op for each in operation.inputs)
    known |= seen
    return False
