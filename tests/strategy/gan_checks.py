"""Two models and two optimizers in one train_step. Run by test_strategy.py; see oracle.py."""

import contextlib

from harness.rank_program import long
from keras_ddl.callbacks import BroadcastVariables
from keras_ddl.compat.tensorflow import tf
from strategy.common import X, Y, keras, small_model
from strategy.oracle import Trained, case, fit

LATENT = Y  # what a generator starts from: given, as random numbers would differ between one process and ranks
layers, ops = keras.layers, keras.ops


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


@long
@case()
def check_gan_of_two_optimizers(scope):
    return train_gan(scope, CallableGan)


@long
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


class TwoRates(keras.Model):
    """A body and a head with an optimizer each; the body's is the compiled one."""

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


@case()
def check_an_optimizer_has_slots_for_what_it_updates_only(scope):
    # It would average the head's weights, too, and write the averages over them.
    with scope:
        model = TwoRates()
        average = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
        model.compile(keras.optimizers.Adam(1e-2, **average), keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    callbacks = [] if isinstance(scope, contextlib.nullcontext) else [BroadcastVariables()]
    return Trained(model, fit(model, callbacks=callbacks).logs, [model.optimizer, model.head_optimizer])
