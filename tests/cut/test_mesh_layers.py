"""Layers cut along the model axis of a mesh: classes, heads, channels. The tests count collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from cut.layouts import TRANSFORMER, Loss, Rules, transformer
from cut.mesh import Mesh, mesh_of

from keras_ddl.compat.tensorflow import tf

layers = keras.layers
RNG = np.random.default_rng(4)
X = RNG.normal(size=(7, 5))

pytestmark = pytest.mark.usefixtures("float64")


def _accuracy(labels: Any, logits: Any) -> Any:
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
    return entropy + keras.ops.mean(keras.metrics.sparse_categorical_accuracy(labels, logits))


CLASSES = RNG.integers(0, 8, 7)


# (activation of logits, function that makes a loss, labels)
HEADS: dict[str, tuple[str | None, Callable[[], Loss], np.ndarray]] = {
    "dense": (
        None,
        lambda: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        np.eye(8)[CLASSES],
    ),
    "sparse_probabilities": ("sigmoid", keras.losses.SparseCategoricalCrossentropy, CLASSES),
    "accuracy": (None, lambda: _accuracy, CLASSES),
}


@pytest.mark.parametrize(
    "name", [each if each == "dense" else pytest.param(each, marks=pytest.mark.long) for each in HEADS]
)
def test_cut_classes_are_not_gathered(name):
    activation, loss, y = HEADS[name]
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(8, activation, name="head")])
    rules: Rules = {"head/kernel": 1, "head/bias": 0}
    mesh = mesh_of(model, [X, y], (1, 2), rules, loss=loss(), along_batch=False).check(X, y, steps=2)
    assert "gather" not in mesh.kinds() and "max" in mesh.kinds(), mesh.moved()


@pytest.mark.parametrize("entries", [[np.nan, 1, 2, np.nan], [-np.inf, np.nan, -np.inf, -np.inf], [1, 3, 3, 3]])
def test_argmax_of_cut_entries_equals_tensorflow(entries):
    weight = tf.Variable(np.array([entries, entries[::-1], np.negative(entries)], np.float64))

    def step(x: Any) -> Any:
        return tf.argmax(weight, 1) + tf.cast(x[0, 0], tf.int64), tf.argmin(weight, 1, tf.int32)

    mesh = Mesh(step, [X], (1, 2), [weight], {id(weight): 1}, along_batch=False)
    for outputs in mesh(X).values():
        np.testing.assert_equal(outputs, mesh.expected(X))
    assert "gather" not in mesh.kinds()


@pytest.mark.parametrize("what", ["classes", "tables"])
def test_concatenated_slices_are_not_taken_for_a_range(what):
    one, other = (tf.Variable(RNG.normal(size=(8, 5))) for _ in range(2))

    def step(x: Any) -> Any:
        both = tf.concat([one, other], 0)  # one rank has rows 0 to 3 and 8 to 11, the other the rest
        if what == "tables":
            return x * tf.gather(both, [0, 5, 9, 15, 3, 7, 11])
        logits = tf.matmul(x, both, transpose_b=True)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[0, 5, 9, 15, 3, 7, 11], logits=logits)

    mesh = Mesh(step, [X], (1, 2), [one, other], {id(one): 0, id(other): 0}, along_batch=False)
    mesh.check(X, steps=1)


@pytest.mark.long
@pytest.mark.parametrize(("heads", "static"), [("(query|key|value)", False), ("query", True)])
def test_grouped_query_attention_is_cut_along_heads(heads, static):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5, 8))
    x = layers.GroupQueryAttention(4, 8, 2, name="attention")(inputs, inputs, use_causal_mask=True)
    rules: Rules = {f"{heads}/kernel": 1, f"{heads}/bias": 0, "attention_output/kernel": 0}
    batch = [RNG.normal(size=(5, 5, 8)), RNG.normal(size=(5, 5, 8))]
    mesh = mesh_of(keras.Model(inputs, x), batch, (1, 2), rules, static=static, along_batch=False).check(*batch)
    assert set(mesh.kinds()) == {"sum"}, mesh.moved()


@pytest.mark.long
def test_table_cut_along_its_width_is_gathered_once_if_rows_are_normalized():
    keras.utils.set_random_seed(5)
    batch = [RNG.integers(0, 16, (3, 5)).astype("int32") for _ in range(2)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rules = {**TRANSFORMER, "table": 1}
    mesh = mesh_of(transformer(blocks=1), batch, (1, 2), rules, loss=loss, along_batch=False).check(*batch, steps=2)
    assert mesh.kinds() == ["gather"] + ["sum"] * 4  # the sums belong to the block


def test_table_cut_along_its_width_stays_cut_if_rows_are_multiplied():
    keras.utils.set_random_seed(1)
    table, flat = layers.Embedding(6, 4, name="table"), layers.Flatten()
    model = keras.Sequential([keras.Input((3,), dtype="int32"), table, flat, layers.Dense(5, name="dense")])
    batch = [RNG.integers(0, 6, (7, 3)).astype("int32"), RNG.normal(size=(7, 5))]
    mesh = mesh_of(model, batch, (1, 2), {"table": 1}, along_batch=False).check(*batch)
    assert "gather" not in mesh.kinds(), mesh.moved()


def images(pool: Callable[..., keras.Layer]) -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([
        keras.Input((6, 6, 2)), layers.Conv2D(4, 3, padding="same", name="wide", use_bias=False),
        layers.BatchNormalization(), layers.ReLU(), pool(2, 1), layers.Conv2D(3, 2, 2, name="narrow"),
        layers.GlobalAveragePooling2D(), layers.Dense(2),
    ])  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("pool", "rules"),
    [
        (layers.MaxPooling2D, {"wide/kernel": 3, "narrow/kernel": 2}),
        (layers.AveragePooling2D, {"wide/kernel": 3}),
        (layers.MaxPooling2D, {"wide/kernel": 2, "narrow/kernel": 2}),
    ],
)
def test_convolutions_are_cut_along_their_channels(pool, rules):
    x, y = RNG.normal(size=(5, 6, 6, 2)), RNG.normal(size=(5, 2))
    mesh = mesh_of(images(pool), [x, y], (2, 2), rules).check(x, y)
    gathered = [each for each in mesh.model_reports[0, 0].entries if each.kind == "gather"]
    assert all(each.reason.startswith(("Assign", "Sub")) for each in gathered), gathered  # gathers weights, not images


@pytest.mark.long
def test_depthwise_convolutions_are_cut_along_their_channels():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([
        keras.Input((6, 6, 2)), layers.Conv2D(4, 3, name="wide"), layers.DepthwiseConv2D(3, name="each"),
        layers.UpSampling2D(2, interpolation="bilinear"), layers.Conv2D(3, 2, name="narrow"),
        layers.GlobalAveragePooling2D(), layers.Dense(2),
    ])  # fmt: skip
    x, y = RNG.normal(size=(5, 6, 6, 2)), RNG.normal(size=(5, 2))
    rules: Rules = {"wide/kernel": 3, "wide/bias": 0, "each/kernel": 2, "each/bias": 0, "narrow/kernel": 2}
    mesh = mesh_of(model, [x, y], (1, 2), rules, along_batch=False).check(x, y)
    assert mesh.moved()["model"] == [("sum", 1)]


@pytest.mark.long
def test_channels_first_is_cut_like_channels_last():
    keras.utils.set_random_seed(1)
    first = {"data_format": "channels_first"}
    model = keras.Sequential([
        keras.Input((2, 7, 7)), layers.Conv2D(4, 3, name="wide", **first), layers.MaxPooling2D(2, 1, **first),
        layers.Conv2D(3, 2, name="narrow", **first), layers.GlobalAveragePooling2D(**first), layers.Dense(2),
    ])  # fmt: skip
    batch = [RNG.normal(size=(5, 2, 7, 7)), RNG.normal(size=(5, 2))]
    rules: Rules = {"wide/kernel": 3, "wide/bias": 0, "narrow/kernel": 2}
    mesh = mesh_of(model, batch, (1, 2), rules, along_batch=False)
    assert mesh.moved()["model"] == [("sum", 1)]  # only cut: TensorFlow has no CPU gradients for channels_first
