"""Checkpoint: writes checkpoints and the servable graph; a resumed run continues on all ranks."""

from __future__ import annotations

import contextlib
import functools
import json
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from keras_ddl import checkpoint as ckpt
from keras_ddl import model_state
from keras_ddl.callbacks._base_graphs import base_graphs
from keras_ddl.callbacks._clock import Clock
from keras_ddl.callbacks._in_parts import Fill, InParts, Place
from keras_ddl.callbacks._learning_rate import controller_of
from keras_ddl.callbacks._notice import Notice
from keras_ddl.callbacks._resuming import resume_from_latest
from keras_ddl.checkpoint.background import BackgroundWriter, wait_for_writers
from keras_ddl.checkpoint.direction import resolve_direction
from keras_ddl.checkpoint.listing import path_of
from keras_ddl.checkpoint.snapshot import Buffers, Snapshot, by_bundle
from keras_ddl.checkpoint.tensor_bundle import Part
from keras_ddl.communicator.first_rank import is_first_rank, on_first_rank
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat.models import optimizers_of, steps_taken, unwrapped
from keras_ddl.errors import CheckpointError, ConfigError
from keras_ddl.files.durable import make_directory
from keras_ddl.link import last_checkpoint, program
from keras_ddl.link.kinds import Kind
from keras_ddl.state.callback_state import JobCallback
from keras_ddl.strategy import keras_patches
from keras_ddl.strategy.agreement.training_state import agreed_layer_state
from keras_ddl.strategy.calls import fits
from keras_ddl.strategy.saving.progress import ARRAYS, RECORD, Restoration, capture

_LOST = -1  # in place of a step: the checkpoint was incomplete when rank 0 was lost


class Checkpoint(JobCallback):
    """Writes checkpoints of the complete state of a run and, once, the base graph that `keras-ddl export` needs.

    Rank 0 writes in a thread while training continues; if variables are cut over ranks, each rank writes its parts. A
    checkpoint appears under its name only when it is complete and on disk, so a job that is killed at any moment leaves
    no partial checkpoint. A new run in a used directory moves the earlier run's checkpoints to `previous-<n>/`. With
    `resume` the run continues on all ranks from the latest checkpoint instead, and ends as if it had not stopped
    (docs/callbacks.md says what that requires).

    Args:
        dir: the checkpoint directory, on a file system that rank 0 can write to. If ranks that have parts of variables
            cannot write to it, rank 0 gathers these parts.
        monitor: the metric that chooses the best checkpoint, a key of the epoch's logs. Default: "val_loss"; if fit
            does not validate, no checkpoint is the best.
        mode: 'min', 'max', or 'auto': the direction of the compiled metric, or that of Keras's names (accuracy, auc,
            loss, `<any>_loss`, ...). A custom metric without a direction needs 'min' or 'max'.
        save_best: keep the best checkpoint in addition to the newest ones.
        keep: how many of the newest checkpoints to keep; the best one is kept in addition.
        save_freq: 'epoch', or a number of optimizer steps (of the optimizer with the most steps). Checkpoints within an
            epoch have no validation metrics and no outputs to compare an export with, and cannot be best.
        save_minutes: also save when this many minutes have passed since the last checkpoint, by rank 0's clock.
        resume: continue from the latest checkpoint, if there is one. The model must be built.
        on_signal: names of signals that announce the end of the job, as in ("SIGTERM", "SIGUSR1"). When any rank
            receives one, all ranks save after the same step, and end with status 75 (start again) when the checkpoint
            is on disk. Without a Strategy, and during validation, they do so at the end of the epoch.
        export_base: write the base graph at train begin, or for a subclassed model after its first batch, when its
            inputs are known. A model that cannot be served fails there. `ExportBase` changes what is written, and
            `Publish` exports during training.
        verbose: 1: print a line for each checkpoint.
        removed: arguments that Checkpoint had during its development, before any release; an error names the
            replacement.
    Raises: ConfigError: bad arguments (when created); mode='auto' and a metric without a direction (at train begin).
        On every rank: CheckpointError: the directory cannot be written, the checkpoint is damaged or of another model;
        a write has failed (at the next step). ExportError: the model cannot be served, or its training step does not
        call it (at train begin, or after the first batch).
    Cost: per checkpoint, a few ms, and a copy of weights and optimizer state in a thread of rank 0 while training
        continues; at the end of an epoch also two forward passes of the sample, if there is a base graph. Only one
        checkpoint is written at a time: the next one waits. Each rank that writes needs memory for a copy of its data.
    """

    runs_last = True  # to save the other callbacks' changes of a step or an epoch
    of_this_process = ("_begun",)

    def __init__(
        self,
        dir: str | Path,
        *,
        monitor: str | None = None,
        mode: str = "auto",
        save_best: bool = True,
        keep: int = 3,
        save_freq: str | int = "epoch",
        save_minutes: float | None = None,
        resume: bool = False,
        on_signal: str | Sequence[str] = (),
        export_base: bool = True,
        verbose: int = 0,
        **removed: Any,
    ) -> None:
        super().__init__()
        _refuse(removed)
        if mode not in ("auto", "min", "max"):
            raise ConfigError(f"mode must be 'auto', 'min' or 'max'. Received: mode={mode!r}.")
        if not _is_count(keep):
            raise ConfigError(f"keep must be the number of checkpoints to keep, 1 or more. Received: keep={keep!r}.")
        if save_freq != "epoch" and not _is_count(save_freq):
            raise ConfigError(
                f"save_freq must be 'epoch' or a number of steps, 1 or more. Received: save_freq={save_freq!r}."
            )
        if save_minutes is not None and not (isinstance(save_minutes, numbers.Real) and save_minutes > 0):
            raise ConfigError(
                f"save_minutes must be a number above 0, or None. Received: save_minutes={save_minutes!r}."
            )
        keras_patches.install()  # a resumed run may begin inside an epoch, even without a Strategy
        self.dir = Path(dir)
        self.monitor, self.mode = "val_loss" if monitor is None else monitor, mode
        self._warned = monitor is None  # by default, do not warn if there is no validation
        self.save_best, self.keep, self.save_freq, self.save_minutes = save_best, keep, save_freq, save_minutes
        self.resume, self.verbose = resume, verbose
        self._every = None if save_freq == "epoch" else int(save_freq)  # steps
        self.export_base = export_base
        self._bases = base_graphs(self.dir if export_base else None)
        self._notice = Notice(on_signal)
        # Lets Keras run on_train_batch_end in a thread, which saves it a wait per batch.
        self.async_safe = self._every is None and save_minutes is None and not self._notice
        self._saved: int | None = None  # the step of the last checkpoint of this object, or _LOST
        self._begun: int | None = None  # the step of the last checkpoint that this process wrote
        self._epoch = self._marks = self._batches = 0
        self._trained = self._is_due = False
        self._has_memory = False
        self._restoration: Restoration | None = None
        self._clock: Clock | None = None
        self._buffers = Buffers()
        self._writer = BackgroundWriter()
        self._in_parts = InParts(self.dir, self._writer, self._buffers)
        self._in_flight = False  # on all ranks: whether rank 0's writer may be busy or have failed

    # ---- train begin -------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._trained = self._is_due = False
        self._optimizers = optimizers_of(self.model)
        self._clock = Clock(60 * self.save_minutes) if self.save_minutes is not None else None
        if self.save_best:
            self._direction = resolve_direction(self.model, self.monitor, self.mode)
        self._bases.follow(self.others)
        is_resumed = on_first_rank(self._prepare, "Checkpoint/prepare") is not None
        self._in_parts.at_train_begin(self.model)
        if is_resumed:
            self._resume()
        self._bases.at_train_begin(self.model)
        self._notice.begin()

    def _prepare(self) -> int | None:
        """On rank 0: cleans the directory; returns the step to resume from, or None for a new run."""
        self._bases.prepare_publishing()
        if self._saved is not None:  # a second fit in this process continues in the directory
            return None
        wait_for_writers()  # an interrupted fit, as in a notebook, may still be writing its last checkpoint
        make_directory(self.dir, "A checkpoint", CheckpointError)  # fails now rather than after the first epoch
        ckpt.sweep_temporaries(self.dir)
        if self.resume and ckpt.list_checkpoints(self.dir):
            return ckpt.latest(self.dir).step
        moved = ckpt.set_aside(self.dir)
        if moved is not None:
            print(f"Checkpoint: the earlier run's checkpoints are now in {moved}")
        return None

    def _resume(self) -> None:
        resumed = resume_from_latest(self.model, self.dir, self.params.get("epochs"))
        self._epoch, self._saved, self._batches = resumed.epoch, resumed.step, resumed.batches
        self._restoration = resumed.restoration
        self._note(resumed.step)
        if resumed.rates and self.model.optimizer is not None:
            controller_of(unwrapped(self.model.optimizer)).restore(resumed.rates)

    # ---- training ----------------------------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._restoration is not None and not self._trained:
            self._restoration.at_epoch_begin(self.others)
        self._epoch, self._trained = epoch, True
        if self._every is not None:
            self._marks = self._step() // self._every

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._bases.is_due and batch > 0:  # after the first batch, a subclassed model's inputs are known
            self._bases.write(self.model)
        if self._in_flight:
            self._follow_writers()
        self._notice.announce()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._restoration is not None:
            self._restoration.at_test_begin()

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._notice.announce()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches += 1
        self._reserve()
        if self._every is not None:
            marks = self._step() // self._every
            self._is_due |= marks > self._marks
            self._marks = marks
        if self._clock is not None:
            self._is_due |= self._clock.is_due()
        noticed = self._notice.agreed()
        self._is_due |= noticed is not None
        # After the last batch, leave the checkpoint to the end of the epoch, where it is more useful.
        steps = self.params.get("steps")
        if self._is_due and (steps is None or batch + 1 < steps):
            save = functools.partial(self._save, self._step(), self._epoch, {}, in_epoch=batch + 1, last_logs=logs)
            if noticed is not None:
                self._end_run(save, *noticed)
            save()

    def _reserve(self) -> None:
        """Allocates memory for copies after the first step, when all variables exist, rather than in a later step."""
        within_epochs = self._every is not None or self._clock is not None or bool(self._notice)
        if within_epochs and not self._has_memory:
            parts = self._in_parts.take(self.model)
            snapshot = model_state.take(self.model, parts=parts) if is_first_rank() else Snapshot({}, by_bundle(parts))
            snapshot.copy_into(self._buffers)
        self._has_memory = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch + 1
        fit = fits.of(self.model)
        if fit is not None:
            fit.logs_before = None
        if self._bases.is_due:
            self._bases.write(self.model)
        step, noticed = self._step(), self._notice.agree()
        # If the epoch's length was unknown, the checkpoint after its last batch is rewritten as the epoch's end.
        if self._every is None or self._is_due or step == self._saved or noticed is not None:
            save = functools.partial(self._save, step, epoch + 1, logs or {})
            if noticed is not None:
                self._end_run(save, *noticed)
            save()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        # The end of training is always saved: Keras has just assigned the optimizer's averaged weights, and
        # EarlyStopping the best ones.
        self._wait()
        step, stopped = self._step(), bool(self.model.stop_training)
        if self._trained and (step != self._saved or stopped or self._averages()):
            stopped_of = self.params.get("epochs") if stopped else None
            self._complete(functools.partial(self._save, step, self._epoch, logs or {}, stopped_of=stopped_of))
        self._notice.end()
        self._restoration = None
        self._bases.wait()

    def _step(self) -> int:
        """The optimizer steps taken; batches, for a model without an optimizer."""
        step = steps_taken(self._optimizers)
        return self._batches if step is None else step

    def _averages(self) -> bool:
        return any(getattr(unwrapped(each), "use_ema", False) for each in self._optimizers)

    def _complete(self, save: Callable[[], None]) -> None:
        """Saves until a checkpoint is complete, because losing rank 0 meanwhile loses the checkpoint. COLLECTIVE."""
        save()
        self._wait()
        while self._saved == _LOST:
            save()
            self._wait()

    def _wait(self) -> None:
        with self._forgetting_failed():
            if self._in_flight and self._in_parts.awaited is not None and not self._in_parts.agree(wait=True):
                self._on_written(False)
            if self._in_flight:
                self._on_written(on_first_rank(self._written, "Checkpoint/wait"))

    @contextlib.contextmanager
    def _forgetting_failed(self) -> Iterator[None]:
        """Ignores checkpoints that could not be written, because another fit may continue with this object."""
        try:
            yield
        except CheckpointError:
            self._on_written(False)
            raise

    def _follow_writers(self) -> None:
        """Checks, without waiting, whether the last checkpoint is complete. COLLECTIVE."""
        with self._forgetting_failed():
            if self._in_parts.awaited is not None:
                is_complete = False if self._in_parts.agree(wait=False) is False else None
            else:
                is_complete = on_first_rank(self._progress, "Checkpoint/written")
        if is_complete is not None:
            self._on_written(is_complete)

    def _progress(self) -> bool | None:
        """On rank 0: like `_written`, but returns None while the checkpoint is being written."""
        return None if self._writer.is_busy() else self._written()

    def _written(self) -> bool:
        """On rank 0, waits for the last checkpoint, perhaps of a lost rank 0. Returns whether it is complete."""
        self._writer.wait()
        if self._begun == self._saved:
            return True
        ckpt.sweep_temporaries(self.dir)
        return any(each.step == self._saved and each.problem is None for each in ckpt.list_checkpoints(self.dir))

    def _on_written(self, is_complete: bool) -> None:
        """Called on all ranks when the last checkpoint is complete and on disk, or was lost with rank 0."""
        self._in_flight = False
        assert self._saved is not None
        if is_complete:
            self._note(self._saved)
            return
        self._saved = _LOST
        self._is_due |= not self.async_safe  # else at the end of the epoch

    def _note(self, step: int, *, is_news: bool = False) -> None:
        """Records the last complete checkpoint, for the message when the job fails. `is_news`: it was just written."""
        path = path_of(self.dir, step)
        if (noted := last_checkpoint.note(path, step, self.resume)) is not None:
            program.tell(Kind.CHECKPOINT, noted | {"is_new": is_news})

    def _end_run(self, save: Callable[[], None], signal_name: str, rank: int) -> NoReturn:
        """Saves after a notice, and ends the program of every rank. COLLECTIVE."""
        self._complete(save)
        self._notice.end()
        if is_first_rank():
            known = last_checkpoint.known()
            assert known is not None
            status = program.RESTART_STATUS
            print(f"Checkpoint: {signal_name} on rank {rank}: saved, and this run ends with status {status}.")
            print(f"Checkpoint: {last_checkpoint.resume_hint(known)}", flush=True)
        program.exit_for_restart()

    def _save(
        self,
        step: int,
        epoch: int,
        logs: Mapping[str, Any],
        *,
        in_epoch: int = 0,
        last_logs: Mapping[str, Any] | None = None,
        stopped_of: int | None = None,
    ) -> None:
        """Takes a checkpoint on all ranks, and begins to write it. COLLECTIVE."""
        self._wait()  # the memory for the copy may be in use
        if self._bases.is_due:
            self._bases.write(self.model)
        self._saved, self._is_due, self._in_flight = step, False, True
        if self._clock is not None:
            self._clock.restart()
        if not in_epoch:
            self._bases.answer(self.model)
        record, arrays = capture(self.model, self.others, epoch, in_epoch, last_logs)
        with contextlib.ExitStack() as stack:
            if in_epoch:
                arrays.update(stack.enter_context(agreed_layer_state(self.model)))
            parts = self._in_parts.take(self.model)
            extra = {
                "learning_rate": self._rates(),
                "batches": self._batches,
                "in_epoch": in_epoch,
                "stopped_of": stopped_of,
            }
            start = functools.partial(self._start_writing, step, epoch, logs, record, arrays, extra, parts)
            place = on_first_rank(start, "Checkpoint/taken")
        if place is not None:
            self._in_parts.awaited = step
            if not is_first_rank():
                self._in_parts.start_beside(step, place, parts)

    def _start_writing(
        self,
        step: int,
        epoch: int,
        logs: Mapping[str, Any],
        record: Mapping[str, Any],
        arrays: Mapping[str, Any],
        extra: Mapping[str, Any],
        parts: Mapping[str, Part | None],
    ) -> Place | None:
        """On rank 0, writes the model's state in a thread. Returns the place for the other ranks' parts, or None."""
        if self._begun is None:  # another process may have been rank 0 until now
            ckpt.sweep_temporaries(self.dir)
            self._bases.prepare_publishing()
        self._begun = step
        bases = self._bases.here(self.model)
        snapshot = model_state.take(self.model, base=bases, evidence=not extra["in_epoch"], parts=parts)
        snapshot.texts[RECORD] = json.dumps(record)
        snapshot.archives[ARRAYS] = arrays
        metrics = {key: float(value) for key, value in logs.items() if isinstance(value, numbers.Real)}
        self._warn_without_monitor(metrics, bool(logs))

        def write(staged: Path | None, fill: Fill) -> None:
            best = (self.monitor, self._direction) if self.save_best else None
            saved = ckpt.write(
                self.dir,
                step,
                fill,
                epoch=epoch,
                metrics=metrics,
                monitor=best and best[0],
                mode=best[1] if best else "auto",
                extra=extra,
                staged=staged,
            )
            self._note(step, is_news=True)
            ckpt.prune(self.dir, self.keep, best)
            self._bases.publish(saved)
            if self.verbose:
                print(f"\nCheckpoint: saved {saved.path}")

        if not self._in_parts.is_on:
            self._writer.start(lambda: snapshot.copy_into(self._buffers), lambda: write(None, snapshot.fill))
            return None
        place = self._in_parts.make_place(self.model)
        self._in_parts.start(step, place.folder, snapshot, write)
        return place

    def _warn_without_monitor(self, metrics: Mapping[str, float], has_logs: bool) -> None:
        if has_logs and self.save_best and self.monitor not in metrics and not self._warned:
            self._warned = True
            stack_position.warn(
                f"Checkpoint cannot choose the best checkpoint: monitor={self.monitor!r} is not in the epoch's logs, "
                f"which have {sorted(metrics)}. Pass validation_data to fit, or another monitor. All checkpoints are "
                f"saved; only the newest {self.keep} are kept."
            )

    def _rates(self) -> dict[str, float] | None:
        optimizer = self.model.optimizer
        return None if optimizer is None else controller_of(unwrapped(optimizer)).state()


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


_REPLACED = {
    **dict.fromkeys(("serve", "sample", "input_signature", "classify", "regress", "signatures"), "ExportBase({}=...)"),
    "publish_to": "Publish(directory)",
    "publish_keep": "Publish(directory, keep=...)",
}


def _refuse(removed: Mapping[str, Any]) -> None:
    for name in removed:
        if name not in _REPLACED:
            raise TypeError(f"Checkpoint() got an unexpected keyword argument {name!r}")
        raise ConfigError(
            f"Checkpoint only saves; separate callbacks export. Received: {name}=.... Pass "
            f"callbacks=[Checkpoint(folder), keras_ddl.callbacks.{_REPLACED[name].format(name)}]."
        )
