"""Patches of keras.Variable: the state of layers is that of one process (strategy/layer_state.py).

Patched: keras/src/backend/tensorflow/core.py (3.15.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy import layer_state, step
from keras_ddl.strategy.variable_origin import not_of_the_program


def direct_assign(original: Callable[..., Any]) -> Callable[..., Any]:
    """Assigns a value to a variable; to the state of a layer and to a learning rate, what one process would have."""

    def _direct_assign(self, value):
        running = step.current()
        if running is not None and running.share.size > 1:
            if not self.trainable and layer_state.is_state(running.model, self):
                value = layer_state.updated(running, self, tf.convert_to_tensor(value))
            return original(self, value)
        result = original(self, value)
        if keras_compat.replica_strategy() is None and tf.executing_eagerly():
            layer_state.set_outside(self)
        return result

    return _direct_assign


def initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the tf.Variable of a keras.Variable, which is none of the program's own (strategy/variables.py)."""

    def _initialize(self, value):
        with not_of_the_program():
            return original(self, value)

    return _initialize
