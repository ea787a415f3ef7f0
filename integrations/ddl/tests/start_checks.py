"""The initial values of variables, on several ranks. Run by test_ddl.py, which sets DDL_OPTIONS."""

import contextlib
import os
import shutil
import tempfile
import warnings

import keras
import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import ddl
import keras_ddl
from harness.linear_graph import RANK, ROWS, SIZE, X, Y, everywhere, graph, linear, start
from keras_ddl.ddl import job
from keras_ddl.errors import ConfigError


def check_group_size_counts_elements_of_four_bytes():
    before = job._State.options, job._State.bucket_size
    os.environ["DDL_GROUP_SIZE"] = "1000"
    try:
        job.init("-dbg_level 0")
        assert job.bucket_size() == (4000, False)
    finally:
        del os.environ["DDL_GROUP_SIZE"]
        job._State.options, job._State.bucket_size = before


def check_get_variable_and_a_list_start_from_rank_0():
    with graph() as session:
        v = tf.get_variable("v", [4], initializer=tf.random_normal_initializer(seed=RANK))
        u = tf.get_variable("u", [4], initializer=tf.random_normal_initializer(seed=RANK))
        session.run(tf.variables_initializer([v]))
        session.run(tf.initializers.variables([u]))
        assert np.ptp(everywhere(session.run(v))) > 0
        everywhere(session.run(u))


def check_single_initializer_gives_rank_0s_value():
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


def check_variables_copied_from_weights_start_from_rank_0():
    with graph() as session:
        w, _ = linear()
        average = tf.train.ExponentialMovingAverage(0.9)
        average.apply([w])
        words = tf.Variable("not to be broadcast")
        session.run(tf.global_variables_initializer())
        np.testing.assert_array_equal(session.run(average.average(w)), start(0))
        assert session.run(words) == b"not to be broadcast"


def check_partitioned_variable_starts_from_rank_0():
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


def check_eager_loop_with_unequal_start_is_warned():
    for optimizer in (tf.train.MomentumOptimizer(0.1, 0.5), keras.optimizers.SGD(0.1, momentum=0.5)):
        w = tf2.Variable(start(RANK))
        for step in range(2):
            with tf2.GradientTape() as tape:
                loss = tf2.reduce_mean(tf2.square(X[ROWS] @ w - Y[ROWS]))
            gradients = tape.gradient(loss, [w])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.apply_gradients(zip(gradients, [w]))
            warned = [str(each.message) for each in caught if "ddl: variables must be equal" in str(each.message)]
            assert len(warned) == (SIZE > 1 and RANK == step == 0), warned
        everywhere(w.numpy())


def check_variables_made_with_broadcast_off_stay_local():
    ddl.disable_broadcast()
    try:
        own = tf2.Variable(start(RANK))
    finally:
        ddl.enable_broadcast()
    tf.train.GradientDescentOptimizer(1.0).apply_gradients([(tf2.ones([3, 1]), own)])
    np.testing.assert_array_equal(own, start(RANK) - 1)


def monitored(folder, steps, **kwargs):
    """Trains up to step `steps`, with checkpoints of rank 0. Returns (first step, weights)."""
    with tf.Graph().as_default():
        w, loss = linear()
        step = tf.train.get_or_create_global_step()
        train = tf.train.AdamOptimizer(0.05).minimize(loss, global_step=step)
        hooks = [tf.train.StopAtStepHook(last_step=steps)]
        directory = folder if RANK == 0 else None
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=directory,
            hooks=hooks,
            save_checkpoint_steps=2,
            save_summaries_steps=None,
            log_step_count_steps=None,
            **kwargs,
        ) as session:
            first = session.run(step)
            while not session.should_stop():
                _, weights = session.run([train, w])
        return int(first), weights


@contextlib.contextmanager
def shared_folder():
    folder = keras_ddl.broadcast_object(tempfile.mkdtemp())
    yield folder
    keras_ddl.barrier()
    if RANK == 0:
        shutil.rmtree(folder)


def check_monitored_session_continues_from_rank_0s_checkpoint():
    for of_one_chief in ({}, {"is_chief": RANK == 0}):
        with shared_folder() as folder:
            first, _ = monitored(folder, 4, **of_one_chief)
            assert everywhere(first) == 0
            first, resumed = monitored(folder, 8, **of_one_chief)
            assert everywhere(first) == 4
            first, at_once = monitored(None, 8, **of_one_chief)
            np.testing.assert_allclose(everywhere(resumed), at_once, rtol=1e-6)


def check_chiefs_restore_reaches_all_ranks():
    with tf.Graph().as_default():
        w, _ = linear()
        given = tf.placeholder(tf.float32, [3, 1])
        load = w.assign(given)
        scaffold = tf.train.Scaffold(init_fn=lambda _, session: session.run(load, {given: start(9)}))
        with tf.train.MonitoredTrainingSession(is_chief=RANK == 0, scaffold=scaffold) as session:
            np.testing.assert_array_equal(session.run(w), start(9))


def check_sessions_without_chief_on_rank_0_are_refused():
    if SIZE == 1:
        return
    with tf.Graph().as_default():
        linear()
        try:
            tf.train.MonitoredTrainingSession(is_chief=RANK != 0)
        except ConfigError as error:
            assert "is_chief=False on rank(s) [0]" in str(error), error
        else:
            raise AssertionError("no error")


def check_supervisor_continues_from_rank_0s_checkpoint():
    with shared_folder() as folder:
        for expected in (0, 2):
            # A Supervisor's session cannot read the global step if it is a resource variable.
            with tf.Graph().as_default():
                _, loss = linear(use_resource=False)
                step = tf.Variable(0, trainable=False, use_resource=False)
                train = tf.train.AdamOptimizer(0.05).minimize(loss, global_step=step)
                logdir = folder if RANK == 0 else None
                seconds = {"save_summaries_secs": 0, "save_model_secs": 0}
                supervisor = tf.train.Supervisor(logdir=logdir, global_step=step, **seconds)
                with supervisor.managed_session() as session:
                    assert everywhere(session.run(step)) == expected
                    for _ in range(2):
                        session.run(train)
                    everywhere(session.run(tf.trainable_variables()[0]))
                    if RANK == 0:
                        supervisor.saver.save(session, f"{folder}/model.ckpt", global_step=step)
            keras_ddl.barrier()


def check_monitored_session_refuses_another_ranks_checkpoint():
    if SIZE == 1:
        return
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default():
        linear()
        tf.train.get_or_create_global_step()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            tf.train.Saver().save(session, f"{folder}/model")
        try:
            tf.train.MonitoredTrainingSession(checkpoint_dir=folder if RANK else None, save_summaries_steps=None)
        except ConfigError as error:
            assert "found by rank(s)" in str(error), error
        else:
            raise AssertionError("no error")
