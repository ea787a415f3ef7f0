"""Operations that compute the same result from the same tensors are built once; all others stay separate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from cut.counting import NoRanks

from keras_ddl.cut import Batch, Program, Report, Sharded, Snapshots, build_step

FIRST, SECOND = tf.Variable(2.0), tf.Variable(3.0)
X = tf.TensorSpec([6, 3])


def built(step: Callable[[tf.Tensor], Any]) -> Counter[str]:
    """Counts the types of operations in a rank's graph of a step."""
    concrete = tf.function(step, autograph=False).get_concrete_function(X)

    def rank_step(rows: tf.Tensor) -> list[tf.Tensor]:
        program, batch = Program(concrete.graph), Batch(6, 3, 0)
        return build_step(program, [rows], [Sharded(0)], batch, NoRanks(), report=Report(), snapshots=Snapshots())

    graph = tf.function(rank_step, autograph=False).get_concrete_function(tf.TensorSpec([3, 3])).graph
    return Counter(each.type for each in graph.get_operations())


def twice(one: Callable[[tf.Tensor], tf.Tensor], other: Callable[[tf.Tensor], tf.Tensor] | None = None) -> Any:
    return lambda x: (one(x), (other or one)(x))


def after_a_write(x: tf.Tensor) -> tf.Tensor:
    power = FIRST**2.0
    FIRST.assign(5.0)
    return power + FIRST**2.0


def on_cpu(x: tf.Tensor) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.exp(x)


@pytest.mark.parametrize(
    ("kind", "count", "step"),
    [
        ("Pow", 1, twice(lambda x: x**2.0)),
        ("Pow", 1, twice(lambda x: FIRST**2.0)),
        ("MatMul", 1, twice(lambda x: tf.matmul(x, tf.ones([3, 2])))),
        ("Pow", 2, twice(lambda x: x**2.0, lambda x: x**3.0)),
        ("Pow", 2, twice(lambda x: FIRST**2.0, lambda x: SECOND**2.0)),
        ("Pow", 2, after_a_write),
        ("Cumsum", 2, twice(lambda x: tf.cumsum(x, 1), lambda x: tf.cumsum(x, 1, exclusive=True))),
        ("Exp", 2, twice(tf.exp, on_cpu)),
        ("RandomUniform", 2, twice(lambda x: tf.random.uniform([4]))),
    ],
)
def test_equal_operations_are_built_once(kind: str, count: int, step: Callable[[tf.Tensor], Any]) -> None:
    assert built(step)[kind] == count
