"""Variables of which each rank holds a part of a sum between steps, such as accumulated gradients."""

import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError

X = np.arange(15.0).reshape(5, 3)


def simulated(step, variables, size=3):
    return Simulation(step, [X], size, variables=variables, parts=[each.handle for each in variables])


@pytest.mark.parametrize("size", [2, 3])
def test_parts_are_accumulated_without_collectives(size):
    added, assigned, subtracted = (tf.Variable(np.zeros(3)) for _ in range(3))

    def step(x):
        gradient = tf.reduce_sum(tf.square(x), axis=0)
        added.assign_add(gradient)
        assigned.assign(assigned + gradient)
        subtracted.assign_sub(gradient)
        return tf.constant(0)

    accumulates = simulated(step, [added, assigned, subtracted], size).check(X, steps=2)
    assert [len(report.entries) for report in accumulates.reports] == [0] * size
    held = accumulates.held(added)
    assert not np.array_equal(held[0], held[1])


def test_parts_are_combined_when_needed():
    parts = tf.Variable(np.zeros(3))

    def step(x):
        parts.assign_add(tf.reduce_sum(x, axis=0))
        norm = tf.sqrt(tf.reduce_sum(tf.square(parts)))
        parts.assign(tf.zeros_like(parts))
        return norm

    simulated(step, [parts]).check(X, steps=2)


def test_other_operations_on_accumulated_gradients_are_refused():
    parts = tf.Variable(np.zeros([3, 3]))

    def step(x):
        parts.scatter_add(tf.IndexedSlices(x[:1], tf.constant([0])))
        return tf.constant(0)

    with pytest.raises(ConfigError, match="accumulates gradients"):
        simulated(step, [parts])(X)
