"""State that layers update in call, against one process. Run by test_strategy.py; see oracle.py."""

import numpy as np

import keras_ddl
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from strategy.common import RANK, SIZE, STRATEGY, X, Y, check_equal_on_all_ranks, keras, set_precision
from strategy.oracle import Trained, case

layers, ops = keras.layers, keras.ops


class Stateful(layers.Layer):
    """Keeps state of given names, {name: add_weight's arguments}, and updates it in training by `update`."""

    def __init__(self, update, **state):
        super().__init__()
        self.update, self.arguments = update, state

    def build(self, shape):
        for name, arguments in self.arguments.items():
            defaults = {"name": name, "shape": (), "initializer": "zeros", "trainable": False}
            setattr(self, name, self.add_weight(**{**defaults, **arguments}))

    def call(self, x, training=False):
        changed = self.update(self, x) if training else None
        return x if changed is None else changed


def build(layer, run_eagerly=False):
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(2)(layer(inputs)))
    model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=run_eagerly)
    return model


def train(scope, layer, run_eagerly=False, x=X, y=Y):
    with scope:
        model = build(layer(), run_eagerly)
    return Trained(model, model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0).history)


def count(layer, x):
    rows = ops.shape(x)[0]
    layer.rows.assign_add(ops.cast(rows, layer.rows.dtype))
    layer.steps.assign_add(1)
    layer.total.assign(layer.total + ops.sum(x, axis=0))


COUNTERS = {"rows": {"dtype": "int32"}, "steps": {"dtype": "int64"}, "total": {"shape": (6,)}}


@case()
def check_counters_without_aggregation(scope):
    return train(scope, lambda: Stateful(count, **COUNTERS))


@case()
def check_sums_of_eager_steps_are_added_up_when_ranks_agree(scope):
    def update(layer, x):
        layer.rows.assign_add(ops.shape(x)[0])

    with scope:
        model = build(Stateful(update, rows={"dtype": "int32", "aggregation": "sum"}), run_eagerly=True)
    model.set_weights([np.full_like(w, 3) for w in model.get_weights()])
    model.fit(X[:40], Y[:40], batch_size=10, epochs=2, shuffle=False, verbose=0)
    return Trained(model, {"evaluated": model.evaluate(X, Y, verbose=0)})


@case()
def check_running_statistics_that_the_step_uses(scope):
    def update(layer, x):
        layer.mean.assign(0.9 * layer.mean + 0.1 * ops.mean(x, axis=0))
        mean, square = ops.mean(x, axis=0), ops.mean(ops.square(x), axis=0)
        layer.variance.assign(0.9 * layer.variance + 0.1 * (square - ops.square(mean)))
        return (x - layer.mean) / ops.sqrt(layer.variance + 1e-3)

    return train(scope, lambda: Stateful(update, mean={"shape": (6,)}, variance={"shape": (6,), "initializer": "ones"}))


@case()
def check_codebook_of_moving_averages(scope):
    def update(layer, x):
        distances = ops.sum(ops.square(x[:, None] - layer.codes), axis=2)
        chosen = ops.one_hot(ops.argmin(distances, axis=1), 4, dtype=x.dtype)
        layer.sizes.assign(0.8 * layer.sizes + 0.2 * ops.sum(chosen, axis=0))
        layer.sums.assign(0.8 * layer.sums + 0.2 * ops.matmul(ops.transpose(chosen), x))
        layer.codes.assign(layer.sums / ops.expand_dims(layer.sizes + 1e-2, 1))
        quantized = ops.matmul(chosen, layer.codes)
        return x + ops.stop_gradient(quantized - x)

    def layer():
        drawn = keras.initializers.RandomNormal(seed=3)
        state = {"codes": {"shape": (4, 6), "initializer": drawn}, "sums": {"shape": (4, 6), "initializer": drawn}}
        return Stateful(update, sizes={"shape": (4,), "initializer": "ones"}, **state)

    return train(scope, layer)


@case()
def check_spectral_normalization(scope):
    return train(scope, lambda: layers.SpectralNormalization(layers.Dense(4)))


@case()
def check_queue_of_gathered_rows(scope):
    def update(layer, x):
        rows = keras_ddl.all_gather(x) if tf.distribute.has_strategy() else x
        layer.queue.assign(ops.concatenate([rows, layer.queue], axis=0)[:16])

    return train(scope, lambda: Stateful(update, queue={"shape": (16, 6)}), x=X[:40], y=Y[:40])


def refusal(layer, **arguments):
    set_precision("float64")
    try:
        train(STRATEGY.scope(), layer, **arguments)
    except ConfigError as error:
        return str(error)
    raise AssertionError("no ConfigError")


def check_rows_kept_in_state_are_refused():
    def update(layer, x):
        layer.queue.assign(ops.concatenate([x, layer.queue], axis=0)[:16])

    def unknown(layer, x):
        layer.queue.assign(ops.concatenate([x, layer.queue[: -ops.shape(x)[0]]], axis=0))

    for each in (unknown, update):
        message = refusal(lambda each=each: Stateful(each, queue={"shape": (16, 6)}))
        assert "'queue' of layer 'stateful" in message and "keras_ddl.all_gather" in message, message


def check_integers_that_differ_are_refused_by_name():
    def update(layer, x):
        layer.positive.assign(layer.positive + ops.cast(ops.any(x > 0), "int32") * (RANK + 1))

    for run_eagerly in (False, True):
        message = refusal(
            lambda: Stateful(update, positive={"dtype": "int32"}), run_eagerly=run_eagerly, x=abs(X[:40]), y=Y[:40]
        )
        assert "'positive' of layer 'stateful" in message and "aggregation='sum'" in message, message
        assert "on rank 0 and another on rank 1" in message


def check_aggregation_decides_where_rows_cannot_be_told():
    def update(layer, x):
        for name in ("mean", "first", "plain"):
            variable = getattr(layer, name)
            variable.assign(variable + RANK + 1.0)

    set_precision("float64")
    state = {"mean": {"aggregation": "mean"}, "first": {"aggregation": "only_first_replica"}, "plain": {}}
    trained = train(STRATEGY.scope(), lambda: Stateful(update, **state), run_eagerly=True, x=X[:20], y=Y[:20])
    mean = 4 * (SIZE + 1) / 2  # of steps in which rank r adds r + 1
    layer = trained.model.layers[1]
    assert [float(v.numpy()) for v in (layer.mean, layer.first, layer.plain)] == [mean, 4.0, mean]


def check_variances_are_averaged_and_ranks_without_rows_change_nothing():
    def update(layer, x):
        layer.variance.assign(0.5 * layer.variance + 0.5 * ops.var(x, axis=0))

    set_precision("float64")
    for run_eagerly in (False, True):
        rows = 2 * SIZE + 1 if not run_eagerly else 2 * SIZE
        with STRATEGY.scope():
            model = build(Stateful(update, variance={"shape": (6,)}), run_eagerly)
        model.fit(X[:rows], Y[:rows], batch_size=2 * SIZE, shuffle=False, verbose=0)
        assert np.isfinite(model.layers[1].variance.numpy()).all() and model.layers[1].variance.numpy().any()
        check_equal_on_all_ranks(model)


def check_recurrent_layers_that_carry_state_on_are_refused():
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((2, 3), batch_size=10), layers.GRU(2, stateful=True)])
        model.compile("sgd", "mse")
    try:
        model.fit(np.zeros((20, 2, 3)), np.zeros((20, 2)), batch_size=10, verbose=0)
    except ConfigError as error:
        assert "stateful=True" in str(error)
    else:
        raise AssertionError("no ConfigError")
