"""The oracle of training: runs a program in one process and on all ranks, and compares all results.

Rank 0 runs the one-process program for all, because test machines have fewer cores than ranks.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

import keras_ddl
from strategy.common import STRATEGY, X, Y, dense_model, of_one_process, set_precision

TOLERANCE = {"float32": 2e-7, "float64": 1e-14}

Values = list[tuple[str, np.ndarray]]  # label, value


@dataclass(frozen=True)
class Trained:
    """The results of a program: a model, logs (or predictions), and optimizers other than the model's."""

    model: keras.Model
    logs: Mapping[str, Any]
    optimizers: Sequence[keras.Optimizer] | None = None

    def values(self) -> Values:
        """Returns all values to compare, in a fixed order."""
        optimizers = [self.model.optimizer] if self.optimizers is None else self.optimizers
        variables = [*self.model.variables, *(variable for each in optimizers for variable in each.variables)]
        values = [(f"weight {v.path}", v.numpy()) for v in variables]
        for key in sorted(self.logs):
            values += [(f"log {key}", np.asarray(each)) for each in keras.tree.flatten(self.logs[key])]
        return values


def fit(model: keras.Model, x: Any = X, y: Any = Y, **arguments: Any) -> Trained:
    """Trains in order for two epochs; arrays are read in batches of 10 rows. `arguments` override this."""
    defaults = {"epochs": 2, "shuffle": False, "verbose": 0}
    if isinstance(x, np.ndarray):
        defaults["batch_size"] = 10
    return Trained(model, model.fit(x, y, **{**defaults, **arguments}).history)


Program = Callable[[Any], Trained]  # takes the scope to build in


def assert_as_one_process(program: Program, dtype: str = "float64", tolerance: float | None = None) -> None:
    """Runs `program` in one process and on all ranks, from the same seed. COLLECTIVE.

    Raises: AssertionError on all ranks, if a rank differs from one process by more than the tolerance, or from rank 0
    in any bit.
    """
    set_precision(dtype)
    expected = of_one_process(lambda: _values(program, contextlib.nullcontext()))
    assert not isinstance(expected, str), f"in one process: {expected}"
    values = _values(program, STRATEGY.scope())
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    mine = [values] if isinstance(values, str) else list(_gaps(expected, values, tolerance, max(1e-12, 5 * tolerance)))
    bits = [] if isinstance(values, str) else [value.tobytes() for _, value in values]
    everyone = keras_ddl.all_gather_object((mine, bits), name="oracle/outcomes")
    found = [f"rank {rank}: {each}" for rank, (theirs, _) in enumerate(everyone) for each in theirs]
    found += [f"rank {n} differs from rank 0 in some bit" for n, one in enumerate(everyone) if one[1] != everyone[0][1]]
    assert not found, "\n".join(found)


def _values(program: Program, scope: Any) -> Values | str:
    """Returns the values or the error's text. All ranks must raise the same error, or a collective hangs."""
    keras.utils.set_random_seed(7)
    try:
        return program(scope).values()
    except Exception as error:
        traceback.print_exc()  # appears in the report of a failed check
        return f"raised {type(error).__name__}: {error}"


def _gaps(expected: Values, values: Values, tolerance: float, log_tolerance: float) -> Any:
    kinds = [[label if label.startswith("log") else "weight" for label, _ in each] for each in (expected, values)]
    if kinds[0] != kinds[1]:
        yield f"{len(values)} values {kinds[1]}, in one process {len(expected)} {kinds[0]}"
        return
    for (_, one), (label, mine) in zip(expected, values):
        allowed = log_tolerance if label.startswith("log") else tolerance
        if one.shape != mine.shape or not np.allclose(mine, one, rtol=0, atol=allowed, equal_nan=True):
            gap = np.abs(mine - one).max() if one.shape == mine.shape and one.dtype.kind in "fiu" else "?"
            expected = f"in one process {one.ravel()[:3]}... (off by {gap}, allowed: {allowed})"
            yield f"{label} is {mine.ravel()[:3]}..., {expected}"


def case(dtype: str = "float64", *, tolerance: float | None = None) -> Callable[[Program], Callable[[], None]]:
    """Turns a program into a check.

    Args:
        dtype: precision of the run.
        tolerance: tolerance for weights, if not the default of the precision.
    """

    def decorate(program: Program) -> Callable[[], None]:
        return functools.wraps(program)(lambda: assert_as_one_process(program, dtype, tolerance))

    return decorate


def check_equal_to_one_process(
    optimizer: Callable[[], keras.Optimizer],
    *,
    build: Callable[[], keras.Model] = dense_model,
    compiled: dict[str, Any] | None = None,
    fit: dict[str, Any] | None = None,
) -> None:
    """Checks that compile and fit give the results of one process, and that ranks agree bit by bit.

    Callables in `compiled` and `fit` are called anew for each run.
    """
    compiled = {"loss": "mse", "optimizer": optimizer, "metrics": lambda: ["mae"], **(compiled or {})}
    arguments = {"x": X, "y": Y, "batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0, **(fit or {})}

    def program(scope: Any) -> Trained:
        with scope:
            model = build()
            model.compile(**{key: value() if callable(value) else value for key, value in compiled.items()})
        chosen = {key: value() if callable(value) else value for key, value in arguments.items()}
        if not isinstance(chosen["x"], (np.ndarray, list, dict)):
            for key in {"y", "batch_size", "shuffle"} - set(fit or {}):
                chosen.pop(key)
        return Trained(model, model.fit(**chosen).history)

    assert_as_one_process(program)
