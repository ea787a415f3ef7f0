"""Losses, optimizers, layers and data under the Strategy equal those of one process. Run by test_strategy.py."""

import os

import numpy as np

from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, SIZE, WEIGHTS, X, Y, keras, recorded_warnings
from strategy.oracle import case, check_equal_to_one_process, fit


def sgd(**arguments):
    return lambda: keras.optimizers.SGD(0.05, **arguments)


def adam(**arguments):
    return lambda: keras.optimizers.Adam(0.01, **arguments)


@long
def check_two_outputs_with_loss_weights():
    def build():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(4, activation="tanh", activity_regularizer=keras.regularizers.L1(1e-3))(inputs)
        return keras.Model(
            inputs, {"a": keras.layers.Dense(2, name="a")(hidden), "b": keras.layers.Dense(1, name="b")(hidden)}
        )

    for batch_size in (10, 43):  # unknown and known numbers of rows: Keras weighs its trackers differently
        check_equal_to_one_process(
            sgd(),
            build=build,
            compiled={
                "loss": lambda: {"a": "mse", "b": keras.losses.Huber(reduction="sum")},
                "loss_weights": lambda: {"a": 0.5, "b": 0.02},
                "metrics": lambda: {"a": ["mae"], "b": ["mse"]},
            },
            fit={"y": {"a": Y, "b": Y[:, :1]}, "batch_size": batch_size},
        )


@long
def check_gradient_accumulation():
    check_equal_to_one_process(adam(gradient_accumulation_steps=3, global_clipnorm=0.1))


@long
def check_run_eagerly():
    class Eager(keras.Sequential):
        pass

    def build():
        return Eager([keras.Input((6,)), keras.layers.Dropout(0.2), keras.layers.Dense(2)])

    with recorded_warnings("Eager.train_step runs eagerly: every rank") as messages:
        check_equal_to_one_process(adam(), build=build, compiled={"run_eagerly": True})
    assert len(messages) == (RANK == 0), messages


@long
def check_shuffling_with_a_script_seed_equals_one_process():
    # The one-process run sets the seed, as a script would; Keras's order depends on nothing else.
    check_equal_to_one_process(sgd(), fit={"shuffle": True})


@long
def check_generator_loses_no_rows():
    def generator():
        for start in range(0, 43, 9):
            yield X[start : start + 9], Y[start : start + 9]

    def build():  # unbuilt: Keras reads a batch to infer its shape
        return keras.Sequential(
            [keras.layers.Dense(3, kernel_initializer="ones"), keras.layers.Dense(2, kernel_initializer="ones")]
        )

    check_equal_to_one_process(sgd(), build=build, fit={"x": generator, "epochs": 1})


@long
def check_data_of_unknown_length_counts_iterations_and_seeds_as_one_process():
    """TensorFlow increments `iterations` and draws seeds before it notices that an epoch has ended."""

    def dataset():
        data = tf.data.Dataset.from_tensor_slices((X[:42], Y[:42])).batch(9)
        return data.filter(lambda x, y: True)  # its length is not known

    def build():
        return keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(2)])

    check_equal_to_one_process(
        lambda: keras.optimizers.Adam(0.05, beta_1=0.5), build=build, fit={"x": dataset, "epochs": 3}
    )


def check_eager_steps_with_ranks_without_rows():
    """The last batch has one row."""
    check_equal_to_one_process(
        sgd(), compiled={"run_eagerly": True}, fit={"x": X[:11], "y": Y[:11], "batch_size": 10, "epochs": 1}
    )


def check_tensorflow_uses_this_ranks_share_of_cores():
    share = max(1, len(os.sched_getaffinity(0)) // SIZE)  # one host, and no rank is bound
    assert tf.config.threading.get_intra_op_parallelism_threads() == share
    assert tf.config.threading.get_inter_op_parallelism_threads() == max(2, share)


def check_20_adam_steps_with_three_steps_per_execution():
    check_equal_to_one_process(adam(), compiled={"steps_per_execution": 3}, fit={"epochs": 4})


def check_uneven_batches_and_ranks_without_rows():
    # 43 = 4 * 10 + 3: the last batch has fewer rows than four ranks
    check_equal_to_one_process(sgd(), fit={"batch_size": max(SIZE, 5), "epochs": 1})


@long
def check_sample_weight_and_weighted_metrics():
    check_equal_to_one_process(
        sgd(), compiled={"weighted_metrics": lambda: ["mae"]}, fit={"sample_weight": WEIGHTS, "validation_split": 0.2}
    )


@long
@case(tolerance=1e-6)  # Keras computes it in float32
def check_ctc_in_an_endpoint_layer(scope):
    class Endpoint(keras.layers.Layer):
        def call(self, inputs):
            labels, logits = inputs
            rows = keras.ops.shape(labels)[0]
            target_lengths = keras.ops.sum(keras.ops.cast(labels > 0, "int32"), axis=1)
            output_lengths = keras.ops.full((rows,), 5, dtype="int32")
            self.add_loss(
                keras.ops.mean(keras.ops.ctc_loss(labels, logits, target_lengths, output_lengths, mask_index=0))
            )
            return logits

    with scope:
        sequence, labels = keras.Input((5, 3), name="s"), keras.Input((2,), dtype="int32", name="labels")
        logits = keras.layers.Dense(4)(keras.layers.GRU(4, return_sequences=True)(sequence))
        model = keras.Model({"s": sequence, "labels": labels}, Endpoint()([labels, logits]))
        model.compile(keras.optimizers.SGD(0.05))
    rng = np.random.default_rng(3)
    sequences, labels = rng.normal(size=(43, 5, 3)), rng.integers(1, 4, size=(43, 2)).astype("int32")
    return fit(model, {"s": sequences, "labels": labels}, None, batch_size=10)
