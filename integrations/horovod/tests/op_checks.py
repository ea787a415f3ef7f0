"""Compares the features that Horovod's collectives add to keras_ddl's with NumPy. Run by test_horovod.py.

tests/ops tests the collectives themselves, and the name checks test that each Horovod name calls the right one.
"""

import numpy as np

import keras_ddl.horovod as hvd
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LAST = RANK == SIZE - 1

DTYPES = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
NUMPY = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod, hvd.Average: np.mean}
PRECISION = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-6, "float64": 1e-14}


def values(dtype: str, shape, rank: int = RANK) -> np.ndarray:
    rng = np.random.default_rng([5, rank, *shape])
    return rng.integers(0 if dtype.startswith(("u", "b")) else -3, 4, size=shape).astype(np.float64)


def tensor(dtype: str, shape, rank: int = RANK) -> tf.Tensor:
    return tf.cast(tf.constant(values(dtype, shape, rank)), dtype)


def all_values(dtype: str, shape) -> list[np.ndarray]:
    return [tf.cast(tensor(dtype, shape, rank), tf.float64).numpy() for rank in range(SIZE)]


def assert_equal(actual, expected, dtype: str, roundings: int = 1, what=None) -> None:
    assert actual.dtype == dtype, (actual.dtype, dtype, what)
    actual = tf.cast(actual, tf.float64).numpy()
    assert actual.shape == np.shape(expected), (actual.shape, np.shape(expected), what)
    atol = roundings * PRECISION.get(dtype, 0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=f"{dtype} {what}")


def both_ways(function):
    """Returns the function itself, and as a tf.function."""
    return function, tf.function(function, reduce_retracing=False)


def check_horovod_every_dtype_and_operation_with_factors():
    """Scaled integers lose their fraction before the sum and after it."""
    for dtype in DTYPES:
        parts = np.stack(all_values(dtype, (2, 3)))
        whole = np.trunc if "int" in dtype else np.asarray
        for function in both_ways(hvd.allreduce):
            for op, numpy in NUMPY.items():
                found = function(tensor(dtype, (2, 3)), op=op)
                assert_equal(found, whole(numpy(parts, axis=0)), dtype, 1, op)
            for op in (hvd.Sum, hvd.Average):
                scaled = function(tensor(dtype, (2, 3)), op=op, prescale_factor=1.5, postscale_factor=2.25)
                reduced = whole(NUMPY[op](whole(parts * 1.5), axis=0))
                assert_equal(scaled, whole(reduced * 2.25), dtype, 6, op)
    tripled = hvd.grouped_allreduce([tensor("float32", (5,))] * 2, op=hvd.Sum, prescale_factor=tf.constant(3.0))
    assert_equal(tripled[1], 3 * np.sum(all_values("float32", (5,)), 0), "float32")


def check_horovod_wrong_arguments():
    x = tensor("float32", (5,))
    for wrong in (
        lambda: hvd.allreduce(x, average=True, op=hvd.Sum),
        lambda: hvd.allreduce(x, op=17),
        lambda: hvd.allreduce(x, process_set=[0]),
        lambda: hvd.reducescatter(tf.ones([])),
        lambda: hvd.reducescatter(x, op=hvd.Adasum),
    ):
        try:
            wrong()
        except ValueError:
            continue
        raise AssertionError("no error")


def check_horovod_allgather_makes_scalars_rows():
    for dtype in (*DTYPES, "uint16", "bool"):
        numbers = hvd.allgather(tf.cast(RANK, dtype))
        assert_equal(numbers, np.array([tf.cast(tf.cast(rank, dtype), tf.float64) for rank in range(SIZE)]), dtype)


def in_a_session(make):
    """Runs make() in a graph, and returns the values of its result in a session after the initializers."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = [
            tf.compat.v1.get_variable(f"v{n}", initializer=RANK + 10.0 * n, use_resource=n > 0) for n in range(3)
        ]
        wanted = make(variables)
        session.run(tf.compat.v1.global_variables_initializer())
        return session.run(wanted), session.run(variables)


def check_horovod_broadcasts_variables_in_a_session():
    expected = [SIZE - 1 + 10.0 * n for n in range(3)]
    returned, held = in_a_session(lambda variables: hvd.broadcast_(variables, SIZE - 1))
    assert returned == held == expected, (returned, held)
    _, held = in_a_session(lambda variables: [hvd.broadcast_(each, SIZE - 1) for each in variables])
    assert held == expected
    for broadcast in (hvd.broadcast_variables, lambda _, root: hvd.broadcast_global_variables(root)):
        _, held = in_a_session(lambda variables, broadcast=broadcast: broadcast(variables, SIZE - 1))
        assert held == expected
    assert hvd.broadcast_variables([tf.Variable(1.0)], 0) is None
    try:
        hvd.broadcast_global_variables(0)
    except RuntimeError as error:
        assert isinstance(error, ConfigError) and "broadcast_variables" in str(error)
    else:
        raise AssertionError("no error")


def check_horovod_compression():
    exact = tf.constant([0.5, 2.0, -3.0]) * (RANK + 1)
    for compression, wire in ((hvd.Compression.fp16, "float16"), (hvd.Compression.bf16, "bfloat16")):
        for dtype in ("float32", "float64", wire, "int32"):
            x = tf.cast(exact, dtype)
            packed, context = compression.compress(x)
            assert packed.dtype == (wire if dtype.startswith("float") else dtype)
            assert compression.decompress(packed, context).dtype == dtype
            for result in (
                hvd.allreduce(x, op=hvd.Sum, compression=compression),
                hvd.grouped_allreduce([x, x], op=hvd.Sum, compression=compression)[1],
            ):
                expected = sum(tf.cast(tf.constant([0.5, 2.0, -3.0]) * (rank + 1), dtype) for rank in range(SIZE))
                assert_equal(result, tf.cast(expected, tf.float64), dtype, what=compression)
        # With 16 bits sent, this value is rounded to 1.
        lost = hvd.allreduce(tf.constant([1 + 2.0**-12]), op=hvd.Average, compression=compression)
        np.testing.assert_array_equal(lost, [1.0])
    # The sum exceeds float16; the average does not.
    np.testing.assert_array_equal(hvd.allreduce(tf.constant([6e4]), compression=hvd.Compression.fp16), [6e4])
    kept = hvd.allreduce(tf.constant([1 + 2.0**-12]), compression=hvd.Compression.none)
    np.testing.assert_array_equal(kept, [1 + 2.0**-12])


def check_horovod_indexed_slices():
    slices = tf.IndexedSlices(tf.fill([RANK + 1, 2], RANK + 1.0), tf.range(RANK + 1), tf.constant([SIZE + 1, 2]))
    expected = np.zeros([SIZE + 1, 2])
    for rank in range(SIZE):
        expected[: rank + 1] += rank + 1
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, SIZE)):
        results = [
            hvd.allreduce(slices, op=op, postscale_factor=2.0),
            hvd.grouped_allreduce([tf.ones([2]), slices], op=op, postscale_factor=2.0)[1],
        ]
        dense = hvd.allreduce(slices, op=op, postscale_factor=2.0, sparse_as_dense=True)
        assert all(isinstance(result, tf.IndexedSlices) for result in results)
        assert not isinstance(dense, tf.IndexedSlices)
        for result in (*results, dense):
            np.testing.assert_allclose(tf.convert_to_tensor(result), expected / divisor * 2, rtol=1e-6)
    try:
        hvd.allreduce(slices, op=hvd.Max)
    except NotImplementedError as error:
        assert isinstance(error, ConfigError) and "sparse_as_dense" in str(error)
    else:
        raise AssertionError("no error")


def gradient(function, x: tf.Tensor) -> tf.Tensor:
    """Returns the gradient of sum((rank + 1) * y), which differs between ranks."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(function(x)) * (RANK + 1.0)
    return tape.gradient(loss, x)


def check_horovod_gradients():
    whole = sum(range(1, SIZE + 1))  # the sum of the weights of all ranks' losses
    ones = np.ones([SIZE, 2])
    fp16 = hvd.Compression.fp16
    cases = {
        "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), whole * ones),
        "average": (lambda x: hvd.allreduce(x), whole / SIZE * ones),
        "fp16": (lambda x: hvd.allreduce(x, op=hvd.Sum, compression=fp16), whole * ones),
        "scaled": (lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0), 6 * whole * ones),
        "grouped": (lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)[1], 2 * whole * ones),
        "min": (lambda x: hvd.allreduce(x, op=hvd.Min), whole * ones * (RANK == 0)),
        "max": (lambda x: hvd.allreduce(x, op=hvd.Max), whole * ones * LAST),
        "product": (
            lambda x: hvd.allreduce(x, op=hvd.Product),
            whole * ones * np.prod([rank + 2.0 for rank in range(SIZE) if rank != RANK]),
        ),
        "allgather": (hvd.allgather, whole * ones),
        "broadcast": (lambda x: hvd.broadcast(x, SIZE - 1), whole / SIZE * ones * LAST),  # as in Horovod
        "reducescatter": (
            lambda x: hvd.reducescatter(x, op=hvd.Sum),
            np.repeat(np.arange(1.0, SIZE + 1)[:, np.newaxis], 2, 1),
        ),
        "alltoall": (hvd.alltoall, np.repeat(np.arange(1.0, SIZE + 1)[:, np.newaxis], 2, 1)),
        "splits": (
            lambda x: hvd.alltoall(x, [SIZE] + [0] * (SIZE - 1))[0],
            ones,
        ),
    }
    x = tf.fill([SIZE, 2], RANK + 2.0)
    for what, (function, expected) in cases.items():
        for run in (gradient, tf.function(gradient)):
            np.testing.assert_allclose(run(function, x), expected, rtol=1e-6, err_msg=what)


def check_horovod_join_with_unequal_numbers_of_batches():
    def step(weights, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * x)
        weights.assign_sub(hvd.DistributedGradientTape(tape).gradient(loss, weights))

    for function in both_ways(step):
        weights = tf.Variable(tf.ones([3]))
        for batch in range(2 + 3 * RANK):
            function(weights, tf.fill([3], 10.0 * batch + RANK))
        last = hvd.join()
        assert last == SIZE - 1
        hvd.broadcast_variables([weights], root_rank=last)
        seen = sum(10 * batch + rank for rank in range(SIZE) for batch in range(2 + 3 * rank))
        np.testing.assert_allclose(weights, np.full(3, 1 - seen / SIZE), rtol=1e-6)


def check_horovod_collectives_while_a_rank_has_joined():
    present = np.arange(1, SIZE)
    x = tf.fill([SIZE, 2], RANK + 1.0)
    if RANK != 0:
        expected = {hvd.Min: 2, hvd.Max: SIZE, hvd.Sum: sum(present + 1), hvd.Product: np.prod(present + 1)}
        for op, value in expected.items():
            for result in (hvd.allreduce(x, op=op), hvd.reducescatter(x, op=op)):
                np.testing.assert_array_equal(result, np.full(result.shape, value))
        np.testing.assert_array_equal(hvd.allgather(x[:1, 0]), present + 1)
        np.testing.assert_array_equal(hvd.broadcast(x, 1), np.full(x.shape, 2))
        slices = tf.IndexedSlices(x[:1], tf.constant([RANK]), tf.constant([SIZE, 2]))
        np.testing.assert_allclose(hvd.allreduce(slices).values[:, 0], (present + 1) / SIZE, rtol=1e-6)
        for wrong in (
            lambda: hvd.broadcast(x, 0),
            lambda: hvd.alltoall(x),
            lambda: hvd.allreduce(x, op=hvd.Adasum),
            lambda: hvd.allgather_object(RANK),
        ):
            try:
                wrong()
            except tf.errors.FailedPreconditionError as error:
                assert "rank(s) 0 have joined" in str(error)
            else:
                raise AssertionError("no error")
    hvd.join()
    np.testing.assert_array_equal(hvd.allgather(x[:1, 0]), np.arange(SIZE) + 1)
