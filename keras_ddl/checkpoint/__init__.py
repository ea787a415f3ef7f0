"""Checkpoints on disk: writes, lists, selects (latest, best) and verifies them.

    ckpt/ckpt-00000120/          one checkpoint: step 120
        weights.index, .data-*   a TensorFlow bundle, with the keys of the base graph's variables (model_state.py)
        optimizer.index, .data-* the optimizer's state, for an exact resume
        golden.npz               the base graph's outputs for the stored sample with these weights
        progress.json, .npz      the rest of a run's state (strategy/progress.py)
        state.json               step, epoch, metrics, size and SHA-256 of every file, and of itself
    ckpt/base/                   the servable graph (keras_ddl.export); base-<name>/ that of a part of the model
    ckpt/previous-1/             an earlier run's base and checkpoints (`set_aside`)

A checkpoint is written under a hidden name, synced and renamed, so a writer killed at any moment leaves no partial
checkpoint under its real name. Several ranks may write parts of its bundles; one process (rank 0) merges them and gives
the checkpoint its name. Any number of processes may read. This file uses neither Keras nor TensorFlow:
`model_state.save_checkpoint` and `restore_checkpoint` convert a model.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from keras_ddl.checkpoint.bundle_index import stored_boxes
from keras_ddl.checkpoint.direction import resolve_mode
from keras_ddl.checkpoint.tensor_bundle import name_of
from keras_ddl.errors import CheckpointError
from keras_ddl.files import digests, durable, foreign
from keras_ddl.state.boxes import without_all
from keras_ddl.state.placements import replicated

__all__ = [
    "Checkpoint",
    "best",
    "find",
    "latest",
    "list_checkpoints",
    "prune",
    "resolve_mode",
    "set_aside",
    "sweep_temporaries",
    "validate",
    "write",
]

FORMAT = 1
STATE = "state.json"
BASE = "base"
_WHAT = "A checkpoint"
_BASES = re.compile(rf"^{BASE}(-([\w-]+))?$", re.ASCII)
_NAME = re.compile(r"^ckpt-(\d{8,})(\.replaced)?$")


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint directory. `problem`: why it cannot be read, or None; `epoch`: number of finished epochs."""

    path: Path
    step: int
    epoch: int | None = None
    metrics: Mapping[str, float] | None = None
    monitor: str | None = None
    mode: str | None = None
    saved_at: float = 0.0
    extra: Mapping[str, Any] | None = None
    state: Mapping[str, Any] | None = field(default=None, repr=False)
    problem: str | None = None

    @property
    def weights(self) -> str:
        """Prefix of the bundle of weights."""
        return str(self.path / "weights")

    @property
    def optimizer(self) -> str:
        """Prefix of the bundle of the optimizer's state."""
        return str(self.path / "optimizer")


def path_of(ckpt_dir: str | Path, step: int) -> Path:
    """Returns the directory of the checkpoint of a step, which need not exist."""
    return Path(ckpt_dir) / f"ckpt-{step:08d}"


def list_checkpoints(ckpt_dir: str | Path) -> list[Checkpoint]:
    """Returns the checkpoints of a directory in order of step, including damaged ones (see `Checkpoint.problem`).

    Checks sizes of files, not their contents (`validate` does). Does not list what killed writers left behind.
    Raises: CheckpointError: `ckpt_dir` does not exist or is a file.
    """
    root = _existing(ckpt_dir)
    while True:
        paths: dict[int, Path] = {}
        matches = [(entry, match) for entry in sorted(root.iterdir()) if (match := _NAME.match(entry.name))]
        for entry, match in matches:
            # `.replaced` sorts after the name it replaces, and counts only while that is missing.
            if entry.is_dir() or entry.is_symlink():
                paths.setdefault(int(match[1]), entry)
        read = [_read(path, step) for step, path in sorted(paths.items())]
        # If the writer has pruned or replaced one before it was read, read again.
        intact = {each.path for each in read if each.problem is None}
        if all(entry in intact or os.path.lexists(entry) for entry, _ in matches):
            return read


def latest(ckpt_dir: str | Path) -> Checkpoint:
    """Returns the checkpoint with the highest step. Raises: CheckpointError: there is none, or it is damaged."""
    return _intact(_some(ckpt_dir)[-1])


def best(ckpt_dir: str | Path, metric: str | None = None, mode: str = "auto") -> Checkpoint:
    """Returns the intact checkpoint with the best value of `metric`; of equal ones, the latest.

    Args:
        metric: a key of the saved metrics; default: the newest checkpoint's `monitor`.
        mode: 'min', 'max', or 'auto': as saved for this metric, else by its exact name (`resolve_mode`).
    Raises: CheckpointError: there is no checkpoint, none has a finite value of `metric`, or 'auto' does not know the
        name.
    """
    everything = _some(ckpt_dir)
    intact = [each for each in everything if each.problem is None] or [_intact(everything[-1])]
    if metric is None:
        metric = next((each.monitor for each in reversed(intact) if each.monitor), None) or "val_loss"
    if mode not in ("auto", "min", "max"):
        raise CheckpointError(f"mode must be 'auto', 'min' or 'max'. Received: mode={mode!r}.")
    candidates = [each for each in intact if _finite(each, metric)]
    if not candidates:
        known = sorted({name for each in intact for name in each.metrics or {}})
        raise CheckpointError(
            f"'best' needs a metric that the checkpoints hold. Received: metric={metric!r}; checkpoints in {ckpt_dir} "
            f"hold {known or 'no metrics'}. Choose one of these metrics, 'latest' or a step."
        )
    if mode == "auto":
        saved = (each.mode for each in reversed(intact) if each.monitor == metric and each.mode)
        mode = next(saved, None) or resolve_mode(metric)
    sign = 1.0 if mode == "max" else -1.0
    return max(candidates, key=lambda each: (sign * (each.metrics or {})[metric], each.step))


def find(
    ckpt_dir: str | Path, which: str | int = "latest", metric: str | None = None, mode: str = "auto"
) -> Checkpoint:
    """Returns a checkpoint. `which`: 'latest', 'best' (see `best`) or a step.

    Raises: CheckpointError: there is no such checkpoint, or sizes show that it is damaged (`validate` reads the
        contents).
    """
    if which == "latest":
        return latest(ckpt_dir)
    if which == "best":
        return best(ckpt_dir, metric, mode)
    steps = [each.step for each in _some(ckpt_dir)]
    if not re.fullmatch(r"\d+", str(which)):
        raise CheckpointError(
            f"--which (which=) must be 'latest', 'best' or a step. Received: {which!r}. Steps in {ckpt_dir}: "
            f"{_few(steps)}."
        )
    for each in list_checkpoints(ckpt_dir):
        if each.step == int(which):
            return _intact(each)
    raise CheckpointError(f"'which' must be a saved step. Received: {which}. Steps in {ckpt_dir}: {_few(steps)}.")


def validate(checkpoint: Checkpoint) -> None:
    """Compares every file of a checkpoint with its SHA-256, and checks that bundles have all entries of variables.

    Several ranks may have written parts of a variable. Cost: one read, at about 1 GB/s.

    Raises: CheckpointError: a file is missing, truncated or altered; entries of a variable are missing.
    """
    validate_files(checkpoint)
    validate_entries(checkpoint)


def validate_files(checkpoint: Checkpoint) -> None:
    """Does the part of `validate` that needs no TensorFlow, which another thread may be importing."""
    _intact(checkpoint)
    state = checkpoint.state or {}
    problem = digests.difference(checkpoint.path, state["files"], contents=True)
    if problem is not None:
        _refuse(checkpoint.path, problem)


def validate_entries(checkpoint: Checkpoint) -> None:
    """Does the rest of `validate`: imports TensorFlow."""
    state = checkpoint.state or {}
    for prefix, name in ((checkpoint.weights, "weights"), (checkpoint.optimizer, "optimizer")):
        problem = _missing_entries(prefix, state.get(name) or ())
        if problem is not None:
            _refuse(checkpoint.path, problem)


def _missing_entries(prefix: str, table: Sequence[Sequence[Any]]) -> str | None:
    """Returns which entries a bundle lacks of the variables [key, dtype, shape] of a table; None: none."""
    if not table:
        return None
    try:
        stored = stored_boxes(prefix)
    except OSError as error:
        return f"{prefix}.index cannot be read: {error}"
    for key, _, shape in table:
        lacking = without_all(replicated(shape)[0], stored.get(key, ()))
        if lacking:
            return f"{name_of(key)} {list(shape)} lacks the entries {lacking[0]}"
    return None


def write(
    ckpt_dir: str | Path,
    step: int,
    fill: Callable[[Path], Mapping[str, Any] | None],
    *,
    epoch: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    monitor: str | None = None,
    mode: str = "auto",
    extra: Mapping[str, Any] | None = None,
    staged: Path | None = None,
    synced: bool = True,
) -> Checkpoint:
    """Writes one checkpoint atomically and durably; a checkpoint of the same step is replaced.

    Args:
        fill: writes files into the directory that it is called with; returns further entries of state.json.
        staged: a directory of `durable.make_staging(ckpt_dir)`, into which other ranks have written their parts.
        synced: wait until it is on disk. Otherwise it survives the process, but not the host.
        extra: JSON values of the caller, returned by `restore_checkpoint` (`Checkpoint.extra`).
    Raises: CheckpointError: the directory cannot be created or written, or the disk is full; nothing is left behind.
    """
    root = durable.make_directory(Path(ckpt_dir), _WHAT, CheckpointError)
    final = path_of(root, step)
    state: dict[str, Any] = {
        "format": FORMAT,
        "step": int(step),
        "epoch": None if epoch is None else int(epoch),
        "metrics": {name: _storable(name, value) for name, value in (metrics or {}).items()},
        "monitor": monitor,
        "mode": resolve_mode(monitor, mode) if monitor else None,
        "saved_at": time.time(),
        "extra": dict(extra or {}),
    }
    try:
        json.dumps(state["extra"])
    except TypeError as error:
        raise CheckpointError(f"extra must be JSON values. Received: {extra!r} ({error}). Convert it first.") from error
    try:
        with durable.staging_directory(root, staged) as folder:
            state.update(fill(folder) or {})
            state["files"] = digests.inventory(folder)
            (folder / STATE).write_text(json.dumps(digests.sealed(state), indent=1))
            durable.publish(folder, final, replace=True, synced=synced)
    except OSError as error:
        raise CheckpointError(durable.explain(error, _WHAT, final)) from error
    return _read(final, step)


def prune(ckpt_dir: str | Path, keep: int, keep_best: tuple[str, str] | None = None) -> list[int]:
    """Removes all but the newest `keep` intact checkpoints and the best one. Returns the removed steps.

    Args:
        keep: at least 1. Damaged checkpoints older than the newest intact one are removed too.
        keep_best: (metric, mode) of the best checkpoint, which stays.
    A checkpoint that is being exported (`durable.being_read`) stays until the next call.
    """
    if keep < 1:
        raise CheckpointError(f"keep must be the number of checkpoints to keep, 1 or more. Received: keep={keep!r}.")
    everything = list_checkpoints(ckpt_dir)
    intact = [each for each in everything if each.problem is None]
    stay = {each.step for each in intact[-keep:]}
    if keep_best and any(_finite(each, keep_best[0]) for each in intact):
        stay.add(best(ckpt_dir, *keep_best).step)
    removed = []
    for each in everything:
        is_old = intact and each.step < intact[-1].step and each.step not in stay
        if is_old and durable.remove_unless_read(each.path):
            removed.append(each.step)
    return removed


def sweep_temporaries(ckpt_dir: str | Path) -> list[str]:
    """Removes what killed writers left behind; call it on rank 0 when training begins. Returns the removed names."""
    return durable.sweep_temporaries(Path(ckpt_dir))


def set_aside(ckpt_dir: str | Path) -> Path | None:
    """Moves the base graph and the checkpoints of an earlier run into `previous-<n>/`, itself a checkpoint directory.

    For a new run in a used directory: nothing is lost, and 'latest' cannot return another run's weights. Call it
    before the new base graph is written. If it is killed, the next call continues.
    Returns: the new directory, or None when there was nothing to move.
    """
    root = Path(ckpt_dir)
    entries = sorted(root.iterdir()) if root.is_dir() else []
    moving = next((entry for entry in entries if re.fullmatch(r"previous-\d+\.moving", entry.name)), None)
    names = [entry for entry in entries if _NAME.match(entry.name)]
    if not names and moving is None:
        return None
    try:
        if moving is None:
            taken = [int(match[1]) for entry in entries if (match := re.fullmatch(r"previous-(\d+)", entry.name))]
            moving = root / f"previous-{max(taken, default=0) + 1}.moving"
            moving.mkdir()
        for entry in [*names, *(root / base_directory(name) for name in list_bases(root))]:
            if entry.exists():
                entry.rename(moving / entry.name)
        durable.sync_file(moving)
        final = moving.with_suffix("")
        moving.rename(final)
        durable.sync_file(root)
    except OSError as error:
        raise CheckpointError(durable.explain(error, _WHAT, root)) from error
    return final


def base_directory(name: str | None) -> str:
    """Returns the name of the directory of the base graph of a model, or of the part of that name."""
    return BASE if name is None else f"{BASE}-{name}"


def list_bases(ckpt_dir: str | Path) -> list[str | None]:
    """Returns the parts of a model that have base graphs in a directory; None stands for the model itself."""
    matches = (_BASES.match(entry.name.removesuffix(durable.REPLACED)) for entry in Path(ckpt_dir).iterdir())
    return sorted({match[2] for match in matches if match}, key=lambda name: name or "")


def _existing(ckpt_dir: str | Path) -> Path:
    root = Path(ckpt_dir)
    if not root.is_dir():
        received = "a file" if root.exists() else "nothing there"
        raise CheckpointError(
            f"A checkpoint directory must exist to be read. Received: {root} ({received}). Give the directory of "
            "callbacks.Checkpoint."
        )
    return root


def _some(ckpt_dir: str | Path) -> list[Checkpoint]:
    checkpoints = list_checkpoints(ckpt_dir)
    if not checkpoints and _NAME.match(Path(ckpt_dir).resolve().name):
        raise CheckpointError(
            "A checkpoint directory must hold ckpt-<step> directories. Received: one of these, "
            f"{ckpt_dir}. Give the directory that holds it, and choose it there: `keras-ddl export --which STEP`."
        )
    if not checkpoints:
        here = sorted(entry.name for entry in Path(ckpt_dir).iterdir() if not entry.name.startswith("."))
        raise CheckpointError(
            f"A checkpoint directory must hold ckpt-<step> directories. Received: {ckpt_dir} with no checkpoint "
            f"(holds: {', '.join(here[:8]) or 'nothing'}). Train with callbacks.Checkpoint until it has written one "
            "(by default at the end of an epoch), or give another directory."
        )
    return checkpoints


_ENTRIES = {"format", "step", "epoch", "metrics", "monitor", "mode", "saved_at", "extra", "files"}


def _read(path: Path, step: int) -> Checkpoint:
    try:
        if (strange := foreign.strange_entry(path)) is not None:
            return Checkpoint(path, step, problem=f"{strange}, which keras_ddl does not read")
        state = foreign.read_json(path, STATE)
    except FileNotFoundError:
        return Checkpoint(path, step, problem=f"{STATE} is missing")
    except (ValueError, OSError) as error:
        return Checkpoint(path, step, problem=f"{STATE} cannot be read ({error})")
    if not digests.is_sealed(state):
        return Checkpoint(path, step, problem=f"{STATE} was altered after it was written (its SHA-256 differs)")
    if lacks := sorted(_ENTRIES - state.keys()):
        return Checkpoint(path, step, problem=f"{STATE} lacks {', '.join(lacks)}")
    if state["format"] != FORMAT or state["step"] != step:
        received = f"format {state['format']} and step {state['step']}, not {FORMAT} and {step}"
        return Checkpoint(path, step, problem=f"{STATE} is of {received}")
    return Checkpoint(
        path,
        step,
        epoch=state["epoch"],
        metrics={name: float(value) for name, value in state["metrics"].items()},
        monitor=state["monitor"],
        mode=state["mode"],
        saved_at=state["saved_at"],
        extra=state["extra"],
        state=state,
        problem=digests.difference(path, state["files"], contents=False),
    )


def _intact(checkpoint: Checkpoint) -> Checkpoint:
    if checkpoint.problem is not None:
        _refuse(checkpoint.path, checkpoint.problem)
    return checkpoint


def _refuse(path: Path, problem: str) -> NoReturn:
    others = [each.step for each in list_checkpoints(path.parent) if each.problem is None and each.path != path]
    remedy = f"use an earlier step ({_few(others)} look complete)" if others else "there is no other checkpoint there"
    raise CheckpointError(
        f"A checkpoint must be complete to be read. Received: {path}: {problem}. Copy it again or remove it; {remedy}."
    )


def _finite(checkpoint: Checkpoint, metric: str) -> bool:
    return math.isfinite((checkpoint.metrics or {}).get(metric, math.nan))


def _storable(name: str, value: Any) -> float | str:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"A metric must be one number. Received: {name}={value!r}. Leave it out of metrics=."
        ) from error
    return number if math.isfinite(number) else repr(number)  # JSON has no NaN; float('nan') reads it back


def _few(steps: list[int]) -> str:
    return ", ".join(map(str, steps[-8:])) or "none"
