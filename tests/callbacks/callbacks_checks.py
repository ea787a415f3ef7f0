"""Callbacks of keras_ddl and Keras on real ranks. Run by test_strategy.py."""

import numpy as np
import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl import callbacks
from keras_ddl import checkpoint as ckpt
from keras_ddl.compat.models import accumulators_of
from keras_ddl.errors import CheckpointError, RankMismatchError
from keras_ddl.strategy.agreement.training_state import agree_on_local_state
from strategy.common import LAST, RANK, SIZE, STRATEGY, X, Y, everyone, keras, recorded_warnings, shared_folder
from strategy.oracle import check_equal_to_one_process


class Watch(keras.callbacks.Callback):
    """Records the learning rate of every step, and the weights before the first."""

    def __init__(self):
        super().__init__()
        self.rates, self.first = [], None

    def on_train_batch_begin(self, batch, logs=None):
        if self.first is None and self.model.built:
            self.first = [w.copy() for w in self.model.get_weights()]
            self.rng = [v.numpy().tolist() for v in self.model.variables if v.name == "seed_generator_state"]
        self.rates.append(float(self.model.optimizer.learning_rate))


def small_model(optimizer=None, dropout=0.0, **compiled):
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dropout(dropout), keras.layers.Dense(2)], name="small"
    )
    model.compile(optimizer or keras.optimizers.SGD(0.05), "mse", metrics=["mae"], **compiled)
    return model


def fit(model, *parts, **arguments):
    defaults = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": list(parts)}
    return model.fit(X, Y, **{**defaults, **arguments}).history


@long
def check_broadcast_copies_the_roots_variables_in_plain_keras():
    for root in {0, LAST}:
        keras.utils.set_random_seed(10)  # dropout must differ despite equal seeds
        model = small_model(keras.optimizers.SGD(0.01 * (RANK + 1), momentum=0.9), dropout=0.5)
        for variable in model.trainable_variables:
            variable.assign(variable + RANK)
        mine = model.get_weights()
        watch = Watch()
        fit(model, callbacks.BroadcastVariables(root), watch, epochs=1)
        for received, sent in zip(watch.first, everyone(mine)[root]):
            if sent.dtype == np.float32:
                np.testing.assert_array_equal(received, sent)
        assert watch.rates[0] == np.float32(0.01 * (root + 1))
        streams = [repr(stream) for stream in everyone(watch.rng)]
        assert len(set(streams)) == SIZE, streams


class Unbuilt(keras.Model):
    def __init__(self):
        super().__init__(name="unbuilt")
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs)


@long
def check_broadcast_waits_for_a_model_built_by_its_first_batch():
    for rows in (40, 10):  # several batches, or a single one
        keras.utils.set_random_seed(RANK)
        model = Unbuilt()
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.fit(X[:rows], Y[:rows], batch_size=10, verbose=0, callbacks=[callbacks.BroadcastVariables()])
        assert len({weights[0].tobytes() for weights in everyone(model.get_weights())}) == 1


def check_broadcast_refuses_models_that_differ():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2 + 3 * (RANK == LAST)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(RankMismatchError, match=r"\[6, [25]\].*\[6, [25]\]"):
        fit(model, callbacks.BroadcastVariables())


@long
def check_broadcast_refuses_models_that_are_not_all_built():
    model = Unbuilt()
    model.compile("sgd", "mse")
    if RANK == LAST:
        model(X[:1])
    with pytest.raises(RankMismatchError, match="Either all ranks or no rank must have built the model"):
        fit(model, callbacks.BroadcastVariables())


class Play(keras.callbacks.Callback):
    def __init__(self, **values):
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        logs.clear()
        logs.update({name: value[epoch] for name, value in self.values.items()})


def check_average_logs_means_over_ranks_and_passes_nan():
    play = Play(a=[float(RANK), 1e300], b=[2.5, float("nan") if RANK == LAST else 1.0], text=["x", "y"])
    history = fit(small_model(), play, callbacks.AverageLogs())
    mean = (SIZE - 1) / 2
    assert history["a"] == [mean, 1e300]
    assert history["b"][0] == 2.5 and np.isnan(history["b"][1])
    assert history["text"] == ["x", "y"]


@long
def check_average_logs_skips_keys_missing_on_a_rank():
    values = {"a": [float(RANK)] * 2}
    if RANK == LAST:
        values["own"] = [7.0, 8.0]
    with recorded_warnings("AverageLogs") as messages:
        history = fit(small_model(), Play(**values), callbacks.AverageLogs())
    assert history["a"] == [(SIZE - 1) / 2] * 2
    assert history.get("own") == ([7.0, 8.0] if RANK == LAST else None)
    expected = f"'own' missing on rank(s) {list(range(SIZE - 1))}"
    assert len(messages) == (RANK == 0) and all(expected in text for text in messages), messages


@long
def check_warmup_trains_as_one_process_with_that_rate():
    def parts():
        warmup = callbacks.LearningRateWarmup(warmup_epochs=2, scaling=float(SIZE))
        return [warmup, callbacks.LearningRateSchedule(0.1, start_epoch=3)]

    sgd = lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True)  # noqa: E731
    keras.utils.set_random_seed(1)  # earlier checks gave the ranks different seeds and
    keras.utils.clear_session()  # different numbers in layer names
    check_equal_to_one_process(sgd, fit={"epochs": 4, "callbacks": parts})


def resumable(seed):
    keras.utils.set_random_seed(seed)
    with STRATEGY.scope():
        return small_model(keras.optimizers.SGD(0.02, momentum=0.9), dropout=0.3)


def check_accumulated_gradients_of_plain_keras_are_summed_once_for_a_checkpoint():
    keras.utils.set_random_seed(1)
    model = small_model(keras.optimizers.SGD(0.05, gradient_accumulation_steps=3))
    model.train_on_batch(X[RANK : RANK + 4], Y[RANK : RANK + 4])
    own = [each.numpy() for each in accumulators_of(model)]
    sums = [sum(of_all) for of_all in zip(*everyone(own))]
    agree_on_local_state(model)
    assert len(own) == 4
    for found, total in zip(accumulators_of(model), sums):
        np.testing.assert_allclose(found.numpy(), total if RANK == 0 else 0 * total, rtol=1e-6)


def check_files_that_rank_0_cannot_read_or_write_raise_on_all_ranks():
    with shared_folder() as folder:
        fit(resumable(5), callbacks.Checkpoint(folder / "a", export_base=False, monitor="loss"), epochs=1)
        if RANK == 0:
            (ckpt.latest(folder / "a").path / "weights.index").unlink()
            (folder / "b").write_text("")
        keras_ddl.barrier(name="test/damaged")
        for name, resume, text in (("a", True, "weights.index is missing"), ("b", False, "file is in the way")):
            with pytest.raises(CheckpointError) as caught:
                fit(resumable(5), callbacks.Checkpoint(folder / name, resume=resume, monitor="loss"), epochs=1)
            assert text in str(caught.value) and (RANK == 0 or "rank 0: " in str(caught.value)), caught.value
