"""Data that only rank 0 reads: all ranks together train on it as one process does. Run by test_strategy.py."""

import contextlib
from unittest import mock

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl.communicator.transports import membership
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.strategy import one_per_job
from strategy.common import RANK, SIZE, X, Y, assert_same_weights, keras, raises, set_precision

layers = keras.layers
OTHER = np.random.default_rng()  # every process draws different numbers


class Recorded:
    """Yields random batches and records them, so that one process can train on them afterwards."""

    def __init__(self, batches=4, rows=10, last=3, fails_at=None):
        self.batches, self.rows, self.last, self.fails_at = batches, rows, last, fails_at
        self.read = []

    def __call__(self):
        for number in range(self.batches):
            if number == self.fails_at:
                raise ValueError(f"no batch {number}")
            x = OTHER.normal(size=(self.last if number == self.batches - 1 else self.rows, 6))
            self.read.append(({"a": x[:, :2], "b": (x[:, 2:],)}, x[:, :2] * 0.5 + 1))
            yield self.read[-1]

    def dataset(self):
        def spec(columns):
            return tf.TensorSpec([None, columns], tf.float64)

        return tf.data.Dataset.from_generator(self, output_signature=({"a": spec(2), "b": (spec(4),)}, spec(2)))

    def rank_0_batches(self):
        """Returns the batches that rank 0 read, after checking that no other rank read any."""
        assert RANK == 0 or not self.read
        return keras_ddl.broadcast_object(self.read)


def model_of_parts():
    inputs = {"a": keras.Input((2,)), "b": (keras.Input((4,)),)}
    hidden = layers.Dense(4, activation="tanh")(layers.Concatenate()([inputs["a"], inputs["b"][0]]))
    return keras.Model(inputs, layers.Dense(2)(hidden))


def models(build=model_of_parts, **compiled):
    """Returns a one-process model and one whose Strategy reads on rank 0, with equal weights."""
    set_precision("float64")
    made = []
    for scope in (contextlib.nullcontext(), reading_on_rank_0().scope()):
        with scope:
            made.append(build())
            made[-1].compile(**{"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", **compiled})
    made[1].set_weights(keras_ddl.broadcast_object(made[0].get_weights()))
    made[0].set_weights(made[1].get_weights())
    return made


def reading_on_rank_0():
    strategy = keras_ddl.Strategy(reader="rank0")
    one_per_job._made.remove(strategy)  # other checks must not get this one from `Strategy()`
    return strategy


def replay(batches):
    """Yields recorded batches for one process."""
    yield from batches


@long
def check_random_data_that_only_rank_0_reads():
    alone, shared = models(metrics=["mae"])
    data, validation = Recorded(), Recorded(2, 5, 2)
    fitted = shared.fit(data.dataset(), epochs=2, validation_data=validation.dataset(), verbose=0).history
    read, validated = data.rank_0_batches(), validation.rank_0_batches()
    assert len(read) == 8 and len(validated) == 4
    for epoch in range(2):
        now = alone.fit(replay(read[4 * epoch : 4 * epoch + 4]), steps_per_epoch=4, verbose=0).history
        logs = alone.evaluate(replay(validated[2 * epoch : 2 * epoch + 2]), steps=2, verbose=0, return_dict=True)
        for name, value in (now | {f"val_{name}": [value] for name, value in logs.items()}).items():
            np.testing.assert_allclose(fitted[name][epoch], value[0], rtol=1e-12)
    assert_same_weights(alone, shared)

    data = Recorded(3, 7, 2)
    predicted = shared.predict(data.dataset(), verbose=0)
    expected = [alone.predict_on_batch(x) for x, _ in data.rank_0_batches()]
    np.testing.assert_allclose(predicted, np.concatenate(expected), rtol=1e-12)


def check_generator_error_is_raised_on_every_rank():
    _, shared = models()
    data = Recorded(fails_at=2)
    raises(tf.errors.InvalidArgumentError, "ValueError: no batch 2", lambda: shared.fit(data.dataset(), verbose=0))
    assert keras_ddl.all_gather_object(RANK) == list(range(SIZE))
    data = Recorded()
    assert len(shared.fit(data.dataset(), verbose=0).history["loss"]) == 1  # the job continues


@long
def check_arrays_and_py_datasets_of_rank_0():
    def small():
        return keras.Sequential([keras.Input((6,)), layers.Dense(2)])

    class Batches(keras.utils.PyDataset):
        read = 0

        def __len__(self):
            return 5 if RANK == 0 else 3  # only rank 0's length matters

        def __getitem__(self, index):
            Batches.read += 1
            return X[9 * index : 9 * index + 9], Y[9 * index : 9 * index + 9]

    alone, shared = models(small)
    for data in (Batches(), (X + (RANK != 0), Y - RANK)):
        x, y = (data, None) if isinstance(data, Batches) else data
        arguments = {"epochs": 2, "verbose": 0, "shuffle": False, **({} if y is None else {"batch_size": 10})}
        shared.fit(x, y, **arguments)
        if RANK == 0:
            alone.fit(x, y, **arguments)
        alone.set_weights(keras_ddl.broadcast_object(alone.get_weights()))
        assert_same_weights(alone, shared)
        assert RANK == 0 or not Batches.read

    def shuffled():
        return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(43, seed=5).batch(10)

    shared.fit(shuffled(), epochs=3, verbose=0)
    if RANK == 0:
        alone.fit(shuffled(), epochs=3, verbose=0)
    alone.set_weights(keras_ddl.broadcast_object(alone.get_weights()))
    assert_same_weights(alone, shared)
    orders = [shared.fit(X, Y, batch_size=10, epochs=2, verbose=0).history["loss"] for _ in range(2)]
    assert keras_ddl.all_gather_object(orders) == [orders] * SIZE  # shuffled alike, with equal seeds
    np.testing.assert_allclose(shared.evaluate(X, Y, verbose=0), np.mean((shared.predict(X, verbose=0) - Y) ** 2))


@long
def check_per_rank_dataset_is_refused():
    _, shared = models()
    own = keras_ddl.data.per_rank_dataset(lambda _: Recorded().dataset(), RANK, SIZE)
    raises(ConfigError, "only rank 0 reads.*from_files", lambda: shared.fit(own, verbose=0))


def check_reader_must_be_known():
    raises(ConfigError, "reader must be 'all' or 'rank0'", lambda: keras_ddl.Strategy(reader="first"))
    with mock.patch.object(membership, "can_ask", lambda: True):
        raises(
            ConfigError,
            "Received: -np MIN:MAX.*Give a fixed number of ranks",
            lambda: keras_ddl.Strategy(reader="rank0"),
        )
