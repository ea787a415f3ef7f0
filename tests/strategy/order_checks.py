"""Ranks that read different batches get an error before the weights change. Run by test_strategy.py."""

import re
import time

import numpy as np
import pytest

import keras_ddl
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import arrays
from keras_ddl.errors import ConfigError, RankMismatchError
from strategy.common import FEW, RANK, SIZE, STRATEGY, keras, linear_model, raises, recorded_warnings

layers = keras.layers
OTHER = np.random.default_rng(RANK)  # the bug under test: every rank has its own state


def assert_fit_raises(message, x, *, error=RankMismatchError, compile=None, **arguments):
    """Checks that fit raises on every rank before the weights change, and that a later fit works."""
    model = linear_model(**(compile or {}))
    before = model.get_weights()
    raises(error, message, lambda: model.fit(x, verbose=0, **arguments))
    assert all(np.array_equal(one, other) for one, other in zip(before, model.get_weights()))
    assert keras_ddl.all_gather_object(RANK) == list(range(SIZE))
    model.fit(*FEW, batch_size=10, verbose=0)


OTHERS = re.escape(str([*range(1, SIZE)]).replace(",", ""))
FIRST_BATCH = rf"All ranks must read the same batches.*batch 0 of pass 1 .* on rank\(s\) {OTHERS} from.*\(in x, y\)"


def rows_dataset(order=None):
    x, y = FEW if order is None else (FEW[0][order], FEW[1][order])
    return tf.data.Dataset.from_tensor_slices((x, y))


def check_numpy_permutation_in_tf_data():
    dataset = rows_dataset(OTHER.permutation(40)).batch(10)
    assert_fit_raises(FIRST_BATCH, dataset)
    assert_fit_raises(FIRST_BATCH, dataset.repeat(), steps_per_epoch=3, compile={"steps_per_execution": 3})
    assert_fit_raises(FIRST_BATCH, dataset, compile={"run_eagerly": True})


def check_numpy_permutation_of_arrays():
    order = OTHER.permutation(40)
    assert_fit_raises(r"in the same order.*array\(s\) \[0, 1\] of 2", FEW[0][order], y=FEW[1][order], batch_size=10)
    # Equal first and last rows do not hide the difference.
    order[[0, -1]] = 0, 1
    assert_fit_raises(r"in the same order", FEW[0][order], y=FEW[1][order], batch_size=10)
    model = linear_model()
    with recorded_warnings("does no harm if the differing arrays are random noise") as messages:
        model.fit(FEW[0] + OTHER.normal(size=(40, 6)), FEW[1], batch_size=10, verbose=0)
    assert bool(messages) == (RANK == 0)


def check_nondeterministic_pipelines_are_refused():
    dataset = rows_dataset().map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False)
    assert_fit_raises(r"deterministic=False in ParallelMapDataset", dataset.batch(10), error=ConfigError)

    def read(i):
        def wait(x, y, j):
            time.sleep(0.05 * (j % SIZE == RANK))  # each rank reads another file slowly
            return x, y

        rows = rows_dataset().skip(i * 10).take(10)
        rows = rows.map(lambda x, y: tf.numpy_function(wait, [x, y, i], [x.dtype, y.dtype]))
        return rows.map(lambda x, y: (tf.ensure_shape(x, [6]), tf.ensure_shape(y, [2])))

    interleaved = tf.data.Dataset.range(4).interleave(read, cycle_length=4, num_parallel_calls=4, deterministic=False)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 4  # otherwise a rank with few cores reads one file at a time
    assert_fit_raises("All ranks must read the same batches", interleaved.batch(10).with_options(options))


def check_difference_that_begins_late():
    def batches(rank):
        for i in range(50):
            rows = np.arange(10) + (20 if i == 41 and rank else i % 30)
            yield FEW[0][rows], FEW[1][rows]

    signature = (tf.TensorSpec([None, 6]), tf.TensorSpec([None, 2]))
    late = tf.data.Dataset.from_generator(lambda: batches(RANK), output_signature=signature)
    model = linear_model()
    model.fit(late, verbose=0)  # batch 41 is not compared
    late = late.skip(1)
    raises(RankMismatchError, "batch 40 of pass 1", lambda: model.fit(late, verbose=0))


def check_evaluate_predict_and_loops_compare_too():
    model = linear_model()
    dataset = rows_dataset(OTHER.permutation(40)).batch(10)
    for function in (model.evaluate, model.predict):
        raises(RankMismatchError, FIRST_BATCH, lambda: function(dataset, verbose=0))  # noqa: B023
    # Another thread prefetches batches.
    shared = STRATEGY.experimental_distribute_dataset(dataset).prefetch(2)
    with pytest.raises(RankMismatchError, match=FIRST_BATCH):
        for x, y in shared:
            STRATEGY.run(lambda x, y: tf.reduce_sum(x), args=(x, y))


def check_augmentation_of_equal_rows_is_a_warning():
    def batches():
        for i in range(4):
            rows = slice(10 * i, 10 * i + 10)
            yield FEW[0][rows] + OTHER.normal(size=(10, 6)).astype("float32"), FEW[1][rows]

    model = linear_model()
    with recorded_warnings("differs between ranks in x, while") as messages:
        model.fit(batches(), verbose=0)
    assert bool(messages) == (RANK == 0)


def check_arrays_that_ranks_shuffle_differently():
    original = arrays._shuffled_whole

    def reversed_on_one_rank(*arguments):
        *others, shuffle = arguments
        return original(*others, (lambda positions: shuffle(positions)[::-1]) if RANK == 1 else shuffle)

    arrays._shuffled_whole = reversed_on_one_rank
    try:
        raises(
            RankMismatchError, "must read the same batches", lambda: linear_model().fit(*FEW, batch_size=8, verbose=0)
        )
    finally:
        arrays._shuffled_whole = original
