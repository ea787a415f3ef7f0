"""Aggregation and synchronization of the program's own tf.Variables. Run by test_strategy.py.

The values expected are those of tf.distribute.MirroredStrategy (TensorFlow 2.21), where replica r assigns r + 1.
"""

import numpy as np

import keras_ddl
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, RankMismatchError
from strategy.common import RANK, SIZE, STRATEGY, keras, raises
from strategy.oracle import Trained, case, fit

AGGREGATIONS, ON_READ = tf.VariableAggregation, tf.VariableSynchronization.ON_READ
TOTAL = SIZE * (SIZE + 1) / 2  # sum of r + 1 over ranks
layers, ops = keras.layers, keras.ops


def make(aggregation="NONE", value=3.0, **arguments):
    with STRATEGY.scope():
        return tf.Variable(value, aggregation=AGGREGATIONS[aggregation], trainable=False, **arguments)


def in_step(variable, how, value, eagerly=False, add=1.0):
    """Assigns `value` + `add` in strategy.run; the graph computes it from the rows of a batch.

    Returns: the value read inside, and the value read outside afterwards.
    """

    def step(rows):
        getattr(variable, how)(tf.reduce_sum(rows) + add)
        return variable.read_value()

    function = step if eagerly else tf.function(step)
    return float(STRATEGY.run(function, args=(tf.constant([value]),))), float(variable.numpy())


def check_assigned_values_are_aggregated():
    expected = {"SUM": TOTAL, "MEAN": TOTAL / SIZE, "ONLY_FIRST_REPLICA": 1.0}
    for eagerly in (False, True):
        for aggregation, total in expected.items():
            for how, result in (("assign", total), ("assign_add", 3 + total), ("assign_sub", 3 - total)):
                inside, outside = in_step(make(aggregation), how, float(RANK), eagerly)
                np.testing.assert_allclose([inside, outside], result, rtol=1e-6)


def check_variables_aggregated_on_read():
    for eagerly in (False, True):
        for aggregation, total, before in (
            ("SUM", TOTAL, 3.0 * SIZE),
            ("MEAN", TOTAL / SIZE, 3.0),
            ("ONLY_FIRST_REPLICA", 1.0, 3.0),
        ):
            variable = make(aggregation, synchronization=ON_READ)
            assert float(variable.numpy()) == before
            inside, outside = in_step(variable, "assign", float(RANK), eagerly)
            assert inside == RANK + 1.0
            np.testing.assert_allclose(outside, total, rtol=1e-6)
            inside, outside = in_step(variable, "assign_add", float(RANK), eagerly)
            assert inside == 2 * (RANK + 1.0)
            np.testing.assert_allclose(outside, 2 * total, rtol=1e-6)
            variable.assign(12.0)
            assert float(variable.numpy()) == 12.0 and float(tf.function(lambda v=variable: v + 1.0)()) == 13.0
            if RANK == 0:
                repr(variable)  # a repr on one rank is not collective


def check_unsupported_variables_are_refused_by_name():
    raises(ConfigError, "Received: seen.*SUM", lambda: make("NONE", synchronization=ON_READ, name="seen"))
    kept_apart = tf.VariableSynchronization.NONE
    raises(ConfigError, "Received: alone", lambda: make("SUM", synchronization=kept_apart, name="alone"))
    raises(ConfigError, "ON_READ and aggregation SUM", lambda: make("SUM", synchronization=ON_READ).assign_add(1.0))
    table = make("SUM", tf.zeros([3, 2]), name="table")
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]))
    raises(ConfigError, "table:0.scatter_sub", lambda: STRATEGY.run(lambda: table.scatter_sub(rows)))
    table.scatter_sub(rows)  # outside run, all ranks do the same


def check_variables_without_aggregation_stay_equal():
    for eagerly in (False, True):
        variable = make(name="steps")

        def step(rows, variable=variable):
            variable.assign_add(1.0)

        STRATEGY.run(step if eagerly else tf.function(step), args=(tf.constant([float(RANK)]),))
        assert float(variable.numpy()) == 4.0
        other = lambda v=variable, e=eagerly: in_step(v, "assign_add", float(RANK), e)  # noqa: E731
        raises((ConfigError, RankMismatchError), "steps:0.assign_add.*aggregation", other)


def check_reduced_gradients_are_applied_by_hand():
    weight = make(value=2.0, name="weight")

    @tf.function
    def train(rows):
        def step(rows):
            with tf.GradientTape() as tape:
                tape.watch(weight)
                loss = tf.reduce_sum(rows * weight) / SIZE
            gradient = tape.gradient(loss, weight)
            weight.assign_sub(0.5 * tf.distribute.get_replica_context().all_reduce("SUM", gradient))

        STRATEGY.run(step, args=(rows,))

    train(tf.constant([RANK + 1.0]))
    np.testing.assert_allclose(float(weight.numpy()), 2.0 - 0.5 * TOTAL / SIZE, rtol=1e-6)


def check_variables_made_in_a_traced_step_take_rank_0_values():
    made = {}

    @tf.function
    def step(rows):
        def body(rows):
            if not made:
                made["float"] = tf.Variable(tf.fill([2], float(RANK)), name="late")
                made["drawn"] = tf.Variable(lambda: tf.random.normal([3]), name="drawn")
                made["flag"] = tf.Variable(RANK == 0, name="flag")
            return rows + made["float"][0]

        return STRATEGY.run(body, args=(rows,))

    with STRATEGY.scope():
        assert step(tf.zeros([2])).numpy().tolist() == [0.0, 0.0]
    values = {name: variable.numpy().tolist() for name, variable in made.items()}
    assert values["float"] == [0.0, 0.0] and values["flag"] is True
    everyone = keras_ddl.all_gather_object(values, name="values")
    assert all(each == everyone[0] for each in everyone)


class Counting(layers.Layer):
    """Keeps state in tf.Variables, which Keras does not track."""

    def __init__(self):
        super().__init__()
        self.rows = tf.Variable(0, dtype=tf.int32, trainable=False, name="rows")
        self.mean = tf.Variable(tf.zeros([6], tf.float64), trainable=False, name="mean")

    def call(self, x, training=False):
        if training:
            self.rows.assign_add(tf.shape(x)[0])
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, axis=0))
        return x - self.mean


@case()
def check_layer_state_in_tf_variables(scope):
    with scope:
        counting = Counting()
        model = keras.Sequential([keras.Input((6,)), counting, layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    trained = fit(model)
    return Trained(model, {**trained.logs, "state": [counting.rows.numpy(), counting.mean.numpy()]})
