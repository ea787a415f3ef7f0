"""Patches Keras's saving so that `model.save`, `save_weights` and `export` write once and completely, on any ranks.

Patched: keras/src/saving/saving_lib.py, legacy/saving/legacy_h5_format.py, models/model.py, utils/io_utils.py (3.15.1).
The first two implement `model.save`, `keras.saving.save_model` and their aliases.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from typing import Any

from keras_ddl import communicator
from keras_ddl.compat import callbacks as keras_callbacks
from keras_ddl.compat import models
from keras_ddl.compat.context import Setting
from keras_ddl.compat.keras import keras
from keras_ddl.files.durable import write_whole
from keras_ddl.strategy import accumulation, agreement, one_per_job
from keras_ddl.strategy.agreement import follow_rank_0
from keras_ddl.strategy.base import BaseStrategy, strategy_of_ranks
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.saving.save_records import Call
from keras_ddl.strategy.shards import gathered_slots
from keras_ddl.strategy.variables.origin import of_one_rank

is_saving = Setting("saving", False)  # whether an enclosing call is already writing


def once(original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function that writes `filepath` so that one rank of each host writes the file, completely or not at
    all."""
    strategy = strategy_of_ranks(model)
    if strategy is None or not isinstance(filepath, (str, os.PathLike)) or is_saving.get():
        return original(model, filepath, *args, **kwargs)
    path, call = os.fspath(filepath), _call_of(original.__name__, model, strategy.job)
    return write_once(strategy, path, call, lambda staged: _write(original, path, model, staged, *args, **kwargs))[1]


def write_once(
    strategy: BaseStrategy,
    path: str,
    call: Call,
    write: Callable[[str], Any],
    *,
    is_whole: bool = True,
    appears_as: str | None = None,
) -> tuple[bool, Any]:
    """Lets one rank of each host carry out `call`, which writes `path`. Returns whether this rank did, and the result.

    Args:
        write: writes to the path that it is given.
        is_whole: the result appears by one rename from a hidden path.
        appears_as: the file whose existence shows that the call is done; None: `path`.
    """
    with of_one_rank(True), is_saving(True), strategy.saves.claim(path, call, appears_as) as mine:
        if not mine:
            return False, None
        if not is_whole or "://" in path:  # remote file systems show only complete files, or cannot rename
            return True, write(path)
        return True, write_whole(path, write)


def _write(original: Callable[..., Any], path: str, model: Any, staged: str, *args: Any, **kwargs: Any) -> Any:
    """Calls `original` with the hidden path, but shows the real path in its output."""
    if staged == path:
        return original(model, path, *args, **kwargs)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            return original(model, staged, *args, **kwargs)
    finally:
        print(printed.getvalue().replace(staged, path), end="")


def ask_to_proceed_with_overwrite(original: Callable[..., Any], filepath: Any) -> Any:
    """Does not ask, with overwrite=False, about a file that another rank has written in the same call."""
    if any(strategy.saves.is_written(str(filepath)) for strategy in one_per_job.alive() if strategy.size > 1):
        return True
    return original(filepath)


def _call_of(name: str, model: Any, job: Job) -> Call:
    """Returns a Call, equal on ranks that make the same call with the same weights and optimizer state."""
    held = follow_rank_0.Held(model, job, with_optimizers=True)
    last = follow_rank_0.agreed(model)
    steps = models.steps_taken(each for each in models.optimizers_of(model) if each.built) or 0
    return Call(f"{name}-{steps}", follow_rank_0.digest_of(held.compared), held.digest, last.digest, last.times)


class MidEpochSaves:
    """Gives rank 0 complete variables before ModelCheckpoint or BackupAndRestore saves there.

    This concerns slots in shards and, if save_freq is a number, gradients accumulated within an epoch.
    """

    def __init__(self, callbacks: Any, job: Job) -> None:
        self._callbacks, self._job = callbacks, job
        model = callbacks.model
        saves, within = communicator.broadcast_object(
            [bool(some) for some in (self._savers(), self._savers(within=True))],
            name=agreement.name_of(model, "saves_within_epochs"),
        )
        has_slots = job.shards_from_elements is not None or job.mesh is not None
        self._has_slots = saves and has_slots
        self._is_on = within and (models.accumulates(model) or has_slots)

    def before_batch_end(self, batch: int) -> bool:
        """Returns whether rank 0 is about to save. COLLECTIVE if rank 0 has such a callback and variables are spread
        over ranks."""
        if not self._is_on:
            return False
        model, savers = self._callbacks.model, self._savers(within=True)

        def any_of_rank_0() -> bool:
            due = self._job.rank == 0 and any(keras_callbacks.saves_after(each, batch) for each in savers)
            return agreement.any_rank(due, agreement.name_of(model, "save_is_due"))

        due = communicator.as_one(any_of_rank_0)
        if due and models.accumulates(model):
            accumulation.combine(model)
        return due

    def gathered_slots(self) -> Any:
        """Returns a context in which rank 0 can save variables in shards. COLLECTIVE if rank 0 has such a callback."""
        slots = gathered_slots.slots_of(self._callbacks.model) if self._has_slots else []
        return gathered_slots.gathered(slots, on_rank=0)

    def _savers(self, within: bool = False) -> list[Any]:
        kinds = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
        savers = [each for each in self._callbacks.callbacks if isinstance(each, kinds)]
        return [each for each in savers if not within or each.save_freq != "epoch"]
