"""A second `Strategy(...)` of a process is the same one; other settings are kept apart. Run by test_strategy.py."""

import copy
import random

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from strategy.common import RANK, keras, set_precision

set_precision("float32")
FIRST = keras_ddl.Strategy(bucket_bytes=3 << 20)


def optimizer_of(strategy):
    with strategy.scope():
        return keras.optimizers.Adam(0.01, name="elsewhere")


def model_of(strategy):
    with strategy.scope():
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])


def refusal(function):
    try:
        function()
    except ConfigError as error:
        return str(error)
    raise AssertionError("no ConfigError")


def check_a_second_strategy_is_the_same():
    for again in (
        keras_ddl.Strategy(bucket_bytes=3 << 20),
        keras_ddl.Strategy(sparse_as_dense="auto", bucket_bytes=3 << 20),
        keras_ddl.Strategy(
            communication_options=tf.distribute.experimental.CommunicationOptions(bytes_per_pack=3 << 20)
        ),
        copy.deepcopy(FIRST),
    ):
        assert again is FIRST
    other = keras_ddl.Strategy(bucket_bytes=5 << 20)
    assert other is not FIRST and other.extended.bucket_size.bytes == 5 << 20
    assert keras_ddl.Strategy() is other, "the latest, where nothing is asked for"
    assert keras_ddl.Strategy(bucket_bytes=3 << 20) is FIRST


@long
def check_other_settings_are_kept_apart():
    other = keras_ddl.Strategy(bucket_bytes=5 << 20, sparse_as_dense=True)
    text = refusal(lambda: model_of(FIRST).compile(optimizer_of(other), "mse"))
    assert "'elsewhere', made under a Strategy with bucket_bytes=5242880 instead of 3145728" in text, text
    assert "sparse_as_dense=True instead of 'auto'" in text and "made outside" not in text, text
    mine, variable = optimizer_of(other), tf.Variable([1.0])
    with other.scope():
        mine.build([variable])
    text = refusal(lambda: FIRST.run(lambda: mine.apply([tf.ones([1])], [variable])))
    assert "bucket_bytes=5242880 instead of 3145728" in text, text


@long
def check_a_seed_counts_again():
    drawn = []
    for _ in range(2):
        assert keras_ddl.Strategy(seed=5 + RANK, bucket_bytes=3 << 20) is FIRST  # rank 0's counts
        drawn.append((random.random(), np.random.rand(), float(tf.random.uniform([]))))
    assert drawn[0] == drawn[1]
    assert keras_ddl.all_gather_object(drawn, name="drawn") == [drawn, drawn]
