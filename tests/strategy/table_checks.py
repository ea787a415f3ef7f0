"""Losses, tables, optimizers and workers as programs have them. Run by test_strategy.py; see oracle.py."""

import multiprocessing
import os

import numpy as np
import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import STRATEGY, X, Y, keras, small_model
from strategy.oracle import case, fit

layers, ops = keras.layers, keras.ops


@case()
def check_ratio_over_the_batch_as_a_loss(scope):
    with scope:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2, activation="sigmoid")])
        model.compile(keras.optimizers.SGD(0.5), keras.losses.Dice())
    return fit(model, X, (Y > 0).astype("float64"))


@long
@case()
def check_one_added_loss_for_each_row(scope):
    class Endpoint(layers.Layer):
        def call(self, x):
            self.add_loss(1e-2 * ops.sum(ops.square(x), axis=1))
            return x

    with scope:
        inputs = keras.Input((6,))
        model = keras.Model(inputs, Endpoint()(layers.Dense(2)(inputs)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return fit(model)


class Positions(layers.Layer):
    """Adds a row of a table to each of the positions 0..5, whose number it takes from the batch's shape."""

    def build(self, shape):
        self.table = layers.Embedding(6, 4)
        self.table.build(None)

    def call(self, x):
        return x[..., None] * self.table(ops.arange(ops.shape(x)[1]))


def train_table(scope, layer, optimizer, x=X, y=Y):
    with scope:
        inputs = keras.Input(x.shape[1:], dtype=x.dtype)
        model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(layer()(inputs))))
        model.compile(optimizer(), "mse")
    return fit(model, x, y)


@long
@case()
def check_table_of_positions_under_adam(scope):
    return train_table(scope, Positions, lambda: keras.optimizers.Adam(0.01))


TOKENS = (np.abs(X) * 3).astype("int32") % 7


class TokensAndPositions(layers.Layer):
    """One table, looked up by tokens of the rows, by positions, and by the tokens that occur, each once."""

    def build(self, shape):
        self.table = layers.Embedding(7, 4)
        self.table.build(None)

    def call(self, tokens):
        unique, position = tf.unique(tf.reshape(tokens, [-1]))
        once = tf.reshape(tf.gather(self.table(unique), position), tf.concat([tf.shape(tokens), [4]], 0))
        return self.table(tokens) + self.table(ops.arange(ops.shape(tokens)[1])) * once


@long
@case()
def check_table_used_in_three_ways_under_adam(scope):
    return train_table(scope, TokensAndPositions, lambda: keras.optimizers.Adam(0.01), TOKENS)


@long
def check_tables_as_dense_gradients():
    """What one process computes does not depend on how gradients of tables travel."""

    class OneHot(TokensAndPositions):
        def call(self, tokens):
            positions = ops.one_hot(ops.arange(ops.shape(tokens)[1]), 7, dtype="float64")
            table = ops.convert_to_tensor(self.table.embeddings)
            rows = ops.matmul(ops.one_hot(tokens, 7, dtype="float64"), table)
            return rows + ops.matmul(positions, table) * rows

    weights = []
    for as_dense, layer in ((True, TokensAndPositions), (False, TokensAndPositions), ("auto", OneHot)):
        keras.utils.set_random_seed(7)
        STRATEGY.extended.sparse_as_dense = as_dense
        try:
            trained = train_table(STRATEGY.scope(), layer, lambda: keras.optimizers.Adam(0.01), TOKENS)
        finally:
            STRATEGY.extended.sparse_as_dense = "auto"
        weights.append(trained.model.get_weights()[0])
    np.testing.assert_allclose(weights[0], weights[1], rtol=0, atol=1e-13)
    assert np.abs(weights[1] - weights[2]).max() > 1e-3  # Adam squares the rows of a token that occurs twice one by one
    with pytest.raises(keras_ddl.errors.ConfigError, match="sparse_as_dense must be True, False or 'auto'"):
        keras_ddl.Strategy(sparse_as_dense="always")


@long
@case()
def check_table_used_in_three_ways_under_clipped_sgd(scope):
    return train_table(scope, TokensAndPositions, lambda: keras.optimizers.SGD(0.1, clipnorm=0.1), TOKENS)


@long
@case()
def check_table_used_in_three_ways_under_sgd(scope):
    return train_table(scope, TokensAndPositions, lambda: keras.optimizers.SGD(0.1), TOKENS)


@long
@case()
def check_layer_that_counts_rows(scope):
    class Counter(layers.Layer):
        def build(self, shape):
            self.rows = self.add_weight(name="rows", shape=(), initializer="zeros", trainable=False, aggregation="sum")

        def call(self, x, training=False):
            if training:
                self.rows.assign_add(ops.cast(ops.shape(x)[0], self.rows.dtype))
            return x

    with scope:
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(2)(Counter()(inputs)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return fit(model)


def train_accumulating_under_loss_scaling(scope, **arguments):
    with scope:
        model = small_model()
        inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0), "mse")
    return fit(model, **arguments)


@long
@case()
def check_accumulated_gradients_under_loss_scaling(scope):
    return train_accumulating_under_loss_scaling(scope, epochs=3, batch_size=11)  # 4 steps: no gradients are left


@long
@case()
def check_accumulated_gradients_under_loss_scaling_outlive_an_epoch(scope):
    return train_accumulating_under_loss_scaling(scope)  # 5 steps


# ---- data ------------------------------------------------------------------------------------------------------------


class Batches(keras.utils.PyDataset):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.home, self.read_elsewhere = os.getpid(), multiprocessing.Value("i", 0)

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if os.getpid() != self.home:
            self.read_elsewhere.value = 1
        return X[index * 9 : index * 9 + 9], Y[index * 9 : index * 9 + 9]


def train_on_workers(scope, **arguments):
    with scope:
        model = small_model()
        model.compile(keras.optimizers.SGD(0.05), "mse")
    batches = Batches(workers=2, max_queue_size=3, **arguments)
    trained = fit(model, batches, None)
    assert bool(batches.read_elsewhere.value) == batches.use_multiprocessing
    return trained


@long
@case()
def check_py_dataset_of_threads(scope):
    return train_on_workers(scope)


@case()
def check_py_dataset_of_processes(scope):
    return train_on_workers(scope, use_multiprocessing=True)
