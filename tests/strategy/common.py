"""What the check programs of the Strategy share: data, models, a run in one process, and the same run on all ranks.

Rank 0 trains the single-process model and sends it to the others: a test machine has fewer cores than ranks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_ddl

# The oracle is a model outside of the scope, on purpose.
warnings.filterwarnings("ignore", message=".*was made outside the scope.*")

keras.utils.set_random_seed(1)
STRATEGY = keras_ddl.Strategy()
RANK, SIZE = STRATEGY.rank, STRATEGY.size
RNG = np.random.default_rng(0)
X = RNG.normal(size=(43, 6))
Y = RNG.normal(size=(43, 2))
WEIGHTS = RNG.uniform(0.1, 2.0, size=43)
LABELS = RNG.integers(0, 3, size=43)
TOLERANCE = {"float32": 2e-7, "float64": 1e-14}


def set_precision(dtype: str) -> None:
    keras.backend.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


def dense_model() -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-2))(inputs)
    return keras.Model(inputs, keras.layers.Dense(2)(hidden), name="dense_model")


def train(build: Callable[[], keras.Model], compiled: dict[str, Any], fit: dict[str, Any], scope: Any, weights=None):
    """Builds and compiles in `scope`, fits outside; returns the model, its initial weights and the history."""
    with scope:
        model = build()
        if weights is not None and model.built:
            model.set_weights(weights)
        model.compile(**{"loss": "mse", **{k: v() if callable(v) else v for k, v in compiled.items()}})
    before = model.get_weights()
    defaults = {"x": X, "y": Y, "batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
    arguments = {**defaults, **{k: v() if callable(v) else v for k, v in fit.items()}}
    if not isinstance(arguments["x"], (np.ndarray, list, dict)):
        for key in {"y", "batch_size", "shuffle"} - set(fit):
            arguments.pop(key)
    history = model.fit(**arguments)
    return model, before, history.history


def check_equal_to_one_process(
    optimizer: Callable[[], keras.Optimizer],
    *,
    build: Callable[[], keras.Model] = dense_model,
    compiled: dict[str, Any] | None = None,
    fit: dict[str, Any] | None = None,
    dtype: str = "float64",
    tolerance: float | None = None,
    log_tolerance: float | None = None,
) -> keras.Model:
    """Checks weights and logs of a run on all ranks against one process, and those of the ranks bit by bit.

    A callable among the arguments of compile (`compiled`) and fit is called for each run.
    """
    set_precision(dtype)
    compiled = {"optimizer": optimizer, "metrics": lambda: ["mae"], **(compiled or {})}
    oracle = None
    if RANK == 0:
        alone, weights, expected = train(build, compiled, fit or {}, contextlib.nullcontext())
        oracle = weights, alone.get_weights(), expected
    weights, trained, expected = keras_ddl.broadcast_object(oracle, name="test/oracle")
    shared, _, history = train(build, compiled, fit or {}, STRATEGY.scope(), weights)

    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    for variable, one, mine in zip(shared.weights, trained, shared.get_weights(), strict=True):
        np.testing.assert_allclose(mine, one, rtol=0, atol=tolerance, err_msg=variable.path)
    assert history.keys() == expected.keys()
    for key in expected:
        allowed = log_tolerance or max(1e-12, 5 * tolerance)
        np.testing.assert_allclose(history[key], expected[key], rtol=0, atol=allowed, err_msg=key)
    check_equal_on_all_ranks(shared, history)
    return shared


def check_equal_on_all_ranks(model: keras.Model, history: dict[str, Any] | None = None) -> None:
    """Checks that weights, optimizer state and history are bitwise equal on all ranks."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
    rank_local = ("seed_generator_state", "gradient_accumulator")
    # By position: Keras numbers names by process, and rank 0 has made more models.
    state = {i: v.numpy().tobytes() for i, v in enumerate(variables) if not v.name.endswith(rank_local)}
    for rank, theirs in enumerate(keras_ddl.all_gather_object((state, repr(history)), name="test/state")):
        assert theirs[1] == repr(history), f"history of rank {rank}: {theirs[1]}, here {history}"
        differing = [variables[i].path for i in state if theirs[0].get(i) != state[i]]
        assert not differing, f"variables differ between rank {rank} and {RANK}: {differing}"


def pair(build=dense_model, **compiled):
    """A model in one process and one on all ranks, with the same weights."""

    def compiled_model():
        model = build()
        arguments = {"metrics": ["mae"], **{k: v() if callable(v) else v for k, v in compiled.items()}}
        model.compile(**{"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", **arguments})
        return model

    alone = compiled_model()
    with STRATEGY.scope():
        shared = compiled_model()
    shared.set_weights([keras_ddl.broadcast_object(w) for w in alone.get_weights()])
    alone.set_weights(shared.get_weights())
    return alone, shared


def assert_same_weights(alone, shared, tolerance=1e-14):
    for one, mine in zip(alone.get_weights(), shared.get_weights()):
        np.testing.assert_allclose(mine, one, rtol=0, atol=tolerance)
    check_equal_on_all_ranks(shared)


def rows_of_ranks(count):
    """Row slices of an uneven split: rank 0 has more than half."""
    ends = [0, *np.linspace(count // 2 + 1, count, SIZE).astype(int)]
    return [slice(ends[r], ends[r + 1]) for r in range(SIZE)]
