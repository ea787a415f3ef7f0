"""callbacks.Checkpoint in one process: what is written when, what stays, and that a resumed run goes on exactly."""

import threading

import keras
import numpy as np
import pytest

from keras_ddl import callbacks
from keras_ddl import checkpoint as ckpt
from keras_ddl.checkpoint.direction import resolve_direction
from keras_ddl.errors import CheckpointError, ConfigError

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Play(keras.callbacks.Callback):
    """Gives each epoch a chosen value of the monitored metric."""

    def __init__(self, **values):
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        logs.update({name: values[epoch] for name, values in self.values.items()})


class Cut(keras.callbacks.Callback):
    """Changes the learning rate once, as ReduceLROnPlateau does."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.7


def make(optimizer="sgd", seed=1, dropout=0.0):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((3,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dropout(dropout)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
    return model


def fit(model, *parts, epochs=3, **arguments):
    return model.fit(
        X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=list(parts), **arguments
    ).history


def checkpointing(folder, **options):
    return callbacks.Checkpoint(folder, **{"export_base": False, **options})


def steps(folder):
    return [each.step for each in ckpt.list_checkpoints(folder)]


def test_checkpoint_keeps_the_newest_and_the_best(tmp_path):
    play = Play(val_loss=[3.0, 1.0, 2.0, float("nan"), 2.5, 2.4])
    fit(make(), play, checkpointing(tmp_path, keep=2), epochs=6)
    assert steps(tmp_path) == [6, 15, 18]  # 3 steps per epoch; epoch 2 was best
    best = ckpt.best(tmp_path)
    assert (best.step, best.epoch, best.metrics["val_loss"]) == (6, 2, 1.0)
    assert ckpt.latest(tmp_path).metrics["val_loss"] == 2.4


@pytest.mark.parametrize(
    ("metric", "monitor", "direction"),
    [
        ("accel_loss", "val_accel_loss", "min"),
        (keras.metrics.AUC(name="dice"), "val_dice", "max"),
        (keras.metrics.MeanSquaredError(name="accuracy"), "accuracy", "min"),
        (keras.metrics.CosineSimilarity(), "cosine_similarity", "max"),
        (None, "val_loss", "min"),
    ],
)
def test_direction_is_the_metrics_own_before_that_of_its_name(metric, monitor, direction):
    model = make()
    if metric is not None:
        model.compile("sgd", "mse", metrics=[metric] if not isinstance(metric, str) else None)
    assert resolve_direction(model, monitor, "auto") == direction


def test_checkpoint_asks_for_the_mode_of_a_metric_that_does_not_say(tmp_path):
    with pytest.raises(ConfigError, match="monitor='score'.*Pass mode='min' or mode='max'"):
        fit(make(), Play(score=[1, 2, 3]), checkpointing(tmp_path, monitor="score"))
    fit(make(), Play(score=[1, 2, 3]), checkpointing(tmp_path, monitor="score", save_best=False))
    assert steps(tmp_path) == [3, 6, 9]


def test_checkpoint_says_when_the_monitored_metric_is_missing(tmp_path):
    with pytest.warns(UserWarning, match="monitor='val_loss' is not in the epoch's logs, which have.*'mae'"):
        fit(make(), checkpointing(tmp_path, monitor="val_loss"))
    assert steps(tmp_path) == [3, 6, 9]


def test_checkpoint_by_steps_saves_within_epochs_and_at_the_end(tmp_path):
    fit(make(), checkpointing(tmp_path, save_freq=4, keep=9, monitor="loss"), epochs=4)
    found = ckpt.list_checkpoints(tmp_path)
    assert [each.step for each in found] == [4, 8, 12]
    assert [each.epoch for each in found] == [1, 2, 4]
    assert found[0].metrics == {}  # not final within an epoch
    assert "loss" in found[-1].metrics


def test_checkpoint_of_a_new_run_sets_an_earlier_one_aside(tmp_path, capsys):
    fit(make(), checkpointing(tmp_path, monitor="loss"), epochs=2)
    fit(make(), checkpointing(tmp_path, monitor="loss"), epochs=1)
    assert steps(tmp_path) == [3]
    assert steps(tmp_path / "previous-1") == [3, 6]
    assert "previous-1" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Only one callback may set the learning rate")
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        pytest.param(lambda: keras.optimizers.Adam(0.05), marks=pytest.mark.long),
        pytest.param(
            lambda: keras.optimizers.AdamW(0.05, use_ema=True, gradient_accumulation_steps=2), marks=pytest.mark.long
        ),
    ],
    ids=["sgd", "adam", "adamw-ema-accumulation"],
)
def test_resume_goes_on_as_if_it_had_not_stopped(tmp_path, optimizer):
    def parts(**options):
        return [
            Cut(),
            callbacks.LearningRateWarmup(warmup_epochs=3, scaling=4.0),
            callbacks.LearningRateSchedule(lambda epoch: 0.5**epoch, start_epoch=3, staircase=False),
            checkpointing(tmp_path, monitor="loss", **options),
        ]

    whole = make(optimizer(), dropout=0.5)
    whole_history = fit(whole, *parts()[:3], epochs=5)
    interrupted = make(optimizer(), dropout=0.5)
    if interrupted.optimizer.use_ema:  # fit ends by putting the averages in place: stop without that
        interrupted.optimizer.finalize_variable_values = lambda variables: None
    fit(interrupted, *parts(), epochs=2)
    resumed = make(optimizer(), seed=99, dropout=0.5)
    history = fit(resumed, *parts(resume=True), epochs=5)
    assert len(history["loss"]) == 3
    assert history["loss"] == whole_history["loss"][2:]
    assert history["learning_rate"] == whole_history["learning_rate"][2:]
    for mine, expected in zip(resumed.get_weights(), whole.get_weights()):
        np.testing.assert_array_equal(mine, expected)


class Break(keras.callbacks.Callback):
    """Ends the process's training inside the second epoch, after its first of three batches."""

    def on_train_batch_begin(self, batch, logs=None):
        if self.model.optimizer.iterations == 4:
            raise KeyboardInterrupt


@pytest.mark.parametrize("eagerly", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("outputs", [1, pytest.param(2, marks=pytest.mark.long)])
def test_metrics_of_an_epoch_that_is_resumed_inside_are_those_of_all_of_it(tmp_path, outputs, eagerly):
    """Keras makes the metrics of compile() in the first step, so there are none when the epoch begins."""

    def make_new():
        keras.utils.set_random_seed(1)
        x = keras.Input((3,))
        outs = {f"out_{n}": keras.layers.Dense(1, name=f"out_{n}")(x) for n in range(outputs)}
        model = keras.Model(x, outs)
        own = {name: ["mae", keras.metrics.RootMeanSquaredError()] for name in outs}
        model.compile("sgd", dict.fromkeys(outs, "mse"), metrics=own, run_eagerly=eagerly)
        return model

    def run(model, *parts):
        y = {f"out_{n}": Y + n for n in range(outputs)}
        data = {
            "batch_size": 4,
            "shuffle": False,
            "validation_data": (X[:2], {name: one[:2] for name, one in y.items()}),
        }
        return model.fit(X, y, epochs=2, verbose=0, callbacks=list(parts), **data).history

    expected = run(make_new())
    options = {"monitor": "loss", "save_freq": 4}
    with pytest.raises(KeyboardInterrupt):
        run(make_new(), checkpointing(tmp_path, **options), Break())
    resumed = run(make_new(), checkpointing(tmp_path, **options, resume=True))
    assert len(expected) == 2 * (1 if outputs == 1 else 3) + 4 * outputs
    assert resumed == {name: values[1:] for name, values in expected.items()}


def test_a_fit_that_was_interrupted_while_it_wrote_is_resumed_from_what_it_wrote(tmp_path, monkeypatch):
    """As in a notebook: the new fit begins while the thread of the old one has yet to publish."""

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    write, may_write = ckpt.write, threading.Event()

    def write_slowly(*arguments, **options):
        assert may_write.wait(60)
        return write(*arguments, **options)

    monkeypatch.setattr(ckpt, "write", write_slowly)
    with pytest.raises(KeyboardInterrupt):
        fit(make(), checkpointing(tmp_path, monitor="loss"), Interrupt())
    assert steps(tmp_path) == []
    threading.Timer(0.5, may_write.set).start()
    assert len(fit(make(), checkpointing(tmp_path, monitor="loss", resume=True))["loss"]) == 2
    assert steps(tmp_path) == [3, 6, 9]


def test_resume_of_a_run_that_a_callback_has_ended_goes_on_only_for_more_epochs(tmp_path, capsys):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    def resumed(epochs):
        return fit(make(), checkpointing(tmp_path, monitor="loss", resume=True), epochs=epochs)

    fit(make(), checkpointing(tmp_path, monitor="loss"), Stop(), epochs=5)
    assert resumed(5) == {}
    assert "A callback has ended this training, so fit(epochs=5) trains nothing" in capsys.readouterr().out
    assert len(resumed(6)["loss"]) == 4
    assert "resuming from step 6, epoch 3\n" in capsys.readouterr().out
    assert resumed(6) == {}
    assert "All 6 epochs are done, so fit trains nothing" in capsys.readouterr().out


def test_resume_refuses_a_model_that_is_not_built(tmp_path):
    fit(make(), checkpointing(tmp_path, monitor="loss"))
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(CheckpointError, match="resume needs a built model"):
        fit(model, checkpointing(tmp_path, monitor="loss", resume=True))


@pytest.mark.parametrize("options", [{"mode": "highest"}, {"keep": 0}, {"save_freq": "batch"}, {"save_freq": 0}])
def test_checkpoint_refuses_bad_arguments_when_it_is_made(tmp_path, options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be .*Received: "):
        callbacks.Checkpoint(tmp_path, **options)
