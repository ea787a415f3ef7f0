"""The model and data that `keras-ddl bench train` trains: a built-in network, or the result of the user's function.

The function is called on every rank, in the scope of a Strategy (on a single rank without one), with the number of rows
of a global batch, which all ranks share:

    def subject(batch: int):
        return model, data                   # compiled; data of batches of `batch` rows
        return model, data, validation       # for --to-accuracy

`data` and `validation` are what `fit` takes as its first argument: (x, y) of NumPy arrays, a tf.data.Dataset of batches
or a keras.utils.PyDataset. The function must choose a learning rate for this batch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

from keras_ddl.bench.training.networks import NETWORKS
from keras_ddl.errors import ConfigError

# Batches of a built-in network's learnable rows for training and for validation.
_TRAINING, _VALIDATION = 64, 8


class Subject(NamedTuple):
    """A compiled model, endless batches for it, and the data for --to-accuracy."""

    model: Any
    batches: Any
    data: Any
    validation: Any


def check(name: str) -> None:
    """Raises: ConfigError: `name` is neither a built-in network nor module:function with an importable module."""
    if name in NETWORKS:
        return
    module, _, function = name.partition(":")
    add_folder()
    try:
        exists = function.isidentifier() and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        exists = False
    if not exists:
        raise ConfigError(
            f"bench train: the subject must be one of {', '.join(NETWORKS)}, or module:function with a module that can "
            f"be imported. Received: {name!r}. Start it in the module's folder, or set PYTHONPATH."
        )


def add_folder() -> None:
    """Adds the current folder to sys.path, as `python -m` does."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def units_of_row(name: str) -> tuple[str, int]:
    """Returns the unit of speed ("words" for rows of tokens, else "rows"), and the number of units in a row."""
    network = NETWORKS.get(name)
    return ("words", network.shape[0]) if network and network.tokens else ("rows", 1)


def make(name: str, batch: int, *, learnable: bool, rate: float = 0.01) -> Subject:
    """Returns the subject for global batches of `batch` rows. Call it in the scope of the Strategy, on all ranks.

    Args:
        learnable: for built-in networks, many batches that can be learned; otherwise one random batch, repeated, so
            that reading costs nothing.
        rate: learning rate for built-in networks.
    Raises: ConfigError: the function returns something else.
    """
    network = NETWORKS.get(name)
    if network is None:
        return _user_subject(name, batch)
    import keras

    model = network.make()
    metrics = ["accuracy"] if learnable else None
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "sparse_categorical_crossentropy", metrics=metrics)
    if not learnable:
        import tensorflow as tf

        rows = network.rows(batch)
        return Subject(model, tf.data.Dataset.from_tensor_slices(rows).batch(batch).cache().repeat(), rows, None)
    data = network.learnable_rows(_TRAINING * network.batch, seed=0)
    validation = network.learnable_rows(_VALIDATION * network.batch, seed=1)
    return Subject(model, _endless(data, batch), data, validation)


def _user_subject(name: str, batch: int) -> Subject:
    module, _, function = name.partition(":")
    add_folder()
    try:
        make_subject = getattr(importlib.import_module(module), function)
    except AttributeError:
        raise ConfigError(f"bench train: {module} must have a function {function}. Received: {name!r}.") from None
    parts = make_subject(batch)
    if not isinstance(parts, tuple) or len(parts) not in (2, 3) or getattr(parts[0], "optimizer", None) is None:
        raise ConfigError(
            f"bench train: {name} must return a compiled Keras model and data, (model, data) or (model, data, "
            f"validation). Received: {_shown(parts)}."
        )
    model, data, *rest = parts
    return Subject(model, _endless(data, batch), data, rest[0] if rest else None)


def _shown(parts: Any) -> str:
    return f"({', '.join(type(part).__name__ for part in parts)})" if isinstance(parts, tuple) else type(parts).__name__


def _endless(data: Any, batch: int) -> Any:
    """Returns endless batches of arrays or a tf.data.Dataset; other data unchanged."""
    import tensorflow as tf

    if isinstance(data, tuple):
        return tf.data.Dataset.from_tensor_slices(data).batch(batch, drop_remainder=True).repeat()
    return data.repeat() if isinstance(data, tf.data.Dataset) else data
