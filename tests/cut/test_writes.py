"""What a step writes: nothing if any rank fails, on any rank; else what one process writes."""

import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf

WORDS = 5
X = np.arange(8, dtype=np.int64).reshape(8, 1) % WORDS


def variable(value):
    return tf.Variable(np.asarray(value, np.float64))


def values(simulation):
    return [[each.numpy() for each in copies.values()] for copies in simulation.copies]


class Program:
    """A step that looks up rows, which fails for an index that is too large, and writes its variables in some way."""

    def __init__(self, write, *variables):
        def step(x):
            total = tf.reduce_sum(tf.gather(tf.ones([WORDS, 2], tf.float64), x))
            return write(total, *variables)

        self.simulation = Simulation(step, [X], 2, variables=variables)

    def check(self, early="", lasting=""):
        """Runs the step, fails on one rank, runs it again. `early`: why variables are copied, as the report says."""
        simulation, bad = self.simulation, X.copy()
        bad[-1] = WORDS
        for _ in range(2):
            before = values(simulation.check(X))
            simulation.exchange._timeout = 1
            with pytest.raises(tf.errors.OpError):
                simulation(bad)
            for snapshots in simulation.snapshots:
                snapshots.restore()
            np.testing.assert_equal(values(simulation), before)
            # A rank that did not come is no longer waited for.
            simulation.exchange.__init__(2)
        report = simulation.reports[0]
        assert list(report.copies) == ([early] if early else [])
        assert list(report.lasting) == ([lasting] if lasting else [])


def test_what_is_assigned_is_read_later_and_written_once():
    def write(total, a, b):
        a.assign_add(tf.fill([2], total))
        b.assign(2 * a)
        a.assign_sub(tf.ones_like(a))
        b.assign_add(a.read_value())
        return a + b, tf.identity(b)

    Program(write, variable([1.0, 2.0]), variable([0.0, 0.0])).check()


def test_rows_that_nobody_reads_later_are_scattered_at_the_end():
    def write(total, table):
        found = tf.gather(table, [0, 1])
        table.scatter_add(tf.IndexedSlices(tf.fill([2], total), tf.constant([1, 3])))
        return found

    Program(write, variable(np.arange(5.0))).check()


def test_rows_that_are_read_later_are_copied_first():
    def write(total, table):
        table.scatter_add(tf.IndexedSlices(tf.fill([2], total), tf.constant([1, 3])))
        return tf.gather(table, [1])

    Program(write, variable(np.arange(5.0))).check(early="ResourceScatterAdd may write it")


def test_a_table_that_is_looked_up_after_it_was_assigned_is_copied_first():
    def write(total, table):
        table.assign(table * 2 + total)
        return tf.gather(table, [1])

    Program(write, variable(np.arange(5.0))).check(early="ResourceGather reads it after it was assigned")


def test_a_branch_that_writes_copies_first():
    def write(total, a, b):
        b.assign_add(total)
        tf.cond(total > -1.0, lambda: a.assign_add(b * 2), lambda: a.assign(b))
        return tf.identity(a)

    simulation = Program(write, variable(1.0), variable(0.0)).simulation
    simulation(X)
    assert simulation.reports[0].copies == {"If reads it after it was assigned": 1, "If may write it": 1}


def test_a_branch_that_only_reads_copies_nothing():
    def write(total, a):
        found = tf.cond(total > -1.0, lambda: a * 2, lambda: a + 1)
        a.assign_add(total)
        return found

    Program(write, variable(1.0)).check()


def test_a_loop_that_writes_copies_first():
    def write(total, a):
        tf.while_loop(lambda i: i < 3, lambda i: (a.assign_add(total), i + 1)[1], [tf.constant(0)])
        return tf.identity(a)

    Program(write, variable(1.0)).check(early="While may write it")


def test_a_python_function_may_read_what_was_assigned():
    def write(total, a):
        a.assign_add(total)
        return tf.numpy_function(lambda: a.numpy(), [], tf.float64)

    simulation = Program(write, variable(1.0)).simulation
    simulation(X)
    assert simulation.reports[0].copies == {"a Python function may read it": 1}
    assert simulation.reports[0].lasting == {"Python functions": 1}
    assert "not undone when a rank fails: Python functions (1)" in simulation.reports[0].text()


def test_random_operations_with_state_in_their_kernels_are_named():
    def write(total, a):
        a.assign(tf.random.normal([], dtype=tf.float64) * 0 + total)
        return tf.identity(a)

    Program(write, variable(1.0)).check(lasting="RandomStandardNormal")
