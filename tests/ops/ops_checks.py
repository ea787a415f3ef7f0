"""Results of the collectives equal NumPy's on real ranks. Run by test_ops_on_ranks.py.

Every rank can compute every rank's input from its number, so NumPy on one rank is the oracle for all ranks. The values
are small integers, whose sums and products are exact in every dtype, including float16 and bfloat16.
"""

import numpy as np

import keras_ddl
from keras_ddl import device, ops
from keras_ddl.compat.tensorflow import load_ops, tf

# TensorFlow gets one thread for the ops of a graph. An op that blocked it while waiting for other ranks would stop the
# graph.
tf.config.threading.set_inter_op_parallelism_threads(1)
device.choose_device(keras_ddl.init())  # as a Strategy does: on software GPUs collectives take tensors there
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()

DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "int8")
NUMPY = {"sum": np.sum, "min": np.min, "max": np.max, "product": np.prod}


def values(dtype: str, shape, rank: int) -> np.ndarray:
    rng = np.random.default_rng([rank, *np.atleast_1d(shape)])
    return rng.integers(0 if dtype == "uint8" else -3, 4, size=shape).astype(np.float64)


def tensor(dtype: str, shape, rank: int = RANK) -> tf.Tensor:
    return tf.constant(values(dtype, shape, rank), dtype)


def reduced(dtype: str, shape, op: str) -> np.ndarray:
    stacked = np.stack([values(dtype, shape, rank) for rank in range(SIZE)])
    if op != "mean":
        return NUMPY[op](stacked, axis=0)
    mean = np.sum(stacked, axis=0) / SIZE
    return np.trunc(mean) if "int" in dtype else mean


def assert_equal(actual: tf.Tensor, expected: np.ndarray, dtype: str, op: str = "", what=None) -> None:
    assert actual.dtype == dtype, (actual.dtype, dtype)
    actual = tf.cast(actual, tf.float64).numpy()
    # Only means of floats are rounded, at most once per rank; values before that are at most 3.
    precision = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1.2e-7, "float64": 2.3e-16}.get(dtype, 0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3 * precision * (op == "mean"), err_msg=f"{op} {what}")


def check_all_reduce_equals_numpy():
    for dtype, op in [*((dtype, "mean") for dtype in DTYPES), *(("float32", op) for op in NUMPY)]:
        before = tensor(dtype, 70001)
        assert_equal(ops.all_reduce(before, op=op), reduced(dtype, 70001, op), dtype, op)
        assert_equal(before, values(dtype, 70001, RANK), dtype)  # the input is unchanged
    variable = tf.Variable(tensor("float32", 100))

    @tf.function
    def read_twice():
        x = variable * 2.0
        return ops.all_reduce(variable), ops.all_reduce(x), x

    of_variable, of_product, product = read_twice()
    assert_equal(of_variable, reduced("float32", 100, "sum"), "float32")
    assert_equal(of_product, 2 * reduced("float32", 100, "sum"), "float32")
    assert_equal(product, 2 * values("float32", 100, RANK), "float32")
    assert_equal(variable.value(), values("float32", 100, RANK), "float32")


def check_eager_collectives_use_tensorflows_fast_path():
    module = load_ops()
    slow = {name: function for name, function in vars(module).items() if name.endswith("_eager_fallback")}
    assert "ddl_all_reduce_eager_fallback" in slow

    def refuse(*args, **kwargs):
        raise AssertionError(f"TensorFlow's fast path does not take this op: {args} {kwargs}")

    try:
        vars(module).update(dict.fromkeys(slow, refuse))
        one = tf.ones([2, 2])
        ops.all_reduce(one)
        ops.all_reduce_n([one])
        ops.reduce_scatter(one)
        ops.all_gather(one)
        ops.all_to_all(tf.ones([SIZE]))
        ops.broadcast(one, 0)
    finally:
        vars(module).update(slow)


def check_all_reduce_n_equals_numpy_in_a_graph():
    shapes = [0, 7, 1000, (), (3, 5), (2, 0, 4)]

    @tf.function
    def all_dtypes(*tensors):
        return ops.all_reduce_n(tensors)

    cases = [(dtype, shape) for dtype in DTYPES for shape in shapes]
    results = all_dtypes(*[tensor(dtype, shape) for dtype, shape in cases])
    for (dtype, shape), result in zip(cases, results):
        assert result.shape == np.zeros(shape).shape
        assert_equal(result, reduced(dtype, shape, "sum"), dtype, "sum", shape)
    assert ops.all_reduce_n([]) == []


def check_reduce_scatter_equals_numpy():
    for dtype, op in [*((dtype, "sum") for dtype in DTYPES), *(("float32", op) for op in (*NUMPY, "mean"))]:
        for rows in (0, 1, 3 * SIZE + 1):
            shape = (rows, 3)
            start = RANK * (rows // SIZE) + min(RANK, rows % SIZE)
            stop = start + rows // SIZE + (rows % SIZE > RANK)
            result = ops.reduce_scatter(tensor(dtype, shape), op=op)
            assert result.shape == (stop - start, 3), (result.shape, rows)
            assert_equal(result, reduced(dtype, shape, op)[start:stop], dtype, op, rows)
    assert ops.reduce_scatter(tf.zeros([5, 0])).shape == (5 // SIZE + (5 % SIZE > RANK), 0)


def check_all_gather_equals_numpy_with_uneven_rows():
    graph = tf.function(ops.all_gather, reduce_retracing=True)
    words = np.array([b"", b"a", b"\x00\xff\x80 and more", b"long " * 60_000], object)
    for dtype in (*DTYPES, "bool", "int16", "uint64", "complex128", "string"):
        for first, rest in ((0, (2,)), (5, (3, 2)), (4, (0,))):
            shapes = [(first + (rank * 3) % 4 if rank else first, *rest) for rank in range(SIZE)]
            numbers = [np.abs(values(dtype, shape, rank)) for rank, shape in enumerate(shapes)]
            if dtype == "string":
                parts = [words[each.astype(int)] for each in numbers]
            else:
                parts = [tf.cast(each, dtype).numpy() for each in numbers]
            for function in (ops.all_gather, graph):
                result = function(tf.constant(parts[RANK], dtype))
                assert result.dtype == dtype
                np.testing.assert_array_equal(result, np.concatenate(parts), err_msg=f"{dtype} {shapes}")
    np.testing.assert_array_equal(ops.all_gather(tf.constant(RANK)), np.arange(SIZE))
    np.testing.assert_array_equal(ops.all_gather(f"rank {RANK}"), [f"rank {rank}".encode() for rank in range(SIZE)])
    z = ops.all_gather(tf.complex([1.0 + RANK], [-2.0 * RANK]))
    np.testing.assert_array_equal(z, [1 + rank - 2j * rank for rank in range(SIZE)])


def check_broadcast_equals_the_roots_values():
    for root in range(SIZE):
        for dtype in (*DTYPES, "bool", "uint32", "complex64") if root == SIZE - 1 else ("float32",):
            shapes = [0, (), (70, 1001)]
            mine = [tf.cast(tf.abs(tensor("float64", shape)), dtype) for shape in shapes]
            expected = [tf.cast(tf.abs(tensor("float64", shape, root)), dtype) for shape in shapes]
            for result, wanted in zip(ops.broadcast_n(mine, root), expected):
                assert result.dtype == dtype
                np.testing.assert_array_equal(result.numpy(), wanted.numpy())
    in_graph = tf.function(lambda x: ops.broadcast(x, root=SIZE - 1))
    assert_equal(in_graph(tensor("float32", 9)), values("float32", 9, SIZE - 1), "float32")


def check_branches_and_loops():
    @tf.function
    def branches(x, add):
        first = tf.cond(add, lambda: ops.all_reduce(x), lambda: ops.all_reduce(x, op="max"))
        second = tf.cond(add, lambda: ops.all_reduce(x, op="min"), lambda: ops.all_reduce(x, op="product"))
        return first, second

    for add, (one, two) in ((True, ("sum", "min")), (False, ("max", "product"))):
        first, second = branches(tensor("float32", 50), tf.constant(add))
        assert_equal(first, reduced("float32", 50, one), "float32")
        assert_equal(second, reduced("float32", 50, two), "float32")

    @tf.function
    def loop(x, steps):
        parts = tf.TensorArray(tf.float32, steps)
        for step in tf.range(steps):
            # The iterations are independent, so TensorFlow may run several at once.
            parts = parts.write(step, ops.all_reduce(x * tf.cast(step, tf.float32)))
        return parts.stack()

    for result, step in zip(loop(tensor("float32", 5), tf.constant(30)), range(30)):
        assert_equal(result, step * reduced("float32", 5, "sum"), "float32")

    @tf.function
    def chain(x):
        return tf.while_loop(lambda _: True, lambda x: [ops.all_reduce(x, op="mean")], [x], maximum_iterations=5)[0]

    np.testing.assert_allclose(chain(tensor("float64", 5)), reduced("float64", 5, "mean"), atol=1e-15)


def check_collectives_match_after_retracing_and_in_nested_functions():
    inner = tf.function(lambda x: ops.all_reduce(x))
    outer = tf.function(lambda x: inner(x) + ops.all_reduce(x, op="max"))
    for count in (3, 4, 5):
        expected = reduced("float32", count, "sum") + reduced("float32", count, "max")
        assert_equal(outer(tensor("float32", count)), expected, "float32")
        assert_equal(inner(tensor("float32", count)), reduced("float32", count, "sum"), "float32")
    if RANK == 0:  # graphs traced on one rank must not change later names
        tf.function(lambda x: tf.cond(x > 0, lambda: x, lambda: -x))(tf.constant(1.0))
    fresh = tf.function(lambda x: tf.cond(tf.size(x) > 0, lambda: ops.all_reduce(x), lambda: x))
    assert_equal(fresh(tensor("float32", 6)), reduced("float32", 6, "sum"), "float32")


def check_indexed_slices_equal_the_dense_sum():
    table = tf.Variable(tf.zeros([10, 3]))
    rows = tf.constant([RANK, 2, 2, RANK + 1][: RANK + 1])
    weights = tf.reshape(tf.range(tf.size(rows) * 3, dtype=tf.float32), [-1, 3])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, rows) * weights)
    slices = tape.gradient(loss, table)
    assert isinstance(slices, tf.IndexedSlices)
    dense = tf.convert_to_tensor(slices)
    for op in ("sum", "mean"):
        result = ops.all_reduce(slices, op=op)
        assert isinstance(result, tf.IndexedSlices)
        np.testing.assert_allclose(tf.convert_to_tensor(result), ops.all_reduce(dense, op=op), rtol=1e-6)


def check_broadcast_variables_copies_the_roots_values():
    import keras

    dtypes = ("float32", "float16", "int64", "uint32", "bool", "float32")
    start = [tf.cast(tf.fill([3, index], RANK + 1), dtype) for index, dtype in enumerate(dtypes)]
    variables = [tf.Variable(value) for value in start]
    variables.append(keras.Variable(np.full([4], RANK, "float32")))
    root = SIZE - 1
    ops.broadcast_variables(variables, root)
    for index, dtype in enumerate(dtypes):
        np.testing.assert_array_equal(variables[index], tf.cast(tf.fill([3, index], root + 1), dtype))
    np.testing.assert_array_equal(variables[-1], np.full([4], root))
    variables[0].assign(tf.zeros([3, 0]))
    tf.function(lambda: ops.broadcast_variables(variables[1:2]))()
    np.testing.assert_array_equal(variables[1], tf.fill([3, 1], tf.cast(root + 1, tf.float16)))


def check_all_to_all_equals_numpy():
    graph = tf.function(ops.all_to_all, reduce_retracing=True)
    # Row s of the table: the numbers of rows that rank s sends to each rank.
    table = np.array([[(2 * s + 3 * r) % 4 for r in range(SIZE)] for s in range(SIZE)])
    cases = [*((dtype, (3, 2)) for dtype in (*DTYPES, "bool", "int16", "uint64")), ("float32", ()), ("float32", (0,))]
    for dtype, rest in cases:
        for sent in (table, np.zeros([SIZE, SIZE], int)):
            parts = [np.abs(values(dtype, (sent[s].sum(), *rest), s)) for s in range(SIZE)]
            parts = [part != 0 for part in parts] if dtype == "bool" else parts
            begins = np.cumsum(sent, 1) - sent
            expected = [parts[s][begins[s, RANK] :][: sent[s, RANK]] for s in range(SIZE)]
            x = tf.cast(tf.constant(parts[RANK]), dtype)
            for function in (ops.all_to_all, graph) if dtype == "float32" else (ops.all_to_all,):
                result, received = function(x, tf.constant(sent[RANK], tf.int32))
                assert result.dtype == dtype
                np.testing.assert_array_equal(received, sent[:, RANK])
                np.testing.assert_array_equal(tf.cast(result, tf.float64), np.concatenate(expected))
    mine = tf.constant([[rank, RANK] for rank in range(SIZE) for _ in range(3)])
    expected = [[RANK, rank] for rank in range(SIZE) for _ in range(3)]
    np.testing.assert_array_equal(ops.all_to_all(mine, name="equal"), expected)


def check_adasum_averages_equal_and_adds_orthogonal_tensors():
    np.testing.assert_allclose(ops.all_reduce(tf.constant([1.0, -2.0]), op="adasum"), [1.0, -2.0])
    one_hot, zeros = ops.all_reduce_n([tf.one_hot(RANK, SIZE), tf.zeros([3])], op="adasum", name="several")
    np.testing.assert_array_equal(one_hot, np.ones(SIZE))
    np.testing.assert_array_equal(zeros, np.zeros(3))


def check_two_hundred_collectives_in_one_function():
    numbers = np.random.default_rng(RANK).permutation(200).tolist()  # in a different order on each rank

    @tf.function(autograph=False)
    def reduce(value):
        return {n: ops.all_reduce(tf.fill([1 + n * 37 % 300], value + float(n)), name=f"many/{n}") for n in numbers}

    for repeat in (1, 2):
        for n, result in reduce(tf.constant(float(RANK * repeat))).items():
            np.testing.assert_array_equal(result, np.full(1 + n * 37 % 300, repeat * sum(range(SIZE)) + n * SIZE))
