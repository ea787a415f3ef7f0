"""Warm-up and schedule callbacks on one rank that simulates more: curves, composition, momentum."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ddl import callbacks, communicator, schedules
from keras_ddl.callbacks._momentum import buffers_with_rate
from keras_ddl.errors import ConfigError

STEPS = 5  # per epoch: 10 rows in batches of 2
MOMENTUM = 0.875  # exact in float32, which Keras always uses for it
X = np.linspace(-1, 1, 30, dtype=np.float32).reshape(10, 3)
Y = (X @ np.array([[1.0], [-2.0], [0.5]], np.float32)).astype(np.float32)


@pytest.fixture
def four_ranks(monkeypatch):
    monkeypatch.setattr(communicator, "is_initialized", lambda: True)
    monkeypatch.setattr(communicator, "size", lambda: 4)
    monkeypatch.setattr(communicator, "rank", lambda: 0)


class Recorder(keras.callbacks.Callback):
    """Records the learning rate of each step."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))


def make(optimizer=None, **compiled):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(optimizer or keras.optimizers.SGD(0.01), "mse", **compiled)
    return model


def fit(model, *parts, epochs=4, **arguments):
    recorder = Recorder()
    history = model.fit(
        X, Y, batch_size=2, epochs=epochs, shuffle=False, verbose=0, callbacks=[*parts, recorder], **arguments
    )
    return np.array(recorder.rates), history.history


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4), ("sqrt", 2), (3.0, 3)])
def test_warmup_rises_linearly_as_in_goyal(four_ranks, scaling, factor):
    rates, history = fit(make(), callbacks.LearningRateWarmup(warmup_epochs=2, scaling=scaling))
    step = np.arange(4 * STEPS)
    np.testing.assert_allclose(rates, 0.01 * (1 + (factor - 1) * np.minimum(step / 10, 1)), rtol=1e-6)
    # The logs show the rate at the end of each epoch.
    expected = 0.01 * np.array([(1 + factor) / 2, factor, factor, factor])
    np.testing.assert_allclose(history["learning_rate"], expected, rtol=1e-6)


def test_warmup_for_part_of_an_epoch_or_none(four_ranks):
    rates, _ = fit(make(), callbacks.LearningRateWarmup(0.02, warmup_epochs=0.4, start=0.5, scaling="linear"), epochs=1)
    np.testing.assert_allclose(rates, 0.02 * np.array([0.5, 2.25, 4, 4, 4]), rtol=1e-6)
    rates, _ = fit(make(), callbacks.LearningRateWarmup(warmup_epochs=0, scaling="linear"), epochs=1)
    np.testing.assert_allclose(rates, 0.04, rtol=1e-6)


def test_warmup_continues_in_a_second_fit(four_ranks):
    model, warmup = make(), callbacks.LearningRateWarmup(warmup_epochs=4, scaling="linear")
    first, _ = fit(model, warmup, epochs=2)
    second, _ = fit(model, callbacks.LearningRateWarmup(warmup_epochs=4, scaling="linear"), initial_epoch=2, epochs=5)
    step = np.arange(25)
    expected = 0.01 * (1 + 3 * np.minimum(step / 20, 1))
    np.testing.assert_allclose(np.concatenate([first, second]), expected, rtol=1e-6)


@pytest.mark.parametrize("order", [1, pytest.param(-1, marks=pytest.mark.long)])
@pytest.mark.parametrize("interrupted", [pytest.param(False, marks=pytest.mark.long), True])
def test_second_fit_does_not_scale_a_changed_rate_again(four_ranks, order, interrupted):
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if interrupted and self.params["epochs"] == 4 and self.model.optimizer.iterations == 2 * STEPS + 2:
                raise InterruptedError

    def parts():
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=1e9)
        return [*[callbacks.LearningRateWarmup(warmup_epochs=1, scaling="linear"), plateau][::order], Interrupt()]

    model = make()
    with no_warnings():
        if interrupted:
            with pytest.raises(InterruptedError):
                fit(model, *parts(), epochs=4)
        else:
            fit(model, *parts(), epochs=2)
        assert float(model.optimizer.learning_rate) == np.float32(0.02)
        rates, _ = fit(model, *parts(), initial_epoch=2, epochs=3)
    np.testing.assert_allclose(rates, 0.02, rtol=1e-6)


def test_schedules_in_sequence_multiply_the_warmed_up_rate(four_ranks):
    parts = [
        callbacks.LearningRateWarmup(warmup_epochs=1, scaling="linear"),
        callbacks.LearningRateSchedule(0.5, start_epoch=2, end_epoch=3),
        callbacks.LearningRateSchedule(lambda epoch: 0.1**epoch, start_epoch=4, end_epoch=5),
    ]
    with no_warnings():
        rates, _ = fit(make(), *parts, epochs=6)
    per_epoch = 0.04 * np.array([1, 0.5, 0.5, 1e-4, 1e-4])  # the last value of an ended schedule stays
    np.testing.assert_allclose(rates[5::5], per_epoch, rtol=1e-6)
    np.testing.assert_allclose(rates[9::5], per_epoch, rtol=1e-6)


def test_schedule_without_staircase_changes_in_every_step():
    schedule = callbacks.LearningRateSchedule(lambda epoch: 0.5**epoch, start_epoch=1, staircase=False)
    rates, _ = fit(make(), schedule, epochs=3)
    step = np.arange(15)
    np.testing.assert_allclose(rates, np.where(step < 5, 0.01, 0.01 * 0.5 ** (step / 5)), rtol=1e-6)


def test_schedules_that_overlap_are_reported_and_the_later_wins():
    parts = [callbacks.LearningRateSchedule(0.5), callbacks.LearningRateSchedule(0.2, start_epoch=1, end_epoch=2)]
    with pytest.warns(UserWarning, match="Two LearningRateSchedule callbacks set the learning rate in epoch 2"):
        rates, _ = fit(make(), *parts, epochs=3)
    np.testing.assert_allclose(rates[::5], 0.01 * np.array([0.5, 0.2, 0.5]), rtol=1e-6)


OBJECTS = {
    "warmup": lambda: schedules.LinearWarmup(schedules.scale_learning_rate(0.01, "sqrt", 4), 7, 0.002),
    "luong10": lambda: schedules.luong_decay(0.05, 20),
    "cosine": lambda: keras.optimizers.schedules.CosineDecay(0.04, 18, warmup_target=0.05, warmup_steps=4, alpha=0.01),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OBJECTS)
def test_schedule_in_the_optimizer_or_as_a_callback_trains_alike(name, tmp_path):
    """Also trains in two parts: resumed from a backup, and with initial_epoch in a second fit."""

    def backup(folder):
        return keras.callbacks.BackupAndRestore(tmp_path / folder, delete_checkpoint=False)

    expected = np.array([float(OBJECTS[name]()(step)) for step in range(4 * STEPS)])
    assert len(set(expected)) > 2
    for kind in ("object", "callback"):
        parts = [] if kind == "object" else [callbacks.LearningRateSchedule(OBJECTS[name]())]

        def made(kind=kind):
            return make(keras.optimizers.SGD(OBJECTS[name]() if kind == "object" else 0.3))

        def after(rates, kind=kind):  # an optimizer with a schedule already shows the next step's rate
            return rates[:-1] if kind == "object" else rates[1:]

        whole = made()
        rates, _ = fit(whole, *parts)
        np.testing.assert_allclose(after(rates), expected[1:], rtol=1e-5)
        again = made()
        fit(again, *parts, epochs=2)
        fit(again, *parts, epochs=4, initial_epoch=2)
        fit(made(), backup(kind), *parts, epochs=2)
        restored = made()
        rates, _ = fit(restored, backup(kind), *parts, epochs=4)
        np.testing.assert_allclose(after(rates), expected[2 * STEPS + 1 :], rtol=1e-5)
        for one, two, three in zip(whole.get_weights(), again.get_weights(), restored.get_weights()):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one, three)
        if kind == "object":
            of_object = whole.get_weights()
    for one, two in zip(of_object, whole.get_weights()):
        np.testing.assert_allclose(one, two, rtol=1e-5)


def test_another_callback_that_sets_the_rate_during_warmup_is_reported(four_ranks):
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.05)
    warmup = callbacks.LearningRateWarmup(warmup_epochs=2, scaling="linear")
    with pytest.warns(
        UserWarning,
        match="Only one callback may set the learning rate.*a change from .* to 0.05, while LearningRateWarmup",
    ):
        fit(make(), warmup, scheduler)


def test_a_plateau_found_during_warmup_stays_a_factor(four_ranks):
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=1e9)
    with pytest.warns(UserWarning, match="multiply the changed rate"):
        rates, _ = fit(make(), callbacks.LearningRateWarmup(warmup_epochs=3, scaling="linear"), plateau, epochs=3)
    line = 0.01 * (1 + 3 * np.arange(15) / 15)
    np.testing.assert_allclose(rates[5:], line[5:] * np.repeat([1, 0.5], 5), rtol=1e-5)


def test_two_warmups_are_refused(four_ranks):
    with pytest.raises(ConfigError, match="one LearningRateWarmup"):
        fit(make(), callbacks.LearningRateWarmup(scaling="linear"), callbacks.LearningRateWarmup(scaling="linear"))


def test_initial_lr_must_be_agreed(four_ranks):
    parts = [callbacks.LearningRateWarmup(0.1, scaling="linear"), callbacks.LearningRateSchedule(0.1, initial_lr=0.2)]
    with pytest.raises(ConfigError, match=r"initial_lr must be the same.*Received: \[0.1, 0.2\]"):
        fit(make(), *parts)


@pytest.mark.long
def test_backup_and_restore_gets_its_rate_back_once(four_ranks, tmp_path):
    def parts():
        restore = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        return [callbacks.LearningRateWarmup(warmup_epochs=3, scaling="linear"), restore]

    whole, _ = fit(make(), callbacks.LearningRateWarmup(warmup_epochs=3, scaling="linear"), epochs=5)
    for order in (1, -1):
        first, _ = fit(make(), *parts()[::order], epochs=2)
        with no_warnings():
            second, _ = fit(make(), *parts()[::order], epochs=5)
        np.testing.assert_allclose(np.concatenate([first, second]), whole, rtol=1e-6)
        for file in tmp_path.iterdir():
            file.unlink()


def unabsorbed(rates, momentum, nesterov, accumulate):
    """Returns weights of SGD with the rate outside its buffer: u <- m*u + g, w <- w - rate*(u or g + m*u)."""
    w, b = np.ones((3, 1)), np.zeros(1)
    u = [np.zeros((3, 1)), np.zeros(1)]
    total = [0.0, 0.0]
    x, y = X.astype(np.float64), Y.astype(np.float64)
    for step, rate in enumerate(rates):
        rows = slice(2 * (step % STEPS), 2 * (step % STEPS) + 2)
        error = x[rows] @ w + b - y[rows]
        total = [t + g / accumulate for t, g in zip(total, [x[rows].T @ error, error.sum(0)])]  # mean over 2 outputs
        if (step + 1) % accumulate:
            continue
        u = [momentum * buffer + g for buffer, g in zip(u, total)]
        move = [g + momentum * buffer for buffer, g in zip(u, total)] if nesterov else u
        w, b, total = w - rate * move[0], b - rate * move[1], [0.0, 0.0]
    return [w, b]


@pytest.mark.parametrize("nesterov", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.long), 2])
def test_momentum_correction_equals_the_form_without_the_rate_inside(float64, four_ranks, nesterov, accumulate):
    parts = [
        callbacks.LearningRateWarmup(warmup_epochs=2, scaling="linear"),
        callbacks.LearningRateSchedule(0.1, start_epoch=3),
    ]
    options = {"nesterov": nesterov, "gradient_accumulation_steps": None if accumulate == 1 else accumulate}
    model = make(keras.optimizers.SGD(0.01, momentum=MOMENTUM, **options))
    rates, _ = fit(model, *parts)
    for mine, expected in zip(model.get_weights(), unabsorbed(rates, MOMENTUM, nesterov, accumulate)):
        np.testing.assert_allclose(mine, expected, rtol=1e-13)

    uncorrected = make(keras.optimizers.SGD(0.01, momentum=MOMENTUM, **options))
    for part in parts:
        part.momentum_correction = False
    fit(uncorrected, *parts)
    assert np.abs(uncorrected.get_weights()[0] - model.get_weights()[0]).max() > 1e-3  # the test can see a difference


def test_momentum_correction_scales_rmsprop_and_the_inner_optimizer_and_leaves_adam():
    def built(optimizer):
        optimizer.build([keras.Variable(np.ones(3, np.float32))])
        return optimizer

    assert len(buffers_with_rate(built(keras.optimizers.RMSprop(momentum=0.9)))) == 1
    assert buffers_with_rate(built(keras.optimizers.RMSprop())) == []
    assert buffers_with_rate(built(keras.optimizers.Adam())) == []
    assert buffers_with_rate(keras.optimizers.SGD(momentum=0.9)) == []
    scaled = built(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(momentum=0.9)))
    assert len(buffers_with_rate(scaled)) == 1


@pytest.mark.parametrize(
    "make_bad",
    [
        lambda: callbacks.LearningRateWarmup(warmup_epochs=-1),
        lambda: callbacks.LearningRateWarmup(scaling="cubic"),
        lambda: callbacks.LearningRateWarmup(start=0.0),
        lambda: callbacks.LearningRateSchedule("half"),
        lambda: callbacks.LearningRateSchedule(0.0),
        lambda: callbacks.LearningRateSchedule(0.5, start_epoch=3, end_epoch=3),
    ],
)
def test_bad_arguments_are_refused_when_the_callback_is_made(make_bad):
    with pytest.raises(ConfigError, match="Received: "):
        make_bad()


def test_a_learning_rate_that_is_a_schedule_is_refused():
    model = make(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)))
    with pytest.raises(ConfigError, match="needs an optimizer whose learning rate is a number.*ExponentialDecay"):
        fit(model, callbacks.LearningRateWarmup())


def test_data_of_unknown_length_needs_steps_per_epoch():
    def generate():
        for _ in range(STEPS):
            yield X[:2], Y[:2]

    def dataset():
        signature = (tf.TensorSpec((2, 3)), tf.TensorSpec((2, 1)))
        return tf.data.Dataset.from_generator(generate, output_signature=signature)

    with pytest.raises(ConfigError, match="must know the steps per epoch"):
        make().fit(dataset(), verbose=0, callbacks=[callbacks.LearningRateWarmup()])
    make().fit(dataset(), verbose=0, callbacks=[callbacks.LearningRateWarmup(steps_per_epoch=STEPS)])
