"""Collectives and a training on software GPUs. Run by test_software_gpu.py."""

import contextlib
from unittest import mock

import keras
import numpy as np

from keras_ddl import device, ops
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, SIZE, STRATEGY
from strategy.oracle import Trained, case


def check_rank_uses_only_its_gpu():
    assert [each.name for each in tf.config.get_visible_devices("GPU")] == [f"/physical_device:GPU:{RANK}"]
    assert STRATEGY.job.device == "/device:GPU:0"
    assert tf.config.experimental.get_memory_growth(tf.config.get_visible_devices("GPU")[0]) is None


def check_collectives_and_device_wait_for_each_other():
    for elements in (10, 100_002):
        numbers = np.arange(elements) % 13.0

        @tf.function
        def step(x):
            y = x * x + x  # computed late on the device, like the sums of the results
            results = [ops.all_reduce(y), ops.broadcast(y, root=SIZE - 1), ops.all_gather(y), ops.reduce_scatter(y)]
            return [each + each for each in [*results, *ops.all_reduce_n([y, x])]]

        of_ranks = [(numbers + rank) ** 2 + numbers + rank for rank in range(SIZE)]
        total = np.sum(of_ranks, axis=0)
        own = np.split(total, SIZE)[RANK]
        expected = [total, of_ranks[-1], np.concatenate(of_ranks), own, total, SIZE * numbers + sum(range(SIZE))]
        for _ in range(5):
            x = tf.constant(numbers + RANK) + 0.0
            assert x.device.endswith("GPU:0"), x.device
            for result, value in zip(step(x), expected, strict=True):
                assert result.device.endswith("GPU:0"), result.device
                np.testing.assert_array_equal(result, 2 * value)
            np.testing.assert_array_equal(ops.all_reduce(x), expected[-1])  # eager


def check_replicated_operations_use_deterministic_kernels():
    """Replaces TensorFlow's switch by a recorder, because the switch stays on for the rest of the process."""
    device._use_deterministic_kernels.cache_clear()
    x = np.arange(6.0)
    with mock.patch.object(tf.config.experimental, "enable_op_determinism") as turned_on:
        STRATEGY.function(lambda x: tf.reduce_sum(x * x))(x)
        assert not turned_on.called
        step = STRATEGY.function(lambda x: tf.unique(x)[0])  # the cut has no rule for it
        for _ in range(2):
            np.testing.assert_array_equal(step(x), x)
        turned_on.assert_called_once()


@case()
def check_training_on_the_device_equals_one_process_on_the_cpu(scope):
    is_alone = isinstance(scope, contextlib.nullcontext)
    random = np.random.default_rng(3)
    with tf.device("CPU:0") if is_alone else contextlib.nullcontext():
        with scope:
            layers = keras.layers
            model = keras.Sequential([
                *(keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.BatchNormalization()),
                *(layers.MaxPooling2D(), layers.Flatten(), layers.Dense(5), layers.Dropout(0.2, seed=5)),
            ])  # fmt: skip
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = random.normal(size=(30, 8, 8, 1)), random.integers(0, 5, 30)
        logs = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    places = {v.value.device[-5:] for v in [*model.trainable_variables, *model.optimizer.variables[2:]]}
    assert places == {"CPU:0" if is_alone else "GPU:0"}, places
    return Trained(model, logs)
