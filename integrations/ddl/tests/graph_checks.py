"""DDL in graphs of tf.compat.v1, on several ranks. Run by test_ddl.py, which sets DDL_OPTIONS."""

import contextlib
import io
import os
from unittest import mock

import numpy as np
import tensorflow.compat.v1 as tf

import ddl
import keras_ddl
from harness.linear_graph import RANK, SIZE, everywhere, gradient, graph, linear, start
from keras_ddl.ddl import job
from keras_ddl.device.sessions import session_config
from keras_ddl.errors import RankMismatchError
from keras_ddl.ops import translate_errors


def count_reductions() -> int:
    return sum(op.type == "DdlAllReduceN" for op in tf.get_default_graph().get_operations())


def check_compat_v1_optimizers_keep_ranks_equal():
    for make in (
        lambda: tf.train.AdamOptimizer(0.1),
        lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
        lambda: tf.train.FtrlOptimizer(0.1),
    ):
        with graph() as session:
            _, loss = linear(use_resource=False)
            train = make().minimize(loss)
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run(train)
            changed = everywhere(session.run(tf.trainable_variables()[0]))
            assert np.abs(changed - start(0)).max() > 1e-5


def check_grads_reduce_replaces_the_optimizers_reduction():
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


def check_mismatch_fails_in_a_session():
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


def check_init_after_keras_ddl_init_is_complete():
    with mock.patch.object(job._State, "ready", False), mock.patch.object(job._State, "bucket_size", None):
        ddl.init()
        assert job.bucket_size() is not None


def check_second_init_accepts_the_running_box():
    ddl.init()
    ddl.init("-mode p")  # the same box
    ddl.init("-mode p:" + keras_ddl.topology().mode.partition(":")[2])


def check_session_config_sets_only_missing_values():
    given = tf.ConfigProto(intra_op_parallelism_threads=7, allow_soft_placement=True)
    config = session_config(given)
    assert config.intra_op_parallelism_threads == 7 and config.allow_soft_placement
    assert config.inter_op_parallelism_threads == tf.config.threading.get_inter_op_parallelism_threads() > 0
    assert not given.inter_op_parallelism_threads and not config.gpu_options.visible_device_list
    # Without a GPU here, this stands for what TensorFlow says about a rank's GPU.
    own = tf.ConfigProto()
    own.gpu_options.visible_device_list = "3"
    own.gpu_options.allow_growth = True
    with mock.patch("keras_ddl.compat.tensorflow.eager_config", return_value=own):
        config = session_config(given)
        assert config.gpu_options.visible_device_list == "3" and config.gpu_options.allow_growth
        given.gpu_options.visible_device_list = "0"
        assert session_config(given).gpu_options.visible_device_list == "0"


def check_dump_iter_prints_every_n_reductions():
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
