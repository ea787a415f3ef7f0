"""A Keras model's state in a checkpoint: which variables, under which keys, and the TensorFlow bundles that hold them.

Weights are kept under `weights/<path of the Keras variable>`, the keys that the base graph's variables also have, so
an export copies key to key and needs neither Keras nor the model's code. Metrics are left out.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from keras_ddl import checkpoint as ckpt
from keras_ddl.errors import CheckpointError

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"  # of every key of an object-based TensorFlow checkpoint


class Base(Protocol):
    """What `save_checkpoint` asks of an export.BaseGraph."""

    def extra_variables(self) -> Mapping[str, Any]:
        """Variables that the graph reads and the model does not track, by name."""

    def evidence(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """(golden outputs by name as arrays, record for state.json) of the stored sample with the current weights."""


def save_checkpoint(
    model: Any,
    ckpt_dir: str | Path,
    step: int,
    epoch: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    *,
    monitor: str | None = None,
    mode: str = "auto",
    optimizer: bool = True,
    base: Base | None = None,
    extra: Mapping[str, Any] | None = None,
) -> ckpt.Checkpoint:
    """Writes weights, BatchNormalization statistics, seeds and optimizer state to `ckpt_dir/ckpt-<step>/`, atomically.

    To be called by one process (rank 0); contains no collective. What is saved does not depend on the Strategy.

    Args:
        model: a built keras.Model.
        step: optimizer steps taken, the checkpoint's name; one of the same step is replaced.
        epoch: epochs finished, which is the `initial_epoch` of a resumed fit.
        metrics: name -> number; what 'best' compares.
        monitor, mode: the metric that 'best' takes by default, and 'min', 'max' or 'auto'.
        optimizer: also keep the optimizer's variables (if the model has an optimizer that is built).
        base: what export.write_base_graph returned in this process; adds the golden outputs that an export compares
            with, and a record of whether the graph still answers as the live model does.
        extra: JSON values to be returned by `restore_checkpoint`.
    Returns: the checkpoint written.
    Raises: CheckpointError: the model is not built; not writable; disk full. Nothing half-written is left.
    Cost: one write and one read (SHA-256) of the state; with `base`, two forward passes of the sample.
    """
    raise NotImplementedError


def restore_checkpoint(
    model: Any,
    ckpt_dir: str | Path,
    which: str | int = "latest",
    *,
    optimizer: bool = True,
    seeds: str = "all",
    metric: str | None = None,
) -> ckpt.Checkpoint:
    """Reads a checkpoint back into a built, compiled model: training goes on as if it had not stopped.

    Every rank may call it (it only reads); or rank 0 calls it and broadcasts. All names, shapes and dtypes are compared
    before the first variable is changed.

    Args:
        which: 'latest', 'best' (by `metric`, default the monitored one) or a step.
        optimizer: also restore the optimizer's variables, building the optimizer if need be.
        seeds: of the seed generators (dropout, random layers): 'all' restores them, 'counter' keeps this process's own
            seed and restores how far it was used (for ranks other than 0, whose seeds differ from the saved ones),
            'none' leaves them.
    Returns: the checkpoint, with its `step`, `epoch` (finished epochs: pass as initial_epoch), `metrics`, `extra`.
    Raises: CheckpointError: no such checkpoint, damaged, or of another model (names the first variable that differs).
    """
    raise NotImplementedError
