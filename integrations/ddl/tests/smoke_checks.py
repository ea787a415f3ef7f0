"""Ranks, and training in a graph of tf.compat.v1. Run by test_smoke.py, which sets DDL_OPTIONS."""

import numpy as np
import tensorflow.compat.v1 as tf

import ddl
import keras_ddl
from harness.linear_graph import RANK, SIZE, everywhere, gradient, graph, linear, start


def count_reductions() -> int:
    return sum(op.type == "DdlAllReduceN" for op in tf.get_default_graph().get_operations())


def check_ranks_match_the_job():
    assert (keras_ddl.rank(), keras_ddl.size()) == (RANK, SIZE)
    assert ddl.local_rank() == RANK and ddl.num_hosts() == 1
    assert keras_ddl.topology().mode == f"x:{SIZE}x1"


def check_gradient_descent_equals_one_process():
    with graph() as session:
        w, loss = linear()
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        assert count_reductions() == 1
        session.run(tf.global_variables_initializer())
        expected = start(0)
        for _ in range(3):
            session.run(train)
            expected = expected - 0.1 * gradient(expected)
        np.testing.assert_allclose(everywhere(session.run(w)), expected, rtol=1e-5)
