"""Gradients in buckets: one plan on all ranks, and overlap with backward. Run by test_strategy.py."""

import os
import time

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from keras_ddl.gradients.sparse import all_reduce_slices
from strategy.common import (
    RANK,
    SIZE,
    keras,
    set_precision,
)

set_precision("float64")


def check_bucket_size_is_agreed_and_measured_once():
    """Ranks of different settings and different clocks plan the same buckets."""
    from keras_ddl.gradients import bucket_size

    before = dict(os.environ)
    os.environ["KERAS_DDL_BUCKET_BYTES"] = "auto" if RANK == 0 else str(1000 + RANK)
    try:
        measured = bucket_size.agree()
        assert measured.measured and measured.bytes in bucket_size.SIZES
        assert set(keras_ddl.all_gather_object(measured, name="test/sizes")) == {measured}
        measure, bucket_size.measure = bucket_size.measure, None
        try:
            assert bucket_size.agree("auto") == measured
        finally:
            bucket_size.measure = measure
        assert bucket_size.agree(12345) == (12345, False)
        times = bucket_size.measure(clock=lambda: time.perf_counter() * (RANK + 1))
        assert set(keras_ddl.all_gather_object(tuple(times.items()), name="test/times")) == {tuple(times.items())}
    finally:
        os.environ.clear()
        os.environ.update(before)


def check_buckets_can_overlap_with_backward():
    """In the traced step no bucket waits for another, and the first ones do not need all of backward."""
    strategy = keras_ddl.Strategy(bucket_bytes=1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), *(keras.layers.Dense(4, use_bias=False) for _ in range(5))])
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        return strategy.run(model.train_step, args=((x, y),))

    graph = step.get_concrete_function(tf.zeros([3, 6], "float64"), tf.zeros([3, 4], "float64")).graph
    collectives = [op for op in graph.get_operations() if op.type.startswith("Ddl")]
    buckets = [op for op in collectives if "AllReduce" in op.type and op.inputs[0].shape.rank == 2]
    assert len(buckets) == 5, [op.name for op in collectives]

    def ancestors(op):
        found, pending = set(), [op]
        while pending:
            current = pending.pop()
            for one in [*(t.op for t in current.inputs), *current.control_inputs]:
                if one not in found:
                    found.add(one)
                    pending.append(one)
        return found

    needs = {op: ancestors(op) for op in buckets}
    assert not any(other in needs[op] for op in buckets for other in buckets)
    backward = {op: sum(one.type == "MatMul" for one in needs[op]) for op in buckets}
    assert len(set(backward.values())) == 5, backward  # each needs one layer more of backward than the one before


@long
def check_slices_are_gathered():
    """Rank r has r rows, so one has none."""
    own = tf.IndexedSlices(tf.ones([RANK, 2], tf.float64) * (RANK + 1), tf.ones([RANK], tf.int32), tf.constant([3, 2]))

    def reduce(values, indices):
        return all_reduce_slices(tf.IndexedSlices(values, indices, own.dense_shape), op="sum", name="slices")

    for result in [each(own.values, own.indices) for each in (reduce, tf.function(reduce))]:
        assert len(result.indices) == SIZE * (SIZE - 1) // 2
        expected = np.zeros([3, 2])
        expected[1] = sum(r * (r + 1) for r in range(SIZE))
        np.testing.assert_array_equal(tf.convert_to_tensor(result), expected)


def check_a_whole_table_among_slices_is_not_gathered():
    """As a program makes it of a dense gradient, beside rank + 1 rows that were looked up, in an unknown batch."""
    rows = tf.constant(([0, 3] * SIZE)[: RANK + 1], tf.int64)
    both = tf.reshape(tf.range(4 * 2 + 2 * (RANK + 1), dtype=tf.float64), [-1, 2])
    dense = keras_ddl.all_reduce(
        tf.convert_to_tensor(tf.IndexedSlices(both, tf.concat([np.arange(4), rows], 0), [4, 2]))
    )

    @tf.function
    def reduce(rows, values):
        whole = tf.cast(tf.range(tf.shape(values[:4])[0]), tf.int64)
        slices = tf.IndexedSlices(values, tf.concat([whole, rows], 0), tf.constant([4, 2], tf.int64))
        return all_reduce_slices(slices, op="sum", name="whole")

    result = reduce(rows, both)
    assert len(result.indices) == len(result.values) == 4 + SIZE * (SIZE + 1) // 2, result.indices
    np.testing.assert_array_equal(result.indices[:4], range(4))
    np.testing.assert_array_equal(tf.convert_to_tensor(result), dense)
