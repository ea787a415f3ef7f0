"""Models of every kind that an export must handle, each with input rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

_random = np.random.default_rng(0)


def rows(*shape: int) -> np.ndarray:
    return _random.random((5, *shape), dtype="float32")


def sequential_cnn() -> tuple[Any, Any]:
    stack = [
        keras.Input((8, 8, 1)),
        layers.Conv2D(4, 3),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Dropout(0.5),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3, activation="softmax"),
    ]
    return keras.Sequential(stack), rows(8, 8, 1)


def functional_dicts() -> tuple[Any, Any]:
    wide, deep = keras.Input((4,), name="wide"), keras.Input((3,), name="deep")
    joined = layers.concatenate([layers.Dense(5)(wide), layers.Dense(2)(deep)])
    outputs = {"score": layers.Dense(1)(joined), "kind": layers.Dense(3)(joined)}
    return keras.Model({"wide": wide, "deep": deep}, outputs), {"wide": rows(4), "deep": rows(3)}


def functional_lists() -> tuple[Any, Any]:
    first, second = keras.Input((4,)), keras.Input((3,), name="some-second.input")
    outputs = [layers.Dense(1, name="sum")(layers.concatenate([first, second])), layers.Dense(2)(second)]
    return keras.Model([first, second], outputs), [rows(4), rows(3)]


class Scale(layers.Layer):
    """A custom layer that is not registered with Keras."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x: Any) -> Any:
        return x * self.factor


class Blocks(keras.Model):
    """Keeps its layers in a Python list, and trains by default, which the export must switch off."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [layers.Dense(6), layers.BatchNormalization(), Scale(), layers.Dropout(0.5)]
        self.head = layers.Dense(2)

    def call(self, x: Any, training: bool = True) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def subclassed() -> tuple[Any, Any]:
    return Blocks(), rows(5)


class Recurrent(keras.Model):
    """Takes and returns a dict; a masked embedding feeds a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.Embedding(10, 4, mask_zero=True)
        self.gru = layers.GRU(3)
        self.head = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return {"answer": self.head(self.gru(self.embedding(inputs["ids"]))) + inputs["bias"]}


def subclassed_dicts() -> tuple[Any, Any]:
    return Recurrent(), {"ids": _random.integers(0, 10, (5, 6)), "bias": rows(1)}


def lstm_with_mask() -> tuple[Any, Any]:
    ids = keras.Input((None,), dtype="int32", name="ids")
    hidden = layers.Embedding(20, 8, mask_zero=True)(ids)
    model = keras.Model(ids, layers.Dense(1)(layers.LSTM(4)(hidden)))
    return model, np.pad(_random.integers(1, 20, (5, 4)), ((0, 0), (0, 3)))


def preprocessing() -> tuple[Any, Any]:
    text = keras.Input((), dtype="string", name="text")
    color = keras.Input((1,), dtype="string", name="color")
    number = keras.Input((2,), name="number")
    words = layers.TextVectorization(max_tokens=20, output_sequence_length=5)
    words.adapt(["the cat sat", "a dog ran", "the end"])
    lookup = layers.StringLookup(output_mode="one_hot")
    lookup.adapt([["red"], ["blue"]])
    scaled = layers.Normalization()
    scaled.adapt(_random.random((50, 2)) * 5 + 3)
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(20, 4)(words(text)))
    joined = layers.concatenate([pooled, lookup(color), scaled(number)])
    model = keras.Model([text, color, number], layers.Dense(1, name="price")(joined))
    colors = np.array([["red"], ["blue"], ["green"], ["red"], [""]])
    return model, [np.array(["the cat", "dog", "end a", "", "the ran"]), colors, rows(2)]


def mixed_precision() -> tuple[Any, Any]:
    half = "mixed_float16"
    stack = [
        keras.Input((6,)),
        layers.Dense(16, activation="relu", dtype=half),
        layers.BatchNormalization(dtype=half),
        layers.Dense(3, dtype=half),
    ]
    return keras.Sequential(stack), rows(6)


def model_in_model() -> tuple[Any, Any]:
    inner = keras.Sequential([keras.Input((8, 8, 3)), layers.Rescaling(1 / 255), layers.RandomFlip(), layers.Flatten()])
    pixels = keras.Input((8, 8, 3), name="pixels")
    return keras.Model(pixels, layers.Dense(2)(inner(pixels))), rows(8, 8, 3)


class Sampler(keras.Model):
    """Samples at inference from a seed that is a weight, and reads a tf.Variable that Keras does not track."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = layers.Dense(3)
        self.seed = keras.random.SeedGenerator(3)
        self.scale = tf.Variable(2.0, trainable=False)

    def call(self, x: Any) -> Any:
        mean = self.mean(x) * self.scale
        noise = tf.random.uniform(tf.shape(mean))  # not reproducible: never compared
        draw = mean + keras.random.normal(keras.ops.shape(mean), seed=self.seed)
        return {"mean": mean, "draw": draw, "noise": noise}


def sampler() -> tuple[Any, Any]:
    return Sampler(), rows(5)


class MeanOfSteps(layers.Layer):
    """Averages ragged rows, of which one is empty."""

    def call(self, steps: Any) -> Any:
        return tf.math.divide_no_nan(tf.reduce_sum(steps, 1), tf.cast(steps.row_lengths(), "float32")[:, None])

    def compute_output_spec(self, steps: Any, **options: Any) -> Any:
        return keras.KerasTensor((None, 2))


def sparse_and_ragged() -> tuple[Any, Any]:
    words = keras.Input((6,), sparse=True, name="words")
    steps = keras.Input((None, 2), ragged=True, name="steps")
    bias = keras.Input((1,), name="bias")
    score = layers.concatenate([layers.Dense(2)(words), MeanOfSteps()(steps), bias])
    outputs = {"score": layers.Dense(1)(score), "words": words, "steps": steps}
    model = keras.Model({"words": words, "steps": steps, "bias": bias}, outputs)
    sparse = tf.sparse.from_dense(np.eye(5, 6, dtype="float32"))
    ragged = tf.RaggedTensor.from_row_lengths(_random.random((7, 2), dtype="float32"), [2, 0, 1, 3, 1])
    return model, {"words": sparse, "steps": ragged, "bias": tf.constant(rows(1))}


ZOO: dict[str, Callable[[], tuple[Any, Any]]] = {
    each.__name__: each
    for each in (
        sequential_cnn,
        functional_dicts,
        functional_lists,
        subclassed,
        subclassed_dicts,
        lstm_with_mask,
        preprocessing,
        mixed_precision,
        model_in_model,
        sampler,
        sparse_and_ragged,
    )
}


def disturb(model: Any) -> None:
    """Changes every weight, including BatchNormalization's statistics, as training does."""
    for variable in model.variables:
        if "float" in variable.dtype and not variable.path.endswith(("/mean", "/variance")):
            change = 0.1 + 0.1 * _random.random(variable.shape)
            variable.assign(variable + keras.ops.cast(change, variable.dtype))
