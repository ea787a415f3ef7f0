"""Schedules equal their closed forms in NumPy, also through the optimizer and serialisation."""

import math

import keras
import numpy as np
import pytest

from keras_ddl import schedules
from keras_ddl.errors import ConfigError


def rates(schedule, steps):
    return np.array([float(schedule(step)) for step in range(steps)])


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 8.0), ("sqrt", math.sqrt(8)), (None, 1.0), (3.5, 3.5)])
def test_scale_factor_follows_its_rule(scaling, factor):
    assert schedules.scale_factor(scaling, 8) == factor
    assert schedules.scale_learning_rate(0.1, scaling, 8) == 0.1 * factor


@pytest.mark.parametrize("scaling", ["cube", 0, -1.0, True, float("nan"), float("inf")])
def test_scale_factor_refuses_unknown_rules(scaling):
    with pytest.raises(ConfigError, match="scaling must be 'linear'.*Received: scaling="):
        schedules.scale_factor(scaling, 2)


def test_linear_warmup_is_a_line_and_then_constant():
    step = np.arange(12)
    expected = np.where(step < 8, 0.1 + (0.8 - 0.1) * step / 8, 0.8)
    np.testing.assert_allclose(rates(schedules.LinearWarmup(0.8, 8, 0.1), 12), expected, rtol=1e-6)
    np.testing.assert_allclose(rates(schedules.LinearWarmup(0.9, 8), 3), [0.1, 0.2, 0.3], rtol=1e-6)  # one step up


def test_linear_warmup_is_followed_by_a_schedule_from_step_0():
    cosine = keras.optimizers.schedules.CosineDecay(0.8, 10)
    curve = rates(schedules.LinearWarmup(0.8, 4, 0.2, after=cosine), 14)
    np.testing.assert_allclose(curve[:4], [0.2, 0.35, 0.5, 0.65], rtol=1e-6)
    np.testing.assert_allclose(curve[4:], rates(cosine, 10), rtol=1e-6)


def test_inverse_square_root_decay_matches_the_transformer_paper():
    d_model, warmup = 512, 40
    schedule = schedules.InverseSquareRootDecay((d_model * warmup) ** -0.5, warmup)
    step = np.arange(1, 301)
    expected = d_model**-0.5 * np.minimum(step**-0.5, step * warmup**-1.5)
    np.testing.assert_allclose(rates(schedule, 300), expected, rtol=1e-6)


def test_piecewise_joins_rates_and_schedules():
    schedule = schedules.Piecewise([3, 7], [0.5, schedules.LinearWarmup(0.4, 4, 0.2), 0.01])
    expected = [0.5] * 3 + [0.2, 0.25, 0.3, 0.35] + [0.01] * 3
    np.testing.assert_allclose(rates(schedule, 10), expected, rtol=1e-6)


def test_staircase_falls_at_equal_intervals():
    step = np.arange(20)
    expected = 0.8 * 0.5 ** np.maximum((step - 6) // 4, 0)
    np.testing.assert_allclose(rates(schedules.Staircase(0.8, 4, 0.5, 6), 20), expected, rtol=1e-6)
    # Counts in integers; float32 would lose steps beyond 2^24.
    assert float(schedules.Staircase(1.0, 2**24 + 1)(2**24)) == 1.0
    assert float(schedules.Staircase(1.0, 2**24 + 1)(np.int64(2**24 + 1))) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("scheme", "start", "falls"), [("luong5", 1 / 2, 5), ("luong10", 1 / 2, 10), ("luong234", 2 / 3, 4)]
)
def test_luong_decay_matches_tensorflows_nmt(scheme, start, falls):
    total = 120
    begin = int(total * start)
    remaining = int((total - begin) / falls)  # as nmt/model.py counts
    decay = keras.optimizers.schedules.ExponentialDecay(0.8, remaining, 0.5, staircase=True)
    expected = [0.8 if step < begin else float(decay(step - begin)) for step in range(total)]
    np.testing.assert_allclose(rates(schedules.luong_decay(0.8, total, scheme), total), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: schedules.Staircase(0.1, 10, 0.5, -1),
        lambda: schedules.luong_decay(0.1, 1000, "luong"),
        lambda: schedules.luong_decay(0.1, 10),
        lambda: schedules.LinearWarmup(0.1, 2.5),
        lambda: schedules.LinearWarmup(0.1, 5, after=0.1),
        lambda: schedules.InverseSquareRootDecay(0.1, 0),
        lambda: schedules.Piecewise([3, 3], [0.1, 0.2, 0.3]),
    ],
)
def test_schedule_refuses_bad_arguments_and_says_what_it_received(make):
    with pytest.raises(ConfigError, match="Received: "):
        make()


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.LinearWarmup(0.8, 4, 0.2),
        schedules.LinearWarmup(0.8, 4, 0.2, after=keras.optimizers.schedules.CosineDecay(0.8, 10)),
        schedules.InverseSquareRootDecay(0.1, 4),
        schedules.Staircase(0.1, 2, 0.5, 3),
        schedules.Piecewise([2, 5], [0.5, schedules.InverseSquareRootDecay(0.1, 4), 0.01]),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_schedule_survives_serialisation_inside_an_optimizer(schedule):
    optimizer = keras.optimizers.SGD(schedule)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again._learning_rate) is type(schedule)
    np.testing.assert_array_equal(rates(again._learning_rate, 8), rates(schedule, 8))


def test_schedule_drives_a_compiled_optimizer_by_its_step():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(schedules.LinearWarmup(0.4, 4, 0.1)), "mse")
    weight, x = 1.0, np.ones((4, 1), np.float32)
    for step in range(6):
        model.train_on_batch(x, np.zeros((4, 1), np.float32))
        weight -= (0.1 + 0.3 * min(step, 4) / 4) * 2 * weight
        assert float(model.get_weights()[0][0, 0]) == pytest.approx(weight, rel=1e-5)
