"""Branches and loops of a cut step equal one process, and are cut where the docs say so."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.operations import registry
from keras_ddl.cut.rules import branches, loops

# (ranks, whether tracing sees the rows, rows); the second case has fewer rows than ranks.
CASES = [pytest.param(2, True, 6, marks=pytest.mark.long), (3, False, 2)]


def batch(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).normal(size=(rows, 4, 3))


def check(step: Any, rows: int, size: int, static: bool, variables: Any = (), times: int = 1) -> Simulation:
    x = batch(rows)
    return Simulation(step, (x,), size, static=static, variables=variables).check(x, steps=times)


def scan(x: tf.Tensor) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = tf.scan(lambda a, e: tf.tanh(a + e), tf.transpose(x, [1, 0, 2]))
        loss = tf.reduce_sum(tf.square(found[-1]))
    return [loss, tape.gradient(loss, x)]


def rows_mapped(x: tf.Tensor) -> list[tf.Tensor]:
    return [tf.map_fn(lambda e: tf.cumsum(e) * tf.reduce_max(e), x)]


def fori(x: tf.Tensor) -> list[tf.Tensor]:
    return [keras.ops.fori_loop(0, 3, lambda i, a: a * 0.5 + tf.cast(i, a.dtype) * x, x)]


def until_small(x: tf.Tensor) -> list[tf.Tensor]:
    """The number of rounds depends on all rows."""
    return [keras.ops.while_loop(lambda a: tf.reduce_sum(tf.abs(a)) > 1.0, lambda a: (a * 0.5,), (x,))[0]]


def sums_of_rounds(x: tf.Tensor) -> list[tf.Tensor]:
    """Carries a sum over rows from round to round without reading it."""
    zero = tf.zeros([3], x.dtype)
    return list(tf.while_loop(lambda i, s: i < 3, lambda i, s: [i + 1, s + tf.reduce_sum(x, [0, 1])], [0, zero]))


def nested(x: tf.Tensor) -> list[tf.Tensor]:
    def inner(a: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda j, _: j < 2, lambda j, c: [j + 1, tf.cond(j < 1, lambda: c * x, lambda: c)], [0, a]
        )[1]

    return [tf.while_loop(lambda i, _: i < 2, lambda i, a: [i + 1, inner(a)], [0, tf.ones_like(x)])[1]]


def rounds_that_need_all_rows(x: tf.Tensor) -> list[tf.Tensor]:
    return [tf.while_loop(lambda i, _: i < 3, lambda i, a: [i + 1, a / tf.reduce_sum(a * a)], [0, x])[1]]


def switched(x: tf.Tensor) -> list[tf.Tensor]:
    which = tf.cast(tf.reduce_sum(x) > 0, tf.int32) + 1
    branches = [lambda: x, lambda: tf.zeros_like(x), lambda: x / tf.reduce_sum(x)]
    return [tf.switch_case(which, branches)]


def branch_gradient(x: tf.Tensor) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        each = tf.cond(tf.reduce_sum(x) > 100, lambda: x * 2, lambda: tf.tanh(x) * x)
        loss = tf.reduce_sum(tf.square(each))
    return [loss, tape.gradient(loss, x)]


def with_effects(x: tf.Tensor) -> list[tf.Tensor]:
    """Assertions are stateful, and so are branches and loops that contain them."""

    def checked(a: tf.Tensor) -> tf.Tensor:
        number = tf.shape(x)[0]
        with tf.control_dependencies([tf.raw_ops.Assert(condition=number > 0, data=[number])]):
            return tf.tanh(a)

    total = tf.reduce_sum(x)
    return [
        tf.cond(total > 0, lambda: checked(x), lambda: x),
        tf.switch_case(tf.cast(total > 0, tf.int32), [lambda: checked(x), lambda: checked(x * 2)]),
        tf.while_loop(lambda i, _: i < 2, lambda i, a: [i + 1, checked(a)], [0, x])[1],
    ]


STEPS = {
    each.__name__: each
    for each in (
        scan, rows_mapped, fori, until_small, sums_of_rounds, nested,
        rounds_that_need_all_rows, switched, branch_gradient, with_effects,
    )
}  # fmt: skip
CUT = {"scan", "fori", "sums_of_rounds", "nested", "branch_gradient"}


def test_every_type_of_branch_and_loop_is_tried() -> None:
    tried = set()
    for step in STEPS.values():
        graph = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([None, 4, 3], tf.float64)).graph
        tried |= {each.type for each in graph.get_operations()}
    rules = {each: registry.rule_of(each) for each in registry.types_with_rules()}
    assert {each for each, rule in rules.items() if rule in (branches.branch, loops.while_loop)} - tried == set()


@pytest.mark.parametrize(("size", "static", "rows"), CASES)
@pytest.mark.parametrize("is_cut", [True, pytest.param(False, marks=pytest.mark.long)])
def test_control_flow_equals_one_process(is_cut: bool, size: int, static: bool, rows: int) -> None:
    steps = [step for name, step in STEPS.items() if (name in CUT) == is_cut]
    simulation = check(lambda x: [each for step in steps for each in step(x)], rows, size, static)
    if is_cut:
        assert simulation.reports[0].replicated == {}
        assert set(simulation.gathers()) <= {"is a result"}


@pytest.mark.parametrize(("size", "static", "rows"), CASES)
def test_assignments_run_once_in_the_branch_taken(size: int, static: bool, rows: int) -> None:
    total, count = tf.Variable(tf.zeros([3], tf.float64)), tf.Variable(0)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        def add() -> tf.Tensor:
            return total.assign_add(tf.reduce_sum(x, [0, 1])).read_value()

        def start_again() -> tf.Tensor:
            return total.assign(tf.reduce_max(x, [0, 1])).read_value()

        found = tf.cond(count.assign_add(1) % 2 == 0, start_again, add)
        return [found, total.read_value()]

    check(step, rows, size, static, [total, count], times=3)


def test_sum_stays_a_part_in_a_branch_of_a_loop() -> None:
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        def add(i: tf.Tensor, total: tf.Tensor) -> list[tf.Tensor]:
            return [i + 1, tf.cond(i < 1, lambda: total + tf.reduce_sum(x, [0, 1]), lambda: total * 2.0)]

        return [tf.while_loop(lambda i, total: i < 3, add, [0, tf.zeros([3], x.dtype)])[1]]

    assert check(step, 6, 2, True).reports[0].replicated == {}


def test_unknown_extents_survive_a_loop() -> None:
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        first = tf.ones([tf.shape(x)[0], tf.shape(x)[0], 3], x.dtype) * x[:, :1]
        last = tf.while_loop(lambda i, a: i < 3, lambda i, a: [i + 1, tf.tanh(a + first)], [0, first])[1]
        return [tf.reduce_sum(tf.reshape(last, [-1, 3]) * tf.reshape(first, [-1, 3]))]

    simulation = check(step, 5, 2, False)
    assert simulation.reports[0].replicated == {} and simulation.gathers() == []


def test_initial_state_is_sharded_if_its_list_receives_rows() -> None:
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        rows = x[:, 0]

        def add(i: tf.Tensor, values: tf.Tensor, state: tf.Tensor) -> list[tf.Tensor]:
            for each in (state, tf.tanh(rows)):
                values = tf.raw_ops.TensorListPushBack(input_handle=values, tensor=each)
            return [i + 1, values, tf.tanh(state + rows)]

        shape = tf.shape(rows)
        empty = tf.raw_ops.EmptyTensorList(element_shape=shape, max_num_elements=-1, element_dtype=x.dtype)
        starts = [0, empty, tf.zeros(shape, x.dtype)]
        _, values, state = tf.while_loop(lambda i, *others: i < 3, add, starts)
        stacked = tf.raw_ops.TensorListStack(input_handle=values, element_shape=shape, element_dtype=x.dtype)
        return [tf.reduce_sum(tf.tanh(stacked)), tf.reduce_sum(tf.tanh(state))]

    simulation = check(step, 6, 2, True)
    assert simulation.reports[0].replicated == {} and simulation.gathers() == []


def test_loop_known_only_by_its_graph_is_replicated() -> None:
    doubled = tf.function(lambda x: tf.while_loop(lambda i, a: i < 3, lambda i, a: [i + 1, a * 2.0], [0, x])[1])
    whole = doubled.get_concrete_function(tf.TensorSpec([6, 4, 3], tf.float64)).graph
    name, result = whole.inputs[0].op.name, whole.outputs[0].name

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        definition = whole.as_graph_def()
        return list(tf.graph_util.import_graph_def(definition, input_map={name: x}, return_elements=[result]))

    check(step, 6, 2, True)
