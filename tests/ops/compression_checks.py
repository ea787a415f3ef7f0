"""Sums that are rounded between hosts, and a Strategy that compresses gradients.

Run by test_ops_on_ranks.py, where every rank counts as a host.
"""

import os
from unittest import mock

import numpy as np
import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl import ops
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, RankMismatchError

keras_ddl.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()
COMPRESSIONS = ("bfloat16", "float16")


def values(rank: int, count: int = 5003) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=count).astype(np.float32)


def check_values_of_one_rank_are_rounded_once():
    """Only rank 0 contributes values other than zero, so TensorFlow's cast is the oracle."""
    mine = values(0) if RANK == 0 else np.zeros(5003, np.float32)
    expected = tf.cast(tf.cast(values(0), tf.bfloat16), tf.float32).numpy()
    np.testing.assert_array_equal(ops.all_reduce(mine, compression="bfloat16"), expected)
    # Scaling extends float16 to tiny and huge numbers; 1e6 alone would be infinite.
    for scale in (1e-9, 1e6):
        result = ops.all_reduce_n([mine * np.float32(scale)], compression="float16")[0]
        np.testing.assert_allclose(result, values(0) * np.float32(scale), rtol=2**-10, atol=scale * 2**-24)


def check_sums_are_equal_on_all_ranks():
    everyone = np.stack([values(rank) for rank in range(SIZE)])
    for compression in COMPRESSIONS:
        for op, exact in (("sum", everyone.sum(0)), ("mean", everyone.mean(0))):
            first, empty = ops.all_reduce_n(
                [values(RANK), np.zeros([0, 3], np.float32)], op=op, compression=compression, name=f"copy/{op}"
            )
            assert empty.shape == (0, 3)
            assert len(set(keras_ddl.all_gather_object(first.numpy().tobytes()))) == 1
            np.testing.assert_allclose(first, exact, atol=0.1)
            assert (first.numpy() != exact).any(), "nothing was rounded"


def check_named_calls_and_graphs_compensate_for_rounding():
    exact = np.stack([values(rank) for rank in range(SIZE)]).sum(0)
    reduce = tf.function(lambda x: ops.all_reduce(x, compression="bfloat16"))
    calls = {
        "graph": lambda: reduce(values(RANK)),
        "named": lambda: ops.all_reduce(values(RANK), compression="bfloat16", name="feedback"),
        "unnamed": lambda: ops.all_reduce(values(RANK), compression="bfloat16"),
        "without": lambda: ops.all_reduce_n([values(RANK)], compression="bfloat16", name="none", feedback="")[0],
    }
    error = {
        name: np.abs(np.mean([call().numpy().astype(np.float64) for _ in range(32)], axis=0) - exact).max()
        for name, call in calls.items()
    }
    assert error["graph"] == error["named"] and error["unnamed"] == error["without"], error
    assert error["named"] * 8 < error["unnamed"], error


def check_unsupported_compression_is_refused_by_name():
    x = tf.ones([2])
    slices = tf.IndexedSlices(tf.ones([1, 2]), [0], [3, 2])
    for text, call in (
        ("compression='int8'", lambda: ops.all_reduce(x, compression="int8")),
        ("float64", lambda: ops.all_reduce_n([x, tf.cast(x, tf.float64)], compression="bfloat16")),
        ("op='max'", lambda: ops.all_reduce(x, op="max", compression="float16")),
        ("mpi=True", lambda: ops.all_reduce_n([x], mpi=True, compression="float16")),
        ("IndexedSlices", lambda: ops.all_reduce(slices, compression="float16")),
        ("feedback=3", lambda: ops.all_reduce_n([x], compression="float16", feedback=3)),
        ("compression='zip'", lambda: keras_ddl.Strategy(compression="zip")),
    ):
        with pytest.raises(ConfigError, match=text):
            call()


def check_ranks_must_agree():
    with pytest.raises(RankMismatchError, match=r"compression: float16 on rank\(s\) 0, none on rank\(s\) 1"):
        ops.all_reduce(tf.ones([2]), compression="float16" if RANK == 0 else None, name="disagree")


@long
def check_strategy_rounds_only_gradients_of_weights():
    import keras  # imported late, because it takes seconds

    x = np.random.default_rng(5).normal(size=[96, 20]).astype(np.float32)
    y = x[:, :3] @ np.ones([3, 1], np.float32)
    weights = {}
    for compression in (None, "bfloat16"):  # both compressions take the same path
        with mock.patch.dict(os.environ, KERAS_DDL_DRIFT_CHECK_PERCENT="0"):
            strategy = keras_ddl.Strategy(compression=compression, seed=3)
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((20,)), keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
            )
            model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        model.fit(x, y, batch_size=40, epochs=2, shuffle=False, verbose=0)  # the last batch has 16 rows
        lines = strategy.explain(model).splitlines()
        steps = sum("train_step, one step" in line for line in lines)
        rounded = [line for line in lines if "16 bits between hosts" in line]
        if compression is None:
            assert not rounded, lines
        else:
            assert len(rounded) == steps > 0, lines
            assert all(f"{4 * (20 * 16 + 16):,} " in line for line in rounded), (
                rounded
            )  # kernels, but neither biases nor moments
        weights[compression] = np.concatenate([each.ravel() for each in model.get_weights()])
        assert len(set(keras_ddl.all_gather_object(weights[compression].tobytes()))) == 1
    assert (weights["bfloat16"] != weights[None]).any()
    np.testing.assert_allclose(weights["bfloat16"], weights[None], atol=0.02)
