"""Changes by one rank outside steps: the next call starts from rank 0's values, and drift is detected. Run by
test_strategy.py.
"""

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
    check_equal_on_all_ranks,
    everyone,
    keras,
    of_one_process,
    raises,
    recorded_warnings,
    set_precision,
)


def compiled(scope, loss="mse", dropout=0.0, optimizer=keras.optimizers.Adam, **options):
    set_precision("float32")
    keras.utils.set_random_seed(5)
    with scope:
        hidden = [keras.layers.Dense(40, "tanh", name="first"), keras.layers.BatchNormalization()]
        last = [keras.layers.Dropout(dropout), keras.layers.Dense(2, name="second")]
        model = keras.Sequential([keras.Input((6,)), *hidden, *last], name="net")
        model.compile(optimizer(0.01, **options), loss, metrics=["mae"])
    return model


def two_layers(**options):
    return compiled(STRATEGY.scope(), dropout=0.2, **options)


def changed(model, by=0.5):
    model.set_weights([(each * by + by).astype(each.dtype) for each in model.get_weights()])


@contextlib.contextmanager
def assert_rank_0_warns(*words):
    """Checks that rank 0 warns once for each of `words`, and that no other rank warns."""
    with recorded_warnings("also outside of steps") as texts:
        yield
    expected = words if RANK == 0 else ()
    assert len(texts) == len(expected) and all(word in text for word, text in zip(expected, texts)), texts


def options(**more):
    return {"batch_size": 9, "verbose": 0, **more}


CALLS = {
    "evaluate": lambda model: model.evaluate(X, Y, **options()),
    "predict": lambda model: model.predict(X, **options()),
    "fit": lambda model: model.fit(X, Y, **options(shuffle=False, validation_data=(X, Y))).history["val_loss"],
}


@long
def check_changes_on_rank_0_apply_to_all_ranks():
    alone = compiled(contextlib.nullcontext())
    for name, call in CALLS.items():
        shared = compiled(STRATEGY.scope())
        alone.set_weights(shared.get_weights())
        for first in (True, False):  # the first call traces the step
            for model in (alone, shared):
                if RANK == 0:
                    changed(model)
            with assert_rank_0_warns(f"when {name} begins: values of net/first/kernel"):
                mine = call(shared)
            expected = of_one_process(lambda: call(alone))  # noqa: B023
            np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-6, err_msg=f"{name} {first}")
            check_equal_on_all_ranks(shared)
            with assert_rank_0_warns():
                CALLS["evaluate"](shared)


@long
def check_no_warning_if_all_ranks_make_the_same_change():
    model = compiled(STRATEGY.scope(), dropout=0.3)
    with assert_rank_0_warns():
        for _ in range(2):
            for call in CALLS.values():
                call(model)
            changed(model)
    check_equal_on_all_ranks(model)


@long
def check_other_variables_of_a_step_take_rank_0_values():
    teacher = compiled(contextlib.nullcontext())
    shared = compiled(STRATEGY.scope(), loss=lambda y, p: keras.ops.square(p - teacher.layers[-1].bias))
    assert np.isfinite(CALLS["evaluate"](shared)).all()
    if RANK == 0:
        teacher.layers[-1].bias.assign([3.0, 4.0])
    with assert_rank_0_warns("when evaluate begins: values of"):
        losses = everyone(CALLS["evaluate"](shared))
    assert losses == [losses[0]] * SIZE
    np.testing.assert_array_equal(teacher.layers[-1].bias, [3.0, 4.0])


@long
def check_evaluating_differing_weights_during_fit_is_a_drift_error():
    class Swap(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            before = self.model.get_weights()
            if RANK == LAST:
                changed(self.model)
            self.model.evaluate(X, Y, **options())
            self.model.set_weights(before)

    model = compiled(STRATEGY.scope())
    raises(DriftError, "net/first/kernel on rank", lambda: model.fit(X, Y, **options(callbacks=[Swap()])))

    class AtValidation(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            if RANK == 0:
                changed(self.model)

    fits = options(validation_data=(X, Y), callbacks=[AtValidation()])
    raises(DriftError, "net/first/kernel on rank", lambda: model.fit(X, Y, **fits))


@contextlib.contextmanager
def drift_check(share):
    """Replaces the drift check's share of training time; 1e6 checks every step on any machine."""
    job = dataclasses.replace(STRATEGY.job, drift_check_fraction=share)
    with mock.patch.object(STRATEGY, "job", job), mock.patch.object(drift, "_FIRST_INTERVAL", 1):
        yield


class AtBatch(keras.callbacks.Callback):
    """Calls `work` on the last rank only, by default in the third batch of the second epoch."""

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


def drift_error(model, *parts, **arguments):
    """Returns fit's DriftError, which must be equal on all ranks but for the rank's number, or "nothing"."""
    text = "nothing"
    try:
        model.fit(X, Y, callbacks=parts, **{"batch_size": 8, "epochs": 3, "verbose": 0, **arguments})
    except DriftError as error:
        text = str(error).replace(f"(rank {RANK})", "(rank ?)")
    texts = everyone(text)
    assert texts == [texts[0]] * SIZE, texts
    return text


@long
def check_drift_error_names_layer_rank_and_step_of_a_flipped_bit():
    with drift_check(1e6):
        text = drift_error(two_layers(), AtBatch(lambda m: flip_a_bit(m.get_layer("first").kernel, element=1)))
    assert f"layer 'first', net/first/kernel on rank {LAST} differs from rank 0; on rank {LAST}: 1 of 240" in text, text
    assert "elements, the first [0, 1] " in text and "more of" not in text, text
    assert "after step 9 (all were equal at step 8), " in text, text


@long
def check_flipped_bit_is_found_by_the_end_of_the_epoch():
    """Uses the default share. Training could round the lowest bit away by then, so a higher one is flipped."""
    text = drift_error(two_layers(), AtBatch(lambda m: flip_a_bit(m.get_layer("second").bias, element=1, bit=1 << 16)))
    assert "layer 'second', net/second/bias" in text and "(all were equal at step " in text, text


@long
def check_drift_of_frozen_layers_rates_and_slots_is_found():
    model = two_layers()
    model.get_layer("first").trainable = False
    with STRATEGY.scope():
        model.compile(keras.optimizers.Adam(0.01), "mse")
    text = drift_error(model, AtBatch(lambda m: flip_a_bit(m.get_layer("first").kernel, bit=1 << 30)))
    assert "layer 'first', net/first/kernel on rank" in text, text

    def set_rate(m):
        m.optimizer.learning_rate = 0.5

    with drift_check(1e6):
        text = drift_error(two_layers(optimizer=keras.optimizers.SGD), AtBatch(set_rate, batch=5))
    assert f"sgd/learning_rate on rank {LAST} differs from rank 0; on rank {LAST}: 1 of 1 elements" in text, text
    assert "the first 0.5 instead of 0.01" in text, text
    # At the end of the epoch, the last batch's momentum has not yet reached the weights.
    last = AtBatch(lambda m: flip_a_bit(m.optimizer._momentums[0]), batch=5)
    text = drift_error(two_layers(), last)
    assert "adam/net_first_kernel_momentum on rank" in text and "after step 12" in text, text


@long
def check_no_drift_error_if_ranks_differ_by_design_or_the_check_is_off():
    with drift_check(1e6):
        # Dropout, local statistics and accumulators differ by design.
        model = two_layers(gradient_accumulation_steps=4, use_ema=True, weight_decay=0.01)
        assert drift_error(model) == "nothing"
    with drift_check(0):
        assert drift_error(two_layers(), AtBatch(lambda m: flip_a_bit(m.get_layer("second").kernel))) == "nothing"
