"""What must not be gathered: nothing of the size of activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cut.comparing import difference
from cut.together import Together

from keras_ddl.compat.tensorflow import tf


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("function", [tf.reduce_mean, tf.reduce_sum, tf.reduce_max])
def test_gradients_of_reductions_over_other_axes_than_the_batch_gather_nothing(function: Any, static: bool) -> None:
    def step(x: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.square(function(x, 1)))
        return [tf.reduce_sum(tape.gradient(loss, x), 0)]

    x = np.random.default_rng(0).normal(size=(5, 3, 4))
    together = Together(step, [x], sizes=[2], static=static)
    assert [each for each in together.reports[2][0].entries if each.kind == "gather"] == []
    for found in together.of_ranks(2, [x]):
        assert difference(found, together.expected([x])) is None
