"""What a cut step moves: no more than is needed, and together what can go together."""

import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf

X = np.random.default_rng(0).normal(size=(6, 4))


def check(step, *, size=2, arguments=(X,), **options):
    return Simulation(step, arguments, size, **options).check(*arguments).reports[0].entries


@pytest.mark.parametrize("static", [True, False])
def test_collectives_of_one_backward_pass_and_its_logs_are_one(static):
    first, second = tf.Variable(np.ones([4, 3])), tf.Variable(np.ones([3, 1]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ first) @ second))
        for variable, gradient in zip((first, second), tape.gradient(loss, (first, second))):
            variable.assign_sub(0.1 * gradient)
        return loss, tf.reduce_sum(x)

    entries = check(step, variables=(first, second), static=static)
    assert [(each.kind, len(each.values)) for each in entries] == [("sum", 4)]


def test_collectives_are_made_only_of_what_is_needed():
    def step(x):
        tf.reduce_sum(tf.sort(x[:, 0]))  # nothing reads it
        return tf.reduce_max(x), tf.reduce_any(x > 2.0), tf.reduce_min(x, axis=0)

    entries = check(step, size=3)
    assert sorted(each.kind for each in entries) == ["max", "max", "min"]  # of floats, of truth values


@pytest.mark.long
def test_collectives_take_a_sum_once_for_a_long_chain_of_parts_that_is_needed_later():
    def step(x):
        total = part = tf.reduce_sum(x, axis=0)
        for _ in range(600):  # twice as many calls would be deeper than Python's stack
            part = -part
        return tf.concat([part, tf.exp(total)], 0), tf.tanh(total)

    assert [(each.kind, len(each.values)) for each in check(step)] == [("sum", 1)]


def test_collectives_sum_before_a_part_is_repeated():
    def step(x):
        mean = tf.reduce_mean(x, axis=0)
        return tf.reduce_sum(tf.square(x - mean * tf.ones_like(x)), axis=0)

    entries = check(step)
    assert entries[0].bytes == 4 * 8, entries


def test_collectives_say_why_and_where():
    entries = check(lambda x: tf.sort(x[:, 0]))
    assert entries[0].kind == "gather" and "needs all rows" in entries[0].reason
    assert "test_collectives.py" in entries[0].line


def test_collectives_of_ranks_without_rows():
    short = (X[:2],)
    check(lambda x: (tf.reduce_mean(x), tf.reduce_max(x, axis=0), tf.sort(x, axis=0)), size=3, arguments=short)
    check(lambda x: (tf.reduce_mean(x), tf.reduce_max(x)), size=3, arguments=short, static=False)
