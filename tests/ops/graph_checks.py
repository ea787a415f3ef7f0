"""The contract of the TensorFlow ops: two hundred at once, whatever the order, eager and in graphs.

Run by test_ops_on_ranks.py."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl import ops
from keras_ddl.compat.tensorflow import tf

# One thread for the ops of a graph: an op that blocked it while waiting for other ranks would stop everything.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras_ddl.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()
MANY = 200
RANKS_SUM = sum(range(SIZE))


def order(seed: int) -> list[int]:
    """Of this rank's own."""
    return np.random.default_rng([seed, RANK]).permutation(MANY).tolist()


def length(number: int) -> int:
    return 1 + number * 37 % 300


def submit_all(value: tf.Tensor, seed: int, prefix: str) -> list[tf.Tensor]:
    """Two hundred independent all_reduces of `value` and their number, made in this rank's own order."""
    results = {}
    for number in order(seed):
        tensor = tf.fill([length(number)], value + float(number))
        results[number] = ops.all_reduce(tensor, name=f"{prefix}/{number}")
    return [results[number] for number in range(MANY)]


def assert_sums(results: list[tf.Tensor], scale: float = 1.0) -> None:
    for number, result in enumerate(results):
        np.testing.assert_array_equal(result, np.full(length(number), scale * RANKS_SUM + number * SIZE))


def check_two_hundred_eager_calls_from_several_threads():
    def reduce(number: int) -> tf.Tensor:
        return ops.all_reduce(tf.fill([length(number)], RANK + float(number)), name=f"eager/{number}")

    # An eager call waits for its result: it needs a thread of its own.
    with ThreadPoolExecutor(MANY) as threads:
        futures = {number: threads.submit(reduce, number) for number in order(1)}
        assert_sums([futures[number].result() for number in range(MANY)])


def check_two_hundred_in_one_function_without_control_dependencies():
    function = tf.function(lambda value: submit_all(value, 2, "graph"), autograph=False)
    for repeat in (1, 2):
        assert_sums(function(tf.constant(float(RANK * repeat))), repeat)


@long
def check_functions_that_run_in_several_threads_at_once():
    functions = [
        tf.function(lambda value, n=n: submit_all(value, 6 + n, f"thread {n}")[:50], autograph=False) for n in range(4)
    ]
    with ThreadPoolExecutor(4) as threads:
        for results in threads.map(lambda function: function(tf.constant(float(RANK))), functions):
            assert_sums(results)
