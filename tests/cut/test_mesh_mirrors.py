"""With one data rank, slices of a mesh have mirrors. Staged values complete a step that other ranks have committed."""

import numpy as np
import pytest
from cut.mesh import Mesh, Position

from keras_ddl.compat.tensorflow import tf

X = np.random.default_rng(0).normal(size=(6, 4))


def mesh(shape: Position, offset: int) -> tuple[Mesh, list[tf.Variable]]:
    """Returns a step that trains a matrix cut along columns and one cut along rows, and counts in a replicated one."""
    rng = np.random.default_rng(1)
    wide, narrow = tf.Variable(rng.normal(size=(4, 6))), tf.Variable(rng.normal(size=(6, 3)))
    steps = tf.Variable(0.0, dtype=tf.float64)
    variables = [wide, narrow, steps]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ wide) @ narrow))
        for variable, gradient in zip((wide, narrow), tape.gradient(loss, [wide, narrow])):
            variable.assign_sub(0.1 * gradient)
        steps.assign_add(1.0)
        return loss

    return Mesh(step, [X], shape, variables, {id(wide): 1, id(narrow): 0}, mirrors=offset), variables


def check_mirrors(trained: Mesh, offset: int) -> None:
    """Checks that each mirror equals the slice of the model rank `offset` before it."""
    for (data, model), mirrors in trained.mirrors.items():
        source = trained.copies[data, (model - offset) % trained.shape[1]]
        for key, mirror in mirrors.items():
            np.testing.assert_array_equal(mirror.numpy(), source[key].numpy())


@pytest.mark.parametrize("size, offset", [(3, 2)])
def test_mirrors_of_slices_receive_the_steps_writes(size: int, offset: int) -> None:
    trained, _ = mesh((1, size), offset)
    trained.check(X)
    check_mirrors(trained, offset)
    assert all("mirror" in [each.kind for each in report.entries] for report in trained.data_reports.values())


@pytest.mark.parametrize("shape, offset", [((1, 2), 1), pytest.param((2, 2), 0, marks=pytest.mark.long)])
def test_step_that_fails_in_its_commit_can_be_undone_or_completed(shape: Position, offset: int) -> None:
    trained, variables = mesh(shape, offset)
    trained.check(X, steps=2)
    before = trained.everything()
    trained.everyone.breaks = "commit"
    trained.expected(X)
    with pytest.raises(tf.errors.OpError):
        trained(X)
    for each in trained.snapshots.values():
        each.restore()
    np.testing.assert_equal(trained.everything(), before)
    for each in trained.snapshots.values():
        each.complete()  # cut variables; no other rank holds this rank's slices
    for data in range(shape[0]):
        for variable in variables[:2]:
            np.testing.assert_allclose(trained.complete(variable, data), variable.numpy(), rtol=1e-12)
    if offset:
        check_mirrors(trained, offset)
