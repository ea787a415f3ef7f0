"""States that DivergenceGuard can restore: copies in memory, or the checkpoints of a directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_ddl import checkpoint as ckpt
from keras_ddl import communicator, model_state
from keras_ddl.callbacks._resuming import restore_on_all_ranks
from keras_ddl.compat.models import optimizers_of, steps_taken
from keras_ddl.strategy import accumulation, agreement
from keras_ddl.strategy.shards import sharded_slots


def step_of(model: Any) -> int:
    """Returns the number of optimizer steps; with several optimizers, the largest number."""
    return steps_taken(optimizers_of(model)) or 0


@dataclass
class _Copy:
    step: int
    values: list[tuple[Any, np.ndarray]]

    def has_old_shards(self, stored: Sequence[Any]) -> bool:
        """Returns whether the copy has shards that this rank no longer stores, because a rank was lost since."""
        return not {id(variable) for variable, _ in self.values} <= {id(each) for each in stored}


class InMemorySnapshots:
    """Copies of the states at the ends of the last two good windows. They use twice the memory of the variables.

    Training may begin to diverge right at the end of a good window, so that state counts as good only when the next
    window is good, too.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._confirmed = self._latest = self._copy() if model.built else None

    def confirm(self) -> None:
        """Records that the last window was good."""
        self._confirmed, self._latest = self._latest, self._copy()

    def go_back(self) -> int | None:
        """Restores the variables of the last good state; returns its step, or None without one. COLLECTIVE."""
        mine = self._confirmed
        step = None if mine is None or mine.has_old_shards(self._stored()) else mine.step
        several = communicator.is_initialized() and communicator.size() > 1
        steps = communicator.all_gather_object(step, name="DivergenceGuard/good") if several else [step]
        if mine is None or None in steps:
            return None
        accumulation.combine(self._model)
        for variable, value in mine.values:
            variable.assign(value)
        if len(set(steps)) > 1:  # a newcomer made its copy when it joined
            agreement.broadcast_variables(_variables(self._model), steps.index(min(steps)))
            mine = self._confirmed = self._copy()
        self._latest = mine
        return mine.step

    def missing(self) -> str:
        """Returns what `go_back` is missing when it returns None, for a message."""
        return "good window to return to."

    def _copy(self) -> _Copy:
        accumulation.combine(self._model)
        return _Copy(step_of(self._model), [(v, np.array(v.numpy())) for v in self._stored()])

    def _stored(self) -> list[Any]:
        return [each for some in _variables(self._model) for each in sharded_slots.local_variables(some)]


def _variables(model: Any) -> Sequence[Any]:
    variables = {id(v): v for v in agreement.all_variables(model)}
    variables.update({id(v): v for each in optimizers_of(model) for v in each.variables})
    return [v for v in variables.values() if not model_state.is_seed(v)]


class SavedSnapshots:
    """The checkpoints of a directory, up to the end of the last good window that was followed by a good one."""

    def __init__(self, model: Any, directory: str | Path) -> None:
        self._model, self._directory = model, Path(directory)
        self._confirmed = self._latest = step_of(model)

    def confirm(self) -> None:
        """Records that the last window was good."""
        self._confirmed, self._latest = self._latest, step_of(self._model)

    def go_back(self) -> int | None:
        """Restores rank 0's newest good checkpoint on all ranks; returns its step, None without one. COLLECTIVE."""
        accumulation.combine(self._model)

        step = restore_on_all_ranks(
            self._model, self._directory, self._newest_good, lambda read: read.step, seeds="none"
        )
        if step is not None:
            self._confirmed = self._latest = step
        return step

    def missing(self) -> str:
        """Returns what `go_back` is missing when it returns None, for a message."""
        return (
            f"intact checkpoint of step {self._confirmed} or earlier in {self._directory} to return to: let Checkpoint "
            "keep more."
        )

    def _newest_good(self) -> int | None:
        intact = [each.step for each in ckpt.list_checkpoints(self._directory) if each.problem is None]
        return max((step for step in intact if step <= self._confirmed), default=None)
