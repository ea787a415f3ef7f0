"""16-bit numbers: a mean over the batch is computed in float32, whatever its sum would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf


@pytest.mark.parametrize(("size", "static"), [(2, True), (3, False)])
def test_mean_of_16_bits_is_finite_where_its_sum_overflows(size: int, static: bool) -> None:
    x = np.full((16, 1), 8000.0, np.float16)

    def step(v: Any) -> list[Any]:
        return [tf.reduce_mean(v), tf.reduce_mean(v, 0), tf.reduce_sum(v)]

    simulation = Simulation(step, (x,), size, static=static)
    for of_all, of_columns, total in simulation(x):
        np.testing.assert_allclose(of_all, 8000.0, rtol=2.0**-9)
        np.testing.assert_allclose(of_columns, [8000.0], rtol=2.0**-9)
        assert np.isinf(total)
    assert np.isinf(simulation.expected(x)[2])  # the sum itself is too large, in one process as well
