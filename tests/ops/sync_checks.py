"""The kernels for versions of TensorFlow that the asynchronous ones were not tested with. Run by test_ops.py."""

import numpy as np

import keras_ddl
from keras_ddl import errors, ops
from keras_ddl.compat.tensorflow import asynchronous, auto_control_deps, tf

keras_ddl.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()


def check_the_ops_keep_program_order():
    assert not asynchronous()
    assert ops.all_reduce(tf.ones([])).numpy() == SIZE
    assert "DdlAllReduce" not in auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS


def check_every_collective_works():
    total = SIZE * (SIZE + 1) / 2
    x = tf.fill([2 * SIZE], RANK + 1.0)

    def everything(x):
        return (
            ops.all_reduce(x),
            ops.all_reduce_n([x, x[:1]])[1],
            ops.reduce_scatter(x),
            ops.all_gather(x[:1]),
            ops.broadcast(x, root=SIZE - 1),
            ops.all_to_all(x),
        )

    expected = (
        [total] * 2 * SIZE,
        [total],
        [total] * 2,
        np.arange(1.0, SIZE + 1),
        [SIZE] * 2 * SIZE,
        np.repeat(np.arange(1.0, SIZE + 1), 2),
    )
    for function in (everything, tf.function(everything)):
        for result, wanted in zip(function(x), expected):
            np.testing.assert_array_equal(result, wanted)


def check_errors_arrive():
    for _ in range(2):
        try:
            ops.all_reduce(tf.ones([2 + RANK % 2]))
        except errors.RankMismatchError:
            continue
        raise AssertionError("no error")
