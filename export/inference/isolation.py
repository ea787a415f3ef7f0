"""Runs a model's inference outside the scopes and modes that training has set."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

Result = TypeVar("Result")


def isolated(work: Callable[[], Result]) -> Result:
    """Runs `work` in a new thread and returns its result.

    TensorFlow keeps strategy, device and name scopes per thread, and Keras its call context, so a trace in another
    thread is not affected by them. Only Keras's dtype policy is carried over.
    """
    import keras

    policy = keras.config.dtype_policy()
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            keras.config.set_dtype_policy(policy)
            outcome["result"] = work()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, name="keras_ddl-inference")
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


@contextlib.contextmanager
def portable_layers(model: Any) -> Iterator[None]:
    """Switches LSTM and GRU layers to kernels that every device has, within the block.

    With a GPU visible, 'auto' would put CudnnRNNV3 into the graph, which has no CPU kernel.
    """
    switched = [layer for layer in layers_of(model) if getattr(layer, "use_cudnn", False) in ("auto", True)]
    before = [layer.use_cudnn for layer in switched]
    for layer in switched:
        layer.use_cudnn = False
    try:
        yield
    finally:
        for layer, value in zip(switched, before):
            layer.use_cudnn = value


@contextlib.contextmanager
def unchanged(variables: Iterable[Any]) -> Iterator[None]:
    """Restores the values of tf.Variables after the block: seeds change when a model samples at inference."""
    import tensorflow as tf

    saved = [(variable, tf.identity(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in saved:
            # Only changed variables, because shared variables count assignments, and other ranks make none here.
            if not _are_same_bits(tf.convert_to_tensor(variable).numpy(), value.numpy()):
                variable.assign(value)


def _are_same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype == object:  # strings
        return np.array_equal(one, other)
    mine, others = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (one, other))
    return np.array_equal(mine, others)


def layers_of(model: Any) -> list[Any]:
    """Returns the model and all layers inside it, at any depth, also in Python lists."""
    from keras_ddl.compat import models  # exporting needs no Keras

    return models.layers_of(model)
