"""Gives all ranks rank 0's variables when a call begins, because one rank may have changed them outside of a step.

A script is written for one process, and rank 0 is that process: scripts for Horovod do `if keras_ddl.rank() == 0:
model.load_weights(...)`. So when fit, evaluate or predict begins and when fit has ended, the ranks exchange a digest of
their weights. If the digests differ, all ranks get rank 0's weights, and rank 0 warns once. Between the steps of a fit,
differences raise a DriftError instead (drift.py). The same happens if ranks have only parts of the variables, because
rank 0 cannot send values that it does not have.

All variables of the model are compared, trained or not, except metrics, which each call resets.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator.comparison import require_equal_values
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat import models
from keras_ddl.errors import DriftError
from keras_ddl.state.replicate import replicate
from keras_ddl.strategy import agreement
from keras_ddl.strategy.agreement.compared import Compared, Digests, differ, digest_of_numbers, name_of, tf_variable
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards import sharded_slots


class Held:
    """A model's variables on this rank when a call begins or ends.

    Args:
        further: additional variables that the call uses.
        with_optimizers: also compare the optimizers' variables.
    Cost: all variables are read once, at the speed of memory; each rank sends about 30 bytes.
    """

    def __init__(self, model: Any, job: Job, further: Iterable[Any] = (), *, with_optimizers: bool = False) -> None:
        self._model, self._job = model, job
        self.compared = Compared(weights(model, job), job)
        self.digest = digest_of(self.compared)
        self._has_parts = self.compared.has_parts
        if with_optimizers:
            left_out = {id(each) for each in models.accumulators_of(model)}
            state = [each for one in models.optimizers_of(model) if one.built for each in one.variables]
            self.compared.add([each for each in state if id(each) not in left_out])
        self.compared.add(further)

    def digests(self) -> Digests:
        return self.compared.digests()

    def follow(self, gathered: Sequence[Digests], call: str) -> None:
        """Gives all ranks rank 0's values if the ranks differ. COLLECTIVE in that case.

        Args:
            gathered: `digests()` by rank.
            call: the call that begins or has ended, for the warning.
        Raises: RankMismatchError: the ranks' models have different variables. DriftError: ranks have only parts of
            variables that differ.
        """
        if differ(gathered, self._job):
            checksums, differing = self.compared.differing(agreement.name_of(self._model, "weights_of_ranks"))
            if any(checksums) and not all(checksums):  # some rank has not built the model, which its first step will do
                return
            variables = [[name for name, _ in each] for each in checksums]
            require_equal_values(
                [f"{len(each)} variables, {each}" for each in variables],
                f"All ranks must have the same model when {call}.",
                "Build it the same way on every rank.",
            )
            received = _received(self.compared, checksums, differing)
            if self._has_parts or not differing:
                raise DriftError(
                    "Outside of steps, variables that are spread over the ranks must be changed in the same way on "
                    f"every rank. Received, when {call}: {received} (rank {self._job.rank}). Run the code that sets "
                    "weights on all ranks, not under `if rank == 0:`."
                )
            replicate([tf_variable(self.compared.variables[n]) for n in sorted({number for number, _ in differing})])
            if self._job.rank == 0:
                say(call, received)
            self.digest = digest_of(Compared(weights(self._model, self._job), self._job))
        remember(self._model, self.digest)


def follow_before_training(model: Any, job: Job, before: Held) -> None:
    """Gives all ranks rank 0's variables when fit begins, even those restored by callbacks. COLLECTIVE.

    before: this rank's variables before the callbacks began; if ranks already differed then, rank 0 warns.
    """
    variables = agreement.all_variables(model)
    now = Compared(sharded_slots.whole(variables), job)
    gathered = communicator.all_gather_object((before.digests(), now.digests()), agreement.name_of(model, "fit_begins"))
    are_equal = not differ([digests for _, digests in gathered], job)
    if not are_equal and differ([digests for digests, _ in gathered], job):
        received = _received(now, *now.differing(agreement.name_of(model, "weights_of_ranks")))
        if job.rank == 0:
            say("fit begins", received)
    agreement.broadcast_variables(variables, are_equal=are_equal)
    remember(model, digest_of(Compared(weights(model, job), job)))


def say(call: str, received: str) -> None:
    """Warns that ranks had different values and now have rank 0's. received: describes the difference."""
    stack_position.warn(
        f"All ranks must hold the same weights, also outside of steps. Received, when {call}: {received}. All ranks "
        "now use the weights of rank 0. To avoid this warning, run the code that sets weights on all ranks."
    )


def _received(compared: Compared, checksums: list[list[Any]], differing: Sequence[tuple[int, Any]]) -> str:
    if len({len(each) for each in checksums}) > 1:
        return f"{[len(each) for each in checksums]} variables by rank"
    if not differing:
        return "assignments to them on some ranks only"
    numbers = sorted({number for number, _ in differing})
    others = [r for r, theirs in enumerate(checksums) if any(theirs[n] != checksums[0][n] for n in numbers)]
    first = name_of(compared.variables[numbers[0]])
    more = f" and {len(numbers) - 1} more of {len(compared.sums)} variables" if len(numbers) > 1 else ""
    ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    return f"values of {first}{more} on {ranks} that differ from rank 0's"


def weights(model: Any, job: Job) -> list[Any]:
    """Returns a model's variables that must be equal on all ranks: all except each rank's own statistics."""
    left_out: set[int] = set()
    if job.settings.batch_statistics == "rank":
        trained = models.weights_made_trainable(model)
        left_out = {id(each) for each in models.layer_state(model) if id(each) not in trained}
    return [each for each in model.variables if id(each) not in left_out]


def digest_of(compared: Compared) -> int:
    """Returns a number that is equal on ranks that hold the same values."""
    return digest_of_numbers([*compared.sums, *compared.digests()])


@dataclass(frozen=True)
class Agreed:
    """A model's values when all ranks last compared it. times: how often they have compared values."""

    times: int
    digest: int


_agreed: weakref.WeakKeyDictionary[Any, Agreed] = weakref.WeakKeyDictionary()


def remember(model: Any, digest: int) -> None:
    """Records that all ranks hold the same values."""
    _agreed[model] = Agreed(agreed(model).times + 1 if model in _agreed else 1, digest)


def agreed(model: Any) -> Agreed:
    """Returns the values that the ranks last agreed on, or Agreed(0, -1)."""
    return _agreed.get(model, Agreed(0, -1))
