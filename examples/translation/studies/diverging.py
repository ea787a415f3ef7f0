"""Runs one rank of divergence.py: short trainings, one after the other, each with a new model from the same seed."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_ddl
from translation.batches import Batches
from translation.settings import Settings
from translation.subwords import PADDING
from translation.training import compiled, make_batches, make_subwords

WITHOUT, WITH, STOP, BACK = "without warm-up", "with warm-up", "guard: stop", "guard: go back"
WAYS = (WITHOUT, WITH, STOP, BACK)  # trainings with the guard have no warm-up
BLIND = 0.98  # with a loss below this share of the loss of blind guesses, a model has learned something


@dataclasses.dataclass(frozen=True)
class Plan:
    """The trainings: all ways at all rates with all batch sizes.

    Attributes:
        tokens: tokens in a batch of all ranks.
        steps: steps of a training.
        warmup: steps of the warm-up.
        window, grace, factor, retries: arguments of the guard.
    """

    rates: tuple[float, ...] = (0.003, 0.01, 0.02, 0.05)
    tokens: tuple[int, ...] = (1024, 4096)
    steps: int = 160
    warmup: int = 40
    window: int = 5
    grace: int = 8
    factor: float = 0.25
    retries: int = 3


@dataclasses.dataclass
class Training:
    """The result of a training. Lists have an entry for each step, also for steps that the guard undid.

    Attributes:
        losses: losses over all ranks' tokens.
        blind: the loss of guesses by the subwords' frequencies alone.
        acts: the guard's actions: (number of steps made, message).
    """

    tokens: int
    rate: float
    way: str
    blind: float
    losses: list[float]
    rates: list[float]
    acts: list[tuple[int, str]]


class Curve(keras.callbacks.Callback):
    """Records the loss of each step, not of the epoch so far, and the guard's messages. Put it after the guard."""

    never_stops_within_epoch = True

    def __init__(self, guard: keras_ddl.callbacks.DivergenceGuard | None = None) -> None:
        super().__init__()
        self.guard = guard
        self.rates: list[float] = []
        self.acts: list[tuple[int, str]] = []
        self._sums: list[np.ndarray] = []

    def losses(self) -> list[float]:
        """Returns the losses over all ranks. COLLECTIVE."""
        total, count = np.array(keras_ddl.all_reduce(np.array(self._sums), name="Curve")).T
        return (total / count).tolist()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._before = self._tracked()
        self.rates.append(float(self.model.optimizer.learning_rate))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._sums.append(self._tracked() - self._before)
        self._note()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._note()

    def _note(self) -> None:
        if self.guard is not None and self.guard.message not in (None, *(said for _, said in self.acts)):
            self.acts.append((len(self.rates), self.guard.message))

    def _tracked(self) -> np.ndarray:
        """Returns the sum and the count of the loss's running mean."""
        tracker = next(metric for metric in self.model.metrics if metric.name == "loss")
        return np.array([float(tracker.total), float(tracker.count)])


def blind_loss(batches: Batches, vocabulary: int, smoothing: float) -> float:
    """Returns the loss of guesses that know each subword's frequency, but not the sentence. COLLECTIVE."""
    counts = np.zeros(vocabulary)
    for (_, labels), _ in batches.remaining():
        counts += np.bincount(labels[labels != PADDING], minlength=vocabulary)
    counts = np.array(keras_ddl.all_reduce(counts, name="counts"))
    shares = (1 - smoothing) * counts / counts.sum() + smoothing / vocabulary
    return -sum(share * math.log(share) for share in shares if share > 0)


def train(paths: Sequence[Path], settings: Settings, plan: Plan) -> list[Training]:
    """Runs all trainings of the plan, on the ranks that call it. COLLECTIVE.

    Args:
        paths: files of source and target.
        settings: sizes of the model and of the vocabulary. The plan's rates and batch sizes replace theirs.
    Raises: ValueError: the corpus has fewer batches than a training has steps.
    """
    keras_ddl.Strategy()
    subwords, found = make_subwords(paths, settings.vocabulary), []
    for tokens in plan.tokens:
        settings = dataclasses.replace(settings, tokens=tokens, decay="constant")
        blind = blind_loss(make_batches(paths, subwords, settings), len(subwords), settings.smoothing)
        for rate in plan.rates:
            for way in WAYS:
                strategy = keras_ddl.Strategy(seed=settings.seed)
                batches = make_batches(paths, subwords, settings)
                if len(batches) < plan.steps:
                    raise ValueError(
                        f"steps: a training must not have more steps than the corpus has batches. Received: "
                        f"{plan.steps} steps, and {len(batches)} batches of {tokens} tokens. Lower --steps, or use a "
                        "larger --corpus."
                    )
                this = dataclasses.replace(settings, learning_rate=rate, warmup=plan.warmup if way == WITH else 0)
                with strategy.scope():
                    model = compiled(this, subwords, this.make_schedule(plan.steps))
                curve = fit(model, batches, plan, way, BLIND * blind)
                found.append(Training(tokens, rate, way, blind, curve.losses(), curve.rates, curve.acts))
                if keras_ddl.rank() == 0:
                    print(f"{tokens:,} tokens, rate {rate:g}, {way}: loss {found[-1].losses[-1]:.2f}", flush=True)
    return found


def fit(model: keras.Model, batches: Batches, plan: Plan, way: str, ceiling: float) -> Curve:
    """Trains for the plan's steps, with the guard if the way includes it."""
    guard = None
    if way in (STOP, BACK):
        guard = keras_ddl.callbacks.DivergenceGuard(
            action="stop" if way == STOP else "go_back",
            window=plan.window,
            ceiling=ceiling,
            grace=plan.grace,
            factor=plan.factor,
            retries=plan.retries,
        )
    curve = Curve(guard)
    callbacks = [guard, curve] if guard else [curve]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DivergenceGuard")  # the curve records them
        model.fit(batches, steps_per_epoch=plan.steps, shuffle=False, verbose=0, callbacks=callbacks)
    return curve
