"""States to which a training that has diverged can go back: in memory, or a Checkpoint's directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_ddl import checkpoint as ckpt
from keras_ddl import model_state
from keras_ddl.communicator.first_rank import on_first_rank
from keras_ddl.compat.models import optimizers_of, steps_taken
from keras_ddl.resuming.training_state import broadcast_training_state
from keras_ddl.strategy import agreement
from keras_ddl.strategy.shards import sharded_slots
from keras_ddl.strategy.step import accumulation


def step_of(model: Any) -> int:
    """Returns the optimizer steps made; of several optimizers, those of the one with the most."""
    return steps_taken(optimizers_of(model)) or 0


@dataclass
class _Copy:
    step: int
    values: list[tuple[Any, np.ndarray]]


class InMemorySnapshots:
    """The last two states from which training went well for a window. Twice the size of weights and optimizers.

    The end of a good window may be where it begins to go wrong; only when the next one is good, too, is it a state to
    go back to.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._confirmed = self._latest = self._copy() if model.built else None

    def note(self) -> None:
        """The window that has ended was good."""
        self._confirmed, self._latest = self._latest, self._copy()

    def go_back(self) -> int | None:
        """Restores the variables; returns the step they are of, or None where there is no such state."""
        if self._confirmed is None:
            return None
        accumulation.combine(self._model)
        for variable, value in self._confirmed.values:
            variable.assign(value)
        self._latest = self._confirmed
        return self._confirmed.step

    def wanted(self) -> str:
        """What `go_back` needs, for a message."""
        return "window that was good"

    def _copy(self) -> _Copy:
        accumulation.combine(self._model)
        held = map(sharded_slots.of_this_rank, _variables(self._model))
        return _Copy(step_of(self._model), [(v, np.array(v.numpy())) for v in held])


def _variables(model: Any) -> Sequence[Any]:
    held = {id(v): v for v in agreement.all_variables(model)}
    held.update({id(v): v for each in optimizers_of(model) for v in each.variables})
    return [v for v in held.values() if not model_state.is_seed(v)]


class CheckpointSnapshots:
    """The checkpoints of a directory, up to a step from which training went well for a window."""

    def __init__(self, model: Any, directory: str | Path) -> None:
        self._model, self._directory = model, Path(directory)
        self._confirmed = self._latest = step_of(model)

    def note(self) -> None:
        """The window that has ended was good."""
        self._confirmed, self._latest = self._latest, step_of(self._model)

    def go_back(self) -> int | None:
        """Restores rank 0's newest good checkpoint on all ranks; returns its step, None without one. COLLECTIVE."""
        accumulation.combine(self._model)
        with sharded_slots.deferring_restored_values():
            step = on_first_rank(self._restore, "DivergenceGuard/restore")
            if step is not None:
                broadcast_training_state(self._model)
        if step is not None:
            self._confirmed = self._latest = step
        return step

    def wanted(self) -> str:
        """What `go_back` needs, for a message."""
        return f"whole checkpoint of step {self._confirmed} or before in {self._directory} (keep more of them)"

    def _restore(self) -> int | None:
        whole = [each.step for each in ckpt.list_checkpoints(self._directory) if each.problem is None]
        good = [step for step in whole if step <= self._confirmed]
        if good:
            model_state.restore_checkpoint(self._model, self._directory, good[-1], seeds="none")
        return good[-1] if good else None
