"""The table of cases: programs as Keras's guides and examples write them. Run by test_strategy.py; see oracle.py."""

import multiprocessing
import os
import warnings

import numpy as np
import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import SIZE, STRATEGY, X, Y, keras
from strategy.oracle import Trained, case, differences

LATENT = Y  # what a generator starts from: given, as random numbers would differ between one process and ranks
layers, ops = keras.layers, keras.ops


def fit(model, x=X, y=Y, **arguments):
    defaults = {"epochs": 2, "shuffle": False, "verbose": 0}
    if isinstance(x, np.ndarray):
        defaults["batch_size"] = 10
    return Trained(model, model.fit(x, y, **{**defaults, **arguments}).history)


def small_model(outputs=2):
    return keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(outputs)])


# ---- two models and two optimizers in one train_step -----------------------------------------------------------------


class Gan(keras.Model):
    """The guide's GAN, but for what it draws at random; `train_step` of (real rows, latent rows)."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), layers.Dense(4, activation="tanh"), layers.Dense(6)])
        self.discriminator = small_model(1)

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.fooled = keras.metrics.BinaryAccuracy(name="fooled", threshold=0.0)

    @property
    def metrics(self):
        return [self.fooled]

    def train_step(self, data):
        real, latent = data
        both = ops.concatenate([self.generator(latent), real], axis=0)
        labels = ops.concatenate([ops.ones((len_of(latent), 1)), ops.zeros((len_of(real), 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.discriminator_loss(both, labels)
        self.step(tape, d_loss, self.d_optimizer, self.discriminator)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(latent))
            g_loss = self.loss_fn(ops.zeros((len_of(latent), 1)), predictions)
        self.step(tape, g_loss, self.g_optimizer, self.generator)
        self.fooled.update_state(ops.zeros((len_of(latent), 1)), predictions)
        return self.logs(d_loss, g_loss)

    def discriminator_loss(self, both, labels):
        return self.loss_fn(labels, self.discriminator(both))

    def logs(self, d_loss, g_loss):
        return {"fooled": self.fooled.result()}

    @staticmethod
    def step(tape, loss, optimizer, model):
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)


def len_of(rows):
    return ops.shape(rows)[0]


class CallableGan(Gan):
    def call(self, x):
        return self.discriminator(x)


def train_gan(scope, kind):
    with scope:
        gan = kind()
        optimizers = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)
        gan.compile(*optimizers)
    trained = fit(gan, X, LATENT)
    return Trained(gan, trained.logs, optimizers)


@case()
def check_gan_of_two_optimizers(scope):
    return train_gan(scope, CallableGan)


@case()
def check_gan_without_call(scope):
    return train_gan(scope, Gan)


@long
@case()
def check_gan_with_trackers_of_its_losses(scope):
    class Tracked(CallableGan):
        def __init__(self):
            super().__init__()
            self.d_tracker, self.g_tracker = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

        @property
        def metrics(self):
            return [self.d_tracker, self.g_tracker]

        def logs(self, d_loss, g_loss):
            self.d_tracker.update_state(d_loss)
            self.g_tracker.update_state(g_loss)
            return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}

    return train_gan(scope, Tracked)


@long
@case(tolerance=1e-10)  # second derivatives round more, and Adam takes small for large
def check_gan_with_a_gradient_penalty(scope):
    class Penalized(CallableGan):
        def discriminator_loss(self, both, labels):
            with tf.GradientTape() as tape:
                tape.watch(both)
                predictions = self.discriminator(both)
            norms = ops.norm(tape.gradient(predictions, both), axis=1)
            return ops.mean((2 * labels - 1) * predictions) + ops.mean((norms - 1.0) ** 2)

    return train_gan(scope, Penalized)


# ---- train_step by hand ----------------------------------------------------------------------------------------------


class ByHand(keras.Model):
    """The guide's custom train_step, with the loss of `loss_of`."""

    def __init__(self):
        super().__init__()
        self.inner = small_model()

    def call(self, x):
        return self.inner(x)

    def loss_of(self, x, y, predicted):
        return self.compute_loss(x=x, y=y, y_pred=predicted)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.loss_of(x, y, predicted)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.logs(y, predicted, loss)

    def logs(self, y, predicted, loss):
        for metric in self.metrics:
            if metric.name != "loss":
                metric.update_state(y, predicted)
        return {"mae": self.metrics[-1].result()["mae"]}


def train_by_hand(scope, kind, **compiled):
    with scope:
        model = kind()
        model.compile(keras.optimizers.SGD(0.05), **{"loss": "mse", "metrics": ["mae"], **compiled})
    return fit(model)


@case()
def check_train_step_by_hand(scope):
    return train_by_hand(scope, ByHand)


@case()
def check_loss_written_by_hand(scope):
    class Variational(ByHand):
        def loss_of(self, x, y, predicted):
            return ops.mean(ops.square(y - predicted)) + 1e-2 * ops.mean(ops.sum(ops.square(predicted), axis=1))

    return train_by_hand(scope, Variational)


@case()
def check_overridden_compute_loss(scope):
    class Overridden(ByHand):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.mean(ops.square(y - y_pred))

    return train_by_hand(scope, Overridden)


@case()
def check_tracker_of_a_computed_loss(scope):
    class Tracked(ByHand):
        def __init__(self):
            super().__init__()
            self.tracker = keras.metrics.Mean(name="loss")

        @property
        def metrics(self):
            return [self.tracker]

        def logs(self, y, predicted, loss):
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

    return train_by_hand(scope, Tracked, metrics=None)


@case()
def check_logs_that_hold_logs(scope):
    class Nested(ByHand):
        def logs(self, y, predicted, loss):
            super().logs(y, predicted, loss)
            return {metric.name: metric.result() for metric in self.metrics if metric.name != "loss"}

    return train_by_hand(scope, Nested)


@case()
def check_rank_without_rows_and_a_mean_by_hand(scope):
    class Distance(ByHand):
        def logs(self, y, predicted, loss):
            return {"distance": ops.mean(ops.square(y - predicted))}

    with scope:
        model = Distance()
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return fit(model, X[:1], Y[:1])


@case()
def check_habits_of_tf_distribute(scope):
    """What a step of tf.distribute divides by is that of one process here."""

    class Ported(ByHand):
        def loss_of(self, x, y, predicted):
            per_row = ops.mean(ops.square(y - predicted), axis=1)
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            average = tf.nn.compute_average_loss(per_row) + tf.nn.compute_average_loss(per_row, global_batch_size=10)
            penalty = tf.nn.scale_regularization_loss(ops.sum(ops.square(self.inner.layers[0].kernel)))
            return average + ops.mean(per_row) / replicas + penalty

    return train_by_hand(scope, Ported)


@case()
def check_sums_means_and_functions_of_both(scope):
    class Several(ByHand):
        def loss_of(self, x, y, predicted):
            error = ops.square(y - predicted)
            masked = ops.cast(y > 0, "float64")
            rows = ops.cast(ops.shape(y)[0], "float64")
            return (
                1e-3 * ops.sum(error)
                + ops.sum(error) / rows
                + ops.sum(error * masked) / ops.sum(masked)
                + ops.sqrt(ops.mean(error))
                + ops.log(ops.sum(ops.exp(predicted)))
                + 1e-2 * ops.max(ops.abs(predicted))
                + ops.mean(tf.boolean_mask(error, y[:, 0] > 0))
                + 1e-2 * ops.sum(ops.square(ops.matmul(ops.transpose(predicted), predicted) / rows))
            )

    return train_by_hand(scope, Several)


@case()
def check_what_is_done_with_gradients_by_hand(scope):
    """Clipping by hand, and a second gradient at weights that the first has moved (Foret et al., arXiv 2010.01412)."""

    class Sharp(ByHand):
        def train_step(self, batch):
            x, y = batch
            variables = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))
            gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.3)
            moves = [0.05 * each / (norm + 1e-12) for each in gradients]
            for variable, move in zip(variables, moves):
                variable.assign_add(move)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))
            gradients = tape.gradient(loss, variables)
            for variable, move in zip(variables, moves):
                variable.assign_sub(move)
            self.optimizer.apply([tf.clip_by_norm(each, 0.5) for each in gradients], variables)
            return {"norm": norm, "loss": loss}

    return train_by_hand(scope, Sharp, metrics=None)


@case(tolerance=1e-12)  # the logits are ten times as large
def check_rows_compared_with_those_of_all_ranks(scope):
    class Contrastive(ByHand):
        def loss_of(self, x, y, predicted):
            own, others = ops.normalize(predicted, axis=1), ops.normalize(y, axis=1)
            everyone = keras_ddl.all_gather(own) if STRATEGY is scope_strategy() else own
            first = STRATEGY.first_row() if STRATEGY is scope_strategy() else 0
            logits = ops.matmul(others, ops.transpose(everyone)) / 0.1
            labels = tf.range(tf.shape(x, tf.int64)[0]) + tf.cast(first, tf.int64)
            return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))

    return train_by_hand(scope, Contrastive)


def scope_strategy():
    return tf.distribute.get_strategy() if tf.distribute.has_strategy() else None


def check_rows_compared_on_each_rank_are_warned_about():
    class Contrastive(ByHand):
        def loss_of(self, x, y, predicted):
            logits = ops.matmul(y, ops.transpose(predicted))
            return ops.mean(keras.losses.sparse_categorical_crossentropy(tf.range(tf.shape(x)[0]), logits))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with STRATEGY.scope():
            model = Contrastive()
            model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        fit(model, X[:20], Y[:20])  # this loss cannot be computed without rows, which a rank may have in a short batch
    messages = [str(each.message) for each in caught]
    assert any("compares rows of the batch with each other" in each for each in messages), messages


@case()
def check_gradients_of_the_graph_and_halves_of_two_batches(scope):
    class Graph(ByHand):
        def train_step(self, batch):
            x, y = batch
            one, other = ops.split(self.inner(ops.concatenate([x, 2 * x], axis=0)), 2, axis=0)
            loss = 1e-2 * ops.sum(ops.square(one - y)) + ops.mean(ops.abs(other))
            self.optimizer.apply(tf.gradients(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return train_by_hand(scope, Graph, metrics=None)


# ---- losses, layers, metrics -----------------------------------------------------------------------------------------


@case()
def check_ratio_over_the_batch_as_a_loss(scope):
    with scope:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2, activation="sigmoid")])
        model.compile(keras.optimizers.SGD(0.5), keras.losses.Dice())
    return fit(model, X, (Y > 0).astype("float64"))


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


@case()
def check_table_used_in_three_ways_under_adam(scope):
    return train_table(scope, TokensAndPositions, lambda: keras.optimizers.Adam(0.01), TOKENS)


@long
def check_tables_as_dense_gradients():
    """Adam then treats a token that occurs twice as one, as it does with dense gradients in one process."""

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
    np.testing.assert_allclose(weights[0], weights[2], rtol=0, atol=1e-13)
    assert np.abs(weights[1] - weights[2]).max() > 1e-3
    with pytest.raises(keras_ddl.errors.ConfigError, match="sparse_as_dense must be True, False or 'auto'"):
        keras_ddl.Strategy(sparse_as_dense="always")


@case()
def check_table_used_in_three_ways_under_clipped_sgd(scope):
    return train_table(scope, TokensAndPositions, lambda: keras.optimizers.SGD(0.1, clipnorm=0.1), TOKENS)


@case()
def check_table_used_in_three_ways_under_sgd(scope):
    return train_table(scope, TokensAndPositions, lambda: keras.optimizers.SGD(0.1), TOKENS)


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


class Stateful(keras.metrics.Metric):
    """Sets its state to what `update` makes of it, the labels and the predictions."""

    def __init__(self, update, dtype=None, **arguments):
        super().__init__(name="state", dtype=dtype)
        self.update = update
        self.value = self.add_variable((), initializer="zeros", name="value", dtype=dtype, **arguments)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.update(self.value, y_true, y_pred)

    def result(self):
        return ops.cast(self.value, "float64") + 0.0


def train_with_metric(scope, *arguments, **named):
    with scope:
        model = small_model()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Stateful(*arguments, **named)])
    return fit(model, validation_data=(X[:7], Y[:7]))


@case()
def check_metric_that_holds_a_maximum(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign(ops.maximum(value, ops.max(ops.abs(y - p)))))


@case()
def check_metric_that_holds_a_minimum(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign(ops.minimum(value, ops.min(y))))


@case()
def check_metric_that_adds_up_means(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign_add(ops.mean(ops.abs(y - p))))


@long
@case()
def check_metric_that_adds_up_roots_of_means(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign_add(ops.sqrt(ops.mean(ops.square(y - p)))))


@long
@case()
def check_metric_that_counts_batches(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign_add(1), "int32")


@case()
def check_metric_that_counts_rows(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign(value + ops.shape(y)[0]), "int32")


@case()
def check_metric_that_holds_the_last_value(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign(ops.mean(y)))


@case()
def check_metric_that_holds_a_moving_average(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign(0.9 * value + 0.1 * ops.mean(ops.abs(y - p))))


@case()
def check_metric_that_says_how_its_state_combines(scope):
    class Declared(Stateful):
        ddl_reduction = {"value": "max"}

    def largest(value, y, p):
        return value.assign(ops.where(ops.max(y) > value, ops.max(y), value))

    with scope:
        model = small_model()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Declared(largest)])
    return fit(model)


def check_metric_whose_state_does_not_combine_is_refused():
    def median(value, y, p):
        return value.assign(ops.median(ops.abs(y - p)))

    found, _ = differences(lambda scope: train_with_metric(scope, median))
    assert all("raised ConfigError: The state of a metric must combine over ranks" in each for each in found), found
    assert len(found) == SIZE, found


def check_metric_whose_state_is_a_list_is_refused():
    class Listed(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="listed")
            self.values = []

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.values.append(float(ops.mean(y_true)))

        def result(self):
            return sum(self.values)

        def reset_state(self):
            self.values = []

    with STRATEGY.scope():
        model = small_model()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Listed()], run_eagerly=True)
    with pytest.raises(keras_ddl.errors.ConfigError, match="must keep its state in variables.*'listed'"):
        fit(model, X[:8], Y[:8])


@case()
def check_metric_whose_result_is_its_variable(scope):
    class Total(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="total")
            self.value = self.add_variable((), initializer="zeros", name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign_add(ops.sum(ops.cast(ops.abs(y_true), self.value.dtype)))

        def result(self):
            return self.value

    with scope:
        model = small_model()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Total()])
    return fit(model)


# ---- optimizers ------------------------------------------------------------------------------------------------------


def train_accumulating_under_loss_scaling(scope, **arguments):
    with scope:
        model = small_model()
        inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0), "mse")
    return fit(model, **arguments)


@case()
def check_accumulated_gradients_under_loss_scaling(scope):
    return train_accumulating_under_loss_scaling(scope, epochs=3, batch_size=11)  # 4 steps: no gradients are left


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
