"""The state of metrics over all ranks.

Each rank's metrics count its own rows; what they hold together is asked for at the end of an epoch or an evaluation.
How a state combines is said by the metric's attribute `ddl_reduction` ({name of the variable: "sum" | "mean" | "max" |
"min"}), by `add_variable(aggregation="mean" | "only_first_replica")`, or by what `update_state` was seen to do with it
(keras_patches/metric_updates.py); it is added up otherwise, as the states of Keras's metrics are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from keras_ddl import communicator
from keras_ddl.compat.keras import keras
from keras_ddl.errors import ConfigError

_SEEN = "_ddl_reduction"  # attribute of a variable: what its metric was seen to do with it
_REDUCTIONS = ("sum", "mean", "max", "min")


def flat(metrics: Sequence[keras.metrics.Metric]) -> list[keras.metrics.Metric]:
    """Returns metrics and those inside them, each once."""
    found: dict[int, Any] = {}
    pending = list(metrics)
    while pending:
        metric = pending.pop(0)
        if id(metric) not in found:
            found[id(metric)] = metric
            pending.extend([*getattr(metric, "_metrics", []), *(getattr(metric, "metrics", None) or [])])
    return list(found.values())


def own_metrics(model: keras.Model) -> dict[int, keras.metrics.Metric]:
    """Returns {id of a variable: its metric} for the metrics of a model that are not of Keras's classes."""
    return {id(variable): metric for metric in flat(model.metrics) if is_own(metric) for variable in metric._variables}


def is_declared(metric: Any, variable: Any) -> bool:
    """Whether the program says how a state combines."""
    declared = getattr(metric, "ddl_reduction", {})
    return variable.name in declared or variable.aggregation in ("mean", "only_first_replica")


def set_reduction(metric: Any, variable: Any, reduction: str) -> None:
    """Remembers what a metric was seen to do with its state. Raises ConfigError where it does now this, now that."""
    before = getattr(variable, _SEEN, reduction)
    if before != reduction:
        raise ConfigError(
            "The state of a metric must combine over ranks in one way. "
            f"Received: metric {metric.name!r} ({type(metric).__name__}) updates {variable.name!r} so that it would be "
            f"reduced by {before!r}, and elsewhere by {reduction!r}. Keep them in two variables, or say which is meant "
            f"with an attribute of the metric: ddl_reduction = {{{variable.name!r}: {reduction!r}}}."
        )
    object.__setattr__(variable, _SEEN, reduction)


def reduction_of(metric: Any, variable: Any) -> str:
    """Returns how a state combines: "sum", "mean", "max", "min", or "equal" (all ranks have it)."""
    declared = getattr(metric, "ddl_reduction", {})
    if variable.name in declared:
        if declared[variable.name] not in _REDUCTIONS:
            raise ConfigError(
                f"A metric's ddl_reduction must be one of {', '.join(_REDUCTIONS)}. Received: metric {metric.name!r}: "
                f"{declared!r}. Correct the attribute."
            )
        return declared[variable.name]
    if variable.aggregation == "mean":
        return "mean"
    if variable.aggregation == "only_first_replica":
        return "equal"
    return getattr(variable, _SEEN, "sum")


@contextlib.contextmanager
def reduced(
    metrics: Sequence[keras.metrics.Metric], rank: int, size: int, name: str, extra: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Inside, the metrics hold the state of all ranks; afterwards each rank's own again. COLLECTIVE, blocking.

    Args:
        extra: float64 numbers that are to be added up as well. Yields: their sums.
    Raises: ConfigError: a metric that keeps its state elsewhere than in variables.
    Cost: one all-reduce of 8 bytes per element; one more each where a state is a maximum or a minimum.
    """
    found = {id(v): (metric, v) for metric in flat(metrics) for v in getattr(metric, "_variables", [])}
    _check_variables(metrics, rank)
    variables = [variable for _, variable in found.values()]
    ways = [reduction_of(metric, variable) for metric, variable in found.values()]
    states = [variable.numpy() for variable in variables]
    wide = [state.astype(np.float64).ravel() for state in states]
    extra = np.zeros(0) if extra is None else extra.astype(np.float64)
    own = [_part(values, way, rank, size) for values, way in zip(wide, ways)]
    total = communicator.all_reduce_array(np.concatenate([*own, extra]), op="sum", name=f"{name} ({len(extra)})")
    ends = np.cumsum([len(values) for values in wide]).astype(int)
    everyone = np.split(total[: len(total) - len(extra)], ends[:-1]) if wide else []
    for op in ("max", "min"):
        chosen = [i for i, way in enumerate(ways) if way == op]
        if chosen:
            values = communicator.all_reduce_array(
                np.concatenate([wide[i] for i in chosen]), op=op, name=f"{name} {op}"
            )
            for i in chosen:
                everyone[i], values = values[: len(wide[i])], values[len(wide[i]) :]
    try:
        for variable, state, values in zip(variables, states, everyone):
            variable.assign(values.reshape(state.shape).astype(state.dtype))
        yield total[len(total) - len(extra) :]
    finally:
        for variable, state in zip(variables, states):
            variable.assign(state)


def _part(values: np.ndarray, way: str, rank: int, size: int) -> np.ndarray:
    if way == "mean":
        return values / size
    if way == "sum" or (way == "equal" and rank == 0):
        return values
    return np.zeros_like(values)


def _check_variables(metrics: Sequence[keras.metrics.Metric], rank: int) -> None:
    for metric in flat(metrics):
        if is_own(metric) and not metric.variables and not hasattr(metric, "ddl_reduction"):
            raise ConfigError(
                "A metric must keep its state in variables, which keras_ddl reduces over ranks. "
                f"Received: metric {metric.name!r} ({type(metric).__name__}) has none, so its result would be that of "
                f"one rank's rows (rank {rank}). Make them with self.add_variable(...), or set ddl_reduction = {{}} if "
                "its result is the same on all ranks."
            )


def is_own(metric: Any) -> bool:
    """Whether a metric is of a class of the program's own."""
    return not type(metric).__module__.startswith("keras.src.")
