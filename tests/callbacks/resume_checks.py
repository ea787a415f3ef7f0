"""Runs that stop inside an epoch and go on from a checkpoint in it, on real ranks. Run by test_strategy.py."""

import contextlib
import functools
import threading
import time
from unittest import mock

import numpy as np
import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl import callbacks
from keras_ddl import checkpoint as ckpt
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import CheckpointError
from keras_ddl.strategy import one_per_job
from strategy.common import (
    RANK,
    STRATEGY,
    X,
    Y,
    check_equal_on_all_ranks,
    keras,
    recorded_warnings,
    set_precision,
    shared_folder,
)

SEED = 5
STEPS = 5  # batches of 10 in 43 rows


class Stopped(Exception):
    pass


class StopAtStep(keras.callbacks.Callback):
    """Ends the run as a kill does: no callback hears of it."""

    never_stops_within_epoch = True

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == self.step:
            raise Stopped


class StopAtEpochEnd(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise Stopped


class Rows(keras.utils.PyDataset):
    """Shuffles its rows itself, with NumPy's generator, from which others draw too."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(len(X))

    def __len__(self):
        return STEPS

    def __getitem__(self, number):
        chosen = self.order[10 * number : 10 * number + 10]
        noise = np.random.normal(size=(len(chosen), 1))
        return X[chosen] + 0.1 * noise, Y[chosen]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def rows_of_generator():
    rng = np.random.default_rng(3)
    while True:
        chosen = rng.integers(0, len(X), 10)
        yield X[chosen], Y[chosen]


def slices():
    return tf.data.Dataset.from_tensor_slices((X, Y))


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 10},
    "shuffled": lambda: {"x": slices().shuffle(43, seed=5).batch(10)},
    "shuffled, seeded by the script": lambda: {"x": slices().shuffle(43).map(lambda *row: row).batch(10).prefetch(2)},
    "shuffle inside repeat": lambda: {"x": slices().shuffle(20, seed=5).take(25).repeat(2).batch(10)},
    "on and on": lambda: {"x": slices().shuffle(43, seed=5).repeat().batch(10), "steps_per_epoch": STEPS},
    "unknown length": lambda: {"x": slices().shuffle(43, seed=5).batch(10).filter(lambda *batch: True)},
    "PyDataset": lambda: {"x": Rows(), "shuffle": True},
    "generator": lambda: {"x": rows_of_generator(), "steps_per_epoch": STEPS},
}


@functools.cache
def model_and_beginning():
    """One model for all runs, which begin with its first state: tracing takes longer than training."""
    keras.utils.set_random_seed(SEED)
    set_precision("float32")
    layers = [
        keras.Input((6,)),
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.BatchNormalization(momentum=0.7),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(2),
    ]
    with STRATEGY.scope():
        model = keras.Sequential(layers)
        metrics = ["mae", keras.metrics.RootMeanSquaredError()]
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=metrics)
        model.optimizer.build(model.trainable_variables)
    return model, [v.numpy() for v in state_of(model)]


def state_of(model):
    return [*model.variables, *model.optimizer.variables]


def train(data, *parts, epochs=3, **arguments):
    """A run from the beginning; returns its end: name -> bits of the state of this rank, and its history."""
    model, beginning = model_and_beginning()
    for variable, value in zip(state_of(model), beginning, strict=True):
        variable.assign(value)
    keras.utils.set_random_seed(SEED)
    history = model.fit(**data(), epochs=epochs, verbose=0, callbacks=list(parts), **arguments).history
    check_equal_on_all_ranks(model, history)
    return {v.path: v.numpy().tobytes() for v in state_of(model)}, history


def stop(data, checkpoint, where, *parts, **arguments):
    """A run that `where` ends, a step or a callback, with the last checkpoint on disk."""
    try:
        train(data, StopAtStep(where) if isinstance(where, int) else where, checkpoint, *parts, **arguments)
    except Stopped:
        checkpoint._writer.wait()
        keras_ddl.barrier(name="test/stopped")
    else:
        raise AssertionError(f"the run did not stop: {where}")


def assert_same_end(ours, expected):
    (state, history), (whole, whole_history) = ours, expected
    for name, values in history.items():
        assert values == whole_history[name][-len(values) :], (name, values, whole_history[name])
    assert state == whole, [path for path in whole if state[path] != whole[path]]


def checkpointing(folder, **options):
    options = {"monitor": "loss", "export_base": False, "save_freq": 7, "keep": 9, **options}
    return callbacks.Checkpoint(folder, **options)


def check_resume_inside_an_epoch_is_exact_for_datasets():
    exact_for(["shuffled, seeded by the script"])


@long
def check_resume_inside_an_epoch_is_exact_for_all_other_data():
    exact_for([each for each in DATA if each != "shuffled, seeded by the script"])


def exact_for(kinds):
    for kind in kinds:
        data = DATA[kind]
        with shared_folder() as folder:
            whole = train(data)
            stop(data, checkpointing(folder), 9)
            found = ckpt.latest(folder)
            if kind != "unknown length":  # there Keras counts a step more, at the end of the first epoch
                assert (found.step, found.extra["in_epoch"]) == (7, 7 % STEPS), (kind, found)
            with recorded_warnings("order") as messages:
                ours = train(data, checkpointing(folder, resume=True))
            assert not messages, kind
            assert len(ours[1]["loss"]) == 3 - 7 // STEPS, kind
            try:
                assert_same_end(ours, whole)
            except AssertionError as error:
                raise AssertionError(f"{kind}: {error}") from error


@long
def check_resume_inside_an_epoch_is_exact_for_data_that_rank_0_reads():
    strategy = keras_ddl.Strategy(reader="rank0")
    one_per_job._made.remove(strategy)  # `Strategy()` of other checks is another
    model_and_beginning.cache_clear()
    try:
        with mock.patch.dict(globals(), STRATEGY=strategy):
            exact_for(["arrays", "shuffled", "on and on", "unknown length", "PyDataset", "generator"])
    finally:
        model_and_beginning.cache_clear()


@long
def check_resume_with_other_seeds_or_shorter_data_is_told():
    def seeded(seed, batches=STEPS):
        return lambda: {"x": slices().shuffle(43, seed=seed).batch(10).take(batches)}

    with shared_folder() as folder:
        stop(seeded(5), checkpointing(folder), 9)
        with recorded_warnings("in the same order as the previous run") as messages:
            train(seeded(6), checkpointing(folder, resume=True))
        assert len(messages) == 1, messages
    with shared_folder() as folder:
        stop(seeded(5), checkpointing(folder), 9)
        with pytest.raises(CheckpointError, match="ends before batch 2 of the epoch"):
            train(seeded(5, batches=1), checkpointing(folder, resume=True))


@long
def check_resume_takes_the_shuffles_that_the_ranks_have_agreed_on():
    """Without a seed of the script each run shuffles arrays anew; a resumed one as the run before."""
    states, data = STRATEGY.random_state, DATA["arrays"]
    states._own_seeds.add(SEED)
    try:
        with shared_folder() as folder:
            before = states.shuffles.getstate()
            whole = train(data)
            assert train(data)[0] != whole[0], "the order is that of the run before"
            states.shuffles.setstate(before)
            stop(data, checkpointing(folder), 9)
            states.next_shuffle_seed()  # as another process would
            assert_same_end(train(data, checkpointing(folder, resume=True)), whole)
    finally:
        states._own_seeds.discard(SEED)


@long
def check_resume_at_the_last_batch_of_an_epoch_keeps_its_logs():
    """Where the length of an epoch is not known, a checkpoint may be of its end and not know."""
    data = DATA["unknown length"]
    with shared_folder() as folder:
        whole = train(data)
        stop(data, checkpointing(folder, save_freq=5), StopAtEpochEnd())
        assert ckpt.latest(folder).extra["in_epoch"] == 5
        assert_same_end(train(data, checkpointing(folder, save_freq=5, resume=True)), whole)


@long
def check_resume_restores_what_other_callbacks_remember():
    data = DATA["shuffled"]

    class Play(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = [3.0, 1.0, 2.0, 1.5, 2.5, 2.5, 0.1, 0.1][epoch]

    class Count(keras.callbacks.Callback):
        """A callback of one's own, with a state of one's own."""

        def __init__(self):
            super().__init__()
            self.batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1

        def get_state(self):
            return self.batches

        def set_state(self, state):
            self.batches = state

    def parts():
        return [
            Play(),
            keras.callbacks.ReduceLROnPlateau(patience=2, factor=0.5, min_delta=0),
            keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True),
            Count(),
        ]

    with shared_folder() as folder:
        expected = parts()
        whole = train(data, *expected, epochs=8)
        assert len(whole[1]["loss"]) == 6
        stop(data, checkpointing(folder), 23, *parts(), epochs=8)  # the checkpoint is of step 21, in the fifth epoch
        ours = parts()
        # First in the list: what it keeps is what the others remember all the same.
        assert_same_end(train(data, checkpointing(folder, resume=True), *ours, epochs=8), whole)
        assert ours[3].batches == expected[3].batches == 30
        assert ours[2].best_epoch == expected[2].best_epoch == 1
        again = train(data, checkpointing(folder, resume=True), *parts(), epochs=8)
        assert again[1] == {} and again[0] == whole[0], "a run that a callback has ended stays ended"


@contextlib.contextmanager
def writing(write):
    """Replaces what the thread of rank 0 does."""
    before, ckpt.write = ckpt.write, write
    try:
        yield
    finally:
        ckpt.write = before


@long
def check_a_write_that_fails_is_an_error_at_the_next_step_on_all_ranks():
    begun, failed = [], threading.Event()

    class Count(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            begun.append(batch)

        def on_train_batch_end(self, batch, logs=None):
            if RANK == 0 and len(begun) >= 3:  # the thread began before the third step, and fails at once
                assert failed.wait(60)
                time.sleep(0.3)

    def full(*args, **options):
        failed.set()
        raise OSError(28, "No space left on device")

    with shared_folder() as folder, writing(full):
        with pytest.raises(CheckpointError) as caught:
            train(DATA["arrays"], checkpointing(folder, save_freq=2), Count())
        assert "No space left" in str(caught.value) and (RANK == 0 or "rank 0: " in str(caught.value)), caught.value
        assert begun[:3] == [0, 1, 2] and len(begun) <= 4, begun


@long
def check_a_write_that_fails_at_the_end_is_an_error_of_fit():
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    with shared_folder() as folder, writing(full), pytest.raises(CheckpointError, match="No space left"):
        train(DATA["arrays"], checkpointing(folder, save_freq=100))


@long
def check_one_checkpoint_is_in_flight_and_fit_waits_for_the_last():
    write, busy, most = ckpt.write, [], []

    def slow(*args, **options):
        busy.append(1)
        most.append(len(busy))
        time.sleep(0.05)
        try:
            return write(*args, **options)
        finally:
            busy.pop()

    with shared_folder() as folder, writing(slow):
        train(DATA["arrays"], checkpointing(folder, save_freq=2, keep=99))
        if RANK == 0:
            assert most == [1] * len(most)
            assert [each.step for each in ckpt.list_checkpoints(folder)] == [2, 4, 6, 8, 10, 12, 14, 15]
            assert [each.extra["in_epoch"] for each in ckpt.list_checkpoints(folder)] == [2, 4, 1, 3, 0, 2, 4, 0]


@long
def check_checkpoints_by_the_clock_are_taken_by_all_ranks():
    class Wait(keras.callbacks.Callback):
        never_stops_within_epoch = True

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.03 * (RANK == 0))

    with shared_folder() as folder:
        train(DATA["arrays"], Wait(), checkpointing(folder, save_freq="epoch", save_minutes=0.06 / 60, keep=99))
        keras_ddl.barrier(name="test/trained")
        inside = [each.step for each in ckpt.list_checkpoints(folder) if each.extra["in_epoch"]]
        assert len(inside) >= 3, inside
