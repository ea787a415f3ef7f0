"""State that layers update in call, against one process. Run by test_strategy.py; see oracle.py."""

import keras_ddl
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from strategy.common import STRATEGY, X, Y, keras, set_precision
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
