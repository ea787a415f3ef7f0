"""predict, evaluate, single batches, custom loops, data of one rank, random streams. Run by test_strategy.py."""

import os
import time

import numpy as np

import keras_ddl
from keras_ddl import data
from parallel.strategy_common import (
    RANK,
    SIZE,
    STRATEGY,
    X,
    Y,
    check_equal_on_all_ranks,
    dense_model,
    keras,
    set_precision,
    tf,
)

set_precision("float64")


def pair(build=dense_model, **compiled):
    """A model in one process and one on all ranks, with the same weights."""

    def compiled_model():
        model = build()
        arguments = {"metrics": ["mae"], **{k: v() if callable(v) else v for k, v in compiled.items()}}
        model.compile(**{"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", **arguments})
        return model

    alone = compiled_model()
    with STRATEGY.scope():
        shared = compiled_model()
    shared.set_weights([keras_ddl.broadcast_object(w) for w in alone.get_weights()])
    alone.set_weights(shared.get_weights())
    return alone, shared


def assert_same_weights(alone, shared, tolerance=1e-14):
    for one, mine in zip(alone.get_weights(), shared.get_weights()):
        np.testing.assert_allclose(mine, one, rtol=0, atol=tolerance)
    check_equal_on_all_ranks(shared)


def rows_of_ranks(count):
    """Row slices of an uneven split: rank 0 has more than half."""
    ends = [0, *np.linspace(count // 2 + 1, count, SIZE).astype(int)]
    return [slice(ends[r], ends[r + 1]) for r in range(SIZE)]


def check_predict_returns_all_rows_in_order():
    alone, shared = pair()
    for arguments in ({"batch_size": 10}, {"batch_size": 43}, {"batch_size": SIZE}):
        np.testing.assert_allclose(
            shared.predict(X, verbose=0, **arguments), alone.predict(X, verbose=0), rtol=0, atol=1e-15
        )
    one_row = shared.predict(X[:1], verbose=0)  # fewer rows than ranks
    np.testing.assert_allclose(one_row, alone.predict(X[:1], verbose=0), rtol=0, atol=1e-15)


def check_predict_with_several_steps_and_structures():
    def build():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(3)(inputs)
        return keras.Model(inputs, {"value": hidden, "positive": hidden > 0})

    alone, shared = pair(build, loss=None, metrics=None, steps_per_execution=2)
    expected = alone.predict(X, verbose=0, batch_size=9)
    got = shared.predict(tf.data.Dataset.from_tensor_slices(X).batch(9), verbose=0)
    np.testing.assert_allclose(got["value"], expected["value"], rtol=0, atol=1e-15)
    np.testing.assert_array_equal(got["positive"], expected["positive"])
    assert got["positive"].dtype == bool


def check_gather_of_ragged_and_sparse_rows():
    rows = [[10 * RANK + i] * (i + RANK) for i in range(RANK + 1)]
    everyone = [[10 * r + i] * (i + r) for r in range(SIZE) for i in range(r + 1)]
    ragged = data.gather_rows(tf.ragged.constant(rows, dtype=tf.int64), RANK, name="ragged")
    assert ragged.to_list() == everyone
    dense = np.arange(12).reshape(3, 4) * (np.arange(12).reshape(3, 4) % 3 == RANK % 3)
    sparse = data.gather_rows(tf.sparse.from_dense(dense), RANK, name="sparse")
    expected = [np.arange(12).reshape(3, 4) * (np.arange(12).reshape(3, 4) % 3 == r % 3) for r in range(SIZE)]
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), np.concatenate(expected))


def check_evaluate_is_that_of_all_rows():
    alone, shared = pair(
        metrics=lambda: ["mae", keras.metrics.RootMeanSquaredError(name="rmse"), keras.metrics.R2Score(name="r2")]
    )
    expected = alone.evaluate(X, Y, batch_size=10, verbose=0, return_dict=True)
    got = shared.evaluate(X, Y, batch_size=10, verbose=0, return_dict=True)
    assert got.keys() == expected.keys()
    for key in expected:
        np.testing.assert_allclose(got[key], expected[key], rtol=1e-12, err_msg=key)
    assert sorted(shared.evaluate(X, Y, batch_size=10, verbose=0)) == sorted(got.values())


def check_single_batches_of_uneven_ranks():
    alone, shared = pair()
    mine = rows_of_ranks(20)[RANK]
    for function in ("train_on_batch", "test_on_batch"):
        for _ in range(2):
            expected = getattr(alone, function)(X[:20], Y[:20], return_dict=True)
            got = getattr(shared, function)(X[mine], Y[mine], return_dict=True)
            for key in expected:
                np.testing.assert_allclose(got[key], expected[key], rtol=0, atol=1e-14, err_msg=f"{function} {key}")
    assert isinstance(shared.train_on_batch(X[mine], Y[mine]), list)
    alone.train_on_batch(X[:20], Y[:20])
    assert_same_weights(alone, shared)


def check_predict_on_batch_stays_on_its_rank():
    alone, shared = pair()
    shared.predict(X, verbose=0)
    if RANK == 0:  # no other rank takes part
        np.testing.assert_allclose(shared.predict_on_batch(X[:5]), alone.predict(X[:5], verbose=0), rtol=0, atol=1e-15)
    assert shared.predict(X, verbose=0).shape == (43, 2)  # still the gathering function


def custom_loop(model, optimizer, strategy, function):
    loss_fn = keras.losses.MeanSquaredError()

    @tf.function
    def inner_loss(y, predicted):  # traced once, used by steps with other shares of rows
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


def check_custom_loops():
    for function in ("run in function", "function in run", "eager"):
        alone, shared = pair()
        alone_optimizer = keras.optimizers.Adam(0.01)
        with STRATEGY.scope():
            optimizer = keras.optimizers.Adam(0.01)
            optimizer.build(shared.trainable_variables)
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
        one = custom_loop(alone, alone_optimizer, None, function)
        all_ranks = custom_loop(shared, optimizer, STRATEGY, function)
        expected = [float(one(x, y)) for x, y in dataset]
        got = [float(all_ranks(x, y)) for x, y in STRATEGY.experimental_distribute_dataset(dataset)]
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-14, err_msg=function)
        assert_same_weights(alone, shared)


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


class CustomStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_initializer="ones")
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, x):
        return self.dense(x)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.seen.update_state(tf.ones(tf.shape(x)[:1]))
        return {"seen": self.seen.result(), "rank_squared": tf.constant(float(RANK**2))}


def check_custom_train_step_with_keys_that_are_no_metrics():
    alone, shared = pair(CustomStep, metrics=None)
    alone.build((None, 6))
    shared.build((None, 6))
    arguments = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
    alone.fit(X, Y, **arguments)
    history = shared.fit(X, Y, **arguments).history
    assert history["seen"] == [43.0, 43.0]
    np.testing.assert_allclose(history["rank_squared"], np.mean(np.square(np.arange(SIZE))))
    assert_same_weights(alone, shared)


def check_data_of_each_rank_with_unequal_lengths():
    # Rank r has r + 2 batches of 3 rows; step k of all ranks together is one batch of one process.
    batches = {
        r: [(X[6 * r + 2 * k : 6 * r + 2 * k + 3], Y[6 * r + 2 * k : 6 * r + 2 * k + 3]) for k in range(r + 2)]
        for r in range(SIZE)
    }

    def make(context):
        assert (context.input_pipeline_id, context.num_replicas_in_sync) == (RANK, SIZE)
        mine = batches[context.input_pipeline_id]
        return tf.data.Dataset.from_generator(
            lambda: iter(mine),
            output_signature=(tf.TensorSpec((None, 6), tf.float64), tf.TensorSpec((None, 2), tf.float64)),
        )

    alone, shared = pair()
    dataset = STRATEGY.distribute_datasets_from_function(make)
    history = shared.fit(dataset, epochs=2, verbose=0).history
    for _ in range(2):
        for k in range(SIZE + 1):
            parts = [batches[r][k] for r in range(SIZE) if k < len(batches[r])]
            alone.train_on_batch(*(np.concatenate(arrays) for arrays in zip(*parts)))
    assert_same_weights(alone, shared)
    assert len(history["loss"]) == 2
    assert len(list(dataset)) == SIZE + 1
    everything = shared.predict(dataset, verbose=0)
    assert everything.shape == (3 * sum(r + 2 for r in range(SIZE)), 2)


def check_random_streams_differ_between_ranks():
    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + tf.random.uniform(tf.shape(x), dtype=x.dtype)

    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5)])
        noise = keras.Sequential([keras.Input((64,)), Noise()])

    @tf.function
    def draw(x):
        return STRATEGY.run(lambda v: (model(v, training=True), noise(v)), args=(x,))

    for values in draw(tf.ones((2, 64))):
        everyone = keras_ddl.all_gather_object(values.numpy().tobytes(), name="draws")
        assert len(set(everyone)) == SIZE


def check_seed_streams_stay_apart_after_loading_and_training():
    import tempfile
    from pathlib import Path

    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "w.weights.h5")
        model.save_weights(path)
        model.load_weights(path)
    model.set_weights([keras_ddl.broadcast_object(w) for w in model.get_weights()])  # rank 0's seeds, too
    model.fit(X, Y, batch_size=10, verbose=0)
    states = keras_ddl.all_gather_object([v.numpy().tolist() for v in model.variables if "seed" in v.name], name="s")
    assert len({str(state) for state in states}) == SIZE
    assert len({state[0][1] for state in states}) == 1, "the counters run in step"
    check_equal_on_all_ranks(model)


def check_moving_statistics_are_averaged_and_survive_ranks_without_rows():
    with STRATEGY.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(2)]
        )
        model.compile("sgd", "mse")
    rows = SIZE * 2 + 1  # the last batch is one row: the other ranks have none
    model.fit(X[:rows], Y[:rows], batch_size=SIZE, epochs=1, shuffle=False, verbose=0)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    check_equal_on_all_ranks(model)
    # Rows of each rank: one in each full batch, and the last batch's on rank 0.
    expected = []
    for rank in range(SIZE):
        mean = np.zeros(6)
        for row in [rank, SIZE + rank, *([2 * SIZE] if rank == 0 else [])]:
            mean = 0.5 * mean + 0.5 * X[row]
        expected.append(mean)
    np.testing.assert_allclose(model.layers[0].moving_mean.numpy(), np.mean(expected, axis=0), rtol=1e-12)


def check_layers_of_all_kinds_take_ranks_without_rows():
    def build():
        inputs = keras.Input((8, 8, 2))
        x = keras.layers.Conv2D(3, 3, activation="relu")(inputs)
        x = keras.layers.MaxPooling2D()(x)
        x = keras.layers.GroupNormalization(3)(x)
        x = keras.layers.Reshape((9, 3))(x)
        x = keras.layers.MultiHeadAttention(1, 2)(x, x)
        x = keras.layers.LayerNormalization()(keras.layers.GRU(4, return_sequences=True)(x))
        return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(keras.layers.Flatten()(x)))

    images = np.random.default_rng(1).normal(size=(2 * SIZE + 1, 8, 8, 2))
    labels = np.arange(2 * SIZE + 1) % 3
    alone, shared = pair(build, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    arguments = {"batch_size": SIZE, "epochs": 1, "shuffle": False, "verbose": 0}
    expected = alone.fit(images, labels, **arguments).history
    history = shared.fit(images, labels, **arguments).history
    for key in expected:
        np.testing.assert_allclose(history[key], expected[key], rtol=0, atol=1e-12)
    assert_same_weights(alone, shared, 1e-12)


def check_variables_are_rank_0s_from_the_start():
    with STRATEGY.scope():
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(2)])
        model.build((None, 6))
        plain = tf.Variable(float(RANK))
        flags = tf.Variable([RANK == 0, True])
        words = tf.Variable(f"rank {RANK}")
    check_equal_on_all_ranks(model)
    assert float(plain) == 0.0 and bool(flags[0]) and words.numpy() == b"rank 0"


def check_weights_loaded_on_rank_0_reach_all():
    alone, shared = pair()
    shared.optimizer.build(shared.trainable_variables)
    if RANK == 0:
        shared.set_weights([w + 1 for w in alone.get_weights()])
        shared.optimizer.learning_rate.assign(0.01)
    shared.fit(X, Y, batch_size=10, epochs=1, verbose=0)
    check_equal_on_all_ranks(shared)
    assert float(shared.optimizer.learning_rate.numpy()) == 0.01


def check_mixed_precision_takes_one_scale():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with STRATEGY.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
    finally:
        set_precision("float64")
    x = X.astype("float32")
    if RANK == SIZE - 1:
        x[-1] = 1e30  # overflows on the rank that holds the last row only
    before = model.get_weights()
    model.fit(x[-10:], Y[-10:].astype("float32"), batch_size=10, epochs=1, shuffle=False, verbose=0)
    assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**14
    np.testing.assert_array_equal(before[0], model.get_weights()[0])
    check_equal_on_all_ranks(model)


def check_bucket_size_is_agreed_and_measured_once():
    """Ranks of different settings and different clocks plan the same buckets."""
    from keras_ddl import bucket_size

    before = dict(os.environ)
    os.environ["KERAS_DDL_BUCKET_BYTES"] = "auto" if RANK == 0 else str(1000 + RANK)
    try:
        measured = bucket_size.agree()
        assert measured.measured and measured.bytes in bucket_size.SIZES
        assert set(keras_ddl.all_gather_object(measured, name="test/sizes")) == {measured}
        measure, bucket_size.measure = bucket_size.measure, None
        try:
            assert bucket_size.agree("auto") == measured
        finally:
            bucket_size.measure = measure
        assert bucket_size.agree(12345) == (12345, False)
        times = bucket_size.measure(clock=lambda: time.perf_counter() * (RANK + 1))
        assert set(keras_ddl.all_gather_object(tuple(times.items()), name="test/times")) == {tuple(times.items())}
    finally:
        os.environ.clear()
        os.environ.update(before)


def check_buckets_can_overlap_with_backward():
    """In the traced step no bucket waits for another, and the first ones do not need all of backward."""
    strategy = keras_ddl.Strategy(bucket_bytes=1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), *(keras.layers.Dense(4, use_bias=False) for _ in range(5))])
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        return strategy.run(model.train_step, args=((x, y),))

    graph = step.get_concrete_function(tf.zeros([3, 6], "float64"), tf.zeros([3, 4], "float64")).graph
    collectives = [op for op in graph.get_operations() if op.type.startswith("Ddl")]
    buckets = [op for op in collectives if b"gradients" in op.get_attr("tensor_name")]
    assert len(buckets) == 5, [op.name for op in collectives]

    def ancestors(op):
        found, pending = set(), [op]
        while pending:
            current = pending.pop()
            for one in [*(t.op for t in current.inputs), *current.control_inputs]:
                if one not in found:
                    found.add(one)
                    pending.append(one)
        return found

    needs = {op: ancestors(op) for op in buckets}
    assert not any(other in needs[op] for op in buckets for other in buckets)
    backward = {op: sum(one.type == "MatMul" for one in needs[op]) for op in buckets}
    assert len(set(backward.values())) == 5, backward  # each needs one layer more of backward than the one before
