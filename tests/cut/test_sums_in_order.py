"""Sums of several tensors are rounded alike on all ranks, because neither the cut nor Grappler builds AddN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cut.simulated import Simulation
from tensorflow.python.eager import context

from keras_ddl.compat.tensorflow import tf


@pytest.mark.parametrize("add", [lambda a, b, c: a + b + c, lambda a, b, c: tf.add_n([a, b, c])])
def test_sums_run_in_program_order(add: Callable[[Any, Any, Any], Any]) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3))
    held = tf.Variable(x[0])

    def step(rows: Any) -> Any:
        return rows * add(tf.tanh(held), tf.exp(held), tf.sin(held))

    simulation = Simulation(step, [x], 2, variables=[held])
    context.context().enable_run_metadata()
    try:
        for outputs in simulation(x):
            np.testing.assert_allclose(outputs[0], simulation.expected(x)[0], rtol=1e-12)
        graphs = context.context().export_run_metadata().function_graphs
    finally:
        context.context().disable_run_metadata()
    rank_operations = [
        {node.op for node in part.node} for each in graphs for part in each.partition_graphs
        if any("Mul" in node.op for node in part.node) and any(node.op == "PyFunc" for node in part.node)
    ]  # fmt: skip
    assert rank_operations and all("AddV2" in types and "AddN" not in types for types in rank_operations)
