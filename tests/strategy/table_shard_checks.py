"""Tables in shards whose rows move between ranks, on real ranks, against one process. Run by test_strategy.py."""

import contextlib

import keras
import numpy as np
import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.shards import table_rows
from keras_ddl.strategy.shards import gathered_slots
from strategy.common import RANK, of_one_process, set_precision, state

STRATEGY = keras_ddl.Strategy(sharding="weights")
RNG = np.random.default_rng(5)
LINES, COUNT, WORDS, WIDTH = 41, 3, 400, 4  # the last batch is one line, so some ranks have none
IDS = RNG.zipf(1.5, (LINES, COUNT)) % WORDS
DENSE, Y = RNG.normal(size=(LINES, 5)), RNG.random((LINES, 1))
layers, optimizers = keras.layers, keras.optimizers
# The last batch opens extents, for which small tables would be gathered.
table_rows.USUAL_LINES, table_rows.USUAL_BYTES = 10, 1000


def dlrm():
    """Two tables, one of them also looked up by all lines' first id, as in recommenders."""
    ids, dense = keras.Input((COUNT,), dtype="int64"), keras.Input((5,))
    tables = [layers.Embedding(WORDS + 7 * n, WIDTH, name=f"table_{n}") for n in range(2)]
    bottom = layers.Dense(WIDTH, activation="relu")(dense)
    rows = layers.Concatenate(axis=1)([*(each(ids) for each in tables), layers.Reshape((1, WIDTH))(bottom)])
    pairs = layers.Flatten()(layers.Dot(axes=(2, 2))([rows, rows]))
    return keras.Model([ids, dense], layers.Dense(1)(layers.Concatenate()([pairs, bottom])))


def trained(strategy, optimizer, make=dlrm, x=(IDS, DENSE)):
    set_precision("float64")
    keras.utils.set_random_seed(11)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = make()
        model.compile(optimizer(), keras.losses.BinaryCrossentropy(from_logits=True), jit_compile=False)
    x = list(x) if isinstance(x, tuple) else x
    model.fit(x, Y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return model


def assert_trained_as_one_process(optimizer, make=dlrm, x=(IDS, DENSE)):
    """Returns the model, the report of its steps, and on rank 0 the model of one process."""
    model = trained(STRATEGY, optimizer, make, x)
    one = trained(None, optimizer, make, x) if RANK == 0 else None
    with STRATEGY.whole_model(model):
        mine = state(model)
    for value, expected in zip(mine, of_one_process(lambda: state(one)), strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)
    return model, STRATEGY.explain(model), one


def assert_as_one_process(optimizer, make=dlrm, x=(IDS, DENSE)):
    """Compares what the trained model computes, too. Returns the report of its steps."""
    model, report, one = assert_trained_as_one_process(optimizer, make, x)
    x = list(x) if isinstance(x, tuple) else x
    for call in (lambda m: m.evaluate(x, Y, verbose=0), lambda m: m.predict(x, verbose=0)):
        np.testing.assert_allclose(call(model), of_one_process(lambda: call(one)), rtol=0, atol=1e-12)  # noqa: B023
    return report


def check_adam_looks_up_and_updates_rows_where_they_are():
    report = assert_as_one_process(lambda: optimizers.Adam(1e-2))
    one, other = ((WORDS + 7 * n) * WIDTH * 8 for n in range(2))
    assert f"rows of tables of {one:,} or {other:,} bytes for GatherV2" in report, report  # together
    assert "all_to_all" in report and "for UnsortedSegmentSum" in report, report


def check_sgd_scatters_rows_at_their_owners():
    report = assert_as_one_process(lambda: optimizers.SGD(0.1))
    assert "for ResourceScatterSub" in report, report


@long
def check_adagrad_divides_rows_where_they_are():
    report = assert_trained_as_one_process(lambda: optimizers.Adagrad(0.1))[1]
    assert "for ResourceScatterAdd" in report, report


@long
def check_ftrl_of_tables_equals_one_process():
    assert_trained_as_one_process(lambda: optimizers.Ftrl(0.1, l1_regularization_strength=1e-3))


@long
def check_tables_are_clipped_decayed_and_averaged_as_by_one_process():
    adam = lambda: optimizers.Adam(1e-2, global_clipnorm=0.1, weight_decay=0.1, use_ema=True)  # noqa: E731
    assert_trained_as_one_process(adam)


def words():
    """Names by a vocabulary and by hash, in one table each; ids of the vocabulary twice."""
    names = keras.Input((COUNT,), dtype="string")
    known = layers.StringLookup(vocabulary=[f"word {n}" for n in range(WORDS // 2)])(names)
    one, other = layers.Embedding(WORDS, WIDTH), layers.Embedding(WORDS, WIDTH)
    rows = [one(known), other(layers.Hashing(WORDS)(names)), one(known[:, ::2])]
    return keras.Model(names, layers.Dense(1)(layers.Flatten()(layers.Concatenate(axis=1)(rows))))


@long
def check_names_and_several_look_ups_in_one_table_equal_one_process():
    names = tf.strings.join(["word ", tf.strings.as_string(IDS)])
    report = assert_as_one_process(lambda: optimizers.Adam(1e-2, global_clipnorm=0.1), words, names)
    assert "rows of tables of" in report and "needs all rows" not in report, report


@long
def check_gradients_of_tables_accumulate_at_the_owners():
    adam = lambda: optimizers.Adam(1e-2, gradient_accumulation_steps=3, clipnorm=0.1)  # noqa: E731
    model, report, _ = assert_trained_as_one_process(adam, words, tf.strings.join(["word ", tf.strings.as_string(IDS)]))
    names = [each.name for each in gathered_slots.slots_of(model)]
    assert sum("gradient_accumulator" in each for each in names) >= 2, names
    assert "for UnsortedSegmentSum" in report, report


@long
def check_losses_of_tables_are_scaled_as_by_one_process():
    scaled = lambda: optimizers.LossScaleOptimizer(optimizers.Adam(1e-2), initial_scale=64.0)  # noqa: E731
    report = assert_trained_as_one_process(scaled)[1]
    assert "for UnsortedSegmentSum" in report, report


def bag():
    ids = keras.Input((None,), dtype="int64", ragged=True)
    rows = layers.Embedding(WORDS, WIDTH)(ids)
    return keras.Model(ids, layers.Dense(1)(keras.ops.sum(rows, axis=1)))


def sparse_bag():
    ids = keras.Input((COUNT,), dtype="int64", sparse=True)
    return keras.Model(ids, layers.Dense(1)(layers.Flatten()(layers.Embedding(WORDS, WIDTH)(ids))))


@long
def check_ragged_and_sparse_lines_equal_one_process():
    ragged = tf.RaggedTensor.from_row_lengths(RNG.integers(0, WORDS, 80), np.arange(LINES) % 5)
    sparse = tf.sparse.from_dense(np.where(IDS % 3 == 0, 0, IDS))
    for make, x in ((bag, ragged), (sparse_bag, sparse)):
        report = assert_as_one_process(lambda: optimizers.Adam(1e-2), make, x)
        assert "rows of tables of" in report and "which all ranks need" not in report, report


def check_an_index_that_no_row_has_fails_on_all_ranks():
    wrong = IDS.copy()
    wrong[3, 1] = WORDS + 50
    raised = []
    for strategy in (None, STRATEGY) if RANK == 0 else (STRATEGY,):
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            trained(strategy, lambda: optimizers.Adam(1e-2), x=(wrong, DENSE))
        raised.append(str(error.value))
    assert all(f"indices[3,1] = {WORDS + 50} is not in [0, " in each for each in raised), raised
