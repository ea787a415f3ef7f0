"""Loops, gradients and metrics over the whole batch; batches that consist of several. Run by test_strategy.py."""

import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import LABELS, RANK, SIZE, STRATEGY, X, Y, keras, own_rows
from strategy.oracle import Trained, case, fit
from strategy.program_checks import apply, squares, train, train_step
from strategy.whole_batch_checks import SEQUENCES, normal, with_layer

layers, ops = keras.layers, keras.ops
SGD = keras.optimizers.SGD


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
        labelled, others = data[:2]
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


@case()
def check_two_batches_of_sizes_that_only_the_first_tells(scope):
    """The last ones are shorter."""
    with scope:
        model = TwoBatches()
        model.compile(SGD(0.05), steps_per_execution=2)
    return fit(model, two_batches(9, 5, drop_remainder=False), None)


@long
@case()
def check_two_batches_of_arrays(scope):
    """Of which each rank passes its part."""
    with scope:
        model = TwoBatches()
        model.compile(SGD(0.05))
    logs = [model.train_on_batch(own_rows(scope, 7)[0], own_rows(scope, 11)[0]) for _ in range(3)]
    return Trained(model, {"logs": logs})


class SimCLR(keras.Model):
    """As on keras.io: a contrastive loss of all images, and a probe of those with labels, of which there are fewer."""

    def __init__(self):
        super().__init__()
        self.noise = layers.GaussianNoise(0.1, seed=3)
        self.encoder = keras.Sequential([layers.Dense(5, activation="tanh"), layers.BatchNormalization()])
        self.head, self.probe = layers.Dense(4), layers.Dense(3)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def call(self, x):
        return self.probe(self.encoder(x))

    def contrast(self, one, other):
        one, other = (ops.normalize(each, axis=1) for each in (one, other))
        alike = ops.matmul(one, ops.transpose(other)) / 0.1
        labels = ops.arange(ops.shape(alike)[0])
        loss = keras.losses.sparse_categorical_crossentropy
        return ops.mean(loss(labels, alike, True)) + ops.mean(loss(labels, ops.transpose(alike), True))

    def train_step(self, data):
        unlabelled, (labelled, labels) = data
        everything = ops.concatenate((unlabelled, labelled), axis=0)
        views = self.noise(everything, training=True), self.noise(everything, training=True)
        with tf.GradientTape() as tape:
            codes = [self.head(self.encoder(each, training=True)) for each in views]
            loss = self.contrast(*codes)
        trained = self.encoder.trainable_weights + self.head.trainable_weights
        gradients = tape.gradient(loss, trained)
        with tf.GradientTape() as tape:
            logits = self.probe(self.encoder(labelled, training=False))
            probe = ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, True))
        gradients += tape.gradient(probe, self.probe.trainable_weights)
        self.optimizer.apply(gradients, trained + self.probe.trainable_weights)
        self.accuracy.update_state(labels, logits)
        return {"contrast": loss, "probe": probe, "accuracy": self.accuracy.result()}


def simclr(scope, sizes):
    """Trains on batches of `sizes` (unlabelled, labelled) rows."""
    unlabelled = tf.data.Dataset.from_tensor_slices(X).batch(sizes[0])
    labelled = tf.data.Dataset.from_tensor_slices((X[::-1], LABELS)).repeat().batch(sizes[1])
    with scope:
        model = SimCLR()
        model.compile(SGD(0.05))
    return fit(model, tf.data.Dataset.zip((unlabelled, labelled)).prefetch(1), None)


@long
@case()
def check_simclr_of_other_numbers_of_labels(scope):
    return simclr(scope, (16, 2))


@long
@case()
def check_simclr_of_sizes_in_proportion(scope):
    return simclr(scope, (12, 6))


@long
@case()
def check_simclr_of_more_labels(scope):
    return simclr(scope, (4, 11))


@long
@case()
def check_simclr_of_fewer_labels_than_ranks(scope):
    return simclr(scope, (15, 1))


@long
def check_sizes_that_change_are_said_as_they_are():
    def batches():
        yield X[:8], X[:8]
        yield X[:8], X[:5]

    spec = tf.TensorSpec([None, 6], tf.float64)
    with STRATEGY.scope():
        model = TwoBatches()
        model.compile(SGD(0.05))
    with pytest.raises(
        keras_ddl.errors.KerasDdlError, match=r"(?s)\[8 5\] rows by component, summed.*drop_remainder=True"
    ):
        model.fit(tf.data.Dataset.from_generator(batches, output_signature=(spec, spec)), verbose=0)


def check_a_rank_without_a_first_batch():
    """Of components whose rows the first batch is to tell."""

    def batches():
        if RANK == 0:
            yield X[:8], (X[:8],)

    spec = tf.TensorSpec([None, 6], tf.float64)
    with STRATEGY.scope():
        model = TwoBatches()
        model.compile(SGD(0.05))
    with pytest.raises(keras_ddl.errors.RankMismatchError, match=r"equally many batches.*none on rank\(s\) \[1"):
        model.fit(tf.data.Dataset.from_generator(batches, output_signature=(spec, (spec,))), verbose=0)
    assert keras_ddl.all_gather_object(RANK) == list(range(SIZE)), "no collective is left over"
