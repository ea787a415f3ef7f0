"""A step also writes mirrors of sharded variables. Staged values complete a step that other ranks have committed."""

import keras
import numpy as np
import pytest
from cut.simulated import Simulation
from cut.test_shards import Trained, X

from keras_ddl.compat.tensorflow import tf


def check(trained: Simulation, offset: int) -> None:
    """Checks that each mirror equals the shard of the rank `offset` before it."""
    for rank, mirrors in enumerate(trained.mirrors):
        source = trained.copies[(rank - offset) % trained.size]
        assert mirrors
        for key, mirror in mirrors.items():
            np.testing.assert_array_equal(mirror.numpy(), source[key].numpy())


@pytest.mark.parametrize("size, offset", [(2, 1), pytest.param(5, 3, marks=pytest.mark.long)])
def test_mirrors_receive_the_steps_writes(size: int, offset: int) -> None:
    trained = Trained(keras.optimizers.AdamW(1e-2), size=size, mirrors=offset)
    report = trained.train()
    check(trained.simulation, offset)
    assert [each.kind for each in report.entries].count("mirror") == 1 and report.copies == {}


@pytest.mark.long
def test_mirrors_receive_writes_of_a_branch() -> None:
    scaled = lambda each: keras.optimizers.LossScaleOptimizer(each, 2.0)  # noqa: E731
    trained = Trained(keras.optimizers.Adam(1e-2), mirrors=1, wrap=scaled)
    report = trained.train()
    check(trained.simulation, 1)
    assert [each.kind for each in report.entries].count("mirror") == 1 and sum(report.copies.values()) > 0


def test_mirrors_receive_scattered_rows() -> None:
    table = tf.Variable(np.arange(10.0).reshape(5, 2))

    def step(x):
        total = tf.reduce_sum(x)
        table.scatter_add(tf.IndexedSlices(tf.fill([2, 2], total), tf.constant([1, 3])))
        return total

    simulation = Simulation(step, [X], 2, variables=[table], sharded=[table], mirrors=1)
    check(simulation.check(X, steps=2), 1)
    assert list(simulation.reports[0].copies) == ["ResourceScatterAdd may write it"]


def test_failed_step_keeps_shards_and_mirrors_and_can_be_completed() -> None:
    trained = Trained(keras.optimizers.Adam(1e-2), size=3, mirrors=1)
    simulation = trained.simulation
    trained.train(steps=2)
    for each in simulation.copies[0].values():
        each.assign(each + 1)
    before = simulation.everything()
    for each in simulation.snapshots:
        each.complete()  # nothing is staged, because the step has committed
    np.testing.assert_equal(simulation.everything(), before)
    for each in simulation.copies[0].values():
        each.assign(each - 1)
    before = simulation.everything()
    simulation.exchange.breaks = "commit"
    with pytest.raises(tf.errors.OpError):
        simulation(X)
    for each in simulation.snapshots:
        each.discard()
        each.complete()  # nothing is staged after discard()
    np.testing.assert_equal(simulation.everything(), before)
    simulation.expected(X)
    with pytest.raises(tf.errors.OpError):
        simulation(X)
    for each in simulation.snapshots:
        each.restore()
    np.testing.assert_equal(simulation.everything(), before)
    for each in simulation.snapshots:
        each.complete()
    for variable in trained.sharded:
        np.testing.assert_allclose(simulation.together(variable), variable, rtol=0, atol=1e-12)
    check(simulation, 1)
