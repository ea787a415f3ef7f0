"""Custom metrics and layers with state. Run by test_strategy.py; see oracle.py."""

import keras_ddl
from keras_ddl.compat.tensorflow import tf
from strategy.common import X, Y, keras, small_model
from strategy.oracle import case, fit

layers, ops = keras.layers, keras.ops


@case()
def check_metric_with_declared_aggregation(scope):
    class Largest(keras.metrics.Metric):
        ddl_reduction = {"value": "max"}

        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_variable((), initializer="zeros", name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            largest = ops.cast(ops.max(y_true), self.value.dtype)
            self.value.assign(ops.where(largest > self.value, largest, self.value))

        def result(self):
            return self.value

    with scope:
        model = small_model()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Largest()])
    return fit(model)


class StatefulLayer(layers.Layer):
    """A layer with the given state, {name: arguments of add_weight}, which `update` changes in training."""

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


def train_layer(scope, layer, rows=43):
    with scope:
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(2)(layer()(inputs)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return fit(model, X[:rows], Y[:rows])


def count(layer, x):
    rows = ops.shape(x)[0]
    layer.rows.assign_add(ops.cast(rows, layer.rows.dtype))
    layer.steps.assign_add(1)
    layer.total.assign(layer.total + ops.sum(x, axis=0))


COUNTERS = {"rows": {"dtype": "int32"}, "steps": {"dtype": "int64"}, "total": {"shape": (6,)}}


@case()
def check_counters_without_aggregation(scope):
    return train_layer(scope, lambda: StatefulLayer(count, **COUNTERS))


@case()
def check_spectral_normalization(scope):
    return train_layer(scope, lambda: layers.SpectralNormalization(layers.Dense(4)))


@case()
def check_queue_of_gathered_rows(scope):
    def update(layer, x):
        rows = keras_ddl.all_gather(x) if tf.distribute.has_strategy() else x
        layer.queue.assign(ops.concatenate([rows, layer.queue], axis=0)[:16])

    return train_layer(scope, lambda: StatefulLayer(update, queue={"shape": (16, 6)}), rows=40)
