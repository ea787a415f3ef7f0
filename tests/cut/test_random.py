"""Random numbers of a cut step equal those of one process."""

from __future__ import annotations

import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf

BATCH = np.arange(33.0).reshape(11, 3)
SETTINGS = [pytest.param(2, True, marks=pytest.mark.long), (3, False)]


def rows_of(x):
    return tf.shape(x, tf.int64)[0]


def check(step, size, static, *, times=2):
    Simulation(step, [BATCH], size, static=static).check(BATCH, steps=times, tolerance=0.0)


def draws():
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[3, 4])
    raw, start = tf.raw_ops, {"key": key, "counter": counter}
    for dtype in (tf.float64, tf.bfloat16):
        yield lambda s, d=dtype: raw.StatelessRandomUniformV2(shape=s, alg=1, dtype=d, **start)
        yield lambda s, d=dtype: raw.StatelessRandomNormalV2(shape=s, alg=3, dtype=d, **start)
    for dtype in (tf.int32, tf.int64, tf.uint64):
        yield lambda s, d=dtype: raw.StatelessRandomUniformFullIntV2(shape=s, alg=3, dtype=d, **start)
    for dtype in (tf.int32, tf.int64):
        bounds = {"minval": tf.constant(2, dtype), "maxval": tf.constant(90, dtype)}
        yield lambda s, bounds=bounds: raw.StatelessRandomUniformIntV2(shape=s, alg=1, **start, **bounds)


@pytest.mark.long
@pytest.mark.parametrize("size, static", SETTINGS)
def test_drawn_rows_equal_rows_of_the_whole_draw(size, static):
    def step(x):
        kinds = []
        for draw in draws():
            noise = draw(tf.concat([[rows_of(x)], tf.constant([2, 4], tf.int64)], 0))
            kinds.append(noise if noise.dtype.is_floating else tf.cast(noise, tf.float64))
        # The elementwise operation with rows makes each rank draw its own rows.
        return tf.concat([tf.cast(tf.reshape(each, [rows_of(x), -1]), tf.float64) + 0 * x[:, :1] for each in kinds], 1)

    check(step, size, static, times=1)


@pytest.mark.parametrize("size, static", SETTINGS)
def test_drawing_rows_avoids_the_whole_draw(size, static):
    def step(x):
        noise = tf.random.stateless_normal([rows_of(x), 3], seed=[1, 2], dtype=tf.float64)
        return tf.reduce_sum(x * noise, 0)

    simulation = Simulation(step, [BATCH], size, static=static).check(BATCH)
    assert [each.kind for each in simulation.reports[0].entries] == ["sum"]
    assert needed_draws(simulation.graph_of_rank_0(BATCH)) == 1


def needed_draws(graph, kind="StatelessRandomNormalV2"):
    """Counts the draws of a graph that run."""
    pending, seen = [each.op for each in graph.outputs] + list(graph.control_outputs), {}
    while pending:
        op = pending.pop()
        if op.name not in seen:
            seen[op.name] = op.type
            pending += [each.op for each in op.inputs] + list(op.control_inputs)
    return list(seen.values()).count(kind)


@pytest.mark.parametrize("size, static", SETTINGS)
def test_draw_for_two_concatenated_batches(size, static):
    def step(x):
        both = tf.concat([x, -x], 0)
        noise = tf.random.stateless_uniform([2 * rows_of(x), 3], seed=[1, 2], dtype=tf.float32)
        words = tf.random.stateless_uniform([3 * rows_of(x), 1], seed=[1, 5], dtype=tf.float64)
        return both + tf.cast(noise, tf.float64), words + tf.reshape(x, [-1, 1])

    check(step, size, static)


@pytest.mark.parametrize("size, static", SETTINGS)
def test_seeded_stateful_draws_equal_one_process_in_every_call(size, static):
    def step(x):
        shape = [rows_of(x), 3]
        noise = tf.random.normal(shape, seed=7, dtype=tf.float64) + tf.random.uniform(shape, seed=7, dtype=tf.float64)
        gamma = tf.random.gamma([4], 2.0, seed=7, dtype=tf.float64)
        return tf.concat([tf.random.shuffle(x, seed=7), x * noise, x * 0 + gamma[0]], 1)

    check(step, size, static, times=3)


@pytest.mark.parametrize("size, static", SETTINGS)
def test_unseeded_stateful_draws_are_equal_on_all_ranks(size, static):
    def step(x):  # the result is replicated; gathered rows would be equal anyway
        return tf.random.normal([rows_of(x), 3], dtype=tf.float64) + tf.random.uniform([3], dtype=tf.float64)

    simulation = Simulation(step, [BATCH], size, static=static)
    first, second = simulation(BATCH), simulation(BATCH)
    for each in (first, second):
        np.testing.assert_array_equal(each[1:], each[:-1])
    assert not np.array_equal(first[0][0], second[0][0])


@pytest.mark.parametrize("whole", [pytest.param(True, marks=pytest.mark.long), False])
def test_rounds_of_a_drawing_loop_do_not_overlap(whole):
    """Overlapping rounds draw in any order, so ranks would draw different numbers in the last one."""

    def step(x):
        def body(i, a):
            noise = tf.random.uniform([], dtype=x.dtype, seed=3)
            return [i + 1, (a / tf.reduce_sum(a) if whole else tf.tanh(a)) * noise]

        return tf.while_loop(lambda i, a: i < 50, body, [0, x], parallel_iterations=20)[1]

    simulation = Simulation(step, [BATCH], 2)
    operations = simulation.graph_of_rank_0(BATCH).get_operations()
    (loop,) = (each for each in operations if each.type in ("While", "StatelessWhile"))
    overlaps = "_lower_using_switch_merge" in loop.node_def.attr and loop.get_attr("parallel_iterations") > 1
    assert not overlaps
    for _ in range(2):
        one, other = simulation(BATCH)
        np.testing.assert_array_equal(one[0], other[0])
