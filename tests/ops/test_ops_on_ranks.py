"""The TensorFlow ops on real ranks; native/tests test the algorithms."""

from pathlib import Path

import pytest

from harness.rank_tests import rank_tests, run_ranks

HERE = Path(__file__).parent


def checks(*names: str) -> list[Path]:
    return [HERE / f"{name}_checks.py" for name in names]


# One launch serves many checks, because importing TensorFlow takes longer than most of them.
# ops and split checks give TensorFlow one thread for the ops of a graph; test_ops_of_three does not.
test_ops_of_two = rank_tests(checks("ops", "gradient", "failure", "split"), [2])
test_ops_of_two_hosts = rank_tests(checks("compression"), [(2, "x:1x2")])
test_ops_of_three = pytest.mark.long(rank_tests(checks("gradient", "failure", "compression"), [(3, "x:1x3")]))
test_ops_of_four = pytest.mark.long(rank_tests(checks("ops", "failure", "split"), [(4, "x:2x2")]))
test_ops_sync = pytest.mark.long(rank_tests(checks("sync", "split"), [2], env={"KERAS_DDL_TF_KERNELS": "sync"}))


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parallel
def test_all_reduce_of_more_than_2_to_the_31_bytes():
    def work():
        import keras_ddl
        from keras_ddl import ops
        from keras_ddl.compat.tensorflow import tf

        keras_ddl.init()

        @tf.function
        def reduce(value):
            # Created inside the function, it is reduced in place: 2 GiB per rank instead of 4.
            y = ops.all_reduce(tf.fill([2**31 + 7], value))
            return tf.shape(y, tf.int64), tf.reduce_min(y), tf.reduce_max(y), y[-3:]

        shape, low, high, end = reduce(tf.constant(keras_ddl.rank() + 1, tf.uint8))
        return shape.numpy().tolist(), int(low), int(high), end.numpy().tolist()

    outcome = run_ranks(work, 2).check()
    assert [rank.result for rank in outcome.ranks] == [([2**31 + 7], 3, 3, [3, 3, 3])] * 2


def test_fields_of_a_lost_rank_survive_any_change_of_the_text():
    def work():
        import re

        import keras

        import keras_ddl
        from keras_ddl import errors, ops
        from keras_ddl.compat.tensorflow import tf
        from keras_ddl.ops.errors import from_tensorflow

        keras_ddl.init()
        keras_ddl.barrier()
        if keras_ddl.rank() == 1:
            return keras_ddl.shutdown()
        total = tf.function(lambda x: ops.all_reduce(x, name="total"))
        ones = tf.ones([3])

        def in_a_session():
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                session.run(ops.all_reduce(tf.ones([3]), name="total"))

        calls = {
            "function": lambda: total(ones),
            "Keras, which makes the error anew": lambda: keras.layers.Lambda(total)(ones),
            "Python function": lambda: tf.function(lambda x: tf.py_function(total, [x], tf.float32))(ones),
            "loop": lambda: tf.function(lambda x: tf.map_fn(total, x))(ones),
            "dataset": lambda: next(iter(tf.data.Dataset.from_tensors(ones).map(total))),
            "session": in_a_session,
        }
        found = {}
        for what, call in calls.items():
            try:
                call()
            except tf.errors.OpError as error:
                mark = re.search(r"keras_ddl\[\w+\]: ", error.message)[0]
                for text in (error.message, f"{mark}rank 7 died"):
                    lost = from_tensorflow(type(error)(None, None, text))
                    assert isinstance(lost, errors.RankLostError) and "rank 1 has left" in str(lost), (what, lost)
                    assert "[[" not in str(lost), (what, lost)
                    found[what] = lost.ranks, lost.has_left, lost.tensor.partition("#")[0]
        try:
            ops.all_reduce(ones, name="total")
        except errors.RankLostError as lost:
            found["eager"] = lost.ranks, lost.has_left, lost.tensor
        return found

    found = run_ranks(work, 2).check().ranks[0].result
    assert len(found) == 7 and set(found.values()) == {((1,), True, "total")}, found
