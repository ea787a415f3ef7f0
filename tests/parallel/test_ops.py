"""The TensorFlow ops on 1 to 4 real ranks: over shared memory, over MPI, and over both."""

from pathlib import Path

import pytest

from parallel.harness import rank_tests, run_ranks

HERE = Path(__file__).parent
ALL_SHARED, ALL_MPI, BOTH = (4, "x:4x1"), (4, "x:1x4"), (4, "x:2x2")

test_ops = rank_tests(HERE / "ops_checks.py", [1, 2, (3, "x:1x3"), BOTH], check_timeout=90)
test_ops_of_four_ranks = pytest.mark.long(rank_tests(HERE / "ops_checks.py", [ALL_SHARED, ALL_MPI], check_timeout=90))
test_ops_gradients = rank_tests(HERE / "ops_gradient_checks.py", [3], check_timeout=90)
test_ops_failures = rank_tests(HERE / "ops_failure_checks.py", [2, 3, BOTH], check_timeout=90)
test_ops_failures_of_eight_ranks = pytest.mark.long(rank_tests(HERE / "ops_failure_checks.py", [8], check_timeout=90))
test_ops_sync = rank_tests(HERE / "ops_sync_checks.py", [2], env={"KERAS_DDL_TF_KERNELS": "sync"})


@pytest.mark.slow
@pytest.mark.parallel
def test_all_reduce_of_more_than_2_to_the_31_bytes():
    def work():
        import keras_ddl
        from keras_ddl import ops
        from keras_ddl._tf_compat import tf

        keras_ddl.init()

        @tf.function
        def reduce(value):
            # Made inside the function, so that it is reduced in place: 2 GiB a rank, not 4.
            y = ops.all_reduce(tf.fill([2**31 + 7], value))
            return tf.shape(y, tf.int64), tf.reduce_min(y), tf.reduce_max(y), y[-3:]

        shape, low, high, end = reduce(tf.constant(keras_ddl.rank() + 1, tf.uint8))
        return shape.numpy().tolist(), int(low), int(high), end.numpy().tolist()

    outcome = run_ranks(work, 2, timeout=180).check()
    assert [rank.result for rank in outcome.ranks] == [([2**31 + 7], 3, 3, [3, 3, 3])] * 2
