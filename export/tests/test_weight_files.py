"""Weight files of TensorFlow and Keras: where a model's variables are in them, and which are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_ddl import export, model_state
from keras_ddl.errors import CheckpointError, ExportError

X = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)


class Hidden(keras.Model):
    """Keeps layers in lists, dicts and tuples, of which tf.train.Checkpoint sees few; all have one shape."""

    def __init__(self, statistics: bool = False) -> None:
        super().__init__()
        self.blocks = [layers.Dense(2), layers.Dense(2)]
        self.grown: list[Any] = []
        self.grown.append(layers.Dense(2))
        self.named = {"one": layers.Dense(2), "more": [layers.Dense(2)]}
        self.nested = [[layers.Dense(2)], (layers.Dense(2),)]
        self.pair = (layers.Dense(2), (layers.Dense(2),))
        self.norm = [layers.BatchNormalization()] if statistics else []
        self.head = layers.Dense(2)

    def call(self, x: Any) -> Any:
        grouped = [*self.nested[0], *self.nested[1], self.pair[0], *self.pair[1], *self.norm, self.head]
        for layer in [*self.blocks, *self.grown, self.named["one"], *self.named["more"], *grouped]:
            x = layer(x)
        return x


def trained(make: Any, folder: Path, optimizer: Any = "adam") -> Any:
    """Writes the base graph, then trains a new model, whose variables have other numbers, as in another process."""
    model = make()
    model(X)
    export.write_base_graph(model, folder, sample=X)
    model = make()
    model.compile(optimizer, "mse")
    model.fit(X, X + 1, batch_size=4, epochs=2, verbose=0)
    return model


def exported(folder: Path, file: Path, name: str | None = None) -> Any:
    out = folder / "out"
    path = export.export_saved_model(folder, out, weights=file, model=name, validate="here", warmup=False).path
    loaded = tf.saved_model.load(str(path))  # kept, because signatures do not keep the variables alive
    function = loaded.signatures["serving_default"]
    (argument,) = function.structured_input_signature[1]
    return next(iter(function(**{argument: tf.constant(X)}).values())).numpy()


def assert_answers(folder: Path, file: Path, model: Any, name: str | None = None) -> None:
    np.testing.assert_allclose(exported(folder, file, name), model(X, training=False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_layers_in_lists_are_found_through_the_optimizer(tmp_path: Path, optimizer: str) -> None:
    model = trained(Hidden, tmp_path, optimizer)
    assert_answers(tmp_path, Path(tf.train.Checkpoint(model=model).save(str(tmp_path / "whole"))), model)
    # A custom loop saves the optimizer beside the model.
    loop = Hidden()
    loop(X)
    beside = keras.optimizers.get(optimizer)
    with tf.GradientTape() as tape:
        loss = keras.ops.mean(loop(X) ** 2)
    beside.apply(tape.gradient(loss, loop.trainable_variables), loop.trainable_variables)
    checkpoint = tf.train.Checkpoint(step=tf.Variable(3), net=loop, optimizer=beside)
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path / "managed"), max_to_keep=2)
    manager.save()
    if optimizer == "sgd":  # nothing shows that it got the variables in the model's order
        with pytest.raises(ExportError, match="without 14 variables.*compiled optimizer, or one with momenta"):
            exported(tmp_path, tmp_path / "managed")
    else:
        assert_answers(tmp_path, tmp_path / "managed", loop)
    with pytest.raises(ExportError, match="of tf.train.Checkpoint, which stores only weights.*--weights"):
        export.export_graph(tmp_path / "managed", tmp_path / "out")


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adam, keras.optimizers.SGD])
def test_optimizer_with_another_order_is_not_used(tmp_path: Path, optimizer: Any) -> None:
    class Lists(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [layers.Dense(2) for _ in range(3)]

        def call(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    trained(Lists, tmp_path)
    model = Lists()
    model(X)
    first, second, *rest = [layer.trainable_variables for layer in model.blocks]
    for order in ([first, second], [second, first]):
        beside = optimizer()
        beside.build([variable for each in [*order, *rest] for variable in each])
        file = Path(tf.train.Checkpoint(net=model, beside=beside, own=tf.Variable(1)).save(str(tmp_path / "file")))
        # The names of momenta show the order; without momenta, and with all layers hidden, nothing does.
        if order[0] is first and optimizer is keras.optimizers.Adam:
            assert_answers(tmp_path, file, model)
        else:
            with pytest.raises(ExportError, match="without 6 variables of the graph"):
                exported(tmp_path, file)


def test_missing_variables_are_named_with_a_remedy(tmp_path: Path) -> None:
    model = trained(lambda: Hidden(statistics=True), tmp_path)
    file = tf.train.Checkpoint(model=model).save(str(tmp_path / "file"))
    with pytest.raises(
        ExportError,
        match=r"without 2 variables of the graph \(.*moving_mean, .*moving_variance\). 2 of them are in layers.*lists, "
        r"dicts or nested tuples.*never in the file\. Save with .*model_state.trackable\(model\)",
    ):
        exported(tmp_path, Path(file))
    alone = tf.train.Checkpoint(Net=model.head).save(str(tmp_path / "alone"))
    with pytest.raises(ExportError, match=r"never in the file .a compiled optimizer, or one with momenta, in"):
        exported(tmp_path, Path(alone))


def test_checkpoint_of_trackable_is_complete_and_restores(tmp_path: Path) -> None:
    make = lambda: Hidden(statistics=True)  # noqa: E731
    model = trained(make, tmp_path)
    checkpoint = tf.train.Checkpoint(model=model_state.trackable(model), optimizer=model.optimizer)
    file = checkpoint.save(str(tmp_path / "file"))
    assert_answers(tmp_path, Path(file), model)
    # Saved beside the model itself, whose variables it shares.
    assert_answers(
        tmp_path, Path(tf.train.Checkpoint(model, all=model_state.trackable(model)).write(str(tmp_path / "b"))), model
    )
    again = make()
    with pytest.raises(CheckpointError, match="not built yet"):
        model_state.trackable(again)
    again(X)
    tf.train.Checkpoint(model=model_state.trackable(again)).restore(file).expect_partial()
    for mine, one in zip(again.variables, model.variables, strict=True):
        np.testing.assert_array_equal(mine, one)


class Pair(keras.Model):
    """Two parts with the same architecture."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (keras.Sequential([keras.Input((2,)), layers.Dense(2)]) for _ in range(2))
        self.built = True


def test_parts_are_found_by_name_in_files_of_the_whole(tmp_path: Path) -> None:
    model = Pair()
    for name in ("left", "right"):
        export.write_base_graph(getattr(model, name), tmp_path, name=name, whole=model, sample=X)
    model.right.layers[0].kernel.assign(keras.ops.ones((2, 2)))
    model.save_weights(tmp_path / "file.weights.h5")
    whole = tf.train.Checkpoint(gan=model).save(str(tmp_path / "whole"))
    parts = tf.train.Checkpoint(right=model.right, left=model.left).save(str(tmp_path / "parts"))
    alone = tf.train.Checkpoint(model.right).save(str(tmp_path / "alone"))
    for file in (tmp_path / "file.weights.h5", whole, parts):
        for name in ("left", "right"):
            assert_answers(tmp_path, Path(file), getattr(model, name), name)
    assert_answers(tmp_path, Path(alone), model.right, "left")  # a file with a single such part
    other = tf.train.Checkpoint(one=model.right, two=model.left).save(str(tmp_path / "other"))
    with pytest.raises(ExportError, match="Received: one, two, which all match"):
        exported(tmp_path, Path(other), "left")
