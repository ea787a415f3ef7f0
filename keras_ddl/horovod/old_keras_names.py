"""Names of Keras 2 that reset callbacks of elastic jobs use: `optimizer.lr`, `keras.backend.set_value`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf

_MISSING = object()


def _set_rate(optimizer: Any, value: Any) -> None:
    optimizer.learning_rate = value


def _set_value(x: Any, value: Any) -> None:
    x.assign(value)


@contextlib.contextmanager
def available() -> Iterator[None]:
    """Adds the names to Keras 3 within the block; an existing `lr` of an optimizer class stays.

    Without this, `optimizer.lr = 0.1` would silently set an unused attribute, and tf.keras.backend.set_value would fail
    with variables of Keras 3.
    """
    lr = property(lambda optimizer: optimizer.learning_rate, _set_rate)
    names: list[tuple[Any, str, Any]] = []
    if not hasattr(keras_compat.BaseOptimizer, "lr"):
        names.append((keras_compat.BaseOptimizer, "lr", lr))
    for backend in (keras.backend, tf.keras.backend):
        names += [(backend, "set_value", _set_value), (backend, "get_value", keras.ops.convert_to_numpy)]
    before = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in names]
    for owner, name, value in names:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
