"""Going on from the latest checkpoint, on all ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from keras_ddl import checkpoint as ckpt
from keras_ddl.callbacks._first_rank import is_first_rank, on_first_rank
from keras_ddl.callbacks._learning_rate_controller import controller_of
from keras_ddl.callbacks._progress import Restoration, read_progress
from keras_ddl.callbacks._training_state import broadcast_training_state
from keras_ddl.checkpoint import model_state
from keras_ddl.compat.keras import layers_of, unwrapped
from keras_ddl.errors import CheckpointError
from keras_ddl.strategy import fits


@dataclasses.dataclass
class Resumed:
    """Where a run goes on.

    restoration: what comes back when the first epoch begins; None if the checkpoint holds no progress.
    """

    step: int
    epoch: int
    batches: int
    restoration: Restoration | None


def resume_from_latest(model: Any, dir: Path, epochs: int | None) -> Resumed:
    """Puts the latest checkpoint in `dir` into the model and its optimizers, and fit to its place. COLLECTIVE.

    Args:
        epochs: what fit was asked for: a run that a callback has ended stays ended, unless it is given more epochs.
    Raises: CheckpointError, on every rank: the model is not built, the checkpoint is damaged or of another model.
    """
    if not (model.built or all(layer.built for layer in layers_of(model)[1:])):
        raise CheckpointError(
            "resume needs a model that is built. Received: a model without variables. Call model.build(shape), or the "
            "model, or each part of one that has no call, on a batch, before fit."
        )

    def plan() -> Any:
        return model_state.optimizers_to_build(model, ckpt.latest(dir))

    model_state.build_optimizers(model, on_first_rank(plan, "Checkpoint/optimizers"))
    told = on_first_rank(lambda: _read_latest(model, dir), "Checkpoint/restore")
    broadcast_training_state(model)
    if told["rates"] and model.optimizer is not None:
        controller_of(unwrapped(model.optimizer)).restore(told["rates"])
    restoration = None
    if told["progress"] is not None:
        restoration = Restoration(model, *told["progress"])
        restoration.at_train_begin()
    ended = told["stopped_of"] is not None and told["stopped_of"] == epochs
    fits.begin_at(model, told["stopped_of"] if ended else told["epoch"])
    if is_first_rank():
        inside = f", batch {told['in_epoch'] + 1}" if told["in_epoch"] else ""
        print(f"Checkpoint: going on from step {told['step']}, epoch {told['epoch'] + 1}{inside}")
    return Resumed(told["step"], told["epoch"], told["batches"], restoration)


def _read_latest(model: Any, dir: Path) -> dict[str, Any]:
    """On rank 0: restores the model; returns what the other ranks need to know."""
    read = model_state.restore_checkpoint(model, dir, "latest")
    extra = read.extra or {}
    return {
        "step": read.step,
        "epoch": read.epoch or 0,
        "rates": extra.get("learning_rate"),
        "batches": extra.get("batches", 0),
        "in_epoch": extra.get("in_epoch", 0),
        "stopped_of": extra.get("stopped_of"),
        "progress": read_progress(read.path),
    }
