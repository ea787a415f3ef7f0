"""Batches with fewer rows than ranks train as in one process.

Run by tests/cut/test_function.py.
"""

import contextlib

import numpy as np

from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, STRATEGY, WEIGHTS, X, Y, keras
from strategy.oracle import Trained, case, fit

layers, ops = keras.layers, keras.ops
IMAGES = np.random.default_rng(2).normal(size=(5, 8, 8, 3))


def model_of(scope, *stack, loss="mse", metrics=("mae", "mse"), **options):
    with scope:
        model = keras.Sequential([*stack, layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, metrics=list(metrics), **options)
    return model


def dense(scope, **options):
    return model_of(
        scope, keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.BatchNormalization(), **options
    )


def logs_of(model, x, y, batch_size):
    trained = fit(model, x, y, batch_size=batch_size, epochs=1, validation_data=(x, y))
    tested = model.evaluate(x, y, batch_size=batch_size, verbose=0)
    predicted = model.predict(x, batch_size=batch_size, verbose=0)
    return Trained(model, {**trained.logs, "tested": tested, "predicted": predicted})


@case()
def check_arrays_two_rows_at_a_time(scope):
    return logs_of(dense(scope), X[:5], Y[:5], 2)


@case()
def check_weights_of_rows_and_classes(scope):
    with scope:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="softmax")])
        loss = "sparse_categorical_crossentropy"
        model.compile(keras.optimizers.Adam(0.02), loss, weighted_metrics=["accuracy", loss], metrics=["accuracy"])
    labels = np.arange(5) % 3
    trained = fit(model, X[:5], labels, batch_size=1, class_weight={0: 0.5, 1: 2.0, 2: 1.0})
    weighted = fit(model, X[:5], labels, batch_size=1, sample_weight=WEIGHTS[:5], shuffle=True)
    return Trained(model, {"classes": trained.logs, "rows": weighted.logs})


@long
@case()
def check_datasets_of_known_and_unknown_sizes(scope):
    model = dense(scope)
    rows = tf.data.Dataset.from_tensor_slices((X[:5], Y[:5]))
    logs = {}
    for number, dataset in enumerate((rows.batch(1, drop_remainder=True), rows.batch(2))):
        logs[f"fit {number}"] = fit(model, dataset, None, epochs=1, validation_data=dataset).logs
        logs[f"test {number}"] = model.evaluate(dataset, verbose=0)
        logs[f"predict {number}"] = model.predict(dataset, verbose=0)
    return Trained(model, logs)


@long
@case(tolerance=1e-12)
def check_layers_for_images(scope):
    model = model_of(
        scope,
        keras.Input((8, 8, 3)),
        layers.Conv2D(4, 3, strides=2, padding="same"),
        layers.BatchNormalization(),
        layers.DepthwiseConv2D(3),
        layers.Conv2DTranspose(3, 3),
        layers.MaxPooling2D(2),
        layers.GroupNormalization(3),
        layers.UpSampling2D(2, interpolation="bilinear"),
        layers.AveragePooling2D(2),
        layers.SeparableConv2D(4, 2, padding="same"),
        layers.GlobalMaxPooling2D(),
    )
    return logs_of(model, IMAGES, Y[:5], 1)


def own_rows(scope, count):
    """One process takes all rows; on several ranks, rank 0 takes them all and the others none."""
    return slice(0, count if isinstance(scope, contextlib.nullcontext) or RANK == 0 else 0)


@case()
def check_single_batches_with_ranks_without_rows(scope):
    model = dense(scope)
    logs = {}
    for number in range(2):
        rows = own_rows(scope, 1)
        logs[f"train {number}"] = model.train_on_batch(X[rows], Y[rows], sample_weight=WEIGHTS[rows])
        logs[f"test {number}"] = model.test_on_batch(X[rows], Y[rows])
    return Trained(model, logs)


@long
@case()
def check_functions_with_few_rows(scope):
    in_one_process = isinstance(scope, contextlib.nullcontext)
    model = dense(scope)
    optimizer = model.optimizer

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(model(x, training=True) - y)) + ops.max(x)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss, model(x)

    logs = {}
    for options in ({}, {"reduce_retracing": True}, {"batches": "rank"}):
        function = tf.function(step) if in_one_process else STRATEGY.function(step, **options)
        for count in (1, 2, 1):
            rows = own_rows(scope, count) if "batches" in options else slice(0, count)
            loss, predicted = function(X[rows], Y[rows])
            logs[f"{options} {len(logs)}"] = [loss.numpy(), predicted.numpy()]
    return Trained(model, logs)
