"""A script that sets no seed. Run by test_strategy.py."""

import random

import numpy as np

import keras_ddl
from keras_ddl.compat.tensorflow import tf

import keras  # isort: skip

from harness.rank_program import long

random.seed()  # a different state on each rank
STRATEGY = keras_ddl.Strategy()
RANK, SIZE = STRATEGY.rank, STRATEGY.size


class Rows(keras.Model):
    """Records the rows that it is trained with; an eager step sees the rows of all ranks, in the order of ranks."""

    def __init__(self):
        super().__init__()
        self.w = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x * self.w

    def train_step(self, batch):
        seen.append(batch[0].numpy()[:, 0].tolist())
        return super().train_step(batch)


seen: list[list[float]] = []


def rows_of_epochs(dataset, epochs=3, **arguments):
    with STRATEGY.scope():
        model = Rows()
        model.compile("sgd", "mse", run_eagerly=True)
        model.build((None, 1))
    seen.clear()
    starts = []

    class Mark(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            starts.append(len(seen))

    model.fit(dataset, epochs=epochs, verbose=0, callbacks=[Mark()], **arguments)
    mine = [seen[a:b] for a, b in zip(starts, [*starts[1:], len(seen)])]
    return keras_ddl.all_gather_object(mine, name="rows")


def assert_epochs(by_rank, rows):
    orders = []
    for epoch in range(3):
        assert all(theirs[epoch] == by_rank[0][epoch] for theirs in by_rank)
        order = [row for batch in by_rank[0][epoch] for row in batch]
        assert sorted(order) == list(range(rows)), order
        orders.append(order)
    assert orders[0] != orders[1] != orders[2], "every epoch has its own order"
    assert orders[0] != sorted(orders[0])


def check_arrays_are_shuffled_alike_and_differently_in_each_epoch():
    x = np.arange(23.0, dtype="float32")[:, None]
    assert_epochs(rows_of_epochs(x, y=x, batch_size=5), 23)
    by_rank = rows_of_epochs(x, y=x, batch_size=5, shuffle="batch")
    for batch in by_rank[0][0]:
        assert max(batch) - min(batch) <= 4


@long
def check_tf_data_is_shuffled_alike_and_differently_in_each_epoch():
    x = np.arange(23.0, dtype="float32")[:, None]
    assert_epochs(rows_of_epochs(tf.data.Dataset.from_tensor_slices((x, x)).shuffle(23).batch(5)), 23)


def check_initial_weights_are_equal():
    with STRATEGY.scope():
        kernel = keras.layers.Dense(5)
        kernel.build((None, 4))
    everyone = keras_ddl.all_gather_object(kernel.get_weights()[0].tobytes(), name="kernel")
    assert len(set(everyone)) == 1
