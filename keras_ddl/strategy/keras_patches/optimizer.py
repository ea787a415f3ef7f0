"""Patches of Keras's optimizers, for slots that a Strategy(shard_optimizer=True) holds in shards (sharded_slots.py).

Patched: keras/src/optimizers/base_optimizer.py, keras/src/backend/tensorflow/optimizer.py (3.15.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl.compat.optimizers import averaged_weights
from keras_ddl.strategy.shards import gathered_slots, sharded_slots


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses optimizers of which it is not known that each entry of a slot is computed by itself."""

    def wrapper(self: Any, variables: Any) -> Any:
        sharded_slots.check(self)
        return original(self, variables)

    return wrapper


def add_variable_from_reference(original: Callable[..., Any]) -> Callable[..., Any]:
    """Shards a slot from the moment it is made: no rank ever has all slots in full."""

    def wrapper(self: Any, reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        with sharded_slots.making(self, reference_variable, name):
            variable = original(self, reference_variable, name=name, initializer=initializer)
        sharded_slots.hold(self, reference_variable, variable, name, initializer)
        return variable

    return wrapper


def finalize_variable_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """At the end of fit the averages of weights, which are slots, take the weights' place. COLLECTIVE then."""

    def wrapper(self: Any, var_list: Any) -> Any:
        with gathered_slots.gathered(gathered_slots.slots_in(averaged_weights(self))):
            return original(self, var_list)

    return wrapper
