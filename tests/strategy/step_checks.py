"""Training steps written by hand. Run by test_strategy.py; see oracle.py."""

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import STRATEGY, X, Y, keras, small_model
from strategy.oracle import case, fit

layers, ops = keras.layers, keras.ops


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


@long
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


@long
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


@long
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


@long
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


@long
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
