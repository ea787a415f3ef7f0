"""Writes checkpoints on several ranks: each writes its boxes of variables spread over ranks, rank 0 also the rest.

Each rank writes its own bundles into one hidden directory, in a thread. When all bundles are on disk, rank 0's thread
merges their indexes and gives the checkpoint its name. So a rank that is killed at any moment leaves either a hidden
directory or a complete checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from keras_ddl import communicator, model_state
from keras_ddl.checkpoint.background import BackgroundWriter
from keras_ddl.checkpoint.snapshot import Buffers, Snapshot, by_bundle, merge_bundles, sync_bundles
from keras_ddl.checkpoint.tensor_bundle import Part
from keras_ddl.communicator.first_rank import is_first_rank
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat import keras as keras_compat
from keras_ddl.errors import CheckpointError, KerasDdlError, of_other_rank
from keras_ddl.files import durable
from keras_ddl.state import files
from keras_ddl.strategy.job import Job

Fill: TypeAlias = Callable[[Path], Mapping[str, Any]]  # writes files; returns entries of state.json

_TURN_SECONDS = 5.0


class _Report(NamedTuple):
    """A rank's progress in writing the checkpoint of a step. `epoch`: how often the job has regrouped.

    Attributes:
        bundles: names of the bundles that the rank has written.
        problem: why it could not write, or None.
    """

    step: int
    epoch: int
    size: int
    rank: int
    is_busy: bool = False
    bundles: tuple[str, ...] = ()
    problem: str | None = None


class Place(NamedTuple):
    """The name of the directory for a checkpoint, and rank 0's keys of the variables that are spread over ranks."""

    folder: str
    keys: list[str]


class InParts:
    """Writes checkpoints in parts.

    Attributes:
        is_on: whether ranks other than rank 0 write; equal on all ranks.
        awaited: the step of the checkpoint whose parts are being written, or None; equal on all ranks.
    """

    of_this_process = ("_folder", "_bundles", "_mine")  # attributes that a newcomer does not get from other ranks

    def __init__(self, dir: Path, writer: BackgroundWriter, buffers: Buffers) -> None:
        self._dir, self._writer, self._buffers = dir, writer, buffers
        self.awaited: int | None = None
        self._mine: _Report | None = None
        self._bundles: list[str] = []
        self._folder: str | None = None
        self._merge: Callable[[Path, Fill], object] | None = None
        self._snapshot: Snapshot | None = None
        self._reached: tuple[bool, ...] = (True,)  # whether each rank can reach the directory
        self._epoch = 0  # the communicator's epoch when the ranks were asked
        self._job = 0, 1, 0  # epoch, size and rank when this rank took its parts

    @property
    def is_on(self) -> bool:
        return any(self._reached[1:])

    def at_train_begin(self, model: Any) -> None:
        """Finds out which ranks can write their own parts. COLLECTIVE if they have parts."""
        self._epoch, self._reached = communicator.epoch(), (True,)
        if _has_parts(model):
            self._reached = files.reaching(self._dir)
            if is_first_rank():
                _warn_of_unreached(self._reached, self._dir)

    def take(self, model: Any) -> dict[str, Part | None]:
        """Returns this rank's parts of variables that are spread over ranks, by its own keys.

        COLLECTIVE if ranks have parts.
        """
        if not _has_parts(model):
            self._reached = (True,)
            return {}

        def take() -> list[Part | None]:
            if self._epoch != communicator.epoch():  # ranks were lost, or have joined
                self.at_train_begin(model)
            self._job = communicator.epoch(), communicator.size(), communicator.rank()
            return model_state.take_parts(model, self._reached)

        parts = communicator.as_one_each(take, "Checkpoint/parts_taken")
        return dict(zip(model_state.spread_variables(model), parts, strict=True))

    def make_place(self, model: Any) -> Place:
        """Makes the directory for the parts of a checkpoint, on rank 0. Raises: CheckpointError."""
        try:
            return Place(durable.make_staging(self._dir).name, list(model_state.spread_variables(model)))
        except OSError as error:
            raise CheckpointError(durable.explain(error, "A checkpoint", self._dir)) from error

    def start_beside(self, step: int, place: Place, parts: Mapping[str, Part | None]) -> None:
        """Writes this rank's parts in a thread, under the keys of rank 0. Called on ranks other than rank 0."""
        self.start(step, place.folder, Snapshot({}, by_bundle(dict(zip(place.keys, parts.values(), strict=True)))))

    def start(
        self,
        step: int,
        folder: str,
        snapshot: Snapshot,
        merge: Callable[[Path, Fill], object] | None = None,
    ) -> None:
        """Writes this rank's parts in a thread.

        Args:
            merge: on rank 0, publishes the directory after all ranks have written; gets the function that fills it.
        """
        self._folder, self._merge = folder, merge
        self._snapshot, self._bundles = snapshot, []
        self._mine = _Report(step, *self._job)
        rank, path = self._mine.rank, self._dir / folder

        def write() -> None:
            names = snapshot.write_bundles(path, rank)
            sync_bundles(path, names, rank)
            self._bundles = names

        self._writer.start(lambda: snapshot.copy_into(self._buffers), write)

    def agree(self, *, wait: bool) -> bool | None:
        """Returns whether all parts are written and rank 0 is merging them. COLLECTIVE.

        False: parts were lost with a rank. None: parts are still being written.

        Raises: CheckpointError, on every rank: a rank could not write.
        """
        while True:  # one collective per turn, because a write may take longer than a collective's deadline
            reports = communicator.all_gather_object(self._report(wait), name="Checkpoint/parts")
            here = [each for each in reports if each is not None]
            outcome = _outcome(here)
            if outcome is not None:
                break
            if not wait:
                return None
        self.awaited = None
        failed = next((each for each in here if each.problem is not None), None)
        if failed is None and outcome:
            self._begin_to_merge({each.rank: each.bundles for each in here})
            return True
        while any(communicator.all_gather_object(self._is_busy(), name="Checkpoint/abandoned")):
            pass  # wait until nobody writes into the folder any more
        if self._folder is not None and is_first_rank():
            shutil.rmtree(self._dir / self._folder, ignore_errors=True)
        if failed is not None:
            error = CheckpointError(f"rank {failed.rank}: {failed.problem}")
            raise error if failed.rank == communicator.rank() else of_other_rank(error, failed.rank)
        return False

    def _report(self, wait: bool) -> _Report | None:
        if self._mine is None or self._mine.step != self.awaited:
            return None
        try:
            is_busy = self._writer.is_busy(_TURN_SECONDS if wait else 0.0)
        except KerasDdlError as error:
            self._mine = self._mine._replace(problem=str(error))
            is_busy = False
        return self._mine._replace(is_busy=is_busy, bundles=() if is_busy else tuple(self._bundles))

    def _is_busy(self) -> bool:
        try:
            return self._writer.is_busy(_TURN_SECONDS)
        except KerasDdlError:  # the error is already known, or its checkpoint no longer matters
            return False

    def _begin_to_merge(self, bundles: Mapping[int, Sequence[str]]) -> None:
        if self._merge is None or self._folder is None or not is_first_rank():
            return
        merge, snapshot, folder = self._merge, self._snapshot, self._dir / self._folder
        assert snapshot is not None

        def fill(staged: Path) -> Mapping[str, Any]:
            merge_bundles(staged, bundles)
            return snapshot.write_files(staged)

        self._merge = self._snapshot = None
        self._writer.start(lambda: None, lambda: merge(folder, fill))


def _outcome(reports: Sequence[_Report]) -> bool | None:
    """Returns whether all ranks that took the checkpoint have reported; None: a rank is still writing."""
    jobs = {(each.epoch, each.size) for each in reports}
    if len(jobs) != 1 or {each.rank for each in reports} != set(range(reports[0].size)):
        return False
    if any(each.problem is not None for each in reports):
        return True
    return None if any(each.is_busy for each in reports) else True


def _has_parts(model: Any) -> bool:
    """Whether variables of a model may be spread over ranks."""
    strategy = keras_compat.strategy_of(model)
    job: Job | None = strategy.job if strategy is not None else None
    return job is not None and job.size > 1 and (job.mesh is not None or job.shards_from_elements is not None)


def _warn_of_unreached(reached: Sequence[bool], dir: Path) -> None:
    apart = [str(rank) for rank, is_near in enumerate(reached) if not is_near]
    if apart:
        stack_position.warn(
            "Each rank must reach the checkpoint directory to write and read its part of the variables that are spread "
            f"over ranks. Received: {dir}, where rank(s) {', '.join(apart)} do not see the files of rank 0. Rank 0 "
            "writes and reads for them, which takes more memory. Give a directory on a file system that all ranks "
            "share."
        )
