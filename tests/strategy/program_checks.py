"""Programs in shapes that taught something: losses over the whole batch, gradients of gradients, logs by other names.

Run by test_strategy.py, in the long tests only; see oracle.py.
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


@case()
def check_correlation_as_a_loss(scope):
    def loss(y, p):
        of_y, of_p = y - ops.mean(y), p - ops.mean(p)
        return 1 - ops.sum(of_y * of_p) / ops.sqrt(ops.sum(of_y**2) * ops.sum(of_p**2))

    return train(scope, loss)


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


@case(tolerance=1e-12)
def check_inner_step_of_maml(scope):
    def step(model, x, y):
        weights = model.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = ops.mean(squares(y, model(x)))
            moved = [w - 0.1 * g for w, g in zip(weights, inner.gradient(loss, weights))]
            after = ops.mean(squares(y, tf.tanh(x @ moved[0] + moved[1]) @ moved[2] + moved[3]))
        apply(model, outer, after)
        return {"loss": loss, "after": after}

    return train_step(scope, step)
