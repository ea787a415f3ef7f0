"""DDL in graphs of tf.compat.v1, on several ranks. Run by test_ddl.py, which sets DDL_OPTIONS."""

import contextlib
import io
import os
import shutil
import tempfile
from unittest import mock

import numpy as np
import tensorflow.compat.v1 as tf

import ddl
import keras_ddl
from harness.linear_graph import RANK, SIZE, everywhere, gradient, graph, linear, start
from keras_ddl.compat.tensorflow import tf as tf2
from keras_ddl.ddl import job
from keras_ddl.device.sessions import session_config
from keras_ddl.errors import ConfigError, RankMismatchError
from keras_ddl.ops import translate_errors


def count_reductions() -> int:
    return sum(op.type == "DdlAllReduceN" for op in tf.get_default_graph().get_operations())


def check_every_optimizer_of_compat_v1():
    for make in (
        lambda: tf.train.AdamOptimizer(0.1),
        lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
        lambda: tf.train.AdadeltaOptimizer(0.1),
        lambda: tf.train.AdagradOptimizer(0.1),
        lambda: tf.train.RMSPropOptimizer(0.1),
        lambda: tf.train.FtrlOptimizer(0.1),
        lambda: tf.train.ProximalGradientDescentOptimizer(0.1),
    ):
        with graph() as session:
            _, loss = linear(use_resource=False)
            train = make().minimize(loss)
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run(train)
            changed = everywhere(session.run(tf.trainable_variables()[0]))
            assert np.abs(changed - start(0)).max() > 1e-5


def check_gradients_are_reduced_before_a_script_clips_them():
    with graph() as session:
        w, loss = linear()
        optimizer = tf.train.GradientDescentOptimizer(1.0)
        (pair,) = optimizer.compute_gradients(loss)
        clipped, _ = tf.clip_by_global_norm([pair[0]], 0.5)
        train = optimizer.apply_gradients([(clipped[0], w)])
        assert count_reductions() == 1
        session.run(tf.global_variables_initializer())
        session.run(train)
        g = gradient(start(0))
        expected = start(0) - g * min(1, 0.5 / np.linalg.norm(g))
        np.testing.assert_allclose(everywhere(session.run(w)), expected, rtol=1e-5)


def check_gradients_by_hand_are_reduced_by_the_optimizer():
    with graph() as session:
        w, loss = linear()
        unused = tf.Variable(1.0)
        (g,) = tf.gradients(loss, [w])
        train = tf.train.GradientDescentOptimizer(1.0).apply_gradients([(g, w), (None, unused)])
        assert count_reductions() == 1
        session.run(tf.global_variables_initializer())
        session.run(train)
        np.testing.assert_allclose(everywhere(session.run(w)), start(0) - gradient(start(0)), rtol=1e-5)


def check_grads_reduce_takes_the_place_of_the_optimizers_own():
    for average, factor in ((True, 1), (False, SIZE)):
        with graph() as session:
            w, loss = linear()
            optimizer = tf.train.GradientDescentOptimizer(1.0)
            pairs = ddl.grads_reduce(optimizer.compute_gradients(loss), average=average)
            before = count_reductions()
            train = optimizer.apply_gradients(pairs)
            assert count_reductions() == before == 2  # the first is in the graph, and nothing runs it
            session.run(tf.global_variables_initializer())
            session.run(train)
            expected = start(0) - factor * gradient(start(0))
            np.testing.assert_allclose(everywhere(session.run(w)), expected, rtol=1e-5)


def check_explicit_collectives():
    with graph() as session:
        value = ddl.bcast(np.full([2, 3], RANK + 1.0))
        grads = ddl.allreduce_n([tf.constant([1.0 * RANK]), None, tf.constant(RANK, tf.float64)], average=False)
        assert grads[1] is None
        np.testing.assert_array_equal(session.run(value), np.ones([2, 3]))
        total = SIZE * (SIZE - 1) / 2
        assert [float(np.squeeze(each)) for each in session.run([grads[0], grads[2]])] == [total, total]


def check_gradients_of_tables_are_reduced():
    with graph() as session:
        table = tf.Variable(np.ones([5, 2], np.float32))
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [RANK, 4]))
        train = tf.train.GradientDescentOptimizer(1.0).minimize(loss)
        session.run(tf.global_variables_initializer())
        session.run(train)
        expected = np.ones([5, 2])
        expected[:SIZE] -= 1 / SIZE
        expected[4] -= 1
        np.testing.assert_allclose(everywhere(session.run(table)), expected, rtol=1e-6, atol=1e-6)


def check_saver_restores_an_old_checkpoint_on_all_ranks():
    folder = keras_ddl.broadcast_object(tempfile.mkdtemp())
    with graph() as session:
        w, loss = linear()
        train = tf.train.AdamOptimizer(0.1).minimize(loss)
        saver = tf.train.Saver()
        session.run(tf.global_variables_initializer())
        session.run(train)
        if RANK == 0:
            saver.save(session, f"{folder}/old")
        kept = session.run(w)
        session.run(train)
        keras_ddl.barrier()
        saver.restore(session, f"{folder}/old")
        np.testing.assert_array_equal(everywhere(session.run(w)), kept)
    keras_ddl.barrier()
    if RANK == 0:
        shutil.rmtree(folder)


def check_ranks_that_differ_are_told_in_a_session():
    with graph() as session:
        value = ddl.bcast(np.zeros([RANK + 1]))
        try:
            with translate_errors():
                session.run(value)
        except RankMismatchError as error:
            assert "ddl/bcast" in str(error), error
        else:
            raise AssertionError("no error")
        np.testing.assert_array_equal(session.run(ddl.bcast(RANK)), 0)


def check_a_second_init_with_another_mode_is_refused():
    ddl.init("-dbg_level 0")
    try:
        ddl.init(f"-mode r:1x{SIZE}")
    except ConfigError as error:
        assert "cannot change" in str(error)
    else:
        raise AssertionError("no error")
    finally:
        ddl.init(os.environ["DDL_OPTIONS"])


def check_init_after_that_of_keras_ddl_is_whole():
    with mock.patch.object(job._State, "ready", False), mock.patch.object(job._State, "bucket_size", None):
        ddl.init()
        assert job.bucket_size() is not None


def check_init_again_keeps_or_compares_options():
    ddl.init()
    ddl.init("-mode p")  # the same box
    ddl.init("-mode p:" + keras_ddl.topology().mode.partition(":")[2])
    try:
        ddl.init(f"-dump_iter {RANK}")
    except RankMismatchError as error:
        assert "dump_iter=1" in str(error) and "on rank 1" in str(error), error
    else:
        raise AssertionError("no error")
    finally:
        ddl.init(os.environ["DDL_OPTIONS"])


def check_interactive_session_takes_a_config():
    with tf.Graph().as_default():
        session = tf.InteractiveSession(config=tf.ConfigProto(allow_soft_placement=True))
        total = ddl.allreduce_n([tf.constant(1.0)], average=False)[0]
        assert total.eval() == SIZE
        session.close()


def check_session_config_says_only_what_a_script_leaves_open():
    given = tf.ConfigProto(intra_op_parallelism_threads=7, allow_soft_placement=True)
    config = session_config(given)
    assert config.intra_op_parallelism_threads == 7 and config.allow_soft_placement
    assert config.inter_op_parallelism_threads == tf.config.threading.get_inter_op_parallelism_threads() > 0
    assert not given.inter_op_parallelism_threads and not config.gpu_options.visible_device_list
    # Without a GPU here: what TensorFlow says of the one that a rank keeps.
    gpu = mock.Mock()
    gpu.name = "/physical_device:GPU:3"
    with mock.patch.object(tf2.config, "get_visible_devices", return_value=[gpu]):
        assert session_config(given).gpu_options.visible_device_list == "3"
        given.gpu_options.visible_device_list = "0"
        assert session_config(given).gpu_options.visible_device_list == "0"


def check_dump_iter_prints_every_so_many_reductions():
    text = io.StringIO()
    ddl.init("-dump_iter 4")
    try:
        with graph() as session, contextlib.redirect_stderr(text):
            w, loss = linear()
            train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
            session.run(tf.global_variables_initializer())
            for _ in range(8):
                session.run(train)
            everywhere(session.run(w))
    finally:
        ddl.init(os.environ["DDL_OPTIONS"])
    lines = [line for line in text.getvalue().splitlines() if "reductions" in line]
    assert len(lines) == (2 if RANK == 0 else 0), text.getvalue()
    assert all("ms on average" in line and "jitter: rank" in line for line in lines)


def check_group_size_bounds_a_reduction():
    with graph():
        loss = tf.reduce_sum([tf.reduce_sum(tf.square(tf.Variable(np.ones(80, np.float32)))) for _ in range(3)])
        tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        assert count_reductions() == (3 if "DDL_GROUP_SIZE" in os.environ else 1)
