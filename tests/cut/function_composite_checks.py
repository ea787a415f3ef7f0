"""`Strategy.function` with ragged tensors, on real ranks. Run by test_function.py."""

import numpy as np
from cut.against_one_process import assert_same

from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, SIZE, STRATEGY


def check_function_takes_ragged_tensors_alone():
    lengths = tf.constant([3, 0, 2, 1, 4])
    whole = tf.RaggedTensor.from_row_lengths(tf.range(10.0), lengths)
    step = lambda x: (tf.reduce_sum(x, 1) / tf.cast(x.nrows(), tf.float32), tf.reduce_max(x))  # noqa: E731
    one = [each.numpy() for each in step(whole)]
    begin, end = RANK * 5 // SIZE, (RANK + 1) * 5 // SIZE
    for retracing in (False, True):
        assert_same([e.numpy() for e in STRATEGY.function(step, reduce_retracing=retracing)(whole)], one)
        found = STRATEGY.function(step, batches="rank", reduce_retracing=retracing)(whole[begin:end])
        assert_same([each.numpy() for each in found], one)


def check_function_does_not_take_what_sparse_tensors_are_made_of_for_rows():
    # As many values and splits as the batch has rows, and a table of as many rows, which is none of the batch.
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(4.0), [4, 0, 0])
    x = tf.reshape(tf.range(8.0), [4, 2])
    step = STRATEGY.function(lambda x, r: (tf.reduce_sum(x * 2), r.values * 1.0, r.row_splits + 0))
    assert_same([each.numpy() for each in step(x, ragged)], [np.float32(56), np.arange(4.0), [0, 4, 4, 4]])
