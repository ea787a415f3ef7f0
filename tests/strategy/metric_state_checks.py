"""Metrics and their state as programs write them. Run by test_strategy.py; see oracle.py."""

from harness.rank_program import long
from strategy.common import X, Y, keras, small_model
from strategy.oracle import case, fit

layers, ops = keras.layers, keras.ops


class Stateful(keras.metrics.Metric):
    """Sets its state to what `update` makes of it, the labels and the predictions."""

    def __init__(self, update, dtype=None, **arguments):
        super().__init__(name="state", dtype=dtype)
        self.update = update
        self.value = self.add_variable((), initializer="zeros", name="value", dtype=dtype, **arguments)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.update(self.value, y_true, y_pred)

    def result(self):
        return ops.cast(self.value, "float64") + 0.0


def train_with_metric(scope, *arguments, **named):
    with scope:
        model = small_model()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Stateful(*arguments, **named)])
    return fit(model, validation_data=(X[:7], Y[:7]))


@case()
def check_metric_that_holds_a_maximum(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign(ops.maximum(value, ops.max(ops.abs(y - p)))))


@long
@case()
def check_metric_that_holds_a_minimum(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign(ops.minimum(value, ops.min(y))))


@long
@case()
def check_metric_that_adds_up_means(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign_add(ops.mean(ops.abs(y - p))))


@long
@case()
def check_metric_that_adds_up_roots_of_means(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign_add(ops.sqrt(ops.mean(ops.square(y - p)))))


@long
@case()
def check_metric_that_counts_batches(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign_add(1), "int32")


@long
@case()
def check_metric_that_counts_rows(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign(value + ops.shape(y)[0]), "int32")


@long
@case()
def check_metric_that_holds_the_last_value(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign(ops.mean(y)))


@long
@case()
def check_metric_that_holds_a_moving_average(scope):
    return train_with_metric(scope, lambda value, y, p: value.assign(0.9 * value + 0.1 * ops.mean(ops.abs(y - p))))


@case()
def check_metric_that_says_how_its_state_combines(scope):
    class Declared(Stateful):
        ddl_reduction = {"value": "max"}

    def largest(value, y, p):
        return value.assign(ops.where(ops.max(y) > value, ops.max(y), value))

    with scope:
        model = small_model()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Declared(largest)])
    return fit(model)


@long
@case()
def check_metric_whose_result_is_its_variable(scope):
    class Total(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="total")
            self.value = self.add_variable((), initializer="zeros", name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign_add(ops.sum(ops.cast(ops.abs(y_true), self.value.dtype)))

        def result(self):
            return self.value

    with scope:
        model = small_model()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Total()])
    return fit(model)
