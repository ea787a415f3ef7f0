"""Silences, on ranks other than 0, callbacks whose class a program derives from a writing callback.

The program's code in such a callback runs on every rank: it may add to the logs, change a rate, or stop. Inherited
hooks write on rank 0 only. On other ranks calls of the inherited hooks (by `super()`, by name, or by the list of
callbacks if the program does not override them) go to an object that follows the training in the writer's place
(standby.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from keras_ddl.compat import callbacks as keras_callbacks
from keras_ddl.compat.keras import keras
from keras_ddl.strategy import writers

_KEY = "keras_ddl_follower"  # an attribute of callbacks that do not write


class Follower(Protocol):
    """Receives the hooks of the writing class."""

    def hear(self, hook: str, args: tuple[Any, ...]) -> None: ...


def hush(callback: Any, kind: type, follower: Follower) -> None:
    """Passes calls of the hooks that this callback inherits from `kind`, a writing class, to `follower` instead of
    running them."""
    _replace_hooks(kind)
    vars(callback)[_KEY] = follower


def follower_of(callback: Any) -> Any:
    """Returns the follower of a hushed callback, or None if the callback writes itself."""
    return vars(callback).get(_KEY)


def let_write(callback: Any) -> None:
    """Lets a callback write itself from now on."""
    vars(callback).pop(_KEY, None)


@contextlib.contextmanager
def writing(callback: Any) -> Iterator[None]:
    """Lets the hooks of the writing class run within the block."""
    follower = vars(callback).pop(_KEY, None)
    try:
        yield
    finally:
        if follower is not None:
            vars(callback)[_KEY] = follower


def arguments_of(hook: str, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments of a hook by position, the logs last."""
    names = ("epoch", "logs") if "epoch" in hook else ("batch", "logs") if "batch" in hook else ("logs",)
    return tuple(args[n] if n < len(args) else given.get(name) for n, name in enumerate(names))


@functools.cache
def _replace_hooks(kind: Any) -> None:
    """Replaces the hooks of a writing class for its hushed objects."""
    for hook in writers.HOOKS:
        if getattr(kind, hook, None) is not getattr(keras.callbacks.Callback, hook):
            setattr(kind, hook, _heard(hook, getattr(kind, hook)))
    if kind.set_model is not keras.callbacks.Callback.set_model:
        kind.set_model = _without_writing(kind, kind.set_model)
    if kind is keras.callbacks.TensorBoard:
        keras_callbacks.hush_points(lambda callback: _KEY in vars(callback))


def _heard(hook: str, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        follower = follower_of(self)
        if follower is None:
            original(self, *args, **kwargs)
        else:
            follower.hear(hook, arguments_of(hook, args, kwargs))

    return method


def _without_writing(kind: type, original: Callable[..., None]) -> Callable[..., None]:
    """Returns a replacement for `set_model`, in which some callbacks write a description of the model."""

    @functools.wraps(original)
    def method(self: Any, model: Any) -> None:
        if follower_of(self) is None:
            original(self, model)
        elif kind is keras.callbacks.TensorBoard:
            keras_callbacks.set_model_in_silence(self, model, original)
        else:
            keras.callbacks.Callback.set_model(self, model)

    return method
