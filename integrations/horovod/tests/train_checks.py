"""Training with Horovod's interface, where each rank has its own batches and loss. Run by test_horovod_training.py."""

import warnings

import keras
import numpy as np
import tensorflow as tf
from horovod_training import (
    BATCH,
    RANK,
    SIZE,
    STEPS,
    X,
    Y,
    assert_close,
    compare,
    dense_model,
    fit,
    mine,
    raises,
)

import keras_ddl
from harness.rank_program import long
from keras_ddl import ops
from keras_ddl.errors import ConfigError
from keras_ddl.horovod.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from keras_ddl.horovod.tape import DistributedGradientTape


def check_fit_equals_one_process():
    compare(lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    compare(lambda: keras.optimizers.Adam(0.01))


def check_clipping_comes_after_the_reduction():
    compare(lambda: keras.optimizers.SGD(0.1, clipnorm=0.05))
    compare(lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05))


@long
def check_schedules_and_decay():
    schedule = keras.optimizers.schedules.ExponentialDecay
    compare(lambda: keras.optimizers.AdamW(schedule(0.01, 2, 0.5), weight_decay=0.1, use_ema=True))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(lambda: 0.05))
    optimizer.apply([tf.constant(1.0, tf.float64)], [variable := keras.Variable(1.0)])
    np.testing.assert_allclose(variable.numpy(), 0.95)


def check_accumulation_reduces_once_per_update():
    calls = []
    original = ops.all_reduce_n
    ops.all_reduce_n = lambda *args, **kwargs: calls.append(kwargs["name"]) or original(*args, **kwargs)
    arguments = {"backward_passes_per_step": 2, "average_aggregated_gradients": True, "compiled": {"run_eagerly": True}}
    accumulated = {"global_clipnorm": 0.05, "gradient_accumulation_steps": 2}
    adam = keras.optimizers.Adam
    try:
        compare(lambda: adam(0.01, global_clipnorm=0.05), oracle=lambda: adam(0.01, **accumulated), **arguments)
        assert len(calls) == 2 * STEPS // 2, calls
    finally:
        ops.all_reduce_n = original


def check_iterations_count_batches_as_in_horovod():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.5, 0.25])
    optimizer = DistributedOptimizer(keras.optimizers.Nadam(schedule), backward_passes_per_step=2)
    by_hand = DistributedOptimizer(
        keras.optimizers.SGD(lambda: 0.5 if int(by_hand.iterations.numpy()) <= 3 else 0.25), backward_passes_per_step=2
    )
    plain = keras.optimizers.Nadam(0.5, gradient_accumulation_steps=2)
    variables = [keras.Variable([1.0]) for _ in range(3)]
    for batch in range(6):
        for each, variable in zip((optimizer, by_hand, plain), variables):
            each.apply([tf.ones([1], variable.dtype)], [variable])
        assert (int(optimizer.iterations), int(by_hand.iterations)) == (batch + 1, batch + 1)
        assert int(plain.iterations) == (batch + 1) // 2  # plain Keras is unchanged
        if batch == 3:  # by the mean or the sum of two equal gradients: Nadam gives the same
            np.testing.assert_allclose(variables[0].numpy(), variables[2].numpy(), rtol=1e-4)
    np.testing.assert_allclose(variables[1].numpy(), [1.0 - 2 * 0.5 - 2 * 0.5 - 2 * 0.25])
    assert float(optimizer.learning_rate) == 0.25


def check_loss_scaling_skips_the_step_on_all_ranks():
    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=4.0)

    compare(scaled)
    # Only the last rank overflows; also when Keras itself wraps the distributed optimizer.
    x = mine(X).copy()
    if RANK == SIZE - 1:
        x[BATCH * 2] = np.inf
    outside = keras.optimizers.LossScaleOptimizer(DistributedOptimizer(keras.optimizers.SGD(0.05)), initial_scale=4.0)
    for optimizer in (DistributedOptimizer(scaled()), outside):
        model = dense_model()
        fit(model, optimizer, x, mine(Y), BATCH)
        assert int(optimizer.inner_optimizer.iterations) == 2 * STEPS - 2
        assert all(np.isfinite(w).all() for w in model.get_weights())
        assert_close(model, model)


def check_saved_optimizer_is_plain_keras():
    optimizer = DistributedOptimizer(keras.optimizers.Adam(0.01, clipnorm=1.0), backward_passes_per_step=2)
    plain = keras.optimizers.Adam(0.01, clipnorm=1.0, gradient_accumulation_steps=2)
    config = {**optimizer.get_config(), "name": plain.name}
    assert config == plain.get_config()
    assert keras.optimizers.serialize(optimizer)["module"] == "keras.optimizers"
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is keras.optimizers.Adam and "_ddl_reduction" not in vars(again)


def check_jit_compile_is_off():
    class WithGpu(keras.Sequential):
        def _resolve_auto_jit_compile(self):
            return True

    model, plain = (WithGpu([keras.Input((6,)), keras.layers.Dense(2)]) for _ in range(2))
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    assert model.jit_compile is False
    distributed = DistributedOptimizer(keras.optimizers.SGD(0.1))
    raises(ConfigError, "jit_compile", lambda: model.compile(distributed, "mse", jit_compile=True))
    raises(TypeError, r"compile\(\) got an unexpected", lambda: model.compile(distributed, los="mse"))
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    assert plain.jit_compile is True


def check_float8_scales_take_the_maximum_over_ranks():
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
    scale, weight = keras.Variable(1.0), keras.Variable(1.0)
    scale.overwrite_with_gradient = True
    optimizer.apply([tf.constant(5.0 + RANK, tf.float64), tf.constant(1.0, tf.float64)], [scale, weight])
    assert float(scale.numpy()) == 4.0 + SIZE and float(weight.numpy()) == 0.0


def check_contradictory_arguments_are_refused():
    sgd = keras.optimizers.SGD
    raises(ConfigError, "takes an optimizer of Keras 3", lambda: DistributedOptimizer("sgd"))
    raises(ConfigError, "reduced (only )?once", lambda: DistributedOptimizer(DistributedOptimizer(sgd())))
    raises(ConfigError, "must be Average or Sum", lambda: DistributedOptimizer(sgd(), op="adasum"))
    raises(ConfigError, "op=Average", lambda: DistributedOptimizer(sgd(), op="sum", gradient_predivide_factor=2.0))
    raises(ConfigError, "groups must be", lambda: DistributedOptimizer(sgd(), groups=-1))
    raises(ConfigError, "backward_passes", lambda: DistributedOptimizer(sgd(), backward_passes_per_step=0))
    twice = sgd(gradient_accumulation_steps=2)
    raises(ConfigError, "same thing", lambda: DistributedOptimizer(twice, backward_passes_per_step=3))
    raises(ConfigError, "must be Keras layers", lambda: PartialDistributedOptimizer(sgd(), local_layers=["dense"]))
    raises(ConfigError, "takes a tf.GradientTape", lambda: DistributedGradientTape(sgd()))
    twice = DistributedGradientTape(tf.GradientTape())
    raises(ConfigError, "takes a tf.GradientTape", lambda: DistributedGradientTape(twice))


# ---- the tape --------------------------------------------------------------------------------------------------------


def loss_of(model, x, y):
    return tf.reduce_mean(tf.square(model(x, training=True) - y))


def train_by_tape(model, wrap, x, y, inside=False):
    optimizer = keras.optimizers.Adam(0.01)

    def step(x, y):
        if inside:
            with wrap(tf.GradientTape()) as tape:
                loss = loss_of(model, x, y)
        else:
            with tf.GradientTape() as tape:
                loss = loss_of(model, x, y)
            tape = wrap(tape)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    for one, other in zip(x, y):
        step(one, other)
    traced = tf.function(step)
    for one, other in zip(x, y):
        traced(one, other)
    return model


def check_tape_equals_one_process():
    together = (X.reshape(STEPS, -1, 6), Y.reshape(STEPS, -1, 2))
    alone = train_by_tape(dense_model(), lambda tape: tape, *together)
    for inside in (False, True):
        shared = train_by_tape(dense_model(), DistributedGradientTape, X[:, RANK], Y[:, RANK], inside)
        assert_close(shared, alone)


def check_tape_with_structures_slices_and_persistence():
    table = tf.Variable(tf.ones([5, 2], tf.float64))
    weight = keras.Variable(2.0 * np.ones([2]))
    with tf.GradientTape(persistent=True) as tape:
        rows = tf.gather(table, [RANK, 4])
        loss = tf.reduce_sum(rows * weight) * (RANK + 1.0)
        unused = tf.Variable(1.0)
    shared = DistributedGradientTape(tape)
    found = shared.gradient(loss, {"table": table, "more": [weight, unused]})
    assert found["more"][1] is None and isinstance(found["table"], tf.IndexedSlices)
    mean = (SIZE + 1) / 2
    np.testing.assert_allclose(found["more"][0], [2 * mean] * 2)
    expected = np.zeros([5, 2])
    for rank in range(SIZE):
        expected[[rank, 4]] += 2 * (rank + 1) / SIZE
    np.testing.assert_allclose(tf.convert_to_tensor(found["table"]), expected)
    np.testing.assert_allclose(tape.gradient(loss, weight), [2 * (RANK + 1)] * 2)  # the plain tape is unchanged
    single = DistributedGradientTape(tape, sparse_as_dense=True, op="max").gradient(loss, table)
    assert isinstance(single, tf.Tensor) and single[4, 0] == 2 * SIZE
    np.testing.assert_allclose(shared.gradient(loss, weight), [2 * mean] * 2)


def check_complete_table_as_slices_is_not_gathered():
    """A gradient as slices that cover all rows is summed, whereas slices of looked-up rows are gathered."""
    table = tf.Variable(tf.ones([5, 2], tf.float64))

    @tf.custom_gradient
    def product(values):
        return (RANK + 1) * tf.reduce_sum(values), lambda g: tf.IndexedSlices(
            g * (RANK + 1) * tf.ones([5, 2], tf.float64), tf.range(5), tf.constant([5, 2])
        )

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            loss = product(table) + tf.reduce_sum(tf.gather(table, [RANK, 4]))
        return DistributedGradientTape(tape, op="sum").gradient(loss, table)

    found = gradient()
    assert len(found.indices) == 5 + 2 * SIZE, found.indices
    expected = np.full([5, 2], SIZE * (SIZE + 1) / 2)
    for rank in range(SIZE):
        expected[[rank, 4]] += 1
    np.testing.assert_allclose(tf.convert_to_tensor(found), expected)


# ---- last: a Strategy, which would affect other checks ---------------------------------------------------------------


def check_a_strategy_and_a_distributed_optimizer_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = keras_ddl.Strategy()
        outside = DistributedOptimizer(keras.optimizers.SGD(0.1))
        with strategy.scope():
            inner = keras.optimizers.SGD(0.1)
            raises(ConfigError, "reduced (only )?once", lambda: DistributedOptimizer(inner))
            model = dense_model()
            raises(ConfigError, "reduced (only )?once", lambda: model.compile(outside, "mse"))
        raises(ConfigError, "reduced (only )?once", lambda: DistributedOptimizer(inner))

        def step():
            variable = tf.constant(1.0)
            with tf.GradientTape() as tape:
                tape.watch(variable)
                loss = variable * 2
            return DistributedGradientTape(tape).gradient(loss, variable)

        raises(ConfigError, "reduced (only )?once", lambda: strategy.run(step))
