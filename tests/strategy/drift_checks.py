"""Weights that come to differ between ranks are found and named. Run by test_strategy.py."""

import contextlib
import dataclasses
from unittest import mock

import numpy as np

from harness.rank_program import long
from keras_ddl.errors import DriftError
from keras_ddl.strategy.agreement import drift
from strategy.common import (
    LAST,
    RANK,
    SIZE,
    STRATEGY,
    X,
    Y,
    everyone,
    keras,
    set_precision,
)


@contextlib.contextmanager
def drift_check(share):
    """With a share of a million times the training time every step is checked, however slow the machine is."""
    job = dataclasses.replace(STRATEGY.job, drift_check_fraction=share)
    with mock.patch.object(STRATEGY, "job", job), mock.patch.object(drift, "_FIRST_INTERVAL", 1):
        yield


class AtBatch(keras.callbacks.Callback):
    """Does something on the last rank alone, in the third batch of the second epoch."""

    def __init__(self, work, epoch=1, batch=2):
        super().__init__()
        self.work, self.at, self.epoch = work, (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if RANK == LAST and (self.epoch, batch) == self.at:
            self.work(self.model)


def flip_a_bit(variable, element=3, bit=1):
    value = variable.numpy().copy()
    value.reshape(-1).view(np.uint32)[element] ^= bit
    variable.assign(value)


def two_layers(optimizer=keras.optimizers.Adam, **options):
    set_precision("float32")
    with STRATEGY.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(40, "tanh", name="first"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(2, name="second"),
            ],
            name="two",
        )
        model.compile(optimizer(0.01, **options), "mse")
    return model


def drift_error(model, *parts, **arguments):
    """What fit raises on this rank, which must be the same on all but for the rank's number."""
    text = "nothing"
    try:
        model.fit(X, Y, callbacks=parts, **{"batch_size": 8, "epochs": 3, "verbose": 0, **arguments})
    except DriftError as error:
        text = str(error).replace(f"(rank {RANK})", "(rank ?)")
    texts = everyone(text)
    assert texts == [texts[0]] * SIZE, texts
    return text


def check_one_flipped_bit_on_one_rank_is_named_with_layer_rank_and_step():
    with drift_check(1e6):
        text = drift_error(two_layers(), AtBatch(lambda m: flip_a_bit(m.get_layer("first").kernel, element=1)))
    assert f"layer 'first', two/first/kernel on rank {LAST} differs from rank 0; on rank {LAST}: 1 of 240" in text, text
    assert "elements, the first [0, 1] " in text and "more of" not in text, text
    assert "after step 9 (at step 8 all were equal), " in text, text
    # At the default share at the end of the epoch at the latest. The lowest bit could be rounded away until then.
    text = drift_error(two_layers(), AtBatch(lambda m: flip_a_bit(m.get_layer("second").bias, element=1, bit=1 << 16)))
    assert "layer 'second', two/second/bias" in text and " all were equal), " in text, text


@long
def check_drift_of_frozen_layers_rates_and_slots_is_named():
    model = two_layers()
    model.get_layer("first").trainable = False
    with STRATEGY.scope():
        model.compile(keras.optimizers.Adam(0.01), "mse")
    text = drift_error(model, AtBatch(lambda m: flip_a_bit(m.get_layer("first").kernel, bit=1 << 30)))
    assert "layer 'first', two/first/kernel on rank" in text, text

    def set_rate(m):
        m.optimizer.learning_rate = 0.5

    with drift_check(1e6):
        text = drift_error(two_layers(keras.optimizers.SGD), AtBatch(set_rate, batch=5))
    assert f"sgd/learning_rate on rank {LAST} differs from rank 0; on rank {LAST}: 1 of 1 elements" in text, text
    assert "the first 0.5 for 0.01" in text, text
    # The last batch's momentum has not reached the weights when the epoch ends.
    last = AtBatch(lambda m: flip_a_bit(m.optimizer._momentums[0]), batch=5)
    text = drift_error(two_layers(), last)
    assert "adam/two_first_kernel_momentum on rank" in text and "after step 12" in text, text


@long
def check_drift_is_not_found_where_ranks_differ_by_design_or_the_check_is_off():
    with drift_check(1e6):
        # Dropout, local statistics and accumulators.
        model = two_layers(gradient_accumulation_steps=4, use_ema=True, weight_decay=0.01)
        assert drift_error(model) == "nothing"
    with drift_check(0):
        assert drift_error(two_layers(), AtBatch(lambda m: flip_a_bit(m.get_layer("second").kernel))) == "nothing"


@long
def check_a_callback_that_sets_weights_on_one_rank_is_found_at_the_epochs_end():
    class Reset(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if RANK == 0:
                self.model.get_layer("second").set_weights(
                    [w * 0 for w in self.model.get_layer("second").get_weights()]
                )

    text = drift_error(two_layers(), Reset())
    assert "1 more of 20 variables differ, the last is two/second/bias" in text, text
    assert (
        "layer 'second', two/second/kernel on rank" in text
        and "after step 6" in text
        and "1 more of 20 variables differ, the last is two/second/bias" in text
    ), text
