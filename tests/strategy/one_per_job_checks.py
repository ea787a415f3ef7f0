"""Equal `Strategy(...)` calls in a process return one object; other settings make another. Run by test_strategy.py."""

import copy
import random

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from strategy.common import RANK, keras, set_precision

set_precision("float32")
FIRST = keras_ddl.Strategy(gather_predictions="rank0")


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


def check_second_strategy_is_the_first():
    for again in (
        keras_ddl.Strategy(gather_predictions="rank0"),
        keras_ddl.Strategy(gather_predictions="rank0", sharding=None),
        copy.deepcopy(FIRST),
    ):
        assert again is FIRST
    other = keras_ddl.Strategy(batch_statistics="rank")
    assert other is not FIRST and other.job.settings.gather_predictions == "all"
    assert keras_ddl.Strategy() is other, "without arguments: the latest one"
    assert keras_ddl.Strategy(gather_predictions="rank0") is FIRST


@long
def check_strategies_with_other_settings_do_not_mix():
    other = keras_ddl.Strategy(batch_statistics="rank", gather_predictions="all")
    text = refusal(lambda: model_of(FIRST).compile(optimizer_of(other), "mse"))
    assert "'elsewhere', made under a Strategy with batch_statistics='rank' instead of 'global'" in text, text
    assert "gather_predictions='all' instead of 'rank0'" in text and "made outside" not in text, text
    mine, variable = optimizer_of(other), tf.Variable([1.0])
    with other.scope():
        mine.build([variable])
    text = refusal(lambda: FIRST.run(lambda: mine.apply([tf.ones([1])], [variable])))
    assert "batch_statistics='rank' instead of 'global'" in text, text


@long
def check_seed_is_set_again():
    drawn = []
    for _ in range(2):
        assert keras_ddl.Strategy(seed=5 + RANK, gather_predictions="rank0") is FIRST  # rank 0's seed is used
        drawn.append((random.random(), np.random.rand(), float(tf.random.uniform([]))))
    assert drawn[0] == drawn[1]
    assert keras_ddl.all_gather_object(drawn, name="drawn") == [drawn, drawn]
