"""Horovod's collectives against NumPy: dtypes, 0 to 5 dimensions, ops, gradients. Run by test_horovod.py."""

import warnings

import numpy as np

import keras_ddl.horovod as hvd
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LAST = RANK == SIZE - 1

DTYPES = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
MOVED = (*DTYPES, "uint16", "int16", "bool")
SHAPES = ((), (5,), (2, 3), (3, 1, 2), (2, 1, 3, 2), (1, 2, 3, 1, 2))
NUMPY = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod, hvd.Average: np.mean}
PRECISION = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-6, "float64": 1e-14}


def values(dtype: str, shape, rank: int = RANK) -> np.ndarray:
    rng = np.random.default_rng([5, rank, *shape])
    return rng.integers(0 if dtype.startswith(("u", "b")) else -3, 4, size=shape).astype(np.float64)


def tensor(dtype: str, shape, rank: int = RANK) -> tf.Tensor:
    return tf.cast(tf.constant(values(dtype, shape, rank)), dtype)


def of_all(dtype: str, shape) -> list[np.ndarray]:
    return [tf.cast(tensor(dtype, shape, rank), tf.float64).numpy() for rank in range(SIZE)]


def assert_equal(actual, expected, dtype: str, what=None) -> None:
    assert actual.dtype == dtype, (actual.dtype, dtype, what)
    expected = np.trunc(expected) if "int" in dtype else expected
    actual = tf.cast(actual, tf.float64).numpy()
    assert actual.shape == np.shape(expected), (actual.shape, np.shape(expected), what)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=PRECISION.get(dtype, 0), err_msg=f"{dtype} {what}")


def both_ways(function):
    """The function as it is, and as a tf.function."""
    return function, tf.function(function, reduce_retracing=False)


def check_horovod_basics():
    import keras_ddl

    assert hvd.is_initialized()
    assert (keras_ddl.rank(), keras_ddl.size()) == (RANK, SIZE)
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (RANK, SIZE, 0, 1)
    assert hvd.is_homogeneous()
    numbers = [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op()]
    assert [int(number) for number in numbers] == [RANK, SIZE, RANK, SIZE, 1]
    assert hvd.mpi_built()
    assert hvd.mpi_enabled() == hvd.mpi_threads_supported() == (SIZE > 1)
    assert not any((hvd.gloo_built(), hvd.gloo_enabled(), hvd.nccl_built(), hvd.cuda_built(), hvd.rocm_built()))
    assert not any((hvd.ddl_built(), hvd.ccl_built()))
    hvd.init(comm=list(range(SIZE)))
    try:
        hvd.init(comm=[SIZE])
    except ValueError as error:
        assert "process_sets" in str(error)
    else:
        raise AssertionError("no error")


def check_horovod_names_are_there_or_say_what_to_use():
    for name in hvd.__all__:
        assert getattr(hvd, name) is not None
    for name, word in (
        ("gpu_available", "list_physical_devices"),
        ("nope", "nope"),
    ):
        try:
            getattr(hvd, name)
        except AttributeError as error:
            assert word in str(error)
        else:
            raise AssertionError(name)


def check_horovod_allreduce_equals_numpy():
    cases = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    inputs = [tensor(*case) for case in cases]
    for op, function in NUMPY.items():
        reduce_all = lambda *xs, op=op: [hvd.allreduce(x, op=op) for x in xs]  # noqa: E731
        for results in (reduce_all(*inputs), tf.function(reduce_all)(*inputs), hvd.grouped_allreduce(inputs, op=op)):
            for case, result in zip(cases, results):
                assert_equal(result, function(np.stack(of_all(*case)), axis=0), case[0], (op, case))
    assert_equal(hvd.allreduce(tensor("float32", (5,))), np.mean(of_all("float32", (5,)), 0), "float32")


def check_horovod_allreduce_old_and_wrong_arguments():
    x = tensor("float32", (5,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        total, mean = hvd.allreduce(x, average=False), hvd.allreduce(x, average=True)
    assert [warning.category for warning in caught].count(DeprecationWarning) == 2
    assert_equal(total, np.sum(of_all("float32", (5,)), 0), "float32")
    assert_equal(mean, np.mean(of_all("float32", (5,)), 0), "float32")
    for wrong in ({"average": True, "op": hvd.Sum}, {"op": 17}, {"process_set": [0]}):
        try:
            hvd.allreduce(x, **wrong)
        except ValueError:
            continue
        raise AssertionError(wrong)


def check_horovod_scale_factors():
    for dtype in DTYPES:
        for op in (hvd.Sum, hvd.Average):
            parts = np.stack(of_all(dtype, (2, 3)))
            scaled = np.trunc(parts * 1.5) if "int" in dtype else parts * 1.5
            reduced = NUMPY[op](scaled, axis=0)
            expected = (np.trunc(reduced) if "int" in dtype else reduced) * 2.25
            for function in both_ways(lambda x, op=op: hvd.allreduce(x, None, "", "", op=op, prescale_factor=1.5,
                                                                     postscale_factor=2.25)):  # fmt: skip
                result = function(tensor(dtype, (2, 3)))
                atol = 6 * PRECISION.get(dtype, 0)
                expected = np.trunc(expected) if "int" in dtype else expected
                np.testing.assert_allclose(tf.cast(result, tf.float64), expected, atol=atol, err_msg=f"{dtype} {op}")
    tripled = hvd.grouped_allreduce([tensor("float32", (5,))] * 2, op=hvd.Sum, prescale_factor=tf.constant(3.0))
    assert_equal(tripled[1], 3 * np.sum(of_all("float32", (5,)), 0), "float32")
    rows = np.sum(of_all("float32", (SIZE, 2)), 0)[RANK : RANK + 1]
    half = hvd.reducescatter(tensor("float32", (SIZE, 2)), op=hvd.Sum, postscale_factor=0.5)
    assert_equal(half, rows / 2, "float32")


def check_horovod_allgather_with_uneven_rows():
    for dtype in MOVED:
        for rest in ((), (2,), (2, 1), (1, 2, 2), (1, 2, 1, 3)):
            shapes = [((rank * 2 + 1) % 4, *rest) for rank in range(SIZE)]
            parts = [tf.cast(tensor(dtype, shape, rank), tf.float64) for rank, shape in enumerate(shapes)]
            for function in both_ways(hvd.allgather) if (dtype, rest) == ("float32", (2,)) else (hvd.allgather,):
                assert_equal(function(tensor(dtype, shapes[RANK])), np.concatenate(parts), dtype, shapes)
    for dtype in MOVED:
        scalars = hvd.allgather(tf.cast(RANK, dtype))
        assert_equal(scalars, np.array([tf.cast(tf.cast(rank, dtype), tf.float64) for rank in range(SIZE)]), dtype)
    one, two = hvd.grouped_allgather([tf.constant([RANK]), tf.ones([2, 3])], name="group")
    np.testing.assert_array_equal(one, np.arange(SIZE))
    np.testing.assert_array_equal(two, np.ones([2 * SIZE, 3]))


def check_horovod_broadcast():
    for dtype in MOVED:
        for shape in SHAPES:
            for root in range(SIZE):
                function = lambda x, root=root: hvd.broadcast(x, root)  # noqa: E731
                for each in both_ways(function) if (dtype, shape) == ("float32", (2, 3)) else (function,):
                    expected = tf.cast(tensor(dtype, shape, root), tf.float64)
                    assert_equal(each(tensor(dtype, shape)), expected.numpy(), dtype, (shape, root))
    variables = [tf.Variable(tensor("float32", (4,))), tf.Variable(tensor("int64", ()))]
    held = hvd.broadcast_(variables, SIZE - 1)
    for variable, value, case in zip(variables, held, (("float32", (4,)), ("int64", ()))):
        assert_equal(variable, values(*case, SIZE - 1), case[0])
        assert_equal(value, values(*case, SIZE - 1), case[0])
    single = tf.Variable(float(RANK))
    hvd.broadcast_(single, 0)
    assert float(single) == 0
    variables[1].assign(RANK + 7)
    hvd.broadcast_variables(variables, root_rank=0)
    assert variables[1].numpy() == 7


def in_a_session(make):
    """What a session of a graph gets for what make() returns, after the initializers."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = [
            tf.compat.v1.get_variable(f"v{n}", initializer=RANK + 10.0 * n, use_resource=n > 0) for n in range(3)
        ]
        wanted = make(variables)
        session.run(tf.compat.v1.global_variables_initializer())
        return session.run(wanted), session.run(variables)


def check_horovod_broadcasts_of_variables_in_a_session():
    expected = [SIZE - 1 + 10.0 * n for n in range(3)]
    returned, held = in_a_session(lambda variables: hvd.broadcast_(variables, SIZE - 1))
    assert returned == held == expected, (returned, held)
    _, held = in_a_session(lambda variables: [hvd.broadcast_(each, SIZE - 1) for each in variables])  # at once
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


def check_horovod_reducescatter_with_uneven_rows():
    for dtype in DTYPES:
        for rest in ((), (2,), (1, 2), (2, 1, 2), (1, 2, 1, 2)):
            for rows in (1, 2 * SIZE + 1):
                begin = RANK * (rows // SIZE) + min(RANK, rows % SIZE)
                end = begin + rows // SIZE + (rows % SIZE > RANK)
                for op in NUMPY:
                    expected = NUMPY[op](np.stack(of_all(dtype, (rows, *rest))), axis=0)[begin:end]
                    result = hvd.reducescatter(tensor(dtype, (rows, *rest)), op=op)
                    assert_equal(result, expected, dtype, (rows, rest, op))
    default = hvd.grouped_reducescatter([tensor("float32", (SIZE,))], name="group")[0]
    assert_equal(default, np.mean(of_all("float32", (SIZE,)), 0)[RANK : RANK + 1], "float32")
    for wrong in (lambda: hvd.reducescatter(tf.ones([])), lambda: hvd.reducescatter(tf.ones([4]), op=hvd.Adasum)):
        try:
            wrong()
        except ValueError:
            continue
        raise AssertionError("no error")


def check_horovod_alltoall():
    for dtype in MOVED:
        for rest in ((), (2,), (1, 2), (2, 1, 2), (1, 2, 1, 2)):
            x = tf.concat([tensor(dtype, (to + 1, *rest)) for to in range(SIZE)], 0)
            splits = tf.range(1, SIZE + 1)
            expected = np.concatenate([of_all(dtype, (RANK + 1, *rest))[sender] for sender in range(SIZE)])
            function = lambda x, splits: hvd.alltoall(x, splits)  # noqa: E731
            for each in both_ways(function) if (dtype, rest) == ("float32", (2,)) else (function,):
                result, received = each(x, splits)
                assert_equal(result, expected, dtype, rest)
                assert received.dtype == tf.int32
                np.testing.assert_array_equal(received, [RANK + 1] * SIZE)
    np.testing.assert_array_equal(hvd.alltoall(tf.fill([SIZE], RANK), name="even"), np.arange(SIZE))


def check_horovod_adasum():
    for function in both_ways(lambda x: hvd.allreduce(x, op=hvd.Adasum)):
        np.testing.assert_allclose(function(tf.constant([3.0, 4.0])), [3.0, 4.0], rtol=1e-6)  # equal: the mean
        np.testing.assert_array_equal(function(tf.one_hot(RANK, SIZE)), np.ones(SIZE))  # orthogonal: the sum
    for each in hvd.grouped_allreduce([tf.one_hot(RANK, SIZE), tf.ones([2])], op=hvd.Adasum, name="grouped"):
        np.testing.assert_array_equal(each, np.ones(each.shape))


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
                assert_equal(result, tf.cast(expected, tf.float64), dtype, compression)
        # That it is 16 bits which travel: this cannot be told from 1 there.
        lost = hvd.allreduce(tf.constant([1 + 2.0**-12]), op=hvd.Average, compression=compression)
        np.testing.assert_array_equal(lost, [1.0])
    # The sum is beyond float16, the average is not.
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
    """Of sum((rank + 1) * y), so that ranks differ."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(function(x)) * (RANK + 1.0)
    return tape.gradient(loss, x)


def check_horovod_gradients():
    whole = sum(range(1, SIZE + 1))  # the weights of all ranks' losses
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


def check_horovod_join_in_a_loop_with_unequal_numbers_of_batches():
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


def check_horovod_objects():
    start = {"rank": RANK, "list": list(range(RANK))}
    for root in range(SIZE):
        assert hvd.broadcast_object(start, root_rank=root) == {"rank": root, "list": list(range(root))}
        assert hvd.broadcast_object_fn(root)(start)["rank"] == root
    assert hvd.allgather_object(start, name="all") == [{"rank": r, "list": list(range(r))} for r in range(SIZE)]
