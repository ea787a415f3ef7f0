"""Keras's callbacks under the Strategy: rank 0 writes, and ranks decide as one process. Run by test_strategy.py."""

import contextlib
import json

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import (
    LAST,
    RANK,
    STRATEGY,
    X,
    Y,
    check_equal_on_all_ranks,
    dense_model,
    keras,
    own_folder,
    recorded_warnings,
    set_precision,
)
from strategy.oracle import Trained, assert_as_one_process

set_precision("float32")


def compiled(scope=None, learning_rate=0.05):
    with scope or STRATEGY.scope():
        model = dense_model()
        model.compile(keras.optimizers.SGD(learning_rate), "mse", metrics=["mae"])
    return model


def fit(model, callbacks, **arguments):
    defaults = {"batch_size": 10, "epochs": 3, "shuffle": False, "verbose": 0, "validation_split": 0.3}
    return model.fit(X, Y, callbacks=callbacks, **{**defaults, **arguments}).history


def files_by_rank(folder):
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return keras_ddl.all_gather_object(found, name="files")


def check_writers_write_on_rank_0_only():
    with own_folder() as folder:
        best = keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True)
        callbacks = [
            best,
            keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True, save_freq=2),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.TensorBoard(folder / "board"),
            keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False),
        ]
        model = compiled()
        history = fit(model, callbacks)
        files, *others = files_by_rank(folder)
        assert others == [[]] * LAST, others
        assert {"best.keras", "log.csv", "1.weights.h5", "backup/latest.weights.h5"} <= set(files), files
        assert any("events.out" in name for name in files)
        assert best.best == min(history["val_loss"]), "every rank knows the best value"
        if RANK == 0:
            rows = (folder / "log.csv").read_text().splitlines()
            assert len(rows) == 4
            loaded = keras.models.load_model(folder / "best.keras")
            np.testing.assert_allclose(
                loaded.predict(X, verbose=0), model(X), rtol=0, atol=1e-6, err_msg="a plain model without keras_ddl"
            )
        check_equal_on_all_ranks(model, history)


class Rates(keras.callbacks.CSVLogger):
    def on_epoch_end(self, epoch, logs=None):
        logs["rate"] = float(self.model.optimizer.learning_rate.numpy())
        super().on_epoch_end(epoch, logs)


class Points(keras.callbacks.TensorBoard):
    def on_epoch_end(self, epoch, logs=None):
        with self._train_writer.as_default():
            tf.summary.scalar("own", 1.0, step=epoch)
        logs["batches"] = self._global_train_batch
        super().on_epoch_end(epoch, logs)


class Backup(keras.callbacks.BackupAndRestore):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.model.stop_training = epoch == 2


class Best(keras.callbacks.ModelCheckpoint):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        logs["best"] = self.best


@long
def check_subclasses_of_writers_run_on_all_ranks():
    seen = []

    class Sum(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["sum"] = sum(logs.values())
            seen.append(dict(logs))

    with own_folder() as folder:  # a different one on each rank
        patched = keras.callbacks.CSVLogger(folder / "patched.csv")
        patched.on_epoch_begin = lambda epoch, logs=None: seen.append(epoch)
        callbacks = [
            Rates(folder / "rates.csv"),
            Points(folder / "points", update_freq=1, write_steps_per_second=True, histogram_freq=1),
            Backup(folder / "backup"),
            Best(folder / "best.keras", save_best_only=True, monitor="loss", save_freq="epoch"),
            patched,
            Sum(),
        ]
        for epochs in (5, 2):  # the second fit reuses the callbacks
            model = compiled()
            history = fit(model, callbacks, epochs=epochs)
            assert {"rate", "batches", "best", "sum"} <= set(history), history
            check_equal_on_all_ranks(model, history)
            assert len(history["loss"]) == min(epochs, 3), "a writer can stop training"
            everyone = keras_ddl.all_gather_object(json.dumps(seen, default=float), name="seen")
            assert everyone == [everyone[0]] * len(everyone), everyone
            files, *others = files_by_rank(folder)
            assert others == [[]] * LAST, others
            written = {"rates.csv", "patched.csv", "best.keras"}
            assert written <= set(files) and any("events.out" in name for name in files), files
        if RANK == 0:
            assert len((folder / "rates.csv").read_text().splitlines()) == 1 + 2
        alone = compiled(contextlib.nullcontext())
        fit(alone, [callbacks[0], callbacks[-1]], epochs=1)
        assert (folder / "rates.csv").exists(), "without a Strategy every process writes"


@long
def check_early_stopping_and_plateau_decide_as_in_one_process():
    def callbacks():
        return [
            keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=0.02),
            keras.callbacks.EarlyStopping(patience=2, min_delta=0.02, restore_best_weights=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.95),
        ]

    def program(scope):
        model = compiled(scope)
        history = fit(model, callbacks(), epochs=30)
        assert 3 <= len(history["loss"]) < 30
        return Trained(model, history)

    assert_as_one_process(program, tolerance=1e-12)  # many steps accumulate rounding


@long
def check_one_rank_stops_all_ranks():
    class StopAt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if RANK == LAST and batch == 1:
                self.model.stop_training = True

    # Scripts may pass the callback on one rank only; the other ranks must still learn of the stop.
    for everywhere in (True, False):
        model = compiled()
        history = fit(model, [StopAt()] if everywhere or RANK == LAST else [], epochs=5)
        assert len(history["loss"]) == 1
        assert int(model.optimizer.iterations.numpy()) == 2
        check_equal_on_all_ranks(model, history)


@long
def check_stop_evaluating_and_predicting():
    class Stop(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            if RANK == LAST and batch == 1:
                self.model.stop_evaluating = True

        def on_predict_batch_end(self, batch, logs=None):
            if RANK == LAST and batch == 1:
                self.model.stop_predicting = True

    model = compiled()
    expected = model.evaluate(X[:20], Y[:20], batch_size=10, verbose=0)
    np.testing.assert_allclose(model.evaluate(X, Y, batch_size=10, verbose=0, callbacks=[Stop()]), expected, rtol=1e-6)
    assert model.predict(X, batch_size=10, verbose=0, callbacks=[Stop()]).shape == (20, 2)


@long
def check_backup_inside_an_epoch_resumes_as_in_one_process():
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 5:  # in the second of two epochs of three steps
                raise KeyboardInterrupt

    def program(scope):
        with own_folder() as folder, scope:
            backup = {"backup_dir": folder / "backup", "save_freq": 2}
            here = contextlib.nullcontext()
            with contextlib.suppress(KeyboardInterrupt):
                fit(compiled(here), [keras.callbacks.BackupAndRestore(**backup), Interrupt()], epochs=6)
            model = compiled(here, learning_rate=0.7)
            history = fit(model, [keras.callbacks.BackupAndRestore(**backup)], epochs=6)
        assert len(history["loss"]) == 5
        return Trained(model, history)

    assert_as_one_process(program)


@long
def check_warning_names_learning_rates_that_differ():
    set_precision("float32")
    with recorded_warnings("the same learning rate") as found:
        with STRATEGY.scope():
            model = dense_model()
            model.compile(keras.optimizers.SGD(0.01 * (RANK + 1)), "mse")
        model.fit(X, Y, verbose=0)
        model.optimizer.learning_rate = 0.03 * (RANK + 1)
        model.fit(X, Y, verbose=0)
        model.fit(X, Y, verbose=0)  # the ranks agree by now
    expected = ["0.03 on rank 0, 0.06 on rank 1"] if RANK == 0 else [f"0.01 on rank 0, {0.01 * (RANK + 1):g} on rank "]
    assert len(found) == 1 and expected[0] in found[0], found
    assert abs(float(model.optimizer.learning_rate) - 0.03) < 1e-8
