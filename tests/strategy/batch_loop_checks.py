"""Metrics over the whole batch, and batches made of several tensors with their own rows. Run by test_strategy.py."""

import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, SIZE, STRATEGY, X, keras
from strategy.oracle import case, fit

layers, ops = keras.layers, keras.ops
SGD = keras.optimizers.SGD


class TwoBatches(keras.Model):
    """Trains on labelled and unlabelled rows; the two numbers of rows may differ."""

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
def check_two_batches_of_different_sizes(scope):
    """Some ranks get equally many rows of both components, and others do not."""
    with scope:
        model = TwoBatches()
        model.compile(SGD(0.05))
    return fit(model, two_batches(7, 8), None)


@long
@case()
def check_two_batches_whose_spec_gives_no_sizes(scope):
    """The last batches are shorter, so the spec does not give the sizes."""
    with scope:
        model = TwoBatches()
        model.compile(SGD(0.05), steps_per_execution=2)
    return fit(model, two_batches(9, 5, drop_remainder=False), None)


@long
def check_error_names_changed_batch_sizes():
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
    """The spec leaves the numbers of rows open, so ranks compare their first batches."""

    def batches():
        if RANK == 0:
            yield X[:8], (X[:8],)

    spec = tf.TensorSpec([None, 6], tf.float64)
    with STRATEGY.scope():
        model = TwoBatches()
        model.compile(SGD(0.05))
    with pytest.raises(keras_ddl.errors.RankMismatchError, match=r"same number of batches.*no batch on rank\(s\) \[1"):
        model.fit(tf.data.Dataset.from_generator(batches, output_signature=(spec, (spec,))), verbose=0)
    assert keras_ddl.all_gather_object(RANK) == list(range(SIZE)), "no collective is left pending"
