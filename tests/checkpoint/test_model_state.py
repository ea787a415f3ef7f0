"""A model's state in a checkpoint: runs resume exactly, and no model is restored by halves."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_ddl import checkpoint, model_state
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.checkpoint.snapshot import Buffers
from keras_ddl.errors import CheckpointError

X = np.random.default_rng(1).random((48, 6), dtype="float32")
Y = np.random.default_rng(2).integers(0, 3, 48)


def make_model(width: int = 8, optimizer: Any = "adam") -> Any:
    stack = [
        keras.Input((6,)),
        layers.Dense(width, activation="relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.4),
        layers.Dense(3),
    ]
    model = keras.Sequential(stack)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit(model: Any, epochs: int, initial: int = 0) -> None:
    model.fit(X, Y, batch_size=16, epochs=epochs, initial_epoch=initial, shuffle=False, verbose=0)


def state_of(model: Any) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(each) for each in [*model.variables, *model.optimizer.variables]]


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "averages": lambda: keras.optimizers.AdamW(0.01, use_ema=True, global_clipnorm=0.5),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
}
LONG = pytest.mark.long


@pytest.mark.parametrize("name", ["scaling", *(pytest.param(each, marks=LONG) for each in ("adam", "averages"))])
def test_resume_is_exact(tmp_path: Path, name: str) -> None:
    optimizer = OPTIMIZERS[name]
    straight = make_model(optimizer=optimizer())
    fit(straight, 2)
    straight.optimizer.learning_rate = 0.005
    saved = model_state.save_checkpoint(straight, tmp_path, 6, 2, {"loss": 1.0}, extra={"patience": [1, 2]})
    fit(straight, 4, initial=2)

    resumed = make_model(optimizer=optimizer())
    found = model_state.restore_checkpoint(resumed, tmp_path)
    assert (found.step, found.epoch, found.extra) == (6, 2, {"patience": [1, 2]})
    assert found.path == saved.path
    fit(resumed, 4, initial=2)
    for expected, received in zip(state_of(straight), state_of(resumed), strict=True):
        np.testing.assert_array_equal(expected, received)


def test_restore_without_optimizer_and_with_own_seed(tmp_path: Path) -> None:
    model = make_model()
    fit(model, 1)
    model_state.save_checkpoint(model, tmp_path, 3, optimizer=False)
    with pytest.raises(CheckpointError, match="exact resume needs the optimizer's state.*optimizer=False"):
        model_state.restore_checkpoint(make_model(), tmp_path)
    other = make_model()
    seed = next(each for each in other.variables if model_state.is_seed(each))
    seed.assign([12345, 0])
    model_state.restore_checkpoint(other, tmp_path, optimizer=False, seeds="none")
    assert seed.numpy().tolist() == [12345, 0]
    np.testing.assert_array_equal(other.get_weights()[0], model.get_weights()[0])
    model_state.restore_checkpoint(other, tmp_path, optimizer=False)
    assert seed.numpy().tolist() == next(each for each in model.variables if model_state.is_seed(each)).numpy().tolist()
    with pytest.raises(CheckpointError, match="'all' or 'none'. Received: seeds='some'"):
        model_state.restore_checkpoint(other, tmp_path, seeds="some")


def test_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    def model_of(units: int = 3, dtype: str = "float32", more: int = 0) -> Any:
        further = [layers.Dense(2) for _ in range(more)]
        return keras.Sequential([keras.Input((2,)), layers.Dense(units, dtype=dtype), *further])

    model_state.save_checkpoint(model_of(), tmp_path, 1)
    for other, words in (
        (model_of(units=4), r"kernel is float32\[2, 3\] there, float32\[2, 4\] here"),
        (model_of(dtype="float16"), r"kernel is float32\[2, 3\] there, float16\[2, 3\] here"),
        (model_of(more=1), "2 weights there, 4 here"),
    ):
        before = other.get_weights()
        with pytest.raises(CheckpointError, match=words):
            model_state.restore_checkpoint(other, tmp_path)
        for old, now in zip(before, other.get_weights(), strict=True):
            np.testing.assert_array_equal(old, now)


def test_unbuilt_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be built before its weights are used"):
        model_state.save_checkpoint(keras.Sequential([layers.Dense(1)]), tmp_path, 1)
    with pytest.raises(CheckpointError, match="has no weights"):
        model_state.save_checkpoint(keras.Sequential([keras.Input((2,)), layers.ReLU()]), tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_weights_of_every_dtype_are_restored(tmp_path: Path) -> None:
    class Mixed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.held = [
                self.add_weight(shape=(3,), dtype=dtype, initializer="ones", trainable=False, name=dtype)
                for dtype in ("float16", "bfloat16", "float64", "int8", "int64", "uint8", "bool")
            ]
            self.empty = self.add_weight(shape=(0, 4), name="empty")
            self.built = True

    model, other, buffers = Mixed(), Mixed(), Buffers()
    for step, held in ((1, None), (2, buffers), (3, buffers)):
        snapshot = model_state.take(model)
        if held is not None:
            snapshot.copy_into(held)
        for each in model.variables:  # later training must not change the snapshot
            each.assign(keras.ops.zeros(each.shape, each.dtype))
        checkpoint.write(tmp_path, step, snapshot.fill)
        for each in model.variables:
            each.assign(keras.ops.ones(each.shape, each.dtype))
        for each in other.variables:
            each.assign(keras.ops.zeros(each.shape, each.dtype))
        model_state.restore_checkpoint(other, tmp_path)
        assert all(bool(np.all(each.numpy() == 1)) for each in other.variables)


def sgd_by_hand(model: Any) -> None:
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(y=Y[:16], y_pred=model(X[:16], training=True))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        for variable, gradient in zip(model.trainable_variables, gradients):
            variable.value.assign_sub(0.1 * gradient)


def embedded(optimizer: Any) -> Any:
    model = keras.Sequential(
        [keras.Input((6,), dtype="int32"), layers.Embedding(9, 4), layers.Flatten(), layers.Dense(3)]
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize(
    ("name", "how"),
    [("adam", "fit"), ("nesterov", "by hand"), ("adam", "sparse"), ("averages", "eagerly")]
    + [pytest.param(name, "fit", marks=LONG) for name in ("nesterov", "averages", "accumulation", "scaling")]
    + [pytest.param(name, "sparse", marks=LONG) for name in ("nesterov", "averages")],
)
def test_snapshot_does_not_change_during_training(name: str, how: str) -> None:
    optimizer = OPTIMIZERS[name]()
    model = embedded(optimizer) if how == "sparse" else make_model(optimizer=optimizer)
    model.run_eagerly = how == "eagerly"
    features = (X * 9).astype(np.int32) if how == "sparse" else X
    model.fit(features, Y, batch_size=16, verbose=0)
    snapshot, before = model_state.take(model), state_of(model)
    held = [each for bundle in snapshot.bundles.values() for each in bundle.values()]
    expected = [np.array(each) for each in held]
    if how == "by hand":
        sgd_by_hand(model)
    else:
        model.fit(features, Y, batch_size=16, verbose=0)
    assert any(not np.array_equal(old, new) for old, new in zip(before, state_of(model)))
    for old, new in zip(expected, held):
        np.testing.assert_array_equal(old, np.array(new))


def test_full_disk_leaves_no_files(tmp_path: Path) -> None:
    model = make_model(width=4000)
    model_state.save_checkpoint(model, tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # Python ignores SIGXFSZ, so writes fail
    try:
        with pytest.raises(CheckpointError, match="no space left.*earlier files are untouched"):
            model_state.save_checkpoint(model, tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt-00000001"]
    checkpoint.validate(checkpoint.latest(tmp_path))


def test_altered_weights_are_not_restored(tmp_path: Path) -> None:
    model = make_model()
    path = model_state.save_checkpoint(model, tmp_path, 1).path
    (data,) = path.glob("weights.data-*")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    before = model.get_weights()
    with pytest.raises(CheckpointError, match="weights.data-.* was altered after it was written"):
        model_state.restore_checkpoint(model, tmp_path)
    for mine, one in zip(model.get_weights(), before):
        np.testing.assert_array_equal(mine, one)


class Twins(keras.Model):
    """Two layers with the same name, whose variables have the same paths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(2, name="twin"), layers.Dense(2, name="twin")

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


def test_variables_with_equal_paths_are_all_saved(tmp_path: Path) -> None:
    saved, other = Twins(), Twins()
    for model in (saved, other):
        model(X[:2, :2])
    paths = [variable.path for variable in saved.variables]
    assert len(set(paths)) == 2 and len(model_state.weights_of(saved)) == 4, paths
    model_state.save_checkpoint(saved, tmp_path, 1)
    model_state.restore_checkpoint(other, tmp_path)
    for mine, one in zip(other.get_weights(), saved.get_weights()):
        np.testing.assert_array_equal(mine, one)


def test_keys_match_tensorflows_checkpoints(tmp_path: Path) -> None:
    names = ["dense/kernel", "a.b", "a..S/.b", "plain"]
    tracked = {name: tf.Variable(float(number)) for number, name in enumerate(names)}
    prefix = tf.train.Checkpoint(weights=tracked).write(str(tmp_path / "checkpoint"))
    for number, name in enumerate(names):
        key = bundle.variable_key("weights", name)
        assert bundle.read(prefix, {key: "float32"})[key].numpy() == number
        assert bundle.name_of(key) == name


def test_tensorflows_checkpoint_restores_our_checkpoint(tmp_path: Path) -> None:
    model, again = make_model(), make_model()
    fit(model, 1)
    saved = model_state.save_checkpoint(model, tmp_path, 3)
    again.optimizer.build(again.trainable_variables)
    for prefix, kind, of_model, of_again in (
        (saved.weights, "weights", model.variables, again.variables),
        (saved.optimizer, "optimizer", model.optimizer.variables, again.optimizer.variables),
    ):
        paths = list(model_state.named(of_model))
        read = tf.train.Checkpoint(**{kind: dict(zip(paths, (each.value for each in of_again)))}).read(prefix)
        read.assert_consumed()
        for mine, expected in zip(of_again, of_model, strict=True):
            np.testing.assert_array_equal(mine.numpy(), expected.numpy())
