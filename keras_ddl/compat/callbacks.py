"""Private interfaces of fit and of Keras's callbacks: ModelCheckpoint, TensorBoard, CSVLogger, SwapEMAWeights."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from keras_ddl.compat import replacing
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf


def initial_epoch(model: Any) -> int | None:
    """Returns the epoch at which a fit of `model` begins, or None if it begins at its argument initial_epoch."""
    epoch: int | None = model._initial_epoch
    return epoch


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Makes a fit of `model` begin at this epoch; None: at its argument initial_epoch."""
    model._initial_epoch = epoch


def saves_after(callback: keras.callbacks.ModelCheckpoint, batch: int) -> bool:
    """Whether ModelCheckpoint or BackupAndRestore is about to save after this batch of the epoch."""
    # Asks a copy, because the method counts batches.
    return bool(copy.copy(callback)._should_save_on_batch(batch))


def note_best(checkpoint: keras.callbacks.ModelCheckpoint, epoch: int, batch: int | None, logs: Any) -> None:
    """Lets ModelCheckpoint decide whether it would save and note its best value, without saving."""
    checkpoint._should_save_model(epoch, batch, logs, checkpoint._get_file_path(epoch, batch, logs))


def replace_save(callback: Any, save: Callable[..., None]) -> None:
    """Makes a ModelCheckpoint or BackupAndRestore call `save` like `original_save`, until `replacing.restore`."""
    replacing.replace_on(callback, {"_save_model": lambda _, *args, **kwargs: save(*args, **kwargs)})


def original_save(callback: Any, *args: Any, **kwargs: Any) -> None:
    """Calls the callback's own save: with (epoch, batch, logs) in ModelCheckpoint, without in BackupAndRestore."""
    replacing.class_of(callback)._save_model(callback, *args, **kwargs)  # type: ignore[attr-defined]


def path_of_saves(callback: Any) -> Path:
    """Returns where ModelCheckpoint or BackupAndRestore saves."""
    is_backup = isinstance(callback, keras.callbacks.BackupAndRestore)
    return Path(callback.backup_dir if is_backup else callback.filepath)


def follow_tensorboard(callback: keras.callbacks.TensorBoard, hook: str, by: int = 1) -> None:
    """Makes TensorBoard count what it counts in this hook, without writing."""
    if hook == "on_train_begin":
        callback._global_train_batch = 0
    elif hook == "on_train_batch_begin":
        callback._global_train_batch += by
    elif hook == "on_test_batch_begin":
        callback._global_test_batch += by


def _set_model_in_silence(callback: keras.callbacks.TensorBoard, model: Any) -> None:
    """Gives TensorBoard the model without writing a description of the model."""
    described = callback.write_graph, callback.embeddings_freq
    callback.write_graph, callback.embeddings_freq = False, 0
    try:
        keras.callbacks.TensorBoard.set_model(callback, model)
    finally:
        callback.write_graph, callback.embeddings_freq = described


_no_writer = property(lambda _: tf.summary.create_noop_writer())
# What is replaced in a TensorBoard that writes nothing, besides its hooks.
SILENT_TENSORBOARD = {"set_model": _set_model_in_silence, "_train_writer": _no_writer, "_val_writer": _no_writer}


@contextlib.contextmanager
def keeping_batches_seen(callback: keras.callbacks.TensorBoard) -> Iterator[None]:
    """Resets, at the end of the block, TensorBoard's count of batches."""
    seen = callback._global_train_batch, callback._global_test_batch
    yield
    callback._global_train_batch, callback._global_test_batch = seen


def finish_batch_hooks(callbacks: keras.callbacks.CallbackList) -> None:
    """Waits for the hooks that a list of callbacks runs in threads."""
    callbacks._flush_futures()


def flush_points(callback: keras.callbacks.TensorBoard) -> None:
    """Writes what TensorBoard has in memory, which would be lost with the process."""
    for writer in callback._writers.values():
        writer.flush()


def begin_rows(callback: keras.callbacks.CSVLogger, text: io.StringIO) -> int:
    """Makes CSVLogger write to `text` instead of its file. Returns the byte position where it would have written."""
    begin = 0
    if callback.append and tf.io.gfile.exists(callback.filename):
        begin = tf.io.gfile.stat(callback.filename).length
        callback.append_header = begin == 0
    callback.csv_file, callback.writer, callback.keys = text, None, None
    return begin


def begin_late_rows(callback: keras.callbacks.CSVLogger, text: io.StringIO) -> int:
    """Like `begin_rows`, but continues a file that another process has written so far."""
    begin = int(tf.io.gfile.stat(callback.filename).length) if tf.io.gfile.exists(callback.filename) else 0
    callback.append_header = begin == 0
    callback.csv_file, callback.writer, callback.keys = text, None, None
    return begin


def continue_rows(callback: keras.callbacks.CSVLogger) -> None:
    """Makes CSVLogger continue at the end of its file."""
    opened = tf.io.gfile.GFile if "://" in callback.filename else open
    callback.csv_file = opened(callback.filename, "a")
    rows = callback.writer
    if rows is not None:
        callback.writer = csv.DictWriter(callback.csv_file, rows.fieldnames, dialect=rows.writer.dialect)


def replace_swap(callback: keras.callbacks.SwapEMAWeights, swap: Callable[..., None]) -> None:
    """Makes this SwapEMAWeights call `swap(*functions)` to exchange weights and averages, until `replacing.restore`."""
    replacing.replace_on(callback, {"_apply_to_ema_optimizers": lambda _, *functions: swap(*functions)})


def original_swap(callback: keras.callbacks.SwapEMAWeights, *functions: Any) -> None:
    """Exchanges weights and averages as SwapEMAWeights does."""
    replacing.class_of(callback)._apply_to_ema_optimizers(callback, *functions)  # type: ignore[attr-defined]
