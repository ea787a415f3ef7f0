"""A cut step sends no more than needed, and shares collectives where possible."""

import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf

X = np.random.default_rng(0).normal(size=(6, 4))


def check(step, *, size=2, arguments=(X,), **options):
    return Simulation(step, arguments, size, **options).check(*arguments).reports[0].entries


@pytest.mark.parametrize("static", [True, False])
def test_backward_pass_and_logs_share_one_collective(static):
    first, second = tf.Variable(np.ones([4, 3])), tf.Variable(np.ones([3, 1]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ first) @ second))
        for variable, gradient in zip((first, second), tape.gradient(loss, (first, second))):
            variable.assign_sub(0.1 * gradient)
        return loss, tf.reduce_sum(x)

    entries = check(step, variables=(first, second), static=static)
    assert [(each.kind, len(each.values)) for each in entries] == [("sum", 4)]


def test_only_needed_values_are_sent():
    def step(x):
        tf.reduce_sum(tf.sort(x[:, 0]))  # nothing reads it
        return tf.reduce_max(x), tf.reduce_any(x > 2.0), tf.reduce_min(x, axis=0)

    entries = check(step, size=3)
    assert sorted(each.kind for each in entries) == ["max", "max", "min"]  # of floats and of booleans


@pytest.mark.long
def test_sum_is_made_once_for_a_long_chain_of_parts():
    def step(x):
        total = part = tf.reduce_sum(x, axis=0)
        for _ in range(600):  # two calls per part would exceed Python's stack
            part = -part
        return tf.concat([part, tf.exp(total)], 0), tf.tanh(total)

    assert [(each.kind, len(each.values)) for each in check(step)] == [("sum", 1)]


def test_part_is_summed_before_it_is_repeated():
    def step(x):
        mean = tf.reduce_mean(x, axis=0)
        return tf.reduce_sum(tf.square(x - mean * tf.ones_like(x)), axis=0)

    entries = check(step)
    assert entries[0].bytes == 4 * 8, entries


def test_entries_name_the_reason_and_line():
    entries = check(lambda x: tf.sort(x[:, 0]))
    assert entries[0].kind == "gather" and "needs all rows" in entries[0].reason
    assert "test_collectives.py" in entries[0].line


def test_collectives_with_ranks_without_rows():
    short = (X[:2],)
    check(lambda x: (tf.reduce_mean(x), tf.reduce_max(x, axis=0), tf.sort(x, axis=0)), size=3, arguments=short)
    check(lambda x: (tf.reduce_mean(x), tf.reduce_max(x)), size=3, arguments=short, static=False)
