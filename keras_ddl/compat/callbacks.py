"""What fit and Keras's callbacks keep to themselves: the first epoch, when and how ModelCheckpoint saves, averages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from keras_ddl.compat.keras import keras


def initial_epoch(model: Any) -> int | None:
    """Returns the epoch with which a fit of `model` begins instead of its initial_epoch; None for that one."""
    epoch: int | None = model._initial_epoch
    return epoch


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Makes a fit of `model` begin with this epoch; None: with its own initial_epoch."""
    model._initial_epoch = epoch


def saves_after(callback: keras.callbacks.ModelCheckpoint, batch: int) -> bool:
    """Whether ModelCheckpoint or BackupAndRestore is about to save after this batch of the epoch."""
    # A copy is asked, for the question counts batches.
    return bool(copy.copy(callback)._should_save_on_batch(batch))


def note_best(checkpoint: keras.callbacks.ModelCheckpoint, epoch: int, batch: int | None, logs: Any) -> None:
    """Has ModelCheckpoint decide whether it would save, which keeps its best value, without saving."""
    checkpoint._should_save_model(epoch, batch, logs, checkpoint._get_file_path(epoch, batch, logs))


def replace_save(checkpoint: keras.callbacks.ModelCheckpoint, save: Callable[..., None] | None) -> None:
    """Has this ModelCheckpoint call `save(epoch, batch, logs)` instead of saving; None: it saves itself again."""
    _replace(checkpoint, "_save_model", save)


def replace_swap(callback: keras.callbacks.SwapEMAWeights, swap: Callable[..., None]) -> None:
    """Has this SwapEMAWeights call `swap(*functions)` to exchange weights and averages."""
    _replace(callback, "_apply_to_ema_optimizers", swap)


def original_swap(callback: keras.callbacks.SwapEMAWeights, *functions: Any) -> None:
    """Exchanges weights and averages as SwapEMAWeights does."""
    type(callback)._apply_to_ema_optimizers(callback, *functions)


def _replace(callback: Any, name: str, replacement: Callable[..., None] | None) -> None:
    vars(callback).pop(name, None)
    if replacement is not None:
        setattr(callback, name, replacement)
