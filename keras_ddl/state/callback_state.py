"""The state of callbacks that checkpoints save and that joining ranks get (resilience/joining.py).

If a callback has `get_state`, its result is the state. Otherwise a checkpoint keeps the attributes that Keras's
callbacks are known to keep from one epoch or batch to the next. A joining rank also gets all plain attributes that have
changed since fit began: numbers, strings, arrays, random generators, functions of modules, and lists and dicts of
these.
"""

from __future__ import annotations

import collections
import copy
import pickle
import random
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from keras_ddl.compat.keras import keras


class JobCallback(keras.callbacks.Callback):
    """The base class of keras_ddl's callbacks: what a Strategy asks of a callback.

    Attributes:
        never_stops_within_epoch: it does not ask to stop after a batch, which saves the ranks an agreement per batch. A
            program's own callback may have this attribute, too.
        runs_last: it saves what the other callbacks of the fit have changed, which it gets as `others`.
        of_this_process: attributes that a joining rank does not get from the others.
    """

    never_stops_within_epoch = True
    runs_last = False
    others: Sequence[Any] = ()
    of_this_process: tuple[str, ...] = ()


_KNOWN = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
}
_STATE = ""  # instead of the name of an attribute, for the result of `get_state`


def named(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Returns name -> callback.

    The name is the class, with a number if the class repeats; equal on all ranks, even if some have callbacks of other
    classes, too.
    """
    result: dict[str, Any] = {}
    counts = collections.Counter[str]()
    for each in callbacks:
        name = type(each).__name__
        counts[name] += 1
        result[name if counts[name] == 1 else f"{name} {counts[name]}"] = each
    return result


def with_state(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Returns name -> callback, for callbacks with a state that a checkpoint keeps.

    If a class repeats, the number in the name is the callback's place among all of these, as in earlier checkpoints.
    """
    result: dict[str, Any] = {}
    for each in callbacks:
        if isinstance(each, tuple(_KNOWN)) or hasattr(each, "get_state"):
            name = type(each).__name__
            result[name if name not in result else f"{name} {len(result)}"] = each
    return result


def for_checkpoint(callbacks: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Returns the states that a checkpoint keeps, by callback and attribute, as JSON."""
    return {name: _own_state(each) or _known_attributes(each) for name, each in with_state(callbacks).items()}


def set_states(callbacks: Mapping[str, Any], states: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Restores callbacks to earlier states, or to the states of another rank's callbacks with the same names."""
    for name, each in callbacks.items():
        update(each, states.get(name) or {})


class Changes:
    """Finds the changes to callbacks' state since this object was made, when fit began."""

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._before = {
            name: {key: pickle.dumps(value) for key, value in _everything(each).items()}
            for name, each in named(callbacks).items()
        }

    def since(self, callbacks: Iterable[Any], most_bytes: float = float("inf")) -> dict[str, dict[str, Any]]:
        """Returns what has changed, by callback and attribute.

        Unchanged attributes are left out, because they may differ between ranks. `most_bytes`: larger attributes are
        left out.
        """
        return {
            name: {
                key: value
                for key, value in _everything(each).items()
                if self._before.get(name, {}).get(key) != (pickled := pickle.dumps(value))
                and len(pickled) <= most_bytes
            }
            for name, each in named(callbacks).items()
        }


def _own_state(callback: Any) -> dict[str, Any]:
    return {_STATE: callback.get_state()} if hasattr(callback, "get_state") else {}


def _everything(callback: Any) -> dict[str, Any]:
    return plain_attributes(callback) | _own_state(callback)


def _known_attributes(callback: Any) -> dict[str, Any]:
    names = next(names for kind, names in _KNOWN.items() if isinstance(callback, kind))
    return {name: _as_json(getattr(callback, name)) for name in names if hasattr(callback, name)}


def _as_json(value: Any) -> Any:
    # Other values are numbers of NumPy or TensorFlow.
    return value if value is None or isinstance(value, (bool, int, float, str)) else float(value)


def plain_attributes(owner: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the attributes that are plain values.

    Attributes inside the parts of keras_ddl's own callbacks have names with dots.
    """
    attributes: dict[str, Any] = {}
    own = ("params", *getattr(owner, "of_this_process", ()))  # Keras's, which say whether this rank shows anything
    for key, value in vars(owner).items():
        if _is_plain(value) and key not in own:
            attributes[f"{prefix}{key}"] = value
        elif type(value).__module__.startswith("keras_ddl.callbacks.") and hasattr(value, "__dict__") and not prefix:
            attributes |= plain_attributes(value, f"{key}.")
    return attributes


def update(owner: Any, attributes: Mapping[str, Any]) -> None:
    """Sets attributes that `plain_attributes` returned for another object, and the state if there is one."""
    for key, value in attributes.items():
        if key == _STATE:
            if hasattr(owner, "set_state"):
                owner.set_state(value)
            continue
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
        return type(value).__module__ != "__main__"  # a class of the script may have other state
    if type(value) in (list, tuple, set, frozenset, collections.deque):
        return all(map(_is_plain, value))
    return type(value) is dict and all(_is_plain(each) for pair in value.items() for each in pair)
