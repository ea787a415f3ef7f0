"""Optimizers of tf.compat.v1.train with Horovod's interface, in graphs and sessions. Run by test_horovod_training.py.

The oracle is NumPy: gradient descent on all ranks' rows (harness/linear_graph.py).
"""

import shutil
import sys
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf
from horovod_training import raises

import keras_ddl
import keras_ddl.horovod as hvd
from harness.linear_graph import RANK, ROWS, SIZE, X, Y, everywhere, gradient, graph, linear, start
from keras_ddl.compat.tensorflow import tf as tf2
from keras_ddl.errors import ConfigError

hvd.init()


def distributed(rate=1.0, **arguments):
    return hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(rate), **arguments)


def begin(session):
    """Initializes the graph's variables, and broadcasts rank 0's."""
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    session.run(hvd.broadcast_global_variables(0))


def count_reductions():
    return sum(op.type == "DdlAllReduceN" for op in tf.get_default_graph().get_operations())


def check_graph_gradient_descent_equals_one_process():
    for use_resource in (True, False):
        with graph() as session:
            w, loss = linear(use_resource=use_resource)
            optimizer = distributed(0.1)
            train = optimizer.minimize(loss)
            assert type(optimizer) is tf.train.GradientDescentOptimizer and count_reductions() == 1
            begin(session)
            expected = start(0)
            np.testing.assert_array_equal(session.run(w), expected)
            for _ in range(3):
                session.run(train)
                expected = expected - 0.1 * gradient(expected)
            np.testing.assert_allclose(everywhere(session.run(w)), expected, rtol=1e-5)


def check_graph_adam_keeps_slots_step_and_names():
    with graph() as session:
        w, loss = linear()
        step = tf.train.get_or_create_global_step()
        optimizer = hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.1))
        train = optimizer.minimize(loss, global_step=step, name="train_step")
        begin(session)
        session.run(train)
        assert session.run(step) == 1 and train.name.startswith("train_step")
        assert optimizer.get_slot_names() == ["m", "v"] and len(optimizer.variables()) == 4
        moment = session.run(optimizer.get_slot(w, "m"))
        np.testing.assert_allclose(everywhere(moment), 0.1 * gradient(start(0)), rtol=1e-5)


def check_graph_gradients_are_reduced_once_if_clipped_or_conditional():
    def clipped_between(optimizer, w, loss):
        ((computed, _),) = optimizer.compute_gradients(loss)
        return optimizer.apply_gradients([(tf.clip_by_norm(computed, 0.5), w)])

    def by_hand(optimizer, w, loss):
        return optimizer.apply_gradients([(tf.gradients(loss, [w])[0], w), (None, tf.Variable(1.0))])

    def in_a_condition(optimizer, w, loss):
        ((computed, _),) = optimizer.compute_gradients(loss)
        finite = tf.reduce_all(tf.is_finite(computed))
        return tf.cond(finite, lambda: optimizer.apply_gradients([(computed / 2, w)]), tf.no_op)

    g = gradient(start(0))
    steps = ((clipped_between, g * min(1, 0.5 / np.linalg.norm(g))), (by_hand, g), (in_a_condition, g / 2))
    for make, expected in steps:
        for new_control_flow in (True, False):
            (tf.enable_control_flow_v2 if new_control_flow else tf.disable_control_flow_v2)()
            with graph() as session:
                w, loss = linear(use_resource=True)
                train = make(distributed(), w, loss)
                functions = tf.get_default_graph().as_graph_def().library.function
                assert count_reductions() == 1, make.__name__
                assert not any(node.op == "DdlAllReduceN" for function in functions for node in function.node_def)
                begin(session)
                session.run(train)
                np.testing.assert_allclose(everywhere(session.run(w)), start(0) - expected, rtol=1e-5)
    tf.enable_control_flow_v2()


def check_graph_tables():
    with graph() as session:
        table = tf.Variable(np.ones([5, 2], np.float32))
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [RANK, 4]))
        train = distributed().minimize(loss)
        begin(session)
        session.run(train)
        expected = np.ones([5, 2])
        expected[:SIZE] -= 1 / SIZE
        expected[4] -= 1
        np.testing.assert_allclose(everywhere(session.run(table)), expected, rtol=1e-6, atol=1e-6)


def check_graph_local_variables_use_local_gradients():
    with graph() as session:
        w, loss = linear()
        optimizer = distributed()
        optimizer.register_local_var(w)
        train = optimizer.minimize(loss)
        assert count_reductions() == 0
        begin(session)
        session.run(train)
        own = 2 * X[ROWS].T @ (X[ROWS] @ start(0) - Y[ROWS]) / len(X[ROWS])
        np.testing.assert_allclose(session.run(w), start(0) - own / SIZE, rtol=1e-5)


def check_graph_accumulation_reduces_sums_and_counts_every_run():
    for average in (True, False):
        for new_control_flow in (True, False):
            (tf.enable_control_flow_v2 if new_control_flow else tf.disable_control_flow_v2)()
            with graph() as session:
                w, loss = linear(use_resource=True)
                step = tf.train.get_or_create_global_step()
                optimizer = distributed(0.1, backward_passes_per_step=3, average_aggregated_gradients=average)
                train = optimizer.minimize(loss, global_step=step)
                begin(session)
                expected = start(0)
                for run in range(1, 8):
                    session.run(train)
                    if run % 3 == 0:
                        expected = expected - 0.1 * gradient(expected) * (1 if average else 3)
                    np.testing.assert_allclose(everywhere(session.run(w)), expected, rtol=1e-5, err_msg=str(run))
                    assert session.run(step) == run
    tf.enable_control_flow_v2()


def weights_without_hooks(session, w):
    def read(step_context):
        return step_context.session.run(w)

    return session.run_step_fn(read)


def check_graph_monitored_session_starts_from_rank_0s_values():
    folder = keras_ddl.broadcast_object(tempfile.mkdtemp())
    kept = None
    for _ in range(2):
        with tf.Graph().as_default():
            w, loss = linear()
            step = tf.train.get_or_create_global_step()
            train = distributed(0.1).minimize(loss, global_step=step)
            hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(num_steps=2)]
            where = folder if RANK == 0 else None
            with tf.train.MonitoredTrainingSession(checkpoint_dir=where, hooks=hooks) as session:
                first = weights_without_hooks(session, w)
                np.testing.assert_array_equal(everywhere(first), start(0) if kept is None else kept)
                while not session.should_stop():
                    session.run(train)
                    kept = weights_without_hooks(session, w)
            everywhere(kept)
    keras_ddl.barrier()
    if RANK == 0:
        shutil.rmtree(folder)


def check_graph_optimizer_in_eager_mode_and_in_a_function():
    for wrap in (lambda function: function, tf2.function):
        w = tf2.Variable(start(0))
        optimizer = distributed()

        @wrap
        def step(w=w, optimizer=optimizer):
            with tf2.GradientTape() as tape:
                loss = tf2.reduce_mean(tf2.square(tf2.matmul(X[ROWS], w) - Y[ROWS]))
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, [w])
            optimizer.apply_gradients(zip(gradients, [w]))

        step()
        np.testing.assert_allclose(everywhere(w.numpy()), start(0) - gradient(start(0)), rtol=1e-5)
        optimizer.minimize(lambda w=w: tf2.reduce_mean(tf2.square(tf2.matmul(X[ROWS], w) - Y[ROWS])), var_list=[w])
        second = start(0) - gradient(start(0))
        np.testing.assert_allclose(everywhere(w.numpy()), second - gradient(second), rtol=1e-4, atol=1e-5)


def check_graph_optimizer_reduces_changed_gradients_once_in_eager_mode():
    w = tf2.Variable([0.0, 0.0])
    optimizer = distributed(op=hvd.Sum)

    def compute():
        return optimizer.compute_gradients(lambda: tf2.reduce_sum(w) * (RANK + 1.0), [w])

    def halve(pairs):
        return [(gradient / 2, variable) for gradient, variable in pairs]

    total = SIZE * (SIZE + 1) / 2
    optimizer.apply_gradients(halve(compute()))
    np.testing.assert_allclose(everywhere(w.numpy()), [-total / 2] * 2)
    optimizer.apply_gradients([(tf2.constant([RANK + 1.0] * 2), w)])
    np.testing.assert_allclose(everywhere(w.numpy()), [-total * 1.5] * 2, err_msg="by hand: not reduced yet")
    (first, _), (second, _) = *compute(), *compute()
    optimizer.apply_gradients([((first + second) / 2, w)])
    np.testing.assert_allclose(everywhere(w.numpy()), [-total * 2.5] * 2)
    raises(ConfigError, "several times", lambda: optimizer.apply_gradients(halve([(second, w)])))
    optimizer.apply_gradients([(second, w)])
    optimizer.apply_gradients(halve(compute()))
    optimizer.apply_gradients([(tf2.constant([RANK + 1.0] * 2), w)])
    np.testing.assert_allclose(everywhere(w.numpy()), [-total * 5] * 2)


def check_graph_optimizer_refuses_to_sum_changed_tape_gradients_again():
    w = tf2.Variable([0.0])

    def tape_gradient(**arguments):
        with tf2.GradientTape() as tape:
            loss = tf2.reduce_sum(w) * (RANK + 1.0)
        return hvd.DistributedGradientTape(tape, **arguments).gradient(loss, [w])[0]

    total, summing = SIZE * (SIZE + 1) / 2, distributed(op=hvd.Sum)
    clipped = tf2.clip_by_norm(tape_gradient(op=hvd.Sum), 0.5)
    raises(ConfigError, "'Variable:0'.*may have reduced.*op=Sum", lambda: summing.apply_gradients([(clipped, w)]))
    summing.apply_gradients([(tape_gradient(op=hvd.Sum), w)])
    np.testing.assert_allclose(everywhere(w.numpy()), [-total])
    summing.apply_gradients([(tf2.constant([RANK + 1.0]), w)])  # not the gradient of the tape
    np.testing.assert_allclose(everywhere(w.numpy()), [-2 * total])
    distributed().apply_gradients([(tape_gradient(op=hvd.Sum) / 2, w)])  # the mean of equal values
    np.testing.assert_allclose(everywhere(w.numpy()), [-2.5 * total])

    @tf2.function
    def step():
        summing.apply_gradients([(tape_gradient(op=hvd.Sum) / 2, w)])

    step()  # the graph shows what a gradient was computed from
    np.testing.assert_allclose(everywhere(w.numpy()), [-3 * total])


def check_graph_optimizer_in_a_function_traces_in_linear_time():
    def calls(layers):
        """Returns the number of Python calls while a step is traced."""
        weights = [tf2.Variable(tf2.eye(2)) for _ in range(layers)]
        optimizer = distributed()

        @tf2.function
        def step(x):
            with tf2.GradientTape() as tape:
                for w in weights:
                    x = tf2.tanh(x @ w)
            optimizer.apply_gradients(zip(tape.gradient(x, weights), weights))

        count = 0

        def note(frame, event, argument):
            nonlocal count
            count += event == "call"

        sys.setprofile(note)
        try:
            step.get_concrete_function(tf2.TensorSpec([1, 2]))
        finally:
            sys.setprofile(None)
        return count

    calls(1)
    few, many = calls(4), calls(32)
    assert many < 8 * few, (few, many)


def check_graph_optimizer_refuses_unsupported_arguments():
    optimizer = distributed()
    raises(ConfigError, "already a DistributedOptimizer", lambda: hvd.DistributedOptimizer(optimizer))
    raises(ConfigError, "Average or Sum", lambda: distributed(op=hvd.Adasum))
    raises(ConfigError, "1 or more", lambda: distributed(backward_passes_per_step=0))
    accumulates = distributed(backward_passes_per_step=2)
    variable = tf2.Variable(1.0)
    raises(ConfigError, "graph", lambda: accumulates.minimize(lambda: variable * 2.0, var_list=[variable]))
    with graph():
        w, loss = linear()
        by_hand = [(tf.gradients(loss, [w])[0], w)]
        raises(ConfigError, "Call compute_gradients", lambda: accumulates.apply_gradients(by_hand))
