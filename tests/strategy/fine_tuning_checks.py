"""Fine-tuning and transfer learning: outside the scope, code may do what plain Keras allows. Run by test_strategy.py.

Each program uses the scope only for its first lines; the rest is as in one process.
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


def require_strategy(scope, model):
    """Returns the model after asserting that it belongs to STRATEGY."""
    assert isinstance(scope, contextlib.nullcontext) or keras_compat.strategy_of(model) is STRATEGY
    return model


def combined_logs(*trained):
    """Combines the logs of combined_logs fits."""
    logs = {f"{number} {key}": each.logs[key] for number, each in enumerate(trained) for key in each.logs}
    return Trained(trained[-1].model, logs)


@case()
def check_base_trained_in_the_second_fit(scope):
    base, model = with_head(scope)
    base.trainable = False
    model.compile(optimizers.Adam(1e-2), "mse", metrics=[keras.metrics.MeanAbsoluteError()])
    first = fit(model)
    base.trainable = True
    model.compile(optimizers.Adam(1e-4), "mse", metrics=["mae", keras.metrics.R2Score()])
    second = fit(model, validation_split=0.3)
    return combined_logs(first, second)


@case()
def check_head_made_outside_the_scope(scope):
    with scope:
        base = base_model()
    base.trainable = False
    model = keras.Model(base.input, layers.Dense(3, activation="softmax")(base.output))
    model.compile(optimizers.AdamW(1e-2, clipnorm=0.5), "sparse_categorical_crossentropy", metrics=["accuracy"])
    first = fit(require_strategy(scope, model), y=LABELS)
    base.trainable = True
    model.compile(optimizers.RMSprop(1e-3, momentum=0.5), keras.losses.SparseCategoricalCrossentropy())
    second = fit(model, y=LABELS)
    loss = model.evaluate(X, LABELS, batch_size=10, verbose=0)
    predicted = model.predict(X, batch_size=10, verbose=0)
    return combined_logs(first, second, Trained(model, {"loss": loss, "predicted": predicted}))


@case()
def check_optimizers_from_config_or_built_outside_the_scope(scope):
    _, model = with_head(scope)
    fits = []
    built = optimizers.Adam(1e-2)  # outside of the scope
    built.build(model.trainable_variables)
    for chosen in ("nadam", {"class_name": "Adam", "config": {"learning_rate": 1e-3}}, built):
        model.compile(chosen, "mse")
        fits.append(fit(model, epochs=1))
    model.optimizer = optimizers.SGD.from_config(optimizers.SGD(0.02, momentum=0.5).get_config())
    model.train_function = None
    return combined_logs(*fits, fit(model, epochs=1))


@case()
def check_folds_are_clones(scope):
    _, model = with_head(scope)
    fits = []
    for number in range(2):
        clone = keras.models.clone_model(model)
        clone.compile(optimizers.Adamax(1e-2), "mse", metrics=["mae"])
        rows = np.arange(len(X)) % 2 == number
        fits.append(fit(require_strategy(scope, clone), X[rows], Y[rows], validation_data=(X[~rows], Y[~rows])))
    return combined_logs(*fits)
