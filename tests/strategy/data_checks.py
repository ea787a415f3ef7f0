"""Training and prediction on every kind of data, compared with one process. Run by test_strategy.py."""

import functools

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl import data
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import arrays
from keras_ddl.errors import ConfigError
from strategy.common import (
    FEW,
    RANK,
    SIZE,
    STRATEGY,
    WEIGHTS,
    X,
    Y,
    keras,
    linear_model,
    raises,
    recorded_warnings,
    set_precision,
)
from strategy.oracle import Trained, assert_as_one_process

layers = keras.layers


def check_each_rank_reads_only_its_rows_of_arrays():
    read = []

    def gather(value, positions, **arguments):
        read.extend([positions] if value.shape == FEW[0].shape else [])
        return stock(value, positions, **arguments)

    stock, tf.gather = tf.gather, gather
    try:
        linear_model().fit(*FEW, batch_size=10, verbose=0)
    finally:
        tf.gather = stock
    first, end = data.chunk(10, RANK, SIZE)
    assert read and all(positions.shape.as_list() == [end - first] for positions in read)


@long
def check_arrays_of_every_kind():
    set_precision("float64")
    dense = {"a": X, "b": [X[:, :2], X[:, 2:] > 0]}
    sparse = tf.sparse.from_dense(X * (X > 0.5))

    def program(scope, x, shuffle, **arguments):
        with scope:
            if isinstance(x, dict):
                inputs = {"a": keras.Input((6,)), "b": [keras.Input((2,)), keras.Input((4,))]}
                joined = layers.Concatenate()(
                    [inputs["a"], inputs["b"][0], layers.Lambda(lambda v: keras.ops.cast(v, "float64"))(inputs["b"][1])]
                )
                model = keras.Model(inputs, layers.Dense(2)(joined))
            else:
                inputs = keras.Input((6,), sparse=isinstance(x, tf.SparseTensor))
                model = keras.Model(inputs, layers.Dense(2)(inputs))
            model.compile(keras.optimizers.SGD(0.05), "mse", weighted_metrics=["mae"])
        history = model.fit(x, Y, batch_size=10, epochs=2, shuffle=shuffle, verbose=0, **arguments).history
        return Trained(model, {**history, "predicted": model.predict(x, batch_size=9, verbose=0)})

    for x, shuffle, arguments in (
        (dense, True, {"sample_weight": WEIGHTS, "validation_split": 0.3}),
        (X, "batch", {"validation_data": (X, Y, WEIGHTS), "validation_batch_size": 7}),
        (tf.constant(X), True, {"steps_per_epoch": 3}),
        (sparse, True, {}),
    ):
        assert_as_one_process(functools.partial(program, x=x, shuffle=shuffle, **arguments))


def batches_per_rank(known):
    """Makes batches per rank, with ragged and sparse components. `known`: whether the number of batches is known."""
    lengths = [3, 1, 2]

    def make(context):
        ragged = tf.ragged.constant([[i] * (i % 3) for i in range(6)], dtype="float64")
        dataset = tf.data.Dataset.from_tensor_slices((X[:6], {"ragged": ragged, "sparse": tf.sparse.from_dense(Y[:6])}))
        dataset = dataset.batch(2).take(lengths[context.input_pipeline_id])
        return dataset if known else dataset.filter(lambda *batch: True)

    return STRATEGY.distribute_datasets_from_function(make), lengths[:SIZE]


@long
def check_per_rank_datasets_in_a_tf_function():
    for known in (True, False):
        dataset, lengths = batches_per_rank(known)

        @tf.function
        def count(iterator, steps):
            rows = tf.constant(0)
            for _ in tf.range(steps):
                x, _ = iterator.get_next()
                rows += tf.shape(x)[0]
            return rows

        assert int(count(iter(dataset), 3)) == 2 * lengths[RANK]
        raises(tf.errors.OutOfRangeError, "", lambda: count(iter(dataset), 4))  # noqa: B023

        @tf.function
        def total():
            rows = tf.constant(0)
            for x, parts in dataset:  # noqa: B023
                rows += tf.shape(x)[0] + tf.cast(parts["ragged"].nrows(), tf.int32)
            return rows

        assert int(total()) == 4 * lengths[RANK]
        assert len(list(dataset.repeat(2))) == 6
        assert len(list(dataset.prefetch(2).map(lambda x, parts: (x, parts["sparse"])))) == 3
        # Every rank may break out of the loop early.
        for number, _ in enumerate(dataset):
            if number == 1:
                break


@long
def check_train_on_batch_warns_of_equal_rows():
    model = linear_model()
    arrays._batches_compared = False
    for rows, expected in (((slice(RANK, RANK + 4)), 0), (slice(0, 4), 1), (slice(0, 4), 0)):
        if expected:
            arrays._batches_compared = False
        with recorded_warnings("take different rows on each rank") as messages:
            model.train_on_batch(FEW[0][rows], FEW[1][rows])
        assert len(messages) == expected


@long
def check_predictions_gathered_on_rank_0_only():
    strategy = keras_ddl.Strategy(gather_predictions="rank0")
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    expected = FEW[0] @ model.get_weights()[0]
    found = model.predict(FEW[0], batch_size=10, verbose=0)
    if RANK:
        rows = [np.arange(40)[b : b + 10][slice(*data.chunk(10, RANK, SIZE))] for b in range(0, 40, 10)]
        expected = expected[np.concatenate(rows)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    raises(ConfigError, "'all' or 'rank0'", lambda: keras_ddl.Strategy(gather_predictions="some"))
