"""Losses that compare the rows of the batch, or take it apart: those of one process. Run by test_strategy.py."""

from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import LABELS, X, keras
from strategy.oracle import case, fit
from strategy.program_checks import squares, train
from strategy.whole_batch_checks import ANCHORS, BOXES, SEQUENCES, TOKENS, rows_of, with_loss

layers, ops = keras.layers, keras.ops
SGD = keras.optimizers.SGD


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


@long
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


@long
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


@long
@case()
def check_condition_on_a_statistic(scope):
    def loss(y, p):
        error = squares(y, p)
        spread = ops.max(ops.abs(y)) - ops.mean(ops.abs(p))
        near = tf.cond(spread > 2.0, lambda: tf.reduce_mean(error), lambda: tf.reduce_sum(tf.sqrt(error)) * 1e-2)
        return near + tf.cond(y[0, 0] > 0, lambda: tf.reduce_max(error), lambda: tf.reduce_mean(tf.sort(p, axis=0)[0]))

    return train(scope, loss)
