"""predict, evaluate, single batches, and custom loops. Run by test_strategy.py."""

import numpy as np

from harness.rank_program import long
from keras_ddl import data
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, SIZE, STRATEGY, X, Y, assert_same_weights, keras, pair, set_precision

set_precision("float64")


def check_gather_of_ragged_and_sparse_rows():
    rows = [[10 * RANK + i] * (i + RANK) for i in range(RANK + 1)]
    everyone = [[10 * r + i] * (i + r) for r in range(SIZE) for i in range(r + 1)]
    ragged = data.gather_rows(tf.ragged.constant(rows, dtype=tf.int64), RANK, name="ragged")
    assert ragged.to_list() == everyone
    dense = np.arange(12).reshape(3, 4) * (np.arange(12).reshape(3, 4) % 3 == RANK % 3)
    sparse = data.gather_rows(tf.sparse.from_dense(dense), RANK, name="sparse")
    expected = [np.arange(12).reshape(3, 4) * (np.arange(12).reshape(3, 4) % 3 == r % 3) for r in range(SIZE)]
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), np.concatenate(expected))


@long
def check_predict_on_batch_stays_on_its_rank():
    alone, shared = pair()
    shared.predict(X, verbose=0)
    if RANK == 0:  # no other rank takes part
        np.testing.assert_allclose(shared.predict_on_batch(X[:5]), alone.predict(X[:5], verbose=0), rtol=0, atol=1e-15)
    assert shared.predict(X, verbose=0).shape == (43, 2)  # predict still gathers


def custom_loop(model, optimizer, strategy, function):
    loss_fn = keras.losses.MeanSquaredError()

    @tf.function
    def inner_loss(y, predicted):  # traced once, reused for other numbers of rows
        return loss_fn(y, predicted)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = inner_loss(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    if strategy is None:
        return step
    if function == "run in function":
        return tf.function(lambda x, y: strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None))
    if function == "function in run":
        step = tf.function(step)
    return lambda x, y: strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)


@long
def check_custom_loops():
    # Keras scales a loss by 1 / SIZE in float32, whatever its dtype.
    tolerance = 1e-14 if SIZE in (1, 2, 4) else 1e-7
    for function in ("run in function", "function in run", "eager"):
        alone, shared = pair()
        alone_optimizer = keras.optimizers.Adam(0.01)
        with STRATEGY.scope():
            optimizer = keras.optimizers.Adam(0.01)
            optimizer.build(shared.trainable_variables)
        # As in tf.distribute, the means of all ranks count equally, so all ranks get equally many rows.
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4 * SIZE, drop_remainder=True)
        one = custom_loop(alone, alone_optimizer, None, function)
        all_ranks = custom_loop(shared, optimizer, STRATEGY, function)
        expected = [float(one(x, y)) for x, y in dataset]
        got = [float(all_ranks(x, y)) for x, y in STRATEGY.experimental_distribute_dataset(dataset)]
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance, err_msg=function)
        assert_same_weights(alone, shared, tolerance)


def check_reduce_and_gather():
    value = tf.reshape(tf.range(6.0) + RANK, (2, 3))
    stacked = np.stack([np.arange(6.0).reshape(2, 3) + r for r in range(SIZE)])
    np.testing.assert_allclose(STRATEGY.reduce("SUM", value, axis=None), stacked.sum(0))
    np.testing.assert_allclose(STRATEGY.reduce(tf.distribute.ReduceOp.MEAN, value, axis=None), stacked.mean(0))
    np.testing.assert_allclose(STRATEGY.reduce("SUM", value, axis=0), stacked.sum((0, 1)))
    np.testing.assert_allclose(STRATEGY.reduce("MEAN", value, axis=1), stacked.mean((0, 2)))
    uneven = tf.range(RANK + 1.0)
    expected = np.concatenate([np.arange(r + 1.0) for r in range(SIZE)])
    np.testing.assert_allclose(STRATEGY.reduce("MEAN", uneven, axis=0), expected.mean())
    np.testing.assert_allclose(STRATEGY.gather(uneven, axis=0), expected)
    np.testing.assert_allclose(STRATEGY.gather(value, axis=1), np.concatenate(stacked, axis=1))
    structure = STRATEGY.reduce("SUM", {"a": value, "b": (uneven[0],)}, axis=None)
    assert float(structure["b"][0]) == 0.0

    def in_replica():
        context = tf.distribute.get_replica_context()
        assert context.num_replicas_in_sync == SIZE and context.replica_id_in_sync_group == RANK
        return context.all_reduce("sum", [value, value]), context.all_gather(uneven, axis=0)

    (total, _), gathered = STRATEGY.run(in_replica)
    np.testing.assert_allclose(total, stacked.sum(0))
    np.testing.assert_allclose(gathered, expected)
    assert int(STRATEGY.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group)) == RANK


@long
def check_metric_results_in_a_custom_loop():
    """A metric counts the rank's rows inside `run`; outside, eagerly or in a function, its result covers all ranks."""
    with STRATEGY.scope():
        seen = keras.metrics.MeanSquaredError()
    alone = keras.metrics.MeanSquaredError()

    @tf.function
    def step(x, y):
        STRATEGY.run(lambda x, y: [seen.update_state(y, x), None][1], args=(x, y))
        return seen.result()

    for x, y in STRATEGY.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((Y, X[:, :2])).batch(9)):
        inside = step(x, y)
    alone.update_state(X[:, :2], Y)
    np.testing.assert_allclose([inside, seen.result()], [alone.result()] * 2, rtol=1e-14)
