"""The translation example's step on ranks equals one process, in float64, where rounding cannot hide a difference."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from cut.simulated import Simulation
from examples.translation_parts import TokenCrossentropy, Transformer

from keras_ddl.compat.tensorflow import tf

ROWS, LENGTH, VOCABULARY = 7, 5, 40


def batch(seed: int) -> list[np.ndarray]:
    """Returns source, target so far and target: ids of padded sentences of several lengths."""
    rng = np.random.default_rng(seed)
    places = np.arange(LENGTH)
    both = [rng.integers(3, VOCABULARY, (ROWS, LENGTH)) * (places < rng.integers(2, 6, (ROWS, 1))) for _ in range(2)]
    before = np.concatenate([np.ones((ROWS, 1), int), both[1][:, :-1]], 1)
    return [each.astype("int32") for each in (both[0], before, both[1])]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_steps_of_translation_equal_one_process(size: int) -> None:
    keras.utils.set_random_seed(1)
    model = Transformer(VOCABULARY, width=8, layers=1, heads=2, inner=16)
    model.compile(keras.optimizers.Adam(2e-3, beta_2=0.98, epsilon=1e-9), TokenCrossentropy(0.1))

    def data(source: Any, before: Any, target: Any) -> Any:
        return {"source": source, "target": before}, target

    model._symbolic_build(data_batch=data(*batch(0)))
    owners = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    variables = list({id(each.value.handle): each.value for each in owners}.values())

    def step(*given: Any) -> Any:
        return model.train_step(data(*map(tf.convert_to_tensor, given)))["loss"]

    simulation = Simulation(step, batch(0), size, variables=variables)
    for seed in range(3):
        expected, found = simulation.expected(*batch(seed)), simulation(*batch(seed))
        for losses in found:
            np.testing.assert_allclose(losses, expected, rtol=1e-12, atol=0)
    for copies in simulation.copies:
        for each in variables:
            np.testing.assert_allclose(copies[id(each.handle)], each, rtol=0, atol=1e-10)
