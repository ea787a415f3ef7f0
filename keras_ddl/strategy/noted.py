"""What callbacks have stored in their attributes since fit began, for newcomers to take over (joining.py).

Only plain values count: numbers, strings, arrays, random generators, functions of modules, and lists and dicts of
these.
"""

from __future__ import annotations

import collections
import copy
import pickle
import random
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_ddl.strategy.keras_patches.standby import Standby


class Noted:
    """What callbacks have stored when fit begins."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._attributes = {
            name: {key: pickle.dumps(value) for key, value in plain_attributes(each).items()}
            for name, each in _named(callbacks).items()
        }

    def since(self, callbacks: Sequence[Any], most_bytes: float = float("inf")) -> dict[str, dict[str, Any]]:
        """Returns what has changed since then, by callback and attribute; unchanged attributes may differ between
        ranks. `most_bytes`: larger attributes are left out.
        """
        return {
            name: {
                key: value
                for key, value in plain_attributes(each).items()
                if self._attributes.get(name, {}).get(key) != (pickled := pickle.dumps(value))
                and len(pickled) <= most_bytes
            }
            for name, each in _named(callbacks).items()
        }


def take_over(callbacks: Sequence[Any], noted: dict[str, dict[str, Any]]) -> None:
    """Gives callbacks the attributes of another rank's callbacks."""
    for name, each in _named(callbacks).items():
        update(each, noted.get(name, {}))


def _named(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Returns name -> callback, with a standby's writer in its place; equal names on all ranks."""
    named: dict[str, Any] = {}
    for callback in callbacks:
        each = callback.writer if isinstance(callback, Standby) else callback
        name, number = type(each).__qualname__, 0
        while f"{name} {number}" in named:
            number += 1
        named[f"{name} {number}"] = each
    return named


def plain_attributes(owner: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the attributes that are plain values, also those inside the parts of keras_ddl's own callbacks, under
    names with dots.
    """
    attributes: dict[str, Any] = {}
    own = ("params", *getattr(owner, "of_this_process", ()))  # Keras's, which say whether this rank shows anything
    for key, value in vars(owner).items():
        if _is_plain(value) and key not in own:
            attributes[f"{prefix}{key}"] = value
        elif type(value).__module__.startswith("keras_ddl.callbacks.") and hasattr(value, "__dict__") and not prefix:
            attributes |= plain_attributes(value, f"{key}.")
    return attributes


def update(owner: Any, attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        part, _, name = key.rpartition(".")
        inner = getattr(owner, part, None) if part else owner
        if inner is not None:
            vars(inner)[name] = _updated(vars(inner).get(name), value)


def _updated(mine: Any, value: Any) -> Any:
    """Returns `value`, copied into the existing list, dict or set, because other objects may refer to it."""
    if type(mine) is not type(value) or not isinstance(value, (list, dict, set, collections.deque)):
        return value
    kept = copy.copy(value)  # which may be the same object
    mine.clear()
    if isinstance(mine, (list, collections.deque)):
        mine.extend(kept)
    else:
        mine.update(kept)
    return mine


def _is_plain(value: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return True
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    if isinstance(value, types.FunctionType):  # of a module, as keras.ops.less; not one of the script's own objects
        return "<" not in value.__qualname__ and value.__module__ in sys.modules
    if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)):
        return type(value).__module__ != "__main__"  # of a class of the script's nothing is known
    if type(value) in (list, tuple, set, frozenset, collections.deque):
        return all(map(_is_plain, value))
    return type(value) is dict and all(_is_plain(each) for pair in value.items() for each in pair)
