"""Patches of the functions that create Keras's variables, to mark their owners and to shard slots (slot_creation.py).

Patched: keras/src/optimizers/base_optimizer.py, backend/tensorflow/core.py, backend/tensorflow/optimizer.py (3.15.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl.compat import models
from keras_ddl.compat.optimizers import averaged_weights
from keras_ddl.strategy import observing
from keras_ddl.strategy.shards import (
    gathered_slots,
    laid_out,
    mesh_slots,
    sharded_weights,
    slot_creation,
    undecided,
)
from keras_ddl.strategy.variables.origin import created_by_keras


def initialize(original: Callable[..., Any], variable: Any, value: Any) -> Any:
    """Makes the tf.Variable of a keras.Variable, marked as made by Keras (distribute_loop/variables.py)."""
    with created_by_keras(True):
        value = laid_out.initial_value(variable, value)
        value = undecided.initial_value(variable, value)
        result = original(variable, sharded_weights.initial_value(variable, value))
    laid_out.note_made(variable)
    observer = observing.observer()
    if observer is not None:
        observer.made(variable)
    return result


def initialize_with_initializer(original: Callable[..., Any], variable: Any, initializer: Any) -> None:
    """Makes only this rank's slice or chunk of a keras.Variable, if its initializer can do this."""
    made = laid_out.from_initializer(variable, initializer)
    if made is None:
        made = sharded_weights.from_initializer(variable, initializer)
    if made is None:
        made = slot_creation.from_initializer(variable, initializer)
    if made is None:
        original(variable, initializer)
    else:
        models.replace_inner_variable(variable, made)


def build(original: Callable[..., Any], optimizer: Any, variables: Any) -> Any:
    """Refuses optimizers that are not known to compute each entry of a slot independently."""
    slot_creation.check_entrywise(optimizer)
    return original(optimizer, variables)


def add_variable_from_reference(
    original: Callable[..., Any], self: Any, reference_variable: Any, name: Any = None, initializer: Any = "zeros"
) -> Any:
    """Shards a slot as soon as it is made, so that no rank ever has all slots in full."""
    is_in_shards = mesh_slots.making_in_shards(slot_creation.is_in_shards(self, reference_variable, name))
    creating = slot_creation.creating_slot(self, reference_variable, name)
    with laid_out.following(reference_variable), is_in_shards, creating:
        variable = original(self, reference_variable, name=name, initializer=initializer)
    slot_creation.shard_slot(self, reference_variable, variable, name, initializer)
    return variable


def finalize_variable_values(original: Callable[..., Any], optimizer: Any, var_list: Any) -> Any:
    """Copies averages of weights (slots) into the weights after fit. COLLECTIVE if the averages are in shards."""
    averages = averaged_weights(optimizer)
    if not gathered_slots.slots_in(averages):
        return original(optimizer, var_list)
    for weight, average in zip(var_list, averages):
        if average is not None:  # one at a time, because a rank may not have memory for all
            with gathered_slots.gathered(gathered_slots.slots_in([average])):
                weight.assign(average)
    return None
