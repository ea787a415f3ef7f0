"""Programs modelled on TensorFlow's guides to its multi-worker strategies. Run by test_strategy.py."""

import json
import os
import re
import warnings

import numpy as np
import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from strategy.common import (
    RANK,
    SIZE,
    STRATEGY,
    X,
    Y,
    assert_same_weights,
    dense_model,
    keras,
    pair,
)

PER_WORKER = 4
GLOBAL = PER_WORKER * SIZE
STEPS = 5


def rows():
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X), seed=5).repeat()


@long
def check_custom_loop_of_the_multi_worker_guide():
    """Uses InputContext, an iterator passed to a tf.function, and compute_average_loss."""
    alone, shared = pair()
    with STRATEGY.scope():
        optimizer = keras.optimizers.RMSprop(0.01)
        seen = keras.metrics.MeanAbsoluteError(name="seen")

    contexts = []

    def dataset_of(context):
        contexts.append(context)
        batch = context.get_per_replica_batch_size(GLOBAL)
        return rows().shard(context.num_input_pipelines, context.input_pipeline_id).batch(batch)

    data = STRATEGY.distribute_datasets_from_function(dataset_of)
    (context,) = contexts
    assert (context.num_input_pipelines, context.input_pipeline_id) == (SIZE, RANK)
    assert context.num_replicas_in_sync == SIZE == STRATEGY.num_replicas_in_sync

    def loss_of(model, x, y):
        error = keras.losses.MeanSquaredError(reduction="none")(y, model(x, training=True))
        return tf.nn.compute_average_loss(error) + tf.nn.scale_regularization_loss(tf.add_n(model.losses))

    @tf.function
    def train_step(iterator):
        def step(inputs):
            x, y = inputs
            with tf.GradientTape() as tape:
                loss = loss_of(shared, x, y)
            gradients = tape.gradient(loss, shared.trainable_variables)
            optimizer.apply_gradients(zip(gradients, shared.trainable_variables))
            seen.update_state(y, shared(x))
            return loss

        losses = STRATEGY.run(step, args=(next(iterator),))
        return STRATEGY.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    one_optimizer, one_seen, expected = keras.optimizers.RMSprop(0.01), keras.metrics.MeanAbsoluteError(), []
    for x, y in rows().batch(GLOBAL).take(2 * STEPS):
        with tf.GradientTape() as tape:
            loss = loss_of(alone, x, y)
        one_optimizer.apply_gradients(zip(tape.gradient(loss, alone.trainable_variables), alone.trainable_variables))
        one_seen.update_state(y, alone(x))
        expected.append(float(loss))

    STRATEGY.__dict__.pop("_ddl_warned_of_means", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="In strategy.run gradients are summed")
        iterator = iter(data)
        losses = [float(train_step(iterator)) for _ in expected]
    np.testing.assert_allclose(losses, expected, rtol=1e-13)
    assert_same_weights(alone, shared, 1e-13)
    np.testing.assert_allclose(seen.result(), one_seen.result(), rtol=1e-13)


@long
def check_distributed_dataset_in_a_loop():
    """Reads experimental_distribute_dataset by an iterator, and by a loop inside a tf.function."""
    whole = tf.data.Dataset.from_tensor_slices(X).batch(2 * SIZE + 1)
    input_options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    data = STRATEGY.experimental_distribute_dataset(whole, input_options)
    assert data.element_spec.shape.as_list() == [None, 6]
    iterator = iter(data)
    first = STRATEGY.run(tf.identity, args=(iterator.get_next(),), options=tf.distribute.RunOptions())
    np.testing.assert_array_equal(STRATEGY.gather(first, axis=0), X[: 2 * SIZE + 1])
    (local,) = STRATEGY.experimental_local_results(first)
    assert local is first

    @tf.function
    def count(data):
        total = tf.zeros([], tf.int64)
        for x in data:
            part = STRATEGY.run(lambda x: tf.shape(x, tf.int64)[0], args=(x,))
            total += STRATEGY.reduce("SUM", part, axis=None)
        return total

    assert int(count(data)) == len(X)
    mean = STRATEGY.reduce(tf.distribute.ReduceOp.MEAN, first, axis=0)
    np.testing.assert_allclose(mean, X[: 2 * SIZE + 1].mean(0), rtol=1e-14)


def check_cluster_resolver_and_replica_context():
    resolver = STRATEGY.cluster_resolver
    assert (resolver.task_type, resolver.task_id) == ("worker", RANK)
    assert len(resolver.cluster_spec().as_dict()["worker"]) == SIZE
    assert len(STRATEGY.extended.worker_devices) == 1
    assert tf.distribute.has_strategy() is False
    with STRATEGY.scope():
        assert tf.distribute.get_strategy() is STRATEGY and tf.distribute.in_cross_replica_context()
    value = STRATEGY.experimental_distribute_values_from_function(
        lambda context: tf.constant([context.replica_id_in_sync_group, context.num_replicas_in_sync])
    )
    assert value.numpy().tolist() == [RANK, SIZE]

    def in_replica(value):
        context = tf.distribute.get_replica_context()
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1 << 20)
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, value, options=options)
        merged = context.merge_call(lambda strategy, value: strategy.extended.reduce_to("SUM", value, value), (value,))
        return total, merged

    total, merged = STRATEGY.run(in_replica, args=(value,))
    assert total.numpy().tolist() == merged.numpy().tolist() == [sum(range(SIZE)), SIZE * SIZE]


def check_reduce_and_gather_of_scalars_and_variables():
    with STRATEGY.scope():
        summed = tf.Variable(
            1.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
    assert float(STRATEGY.reduce("SUM", summed, axis=None)) == SIZE  # summed once, not again for each rank
    assert float(STRATEGY.reduce("SUM", 1.5, axis=None)) == 1.5 * SIZE
    assert STRATEGY.gather(tf.ones([2, 1]), axis=-1).shape == (2, SIZE)
    with pytest.raises(ConfigError, match="Received: a scalar"):
        STRATEGY.gather(tf.constant(1.0), axis=0)


def check_chief_comes_from_tf_config():
    """Sets TF_CONFIG as `keras-ddl run --tf-config` does."""
    workers = [f"h{rank}:1" for rank in range(1, SIZE)]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"chief": ["h0:1"], "worker": workers, "evaluator": ["h9:1"]}})
    try:
        resolver = STRATEGY.cluster_resolver
        expected = ("chief", 0) if RANK == 0 else ("worker", RANK - 1)
        assert (resolver.task_type, resolver.task_id) == expected
        assert resolver.cluster_spec().as_dict() == {"chief": ["h0:1"], "worker": workers}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["h0:1"] * (SIZE + 1)}})
        assert (STRATEGY.cluster_resolver.task_type, STRATEGY.cluster_resolver.task_id) == ("worker", RANK)
    finally:
        del os.environ["TF_CONFIG"]


def check_arguments_of_tensorflows_strategies():
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1 << 20)
    simple = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    for arguments, keywords, message in (
        ((), {"communication_options": options}, "KERAS_DDL_BUCKET_BYTES bounds"),
        ((), {"cluster_resolver": simple}, "Received: cluster_resolver="),
        ((["GPU:0", "GPU:1"],), {}, "Received: devices=['GPU:0', 'GPU:1']"),
        ((), {"devices": ["GPU:0"]}, "keras-ddl run -np N"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            keras_ddl.Strategy(*arguments, **keywords)
    keras_ddl.Strategy(cluster_resolver=None)
    with pytest.raises(TypeError, match="'speed'"):
        keras_ddl.Strategy(speed=2)


def check_preemption_handler_is_refused():
    checkpoint = tf.train.Checkpoint(step=tf.Variable(0))
    with pytest.raises(
        ConfigError, match=rf"Received: a PreemptionCheckpointHandler on rank {RANK} of {SIZE}.*resume=True"
    ):
        tf.distribute.experimental.PreemptionCheckpointHandler(STRATEGY.cluster_resolver, checkpoint, "never-made")


@long
def check_strategy_set_for_the_whole_program():
    alone = dense_model()
    tf.distribute.experimental_set_strategy(STRATEGY)
    try:
        shared = dense_model()
        alone.set_weights(shared.get_weights())
        shared.compile(keras.optimizers.SGD(0.05), "mse")
        shared.fit(X, Y, batch_size=GLOBAL, shuffle=False, verbose=0)
    finally:
        tf.distribute.experimental_set_strategy(None)
    alone.compile(keras.optimizers.SGD(0.05), "mse")
    alone.fit(X, Y, batch_size=GLOBAL, shuffle=False, verbose=0)
    assert_same_weights(alone, shared, 1e-13)
