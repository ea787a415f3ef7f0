"""The drift check: now and then, while Keras trains, all ranks compare checksums of their weights.

Ranks that train together have the same bits. A callback that changes weights on one rank, a step with its own random
numbers or failing memory breaks this, and without a check nobody would notice, because gradients are still summed.

Within an epoch the ranks compare weights, learning rate and other scalars of the optimizers, as often as the allowed
fraction of the training time permits. At the end of each epoch they also compare all other state of the optimizers. If
a layout cuts a variable along the model axis, each slice is compared among the ranks that have it. Values that differ
between ranks by design are left out: statistics of layers, seeds, accumulated gradients, and variables in shards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_ddl import communicator
from keras_ddl.compat import models
from keras_ddl.compat.names import plain_name
from keras_ddl.errors import DriftError
from keras_ddl.strategy import agreement
from keras_ddl.strategy.agreement.compared import Compared, Digests, differ, is_compared, values
from keras_ddl.strategy.job import Job

_FIRST_INTERVAL = 8  # steps, until the cost of a step and of the check is known
_AT_MOST = 10_000


class DriftCheck:
    """The drift check of one fit."""

    def __init__(self, model: Any, job: Job) -> None:
        self._model, self._job, self._time_fraction = model, job, job.drift_check_fraction
        self._interval = _FIRST_INTERVAL
        self._last_equal: int | None = None
        self._gather_seconds = 0.0
        self._started = False
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Starts counting steps and seconds."""
        self._begin, self._steps = time.perf_counter(), 0

    def after_batch(self) -> None:
        """Compares if the number of batches that the ranks agreed on has passed. COLLECTIVE in that case.

        Raises: DriftError: the ranks differ; on every rank.
        """
        if not self._time_fraction:
            return
        if not self._started:  # the first batch includes tracing, so it is not timed
            self._started = True
            self.begin_epoch()
            return
        self._steps += 1
        if self._steps >= self._interval:
            self._check(everything=False)

    def after_epoch(self) -> None:
        """Compares all weights and optimizer state. COLLECTIVE. Raises: DriftError, on every rank: the ranks differ."""
        if self._time_fraction:
            self._check(everything=True)

    def compare(self) -> None:
        """Compares at once, whether or not it is due. COLLECTIVE. Raises: as `after_epoch`."""
        if self._time_fraction:
            slots = [v for v in _state_of_optimizers(self._model) if math.prod(v.shape) > 1]
            compared = Compared([*_weights(self._model), *slots], self._job)
            name = agreement.name_of(self._model, "drift_now")
            self.require_equal(compared, communicator.all_gather_object(compared.digests(), name=name))

    def require_equal(self, compared: Compared, gathered: Sequence[Digests]) -> None:
        """Raises DriftError if the ranks' digests differ. COLLECTIVE in that case. compared: this rank's variables."""
        if self._time_fraction and differ(gathered, self._job):
            self._explain(compared, models.steps_taken(models.optimizers_of(self._model)) or 0)

    def checksums(self) -> dict[str, int]:
        """Returns name -> checksum of the weights and of all state of the optimizers."""
        return Compared([*_weights(self._model), *_state_of_optimizers(self._model)], self._job).checksums()

    def _check(self, everything: bool) -> None:
        begin = time.perf_counter()
        variables = _weights(self._model)
        compared = Compared(variables, self._job)
        cost = time.perf_counter() - begin
        if everything:
            compared.add([v for v in _state_of_optimizers(self._model) if math.prod(v.shape) > 1])
        step = models.steps_taken(models.optimizers_of(self._model)) or 0
        per_step = (begin - self._begin) / self._steps if self._steps else math.inf
        gather_begin = time.perf_counter()
        mine = (compared.digests(), cost, self._gather_seconds, per_step)
        gathered = communicator.all_gather_object(mine, name=agreement.name_of(self._model, "drift"))
        self._gather_seconds = time.perf_counter() - gather_begin
        digests, costs, gathers, steps = zip(*gathered)
        if differ(digests, self._job):
            self._explain(compared, step)
        self._last_equal = step
        # Computed from shared numbers, so all ranks agree. The shortest gather did not wait, so it shows the cost.
        if 0 < min(steps) < math.inf:
            seconds = max(costs) + min(gathers)
            self._interval = min(max(1, math.ceil(seconds / (self._time_fraction * min(steps)))), _AT_MOST)
        self.begin_epoch()

    def _explain(self, compared: Compared, step: int) -> None:
        """Raises the DriftError that says where the ranks differ. COLLECTIVE."""
        name = agreement.name_of(self._model, "drift_of")
        gathered, differing = compared.differing(name)
        since = "" if self._last_equal is None else f" (all were equal at step {self._last_equal})"
        if len({len(theirs) for theirs in gathered}) > 1:
            received = f"{[len(theirs) for theirs in gathered]} variables by rank"
        elif not differing:
            received = "assignments on some ranks only, to variables of which each rank has a part"
        else:
            i, ranks = differing[0]
            values_by_rank = [gathered[rank][i] for rank in ranks]
            value = max(values_by_rank, key=values_by_rank.count)  # the majority's value; in a tie the first
            right = ranks[values_by_rank.index(value)]
            others = [rank for rank in ranks if gathered[rank][i] != value]
            first = compared.variables[i]
            looks = communicator.all_gather_object(self._look(first, right, name), name=f"{name}_looks")
            where = f"rank {', '.join(map(str, others))} differs from rank {right}"
            received = f"{self._owner(first)}{plain_name(first.path)} on {where}"
            received += "".join(f"; on rank {rank}: {looks[rank]}" for rank in others if looks[rank])
            more = sorted({each for each, _ in differing} - {i})
            if more:
                last = plain_name(compared.variables[more[-1]].path)
                received += f"; {len(more)} more of {len(compared.sums)} variables differ, the last is {last}"
        raise DriftError(
            f"Ranks that train together must hold the same weights, bit by bit. Received: after step {step}{since}, "
            f"{received} (rank {self._job.rank}). Change weights and learning rates in callbacks and steps the same "
            "way on every rank; if no code changes them, suspect faulty memory or a faulty processor, and resume from "
            "a checkpoint. KERAS_DDL_DRIFT_CHECK_PERCENT=0 turns the check off."
        )

    def _look(self, variable: Any, right: int, name: str) -> str:
        """Returns how many elements of a variable differ from rank `right`'s, and the first one. COLLECTIVE."""
        mine = np.asarray(values(variable), order="C")
        theirs = communicator.broadcast_object(mine, root=right, name=f"{name}_value")
        if mine.shape != theirs.shape:
            return f"shape {mine.shape}, not {theirs.shape}"
        bits = [a.reshape(-1, 1).view(np.uint8) for a in (mine, theirs)]
        where = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
        if not len(where):
            return ""
        at = np.unravel_index(where[0], mine.shape)
        index = f"[{', '.join(map(str, at))}] " if at else ""
        return f"{len(where)} of {mine.size} elements, the first {index}{mine[at]!s} instead of {theirs[at]!s}"

    def _owner(self, variable: Any) -> str:
        layer = models.layer_with(self._model, variable)
        return "" if layer is None or layer is self._model else f"layer {layer.name!r}, "


def _weights(model: Any) -> list[Any]:
    """Returns the weights, even of frozen layers, and the scalars of the optimizers, such as the learning rate."""
    weights = models.weights_made_trainable(model)
    variables = {key: v for key, v in weights.items() if is_compared(v)}
    variables.update({id(v): v for v in _state_of_optimizers(model) if math.prod(v.shape) == 1})
    return list(variables.values())


def _state_of_optimizers(model: Any) -> list[Any]:
    optimizers = [each for each in models.optimizers_of(model) if each.built]
    left_out = {id(v) for v in models.accumulators_of(model)}
    variables = {id(v): v for each in optimizers for v in each.variables if id(v) not in left_out and is_compared(v)}
    return list(variables.values())
