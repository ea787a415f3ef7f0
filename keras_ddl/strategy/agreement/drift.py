"""The drift check: now and then, while Keras trains, all ranks compare checksums of their weights.

Ranks that train together have the same bits. What breaks that (a callback that changes weights on one rank, a step that
draws numbers of its own, memory that fails) would go unnoticed for ever: gradients are summed all the same.

Between the ends of epochs the weights, the learning rate and the other single numbers of the optimizers are compared,
as often as the fraction of the training time that is allowed pays for; at the end of each epoch also all state of the
optimizers. Left out is what differs between ranks by design: statistics of layers, seeds, accumulated gradients,
and what is in shards.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_ddl import communicator
from keras_ddl.compat import models
from keras_ddl.errors import DriftError
from keras_ddl.strategy import agreement
from keras_ddl.strategy.checksum import checksum
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards import sharded_slots

_FIRST_INTERVAL = 8  # steps, before it is known what they and the check take
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
        """Steps and seconds count from here."""
        self._begin, self._steps = time.perf_counter(), 0

    def after_batch(self) -> None:
        """COLLECTIVE after as many batches as the ranks have agreed on.

        Raises: DriftError: the ranks differ; on every rank.
        """
        if not self._time_fraction:
            return
        if not self._started:  # the first batch is traced, and is no measure
            self._started = True
            self.begin_epoch()
            return
        self._steps += 1
        if self._steps >= self._interval:
            self._check(everything=False)

    def after_epoch(self) -> None:
        """COLLECTIVE. Raises: DriftError: the ranks differ; on every rank."""
        if self._time_fraction:
            self._check(everything=True)

    def compare(self) -> None:
        """Compares once, apart from when that is due. COLLECTIVE. Raises: as `after_epoch`."""
        if self._time_fraction:
            variables = _weights(self._model)
            variables += [v for v in _state_of_optimizers(self._model) if math.prod(v.shape) > 1]
            sums = [checksum(v.numpy()) for v in variables]
            name = agreement.name_of(self._model, "drift_now")
            if len(set(communicator.all_gather_object(_digest(sums), name=name))) > 1:
                self._explain(variables, sums, models.steps_taken(models.optimizers_of(self._model)) or 0)

    def _check(self, everything: bool) -> None:
        begin = time.perf_counter()
        variables = _weights(self._model)
        sums = [checksum(v.numpy()) for v in variables]
        cost = time.perf_counter() - begin
        if everything:
            slots = [v for v in _state_of_optimizers(self._model) if math.prod(v.shape) > 1]
            variables, sums = variables + slots, sums + [checksum(v.numpy()) for v in slots]
        step = models.steps_taken(models.optimizers_of(self._model)) or 0
        digest = _digest(sums)
        per_step = (begin - self._begin) / self._steps if self._steps else math.inf
        gather_begin = time.perf_counter()
        gathered = communicator.all_gather_object(
            (digest, cost, self._gather_seconds, per_step), name=agreement.name_of(self._model, "drift")
        )
        self._gather_seconds = time.perf_counter() - gather_begin
        digests, costs, gathers, steps = zip(*gathered)
        if len(set(digests)) > 1:
            self._explain(variables, sums, step)
        self._last_equal = step
        # From what all ranks know, so that they agree; of the gathers the shortest waited for nobody.
        if 0 < min(steps) < math.inf:
            seconds = max(costs) + min(gathers)
            self._interval = min(max(1, math.ceil(seconds / (self._time_fraction * min(steps)))), _AT_MOST)
        self.begin_epoch()

    def _explain(self, variables: Sequence[Any], sums: Sequence[int], step: int) -> None:
        """Raises the DriftError that says where the ranks differ. COLLECTIVE."""
        name = agreement.name_of(self._model, "drift_of")
        paths = [models.plain_name(v.path) for v in variables]
        gathered = communicator.all_gather_object(list(zip(paths, sums)), name=name)
        differing = [i for i in range(len(gathered[0])) if len({tuple(theirs[i : i + 1]) for theirs in gathered}) > 1]
        since = "" if self._last_equal is None else f" (at step {self._last_equal} all were equal)"
        if len({len(theirs) for theirs in gathered}) > 1:
            received = f"{[len(theirs) for theirs in gathered]} variables by rank"
        else:
            by_rank = [theirs[differing[0]] for theirs in gathered]
            right = by_rank.index(max(by_rank, key=by_rank.count))  # what most ranks hold; rank 0's of two
            others = [rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[right]]
            first = variables[differing[0]]
            looks = communicator.all_gather_object(self._look(first, right, name), name=f"{name}_looks")
            where = f"rank {', '.join(map(str, others))} differs from rank {right}"
            received = f"{self._owner(first)}{paths[differing[0]]} on {where}"
            received += "".join(f"; on rank {rank}: {looks[rank]}" for rank in others if looks[rank])
            if len(differing) > 1:
                received += (
                    f"; {len(differing) - 1} more of {len(sums)} variables differ, the last is {paths[differing[-1]]}"
                )
        raise DriftError(
            f"Ranks that train together must hold the same weights, bit by bit. Received: after step {step}{since}, "
            f"{received} (rank {self._job.rank}). Change weights and learning rates in callbacks and steps the same "
            "way on every rank; where nothing does that, suspect memory or a processor, and resume from a checkpoint. "
            "Strategy(drift_check_percent=0) turns the check off."
        )

    def _look(self, variable: Any, right: int, name: str) -> str:
        """Says how many elements of this rank's variable are not rank `right`'s, and shows the first. COLLECTIVE."""
        mine = np.asarray(variable.numpy(), order="C")
        theirs = communicator.broadcast_object(mine, root=right, name=f"{name}_value")
        if mine.shape != theirs.shape:
            return f"shape {mine.shape}, not {theirs.shape}"
        bits = [a.reshape(-1, 1).view(np.uint8) for a in (mine, theirs)]
        where = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
        if not len(where):
            return ""
        at = np.unravel_index(where[0], mine.shape)
        index = f"[{', '.join(map(str, at))}] " if at else ""
        return f"{len(where)} of {mine.size} elements, the first {index}{mine[at]!s} for {theirs[at]!s}"

    def _owner(self, variable: Any) -> str:
        layer = models.layer_with(self._model, variable)
        return "" if layer is None or layer is self._model else f"layer {layer.name!r}, "


def _digest(sums: Sequence[int]) -> int:
    return zlib.crc32(np.array(sums, np.uint32).tobytes()) ^ len(sums)


def _weights(model: Any) -> list[Any]:
    """The weights, also of layers that are frozen, and the single numbers of the optimizers, as the learning rate."""
    weights = models.weights_made_trainable(model)
    variables = {key: v for key, v in weights.items() if sharded_slots.sharded_variable(v) is None}
    variables.update({id(v): v for v in _state_of_optimizers(model) if math.prod(v.shape) == 1})
    return list(variables.values())


def _state_of_optimizers(model: Any) -> list[Any]:
    optimizers = [each for each in models.optimizers_of(model) if each.built]
    left_out = {id(v) for v in models.accumulators_of(model)}
    left_out |= {id(v) for each in optimizers for v in each.variables if sharded_slots.sharded_variable(v) is not None}
    variables = {id(v): v for each in optimizers for v in each.variables if id(v) not in left_out}
    return list(variables.values())
