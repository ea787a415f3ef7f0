"""Transfer learning and its like: after the scope, programs do what plain Keras allows. Run by test_strategy.py.

Only the first lines of each program are in the scope; everything else is as one process has it.
"""

import contextlib

import numpy as np

from keras_ddl.compat import keras as keras_compat
from strategy.common import RNG, STRATEGY, X, Y, keras
from strategy.oracle import Trained, case, fit

ops, layers, optimizers = keras.ops, keras.layers, keras.optimizers
LABELS = (X @ RNG.normal(size=(6, 3))).argmax(axis=1)


def base_model():
    inputs = keras.Input((6,))
    hidden = layers.BatchNormalization()(layers.Dense(8, activation="tanh")(inputs))
    return keras.Model(inputs, layers.Dropout(0.2)(layers.Dense(5, activation="tanh")(hidden)), name="base")


def with_head(scope):
    with scope:
        base = base_model()
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(2)(base(inputs, training=False)))
        model.compile(optimizers.Adam(1e-2), "mse")
    return base, model


def of_the_job(scope, model):
    """The model, which all ranks train together, and none alone."""
    assert isinstance(scope, contextlib.nullcontext) or keras_compat.strategy_of(model) is STRATEGY
    return model


def several(*trained):
    """What several fits have left."""
    logs = {f"{number} {key}": each.logs[key] for number, each in enumerate(trained) for key in each.logs}
    return Trained(trained[-1].model, logs)


@case()
def check_the_base_is_trained_in_the_second_fit(scope):
    base, model = with_head(scope)
    base.trainable = False
    model.compile(optimizers.Adam(1e-2), "mse", metrics=[keras.metrics.MeanAbsoluteError()])
    first = fit(model)
    base.trainable = True
    model.compile(optimizers.Adam(1e-4), "mse", metrics=["mae", keras.metrics.R2Score()])
    second = fit(model, validation_split=0.3)
    return several(first, second)


@case()
def check_a_head_is_made_outside_of_the_scope(scope):
    with scope:
        base = base_model()
    base.trainable = False
    model = keras.Model(base.input, layers.Dense(3, activation="softmax")(base.output))
    model.compile(optimizers.AdamW(1e-2, clipnorm=0.5), "sparse_categorical_crossentropy", metrics=["accuracy"])
    first = fit(of_the_job(scope, model), y=LABELS)
    base.trainable = True
    model.compile(optimizers.RMSprop(1e-3, momentum=0.5), keras.losses.SparseCategoricalCrossentropy())
    second = fit(model, y=LABELS)
    loss = model.evaluate(X, LABELS, batch_size=10, verbose=0)
    predicted = model.predict(X, batch_size=10, verbose=0)
    return several(first, second, Trained(model, {"loss": loss, "predicted": predicted}))


@case()
def check_optimizers_of_configurations_and_one_that_was_built_outside(scope):
    _, model = with_head(scope)
    fits = []
    built = optimizers.Adam(1e-2)  # outside of the scope
    built.build(model.trainable_variables)
    for chosen in ("nadam", {"class_name": "Adam", "config": {"learning_rate": 1e-3}}, built):
        model.compile(chosen, "mse")
        fits.append(fit(model, epochs=1))
    model.optimizer = optimizers.SGD.from_config(optimizers.SGD(0.02, momentum=0.5).get_config())
    model.train_function = None
    return several(*fits, fit(model, epochs=1))


@case()
def check_folds_are_clones(scope):
    _, model = with_head(scope)
    fits = []
    for number in range(2):
        clone = keras.models.clone_model(model)
        clone.compile(optimizers.Adamax(1e-2), "mse", metrics=["mae"])
        rows = np.arange(len(X)) % 2 == number
        fits.append(fit(of_the_job(scope, clone), X[rows], Y[rows], validation_data=(X[~rows], Y[~rows])))
    return several(*fits)
