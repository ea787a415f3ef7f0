"""Momentum correction: rescales SGD's momentum when the learning rate changes (Goyal et al. 2017, section 3).

Keras's SGD keeps the rate inside its buffer (v <- m*v - rate*g, w <- w + v), so a step made at a new rate still
carries the old rate in everything it remembers. The form without the rate inside, u <- m*u + g, w <- w - rate*u, has
v = -rate*u; the two are equal at every rate exactly when v is multiplied by new_rate / old_rate before the first step
at the new rate. Scaling the buffer once is that equality, for plain and for Nesterov momentum. (Horovod scales `m` for
one batch, which is the same for plain momentum only; and in Keras 3 `m` is a constant of the traced step.)

RMSprop's momentum keeps the rate inside in the same way. Adam and similar optimizers do not need a correction.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_ddl.compat.models import unwrapped
from keras_ddl.compat.optimizers import rmsprop_momentums
from keras_ddl.strategy.shards import sharded_slots


def buffers_with_rate(optimizer: Any) -> list[Any]:
    """Returns the optimizer's variables that are proportional to the learning rate; none before it is built."""
    optimizer = unwrapped(optimizer)
    if isinstance(optimizer, keras.optimizers.SGD):
        buffers = getattr(optimizer, "momentums", [])
    elif isinstance(optimizer, keras.optimizers.RMSprop) and optimizer.momentum > 0:
        buffers = rmsprop_momentums(optimizer)
    else:
        buffers = []
    return [buffer for buffer in buffers if buffer is not None]


class MomentumCorrection:
    """Scales one optimizer's buffers. Cost: one read and one write of the buffers for each change of the rate."""

    def __init__(self) -> None:
        self._buffers: list[Any] = []
        self._scale: Any = None

    def scale(self, optimizer: Any, ratio: float) -> None:
        """Multiplies every buffer by `ratio` = new rate / old rate."""
        buffers = [each for some in buffers_with_rate(optimizer) for each in sharded_slots.local_variables(some)]
        if not buffers:
            return
        if self._scale is None or [id(b) for b in buffers] != [id(b) for b in self._buffers]:
            # One traced function for all buffers: an eager assignment costs some 50 us, in every batch of a warm-up.
            self._buffers, self._scale = buffers, tf.function(_scaler(buffers), autograph=False)
        self._scale(tf.constant(ratio, tf.float64))


def _scaler(buffers: list[Any]) -> Any:
    def scale_buffers(ratio: tf.Tensor) -> None:
        for buffer in buffers:
            buffer.assign(keras.ops.multiply(buffer, tf.cast(ratio, buffer.dtype)))

    return scale_buffers
