"""What is found to belong to a layer's own statistics, in graphs as Keras and TensorFlow never make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import own_statistics
from keras_ddl.cut.own_statistics import REPLICATED, SUM, Call
from keras_ddl.cut.program import Program, Value
from keras_ddl.cut.rules.own_statistics import may_be_along

OPEN, SQUARE = tf.TensorSpec([None, 5]), tf.TensorSpec([5, 5])


def parts_of(
    step: Callable[..., list[Any]], *specs: tf.TensorSpec, scope: str = ""
) -> tuple[Program, Call, list[Value]]:
    """Returns the program of a step, a call whose moment is its only mean, and what the step returns."""
    program = Program(tf.function(step, autograph=False).get_concrete_function(*specs).graph)
    (mean,) = (node for node in program.nodes if node.type == "Mean")
    call = Call(mean.inputs[0], mean, mean, scope, scope)
    call.kinds[mean.outputs[0]] = own_statistics.OWN
    return program, call, [each.source() for each in program.outputs]


def mean_of(x: Any) -> Any:
    return tf.reduce_mean(x, 0, keepdims=True)


def test_a_count_is_a_product_of_extents() -> None:
    def step(x: Any) -> list[Any]:
        extents = tf.gather(tf.shape(x), [0])
        numbers = (tf.reduce_prod(extents), tf.reduce_max(extents), tf.reduce_prod(extents + 1))
        return [mean_of(x), *(tf.cast(each, x.dtype) for each in numbers)]

    _, call, (_, *counts) = parts_of(step, OPEN)
    assert [own_statistics._is_count(call, each) for each in counts] == [True, False, False]


@pytest.mark.parametrize(("shape", "expected"), [([1, 5], True), ([5], True), ([5, 1], False)])
def test_the_gradient_of_a_mean_is_repeated_along_rows(shape: list[int], expected: bool) -> None:
    def step(x: Any) -> list[Any]:
        repeated = tf.raw_ops.BroadcastTo(input=tf.reshape(x[0], shape), shape=[5, 5])
        return [mean_of(x), repeated / 5.0]

    program, call, (_, divided) = parts_of(step, SQUARE)
    spread = divided.node.inputs[0].node
    assert own_statistics._is_gradient_of_mean(program, call, spread, [SUM, REPLICATED]) == expected


@pytest.mark.parametrize(
    ("after", "is_understood", "is_sum"),
    [
        (lambda each: tf.reshape(each, [5]), True, True),
        (lambda each: tf.reshape(each, [-1, 5]), True, False),  # as many as rows: nothing was summed
        (lambda each: tf.reshape(each, [2, 5]), False, False),
        (tf.negative, False, False),
    ],
    ids=["statistic", "rows", "other", "no reshape"],
)
def test_a_sum_along_open_axes_is_what_it_is_reshaped_to(after: Any, is_understood: bool, is_sum: bool) -> None:
    def step(x: Any, axes: Any) -> list[Any]:
        return [mean_of(x), after(tf.raw_ops.Sum(input=x, axis=axes))]

    program, call, (_, result) = parts_of(step, OPEN, tf.TensorSpec([None], tf.int32))
    summed = result.node.inputs[0].node
    assert own_statistics._understand_sum(program, call, summed) == is_understood
    assert may_be_along(0, summed) and may_be_along(1, summed)
    assert (call.kinds.get(summed.outputs[0]) is SUM) == (summed in call.roles) == is_sum


@pytest.mark.parametrize(("scope", "expected"), [("", ["Mul", "AddV2", "AssignVariableOp"]), ("elsewhere/", None)])
def test_a_moving_average_is_made_in_the_scope_of_its_layer(scope: str, expected: list[str] | None) -> None:
    moving = tf.Variable(tf.zeros([1, 5]))

    def step(x: Any) -> list[Any]:
        moving.assign(tf.raw_ops.AddV2(x=mean_of(x) * 0.1, y=moving * 0.9))
        return []

    program, call, _ = parts_of(step, OPEN, scope=scope)
    (update,) = (each for each in program.readers(call.moment) if each.type == "Mul")
    made = own_statistics._moving_average(program, call, update)
    assert (None if made is None else [each.type for each in made]) == expected
