"""The saves of Keras's ModelCheckpoint and BackupAndRestore: rank 0 writes, and all ranks decide the same."""

from __future__ import annotations

import functools
from typing import Any

from keras_ddl.communicator.first_rank import on_first_rank
from keras_ddl.compat import callbacks as keras_callbacks
from keras_ddl.compat import replacing
from keras_ddl.compat.keras import keras
from keras_ddl.files.durable import sweep_temporaries


class Saves:
    """The saves of a ModelCheckpoint or a BackupAndRestore: all ranks take part in each save, and rank 0 makes it."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    @classmethod
    def of(cls, callback: Any) -> Saves | None:
        """Returns the Saves of a callback, or None."""
        is_saver = isinstance(callback, keras.callbacks.ModelCheckpoint)
        is_saver = is_saver or replacing.class_of(callback) is keras.callbacks.BackupAndRestore
        return cls(callback) if is_saver else None

    def share(self) -> None:
        """Makes the callback save by `save`, on all ranks."""
        keras_callbacks.replace_save(self._callback, self.save)

    def leave_to_rank_0(self) -> None:
        """Makes the callback save nothing on this other rank, in a job in which rank 0 cannot be lost."""
        if isinstance(self._callback, keras.callbacks.ModelCheckpoint):
            keras_callbacks.replace_save(self._callback, functools.partial(decide_only, self._callback))

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Replaces the callback's own save. COLLECTIVE."""
        made = []

        def save() -> None:
            made.append(True)
            keras_callbacks.original_save(self._callback, *args, **kwargs)

        on_first_rank(save, "keras_ddl/save")
        if not made and isinstance(self._callback, keras.callbacks.ModelCheckpoint):
            decide_only(self._callback, *args, **kwargs)

    def become_first(self) -> None:
        """Called when this rank becomes rank 0: removes what the lost rank 0 has not completed."""
        path = keras_callbacks.path_of_saves(self._callback)
        sweep_temporaries(path.parent)
        sweep_temporaries(path)


def decide_only(checkpoint: keras.callbacks.ModelCheckpoint, epoch: int, batch: int | None, logs: Any) -> None:
    """Replaces saving on ranks other than 0: the best value is tracked on all ranks, but only rank 0 writes the
    file."""
    verbose, checkpoint.verbose = checkpoint.verbose, 0
    try:
        keras_callbacks.note_best(checkpoint, epoch, batch, logs)
    finally:
        checkpoint.verbose = verbose
