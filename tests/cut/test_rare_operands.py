"""Operands that programs rarely have: each cut step equals one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cut.comparing import difference
from cut.simulated import Simulation
from cut.together import Together

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import Program
from keras_ddl.cut.analysis.dims import Dim
from keras_ddl.cut.analysis.extents import Extents

raw = tf.raw_ops


def one_value_broadcast(x: Any) -> list[Any]:
    """A rank builds only its rows, although the value has fewer axes than the result."""
    return [x * tf.identity(tf.broadcast_to(tf.constant(2.0, x.dtype), tf.shape(x)))]


def a_new_first_axis(x: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        actual = tf.square(x[None])
    return [actual, tape.gradient(actual, x), x[None, :, None]]


def index_that_is_a_sum(x: Any) -> list[Any]:
    """Every rank has a part of the sum that makes the index."""
    count = tf.reduce_sum(tf.cast(tf.abs(x) < 1e9, tf.int32))
    return [tf.gather_nd(tf.square(tf.range(64)), tf.reshape(count, [1, 1]))]


def images_with_a_size_of_unknown_length(x: Any) -> list[Any]:
    size, _ = tf.unique(tf.cast([3, 2], tf.int32))  # tracing does not know its length
    moved = raw.ImageProjectiveTransformV3(
        images=tf.reshape(x, [-1, 3, 1, 1]),
        transforms=tf.constant([[1.0, 0, 0, 0, 1, 1, 0, 0]]),
        output_shape=size,
        fill_value=0.0,
        interpolation="NEAREST",
    )
    return [moved]


STEPS: list[Callable[[Any], list[Any]]] = [
    one_value_broadcast, a_new_first_axis, index_that_is_a_sum, images_with_a_size_of_unknown_length,
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=lambda each: each.__name__)
def test_steps_with_rare_operands_equal_one_process(step: Callable[[Any], list[Any]]) -> None:
    x = np.random.default_rng(0).normal(size=(5, 3))
    for static, size in ((True, 2), (False, 3)):
        together = Together(step, [x], sizes=[size], static=static)
        for rows in [5] if static else [5, 2]:
            expected = together.expected([x[:rows]])
            for actual in together.outputs(size, [x[:rows]]):
                assert difference(actual, expected) is None
        together.close()


def test_vectors_are_keys_of_an_existing_table() -> None:
    table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, -1, empty_key=[-1, -1], deleted_key=[-2, -2])
    table.insert(tf.constant([[0, 1], [2, 3]], tf.int64), tf.constant([5, 6], tf.int64))
    keys = np.array([[2, 3], [0, 1], [4, 5]])

    def step(x: Any) -> list[Any]:
        actual = table.lookup(x)  # tracing does not know its rank
        return [actual, tf.shape(actual)]

    for actual, shape in Simulation(step, [keys], 2)(keys):
        np.testing.assert_array_equal(actual, [6, 5, -1])
        np.testing.assert_array_equal(shape, [3])


def test_parts_in_half_precision_are_summed_in_float32() -> None:
    x = np.full((4, 2), 20000.0, np.float16)
    simulation = Simulation(lambda x: [tf.cast(tf.reduce_sum(x, 0), tf.float32)], [x], 2)
    np.testing.assert_array_equal(simulation(x), np.full((2, 1, 2), 80000.0))


@pytest.mark.parametrize(("size", "static"), [(2, True), (3, False)])
def test_mean_in_half_precision_is_finite_if_the_sum_overflows(size: int, static: bool) -> None:
    x = np.full((16, 1), 8000.0, np.float16)

    def step(v: Any) -> list[Any]:
        return [tf.reduce_mean(v), tf.reduce_mean(v, 0), tf.reduce_sum(v)]

    for mean, columns, total in Simulation(step, (x,), size, static=static)(x):
        np.testing.assert_allclose([mean, *columns], 8000.0, rtol=2.0**-9)
        assert np.isinf(total)  # overflows as in one process


def test_long_chain_of_integers_is_followed() -> None:
    def step(x: Any) -> Any:
        count = tf.shape(x)[0]
        for _ in range(sys.getrecursionlimit() // 2):
            count = raw.AddV2(x=count, y=1)
        return count

    rows = Dim.unknown("rows")
    program = Program(tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([None, 3])).graph)
    known = Extents(rows)
    known.set_dims(program.inputs[0], (rows, Dim(3)))
    for node in program.nodes:
        for each in node.outputs:
            known.follow(each)
    assert known.number(program.outputs[0]) == rows + sys.getrecursionlimit() // 2
