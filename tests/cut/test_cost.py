"""The time to cut a program grows with its size, not with the depth of nesting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cut.counting import report_of
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import Dim
from keras_ddl.cut.building.subgraph import SubgraphBuilder

long = pytest.mark.long
X = np.random.default_rng(0).normal(size=(6, 3))


def branch(x: Any, depth: int, inside: Callable[[Any], Any]) -> Any:
    return tf.cond(tf.reduce_sum(x) > float(depth), lambda: inside(x + 1.0), lambda: tf.tanh(x))


def case(x: Any, depth: int, inside: Callable[[Any], Any]) -> Any:
    return tf.switch_case(tf.shape(x)[0] % 3, [lambda: inside(x + 1.0), lambda: tf.tanh(x), lambda: x * 0.5])


def loop(x: Any, depth: int, inside: Callable[[Any], Any]) -> Any:
    return tf.while_loop(lambda i, a: i < 2, lambda i, a: [i + 1, inside(a * 0.5)], [0, x])[1]


def growing(x: Any, depth: int, inside: Callable[[Any], Any]) -> Any:
    """The carried value starts replicated and becomes rows, so the body is built again."""
    start = tf.zeros([6, 3], x.dtype)
    return tf.while_loop(lambda i, a: i < 2, lambda i, a: [i + 1, a * 0.5 + inside(x)], [0, start])[1]


def nested(kinds: list[Any], depth: int) -> Callable[[Any], Any]:
    def at(x: Any, left: int) -> Any:
        return kinds[left % len(kinds)](x, left, lambda v: at(v, left - 1)) if left else x * 2.0

    return lambda x: at(x, depth)


NESTED = {"branches in loops that are tried again": [branch, growing], "cases": [case], "loops": [loop]}


def graphs_made(step: Any, monkeypatch: Any, static: bool) -> int:
    made = []
    build = SubgraphBuilder.build

    def counted(self: SubgraphBuilder, wanted: Any = None) -> None:
        made.append(self)  # keeps the object alive, so that its hash stays unique
        build(self, wanted)

    with monkeypatch.context() as context:
        context.setattr(SubgraphBuilder, "build", counted)
        report_of(step, X, static=static)
    return len(set(made))


@pytest.mark.parametrize("kinds", [each if "branches" in each else pytest.param(each, marks=long) for each in NESTED])
def test_number_of_graphs_does_not_double_with_each_level(kinds: str, monkeypatch: Any) -> None:
    two, four, eight = (graphs_made(nested(NESTED[kinds], n), monkeypatch, False) for n in (2, 4, 8))
    assert four <= 4 * two and eight <= 4 * four, (two, four, eight)  # at most the square of the depth


def recurrent(x: Any) -> Any:
    """Like a recurrent layer: the state and the elements of its list start replicated and become rows."""
    states = tf.TensorArray(x.dtype, size=3, element_shape=[None, 3])

    def body(i: Any, state: Any, states: Any) -> list[Any]:
        state = tf.tanh(state + x)
        return [i + 1, state, states.write(i, state)]

    return tf.while_loop(lambda i, *_: i < 3, body, [0, tf.zeros([6, 3], x.dtype), states])[2].stack()


def test_round_of_a_recurrent_layer_is_built_twice(monkeypatch: Any) -> None:
    assert graphs_made(recurrent, monkeypatch, static=True) == 3  # the body twice, and the condition


def halves(count: int) -> Callable[[Any], Any]:
    def step(x: Any) -> list[Any]:
        number = tf.shape(x)[0] * 7
        for _ in range(count):
            number = number - number // 2
        return [tf.zeros([number, 3], x.dtype) + tf.reduce_sum(x), x + tf.cast(number, x.dtype)]

    return step


def parts(count: int) -> Callable[[Any], Any]:
    def step(x: Any) -> list[Any]:
        return [tf.concat([x[: tf.shape(x)[0] // (1 + i % 4)] for i in range(count)], 0)]

    return step


@pytest.mark.parametrize(
    "step", [halves(5), pytest.param(halves(100), marks=long), parts(10)], ids=["5", "100", "parts"]
)
def test_long_chains_of_extents_are_right(step: Any) -> None:
    Simulation(step, (X,), 2, static=False).check(X)


def test_stored_size_of_an_extent_is_bounded() -> None:
    number = Dim.unknown("rows")
    square = Dim.unknown("rows")
    for _ in range(16):
        number = number - number.floor_divided_by(2)
        square = square * square
    assert len(repr(number)) < 1000 and len(repr(square)) < 1000
    assert len(square.unknowns) <= 16 and len({each.key for each in number.leaves()}) == 1
