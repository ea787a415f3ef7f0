"""Lookups, scatters and counts by index, in tensors and tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from cut.operations.cases import case, rows_of

from keras_ddl.compat.tensorflow import tf

raw = tf.raw_ops


@case("GatherV2", "UnsortedSegmentSum")
def by_index(x: Any) -> Any:
    at, cube = tf.argmax(x, 1), rows_of(x, 3, 2)
    found = [tf.gather(x, [0, 0]), tf.gather(x, tf.argsort(x[:, 0])), tf.gather(cube, tf.argmax(cube, 1), batch_dims=1)]
    found += [tf.gather(tf.reduce_sum(x, 0), at), tf.gather(tf.transpose(x), at), tf.gather(x, at, axis=1)]
    found += [tf.gather(x, tf.reduce_sum(tf.cast(at, tf.int32)) * 0), tf.one_hot(tf.argmax(cube, 1), 3, axis=1)]
    found += [tf.math.unsorted_segment_sum(x, at, 3), tf.math.unsorted_segment_sum(x[:, 0], at - 1, 2)]
    found += [tf.math.unsorted_segment_sum(x, tf.argmax(cube, 1)[:, :1] * tf.ones([1, 3], tf.int64), 3)]
    table = tf.zeros([40, 2], tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(table)
        loss = tf.reduce_sum(tf.gather(table, at * 7) * x[:, :2])
    return [*found, tf.convert_to_tensor(tape.gradient(loss, table))]


@case("ResourceGather")
def looked_up(x: Any) -> Any:
    handle = raw.VarHandleOp(dtype=tf.float64, shape=[3, 4], shared_name="table")
    table = tf.constant(np.arange(12.0).reshape(3, 4))
    with tf.control_dependencies([raw.AssignVariableOp(resource=handle, value=table)]):
        handle = tf.identity(handle)
    found = [raw.ResourceGather(resource=handle, indices=tf.argmax(x, 1), dtype=tf.float64)]
    found += [raw.ResourceGather(resource=handle, indices=tf.argmax(x, 0) * 0, dtype=tf.float64)]
    return [*found, raw.ResourceGather(resource=handle, indices=tf.argmax(rows_of(x, 3, 2), 1), dtype=tf.float64)]


def _found(table: Any, keys: Any, missing: Any) -> Any:
    return raw.LookupTableFindV2(table_handle=table, keys=keys, default_value=missing)


@case("LookupTableFindV2")
def tables(x: Any) -> Any:
    keys = tf.cast(x * 3, tf.int64)

    def filled(keys: Any, values: Any, handle: Any) -> Any:
        keys = tf.constant(keys, tf.int64)
        with tf.control_dependencies([raw.LookupTableInsertV2(table_handle=handle, keys=keys, values=values)]):
            return tf.identity(handle)

    types = {"key_dtype": tf.int64, "value_dtype": tf.float64}
    numbers = filled([0, 1, -1], tf.constant([5.0, 6.0, 7.0], tf.float64), raw.MutableHashTableV2(**types))
    missing = tf.constant(0.5, tf.float64)
    found = [_found(numbers, keys, missing), _found(numbers, tf.transpose(keys), tf.reduce_max(x))]
    found += [_found(numbers, keys[:, 0], missing), _found(numbers, tf.reduce_max(keys, 0), missing)]
    vectors = raw.MutableHashTableOfTensorsV2(**types, value_shape=[2])
    vectors = filled([0, 1], tf.constant([[1.0, 2.0], [3.0, 4.0]], tf.float64), vectors)
    found += [_found(vectors, keys[:, 0], missing[None] * [1, 2])]
    none, gone = (tf.constant([key, key], tf.int64) for key in (99, 98))
    pairs = raw.MutableDenseHashTableV2(empty_key=none, deleted_key=gone, value_dtype=tf.float64)
    pairs = filled([[0, 0], [1, 1]], tf.constant([1.0, 2.0], tf.float64), pairs)
    found += [_found(pairs, keys[:, :2], missing), _found(pairs, keys[:, 1:], missing)]
    return found
