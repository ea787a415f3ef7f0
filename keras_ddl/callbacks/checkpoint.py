"""Checkpoint: rank 0 writes whole checkpoints and the servable graph; a resumed run goes on on all ranks."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from keras_ddl import checkpoint as ckpt
from keras_ddl import export
from keras_ddl.callbacks._first_rank import is_first_rank, on_first_rank
from keras_ddl.callbacks._learning_rate_controller import controller_of
from keras_ddl.callbacks._training_state import broadcast_training_state, build_optimizer
from keras_ddl.checkpoint import model_state
from keras_ddl.checkpoint.durable import make_directory
from keras_ddl.compat.keras import unwrapped
from keras_ddl.errors import CheckpointError, ConfigError


class Checkpoint(keras.callbacks.Callback):
    """Writes checkpoints of weights and optimizer state, and once the base graph that `keras-ddl export` needs.

    Only rank 0 writes. A checkpoint appears under its name only when it is whole and on disk, so a job that is killed
    at any moment leaves nothing half-written. A new run in a used directory moves the earlier run's checkpoints to
    `previous-<n>/`; with `resume` it goes on from the latest instead: weights, optimizer, seeds, learning rate and
    epoch, on all ranks. Data that fit shuffles itself is shuffled anew (docs/callbacks.md).

    Args:
        dir: the checkpoint directory, on a file system that rank 0 reaches.
        monitor: the metric by which 'best' is chosen; a key of the epoch's logs.
        mode: 'min', 'max', or 'auto': from the compiled metric, else from the name.
        save_best: keep the best checkpoint beside the newest ones.
        keep: how many of the newest checkpoints to keep.
        save_freq: 'epoch', or a number of optimizer steps. Checkpoints made inside an epoch hold no metrics (they are
            not final there), so they cannot be best; resumed from one, fit begins that epoch again.
        export_base: write the base graph at train begin, which fails there if the model cannot be served. A
            subclassed model's is written after its first batch, when its inputs are known.
        sample: a few rows of real input, which every export replays to prove itself; default: made-up rows.
        resume: go on from the latest checkpoint, if there is one. The model must be built.
        input_signature, classify, regress: as `keras_ddl.export.write_base_graph`.
    Raises: ConfigError: bad arguments (when made). On every rank: CheckpointError: the directory cannot be written,
        the checkpoint is damaged or of another model; ExportError: the model cannot be served.
    Cost: per checkpoint, rank 0 writes and reads back weights and optimizer state while the others wait.
    """

    never_stops_within_epoch = True  # spares the ranks an agreement in every batch

    def __init__(
        self,
        dir: str | Path,
        monitor: str = "val_loss",
        mode: str = "auto",
        save_best: bool = True,
        keep: int = 3,
        save_freq: str | int = "epoch",
        export_base: bool = True,
        sample: Any = None,
        resume: bool = False,
        *,
        input_signature: Mapping[str, Any] | None = None,
        classify: Any = None,
        regress: Any = None,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        if mode not in ("auto", "min", "max"):
            raise ConfigError(f"mode must be 'auto', 'min' or 'max'. Received: mode={mode!r}.")
        if not _is_count(keep):
            raise ConfigError(f"keep must be the number of checkpoints that stay, 1 or more. Received: keep={keep!r}.")
        if save_freq != "epoch" and not _is_count(save_freq):
            raise ConfigError(
                f"save_freq must be 'epoch' or a number of steps, 1 or more. Received: save_freq={save_freq!r}."
            )
        self.dir = Path(dir)
        self.monitor, self.mode = monitor, mode
        self.save_best, self.keep, self.save_freq = save_best, keep, save_freq
        self.export_base, self.resume, self.verbose = export_base, resume, verbose
        self._export_options = {
            "sample": sample,
            "input_signature": input_signature,
            "classify": classify,
            "regress": regress,
        }
        # Keras may run on_train_batch_end in a thread if nobody minds; that spares it a wait in every batch.
        self.async_safe = save_freq == "epoch"
        self._base: Any = None  # on rank 0
        self._has_base = self._base_is_due = False  # on all ranks: they decide which collectives come
        self._saved: int | None = None  # the step of the last checkpoint that this object has written
        self._epoch = self._marks = 0
        self._trained = self._resumed = self._warned = False

    # ---- train begin -------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._trained = False
        self._resumed = on_first_rank(self._prepare, "Checkpoint/prepare") is not None
        if self._resumed:
            self._restore()
        self._base_is_due = self.export_base and not self._has_base
        if self._base_is_due and on_first_rank(self._inputs_are_ready, "Checkpoint/inputs"):
            self._write_base()

    def _prepare(self) -> int | None:
        """On rank 0: cleans the directory; returns the step to resume from, or None to begin anew."""
        if self._saved is not None:  # a second fit of this process goes on in the directory
            return None
        make_directory(self.dir, "A checkpoint", CheckpointError)  # fails now rather than after the first epoch
        ckpt.sweep_temporaries(self.dir)
        if self.resume and ckpt.list_checkpoints(self.dir):
            return ckpt.latest(self.dir).step
        moved = ckpt.set_aside(self.dir)
        if moved is not None:
            print(f"Checkpoint: the earlier run's checkpoints are now in {moved}")
        return None

    def _restore(self) -> None:
        model = self.model
        if not model.built:
            raise CheckpointError(
                "resume needs a model that is built. Received: a model without variables. Call model.build(shape), or "
                "the model on a batch, before fit."
            )
        build_optimizer(model)
        told = on_first_rank(self._read_latest, "Checkpoint/restore")
        broadcast_training_state(model)
        if told["rates"]:
            controller_of(unwrapped(model.optimizer)).restore(told["rates"])
        model._initial_epoch = self._epoch = told["epoch"]
        self._saved = told["step"]
        if is_first_rank():
            print(f"Checkpoint: going on from step {told['step']}, epoch {told['epoch'] + 1}")

    def _read_latest(self) -> dict[str, Any]:
        read = model_state.restore_checkpoint(self.model, self.dir, "latest")
        return {
            "step": read.step,
            "epoch": read.epoch or 0,
            "rates": (read.extra or {}).get("learning_rate"),
        }

    def _inputs_are_ready(self) -> bool:
        if self.model.built and (
            self._export_options["input_signature"] is not None or export.inputs_are_known(self.model)
        ):
            return True
        export.record_inputs(self.model)
        return False

    def _write_base(self) -> None:
        self._base_is_due = False
        on_first_rank(self._write_base_here, "Checkpoint/base")
        self._has_base = True

    def _write_base_here(self) -> None:
        self._base = export.write_base_graph(self.model, self.dir, **self._export_options)
        for sentence in self._base.warnings:
            warnings.warn(sentence, stacklevel=2)

    # ---- training ----------------------------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._trained = epoch, True
        if self.save_freq != "epoch":
            self._marks = self._step() // self.save_freq

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._base_is_due and batch > 0:  # the first batch has shown the inputs of a subclassed model
            self._write_base()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.save_freq != "epoch":
            step = self._step()
            if step // self.save_freq > self._marks:
                self._marks = step // self.save_freq
                self._save(step, self._epoch, {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch + 1
        if self._base_is_due:
            self._write_base()
        step = self._step()
        # A checkpoint made after the epoch's last batch is written again, now that the epoch counts as finished.
        if self.save_freq == "epoch" or step == self._saved:
            self._save(step, epoch + 1, logs or {})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        # The end of training is always saved; Keras has just put averaged weights in place if the optimizer has them.
        step = self._step()
        if self._trained and (step != self._saved or getattr(unwrapped(self.model.optimizer), "use_ema", False)):
            self._save(step, self._epoch, logs or {})
        if self._resumed:
            self.model._initial_epoch = None  # of this fit only

    def _step(self) -> int:
        return int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))

    def _save(self, step: int, epoch: int, logs: Mapping[str, Any]) -> None:
        if self._base_is_due:
            self._write_base()
        self._saved = step
        if not is_first_rank():
            return
        metrics = {key: float(value) for key, value in logs.items() if isinstance(value, numbers.Real)}
        mode = self._resolved_mode()
        if logs and self.save_best and self.monitor not in metrics and not self._warned:
            self._warned = True
            warnings.warn(
                f"Checkpoint cannot tell the best checkpoint: monitor={self.monitor!r} is not in the epoch's logs, "
                f"which hold {sorted(metrics)}. Pass validation_data to fit, or another monitor. All are saved; the "
                f"newest {self.keep} stay.",
                stacklevel=2,
            )
        saved = model_state.save_checkpoint(
            self.model,
            self.dir,
            step,
            epoch,
            metrics,
            monitor=self.monitor,
            mode=mode,
            base=self._base,
            extra={"learning_rate": controller_of(unwrapped(self.model.optimizer)).state()},
        )
        ckpt.prune(self.dir, self.keep, (self.monitor, mode) if self.save_best else None)
        if self.verbose:
            print(f"\nCheckpoint: saved {saved.path}")

    def _resolved_mode(self) -> str:
        """'min' or 'max', preferring what the compiled metric says of itself over its name."""
        if self.mode != "auto":
            return self.mode
        wanted = self.monitor.removeprefix("val_")
        for metric in self.model.metrics:
            for each in getattr(metric, "metrics", [metric]):
                direction = getattr(each, "_direction", None)
                if each.name == wanted and direction is not None:
                    return "max" if direction == "up" else "min"
        return ckpt.resolve_mode(self.monitor)


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 1
