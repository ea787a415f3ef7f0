"""Programs that see the batch as a whole: queues, memories, noise, positions, mining, loops, metrics of one's own.

Each is written as for one process and was silently wrong where ranks guessed from their own rows. Run by
test_strategy.py; see oracle.py.
"""

import numpy as np

from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import RNG, X, Y, keras
from strategy.oracle import Trained, case, fit
from strategy.program_checks import apply, squares, train_step

layers, ops = keras.layers, keras.ops
SGD = keras.optimizers.SGD
SEQUENCES = RNG.normal(size=(43, 5, 3))
TOKENS = RNG.integers(0, 9, size=(43, 5)).astype("int32")
POSITIONS = RNG.permutation(43).astype("int32")
_LOW = RNG.uniform(0, 0.6, size=(43, 2, 2))
BOXES = np.concatenate([_LOW, _LOW + 0.4, RNG.integers(0, 3, size=(43, 2, 1))], axis=-1)  # corners, class
_CORNERS = np.stack(np.meshgrid(np.arange(3) / 3, np.arange(3) / 3), axis=-1).reshape(9, 2)
ANCHORS = np.concatenate([_CORNERS, _CORNERS + 0.4], axis=-1)


def normal(seed=3):
    return keras.initializers.RandomNormal(stddev=0.5, seed=seed)


def with_layer(scope, layer, loss="mse", metrics=None, **arguments):
    """A model with `layer()` between two Dense ones."""
    with scope:
        inputs = keras.Input((6,))
        hidden = layer()(layers.Dense(5, activation="tanh")(inputs))
        model = keras.Model(inputs, layers.Dense(2)(hidden))
        model.compile(SGD(0.05), loss, metrics=None if metrics is None else metrics())
    return fit(model, **arguments)


def with_loss(scope, loss, x=X, y=Y):
    """`loss(y, predicted)` given to compile."""
    with scope:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(2)])
        model.compile(SGD(0.05), loss)
    return fit(model, x, y)


def rows_of(x):
    return ops.cast(ops.shape(x)[0], "float64")


# ---- state of layers -------------------------------------------------------------------------------------------------


@long
@case()
def check_queue_of_nnclr(scope):
    class Neighbours(layers.Layer):
        def build(self, shape):
            self.queue = self.add_weight(shape=(20, shape[-1]), initializer=normal(), trainable=False)

        def call(self, x, training=False):
            rows = x.shape[0]
            own = ops.normalize(x, axis=1)
            nearest = tf.gather(self.queue, tf.argmax(own @ tf.transpose(self.queue), axis=1))
            if training and rows is not None:
                self.queue.assign(tf.concat([own, self.queue[:-rows]], axis=0))
            return own + tf.stop_gradient(nearest - own)

    return with_layer(scope, Neighbours)


@long
@case()
def check_memory_bank_by_position(scope):
    class Bank(layers.Layer):
        def build(self, shape):
            self.bank = self.add_weight(shape=(43, 5), initializer=normal(), trainable=False)

        def call(self, inputs, training=False):
            x, places = inputs
            known = tf.gather(self.bank, places)
            if training:
                updated = 0.5 * known + 0.5 * x
                self.bank.assign(tf.tensor_scatter_nd_update(self.bank, places[:, None], updated))
            return x + 0.3 * known + 0.1 * ops.matmul(ops.softmax(x @ tf.transpose(self.bank)), self.bank)

    with scope:
        inputs = {"x": keras.Input((6,), name="x"), "place": keras.Input((), dtype="int32", name="place")}
        hidden = Bank()([layers.Dense(5, activation="tanh")(inputs["x"]), inputs["place"]])
        model = keras.Model(inputs, layers.Dense(2)(hidden))
        model.compile(SGD(0.05), "mse")
    return fit(model, {"x": X, "place": POSITIONS}, Y, batch_size=10)


@long
@case()
def check_running_variance(scope):
    class Scaled(layers.Layer):
        def build(self, shape):
            self.variance = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False)
            self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False)
            self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

        def call(self, x, training=False):
            if training:
                self.variance.assign(0.9 * self.variance + 0.1 * ops.var(x, axis=0))
                self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(x))))
                self.seen.assign_add(ops.shape(x)[0])
            return x / ops.sqrt(self.variance + 1e-3) / (0.1 + self.largest)

    return with_layer(scope, Scaled)


@long
@case()
def check_vector_quantisation_with_moving_averages(scope):
    class Quantiser(layers.Layer):
        def build(self, shape):
            add = self.add_weight
            self.codes = add(shape=(7, shape[-1]), initializer=normal(), trainable=False)
            self.counts = add(shape=(7,), initializer="ones", trainable=False)
            self.sums = add(shape=(7, shape[-1]), initializer=normal(), trainable=False)

        def call(self, x, training=False):
            flat = ops.reshape(x, (-1, x.shape[-1]))
            distances = ops.sum(flat**2, axis=1, keepdims=True) - 2 * flat @ tf.transpose(self.codes)
            found = ops.argmin(distances + ops.sum(ops.square(self.codes), axis=1), axis=1)
            one_hot = ops.one_hot(found, 7, dtype="float64")
            quantised = ops.reshape(one_hot @ self.codes, ops.shape(x))
            if training:
                self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(one_hot, axis=0))
                self.sums.assign(0.9 * self.sums + 0.1 * tf.transpose(one_hot) @ flat)
                total = ops.sum(self.counts)
                counts = (self.counts + 1e-5) / (total + 7e-5) * total
                self.codes.assign(self.sums / counts[:, None])
            self.add_loss(0.25 * ops.mean((ops.stop_gradient(quantised) - x) ** 2))
            mean = ops.mean(one_hot, axis=0)
            self.add_loss(-1e-2 * ops.exp(-ops.sum(mean * ops.log(mean + 1e-10))))
            return x + ops.stop_gradient(quantised - x)

    with scope:
        inputs = keras.Input((5, 3))
        hidden = Quantiser()(layers.Conv1D(4, 2, activation="tanh")(inputs))
        model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(hidden)))
        model.compile(SGD(0.05), "mse")
    return fit(model, SEQUENCES)


@long
@case()
def check_stateful_lstm(scope):
    with scope:
        inputs = keras.Input(batch_shape=(10, 5, 3))
        model = keras.Model(inputs, layers.Dense(2)(layers.LSTM(4, stateful=True)(inputs)))
        model.compile(SGD(0.05), "mse")
    return fit(model, SEQUENCES[:40], Y[:40])


# ---- the batch mixed with itself -------------------------------------------------------------------------------------


@long
@case()
def check_mixup(scope):
    def step(model, x, y):
        rows = ops.shape(x)[0]
        order = tf.random.shuffle(tf.range(rows))
        share = keras.random.beta((rows, 1), 0.4, 0.4, seed=model.seeds)
        x, y = (share * each + (1 - share) * tf.gather(each, order) for each in (x, y))
        with tf.GradientTape() as tape:
            loss = ops.mean(squares(y, model(x)))
        apply(model, tape, loss)
        return {"loss": loss}

    def build(model):
        model.seeds = keras.random.SeedGenerator(5)

    return train_step(scope, step, build)


@long
@case()
def check_cutmix(scope):
    class CutMix(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(5)

        def call(self, x, training=False):
            if not training:
                return x
            images = tf.reshape(x, (-1, 3, 2))
            order = ops.argsort(keras.random.uniform((ops.shape(x)[0],), seed=self.seeds))
            corner = keras.random.randint((2,), 0, 2, seed=self.seeds)
            rows, columns = ops.arange(3, dtype="int32")[:, None], ops.arange(2, dtype="int32")[None]
            inside = ops.logical_and(rows >= ops.cast(corner[0], "int32"), columns >= ops.cast(corner[1], "int32"))
            mixed = ops.where(inside[None, :, :], tf.gather(images, order), images)
            flipped = ops.where(inside[None], images[::-1], mixed)
            return tf.reshape(0.7 * mixed + 0.3 * flipped, (-1, 6))

    with scope:
        model = keras.Sequential([keras.Input((6,)), CutMix(), layers.Dense(5, activation="tanh"), layers.Dense(2)])
        model.compile(SGD(0.05), "mse")
    return fit(model)


@case()
def check_attention_across_rows(scope):
    class Across(layers.Layer):
        def build(self, shape):
            self.attention = layers.MultiHeadAttention(2, 3)
            self.attention.build((1, None, shape[-1]), (1, None, shape[-1]))

        def call(self, x):
            rows = ops.reshape(x, (1, -1, x.shape[-1]))
            return x + ops.reshape(self.attention(rows, rows), (-1, x.shape[-1]))

    return with_layer(scope, Across)


@long
@case()
def check_standard_deviation_of_minibatches(scope):
    class Deviation(layers.Layer):
        def call(self, x):
            rows = ops.shape(x)[0]
            deviation = ops.mean(ops.sqrt(ops.var(x, axis=0) + 1e-8))
            return ops.concatenate([x, ops.tile(ops.reshape(deviation, (1, 1)), (rows, 1))], axis=1)

    return with_layer(scope, Deviation)


@long
@case()
def check_standard_deviation_of_groups(scope):
    class Grouped(layers.Layer):
        def call(self, x):
            groups = tf.reshape(x, (2, -1, 1, x.shape[-1]))
            centred = groups - tf.reduce_mean(groups, axis=0, keepdims=True)
            deviation = tf.sqrt(tf.reduce_mean(tf.square(centred), axis=0) + 1e-8)
            mean = tf.reduce_mean(deviation, axis=[1, 2], keepdims=True)
            return tf.concat([x, tf.reshape(tf.tile(mean, (2, 1, 1)), (-1, 1))], axis=1)

    return with_layer(scope, Grouped, x=X[:40], y=Y[:40])


# ---- layers ----------------------------------------------------------------------------------------------------------


@long
@case(tolerance=1e-12)
def check_masked_batch_normalization(scope):
    with scope:
        inputs = keras.Input((5,), dtype="int32")
        hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
        hidden = layers.BatchNormalization(momentum=0.8)(hidden)
        model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))
        model.compile(SGD(0.05), "mse")
    return fit(model, TOKENS)


@long
@case()
def check_mixture_of_experts(scope):
    class Experts(layers.Layer):
        def build(self, shape):
            self.gate = self.add_weight(shape=(shape[-1], 3), initializer=normal(1))
            self.kernel = self.add_weight(shape=(3, shape[-1], 5), initializer=normal(2))

        def call(self, x):
            chances = ops.softmax(x @ self.gate)
            chosen = ops.one_hot(ops.argmax(chances, axis=1), 3, dtype="float64")
            self.add_loss(3e-1 * ops.sum(ops.mean(chosen, axis=0) * ops.mean(chances, axis=0)))
            capacity = tf.cast(tf.math.ceil(1.1 * rows_of(x) / 3), "int32")
            places = tf.cast(tf.cumsum(chosen, axis=0) * chosen, "int32") - 1
            kept = tf.one_hot(places, capacity, dtype="float64")  # [rows, experts, capacity]
            slots = tf.einsum("nec,nd->ecd", kept, x)
            done = tf.nn.tanh(tf.einsum("ecd,edh->ech", slots, self.kernel))
            return x + tf.einsum("nec,ech->nh", kept * chances[:, :, None], done)

    return with_layer(scope, Experts)


@long
@case()
def check_transfer_learning_with_batch_normalization(scope):
    with scope:
        body = keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.BatchNormalization(), layers.ReLU()])
        body.trainable = False
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(2)(layers.BatchNormalization()(body(inputs, training=False))))
        model.compile(SGD(0.05), "mse")
        first = model.fit(X, Y, batch_size=10, shuffle=False, verbose=0).history
        body.trainable = True
        model.compile(SGD(0.01), "mse")
    return Trained(model, {**fit(model, epochs=1).logs, "first": first["loss"]})


@long
@case()
def check_ones_of_the_batch_in_the_middle(scope):
    class Views(layers.Layer):
        def call(self, x):
            factors = tf.constant([[[1.0]], [[2.0]], [[3.0]]], "float64")
            views = tf.ones((3, x.shape[0] or tf.shape(x)[0], 5), "float64") * factors
            return tf.reduce_sum(views * x[None], axis=0) / 6 + 0.01 * tf.reduce_mean(views[:, :, 0] ** 2)

    return with_layer(scope, Views)


@case()
def check_random_numbers_of_tensorflow_in_a_layer(scope):
    class Noisy(layers.Layer):
        def call(self, x, training=False):
            if not training:
                return x
            noise = tf.random.normal(tf.shape(x), stddev=0.1, dtype="float64")
            other = tf.random.uniform((2, tf.shape(x)[0], 1), dtype="float64")
            return x * (1 + noise) + 0.1 * other[0] * other[1] + 0.01 * tf.random.normal((), dtype="float64")

    return with_layer(scope, Noisy)


# ---- gans ------------------------------------------------------------------------------------------------------------


def gan_step(penalty):
    def step(model, x, y):
        rows = x.shape[0]
        latent = tf.random.normal((rows, 3), dtype="float64")
        made = model.generator(latent)
        both = tf.concat([made, x], axis=0)
        labels = tf.concat([tf.ones((rows, 1), "float64"), tf.zeros((rows, 1), "float64")], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels), dtype="float64")
        with tf.GradientTape() as tape:
            if penalty:
                at_real, at_made = model.critic(x), model.critic(made)
                share = tf.random.uniform((rows, 1), dtype="float64")
                between = share * x + (1 - share) * made
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    at = model.critic(between)
                norm = tf.sqrt(tf.reduce_sum(tf.square(inner.gradient(at, between)), axis=1))
                loss = tf.reduce_mean(at_made) - tf.reduce_mean(at_real) + 10 * tf.reduce_mean((norm - 1.0) ** 2)
            else:
                loss = model.bce(labels, model.critic(both))
        weights = model.critic.trainable_weights
        model.d_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        latent = tf.random.normal((rows, 3), dtype="float64")
        with tf.GradientTape() as tape:
            predictions = model.critic(model.generator(latent))
            if penalty:
                g_loss = -tf.reduce_mean(predictions)
            else:
                g_loss = model.bce(tf.zeros((rows, 1), "float64"), predictions)
        weights = model.generator.trainable_weights
        model.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))
        return {"d_loss": loss, "g_loss": g_loss}

    return step


def build_gan(model):
    model.generator = keras.Sequential([keras.Input((3,)), layers.Dense(5, activation="tanh"), layers.Dense(6)])
    model.critic = keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(1)])
    model.bce = keras.losses.BinaryCrossentropy(from_logits=True)
    model.d_optimizer, model.g_optimizer = SGD(0.02), SGD(0.02)


@long  # gan_checks.py trains such steps
@case()
def check_dcgan_of_a_guide(scope):
    return train_step(scope, gan_step(penalty=False), build_gan, X[:40], Y[:40])


@long
@case()
def check_wgan_with_a_gradient_penalty(scope):
    return train_step(scope, gan_step(penalty=True), build_gan, X[:40], Y[:40])
