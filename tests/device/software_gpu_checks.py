"""Collectives and a training on software GPUs. Run by test_software_gpu.py, with both paths of tensors."""

import contextlib
import os
from unittest import mock

import keras
import numpy as np
import pytest

import keras_ddl
from keras_ddl import communicator, device, ops
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import RankMismatchError
from strategy.common import RANK, SIZE, STRATEGY
from strategy.oracle import Trained, case

THROUGH_HOST = os.environ["KERAS_DDL_TF_STREAM"] == "none"


def check_path_of_tensors_is_as_said():
    said = "TensorFlow copies tensors to the host for collectives, because KERAS_DDL_TF_STREAM=none"
    assert device.path_of_tensors() == (said if THROUGH_HOST else "collectives take tensors on GPUs")
    with keras_ddl.split(0, name="pair") as pair:
        for comm in (communicator.communicator_of(None), pair):
            for dtype, on_gpu in ((tf.float32, not THROUGH_HOST), (tf.int64, False)):
                before = comm.native().count()["staged"]
                total = ops.all_reduce(tf.ones([2], dtype), comm=comm)
                np.testing.assert_array_equal(total, [SIZE, SIZE])
                assert comm.native().count()["staged"] - before == on_gpu, (comm, dtype)


def check_errors_are_those_of_tensors_on_the_cpu():
    messages = []
    for place in ("CPU:0", "GPU:0"):
        with tf.device(place), pytest.raises(RankMismatchError) as caught:
            ops.all_reduce(tf.zeros([3 + RANK]) + 1.0, name="unequal")
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "unequal" in messages[0], messages


def check_one_rank_may_have_its_tensor_on_the_cpu():
    with tf.device("CPU:0" if RANK == 0 else "GPU:0"):
        np.testing.assert_array_equal(ops.all_reduce(tf.zeros([5]) + RANK), [sum(range(SIZE))] * 5)


def check_ranks_may_have_different_numbers_of_rows():
    @tf.function
    def step(rows, splits):
        return ops.all_gather(rows * 2.0) * 1.0, ops.all_to_all(rows * 3.0, splits)[0] * 1.0

    def from_all(rows_per_number):
        return np.concatenate([np.full([rows_per_number * number, 3], number) for number in range(1, SIZE + 1)])

    number = RANK + 1
    for _ in range(5):
        gathered, received = step(tf.fill([SIZE * number, 3], float(number)), [number] * SIZE)
        np.testing.assert_array_equal(gathered, from_all(SIZE) * 2)
        np.testing.assert_array_equal(received, from_all(1) * 3)


def check_rank_uses_only_its_gpu():
    assert [each.name for each in tf.config.get_visible_devices("GPU")] == [f"/physical_device:GPU:{RANK}"]
    assert STRATEGY.job.device == "/device:GPU:0"
    assert tf.config.experimental.get_memory_growth(tf.config.get_visible_devices("GPU")[0]) is None


def check_sessions_with_a_config_use_only_that_gpu():
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session(config=v1.ConfigProto()) as session:
        assert [each.device_type for each in session.list_devices()] == ["CPU", "GPU"]
        (total,) = session.run([ops.all_reduce(tf.fill([3], 1.0 + RANK) * 2.0)])
    np.testing.assert_array_equal(total, [SIZE * (SIZE + 1.0)] * 3)


def check_collectives_and_device_wait_for_each_other():
    for elements in (10, 100_002):
        numbers = np.arange(elements) % 13.0

        @tf.function
        def step(x):
            y = x * x + x  # computed late on the device, like the sums of the results
            results = [ops.all_reduce(y), ops.broadcast(y, root=SIZE - 1), ops.all_gather(y), ops.reduce_scatter(y)]
            return [each + each for each in [*results, *ops.all_reduce_n([y, x])]]

        results_by_rank = [(numbers + rank) ** 2 + numbers + rank for rank in range(SIZE)]
        total = np.sum(results_by_rank, axis=0)
        own = np.split(total, SIZE)[RANK]
        expected = [
            total,
            results_by_rank[-1],
            np.concatenate(results_by_rank),
            own,
            total,
            SIZE * numbers + sum(range(SIZE)),
        ]
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


@case("float32", tolerance=1e-2)
def check_mixed_precision_equals_one_process_up_to_rounding(scope):
    random = np.random.default_rng(4)
    layers, policy = keras.layers, keras.DTypePolicy("mixed_bfloat16")
    with scope:
        first = layers.Dense(5, activation="tanh", dtype=policy)
        model = keras.Sequential([keras.Input((6,)), first, layers.Dense(2, dtype="float32")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(random.normal(size=(30, 6)), random.normal(size=(30, 2)), batch_size=8, shuffle=False, verbose=0)
    assert (first.compute_dtype, first.kernel.dtype) == ("bfloat16", "float32")
    return Trained(model, {})
