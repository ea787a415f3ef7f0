"""Models for mesh_*checks.py on 2 x 2 ranks, and comparisons with one process."""

import os
from typing import Any
from unittest import mock

import keras
import numpy as np

import keras_ddl
from keras_ddl import checkpoint as ckpt
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.cut.commit import after_commit
from keras_ddl.cut.values import requests
from strategy import common
from strategy.common import RANK, SIZE, assert_close, of_one_process, state

LAYOUT = keras.distribution.LayoutMap(keras_ddl.device_mesh((SIZE // 2, 2)))
LAYOUT[".*attention.*(query|key|value)/kernel"] = (None, "model", None)
LAYOUT[".*attention.*(query|key|value)/bias"] = ("model", None)
LAYOUT[".*attention.*attention_output/kernel"] = ("model", None, None)
LAYOUT[".*(up0|dense_wide)/kernel"] = (None, "model")
LAYOUT[".*(up0|dense_wide)/bias"] = ("model",)
LAYOUT[".*(down0|dense_narrow)/kernel"] = ("model", None)
with mock.patch.dict(os.environ, KERAS_DDL_DRIFT_CHECK_PERCENT="100"):
    STRATEGY = keras_ddl.Strategy(layout=LAYOUT)

after_commit._SMALL = requests._ALONE = 1  # small updates and gathers also wait for the commit
SHARDING = keras_ddl.Strategy(layout=LAYOUT, sharding="optimizer")  # ZeRO 1 beside the model axis
SHARDING.job.shards_from_elements = 4

TOKENS, LABELS = (np.random.default_rng(3).integers(0, 16, (23, 5)).astype("int32") for _ in range(2))


def dense() -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh", name="dense_wide")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="dense_narrow")(hidden), name="dense_model")


def compiled(strategy: Any, make: Any = dense, *options: Any, **more: Any) -> keras.Model:
    return common.compiled(strategy, make, *options, **more)


def alone(*options: Any, **more: Any) -> keras.Model | None:
    """Returns a one-process model on rank 0 and None elsewhere, because test machines have fewer cores than ranks."""
    return compiled(None, *options, **more) if RANK == 0 else None


def fit_both(model: keras.Model, one: keras.Model | None, *data: Any, **options: Any) -> None:
    for each in (model, one):
        if each is not None:
            each.fit(*data, **options)


def assert_equal(model: keras.Model, one: keras.Model | None) -> None:
    """Compares `model` with `one`, which only rank 0 has."""
    with STRATEGY.whole_model(model):  # works for models of SHARDING, too
        mine = state(model)
    assert_close(mine, of_one_process(lambda: state(one)))


def assert_saved_in_slices(saved: ckpt.Checkpoint, one: keras.Model | None) -> None:
    """Checks that each rank of a model axis wrote its half of cut variables, and that TensorFlow reads them all.

    Only rank 0 has `one`.
    """
    assert saved.state is not None
    files = sorted(file for file in saved.state["files"] if ".data-" in file)
    assert files == [f"{each}.data-0000{i}-of-00002" for each in ("optimizer", "weights") for i in range(2)], files
    held = bundle.read(saved.weights, {key: "float64" for key, _, _ in saved.state["weights"]})
    assert_close(held.values(), of_one_process(lambda: one.get_weights()))
    half = 8 * (6 * 8 + 8 + 8 * 2) // 2  # bytes of the cut weights; Adam has two slots for each
    assert [(saved.path / file).stat().st_size for file in files[1::2]] == [2 * half, half]
