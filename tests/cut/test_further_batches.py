"""Steps with several batches: each batch is divided among ranks by its own rows, also when batches are combined."""

import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf

RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(3, 3))
# Sizes in proportion or not; as many rows as ranks, fewer, or none; with the larger batch first or last.
SIZES = [(8, 4), (8, 3), (3, 8), (5, 1), (4, 0)]


def separately(x, y):
    return [tf.tanh(x @ KERNEL), tf.tanh(y @ KERNEL), tf.reduce_sum(x**2) + tf.reduce_mean(tf.exp(y)), y - y[:1]]


def side_by_side(x, y):
    """As in SimCLR, concatenates both batches, computes codes by row, and compares all rows with each other."""
    both = tf.concat([x, y], 0)
    codes = tf.tanh(both @ KERNEL)
    alike = codes @ tf.transpose(codes)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(alike)[0]), alike)
    return [codes, tf.reduce_mean(losses), codes - tf.reduce_mean(codes, 0), tf.reduce_max(both, 0), alike]


def split_again(x, y):
    both = tf.tanh(tf.concat([y, x, y], 0) @ KERNEL)
    count, other = tf.shape(y)[0], tf.shape(x)[0]
    return [both[:count], both[count : count + other] * 2.0, both[count + other :], both[1:], tf.reverse(both, [0])]


def reshaped(x, y):
    both = tf.concat([x, y], 0)
    flat = tf.reshape(both[:, :, None] * KERNEL[0], [-1, 3])
    tiled = tf.tile(both, [2, 1])
    return [flat, tiled, tf.reshape(flat, [-1, 3, 3]), tf.transpose(both), tf.reduce_sum(tiled, 1), both @ KERNEL]


def crossed(x, y):
    scores = x @ tf.transpose(y)
    shares = tf.nn.softmax(scores) if y.shape[0] != 0 else scores
    return [scores, tf.transpose(scores), shares @ y, tf.reduce_sum(scores, 1), tf.concat([scores, scores], 1)]


def gradients(x, y):
    kernel = tf.constant(KERNEL)
    with tf.GradientTape() as tape:
        tape.watch([kernel, x, y])
        both = tf.tanh(tf.concat([x, y], 0) @ kernel)
        loss = tf.reduce_sum(both**2) + tf.reduce_sum(tf.tanh(y @ kernel)) * tf.reduce_mean(x)
    return tape.gradient(loss, [kernel, x, y])


def in_loops_and_branches(x, y):
    def body(i, a, b):
        return i + 1, tf.tanh(a @ KERNEL), b + tf.reduce_sum(a)

    _, a, b = tf.while_loop(lambda i, *_: i < 3, body, (0, tf.concat([x, y], 0), y))
    return [a, b, tf.cond(tf.reduce_sum(y) > 0, lambda: y * 2.0, lambda: y - 1.0)]


def random_noise(x, y):
    both = tf.concat([x, y], 0)
    noise = tf.random.stateless_normal(tf.shape(both), [1, 2], dtype=tf.float64)
    return [both + noise, y + tf.random.stateless_uniform(tf.shape(y), [3, 4], dtype=tf.float64)]


def equal_extents(x, y):
    """If y repeated twice has as many rows as x, corresponding rows may lie on different ranks."""
    twice = tf.tile(y, [2, 1])
    same = tf.concat([twice, x], 0)[: tf.shape(x)[0]]
    return [same * x, tf.concat([same, x], 1), tf.transpose(same) @ x]


STEPS = [separately, side_by_side, split_again, reshaped, crossed, gradients, in_loops_and_branches, random_noise,
         equal_extents]  # fmt: skip


def batches(sizes):
    return [np.random.default_rng(sum(sizes)).normal(size=(rows, 3)) for rows in sizes]


def check(step, sizes, ranks, static):
    return Simulation(step, batches(sizes), ranks, static=static).check(*batches(sizes))


@pytest.mark.parametrize("static", [pytest.param(True, marks=pytest.mark.long), False])
def test_two_batches_side_by_side(static):
    check(side_by_side, (5, 2), 3, static)


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_two_batches_of_different_sizes(step):
    for number, sizes in enumerate(SIZES):
        for static in (True, False) if number < 2 else (bool(number % 2),):
            check(step, sizes, 2 + number % 2, static)


@pytest.mark.parametrize("static", [True, False])
def test_concatenated_batches_are_computed_by_rows(static):
    def step(x, y):
        return tf.reduce_sum(tf.tanh(tf.tanh(tf.concat([x, y], 0) @ KERNEL) @ KERNEL))

    assert [each.kind for each in check(step, (6, 4), 2, static).reports[0].entries] == ["sum"]
