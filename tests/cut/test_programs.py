"""Programs whose loss uses the whole batch: after three steps the weights equal those of plain Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from cut.mesh import variables_of
from cut.simulated import Simulation
from keras import ops

from keras_ddl.compat.tensorflow import tf

ROWS = 7


def singular_values(z: Any, x: Any, y: Any) -> Any:
    return ops.sum(tf.linalg.svd(z, compute_uv=False)) / 7


def contrastive(z: Any, x: Any, y: Any) -> Any:
    a, b = ops.normalize(z, axis=1), ops.normalize(z * 0.9 + x[:, :6] * 0.1, axis=1)
    s = ops.matmul(a, ops.transpose(b)) / 0.5
    labels = tf.range(tf.shape(x)[0])
    loss = keras.losses.sparse_categorical_crossentropy
    return ops.mean(loss(labels, s, from_logits=True)) + ops.mean(loss(labels, ops.transpose(s), from_logits=True))


def supervised_contrastive(z: Any, x: Any, y: Any) -> Any:
    z = ops.normalize(z, axis=1)
    s = ops.matmul(z, ops.transpose(z)) / 1.3
    same = ops.cast(ops.equal(y[:, None], y[None, :]), s.dtype) * (1 - tf.eye(tf.shape(x)[0], dtype=s.dtype))
    wanted = ops.sum((s - ops.logsumexp(s, axis=1, keepdims=True)) * same, 1)
    return -ops.mean(wanted / ops.maximum(ops.sum(same, 1), 1))


def chosen_rows(z: Any, x: Any, y: Any) -> Any:
    errors = ops.sum(ops.square(z - x[:, :6]), 1)
    worst, at = tf.math.top_k(errors, k=tf.maximum(1, tf.shape(errors)[0] // 3))
    _, kind, count = tf.unique_with_counts(y)
    centres = tf.math.unsorted_segment_mean(z, kind, tf.size(count))
    halves = tf.cast(y % 2, tf.int32)
    parts = [each - ops.sum(each, 0) / 9.0 for each in tf.dynamic_partition(z, halves, 2)]
    joined = tf.dynamic_stitch(tf.dynamic_partition(tf.range(tf.shape(z)[0]), halves, 2), parts)
    kept = tf.boolean_mask(z, y > 0)
    near = ops.sum(tf.square(z - tf.gather(centres, kind)), 1) / ops.cast(tf.gather(count, kind), z.dtype)
    return (
        ops.mean(worst * tf.gather(x[:, 0], at))
        + ops.mean(near)
        + ops.mean(ops.square(joined - z[:1]))
        + ops.sum(ops.square(kept[1:] - kept[:-1])) / ops.cast(1 + tf.shape(kept)[0], z.dtype)
    )


def loop_over_rows(z: Any, x: Any, y: Any) -> Any:
    rows = tf.shape(z)[0]

    def body(i: Any, before: Any, other: Any, found: Any) -> Any:
        now = 0.5 * other + z[i] * x[i, 0]
        return i + 1, now, before, found.write(i, tf.tanh(now))

    none = tf.TensorArray(z.dtype, size=rows, element_shape=[6])
    start = (0, tf.zeros([6], z.dtype), tf.ones([6], z.dtype), none)
    _, last, _, found = tf.while_loop(lambda i, *_: i < rows, body, start)
    return ops.mean(ops.square(found.stack() - x[:, :6])) + 0.1 * ops.sum(ops.square(last))


LOSSES: list[Callable[[Any, Any, Any], Any]] = [
    singular_values, contrastive, supervised_contrastive,
    chosen_rows, loop_over_rows,
]  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "size", "static"),
    [
        ([contrastive], 3, False),
        *(pytest.param(LOSSES, *each, marks=pytest.mark.long) for each in ((2, True), (3, False))),
    ],
    ids=["one", "static", "open"],
)
@pytest.mark.usefixtures("float64")
def test_weights_equal_those_of_plain_keras(losses: Any, size: int, static: bool) -> None:
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 8)), rng.integers(0, 4, ROWS)
    layers = [keras.layers.Dense(9, activation="tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(6)]
    encoder = keras.Sequential([keras.Input((8,)), *layers])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)
    optimizer.build(encoder.trainable_variables)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            z = encoder(x, training=True)
            found = [each(z, x, y) for each in losses]
            loss = tf.add_n(found)
        weights = encoder.trainable_variables
        optimizer.apply(tape.gradient(loss, [each.value for each in weights]), weights)
        return found

    variables = variables_of(encoder, optimizer)
    Simulation(step, (x, y), size, static=static, variables=variables).check(x, y, steps=3)
