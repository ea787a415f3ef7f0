"""Values that are equal on all ranks are not sent."""

from __future__ import annotations

import pytest

from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.agreement import equal_values


def test_are_equal_compares_dtypes_shapes_and_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_values, "is_equal", lambda content, name: content)
    large = tf.range(100_000.0)
    values = [
        [large],
        [tf.tensor_scatter_nd_update(large, [[77_777]], [77_776.99])],
        [tf.reshape(large, [10, -1])],
        [tf.cast(large, tf.float64)],
        [large, large],
        [tf.zeros([2])],
        [-tf.zeros([2])],
        [tf.zeros([2], tf.int32)],  # the same bits as zeros of float32
        [tf.zeros([0, 2])],
        [tf.constant(True)],
        [tf.ones([], tf.bfloat16)],
        [tf.complex(1.0, 2.0)],
    ]
    contents = [equal_values.are_equal(each, "name") for each in values]
    assert len(set(contents)) == len(values)
    assert equal_values.are_equal([tf.identity(large)], "name") == contents[0]
