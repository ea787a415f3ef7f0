"""The drift check: now and then, while Keras trains, all ranks compare checksums of their weights.

Ranks that train together have the same bits. What breaks that (a callback that changes weights on one rank, a step that
draws numbers of its own, memory that fails) would go unnoticed for ever: gradients are summed all the same.

Between the ends of epochs the weights, the learning rate and the other single numbers of the optimizers are compared,
as often as the fraction of the training time that is allowed pays for; at the end of each epoch also all state of the
optimizers. Of what a layout cuts along the model axis, each slice is compared among the ranks that have it. Left out is
what differs between ranks by design: statistics of layers, seeds, accumulated gradients, and what is in shards.
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
from keras_ddl.compat.tensorflow import as_array, tf
from keras_ddl.errors import DriftError
from keras_ddl.strategy import agreement
from keras_ddl.strategy.checksum import checksum
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.mesh import laid_out
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
            sums = [checksum(_values(v)) for v in variables]
            name = agreement.name_of(self._model, "drift_now")
            if self._differ(communicator.all_gather_object(_digests(variables, sums), name=name)):
                self._explain(variables, sums, models.steps_taken(models.optimizers_of(self._model)) or 0)

    def checksums(self) -> dict[str, int]:
        """Returns name -> checksum, of the weights and of all state of the optimizers."""
        variables = {id(each): each for each in [*_weights(self._model), *_state_of_optimizers(self._model)]}
        sums: dict[str, int] = {}
        for number, each in enumerate(variables.values()):
            name = models.plain_name(each.path)
            sums[name if name not in sums else f"{name} ({number})"] = checksum(_values(each))
        return sums

    def _check(self, everything: bool) -> None:
        begin = time.perf_counter()
        variables = _weights(self._model)
        sums = [checksum(_values(v)) for v in variables]
        cost = time.perf_counter() - begin
        if everything:
            slots = [v for v in _state_of_optimizers(self._model) if math.prod(v.shape) > 1]
            variables, sums = variables + slots, sums + [checksum(_values(v)) for v in slots]
        step = models.steps_taken(models.optimizers_of(self._model)) or 0
        per_step = (begin - self._begin) / self._steps if self._steps else math.inf
        gather_begin = time.perf_counter()
        mine = (_digests(variables, sums), cost, self._gather_seconds, per_step)
        gathered = communicator.all_gather_object(mine, name=agreement.name_of(self._model, "drift"))
        self._gather_seconds = time.perf_counter() - gather_begin
        digests, costs, gathers, steps = zip(*gathered)
        if self._differ(digests):
            self._explain(variables, sums, step)
        self._last_equal = step
        # From what all ranks know, so that they agree; of the gathers the shortest waited for nobody.
        if 0 < min(steps) < math.inf:
            seconds = max(costs) + min(gathers)
            self._interval = min(max(1, math.ceil(seconds / (self._time_fraction * min(steps)))), _AT_MOST)
        self.begin_epoch()

    def _differ(self, digests: Sequence[tuple[int, int]]) -> bool:
        """Whether ranks differ in what all have, or in a slice that several have. digests: by rank."""
        slices = [[of_slices for _, of_slices in digests][rank :: self._apart] for rank in range(self._apart)]
        return any(len(set(each)) > 1 for each in [[common for common, _ in digests], *slices])

    @property
    def _apart(self) -> int:
        """Ranks so far apart have the same slices."""
        return 1 if self._job.mesh is None else self._job.mesh.model.size

    def _ranks_with(self, variable: Any) -> list[range]:
        """Returns, for each slice of a variable, the ranks that have it; for other variables all ranks at once."""
        apart = self._apart if laid_out.slice_of(variable) is not None else 1
        return [range(first, self._job.size, apart) for first in range(apart)]

    def _explain(self, variables: Sequence[Any], sums: Sequence[int], step: int) -> None:
        """Raises the DriftError that says where the ranks differ. COLLECTIVE."""
        name = agreement.name_of(self._model, "drift_of")
        paths = [models.plain_name(v.path) for v in variables]
        gathered = communicator.all_gather_object(list(zip(paths, sums)), name=name)
        differing = [
            (i, ranks)
            for i, variable in enumerate(variables)
            for ranks in self._ranks_with(variable)
            if len({tuple(gathered[rank][i : i + 1]) for rank in ranks}) > 1
        ]
        since = "" if self._last_equal is None else f" (at step {self._last_equal} all were equal)"
        if len({len(theirs) for theirs in gathered}) > 1:
            received = f"{[len(theirs) for theirs in gathered]} variables by rank"
        else:
            i, ranks = differing[0]
            of_ranks = [gathered[rank][i] for rank in ranks]
            value = max(of_ranks, key=of_ranks.count)  # what most of these ranks hold; the first's of two
            right = ranks[of_ranks.index(value)]
            others = [rank for rank in ranks if gathered[rank][i] != value]
            first = variables[i]
            looks = communicator.all_gather_object(self._look(first, right, name), name=f"{name}_looks")
            where = f"rank {', '.join(map(str, others))} differs from rank {right}"
            received = f"{self._owner(first)}{paths[i]} on {where}"
            received += "".join(f"; on rank {rank}: {looks[rank]}" for rank in others if looks[rank])
            more = sorted({each for each, _ in differing} - {i})
            if more:
                received += f"; {len(more)} more of {len(sums)} variables differ, the last is {paths[more[-1]]}"
        raise DriftError(
            f"Ranks that train together must hold the same weights, bit by bit. Received: after step {step}{since}, "
            f"{received} (rank {self._job.rank}). Change weights and learning rates in callbacks and steps the same "
            "way on every rank; where nothing does that, suspect memory or a processor, and resume from a checkpoint. "
            "Strategy(drift_check_percent=0) turns the check off."
        )

    def _look(self, variable: Any, right: int, name: str) -> str:
        """Says how many elements of this rank's variable are not rank `right`'s, and shows the first. COLLECTIVE."""
        mine = np.asarray(_values(variable), order="C")
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


def _digests(variables: Sequence[Any], sums: Sequence[int]) -> tuple[int, int]:
    """Returns a digest of the checksums of what all ranks have, and one of those of this rank's slices."""
    is_slice = [laid_out.slice_of(each) is not None for each in variables]
    return _digest([s for s, cut in zip(sums, is_slice) if not cut]), _digest([s for s, c in zip(sums, is_slice) if c])


def _digest(sums: Sequence[int]) -> int:
    return zlib.crc32(np.array(sums, np.uint32).tobytes()) ^ len(sums)


def _values(variable: Any) -> np.ndarray:
    """Returns what this rank has of a variable that is compared."""
    own = laid_out.slice_of(variable)
    return as_array(tf.convert_to_tensor(variable if own is None else own))


def _is_compared(variable: Any) -> bool:
    return sharded_slots.sharded_variable(variable) is None or laid_out.slice_of(variable) is not None


def _weights(model: Any) -> list[Any]:
    """The weights, also of layers that are frozen, and the single numbers of the optimizers, as the learning rate."""
    weights = models.weights_made_trainable(model)
    variables = {key: v for key, v in weights.items() if _is_compared(v)}
    variables.update({id(v): v for v in _state_of_optimizers(model) if math.prod(v.shape) == 1})
    return list(variables.values())


def _state_of_optimizers(model: Any) -> list[Any]:
    optimizers = [each for each in models.optimizers_of(model) if each.built]
    left_out = {id(v) for v in models.accumulators_of(model)}
    variables = {id(v): v for each in optimizers for v in each.variables if id(v) not in left_out and _is_compared(v)}
    return list(variables.values())
