"""Keras's callbacks that decide, and learning rates: as in one process. Run by test_strategy.py."""

import contextlib
import csv
import warnings

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import (
    LABELS,
    RANK,
    STRATEGY,
    X,
    Y,
    dense_model,
    keras,
    own_folder,
    set_precision,
)
from strategy.oracle import Trained, differences


def classifier(optimizer=None):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3, "softmax")])
    optimizer = optimizer or keras.optimizers.SGD(0.2, momentum=0.5)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def fit(model, parts, **arguments):
    defaults = {"batch_size": 10, "epochs": 6, "shuffle": False, "verbose": 0, "validation_split": 0.3}
    return model.fit(X, LABELS, callbacks=parts, **{**defaults, **arguments}).history


def assert_as_one_process(program):
    found, _ = differences(program)
    assert not found, "\n".join(found)


@long
def check_callbacks_that_decide_leave_what_one_process_leaves():
    def program(scope):
        with scope:
            model = classifier()
        seen = []

        def note(epoch, logs):
            seen.append([logs["val_accuracy"], logs["loss"], float(model.optimizer.learning_rate)])

        class Shrink(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if logs["loss"] < 1.1:
                    self.model.layers[-1].kernel.assign(self.model.layers[-1].kernel * (1 - logs["loss"] / 10))
                    self.model.layers[0].set_weights([w * 0.9 for w in self.model.layers[0].get_weights()])

        parts = [
            Shrink(),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.97),
            keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, cooldown=1, min_delta=0.01),
            keras.callbacks.EarlyStopping("val_accuracy", patience=4, restore_best_weights=True, start_from_epoch=2),
            keras.callbacks.LambdaCallback(on_epoch_end=note),
            keras.callbacks.TerminateOnNaN(),
        ]
        history = fit(model, parts, epochs=25)
        return Trained(model, {**history, "seen": seen})

    assert_as_one_process(program)


@long
def check_the_best_model_is_chosen_by_direction_and_by_batches_as_in_one_process():
    def program(scope):
        with scope:
            model = classifier()
        with own_folder() as folder:

            def saver(name, *arguments, **more):
                return keras.callbacks.ModelCheckpoint(
                    folder / f"{name}-{{epoch}}-{{batch}}.weights.h5" if "save_freq" in more else folder / name,
                    *arguments,
                    save_weights_only=True,
                    save_best_only=True,
                    **more,
                )

            savers = [
                saver("accuracy.weights.h5", "val_accuracy"),
                saver("loss.weights.h5", "val_loss"),
                saver("worst.weights.h5", "loss", mode="max"),
                saver("batch", "loss", save_freq=2),
            ]
            history = fit(model, savers, validation_freq=1)
            left = {}
            if RANK == 0:
                loaded = classifier()
                for path in sorted(folder.iterdir()):
                    loaded.load_weights(path)
                    left[path.name] = [w.copy() for w in loaded.get_weights()]
                assert len(left) >= 5, left.keys()
            if not isinstance(scope, contextlib.nullcontext):
                left = keras_ddl.broadcast_object(left, name="around/left")
            return Trained(model, {**history, **left, "best": [each.best for each in savers]})

    assert_as_one_process(program)


@long
def check_backup_within_an_epoch_goes_on_as_in_one_process():
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 5:  # in the second of two epochs of three steps
                raise KeyboardInterrupt

    def program(scope):
        with own_folder() as folder:
            backup = {"backup_dir": folder / "backup", "save_freq": 2}
            with scope:
                interrupted, model = classifier(), classifier(keras.optimizers.SGD(0.7, momentum=0.5))
            with contextlib.suppress(KeyboardInterrupt):
                fit(interrupted, [keras.callbacks.BackupAndRestore(**backup), Interrupt()])
            history = fit(model, [keras.callbacks.BackupAndRestore(**backup)])
        assert len(history["loss"]) == 5
        return Trained(model, history)

    assert_as_one_process(program)


@long
def check_tensorboard_and_csv_hold_the_history():
    set_precision("float64")
    with own_folder() as folder:
        with STRATEGY.scope():
            model = classifier()
        board = keras.callbacks.TensorBoard(folder / "board", histogram_freq=1, write_graph=True)
        history = fit(model, [board, keras.callbacks.CSVLogger(folder / "log.csv")], epochs=3)
        if RANK == 0:
            rows = list(csv.DictReader((folder / "log.csv").open()))
            for key in history:
                np.testing.assert_array_equal([float(row[key]) for row in rows], history[key])
            for kind, key in (("train", "loss"), ("validation", "val_loss")):
                (file,) = (folder / "board" / kind).glob("events*")
                events = [e for e in tf.compat.v1.train.summary_iterator(str(file)) if e.HasField("summary")]
                values = [v for e in events for v in e.summary.value if v.tag == "epoch_loss"]
                written = [float(tf.make_ndarray(v.tensor)) for v in values]
                np.testing.assert_allclose(written, history[key], rtol=1e-6)
        else:
            assert not list(folder.iterdir())


@long
def check_swapped_averages_of_every_epoch_are_those_of_one_process():
    def program(scope):
        with scope:
            model = classifier(keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.6))
        best = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
        return Trained(model, fit(model, [keras.callbacks.SwapEMAWeights(swap_on_epoch=True), best], epochs=9))

    assert_as_one_process(program)


def check_learning_rates_that_differ_between_ranks_are_named():
    set_precision("float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with STRATEGY.scope():
            model = dense_model()
            model.compile(keras.optimizers.SGD(0.01 * (RANK + 1)), "mse")
        model.fit(X, Y, verbose=0)
        model.optimizer.learning_rate = 0.03 * (RANK + 1)
        model.fit(X, Y, verbose=0)
        model.fit(X, Y, verbose=0)  # equal by now
    found = [str(w.message) for w in caught if "the same learning rate" in str(w.message)]
    expected = ["0.03 on rank 0, 0.06 on rank 1"] if RANK == 0 else [f"0.01 on rank 0, {0.01 * (RANK + 1):g} on rank "]
    assert len(found) == 1 and expected[0] in found[0], found
    assert abs(float(model.optimizer.learning_rate) - 0.03) < 1e-8
