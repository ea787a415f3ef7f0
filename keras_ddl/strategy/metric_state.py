"""The state of metrics over all ranks.

Each rank's metrics count its own rows; what they hold together is asked for at the end of an epoch or an evaluation.
How a state combines is what `keras.metrics.Metric.add_variable(aggregation=...)` says ("sum" by default, "mean",
"only_first_replica"), or what the metric's `update_state` was seen to do with it (see keras_patches/metric_updates.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from keras_ddl import communicator
from keras_ddl.compat.keras import keras

REDUCTION = "_ddl_reduction"  # attribute of a variable: "max" or "min"


def of_metrics(metrics: Sequence[keras.metrics.Metric]) -> list[keras.Variable]:
    """Returns the variables of metrics, each once."""
    return list({id(v): v for metric in metrics for v in metric.variables}.values())


@contextlib.contextmanager
def reduced(
    variables: Sequence[keras.Variable], rank: int, size: int, name: str, extra: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Inside, the variables hold the state of all ranks; afterwards each rank's own again. COLLECTIVE, blocking.

    Args:
        extra: float64 numbers that are to be added up as well. Yields: their sums.
    Cost: one all-reduce of 8 bytes per element; one more each where a state is a maximum or a minimum.
    """
    states = [v.numpy() for v in variables]
    own = [_part(v, state, rank, size) for v, state in zip(variables, states)]
    extra = np.zeros(0) if extra is None else extra
    flat = np.concatenate([*own, extra.astype(np.float64)])
    total = communicator.all_reduce_array(flat, op="sum", name=f"{name} ({len(flat)})")
    everyone, start = [], 0
    for state in states:
        everyone.append(total[start : start + state.size])
        start += state.size
    for op in ("max", "min"):
        chosen = [i for i, v in enumerate(variables) if getattr(v, REDUCTION, None) == op]
        if chosen:
            values = np.concatenate([states[i].astype(np.float64).ravel() for i in chosen])
            values = communicator.all_reduce_array(values, op=op, name=f"{name} {op} ({len(values)})")
            for i in chosen:
                everyone[i], values = values[: states[i].size], values[states[i].size :]
    try:
        for variable, state, values in zip(variables, states, everyone):
            variable.assign(values.reshape(state.shape).astype(state.dtype))
        yield total[start:]
    finally:
        for variable, state in zip(variables, states):
            variable.assign(state)


def _part(variable: keras.Variable, state: np.ndarray, rank: int, size: int) -> np.ndarray:
    flat = state.astype(np.float64).ravel()
    if variable.aggregation == "mean":
        return flat / size
    if variable.aggregation == "only_first_replica":
        return flat * (rank == 0)
    return flat
