"""Registers optimizers that reduce their gradients themselves, without a Strategy, as Horovod's do."""

from __future__ import annotations

import weakref
from typing import Any, Protocol


class Reduction(Protocol):
    """The reduction of an optimizer that reduces its gradients itself."""

    @property
    def is_active(self) -> bool:
        """Whether the optimizer reduces over more than one rank."""


_ATTRIBUTE = "_ddl_reduction"
_all: weakref.WeakSet[Any] = weakref.WeakSet()


def set_reduction(optimizer: Any, reduction: Reduction) -> None:
    """Attaches a reduction to an optimizer, without Keras's tracking, so that it is neither saved nor restored."""
    object.__setattr__(optimizer, _ATTRIBUTE, reduction)
    _all.add(reduction)


def reduction_of(optimizer: Any) -> Any:
    """Returns the reduction that `set_reduction` has attached to an optimizer, else None."""
    return getattr(optimizer, "__dict__", {}).get(_ATTRIBUTE)


def any_is_active() -> bool:
    """Whether an optimizer of this process reduces its gradients over several ranks."""
    return any(each.is_active for each in _all)
