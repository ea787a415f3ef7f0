"""Programs that see the batch as a whole: queues, memories, noise, positions, mining, loops, metrics of one's own.

Each is written as for one process and was wrong, without a word, where ranks guessed from their own rows. Run by
test_strategy.py; see oracle.py.
"""

import numpy as np
import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import LABELS, RNG, STRATEGY, X, Y, keras
from strategy.oracle import Trained, case, fit
from strategy.program_checks import apply, squares, train, train_step

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


@case()
def check_dcgan_of_a_guide(scope):
    return train_step(scope, gan_step(penalty=False), build_gan, X[:40], Y[:40])


@long
@case()
def check_wgan_with_a_gradient_penalty(scope):
    return train_step(scope, gan_step(penalty=True), build_gan, X[:40], Y[:40])


# ---- losses ----------------------------------------------------------------------------------------------------------


@long
@case(tolerance=1e-6)  # Keras computes it in float32
def check_ctc_in_an_endpoint_layer(scope):
    class Endpoint(layers.Layer):
        def call(self, inputs):
            labels, logits = inputs
            rows = ops.shape(labels)[0]
            target_lengths = ops.sum(ops.cast(labels > 0, "int32"), axis=1)
            output_lengths = ops.full((rows,), 5, dtype="int32")
            self.add_loss(ops.mean(ops.ctc_loss(labels, logits, target_lengths, output_lengths, mask_index=0)))
            return logits

    with scope:
        sequence, labels = keras.Input((5, 3), name="s"), keras.Input((2,), dtype="int32", name="labels")
        logits = layers.Dense(4)(layers.GRU(4, return_sequences=True)(sequence))
        model = keras.Model({"s": sequence, "labels": labels}, Endpoint()([labels, logits]))
        model.compile(SGD(0.05))
    labels = 1 + (TOKENS[:, :2] % 3)
    return fit(model, {"s": SEQUENCES, "labels": labels.astype("int32")}, None, batch_size=10)


@long
@case(tolerance=1e-6)  # Keras computes it in float32
def check_ctc_as_a_loss(scope):
    with scope:
        model = keras.Sequential([keras.Input((5, 3)), layers.Conv1D(4, 3, padding="same"), layers.Dense(4)])
        model.compile(SGD(0.05), keras.losses.CTC())
    return fit(model, SEQUENCES, 1 + (TOKENS[:, :2] % 3))


@long
@case()
def check_detection(scope):
    def loss(y, p):
        # y: [rows, boxes, 4 corners + class]; p: [rows, anchors, 4 + 3]
        there = tf.constant(ANCHORS)
        low = tf.maximum(there[None, :, None, :2], y[:, None, :, :2])
        high = tf.minimum(there[None, :, None, 2:], y[:, None, :, 2:4])
        overlap = tf.reduce_prod(tf.maximum(high - low, 0.0), axis=-1)
        area = tf.reduce_prod(there[:, 2:] - there[:, :2], axis=-1)[None, :, None]
        area += tf.reduce_prod(y[:, None, :, 2:4] - y[:, None, :, :2], axis=-1)
        shares = overlap / (area - overlap)
        best = tf.argmax(shares, axis=-1)
        positive = tf.cast(tf.reduce_max(shares, axis=-1) > 0.2, "float64")
        matched = tf.gather(y, best, batch_dims=1)
        truth = tf.one_hot(tf.cast(matched[..., 4], "int32"), 3, dtype="float64") * positive[..., None]
        chance = tf.sigmoid(p[..., 4:])
        right = truth * chance + (1 - truth) * (1 - chance)
        focal = -tf.pow(1 - right, 2) * tf.math.log(right + 1e-7)
        off = tf.abs(matched[..., :4] - there - p[..., :4])
        smooth = tf.reduce_sum(tf.where(off < 0.5, off**2, off - 0.25), axis=-1) * positive
        count = tf.maximum(tf.reduce_sum(positive), 1.0)
        return (tf.reduce_sum(focal) + tf.reduce_sum(smooth)) / count

    with scope:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(9 * 7), layers.Reshape((9, 7))])
        model.compile(SGD(0.02), loss)
    return fit(model, X, BOXES)


@case()
def check_hard_negatives_of_the_batch(scope):
    def loss(y, p):
        error = ops.mean(squares(y, p), axis=1)
        positive = ops.cast(y[:, 0] > 0.5, "float64")
        count = ops.sum(positive)
        negative = (1 - positive) * error
        hardest = tf.minimum(tf.cast(3 * count, "int32"), tf.shape(error)[0])
        values, _ = tf.math.top_k(negative, k=hardest)
        four, places = tf.math.top_k(error, k=min(4, y.shape[0]) if y.shape[0] else 1)
        return (ops.sum(positive * error) + ops.sum(values)) / (count + 1) + ops.mean(four * tf.gather(p[:, 0], places))

    return train(scope, loss)


@case()
def check_all_triplets(scope):
    def loss(y, p):
        labels = ops.cast(ops.reshape(y, (-1,)), "int32")
        dot = p @ ops.transpose(p)
        square = tf.linalg.diag_part(dot)
        distance = tf.maximum(square[None] - 2 * dot + square[:, None], 0.0)
        alone = tf.cast(tf.equal(distance, 0.0), "float64")
        distance = (1 - alone) * tf.sqrt(distance + alone * 1e-16)
        triplets = distance[:, :, None] - distance[:, None, :] + 0.5
        same = labels[None] == labels[:, None]
        other = tf.logical_not(tf.eye(tf.shape(labels)[0], dtype="bool"))
        distinct = other[:, :, None] & other[:, None, :] & other[None]
        valid = tf.cast(distinct & (same[:, :, None] & ~same[:, None, :]), "float64")
        triplets = tf.maximum(triplets * valid, 0.0)
        return tf.reduce_sum(triplets) / (tf.reduce_sum(tf.cast(triplets > 1e-16, "float64")) + 1e-16)

    return with_loss(scope, loss, y=LABELS.astype("float64"))


@long
@case()
def check_mean_discrepancy(scope):
    def kernel(a, b):
        return ops.exp(-ops.sum(ops.square(a[:, None, :] - b[None, :, :]), axis=-1))

    def loss(y, p):
        return ops.mean(kernel(p, p)) + ops.mean(kernel(y, y)) - 2 * ops.mean(kernel(y, p))

    return with_loss(scope, loss)


@long
@case()
def check_pinball_by_stack(scope):
    def loss(y, p):
        error = y - p
        both = ops.stack([0.3 * error, (0.3 - 1) * error], axis=-1)
        return ops.mean(ops.max(both, axis=-1)) + 1e-2 * ops.sum(ops.sum(both, axis=-1) ** 2)

    return with_loss(scope, loss)


@long
@case()
def check_ranks_of_scores(scope):
    def loss(y, p):
        s, t = p[:, 0], y[:, 0]
        worse = ops.cast(t[:, None] > t, "float64")
        return ops.sum(worse * ops.softplus(-(s[:, None] - s))) / (ops.sum(worse) + 1)

    return with_loss(scope, loss)


@case()
def check_sizes_of_the_batch(scope):
    """As Python numbers, and to powers."""

    def loss(y, p):
        rows, width = y.shape
        rows = rows or ops.shape(y)[0]
        divisor = tf.cast(rows * width, "float64")
        weight = 1 / tf.cast(rows, "float64")
        error = squares(y, p)
        position = ops.cast(ops.arange(rows), "float64") / divisor
        return (
            ops.sum(error) / divisor
            + ops.sum(ops.mean(error, axis=1) * weight) * weight
            + ops.sum(ops.square((y - p) * weight))
            + ops.sum(ops.mean(error, axis=1) * position)
            + ops.sum(error) / tf.cast(tf.maximum(rows - 1, 1), "float64")
            + ops.sum(p * tf.ones((rows, 2), "float64")) * weight
        )

    return train(scope, loss)


@long
@case()
def check_neighbours_by_position(scope):
    def loss(y, p):
        smooth = ops.sum(ops.square(p[1:] - p[:-1])) + ops.sum(ops.abs(p[::2])) + ops.sum(p[-1] * p[0])
        rolled = ops.mean(ops.square(p - ops.roll(p, 1, axis=0)))
        half = ops.shape(p)[0] // 2
        return ops.mean(squares(y, p)) + 1e-2 * smooth + 1e-2 * rolled + 1e-2 * ops.sum(p[:half] * y[-half:])

    return train(scope, loss)


@long
@case()
def check_sorted_batch(scope):
    def loss(y, p):
        lorenz = ops.cumsum(ops.sort(ops.abs(p[:, 0])))
        median = ops.median(p[:, 1])
        order = ops.argsort(y[:, 0])
        return (
            ops.mean(ops.square(ops.sort(p, axis=0) - ops.sort(y, axis=0)))
            + 1e-2 * ops.mean(lorenz)
            + ops.square(median)
            + ops.mean(ops.logsumexp(ops.take(p, order, axis=0), axis=0)) * 0.1
        )

    return train(scope, loss)


@long
@case(tolerance=1e-12)
def check_whitening_by_svd(scope):
    def loss(y, p):
        centred = p - ops.mean(p, axis=0)
        singular = tf.linalg.svd(centred, compute_uv=False)
        covariance = tf.transpose(centred) @ centred / tf.cast(tf.shape(p)[0] - 1, "float64") + 0.1 * tf.eye(
            2, dtype="float64"
        )
        white = tf.linalg.triangular_solve(tf.linalg.cholesky(covariance), tf.transpose(centred))
        return ops.mean(squares(y, tf.transpose(white))) + 1e-2 * ops.sum(singular)

    return train(scope, loss)


@long
@case()
def check_means_by_label(scope):
    def loss(y, p):
        labels = tf.cast(y[:, 0] > 0, "int32") + tf.cast(y[:, 0] > 1, "int32")
        means = tf.math.unsorted_segment_mean(p, labels, 3)
        order = tf.argsort(labels, stable=True)
        largest = tf.math.segment_max(tf.gather(p, order), tf.gather(labels, order))
        between = ops.sum(ops.square(means[0] - means[1]))
        return ops.mean(ops.square(p - tf.gather(means, labels))) - 0.1 * between + 0.1 * ops.sum(largest)

    return train(scope, loss)


@long
@case()
def check_transport_by_sinkhorn(scope):
    def loss(y, p):
        cost = ops.sum(ops.square(p[:, None] - y[None]), axis=-1)
        kernel = ops.exp(-cost)
        rows = rows_of(p)
        u = v = ops.ones_like(cost[:, 0]) / rows
        for _ in range(3):
            u = 1 / rows / (ops.matmul(kernel, v[:, None])[:, 0] + 1e-9)
            v = 1 / rows / (ops.matmul(ops.transpose(kernel), u[:, None])[:, 0] + 1e-9)
        return ops.sum(u[:, None] * kernel * v[None] * cost)

    return train(scope, loss)


@long
@case()
def check_transport_by_sinkhorn_in_a_loop(scope):
    def loss(y, p):
        scores = p @ ops.transpose(y)
        q = tf.exp(scores - tf.reduce_max(scores))

        def body(i, q):
            q = q / tf.reduce_sum(q, axis=0, keepdims=True)
            return i + 1, q / tf.reduce_sum(q, axis=1, keepdims=True)

        _, q = tf.while_loop(lambda i, q: i < 3, body, (0, q))
        return -ops.mean(ops.sum(ops.stop_gradient(q) * ops.log_softmax(scores), axis=1)) + ops.mean(q * scores)

    return train(scope, loss)


@case()
def check_condition_on_a_statistic(scope):
    def loss(y, p):
        error = squares(y, p)
        spread = ops.max(ops.abs(y)) - ops.mean(ops.abs(p))
        near = tf.cond(spread > 2.0, lambda: tf.reduce_mean(error), lambda: tf.reduce_sum(tf.sqrt(error)) * 1e-2)
        return near + tf.cond(y[0, 0] > 0, lambda: tf.reduce_max(error), lambda: tf.reduce_mean(tf.sort(p, axis=0)[0]))

    return train(scope, loss)


# ---- loops -----------------------------------------------------------------------------------------------------------


@long
@case()
def check_loops_over_time(scope):
    class Recurrent(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(3, 3), initializer=normal())

        def call(self, x):
            time = tf.transpose(x, (1, 0, 2))
            start = tf.zeros_like(time[0])
            scanned = tf.scan(lambda h, e: tf.tanh(h @ self.kernel + e), time, initializer=start)

            def body(i, h):
                return i + 1, tf.tanh(h @ self.kernel + tf.gather(x, i, axis=1))

            _, looped = tf.while_loop(lambda i, h: i < 5, body, (0, start))
            mapped = tf.map_fn(lambda e: tf.reduce_sum(e @ self.kernel, axis=-1), time)
            rowwise = tf.map_fn(lambda e: tf.reduce_max(e, axis=0), x)
            return tf.concat([scanned[-1], looped, tf.transpose(mapped), rowwise], axis=1)

    with scope:
        inputs = keras.Input((5, 3))
        model = keras.Model(inputs, layers.Dense(2)(Recurrent()(inputs)))
        model.compile(SGD(0.05), "mse")
    return fit(model, SEQUENCES)


@long
@case()
def check_scan_over_rows(scope):
    def loss(y, p):
        average = tf.scan(lambda a, e: 0.9 * a + 0.1 * e, p)
        returns = tf.scan(lambda a, e: 0.5 * a + e, y[:, 0] - p[:, 0], reverse=True)
        return ops.mean(squares(y, average)) + 0.1 * ops.mean(returns**2)

    return train(scope, loss)


# ---- gradients -------------------------------------------------------------------------------------------------------


@long
@case()
def check_invariant_risk(scope):
    def step(model, x, y):
        with tf.GradientTape() as tape:
            predicted = model(x)
            scale = tf.constant(1.0, "float64")
            with tf.GradientTape() as inner:
                inner.watch(scale)
                risk = ops.mean(squares(y, scale * predicted))
            penalty = ops.square(inner.gradient(risk, scale))
            loss = risk + penalty
        apply(model, tape, loss)
        return {"loss": loss, "penalty": penalty}

    return train_step(scope, step)


@long
@case(tolerance=1e-12)
def check_product_with_the_hessian(scope):
    def step(model, x, y):
        weights = model.trainable_variables
        vectors = [tf.ones_like(each) for each in weights]
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = ops.mean(squares(y, model(x)))
            gradients = inner.gradient(loss, weights)
        products = outer.gradient(gradients, weights, output_gradients=vectors)
        products = [tf.zeros_like(w) if h is None else h for h, w in zip(products, weights)]
        model.optimizer.apply([g + 0.1 * h for g, h in zip(gradients, products)], weights)
        return {"loss": loss, "curvature": sum(ops.sum(h) for h in products)}

    return train_step(scope, step)


@long
@case()
def check_gradient_of_ones_own_clipped(scope):
    class Clipped(layers.Layer):
        def call(self, x):
            @tf.custom_gradient
            def same(x):
                return tf.identity(x), lambda dy: tf.clip_by_norm(dy, 1e-2) + 0.1 * tf.reduce_max(dy)

            return same(x)

    return with_layer(scope, Clipped)


# ---- metrics ---------------------------------------------------------------------------------------------------------


class Concordance(keras.metrics.Metric):
    """Per-epoch mean of what is no sum over rows."""

    def __init__(self):
        super().__init__(name="concordance")
        self.sum = self.add_variable((), "zeros", name="sum")
        self.steps = self.add_variable((), "zeros", name="steps")

    def update_state(self, y, p, sample_weight=None):
        s, t = p[:, 0], y[:, 0]
        pairs = ops.cast(t[:, None] > t[None], "float64")
        right = ops.cast(s[:, None] > s[None], "float64")
        self.sum.assign_add(ops.sum(pairs * right) / (ops.sum(pairs) + 1e-9))
        self.steps.assign_add(1.0)

    def result(self):
        return self.sum / self.steps


class Extremes(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="extremes")
        self.largest = self.add_variable((), lambda shape, dtype: ops.full(shape, -1e9, dtype), name="largest")
        self.last = self.add_variable((2,), "zeros", name="last")
        self.masked = self.add_variable((), "zeros", name="masked")

    def update_state(self, y, p, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max(p)))
        self.last.assign(p[-1])
        mask = y[:, 0] > 0
        self.masked.assign(ops.mean(tf.boolean_mask(p, mask)))

    def result(self):
        return {"largest": self.largest, "last": self.last[0] + self.last[1], "masked": self.masked}


class Median(keras.metrics.Metric):
    """Keeps all values of an epoch."""

    def __init__(self):
        super().__init__(name="median")
        self.kept = self.add_variable((64,), "zeros", name="kept")
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, y, p, sample_weight=None):
        errors = ops.mean(ops.abs(y - p), axis=-1)
        places = self.count + ops.arange(ops.shape(errors)[0])
        self.kept.assign(ops.scatter_update(self.kept, places[:, None], errors))
        self.count.assign_add(ops.shape(errors)[0])

    def result(self):
        return ops.median(ops.sort(self.kept)[64 - ops.maximum(self.count, 1) :])


@case()
def check_metrics_of_ones_own(scope):
    with scope:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(2)])
        model.compile(SGD(0.05), "mse", metrics=[Concordance(), Extremes(), Median()])
    return fit(model, validation_data=(X[:17], Y[:17]))


# ---- batches that consist of several ---------------------------------------------------------------------------------


class TwoBatches(keras.Model):
    """Trains on rows with labels and on other rows without, as many as the data has of each."""

    def __init__(self):
        super().__init__()
        self.encoder = layers.Dense(3)

    def call(self, x):
        return self.encoder(x)

    def train_step(self, data):
        labelled, others = data
        with tf.GradientTape() as tape:
            codes, everyone = self(labelled), self(others)
            alike = ops.matmul(codes, ops.transpose(everyone))
            loss = ops.mean(ops.square(codes)) + ops.mean(ops.square(alike - 1.0))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"alike": loss}


def two_batches(one, other, drop_remainder=True):
    parts = [tf.data.Dataset.from_tensor_slices(X[: 4 * batch]).batch(batch, drop_remainder) for batch in (one, other)]
    return tf.data.Dataset.zip(tuple(parts))


@case()
def check_two_batches_of_other_sizes(scope):
    """Some ranks have as many rows of one as of the other, and some have not."""
    with scope:
        model = TwoBatches()
        model.compile(SGD(0.05))
    return fit(model, two_batches(7, 8), None)


def check_two_batches_of_sizes_that_are_not_known_are_refused():
    with STRATEGY.scope():
        model = TwoBatches()
        model.compile(SGD(0.05))
    with pytest.raises(keras_ddl.errors.KerasDdlError, match="(?s)equally many rows.*drop_remainder=True"):
        model.fit(two_batches(6, 9, drop_remainder=False), verbose=0)
