"""The training progress saved within an epoch (progress.py)."""

from __future__ import annotations

import json

import keras
import numpy as np
import tensorflow as tf

from keras_ddl.strategy.saving.progress import capture


def test_logs_may_contain_a_dict_of_compiled_metrics() -> None:
    """A custom train_step may return such logs, if it asks each metric for its result."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    logs = {"loss": tf.constant(1.0), "compile_metrics": {"mae": np.float32(2.0)}, "of_each_class": np.ones(3)}
    record, _ = capture(model, [], 0, 1, logs)
    assert json.loads(json.dumps(record))["logs"] == [{"loss": 1.0, "compile_metrics": {"mae": 2.0}}]
