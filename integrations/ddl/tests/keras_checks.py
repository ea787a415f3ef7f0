"""DDL with Keras, without a Strategy, on several ranks. Run by test_ddl.py."""

import keras
import numpy as np
import tensorflow as tf

import ddl
import keras_ddl

RANK, SIZE = ddl.rank(), ddl.size()
X = np.random.default_rng(3).normal(size=(24, 3)).astype(np.float32)
Y = X @ np.float32([[1.0], [-2.0], [0.5]])
ROWS = slice(RANK * 24 // SIZE, (RANK + 1) * 24 // SIZE)


def make_model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])


def whole(optimizer, steps: int) -> list[np.ndarray]:
    """Returns the weights of one process with all rows, trained in plain TensorFlow."""
    model = make_model(0)
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(X) - Y))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        for variable, gradient in zip(model.trainable_variables, gradients):
            variable.assign_sub(optimizer * gradient)
    return model.get_weights()


def compare(model: keras.Model, expected: list[np.ndarray]) -> None:
    for mine, of_all, one in zip(model.get_weights(), keras_ddl.all_gather_object(model.get_weights())[0], expected):
        np.testing.assert_array_equal(mine, of_all)
        np.testing.assert_allclose(mine, one, rtol=1e-4, atol=1e-6)


def check_fit_equals_one_process():
    model = make_model(RANK)
    # As Keras chooses on a GPU, although XLA has no kernel for collectives.
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    callbacks = [ddl.DDLCallback(), ddl.DDLGlobalVariablesCallback()]
    history = model.fit(
        X[ROWS], Y[ROWS], batch_size=24 // SIZE, epochs=3, shuffle=False, verbose=0, callbacks=callbacks
    ).history
    compare(model, whole(0.1, 3))
    assert len(set(keras_ddl.all_gather_object(history["loss"][-1]))) == 1


def check_callback_without_parentheses_is_named():
    for wrong in (ddl.DDLCallback, ddl.DDLGlobalVariablesCallback):
        model = make_model(RANK)
        model.compile("sgd", "mse")
        try:
            model.fit(X[ROWS], Y[ROWS], verbose=0, callbacks=[wrong])
        except keras_ddl.errors.ConfigError as error:
            assert f"Write {wrong.__name__}()" in str(error), error
        else:
            raise AssertionError("no error")


def check_custom_loop_equals_one_process():
    for wrap in (lambda optimizer: optimizer, lambda optimizer: keras.optimizers.LossScaleOptimizer(optimizer)):
        model = make_model(0)
        optimizer = wrap(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)

        @tf.function(autograph=False)
        def step(model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_mean(tf.square(model(X[ROWS]) - Y[ROWS])))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, [v.value for v in variables]), variables))

        for _ in range(2):
            step()
        compare(model, whole(0.1, 2))
