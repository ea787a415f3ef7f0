"""The ops without other ranks: shapes, bad arguments, a single rank, and no runtime."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import keras_ddl
from keras_ddl import errors, ops
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import load_ops, tf


@pytest.fixture
def alone():
    keras_ddl.init()
    yield
    keras_ddl.shutdown()


@pytest.fixture
def not_started():
    keras_ddl.shutdown()


def test_library_is_loaded_once_by_concurrent_threads(monkeypatch):
    load = tf.load_op_library
    loads = []

    def slowly(path):
        loads.append(path)
        time.sleep(0.1)
        return load(path)

    monkeypatch.setattr(tf, "load_op_library", slowly)
    tf_compat._load_ops.cache_clear()
    with ThreadPoolExecutor(4) as threads:
        libraries = list(threads.map(lambda _: load_ops(), range(4)))
    assert len(loads) == 1
    assert len(set(map(id, libraries))) == 1


@pytest.mark.parametrize("shape", [None, [], [0], [3], [None, 4], [2, 3, 4]])
def test_shape_functions_infer_known_dimensions(shape):
    library = load_ops()
    rows = None if shape is None else [None, *shape[1:]]
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, shape)

        def same(tensor, expected):
            return tensor.shape.as_list() == expected if expected is not None else tensor.shape.rank is None

        assert same(library.ddl_all_reduce(x), shape)
        assert all(same(y, shape) for y in library.ddl_all_reduce_n([x, x]))
        assert all(same(y, shape) for y in library.ddl_broadcast([x, x]))
        gathered, counts = library.ddl_all_gather(x)
        assert same(gathered, rows)
        assert same(counts, [None])
        splits = tf.constant([1, 2, 0], tf.int64)
        if shape == []:
            for op in (library.ddl_reduce_scatter, lambda x: library.ddl_all_to_all(x, splits)):
                with pytest.raises(ValueError, match="at least rank 1"):
                    op(x)
        else:
            assert same(library.ddl_reduce_scatter(x), rows)
            result, received = library.ddl_all_to_all(x, splits)
            assert same(result, rows)
            assert same(received, [3])


def test_ops_before_init_name_the_missing_call(not_started):
    for call in (
        lambda: ops.all_reduce(tf.ones([2])),
        lambda: ops.all_reduce_n([tf.ones([2])]),
        lambda: ops.reduce_scatter(tf.ones([2])),
        lambda: ops.all_gather(tf.ones([2])),
        lambda: ops.all_to_all(tf.ones([2])),
        lambda: ops.broadcast(tf.ones([2])),
        lambda: ops.broadcast_variables([tf.Variable(1.0)]),
        lambda: tf.function(lambda x: ops.all_reduce(x))(tf.ones([2])),
    ):
        with pytest.raises(errors.NotInitializedError, match=r"keras_ddl\.init\(\)"):
            call()


def test_kernels_after_shutdown_name_the_missing_call(not_started):
    library = load_ops()
    for call in (
        lambda: library.ddl_all_reduce(tf.ones([2])),
        lambda: library.ddl_all_gather(tf.ones([2])),
        tf.function(lambda: library.ddl_broadcast([tf.ones([2])])),
    ):
        with pytest.raises(errors.NotInitializedError, match=r"keras_ddl\.init\(\)"), ops.translate_errors():
            call()


def test_single_rank_gets_its_input_back(alone):
    x = tf.constant([[1, 2], [3, 4]], tf.int8)

    def everything(x):
        return [
            *(ops.all_reduce(x, op=op) for op in ("sum", "mean", "avg", "min", "max", "product")),
            *ops.all_reduce_n([x, x], mpi=True),
            *ops.all_reduce_n([x], check=0.0),
            ops.reduce_scatter(x),
            ops.all_gather(x),
            ops.all_to_all(x),
            ops.all_to_all(x, [2])[0],
            ops.broadcast(x),
        ]

    for function in (everything, tf.function(everything), tf.function(everything, jit_compile=True)):
        for result in function(x):
            assert result.dtype == tf.int8
            np.testing.assert_array_equal(result, x)
    assert ops.all_gather(tf.constant(5.0)).shape == (1,)
    assert ops.all_gather(tf.constant([True])).dtype == tf.bool
    with pytest.raises(errors.ConfigError, match="2 rows in splits of 3 on rank 0"):
        ops.all_to_all(x, [3])
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([4, 4]), tf.constant([9, 3]))
    np.testing.assert_array_equal(tf.convert_to_tensor(ops.all_reduce(slices)), tf.convert_to_tensor(slices))
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = ops.all_reduce(ops.all_gather(ops.broadcast(ops.reduce_scatter(x))), op="product")
        loss = tf.reduce_sum(y * y)
    np.testing.assert_array_equal(tape.gradient(loss, x), [2.0, 4.0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: ops.all_reduce(x, op="median"), ["'sum', 'mean'", "op='median'"]),
        (lambda x: ops.all_reduce(tf.cast(x, tf.bool)), ["dtype bool", "tf.cast"]),
        (lambda x: ops.all_reduce_n([tf.IndexedSlices(x, tf.constant([0, 1]))]), ["IndexedSlices", "all_reduce"]),
        (lambda x: ops.all_reduce(tf.IndexedSlices(x, tf.constant([0, 1])), op="max"), ["IndexedSlices", "'max'"]),
        (
            lambda x: ops.all_reduce(tf.IndexedSlices(tf.cast(x, tf.int32), tf.constant([0, 1])), op="mean"),
            ["mean of IndexedSlices", "int32"],
        ),
        (lambda x: ops.all_reduce_n([x], check=-1.0), ["check=-1.0"]),
        (lambda x: ops.all_reduce_n([x], check=0.1, mpi=True), ["mpi=True, check=0.1"]),
        (lambda x: ops.reduce_scatter(x[0]), ["scalar", "all_reduce"]),
        (lambda x: ops.broadcast(x, root=1), ["0 to 0", "root=1"]),
        (lambda x: ops.broadcast_variables([x]), ["EagerTensor", "tf.Variable"]),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(alone, call, words):
    with pytest.raises(errors.ConfigError) as caught:
        call(tf.constant([1.0, 2.0]))
    for word in ("Received: ", *words):
        assert word in str(caught.value)
