"""Compares the step model with hand-computed values."""

from __future__ import annotations

import math

import pytest

from keras_ddl import cost_model
from keras_ddl.cost_model import Cluster, Dimension

PAIR = Cluster((Dimension(2, 10e9),))


def test_expected_largest_matches_the_normal_distribution():
    # Closed forms for the first four.
    by_hand = {
        1: 0.0,
        2: 1 / math.sqrt(math.pi),
        3: 1.5 / math.sqrt(math.pi),
        4: 3 / math.sqrt(math.pi) * (0.5 + math.asin(1 / 3) / math.pi),
        16: 1.76599,
    }
    for count, expected in by_hand.items():
        assert cost_model.expected_largest(count) == pytest.approx(expected, abs=1e-4)


def test_step_adds_compute_waiting_and_exposed_exchange():
    # Each of two ranks sends 2 (2-1)/2 = 1 times the gradients: 2 GB at 10 GB/s.
    step = cost_model.Step(0.5, 2e9)
    assert step.seconds(Cluster((Dimension(1, 1.0),))) == 0.5
    assert step.seconds(PAIR) == pytest.approx(0.7)
    assert cost_model.Step(0.5, 2e9, overlap=0.1).seconds(PAIR) == pytest.approx(0.65)
    assert cost_model.Step(0.5, 2e9, overlap=0.9).seconds(PAIR) == 0.5
    assert cost_model.Step(0.5, 2e9, spread=0.1).seconds(PAIR) == pytest.approx(0.7 + 0.1 / math.sqrt(math.pi))


def test_fits_recover_the_parameters_of_the_rows():
    clusters = [cost_model.machines(devices, 4, 10e9, 1e9, 0.0) for devices in (2, 4, 8)]
    assert [len(cluster.dims) for cluster in clusters] == [1, 1, 2] and clusters[2].size == 8
    made = [(cluster, cost_model.Step(0.5, 2e9, spread=0.07).seconds(cluster)) for cluster in clusters]
    assert cost_model.fitted_spread(cost_model.Step(0.5, 2e9), made) == pytest.approx(0.07)
    assert cost_model.fitted_link(cost_model.Step(0.5, 2e9), 4, made[1][1]) < 10e9
    assert cost_model.fitted_link(cost_model.Step(0.5, 2e9), 4, 0.5 + 1.5 * 2 / 8) == pytest.approx(8e9)
