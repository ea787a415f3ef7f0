"""What variables start from, on several ranks. Run by test_ddl.py, which sets DDL_OPTIONS."""

import warnings

import keras
import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import ddl
import keras_ddl
from harness.linear_graph import RANK, ROWS, SIZE, X, Y, everywhere, graph, linear, start


def check_variables_start_from_rank_0():
    for resource in (True, False):
        with graph() as session:
            w, _ = linear(use_resource=resource)
            own = tf.Variable(float(RANK), trainable=False, use_resource=resource)
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(w), start(0))
            assert session.run(own) == RANK  # statistics and counters stay a rank's own


def check_get_variable_and_a_list_of_variables_start_from_rank_0():
    with graph() as session:
        v = tf.get_variable("v", [4], initializer=tf.random_normal_initializer(seed=RANK))
        u = tf.get_variable("u", [4], initializer=tf.random_normal_initializer(seed=RANK))
        session.run(tf.variables_initializer([v]))
        session.run(tf.initializers.variables([u]))
        assert np.ptp(everywhere(session.run(v))) > 0
        everywhere(session.run(u))


def check_a_graph_of_one_rank_initialises_alone():
    ddl.disable_broadcast()
    try:
        with tf.Graph().as_default() as evaluation:
            w, loss = linear()
    finally:
        ddl.enable_broadcast()
    with evaluation.as_default():
        if RANK == SIZE - 1:
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                np.testing.assert_array_equal(session.run(w), start(RANK))
    keras_ddl.barrier()


def check_an_exported_base_graph_has_no_operation_of_ours():
    with tf.Graph().as_default():
        _, loss = linear()
        meta = tf.train.export_meta_graph()
        train = tf.train.GradientDescentOptimizer(1.0).minimize(loss)
        tf.global_variables_initializer()
        assert not [node.op for node in meta.graph_def.node if node.op.startswith("Ddl")]
        assert [op for op in train.graph.get_operations() if op.type.startswith("Ddl")]


def check_one_variables_initializer_gives_rank_0s_value():
    for resource in (True, False):
        with graph() as session:
            w, _ = linear(use_resource=resource)
            own = tf.Variable(float(RANK), trainable=False, use_resource=resource)
            session.run([w.initializer, own.initializer])
            np.testing.assert_array_equal(session.run(w), start(0))
            assert session.run(own) == RANK
            operations = len(tf.get_default_graph().get_operations())
            w.load(start(7 + RANK), session)  # through the initializer; no other rank takes part
            np.testing.assert_array_equal(session.run(w), start(7 + RANK))
            if RANK == 0:
                session.run(own.initializer)
            tf.train.export_meta_graph()
            assert w.initializer is w.initializer
            assert len(tf.get_default_graph().get_operations()) == operations


def check_what_starts_from_weights_starts_from_rank_0s():
    with graph() as session:
        w, _ = linear()
        average = tf.train.ExponentialMovingAverage(0.9)
        average.apply([w])
        words = tf.Variable("not to be broadcast")
        session.run(tf.global_variables_initializer())
        np.testing.assert_array_equal(session.run(average.average(w)), start(0))
        assert session.run(words) == b"not to be broadcast"


def check_parts_of_a_variable_start_from_rank_0():
    with graph() as session:
        parts = tf.get_variable("t", [5, 2], partitioner=tf.fixed_size_partitioner(2))
        session.run(tf.global_variables_initializer())
        whole = everywhere(session.run(tf.convert_to_tensor(parts)))
        session.run([part.initializer for part in parts])
        assert np.abs(everywhere(session.run(tf.convert_to_tensor(parts))) - whole).max() > 0


def check_fit_without_callbacks_starts_from_rank_0():
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    of_rank_0 = keras_ddl.broadcast_object(model.get_weights())[0]
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ddl: variables")
        model.fit(X[ROWS], Y[ROWS], batch_size=len(X) // SIZE, verbose=0)
    expected = of_rank_0 - 0.1 * 2 * X.T @ (X @ of_rank_0 - Y) / len(X)
    np.testing.assert_allclose(everywhere(model.get_weights()[0]), expected, rtol=1e-4, atol=1e-6)


def check_an_eager_loop_is_told_that_ranks_began_apart():
    for optimizer in (tf.train.MomentumOptimizer(0.1, 0.5), keras.optimizers.SGD(0.1, momentum=0.5)):
        w = tf2.Variable(start(RANK))
        for step in range(2):
            with tf2.GradientTape() as tape:
                loss = tf2.reduce_mean(tf2.square(X[ROWS] @ w - Y[ROWS]))
            gradients = tape.gradient(loss, [w])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.apply_gradients(zip(gradients, [w]))
            told = [str(each.message) for each in caught if "ddl: variables must be equal" in str(each.message)]
            assert len(told) == (SIZE > 1 and RANK == step == 0), told
        everywhere(w.numpy())


def check_variables_made_while_the_broadcast_is_off_stay_apart():
    ddl.disable_broadcast()
    try:
        own = tf2.Variable(start(RANK))
    finally:
        ddl.enable_broadcast()
    tf.train.GradientDescentOptimizer(1.0).apply_gradients([(tf2.ones([3, 1]), own)])
    np.testing.assert_array_equal(own, start(RANK) - 1)
