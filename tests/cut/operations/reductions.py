"""Reductions, what runs along an axis, losses, bincount and its like."""

from __future__ import annotations

from typing import Any

from cut.operations.cases import case, rows_of, with_gradients

from keras_ddl.compat.tensorflow import tf

raw = tf.raw_ops


@case("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "L2Loss")
def reductions(x: Any) -> Any:
    cube = rows_of(x, 2, 3)
    whole = tf.cast(x * 10, tf.int32)
    found = []
    for axes in ([0], [1], [0, 2], [-1, 1], [0, 1, 2], [], None):
        for keep in (False, True):
            for function in (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.reduce_prod):
                found.append(function(cube, axes, keepdims=keep))
    for function in (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.reduce_prod):
        found += [function(whole, 0), function(tf.cast(whole, tf.int16), 0), function(tf.transpose(cube), 2)]
        found += [function(function(cube, 0), 0), function(tf.reduce_sum(whole, 0)), function(cube[:, :0], 1)]
        found += [function(cube[:, :0], 0), function(cube[:, :0])]
    found += [tf.reduce_all(x > -1, 0), tf.reduce_any(x > 1, 0), tf.reduce_all(x > 0), tf.reduce_any(x > 0, 1)]
    found += [tf.reduce_any(tf.reduce_all(x > -1, 0)), tf.reduce_all(~tf.reduce_any(x > 1, 0))]
    return found + [tf.nn.l2_loss(x), tf.nn.l2_loss(tf.reduce_sum(x, 0)), tf.reduce_sum(x / (x - x))]


@case("ArgMax", "ArgMin", "Cumsum", "Cumprod", "CumulativeLogsumexp", "TopKV2")
def along_an_axis(x: Any) -> Any:
    found = []
    for axis in (0, 1, -1):
        found += [tf.argmax(x, axis), tf.argmin(x, axis, tf.int32), tf.cumsum(x, axis, exclusive=True)]
        found += [tf.math.cumprod(x, axis, reverse=True), tf.math.cumulative_logsumexp(x, axis)]
    s = tf.reduce_sum(x, 0)
    found += [tf.argmax(s), tf.cumsum(s), *tf.math.top_k(x, 2), *tf.math.top_k(tf.transpose(x), 1)]
    return found


@case("Softmax", "LogSoftmax", "SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
@case("InTopK", "InTopKV2")
def losses(x: Any) -> Any:
    labels = tf.argmax(x[:, ::-1], 1, tf.int32)
    ones = tf.one_hot(labels, 3, dtype=tf.float64)
    found = with_gradients(lambda a: tf.nn.softmax_cross_entropy_with_logits(ones, a), x)
    found += with_gradients(lambda a: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, a), x)
    found += [tf.nn.softmax(x), tf.nn.softmax(x, 0), tf.nn.log_softmax(x), tf.nn.log_softmax(tf.transpose(x))]
    found += [raw.SoftmaxCrossEntropyWithLogits(features=x, labels=tf.constant([[0.2, 0.3, 0.5]], tf.float64)).loss]
    single = tf.cast(x, tf.float32)
    found += [
        raw.InTopK(predictions=single, targets=labels, k=2),
        raw.InTopKV2(predictions=single, targets=labels, k=1),
    ]
    of_all = raw.SoftmaxCrossEntropyWithLogits(features=tf.reduce_sum(x, 0)[None], labels=ones)
    found += [of_all.loss, of_all.loss + x[:, 0], of_all.backprop * x]
    return [*found, tf.nn.softmax_cross_entropy_with_logits(ones[:, :], tf.reduce_sum(x, 0)[None] + x)]


@case("DenseBincount")
def counted(x: Any) -> Any:
    entries, size = tf.cast(tf.abs(x) * 2, tf.int32), tf.constant(3)
    none = tf.zeros([0], tf.float64)
    options = [
        (entries, none),
        (entries[:, 0], none),
        (entries, x),
        (entries[:, 0], x[:, 1]),
        (tf.transpose(entries), none),
    ]
    found = [raw.DenseBincount(input=value, size=size, weights=weights) for value, weights in options]
    found += [raw.DenseBincount(input=value, size=size, weights=none, binary_output=True) for value, _ in options]
    most = tf.reduce_max(entries) + 1
    return [*found, raw.DenseBincount(input=entries, size=most, weights=none), tf.math.bincount(entries, axis=-1)]


@case("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def transformed(x: Any) -> Any:
    images, size = rows_of(x, 4, 3, 2), tf.constant([3, 4])
    each = tf.cast(tf.pad(x, [[0, 0], [0, 5]]) * 0.1, tf.float32) + tf.constant([1.0, 0, 0, 0, 1, 0, 0, 0])
    one, options = each[:1] * 0 + [1.0, 0.2, 0, 0, 0.9, 0.5, 0, 0], {"output_shape": size, "interpolation": "BILINEAR"}
    found = []
    for transforms in (each, one, tf.constant([[1.0, 0.2, 0, 0, 0.9, 0.5, 0, 0]])):
        found += [raw.ImageProjectiveTransformV2(images=images, transforms=transforms, **options)]
        found += [raw.ImageProjectiveTransformV3(images=images, transforms=transforms, fill_value=2.0, **options)]
    return found
