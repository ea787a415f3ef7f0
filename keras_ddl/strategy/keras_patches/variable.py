"""The tf.Variable of a keras.Variable, which is none of the program's own (strategy/distribute_loop/variables.py).

Patched: keras/src/backend/tensorflow/core.py (3.15.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl.strategy.variable_origin import of_keras


def initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the tf.Variable, knowing whose it is."""

    def _initialize(self: Any, value: Any) -> Any:
        with of_keras():
            return original(self, value)

    return _initialize
