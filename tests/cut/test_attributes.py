"""Attributes and devices of operations and calls have the same effect as in one process."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis import attributes

X = np.random.default_rng(0).normal(size=(7, 3))


@functools.cache  # not at import: tools/mutants.py forks after collection, before TensorFlow starts
def weight() -> tf.Variable:
    with tf.init_scope():
        return tf.Variable(np.linspace(-1.0, 1.0, 6).reshape(3, 2))


@functools.cache
def count() -> tf.Variable:
    with tf.init_scope():
        return tf.Variable(np.zeros(3))


@tf.function(jit_compile=True, autograph=False)
def compiled(x: tf.Tensor) -> tf.Tensor:
    """Tells XLA from TensorFlow: for an index beyond the rows, XLA reads the last row and TensorFlow raises."""
    return tf.gather(x, [0, 40]) * 2.0


@tf.function(jit_compile=True, autograph=False)
def compiled_product(x: tf.Tensor) -> tf.Tensor:
    return tf.tanh(x @ weight())


@tf.function(jit_compile=True, autograph=False)
def compiled_count(x: tf.Tensor) -> tf.Tensor:
    count().assign_add(tf.reduce_sum(x, 0))
    return count() + tf.gather(x, 40)


def within_calls(x: tf.Tensor) -> list[tf.Tensor]:
    return [tf.function(lambda v: compiled(v * 3.0) + 1.0, autograph=False)(x), tf.reduce_sum(x)]


def with_gradients(x: tf.Tensor) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_mean(tf.square(compiled_product(x * 2.0) - x[:, :2]))
    return [loss, *tape.gradient(loss, [x, weight()])]


def with_variables(x: tf.Tensor) -> list[tf.Tensor]:
    found = compiled_count(x)
    weight().assign_sub(0.1 * weight())
    return [found, count().read_value(), compiled_product(x)]


def in_a_branch(x: tf.Tensor) -> list[tf.Tensor]:
    return [tf.cond(tf.reduce_sum(x) < 1e6, lambda: compiled(x), lambda: x[:2])]


def in_a_loop(x: tf.Tensor) -> list[tf.Tensor]:
    return [tf.while_loop(lambda i, a: i < 3, lambda i, a: [i + 1, a * 0.5 + compiled(a)[1]], [0, x])[1]]


def in_a_scope(x: tf.Tensor) -> list[tf.Tensor]:
    with tf.xla.experimental.jit_scope():
        found = tf.gather(x * 3.0, [0, 40])
    with tf.xla.experimental.jit_scope(compile_ops=False):
        other = tf.square(x)
    return [found, other]


FEW = (with_variables, in_a_branch)
COMPILED = [within_calls, with_gradients, with_variables, in_a_branch, in_a_loop, in_a_scope]


@pytest.mark.parametrize(("size", "static"), [pytest.param(2, True, marks=pytest.mark.long), (3, False)])
@pytest.mark.parametrize(
    "step",
    [pytest.param(each, marks=[] if each in FEW else pytest.mark.long) for each in COMPILED],
    ids=lambda each: each.__name__,
)
def test_compiled_functions_stay_compiled(step: Any, size: int, static: bool) -> None:
    variables = [weight(), count()]
    kept = [each.numpy() for each in variables]
    simulation = Simulation(step, (X,), size, static=static, variables=variables).check(X, steps=2)
    for each, before in zip(variables, kept):
        each.assign(before)
    if step is not in_a_loop:  # the loop is replicated as a whole
        text = simulation.reports[0].text()
        assert "compiled by XLA" in text and "test_attributes.py" in text


@pytest.mark.parametrize("static", [True, False])
def test_compiled_step_stays_one_operation(static: bool) -> None:
    @tf.function(jit_compile=True, autograph=False)
    def step(x: tf.Tensor) -> Any:
        return compiled(x), tf.reduce_sum(x, 0)

    simulation = Simulation(step, (X,), 2, static=static).check(X)
    assert len(simulation.reports[0].kept) == 1


def test_draws_of_a_compiled_function_are_rank_0s_on_every_rank() -> None:
    """XLA counts the runs of a process: two ranks of one process draw differently, as ranks that ran others would."""
    total = tf.Variable(np.zeros(3))

    @tf.function(jit_compile=True, autograph=False)
    def noisy(x: tf.Tensor) -> tf.Tensor:
        noise = tf.random.normal([3], dtype=tf.float64)
        total.assign_add(noise)
        return tf.reduce_sum(x, 0) + noise

    simulation = Simulation(lambda x: [noisy(x)], (X,), 3, variables=[total])
    before, after = simulation(X), simulation(X)
    assert not np.array_equal(before[0], after[0])
    for each in (before, after, simulation.held(total)):
        np.testing.assert_array_equal(each[1:], each[:-1])


def attribute(name: str) -> Any:
    return tf.compat.v1.get_default_graph()._attr_scope({name: tf.compat.v1.AttrValue(b=True)})


def test_an_operation_with_an_unknown_attribute_is_whole_and_keeps_it() -> None:
    @tf.function(autograph=False)
    def twice(x: tf.Tensor) -> tf.Tensor:
        return x * 2.0

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with attribute("_of_the_future"):
            return [tf.square(x), twice(x)]

    simulation = Simulation(step, (X,), 2).check(X)
    assert len(simulation.reports[0].kept) == 2
    assert "_of_the_future" in simulation.reports[0].text()
    made = [each for each in simulation.graph_of_rank_0(X).get_operations() if "_of_the_future" in each.node_def.attr]
    assert sorted(each.type for each in made) == ["PartitionedCall", "Square"]


@pytest.mark.parametrize(
    "known",
    [
        {"_noinline": True, "_implements": "something"},
        {"_OutputsOnOpDevice": True, "_tf_data_function": True, "time_major": True, "go_backwards": False},
    ],
)
def test_a_function_with_an_attribute_that_leaves_its_values_alone_is_cut(known: dict[str, Any]) -> None:
    inner = tf.function(lambda x: x - tf.reduce_mean(x, 0), autograph=False, experimental_attributes=known)
    plain = tf.function(lambda x: tf.reduce_sum(x * x), autograph=False, jit_compile=False)
    report = Simulation(lambda x: [inner(x), plain(x)], (X,), 2).check(X).reports[0]
    assert report.kept == {} and report.replicated == {}


def test_an_attribute_that_the_type_declares_is_kept_whatever_a_function_means_by_its_name() -> None:
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        zeros = tf.zeros([len(X), 1, 4], x.dtype)
        lstm = tf.raw_ops.CudnnRNNV3(
            input=x[:, None],
            input_h=zeros,
            input_c=zeros,
            params=tf.zeros([144], x.dtype),
            sequence_lengths=tf.ones([len(X)], tf.int32),
            time_major=False,
        )
        return [lstm.output]

    (made,) = (each for each in Simulation(step, (X,), 2).graph_of_rank_0(X).get_operations() if "Cudnn" in each.type)
    assert made.get_attr("time_major") is False


def test_every_attribute_that_tensorflow_gives_a_function_is_decided() -> None:
    assert tf_compat.function_attributes() - set(attributes.FATES) == set()


def test_an_operation_stays_on_the_cpu_and_on_no_other_device_of_the_trace() -> None:
    @tf.function(autograph=False)
    def cosines(x: tf.Tensor) -> tf.Tensor:
        with tf.device("/gpu:1"):
            other = tf.sin(x)
        return tf.cos(x) + other

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.device("/cpu:0"):
            found = tf.square(x) + cosines(x)
        return [found, tf.exp(x)]

    devices = {each.type: each.device for each in Simulation(step, (X,), 2).graph_of_rank_0(X).get_operations()}
    assert devices["Square"].endswith("CPU:0") and devices["Cos"].endswith("CPU:0")
    assert devices["Sin"] == "" and devices["Exp"] == ""
