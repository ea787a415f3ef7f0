"""Optimizers that reduce their gradients by themselves where there is no Strategy, as Horovod's do."""

from __future__ import annotations

import weakref
from typing import Any, Protocol


class Reduction(Protocol):
    """What such an optimizer reduces its gradients with."""

    @property
    def is_active(self) -> bool:
        """Whether it has more than one rank to reduce over."""


_ATTRIBUTE = "_ddl_reduction"
_all: weakref.WeakSet[Any] = weakref.WeakSet()


def set_reduction(optimizer: Any, reduction: Reduction) -> None:
    """Notes what an optimizer reduces with, past Keras's tracking: it is no part that is saved or restored."""
    object.__setattr__(optimizer, _ATTRIBUTE, reduction)
    _all.add(reduction)


def reduction_of(optimizer: Any) -> Any:
    """Returns what an optimizer reduces with, as `set_reduction` has noted it; None: it does not."""
    return getattr(optimizer, "__dict__", {}).get(_ATTRIBUTE)


def any_is_active() -> bool:
    """Whether some optimizer of this process reduces its gradients over several ranks."""
    return any(each.is_active for each in _all)
