"""Rows of tables in shards that are looked up by ragged and sparse ids: each rank has the rows of its rows of the batch."""

import keras
import numpy as np
import pytest
from cut.simulated import Simulation
from cut.test_gathered_weights import Trained
from cut.test_table_rows import IDS, OPTIMIZERS, RNG, ROWS, WIDTH, LookedUp, adam, kinds_of, small_batches, whole_tables

from keras_ddl.compat.tensorflow import tf

LENGTHS = np.array([2, 0, 5, 1, 0, 3, 0], "int32")  # empty rows among others and at the end
LONG = pytest.mark.long
__all__ = ["small_batches"]


@pytest.fixture(autouse=True)
def drawn_from_a_seed(float64, small_batches):
    keras.utils.set_random_seed(3)


def ragged(ids, lengths):
    return tf.RaggedTensor.from_tensor(ids, lengths)


def summed(model, ids, lengths):
    return model.dense(tf.tanh(tf.reduce_sum(model.table(ragged(ids, lengths)), axis=1)))


def averaged(model, ids, lengths):
    return model.dense(tf.tanh(tf.reduce_mean(model.table(ragged(ids, lengths + 1)) * 2.0, axis=1)))


class Pooled(LookedUp):
    def call(self, batch, training=None):
        return self._call(self, *batch)


def trained(call, optimizer=None, *, size=3, ids=IDS, lengths=LENGTHS, steps=2, static=True):
    model = Pooled(call)
    batch = [ids, lengths]
    return Trained(model, batch, size=size, optimizer=optimizer, least=50, static=static).train(steps)


@pytest.mark.parametrize("call", [summed, averaged])
def test_rows_of_a_ragged_batch_go_to_the_ranks_of_its_rows(call):
    report = trained(call)
    print(report.text())
    assert whole_tables(report) == [] and "all_gather" not in kinds_of(report), report.text()


def sparse(ids, lengths):
    return ragged(ids, lengths).to_sparse()


def by_layer(model, ids, lengths):
    return model.dense(tf.tanh(model.table(sparse(ids, lengths))))


def pooled_by(combiner, safe=True):
    look_up = tf.nn.safe_embedding_lookup_sparse if safe else tf.nn.embedding_lookup_sparse

    def call(model, ids, lengths):
        table = tf.convert_to_tensor(model.table.embeddings)
        found = look_up(table, sparse(ids, lengths), *([] if safe else [None]), combiner=combiner)
        return model.dense(tf.tanh(found))

    return call


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("safe", [True, False])
def test_rows_of_a_sparse_batch_go_to_the_ranks_of_its_rows(combiner, safe):
    report = trained(pooled_by(combiner, safe))
    print(report.text())
    assert whole_tables(report) == [] and "all_gather" not in kinds_of(report), report.text()


def test_layer():
    report = trained(by_layer)
    print(report.text())
    assert whole_tables(report) == [] and "all_gather" not in kinds_of(report), report.text()
