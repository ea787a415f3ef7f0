"""Adds names of Keras 2 for Horovod's scripts: `optimizer.lr`, `optimizer.variables()`, `keras.backend.set_value`.

Reset callbacks of elastic jobs have the names while they run; a script that imports `horovod` always has them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import replacing
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf


@contextlib.contextmanager
def available() -> Iterator[None]:
    """Adds the names to Keras 3 within the block; an existing `lr` of an optimizer class stays.

    Without this, `optimizer.lr = 0.1` would silently set an unused attribute, and tf.keras.backend.set_value would fail
    with variables of Keras 3.
    """
    undo = replacing.set_values(_names())
    try:
        yield
    finally:
        undo()


@functools.cache
def install() -> None:
    """Adds the names for the rest of the process."""
    replacing.set_values(_names())


class _Variables(list[Any]):
    """The variables of an optimizer, as an attribute (Keras 3) and as a method (Keras 2)."""

    def __call__(self) -> _Variables:
        return self


def _names() -> list[tuple[Any, str, Any]]:
    """Returns the names: (where, name, value)."""
    names: list[tuple[Any, str, Any]] = []
    if not hasattr(keras_compat.BaseOptimizer, "lr"):
        rate = property(
            lambda optimizer: optimizer.learning_rate, lambda each, value: setattr(each, "learning_rate", value)
        )
        names.append((keras_compat.BaseOptimizer, "lr", rate))
    for backend in (keras.backend, tf.keras.backend):
        names += [
            (backend, "set_value", lambda x, value: x.assign(value)),
            (backend, "get_value", keras.ops.convert_to_numpy),
        ]
    for kind in (keras_compat.BaseOptimizer, keras_compat.LossScaleOptimizer):
        if isinstance(own := vars(kind).get("variables"), property):
            names.append((kind, "variables", _callable_variables(own)))
    return names


def _callable_variables(original: property) -> property:
    def variables(self: Any) -> _Variables:
        """The variables of the optimizer, which may be called, as in Keras 2."""
        assert original.fget is not None
        return _Variables(original.fget(self))

    return property(variables, original.fset, original.fdel)
