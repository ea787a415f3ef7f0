"""The oracle of training: the same program in one process and on all ranks, with everything that it leaves compared.

Rank 0 runs the one process and tells the others: a test machine has fewer cores than ranks.
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
    """What a program leaves: a model, logs (or predictions), and its optimizers if they are not the model's."""

    model: keras.Model
    logs: Mapping[str, Any]
    optimizers: Sequence[keras.Optimizer] | None = None

    def values(self) -> Values:
        """Returns all that one process and all ranks must have alike, in order."""
        optimizers = [self.model.optimizer] if self.optimizers is None else self.optimizers
        variables = [*self.model.variables, *(variable for each in optimizers for variable in each.variables)]
        values = [(f"weight {v.path}", v.numpy()) for v in variables]
        for key in sorted(self.logs):
            values += [(f"log {key}", np.asarray(each)) for each in keras.tree.flatten(self.logs[key])]
        return values


def fit(model: keras.Model, x: Any = X, y: Any = Y, **arguments: Any) -> Trained:
    """Trains for two epochs, in order, in batches of 10 rows of arrays, if the arguments of fit say nothing else."""
    defaults = {"epochs": 2, "shuffle": False, "verbose": 0}
    if isinstance(x, np.ndarray):
        defaults["batch_size"] = 10
    return Trained(model, model.fit(x, y, **{**defaults, **arguments}).history)


Program = Callable[[Any], Trained]  # takes the scope to build in


def assert_as_one_process(program: Program, dtype: str = "float64", tolerance: float | None = None) -> None:
    """Runs `program` in one process and on all ranks, from the same seed. COLLECTIVE.

    Raises: AssertionError, on all ranks: says how any rank differs from one process by more than a tolerance, or from
    rank 0 in any bit.
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
    """Returns the values that are left, or what was raised, which is alike on all ranks, or a collective hangs."""
    keras.utils.set_random_seed(7)
    try:
        return program(scope).values()
    except Exception as error:
        traceback.print_exc()  # shown with a check that fails
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
    """Makes a check of a program.

    Args:
        dtype: the precision that it runs in.
        tolerance: of the weights, where it is not that of the precision.
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
    """Checks compile and fit of a model against one process, and the ranks against each other, bit by bit.

    A callable among the arguments of compile (`compiled`) and fit is called for each run.
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
