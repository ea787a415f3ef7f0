"""Patches that let a fit begin in the middle of an epoch, where a checkpoint was made (`strategy.position`).

Patched: keras/src/backend/tensorflow/trainer.py, trainers/epoch_iterator.py (3.15.1).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from keras_ddl.strategy import position

_thread = threading.local()


def fit(original: Callable[..., Any]) -> Callable[..., Any]:
    """The first EpochIterator that fit makes is the one that trains."""

    def wrapper(self, *args, **kwargs):
        _thread.model = self
        try:
            with position.of_one_fit(self):
                return original(self, *args, **kwargs)
        finally:
            _thread.model = None

    return wrapper


def epoch_iterator_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """The training's iterator gets its `Reading`."""

    def __init__(self, *args, **kwargs):
        model, _thread.model = getattr(_thread, "model", None), None
        original(self, *args, **kwargs)
        if model is not None:
            position.attach(model, self)

    return __init__


def enumerate_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    """An epoch begins where the reading was told to go."""

    def _enumerate_iterator(self):
        reading = getattr(self, "_ddl_reading", None)
        return original(self) if reading is None else reading.epoch(original)

    return _enumerate_iterator
