"""A step writes what one process writes, or, if any rank fails, nothing on any rank."""

import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf

WORDS = 5
X = np.arange(8, dtype=np.int64).reshape(8, 1) % WORDS


def variable(value):
    return tf.Variable(np.asarray(value, np.float64))


def simulated(write, *variables):
    """Returns a step that looks up rows and fails for an index that is too large; `write` writes the variables."""

    def step(x):
        total = tf.reduce_sum(tf.gather(tf.ones([WORDS, 2], tf.float64), x))
        return write(total, *variables)

    return Simulation(step, [X], 2, variables=variables)


def assign_then_read(total, a, b):
    a.assign_add(tf.fill([2], total))
    b.assign(2 * a)
    a.assign_sub(tf.ones_like(a))
    b.assign_add(a.read_value())
    return a + b, tf.identity(b)


def scatter_without_read(total, table):
    found = tf.gather(table, [0, 1])
    table.scatter_add(tf.IndexedSlices(tf.fill([2], total), tf.constant([1, 3])))
    return found


def scatter_then_read(total, table):
    table.scatter_add(tf.IndexedSlices(tf.fill([2], total), tf.constant([1, 3])))
    return tf.gather(table, [1])


def assign_then_look_up(total, table):
    table.assign(table * 2 + total)
    return tf.gather(table, [1])


def read_in_branch(total, a):
    found = tf.cond(total > -1.0, lambda: a * 2, lambda: a + 1)
    a.assign_add(total)
    return found


def write_in_loop(total, a):
    tf.while_loop(lambda i: i < 3, lambda i: (a.assign_add(total), i + 1)[1], [tf.constant(0)])
    return tf.identity(a)


def drawn(total, a):
    a.assign(tf.random.normal([], dtype=tf.float64) * 0 + total)
    return tf.identity(a)


@pytest.mark.parametrize(
    ("write", "first", "copied", "lasting"),
    [
        (assign_then_read, ([1.0, 2.0], [0.0, 0.0]), [], []),
        (scatter_without_read, (np.arange(5.0),), [], []),
        (scatter_then_read, (np.arange(5.0),), ["ResourceScatterAdd may write it"], []),
        (assign_then_look_up, (np.arange(5.0),), ["ResourceGather reads it after it was assigned"], []),
        (read_in_branch, (1.0,), [], []),
        (write_in_loop, (1.0,), ["While may write it"], []),
        (drawn, (1.0,), [], ["RandomStandardNormal"]),
    ],
)
def test_step_writes_as_one_process_or_not_at_all(write, first, copied, lasting):
    """`copied`: the reasons to copy variables before the step. `lasting`: effects that no rank can undo."""
    simulation, bad = simulated(write, *map(variable, first)), X.copy()
    bad[-1] = WORDS
    for _ in range(2):
        before = simulation.check(X).everything()
        simulation.exchange._timeout = 1
        with pytest.raises(tf.errors.OpError):
            simulation(bad)
        for snapshots in simulation.snapshots:
            snapshots.restore()
        np.testing.assert_equal(simulation.everything(), before)
        # Replaces the exchange in which a rank is missing.
        simulation.exchange.__init__(2)
    report = simulation.reports[0]
    assert (list(report.copies), list(report.lasting)) == (copied, lasting)


def test_writing_branch_copies_variables_first():
    def write(total, a, b):
        b.assign_add(total)
        tf.cond(total > -1.0, lambda: a.assign_add(b * 2), lambda: a.assign(b))
        return tf.identity(a)

    report = simulated(write, variable(1.0), variable(0.0)).check(X).reports[0]
    assert report.copies == {"If reads it after it was assigned": 1, "If may write it": 1}


def test_python_function_may_read_assigned_variables():
    def write(total, a):
        a.assign_add(total)
        return tf.numpy_function(lambda: a.numpy(), [], tf.float64)

    simulation = simulated(write, variable(1.0))
    simulation(X)
    report = simulation.reports[0]
    assert (report.copies, report.lasting) == ({"a Python function may read it": 1}, {"Python functions": 1})
    assert "not undone when a rank fails: Python functions (1)" in report.text()
