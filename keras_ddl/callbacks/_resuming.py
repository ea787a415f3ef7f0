"""Resumes a run from its latest checkpoint on all ranks: variables and the rest of its state (strategy/progress.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from keras_ddl import checkpoint as ckpt
from keras_ddl import communicator, model_state
from keras_ddl.communicator.first_rank import is_first_rank, on_first_rank
from keras_ddl.compat.models import is_built
from keras_ddl.cut.values.layouts import Box
from keras_ddl.errors import CheckpointError
from keras_ddl.state import files
from keras_ddl.strategy import agreement
from keras_ddl.strategy.agreement.training_state import broadcast_training_state
from keras_ddl.strategy.calls import fits
from keras_ddl.strategy.saving.progress import Restoration, build_for_data, read_progress
from keras_ddl.strategy.variables.origin import of_one_rank

T = TypeVar("T")


@dataclasses.dataclass
class Resumed:
    """The position at which a resumed run continues.

    Attributes:
        batches: number of batches done in all epochs.
        in_epoch: number of batches done in an unfinished epoch, else 0.
        stopped_of: the `epochs` of the fit that a callback ended early, else None.
        rates: state of the learning-rate controller.
        progress: as returned by `capture`. None: not in the checkpoint.
        restoration: restores the rest when the first epoch begins; None without progress.
    """

    step: int
    epoch: int
    batches: int
    in_epoch: int
    stopped_of: int | None
    rates: dict[str, float] | None
    progress: Any
    restoration: Restoration | None = None


def resume_from_latest(model: Any, dir: Path, epochs: int | None) -> Resumed:
    """Restores the latest checkpoint in `dir` into the model, its optimizers, and fit. COLLECTIVE.

    Args: epochs: the argument of fit; a run that a callback stopped stays stopped unless this has changed.
    Raises: CheckpointError, on every rank: the model is not built, the checkpoint is damaged or of another model.
    """
    with of_one_rank(False):
        build_for_data(model)
    if not is_built(model):
        raise CheckpointError(
            "resume needs a built model. Received: a model without variables. Before fit, call model.build(shape), "
            "or call the model on a batch. If the model has no call(), do this for each of its parts."
        )

    def plan() -> Any:
        return model_state.optimizers_to_build(model, ckpt.latest(dir))

    to_build = on_first_rank(plan, "Checkpoint/optimizers")
    with of_one_rank(False):
        model_state.build_optimizers(model, to_build)

    resumed = restore_on_all_ranks(model, dir, lambda: "latest", _resumed)
    assert resumed is not None
    if resumed.progress is not None:
        resumed.restoration = Restoration(model, *resumed.progress)
        resumed.restoration.at_train_begin()
    ended = resumed.stopped_of is not None and resumed.stopped_of == epochs
    fits.begin_at(model, epochs if ended and epochs is not None else resumed.epoch)
    if is_first_rank():
        where = f", epoch {resumed.epoch + 1}" + (f", batch {resumed.in_epoch + 1}" if resumed.in_epoch else "")
        if ended:
            where = f". A callback has ended this training, so fit(epochs={epochs}) trains nothing"
        elif epochs is not None and resumed.epoch >= epochs:
            where = f". All {epochs} epochs are done, so fit trains nothing"
        print(f"Checkpoint: resuming from step {resumed.step}{where}")
    return resumed


def _resumed(read: ckpt.Checkpoint) -> Resumed:
    extra = read.extra or {}
    return Resumed(
        read.step,
        read.epoch or 0,
        extra.get("batches", 0),
        extra.get("in_epoch", 0),
        extra.get("stopped_of"),
        extra.get("learning_rate"),
        read_progress(read.path),
    )


def restore_on_all_ranks(
    model: Any,
    dir: Path,
    which: Callable[[], str | int | None],
    returned: Callable[[ckpt.Checkpoint], T],
    *,
    seeds: str = "all",
) -> T | None:
    """Restores a checkpoint in `dir` on all ranks. Rank 0 reads and sends all that is not spread. COLLECTIVE.

    Args:
        which: called on rank 0; returns which checkpoint to restore, as `restore_checkpoint` takes it, or None.
        returned: called on rank 0; returns the result for all ranks.
        seeds: as for `restore_checkpoint`.
    Returns: the result of `returned`, or None if `which` returned None.
    Raises: CheckpointError, on every rank.
    """

    def read_on_rank_0() -> tuple[T, list[tuple[str, str] | None]] | None:
        chosen = which()
        if chosen is None:
            return None
        read, sources = model_state.restore_complete(model, dir, chosen, seeds=seeds)
        in_files = {target: (f"{read.path.name}/{name}", key) for target, (name, key) in sources.items()}
        return returned(read), [in_files.get(target) for target in model_state.spread_variables(model)]

    def restore() -> T | None:
        read = on_first_rank(read_on_rank_0, "Checkpoint/restore")
        if read is None:
            return None
        _restore_spread(model, dir, read[1])
        broadcast_training_state(model)
        return read[0]

    return communicator.as_one(restore, lambda: agreement.all_variables(model))


def _restore_spread(model: Any, dir: Path, sources: Sequence[tuple[str, str] | None]) -> None:
    """Gives every rank its parts of the variables that are spread over ranks. COLLECTIVE.

    sources: bundle and key of each variable, or None for a variable that is not restored.
    """
    spread = model_state.spread_variables(model).values()
    pairs = [(each, source) for each, source in zip(spread, sources, strict=True) if source is not None]

    def read(number: int, boxes: Sequence[Box]) -> np.ndarray:
        variable, (bundle, key) = pairs[number]
        return model_state.read_boxes(str(dir / bundle), key, variable, boxes)

    if pairs:
        files.read([each for each, _ in pairs], read, files.reaching(dir))
