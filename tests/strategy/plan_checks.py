"""Gradients in buckets, which all ranks plan alike and send without asking rank 0. Run by test_strategy.py."""

import os
import time
from unittest import mock

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl import communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.gradients.sparse import all_reduce_slices
from strategy.common import RANK, SIZE, keras, set_precision

STEPS = 6
# Kernels of this width are too large for a calling thread to reduce itself (native/tf/collective_call.cc).
WIDTH = 160


def undisturbed_counts(model, x, y):
    """Returns this rank's counts for an undisturbed fit.

    On a busy machine a rank may be seconds late; the coordinator then takes over that step and some of the next ones.
    """
    for _ in range(20):
        before = communicator.count()
        model.fit(x, y, batch_size=SIZE * 4, epochs=1, verbose=0, shuffle=False)
        counts = {name: value - before[name] for name, value in communicator.count().items()}
        if not any(keras_ddl.all_gather_object(counts["fell_back"], name="test/fell_back")):
            break
    return counts


@long
def check_a_steady_step_needs_nothing_from_rank_0():
    """Row counts need no messages either: a longer fit sends as many messages."""
    set_precision("float32")
    rng = np.random.default_rng(2)
    x = rng.normal(size=(STEPS * SIZE * 20, WIDTH)).astype(np.float32)
    with mock.patch.dict(os.environ, KERAS_DDL_BUCKET_BYTES="1"):  # a bucket for each layer
        strategy = keras_ddl.Strategy(batch_statistics="rank")  # other checks use another Strategy
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    more = STEPS * 4
    sent = []
    for steps in (STEPS, STEPS, STEPS + more):  # the first fit traces
        rows = x[: steps * SIZE * 4]
        counts = undisturbed_counts(model, rows, rows[:, :1])
        sent.append(counts["control_sent"])
    assert counts["fell_back"] == 0, counts
    assert counts["planned"] + counts["ran_inline"] >= 3 * (STEPS + more), counts  # rows and gradients
    assert sent[2] - sent[1] < more / 2, (sent, counts)
    keras_ddl.barrier()


@long
def check_bucket_size_is_agreed_and_measured_once():
    """Ranks with different settings and clocks plan the same buckets."""
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


@long
def check_dense_part_of_slices_is_not_gathered():
    """Some gradients combine a dense part and looked-up rows, here rank + 1 of them, in a batch of unknown size."""
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
