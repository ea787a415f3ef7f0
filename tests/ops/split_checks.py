"""TensorFlow ops in communicators made by `split`. Run by test_ops_on_ranks.py."""

import numpy as np
import pytest

import keras_ddl
from keras_ddl import errors, ops
from keras_ddl.compat.tensorflow import tf

tf.config.threading.set_inter_op_parallelism_threads(1)
keras_ddl.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()
# Two ranks form one part, so the other communicator has all ranks; four ranks form two halves.
WIDTH = min(2, SIZE)
HALF = keras_ddl.split(RANK // WIDTH, key=-RANK, name="half")
RANKS = list(HALF.world_ranks)
TOTAL = float(sum(RANKS))


def everything(x, comm):
    return (
        ops.all_reduce(x, comm=comm),
        ops.all_reduce_n([x, x[:1]], op="max", comm=comm)[1],
        ops.reduce_scatter(x, comm=comm),
        ops.all_gather(x[: 1 + RANK % 2], comm=comm),
        ops.broadcast(x, root=comm.size - 1, comm=comm),
    )


def check_every_collective_eager_and_in_a_graph():
    x = tf.fill([2 * HALF.size, 3], float(RANK))
    expected = (
        np.full(x.shape, TOTAL),
        np.full([1, 3], max(RANKS)),
        np.full([2, 3], TOTAL),
        np.concatenate([np.full([1 + rank % 2, 3], rank) for rank in RANKS]),
        np.full(x.shape, RANKS[-1]),
    )
    for function in (everything, tf.function(everything)):
        for result, wanted in zip(function(x, HALF), expected):
            np.testing.assert_array_equal(result, wanted)
    slices = ops.all_reduce(tf.IndexedSlices(x[:1], tf.constant([RANK]), tf.constant([SIZE, 3])), comm=HALF)
    np.testing.assert_array_equal(slices.indices, RANKS)


def check_broadcast_variables_in_each_part():
    variables = [tf.Variable(tf.fill([3], RANK + 1)), tf.Variable(float(RANK))]
    ops.broadcast_variables(variables, root=1 % HALF.size, comm=HALF)
    root = RANKS[1 % HALF.size]
    np.testing.assert_array_equal(variables[0], np.full(3, root + 1))
    assert variables[1].numpy() == root


def check_functions_that_differ_between_parts_share_collectives_of_all():
    @tf.function(autograph=False)
    def function(x):
        # The first part makes two more collectives, before and after the one of all ranks.
        if RANK < WIDTH:
            x = ops.all_reduce(x, comm=HALF)
        x = ops.all_reduce(x)
        if RANK < WIDTH:
            x = ops.all_reduce(x, comm=HALF) / HALF.size
        return x + ops.all_reduce(tf.ones_like(x))

    first = [rank for rank in range(SIZE) if rank < WIDTH]
    expected = sum(first) * len(first) + sum(range(WIDTH, SIZE)) + SIZE
    np.testing.assert_array_equal(function(tf.fill([4], float(RANK))), np.full(4, expected))


def check_gradients_stay_in_the_communicator():
    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            parts = (
                ops.all_reduce(x, op="mean", comm=HALF),
                ops.all_reduce(x, op="product", comm=HALF),
                ops.broadcast(x, root=HALF.size - 1, comm=HALF),
                ops.reduce_scatter(x, op="max", comm=HALF),
                ops.all_gather(x, comm=HALF),
            )
            loss = tf.add_n([tf.reduce_sum(part) for part in parts])
        return tape.gradient(loss, x)

    count = 2 * HALF.size
    x = tf.fill([count], RANK + 2.0)
    others = np.prod([rank + 2.0 for rank in RANKS]) / (RANK + 2.0)
    is_root, is_largest = RANKS[-1] == RANK, max(RANKS) == RANK
    expected = 1.0 + HALF.size * others + HALF.size * is_root + 1.0 * is_largest + HALF.size
    for function in (gradients, tf.function(gradients)):
        np.testing.assert_allclose(function(x), np.full(count, expected), rtol=1e-6)


def check_mismatch_names_the_communicator_and_leaves_others_usable():
    if RANK < WIDTH and WIDTH > 1:
        with pytest.raises(errors.RankMismatchError, match="half/loss"):
            ops.all_reduce(tf.ones([2 + HALF.rank]), name="loss", comm=HALF)
    np.testing.assert_array_equal(ops.all_reduce(tf.ones([3]), comm=HALF), np.full(3, HALF.size))
    np.testing.assert_array_equal(ops.all_reduce(tf.ones([3])), np.full(3, SIZE))


def check_function_of_a_closed_communicator_raises():
    comm = keras_ddl.split(RANK // WIDTH, name="short")
    function = tf.function(lambda x: ops.all_reduce(x, comm=comm))
    np.testing.assert_array_equal(function(tf.ones([2])), np.full(2, comm.size))
    keras_ddl.barrier()
    comm.close()
    with pytest.raises(tf.errors.NotFoundError, match="'short/.*trace the function again"):
        function(tf.ones([2]))
    with pytest.raises(errors.NotInitializedError, match="split"), ops.translate_errors():
        function(tf.ones([2]))
    with pytest.raises(errors.NotInitializedError, match="'short' is closed"):
        ops.all_reduce(tf.ones([2]), comm=comm)
    np.testing.assert_array_equal(ops.all_reduce(tf.ones([3])), np.full(3, SIZE))
