"""Tables that are looked up, also several times, or looked up and multiplied. Run by test_strategy.py.

TensorFlow adds the parts of its gradient up to a dense tensor. Programs that make slices of the dense part themselves
("assumed sparse", arXiv 1905.04035) are here, too.
"""

from unittest import mock

import numpy as np

from keras_ddl import ops as collectives
from keras_ddl.compat.tensorflow import tf
from strategy.common import STRATEGY, X, keras
from strategy.oracle import case, fit

layers, ops = keras.layers, keras.ops
WORDS, WIDTH = 7, 4
TOKENS = (np.abs(X) * 3).astype("int32") % WORDS
LABELS = (np.arange(len(X)) * 5) % WORDS


@tf.custom_gradient
def as_slices(table):
    """Returns the table, with its gradient as slices of all rows."""
    shape = tf.constant([WORDS, WIDTH])
    return tf.identity(table), lambda gradient: tf.IndexedSlices(gradient, tf.range(WORDS), shape)


class Tied(layers.Layer):
    """Logits for the next token, from a table that is looked up twice and multiplied once."""

    def build(self, _):
        self.table = layers.Embedding(WORDS, WIDTH)
        self.table.build(None)

    def call(self, tokens):
        hidden = ops.mean(self.table(tokens), axis=1) + ops.tanh(self.table(tokens[:, 0]))
        table = ops.convert_to_tensor(self.table.embeddings)
        return ops.matmul(hidden, ops.transpose(as_slices(table)))


@case()
def check_assumed_sparse_table_under_adam(scope):
    """Adam squares the rows one by one, so they are listed as in one process; the table among them is no longer."""
    with scope:
        inputs = keras.Input(TOKENS.shape[1:], dtype="int32")
        model = keras.Model(inputs, Tied()(inputs))
        model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    names, original = [], collectives.all_gather

    def all_gather(tensor, *, name=None, **arguments):
        names.append(name)
        return original(tensor, name=name, **arguments)

    with mock.patch.object(collectives, "all_gather", all_gather):
        trained = fit(model, TOKENS, LABELS)
    if model.distribute_strategy is STRATEGY:  # values and indices
        assert len([name for name in names if name and "train_step" in name]) == 4, names
    return trained


class TokensAndPositions(layers.Layer):
    """One table, looked up by tokens of the rows, by positions, and by the tokens that occur, each once."""

    def build(self, shape):
        self.table = layers.Embedding(7, 4)
        self.table.build(None)

    def call(self, tokens):
        unique, position = tf.unique(tf.reshape(tokens, [-1]))
        once = tf.reshape(tf.gather(self.table(unique), position), tf.concat([tf.shape(tokens), [4]], 0))
        return self.table(tokens) + self.table(ops.arange(ops.shape(tokens)[1])) * once
