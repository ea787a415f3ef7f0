"""Programs in shapes that taught something: losses over the whole batch, gradients of gradients, logs by other names.

Run by test_strategy.py; see oracle.py. `further_program_checks.py` has those that only the long tests run.
"""

from keras_ddl.compat.tensorflow import tf
from strategy.common import X, Y, keras
from strategy.oracle import Trained, case

layers, ops = keras.layers, keras.ops
SGD = keras.optimizers.SGD


def small_model(outputs=2):
    return keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(outputs)])


class ByHand(keras.Model):
    """A train_step that takes the loss of `loss_of(y, predicted)` and tracks it."""

    def __init__(self, loss_of):
        super().__init__()
        self.inner, self.loss_of = small_model(), loss_of
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.inner(x)

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def fit(model, x=X, y=Y, **arguments):
    if not isinstance(x, tf.data.Dataset):
        arguments = {"batch_size": 10, **arguments}
    return Trained(model, model.fit(x, y, **{"epochs": 1, "shuffle": False, "verbose": 0, **arguments}).history)


def train(scope, loss_of, **compiled):
    with scope:
        model = ByHand(loss_of)
        model.compile(SGD(0.05), **compiled)
    return fit(model)


def train_step(scope, step, build=lambda model: None, x=X, y=Y):
    """A model with `step(model, x, y)`, which returns the logs, as train_step."""

    class Stepping(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = small_model()
            build(self)

        def call(self, x):
            return self.inner(x)

        def train_step(self, batch):
            return step(self, *batch)

    with scope:
        model = Stepping()
        model.compile(SGD(0.05))
    return fit(model, x, y)


def squares(y, predicted):
    return ops.square(y - predicted)


def apply(model, tape, loss):
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


# ---- losses whose rows depend on totals over the batch ---------------------------------------------------------------


@case()
def check_variance_as_a_loss(scope):
    return train(scope, lambda y, p: ops.mean(ops.var(y - p, axis=0)))


@case()
def check_correlation_as_a_loss(scope):
    def loss(y, p):
        of_y, of_p = y - ops.mean(y), p - ops.mean(p)
        return 1 - ops.sum(of_y * of_p) / ops.sqrt(ops.sum(of_y**2) * ops.sum(of_p**2))

    return train(scope, loss)


@case()
def check_log_of_a_sum_of_exponentials(scope):
    return train(scope, lambda y, p: ops.logsumexp(squares(y, p)))


@case()
def check_weights_normalised_over_the_batch(scope):
    def loss(y, p):
        weights = ops.abs(y[:, 0])
        return ops.sum(weights / ops.sum(weights) * ops.mean(squares(y, p), axis=-1))

    return train(scope, loss)


@case()
def check_predictions_scaled_by_their_largest(scope):
    return train(scope, lambda y, p: ops.mean(squares(y, p / ops.max(ops.abs(p)))))


@case()
def check_barlow_twins(scope):
    def normalised(rows):
        return (rows - ops.mean(rows, axis=0)) / (ops.std(rows, axis=0) + 1e-5)

    def loss(y, p):
        rows = ops.cast(ops.shape(p)[0], p.dtype)
        correlation = ops.matmul(ops.transpose(normalised(p)), normalised(y)) / rows
        return ops.sum(ops.where(ops.eye(2, dtype="bool"), (correlation - 1) ** 2, 5e-3 * correlation**2))

    return train(scope, loss)


@case()
def check_rows_in_groups_of_their_class(scope):
    def loss(y, p):
        centres = tf.math.unsorted_segment_mean(p, tf.cast(y[:, 0] > 0, tf.int32), 2)
        return tf.reduce_mean(squares(y, p)) + tf.reduce_sum(centres**2)

    return train(scope, loss)


@case()
def check_functions_of_a_mean_and_a_maximum_over_some_rows(scope):
    def loss(y, p):
        chosen = tf.boolean_mask(p, y[:, 0] > 0)
        return ops.max(p) + ops.max(-p) - 0.5 * tf.reduce_mean(chosen) + tf.reduce_mean(chosen**2)

    return train(scope, loss)


@case()
def check_q_values_of_the_actions_taken(scope):
    def loss(y, p):
        taken = tf.cast(y[:, 0] > 0, tf.int32)
        values = tf.gather_nd(p, tf.stack([tf.range(tf.shape(p)[0]), taken], axis=1))
        return ops.mean(squares(y[:, 1], values)) + ops.mean(tf.gather(p, taken, batch_dims=1) ** 2)

    return train(scope, loss)


# ---- losses that compare rows with each other ------------------------------------------------------------------------


@case()
def check_rows_taken_by_position(scope):
    def loss(y, p):
        return (
            ops.sum(ops.softmax(p[:, 0], axis=0) * y[:, 0])
            + ops.mean(ops.cumsum(p[:, 0], axis=0))
            + ops.mean(squares(ops.roll(y, 1, axis=0), p))
            + ops.mean(squares(ops.flip(y, axis=0), p))
            + ops.mean(squares(y, p)[: ops.shape(p)[0] // 2])
        )

    return train(scope, loss)


@case()
def check_parts_of_rows(scope):
    def loss(y, p):
        return (
            ops.mean(squares(y, p)[:, 1:])
            + ops.mean(ops.flip(squares(y, p), axis=1))
            + ops.mean(tf.boolean_mask(squares(y, p), y[:, 0] > 0))
            + ops.mean(ops.concatenate([p, y], axis=0)[: ops.shape(p)[0]])
        )

    return train(scope, loss)


@case()
def check_losses_by_hand_in_eager_mode(scope):
    return train(scope, lambda y, p: 0.01 * ops.sum(squares(ops.flip(y, axis=0), p)), run_eagerly=True)


# ---- gradients -------------------------------------------------------------------------------------------------------


@case()
def check_recomputed_gradients(scope):
    return train(scope, lambda y, p: tf.recompute_grad(lambda gap: tf.reduce_mean(tf.square(gap)))(y - p))


@case()
def check_gradients_by_inputs_not_normalised(scope):
    def step(model, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = ops.mean(squares(y, model(x)))
        with_noise = x + 5.0 * tape.gradient(loss, x)
        with tf.GradientTape() as tape:
            loss = ops.mean(squares(y, model(with_noise)))
        apply(model, tape, loss)
        return {"loss": loss}

    return train_step(scope, step)


@case()
def check_gradients_of_each_row_clipped(scope):
    def step(model, x, y):
        with tf.GradientTape() as tape:
            losses = ops.mean(squares(y, model(x)), axis=-1)
        of_rows = tape.jacobian(losses, model.trainable_variables)
        clipped = [tf.clip_by_norm(each, 0.5, axes=list(range(1, len(each.shape)))) for each in of_rows]
        model.optimizer.apply([tf.reduce_mean(each, axis=0) for each in clipped], model.trainable_variables)
        return {"loss": ops.mean(losses)}

    return train_step(scope, step)


@case()
def check_gradient_of_a_sum_divided_by_the_rows(scope):
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = ops.sum(squares(y, model(x)))
        rows = ops.cast(ops.shape(x)[0], loss.dtype)
        gradients = [each / rows for each in tape.gradient(loss, model.trainable_variables)]
        model.optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss / rows}

    return train_step(scope, step)


@case()
def check_gradient_of_a_loss_by_its_derivative(scope):
    def step(model, x, y):
        with tf.GradientTape() as tape:
            predicted = model(x)
        slope = 2 * (predicted - y) / ops.cast(ops.size(y), y.dtype)
        model.optimizer.apply(tape.gradient(predicted, model.trainable_variables, slope), model.trainable_variables)
        return {"loss": ops.mean(squares(y, predicted))}

    return train_step(scope, step)


# ---- logs ------------------------------------------------------------------------------------------------------------


@case()
def check_tracker_of_a_mean_for_each_output(scope):
    return train(scope, lambda y, p: ops.mean(squares(y, p), axis=0))


@case()
def check_results_of_metrics_under_other_names(scope):
    class Renamed(ByHand):
        def train_step(self, batch):
            return {"total": super().train_step(batch)["loss"]}

    with scope:
        model = Renamed(lambda y, p: ops.mean(squares(y, p)))
        model.compile(SGD(0.05))
    return fit(model)


# ---- variables that a program assigns to -----------------------------------------------------------------------------


@case()
def check_learning_rate_from_the_loss(scope):
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = ops.mean(squares(y, model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.learning_rate.assign(0.05 / (1 + loss))
        model.optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss}

    return train_step(scope, step)


@case()
def check_loss_over_its_running_mean(scope):
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = ops.mean(squares(y, model(x)))
            model.running.assign(0.9 * model.running + 0.1 * loss)
            ratio = loss / model.running
        apply(model, tape, ratio)
        return {"loss": loss, "ratio": ratio}

    def build(model):
        model.running = model.add_weight(shape=(), initializer="ones", trainable=False)

    return train_step(scope, step, build)


class Codes(layers.Layer):
    """A codebook of running means, as VQ-VAE has it."""

    def build(self, shape):
        random = {"initializer": "random_uniform", "trainable": False}
        self.codes, self.sums = self.add_weight(shape=(5, 2), **random), self.add_weight(shape=(5, 2), **random)
        self.counts = self.add_weight(shape=(5,), initializer="ones", trainable=False)

    def call(self, x, training=False):
        distances = ops.sum(ops.square(x[:, None] - self.codes[None]), axis=-1)
        nearest = ops.one_hot(ops.argmin(distances, axis=1), 5, dtype=x.dtype)
        found = ops.matmul(nearest, self.codes)
        if training:
            self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(nearest, axis=0))
            self.sums.assign(0.9 * self.sums + 0.1 * ops.matmul(ops.transpose(nearest), x))
            self.codes.assign(self.sums / self.counts[:, None])
        self.add_loss(0.25 * ops.mean(ops.square(x - ops.stop_gradient(found))))
        return x + ops.stop_gradient(found - x)


class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0)


def train_layer(scope, layer):
    with scope:
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(2)(layer()(layers.Dense(2)(inputs))))
        model.compile(SGD(0.05), "mse")
    return fit(model)


@case(tolerance=1e-13)
def check_codebook_of_running_means(scope):
    return train_layer(scope, Codes)


@case(tolerance=1e-13)
def check_layer_that_subtracts_the_mean_of_the_batch(scope):
    return train_layer(scope, Centred)
