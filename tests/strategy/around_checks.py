"""What a script does around training: saving, callbacks, learning rates, guards. Run by test_strategy.py."""

import contextlib
import csv
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl import callbacks
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import DriftError
from keras_ddl.strategy import drift
from strategy.common import (
    LABELS,
    RANK,
    SIZE,
    STRATEGY,
    X,
    Y,
    check_equal_on_all_ranks,
    dense_model,
    keras,
    set_precision,
)
from strategy.oracle import Trained, differences

LAST = SIZE - 1


def everyone(value):
    return keras_ddl.all_gather_object(value, name="around/everyone")


@contextlib.contextmanager
def shared_folder():
    """One folder for all ranks, which must not be left before all are done with it."""
    folder = keras_ddl.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None, name="around/folder")
    yield Path(folder)
    keras_ddl.barrier(name="around/folder_done")
    if RANK == 0:
        shutil.rmtree(folder)


def trained(build=dense_model, **arguments):
    set_precision("float32")
    with STRATEGY.scope():
        model = build()
        model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(X[:20], Y[:20], **{"batch_size": 10, "verbose": 0, **arguments})
    return model


# ---- saving ----------------------------------------------------------------------------------------------------------

SAVES = {
    "model.keras": lambda model, path: model.save(path),
    "function.keras": lambda model, path: keras.models.save_model(model, path, overwrite=False),
    "legacy.h5": lambda model, path: model.save(path),
    "model.weights.h5": lambda model, path: model.save_weights(path),
    "function.weights.h5": lambda model, path: keras.saving.save_weights(model, path),
    "sharded.weights.json": lambda model, path: model.save_weights(path, max_shard_size=3e-7),
    "folder": lambda model, path: model.save(path, zipped=False),
    "new/exported": lambda model, path: model.export(path, verbose=False),
}


def files_of(folder):
    return {str(p.relative_to(folder)): p.stat() for p in sorted(folder.rglob("*")) if p.is_file()}


def check_what_all_ranks_save_is_written_once_and_is_there_on_all():
    model = trained()
    with shared_folder() as folder:
        for name, save in SAVES.items():
            if RANK == 0:
                time.sleep(0.1)  # whoever comes first writes
            save(model, folder / name)
            found = {k: (s.st_ino, s.st_mtime_ns) for k, s in files_of(folder).items()}
            of_all = everyone(found)
            later = {k: (s.st_ino, s.st_mtime_ns) for k, s in files_of(folder).items()}
            keras_ddl.barrier()  # the next save is not to be among these files
            assert of_all == [later] * SIZE, f"{name}: whole when the call returns, and not written again"
        assert not any(path.name.startswith(".") for path in folder.iterdir()), "nothing is left beside them"
        assert {"sharded_00000.weights.h5", "new/exported/saved_model.pb", "folder/config.json"} <= set(later)
        expected = model.predict_on_batch(X[:4])
        for name in ("model.keras", "function.keras", "legacy.h5", "folder"):
            loaded = keras.models.load_model(folder / name, compile=False)  # Keras cannot read the "mse" of its .h5
            np.testing.assert_allclose(loaded(X[:4]), expected, rtol=0, atol=1e-6)
        for name in ("model.weights.h5", "function.weights.h5", "sharded.weights.json"):
            other = dense_model()
            other.load_weights(folder / name)
            np.testing.assert_allclose(other(X[:4]), expected, rtol=0, atol=1e-6)
        exported = tf.saved_model.load(str(folder / "new/exported"))
        np.testing.assert_allclose(exported.serve(tf.constant(X[:4], tf.float32)), expected, rtol=0, atol=1e-6)


def check_one_rank_may_save_alone_and_each_to_its_own_path():
    model = trained()
    with shared_folder() as folder:
        for rank in range(SIZE):
            if rank == RANK:
                for _ in range(2):
                    model.save(folder / f"of_{rank}.keras")
                    (folder / f"of_{rank}.keras").unlink()
                model.save(folder / f"of_{rank}.keras")
        model.save_weights(folder / f"{RANK}.weights.h5")
        keras_ddl.barrier(name="around/own")
        assert set(files_of(folder)) == {n for r in range(SIZE) for n in (f"of_{r}.keras", f"{r}.weights.h5")}


def check_saving_again_replaces_the_file_also_when_only_some_ranks_had_saved():
    model = trained()
    with shared_folder() as folder:
        path = folder / "model.keras"
        if RANK == LAST:
            model.save(path)
        keras_ddl.barrier(name="around/first")
        for value in (1.0, 2.0, 1.0):
            model.layers[-1].bias.assign([value, value])
            model.save(path)
            np.testing.assert_array_equal(keras.models.load_model(path).layers[-1].bias.numpy(), [value, value])
            keras_ddl.barrier(name="around/again")
        if RANK == 0:
            model.layers[-1].bias.assign([3.0, 3.0])
            model.save(path)
        keras_ddl.barrier(name="around/alone")
        np.testing.assert_array_equal(keras.models.load_model(path).layers[-1].bias.numpy(), [3.0, 3.0])


def check_a_save_that_fails_leaves_the_earlier_file_and_is_an_error_on_all_ranks():
    class Fails(keras.layers.Dense):
        fails = False

        def save_own_variables(self, store):
            if self.fails:
                raise OSError(28, "No space left on device")
            super().save_own_variables(store)

    model = trained(lambda: keras.Sequential([keras.Input((6,)), Fails(2)]))
    with shared_folder() as folder:
        path = folder / "model.weights.h5"
        model.save_weights(path)
        before = files_of(folder)["model.weights.h5"].st_mtime_ns
        model.layers[0].fails = True
        model.layers[0].bias.assign([5.0, 5.0])
        with pytest.raises(OSError, match="No space left"):
            model.save_weights(path)
        keras_ddl.barrier(name="around/failed")
        assert {k: s.st_mtime_ns for k, s in files_of(folder).items()} == {"model.weights.h5": before}
        with pytest.raises(FileNotFoundError, match=r"missing/model.keras") as caught:
            model.save(folder / "missing" / "model.keras")
        assert ".tmp" not in str(caught.value)


def with_statistics():
    return keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])


def check_what_is_saved_within_an_epoch_holds_the_statistics_of_all_ranks():
    with shared_folder() as folder:
        path, seen = folder / "{batch}.weights.h5", []

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append([w.copy() for w in self.model.get_weights()])

        saver = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)
        parts = [saver, Look()] if RANK == 0 else [Look()]  # as scripts in Horovod's manner give it
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="A model saved within an epoch.*")
            trained(with_statistics, batch_size=5, callbacks=parts)
        names = sorted(files_of(folder))
        assert names == ["2.weights.h5", "4.weights.h5"], names
        saved = with_statistics()
        saved.load_weights(folder / "2.weights.h5")
        of_all = everyone(seen[1])
        for mine, theirs in zip(saved.get_weights(), of_all[LAST]):
            np.testing.assert_array_equal(mine, theirs)
        assert not np.array_equal(*(weights[2] for weights in everyone(seen[0])[:2])), "they had differed before"


def check_saving_local_statistics_by_hand_is_warned_of():
    class Save(keras.callbacks.Callback):
        def __init__(self, path):
            super().__init__()
            self.path = path

        def on_train_batch_end(self, batch, logs=None):
            if RANK == 0:
                self.model.save_weights(self.path)

    with shared_folder() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(with_statistics, callbacks=[Save(folder / "a.weights.h5")])
        trained(callbacks=[Save(folder / "b.weights.h5")])
        trained(with_statistics).save_weights(folder / "c.weights.h5")
    found = [str(w.message) for w in caught if "saved within an epoch" in str(w.message)]
    assert len(found) == (RANK == 0), found
    assert all("batch_normalization" in text and "(rank 0)" in text for text in found)


# ---- Keras's callbacks -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_folder():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


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
    found = [str(w.message) for w in caught if "one learning rate" in str(w.message)]
    expected = ["0.03 on rank 0, 0.06 on rank 1"] if RANK == 0 else [f"0.01 on rank 0, {0.01 * (RANK + 1):g} on rank "]
    assert len(found) == 1 and expected[0] in found[0], found
    assert abs(float(model.optimizer.learning_rate) - 0.03) < 1e-8


# ---- DivergenceGuard -------------------------------------------------------------------------------------------------


def regression(learning_rate, momentum=0.0):
    """A problem whose steps diverge from a rate of 2 / (largest eigenvalue) on: some 0.7."""
    set_precision("float64")
    keras.utils.set_random_seed(5)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(learning_rate, momentum), "mse", metrics=["mae"])
    return model


TARGETS = X @ np.arange(1.0, 7.0)[:, None]


def fit_guarded(model, guard, *parts, **arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        defaults = {"batch_size": 10, "epochs": 12, "shuffle": False, "verbose": 0}
        history = model.fit(X[:40], TARGETS[:40], callbacks=[*parts, guard], **{**defaults, **arguments}).history
    said = [str(w.message) for w in caught if "DivergenceGuard" in str(w.message)]
    messages = everyone((guard.message, said))
    assert messages == [messages[0]] * SIZE, messages
    check_equal_on_all_ranks(model, history)
    return history, said


def check_divergence_stops_all_ranks_with_a_message():
    for validation in ({}, {"validation_data": (X, TARGETS)}):
        model = regression(2.5)
        history, said = fit_guarded(model, callbacks.DivergenceGuard(window=2), **validation)
        assert len(history["loss"]) < 3 and model.optimizer.iterations < 12, history
        assert len(said) == 1 and "loss is" in said[0] and "the lowest before was" in said[0], said
        assert "Training stops. Lower the learning rate" in said[0], said
    # What TerminateOnNaN of one rank sees: a row that only the last rank has.
    x = X[:40].copy()
    x[39] = np.nan
    model = regression(0.01)
    guard = callbacks.DivergenceGuard(window=3, rise=None)
    with pytest.warns(UserWarning, match="DivergenceGuard: loss is nan in the window that ends with step 4"):
        model.fit(x, TARGETS[:40], batch_size=10, epochs=9, shuffle=False, verbose=0, callbacks=[guard])
    assert int(model.optimizer.iterations) == 4


@contextlib.contextmanager
def drift_check(share):
    """With a share of a million times the training time every step is checked, however slow the machine is."""
    with mock.patch.object(STRATEGY, "drift_check_share", share), mock.patch.object(drift, "_FIRST_INTERVAL", 1):
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
    assert f"layer 'first', two/first/kernel on rank {LAST} is not that on rank 0; on rank {LAST}: 1 of 240" in text, (
        text
    )
    assert "elements, the first [0, 1] " in text and "more of" not in text, text
    assert "after step 9 (at step 8 all were equal), " in text, text
    # At the default share at the end of the epoch at the latest.
    text = drift_error(two_layers(), AtBatch(lambda m: flip_a_bit(m.get_layer("second").bias, element=1)))
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
    assert f"sgd/learning_rate on rank {LAST} is not that on rank 0; on rank {LAST}: 1 of 1 elements" in text, text
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
