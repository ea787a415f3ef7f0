"""Keras's optimizers average over ranks, outside of any strategy."""

from __future__ import annotations

import functools
import threading
from typing import Any

import keras

from keras_ddl.ddl import job, reduction

_applying = threading.local()


def install() -> None:
    """Changes keras.optimizers. Once per process."""
    for optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        _average(optimizer)


def _average(optimizer: type) -> None:
    original = optimizer.apply

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        # An optimizer within another gets what the outer one has made of reduced gradients. Whether they are finite,
        # for one, must be asked of gradients that are the same on all ranks.
        if getattr(_applying, "inside", False) or not job.is_training_together():
            return original(self, grads, trainable_variables)
        _applying.inside = True
        try:
            return original(self, reduction.averaged(list(grads)), trainable_variables)
        finally:
            _applying.inside = False

    optimizer.apply = apply
