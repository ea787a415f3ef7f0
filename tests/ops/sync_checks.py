"""Synchronous kernels, for versions of TensorFlow with which the asynchronous kernels were not tested.

Run by test_ops_on_ranks.py, with the checks of split_checks.py.
"""

import keras_ddl
from keras_ddl import ops
from keras_ddl.compat.tensorflow import asynchronous, auto_control_deps, tf

tf.config.threading.set_inter_op_parallelism_threads(1)
keras_ddl.init()


def check_ops_keep_program_order():
    assert not asynchronous()
    assert ops.all_reduce(tf.ones([])).numpy() == keras_ddl.size()
    assert "DdlAllReduce" not in auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS
