"""What each rank has of its own (data) and what all share (weights, statistics, accumulated gradients).

Run by test_strategy.py.
"""

import numpy as np

from harness.rank_program import long
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.tensorflow import tf
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
    set_precision,
)
from strategy.oracle import Trained, case, fit

set_precision("float64")


@long
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


@long
def check_what_steps_write_is_known_whoever_made_it():
    """Ranks that have not finished a step get it from others (survival.py)."""
    teacher = tf.Variable(tf.zeros([6], tf.float64))

    class Taught(keras.Sequential):
        def train_step(self, batch):
            x, y = batch
            teacher.assign_add(tf.reduce_mean(x + keras.random.normal(tf.shape(x)), 0))
            return super().train_step((x + teacher, y))

    with STRATEGY.scope():
        model = Taught([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("adam", "mse", metrics=["mae"])
    model.fit(X[:10], Y[:10], batch_size=5, verbose=0)
    (execution,) = model.train_function._executions.values()
    written = {id(each) for each in execution.written()}
    drawn = keras_compat.global_seed_generator().state
    expected = [*model.variables, *model.optimizer.variables, *model.metrics_variables, drawn]
    missing = [each.path for each in expected if id(each.value) not in written]
    assert not missing and id(teacher) in written, missing


def accumulating(scope, steps=3, **options):
    with scope:
        model = dense_model()
        model.compile(keras.optimizers.AdamW(0.02, gradient_accumulation_steps=steps, **options), "mse")
    return model


def slots(model):
    return [variable.numpy() for variable in model.optimizer.variables]


@case()
def check_what_a_fit_leaves_in_the_middle_of_an_accumulation(scope):
    model = accumulating(scope)
    logs = {}
    for number, rows in enumerate((20, 40, 10)):  # 2, 4 and 1 steps
        trained = fit(model, X[:rows], Y[:rows], epochs=1, validation_data=(X[:5], Y[:5]))
        logs[f"fit {number}"] = [trained.logs, slots(model)]
    return Trained(model, logs)


@long
@case()
def check_eager_steps_between_others(scope):
    model = accumulating(scope)
    fit(model, X[:20], Y[:20], epochs=1)
    with STRATEGY.scope() if model.distribute_strategy is STRATEGY else scope:
        model.compile(model.optimizer, "mse", run_eagerly=True)
    return fit(model, X[:40], Y[:40], epochs=1)
