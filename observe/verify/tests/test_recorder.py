"""The recording of one process, without ranks: names, kinds, last bits, callbacks, files."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ddl
from keras_ddl.cut import Report, work_of
from keras_ddl.verify import recorder
from keras_ddl.verify.recording import Plan, Recording


def small_model() -> keras.Model:
    layers = [keras.layers.Dense(3, name="first"), keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers], name="small")
    model.compile(keras.optimizers.Adam(name="adam"), "mse", metrics=["mae"])  # otherwise the second one is "adam_1"
    return model


def test_recorder_stores_weights_slots_and_logs_of_a_step(tmp_path: Path) -> None:
    model = small_model()
    logs = model.train_on_batch(np.ones((4, 2)), np.ones((4, 1)), return_dict=True)
    following = recorder.Recorder(tmp_path, Plan(5))
    following.begin_step("small", model)
    following.end_step("small", model, (), logs)
    following.end_epoch(model, {"loss": 0.5, "nested": {"mae": 1.0}})
    following.predicted(model, [np.ones(3), {"a": np.zeros(2)}])
    read = Recording(tmp_path)
    labels = ["training step", "logs of an epoch or evaluation", "prediction"]
    assert [each.label for each in read.events] == [f"{each} of small" for each in labels]
    step, epoch, prediction = read.events
    arrays = read.arrays(step)
    np.testing.assert_array_equal(arrays["small/first/kernel"], model.layers[0].kernel.numpy())
    assert {"small/norm/moving_mean", "adam/iteration", "returned loss", "returned mae"} <= arrays.keys()
    assert (step.kinds["small/first/kernel"], step.kinds["small/norm/moving_mean"]) == ("weights", "mean")
    assert Counter(step.kinds.values())["momentum"] == Counter(step.kinds.values())["velocity"] == 6
    assert not any("mean_absolute_error" in name for name in arrays)  # variables of metrics are not recorded
    assert sorted(epoch.kinds) == ["log loss", "log nested/mae"]
    assert sorted(prediction.kinds) == ["output 0", "output 1/a"]
    assert (read.facts["dtypes"], read.facts["epsilon"]) == (["float32"], 2.0**-23)
    assert read.facts["trained_alone"] == ["small"]


def test_metrics_that_count_rows_have_their_own_kind(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")], name="counting")
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="area"), "mae"])
    logs = model.train_on_batch(np.ones((4, 2)), np.ones((4, 1)), return_dict=True)
    following = recorder.Recorder(tmp_path, Plan(5))
    following.end_step("counting", model, (), logs)
    following.end_epoch(model, {"val_accuracy": 0.5, "loss": 0.5})
    step, epoch = Recording(tmp_path).events
    kinds = {name: kind for name, kind in step.kinds.items() if name.startswith("returned")}
    assert {name for name, kind in kinds.items() if kind == "counts"} == {"returned accuracy", "returned area"}
    assert {name for name, kind in kinds.items() if kind == "returned"} == {"returned loss", "returned mae"}
    assert epoch.kinds == {"log val_accuracy": "counts", "log loss": "logs"}


def test_recorder_changes_the_last_bit_of_weights_but_no_random_state(tmp_path: Path) -> None:
    model = small_model()
    before, state = [each.numpy() for each in model.trainable_variables], np.random.get_state()[1].tolist()
    recorder.Recorder(tmp_path, Plan(5, last_bit=True)).begin_step("small", model)
    for old, variable in zip(before, model.trainable_variables):
        changes = np.abs(variable.numpy() - old)
        assert np.max(changes) <= 2 * np.spacing(np.max(np.abs(old))) and np.all((changes > 0) | (old == 0))
    assert np.random.get_state()[1].tolist() == state


def test_recorder_changes_last_bits_of_weights_created_by_the_first_step(tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Dense(1, name="first")], name="small")
    model.compile("sgd", "mse")
    following = recorder.Recorder(tmp_path, Plan(5, last_bit=True))

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        made, result = not model.built, model(x)
        for each in model.trainable_variables if made else ():
            following.made(each)  # they had no values before the step was traced
        return result

    following.begin_step("small", model)
    step(tf.ones((4, 2)))
    (before, _) = (each.numpy() for each in model.trainable_variables)
    for _ in range(2):
        following.end_step("small", model, (), {"loss": 0.5})
    one, two = (Recording(tmp_path).arrays(each)["small/first/kernel"] for each in Recording(tmp_path).events)
    np.testing.assert_array_equal(one, before)
    assert np.all(two != before) and np.max(np.abs(two - before)) <= 2 * np.spacing(np.max(np.abs(before)))
    np.testing.assert_array_equal(two, model.layers[0].kernel.numpy())  # changed once


def test_callbacks_that_write_or_resume_are_left_out(tmp_path: Path) -> None:
    following = recorder.Recorder(tmp_path, Plan(5))
    stays = keras.callbacks.EarlyStopping()
    progress = keras.callbacks.ProgbarLogger()  # writes, but not to a file
    chosen = [keras.callbacks.CSVLogger("log.csv"), stays, keras_ddl.callbacks.Checkpoint(str(tmp_path / "ckpt"))]
    assert following.callbacks_of_fit(chosen) == [stays]
    assert following.callbacks_of_fit(stays) == [stays]
    foreign = type("WandbMetricsLogger", (keras.callbacks.Callback,), {})
    foreign.__module__ = "wandb.integration.keras.callbacks.metrics_logger"
    assert following.callbacks_of_fit([foreign(), stays, progress]) == [stays, progress]
    assert following.callbacks_of_fit(None) == []
    of_list = keras.callbacks.CallbackList(chosen, add_history=True)
    kept = following.callbacks_of_fit(of_list).callbacks
    assert [type(each).__name__ for each in kept] == ["EarlyStopping", "History"]


def test_files_written_by_python_are_noted(tmp_path: Path) -> None:
    following = recorder.Recorder(tmp_path / "run-1" / "recording", Plan(5))
    writes = os.O_WRONLY | os.O_CREAT
    following.audit("open", (str(tmp_path / "out.txt"), "w", writes))
    following.audit("open", (str(tmp_path / "in.txt"), "r", os.O_RDONLY))
    following.audit("open", (str(tmp_path / "run-1" / "files" / "x"), "w", writes))
    following.audit("open", (3, "w", writes))
    following.predicted(small_model(), np.ones(1))
    assert Recording(tmp_path / "run-1" / "recording").facts["files_written"] == [str(tmp_path / "out.txt")]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: tf.matmul(x, x, transpose_a=True), 5 * 5 * 2 * 4),
        (lambda x: tf.einsum("ab,cb->ac", x, tf.ones([3, 5])), 4 * 3 * 2 * 5),
        (lambda x: tf.nn.conv2d(x[None, :, :, None], tf.ones([3, 3, 1, 8]), 1, "VALID"), 2 * 3 * 8 * 2 * 9),
    ],
)
def test_work_of_an_operation(function: object, expected: float) -> None:
    graph = tf.function(function).get_concrete_function(tf.TensorSpec([4, 5])).graph
    kinds = ("MatMul", "Einsum", "Conv2D")
    assert [work_of(each) for each in graph.get_operations() if each.type in kinds] == [expected]


def test_share_of_replicated_arithmetic_and_release_of_the_graph(tmp_path: Path) -> None:
    with tf.Graph().as_default() as graph:
        square = tf.zeros((4, 4))
        tf.matmul(square, square)
        tf.matmul(square, square)
    kinds = [each for each in graph.get_operations() if each.type == "MatMul"]
    products = [SimpleNamespace(type="MatMul", operation=each, position=at) for at, each in enumerate(kinds)]
    report, branch = Report(), Report(earlier=Report())
    branch.replicated_op(products[0], [object()])
    report.add(branch)
    following = recorder.Recorder(tmp_path, Plan(5))
    following.traced("step", SimpleNamespace(nodes=products), report)
    traced = following._traces["step"]
    assert traced["replicated"] == {"MatMul": 1} and traced["replicated_share"] == pytest.approx(0.5)
    branch.forget_operations()
    report.forget_operations()
    assert branch.replicated_operations == report.replicated_operations == []
