"""Data of each rank, and state that ranks share: weights, statistics, accumulated gradients.

Run by test_strategy.py.
"""

import numpy as np

from harness.rank_program import long
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
def check_per_rank_data_of_unequal_lengths():
    # Rank r has r + 2 batches of 3 rows; one process trains on the k-th batches of all ranks as one batch.
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


def accumulating(scope, steps=3, **options):
    with scope:
        model = dense_model()
        model.compile(keras.optimizers.AdamW(0.02, gradient_accumulation_steps=steps, **options), "mse")
    return model


def slots(model):
    return [variable.numpy() for variable in model.optimizer.variables]


@case()
def check_fits_that_end_in_the_middle_of_an_accumulation(scope):
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
