"""A batch of as many rows as there are features and classes: no extent tells an axis of the batch from another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cut.comparing import difference
from cut.together import Together

from keras_ddl.compat.tensorflow import tf

N = 4


def transposed(z: tf.Tensor, x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    mixed = z + tf.transpose(z) * x + z @ z + tf.transpose(z) @ x @ z
    sides = tf.nn.softmax(z, 0) * tf.nn.softmax(tf.transpose(x)) + tf.math.l2_normalize(z @ tf.transpose(x), 0)
    corner = tf.linalg.diag_part(mixed) * w + tf.reduce_sum(sides, 0) * w + tf.reduce_sum(sides, 1)
    return tf.reduce_mean(corner**2) + tf.reduce_sum(tf.linalg.diag(w) * sides * z) + tf.linalg.trace(z @ x)


def contracted(z: tf.Tensor, x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    weighted = tf.einsum("ij,kj,i->ki", z, z, w) * x
    chain = tf.einsum("ij,jk,kl->il", z, x, z)
    return (
        tf.einsum("ij,ji->", z, x)
        + tf.reduce_sum(tf.linalg.diag_part(z @ x) * w)
        + tf.reduce_sum(weighted)
        + tf.reduce_sum(chain**2) / 9
        + tf.tensordot(z, x, [[0, 1], [1, 0]])
    )


def reshaped(z: tf.Tensor, x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    pairs = tf.reshape(tf.stack([z, tf.transpose(z)], 1), [2 * N, N])
    wide = tf.reshape(tf.stack([z, x], 2), [N, 2 * N])
    cube = tf.reshape(z, [1, N, N]) * tf.reshape(x, [N, 1, N])
    flat = tf.reshape(tf.transpose(z), [N * N])
    return (
        tf.reduce_mean(tf.reshape(z, [N // 2, 2 * N]) ** 2)
        + tf.reduce_mean(tf.cumsum(pairs, 0) * tf.concat([x, z], 0))
        + tf.reduce_mean(tf.cumsum(wide, 1) ** 2)
        + tf.reduce_mean(cube * w[:, None])
        + tf.reduce_mean(cube * w)
        + tf.reduce_sum(flat[3:9])
    )


@pytest.mark.long
@pytest.mark.parametrize("static", [True, False])
def test_axes_are_not_confused(static: bool) -> None:
    rng = np.random.default_rng(0)
    x, w, kernel = rng.normal(size=(N, N)), rng.uniform(0.1, 2, N), rng.normal(size=(N, N))

    def step(x: Any, w: Any, kernel: Any) -> list[Any]:
        losses = [loss(tf.tanh(x @ kernel), x, w) for loss in (transposed, contracted, reshaped)]
        return [*losses, *(tf.gradients(each, kernel)[0] for each in losses)]

    together = Together(step, [x, w], [kernel], static=static, sizes=[3])
    expected = together.expected([x, w], [kernel])
    for rank, found in enumerate(together.of_ranks(3, [x, w], [kernel])):
        assert difference(found, expected) is None, f"rank {rank}"
    together.close()
