"""Custom training steps, some with two models and two optimizers. Run by test_strategy.py; see oracle.py."""

import contextlib

import keras_ddl
from harness.rank_program import long
from keras_ddl.callbacks import BroadcastVariables
from keras_ddl.compat.tensorflow import tf
from strategy.common import STRATEGY, X, Y, keras, small_model
from strategy.oracle import Trained, case, fit

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
def check_steps_ported_from_tf_distribute(scope):
    """A step written for tf.distribute divides by the same numbers as in one process."""

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
def check_per_row_gradients_are_clipped(scope):
    class Clipped(ByHand):
        def train_step(self, batch):
            x, y = batch
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                losses = ops.mean(ops.square(y - self(x)), axis=-1)
            of_rows = tape.jacobian(losses, weights)
            clipped = [tf.clip_by_norm(each, 0.5, axes=list(range(1, len(each.shape)))) for each in of_rows]
            self.optimizer.apply([tf.reduce_mean(each, axis=0) for each in clipped], weights)
            return {"loss": ops.mean(losses)}

    return train_by_hand(scope, Clipped, metrics=None)


@long
@case(tolerance=1e-12)
def check_inner_step_of_maml(scope):
    class Adapted(ByHand):
        def train_step(self, batch):
            x, y = batch
            weights = self.trainable_variables
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = ops.mean(ops.square(y - self(x)))
                moved = [w - 0.1 * g for w, g in zip(weights, inner.gradient(loss, weights))]
                after = ops.mean(ops.square(y - (tf.tanh(x @ moved[0] + moved[1]) @ moved[2] + moved[3])))
            self.optimizer.apply(outer.gradient(after, weights), weights)
            return {"loss": loss, "after": after}

    return train_by_hand(scope, Adapted, metrics=None)


@long
@case(tolerance=1e-12)  # the logits are scaled by ten
def check_contrastive_loss_over_all_ranks(scope):
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


LATENT = Y  # the generator's input: fixed, because random numbers would differ from one process


class Gan(keras.Model):
    """The guide's GAN without random draws; `train_step` takes (real rows, latent rows). It has no `call`."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), layers.Dense(4, activation="tanh"), layers.Dense(6)])
        self.discriminator = small_model(1)
        self.d_optimizer = keras.optimizers.Adam(0.01)
        self.g_optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.fooled = keras.metrics.BinaryAccuracy(name="fooled", threshold=0.0)

    @property
    def metrics(self):
        return [self.fooled]

    def train_step(self, data):
        real, latent = data
        both = ops.concatenate([self.generator(latent), real], axis=0)
        made, found = ops.ones((ops.shape(latent)[0], 1)), ops.zeros((ops.shape(real)[0], 1))
        with tf.GradientTape() as tape:
            loss = self.loss_fn(ops.concatenate([made, found], axis=0), self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(latent))
            loss = self.loss_fn(ops.zeros_like(made), predictions)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(loss, weights), weights)
        self.fooled.update_state(ops.zeros_like(made), predictions)
        return {"fooled": self.fooled.result()}


@long
@case()
def check_gan_of_two_optimizers_without_call(scope):
    with scope:
        gan = Gan()
        gan.compile()
    return Trained(gan, fit(gan, X, LATENT).logs, [gan.d_optimizer, gan.g_optimizer])


class TwoRates(keras.Model):
    """A body and a head with one optimizer each; compile() receives the body's."""

    def __init__(self):
        super().__init__()
        self.body, self.head = layers.Dense(5, activation="tanh"), layers.Dense(2)

    def call(self, x):
        return self.head(self.body(x))

    def compile(self, optimizer, head_optimizer, loss):
        super().compile(optimizer, loss)
        self.head_optimizer = head_optimizer

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        for part, optimizer in ((self.body, self.optimizer), (self.head, self.head_optimizer)):
            optimizer.apply(tape.gradient(loss, part.trainable_variables), part.trainable_variables)
        return {"loss": loss}


@long
@case()
def check_optimizer_has_slots_only_for_weights_it_updates(scope):
    # Otherwise it would also average the head's weights and overwrite them with the averages.
    with scope:
        model = TwoRates()
        average = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
        model.compile(keras.optimizers.Adam(1e-2, **average), keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    callbacks = [] if isinstance(scope, contextlib.nullcontext) else [BroadcastVariables()]
    return Trained(model, fit(model, callbacks=callbacks).logs, [model.optimizer, model.head_optimizer])
