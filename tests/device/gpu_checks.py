"""Collectives and trainings on a real GPU that all ranks share. Run by test_gpu.py, with both paths of tensors.

A model must have the weights of one process on the same GPU, up to rounding, and the same bits on all ranks.
"""

import os

import keras
import numpy as np

from keras_ddl import device, ops
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, SIZE
from strategy.oracle import Trained, case, fit

layers = keras.layers
random = np.random.default_rng(3)
IMAGES, LABELS = random.normal(size=(44, 8, 8, 3)), random.integers(0, 5, 44)
SERIES, IDS = random.normal(size=(44, 6, 5)), random.integers(0, 50, (44, 6))
TOLERANCE = 1e-11
WIDTH = 3000  # of matrices whose products keep a GPU busy for some milliseconds


def check_path_of_tensors_is_as_said():
    on_gpus = device.path_of_tensors() == "collectives take tensors on GPUs"
    assert on_gpus == (os.environ["KERAS_DDL_TF_STREAM"] != "none"), device.path_of_tensors()


def check_collectives_and_a_busy_gpu_wait_for_each_other():
    factor = tf.random.normal([WIDTH, WIDTH], seed=1) / WIDTH

    @tf.function
    def step(number):
        product = factor
        for _ in range(12):
            product = product @ factor
        late = tf.fill([60_000 * SIZE], number) + 0.0 * tf.reduce_sum(product)
        results = ops.all_reduce(late), ops.reduce_scatter(late), ops.broadcast(late, root=1), ops.all_gather(late[:10])
        return [each * 2.0 for each in results]

    for number in range(20):
        total, part, of_one, of_all = (each.numpy() for each in step(tf.constant(float(RANK + number))))
        assert np.all(total == 2 * (sum(range(SIZE)) + SIZE * number)) and np.all(part == total[0]), number
        assert np.all(of_one == 2 * (1 + number)), number
        np.testing.assert_array_equal(of_all, 2.0 * np.repeat(np.arange(SIZE) + number, 10))


def check_dtypes_and_sizes():
    for dtype in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8"):
        for count in (0, 1, 33, 1000, 300_007, 3_000_001):
            by_rank = [(np.arange(count) * 7 + 3 * rank) % 3 for rank in range(SIZE)]
            own = tf.cast(tf.constant(by_rank[RANK], tf.float64), dtype)
            results = ops.all_reduce(own), ops.broadcast(own, root=1), ops.all_gather(own)
            expected = np.sum(by_rank, axis=0), by_rank[1], np.concatenate(by_rank)
            for result, values in zip(results, expected, strict=True):
                np.testing.assert_array_equal(tf.cast(result, tf.float64), values, err_msg=f"{dtype} {count}")


def trained(scope, inputs, hidden, optimizer, rows) -> Trained:
    with scope:
        model = keras.Sequential([inputs, *hidden, layers.Dense(5)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return fit(model, rows, LABELS, batch_size=10)


@case(tolerance=TOLERANCE)
def check_convolutions(scope):
    hidden = [layers.Conv2D(6, 3, activation="relu"), layers.BatchNormalization(), layers.MaxPooling2D()]
    hidden += [layers.Flatten(), layers.Dropout(0.2, seed=5)]
    return trained(scope, keras.Input((8, 8, 3)), hidden, keras.optimizers.SGD(0.05, momentum=0.9), IMAGES)


@case(tolerance=TOLERANCE)
def check_embedding_with_adam(scope):
    hidden = [layers.Embedding(50, 8), layers.GlobalAveragePooling1D()]
    return trained(scope, keras.Input((6,), dtype="int32"), hidden, keras.optimizers.Adam(1e-2), IDS)


@case(tolerance=TOLERANCE)
def check_attention_with_adam(scope):
    inputs = keras.Input((6, 5))
    with scope:
        attended = layers.MultiHeadAttention(2, 4)(inputs, inputs)
        model = keras.Model(inputs, layers.Dense(5)(layers.Flatten()(layers.LayerNormalization()(attended))))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2), loss, jit_compile=False)
    return fit(model, SERIES, LABELS, batch_size=10)


@case(tolerance=TOLERANCE)
def check_recurrent_layers(scope):
    """cuDNN computes them, and the cut has no rule for its operations."""
    hidden = [layers.Bidirectional(layers.GRU(4, return_sequences=True)), layers.LSTM(7)]
    return trained(scope, keras.Input((6, 5)), hidden, keras.optimizers.SGD(0.05), SERIES)
