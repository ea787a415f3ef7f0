"""Makes repeated `Strategy(...)` calls of one job return the same object.

Programs that were written for one process call `Strategy()` wherever they need it, as they would call
`tf.distribute.get_strategy()`. The Strategies are in module variables, because a process is one rank of one job at a
time, and nothing else knows all of its Strategies. `keras_ddl.shutdown` ends a job; its Strategies have another
topology and are not returned to the next job.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

from keras_ddl import communicator
from keras_ddl.strategy.base import BaseStrategy
from keras_ddl.strategy.job import Settings

# This job's Strategies, the latest last. They are kept alive, because making another is collective, so whether
# `existing` finds one must not depend on a rank's garbage collection.
_made: list[BaseStrategy] = []
# All Strategies still in use, including Strategies of the process's earlier jobs.
_alive: weakref.WeakSet[BaseStrategy] = weakref.WeakSet()
# Arguments that may differ between calls that return the same Strategy.
_NOT_SETTINGS = ("seed",)
_SETTINGS = {each.name for each in dataclasses.fields(Settings)}


def remember(strategy: BaseStrategy) -> None:
    """Keeps a Strategy that was made for this job."""
    _made[:] = [each for each in _made if each.topology is strategy.topology] + [strategy]
    _alive.add(strategy)


def alive() -> list[BaseStrategy]:
    """Returns all Strategies of this process that are still in use, also those of earlier jobs."""
    return list(_alive)


def existing(cls: type[Any], arguments: Mapping[str, Any]) -> Any:
    """Returns the latest Strategy of this job that has the settings of these arguments, or None.

    Args:
        arguments: by name, as the caller wrote them.
    """
    if not communicator.is_initialized():
        return None
    settings = {
        name: value
        for name, value in arguments.items()
        if name not in _NOT_SETTINGS and (value is not None or name in _SETTINGS)
    }
    place = communicator.topology()
    for each in reversed(_made):
        if type(each) is not cls or each.topology is not place:
            continue
        has = vars(each.job.settings)
        if all(name in has and _are_the_same(value, has[name]) for name, value in settings.items()):
            return each
    return None


def _are_the_same(one: object, other: object) -> bool:
    """Whether two settings are equal. True and 1 differ, so that every Strategy refuses a wrong setting."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def differences(one: BaseStrategy, other: BaseStrategy) -> str:
    """Returns how two Strategies differ, for a message."""
    if one.topology is not other.topology:
        return "before keras_ddl.shutdown()"
    pairs = [(name, value, getattr(other.job.settings, name)) for name, value in vars(one.job.settings).items()]
    return "with " + ", ".join(f"{name}={a!r} instead of {b!r}" for name, a, b in pairs if a != b)


def outside_message(what: str, name: str, strategy: BaseStrategy, other: BaseStrategy | None = None) -> str:
    """Returns the message for a model or an optimizer made outside `strategy`'s scope, perhaps in another scope."""
    if other is not None:
        return (
            "Models and optimizers trained together must be created under one keras_ddl.Strategy. "
            f"Received: {name!r}, made under a Strategy {differences(other, strategy)} (rank {strategy.rank}). "
            "Make one Strategy with the settings that you want, and use its scope everywhere."
        )
    return (
        f"{what} that is trained under a keras_ddl.Strategy must be made inside its scope. "
        f"Received: {name!r}, made outside (rank {strategy.rank}). Move the line that makes it under "
        "`with strategy.scope():`."
    )
