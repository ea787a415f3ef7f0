"""Reports are complete, and some steps gather nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cut.simulated import SimulatedCollectives, Simulation

from keras_ddl.compat.tensorflow import tf


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("function", [tf.reduce_mean, tf.reduce_max])
def test_gradients_of_reductions_along_other_axes_gather_nothing(function: Any, static: bool) -> None:
    def step(x: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.square(function(x, 1)))
        return [tf.reduce_sum(tape.gradient(loss, x), 0)]

    x = np.random.default_rng(0).normal(size=(5, 3, 4))
    assert Simulation(step, (x,), 2, static=static).check(x).gathers() == []


@pytest.mark.parametrize("static", [True, False])
def test_report_counts_every_collective_and_names_host_functions(monkeypatch: Any, static: bool) -> None:
    made = []
    for kind in ("gather", "reduce"):
        original = getattr(SimulatedCollectives, kind)

        def counted(self: Any, *args: Any, original: Any = original, kind: str = kind, **options: Any) -> Any:
            if args[-1:] != ("commit",):  # reported separately
                made.append((self.rank, kind))
            return original(self, *args, **options)

        monkeypatch.setattr(SimulatedCollectives, kind, counted)

    def step(x: Any) -> Any:
        two = tf.numpy_function(lambda a: (a[0], a[:1] > 0), [x], [tf.float64, tf.bool])
        one = tf.py_function(lambda a: a, [tf.reduce_sum(x)], tf.float64)
        one.set_shape([])
        tf.print("of", tf.shape(x)[0], "rows")  # has no outputs
        return *two, one, tf.sort(x, 0)

    x = np.random.default_rng(0).normal(size=(5, 3))
    simulation = Simulation(step, (x,), 2, static=static)
    simulation(x)
    for rank, report in enumerate(simulation.reports):
        assert sum(each.count for each in report.entries) == sum(each == rank for each, _ in made)
        found = {each.reason.split()[0]: each for each in report.entries if each.kind == "from rank 0"}
        numbers = {name: (each.count, each.bytes) for name, each in found.items()}
        assert numbers == {"PyFunc": (4, None), "EagerPyFunc": (1, 8)}
        assert all("test_reports.py" in each.line for each in found.values())
        text = report.text()
        assert "not known" in text and f"{sum(each == rank for each, _ in made)} collectives per step" in text
