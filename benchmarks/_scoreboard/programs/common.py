"""The registry of programs, and what programs share: data, a small model, and a training function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from _scoreboard.judge import DRAWN
from _scoreboard.peers import Peer

layers, ops = keras.layers, keras.ops
Values = dict[str, np.ndarray]
BATCH, ROWS = 10, 40

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 6))
Y = np.tanh(X @ RNG.normal(size=(6, 2))) + 0.1 * RNG.normal(size=(48, 2))
LABELS = RNG.integers(0, 3, 48)
TOKENS = RNG.integers(1, 12, (48, 5)) * (np.arange(5) < RNG.integers(1, 6, (48, 1)))  # 0 is padding
SEQUENCES = RNG.normal(size=(48, 5, 3))


@dataclass(frozen=True)
class Program:
    """A row of the scoreboard.

    Attributes:
        about: a description in a few words.
        run: trains under a peer, and returns the values that must be equal.
        tolerance: see judge.judge.
        backends: backends on which one process can run it.
        of_logs: it is about metrics or callbacks, so equal weights alone prove nothing.
    """

    name: str
    about: str
    run: Callable[[Peer], Values]
    tolerance: float
    backends: Sequence[str]
    of_logs: bool


REGISTERED: dict[str, Program] = {}


def program(
    about: str,
    *,
    tolerance: float = 1e-9,
    backends: Sequence[str] = ("tensorflow", "jax", "torch"),
    of_logs: bool = False,
) -> Callable[[Callable[[Peer], Values]], Callable[[Peer], Values]]:
    """Registers the decorated function as a row of the scoreboard."""

    def register(run: Callable[[Peer], Values]) -> Callable[[Peer], Values]:
        name = run.__name__
        REGISTERED[name] = Program(name, about, run, tolerance, backends, of_logs)
        return run

    return register


def sgd(**options: Any) -> keras.Optimizer:
    """Returns an optimizer that does not amplify rounding, unlike Adam with small gradients."""
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def dense(*between: keras.layers.Layer, outputs: int = 2, activation: str | None = None) -> keras.Model:
    first, last = layers.Dense(8, activation="tanh"), layers.Dense(outputs, activation=activation)
    return keras.Sequential([keras.Input((6,)), first, *between, last])


def train(
    peer: Peer,
    build: Callable[[], keras.Model] = dense,
    x: Any = X,
    y: Any = Y,
    *,
    loss: Any = "mse",
    optimizer: Callable[[], keras.Optimizer] = sgd,
    metrics: Callable[[], list[Any]] = list,
    rows: int = ROWS,
    compiled: dict[str, Any] | None = None,
    **fit: Any,
) -> Values:
    """Builds and compiles under the peer's scope, trains without shuffling, and returns weights and logs."""
    with peer.scope():
        model = build()
        model.compile(optimizer(), loss, metrics=metrics(), **(compiled or {}))
    x, y = (keras.tree.map_structure(lambda each: each[:rows], part) for part in (x, y))
    return values_of(model, peer.fit(model, x, y, **{"batch_size": BATCH, "epochs": 2, **fit}))


def values_of(model: keras.Model, logs: dict[str, Any]) -> Values:
    """Returns label -> array for the weights of a model and for logs."""
    values = {f"weight {n} {each.name}": keras.ops.convert_to_numpy(each) for n, each in enumerate(model.weights)}
    return values | {f"log {key}": np.asarray(value, "float64") for key, value in logs.items()}


def with_draws(peer: Peer, build: Callable[[float], keras.Model]) -> Values:
    """Trains `build(1.0)`, whose random numbers may differ between peers, and `build(0.0)`, which draws none."""
    drawn = {DRAWN + label: value for label, value in train(peer, lambda: build(1.0)).items()}
    return drawn | train(peer, lambda: build(0.0))
