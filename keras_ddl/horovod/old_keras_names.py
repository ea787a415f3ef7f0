"""Names of Keras 2 and TensorFlow 1 in Horovod's scripts: `optimizer.lr`, `optimizer.variables()`, `K.set_value`.

Reset callbacks of elastic jobs have them while they run, a script that imports `horovod` always. What cannot be had is
explained when the script fails for lack of it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf

_MISSING = object()

# Names of Keras 2 that scripts use and Keras 3 has not -> what to write.
_INSTEAD = {
    "fit_generator": "model.fit, which takes generators and datasets",
    "evaluate_generator": "model.evaluate",
    "set_session": 'tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")',
    "get_session": "eager execution: tensors have numpy()",
}


@contextlib.contextmanager
def available() -> Iterator[None]:
    """Adds the names to Keras 3 within the block; an existing `lr` of an optimizer class stays.

    Without this, `optimizer.lr = 0.1` would silently set an unused attribute, and tf.keras.backend.set_value would fail
    with variables of Keras 3.
    """
    names = _names()
    before = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in names]
    _set(names)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@functools.cache
def install() -> None:
    """Adds the names for the rest of the process, and explains those of TensorFlow 1 and Keras 2 that end it."""
    _set(_names())
    sys.excepthook = _explaining(sys.excepthook)


def explain(error: BaseException) -> None:
    """Completes the message of an AttributeError for a name of TensorFlow 1 or Keras 2 with what to use."""
    name, module = getattr(error, "name", None), getattr(getattr(error, "obj", None), "__name__", "")
    if not isinstance(error, AttributeError) or not isinstance(name, str):
        return
    if module == "tensorflow" and hasattr(tf.compat.v1, name):
        text = f"It is a name of TensorFlow 1: tf.compat.v1.{name}. Scripts of Keras 3 need no session"
    elif name in _INSTEAD:
        text = f"It is a name of Keras 2. Use {_INSTEAD[name]}"
    else:
        return
    error.args = (f"{error}. {text}; see docs/from-horovod.md.",)


def _explaining(hook: Any) -> Any:
    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):  # explaining must not hide the error itself
            explain(error)
        hook(kind, error, trace)

    return excepthook


class _Variables(list[Any]):
    """The variables of an optimizer, which are an attribute in Keras 3 and were a method in Keras 2: both work."""

    def __call__(self) -> _Variables:
        return self


def _names() -> list[tuple[Any, str, Any]]:
    """Returns the names: (where, name, value)."""
    names: list[tuple[Any, str, Any]] = []
    if not hasattr(keras_compat.BaseOptimizer, "lr"):
        rate = property(lambda optimizer: optimizer.learning_rate, _set_rate)
        names.append((keras_compat.BaseOptimizer, "lr", rate))
    for backend in (keras.backend, tf.keras.backend):
        names += [(backend, "set_value", _set_value), (backend, "get_value", keras.ops.convert_to_numpy)]
    for kind in (keras_compat.BaseOptimizer, keras_compat.LossScaleOptimizer):
        if isinstance(own := vars(kind).get("variables"), property):
            names.append((kind, "variables", _callable_variables(own)))
    return names


def _set(names: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in names:
        setattr(owner, name, value)


def _callable_variables(original: property) -> property:
    def variables(self: Any) -> _Variables:
        """Variables of the optimizer. May be called, as in Keras 2."""
        assert original.fget is not None
        return _Variables(original.fget(self))

    return property(variables, original.fset, original.fdel)


def _set_rate(optimizer: Any, value: Any) -> None:
    optimizer.learning_rate = value


def _set_value(x: Any, value: Any) -> None:
    x.assign(value)
