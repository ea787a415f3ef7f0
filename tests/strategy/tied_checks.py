"""One table that is looked up twice and multiplied: embedding and projection of a translator. Run by test_strategy.py.

TensorFlow adds the parts of its gradient up to a dense tensor. Programs that make slices of the dense part themselves
("assumed sparse", arXiv 1905.04035) are here, too.
"""

import contextlib

import numpy as np

from harness.rank_program import long
from keras_ddl import ops as collectives
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, STRATEGY, X, keras, rows_of_ranks
from strategy.oracle import Trained, case, fit

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

    def __init__(self, assumed_sparse=False):
        super().__init__()
        self.assumed_sparse = assumed_sparse

    def build(self, _):
        self.table = layers.Embedding(WORDS, WIDTH)
        self.table.build(None)

    def call(self, tokens):
        hidden = ops.mean(self.table(tokens), axis=1) + ops.tanh(self.table(tokens[:, 0]))
        table = ops.convert_to_tensor(self.table.embeddings)
        return ops.matmul(hidden, ops.transpose(as_slices(table) if self.assumed_sparse else table))


LOSS = {"from_logits": True}


def train(scope, optimizer, assumed_sparse=False, kind=keras.Model, **arguments):
    with scope:
        inputs = keras.Input(TOKENS.shape[1:], dtype="int32")
        model = kind(inputs, Tied(assumed_sparse)(inputs))
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(**LOSS))
    return fit(model, TOKENS, LABELS, **arguments)


@contextlib.contextmanager
def gathered(scope, expected):
    """Checks how many gathers a step on several ranks has, of values and indices."""
    names, original = [], collectives.all_gather

    def all_gather(tensor, *, name=None, **arguments):
        names.append(name)
        return original(tensor, name=name, **arguments)

    collectives.all_gather = all_gather
    try:
        yield
    finally:
        collectives.all_gather = original
    if scope is not None:
        assert len([name for name in names if name and "train_step" in name]) == expected, names


def under(scope):
    return None if isinstance(scope, contextlib.nullcontext) else scope


@case()
def check_tied_table_under_adam(scope):
    with gathered(under(scope), 0):
        return train(scope, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1))


@long
@case()
def check_tied_table_with_accumulated_gradients(scope):
    with gathered(under(scope), 0):
        return train(scope, lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), epochs=1, batch_size=11)


@long
@case()
def check_assumed_sparse_table_under_adam(scope):
    """Adam squares the rows one by one, so they are listed as in one process; the table among them is no longer."""
    with gathered(under(scope), 4):
        return train(scope, lambda: keras.optimizers.Adam(0.01), assumed_sparse=True)


class OnceAndOnce(layers.Layer):
    """Looks up the words that occur, each once, twice."""

    def build(self, _):
        self.table = layers.Embedding(WORDS, WIDTH)
        self.table.build(None)

    def call(self, tokens):
        found = []
        for some in (tokens[:, :3], tokens[:, 3:]):
            unique, position = tf.unique(tf.reshape(some, [-1]))
            found.append(tf.reduce_mean(tf.reshape(tf.gather(self.table(unique), position), [-1, 3, WIDTH]), axis=1))
        return tf.tile(found[0] * found[1], [1, 2])[:, :WORDS]


@long
@case()
def check_unique_words_of_two_lookups_under_adam(scope):
    with scope:
        inputs = keras.Input(TOKENS.shape[1:], dtype="int32")
        model = keras.Model(inputs, OnceAndOnce()(inputs))
        model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(**LOSS))
    return fit(model, TOKENS, LABELS)


@long
@case()
def check_assumed_sparse_table_under_sgd(scope):
    with gathered(under(scope), 4):
        return train(scope, lambda: keras.optimizers.SGD(0.1, momentum=0.9), assumed_sparse=True)


class TiedInCond(Tied):
    """Multiplies in one branch, and only looks up in the other, where tokens occur several times."""

    def __init__(self, multiply):
        super().__init__()
        self.multiply = tf.Variable(multiply, trainable=False)

    def call(self, tokens):
        hidden = ops.mean(self.table(tokens), axis=1)
        table = ops.convert_to_tensor(self.table.embeddings)

        def multiplied():
            return ops.matmul(hidden + ops.tanh(self.table(tokens[:, 0])), ops.transpose(table))

        def looked_up():
            return tf.tile(hidden + ops.tanh(self.table(tokens[:, 1])), [1, 2])[:, :WORDS]

        return tf.cond(self.multiply, multiplied, looked_up)


@long
@case()
def check_tied_table_in_a_branch_under_adam(scope):
    with scope:
        inputs = keras.Input(TOKENS.shape[1:], dtype="int32")
        model = keras.Model(inputs, TiedInCond(True)(inputs))
        model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(**LOSS))
    first = fit(model, TOKENS, LABELS, epochs=1)
    model.layers[-1].multiply.assign(False)
    return Trained(model, first.logs | {f"then_{k}": v for k, v in fit(model, TOKENS, LABELS, epochs=1).logs.items()})


class TwoLosses(keras.Model):
    """Takes the gradients of two losses, of lookups and of a product, adds them up, and clips them by hand."""

    def train_step(self, data):
        x, y = data
        table = self.trainable_variables[0]
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            looked_up = ops.mean(ops.square(ops.take(table, x, axis=0)))
        (one,), (two,) = (tape.gradient(each, [table]) for each in (loss, looked_up))
        (total,), _ = tf.clip_by_global_norm([tf.add_n([one, two])], 0.05)
        (rows,), _ = tf.clip_by_global_norm([two], 0.05)
        assert isinstance(total, tf.Tensor) and isinstance(rows, tf.IndexedSlices)
        self.optimizer.apply([total], [table])
        self.optimizer.apply([rows], [table])
        return {"total": loss}


@long
@case()
def check_gradients_of_two_losses_by_a_tied_table(scope):
    return train(scope, lambda: keras.optimizers.Adam(0.01), kind=TwoLosses)


def loop(scope, optimizer, assumed_sparse):
    with scope:
        layer = Tied(assumed_sparse)
        layer.build(None)
        model = keras.Sequential([keras.Input(TOKENS.shape[1:], dtype="int32"), layer])
        optimizer = optimizer()
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(reduction="none", **LOSS)
    rows = slice(None) if under(scope) is None else rows_of_ranks(len(X))[RANK]
    strategy = tf.distribute.get_strategy() if under(scope) is None else STRATEGY

    @tf.function
    def train_step(x, y):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss(loss_of(y, model(x)), global_batch_size=len(X))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    losses = [train_step(tf.constant(TOKENS[rows]), tf.constant(LABELS[rows])).numpy() for _ in range(3)]
    return Trained(model, {"loss": losses}, [optimizer])


@long
@case()
def check_tied_table_in_a_loop(scope):
    with gathered(under(scope), 0):
        return loop(scope, lambda: keras.optimizers.Adam(0.01), False)


@long
@case()
def check_assumed_sparse_table_in_a_loop(scope):
    with gathered(under(scope), 0):
        return loop(scope, lambda: keras.optimizers.SGD(0.1), True)


@long
@case()
def check_assumed_sparse_table_in_a_loop_under_adam(scope):
    return loop(scope, lambda: keras.optimizers.Adam(0.01), True)
